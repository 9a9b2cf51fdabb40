//! Last words, and the end.

use std::time::Duration;

use sandboxer_protocol::agent::ToAgent;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use super::{
    Attachment, Driver, Outcome,
    attached::{Client, Pinged},
};
use crate::sandbox::{
    asks,
    client::{FromClient, Outgoing},
    delivery::Delivery,
    farewell,
    saving::tell_volume,
};

/// How long the last messages may take on their way to a client.
const FAREWELL: Duration = Duration::from_secs(2);

impl Driver {
    /// Says the last words to the client and ends the sandbox, or leaves it.
    pub(super) async fn finish(mut self, outcome: Outcome) -> Outcome {
        info!(?outcome, "ending");
        for knocking in self.knocking.drain(..) {
            let _ = knocking.reply.send(Attachment::InUse);
        }
        self.late.clear();
        let mut client = self.client.take();
        let mut leaves = None;
        if let Outcome::Checkpointed { .. } | Outcome::HandedOver = outcome {
            // Those who hear of it may want its place at once.
            leaves = Some(self.leaving.begin(self.record.owner.as_deref()));
            // It counts, and nothing of it here does.
            if let Some(reply) = self.asks.take(asks::What::Checkpoint) {
                let _ = reply.send(Ok(asks::Told::Checkpointed));
            }
            tell(client.as_mut(), farewell::after(&outcome)).await;
            client = None;
        }
        if let Outcome::LeftRunning = outcome {
            self.leave(client, farewell::after(&outcome)).await;
            return outcome;
        }
        let told = tell(client.as_mut(), farewell::before(&outcome));
        let ((), removed) = tokio::join!(told, self.runtime.remove(self.record.container(), &self.dir));
        if let Err(error) = &removed {
            warn!(%error, "the sandbox could not be removed whole; the next start of the server tries again");
        }
        if let Some(kept) = self.saves.kept.take() {
            // Its lease may want to be heard meanwhile, and must not wait for that.
            self.commands.close();
            tell_volume(kept, &self.record, &outcome).await;
        }
        (self.on_end)(&outcome, removed.is_ok().then_some(&self.dir));
        drop(leaves);
        tell(client.as_mut(), farewell::after(&outcome)).await;
        outcome
    }

    /// The sandbox goes on without us. What the client read to its end need not be repeated by the next server.
    async fn leave(&mut self, client: Option<Client>, last_words: Vec<Outgoing>) {
        if let Some(mut client) = client {
            let delivery = client.delivery.take();
            for message in last_words {
                client.outbox.push(message);
            }
            let mut handed = delivery.as_ref().filter(|_| !client.peeks).map(Delivery::handed);
            let mut end_handed = delivery.as_ref().is_some_and(|delivery| delivery.end_handed);
            let until = Instant::now() + FAREWELL;
            while let Some(message) = client.outbox.pop() {
                match (&message, &mut handed) {
                    (Outgoing::Output(piece), Some(handed)) => *handed.get_mut(piece.stream) = piece.end,
                    (Outgoing::End(_), _) => end_handed = true,
                    _ => {}
                }
                if !matches!(tokio::time::timeout_at(until, client.port.outgoing.send(message)).await, Ok(Ok(()))) {
                    break;
                }
            }
            let read = tokio::time::timeout_at(until, async {
                while let Some(incoming) = client.port.incoming.recv().await {
                    if matches!(incoming.message, FromClient::ReadToTheEnd) {
                        return true;
                    }
                }
                false
            });
            let read = read.await;
            if let Some(Pinged { number, upto, end, .. }) = client.last_answer() {
                self.acknowledge(number, upto, end);
            }
            if let (Ok(true), Some(delivery), Some(handed)) = (read, delivery, handed) {
                self.acknowledge(delivery.number, handed, end_handed);
            }
            if let Some(execution) = &self.execution {
                self.writer.queue(&ToAgent::Pause { number: execution.number });
            }
        }
        let flushed = timeout(FAREWELL, self.writer.flush());
        // What was not written is asked for again by the next server: nothing is lost by it.
        let _ = flushed.await;
    }
}

/// Puts the last messages on their way, as far as the client reads.
async fn tell(client: Option<&mut Client>, last: Vec<Outgoing>) {
    let Some(client) = client else { return };
    for message in last {
        client.outbox.push(message);
    }
    let until = Instant::now() + FAREWELL;
    while let Some(message) = client.outbox.pop() {
        if !matches!(tokio::time::timeout_at(until, client.port.outgoing.send(message)).await, Ok(Ok(()))) {
            break;
        }
    }
}

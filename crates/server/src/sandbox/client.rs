//! The client that is attached to a sandbox, as its driver sees it: what comes from it, and what is on its way to it.
//!
//! Nothing here waits. Output on its way is bounded by the credit that the agent was given, and everything else by
//! [`MAX_WAITING_EVENTS`]: beyond that the driver takes no more requests until the client reads.

use std::{collections::VecDeque, ops::Deref, sync::Arc};

use bytes::{Bytes, BytesMut};
use sandboxer_protocol::{
    ExecutionId,
    agent::{PerStream, Stream},
    client::{BadRequest, CloseCode, Encoding, ErrorCode, ErrorEvent, Request, ServerEvent, Status, StdinAck},
};
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};
use tokio_util::sync::DropGuard;

use crate::shares::Held;

/// Messages other than output that may wait for a client that does not read.
pub(crate) const MAX_WAITING_EVENTS: usize = 64;
/// What may wait between the driver and the socket.
pub(crate) const OUTGOING_MESSAGES: usize = 8;
/// Requests that may wait for the driver, and their bytes in KiB.
pub(crate) const INCOMING_REQUESTS: usize = 256;
pub(crate) const INCOMING_KIB: usize = 16 * 1024;
/// Pieces of output smaller than this are gathered while they wait, up to the second.
const SMALL_BYTES: usize = 16 * 1024;
const MERGED_BYTES: usize = 64 * 1024;

/// What a connection hands to the driver.
#[derive(Debug)]
pub(crate) enum FromClient {
    Request(Request),
    Bad(BadRequest),
    /// With [`Acknowledgement::Explicit`]: the client has the output before these offsets, and the end of the execution.
    Received {
        id: ExecutionId,
        upto: PerStream<u64>,
        end: bool,
    },
    /// The server closed the connection and the client answered: it has read everything that was sent before.
    ReadToTheEnd,
}

/// The same with the room that it takes, until it has been dealt with.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub(crate) message: FromClient,
    pub(crate) _room: Option<MessageRoom>,
}

/// Room of the connection's queue, and of its key's budget if the message is large.
#[derive(Debug)]
pub(crate) struct MessageRoom {
    pub(crate) _queue: Option<OwnedSemaphorePermit>,
    pub(crate) _budget: Vec<Held>,
}

/// What the driver hands to a connection.
#[derive(Debug)]
pub(crate) enum Outgoing {
    Event(ServerEvent),
    Output(Piece),
    /// What tells the end of an execution, behind all its output.
    End(Vec<ServerEvent>),
    Ping(Bytes),
    Close(CloseCode),
}

/// A piece of output with its place in the stream.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    pub(crate) execution: Arc<ExecutionId>,
    pub(crate) stream: Stream,
    pub(crate) encoding: Encoding,
    pub(crate) data: Data,
    pub(crate) offset: u64,
    pub(crate) end: u64,
}

/// Bytes that are shared with others, or one's own to add to.
#[derive(Debug, Clone)]
pub(crate) enum Data {
    Shared(Bytes),
    Own(BytesMut),
}

impl Deref for Data {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Data::Shared(bytes) => bytes,
            Data::Own(bytes) => bytes,
        }
    }
}

impl Piece {
    fn continues_into(&self, next: &Piece) -> bool {
        matches!(self.data, Data::Own(_))
            && self.data.len() + next.data.len() <= MERGED_BYTES
            && (self.stream, self.encoding, self.end) == (next.stream, next.encoding, next.offset)
            && Arc::ptr_eq(&self.execution, &next.execution)
    }

    fn append(&mut self, next: &Piece) {
        if let Data::Own(bytes) = &mut self.data {
            bytes.extend_from_slice(&next.data);
            self.end = next.end;
        }
    }

    fn on_its_own(mut self) -> Self {
        self.data = Data::Own(BytesMut::from(&self.data[..]));
        self
    }
}

/// How a client says which output it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Acknowledgement {
    /// Its pong acknowledges everything that was sent before the ping.
    ByPong,
    /// A pong is only a sign of life. The client acknowledges by [`FromClient::Received`].
    Explicit,
}

/// One connection's ends of its channels.
pub(crate) struct ClientPort {
    pub(crate) incoming: mpsc::Receiver<Incoming>,
    /// The newest pong. Only the newest matters, so a flood of them takes no room.
    pub(crate) pongs: watch::Receiver<Bytes>,
    pub(crate) outgoing: mpsc::Sender<Outgoing>,
    pub(crate) acknowledgement: Acknowledgement,
    /// Dropped with the port: the connection then has a moment to write what it was handed, and is closed.
    pub(crate) _closing: DropGuard,
}

/// Messages in the order in which the client gets them.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    queue: VecDeque<Outgoing>,
    events: usize,
}

impl Outbox {
    pub(crate) fn push(&mut self, message: Outgoing) {
        let message = match message {
            // A small piece is a slice of a large buffer: kept as it is, it would keep all of that.
            Outgoing::Output(piece) if piece.data.len() < SMALL_BYTES => match self.queue.back_mut() {
                Some(Outgoing::Output(last)) if last.continues_into(&piece) => {
                    last.append(&piece);
                    return;
                }
                _ => Outgoing::Output(piece.on_its_own()),
            },
            message => message,
        };
        self.events += usize::from(!matches!(message, Outgoing::Output(_)));
        self.queue.push_back(message);
    }

    pub(crate) fn event(&mut self, event: impl Into<ServerEvent>) {
        self.push(Outgoing::Event(event.into()));
    }

    /// Only the newest counts, so one that still waits is replaced.
    pub(crate) fn stdin_ack(&mut self, ack: StdinAck) {
        match self.queue.back_mut() {
            Some(Outgoing::Event(ServerEvent::StdinAck(last))) => *last = ack,
            _ => self.event(ServerEvent::StdinAck(ack)),
        }
    }

    pub(crate) fn error(&mut self, code: ErrorCode, message: impl Into<String>) {
        self.event(ServerEvent::Error(ErrorEvent::new(code, message)));
    }

    /// An error that nobody asked for. A client that has not read the last ones has nothing of another one.
    pub(crate) fn notice(&mut self, code: ErrorCode, message: impl Into<String>) {
        if !self.is_full() {
            self.error(code, message);
        }
    }

    /// An error status and the error that follows it.
    pub(crate) fn failure(&mut self, status: Status, code: ErrorCode, message: impl Into<String>) {
        let message = message.into();
        self.event(ServerEvent::StatusUpdate(sandboxer_protocol::client::StatusUpdate::new(status).message(message.clone())));
        self.error(code, message);
    }

    pub(crate) fn pop(&mut self) -> Option<Outgoing> {
        let message = self.queue.pop_front()?;
        self.events -= usize::from(!matches!(message, Outgoing::Output(_)));
        Some(message)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.events >= MAX_WAITING_EVENTS
    }

    /// Takes back what was not handed out yet of an execution: it will be asked for anew.
    pub(crate) fn take_back_output(&mut self) {
        self.queue.retain(|message| !matches!(message, Outgoing::Output(_) | Outgoing::End(_)));
        self.events = self.queue.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_agent_says_again_and_again_takes_no_more_room_than_other_events() {
        let mut outbox = Outbox::default();
        for _ in 0..10 * MAX_WAITING_EVENTS {
            outbox.notice(ErrorCode::ProcessesLost, "again");
        }
        assert_eq!(std::iter::from_fn(|| outbox.pop()).count(), MAX_WAITING_EVENTS);
        outbox.notice(ErrorCode::ProcessesLost, "and again, when it has read");
        assert!(outbox.pop().is_some());
    }
}

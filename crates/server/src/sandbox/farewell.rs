//! What a client is told when its sandbox ends, and what those who come later are told of it.

use sandboxer_protocol::client::{CloseCode, EndReason, ErrorCode, ErrorEvent, ServerEvent, Status, StatusUpdate};
use sandboxer_runtime::End;

use super::{client::Outgoing, driver::Outcome};

/// Before the sandbox is removed.
pub(super) fn before(outcome: &Outcome) -> Vec<Outgoing> {
    match outcome {
        Outcome::KilledByClient => vec![Outgoing::Event(Status::Killing.into())],
        _ => Vec::new(),
    }
}

/// Once it is gone, or left.
pub(super) fn after(outcome: &Outcome) -> Vec<Outgoing> {
    let error = |code, message: String| Outgoing::Event(ServerEvent::Error(ErrorEvent::new(code, message)));
    let died = |code, message: String| {
        let mut update = StatusUpdate::new(Status::Error).message(message.clone());
        update.reason = reason(outcome);
        vec![Outgoing::Event(ServerEvent::StatusUpdate(update)), error(code, message), Outgoing::Close(CloseCode::Application)]
    };
    match outcome {
        Outcome::KilledByClient => vec![Outgoing::Event(Status::Killed.into()), Outgoing::Close(CloseCode::Normal)],
        // No client is attached.
        Outcome::Idle(_) | Outcome::ClientGone(_) => Vec::new(),
        Outcome::Lifetime(_) => died(ErrorCode::LifetimeOver, obituary(outcome)),
        Outcome::Died(End::OutOfMemory) => died(ErrorCode::OutOfMemory, obituary(outcome)),
        Outcome::Died(End::Killed) => died(ErrorCode::SandboxKilled, obituary(outcome)),
        Outcome::Died(_) => died(ErrorCode::RuntimeFailed, obituary(outcome)),
        Outcome::Drained => {
            let message = "The server is stopping and this sandbox ends with it. Create a new one at another server.".to_owned();
            vec![error(ErrorCode::ServerStopping, message), Outgoing::Close(CloseCode::GoingAway)]
        }
        Outcome::Checkpointed { draining } => {
            let code = if *draining { CloseCode::GoingAway } else { CloseCode::Normal };
            vec![Outgoing::Event(Status::Checkpointed.into()), Outgoing::Close(code)]
        }
        Outcome::HandedOver => vec![Outgoing::Event(Status::Checkpointed.into()), Outgoing::Close(CloseCode::Normal)],
        Outcome::Lost(_) => vec![error(ErrorCode::SandboxMoved, obituary(outcome)), Outgoing::Close(CloseCode::GoingAway)],
        Outcome::LeftRunning => {
            let message = "The server is restarting. The sandbox goes on: attach again in a moment.".to_owned();
            vec![error(ErrorCode::ServerRestarting, message), Outgoing::Close(CloseCode::GoingAway)]
        }
    }
}

/// Why a sandbox ended that neither its client, its owner nor its idle time ended.
pub(crate) fn reason(outcome: &Outcome) -> Option<EndReason> {
    match outcome {
        Outcome::Lifetime(_) => Some(EndReason::Lifetime),
        Outcome::Died(End::OutOfMemory) => Some(EndReason::OutOfMemory),
        Outcome::Died(End::Killed) => Some(EndReason::Killed),
        Outcome::Died(_) => Some(EndReason::RuntimeFailed),
        _ => None,
    }
}

/// What is remembered of a sandbox that ended.
pub(crate) fn obituary(outcome: &Outcome) -> String {
    match outcome {
        Outcome::KilledByClient => "The sandbox was killed by its client.".to_owned(),
        Outcome::Idle(after) => {
            format!("The sandbox was deleted after {} s without a client and without a running program.", after.as_secs_f64())
        }
        Outcome::ClientGone(after) => {
            format!(
                "The sandbox was deleted after {} s without a client, as its creator had said (client_gone_timeout).",
                after.as_secs_f64()
            )
        }
        Outcome::Lifetime(limit) => format!("The sandbox reached the longest lifetime that this server allows, {} s.", limit.as_secs_f64()),
        Outcome::Died(End::OutOfMemory) => "The sandbox was killed because it went over its memory limit.".to_owned(),
        Outcome::Died(End::Killed) => "The sandbox was killed from outside.".to_owned(),
        Outcome::Died(end) => sentence(&end.to_string()),
        Outcome::Drained => "The sandbox ended when its server was stopped.".to_owned(),
        Outcome::LeftRunning => "The sandbox goes on.".to_owned(),
        Outcome::Checkpointed { .. } => "The sandbox is saved. Attach again, and it goes on.".to_owned(),
        Outcome::HandedOver => "The sandbox goes on at another instance.".to_owned(),
        Outcome::Lost(why) => sentence(&format!("the sandbox goes on elsewhere: {why}")),
    }
}

fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| format!("{}{}.", first.to_uppercase(), letters.as_str().trim_end_matches('.')))
}

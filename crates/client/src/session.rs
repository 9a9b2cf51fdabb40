//! What is known of the sandbox and what is to be said to the server, without any I/O: the driver tells it what happened and asks it
//! what to send. Since everything that goes out is derived from the state at the moment of sending, a cut needs no undoing: what was
//! not confirmed counts as unsent.
//!
//! ```text
//!            opened            RUNNING             resumed
//!   Down ───────────► Opening ─────────► Resuming ─────────► Ready
//!    ▲                   │  RUNNING, nothing in doubt          ▲ │
//!    │                   └─────────────────────────────────────┘ │
//!    └───────────────── cut, from anywhere ──────────────────────┘
//! ```

mod input;
#[cfg(test)]
#[allow(unreachable_pub, dead_code, reason = "the tests in tests/ include it too")]
mod model;
mod receive;
mod run;
#[cfg(test)]
mod tests;

use sandboxer_protocol::{
    ExecutionId, SandboxId,
    agent::PerStream,
    client::{CreateConfig, ErrorCode, OffsetsRequest, Request, Status, StatusUpdate},
};
use tokio::time::Instant;

pub(crate) use self::input::INPUT_PIECE_BYTES;
pub use self::run::Piece;
use self::run::{Phase, Run, Wish};
use crate::{Ended, Error, Exit, connect::Target, outage::Setback};

/// How the connection is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    Down,
    Opening {
        /// The configuration went out; nothing is sent on an attach.
        configured: bool,
        restoring: bool,
    },
    Resuming {
        asked: bool,
    },
    Ready,
}

/// Who the sandbox is.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    pub(crate) id: SandboxId,
    pub(crate) token: Option<String>,
}

/// What the driver has to do about something that was received.
#[derive(Debug, PartialEq)]
pub(crate) enum Effect {
    /// The sandbox runs and this is its client. An execution that this client did not know of may be there.
    Ready(Option<Found>),
    Started,
    /// Also means that it was started.
    Piece(Piece),
    Done(Exit),
    /// The execution failed; the sandbox did not.
    Failed(Error),
    /// Something was acknowledged.
    Progress,
    /// The sandbox was set back. The execution, if there was one, is void.
    Rewound(u64),
    /// Leave this connection and make another.
    Again(Setback),
    /// The end.
    Over(Error),
}

/// An execution that was there already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) id: ExecutionId,
    pub(crate) running: bool,
    pub(crate) from: PerStream<u64>,
    pub(crate) stdin_offset: u64,
    /// How far its output goes, as far as is known.
    pub(crate) end: Option<PerStream<u64>>,
    pub(crate) tty: bool,
}

#[derive(Debug)]
pub(crate) struct Session {
    identity: Option<Identity>,
    /// The configuration, if it is to be created.
    config: Option<String>,
    link: Link,
    /// RUNNING was seen once.
    settled: bool,
    /// What to ask for in order to take up what is there, until it is answered.
    take_up: Option<OffsetsRequest>,
    run: Option<Run>,
    /// An error status whose `error` has not come yet.
    refusal: Option<StatusUpdate>,
    kill: Option<Wish>,
    /// Another client asked for the sandbox.
    release_requested: bool,
    checkpointed: bool,
    generation: u64,
    /// Not yet told to the user.
    rewound: Option<u64>,
}

impl Session {
    pub(crate) fn create(config: CreateConfig) -> Self {
        Self::new(None, Some(Request::Configure(Box::new(config)).to_json()), None)
    }

    pub(crate) fn attach(identity: Identity, from: OffsetsRequest) -> Self {
        Self::new(Some(identity), None, Some(from))
    }

    fn new(identity: Option<Identity>, config: Option<String>, take_up: Option<OffsetsRequest>) -> Self {
        Self {
            identity,
            config,
            link: Link::Down,
            settled: false,
            take_up,
            run: None,
            refusal: None,
            kill: None,
            release_requested: false,
            checkpointed: false,
            generation: 0,
            rewound: None,
        }
    }

    pub(crate) fn identity(&self) -> Option<&Identity> {
        self.identity.as_ref()
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// What to connect to next.
    pub(crate) fn target(&self) -> Target {
        match &self.identity {
            None => Target::Create,
            Some(Identity { id, token }) => Target::Attach { id: *id, token: token.clone() },
        }
    }

    /// Whether the server said that it is restoring the sandbox: that takes as long as it takes.
    pub(crate) fn is_restoring(&self) -> bool {
        matches!(self.link, Link::Opening { restoring: true, .. })
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.link == Link::Ready
    }

    // What the user wants.

    /// Asks for an execution.
    ///
    /// # Errors
    /// One runs already, or the sandbox was set back and nobody was told yet.
    pub(crate) fn start(&mut self, id: ExecutionId, message: String) -> Result<(), Error> {
        if let Some(generation) = self.rewound.take() {
            return Err(Error::Rewound { generation });
        }
        self.run = Some(Run::requested(id, message));
        Ok(())
    }

    /// The user knows that the sandbox was set back.
    pub(crate) fn rewinding_is_known(&mut self) {
        self.rewound = None;
    }

    /// Whether an execution is under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.run.as_ref().is_some_and(|run| run.phase != Phase::Done)
    }

    fn active(&mut self, id: &ExecutionId) -> Option<&mut Run> {
        self.run.as_mut().filter(|run| run.id == *id && run.phase != Phase::Done)
    }

    pub(crate) fn write(&mut self, data: &[u8]) {
        if let Some(run) = &mut self.run {
            run.input.push(data);
        }
    }

    pub(crate) fn end_input(&mut self) {
        if let Some(run) = &mut self.run {
            run.input.end();
        }
    }

    /// Whether more input can be taken from the user.
    pub(crate) fn wants_input(&self) -> bool {
        self.run.as_ref().is_some_and(|run| run.phase != Phase::Done && run.input.has_room())
    }

    /// How much input was acknowledged; none if no more is taken.
    pub(crate) fn input_acknowledged(&self) -> Option<u64> {
        self.run.as_ref().filter(|run| run.phase != Phase::Done && !run.input.is_closed()).map(|run| run.input.acknowledged())
    }

    /// Returns false if that execution no longer runs.
    pub(crate) fn signal(&mut self, id: &ExecutionId, signal: i32) -> bool {
        self.active(id).map(|run| run.signals.push(signal)).is_some()
    }

    /// Returns false if that execution no longer runs.
    pub(crate) fn resize(&mut self, id: &ExecutionId, rows: u16, cols: u16) -> bool {
        self.active(id).map(|run| run.resize = Some((rows, cols, Wish::Unsent))).is_some()
    }

    /// Returns false if that execution no longer runs.
    pub(crate) fn kill(&mut self, id: &ExecutionId) -> bool {
        self.active(id).map(|run| run.kill = Some(run.kill.unwrap_or(Wish::Unsent))).is_some()
    }

    pub(crate) fn kill_sandbox(&mut self) {
        self.kill = Some(self.kill.unwrap_or(Wish::Unsent));
    }

    /// The user has consumed this much of the execution's output.
    pub(crate) fn consumed(&mut self, upto: PerStream<u64>, now: Instant) {
        if let Some(run) = &mut self.run {
            run.consume(upto, now);
        }
    }

    /// Nobody wants the output any more: all that comes counts as consumed.
    pub(crate) fn discard(&mut self, now: Instant) {
        if let Some(run) = &mut self.run {
            run.consume(run.have, now);
        }
    }

    /// Bytes of output that the user has not consumed yet.
    pub(crate) fn outstanding(&self) -> u64 {
        self.run.as_ref().map_or(0, Run::outstanding)
    }

    // What happens on the connection.

    pub(crate) fn opened(&mut self) {
        self.link = Link::Opening { configured: self.identity.is_some(), restoring: false };
    }

    /// The connection is gone, for whatever reason.
    pub(crate) fn cut(&mut self) {
        self.link = Link::Down;
        self.refusal = None;
        self.checkpointed = false;
        self.release_requested = false;
        self.kill = self.kill.map(|_| Wish::Unsent);
        if let Some(run) = &mut self.run {
            run.cut();
        }
    }

    /// The server closed the connection, with this code if it said one.
    pub(crate) fn closed(&mut self, code: Option<u16>, reason: &str) -> Effect {
        if let Some(refusal) = self.refusal.take() {
            // Its `error` did not come; the status says enough.
            let message = refusal.message.clone().unwrap_or_else(|| format!("{} (the server gave no reason)", refusal.status.as_str()));
            if let Some(effect) = self.refused(refusal, ErrorCode::Unknown, message) {
                return effect;
            }
        }
        if self.checkpointed && (self.release_requested || code == Some(1000)) {
            let reason = if self.release_requested { Ended::HandedOff } else { Ended::Checkpointed };
            return Effect::Over(Error::SandboxEnded { reason, message: reason.to_string() });
        }
        if code == Some(1009)
            && let Some(Run { phase: phase @ Phase::Requested { sent: true, .. }, .. }) = &mut self.run
        {
            *phase = Phase::Done;
            return Effect::Failed(Error::invalid("The program is larger than this server takes in one message."));
        }
        let what = match code {
            None => "the connection was cut".to_owned(),
            Some(code) => format!("the server closed the connection ({code} {reason})"),
        };
        Effect::Again(Setback::Cut(what))
    }

    /// When to ask again for something to send, without anything else happening.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        if self.link == Link::Ready { self.run.as_ref()?.deadline() } else { None }
    }

    /// The next message to send now.
    pub(crate) fn next_message(&mut self, now: Instant) -> Option<String> {
        match &mut self.link {
            Link::Down => None,
            Link::Opening { configured: configured @ false, .. } => {
                *configured = true;
                self.config.clone()
            }
            Link::Opening { .. } => None,
            Link::Resuming { asked: asked @ false } => {
                *asked = true;
                match (&self.take_up, &self.run) {
                    (Some(from), _) => Some(Request::Reconnect(from.clone()).to_json()),
                    (None, Some(run)) => Some(run.reconnect().to_json()),
                    (None, None) => None,
                }
            }
            Link::Resuming { .. } | Link::Ready => {
                if self.kill == Some(Wish::Unsent) {
                    self.kill = Some(Wish::Sent);
                    return Some(Request::KillSandbox.to_json());
                }
                if self.link == Link::Ready { self.run.as_mut()?.next_message(now) } else { None }
            }
        }
    }
}

/// Whether `error` follows this status.
fn is_refusal(status: Status) -> bool {
    matches!(
        status,
        Status::CreationError
            | Status::RestoreError
            | Status::ExecutionError
            | Status::ExecutionUnsupportedLanguageError
            | Status::ExecutionInProgressError
            | Status::StdinError
            | Status::CheckpointError
            | Status::SnapshotError
            | Status::FilesystemSnapshotError
            | Status::PermissionDenialError
            | Status::Error
    )
}

//! The running or the last execution, as the server knows it. The output itself is the agent's to keep.

use std::{sync::Arc, time::Duration};

use sandboxer_protocol::{
    ExecutionId,
    agent::{ExecState, ExecutionNumber, Exit, ExitCause, PerStream, signal_name},
    client::{Encoding, ErrorCode, ErrorEvent, ServerEvent, Status, StatusUpdate},
};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// What only the server knows of an execution. The agent keeps it, so that it survives the server and travels with the sandbox.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Note {
    #[serde(default)]
    pub(crate) encoding: Encoding,
    /// When the time of the execution is over, in milliseconds since 1970.
    #[serde(default)]
    pub(crate) deadline_unix_ms: Option<i64>,
    /// The timeout as it was asked for, for the message.
    #[serde(default)]
    pub(crate) timeout_ms: Option<u64>,
    #[serde(default)]
    pub(crate) tty: bool,
}

/// The execution of a sandbox, for a caller that only looks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExecutionView {
    pub(crate) id: Arc<ExecutionId>,
    pub(crate) running: bool,
}

impl ExecutionView {
    pub(crate) fn of(execution: &Execution) -> Self {
        Self { id: Arc::clone(&execution.id), running: execution.is_live() }
    }
}

#[derive(Debug)]
pub(crate) enum State {
    /// The agent was asked to start it.
    Asked,
    Running,
    Ended(Exit),
    /// It could not be started; why.
    Failed(String),
}

#[derive(Debug)]
pub(crate) struct Execution {
    pub(crate) number: ExecutionNumber,
    pub(crate) id: Arc<ExecutionId>,
    pub(crate) note: Note,
    pub(crate) state: State,
    /// A client has everything before this.
    pub(crate) acknowledged: PerStream<u64>,
    /// A client may have seen everything before this.
    pub(crate) shown: PerStream<u64>,
    /// A client has been told the end, for sure.
    pub(crate) end_acknowledged: bool,
    /// Where input without an offset goes.
    pub(crate) stdin_next: u64,
    /// The client numbers its input, and wants to hear how far it was taken.
    pub(crate) stdin_acks: bool,
    pub(crate) deadline: Option<Instant>,
    /// A client asked for its death when it had ended already, and waits to hear of it all the same.
    pub(crate) force_killed: bool,
    pub(crate) asked_at: Instant,
}

impl Execution {
    pub(crate) fn new(number: ExecutionNumber, id: ExecutionId, note: Note, timeout: Option<Duration>) -> Self {
        let now = Instant::now();
        Self {
            number,
            id: Arc::new(id),
            note,
            state: State::Asked,
            acknowledged: PerStream::default(),
            shown: PerStream::default(),
            end_acknowledged: false,
            stdin_next: 0,
            stdin_acks: false,
            deadline: timeout.map(|timeout| now + timeout),
            force_killed: false,
            asked_at: now,
        }
    }

    /// As the agent of a sandbox that ran on without us tells it.
    pub(crate) fn taken_up(state: ExecState) -> Self {
        // The note comes from the agent, which may be the guest's: what can't be read is as good as none.
        let note: Note = serde_json::from_str(&state.note).unwrap_or_default();
        let left = note.deadline_unix_ms.map(|at| {
            let left = at.saturating_sub(jiff::Timestamp::now().as_millisecond());
            Duration::from_millis(u64::try_from(left).unwrap_or(0))
        });
        let mut execution = Self::new(state.number, state.id, note, left);
        execution.acknowledged = state.held_from;
        execution.shown = state.end;
        execution.stdin_next = state.stdin_offset;
        execution.end_acknowledged = state.end_acknowledged;
        execution.state = state.exit.map_or(State::Running, State::Ended);
        execution
    }

    pub(crate) fn is_live(&self) -> bool {
        matches!(self.state, State::Asked | State::Running)
    }

    pub(crate) fn exit(&self) -> Option<&Exit> {
        match &self.state {
            State::Ended(exit) => Some(exit),
            _ => None,
        }
    }

    /// Whether a client that comes now has anything to hear of it.
    pub(crate) fn has_news(&self) -> bool {
        match &self.state {
            // A collector acknowledges the end alone, and leaves its output to a request that is sent again.
            State::Ended(_) | State::Failed(_) => !self.end_acknowledged,
            State::Asked | State::Running => true,
        }
    }

    /// A client has everything before `upto`. Returns whether that is new.
    pub(crate) fn acknowledge(&mut self, upto: PerStream<u64>) -> bool {
        let before = self.acknowledged;
        self.acknowledged.stdout = before.stdout.max(upto.stdout.min(self.shown.stdout));
        self.acknowledged.stderr = before.stderr.max(upto.stderr.min(self.shown.stderr));
        self.acknowledged != before
    }

    /// The messages that tell its end.
    pub(crate) fn finale(&self, exit: &Exit) -> Vec<ServerEvent> {
        let mut events = Vec::new();
        let timed_out = exit.cause == Some(ExitCause::TimedOut);
        if timed_out {
            let limit = self.note.timeout_ms.unwrap_or_default();
            let message = format!(
                "The program was killed because it ran longer than its timeout of {} s.",
                Duration::from_millis(limit).as_secs_f64()
            );
            events.push(ServerEvent::StatusUpdate(self.update(Status::ExecutionError).message(message.clone())));
            events.push(ServerEvent::Error(ErrorEvent::new(ErrorCode::TimedOut, message)));
        } else if self.force_killed || exit.cause == Some(ExitCause::ForceKilled) {
            events.push(ServerEvent::StatusUpdate(self.update(Status::ExecutionForceKilled)));
        }
        let mut done = self.update(Status::ExecutionDone);
        #[expect(clippy::cast_precision_loss, reason = "a duration of a human scale")]
        {
            done.duration_ms = Some(exit.duration_us as f64 / 1000.0);
        }
        done.exit_code = exit.code;
        done.signal = exit.signal.map(signal_name);
        done.timed_out = timed_out.then_some(true);
        done.message = exit.cause.and_then(|cause| match cause {
            ExitCause::TimedOut | ExitCause::ForceKilled => None,
            ExitCause::OutOfMemory => {
                Some("The program was killed because the sandbox came near its memory limit and it was the largest process.".to_owned())
            }
            ExitCause::NamespaceEnded => {
                Some("Every process of the sandbox was killed from inside, and this program with them. Its files are kept.".to_owned())
            }
        });
        events.push(ServerEvent::StatusUpdate(done));
        events
    }

    /// The messages that tell that it could not be started.
    pub(crate) fn failure(&self, why: &str) -> Vec<ServerEvent> {
        let message = format!("The program could not be started: {why}");
        let update = self.update(Status::ExecutionError).message(message.clone());
        vec![ServerEvent::StatusUpdate(update), ServerEvent::Error(ErrorEvent::new(ErrorCode::StartFailed, message))]
    }

    pub(crate) fn update(&self, status: Status) -> StatusUpdate {
        let mut update = StatusUpdate::new(status);
        update.execution_id = Some((*self.id).clone());
        update
    }
}

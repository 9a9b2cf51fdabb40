//! Server to client.

use serde::{Deserialize, Serialize};

use super::{EndReason, ErrorCode, FileEvent, Status, request::Encoding};
use crate::{ExecutionId, SandboxId};

/// Every message that the server sends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ServerEvent {
    StatusUpdate(StatusUpdate),
    SandboxId(SandboxIdEvent),
    Stdout(OutputEvent),
    Stderr(OutputEvent),
    Error(ErrorEvent),
    Resumed(Resumed),
    StdinAck(StdinAck),
    File(Box<FileEvent>),
}

impl ServerEvent {
    #[must_use]
    pub fn to_json(&self) -> String {
        // No map in here has keys other than strings, so this can't fail.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// A change of state. What else it carries depends on the status.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct StatusUpdate {
    pub status: Status,
    /// What happened and what to do, for an error status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Why the sandbox died.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<EndReason>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execution_id: Option<ExecutionId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// The name of the signal that ended the program, such as `SIGKILL`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timed_out: Option<bool>,
    /// The sandbox came back from a save that is older than what a client may have seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewound: Option<bool>,
    /// Rises with every rewinding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// With `rewound`: where the execution's streams are now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout_offset: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr_offset: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin_offset: Option<u64>,
    /// With `SANDBOX_SNAPSHOT_CREATED`: by what it is found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<String>,
}

impl StatusUpdate {
    #[must_use]
    pub fn new(status: Status) -> Self {
        Self {
            status,
            message: None,
            reason: None,
            execution_id: None,
            duration_ms: None,
            exit_code: None,
            signal: None,
            timed_out: None,
            rewound: None,
            generation: None,
            stdout_offset: None,
            stderr_offset: None,
            stdin_offset: None,
            snapshot_id: None,
        }
    }

    #[must_use]
    pub fn message(mut self, message: impl Into<String>) -> Self {
        self.message = Some(message.into());
        self
    }
}

impl From<Status> for ServerEvent {
    fn from(status: Status) -> Self {
        ServerEvent::StatusUpdate(StatusUpdate::new(status))
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct SandboxIdEvent {
    pub sandbox_id: SandboxId,
    pub sandbox_token: String,
}

/// A piece of output. `offset` and `end` count raw bytes of this stream of this execution, before and after the piece.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct OutputEvent {
    pub data: String,
    pub offset: u64,
    pub end: u64,
    pub execution_id: ExecutionId,
    /// How `data` is written, if not as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoding: Option<Encoding>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ErrorEvent {
    pub code: ErrorCode,
    pub message: String,
    /// Output that is still held begins here, with code `output_gone`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub available_from: Option<OffsetsEvent>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct OffsetsEvent {
    pub stdout_offset: u64,
    pub stderr_offset: u64,
}

impl ErrorEvent {
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), available_from: None }
    }
}

/// The answer to `reconnect`: where the output goes on. All none: nothing was ever run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Resumed {
    pub execution_id: Option<ExecutionId>,
    pub running: Option<bool>,
    pub stdout_offset: Option<u64>,
    pub stderr_offset: Option<u64>,
    pub stdin_offset: Option<u64>,
    /// How far its output goes so far: behind these offsets it is new.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout_end: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr_end: Option<u64>,
    /// It has a terminal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tty: Option<bool>,
}

/// The agent has the input before this offset.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct StdinAck {
    pub offset: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execution_id: Option<ExecutionId>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_says_only_what_it_has_to_say() {
        assert_eq!(ServerEvent::from(Status::Running).to_json(), r#"{"event":"status_update","status":"SANDBOX_RUNNING"}"#);
    }

    #[test]
    fn an_unknown_error_code_is_still_an_error() {
        let event: ServerEvent = serde_json::from_str(r#"{"event":"error","code":"of_tomorrow","message":"m","new":1}"#).unwrap();
        assert_eq!(event, ServerEvent::Error(ErrorEvent::new(ErrorCode::Unknown, "m")));
    }
}

//! Server to client.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde::{Deserialize, Serialize};

use super::{EndReason, ErrorCode, Status, request::Encoding};
use crate::{ExecutionId, SandboxId, agent::Stream};

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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Resumed {
    pub execution_id: Option<ExecutionId>,
    pub running: Option<bool>,
    pub stdout_offset: Option<u64>,
    pub stderr_offset: Option<u64>,
    pub stdin_offset: Option<u64>,
}

/// The agent has the input before this offset.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct StdinAck {
    pub offset: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execution_id: Option<ExecutionId>,
}

/// Writes an output message without building it first: this is the path that every byte of output takes.
#[must_use]
pub fn encode_output(stream: Stream, encoding: Encoding, data: &[u8], offset: u64, end: u64, id: &ExecutionId) -> String {
    let mut json = Vec::with_capacity(data.len() + data.len() / 8 + 256);
    json.extend_from_slice(match stream {
        Stream::Stdout => b"{\"event\":\"stdout\",\"data\":",
        Stream::Stderr => b"{\"event\":\"stderr\",\"data\":",
    });
    match encoding {
        Encoding::Text => put_string(&mut json, &String::from_utf8_lossy(data)),
        Encoding::Base64 => put_string(&mut json, &BASE64_STANDARD.encode(data)),
    }
    json.extend_from_slice(format!(",\"offset\":{offset},\"end\":{end},\"execution_id\":").as_bytes());
    put_string(&mut json, id.as_str());
    if encoding == Encoding::Base64 {
        json.extend_from_slice(b",\"encoding\":\"base64\"");
    }
    json.push(b'}');
    // Every part above is text; checking it again costs a tenth of writing it.
    String::from_utf8(json).unwrap_or_default()
}

fn put_string(json: &mut Vec<u8>, text: &str) {
    // Writing to memory can't fail.
    let _ = serde_json::to_writer(json, text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_written_as_its_type_reads_it() {
        let id: ExecutionId = "a\"b".parse().unwrap();
        for encoding in [Encoding::Text, Encoding::Base64] {
            let json = encode_output(Stream::Stderr, encoding, "ä\n\u{1}\"".as_bytes(), 5, 10, &id);
            let ServerEvent::Stderr(event) = serde_json::from_str(&json).unwrap() else { panic!("{json}") };
            let data = if encoding == Encoding::Text { "ä\n\u{1}\"" } else { "w6QKASI=" };
            assert_eq!((event.data.as_str(), event.offset, event.end, &event.execution_id), (data, 5, 10, &id));
        }
    }

    #[test]
    fn what_is_not_utf8_arrives_as_the_replacement_character() {
        let json = encode_output(Stream::Stdout, Encoding::Text, b"a\xffb", 0, 3, &"e".parse().unwrap());
        let ServerEvent::Stdout(event) = serde_json::from_str(&json).unwrap() else { panic!("{json}") };
        assert_eq!((event.data.as_str(), event.end), ("a\u{fffd}b", 3));
    }

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

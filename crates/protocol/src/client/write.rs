//! Requests as a client writes them. What is written here, [`Request::parse`] reads as the same request.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde::Serialize;

use super::{
    FileRequest,
    request::{Encoding, OffsetsRequest, Request, SnapshotTarget},
};
use crate::agent::signal_name;

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "action", rename_all = "snake_case")]
pub(super) enum Action<'a> {
    KillProcess,
    KillSandbox,
    Resize {
        rows: u16,
        cols: u16,
    },
    Signal {
        signal: String,
    },
    Ack(&'a OffsetsRequest),
    Reconnect(&'a OffsetsRequest),
    Checkpoint {
        #[serde(skip_serializing_if = "is_false")]
        include_execution: bool,
    },
    Snapshot {
        #[serde(skip_serializing_if = "Option::is_none")]
        name: Option<&'a str>,
    },
    Rollback(&'a SnapshotTarget),
    SnapshotFilesystem {
        name: &'a str,
        #[serde(skip_serializing_if = "is_false")]
        replace: bool,
    },
    File(&'a FileRequest),
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Input<'a> {
    Stdin {
        data: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        offset: Option<u64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        encoding: Option<Encoding>,
    },
    StdinEof {
        #[serde(skip_serializing_if = "Option::is_none")]
        offset: Option<u64>,
    },
}

fn is_false(value: &bool) -> bool {
    !value
}

impl Request {
    /// Writes the request as one text message. Fields that say nothing are left out. Input that is not UTF-8 goes as base64.
    #[must_use]
    pub fn to_json(&self) -> String {
        match self {
            Request::Configure(config) => json(config),
            Request::Execute(execute) => json(execute),
            Request::Stdin { data, offset } => match std::str::from_utf8(data) {
                Ok(data) => json(&Input::Stdin { data, offset: *offset, encoding: None }),
                Err(_) => {
                    let data = BASE64_STANDARD.encode(data);
                    json(&Input::Stdin { data: &data, offset: *offset, encoding: Some(Encoding::Base64) })
                }
            },
            Request::StdinEof { offset } => json(&Input::StdinEof { offset: *offset }),
            Request::Resize { rows, cols } => json(&Action::Resize { rows: *rows, cols: *cols }),
            Request::Signal { signal } => json(&Action::Signal { signal: signal_name(*signal) }),
            Request::KillProcess => json(&Action::KillProcess),
            Request::KillSandbox => json(&Action::KillSandbox),
            Request::Ack(offsets) => json(&Action::Ack(offsets)),
            Request::Reconnect(offsets) => json(&Action::Reconnect(offsets)),
            Request::Checkpoint { include_execution } => json(&Action::Checkpoint { include_execution: *include_execution }),
            Request::Snapshot { name } => json(&Action::Snapshot { name: name.as_deref() }),
            Request::Rollback(target) => json(&Action::Rollback(target)),
            Request::SnapshotFilesystem { name, replace } => json(&Action::SnapshotFilesystem { name, replace: *replace }),
            Request::File(request) => json(&Action::File(request)),
        }
    }
}

fn json(message: &impl Serialize) -> String {
    // No map in a request has keys other than strings, so this can't fail.
    serde_json::to_string(message).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::client::{CreateConfig, ExecuteRequest};

    #[test]
    fn a_request_is_written_as_the_contract_spells_it() {
        let offsets = OffsetsRequest { execution_id: "e".parse().ok(), stdout_offset: Some(1), stderr_offset: None, peek: None };
        let peek = OffsetsRequest { peek: Some(true), ..OffsetsRequest::default() };
        let execute = ExecuteRequest {
            language: "bash".into(),
            code: "true".into(),
            execution_id: None,
            env: None,
            cwd: None,
            timeout: Some(std::time::Duration::from_millis(1500).into()),
            stdin: Some(false),
            tty: None,
            encoding: Some(Encoding::Base64),
            peek: None,
        };
        let cases = [
            (
                Request::Configure(Box::new(CreateConfig { enable_checkpoint: Some(true), ..CreateConfig::default() })),
                r#"{"enable_checkpoint":true}"#,
            ),
            (Request::Execute(Box::new(execute)), r#"{"language":"bash","code":"true","timeout":1.5,"stdin":false,"encoding":"base64"}"#),
            (Request::Stdin { data: Bytes::from_static(b"a\n"), offset: Some(7) }, r#"{"event":"stdin","data":"a\n","offset":7}"#),
            (Request::Stdin { data: Bytes::from_static(b"\xff"), offset: None }, r#"{"event":"stdin","data":"/w==","encoding":"base64"}"#),
            (Request::StdinEof { offset: None }, r#"{"event":"stdin_eof"}"#),
            (Request::Resize { rows: 2, cols: 3 }, r#"{"action":"resize","rows":2,"cols":3}"#),
            (Request::Signal { signal: 2 }, r#"{"action":"signal","signal":"SIGINT"}"#),
            (Request::KillProcess, r#"{"action":"kill_process"}"#),
            (Request::KillSandbox, r#"{"action":"kill_sandbox"}"#),
            (Request::Ack(offsets.clone()), r#"{"action":"ack","execution_id":"e","stdout_offset":1}"#),
            (Request::Reconnect(offsets), r#"{"action":"reconnect","execution_id":"e","stdout_offset":1}"#),
            (Request::Reconnect(peek), r#"{"action":"reconnect","peek":true}"#),
            (Request::Reconnect(OffsetsRequest::default()), r#"{"action":"reconnect"}"#),
            (Request::Checkpoint { include_execution: false }, r#"{"action":"checkpoint"}"#),
            (Request::Snapshot { name: None }, r#"{"action":"snapshot"}"#),
            (
                Request::Rollback(SnapshotTarget { snapshot_id: Some("s".into()), checkpoint: None }),
                r#"{"action":"rollback","snapshot_id":"s"}"#,
            ),
            (
                Request::SnapshotFilesystem { name: "n".into(), replace: true },
                r#"{"action":"snapshot_filesystem","name":"n","replace":true}"#,
            ),
        ];
        for (request, text) in cases {
            assert_eq!(request.to_json(), text);
            assert_eq!(Request::parse(text), Ok(request), "{text}");
        }
    }
}

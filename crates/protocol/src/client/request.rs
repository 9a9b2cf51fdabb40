//! Client to server: which request a message is, and what it says. Parsed here and nowhere else.

use std::{collections::BTreeMap, time::Duration};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};
use serde_json::{Map, Value};

use super::{ErrorCode, FileRequest};
use crate::{
    ExecutionId,
    agent::DetachedOutput,
    limits::{MAX_COMPLAINT_BYTES, MAX_ENV_BYTES, MAX_EXECUTION_ID_BYTES, MAX_METADATA_BYTES, MAX_PATH_BYTES},
};

/// What a client may ask for.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    Configure(Box<CreateConfig>),
    Execute(Box<ExecuteRequest>),
    Stdin { data: Bytes, offset: Option<u64> },
    StdinEof { offset: Option<u64> },
    Resize { rows: u16, cols: u16 },
    Signal { signal: i32 },
    KillProcess,
    KillSandbox,
    Ack(OffsetsRequest),
    Reconnect(OffsetsRequest),
    Checkpoint { include_execution: bool },
    Snapshot { name: Option<String> },
    Rollback(SnapshotTarget),
    SnapshotFilesystem { name: String, replace: bool },
    File(Box<FileRequest>),
}

/// A message that is no request, and what it tried to be: that decides how it is answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct BadRequest {
    pub about: About,
    pub code: ErrorCode,
    pub message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum About {
    Configuration,
    Execution,
    Other,
}

/// A length of time in seconds, as clients write it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct Seconds(f64);

impl Seconds {
    /// None stands for zero, which means "never" wherever it is allowed.
    #[must_use]
    pub fn nonzero(self) -> Option<Duration> {
        (self.0 > 0.0).then(|| Duration::from_secs_f64(self.0))
    }
}

impl From<Duration> for Seconds {
    fn from(duration: Duration) -> Self {
        Self(duration.as_secs_f64())
    }
}

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let seconds = f64::deserialize(deserializer)?;
        // A thousand years: far below where `Duration` and `Instant` overflow.
        if !(0.0..=3.2e10).contains(&seconds) {
            return Err(D::Error::custom("a number of seconds, zero or more"));
        }
        Ok(Self(seconds))
    }
}

/// The first message of `/create`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct CreateConfig {
    /// Seconds without client and execution after which the sandbox is saved or deleted; 0: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_timeout: Option<Seconds>,
    /// Seconds without a client after which the sandbox is deleted, even while an execution runs; 0: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_gone_timeout: Option<Seconds>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enable_checkpoint: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filesystem_snapshot_name: Option<String>,
    /// Name or digest of an image; left out: the base image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Added to the environment of every execution.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, String>>,
    /// Where executions start, if they don't say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsRequest>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enable_sandbox_handoff: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enable_idle_timeout_auto_checkpoint: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub autosave_seconds: Option<Seconds>,
    #[cfg_attr(test, schemars(with = "Option<String>"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detached_output: Option<DetachedOutput>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct LimitsRequest {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pids: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_mb: Option<u64>,
}

/// What a sandbox may reach.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum Network {
    None(NoNetwork),
    Allow { allow: Vec<String> },
}

/// The text `none`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum NoNetwork {
    None,
}

impl<'de> Deserialize<'de> for Network {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Allow {
            allow: Vec<String>,
        }
        // By hand, because serde's untagged enums don't say what was wrong.
        match Value::deserialize(deserializer)? {
            Value::String(text) if text == "none" => Ok(Network::None(NoNetwork::None)),
            value @ Value::Object(_) => {
                let Allow { allow } = serde_json::from_value(value).map_err(D::Error::custom)?;
                Ok(Network::Allow { allow })
            }
            _ => Err(D::Error::custom("either \"none\" or {\"allow\":[…]}")),
        }
    }
}

/// `{"language":…,"code":…}`.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ExecuteRequest {
    pub language: String,
    pub code: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub execution_id: Option<ExecutionId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Seconds after which the program is killed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Seconds>,
    /// Whether standard input is open (the default) or at its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stdin: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tty: Option<TtyRequest>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encoding: Option<Encoding>,
    /// Who asks for it leaves it to others: nothing that is sent of it on this connection counts as acknowledged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peek: Option<bool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TtyRequest {
    #[serde(default = "default_rows")]
    pub rows: u16,
    #[serde(default = "default_cols")]
    pub cols: u16,
}

fn default_rows() -> u16 {
    24
}

fn default_cols() -> u16 {
    80
}

/// How `data` is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Encoding {
    #[default]
    #[serde(alias = "utf8", alias = "utf-8")]
    Text,
    Base64,
}

/// Offsets of an `ack` or a `reconnect`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct OffsetsRequest {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub execution_id: Option<ExecutionId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stdout_offset: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stderr_offset: Option<u64>,
    /// With `reconnect`: what is sent from now on is only looked at. It counts as not acknowledged, and is there for the next client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peek: Option<bool>,
}

/// Where a rollback goes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct SnapshotTarget {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
}

impl Request {
    /// Reads one text message.
    ///
    /// # Errors
    /// It is no request; the error says why, and names the field if one is to blame.
    pub fn parse(text: &str) -> Result<Self, BadRequest> {
        let value: Value = serde_json::from_str(text).map_err(|error| {
            bad(About::Other, ErrorCode::MalformedJson, format!("This is not JSON: {error}. Send one JSON object a message."))
        })?;
        let Value::Object(fields) = value else {
            return Err(bad(About::Other, ErrorCode::NotAnObject, "This is JSON, but not an object. Send one JSON object a message."));
        };
        if fields.contains_key("action") {
            return Self::action(fields);
        }
        if fields.contains_key("event") {
            return Self::event(fields);
        }
        if fields.contains_key("language") || fields.contains_key("code") {
            let request: ExecuteRequest = read(About::Execution, fields)?;
            check_environment(About::Execution, request.env.as_ref())?;
            check_path(About::Execution, request.cwd.as_deref())?;
            if request.code.contains('\0') {
                return Err(field(About::Execution, "code", "a program can't contain a NUL character"));
            }
            return Ok(Request::Execute(Box::new(request)));
        }
        let config: CreateConfig = read(About::Configuration, fields)?;
        check_environment(About::Configuration, config.env.as_ref())?;
        check_path(About::Configuration, config.cwd.as_deref())?;
        let metadata: usize = config.metadata.iter().flatten().map(|(name, value)| name.len() + value.len()).sum();
        if metadata > MAX_METADATA_BYTES {
            return Err(field(About::Configuration, "metadata", format!("at most {MAX_METADATA_BYTES} bytes together")));
        }
        Ok(Request::Configure(Box::new(config)))
    }

    fn event(fields: Map<String, Value>) -> Result<Self, BadRequest> {
        #[derive(Deserialize)]
        struct Stdin {
            event: String,
            data: Option<String>,
            offset: Option<u64>,
            #[serde(default)]
            encoding: Encoding,
        }
        let stdin: Stdin = read(About::Other, fields)?;
        match stdin.event.as_str() {
            "stdin" => {
                let Some(data) = stdin.data else { return Err(field(About::Other, "data", "it is missing")) };
                let data = match stdin.encoding {
                    Encoding::Text => Bytes::from(data),
                    Encoding::Base64 => {
                        BASE64_STANDARD.decode(data).map_err(|error| field(About::Other, "data", format!("not base64: {error}")))?.into()
                    }
                };
                Ok(Request::Stdin { data, offset: stdin.offset })
            }
            "stdin_eof" => Ok(Request::StdinEof { offset: stdin.offset }),
            other => Err(bad(
                About::Other,
                ErrorCode::UnknownEvent,
                format!("Unknown event {other:?}. A client sends \"stdin\" and \"stdin_eof\"."),
            )),
        }
    }

    fn action(mut fields: Map<String, Value>) -> Result<Self, BadRequest> {
        #[derive(Deserialize)]
        struct Resize {
            rows: u16,
            cols: u16,
        }
        #[derive(Deserialize)]
        struct Signal {
            signal: String,
        }
        #[derive(Deserialize)]
        struct Checkpoint {
            include_execution: Option<bool>,
        }
        #[derive(Deserialize)]
        struct Snapshot {
            name: Option<String>,
        }
        #[derive(Deserialize)]
        struct FilesystemSnapshot {
            name: String,
            replace: Option<bool>,
        }
        let Some(Value::String(action)) = fields.remove("action") else { return Err(field(About::Other, "action", "it must be a string")) };
        Ok(match action.as_str() {
            "kill_process" => Request::KillProcess,
            "kill_sandbox" => Request::KillSandbox,
            "resize" => {
                let Resize { rows, cols } = read(About::Other, fields)?;
                Request::Resize { rows, cols }
            }
            "signal" => {
                let Signal { signal } = read(About::Other, fields)?;
                let number = crate::agent::signal_number(&signal);
                Request::Signal { signal: number.ok_or_else(|| field(About::Other, "signal", format!("there is no signal {signal:?}")))? }
            }
            "ack" => Request::Ack(read(About::Other, fields)?),
            "reconnect" => Request::Reconnect(read(About::Other, fields)?),
            "checkpoint" => {
                let Checkpoint { include_execution } = read(About::Other, fields)?;
                Request::Checkpoint { include_execution: include_execution.unwrap_or(false) }
            }
            "snapshot" => {
                let Snapshot { name } = read(About::Other, fields)?;
                Request::Snapshot { name }
            }
            "rollback" => Request::Rollback(read(About::Other, fields)?),
            "snapshot_filesystem" => {
                let FilesystemSnapshot { name, replace } = read(About::Other, fields)?;
                Request::SnapshotFilesystem { name, replace: replace.unwrap_or(false) }
            }
            "file" => {
                let request: FileRequest = read(About::Other, fields)?;
                if request.id.as_ref().is_some_and(|id| id.len() > MAX_EXECUTION_ID_BYTES) {
                    return Err(field(About::Other, "id", format!("at most {MAX_EXECUTION_ID_BYTES} bytes")));
                }
                Request::File(Box::new(request))
            }
            other => return Err(bad(About::Other, ErrorCode::UnknownAction, format!("Unknown action {other:?}."))),
        })
    }
}

fn read<T: for<'de> Deserialize<'de>>(about: About, fields: Map<String, Value>) -> Result<T, BadRequest> {
    serde_path_to_error::deserialize(Value::Object(fields)).map_err(|error| {
        let path = error.path().to_string();
        let problem = error.into_inner().to_string();
        if path == "." { bad(about, ErrorCode::InvalidField, format!("Bad request: {problem}.")) } else { field(about, &path, problem) }
    })
}

fn check_environment(about: About, env: Option<&BTreeMap<String, String>>) -> Result<(), BadRequest> {
    let mut bytes = 0;
    for (name, value) in env.into_iter().flatten() {
        bytes += name.len() + value.len() + 2;
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(field(about, "env", format!("{name:?} can't be a variable: no empty name, no \"=\" in it, no NUL character")));
        }
    }
    if bytes > MAX_ENV_BYTES { Err(field(about, "env", format!("at most {MAX_ENV_BYTES} bytes together"))) } else { Ok(()) }
}

fn check_path(about: About, path: Option<&str>) -> Result<(), BadRequest> {
    match path {
        Some(path) if !path.starts_with('/') || path.contains('\0') || path.len() > MAX_PATH_BYTES => {
            Err(field(about, "cwd", format!("an absolute path of at most {MAX_PATH_BYTES} bytes")))
        }
        _ => Ok(()),
    }
}

/// What is wrong may be quoted from the message, which may be as long as messages are: the answer is not.
fn bad(about: About, code: ErrorCode, message: impl Into<String>) -> BadRequest {
    let mut message = message.into();
    if message.len() > MAX_COMPLAINT_BYTES {
        let room = MAX_COMPLAINT_BYTES - '…'.len_utf8();
        let end = (0..=room).rev().find(|end| message.is_char_boundary(*end)).unwrap_or(0);
        message.truncate(end);
        message.push('…');
    }
    BadRequest { about, code, message }
}

fn field(about: About, name: &str, problem: impl std::fmt::Display) -> BadRequest {
    bad(about, ErrorCode::InvalidField, format!("Field \"{name}\": {problem}."))
}

#[cfg(test)]
mod tests;

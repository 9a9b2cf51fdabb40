//! Extensions that are programs: one process a call, one JSON object in, one out. The program is not trusted to answer, to answer in time,
//! to answer briefly, or to speak of the sandbox it was asked about.
//!
//! ```text
//! stdin   {"protocol":1,"id":"<call>","method":"provision","params":{"sandbox_id":…,"profile":{…},"inputs":{…},"host":{…},…}}
//! stdout  {"id":"<call>","sandbox_id":…,"result":{…}}     or     {"id":"<call>","error":{"code":"invalid","message":"…"}}
//! ```

mod process;

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{ExtensionError, ExtensionName, Health, Host, Inputs, Kind, Map, Profile, Sandbox, SandboxExtension, SnapshotId, check_map};

pub const PROTOCOL: u64 = 1;
/// How long a call may take, unless the configuration says otherwise.
pub const CALL_WITHIN: Duration = Duration::from_secs(600);
/// The same for calls that make nothing.
const QUESTION_WITHIN: Duration = Duration::from_secs(30);
/// What is shown of a program's own words.
const MAX_MESSAGE_CHARS: usize = 1000;

/// A program, and how it is started.
#[derive(Debug, Clone)]
pub struct Program {
    pub path: PathBuf,
    pub args: Vec<String>,
    /// Besides `PATH`, `HOME` and `LANG`, which are all it gets.
    pub env: BTreeMap<String, String>,
    /// Its working directory and `HOME`.
    pub state_dir: PathBuf,
    /// The longest call.
    pub within: Duration,
}

/// An extension that is a program.
#[derive(Debug)]
pub struct External {
    name: ExtensionName,
    program: Program,
}

/// What a program says of itself.
#[derive(Debug, Clone, Deserialize, PartialEq, Eq)]
pub struct Description {
    pub name: ExtensionName,
    pub protocol: u64,
    #[serde(default)]
    pub supports_snapshots: bool,
}

#[derive(Deserialize)]
struct Answer {
    id: String,
    sandbox_id: Option<String>,
    snapshot_id: Option<String>,
    result: Option<Value>,
    error: Option<Complaint>,
}

#[derive(Deserialize)]
struct Complaint {
    #[serde(default)]
    code: String,
    message: String,
}

#[derive(Deserialize)]
struct StatusResult {
    status: String,
    #[serde(default)]
    message: String,
}

impl External {
    #[must_use]
    pub fn new(name: ExtensionName, program: Program) -> Self {
        Self { name, program }
    }

    /// Asks a program who it is, before it has a name here.
    ///
    /// # Errors
    /// It does not say.
    pub async fn introduce(program: Program) -> Result<Self, ExtensionError> {
        let nameless = Self { name: "ext.unnamed".parse().map_err(|_| ExtensionError::failed("no name"))?, program };
        let description = nameless.ask_description().await?;
        Ok(Self { name: description.name, program: nameless.program })
    }

    /// # Errors
    /// The program does not answer as it should, or is another one than it is configured as.
    pub async fn describe(&self) -> Result<Description, ExtensionError> {
        let description = self.ask_description().await?;
        if description.name != self.name {
            return Err(self.fault(&format!("it says that it is {}", description.name)));
        }
        Ok(description)
    }

    async fn ask_description(&self) -> Result<Description, ExtensionError> {
        let result = self.call("describe", json!({}), QUESTION_WITHIN).await?;
        let description: Description =
            serde_json::from_value(result).map_err(|error| self.fault(&format!("what it says of itself can't be understood: {error}")))?;
        if description.protocol != PROTOCOL {
            return Err(
                self.fault(&format!("it speaks version {} of the protocol, and this server version {PROTOCOL}", description.protocol))
            );
        }
        Ok(description)
    }

    /// One call of any method, for those who check a program.
    ///
    /// # Errors
    /// The program says so, or breaks the protocol.
    pub async fn call(&self, method: &str, params: Value, within: Duration) -> Result<Value, ExtensionError> {
        let call = uuid::Uuid::new_v4().to_string();
        let request = json!({ "protocol": PROTOCOL, "id": call, "method": method, "params": params });
        let within = within.min(self.program.within);
        let said = process::run(&self.name, &self.program, &request.to_string(), within).await.map_err(|why| self.fault(&why))?;
        let answer: Answer = serde_json::from_slice(&said)
            .map_err(|error| self.fault(&format!("its answer to {method} is not the JSON it should be: {error}")))?;
        if answer.id != call {
            return Err(self.fault("it answered another call than it was asked"));
        }
        for (asked, answered, what) in [("sandbox_id", answer.sandbox_id, "sandbox"), ("snapshot_id", answer.snapshot_id, "snapshot")] {
            let asked = params.get(asked).and_then(Value::as_str);
            if answer.error.is_none() && asked != answered.as_deref() {
                return Err(self.fault(&format!("it answered for another {what} than it was asked about")));
            }
        }
        match (answer.result, answer.error) {
            (Some(result), None) => Ok(result),
            (None, Some(complaint)) => Err(complaint.into_error()),
            _ => Err(self.fault("its answer has to have either a result or an error")),
        }
    }

    async fn map(&self, method: &str, params: Value) -> Result<Map, ExtensionError> {
        let result = self.call(method, params, self.program.within).await?;
        let map = serde_json::from_value(result).map_err(|_| self.fault(&format!("{method} has to return texts by their names")))?;
        check_map(method, &map)?;
        Ok(map)
    }

    fn fault(&self, why: &str) -> ExtensionError {
        let shown: String = why.chars().take(MAX_MESSAGE_CHARS).collect();
        ExtensionError::new(
            Kind::Failed,
            "extension_failed",
            format!("{} does not do what an extension must: {shown}. The server's log has what it said.", self.name),
        )
    }
}

impl Complaint {
    fn into_error(self) -> ExtensionError {
        let message: String = self.message.chars().filter(|c| !c.is_control()).take(MAX_MESSAGE_CHARS).collect();
        match self.code.as_str() {
            "invalid" => ExtensionError::new(Kind::Invalid, "invalid_input", message),
            "conflict" => ExtensionError::new(Kind::Conflict, "conflict", message),
            "not_found" => ExtensionError::new(Kind::NotFound, "not_found", message),
            "unsupported" => ExtensionError::unsupported(message),
            "unavailable" => ExtensionError::unavailable(message),
            _ => ExtensionError::failed(message),
        }
    }
}

fn params(sandbox: &Sandbox) -> Value {
    json!({
        "sandbox_id": sandbox.id,
        "profile": sandbox.profile,
        "inputs": sandbox.inputs,
        "host": sandbox.host,
        "metadata": sandbox.metadata,
        "handle": sandbox.handle,
    })
}

fn with(mut params: Value, name: &str, value: Value) -> Value {
    params[name] = value;
    params
}

#[async_trait]
impl SandboxExtension for External {
    fn name(&self) -> ExtensionName {
        self.name.clone()
    }

    async fn validate(&self, profile: &Profile, inputs: &Inputs, host: &Host) -> Result<(), ExtensionError> {
        self.describe().await?;
        let params = json!({ "profile": profile, "inputs": inputs, "host": host });
        self.call("validate", params, QUESTION_WITHIN).await.map(drop)
    }

    async fn provision(&self, sandbox: &Sandbox) -> Result<Map, ExtensionError> {
        self.map("provision", params(sandbox)).await
    }

    async fn status(&self, sandbox: &Sandbox) -> Result<Health, ExtensionError> {
        let result = self.call("status", params(sandbox), QUESTION_WITHIN).await?;
        let result: StatusResult =
            serde_json::from_value(result).map_err(|error| self.fault(&format!("its status can't be understood: {error}")))?;
        match result.status.as_str() {
            "ready" => Ok(Health::Ready),
            "provisioning" => Ok(Health::Provisioning),
            "failed" => Ok(Health::Failed(result.message.chars().take(MAX_MESSAGE_CHARS).collect())),
            "gone" => Ok(Health::Gone),
            _ => Err(self.fault("its status is none of ready, provisioning, failed and gone")),
        }
    }

    async fn teardown(&self, sandbox: &Sandbox) -> Result<(), ExtensionError> {
        self.call("teardown", params(sandbox), self.program.within).await.map(drop)
    }

    async fn supports_snapshots(&self) -> Result<bool, ExtensionError> {
        Ok(self.describe().await?.supports_snapshots)
    }

    async fn snapshot(&self, id: SnapshotId, sandbox: &Sandbox) -> Result<Map, ExtensionError> {
        self.map("snapshot", with(params(sandbox), "snapshot_id", json!(id))).await
    }

    async fn restore_from_snapshot(&self, sandbox: &Sandbox, snapshot: SnapshotId, meta: &Map) -> Result<Map, ExtensionError> {
        let params = with(with(params(sandbox), "snapshot_id", json!(snapshot)), "snapshot_meta", json!(meta));
        self.map("restore_from_snapshot", params).await
    }

    async fn delete_snapshot(&self, id: SnapshotId, host: &Host, meta: &Map) -> Result<(), ExtensionError> {
        let params = json!({ "snapshot_id": id, "host": host, "snapshot_meta": meta });
        self.call("delete_snapshot", params, self.program.within).await.map(drop)
    }
}

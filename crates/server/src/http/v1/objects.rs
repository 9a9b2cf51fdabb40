//! Objects as clients see them.

use sandboxer_extensions::{Health, SandboxRow, SandboxState, SnapshotRow};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::workspaces::NativeSandbox;

#[derive(Debug, Clone, Serialize)]
pub(super) struct SandboxObject {
    pub(super) id: String,
    kind: String,
    profile: String,
    extension: String,
    host: String,
    pub(super) status: &'static str,
    pub(super) created_at: jiff::Timestamp,
    metadata: Value,
    inputs: Value,
    handle: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot_id: Option<String>,
    /// Only when it is made: it is nowhere else.
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<String>,
}

impl From<SandboxRow> for SandboxObject {
    fn from(row: SandboxRow) -> Self {
        Self {
            id: row.id.to_string(),
            kind: row.extension.as_str().trim_start_matches("ext.").to_owned(),
            profile: row.profile.to_string(),
            extension: row.extension.to_string(),
            host: row.host.to_string(),
            status: match row.status {
                SandboxState::Provisioning => "provisioning",
                SandboxState::Ready => "ready",
                SandboxState::Failed => "failed",
            },
            created_at: row.created_at,
            metadata: json!(row.metadata),
            inputs: json!(row.inputs),
            handle: json!(row.handle),
            error: row.error,
            snapshot_id: row.snapshot_id.map(|id| id.to_string()),
            token: None,
        }
    }
}

impl SandboxObject {
    pub(super) fn native(sandbox: NativeSandbox, token: Option<String>) -> Self {
        Self {
            id: sandbox.id.to_string(),
            kind: "gvisor".to_owned(),
            profile: "profile.gvisor".to_owned(),
            extension: "ext.gvisor".to_owned(),
            host: "local".to_owned(),
            status: "ready",
            created_at: sandbox.created_at,
            metadata: json!(sandbox.metadata),
            inputs: Value::Object(Map::new()),
            handle: Value::Object(Map::new()),
            error: None,
            snapshot_id: None,
            token,
        }
    }

    /// As it is now.
    pub(super) fn with(mut self, health: Health) -> Self {
        self.status = match health {
            Health::Provisioning => "provisioning",
            Health::Ready => "ready",
            Health::Failed(why) => {
                self.error = Some(why);
                "failed"
            }
            Health::Gone => "gone",
        };
        self
    }

    /// Its host does not say how it is.
    pub(super) fn unknown(mut self, why: String) -> Self {
        self.error = Some(why);
        self
    }
}

/// Its inputs and metadata are the sandbox's and are kept for a restore; they are shown too.
pub(super) fn snapshot(row: SnapshotRow) -> Value {
    let mut object = json!(row);
    if let Some(fields) = object.as_object_mut() {
        fields.remove("owner");
    }
    object
}

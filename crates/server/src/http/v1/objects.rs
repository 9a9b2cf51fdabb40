//! Objects as clients see them.

use sandboxer_extensions::{Health, SandboxRow, SandboxState, SnapshotRow};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::{
    checkpoints::{SavedCheckpoint, SavedSnapshot},
    workspaces::NativeSandbox,
};

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
    /// Rises when a gVisor sandbox goes back, and is another one in every copy.
    #[serde(skip_serializing_if = "Option::is_none")]
    generation: Option<u64>,
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
            generation: None,
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
            status: if sandbox.runs { "ready" } else { "saved" },
            created_at: sandbox.created_at,
            metadata: json!(sandbox.metadata),
            inputs: Value::Object(Map::new()),
            handle: Value::Object(Map::new()),
            error: None,
            snapshot_id: sandbox.snapshot_id.map(|id| id.to_string()),
            generation: Some(sandbox.generation),
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

/// A snapshot of a gVisor sandbox. What it holds beside its sandbox is told where that is known: what was written for it, and what was
/// there already.
pub(super) fn native_snapshot(snapshot: &SavedSnapshot) -> Value {
    let about = &snapshot.about;
    let mut meta = Map::new();
    if let Some(name) = &about.name {
        meta.insert("name".to_owned(), json!(name));
    }
    for (field, bytes) in
        [("raw_bytes", about.raw_bytes), ("written_bytes", about.saving.written_bytes), ("reused_bytes", about.saving.reused_bytes)]
    {
        meta.insert(field.to_owned(), json!(bytes.to_string()));
    }
    json!({
        "id": snapshot.id,
        "sandbox_id": about.sandbox_id,
        "profile": "profile.gvisor",
        "extension": "ext.gvisor",
        "host": "local",
        "status": "completed",
        "created_at": about.created_at,
        "size_bytes": about.stored_bytes,
        "meta": meta,
        "inputs": {},
        "metadata": about.state.config.metadata,
    })
}

pub(super) fn checkpoint(checkpoint: &SavedCheckpoint) -> Value {
    let about = &checkpoint.about;
    json!({
        "name": checkpoint.name,
        "sandbox_id": about.sandbox_id,
        "created_at": about.created_at,
        "parent": about.parent,
        "automatic": about.automatic,
        "latest": checkpoint.latest,
        "generation": about.state.generation,
        "size_bytes": about.stored_bytes,
        "raw_bytes": about.raw_bytes,
        "written_bytes": about.saving.written_bytes,
        "reused_bytes": about.saving.reused_bytes,
    })
}

//! Objects as clients see them. Their schemas in the API's own document come from these types.

use std::collections::BTreeMap;

use jiff::Timestamp;
use sandboxer_extensions::{Health, InputType, InputValue, Map, Profile, SandboxRow, SandboxState, SnapshotRow, SnapshotState};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{
    checkpoints::{SavedCheckpoint, SavedSnapshot},
    filesystems::SavedFilesystem,
    sandbox::record::SandboxConfig,
    workspaces::NativeSandbox,
};

/// A part of a list.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct List<T> {
    pub(super) items: Vec<T>,
    /// Send it as `cursor` to get what follows; null: that was all.
    #[schema(required = true)]
    pub(super) next_cursor: Option<String>,
    /// What the list may lack, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) warnings: Vec<String>,
}

/// One new sandbox, or, where a count was given, all of them.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum OneOrMany {
    One(Box<SandboxObject>),
    Many(Copies),
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Copies {
    pub(super) items: Vec<SandboxObject>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum SandboxStatus {
    Provisioning,
    Ready,
    /// On the volume, and nowhere in memory.
    Saved,
    Failed,
    Gone,
}

/// A sandbox.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = Sandbox)]
pub(super) struct SandboxObject {
    #[schema(format = Uuid)]
    pub(super) id: String,
    kind: String,
    profile: String,
    extension: String,
    host: String,
    pub(super) status: SandboxStatus,
    #[schema(value_type = String, format = DateTime)]
    pub(super) created_at: Timestamp,
    /// Notes of its creator.
    metadata: Map,
    /// What its profile was given.
    #[schema(value_type = Object)]
    inputs: BTreeMap<String, InputValue>,
    /// What its extension says of it.
    handle: Map,
    /// Why it failed, or can't be asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    error: Option<String>,
    /// What it was made from.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    snapshot_id: Option<String>,
    /// Rises when a gVisor sandbox goes back, and is another one in every copy.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    generation: Option<u64>,
    /// The image, limits, network and times of a gVisor sandbox. A list leaves it out where the sandbox
    /// is not in this server's memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    configuration: Option<ConfigurationObject>,
    /// The program that runs, or ran last. Only the object of a single sandbox has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    execution: Option<ExecutionObject>,
    /// Only when it is made: it is nowhere else.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    token: Option<String>,
}

/// How a gVisor sandbox was made, with all defaults filled in. The values of its environment are not
/// shown.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = SandboxConfiguration)]
pub(super) struct ConfigurationObject {
    /// The digest of the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    image: Option<String>,
    limits: LimitsObject,
    /// The hosts that its programs may reach. Empty: there is no network.
    network: Vec<String>,
    /// Seconds without a client and a running program after which it is saved or deleted. Null: never.
    #[schema(required = true)]
    idle_timeout: Option<f64>,
    /// The directory where programs start. Null: the home directory.
    #[schema(required = true)]
    cwd: Option<String>,
    /// The names of the variables that every program gets.
    env: Vec<String>,
    /// The sandbox is kept on the volume.
    checkpoint: bool,
}

/// The limits that a sandbox runs under.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = Limits)]
pub(super) struct LimitsObject {
    memory_mb: u64,
    cpus: f64,
    pids: u32,
    disk_mb: u64,
}

/// A program in a sandbox.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = SandboxExecution)]
pub(super) struct ExecutionObject {
    id: String,
    running: bool,
}

impl ConfigurationObject {
    fn new(config: &SandboxConfig, image: Option<String>) -> Self {
        let limits = &config.limits;
        Self {
            image,
            limits: LimitsObject { memory_mb: limits.memory_mb, cpus: limits.cpus, pids: limits.pids, disk_mb: limits.disk_mb },
            network: config.network.iter().map(ToString::to_string).collect(),
            idle_timeout: config.idle_timeout.map(|timeout| timeout.as_secs_f64()),
            cwd: config.cwd.clone(),
            env: config.env.keys().cloned().collect(),
            checkpoint: config.checkpoint,
        }
    }
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
                SandboxState::Provisioning => SandboxStatus::Provisioning,
                SandboxState::Ready => SandboxStatus::Ready,
                SandboxState::Failed => SandboxStatus::Failed,
            },
            created_at: row.created_at,
            metadata: row.metadata,
            inputs: row.inputs,
            handle: row.handle,
            error: row.error,
            snapshot_id: row.snapshot_id.map(|id| id.to_string()),
            generation: None,
            configuration: None,
            execution: None,
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
            status: if sandbox.runs { SandboxStatus::Ready } else { SandboxStatus::Saved },
            created_at: sandbox.created_at,
            metadata: sandbox.metadata,
            inputs: BTreeMap::new(),
            handle: Map::new(),
            error: None,
            snapshot_id: sandbox.snapshot_id.map(|id| id.to_string()),
            generation: Some(sandbox.generation),
            configuration: sandbox.config.map(|config| ConfigurationObject::new(&config, sandbox.image)),
            execution: sandbox.execution.map(|seen| ExecutionObject { id: seen.id.to_string(), running: seen.running }),
            token,
        }
    }

    /// As it is now.
    pub(super) fn with(mut self, health: Health) -> Self {
        self.status = match health {
            Health::Provisioning => SandboxStatus::Provisioning,
            Health::Ready => SandboxStatus::Ready,
            Health::Failed(why) => {
                self.error = Some(why);
                SandboxStatus::Failed
            }
            Health::Gone => SandboxStatus::Gone,
        };
        self
    }

    /// Its host does not say how it is.
    pub(super) fn unknown(mut self, why: String) -> Self {
        self.error = Some(why);
        self
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum SnapshotStatus {
    Pending,
    Completed,
    Failed,
}

/// A snapshot. Its inputs and metadata are the sandbox's and are kept for a restore; they are shown too.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = Snapshot)]
pub(super) struct SnapshotObject {
    #[schema(format = Uuid)]
    pub(super) id: String,
    #[schema(format = Uuid)]
    pub(super) sandbox_id: String,
    pub(super) profile: String,
    pub(super) extension: String,
    pub(super) host: String,
    pub(super) status: SnapshotStatus,
    #[schema(value_type = String, format = DateTime)]
    pub(super) created_at: Timestamp,
    /// Bytes where it is kept; null: not known.
    #[schema(required = true)]
    pub(super) size_bytes: Option<u64>,
    /// More of it: of gVisor's own its name and what was written for it beside what was there already.
    pub(super) meta: Map,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(super) error: Option<String>,
    #[schema(value_type = Object)]
    pub(super) inputs: BTreeMap<String, InputValue>,
    pub(super) metadata: Map,
}

impl From<SnapshotRow> for SnapshotObject {
    fn from(row: SnapshotRow) -> Self {
        Self {
            id: row.id.to_string(),
            sandbox_id: row.sandbox_id.to_string(),
            profile: row.profile.to_string(),
            extension: row.extension.to_string(),
            host: row.host.to_string(),
            status: match row.status {
                SnapshotState::Pending => SnapshotStatus::Pending,
                SnapshotState::Completed => SnapshotStatus::Completed,
                SnapshotState::Failed => SnapshotStatus::Failed,
            },
            created_at: row.created_at,
            size_bytes: row.size_bytes,
            meta: row.meta,
            error: row.error,
            inputs: row.inputs,
            metadata: row.metadata,
        }
    }
}

/// What it holds beside its sandbox is told where that is known: what was written for it, and what was there already.
impl From<&SavedSnapshot> for SnapshotObject {
    fn from(snapshot: &SavedSnapshot) -> Self {
        let about = &snapshot.about;
        let mut meta: Map = about.name.iter().map(|name| ("name".to_owned(), name.clone())).collect();
        for (field, bytes) in
            [("raw_bytes", about.raw_bytes), ("written_bytes", about.saving.written_bytes), ("reused_bytes", about.saving.reused_bytes)]
        {
            meta.insert(field.to_owned(), bytes.to_string());
        }
        Self {
            id: snapshot.id.to_string(),
            sandbox_id: about.sandbox_id.to_string(),
            profile: "profile.gvisor".to_owned(),
            extension: "ext.gvisor".to_owned(),
            host: "local".to_owned(),
            status: SnapshotStatus::Completed,
            created_at: about.created_at,
            size_bytes: Some(about.stored_bytes),
            meta,
            error: None,
            inputs: BTreeMap::new(),
            metadata: about.state.config.metadata.clone(),
        }
    }
}

/// A checkpoint of a gVisor sandbox.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Checkpoint)]
pub(super) struct CheckpointObject {
    name: String,
    #[schema(format = Uuid)]
    sandbox_id: String,
    #[schema(value_type = String, format = DateTime)]
    created_at: Timestamp,
    /// The checkpoint before it.
    #[schema(required = true)]
    parent: Option<String>,
    /// The server made it by itself.
    automatic: bool,
    /// It is what an attach goes on from.
    latest: bool,
    generation: u64,
    /// Bytes on the volume, shared with others or not.
    size_bytes: u64,
    raw_bytes: u64,
    written_bytes: u64,
    reused_bytes: u64,
}

impl From<&SavedCheckpoint> for CheckpointObject {
    fn from(checkpoint: &SavedCheckpoint) -> Self {
        let about = &checkpoint.about;
        Self {
            name: checkpoint.name.to_string(),
            sandbox_id: about.sandbox_id.to_string(),
            created_at: about.created_at,
            parent: about.parent.map(|parent| parent.to_string()),
            automatic: about.automatic,
            latest: checkpoint.latest,
            generation: about.state.generation,
            size_bytes: about.stored_bytes,
            raw_bytes: about.raw_bytes,
            written_bytes: about.saving.written_bytes,
            reused_bytes: about.saving.reused_bytes,
        }
    }
}

/// The files of a sandbox, by a name.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = FilesystemSnapshot)]
pub(super) struct FilesystemObject {
    name: String,
    #[schema(value_type = String, format = DateTime)]
    created_at: Timestamp,
    /// Null: it was imported.
    #[schema(required = true)]
    sandbox_id: Option<String>,
    /// The digest of the image that they lie on; null: any.
    #[schema(required = true)]
    image: Option<String>,
    entries: u64,
    /// Bytes of all files, holes included.
    content_bytes: u64,
    /// Bytes on the volume, shared with others or not.
    size_bytes: u64,
    /// The fault of a damaged snapshot, which can't be used, and can be deleted and replaced. Only the name of such a snapshot is
    /// known; `created_at` is the time of its file.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    error: Option<String>,
}

impl From<&SavedFilesystem> for FilesystemObject {
    fn from(saved: &SavedFilesystem) -> Self {
        let about = &saved.about;
        Self {
            name: saved.name.to_string(),
            created_at: about.created_at,
            sandbox_id: about.sandbox_id.map(|id| id.to_string()),
            image: about.image.map(|image| image.to_string()),
            entries: about.entries,
            content_bytes: about.content_bytes,
            size_bytes: saved.stored_bytes,
            error: saved.damage.clone(),
        }
    }
}

/// What may be made.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Profile)]
pub(super) struct ProfileObject {
    name: String,
    extension: String,
    description: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    host: Option<String>,
    /// Whether its sandboxes can be snapshotted.
    snapshots: bool,
    inputs: BTreeMap<String, InputObject>,
    /// For the extension; not a user's to change.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(value_type = Object, required = false)]
    settings: BTreeMap<String, InputValue>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Input)]
pub(super) struct InputObject {
    /// `string`, `integer`, `number` or `boolean`.
    #[serde(rename = "type")]
    #[schema(value_type = String)]
    kind: InputType,
    description: String,
    required: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = serde_json::Value, required = false)]
    default: Option<InputValue>,
    /// If there are any, one of these.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<serde_json::Value>, required = false)]
    choices: Vec<InputValue>,
}

impl From<&Profile> for ProfileObject {
    fn from(profile: &Profile) -> Self {
        let inputs = profile.inputs.iter().map(|(name, spec)| {
            let spec = spec.clone();
            let input = InputObject {
                kind: spec.kind,
                description: spec.description,
                required: spec.required,
                default: spec.default,
                choices: spec.choices,
            };
            (name.clone(), input)
        });
        Self {
            name: profile.name.to_string(),
            extension: profile.extension.to_string(),
            description: profile.description.clone(),
            host: profile.host.as_ref().map(ToString::to_string),
            snapshots: profile.snapshots,
            inputs: inputs.collect(),
            settings: profile.settings.clone(),
        }
    }
}

/// Where sandboxes may be made. Names and kinds only: where a host is and how it is reached is not a client's to know.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Host)]
pub(super) struct HostObject {
    pub(super) name: String,
    /// `local` or `ssh`.
    pub(super) kind: String,
}

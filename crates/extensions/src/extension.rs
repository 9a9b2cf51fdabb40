//! The contract of an extension. docs/extension-sdk.md describes it for authors; [`crate::conformance`] checks it.

use std::collections::BTreeMap;

use async_trait::async_trait;
use sandboxer_protocol::SandboxId;
use serde::Serialize;

use crate::{ExtensionError, ExtensionName, Host, Inputs, Profile, SnapshotId};

const MAX_ENTRIES: usize = 64;
const MAX_KEY_BYTES: usize = 64;
const MAX_VALUE_BYTES: usize = 4096;

/// What an extension says about something it made: it is kept, given back to it, and shown to the owner. No secrets.
pub type Map = BTreeMap<String, String>;

/// A sandbox, as its extension is told of it. Its id is chosen by the server.
#[derive(Debug, Clone, Serialize)]
pub struct Sandbox {
    pub id: SandboxId,
    pub profile: Profile,
    pub inputs: Inputs,
    pub host: Host,
    pub metadata: Map,
    /// What `provision` or `restore_from_snapshot` returned. Empty where that has not ended well: what was begun must be found by the id.
    pub handle: Map,
}

/// How a sandbox is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    Provisioning,
    Ready,
    Failed(String),
    Gone,
}

/// Makes, watches and removes sandboxes of one kind.
///
/// Every method may be called at any time and in any order, also for a sandbox that another process of the server began; the id is
/// what names everything. None is cancelled by a client that goes away, and each has a deadline of its own.
#[async_trait]
pub trait SandboxExtension: Send + Sync {
    fn name(&self) -> ExtensionName;

    /// Everything that can be wrong with a request, before anything is made.
    async fn validate(&self, profile: &Profile, inputs: &Inputs, host: &Host) -> Result<(), ExtensionError>;

    /// Makes the sandbox and returns when it is ready. What it leaves when it fails is removed by `teardown`.
    async fn provision(&self, sandbox: &Sandbox) -> Result<Map, ExtensionError>;

    async fn status(&self, sandbox: &Sandbox) -> Result<Health, ExtensionError>;

    /// Removes the sandbox and everything of it but its snapshots. Idempotent: what is not there is removed.
    async fn teardown(&self, sandbox: &Sandbox) -> Result<(), ExtensionError>;

    async fn supports_snapshots(&self) -> Result<bool, ExtensionError> {
        Ok(false)
    }

    /// Saves the state of a ready sandbox, which goes on. What it returns is given to `restore_from_snapshot`; `size_bytes` among it is
    /// shown as the size.
    async fn snapshot(&self, _id: SnapshotId, _sandbox: &Sandbox) -> Result<Map, ExtensionError> {
        Err(no_snapshots(&self.name()))
    }

    /// Makes a sandbox from a snapshot, as `provision` does.
    async fn restore_from_snapshot(&self, _sandbox: &Sandbox, _snapshot: SnapshotId, _snapshot_meta: &Map) -> Result<Map, ExtensionError> {
        Err(no_snapshots(&self.name()))
    }

    /// Removes what a snapshot left on the host, also one that failed half-way. Idempotent.
    async fn delete_snapshot(&self, _id: SnapshotId, _host: &Host, _snapshot_meta: &Map) -> Result<(), ExtensionError> {
        Ok(())
    }
}

fn no_snapshots(name: &ExtensionName) -> ExtensionError {
    ExtensionError::unsupported(format!("{name} makes sandboxes that can't be snapshotted."))
}

/// Whether what an extension returned can be kept.
///
/// # Errors
/// It is too much of it.
pub fn check_map(what: &str, map: &Map) -> Result<(), ExtensionError> {
    let small = map.iter().all(|(key, value)| !key.is_empty() && key.len() <= MAX_KEY_BYTES && value.len() <= MAX_VALUE_BYTES);
    if map.len() > MAX_ENTRIES || !small {
        let bound = format!("{MAX_ENTRIES} entries, names of {MAX_KEY_BYTES} and values of {MAX_VALUE_BYTES} bytes are the most");
        return Err(ExtensionError::failed(format!("The extension returned a {what} that is too large: {bound}.")));
    }
    Ok(())
}

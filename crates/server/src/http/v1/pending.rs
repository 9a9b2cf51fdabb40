//! Snapshots of gVisor sandboxes that somebody did not wait for: being made, or failed. What is completed is on the volume.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::http::StatusCode;
use sandboxer_store::SnapshotId;
use tokio::time::Instant;

use super::{
    ApiError,
    extract::Of,
    objects::{SnapshotObject, SnapshotStatus},
};
use crate::workspaces::{NativeSandbox, may_see};

/// How long the failure of one is remembered.
const REMEMBER: Duration = Duration::from_secs(600);
/// How many are.
const MAX_PENDING: usize = 1000;

#[derive(Default)]
pub(super) struct Pending(Mutex<HashMap<SnapshotId, Entry>>);

struct Entry {
    owner: Option<String>,
    object: SnapshotObject,
    /// None: it is being made.
    failed: Option<Instant>,
}

impl Pending {
    /// Begins one, which goes on by itself.
    pub(super) fn begin(of: Of, sandbox: &NativeSandbox, name: Option<String>) -> Result<SnapshotObject, ApiError> {
        let (id, snapshot_id) = (sandbox.id, SnapshotId::random());
        let object = SnapshotObject {
            id: snapshot_id.to_string(),
            sandbox_id: id.to_string(),
            profile: "profile.gvisor".to_owned(),
            extension: "ext.gvisor".to_owned(),
            host: "local".to_owned(),
            status: SnapshotStatus::Pending,
            created_at: jiff::Timestamp::now(),
            size_bytes: None,
            meta: name.iter().map(|name| ("name".to_owned(), name.clone())).collect(),
            error: None,
            inputs: BTreeMap::new(),
            metadata: sandbox.metadata.clone(),
        };
        of.api.pending.add(snapshot_id, of.owner.clone(), object.clone())?;
        let api = Arc::clone(&of.api);
        tokio::spawn(async move {
            let made = api.native.take_snapshot(id, of.who(), name, Some(snapshot_id)).await;
            api.pending.settle(snapshot_id, made.err().map(|error| ApiError::from(error).message));
        });
        Ok(object)
    }

    fn add(&self, id: SnapshotId, owner: Option<String>, object: SnapshotObject) -> Result<(), ApiError> {
        let mut entries = self.lock();
        let now = Instant::now();
        entries.retain(|_, entry| entry.failed.is_none_or(|at| now.duration_since(at) < REMEMBER));
        if entries.len() >= MAX_PENDING {
            let message = "Too many snapshots are being made. Try again later.";
            return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limited", message));
        }
        entries.insert(id, Entry { owner, object, failed: None });
        Ok(())
    }

    fn settle(&self, id: SnapshotId, failed: Option<String>) {
        let mut entries = self.lock();
        match (failed, entries.get_mut(&id)) {
            (Some(why), Some(entry)) => {
                entry.object.status = SnapshotStatus::Failed;
                entry.object.error = Some(why);
                entry.failed = Some(Instant::now());
            }
            _ => drop(entries.remove(&id)),
        }
    }

    pub(super) fn get(&self, id: SnapshotId, who: Option<&str>) -> Option<SnapshotObject> {
        self.lock().get(&id).filter(|entry| may_see(entry.owner.as_deref(), who)).map(|entry| entry.object.clone())
    }

    pub(super) fn list(&self, who: Option<&str>) -> Vec<SnapshotObject> {
        let entries = self.lock();
        entries.values().filter(|entry| may_see(entry.owner.as_deref(), who)).map(|entry| entry.object.clone()).collect()
    }

    /// Whether one that failed is forgotten by this. One that is being made can't be deleted: it would come after its deletion.
    pub(super) fn forget(&self, id: SnapshotId, who: Option<&str>) -> Result<bool, ApiError> {
        let mut entries = self.lock();
        match entries.get(&id).filter(|entry| may_see(entry.owner.as_deref(), who)) {
            None => Ok(false),
            Some(entry) if entry.failed.is_none() => {
                Err(ApiError::new(StatusCode::CONFLICT, "not_now", "The snapshot is being made. Delete it when it is completed."))
            }
            Some(_) => Ok(entries.remove(&id).is_some()),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<SnapshotId, Entry>> {
        // A map is whole after each change.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

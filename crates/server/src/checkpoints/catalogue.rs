//! What there is on the volume, for those who look before they go back or copy: snapshots, and the checkpoints of a sandbox.
//!
//! A manifest never changes, so what was read of one is remembered for as long as it is there.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use futures_util::{StreamExt as _, stream};
use object_store::ObjectStoreExt as _;
use sandboxer_protocol::SandboxId;
use sandboxer_store::{CheckpointName, Error, Manifest, ManifestAt, SnapshotId};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tracing::warn;

use super::{Checkpoints, SavedState};

/// Manifests that are read at once.
const LOOKS_AT_ONCE: usize = 8;
/// Where a manifest says what the save did.
const SAVING: &str = "saving";
/// Where it says what it was made from, and `metadata.json` too.
const FROM: &str = "from";

/// What a save did, as its manifest tells it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Saving {
    /// Bytes that went to the volume.
    pub(crate) written_bytes: u64,
    /// Bytes of the sandbox that were there already.
    pub(crate) reused_bytes: u64,
}

impl Saving {
    /// As a part of a manifest's contract.
    pub(super) fn noted(self) -> Map<String, Value> {
        let noted = serde_json::to_value(self).map(|noted| (SAVING.to_owned(), noted));
        noted.into_iter().collect()
    }
}

/// What a sandbox, or a checkpoint, was made from that is not a checkpoint of the same sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Origin {
    /// The sandbox that was saved.
    pub(crate) sandbox_id: SandboxId,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) checkpoint: Option<CheckpointName>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) snapshot_id: Option<SnapshotId>,
}

impl Origin {
    pub(crate) fn of(manifest: &Manifest) -> Option<Self> {
        let sandbox_id = manifest.contract()?.sandbox_id;
        Some(match manifest.at() {
            ManifestAt::Checkpoint { name, .. } => Self { sandbox_id, checkpoint: Some(name), snapshot_id: None },
            ManifestAt::Snapshot { snapshot_id } => Self { sandbox_id, checkpoint: None, snapshot_id: Some(snapshot_id) },
            ManifestAt::Image { .. } | ManifestAt::Filesystem { .. } => return None,
        })
    }

    /// As a part of a manifest's contract, or of a sandbox's metadata.
    pub(super) fn noted(self) -> Map<String, Value> {
        let noted = serde_json::to_value(self).map(|noted| (FROM.to_owned(), noted));
        noted.into_iter().collect()
    }

    pub(super) fn read(noted: &Map<String, Value>) -> Option<Self> {
        Self::deserialize(noted.get(FROM)?).ok()
    }
}

/// What is known of something that was saved.
#[derive(Debug)]
pub(crate) struct About {
    pub(crate) sandbox_id: SandboxId,
    pub(crate) created_at: jiff::Timestamp,
    pub(crate) name: Option<String>,
    pub(crate) parent: Option<CheckpointName>,
    pub(crate) automatic: bool,
    pub(crate) raw_bytes: u64,
    /// Bytes on the volume, shared with others or not.
    pub(crate) stored_bytes: u64,
    pub(crate) saving: Saving,
    pub(crate) from: Option<Origin>,
    pub(crate) state: SavedState,
}

#[derive(Debug, Clone)]
pub(crate) struct SavedSnapshot {
    pub(crate) id: SnapshotId,
    pub(crate) about: Arc<About>,
}

#[derive(Debug, Clone)]
pub(crate) struct SavedCheckpoint {
    pub(crate) name: CheckpointName,
    /// It is what an attach goes on from.
    pub(crate) latest: bool,
    pub(crate) about: Arc<About>,
}

/// What was read of snapshots.
#[derive(Default)]
pub(super) struct Known(Mutex<HashMap<SnapshotId, Arc<About>>>);

impl Checkpoints {
    /// The manifest there, for somebody who may know of it.
    pub(super) async fn manifest_for(&self, at: ManifestAt, passes: impl Fn(Option<&str>) -> bool) -> Result<Option<Manifest>, String> {
        let manifest = match self.volume.manifest(at).await {
            Ok(manifest) => manifest,
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error.whole()),
        };
        let contract = manifest.contract().ok_or_else(|| format!("{at} is not that of a sandbox"))?;
        let state = SavedState::read(&contract.state).map_err(|why| format!("{at}: {why}"))?;
        Ok(passes(state.owner.as_deref()).then_some(manifest))
    }

    /// Whether it is there, for somebody who may know of it.
    pub(crate) async fn sees(&self, at: ManifestAt, passes: impl Fn(Option<&str>) -> bool) -> Result<bool, String> {
        Ok(self.manifest_for(at, passes).await?.is_some())
    }

    /// What is known of something that was saved, if it is there and can be read.
    pub(crate) async fn about(&self, at: ManifestAt) -> Result<Option<About>, String> {
        match self.manifest_for(at, |_| true).await? {
            Some(manifest) => About::of(&manifest).map(Some),
            None => Ok(None),
        }
    }

    pub(crate) async fn snapshot(&self, id: SnapshotId) -> Result<Option<SavedSnapshot>, String> {
        let known = self.known.0.lock().unwrap_or_else(PoisonError::into_inner).get(&id).cloned();
        let path = ManifestAt::Snapshot { snapshot_id: id };
        let about = match known {
            Some(about) if self.is_there(path).await? => about,
            _ => match self.about(path).await? {
                Some(about) => Arc::new(about),
                None => return Ok(None),
            },
        };
        Ok(Some(SavedSnapshot { id, about }))
    }

    /// Every snapshot that can be read. What can't is left to `store verify`.
    pub(crate) async fn snapshots(&self) -> Result<Vec<SavedSnapshot>, String> {
        let ids = self.volume.snapshots().await.map_err(|error| error.whole())?;
        let mut known = std::mem::take(&mut *self.known.0.lock().unwrap_or_else(PoisonError::into_inner));
        known.retain(|id, _| ids.binary_search(id).is_ok());
        let unknown = ids.iter().copied().filter(|id| !known.contains_key(id)).collect::<Vec<_>>();
        let looks = stream::iter(unknown).map(async |snapshot_id| (snapshot_id, self.about(ManifestAt::Snapshot { snapshot_id }).await));
        let looked: Vec<_> = looks.buffer_unordered(LOOKS_AT_ONCE).collect().await;
        for (id, about) in looked {
            match about {
                Ok(Some(about)) => drop(known.insert(id, Arc::new(about))),
                Ok(None) => {}
                Err(why) => warn!(why, "a snapshot can't be read"),
            }
        }
        let found = known.iter().map(|(id, about)| SavedSnapshot { id: *id, about: Arc::clone(about) }).collect();
        *self.known.0.lock().unwrap_or_else(PoisonError::into_inner) = known;
        Ok(found)
    }

    /// The checkpoints of a sandbox, oldest first, up to the one that its record names: a later one does not count yet.
    pub(crate) async fn checkpoints(&self, id: SandboxId, latest: Option<CheckpointName>) -> Result<Vec<SavedCheckpoint>, String> {
        let Some(latest) = latest else { return Ok(Vec::new()) };
        let names = self.volume.checkpoints(id).await.map_err(|error| error.whole())?;
        let looks = stream::iter(names.into_iter().filter(|name| *name <= latest))
            .map(async |name| (name, self.about(ManifestAt::Checkpoint { sandbox_id: id, name }).await));
        let looked: Vec<_> = looks.buffered(LOOKS_AT_ONCE).collect().await;
        let mut found = Vec::with_capacity(looked.len());
        for (name, about) in looked {
            match about {
                Ok(Some(about)) => found.push(SavedCheckpoint { name, latest: name == latest, about: Arc::new(about) }),
                Ok(None) => {}
                Err(why) => warn!(why, "a checkpoint can't be read"),
            }
        }
        Ok(found)
    }

    /// What the newest checkpoint says that can be read: going back is how a damaged one is left behind.
    pub(crate) async fn newest_readable(&self, id: SandboxId, latest: Option<CheckpointName>) -> Result<Option<Arc<About>>, String> {
        let Some(name) = latest else { return Ok(None) };
        match self.about(ManifestAt::Checkpoint { sandbox_id: id, name }).await {
            Ok(Some(about)) => Ok(Some(Arc::new(about))),
            Ok(None) | Err(_) => Ok(self.checkpoints(id, latest).await?.pop().map(|newest| newest.about)),
        }
    }

    /// From here on nobody can start from it. Its data goes when nothing else refers to it.
    pub(crate) async fn delete_snapshot(&self, snapshot_id: SnapshotId) -> Result<(), String> {
        let path = ManifestAt::Snapshot { snapshot_id }.path();
        match self.volume.store().delete(&path).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    pub(super) async fn is_there(&self, at: ManifestAt) -> Result<bool, String> {
        match self.volume.store().head(&at.path()).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(error.to_string()),
        }
    }
}

impl About {
    pub(crate) fn of(manifest: &Manifest) -> Result<Self, String> {
        let contract = manifest.contract().ok_or_else(|| format!("{} is not that of a sandbox", manifest.at()))?;
        // Those of older servers don't say.
        let saving = contract.other.get(SAVING).and_then(|saving| Saving::deserialize(saving).ok()).unwrap_or_default();
        Ok(Self {
            sandbox_id: contract.sandbox_id,
            created_at: contract.created_at,
            name: contract.name.clone(),
            parent: contract.parent,
            automatic: contract.automatic,
            raw_bytes: manifest.raw_bytes(),
            stored_bytes: manifest.stored_bytes(),
            saving,
            from: Origin::read(&contract.other),
            state: SavedState::read(&contract.state).map_err(|why| format!("{}: {why}", manifest.at()))?,
        })
    }
}

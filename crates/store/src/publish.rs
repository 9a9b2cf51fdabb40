//! The order in which a checkpoint becomes visible.
//!
//! ```text
//! Saver::save        packs, durable                          unreferenced: nobody reads them
//! Volume::prepare    the manifest, create-only, durable      complete, and nobody is told
//! the caller         the record's compare-and-swap           the commit: from here on it counts
//! Volume::follow     `latest`, then metadata.json            copies for people and tools
//! ```
//!
//! Each step is durable before the next begins. A process that dies between two leaves what the steps before made, and a reader never sees half a checkpoint.

use object_store::PutMode;
use sandboxer_protocol::SandboxId;

use crate::contract::Contract;
use crate::error::{Error, Result};
use crate::layout::{CheckpointName, ManifestAt, SnapshotId};
use crate::manifest::Manifest;
use crate::metadata::Metadata;
use crate::save::Saved;
use crate::volume::Volume;

/// So many others in one millisecond are a fault.
const MAX_NAME_TRIES: usize = 1000;

/// A checkpoint that is complete on the volume and that no record names yet.
#[derive(Debug)]
#[must_use = "it counts when the record names it"]
pub struct Prepared {
    pub sandbox_id: SandboxId,
    pub name: CheckpointName,
    pub manifest: Manifest,
}

impl Volume {
    /// Writes the manifest under a name later than `after` (what the record names as latest) and than all that is there, whatever the clock says.
    ///
    /// # Errors
    /// The contract is too large, the save took too long, or the volume can't be written.
    pub async fn prepare(&self, saved: &Saved, contract: Contract, after: Option<CheckpointName>) -> Result<Prepared> {
        let there = self.checkpoints(contract.sandbox_id).await?;
        self.prepare_behind(saved, contract, there.last().copied().max(after)).await
    }

    /// The same where it is known what was there when the save began: whoever holds the lease is alone in adding to it.
    ///
    /// # Errors
    /// As [`Volume::prepare`].
    pub async fn prepare_behind(&self, saved: &Saved, contract: Contract, mut last: Option<CheckpointName>) -> Result<Prepared> {
        let sandbox_id = contract.sandbox_id;
        let now = u64::try_from(contract.created_at.as_millisecond()).unwrap_or(0);
        for _ in 0..MAX_NAME_TRIES {
            let name = CheckpointName::after(last, now)
                .ok_or_else(|| Error::Invalid(format!("no checkpoint of {sandbox_id} can come after {last:?}")))?;
            let manifest = saved.describe(ManifestAt::Checkpoint { sandbox_id, name }, contract.clone())?;
            match self.commit(saved, &manifest, PutMode::Create).await {
                Ok(()) => return Ok(Prepared { sandbox_id, name, manifest }),
                Err(Error::Exists { .. }) => last = Some(name),
                Err(error) => return Err(error),
            }
        }
        Err(Error::Invalid(format!("{MAX_NAME_TRIES} names for a checkpoint of {sandbox_id} were taken")))
    }

    /// Brings the copies up to date, after the commit.
    ///
    /// # Errors
    /// The volume can't be written. The checkpoint counts all the same.
    pub async fn follow(&self, prepared: &Prepared, metadata: &Metadata) -> Result<()> {
        self.put_latest(prepared.sandbox_id, prepared.name).await?;
        self.put_metadata(prepared.sandbox_id, metadata).await
    }

    /// Writes a whole-sandbox snapshot's manifest, which is its commit: no record names it.
    ///
    /// # Errors
    /// As [`Volume::prepare`]; [`Error::Exists`] if the id is taken.
    pub async fn put_snapshot(&self, saved: &Saved, contract: Contract, snapshot_id: SnapshotId) -> Result<Manifest> {
        let manifest = saved.describe(ManifestAt::Snapshot { snapshot_id }, contract)?;
        self.commit(saved, &manifest, PutMode::Create).await?;
        Ok(manifest)
    }

    /// Writes the manifest, by which what was saved counts.
    pub(crate) async fn commit(&self, saved: &Saved, manifest: &Manifest, mode: PutMode) -> Result<()> {
        saved.intent.commit(manifest.path(), manifest.encode(self.key())?.into(), mode).await
    }
}

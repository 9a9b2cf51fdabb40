//! Everything on a volume at about one moment: which manifests there are, which of them go, and which packs the others need.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::{StreamExt, TryStreamExt, stream};
use sandboxer_protocol::SandboxId;

use super::Retention;
use crate::error::{Error, Result};
use crate::layout::{CheckpointName, ManifestAt, PackId, Tenant};
use crate::manifest::Manifest;
use crate::record::{ReadError, RecordStore, Stored};
use crate::volume::Volume;

/// Manifests that are read at once.
const READS_AT_ONCE: usize = 8;
/// Records of a bucket that are read at once.
const RECORDS_AT_ONCE: usize = 16;
/// Records that are listed at a time.
const PAGE: usize = 1000;

/// What a collection has to know of a manifest.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) packs: Vec<(Tenant, PackId)>,
    automatic: bool,
}

/// What was read of manifests, which never change: for as long as they are there.
#[derive(Debug, Default)]
pub(super) struct Known(Mutex<BTreeMap<ManifestAt, Arc<Facts>>>);

/// A manifest that is there. Without facts: it can't be read.
#[derive(Debug, Clone)]
pub(super) struct Found {
    pub(super) bytes: u64,
    pub(super) facts: std::result::Result<Arc<Facts>, String>,
}

/// A sandbox that was killed.
#[derive(Debug, Clone)]
pub(super) struct Ended {
    pub(super) id: SandboxId,
    pub(super) tombstone: Stored,
    /// It has files besides manifests.
    pub(super) has_files: bool,
}

#[derive(Debug, Default)]
pub(super) struct Scan {
    pub(super) manifests: BTreeMap<ManifestAt, Found>,
    /// Those that are not to stay.
    pub(super) goes: BTreeSet<ManifestAt>,
    pub(super) ended: Vec<Ended>,
    /// Sandboxes that have a record and were not killed, as far as can be told.
    pub(super) alive: BTreeSet<SandboxId>,
    /// Manifests that stay and can't be read: nobody knows what they need.
    pub(super) unreadable: Vec<String>,
    /// Records that can't be read: all of their sandboxes stays.
    pub(super) bad_records: Vec<String>,
}

impl Scan {
    pub(super) async fn of(volume: &Volume, records: &dyn RecordStore, retention: Retention, known: &Known) -> Result<Self> {
        let mut scan = Self::default();
        let (dirs, recorded) = if volume.is_far() {
            // One list of all, and the records while others are under way: a request for each sandbox, one after the other, would take hours.
            let all = volume.all_checkpoints().await?;
            let recorded = all_records(records).await?;
            let dirs: BTreeSet<SandboxId> = all.keys().copied().collect();
            let of = |(id, listed): (&SandboxId, &Vec<(CheckpointName, u64)>)| places(*id, listed);
            scan.read(volume, all.iter().flat_map(of).collect(), known).await?;
            let mut reads =
                stream::iter(all).map(|(id, listed)| async move { (id, listed, records.read(id).await) }).buffered(RECORDS_AT_ONCE);
            while let Some((id, listed, read)) = reads.next().await {
                scan.weigh(id, &listed, read, retention)?;
            }
            (dirs, recorded)
        } else {
            let dirs: BTreeSet<SandboxId> = volume.sandboxes().await?.into_iter().collect();
            let recorded = all_records(records).await?;
            for id in &dirs {
                let listed = volume.checkpoints_with_bytes(*id).await?;
                scan.read(volume, places(*id, &listed), known).await?;
                // After the listing: what it names is there, or is newer than all that was listed.
                scan.weigh(*id, &listed, records.read(*id).await, retention)?;
            }
            (dirs, recorded)
        };
        let without: Vec<SandboxId> = recorded.difference(&dirs).copied().collect();
        let at_once = if volume.is_far() { RECORDS_AT_ONCE } else { 1 };
        let mut reads = stream::iter(without).map(|id| async move { (id, records.read(id).await) }).buffered(at_once);
        while let Some((id, read)) = reads.next().await {
            match read {
                Ok(Some(tombstone)) if tombstone.record.tombstone.is_some() => {
                    scan.ended.push(Ended { id, tombstone, has_files: false });
                }
                Ok(None) => {}
                Ok(Some(_)) | Err(_) => drop(scan.alive.insert(id)),
            }
        }
        let snapshots = volume.snapshots_with_bytes().await?.into_iter();
        scan.read(volume, snapshots.map(|(snapshot_id, bytes)| (ManifestAt::Snapshot { snapshot_id }, bytes)).collect(), known).await?;
        let images = volume.images_with_bytes().await?.into_iter();
        scan.read(volume, images.map(|(digest, bytes)| (ManifestAt::Image { digest }, bytes)).collect(), known).await?;
        scan.read(volume, volume.filesystems_with_bytes().await?, known).await?;
        for (at, found) in &scan.manifests {
            if let (Err(why), false) = (&found.facts, scan.goes.contains(at)) {
                scan.unreadable.push(why.clone());
            }
        }
        known.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|at, _| scan.manifests.contains_key(at));
        Ok(scan)
    }

    /// The packs that manifests need, but for some of these.
    pub(super) fn needed(&self, without: &BTreeSet<ManifestAt>) -> BTreeSet<(Tenant, PackId)> {
        let stay = self.manifests.iter().filter(|(at, _)| !without.contains(at));
        stay.filter_map(|(_, found)| found.facts.as_ref().ok()).flat_map(|facts| facts.packs.iter().copied()).collect()
    }

    /// What a record says of the checkpoints that were listed before it was read.
    fn weigh(
        &mut self,
        id: SandboxId,
        listed: &[(CheckpointName, u64)],
        read: std::result::Result<Option<Stored>, ReadError>,
        retention: Retention,
    ) -> Result<()> {
        let names: Vec<CheckpointName> = listed.iter().map(|(name, _)| *name).collect();
        match read {
            Ok(Some(stored)) => self.settle(id, &names, stored, retention),
            // It was made and buried meanwhile, or nobody knows of it.
            Ok(None) => {}
            Err(ReadError::Bad(why)) => {
                self.alive.insert(id);
                self.bad_records.push(format!("locks/{id}.lock: {why}"));
            }
            Err(error @ ReadError::Unavailable(_)) => return Err(Error::Invalid(error.to_string())),
        }
        Ok(())
    }

    fn settle(&mut self, id: SandboxId, names: &[CheckpointName], stored: Stored, retention: Retention) {
        let at = |name: CheckpointName| ManifestAt::Checkpoint { sandbox_id: id, name };
        if stored.record.tombstone.is_some() {
            self.goes.extend(names.iter().map(|name| at(*name)));
            self.ended.push(Ended { id, tombstone: stored, has_files: true });
            return;
        }
        self.alive.insert(id);
        // One that can't be read counts as one that somebody asked for.
        let automatic = |name: CheckpointName| {
            let facts = self.manifests.get(&at(name)).and_then(|found| found.facts.as_ref().ok());
            facts.is_some_and(|facts| facts.automatic)
        };
        let there: Vec<_> =
            names.iter().filter(|name| self.manifests.contains_key(&at(**name))).map(|name| (*name, automatic(*name))).collect();
        self.goes.extend(retention.goes(&there, stored.record.latest).into_iter().map(at));
    }

    /// What goes while it is read is not there.
    async fn read(&mut self, volume: &Volume, places: Vec<(ManifestAt, u64)>, known: &Known) -> Result<()> {
        let reads = stream::iter(places).map(|(at, bytes)| async move {
            let remembered = known.0.lock().unwrap_or_else(PoisonError::into_inner).get(&at).cloned();
            if let Some(facts) = remembered {
                return Ok(Some((at, Found { bytes, facts: Ok(facts) })));
            }
            match volume.manifest(at).await {
                Ok(manifest) => {
                    let facts = Arc::new(Facts::of(&manifest));
                    // An image that was damaged is written again under its name, and a filesystem snapshot may be replaced.
                    if !matches!(at, ManifestAt::Image { .. } | ManifestAt::Filesystem { .. }) {
                        known.0.lock().unwrap_or_else(PoisonError::into_inner).insert(at, Arc::clone(&facts));
                    }
                    Ok(Some((at, Found { bytes, facts: Ok(facts) })))
                }
                Err(Error::NotFound { .. }) => Ok(None),
                Err(error @ Error::Damaged { .. }) => Ok(Some((at, Found { bytes, facts: Err(error.whole()) }))),
                Err(error) => Err(error),
            }
        });
        let found: Vec<_> = reads.buffered(READS_AT_ONCE).try_collect().await?;
        self.manifests.extend(found.into_iter().flatten());
        Ok(())
    }
}

impl Facts {
    fn of(manifest: &Manifest) -> Self {
        let tenant = manifest.tenant();
        Self {
            packs: manifest.packs().iter().map(|pack| (tenant, pack.id)).collect(),
            automatic: manifest.contract().is_some_and(|contract| contract.automatic),
        }
    }
}

fn places(id: SandboxId, listed: &[(CheckpointName, u64)]) -> Vec<(ManifestAt, u64)> {
    listed.iter().map(|(name, bytes)| (ManifestAt::Checkpoint { sandbox_id: id, name: *name }, *bytes)).collect()
}

async fn all_records(records: &dyn RecordStore) -> Result<BTreeSet<SandboxId>> {
    let mut found = BTreeSet::new();
    loop {
        let page = records.list(found.last().copied(), PAGE).await.map_err(|error| Error::Invalid(error.to_string()))?;
        let last = page.len() < PAGE;
        found.extend(page);
        if last {
            return Ok(found);
        }
    }
}

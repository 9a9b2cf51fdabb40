//! Walks everything on a volume and tells each fault with its file.

use std::collections::{HashMap, HashSet};

use object_store::path::Path;
use sandboxer_protocol::SandboxId;

use crate::error::{Error, Fault, Result};
use crate::layout::{self, CheckpointName, ManifestAt, PackId};
use crate::load::Loader;
use crate::manifest::{Chunk, Manifest, PackRef};
use crate::volume::Volume;

/// How closely to look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Manifests whole, packs by their size.
    Sizes,
    /// Every byte that a manifest refers to.
    Everything,
}

#[derive(Debug, Default)]
pub struct Report {
    pub sandboxes: usize,
    pub checkpoints: usize,
    pub snapshots: usize,
    /// Filesystem snapshots.
    pub filesystems: usize,
    pub images: usize,
    /// Packs that manifests refer to.
    pub packs: usize,
    pub read_bytes: u64,
    pub faults: Vec<Error>,
}

impl Report {
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.faults.is_empty()
    }
}

impl Volume {
    /// That all packs of a manifest are there and as long as it says.
    ///
    /// # Errors
    /// The first that is not.
    pub async fn check_packs(&self, manifest: &Manifest) -> Result<()> {
        match self.pack_faults(manifest).await?.into_iter().next() {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    /// The newest checkpoint before `before` that holds together as far as sizes tell: where to go back to when that one does not.
    ///
    /// # Errors
    /// The volume can't be listed.
    pub async fn intact_before(&self, sandbox_id: SandboxId, before: CheckpointName) -> Result<Option<CheckpointName>> {
        for name in self.checkpoints(sandbox_id).await?.into_iter().rev().filter(|name| *name < before) {
            if let Ok(manifest) = self.checkpoint(sandbox_id, name).await
                && self.check_packs(&manifest).await.is_ok()
            {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }

    async fn pack_faults(&self, manifest: &Manifest) -> Result<Vec<Error>> {
        let sizes: HashMap<_, _> =
            self.sizes_of(manifest.tenant(), manifest.packs().iter().map(|pack| pack.id).collect()).await?.into_iter().collect();
        let fault = |pack: &PackRef| {
            let needed_by = manifest.at().to_string();
            let fault = match sizes.get(&pack.id).copied().flatten() {
                None => Fault::MissingPack { needed_by },
                Some(found) if found != pack.bytes => Fault::TornPack { expected: pack.bytes, found, needed_by },
                Some(_) => return None,
            };
            Some(Error::damaged(&layout::pack(manifest.tenant(), pack.id), fault))
        };
        Ok(manifest.packs().iter().filter_map(fault).collect())
    }
}

/// Looks at all that is on the loader's volume. `named`: the checkpoints that records name. Data shared by many is read once unless a fault was found in it.
///
/// # Errors
/// The volume can't be listed. What is wrong with a file is in the report.
pub async fn verify(loader: &Loader, named: &[(SandboxId, CheckpointName)], depth: Depth) -> Result<Report> {
    let volume = loader.volume();
    let mut walk = Walk { loader, depth, report: Report::default(), packs: HashSet::new(), seen: HashSet::new(), bad: HashSet::new() };
    for sandbox_id in volume.sandboxes().await? {
        walk.report.sandboxes += 1;
        let names = volume.checkpoints(sandbox_id).await?;
        for name in &names {
            walk.report.checkpoints += 1;
            walk.manifest(ManifestAt::Checkpoint { sandbox_id, name: *name }).await?;
        }
        walk.copies(sandbox_id, &names).await?;
    }
    for (sandbox_id, name) in named {
        if !volume.checkpoints(*sandbox_id).await?.contains(name) {
            walk.fault(&layout::locks().join(format!("{sandbox_id}.lock")), Fault::NamesNothing { names: name.to_string() });
        }
    }
    for snapshot_id in volume.snapshots().await? {
        walk.report.snapshots += 1;
        walk.manifest(ManifestAt::Snapshot { snapshot_id }).await?;
    }
    for at in volume.all_filesystems().await? {
        walk.report.filesystems += 1;
        walk.manifest(at).await?;
    }
    for digest in volume.images().await? {
        walk.report.images += 1;
        walk.manifest(ManifestAt::Image { digest }).await?;
    }
    walk.report.packs = walk.packs.len();
    Ok(walk.report)
}

struct Walk<'a> {
    loader: &'a Loader,
    depth: Depth,
    report: Report,
    packs: HashSet<PackId>,
    /// Chunks already read and found right, by pack, place and content.
    seen: HashSet<[u8; 16]>,
    bad: HashSet<PackId>,
}

impl Walk<'_> {
    fn fault(&mut self, file: &Path, fault: Fault) {
        self.report.faults.push(Error::damaged(file, fault));
    }

    async fn manifest(&mut self, at: ManifestAt) -> Result<()> {
        let volume = self.loader.volume();
        let manifest = match volume.manifest(at).await {
            Ok(manifest) => manifest,
            Err(error @ Error::Damaged { .. }) => {
                self.report.faults.push(error);
                return Ok(());
            }
            // Deleted since it was listed.
            Err(Error::NotFound { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        self.packs.extend(manifest.packs().iter().map(|pack| pack.id));
        let mut faults = volume.pack_faults(&manifest).await?;
        if self.depth == Depth::Everything && faults.is_empty() {
            faults = self.data(&manifest).await;
        }
        if !faults.is_empty() {
            self.bad.extend(manifest.packs().iter().map(|pack| pack.id));
        }
        self.report.faults.append(&mut faults);
        Ok(())
    }

    async fn data(&mut self, manifest: &Manifest) -> Vec<Error> {
        let doubtful = manifest.packs().iter().any(|pack| self.bad.contains(&pack.id));
        let mark = |chunk: &Chunk| {
            let mut hasher = blake3::Hasher::new();
            let pack = manifest.packs().get(chunk.pack as usize).map_or([0; 16], |pack| *pack.id.as_bytes());
            hasher.update(&pack).update(&chunk.offset.to_le_bytes()).update(&chunk.hash.0);
            let mut mark = [0; 16];
            hasher.finalize_xof().fill(&mut mark);
            mark
        };
        let mut taken = HashSet::new();
        let seen = &self.seen;
        let (read, faults) =
            self.loader.faults(manifest, |chunk| (doubtful || !seen.contains(&mark(chunk))) && taken.insert(mark(chunk))).await;
        self.report.read_bytes += read;
        if faults.is_empty() {
            self.seen.extend(taken);
        }
        faults
    }

    async fn copies(&mut self, sandbox_id: SandboxId, names: &[CheckpointName]) -> Result<()> {
        let volume = self.loader.volume();
        match volume.latest(sandbox_id).await {
            // It may be newer than the list.
            Ok(Some(name)) if !names.contains(&name) && !volume.checkpoints(sandbox_id).await?.contains(&name) => {
                self.fault(&layout::latest(sandbox_id), Fault::NamesNothing { names: name.to_string() })
            }
            Ok(_) => {}
            Err(error @ Error::Damaged { .. }) => self.report.faults.push(error),
            Err(error) => return Err(error),
        }
        match volume.metadata(sandbox_id).await {
            Ok(_) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error @ Error::Damaged { .. }) => {
                self.report.faults.push(error);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

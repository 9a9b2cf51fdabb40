//! Who needs how much of a volume.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::error::{Error, Result};
use crate::layout::{ManifestAt, PackId};
use crate::manifest::{Codec, Manifest};
use crate::volume::Volume;

/// Bytes in packs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Share {
    /// What nobody else needs.
    pub own: u64,
    /// What others need too.
    pub shared: u64,
}

/// All that manifests need of a volume.
#[derive(Debug)]
pub struct Usage<K> {
    pub shares: BTreeMap<K, Share>,
    /// What several need, counted once.
    pub shared: u64,
    /// Bytes of all packs, needed or not.
    pub packs: u64,
    /// Manifests that can't be read.
    pub unreadable: Vec<String>,
}

impl<K> Usage<K> {
    /// What is needed, counted once.
    #[must_use]
    pub fn needed(&self) -> u64 {
        self.shares.values().map(|share| share.own).sum::<u64>() + self.shared
    }
}

impl Volume {
    /// Who needs what, by whatever `who` says of each manifest; none: it does not count.
    ///
    /// # Errors
    /// The volume can't be listed or read.
    pub async fn usage<K: Ord + Send>(&self, who: impl Fn(&Manifest) -> Option<K> + Send + Sync) -> Result<Usage<K>> {
        let mut places: BTreeMap<K, HashMap<(PackId, u32), u32>> = BTreeMap::new();
        let mut unreadable = Vec::new();
        for at in self.all_manifests().await? {
            let manifest = match self.manifest(at).await {
                Ok(manifest) => manifest,
                Err(Error::NotFound { .. }) => continue,
                Err(error @ Error::Damaged { .. }) => {
                    unreadable.push(error.whole());
                    continue;
                }
                Err(error) => return Err(error),
            };
            let Some(who) = who(&manifest) else { continue };
            let own = places.entry(who).or_default();
            for chunk in manifest.chunks().iter().filter(|chunk| chunk.codec != Codec::Zero) {
                if let Some(pack) = manifest.packs().get(chunk.pack as usize) {
                    own.insert((pack.id, chunk.offset), chunk.stored);
                }
            }
        }
        let (mut once, mut several) = (HashSet::new(), HashMap::new());
        for own in places.values() {
            for (place, stored) in own {
                if !once.insert(*place) {
                    several.insert(*place, u64::from(*stored));
                }
            }
        }
        let share = |own: HashMap<(PackId, u32), u32>| {
            let mut share = Share::default();
            for (place, stored) in own {
                *(if several.contains_key(&place) { &mut share.shared } else { &mut share.own }) += u64::from(stored);
            }
            share
        };
        Ok(Usage {
            shares: places.into_iter().map(|(who, own)| (who, share(own))).collect(),
            shared: several.values().sum(),
            packs: self.all_packs().await?.values().sum(),
            unreadable,
        })
    }

    async fn all_manifests(&self) -> Result<Vec<ManifestAt>> {
        let mut found = Vec::new();
        for sandbox_id in self.sandboxes().await? {
            found.extend(self.checkpoints(sandbox_id).await?.into_iter().map(|name| ManifestAt::Checkpoint { sandbox_id, name }));
        }
        found.extend(self.snapshots().await?.into_iter().map(|snapshot_id| ManifestAt::Snapshot { snapshot_id }));
        found.extend(self.all_filesystems().await?);
        found.extend(self.images().await?.into_iter().map(|digest| ManifestAt::Image { digest }));
        Ok(found)
    }
}

//! Which chunks of a tenant are on the volume, as far as this process has seen: bounded, and only ever a hint. What a save relies on is checked before it counts.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use crate::layout::{PackId, Tenant};
use crate::manifest::{ChunkHash, Codec, Manifest};

/// Where a chunk lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) pack: PackId,
    pub(crate) offset: u32,
    pub(crate) stored: u32,
    pub(crate) raw: u32,
    pub(crate) codec: Codec,
}

/// Together 65,536 chunks, some 5 GiB of data, in about 6 MiB.
const MAX_YOUNG: usize = 32 << 10;

type Key = (Tenant, ChunkHash);

/// Shared by all saves and loads of a process.
#[derive(Debug, Clone, Default)]
pub struct ChunkIndex {
    inner: Arc<Mutex<Generations>>,
}

#[derive(Debug, Default)]
struct Generations {
    young: HashMap<Key, Place>,
    old: HashMap<Key, Place>,
}

impl ChunkIndex {
    pub(crate) fn find(&self, tenant: Tenant, hash: &ChunkHash) -> Option<Place> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (tenant, *hash);
        if let Some(place) = inner.young.get(&key) {
            return Some(*place);
        }
        let place = inner.old.remove(&key)?;
        inner.insert(key, place);
        Some(place)
    }

    pub(crate) fn learn(&self, tenant: Tenant, chunks: impl IntoIterator<Item = (ChunkHash, Place)>) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        for (hash, place) in chunks {
            inner.insert((tenant, hash), place);
        }
    }

    /// What a manifest that was read refers to.
    pub fn learn_manifest(&self, manifest: &Manifest) {
        self.learn(manifest.tenant(), places(manifest));
    }

    /// These packs are gone.
    pub(crate) fn forget(&self, packs: &HashSet<PackId>) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.young.retain(|_, place| !packs.contains(&place.pack));
        inner.old.retain(|_, place| !packs.contains(&place.pack));
    }
}

impl Generations {
    fn insert(&mut self, key: Key, place: Place) {
        if self.young.len() >= MAX_YOUNG {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(key, place);
    }
}

/// The chunks of a manifest with where they lie.
pub(crate) fn places(manifest: &Manifest) -> impl Iterator<Item = (ChunkHash, Place)> {
    manifest.chunks().iter().filter(|chunk| chunk.codec != Codec::Zero).filter_map(|chunk| {
        let pack = manifest.packs().get(chunk.pack as usize)?.id;
        Some((chunk.hash, Place { pack, offset: chunk.offset, stored: chunk.stored, raw: chunk.raw, codec: chunk.codec }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(n: u32) -> Place {
        Place { pack: PackId::from_bytes([n as u8; 16]), offset: n, stored: 1, raw: 2, codec: Codec::Zstd }
    }

    fn hash(n: u32) -> ChunkHash {
        ChunkHash(*blake3::hash(&n.to_le_bytes()).as_bytes())
    }

    #[test]
    fn it_is_bounded_and_keeps_what_is_used() {
        let (index, tenant) = (ChunkIndex::default(), Tenant::open());
        for n in 0..300_000 {
            index.learn(tenant, [(hash(n), place(n))]);
            assert!(index.find(tenant, &hash(0)).is_some());
        }
        let inner = index.inner.lock().unwrap();
        assert!(inner.young.len() + inner.old.len() <= 2 * MAX_YOUNG);
    }

    #[test]
    fn a_tenant_does_not_find_what_another_has() {
        let index = ChunkIndex::default();
        index.learn(Tenant::of_key(b"a"), [(hash(1), place(1))]);
        assert!(index.find(Tenant::of_key(b"b"), &hash(1)).is_none());
        index.forget(&HashSet::from([place(1).pack]));
        assert!(index.find(Tenant::of_key(b"a"), &hash(1)).is_none());
    }
}

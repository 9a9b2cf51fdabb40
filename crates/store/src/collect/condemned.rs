//! The lists of packs that collectors mean to remove. Whoever writes relies on none of them.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use object_store::PutMode;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::layout::{self, PackId, Tenant};
use crate::record::{InstanceId, Nonce};
use crate::volume::Volume;

const FORMAT: u32 = 1;
/// One list has at most so many packs, some 4 MiB of text; the rest is for the next collection.
pub(super) const MAX_PACKS: usize = 100_000;
const MAX_LIST_BYTES: usize = 8 << 20;

/// What one collector means to remove.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct List {
    format: u32,
    pub(super) by: InstanceId,
    packs: BTreeMap<Tenant, BTreeSet<PackId>>,
}

impl List {
    pub(super) fn new(by: InstanceId, packs: impl IntoIterator<Item = (Tenant, PackId)>) -> Self {
        let mut list = Self { format: FORMAT, by, packs: BTreeMap::new() };
        for (tenant, pack) in packs {
            list.packs.entry(tenant).or_default().insert(pack);
        }
        list
    }

    pub(super) fn packs(&self) -> impl Iterator<Item = (Tenant, PackId)> + '_ {
        self.packs.iter().flat_map(|(tenant, packs)| packs.iter().map(|pack| (*tenant, *pack)))
    }

    pub(super) async fn put(&self, volume: &Volume, name: Nonce) -> Result<()> {
        let path = layout::condemned(name);
        let bytes = serde_json::to_vec(self).map_err(|error| Error::Invalid(format!("{path}: {error}")))?;
        volume.put(&path, bytes.into(), PutMode::Create).await
    }

    /// None: it can't be understood.
    fn parse(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok().filter(|list: &Self| list.format == FORMAT)
    }
}

/// All lists that are there, and by whom; none for one that can't be understood. One that goes meanwhile is passed over: its collector is done.
pub(super) async fn lists(volume: &Volume) -> Result<BTreeMap<Nonce, Option<List>>> {
    let mut found = BTreeMap::new();
    for name in volume.condemned_lists().await? {
        let list = match volume.read(&layout::condemned(name), MAX_LIST_BYTES).await {
            Ok(bytes) => List::parse(&bytes),
            Err(Error::NotFound { .. }) => continue,
            Err(Error::Damaged { .. }) => None,
            Err(error) => return Err(error),
        };
        found.insert(name, list);
    }
    Ok(found)
}

/// The packs that a writer must not rely on.
#[derive(Debug, Clone, Default)]
pub struct Condemned {
    packs: HashSet<(Tenant, PackId)>,
    /// A list could not be understood.
    everything: bool,
}

impl Condemned {
    pub(super) async fn read(volume: &Volume) -> Result<Self> {
        let mut condemned = Self::default();
        for list in lists(volume).await?.into_values() {
            match list {
                Some(list) => condemned.packs.extend(list.packs()),
                None => condemned.everything = true,
            }
        }
        Ok(condemned)
    }

    #[must_use]
    pub fn has(&self, tenant: Tenant, pack: PackId) -> bool {
        self.everything || self.packs.contains(&(tenant, pack))
    }

    /// Nothing is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.everything && self.packs.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn what_cannot_be_understood_condemns_everything() {
        let volume = Volume::on(Arc::new(object_store::memory::InMemory::new()));
        let (tenant, pack) = (Tenant::open(), PackId::random());
        assert!(Condemned::read(&volume).await.unwrap().is_empty());
        List::new("i".parse().unwrap(), [(tenant, pack)]).put(&volume, Nonce::from_bits(1)).await.unwrap();
        let condemned = Condemned::read(&volume).await.unwrap();
        assert!(condemned.has(tenant, pack) && !condemned.has(tenant, PackId::random()) && !condemned.has(Tenant::images(), pack));
        for text in ["", "{}", r#"{"format":2,"by":"i","packs":{}}"#, r#"{"format":1,"by":"i","packs":{"x":[]}}"#] {
            volume.put(&layout::condemned(Nonce::from_bits(2)), text.into(), PutMode::Overwrite).await.unwrap();
            assert!(Condemned::read(&volume).await.unwrap().has(tenant, PackId::random()), "{text}");
        }
    }
}

//! Names of sandboxes that are gone, in the lists of their tenants.

use std::collections::BTreeSet;

use super::{Collector, Scan};
use crate::layout::{KeptName, Tenant};

impl Collector {
    /// `kept` was read before the scan. What can't be removed now goes another time: whoever lists looks at the record of each.
    pub(super) async fn forget_the_gone(&self, kept: &BTreeSet<(Tenant, KeptName)>, scan: &Scan) {
        for (tenant, name) in kept.iter().filter(|(_, name)| !scan.alive.contains(&name.id())) {
            // A list may be behind, so the record itself is asked.
            let gone = match self.records.read(name.id()).await {
                Ok(None) => true,
                Ok(Some(stored)) => stored.record.tombstone.is_some(),
                Err(_) => false,
            };
            if gone {
                let _ = self.volume.remove_kept(*tenant, *name).await;
            }
        }
    }
}

//! How much of the volume each tenant may take.
//!
//! The bytes of all packs of the tenant count, needed or not, as a list of them tells. An old list is made
//! anew, and a save adds its own packs meanwhile. Other instances write as
//! well, so that a tenant may exceed its quota by what they write within [`FRESH`].

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use crate::{
    error::{Error, Result},
    layout::Tenant,
    volume::Volume,
};

/// How long a list of packs is good for.
const FRESH: Duration = Duration::from_secs(30);

#[derive(Debug, Clone)]
pub(super) struct Quota {
    limit: u64,
    used: Arc<Mutex<HashMap<Tenant, (u64, Instant)>>>,
}

impl Quota {
    pub(super) fn new(limit: u64) -> Self {
        Self { limit, used: Arc::default() }
    }

    /// Checks that the tenant may write at all.
    pub(super) async fn check(&self, volume: &Volume, tenant: Tenant) -> Result<()> {
        let known = self.used.lock().unwrap_or_else(PoisonError::into_inner).get(&tenant).copied();
        let used = match known.filter(|(_, at)| at.elapsed() < FRESH) {
            Some((used, _)) => used,
            None => {
                let used = volume.packs_bytes(tenant).await?;
                self.used.lock().unwrap_or_else(PoisonError::into_inner).insert(tenant, (used, Instant::now()));
                used
            }
        };
        if used >= self.limit { Err(self.exceeded()) } else { Ok(()) }
    }

    /// Checks that the tenant may write so much more, and counts it.
    pub(super) fn add(&self, tenant: Tenant, bytes: u64) -> Result<()> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let (used, _) = used.entry(tenant).or_insert((0, Instant::now()));
        if used.saturating_add(bytes) > self.limit {
            return Err(self.exceeded());
        }
        *used += bytes;
        Ok(())
    }

    /// The next save lists the packs anew.
    pub(super) fn forget(&self, tenant: Tenant) {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).remove(&tenant);
    }

    fn exceeded(&self) -> Error {
        Error::Quota { limit: self.limit }
    }
}

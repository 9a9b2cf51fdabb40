//! What an API key has on the volume, for lists: a part at a time, oldest first.
//!
//! The volume has a list of names for each tenant. What is told of a sandbox comes from its record and from what was saved last, of which as much as a list needs is
//! remembered: the next list reads the records alone.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError},
};

use futures_util::{StreamExt as _, stream};
use sandboxer_protocol::SandboxId;
use sandboxer_store::{CheckpointName, KeptName};
use tracing::warn;

use super::{About, Checkpoints, tenant};

/// Records that are read at once.
const LOOKS_AT_ONCE: usize = 8;
/// Sandboxes that are looked at for one part of a list.
const MOST_LOOKS: usize = 1000;
/// Sandboxes of which something is remembered, each with some KiB at most.
const MOST_REMEMBERED: usize = 1024;

/// A sandbox that is not in memory here.
#[derive(Debug, Clone)]
pub(crate) struct Rest {
    pub(crate) id: SandboxId,
    /// An instance has it now.
    pub(crate) held: bool,
    pub(crate) noted: Arc<Noted>,
}

/// What was saved of it last says so much.
#[derive(Debug)]
pub(crate) struct Noted {
    owner: Option<String>,
    pub(crate) created_at: jiff::Timestamp,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) generation: u64,
}

impl From<&About> for Noted {
    fn from(about: &About) -> Self {
        let state = &about.state;
        Self {
            owner: state.owner.clone(),
            created_at: state.created_at,
            metadata: state.config.metadata.clone(),
            generation: state.generation,
        }
    }
}

/// A part of a list.
#[derive(Debug, Default)]
pub(crate) struct Resters {
    pub(crate) found: Vec<Rest>,
    /// Behind this one nobody looked; none: these are all.
    pub(crate) until: Option<KeptName>,
    /// Those whose record is damaged, so that nothing can be said of them.
    pub(crate) damaged: Vec<SandboxId>,
}

#[derive(Default)]
pub(super) struct Resting(Mutex<HashMap<SandboxId, (CheckpointName, Arc<Noted>)>>);

impl Resting {
    fn get(&self, id: SandboxId, latest: CheckpointName) -> Option<Arc<Noted>> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(&id).filter(|(name, _)| *name == latest).map(|(_, noted)| Arc::clone(noted))
    }

    fn put(&self, id: SandboxId, latest: CheckpointName, noted: Arc<Noted>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MOST_REMEMBERED {
            known.clear();
        }
        known.insert(id, (latest, noted));
    }
}

impl Checkpoints {
    /// Sandboxes of this owner behind `after`, but for those that `here` knows: until there are more than `enough`, or as many were looked at as one request may.
    pub(crate) async fn resters(
        &self,
        owner: Option<&str>,
        after: Option<KeptName>,
        enough: usize,
        here: impl Fn(SandboxId) -> bool + Sync,
    ) -> Result<Resters, String> {
        let names = self.volume.kept(tenant(owner), after, MOST_LOOKS).await.map_err(|error| error.whole())?;
        if names.is_empty() {
            // So is the list of a directory that is no longer there, which is not the same.
            self.leases.records().list(None, 1).await.map_err(|error| error.to_string())?;
        }
        let last = names.last().copied().filter(|_| names.len() >= MOST_LOOKS);
        let here = &here;
        let looks = stream::iter(names).map(|name| async move {
            let rest = if here(name.id()) { Ok(None) } else { self.rester(name.id(), owner).await };
            (name, rest)
        });
        let mut looks = looks.buffered(LOOKS_AT_ONCE);
        let (mut found, mut damaged) = (Vec::new(), Vec::new());
        while let Some((name, rest)) = looks.next().await {
            match rest {
                Ok(rest) => found.extend(rest),
                Err(why) => {
                    // A record that can't be read keeps no others from the list, unless none can be read.
                    self.answers().await?;
                    warn!(why, id = %name.id(), "the record of a sandbox can't be read, so it is not listed");
                    damaged.push(name.id());
                }
            }
            if found.len() > enough {
                return Ok(Resters { found, until: Some(name), damaged });
            }
        }
        Ok(Resters { found, until: last, damaged })
    }

    /// As its record says. A list of names may say anything: whose it is says what was saved.
    async fn rester(&self, id: SandboxId, owner: Option<&str>) -> Result<Option<Rest>, String> {
        if self.unburied(id).is_some() {
            return Ok(None);
        }
        let record = match self.look(id).await {
            Ok(Some(stored)) => stored.record,
            Ok(None) => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        let Some(latest) = record.latest.filter(|_| record.tombstone.is_none()) else { return Ok(None) };
        let noted = match self.resting.get(id, latest) {
            Some(noted) => noted,
            None => {
                let Some(about) = self.newest_readable(id, Some(latest)).await? else { return Ok(None) };
                let noted = Arc::new(Noted::from(&*about));
                self.resting.put(id, latest, Arc::clone(&noted));
                noted
            }
        };
        let is_theirs = noted.owner.as_deref() == owner;
        Ok(is_theirs.then(|| Rest { id, held: record.owner.is_some(), noted }))
    }
}

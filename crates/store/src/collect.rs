//! Removing what nobody needs, beside any number of writers and other collectors.
//!
//! ```text
//! writer      intent ── reads the condemned lists ── packs ── manifest ── intent gone
//! collector   scan ── condemned list ── waits for the intents that are there ── scan ── removes what both scans agree on ── list gone
//! ```
//!
//! Why nothing is lost by it is argued step by step in `docs/design/2026-11-16-collecting-packs.md`. What the argument stands on: an intent comes before the
//! first look at what others wrote; a list comes before the look at the intents; a list stays until its own collector has removed the last thing by it.

mod bells;
mod condemned;
mod faults;
mod intent;
mod kept;
mod retention;
mod scan;
mod turn;
mod usage;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use object_store::{ObjectStoreExt, PutMode};
use sandboxer_protocol::SandboxId;

#[cfg(feature = "planted-faults")]
pub use self::faults::CollectFault;
pub use self::{
    condemned::Condemned,
    faults::CollectFaults,
    intent::{Intent, LONGEST_SAVE, Writer},
    retention::Retention,
    usage::{Share, Usage},
};
use self::{
    condemned::List,
    scan::{Known, Scan},
};
use crate::error::{Error, Result};
use crate::layout::{self, KeptName, ManifestAt, PackId, Tenant};
use crate::lease::{Clock, Moment};
use crate::record::{InstanceId, Nonce, RecordStore};
use crate::volume::Volume;

/// What is kept for the list of a collection on a full volume.
const RESERVE_BYTES: usize = 64 << 10;
/// What a pack takes in a list.
const PACK_LINE_BYTES: usize = 36;
/// How often a collector looks whether a writer is done.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How a collection goes about it.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    pub retention: Retention,
    /// What a writer may take whose intent does not say.
    pub longest_save: Duration,
    /// How long tombstones stay, counted from when this collector first saw them; none: for ever.
    pub remember: Option<Duration>,
}

impl Default for Terms {
    fn default() -> Self {
        Self { retention: Retention::default(), longest_save: LONGEST_SAVE, remember: None }
    }
}

/// What a collection removed, or would remove.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    pub packs: u64,
    pub pack_bytes: u64,
    pub checkpoints: u64,
    pub checkpoint_bytes: u64,
    /// Sandboxes that were killed and of which nothing but the tombstone is left.
    pub sandboxes: u64,
    pub tombstones: u64,
    /// Files that writers left half done.
    pub staged: u64,
    pub staged_bytes: u64,
    /// Writers that were taken for dead.
    pub dead_writers: u64,
    /// Packs that were condemned and turned out to be in use.
    pub spared: u64,
    /// What can't be read. While there is any, no pack goes: nobody knows which it needs.
    pub unreadable: Vec<String>,
    /// Records that can't be read: all of their sandboxes stays.
    pub bad_records: Vec<String>,
    /// Another instance was at it, and nothing was done.
    pub left_to_another: bool,
}

impl Collected {
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pack_bytes + self.checkpoint_bytes + self.staged_bytes
    }

    /// Both, one after the other.
    fn and(self, next: Self) -> Self {
        Self {
            packs: self.packs + next.packs,
            pack_bytes: self.pack_bytes + next.pack_bytes,
            checkpoints: self.checkpoints + next.checkpoints,
            checkpoint_bytes: self.checkpoint_bytes + next.checkpoint_bytes,
            sandboxes: self.sandboxes + next.sandboxes,
            tombstones: self.tombstones + next.tombstones,
            staged: self.staged + next.staged,
            staged_bytes: self.staged_bytes + next.staged_bytes,
            dead_writers: self.dead_writers + next.dead_writers,
            spared: self.spared + next.spared,
            ..next
        }
    }

    fn warned_by(self, scan: &Scan) -> Self {
        Self { unreadable: scan.unreadable.clone(), bad_records: scan.bad_records.clone(), ..self }
    }
}

/// Collects on one volume. What it has seen it remembers from one collection to the next.
pub struct Collector {
    volume: Volume,
    records: Arc<dyn RecordStore>,
    clock: Arc<dyn Clock>,
    me: InstanceId,
    terms: Terms,
    faults: CollectFaults,
    known: Known,
    seen: Mutex<Seen>,
}

/// When things were first seen, by this collector's clock.
#[derive(Debug, Default)]
struct Seen {
    intents: BTreeMap<Nonce, Moment>,
    lists: BTreeMap<Nonce, Moment>,
    tombstones: BTreeMap<SandboxId, Moment>,
    /// Lists that have no name yet, or never got one.
    staged_lists: BTreeMap<PathBuf, Moment>,
    /// Who had collected last when this one looked; none: it has not looked.
    turn: Option<Option<Nonce>>,
}

/// What a first scan finds.
struct Plan {
    scan: Scan,
    /// Packs that nothing needs, with their bytes.
    idle: BTreeMap<(Tenant, PackId), u64>,
    staged: BTreeMap<PathBuf, u64>,
    /// Sandboxes in the lists of their tenants, before the scan.
    kept: BTreeSet<(Tenant, KeptName)>,
}

impl Collector {
    #[must_use]
    pub fn new(volume: Volume, records: Arc<dyn RecordStore>, clock: Arc<dyn Clock>, me: InstanceId, terms: Terms) -> Self {
        let faults = CollectFaults::default();
        Self { volume, records, clock, me, terms, faults, known: Known::default(), seen: Mutex::default() }
    }

    #[must_use]
    pub fn with_faults(mut self, faults: CollectFaults) -> Self {
        self.faults = faults;
        self
    }

    /// What a collection would remove now. Nothing is changed.
    ///
    /// # Errors
    /// The volume can't be read.
    pub async fn plan(&self) -> Result<Collected> {
        let plan = self.first_scan().await?;
        let mut would = Collected::default().warned_by(&plan.scan);
        for at in &plan.scan.goes {
            would.checkpoints += 1;
            would.checkpoint_bytes += plan.scan.manifests.get(at).map_or(0, |found| found.bytes);
        }
        would.packs = plan.idle.len() as u64;
        would.pack_bytes = plan.idle.values().sum();
        would.sandboxes = plan.scan.ended.iter().filter(|ended| ended.has_files).count() as u64;
        would.staged = plan.staged.len() as u64;
        would.staged_bytes = plan.staged.values().sum();
        Ok(would)
    }

    /// The same unless another instance seems to be at it.
    ///
    /// # Errors
    /// As [`Collector::collect`].
    pub async fn collect_unless_another_does(&self) -> Result<Collected> {
        let lists = condemned::lists(&self.volume).await?;
        let now = self.clock.now();
        let patience = self.terms.longest_save * 2;
        let busy = {
            let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            seen.lists.retain(|name, _| lists.contains_key(name));
            let foreign = |list: &Option<List>| list.as_ref().is_some_and(|list| list.by != self.me);
            // Each is noted, also behind the first that counts.
            let fresh = lists.iter().filter(|(name, list)| now.since(*seen.lists.entry(**name).or_insert(now)) < patience && foreign(list));
            fresh.count() > 0
        };
        if busy {
            return Ok(Collected { left_to_another: true, ..Collected::default() });
        }
        self.collect().await
    }

    /// Removes what nobody needs. May be dropped at any point: the next collection, by whomever, goes on with it.
    ///
    /// # Errors
    /// The volume can't be read or written. What was removed until then is gone for good reason.
    pub async fn collect(&self) -> Result<Collected> {
        let (first, no_room) = self.collect_once().await?;
        let Some(full) = no_room else { return Ok(first) };
        // What went meanwhile may have made room for a list.
        let (second, no_room) = self.collect_once().await?;
        let done = first.and(second);
        if no_room.is_some() && done.bytes() == 0 { Err(full) } else { Ok(done) }
    }

    /// With the error, if there was no room for a list, so that packs had to stay.
    async fn collect_once(&self) -> Result<(Collected, Option<Error>)> {
        let plan = self.first_scan().await?;
        let mut done = Collected::default().warned_by(&plan.scan);
        let (list, no_room) = match self.condemn(&plan.idle).await {
            Ok(list) => (list, None),
            Err(error) if error.is_full() => (None, Some(error)),
            Err(error) => return Err(error),
        };
        if list.is_none() && plan.scan.goes.is_empty() && plan.scan.ended.is_empty() && plan.staged.is_empty() {
            done.dead_writers += self.remove_dead_intents().await?;
            self.remove_spent_lists().await?;
            self.forget_the_gone(&plan.kept, &plan.scan).await;
            return Ok((done, no_room));
        }
        let scan = if self.faults.waits_for_nobody() {
            plan.scan
        } else {
            self.settle().await;
            done.dead_writers += self.wait_for_writers().await?;
            self.settle().await;
            let again = Scan::of(&self.volume, &*self.records, self.terms.retention, &self.known).await?;
            done = done.warned_by(&again);
            Scan { goes: again.goes.intersection(&plan.scan.goes).copied().collect(), ..again }
        };
        for at in &scan.goes {
            self.remove(&at.path()).await?;
            done.checkpoints += 1;
            done.checkpoint_bytes += scan.manifests.get(at).map_or(0, |found| found.bytes);
        }
        if let Some((name, packs)) = list {
            let needed = scan.needed(&scan.goes);
            for (tenant, pack) in packs {
                if !scan.unreadable.is_empty() || needed.contains(&(tenant, pack)) {
                    done.spared += 1;
                    continue;
                }
                self.remove(&layout::pack(tenant, pack)).await?;
                done.packs += 1;
                done.pack_bytes += plan.idle.get(&(tenant, pack)).copied().unwrap_or(0);
            }
            // The last: nothing is removed by it any more, and what was removed is seen to be gone.
            self.settle().await;
            self.remove(&layout::condemned(name)).await?;
        }
        self.forget_the_gone(&plan.kept, &scan).await;
        self.remove_ended(&scan, &mut done).await?;
        for (path, bytes) in self.volume.staged().await?.into_iter().filter(|(path, _)| plan.staged.contains_key(path)) {
            self.volume.remove_staged(path).await?;
            done.staged += 1;
            done.staged_bytes += bytes;
        }
        self.remove_spent_lists().await?;
        self.remove_old_bells().await;
        self.keep_reserve().await;
        Ok((done, no_room))
    }

    /// What writers have not named yet. Collectors do not wait for each other: a list that another has not named yet is left to it for as long as one that it has.
    async fn staged(&self) -> Result<BTreeMap<PathBuf, u64>> {
        let mut staged = self.volume.staged().await?;
        let now = self.clock.now();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.staged_lists.retain(|path, _| staged.contains_key(path));
        staged.retain(|path, _| {
            let is_list = path.parent().is_some_and(|dir| dir.ends_with("collect/condemned"));
            !is_list || now.since(*seen.staged_lists.entry(path.clone()).or_insert(now)) >= self.terms.longest_save * 2
        });
        Ok(staged)
    }

    async fn first_scan(&self) -> Result<Plan> {
        let staged = self.staged().await?;
        // Before the records: each of them had one then.
        let kept = self.volume.all_kept().await?;
        // The packs first: a manifest that comes later may only need what is there by then.
        let packs = self.volume.all_packs().await?;
        let scan = Scan::of(&self.volume, &*self.records, self.terms.retention, &self.known).await?;
        let needed = scan.needed(&scan.goes);
        let idle = if scan.unreadable.is_empty() {
            packs.into_iter().filter(|(pack, _)| !needed.contains(pack)).take(condemned::MAX_PACKS).collect()
        } else {
            BTreeMap::new()
        };
        Ok(Plan { scan, idle, staged, kept })
    }

    /// Puts a list on the volume of what may be removed, and returns it. On a full volume it is as long as there is room.
    async fn condemn(&self, idle: &BTreeMap<(Tenant, PackId), u64>) -> Result<Option<(Nonce, Vec<(Tenant, PackId)>)>> {
        if idle.is_empty() {
            return Ok(None);
        }
        let mut packs: Vec<_> = idle.keys().copied().collect();
        // The largest make the most room.
        packs.sort_by_key(|pack| std::cmp::Reverse(idle.get(pack).copied()));
        let mut has_reserve = true;
        loop {
            let name = self.clock.nonce();
            let list = List::new(self.me.clone(), packs.iter().copied());
            match list.put(&self.volume, name).await {
                Ok(()) => return Ok(Some((name, packs))),
                Err(error) if error.is_full() && has_reserve => {
                    has_reserve = false;
                    packs.truncate(RESERVE_BYTES / 2 / PACK_LINE_BYTES);
                    let _ = self.volume.store().delete(&layout::reserve()).await;
                }
                Err(error) if error.is_full() && packs.len() > 1 => packs.truncate(packs.len() / 2),
                Err(error) => {
                    // It may have got there for all that is known; it names nothing that is removed by it.
                    let _ = self.volume.store().delete(&layout::condemned(name)).await;
                    return Err(error);
                }
            }
        }
    }

    /// Until each writer is done or dead that is there now. The count of the dead.
    async fn wait_for_writers(&self) -> Result<u64> {
        let mut waiting: BTreeSet<Nonce> = self.volume.intents().await?.into_iter().collect();
        let mut dead = 0;
        loop {
            let there: BTreeSet<Nonce> = self.volume.intents().await?.into_iter().collect();
            waiting.retain(|name| there.contains(name));
            dead += self.bury_dead(&there).await?;
            if waiting.is_empty() {
                return Ok(dead);
            }
            self.clock.sleep_until(self.clock.now() + LOOK_EVERY.min(self.terms.longest_save / 4)).await;
        }
    }

    async fn remove_dead_intents(&self) -> Result<u64> {
        let there = self.volume.intents().await?.into_iter().collect();
        self.bury_dead(&there).await
    }

    /// Removes the intents that were there for too long. What goes is seen to be gone at the next look.
    async fn bury_dead(&self, there: &BTreeSet<Nonce>) -> Result<u64> {
        let mut dead = 0;
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).intents.retain(|name, _| there.contains(name));
        for name in there {
            let now = self.clock.now();
            let since = *self.seen.lock().unwrap_or_else(PoisonError::into_inner).intents.entry(*name).or_insert(now);
            let words = match intent::read(&self.volume, *name).await {
                Ok(words) => words,
                Err(Error::NotFound { .. }) => continue,
                Err(error) => return Err(error),
            };
            let patience = words.as_ref().map_or(self.terms.longest_save, intent::Words::longest) * 2;
            let waited = match &words {
                Some(words) if self.faults.believes_wall_clocks() => self.clock.unix_time().saturating_sub(words.timestamp()),
                _ => now.since(since),
            };
            if waited >= patience {
                self.remove(&layout::intent(*name)).await?;
                dead += 1;
            }
        }
        Ok(dead)
    }

    /// What is left of sandboxes that were killed.
    async fn remove_ended(&self, scan: &Scan, done: &mut Collected) -> Result<()> {
        let now = self.clock.now();
        for ended in &scan.ended {
            let whole = scan
                .manifests
                .keys()
                .any(|at| matches!(at, ManifestAt::Checkpoint { sandbox_id, .. } if *sandbox_id == ended.id && !scan.goes.contains(at)));
            if whole {
                continue;
            }
            if ended.has_files {
                self.remove(&layout::latest(ended.id)).await?;
                self.remove(&layout::metadata(ended.id)).await?;
                done.sandboxes += 1;
            }
            let Some(remember) = self.terms.remember else { continue };
            let since = *self.seen.lock().unwrap_or_else(PoisonError::into_inner).tombstones.entry(ended.id).or_insert(now);
            // Its directory may have been listed before it had one: what is there then is removed by the next collection, which needs the tombstone for that.
            if now.since(since) >= remember
                && self.volume.checkpoints(ended.id).await.is_ok_and(|there| there.is_empty())
                && self.records.remove(ended.id, &ended.tombstone).await.is_ok()
            {
                done.tombstones += 1;
            }
        }
        let ended: BTreeSet<SandboxId> = scan.ended.iter().map(|ended| ended.id).collect();
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).tombstones.retain(|id, _| ended.contains(id));
        Ok(())
    }

    /// Lists that others left, once nothing is there that they name. Their collectors may still mean to remove it, and nobody uses it.
    async fn remove_spent_lists(&self) -> Result<()> {
        let lists = condemned::lists(&self.volume).await?;
        if lists.is_empty() {
            return Ok(());
        }
        // After the lists: what they name was there before them, and is seen unless it is gone.
        self.settle().await;
        let there = self.volume.all_packs().await?;
        self.settle().await;
        for (name, list) in lists {
            let spent = list.is_some_and(|list| !list.packs().any(|pack| there.contains_key(&pack)));
            if spent || self.faults.removes_foreign_lists() {
                self.remove(&layout::condemned(name)).await?;
            }
        }
        Ok(())
    }

    /// Where names may be seen late, until all are seen that are there now.
    async fn settle(&self) {
        let late = self.volume.seen_late();
        if !late.is_zero() {
            self.clock.sleep_until(self.clock.now() + late).await;
        }
    }

    /// Leaves something on the volume that makes room for a list when it is full. What can't be had now is had another time.
    pub async fn keep_reserve(&self) {
        let path = layout::reserve();
        if matches!(self.volume.store().head(&path).await, Err(object_store::Error::NotFound { .. })) {
            let _ = self.volume.put(&path, vec![0; RESERVE_BYTES].into(), PutMode::Create).await;
        }
    }

    async fn remove(&self, path: &object_store::path::Path) -> Result<()> {
        match self.volume.store().delete(path).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(Error::volume("remove", path, error)),
        }
    }
}

//! What an observer who sees everything knows, and what must never happen.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
};

use sandboxer_store::{
    CheckpointName,
    record::{InstanceId, Record},
};

use crate::world::{World, lock};

/// A sandbox's state: every checkpoint that was ever taken of it on the way here.
pub(crate) type Lineage = Vec<CheckpointName>;

/// How often things happened, so that one can see that they do.
#[derive(Debug, Default, Clone, Copy)]
pub struct Counts {
    pub acts: u64,
    pub epochs: u64,
    pub published: u64,
    pub acknowledged: u64,
    pub handed_over: u64,
    pub taken_over: u64,
    pub frozen: u64,
    pub lost: u64,
    pub crashes: u64,
    pub running: u64,
    pub in_use: u64,
    pub in_progress: u64,
    pub cannot_save: u64,
    pub other_answers: u64,
}

impl Counts {
    pub fn add(&mut self, other: &Self) {
        self.acts += other.acts;
        self.epochs += other.epochs;
        self.published += other.published;
        self.acknowledged += other.acknowledged;
        self.handed_over += other.handed_over;
        self.taken_over += other.taken_over;
        self.frozen += other.frozen;
        self.lost += other.lost;
        self.crashes += other.crashes;
        self.running += other.running;
        self.in_use += other.in_use;
        self.in_progress += other.in_progress;
        self.cannot_save += other.cannot_save;
        self.other_answers += other.other_answers;
    }
}

pub(crate) struct Truth {
    world: Arc<World>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What is durable on the volume.
    checkpoints: BTreeMap<CheckpointName, Lineage>,
    published: BTreeSet<CheckpointName>,
    acknowledged: BTreeSet<CheckpointName>,
    /// The newest epoch that someone acted in, and who.
    acted: Option<(u64, usize)>,
    counts: Counts,
}

impl Truth {
    pub(crate) fn new(world: &Arc<World>) -> Self {
        Self { world: Arc::clone(world), state: Mutex::default() }
    }

    pub(crate) fn counts(&self) -> Counts {
        lock(&self.state).counts
    }

    pub(crate) fn count(&self, count: impl FnOnce(&mut Counts)) {
        count(&mut lock(&self.state).counts);
    }

    /// Something of the sandbox that others could see: an owner serves it, with everything that was ever acknowledged in it.
    pub(crate) fn acts(&self, node: usize, epoch: u64, lineage: &Lineage) {
        let mut state = lock(&self.state);
        state.counts.acts += 1;
        if state.acted.is_none_or(|(newest, _)| newest != epoch)
            && let Some(lost) = state.acknowledged.iter().find(|acknowledged| !lineage.contains(acknowledged))
        {
            self.world.violated(format!("{lost} was acknowledged, and node {node} acts in epoch {epoch} and knows nothing of it"));
        }
        match state.acted {
            Some((newest, by)) if epoch < newest => {
                self.world.violated(format!("node {node} acted in epoch {epoch} after node {by} acted in epoch {newest}"));
            }
            Some((newest, by)) if epoch == newest && by != node => {
                self.world.violated(format!("nodes {by} and {node} both acted in epoch {epoch}"));
            }
            _ => {
                state.counts.epochs += u64::from(state.acted.is_none_or(|(newest, _)| newest != epoch));
                state.acted = Some((epoch, node));
            }
        }
    }

    /// Makes a checkpoint durable under the first free name from `wanted` on.
    pub(crate) fn store(&self, wanted: CheckpointName, lineage: Lineage) -> CheckpointName {
        let mut state = lock(&self.state);
        let mut name = wanted;
        while state.checkpoints.contains_key(&name) {
            name = CheckpointName::after(Some(name), 0).unwrap_or(name);
        }
        state.checkpoints.insert(name, lineage);
        name
    }

    /// Reads a checkpoint back.
    pub(crate) fn load(&self, name: CheckpointName) -> Lineage {
        let Some(mut lineage) = lock(&self.state).checkpoints.get(&name).cloned() else {
            self.world.violated(format!("{name} is to be restored and is not on the volume"));
            return Lineage::new();
        };
        lineage.push(name);
        lineage
    }

    pub(crate) fn acknowledged(&self, name: CheckpointName) {
        let mut state = lock(&self.state);
        state.counts.acknowledged += 1;
        state.acknowledged.insert(name);
        if !state.published.contains(&name) {
            self.world.violated(format!("{name} was acknowledged and never published"));
        }
    }

    pub(crate) fn anything_acknowledged(&self) -> bool {
        !lock(&self.state).acknowledged.is_empty()
    }

    /// A swap by `node`, whose instance is `name`, has taken effect.
    pub(crate) fn swapped(&self, node: usize, name: &InstanceId, before: Option<&Record>, after: &Record) {
        let mut state = lock(&self.state);
        let Some(before) = before else { return };
        let as_owner = after.renewed != before.renewed || after.latest != before.latest || after.owner != before.owner;
        if as_owner && after.epoch == before.epoch && before.owner.as_ref() != Some(name) {
            let owner = before.owner.as_ref().map_or("nobody", |owner| owner.as_str());
            self.world.violated(format!("node {node} changed, as an owner, what {owner} holds in epoch {}", before.epoch));
        }
        if after.sequence != before.sequence + 1 || after.epoch < before.epoch {
            self.world.violated("the record's counters went back");
        }
        if before.tombstone.is_some() && after.tombstone.is_none() {
            self.world.violated("a tombstone was removed");
        }
        if after.epoch > before.epoch {
            let count = if before.owner.is_some() { &mut state.counts.taken_over } else { &mut state.counts.handed_over };
            *count += 1;
        } else if after.owner != before.owner && after.owner.is_some() {
            self.world.violated("a new owner did not raise the epoch");
        }
        if after.latest == before.latest {
            return;
        }
        state.counts.published += 1;
        let Some(latest) = after.latest else {
            self.world.violated("the record forgot its checkpoint");
            return;
        };
        state.published.insert(latest);
        match state.checkpoints.get(&latest) {
            None => self.world.violated(format!("the record names {latest}, which is not on the volume")),
            Some(lineage) => {
                if let Some(before) = before.latest.filter(|before| !lineage.contains(before)) {
                    self.world.violated(format!("{latest} was published after {before}, of which it knows nothing"));
                }
            }
        }
    }
}

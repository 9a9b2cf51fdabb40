//! Collection against writers: several nodes save, fork, go back, kill, delete and collect on one volume, while some of them die, stand still, or are late.
//!
//! What runs is what production runs: intents, condemned lists, scans, retention and removal (`sandboxer_store::collect`), manifests and records. Only files are
//! missing: a save is the packs that it writes and those that it relies on.
//!
//! What is checked whenever something gets to the volume or leaves it:
//! - every pack that a manifest names is there, for as long as the manifest is;
//! - what a record names is there;
//! - in the end, when everything works again, nothing is there that nobody needs.

mod node;
mod store;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use sandboxer_store::collect::{CollectFaults, Retention};

use self::{node::Node, store::Shared};
use crate::{
    network::Kept,
    world::{Executor, World},
};

/// What a save may take.
const LONGEST: Duration = Duration::from_secs(20);
const REMEMBER: Duration = Duration::from_secs(30);
const RETENTION: Retention = Retention { checkpoints: 2, automatic: 1 };

/// How often things happened, so that one can see that they do.
#[derive(Debug, Default, Clone, Copy)]
pub struct CollectionCounts {
    pub saves: u64,
    pub late_saves: u64,
    pub published: u64,
    pub forks: u64,
    pub written_anew: u64,
    pub kills: u64,
    pub deleted: u64,
    pub collections: u64,
    pub packs_removed: u64,
    pub spared: u64,
    pub dead_writers: u64,
    pub crashes: u64,
}

impl CollectionCounts {
    pub fn add(&mut self, other: &Self) {
        self.saves += other.saves;
        self.late_saves += other.late_saves;
        self.published += other.published;
        self.forks += other.forks;
        self.written_anew += other.written_anew;
        self.kills += other.kills;
        self.deleted += other.deleted;
        self.collections += other.collections;
        self.packs_removed += other.packs_removed;
        self.spared += other.spared;
        self.dead_writers += other.dead_writers;
        self.crashes += other.crashes;
    }
}

/// What came of one seed.
pub struct CollectionOutcome {
    pub seed: u64,
    pub counts: CollectionCounts,
    /// What must never happen, and did.
    pub violation: Option<String>,
}

/// Runs one seed in a directory.
#[must_use]
pub fn run_collection(seed: u64, faults: CollectFaults, trace: bool) -> CollectionOutcome {
    run_collection_on(Kept::Directory, seed, faults, trace)
}

/// Runs one seed.
#[must_use]
pub fn run_collection_on(kept: Kept, seed: u64, faults: CollectFaults, trace: bool) -> CollectionOutcome {
    let count = 2 + (seed % 3) as usize;
    let world = World::new(seed ^ 0xc011_ec70_0000_0000, count, trace);
    let shared = Shared::new(&world, kept);
    let nodes: Vec<_> = (0..count).map(|index| Node::new(index, &shared, faults)).collect();
    let length = world.random(|rng| rng.millis(40_000..130_000));
    let done = Arc::new(AtomicBool::new(false));
    let play = Play { world: Arc::clone(&world), shared: Arc::clone(&shared), nodes, done: Arc::clone(&done) };
    world.spawn(None, Box::pin(async move { play.go(length).await }));
    let until = length + LONGEST * 100;
    Executor::default().run(&world, until, || done.load(Ordering::Relaxed));
    if !done.load(Ordering::Relaxed) {
        world.violated("it never came to an end");
    }
    CollectionOutcome { seed, counts: shared.counts(), violation: world.violation() }
}

struct Play {
    world: Arc<World>,
    shared: Arc<Shared>,
    nodes: Vec<Arc<Node>>,
    done: Arc<AtomicBool>,
}

impl Play {
    async fn go(self, length: Duration) {
        for node in &self.nodes {
            node.start();
        }
        self.trouble(length).await;
        self.world.note(|| "everything works again".to_owned());
        self.shared.calm_down();
        for node in &self.nodes {
            node.stop();
            if self.world.is_dead(node.index) {
                self.world.revive(node.index);
            } else {
                self.world.end_stall(node.index);
            }
        }
        // What is under way ends, or is taken for dead.
        self.world.sleep(LONGEST * 3).await;
        let last = Node::new(0, &self.shared, CollectFaults::default()).newcomer();
        for pause in [REMEMBER * 2, LONGEST * 3, Duration::ZERO] {
            if last.collect().await.is_err() {
                self.world.violated("a collection fails on a good day");
            }
            // A writer that died is taken for dead by who has seen its intent for long enough.
            self.world.sleep(pause).await;
        }
        self.check();
        self.done.store(true, Ordering::Relaxed);
    }

    /// Breaks things until `length` is over.
    async fn trouble(&self, length: Duration) {
        while self.world.now() < length {
            self.world.sleep(self.world.random(|rng| rng.millis(500..15_000))).await;
            let (what, victim) = self.world.random(|rng| (rng.within(0..100), rng.index(self.nodes.len())));
            match what {
                0..35 => self.crash(victim).await,
                35..65 => {
                    let length = self.world.random(|rng| rng.millis(500..90_000));
                    self.world.note(|| format!("{victim}: stops for {length:?}"));
                    self.world.stall(victim, length);
                }
                _ => {
                    let jump = self.world.random(|rng| rng.within(0..7_200_000) as i64 - 3_600_000);
                    self.nodes[victim].clock.jump(jump);
                }
            }
        }
    }

    async fn crash(&self, victim: usize) {
        if self.world.is_dead(victim) {
            return;
        }
        let (polls, back) = self.world.random(|rng| (rng.within(1..120) as u32, rng.millis(50..20_000)));
        self.world.doom(victim, polls);
        let patience = self.world.now() + Duration::from_secs(60);
        while !self.world.is_dead(victim) && self.world.now() < patience {
            self.world.sleep(Duration::from_millis(20)).await;
        }
        self.shared.count(|counts| counts.crashes += 1);
        self.world.note(|| format!("{victim}: dies"));
        let node = Arc::clone(&self.nodes[victim]);
        self.world.after(
            back,
            Box::new(move |world| {
                if world.is_dead(node.index) {
                    world.revive(node.index);
                    node.start();
                }
            }),
        );
    }

    /// Nothing is left that nobody needs.
    fn check(&self) {
        let (there, needed) = (self.shared.below("packs/"), self.shared.needed());
        if let Some(pack) = there.difference(&needed).next() {
            self.world.violated(format!("nobody needs {pack}, and it is still there"));
        }
        if let Some(intent) = self.shared.below("collect/intents/").first() {
            self.world.violated(format!("{intent} is of nobody, and is still there"));
        }
        for manifest in self.shared.below("").iter().filter(|path| path.as_ref().contains("/checkpoints/")) {
            let id = manifest.parts().next().and_then(|id| id.as_ref().parse().ok());
            let record = id.and_then(|id| self.shared.records.read_now(id));
            if record.is_none_or(|stored| stored.record.tombstone.is_some()) {
                self.world.violated(format!("{manifest} is of a killed sandbox, and is still there"));
            }
        }
    }
}

//! A sandbox on a node: a lineage instead of a memory, and sleeps instead of runsc.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use sandboxer_store::{
    CheckpointName,
    lease::handoff::{Consent, Ending, Host, Stance},
    record::InstanceId,
};

use crate::{
    truth::{Lineage, Truth},
    world::{World, lock},
};

pub(crate) struct SimHost {
    world: Arc<World>,
    truth: Arc<Truth>,
    node: usize,
    /// Percent of saves and restores that fail.
    failing: u64,
    /// Whether an attached client gives way.
    yields: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    running: bool,
    frozen: bool,
    client: bool,
    lineage: Lineage,
}

impl SimHost {
    pub(crate) fn new(world: &Arc<World>, truth: &Arc<Truth>, node: usize, failing: u64, yields: bool) -> Arc<Self> {
        Arc::new(Self { world: Arc::clone(world), truth: Arc::clone(truth), node, failing, yields, state: Mutex::default() })
    }

    pub(crate) fn start(&self) {
        lock(&self.state).running = true;
    }

    pub(crate) fn is_running(&self) -> bool {
        lock(&self.state).running
    }

    /// Whether the guest goes on by itself.
    pub(crate) fn is_awake(&self) -> bool {
        let state = lock(&self.state);
        state.running && !state.frozen
    }

    pub(crate) fn lineage(&self) -> Lineage {
        lock(&self.state).lineage.clone()
    }

    /// True if there was no other client.
    pub(crate) fn attach_client(&self) -> bool {
        !std::mem::replace(&mut lock(&self.state).client, true)
    }

    pub(crate) fn has_client(&self) -> bool {
        lock(&self.state).client
    }

    pub(crate) fn detach_client(&self) {
        lock(&self.state).client = false;
    }

    async fn takes(&self, range: std::ops::Range<u64>) {
        self.world.sleep(self.world.random(|rng| rng.millis(range))).await;
    }

    fn fails(&self) -> bool {
        self.world.random(|rng| rng.chance(self.failing))
    }
}

#[async_trait]
impl Host for SimHost {
    type Capture = Lineage;

    async fn asked_for(&self, by: &InstanceId) -> Consent {
        self.takes(1..20).await;
        let mut state = lock(&self.state);
        let consent = if state.client && !self.yields { Consent::InUse } else { Consent::HandOver };
        if consent == Consent::HandOver {
            state.client = false;
        }
        self.world.note(|| format!("{}: asked by {by}: {consent:?}", self.node));
        consent
    }

    async fn freeze(&self) {
        self.takes(5..50).await;
        self.truth.count(|counts| counts.frozen += 1);
        lock(&self.state).frozen = true;
    }

    async fn thaw(&self) {
        self.takes(1..10).await;
        lock(&self.state).frozen = false;
    }

    async fn capture(&self, stance: Stance) -> Result<Lineage, String> {
        if stance == Stance::Still {
            lock(&self.state).frozen = true;
        }
        self.takes(5..300).await;
        if self.fails() {
            return Err("runsc would not".to_owned());
        }
        Ok(lock(&self.state).lineage.clone())
    }

    async fn persist(&self, capture: Lineage, epoch: u64, wanted: CheckpointName) -> Result<CheckpointName, String> {
        self.takes(5..800).await;
        if self.fails() {
            return Err("the volume is full".to_owned());
        }
        let name = self.truth.store(wanted, capture);
        lock(&self.state).lineage.push(name);
        self.world.note(|| format!("{}: {name} of epoch {epoch} is durable", self.node));
        Ok(name)
    }

    async fn published(&self, _: CheckpointName) {
        self.takes(1..5).await;
    }

    async fn restore(&self, name: CheckpointName, epoch: u64) -> Result<(), String> {
        self.takes(20..600).await;
        if self.fails() {
            return Err("runsc would not".to_owned());
        }
        let lineage = self.truth.load(name);
        *lock(&self.state) = State { running: true, frozen: false, client: false, lineage };
        self.world.note(|| format!("{}: {name} runs in epoch {epoch}", self.node));
        Ok(())
    }

    async fn stop(&self, why: Ending) {
        lock(&self.state).frozen = true;
        self.takes(5..30).await;
        self.truth.count(|counts| counts.lost += u64::from(matches!(why, Ending::Lost(_))));
        self.world.note(|| format!("{}: stopped: {why:?}", self.node));
        *lock(&self.state) = State::default();
    }
}

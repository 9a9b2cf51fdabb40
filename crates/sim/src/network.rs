//! The way from a node to the records: messages that are late, lost, repeated or answered by an error, and partitions.
//!
//! A request that was sent goes its way even if whoever sent it has stopped waiting, or is dead.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use sandboxer_protocol::SandboxId;
use sandboxer_store::record::{Changes, InstanceId, MemoryRecords, ReadError, Record, RecordStore, Stored, SwapError};
use tokio::sync::{oneshot, watch};

use crate::{
    rng::Rng,
    truth::Truth,
    world::{World, lock},
};

/// How bad it is at the moment, in percent of messages.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Weather {
    pub(crate) lost: u64,
    pub(crate) repeated: u64,
    pub(crate) refused: u64,
    /// Takes up to two seconds.
    pub(crate) slow: u64,
    /// Takes up to twelve seconds.
    pub(crate) very_slow: u64,
    /// Answered by a bucket that has too much to do: not done, and whoever wrote can't tell that from a lost reply.
    pub(crate) throttled: u64,
}

/// Where the records are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    Directory,
    /// Nobody is told of changes but by bells, which get lost.
    Bucket,
}

/// Between all nodes and the records.
pub(crate) struct Network {
    pub(crate) world: Arc<World>,
    pub(crate) records: Arc<MemoryRecords>,
    pub(crate) truth: Arc<Truth>,
    state: Mutex<State>,
    hints: bool,
    kept: Kept,
    /// One for each node.
    bells: Vec<watch::Sender<u64>>,
}

struct State {
    weather: Weather,
    partitioned: Vec<bool>,
    /// Nodes that are stopped as soon as something they have asked for is done, and cut off when they go on.
    moving: Vec<bool>,
    calm: bool,
}

impl Network {
    pub(crate) fn new(world: &Arc<World>, truth: &Arc<Truth>, nodes: usize, kept: Kept) -> Arc<Self> {
        let state = State { weather: Weather::default(), partitioned: vec![false; nodes], moving: vec![false; nodes], calm: false };
        let hints = world.random(|rng| rng.chance(50));
        Arc::new(Self {
            world: Arc::clone(world),
            records: Arc::default(),
            truth: Arc::clone(truth),
            state: Mutex::new(state),
            hints,
            kept,
            bells: (0..nodes).map(|_| watch::Sender::default()).collect(),
        })
    }

    pub(crate) fn set_weather(&self, weather: Weather) {
        lock(&self.state).weather = weather;
    }

    pub(crate) fn partition(&self, node: usize, cut: bool) {
        let mut state = lock(&self.state);
        state.partitioned[node] = cut && !state.calm;
    }

    /// The machine is moved with everything on it, in the middle of a request, as hosts of virtual machines do.
    pub(crate) fn begin_move(&self, node: usize) {
        lock(&self.state).moving[node] = true;
    }

    /// From now on nothing is lost, late or cut off.
    pub(crate) fn calm_down(&self) {
        let mut state = lock(&self.state);
        state.weather = Weather::default();
        state.partitioned.fill(false);
        state.moving.fill(false);
        state.calm = true;
    }

    fn move_now(self: &Arc<Self>, node: usize) {
        if !std::mem::take(&mut lock(&self.state).moving[node]) {
            return;
        }
        let (stopped, cut) = self.world.random(|rng| (rng.millis(4000..14_000), rng.millis(4000..30_000)));
        self.world.note(|| format!("{node}: is moved: stops for {stopped:?}, is then cut off for {cut:?}"));
        self.world.stall(node, stopped);
        let (before, after) = (Arc::clone(self), Arc::clone(self));
        self.world.after(stopped - Duration::from_millis(1), Box::new(move |_| before.partition(node, true)));
        self.world.after(stopped + cut, Box::new(move |_| after.partition(node, false)));
    }

    /// A waiter tells the owner, if what it says gets through.
    fn ring(self: &Arc<Self>, by: usize, before: Option<&Record>, after: &Record) {
        let asks = |record: &Record| record.waiter.as_ref().map(|waiter| waiter.nonce);
        let owner = (0..self.bells.len()).find(|node| after.owner.as_ref() == Some(&name_of(*node)));
        let Some(owner) = owner.filter(|_| asks(after).is_some() && asks(after) != before.and_then(asks)) else { return };
        let weather = self.weather();
        let (lost, late) =
            self.world.random(|rng| (rng.chance(weather.lost + weather.throttled), delay(rng, weather) + rng.millis(0..500)));
        if lost || self.is_cut(by) {
            return;
        }
        let network = Arc::clone(self);
        self.world.after(
            late,
            Box::new(move |_| {
                if !network.is_cut(owner) {
                    network.bells[owner].send_modify(|count| *count += 1)
                }
            }),
        );
    }

    fn is_cut(&self, node: usize) -> bool {
        lock(&self.state).partitioned[node]
    }

    fn weather(&self) -> Weather {
        lock(&self.state).weather
    }
}

/// The records as one node sees them.
pub(crate) struct Link {
    pub(crate) network: Arc<Network>,
    pub(crate) node: usize,
}

/// Who waits for the reply; the first that arrives counts.
type Reply<T> = Arc<Mutex<Option<oneshot::Sender<T>>>>;

impl Link {
    /// One request. Lost, it is never answered, or by what `broken` says.
    async fn request<T: Send + 'static>(&self, apply: impl Fn(&Arc<Network>) -> T + Send + Sync + 'static, refused: T, broken: T) -> T {
        let (weather, world) = (self.network.weather(), &self.network.world);
        if self.network.kept == Kept::Bucket && world.random(|rng| rng.chance(weather.throttled)) && !self.network.is_cut(self.node) {
            world.sleep(world.random(|rng| delay(rng, weather))).await;
            return broken;
        }
        if world.random(|rng| rng.chance(weather.refused)) && !self.network.is_cut(self.node) {
            world.sleep(world.random(|rng| delay(rng, weather))).await;
            return refused;
        }
        let (sender, reply) = oneshot::channel();
        let sender: Reply<T> = Arc::new(Mutex::new(Some(sender)));
        let apply = Arc::new(apply);
        let deliveries = if world.random(|rng| rng.chance(weather.repeated)) { 2 } else { 1 };
        for delivery in 0..deliveries {
            let (network, node, apply, sender) = (Arc::clone(&self.network), self.node, Arc::clone(&apply), Arc::clone(&sender));
            let (lost, late) = world.random(|rng| (rng.chance(weather.lost), delay(rng, weather)));
            let late = late * (delivery + 1);
            if lost {
                continue;
            }
            world.after(
                late,
                Box::new(move |world| {
                    if network.is_cut(node) {
                        return;
                    }
                    let outcome = apply(&network);
                    network.move_now(node);
                    let (lost, late) = world.random(|rng| (rng.chance(weather.lost), delay(rng, weather)));
                    if lost {
                        return;
                    }
                    world.after(
                        late,
                        Box::new(move |_| {
                            if !network.is_cut(node) {
                                answer(&sender, outcome);
                            }
                        }),
                    );
                }),
            );
        }
        if world.random(|rng| rng.chance(weather.refused)) {
            // An error of the way, not of the store: what was sent is still under way.
            let (sender, late) = (Arc::clone(&sender), world.random(|rng| delay(rng, weather)));
            world.after(late, Box::new(move |_| answer(&sender, broken)));
        }
        drop(sender);
        match reply.await {
            Ok(outcome) => outcome,
            // Every copy of it was lost. Nobody will ever say so.
            Err(_) => std::future::pending().await,
        }
    }
}

fn answer<T>(sender: &Reply<T>, outcome: T) {
    if let Some(sender) = lock(sender).take() {
        let _ = sender.send(outcome);
    }
}

fn delay(rng: &mut Rng, weather: Weather) -> Duration {
    if rng.chance(weather.very_slow) {
        rng.millis(1000..12_000)
    } else if rng.chance(weather.slow) {
        rng.millis(10..2000)
    } else {
        rng.millis(1..8)
    }
}

#[async_trait]
impl RecordStore for Link {
    async fn read(&self, id: SandboxId) -> Result<Option<Stored>, ReadError> {
        let failed = || Err(ReadError::Unavailable("the way is broken".to_owned()));
        self.request(move |network| Ok(network.records.read_now(id)), failed(), failed()).await
    }

    async fn create(&self, id: SandboxId, first: &Record) -> Result<Stored, SwapError> {
        self.write(id, None, first).await
    }

    async fn swap(&self, id: SandboxId, expected: &Stored, next: &Record) -> Result<Stored, SwapError> {
        self.write(id, Some(expected.clone()), next).await
    }

    async fn remove(&self, _: SandboxId, _: &Stored) -> Result<(), SwapError> {
        Err(SwapError::Unavailable("nothing is collected here".to_owned()))
    }

    async fn list(&self, after: Option<SandboxId>, limit: usize) -> Result<Vec<SandboxId>, ReadError> {
        self.network.records.list(after, limit).await
    }

    fn changes(&self, id: SandboxId) -> Changes {
        match self.network.kept {
            Kept::Bucket => Changes::from_afar(self.network.bells[self.node].subscribe()),
            Kept::Directory if self.network.hints => self.network.records.changes(id),
            Kept::Directory => Changes::none(),
        }
    }
}

impl Link {
    async fn write(&self, id: SandboxId, expected: Option<Stored>, next: &Record) -> Result<Stored, SwapError> {
        let (node, next) = (self.node, next.clone());
        let apply = move |network: &Arc<Network>| {
            let before = network.records.read_now(id);
            let swapped = network.records.swap_now(id, expected.as_ref(), &next);
            if let Ok(after) = &swapped {
                network.world.note(|| describe(node, &after.record));
                network.truth.swapped(node, &name_of(node), before.as_ref().map(|before| &before.record), &after.record);
                if network.kept == Kept::Bucket {
                    network.ring(node, before.as_ref().map(|before| &before.record), &after.record);
                }
            }
            swapped
        };
        let refused = Err(SwapError::Unavailable("too busy".to_owned()));
        self.request(apply, refused, Err(SwapError::Unknown("the way is broken".to_owned()))).await
    }
}

/// The name of a node's instance, also of the one after a restart.
pub(crate) fn name_of(node: usize) -> InstanceId {
    format!("node-{node}").parse().unwrap_or_else(|_| InstanceId::random())
}

fn describe(node: usize, record: &Record) -> String {
    let owner = record.owner.as_ref().map_or("nobody", |owner| owner.as_str());
    let waiter = record.waiter.as_ref().map_or("nobody", |waiter| waiter.instance.as_str());
    let latest = record.latest.map_or_else(|| "nothing".to_owned(), |latest| latest.to_string());
    let answer = if record.answer.is_some() { ", answered" } else { "" };
    format!("{node}: version {} by epoch {}: {owner} has it, {waiter} waits, {latest}{answer}", record.sequence, record.epoch)
}

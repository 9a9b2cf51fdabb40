//! A sandbox that moves between three instances on one directory, as it does in production, with a counter for a sandbox.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use sandboxer_protocol::SandboxId;
use sandboxer_store::{
    CheckpointName,
    failpoint::FailPoints,
    lease::{
        BootClock, Leases, Sought, Terms,
        handoff::{Arrival, Consent, Ending, Host, Keeper, Stance, arrive, keep},
    },
    record::{Codec, DirectoryRecords, InstanceId, RecordStore as _},
};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

/// What is saved, by name: the volume's data.
type Saved = Arc<Mutex<BTreeMap<CheckpointName, u64>>>;

struct Counter {
    saved: Saved,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    count: u64,
    frozen: bool,
    client: bool,
    broken: bool,
    ended: Option<Ending>,
}

impl Counter {
    fn new(saved: &Saved) -> Arc<Self> {
        Arc::new(Self { saved: Arc::clone(saved), state: Mutex::default() })
    }

    /// It is ended right after the record says so.
    async fn ended(&self) -> Ending {
        let ended = async {
            loop {
                if let Some(ending) = self.with(|state| state.ended.clone()) {
                    return ending;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), ended).await.unwrap()
    }

    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock().unwrap())
    }
}

#[async_trait]
impl Host for Counter {
    type Capture = u64;

    async fn asked_for(&self, _: &InstanceId) -> Consent {
        if self.with(|state| state.client) { Consent::InUse } else { Consent::HandOver }
    }

    async fn freeze(&self) {
        self.with(|state| state.frozen = true);
    }

    async fn thaw(&self) {
        self.with(|state| state.frozen = false);
    }

    async fn capture(&self, stance: Stance) -> Result<u64, String> {
        self.with(|state| {
            state.frozen |= stance == Stance::Still;
            if state.broken { Err("no room".to_owned()) } else { Ok(state.count) }
        })
    }

    async fn persist(&self, capture: u64, _: u64, wanted: CheckpointName) -> Result<CheckpointName, String> {
        assert!(self.saved.lock().unwrap().insert(wanted, capture).is_none(), "{wanted} was there");
        Ok(wanted)
    }

    async fn published(&self, name: CheckpointName) {
        assert!(self.saved.lock().unwrap().contains_key(&name));
    }

    async fn restore(&self, name: CheckpointName, _: u64) -> Result<(), String> {
        let count = *self.saved.lock().unwrap().get(&name).ok_or("not there")?;
        self.with(|state| *state = State { count, ..State::default() });
        Ok(())
    }

    async fn stop(&self, why: Ending) {
        self.with(|state| state.ended = Some(why));
    }
}

struct Service {
    root: TempDir,
    id: SandboxId,
    saved: Saved,
}

impl Service {
    fn new() -> Self {
        // Not on the disk: how soon a waiter is noticed is asked, and not how long a sync takes.
        Self { root: tempfile::tempdir_in("/dev/shm").unwrap(), id: SandboxId::random(), saved: Saved::default() }
    }

    fn records(&self) -> DirectoryRecords {
        DirectoryRecords::open(self.root.path(), Codec::default(), FailPoints::default()).unwrap()
    }

    fn instance(&self, name: &str) -> Leases {
        let spawn = Arc::new(|task| drop(tokio::spawn(task)));
        Leases::new(Arc::new(self.records()), Arc::new(BootClock), name.parse().unwrap(), Terms::default(), spawn)
    }

    async fn create(&self, leases: &Leases) -> (Arc<Counter>, Keeper) {
        let host = Counter::new(&self.saved);
        let held = leases.create(self.id, BTreeMap::new()).await.unwrap();
        (Arc::clone(&host), keep(leases, held, host))
    }

    async fn arrive(&self, leases: &Leases) -> (Arc<Counter>, Arrival) {
        let host = Counter::new(&self.saved);
        (Arc::clone(&host), arrive(leases, self.id, host, &CancellationToken::new()).await)
    }
}

fn running(arrival: Arrival) -> Keeper {
    match arrival {
        Arrival::Running(keeper) => keeper,
        Arrival::RestoreFailed(reason) => panic!("{reason}"),
        Arrival::NotHeld(_) => panic!("not held"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_bounces_between_instances_and_loses_nothing() {
    let service = Service::new();
    let instances = ["a", "b", "c"].map(|name| service.instance(name));
    let (mut host, mut keeper) = service.create(&instances[0]).await;
    let mut took = Vec::new();
    for round in 1..=15_u64 {
        host.with(|state| state.count += 1);
        let begun = Instant::now();
        let (next_host, arrival) = service.arrive(&instances[round as usize % 3]).await;
        let next = running(arrival);
        took.push(begun.elapsed());
        assert_eq!(next_host.with(|state| state.count), round);
        assert_eq!(next.lease().epoch(), round + 1);
        // It stands still from before the release; that it was released it hears a moment later.
        assert_eq!(host.ended().await, Ending::HandedOver);
        assert!(!keeper.lease().may_act());
        (host, keeper) = (next_host, next);
    }
    took.sort_unstable();
    println!("median {:?}, longest {:?}", took[took.len() / 2], took[took.len() - 1]);
    assert!(took[took.len() - 1] < Duration::from_secs(8), "a waiter was noticed too late: {took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_keeps_its_sandbox_says_why_and_it_goes_on() {
    let service = Service::new();
    let (one, other) = (service.instance("a"), service.instance("b"));
    let (host, keeper) = service.create(&one).await;
    host.with(|state| state.client = true);
    assert!(matches!(service.arrive(&other).await.1, Arrival::NotHeld(Sought::InUse)));
    host.with(|state| (state.client, state.broken) = (false, true));
    match service.arrive(&other).await.1 {
        Arrival::NotHeld(Sought::CannotSave(reason)) => assert_eq!(reason, "no room"),
        _ => panic!("it could not be saved"),
    }
    assert!(host.with(|state| !state.frozen && state.ended.is_none()));
    assert!(keeper.lease().may_act());
    host.with(|state| state.broken = false);
    let name = keeper.save().await.unwrap();
    assert!(host.with(|state| !state.frozen && state.ended.is_none()));
    assert_eq!(keeper.lease().latest(), Some(name));
    assert!(keeper.checkpoint().await.unwrap() > name);
    assert_eq!(host.ended().await, Ending::Checkpointed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_checkpoint_that_can_not_be_restored_is_left_as_it_is() {
    let service = Service::new();
    let (one, other) = (service.instance("a"), service.instance("b"));
    let (_, keeper) = service.create(&one).await;
    let name = keeper.checkpoint().await.unwrap();
    let lost = service.saved.lock().unwrap().remove(&name);
    assert!(matches!(service.arrive(&other).await.1, Arrival::RestoreFailed(_)));
    let there = service.records().read(service.id).await.unwrap().unwrap().record;
    assert_eq!((there.owner, there.latest), (None, Some(name)));
    service.saved.lock().unwrap().extend(lost.map(|count| (name, count)));
    running(service.arrive(&other).await.1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_sandbox_leaves_a_tombstone() {
    let service = Service::new();
    let (one, other) = (service.instance("a"), service.instance("b"));
    let (host, keeper) = service.create(&one).await;
    keeper.save().await.unwrap();
    keeper.kill("as asked for".to_owned()).await.unwrap();
    assert_eq!(host.with(|state| state.ended.clone()), Some(Ending::Killed));
    match service.arrive(&other).await.1 {
        Arrival::NotHeld(Sought::Gone(tombstone)) => assert_eq!(tombstone.reason, "as asked for"),
        _ => panic!("it was killed"),
    }
}

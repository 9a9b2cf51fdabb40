//! One server instance: its process comes and goes, and its sandbox may outlive it.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use sandboxer_protocol::SandboxId;
use sandboxer_store::{
    lease::{
        Faults, Leases, Sought, Terms,
        handoff::{Arrival, Keeper, arrive, keep},
    },
    record::SwapError,
};
use tokio_util::sync::CancellationToken;

use crate::{
    clock::NodeClock,
    host::SimHost,
    network::{Link, Network, name_of},
    world::lock,
};

/// How long a client waits for a sandbox that is here and whose lease is not certain.
const LOCAL_PATIENCE: Duration = Duration::from_secs(40);

/// What a client is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    Running,
    InUse,
    HandoffInProgress,
    CannotSave,
    RestoreFailed,
    NotFound,
    NeverSaved,
    Gone,
    Unanswered,
    Unavailable,
    GivenUp,
}

pub(crate) struct Node {
    pub(crate) index: usize,
    pub(crate) id: SandboxId,
    pub(crate) network: Arc<Network>,
    pub(crate) clock: Arc<NodeClock>,
    terms: Terms,
    faults: Faults,
    failing: u64,
    yields: bool,
    /// One process at a time.
    leases: Mutex<Option<Leases>>,
    local: Mutex<Option<Local>>,
    attaching: AtomicBool,
}

/// The sandbox that runs here.
struct Local {
    host: Arc<SimHost>,
    epoch: u64,
    /// None while no process keeps it.
    keeper: Option<Keeper>,
}

impl Node {
    pub(crate) fn new(
        index: usize,
        id: SandboxId,
        network: &Arc<Network>,
        terms: Terms,
        faults: Faults,
        failing: u64,
        yields: bool,
    ) -> Arc<Self> {
        Arc::new(Self {
            index,
            id,
            network: Arc::clone(network),
            clock: Arc::new(NodeClock::new(&network.world)),
            terms,
            faults,
            failing,
            yields,
            leases: Mutex::default(),
            local: Mutex::default(),
            attaching: AtomicBool::new(false),
        })
    }

    /// Starts the process. What an earlier one left running is taken up.
    pub(crate) fn start(self: &Arc<Self>) {
        let (world, index) = (Arc::clone(&self.network.world), self.index);
        world.revive(index);
        self.attaching.store(false, Ordering::Relaxed);
        let link = Arc::new(Link { network: Arc::clone(&self.network), node: index });
        let spawner = Arc::clone(&world);
        let spawn = Arc::new(move |task| spawner.spawn(Some(index), task));
        let leases = Leases::new(link, self.clock.clone(), name_of(index), self.terms.clone(), spawn).with_faults(self.faults);
        *lock(&self.leases) = Some(leases.clone());
        let left = lock(&self.local).as_ref().map(|local| (Arc::clone(&local.host), local.epoch));
        if let Some((host, epoch)) = left {
            world.note(|| format!("{index}: takes its sandbox up in epoch {epoch}"));
            host.detach_client();
            let keeper = keep(&leases, leases.resume(self.id, epoch), Arc::clone(&host));
            self.settle(host, keeper);
        }
        let node = Arc::clone(self);
        world.spawn(Some(index), Box::pin(async move { node.save_now_and_then().await }));
    }

    /// The process has died, and the sandbox with it if the machine has.
    pub(crate) fn died(&self, with_sandbox: bool) {
        *lock(&self.leases) = None;
        let mut local = lock(&self.local);
        match local.as_mut() {
            Some(here) if !with_sandbox && here.host.is_running() => here.keeper = None,
            _ => *local = None,
        }
    }

    /// Makes the sandbox.
    pub(crate) async fn create(self: &Arc<Self>) -> Result<(), SwapError> {
        let Some(leases) = lock(&self.leases).clone() else { return Ok(()) };
        let held = leases.create(self.id, Default::default()).await?;
        let host = self.new_host();
        host.start();
        let keeper = keep(&leases, held, Arc::clone(&host));
        self.settle(host, keeper);
        Ok(())
    }

    fn new_host(&self) -> Arc<SimHost> {
        SimHost::new(&self.network.world, &self.network.truth, self.index, self.failing, self.yields)
    }

    fn settle(self: &Arc<Self>, host: Arc<SimHost>, keeper: Keeper) {
        let epoch = keeper.lease().epoch();
        *lock(&self.local) = Some(Local { host: Arc::clone(&host), epoch, keeper: Some(keeper.clone()) });
        let node = Arc::clone(self);
        self.network.world.spawn(Some(self.index), Box::pin(async move { node.serve(host, keeper).await }));
    }

    /// The keeper of the sandbox that runs here.
    pub(crate) fn keeper(&self) -> Option<(Arc<SimHost>, Keeper)> {
        let local = lock(&self.local);
        let local = local.as_ref().filter(|local| local.host.is_running())?;
        Some((Arc::clone(&local.host), local.keeper.clone()?))
    }

    /// Lets others see something of the sandbox now and then, as long as it may.
    async fn serve(self: Arc<Self>, host: Arc<SimHost>, keeper: Keeper) {
        let (world, epoch) = (&self.network.world, keeper.lease().epoch());
        while host.is_running() {
            world.sleep(world.random(|rng| rng.millis(10..400))).await;
            if host.is_awake() && keeper.lease().may_act() {
                self.network.truth.acts(self.index, epoch, &host.lineage());
            }
        }
        let mut local = lock(&self.local);
        if local.as_ref().is_some_and(|local| Arc::ptr_eq(&local.host, &host)) {
            *local = None;
        }
    }

    async fn save_now_and_then(self: Arc<Self>) {
        let world = &self.network.world;
        loop {
            world.sleep(world.random(|rng| rng.millis(1000..12_000))).await;
            if let Some((_, keeper)) = self.keeper()
                && let Ok(name) = keeper.save().await
            {
                self.network.truth.acknowledged(name);
            }
        }
    }

    /// A client wants the sandbox.
    pub(crate) async fn attach(self: &Arc<Self>, give_up: &CancellationToken) -> Answer {
        if self.attaching.swap(true, Ordering::Relaxed) {
            return Answer::HandoffInProgress;
        }
        let answer = self.attach_alone(give_up).await;
        self.attaching.store(false, Ordering::Relaxed);
        answer
    }

    async fn attach_alone(self: &Arc<Self>, give_up: &CancellationToken) -> Answer {
        let world = &self.network.world;
        let until = world.now() + LOCAL_PATIENCE;
        loop {
            let Some((host, keeper)) = self.keeper() else { break };
            if host.has_client() {
                return Answer::InUse;
            }
            if keeper.lease().may_act() && host.attach_client() {
                return Answer::Running;
            }
            if world.now() >= until {
                return Answer::Unanswered;
            }
            if give_up.is_cancelled() {
                return Answer::GivenUp;
            }
            world.sleep(Duration::from_millis(100)).await;
        }
        let Some(leases) = lock(&self.leases).clone() else { return Answer::Unavailable };
        let host = self.new_host();
        match arrive(&leases, self.id, Arc::clone(&host), give_up).await {
            Arrival::Running(keeper) => {
                host.attach_client();
                self.settle(host, keeper);
                Answer::Running
            }
            Arrival::RestoreFailed(_) => Answer::RestoreFailed,
            Arrival::NotHeld(sought) => match sought {
                Sought::Held(_) | Sought::NotFound => Answer::NotFound,
                Sought::NeverSaved { .. } => Answer::NeverSaved,
                Sought::Gone(_) => Answer::Gone,
                Sought::InUse => Answer::InUse,
                Sought::HandoffInProgress => Answer::HandoffInProgress,
                Sought::CannotSave(_) => Answer::CannotSave,
                Sought::Unanswered => Answer::Unanswered,
                Sought::Unavailable(_) => Answer::Unavailable,
                Sought::GivenUp => Answer::GivenUp,
            },
        }
    }
}

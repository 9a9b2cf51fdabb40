//! All sandboxes of this server: making them, finding them, taking them up again, bringing them from the volume, ending them.

mod arrive;
mod bury;
mod converse;
mod copies;
mod create;
mod drive;
mod fork;
mod go_back;
mod handle;
mod keep;
mod launch;
mod leave;
mod left;
mod pool;
mod rollback;
mod secrets;
mod take_up;
mod template;
mod view;

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use sandboxer_protocol::SandboxId;
use sandboxer_runtime::{HostLimits, Runtime};
use tokio::sync::{Semaphore, watch};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

pub(crate) use self::{
    arrive::{ArriveError, Arrived, Restorer, Saved},
    bury::Buried,
    create::{CreateError, Created},
    handle::{Handle, NetworkView},
    rollback::{Going, RolledBack, Roller},
    secrets::hash,
    view::{InstanceView, Served},
};
use self::{launch::private_dir, pool::Pool, secrets::same_secret, take_up::TakingUp};
use crate::{
    checkpoints::Checkpoints,
    file_turns::FileTurns,
    filesystems::Filesystems,
    health::Health,
    images::Images,
    leaving::Leaving,
    metrics::Metrics,
    network::{AllPlaces, NetworkSettings},
    obituaries::{Obituaries, Obituary},
    sandbox::driver::Stop,
    settings::Settings,
    shares::{Budget, Shares},
    tenants::Tenants,
};

/// Connections to ports that are carried as they are, at once: to the sandboxes of one key. All keys
/// together have twice as many.
const MAX_PORT_SOCKETS_OF_A_KEY: u64 = 1000;
/// WebSockets of clients at once, of one API key and of a server without keys.
const MAX_SOCKETS_OF_A_KEY: u64 = 2500;
const MAX_SOCKETS: u64 = 5000;
/// Requests of one API key that read much of a volume at once, and twice as many in all.
const VOLUME_TURNS: u32 = 4;
/// Requests larger than a few KiB that are under way, in KiB of one API key; twice as much in all.
const MESSAGES_KIB: u32 = 32 * 1024;
/// How long a sandbox that is taken up waits to hear that it is still this instance's, and others for what the volume is told in passing.
const CERTAIN_WITHIN: Duration = Duration::from_secs(5);

pub(crate) struct Manager {
    settings: Settings,
    runtime: Arc<dyn Runtime>,
    images: Images,
    host: HostLimits,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) checkpoints: Option<Arc<Checkpoints>>,
    pub(crate) filesystems: Option<Arc<Filesystems>>,
    pub(crate) health: Health,
    /// For what is done with files, over HTTP and on sockets.
    pub(crate) file_turns: FileTurns,
    /// Sandboxes that are being brought here from the volume: one attach at a time does it, the others then find it.
    arriving: Mutex<HashMap<SandboxId, Weak<Semaphore>>>,
    obituaries: Obituaries,
    sandboxes: Mutex<HashMap<SandboxId, Handle>>,
    slots: Arc<Semaphore>,
    leaving: Leaving,
    pool: Pool,
    /// Who may start gVisor now.
    starts: Semaphore,
    tenants: Arc<Tenants>,
    network: Arc<NetworkSettings>,
    /// Connections of all sandboxes together.
    connections: AllPlaces,
    drivers: TaskTracker,
    /// How many WebSockets each key may have.
    pub(crate) socket_turns: Shares,
    /// For requests that read much of a volume.
    pub(crate) volume_turns: Budget,
    /// For what clients send that is held in memory.
    pub(crate) message_budget: Budget,
    /// Every WebSocket holds a token of it for as long as it is open.
    pub(crate) sockets: TaskTracker,
    /// Connections to ports that were upgraded, and their places: not among those, so that they keep no client of a sandbox out. They end with the process.
    pub(crate) port_sockets: (TaskTracker, Shares),
    stop: watch::Sender<Option<Stop>>,
    /// Who may be saved now that the server stops.
    turns: Arc<Semaphore>,
    /// Sandboxes of an earlier process that are not taken up yet. They run: nothing else may be made of them.
    taking_up: watch::Sender<HashMap<SandboxId, TakingUp>>,
}

impl Manager {
    pub(crate) fn open(settings: Settings, runtime: Arc<dyn Runtime>, images: Images, host: HostLimits) -> io::Result<Arc<Self>> {
        private_dir(&settings.data_dir.join("sandboxes"))?;
        let obituaries = Obituaries::open(settings.data_dir.join("ended"), settings.remember)?;
        let drivers = TaskTracker::new();
        let largest = settings.max_limits.memory_bytes().saturating_add(settings.max_limits.disk_bytes());
        let checkpoints = settings
            .checkpoints
            .clone()
            .map(|checkpoints| {
                Checkpoints::open(checkpoints, &settings.data_dir, largest, settings.key_limits.volume_bytes, TaskTracker::new())
                    .map(Arc::new)
            })
            .transpose()?;
        let filesystems = settings
            .filesystems
            .clone()
            .map(|filesystems| {
                Filesystems::open(filesystems, &settings.data_dir, &settings.max_limits, settings.key_limits.volume_bytes).map(Arc::new)
            })
            .transpose()?;
        Ok(Arc::new(Self {
            checkpoints,
            filesystems,
            health: Health::default(),
            file_turns: FileTurns::new(),
            arriving: Mutex::default(),
            slots: Arc::new(Semaphore::new(settings.max_sandboxes)),
            leaving: Leaving::default(),
            pool: Pool::new(settings.pool.clone()),
            starts: Semaphore::new(launch::starts_at_once()),
            tenants: Arc::new(Tenants::new(settings.key_limits)),
            network: Arc::new(settings.network.clone()),
            connections: AllPlaces::of_this_process(),
            socket_turns: Shares::new(if settings.access.keys.is_empty() { MAX_SOCKETS } else { MAX_SOCKETS_OF_A_KEY }),
            settings,
            runtime,
            images,
            host,
            metrics: Arc::new(Metrics::new()),
            obituaries,
            sandboxes: Mutex::default(),
            drivers,
            volume_turns: Budget::new(VOLUME_TURNS),
            message_budget: Budget::new(MESSAGES_KIB),
            sockets: TaskTracker::new(),
            port_sockets: (TaskTracker::new(), Shares::new(MAX_PORT_SOCKETS_OF_A_KEY)),
            stop: watch::Sender::new(None),
            turns: Arc::new(Semaphore::new(leave::saves_at_once())),
            taking_up: watch::Sender::default(),
        }))
    }

    /// Collects on the volumes that there are, for as long as what this returns is kept.
    pub(crate) fn collect(&self) -> Vec<AbortOnDropHandle<()>> {
        let metrics = || Arc::clone(&self.metrics);
        let place = self.settings.checkpoints.as_ref().map(|checkpoints| checkpoints.place.clone());
        let checkpoints = self.checkpoints.clone();
        let checkpoints =
            checkpoints.map(|checkpoints| tokio::spawn(checkpoints.collect_again_and_again(self.settings.remember, metrics())));
        let filesystems = self.filesystems.clone();
        let filesystems = filesystems.map(|filesystems| tokio::spawn(filesystems.collect_again_and_again(place, metrics())));
        checkpoints.into_iter().chain(filesystems).map(AbortOnDropHandle::new).collect()
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(crate) fn images(&self) -> &Images {
        &self.images
    }

    /// How the server is being stopped, if it is.
    pub(crate) fn stopping(&self) -> Option<Stop> {
        *self.stop.borrow()
    }

    /// Waits until it is. Cancel-safe.
    async fn stopped(&self) {
        // The sender is a part of this.
        drop(self.stop.subscribe().wait_for(Option::is_some).await);
    }

    /// A sandbox by its id. Waits for one that is being taken up.
    pub(crate) async fn find(&self, id: SandboxId) -> Option<Handle> {
        self.find_certainly(id).await.ok().flatten()
    }

    /// Likewise, for those who would make it anew if it is not here: one that could not be taken up yet is an error.
    async fn find_certainly(&self, id: SandboxId) -> Result<Option<Handle>, ArriveError> {
        let mut taking_up = self.taking_up.subscribe();
        // The sender is a part of this. Looked at first: one that is taken up is in the map before it is out of this.
        let left = taking_up.wait_for(|ids| ids.get(&id) != Some(&TakingUp::First)).await.is_ok_and(|ids| ids.contains_key(&id));
        match self.lock().get(&id).cloned() {
            None if left => Err(ArriveError::NotYet),
            handle => Ok(handle),
        }
    }

    /// Why a sandbox ended, for those who may know: with keys, who has its token.
    pub(crate) fn obituary(&self, id: SandboxId, token: Option<&str>) -> Option<String> {
        let obituary = self.obituaries.get(id)?;
        let known = token.is_some_and(|token| same_secret(token, &obituary.token_sha256));
        (known || !self.settings.access.needs_token()).then_some(obituary.message)
    }

    /// Why a sandbox ended, for an API key: with keys, for the key that made the sandbox.
    pub(crate) fn obituary_of_key(&self, id: SandboxId, who: Option<&str>) -> Option<Obituary> {
        let obituary = self.obituaries.get(id)?;
        (!self.settings.access.needs_token() || who.is_some() && obituary.owner.as_deref() == who).then_some(obituary)
    }

    /// Whether this API key made a sandbox that is not in memory.
    pub(crate) async fn made_by(&self, id: SandboxId, who: Option<&str>) -> bool {
        who.is_some() && self.on_volume(id, who).await.is_ok_and(|there| there.is_some())
    }

    /// Those that run here.
    pub(crate) fn all(&self) -> Vec<Handle> {
        self.lock().values().cloned().collect()
    }

    /// What this instance has, for those of one API key: the name of the instance, and each sandbox with whether it is served now and in which
    /// epoch. By the hash of its id, since the id alone may open it.
    pub(crate) fn view(&self, owner: Option<&str>) -> InstanceView {
        let instance = self.checkpoints.as_ref().map(|checkpoints| checkpoints.leases.instance().to_string());
        let sandboxes = self.lock().values().filter(|handle| handle.owner.as_deref() == owner).map(Handle::view).collect();
        InstanceView { instance, stopping: self.stopping().is_some(), sandboxes }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<SandboxId, Handle>> {
        // A map is whole after each change.
        self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! All sandboxes of this server: making them, finding them, taking them up again, bringing them from the volume, ending them.

mod arrive;
mod bury;
mod copies;
mod fork;
mod go_back;
mod leave;
mod left;
mod pool;
mod rollback;
mod template;
mod view;

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use sandboxer_protocol::{
    SandboxId,
    agent::{AgentConfig, Enforced, FromAgent, Marker, ToAgent},
    client::{CreateConfig, ErrorCode, LimitsRequest, Network, ServerEvent, Status, StatusUpdate},
};
use sandboxer_runtime::{
    HostLimits, HostResources, Instance, Launch, Runtime, RuntimeError,
    link::{self, Link, LinkError},
};
use sandboxer_store::{
    SandboxStatus,
    lease::{Held, LeaseError, LeaseView, Release, handoff},
    record::SwapError,
};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch},
    time::Instant,
};
use tokio_util::{
    sync::CancellationToken,
    task::{AbortOnDropHandle, TaskTracker},
};
use tracing::{Instrument as _, info, info_span, warn};

use self::{
    arrive::unanswered,
    left::{Left, step_back},
    pool::{Class, Pool},
};
pub(crate) use self::{
    arrive::{ArriveError, Arrived, Restorer, Saved},
    bury::Buried,
    rollback::{Going, RolledBack, Roller},
    view::{InstanceView, Served},
};
use crate::{
    checkpoints::Checkpoints,
    file_turns::FileTurns,
    filesystems::Filesystems,
    images::Images,
    limits::Limits,
    metrics::Metrics,
    network::{AllPlaces, Egress, Log, NetworkSettings, Rule},
    obituaries::{Obituaries, Obituary},
    sandbox::{
        Execution,
        asks::{Ask, Refused, Told},
        client::ClientPort,
        driver::{Attachment, Command, Driver, END_EXPLAINED, Ending, Outcome, Start, Stop},
        farewell::obituary,
        files::{Keeps, OnMade},
        host::SandboxHost,
        last_use::LastUse,
        record::{RECORD_VERSION, Record, RecordError, SandboxConfig},
        saving::Kept,
        streams::NoWay,
        transfers::{self, SingleFiles},
        tunnel::TunnelStream,
    },
    settings::Settings,
    tenants::{Place, Tenants},
};

/// Connections to ports of sandboxes that are carried as they are, at once.
const MAX_PORT_SOCKETS: usize = 2000;
/// Commands that may wait for a driver.
const COMMANDS: usize = 16;
/// Saving more often than this would be all that a sandbox does.
const LEAST_AUTOSAVE: Duration = Duration::from_millis(500);
/// How long the agent of a sandbox that is taken up may take to answer.
const TAKE_UP: Duration = Duration::from_secs(60);
/// How long the server waits for that before it serves.
const TAKE_UP_FIRST: Duration = Duration::from_secs(10);
/// Between one attempt to take up a sandbox and the next: at first, and at most.
const TAKE_UP_AGAIN: Duration = Duration::from_secs(1);
const TAKE_UP_AGAIN_AT_MOST: Duration = Duration::from_secs(30);

/// How long a sandbox that is taken up waits to hear that it is still this instance's, and others for what the volume is told in passing.
const CERTAIN_WITHIN: Duration = Duration::from_secs(5);

/// Why a sandbox was not made. The message says what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct CreateError {
    pub(crate) code: ErrorCode,
    pub(crate) message: String,
}

impl CreateError {
    pub(crate) fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// A sandbox, as those see it who want something of it.
#[derive(Debug, Clone)]
pub(crate) struct Handle {
    pub(crate) id: SandboxId,
    token_sha256: Arc<str>,
    commands: mpsc::Sender<Command>,
    gone: CancellationToken,
    /// Rises when it goes back.
    generation: Arc<AtomicU64>,
    /// Which API key it belongs to.
    pub(crate) owner: Option<Arc<str>>,
    pub(crate) created_at: jiff::Timestamp,
    pub(crate) metadata: Arc<BTreeMap<String, String>>,
    last_use: LastUse,
    /// The lease on it, if it is kept on the volume.
    lease: Option<LeaseView>,
    pub(crate) network: Arc<NetworkView>,
}

/// What is known of a sandbox's network.
#[derive(Debug)]
pub(crate) struct NetworkView {
    pub(crate) rules: Vec<Rule>,
    pub(crate) log: Arc<Log>,
}

impl NetworkView {
    fn of(record: &Record, dir: &Path) -> Self {
        let rules = record.config.network.clone();
        let log = if rules.is_empty() { Log::of_none(dir) } else { Log::open(dir) };
        Self { rules, log }
    }
}

impl Handle {
    /// What a client that attaches is told first. One that missed the telling of a rewinding knows it by the generation.
    pub(crate) fn running(&self) -> ServerEvent {
        let mut update = StatusUpdate::new(Status::Running);
        update.generation = Some(self.generation()).filter(|generation| *generation > 0);
        ServerEvent::StatusUpdate(update)
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Waits until nothing of the sandbox is left here.
    pub(crate) async fn gone(&self) {
        self.gone.cancelled().await;
    }

    /// Whether this is the sandbox's token, without telling how much of it is right.
    pub(crate) fn opens(&self, token: &str) -> bool {
        same_secret(token, &self.token_sha256)
    }

    /// What only the servers of this sandbox know.
    pub(crate) fn token_sha256(&self) -> &str {
        &self.token_sha256
    }

    /// Has something done by the sandbox's driver. None: the sandbox is gone from here.
    pub(crate) async fn ask(&self, ask: Ask) -> Option<Result<Told, Refused>> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Ask { ask, reply }).await.ok()?;
        answer.await.ok()
    }

    /// One that a test plays the driver of.
    #[cfg(test)]
    pub(crate) fn played() -> (Self, mpsc::Receiver<Command>) {
        let (commands, played) = mpsc::channel(COMMANDS);
        let handle = Self {
            id: SandboxId::random(),
            token_sha256: Arc::from(""),
            commands,
            gone: CancellationToken::new(),
            generation: Arc::default(),
            owner: None,
            created_at: jiff::Timestamp::UNIX_EPOCH,
            metadata: Arc::default(),
            last_use: LastUse::at(jiff::Timestamp::UNIX_EPOCH),
            lease: None,
            network: Arc::new(NetworkView { rules: Vec::new(), log: Log::of_none(Path::new("")) }),
        };
        (handle, played)
    }

    /// Has something done with a single file. False: the sandbox is gone from here.
    pub(crate) async fn file(&self, order: transfers::Order) -> bool {
        self.commands.send(Command::File(order)).await.is_ok()
    }

    /// A way to a port of the sandbox's loopback. None: the sandbox is gone from here.
    pub(crate) async fn way(&self, port: u16) -> Option<Result<TunnelStream, NoWay>> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Way { port, reply }).await.ok()?;
        answer.await.ok()
    }

    /// Ends a sandbox that nobody has heard of.
    pub(crate) async fn abandon(&self) {
        // A driver that has ended already has nothing to be told.
        let _ = self.commands.send(Command::Abandon).await;
    }

    fn view(&self) -> Served {
        let (epoch, serving) = match &self.lease {
            Some(lease) => (Some(lease.epoch()), lease.may_act()),
            None => (None, true),
        };
        Served { id_sha256: hash(&self.id.to_string()), epoch, serving }
    }

    /// Makes a connection the client of the sandbox. None: the sandbox is gone.
    pub(crate) async fn attach(&self, port: ClientPort, greeting: Vec<ServerEvent>) -> Option<Attachment> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Attach { port, greeting, reply }).await.ok()?;
        answer.await.ok()
    }
}

/// A sandbox that was just made, with the only copy of its token.
pub(crate) struct Created {
    pub(crate) handle: Handle,
    pub(crate) token: String,
}

pub(crate) struct Manager {
    settings: Settings,
    runtime: Arc<dyn Runtime>,
    images: Images,
    host: HostLimits,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) checkpoints: Option<Arc<Checkpoints>>,
    pub(crate) filesystems: Option<Arc<Filesystems>>,
    /// For what is done with files, over HTTP and on sockets.
    pub(crate) file_turns: FileTurns,
    /// Sandboxes that are being brought here from the volume: one attach at a time does it, the others then find it.
    arriving: Mutex<HashMap<SandboxId, Weak<Semaphore>>>,
    obituaries: Obituaries,
    sandboxes: Mutex<HashMap<SandboxId, Handle>>,
    slots: Arc<Semaphore>,
    pool: Pool,
    tenants: Arc<Tenants>,
    network: Arc<NetworkSettings>,
    /// Connections of all sandboxes together.
    connections: AllPlaces,
    drivers: TaskTracker,
    /// Every WebSocket holds a token of it for as long as it is open.
    pub(crate) sockets: TaskTracker,
    /// Connections to ports that were upgraded, and their places: not among those, so that they keep no client of a sandbox out. They end with the process.
    pub(crate) port_sockets: (TaskTracker, Arc<Semaphore>),
    stop: watch::Sender<Option<Stop>>,
    /// Who may be saved now that the server stops.
    turns: Arc<Semaphore>,
    /// Sandboxes of an earlier process that are not taken up yet. They run: nothing else may be made of them.
    taking_up: watch::Sender<HashMap<SandboxId, TakingUp>>,
}

/// How far the taking up of a sandbox is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum TakingUp {
    /// Whoever wants it waits.
    First,
    /// It could not be taken up. It is tried again, and whoever wants it is told so, unless it is not known who may: then it is left for the next start.
    NotYet { token_sha256: Option<String> },
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
            .map(|checkpoints| Checkpoints::open(checkpoints, &settings.data_dir, largest, TaskTracker::new()).map(Arc::new))
            .transpose()?;
        let filesystems = settings
            .filesystems
            .clone()
            .map(|filesystems| Filesystems::open(filesystems, &settings.data_dir, &settings.max_limits).map(Arc::new))
            .transpose()?;
        Ok(Arc::new(Self {
            checkpoints,
            filesystems,
            file_turns: FileTurns::new(),
            arriving: Mutex::default(),
            slots: Arc::new(Semaphore::new(settings.max_sandboxes)),
            pool: Pool::new(settings.pool.clone()),
            tenants: Arc::new(Tenants::new(settings.key_limits)),
            network: Arc::new(settings.network.clone()),
            connections: AllPlaces::of_this_process(),
            settings,
            runtime,
            images,
            host,
            metrics: Arc::new(Metrics::new()),
            obituaries,
            sandboxes: Mutex::default(),
            drivers,
            sockets: TaskTracker::new(),
            port_sockets: (TaskTracker::new(), Arc::new(Semaphore::new(MAX_PORT_SOCKETS))),
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

    /// Makes a sandbox. Runs to its end even if nobody waits for it any longer.
    pub(crate) async fn create(self: &Arc<Self>, config: CreateConfig, owner: Option<String>) -> Result<Created, CreateError> {
        let manager = Arc::clone(self);
        let began = Instant::now();
        self.metrics.creates.inc();
        let made = self.drivers.spawn(async move { manager.make(config, owner).await });
        let made = made.await.unwrap_or_else(|_| Err(CreateError::new(ErrorCode::Internal, "Making the sandbox failed. Try again.")));
        match &made {
            Ok(_) => self.metrics.create_seconds.observe(began.elapsed().as_secs_f64()),
            Err(_) => {
                self.metrics.create_failures.inc();
            }
        }
        made
    }

    async fn make(self: Arc<Self>, config: CreateConfig, owner: Option<String>) -> Result<Created, CreateError> {
        if self.stopping().is_some() {
            return Err(CreateError::new(ErrorCode::ServerStopping, "The server is stopping. Create the sandbox at another one."));
        }
        let asked = config.limits.unwrap_or_default();
        let image = config.image.clone();
        let template_name = config.filesystem_snapshot_name.clone();
        let config = self.check(config)?;
        let resources = config.limits.on_the_host(&asked, &self.host)?;
        let place = self.tenants.admit(owner.as_deref())?;
        let slot = self.slot()?;
        let _busy = self.pool.busy();
        let template = self.template(template_name.as_deref(), owner.as_deref()).await?;
        let image = self.image_for(template.as_ref(), image.as_deref()).await?;
        let class = Class { image: image.clone(), limits: config.limits };
        let waited = if template.is_none() { self.from_pool(&class).await } else { None };
        self.give_way();
        let (id, marker) =
            waited.as_ref().map_or_else(|| (SandboxId::random(), Marker::new(rand::random())), |waited| (waited.id, waited.marker));
        let token = new_token();
        let mut record = Record {
            version: RECORD_VERSION,
            id,
            created_at: jiff::Timestamp::now(),
            token_sha256: hash(&token),
            marker,
            image,
            owner,
            idle_since: None,
            config,
            epoch: None,
            generation: 0,
            container: None,
            standby: false,
        };
        let finish = async {
            let held = match (self.register(&mut record).await, &waited) {
                (Ok(held), _) => held,
                (Err(error), None) => return Err(error),
                (Err(error), Some(_)) => {
                    waited.into_iter().for_each(|waited| self.back_into_pool(&class, waited));
                    return Err(error);
                }
            };
            let mut launch = self.launch(&record, resources);
            let begun = Instant::now();
            let from_pool = waited.is_some();
            let started = match waited {
                Some(waited) => waited.hand_out(&record, &launch.dir),
                None => self.start_with_files(&mut launch, &mut record, template.as_ref()).await,
            };
            match started.and_then(|opened| as_asked(opened, &asked, &record.config)) {
                Ok(running) => {
                    info!(ms = begun.elapsed().as_millis(), from_pool, "started");
                    let wire = Wire::default();
                    let keeping = self.keep(&record, &wire, held);
                    let handle = self.drive(record, (Some(slot), place), running, Duration::ZERO, wire, keeping);
                    Ok(Created { handle, token })
                }
                Err(error) => {
                    warn!(why = error.message, "could not be started");
                    self.discard(&launch).await;
                    if let Some((_, held)) = held {
                        // Nobody has heard of it, and its creator is not to wait for a volume that is away.
                        let _ = tokio::time::timeout(CERTAIN_WITHIN, held.lease.bury(error.message.clone())).await;
                    }
                    Err(error)
                }
            }
        };
        finish.instrument(info_span!(parent: None, "sandbox", %id)).await
    }

    fn slot(&self) -> Result<OwnedSemaphorePermit, CreateError> {
        Arc::clone(&self.slots).try_acquire_owned().map_err(|_| {
            let most = self.settings.max_sandboxes;
            CreateError::new(
                ErrorCode::NoCapacity,
                format!("This server has {most} sandboxes, and that is all it may have. Try again later."),
            )
        })
    }

    /// Everything that can be wrong with a configuration, before anything is made.
    fn check(&self, config: CreateConfig) -> Result<SandboxConfig, CreateError> {
        let refuse = |code, message: &str| Err(CreateError::new(code, message));
        let checkpoint = config.enable_checkpoint == Some(true);
        if checkpoint && self.checkpoints.is_none() {
            return refuse(
                ErrorCode::CheckpointNotConfigured,
                "enable_checkpoint: this server keeps no checkpoints. Leave it out, or ask another server.",
            );
        }
        let autosave = config.autosave_seconds.and_then(|seconds| seconds.nonzero()).map(|period| period.max(LEAST_AUTOSAVE));
        if autosave.is_some() && !checkpoint {
            return refuse(ErrorCode::CheckpointNotEnabled, "autosave_seconds needs enable_checkpoint.");
        }
        if config.enable_sandbox_handoff == Some(true) && !checkpoint {
            return refuse(ErrorCode::CheckpointNotEnabled, "enable_sandbox_handoff needs enable_checkpoint.");
        }
        let network = match &config.network {
            Some(Network::Allow { allow }) => {
                let admitted = self.settings.network.admit(allow);
                admitted.map_err(|why| {
                    CreateError::new(ErrorCode::NetworkNotAvailable, format!("{why}. Leave it out, or ask another server."))
                })?
            }
            Some(Network::None(_)) | None => Vec::new(),
        };
        let limits = Limits::resolve(&config.limits.unwrap_or_default(), &self.settings.default_limits, &self.settings.max_limits)?;
        Ok(SandboxConfig {
            idle_timeout: config.idle_timeout.map_or(self.settings.idle_timeout, |seconds| seconds.nonzero()),
            env: config.env.unwrap_or_default(),
            cwd: config.cwd,
            limits,
            detached_output: config.detached_output.unwrap_or_default(),
            metadata: config.metadata.unwrap_or_default(),
            checkpoint,
            handoff: config.enable_sandbox_handoff == Some(true),
            autosave,
            network,
            idle_checkpoint: checkpoint && config.enable_idle_timeout_auto_checkpoint != Some(false),
        })
    }

    /// What a sandbox is started or restored with: the server's own template, whatever a volume says.
    fn launch(&self, record: &Record, resources: HostResources) -> Launch {
        let limits = &record.config.limits;
        Launch {
            id: record.container(),
            dir: self.dir(record.container()),
            image: record.image.clone(),
            config: AgentConfig {
                marker: record.marker.to_hex(),
                disk_bytes: limits.disk_bytes(),
                disk_inodes: limits.disk_inodes(),
                memory_bytes: Some(limits.memory_bytes()),
                pids: Some(limits.pids),
                output_window_bytes: self.settings.output_window_bytes,
                stdin_window_bytes: self.settings.stdin_window_bytes,
                spares: self.settings.spares.for_agents(),
            },
            resources,
        }
    }

    /// Makes the volume know a sandbox that is to be kept there, before anybody hears of it.
    async fn register(&self, record: &mut Record) -> Result<Option<(Arc<Checkpoints>, Held)>, CreateError> {
        let Some(checkpoints) = self.checkpoints.as_ref().filter(|_| record.config.checkpoint) else { return Ok(None) };
        let failed =
            |why: String| CreateError::new(ErrorCode::CheckpointFailed, format!("The volume can't be written: {why}. Try again later."));
        checkpoints.describe(record, SandboxStatus::Created, None).await.map_err(|error| failed(error.whole()))?;
        let held = checkpoints.leases.create(record.id, Checkpoints::attributes(record)).await.map_err(|error| match error {
            SwapError::Unknown(why) => CreateError::new(ErrorCode::VolumeUnavailable, unanswered(&why)),
            error => failed(error.to_string()),
        })?;
        record.epoch = Some(held.lease.epoch());
        checkpoints.keep_image(record.image.clone());
        Ok(Some((Arc::clone(checkpoints), held)))
    }

    /// How a sandbox that was made or taken up here is captured, and the keeping of its lease if it has one.
    fn keep(&self, record: &Record, wire: &Wire, held: Option<(Arc<Checkpoints>, Held)>) -> Keeping {
        let Some(checkpoints) = &self.checkpoints else { return Keeping::default() };
        let place = (record.container(), self.dir(record.container()));
        let (runtime, metrics) = (Arc::clone(&self.runtime), Arc::clone(&self.metrics));
        let host = SandboxHost::new(record.id, place, runtime, Arc::clone(checkpoints), wire.sender.clone(), metrics, None);
        let kept = held.map(|(checkpoints, held)| {
            host.stands_on(held.lease.latest());
            let keeper = handoff::keep(&checkpoints.leases, held, Arc::clone(&host));
            Kept { keeper, checkpoints }
        });
        Keeping { host: Some(host), kept }
    }

    async fn start(&self, launch: &Launch, record: &Record) -> Result<Opened, String> {
        prepare(launch, record).map_err(|error| format!("{}: {error}", launch.dir.display()))?;
        let instance = self.runtime.start(launch).await.map_err(|error| error.to_string())?;
        converse(instance, &record.marker, self.settings.start_timeout).await
    }

    async fn discard(&self, launch: &Launch) {
        self.remove(launch.id, &launch.dir).await;
    }

    async fn remove(&self, container: SandboxId, dir: &Path) {
        match self.runtime.remove(container, dir).await {
            Ok(()) => remove_dir(dir),
            Err(error) => warn!(%error, "what is left of it could not be removed; the next start of the server tries again"),
        }
    }

    /// Gives a running sandbox its driver.
    fn drive(
        self: &Arc<Self>,
        record: Record,
        slot: (Option<OwnedSemaphorePermit>, Place),
        running: Running,
        age: Duration,
        wire: Wire,
        Keeping { host, kept }: Keeping,
    ) -> Handle {
        let (id, dir) = (record.id, self.dir(record.container()));
        let Wire { sender, receiver: commands } = wire;
        let gone = CancellationToken::new();
        let handle = Handle {
            id,
            token_sha256: record.token_sha256.as_str().into(),
            commands: sender,
            gone: gone.clone(),
            generation: Arc::new(AtomicU64::new(record.generation)),
            owner: record.owner.as_deref().map(Arc::from),
            created_at: record.created_at,
            metadata: Arc::new(record.config.metadata.clone()),
            last_use: LastUse::at(record.idle_since.unwrap_or_else(jiff::Timestamp::now)),
            lease: kept.as_ref().map(|kept| kept.keeper.lease().view()),
            network: Arc::new(NetworkView::of(&record, &dir)),
        };
        let egress = Egress::new(&self.network, &self.connections, &record.config.network, Arc::clone(&handle.network.log));
        let running = running.identified(&record);
        let Running { reader, writer, ended, execution, next_number, files: packs_files, single_files, tunnel, .. } = running;
        let roller = self.roller();
        let manager = Arc::clone(self);
        let token_sha256 = record.token_sha256.clone();
        let driver = Driver::new(Start {
            id,
            dir,
            runtime: Arc::clone(&self.runtime),
            record,
            metrics: Arc::clone(&self.metrics),
            commands,
            reader,
            writer,
            ended,
            execution,
            age,
            max_lifetime: self.settings.max_lifetime,
            on_end: Box::new(move |outcome| {
                if outcome.is_kept_elsewhere() {
                    return;
                }
                let message = obituary(outcome);
                manager.forget(id, Some(Obituary { message, token_sha256: token_sha256.clone() }));
            }),
            stop: self.stop.subscribe(),
            next_number,
            host,
            kept,
            roller,
            generation: Arc::clone(&handle.generation),
            last_use: handle.last_use.clone(),
            filesystems: self.filesystems.clone().map(|filesystems| {
                let manager = Arc::clone(self);
                let on_made: OnMade = Box::new(move |made, of| manager.template_ahead(made, of));
                Keeps { filesystems, on_made }
            }),
            packs_files,
            single_files,
            tunnel,
            egress,
        });
        self.lock().insert(id, handle.clone());
        self.leave_too(&handle);
        self.metrics.live.inc();
        let manager = Arc::clone(self);
        let drive = async move {
            let Ending { outcome, removed, dir } = driver.run().await;
            manager.metrics.live.dec();
            if !matches!(outcome, Outcome::LeftRunning) {
                manager.metrics.ended.inc();
            }
            if removed {
                remove_dir(&dir);
            }
            // Those who come now look on the volume.
            if matches!(outcome, Outcome::LeftRunning) || outcome.is_kept_elsewhere() {
                manager.forget(id, None);
            }
            drop(slot);
            manager.pool.look();
            gone.cancel();
        };
        self.drivers.spawn(drive.instrument(info_span!(parent: None, "sandbox", %id)));
        handle
    }

    fn forget(&self, id: SandboxId, why: Option<Obituary>) {
        if let Some(why) = why {
            self.obituaries.add(id, why);
        }
        self.lock().remove(&id);
    }

    /// Takes up every sandbox that an earlier server process left in the data directory. What can't be taken up is removed, and the
    /// reason is remembered.
    pub(crate) async fn take_up_all(self: &Arc<Self>) {
        if let Some(checkpoints) = &self.checkpoints {
            checkpoints.bury_what_is_due();
        }
        let found = match fs::read_dir(self.settings.data_dir.join("sandboxes")) {
            Ok(entries) => entries.flatten().filter_map(|entry| Left::read(&entry)).collect(),
            Err(error) => {
                warn!(%error, "the data directory can't be read");
                Vec::new()
            }
        };
        let mut found: Vec<Left> = found;
        step_back(&mut found);
        // One that stands by for another has no name of its own.
        let named = |left: &&Left| !left.record.as_ref().is_ok_and(|record| record.standby);
        self.taking_up.send_modify(|ids| ids.extend(found.iter().filter(named).map(|left| (left.id, TakingUp::First))));
        let mut stand_by = Vec::new();
        for left in found {
            let (id, stands_by) = (left.id, !named(&&left));
            let manager = Arc::clone(self);
            let take_up = async move {
                let settled = Arc::clone(&manager).take_up(left).await;
                if settled && !stands_by {
                    manager.taking_up.send_modify(|ids| {
                        ids.remove(&id);
                    });
                }
            };
            let task = self.drivers.spawn(take_up.instrument(info_span!(parent: None, "sandbox", %id)));
            stand_by.extend(stands_by.then_some(task));
        }
        let all = async {
            for task in stand_by {
                // A task that panicked has said so; its sandbox stays for the next start.
                let _ = task.await;
            }
            let tried = |ids: &HashMap<_, TakingUp>| ids.values().all(|taking_up| *taking_up != TakingUp::First);
            let _ = self.taking_up.subscribe().wait_for(tried).await;
        };
        // Who attaches to one that takes longer waits for it.
        if tokio::time::timeout(TAKE_UP_FIRST, all).await.is_err() {
            warn!("some sandboxes take long to be taken up; serving the others");
        }
    }

    /// False: it is left for the next start.
    async fn take_up(self: Arc<Self>, left: Left) -> bool {
        let (id, container) = (left.id, left.container);
        let dir = self.dir(container);
        if let Some(record) = left.record.as_ref().ok().filter(|record| record.standby) {
            info!(%container, "it was to take the place of another one, which goes on, or was a copy that nobody had heard of");
            self.remove(container, &dir).await;
            if record.is_unheard_of() {
                self.bury_copy(record).await;
            }
            return true;
        }
        if let Some(why) = self.checkpoints.as_ref().and_then(|checkpoints| checkpoints.unburied(id)) {
            info!(why, "was ended for good, and is removed");
            self.remove(container, &dir).await;
            return true;
        }
        let (why, token_sha256) = match self.try_take_up(left, &dir).await {
            Ok(()) => {
                self.metrics.taken_up.inc();
                info!("taken up");
                return true;
            }
            Err(NotTakenUp::Unknown(why)) => {
                // What can't be judged is not destroyed.
                warn!(why, "can't be taken up now, and is left for the next start");
                return false;
            }
            Err(NotTakenUp::Moved(why)) => {
                warn!(why, "is no longer this instance's, and is ended here without anything being written");
                self.remove(container, &dir).await;
                return true;
            }
            Err(NotTakenUp::Lost { why, token_sha256 }) => (why, token_sha256),
        };
        warn!(why, "can't be taken up");
        let message = format!("The sandbox was lost when its server was restarted: {why}.");
        self.obituaries.add(id, Obituary { message, token_sha256 });
        self.remove(container, &dir).await;
        true
    }

    /// Nobody waits for it any longer, and nothing is made of it.
    fn not_taken_up_yet(&self, id: SandboxId, token_sha256: Option<String>) {
        self.taking_up.send_modify(|ids| drop(ids.insert(id, TakingUp::NotYet { token_sha256 })));
    }

    async fn try_take_up(self: &Arc<Self>, left: Left, dir: &Path) -> Result<(), NotTakenUp> {
        let Left { id, container, record } = left;
        let record = match record {
            Ok(record) => record,
            Err(error @ RecordError::Version(_)) => {
                self.not_taken_up_yet(id, None);
                return Err(NotTakenUp::Unknown(error.to_string()));
            }
            Err(error) => return Err(NotTakenUp::Lost { why: error.to_string(), token_sha256: String::new() }),
        };
        // Before anything of it moves again: whether it is still this instance's.
        let held = self.resume_lease(&record).await?;
        // More than are allowed now may have been left: they are taken up all the same, and no new ones are made until they are fewer.
        let slot = Arc::clone(&self.slots).try_acquire_owned().ok();
        let place = self.tenants.readmit(record.owner.as_deref());
        let mut wait = TAKE_UP_AGAIN;
        let running = loop {
            match self.reach(&record, dir, held.as_ref()).await {
                Err(NotTakenUp::Unknown(why)) => {
                    warn!(why, "can't be taken up now, which is tried again");
                    self.not_taken_up_yet(id, Some(record.token_sha256.clone()));
                }
                reached => break reached?,
            }
            let mut stop = self.stop.subscribe();
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = async { drop(stop.wait_for(Option::is_some).await) } => return Err(NotTakenUp::Unknown("the server stops".to_owned())),
            }
            wait = (wait * 2).min(TAKE_UP_AGAIN_AT_MOST);
            if let Some(held) = &held {
                still_ours(held).await?;
            }
        };
        let age = jiff::Timestamp::now().duration_since(record.created_at);
        let age = Duration::try_from(age).unwrap_or_default();
        let wire = Wire::default();
        let held = match (&self.checkpoints, held) {
            (Some(checkpoints), Some(held)) => {
                if !held.lease.may_act() {
                    // Unknown is frozen, until its lease is certain.
                    let _ = self.runtime.pause(container, dir).await;
                    let _ = wire.sender.send(Command::Still).await;
                }
                Some((Arc::clone(checkpoints), held))
            }
            _ => None,
        };
        let keeping = self.keep(&record, &wire, held);
        self.drive(record, (slot, place), running, age, wire, keeping);
        Ok(())
    }

    /// The agent of a sandbox that an earlier process left.
    async fn reach(&self, record: &Record, dir: &Path, held: Option<&Held>) -> Result<Running, NotTakenUp> {
        let lost = |why: String| NotTakenUp::Lost { why, token_sha256: record.token_sha256.clone() };
        let instance = match self.runtime.take_up(record.container(), dir).await {
            Ok(instance) => instance,
            Err(RuntimeError::NotFound) => {
                if let Some(Held { lease, .. }) = held
                    && lease.latest().is_some()
                {
                    // What was saved of it can go on anywhere, and nobody should have to wait for the lease to run out.
                    let _ = tokio::time::timeout(CERTAIN_WITHIN, lease.release(Release::Anyone)).await;
                }
                return Err(lost("it no longer runs".to_owned()));
            }
            Err(error) => return Err(NotTakenUp::Unknown(error.to_string())),
        };
        let ended = instance.ended.clone();
        match (converse(instance, &record.marker, TAKE_UP).await, ended.now()) {
            (Ok(Opened { running, .. }), _) => Ok(running),
            (Err(why), Some(_)) => Err(lost(why)),
            (Err(why), None) => Err(NotTakenUp::Unknown(why)),
        }
    }

    /// The lease of a sandbox that an earlier process held. One that is lost is an error; one that is unknown, since the volume does not
    /// answer, is not.
    async fn resume_lease(&self, record: &Record) -> Result<Option<Held>, NotTakenUp> {
        let (Some(checkpoints), Some(epoch)) = (&self.checkpoints, record.epoch) else { return Ok(None) };
        let held = checkpoints.leases.resume(record.id, epoch);
        still_ours(&held).await?;
        Ok(Some(held))
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

    fn dir(&self, container: SandboxId) -> PathBuf {
        self.settings.data_dir.join("sandboxes").join(container.to_string())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<SandboxId, Handle>> {
        // A map is whole after each change.
        self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Both ends of the way to a driver.
struct Wire {
    sender: mpsc::Sender<Command>,
    receiver: mpsc::Receiver<Command>,
}

impl Default for Wire {
    fn default() -> Self {
        let (sender, receiver) = mpsc::channel(COMMANDS);
        Self { sender, receiver }
    }
}

/// How a sandbox is captured, where there is a volume, and its lease, where it is kept there.
#[derive(Default)]
struct Keeping {
    host: Option<Arc<SandboxHost>>,
    kept: Option<Kept>,
}

/// Why a sandbox was not taken up.
enum NotTakenUp {
    /// It is gone, for sure.
    Lost { why: String, token_sha256: String },
    /// It may well live.
    Unknown(String),
    /// It goes on elsewhere, or was ended.
    Moved(String),
}

/// A sandbox whose agent has answered.
struct Opened {
    enforced: Enforced,
    running: Running,
}

struct Running {
    reader: link::LinkReader,
    writer: link::LinkWriter,
    ended: sandboxer_runtime::Ended,
    execution: Option<Execution>,
    next_number: u64,
    /// The agent can be told who it is.
    identifies: bool,
    /// The agent packs and unpacks files.
    files: bool,
    /// It does what is asked of single files.
    single_files: SingleFiles,
    /// It carries streams of the network.
    tunnel: bool,
}

impl Running {
    /// The agent is told who it is before it hears anything else.
    fn identified(mut self, record: &Record) -> Self {
        if self.identifies {
            self.writer.queue(&ToAgent::Identify { hostname: record.hostname(), generation: record.generation });
        }
        self
    }
}

/// Whether a lease is not lost, as far as can be told.
async fn still_ours(held: &Held) -> Result<(), NotTakenUp> {
    match tokio::time::timeout(CERTAIN_WITHIN, held.lease.certain()).await {
        Ok(Err(LeaseError::Lost(reason))) => Err(NotTakenUp::Moved(reason.to_string())),
        _ => Ok(()),
    }
}

/// Opens the conversation, unless the sandbox ends first.
async fn converse(instance: Instance, marker: &Marker, within: Duration) -> Result<Opened, String> {
    let ended = instance.ended.clone();
    let opened = tokio::select! {
        opened = link::open(instance, marker, within) => opened,
        end = ended.wait() => return Err(end.to_string()),
    };
    match opened {
        Ok(Link {
            hello: FromAgent::HelloReply { enforced, execution, last_number, identifies, files, single_files, watches, tunnel, .. },
            reader,
            writer,
            ended,
        }) => {
            let last = execution.as_ref().map_or(0, |execution| execution.number).max(last_number.unwrap_or(0));
            let next_number = last.saturating_add(1);
            let execution = execution.map(Execution::taken_up);
            let single_files = SingleFiles::of(single_files, watches);
            let running = Running { reader, writer, ended, execution, next_number, identifies, files, single_files, tunnel };
            Ok(Opened { enforced, running })
        }
        Ok(_) => Err(LinkError::NotAReply.to_string()),
        // The agent's end closes a moment before the runtime knows why.
        Err(LinkError::Closed) => match tokio::time::timeout(END_EXPLAINED, ended.wait()).await {
            Ok(end) => Err(end.to_string()),
            Err(_) => Err(LinkError::Closed.to_string()),
        },
        Err(error) => Err(error.to_string()),
    }
}

fn prepare(launch: &Launch, record: &Record) -> io::Result<()> {
    private_dir(&launch.dir)?;
    record.write(&launch.dir)
}

fn private_dir(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

fn remove_dir(dir: &Path) {
    if let Err(error) = fs::remove_dir_all(dir) {
        warn!(%error, dir = %dir.display(), "could not be removed; the next start of the server tries again");
    }
}

/// A sandbox that has started, if it can do all that was asked for.
fn as_asked(Opened { enforced, running }: Opened, asked: &LimitsRequest, config: &SandboxConfig) -> Result<Running, CreateError> {
    if let Some(name) = not_enforced(asked, enforced) {
        let message = format!("limits.{name} can't be enforced with the gVisor of this server. Leave it out, or ask another server.");
        return Err(CreateError::new(ErrorCode::LimitNotEnforceable, message));
    }
    if !config.network.is_empty() && !running.tunnel {
        let message = "network: the agent of this image is older than this server and can't do it. Leave it out, or make the image anew.";
        return Err(CreateError::new(ErrorCode::NetworkNotAvailable, message));
    }
    Ok(running)
}

/// A limit that was asked for and that this sandbox can't enforce.
fn not_enforced(asked: &LimitsRequest, enforced: Enforced) -> Option<&'static str> {
    [
        (asked.pids.is_some() && !enforced.pids, "pids"),
        (asked.memory_mb.is_some() && !enforced.memory, "memory_mb"),
        (asked.disk_mb.is_some() && !enforced.disk, "disk_mb"),
    ]
    .into_iter()
    .find_map(|(missing, name)| missing.then_some(name))
}

fn same_secret(given: &str, sha256: &str) -> bool {
    hash(given).as_bytes().ct_eq(sha256.as_bytes()).into()
}

fn new_token() -> String {
    let bytes: [u8; 32] = rand::random();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn hash(secret: &str) -> String {
    Sha256::digest(secret.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

//! Bringing a sandbox here from the volume: from whoever has it, or from its last checkpoint.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use sandboxer_protocol::{
    SandboxId,
    client::{ErrorCode, ServerEvent, Status, StatusUpdate},
};
use sandboxer_runtime::{Instance, Launch};
use sandboxer_store::{
    CheckpointName, FileSet, ManifestAt, SandboxStatus,
    lease::{
        Sought,
        handoff::{self, Arrival},
    },
    record::{ReadError, Stored},
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinHandle,
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, debug, info, info_span, warn};

use super::{
    Handle, Manager,
    converse::{Opened, Running, converse},
    handle::Wire,
    keep::Keeping,
    launch::{prepare, private_dir},
    secrets::same_secret,
    take_up::TakingUp,
};
use crate::{
    checkpoints::Checkpoints,
    sandbox::{
        host::SandboxHost,
        record::{RECORD_VERSION, Record},
        saving::Kept,
    },
    tenants::Place,
};

/// Why a sandbox does not come here, said to who wanted it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ArriveError {
    NotFound(String),
    InUse,
    HandoffInProgress,
    /// It runs here, and could not be taken up yet.
    NotYet,
    /// The instance that has it does not answer, and has never saved it: it may live, and there is nothing to restore.
    OwnerSilent,
    /// It is not the sandbox: another server may have it, or this one a moment later.
    Later(ErrorCode, String),
    Failed(String),
}

/// What is known of a sandbox that is not in memory.
pub(crate) enum Saved {
    There(There),
    Unreadable(ReadError),
}

pub(crate) struct There {
    token_sha256: String,
}

impl There {
    /// Whether this is the sandbox's token, without telling how much of it is right.
    pub(crate) fn opens(&self, token: &str) -> bool {
        same_secret(token, &self.token_sha256)
    }
}

/// A sandbox that came, and what its client is told first.
pub(crate) struct Arrived {
    pub(crate) handle: Handle,
    pub(crate) greeting: ServerEvent,
}

/// What a restore brings, for the one who asked for it.
struct Restored {
    record: Record,
    running: Running,
    place: (Option<OwnedSemaphorePermit>, Place),
}

/// Who waits for what is got ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hurry {
    Somebody,
    /// The lease of a silent owner has some seconds to go.
    Nobody,
}

/// A restore that lacks only the lease.
struct Ready {
    name: CheckpointName,
    record: Record,
    launch: Launch,
    files: FileSet,
    /// A container that waits for it.
    container: Option<Instance>,
    /// Its place, where it was taken ahead.
    slot: Option<OwnedSemaphorePermit>,
    /// Its place among those of its API key.
    place: Place,
}

/// What is got ready before the sandbox is held.
#[derive(Default)]
enum Ahead {
    #[default]
    Nothing,
    Here(Box<Ready>),
    /// On its way. It is never cut off: half of a container is nobody's.
    Coming(CheckpointName, JoinHandle<Option<Box<Ready>>>),
}

impl Ahead {
    async fn arrived(self) -> Option<Box<Ready>> {
        match self {
            Self::Nothing => None,
            Self::Here(ready) => Some(ready),
            Self::Coming(_, ready) => ready.await.ok().flatten(),
        }
    }

    fn is_of(&self, name: CheckpointName) -> bool {
        match self {
            Self::Nothing => false,
            Self::Here(ready) => ready.name == name,
            Self::Coming(coming, _) => *coming == name,
        }
    }
}

/// Starts one sandbox from a checkpoint.
pub(crate) struct Restorer {
    manager: Arc<Manager>,
    checkpoints: Arc<Checkpoints>,
    id: SandboxId,
    token_sha256: String,
    ahead: Arc<Mutex<Ahead>>,
    restored: Arc<Mutex<Option<Restored>>>,
}

impl Manager {
    pub(crate) fn keeps_checkpoints(&self) -> bool {
        self.checkpoints.is_some()
    }

    /// What there is of a sandbox that is not in memory, on the volume or left by an earlier process, before anything is locked. None: nothing.
    pub(crate) async fn saved(&self, id: SandboxId) -> Option<Saved> {
        if let Some(TakingUp::NotYet { token_sha256: Some(token_sha256) }) = self.taking_up.borrow().get(&id) {
            return Some(Saved::There(There { token_sha256: token_sha256.clone() }));
        }
        match self.checkpoints.as_ref()?.leases.look(id).await {
            Ok(stored) => stored.map(|stored| Saved::There(There { token_sha256: Checkpoints::token_sha256(&stored).to_owned() })),
            Err(error) => Some(Saved::Unreadable(error)),
        }
    }

    /// Gets hold of a sandbox that is not here and starts it from its latest checkpoint. Runs to its end even if nobody waits for it any
    /// longer; `give_up` ends the waiting for another instance.
    pub(crate) async fn arrive(self: &Arc<Self>, id: SandboxId, give_up: CancellationToken) -> Result<Arrived, ArriveError> {
        let manager = Arc::clone(self);
        let span = info_span!(parent: None, "sandbox", %id);
        let mut stop = self.stop.subscribe();
        let bring = async move {
            let bringing = manager.bring(id, &give_up);
            tokio::pin!(bringing);
            tokio::select! {
                arrived = &mut bringing => arrived,
                // A server that stops takes nothing more.
                () = async { drop(stop.wait_for(Option::is_some).await) } => {
                    give_up.cancel();
                    bringing.await
                }
            }
        };
        let arriving = self.drivers.spawn(bring.instrument(span));
        arriving.await.unwrap_or_else(|_| Err(ArriveError::Failed("Bringing the sandbox here failed. Try again.".to_owned())))
    }

    async fn bring(self: Arc<Self>, id: SandboxId, give_up: &CancellationToken) -> Result<Arrived, ArriveError> {
        let turn = self.turn(id);
        let _turn = turn.acquire().await;
        if let Some(handle) = self.find_certainly(id).await? {
            return Ok(Arrived { greeting: handle.running(), handle });
        }
        let Some(checkpoints) = self.checkpoints.clone() else { return Err(not_found()) };
        if let Some(why) = checkpoints.unburied(id) {
            return Err(ArriveError::NotFound(why));
        }
        let begun = Instant::now();
        let _busy = self.pool.busy();
        let looked = checkpoints.leases.look(id).await?;
        let Some(stored) = looked else { return Err(not_found()) };
        let ahead = self.look_ahead(&checkpoints, id, &stored).await?.map_or(Ahead::Nothing, |ready| Ahead::Here(Box::new(ready)));
        let ahead = Arc::new(Mutex::new(ahead));
        let wire = Wire::default();
        let restored = Arc::new(Mutex::new(None));
        let restorer = Restorer {
            manager: Arc::clone(&self),
            checkpoints: Arc::clone(&checkpoints),
            id,
            token_sha256: Checkpoints::token_sha256(&stored).to_owned(),
            ahead: Arc::clone(&ahead),
            restored: Arc::clone(&restored),
        };
        let (runtime, metrics) = (Arc::clone(&self.runtime), Arc::clone(&self.metrics));
        let place = (id, self.dir(id));
        let host = SandboxHost::new(id, place, runtime, Arc::clone(&checkpoints), wire.sender.clone(), metrics, Some(restorer));
        let arrival = handoff::arrive(&checkpoints.leases, id, Arc::clone(&host), give_up).await;
        self.put_back_later(std::mem::take(&mut *ahead.lock().unwrap_or_else(PoisonError::into_inner)));
        let keeper = match arrival {
            Arrival::Running(keeper) => keeper,
            Arrival::NotHeld(sought) => return Err(not_held(&sought)),
            Arrival::RestoreFailed(why) => return Err(ArriveError::Failed(why)),
        };
        let came = restored.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Restored { mut record, running, place }) = came else {
            return Err(ArriveError::Failed("The sandbox was restored and lost.".to_owned()));
        };
        let mut greeting = StatusUpdate::new(Status::Running);
        greeting.generation = (record.generation > 0).then_some(record.generation);
        if !keeper.lease().is_exact() {
            // What was saved may be older than the last rewinding; epochs always rise.
            record.generation = record.generation.saturating_add(keeper.lease().epoch());
            greeting.rewound = Some(true);
            greeting.generation = Some(record.generation);
            if let Some(execution) = &running.execution {
                greeting.execution_id = Some((*execution.id).clone());
                greeting.stdout_offset = Some(execution.shown.stdout);
                greeting.stderr_offset = Some(execution.shown.stderr);
                greeting.stdin_offset = Some(execution.stdin_next);
            }
        }
        if let Err(error) = record.write(&self.dir(record.container())) {
            warn!(%error, "the record of the sandbox could not be written");
        }
        info!(ms = begun.elapsed().as_millis(), rewound = greeting.rewound, "restored");
        self.metrics.restores.inc();
        let age = std::time::Duration::try_from(jiff::Timestamp::now().duration_since(record.created_at)).unwrap_or_default();
        let keeping = Keeping { host: Some(host), kept: Some(Kept { keeper, checkpoints }) };
        let handle = self.drive(record, place, running, age, wire, keeping);
        Ok(Arrived { handle, greeting: ServerEvent::StatusUpdate(greeting) })
    }

    /// Gets ready what nobody has, before it is held: a restore that can't succeed leaves the record as it is.
    async fn look_ahead(self: &Arc<Self>, checkpoints: &Checkpoints, id: SandboxId, stored: &Stored) -> Result<Option<Ready>, ArriveError> {
        let record = &stored.record;
        let (None, None, Some(name)) = (&record.owner, &record.tombstone, record.latest) else { return Ok(None) };
        // Taken, so that no more is got ready than could be restored.
        let slot = self.leaving.room(self.stopped(), || Arc::clone(&self.slots).try_acquire_owned()).await;
        let slot = slot.map_err(|_| ArriveError::Later(ErrorCode::NoCapacity, self.full()))?;
        let why = match self.get_ready(checkpoints, id, name, Checkpoints::token_sha256(stored), Hurry::Somebody).await {
            Ok(ready) => return Ok(Some(Ready { slot: Some(slot), ..ready })),
            Err(why) => why,
        };
        // Somebody may have gone on with it, and removed what it was at.
        match checkpoints.look(id).await {
            Ok(Some(now)) if now.record.sequence == record.sequence => Err(ArriveError::Failed(why)),
            _ => Ok(None),
        }
    }

    /// Ends what was got ready for nothing.
    async fn put_back(&self, unused: Ready) {
        if unused.container.is_some() {
            self.discard(&unused.launch).await;
        }
    }

    /// The same when it is there. Nobody waits for that: it was only a guess.
    fn put_back_later(self: &Arc<Self>, ahead: Ahead) {
        if matches!(ahead, Ahead::Nothing) {
            return;
        }
        let manager = Arc::clone(self);
        let end = async move {
            if let Some(unused) = ahead.arrived().await {
                manager.put_back(*unused).await;
            }
        };
        self.drivers.spawn(end.in_current_span());
    }

    /// Everything of a restore that needs no lease. If no container waits, one is made while the data is on its way here; data that is here
    /// already would only be held up by that, where somebody waits.
    async fn get_ready(
        self: &Arc<Self>,
        checkpoints: &Checkpoints,
        id: SandboxId,
        name: CheckpointName,
        token_sha256: &str,
        hurry: Hurry,
    ) -> Result<Ready, String> {
        let found = checkpoints.find(ManifestAt::Checkpoint { sandbox_id: id, name }, &self.images).await?;
        let state = &found.state;
        let resources = state.config.limits.again(&self.settings.max_limits, &self.host).map_err(|error| error.message)?;
        let owner = state.owner.as_deref();
        let place = match hurry {
            Hurry::Somebody => self.leaving.room_of(owner, self.stopped(), || self.tenants.admit_again(owner)).await,
            Hurry::Nobody => self.tenants.admit_again(owner),
        };
        let place = place.map_err(|error| error.message)?;
        let waited = self.container_from_pool(&found.image);
        let makes_one = waited.is_none() && (hurry == Hurry::Nobody || !checkpoints.has(&found).await);
        // What is made before the sandbox is held is not yet the sandbox, neither to the next server.
        let container = waited.as_ref().map(|container| container.id).or_else(|| makes_one.then(SandboxId::random));
        let record = Record {
            version: RECORD_VERSION,
            id,
            created_at: state.created_at,
            token_sha256: token_sha256.to_owned(),
            marker: state.marker,
            image: found.image.clone(),
            owner: state.owner.clone(),
            idle_since: None,
            config: state.config.clone(),
            epoch: None,
            generation: state.generation,
            container,
            standby: true,
        };
        let launch = self.launch(&record, resources);
        let (files, container) = match waited {
            Some(waited) => (checkpoints.bring(&found).await, Some(waited.instance)),
            None if makes_one => tokio::join!(checkpoints.bring(&found), self.make_container(&launch, &record)),
            None => (checkpoints.bring(&found).await, None),
        };
        match files {
            Ok(files) => Ok(Ready { name, record, launch, files, container, slot: None, place }),
            Err(why) => {
                if container.is_some() {
                    self.discard(&launch).await;
                }
                Err(why)
            }
        }
    }

    /// Without one the restore takes longer, and that is all.
    pub(super) async fn make_container(&self, launch: &Launch, record: &Record) -> Option<Instance> {
        let begun = Instant::now();
        let made = async {
            prepare(launch, record).map_err(|error| error.to_string())?;
            self.runtime.create(launch).await.map_err(|error| error.to_string())
        };
        match made.await {
            Ok(container) => {
                debug!(ms = begun.elapsed().as_millis(), "a container waits for what was saved");
                Some(container)
            }
            Err(why) => {
                warn!(why, "no container could be made ahead of the restore");
                self.discard(launch).await;
                None
            }
        }
    }

    fn full(&self) -> String {
        format!("This server has {} sandboxes, and that is all it may have. Try another one.", self.settings.max_sandboxes)
    }

    /// One at a time for each sandbox.
    pub(super) fn turn(&self, id: SandboxId) -> Arc<Semaphore> {
        let mut arriving = self.arriving.lock().unwrap_or_else(PoisonError::into_inner);
        arriving.retain(|_, turn| turn.strong_count() > 0);
        if let Some(turn) = arriving.get(&id).and_then(Weak::upgrade) {
            return turn;
        }
        let turn = Arc::new(Semaphore::new(1));
        arriving.insert(id, Arc::downgrade(&turn));
        turn
    }
}

impl Restorer {
    /// Gets ready what will probably be restored.
    pub(crate) fn expect(&self, name: CheckpointName) {
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        if ahead.is_of(name) {
            return;
        }
        self.manager.put_back_later(std::mem::take(&mut *ahead));
        // What is only expected takes a place too, so that no more is got ready than could be restored.
        let Ok(slot) = Arc::clone(&self.manager.slots).try_acquire_owned() else { return };
        let (manager, checkpoints) = (Arc::clone(&self.manager), Arc::clone(&self.checkpoints));
        let (id, token_sha256) = (self.id, self.token_sha256.clone());
        let coming = async move {
            info!(%name, "its owner is silent: what was saved is got ready");
            match manager.get_ready(&checkpoints, id, name, &token_sha256, Hurry::Nobody).await {
                Ok(ready) => Some(Box::new(Ready { slot: Some(slot), ..ready })),
                Err(why) => {
                    // It is tried again, and told, when the sandbox is held.
                    debug!(why, "what was saved could not be got ready");
                    None
                }
            }
        };
        *ahead = Ahead::Coming(name, self.manager.drivers.spawn(coming.in_current_span()));
    }

    /// A restore that gVisor fails is tried once more. Returns what it is to the runtime, and where.
    pub(crate) async fn restore(&self, name: CheckpointName, epoch: u64) -> Result<(SandboxId, PathBuf), String> {
        let manager = &self.manager;
        let mut ahead = std::mem::take(&mut *self.ahead.lock().unwrap_or_else(PoisonError::into_inner));
        if !ahead.is_of(name) {
            // Somebody has gone on with it since.
            manager.put_back_later(std::mem::take(&mut ahead));
        }
        let mut ready = ahead.arrived().await;
        let got = ready.as_mut().and_then(|ready| ready.slot.take());
        let Ok(slot) = got.map_or_else(|| Arc::clone(&manager.slots).try_acquire_owned(), Ok) else {
            if let Some(ready) = ready {
                manager.put_back(*ready).await;
            }
            return Err(manager.full());
        };
        manager.give_way();
        let ready = match ready {
            Some(ready) => *ready,
            None => manager.get_ready(&self.checkpoints, self.id, name, &self.token_sha256, Hurry::Somebody).await?,
        };
        let Ready { record, launch, files, mut container, place, .. } = ready;
        let record = Record { epoch: Some(epoch), standby: false, ..record };
        let mut failure = String::new();
        for attempt in 1..=2 {
            let container = container.take();
            let begun = Instant::now();
            let started = async {
                prepare(&launch, &record).map_err(|error| format!("{}: {error}", launch.dir.display()))?;
                let restored = match container {
                    Some(instance) => manager.runtime.restore_into(&launch, files.dir()).await.map(|()| instance),
                    None => manager.runtime.restore(&launch, files.dir()).await,
                };
                let instance = restored.map_err(|error| error.to_string())?;
                debug!(ms = begun.elapsed().as_millis(), "gVisor has restored it");
                let described = self.describe(&record, SandboxStatus::Running);
                let (opened, ()) = tokio::join!(converse(instance, &record.marker, manager.settings.start_timeout), described);
                opened
            };
            match started.await {
                Ok(Opened { running, .. }) => {
                    debug!(ms = begun.elapsed().as_millis(), "its agent answers");
                    let restored = Restored { record, running, place: (Some(slot), place) };
                    *self.restored.lock().unwrap_or_else(PoisonError::into_inner) = Some(restored);
                    return Ok((launch.id, launch.dir));
                }
                Err(why) => {
                    warn!(attempt, why, "could not be restored");
                    self.keep_boot_log(&launch.dir);
                    self.describe(&record, SandboxStatus::Checkpointed).await;
                    manager.discard(&launch).await;
                    failure = why;
                }
            }
        }
        Err(format!("{name} could not be restored: {failure}"))
    }

    /// Brings the copies up to date that people and tools read.
    async fn describe(&self, record: &Record, status: SandboxStatus) {
        if let Err(error) = self.checkpoints.describe(record, status, None).await {
            warn!(error = error.whole(), ?status, "the volume could not be told what became of the sandbox");
        }
    }

    /// Ends what was restored, if it has no driver yet that would.
    pub(crate) async fn take_back(&self) -> bool {
        let taken = self.restored.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Restored { record, running, place }) = taken else { return false };
        drop(running);
        let resources = sandboxer_runtime::HostResources::default();
        self.manager.discard(&self.manager.launch(&record, resources)).await;
        drop(place);
        true
    }

    fn keep_boot_log(&self, dir: &std::path::Path) {
        let kept = self.manager.settings.data_dir.join("failed-restores");
        if let Ok(log) = std::fs::read(dir.join("boot.log"))
            && private_dir(&kept).and_then(|()| std::fs::write(kept.join(format!("{}.log", self.id)), log)).is_err()
        {
            warn!("the boot log of the failed restore could not be kept");
        }
    }
}

pub(super) fn not_found() -> ArriveError {
    ArriveError::NotFound("There is no such sandbox.".to_owned())
}

pub(super) fn not_held(sought: &Sought) -> ArriveError {
    match sought {
        Sought::Held(_) | Sought::NotFound => not_found(),
        Sought::NeverSaved { owner: None } => {
            ArriveError::NotFound("The sandbox was lost before it was saved for the first time.".to_owned())
        }
        Sought::NeverSaved { owner: Some(_) } => ArriveError::OwnerSilent,
        Sought::Gone(tombstone) => ArriveError::NotFound(tombstone.reason.clone()),
        Sought::InUse => ArriveError::InUse,
        Sought::HandoffInProgress => ArriveError::HandoffInProgress,
        Sought::CannotSave(why) => ArriveError::Failed(format!("The instance that has the sandbox can't save it, and keeps it: {why}")),
        Sought::Unanswered => {
            ArriveError::Failed("The instance that has the sandbox neither hands it over nor answers. Try again later.".to_owned())
        }
        Sought::GivenUp => ArriveError::Failed("Nobody waits for it any longer.".to_owned()),
        Sought::Unavailable(why) => ArriveError::Later(ErrorCode::VolumeUnavailable, unanswered(why)),
    }
}

impl From<ReadError> for ArriveError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Unavailable(why) => Self::Later(ErrorCode::VolumeUnavailable, unanswered(&why)),
            ReadError::Bad(bad) => Self::Failed(bad.to_string()),
        }
    }
}

pub(super) fn unanswered(why: &str) -> String {
    format!("The volume does not answer: {why}. Try again later.")
}

//! Being ready before anybody asks: started sandboxes that wait for their creator, and created containers that wait for what is restored.
//!
//! ```text
//!   keeper ── makes one at a time, while nobody else has anything made ──► waits ──► handed out, if it answers
//!                                                                           └─ dead, too many, memory short, server stops: removed
//! ```
//!
//! What waits holds nobody's place: it gives way when a client needs the last one. To the next server process it is a *standby* that nobody
//! has heard of, and is removed. Its id is its own from the start and is told to nobody before its creator; everything else that a sandbox
//! is, it becomes when it is handed out.

mod shelves;

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::future::join_all;
use sandboxer_protocol::{
    SandboxId,
    agent::{Enforced, FromAgent, FromAgentFrame, Marker, ToAgent},
    client::{ErrorCode, LimitsRequest},
};
use sandboxer_runtime::{HostResources, Instance, Launch};
use tokio::{
    sync::{Notify, oneshot, watch},
    time::{Instant, sleep_until, timeout},
};
use tracing::{Instrument as _, debug, info, info_span, warn};

use self::shelves::{Shelves, Waits};
use super::{
    CreateError, Manager,
    converse::{Opened, Running},
    launch::prepare,
};
use crate::{
    images::BaseImage,
    limits::Limits,
    memory::available_memory,
    sandbox::{
        driver::Stop,
        record::{RECORD_VERSION, Record, SandboxConfig},
    },
    settings::PoolSettings,
};

/// For how long nobody has had anything made before something is made to wait.
const QUIET: Duration = Duration::from_millis(100);
/// A pool that is not full for so long is filled although others have something made: it is work that they would have to do.
const STARVED: Duration = Duration::from_secs(2);
/// How often is looked how much memory there is, while something waits.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
/// After something could not be made.
const AFTER_FAILURE: Duration = Duration::from_secs(10);
/// How long one that waited may take to give a sign of life.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// What a sandbox can't be told any more once it is started.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Class {
    pub(super) image: PathBuf,
    pub(super) limits: Limits,
}

/// A started sandbox that nobody has heard of.
pub(super) struct Waiting {
    pub(super) id: SandboxId,
    pub(super) marker: Marker,
    launch: Launch,
    enforced: Enforced,
    running: Running,
}

impl Waiting {
    /// It is what the record says from now on, also to the next server.
    pub(super) fn hand_out(self, record: &Record, dir: &Path) -> Result<Opened, CreateError> {
        let written = record.write(dir).map_err(|error| {
            CreateError::new(ErrorCode::RuntimeFailed, format!("The sandbox could not be started: {}: {error}", dir.display()))
        });
        written.map(|()| Opened { enforced: self.enforced, running: self.running })
    }

    /// Whether its agent is there: nobody is given one that is dead.
    async fn answers(&mut self) -> bool {
        let value: u64 = rand::random();
        let Running { reader, writer, .. } = &mut self.running;
        let asked = async {
            writer.send(&ToAgent::Ping { value }).await.ok()?;
            loop {
                match reader.recv().await.ok()? {
                    FromAgentFrame::Control(FromAgent::Pong { value: said, .. }) if said == value => return Some(()),
                    FromAgentFrame::Control(_) => {}
                    _ => return None,
                }
            }
        };
        matches!(timeout(ANSWERS_WITHIN, asked).await, Ok(Some(())))
    }
}

impl Waits for Waiting {
    fn is_alive(&self) -> bool {
        self.running.ended.now().is_none()
    }
}

/// A created container that waits for what is to be restored into it.
pub(super) struct Container {
    pub(super) id: SandboxId,
    pub(super) instance: Instance,
    launch: Launch,
}

impl Waits for Container {
    fn is_alive(&self) -> bool {
        self.instance.ended.now().is_none()
    }
}

/// What the keeper does next.
enum Job {
    Sandbox(Class),
    Container(PathBuf),
}

/// A sandbox that is being made, and who wants it as soon as it is there.
struct Making {
    class: Class,
    wanted: Option<oneshot::Sender<Waiting>>,
}

struct Stock {
    sandboxes: Shelves<Class, Waiting>,
    containers: Shelves<PathBuf, Container>,
    making: Option<Making>,
    closed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Memory {
    Plenty,
    /// What waits stays, and nothing is added.
    Tight,
    Short,
}

pub(super) struct Pool {
    settings: PoolSettings,
    stock: Mutex<Stock>,
    /// Something happened that the keeper has to look at.
    news: Arc<Notify>,
    activity: Arc<Activity>,
}

/// Whether somebody is having something made.
struct Activity {
    under_way: AtomicUsize,
    last: Mutex<Instant>,
    news: Arc<Notify>,
}

/// Somebody is having something made, until this is dropped.
pub(super) struct Busy(Arc<Activity>);

impl Drop for Busy {
    fn drop(&mut self) {
        *self.0.last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        if self.0.under_way.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.news.notify_one();
        }
    }
}

impl Pool {
    pub(super) fn new(settings: PoolSettings) -> Self {
        let news = Arc::new(Notify::new());
        let stock = Stock {
            sandboxes: Shelves::new(settings.sandboxes),
            containers: Shelves::new(settings.containers),
            making: None,
            closed: false,
        };
        let activity = Activity { under_way: AtomicUsize::new(0), last: Mutex::new(Instant::now()), news: Arc::clone(&news) };
        Self { settings, stock: Mutex::new(stock), news, activity: Arc::new(activity) }
    }

    /// Nothing is made to wait as long as this is kept, unless that goes on and on.
    pub(super) fn busy(&self) -> Busy {
        self.activity.under_way.fetch_add(1, Ordering::AcqRel);
        Busy(Arc::clone(&self.activity))
    }

    /// There may be room for more, or for less.
    pub(super) fn look(&self) {
        self.news.notify_one();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Stock> {
        // Shelves are whole after each change.
        self.stock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From when on nothing is disturbed by making something. None: somebody has something made.
    fn quiet_at(&self) -> Option<Instant> {
        let last = *self.activity.last.lock().unwrap_or_else(PoisonError::into_inner);
        (self.activity.under_way.load(Ordering::Acquire) == 0).then_some(last + QUIET)
    }

    /// There is memory for what nobody has asked for.
    pub(super) fn may_grow(&self) -> bool {
        self.memory() == Memory::Plenty
    }

    fn memory(&self) -> Memory {
        let least = self.settings.min_free_bytes;
        match available_memory(&self.settings.meminfo) {
            Some(available) if available < least => Memory::Short,
            Some(available) if available < least.saturating_add(least / 4) => Memory::Tight,
            _ => Memory::Plenty,
        }
    }
}

impl Manager {
    /// Keeps the pool full until the server stops.
    pub(crate) fn keep_pool(self: &Arc<Self>) {
        let PoolSettings { sandboxes, containers, .. } = self.pool.settings;
        if sandboxes > 0 || (containers > 0 && self.restores()) {
            self.drivers.spawn(Arc::clone(self).fill_and_drain());
        }
    }

    /// Something may come to be restored here: what was saved on a volume, or a template.
    fn restores(&self) -> bool {
        self.checkpoints.is_some() || self.filesystems.as_ref().is_some_and(|filesystems| filesystems.templates.is_some())
    }

    /// A sandbox of this class that waits, or is just being made to.
    pub(super) async fn from_pool(self: &Arc<Self>, class: &Class) -> Option<Waiting> {
        if self.pool.settings.sandboxes == 0 {
            return None;
        }
        loop {
            let (taken, coming) = {
                let mut stock = self.pool.lock();
                let taken = stock.sandboxes.take(class, Instant::now());
                let coming = match &mut stock.making {
                    Some(Making { class: made, wanted: wanted @ None }) if taken.is_none() && made == class => {
                        let (sender, receiver) = oneshot::channel();
                        *wanted = Some(sender);
                        Some(receiver)
                    }
                    _ => None,
                };
                (taken, coming)
            };
            self.note_pool();
            let waiting = match (taken, coming) {
                (Some(waiting), _) => Some(waiting),
                (None, Some(coming)) => coming.await.ok(),
                (None, None) => None,
            };
            let Some(mut waiting) = waiting else {
                self.metrics.pool_misses.inc();
                return None;
            };
            if waiting.answers().await {
                self.metrics.pool_hits.inc();
                return Some(waiting);
            }
            warn!(id = %waiting.id, "a sandbox that waited does not answer");
            self.give_up(waiting.launch);
        }
    }

    /// It was taken and could not be used, which was not its fault.
    pub(super) fn back_into_pool(self: &Arc<Self>, class: &Class, waiting: Waiting) {
        self.put(class, waiting);
        self.pool.look();
    }

    /// A container of this image that waits for something to be restored into it.
    pub(super) fn container_from_pool(self: &Arc<Self>, image: &Path) -> Option<Container> {
        if self.pool.settings.containers == 0 {
            return None;
        }
        let (kind, mut dead) = (image.to_owned(), Vec::new());
        let taken = {
            let mut stock = self.pool.lock();
            loop {
                match stock.containers.take(&kind, Instant::now()) {
                    Some(container) if !container.is_alive() => dead.push(container.launch),
                    taken => break taken,
                }
            }
        };
        self.give_up_all(dead);
        if taken.is_some() { &self.metrics.restore_pool_hits } else { &self.metrics.restore_pool_misses }.inc();
        self.note_pool();
        self.pool.look();
        taken
    }

    /// What waits makes room for those who have taken a place.
    pub(super) fn give_way(self: &Arc<Self>) {
        let most = self.slots.available_permits();
        let stock = self.stock_class();
        let out = {
            let mut shelves = self.pool.lock();
            take_beyond(&mut shelves, stock.as_ref(), most)
        };
        self.give_up_all(out);
    }

    /// What is always kept: the base image with the limits that nobody asked for.
    fn stock_class(&self) -> Option<Class> {
        let BaseImage::Ready(image) = self.images.base() else { return None };
        let limits = Limits::resolve(&LimitsRequest::default(), &self.settings.default_limits, &self.settings.max_limits).ok()?;
        Some(Class { image, limits })
    }

    async fn fill_and_drain(self: Arc<Self>) {
        let mut stop = self.stop.subscribe();
        let mut base = self.images.watch();
        let mut lacking: Option<Instant> = None;
        let mut not_before = Instant::now();
        while self.stopping().is_none() {
            let memory = self.pool.memory();
            let stock = self.stock_class();
            self.tidy(stock.as_ref(), memory);
            let job = if memory == Memory::Plenty { self.next_job(stock.as_ref()) } else { None };
            let now = Instant::now();
            let at = match &job {
                Some(_) => {
                    let starved = *lacking.get_or_insert(now) + STARVED;
                    self.pool.quiet_at().map_or(starved, |quiet| quiet.min(starved)).max(not_before)
                }
                None => {
                    lacking = None;
                    now + LOOK_AGAIN
                }
            };
            if let Some(job) = job
                && at <= now
            {
                if let Err(why) = self.fill(job, &mut stop).await {
                    warn!(why, "nothing could be made to wait");
                    not_before = Instant::now() + AFTER_FAILURE;
                }
                continue;
            }
            tokio::select! {
                () = self.pool.news.notified() => {}
                // The sender is a part of the images.
                _ = base.changed() => {}
                () = async { drop(stop.wait_for(Option::is_some).await) } => {}
                () = sleep_until(at) => {}
            }
        }
        self.drain_pool().await;
    }

    /// What is to be made, if there is room for it.
    fn next_job(&self, stock: Option<&Class>) -> Option<Job> {
        let (shelves, now) = (self.pool.lock(), Instant::now());
        if shelves.sandboxes.len() + shelves.containers.len() >= self.slots.available_permits() {
            return None;
        }
        let sandbox = shelves.sandboxes.wanted(stock, now).map(Job::Sandbox);
        let container = || {
            let image = stock.filter(|_| self.restores()).map(|stock| &stock.image);
            shelves.containers.wanted(image, now).map(Job::Container)
        };
        sandbox.or_else(container)
    }

    async fn fill(self: &Arc<Self>, job: Job, stop: &mut watch::Receiver<Option<Stop>>) -> Result<(), String> {
        let begun = Instant::now();
        let class = match &job {
            Job::Sandbox(class) => class.clone(),
            Job::Container(image) => {
                let limits = self.stock_class().map_or_else(Limits::default, |class| class.limits);
                Class { image: image.clone(), limits }
            }
        };
        let (record, launch) = self.plan_waiting(&class)?;
        let span = info_span!(parent: None, "sandbox", id = %record.id);
        let stopped = async { drop(stop.wait_for(Option::is_some).await) };
        let done = match job {
            Job::Sandbox(_) => {
                self.pool.lock().making = Some(Making { class: class.clone(), wanted: None });
                let started = tokio::select! {
                    started = self.start(&launch, &record).instrument(span) => started.map(Some),
                    () = stopped => Ok(None),
                };
                // Whoever waits for one that could not be made is told by its being dropped.
                let making = self.pool.lock().making.take();
                match started {
                    Ok(Some(opened)) => {
                        let mut waiting = waiting(&record, launch.clone(), opened);
                        // Now, and not with what its creator asks for first. One that does not hear it is asked for a sign of life before anybody gets it.
                        let _ = timeout(ANSWERS_WITHIN, waiting.running.writer.flush()).await;
                        self.watch_end(waiting.running.ended.clone());
                        match making.and_then(|making| making.wanted) {
                            Some(wanted) => {
                                if let Err(waiting) = wanted.send(waiting) {
                                    self.put(&class, waiting);
                                }
                            }
                            None => self.put(&class, waiting),
                        }
                        debug!(ms = begun.elapsed().as_millis(), "one more waits");
                        return Ok(());
                    }
                    Ok(None) => Ok(()),
                    Err(why) => Err(why),
                }
            }
            Job::Container(image) => {
                let created = async {
                    prepare(&launch, &record).map_err(|error| format!("{}: {error}", launch.dir.display()))?;
                    let instance = self.runtime.create(&launch).await.map_err(|error| error.to_string())?;
                    // Only when it is there does it save anybody anything.
                    self.runtime.created(launch.id).await.map_err(|error| error.to_string())?;
                    Ok::<_, String>(instance)
                };
                let created = tokio::select! {
                    created = created.instrument(span) => created.map(Some),
                    () = stopped => Ok(None),
                };
                match created {
                    Ok(Some(instance)) => {
                        self.watch_end(instance.ended.clone());
                        let container = Container { id: record.id, instance, launch: launch.clone() };
                        self.put_container(&image, container);
                        debug!(ms = begun.elapsed().as_millis(), "one more waits");
                        return Ok(());
                    }
                    Ok(None) => Ok(()),
                    Err(why) => Err(why),
                }
            }
        };
        self.discard(&launch).await;
        done
    }

    fn plan_waiting(&self, class: &Class) -> Result<(Record, Launch), String> {
        let resources: HostResources =
            class.limits.on_the_host(&LimitsRequest::default(), &self.host).map_err(|error| error.message.clone())?;
        let record = Record {
            version: RECORD_VERSION,
            id: SandboxId::random(),
            created_at: jiff::Timestamp::now(),
            // Nothing opens it: it is nobody's.
            token_sha256: String::new(),
            marker: Marker::new(rand::random()),
            image: class.image.clone(),
            owner: None,
            idle_since: None,
            config: SandboxConfig { limits: class.limits, ..SandboxConfig::default() },
            epoch: None,
            generation: 0,
            container: None,
            standby: true,
        };
        let launch = self.launch(&record, resources);
        Ok((record, launch))
    }

    /// One that dies while it waits is replaced.
    fn watch_end(&self, ended: sandboxer_runtime::Ended) {
        let (news, mut stop) = (Arc::clone(&self.pool.news), self.stop.subscribe());
        self.drivers.spawn(async move {
            tokio::select! {
                _ = ended.wait() => news.notify_one(),
                () = async { drop(stop.wait_for(Option::is_some).await) } => {}
            }
        });
    }

    fn put(self: &Arc<Self>, class: &Class, waiting: Waiting) {
        let mut stock = self.pool.lock();
        if stock.closed {
            drop(stock);
            return self.give_up(waiting.launch);
        }
        stock.sandboxes.put(class, waiting, Instant::now());
        drop(stock);
        self.note_pool();
    }

    fn put_container(self: &Arc<Self>, image: &Path, container: Container) {
        let mut stock = self.pool.lock();
        if stock.closed {
            drop(stock);
            return self.give_up(container.launch);
        }
        stock.containers.put(&image.to_owned(), container, Instant::now());
        drop(stock);
        self.note_pool();
    }

    /// Removes what is dead, too many, or too much for the memory that is left.
    fn tidy(self: &Arc<Self>, stock: Option<&Class>, memory: Memory) {
        let most = if memory == Memory::Short { 0 } else { self.slots.available_permits() };
        let now = Instant::now();
        let out = {
            let mut shelves = self.pool.lock();
            let image = stock.map(|stock| stock.image.clone());
            let mut out: Vec<Launch> = shelves.sandboxes.surplus(stock, most, now).into_iter().map(|waiting| waiting.launch).collect();
            out.extend(shelves.containers.surplus(image.as_ref(), most, now).into_iter().map(|container| container.launch));
            out.extend(take_beyond(&mut shelves, stock, most));
            out
        };
        if memory == Memory::Short && !out.is_empty() {
            info!(count = out.len(), "memory is short: what waits is given up");
        }
        self.give_up_all(out);
    }

    fn give_up_all(self: &Arc<Self>, out: Vec<Launch>) {
        if out.is_empty() {
            return;
        }
        self.metrics.pool_given_up.inc_by(out.len() as u64);
        out.into_iter().for_each(|launch| self.give_up(launch));
        self.note_pool();
    }

    fn give_up(self: &Arc<Self>, launch: Launch) {
        let manager = Arc::clone(self);
        self.drivers.spawn(async move { manager.discard(&launch).await });
    }

    async fn drain_pool(self: &Arc<Self>) {
        let out = {
            let mut stock = self.pool.lock();
            stock.closed = true;
            take_beyond(&mut stock, None, 0)
        };
        join_all(out.iter().map(|launch| self.discard(launch))).await;
        self.note_pool();
    }

    fn note_pool(&self) {
        let (sandboxes, containers) = {
            let stock = self.pool.lock();
            (stock.sandboxes.len(), stock.containers.len())
        };
        self.metrics.pooled_sandboxes.set(i64::try_from(sandboxes).unwrap_or(i64::MAX));
        self.metrics.pooled_containers.set(i64::try_from(containers).unwrap_or(i64::MAX));
    }
}

/// Containers go first: without them a restore takes a little longer, and a create the same.
fn take_beyond(stock: &mut Stock, class: Option<&Class>, most: usize) -> Vec<Launch> {
    let image = class.map(|class| class.image.clone());
    let containers = stock.containers.beyond(image.as_ref(), most.saturating_sub(stock.sandboxes.len()));
    let sandboxes = stock.sandboxes.beyond(class, most);
    containers.into_iter().map(|container| container.launch).chain(sandboxes.into_iter().map(|waiting| waiting.launch)).collect()
}

fn waiting(record: &Record, launch: Launch, Opened { enforced, running }: Opened) -> Waiting {
    // Its name is known already, and what starts in it ahead of its first program has it from the start.
    let mut running = running.identified(record);
    running.identifies = false;
    Waiting { id: record.id, marker: record.marker, launch, enforced, running }
}

//! Sandboxes by gVisor's runsc.
//!
//! What is in a sandbox's directory: the FIFOs (`fifo`), the bundle (`config.json` and an empty `rootfs`), `pid`, `runtime.json`
//! (`record`), `runsc.log`, `panic.log` and, until all of its memory is there, `serve-files.log` (empty unless something failed), `boot.log`
//! (after a failed start only).
//!
//! ## Starting
//! runsc opens its boot log before it does anything else, the boot log is a FIFO, and opening a FIFO waits for its reader. So runsc
//! is spawned, put into the sandbox's cgroup, and only then let go by opening the reading end: everything that it starts is in the
//! cgroup from its first instruction. The boot log is read while runsc starts and closed afterwards; the sandbox's kernel then writes
//! into nothing, so a guest can't fill the host's disk with it.

mod save;
mod watch;

use std::{
    collections::HashMap,
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use sandboxer_protocol::{SandboxId, agent::AgentConfig};
use sandboxer_runsc::{CallError, Features, FileServer, Files, FindError, Global, NotBrought, Restore, Run, Runsc, SandboxSpec, Status};
use tokio::{sync::watch as channel, time::timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::watch::{Started, Starting, Watch};
use crate::{
    AfterSave, BoxFuture, Ended, HostLimits, Instance, Launch, NotWhole, Runtime, RuntimeError, Written,
    cgroup::SandboxCgroup,
    fifo,
    process::{Process, file_servers_of, hurry, is_gone, processes_of},
    record::{Phase, Record},
};

/// Calls that only ask or tell.
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// How long `runsc run` may take; a loaded machine needs seconds.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long a sandbox that runs may take until all of its memory is there.
const WHOLE_LIMIT: Duration = Duration::from_secs(300);
/// Until then it has a processor at least, which it shares with whoever brings it, but no longer than this.
const BRINGING_LIMIT: Duration = Duration::from_secs(60);
/// Whoever has brought all of it ends by itself, unless the sandbox keeps it.
const BROUGHT_GRACE: Duration = Duration::from_secs(30);
/// How long a killed process may take to be gone.
const KILL_LIMIT: Duration = Duration::from_secs(10);
/// How long a start that is under way may go on when its sandbox is to be removed.
const START_GRACE: Duration = Duration::from_secs(5);

const RESTORE: &str = "restore the sandbox";

/// How a container comes to be.
#[derive(Clone, Copy)]
enum How<'a> {
    Run,
    Restore(&'a Path),
    /// It waits for what is to be restored into it.
    Create,
}

/// Where the pieces are.
#[derive(Debug, Clone)]
pub struct GvisorOptions {
    /// The runsc binary; see [`sandboxer_runsc::find`].
    pub runsc: PathBuf,
    /// Where runsc keeps its state. Private, on a local file system, the same after a restart.
    pub state_dir: PathBuf,
    pub limits: HostLimits,
    /// A program and its arguments that calls [`sandboxer_runsc::serve_files`]; without it gVisor reads what it restores by itself.
    pub file_server: Option<(PathBuf, &'static [&'static str])>,
}

/// Sandboxes by gVisor. It lets go of all of them when dropped; they go on.
pub struct GvisorRuntime {
    runsc: Runsc,
    state_dir: PathBuf,
    limits: HostLimits,
    file_server: Option<(PathBuf, &'static [&'static str])>,
    known: Mutex<HashMap<SandboxId, Known>>,
    tasks: TaskTracker,
    let_go: CancellationToken,
}

/// Waits with a container for what is restored into it.
type Waiting = Arc<Mutex<Option<FileServer>>>;

/// A sandbox that a task of ours watches.
#[derive(Clone)]
struct Known {
    ended: Ended,
    started: channel::Receiver<Started>,
    /// Gives up a start that takes too long.
    give_up: CancellationToken,
    files: Waiting,
    /// Ends whoever brings its memory, or waits for that.
    no_files: CancellationToken,
    /// Follows that one. Closed, so that it can be waited for.
    bringing: TaskTracker,
}

impl GvisorRuntime {
    /// Asks the binary what it can do and prepares the state directory.
    ///
    /// # Errors
    /// [`RuntimeError::Unavailable`] with what to do if the binary won't do, or the directory can't be made.
    pub async fn open(options: GvisorOptions) -> Result<Self, RuntimeError> {
        let features = Features::probe(&options.runsc).await.map_err(|error: FindError| RuntimeError::Unavailable(error.to_string()))?;
        let state_dir = std::path::absolute(&options.state_dir).map_err(unavailable(&options.state_dir))?;
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&state_dir).map_err(unavailable(&state_dir))?;
        let runsc = Runsc::new(options.runsc, Global { root: state_dir.clone(), features });
        Ok(Self {
            runsc,
            limits: options.limits.of_instance(&state_dir),
            file_server: options.file_server,
            state_dir,
            known: Mutex::default(),
            tasks: TaskTracker::new(),
            let_go: CancellationToken::new(),
        })
    }

    /// What the runsc in use can do.
    #[must_use]
    pub fn features(&self) -> &Features {
        &self.runsc.global().features
    }

    /// What the host can limit.
    #[must_use]
    pub fn limits(&self) -> &HostLimits {
        &self.limits
    }

    fn known(&self) -> std::sync::MutexGuard<'_, HashMap<SandboxId, Known>> {
        // Nothing panics while it is held, and a map is whole after each change.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a sandbox, a saved one, or a container for one that is yet to come.
    async fn launch(&self, launch: &Launch, how: How<'_>) -> Result<Instance, RuntimeError> {
        self.limits.check(&launch.resources)?;
        let image = std::path::absolute(&launch.image).unwrap_or_else(|_| launch.image.clone());
        if !image.is_file() {
            return Err(RuntimeError::Unavailable(format!("the image {} is not there", image.display())));
        }
        let dir = launch.dir.as_path();
        let what = if matches!(how, How::Run) { "start the sandbox" } else { RESTORE };
        let failed = |error: io::Error| RuntimeError::Failed { what, why: format!("{}: {error}", dir.display()) };
        write_bundle(launch, image).map_err(|why| RuntimeError::Failed { what, why })?;
        let ends = fifo::create(dir).map_err(failed)?;
        let cgroup = self.limits.create(launch.id, &launch.resources).map_err(failed)?;
        let run = run_of(launch);
        let spawned = match how {
            How::Run => self.runsc.spawn_run(&run, ends.guest_stdin, ends.guest_stdout),
            How::Create => self.runsc.spawn_create(&run, ends.guest_stdin, ends.guest_stdout),
            How::Restore(from) => self.runsc.spawn_restore(&Restore { run, image: from.to_owned() }, ends.guest_stdin, ends.guest_stdout),
        };
        let mut child = spawned.map_err(|error| RuntimeError::Failed { what, why: error.to_string() })?;
        let pid = child.id().unwrap_or_default();
        let prepared = (|| {
            let identity = Process::open(i32::try_from(pid).unwrap_or_default())?.identity().clone();
            Record::new(Phase::Starting, identity, cgroup.clone()).write(dir)?;
            cgroup.join(pid)?;
            fifo::open_boot_log(dir)
        })();
        let boot_log = match prepared {
            Ok(boot_log) => boot_log,
            Err(error) => {
                // It still waits for its boot log, so there is nothing but this one process.
                child.kill().await.ok();
                cgroup.remove().await.ok();
                return Err(failed(error));
            }
        };
        let starting = if matches!(how, How::Create) { Starting::Container } else { Starting::Sandbox };
        let ended = self.watch(launch.id, |watch| watch.start(dir.to_owned(), cgroup.clone(), child, boot_log, starting));
        let known = self.known().get(&launch.id).cloned();
        if let (How::Create, Some(known)) = (how, known) {
            *known.files.lock().unwrap_or_else(PoisonError::into_inner) = self.start_file_server(dir, &cgroup, &known);
        }
        Ok(Instance { from_agent: Box::new(ends.from_agent), to_agent: Box::new(ends.to_agent), ended })
    }

    async fn fill(&self, launch: &Launch, from: &Path) -> Result<(), RuntimeError> {
        let failed = |why: String| RuntimeError::Failed { what: RESTORE, why };
        let process = self.created_process(launch.id).await?;
        // It may have been made for another: what it may use is what is asked for now, and memory before it is filled.
        let cgroup = self.limits.create(launch.id, &launch.resources).map_err(|error| failed(error.to_string()))?;
        let restore = Restore { run: run_of(launch), image: from.to_owned() };
        let known = self.known().get(&launch.id).cloned();
        let files = known.as_ref().and_then(|known| {
            let waiting = known.files.lock().unwrap_or_else(PoisonError::into_inner).take();
            waiting.or_else(|| self.start_file_server(&launch.dir, &cgroup, known))
        });
        let known = known.filter(|_| files.is_some());
        self.runsc.restore_into(&restore, files, START_LIMIT).await.map_err(|error| refused(RESTORE, &error))?;
        let held = if known.is_some() { cgroup.hold_at_first() } else { cgroup.hold() };
        let running = held.and_then(|()| watch::note_running(&launch.dir, &cgroup, &process));
        running.map_err(|error| failed(error.to_string()))?;
        match known {
            Some(known) => self.accompany(launch, cgroup, process, known),
            // Whoever could not be used has nothing to say.
            None => NotBrought::forget(&launch.dir),
        }
        Ok(())
    }

    /// Sees to it that a sandbox whose memory is still on its way gets its limit of processor time when that is there, and that whoever brought it goes.
    fn accompany(&self, launch: &Launch, cgroup: SandboxCgroup, process: Arc<Process>, known: Known) {
        let (runsc, id, dir, let_go) = (self.runsc.clone(), launch.id.to_string(), launch.dir.clone(), self.let_go.clone());
        self.tasks.spawn(async move {
            let coming = async {
                let whole = runsc.whole(&id, WHOLE_LIMIT);
                tokio::pin!(whole);
                let in_time = timeout(BRINGING_LIMIT, &mut whole).await;
                if cgroup.hold().is_err() {
                    // Nobody has more than was asked for: it goes as it would have gone had this been seen before.
                    process.kill();
                }
                let whole = match in_time {
                    Ok(whole) => whole,
                    Err(_) => whole.await,
                };
                if whole.is_ok() {
                    let _ = timeout(BROUGHT_GRACE, known.bringing.wait()).await;
                    known.no_files.cancel();
                    NotBrought::forget(&dir);
                }
            };
            // The next server does all of it when it takes it up.
            let_go.run_until_cancelled(coming).await;
        });
    }

    /// Likewise for whoever an earlier server started, and who may still be at it. The limit holds already.
    fn accompany_again(&self, id: SandboxId, dir: &Path, no_files: CancellationToken) {
        if !NotBrought::is_possible(dir) {
            return;
        }
        let (runsc, id, dir, let_go) = (self.runsc.clone(), id.to_string(), dir.to_owned(), self.let_go.clone());
        self.tasks.spawn(async move {
            let bringing = file_servers_of(&dir);
            let coming = async {
                if runsc.whole(&id, WHOLE_LIMIT).await.is_err() {
                    // It goes with the sandbox.
                    return std::future::pending().await;
                }
                let gone = async {
                    for process in &bringing {
                        process.ended().await;
                    }
                };
                let _ = timeout(BROUGHT_GRACE, gone).await;
                NotBrought::forget(&dir);
            };
            let until = async {
                tokio::select! {
                    () = coming => {}
                    () = no_files.cancelled() => {}
                }
                bringing.iter().for_each(Process::kill);
            };
            let_go.run_until_cancelled(until).await;
        });
    }

    /// Somebody who brings a sandbox its memory, counted as the sandbox's. Without one it is restored too: where no cgroup counts, since what is written into a sandbox's
    /// memory and not touched yet is not among what its process is seen to have.
    fn start_file_server(&self, dir: &Path, cgroup: &SandboxCgroup, known: &Known) -> Option<FileServer> {
        let (program, arguments) = self.file_server.as_ref().filter(|_| self.features().control_socket && cgroup.counts_memory())?;
        let (files, mut process) = FileServer::start(program, arguments, dir).ok()?;
        // Otherwise it ends unused.
        let joined = process.id().is_some_and(|pid| cgroup.join(pid).is_ok());
        if let Some(pid) = process.id().filter(|_| joined && cgroup.limits_cpu()) {
            // What it takes the sandbox has less: the more of that wants a processor, the longer all of it would wait for its memory.
            hurry(pid);
        }
        let (no_files, let_go, dir) = (known.no_files.clone(), self.let_go.clone(), dir.to_owned());
        known.bringing.spawn(async move {
            tokio::select! {
                status = process.wait() => match status {
                    Ok(status) if !status.success() => NotBrought::note_end(&dir, &status.to_string()),
                    _ => {}
                },
                () = no_files.cancelled() => drop(process.kill().await),
                // It goes on, as the sandbox does.
                () = let_go.cancelled() => {}
            }
        });
        joined.then_some(files)
    }

    async fn created_process(&self, id: SandboxId) -> Result<Arc<Process>, RuntimeError> {
        let why = || RuntimeError::Failed { what: RESTORE, why: "its container could not be made".to_owned() };
        self.started(id).await.ok_or_else(why)
    }

    /// The process of a sandbox that is being started; none if it can't be.
    async fn started(&self, id: SandboxId) -> Option<Arc<Process>> {
        let mut started = self.known().get(&id)?.started.clone();
        let started = started.wait_for(|started| !matches!(started, Started::NotYet)).await.ok()?;
        match &*started {
            Started::Running(process) => Some(Arc::clone(process)),
            Started::NotYet | Started::Failed => None,
        }
    }

    /// Gives a sandbox its watching task.
    fn watch<F>(&self, id: SandboxId, task: impl FnOnce(Watch) -> F) -> Ended
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (sender, ended) = Ended::channel();
        let (started_sender, started) = channel::channel(Started::NotYet);
        let (give_up, no_files, bringing) = (CancellationToken::new(), CancellationToken::new(), TaskTracker::new());
        bringing.close();
        let known = Known { ended: ended.clone(), started, give_up, files: Waiting::default(), no_files, bringing };
        let Known { give_up, files, bringing, .. } = known.clone();
        let watch = Watch { ended: sender, started: started_sender, give_up, files, bringing };
        self.known().insert(id, known);
        let work = task(watch);
        let let_go = self.let_go.clone();
        self.tasks.spawn(async move {
            let_go.run_until_cancelled(work).await;
        });
        ended
    }

    async fn take_up_known_or_find(&self, id: SandboxId, dir: &Path) -> Result<Instance, RuntimeError> {
        let known = self.known().get(&id).cloned();
        let ended = match known {
            Some(known) => known.ended,
            None => {
                let (process, cgroup) = self.find(id, dir).await?;
                save::finish_interrupted(&self.runsc, id, dir).await?;
                let ended = self.watch(id, |watch| watch.follow(dir.to_owned(), cgroup, Arc::new(process)));
                if let Some(known) = self.known().get(&id) {
                    self.accompany_again(id, dir, known.no_files.clone());
                }
                ended
            }
        };
        if ended.now().is_some() {
            return Err(RuntimeError::NotFound);
        }
        let (to_agent, from_agent) = fifo::open_server_ends(dir).map_err(|error| {
            // Without the sandbox's ends there is no sandbox.
            let gone = error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(nix::libc::ENXIO);
            if gone { RuntimeError::NotFound } else { unavailable(dir)(error) }
        })?;
        Ok(Instance { from_agent: Box::new(from_agent), to_agent: Box::new(to_agent), ended })
    }

    /// The process of a sandbox that an earlier server started. Not found is only what is certainly gone.
    async fn find(&self, id: SandboxId, dir: &Path) -> Result<(Process, SandboxCgroup), RuntimeError> {
        let record = Record::read(dir).map_err(unavailable(dir))?;
        let cgroup = record.as_ref().map_or_else(|| self.limits.cgroup_of(id), |record| record.cgroup.clone());
        match record {
            Some(Record { phase: Phase::Running, process, .. }) => {
                let found = Process::find(&process).map_err(unavailable(dir))?;
                if found.is_some() {
                    // The server before may have gone when all of its memory was not there yet.
                    cgroup.hold().map_err(unavailable(dir))?;
                }
                return found.map(|process| (process, cgroup)).ok_or(RuntimeError::NotFound);
            }
            Some(Record { phase: Phase::Starting, process, .. }) => {
                if let Some(starting) = Process::find(&process).map_err(unavailable(dir))? {
                    // It may wait for a reader of its boot log that was never opened.
                    let _reader = fifo::open_boot_log(dir);
                    if timeout(START_GRACE, starting.ended()).await.is_err() {
                        return Err(RuntimeError::Unavailable(format!("{}: it is still being started", dir.display())));
                    }
                }
            }
            None => {}
        }
        let state =
            self.runsc.state(&id.to_string(), CALL_LIMIT).await.map_err(|error| {
                if error.is_not_found() { RuntimeError::NotFound } else { RuntimeError::Unavailable(error.to_string()) }
            })?;
        if !matches!(state.status, Status::Running | Status::Paused) {
            return Err(RuntimeError::NotFound);
        }
        let process =
            Process::open(state.pid).map_err(|error| if is_gone(&error) { RuntimeError::NotFound } else { unavailable(dir)(error) })?;
        cgroup.hold().map_err(unavailable(dir))?;
        Record::new(Phase::Running, process.identity().clone(), cgroup.clone()).write(dir).ok();
        Ok((process, cgroup))
    }

    async fn remove_all(&self, id: SandboxId, dir: &Path) -> Result<(), RuntimeError> {
        let failed = |why: String| RuntimeError::Failed { what: "remove the sandbox", why };
        let name = id.to_string();
        let known = self.known().get(&id).cloned();
        match known {
            Some(known) => {
                let ended = self.end_known(&known, &name, dir).await;
                // Whoever is in its cgroup keeps that from being removed. After the sandbox, which is not to end for want of its memory.
                known.no_files.cancel();
                ended.map_err(failed)?;
            }
            None => end_unknown(&name, dir).await.map_err(failed)?,
        }
        let deleted = match self.runsc.delete_force(&name, CALL_LIMIT).await {
            // Once more: the first may have met a process that was not gone yet.
            Err(_) => self.runsc.delete_force(&name, CALL_LIMIT).await,
            deleted => deleted,
        };
        deleted.map_err(|error| failed(error.to_string()))?;
        let recorded = Record::read(dir).map_err(|error| failed(error.to_string()))?.map(|record| record.cgroup).unwrap_or_default();
        for cgroup in [recorded, self.limits.cgroup_of(id)] {
            cgroup.remove().await.map_err(|error| failed(error.to_string()))?;
        }
        // What runsc leaves when it was killed at a bad moment.
        for leftover in [format!("runsc-{name}.sock"), format!("{name}_sandbox:{name}.state"), format!("{name}_sandbox:{name}.lock")] {
            fs::remove_file(self.state_dir.join(leftover)).ok();
        }
        fifo::remove(dir).map_err(|error| failed(error.to_string()))?;
        Record::remove(dir);
        self.known().remove(&id);
        Ok(())
    }

    async fn end_known(&self, known: &Known, name: &str, dir: &Path) -> Result<(), String> {
        let mut started = known.started.clone();
        timeout(START_GRACE, started.wait_for(|started| !matches!(started, Started::NotYet))).await.map(drop).ok();
        let process = match &*started.borrow() {
            Started::Running(process) => Some(Arc::clone(process)),
            Started::NotYet | Started::Failed => None,
        };
        match process {
            Some(process) => process.kill(),
            None => {
                known.give_up.cancel();
                kill_by_name(name, dir).await;
            }
        }
        timeout(KILL_LIMIT, known.ended.wait()).await.map(drop).map_err(|_| "its process does not end".to_owned())
    }
}

impl Drop for GvisorRuntime {
    fn drop(&mut self) {
        self.let_go.cancel();
    }
}

impl Runtime for GvisorRuntime {
    fn start<'a>(&'a self, launch: &'a Launch) -> BoxFuture<'a, Result<Instance, RuntimeError>> {
        Box::pin(self.launch(launch, How::Run))
    }

    fn take_up<'a>(&'a self, id: SandboxId, dir: &'a Path) -> BoxFuture<'a, Result<Instance, RuntimeError>> {
        Box::pin(self.take_up_known_or_find(id, dir))
    }

    fn checkpoint<'a>(
        &'a self,
        id: SandboxId,
        dir: &'a Path,
        into: &'a Path,
        after: AfterSave,
        written: Option<Written<'a>>,
    ) -> BoxFuture<'a, Result<(), RuntimeError>> {
        Box::pin(async move {
            match after {
                AfterSave::GoOn => save::save(&self.runsc, id, into, written).await,
                AfterSave::Freeze => save::save_frozen(&self.runsc, id, dir, into, written).await,
            }
        })
    }

    fn restore<'a>(&'a self, launch: &'a Launch, from: &'a Path) -> BoxFuture<'a, Result<Instance, RuntimeError>> {
        Box::pin(self.launch(launch, How::Restore(from)))
    }

    fn create<'a>(&'a self, launch: &'a Launch) -> BoxFuture<'a, Result<Instance, RuntimeError>> {
        Box::pin(self.launch(launch, How::Create))
    }

    fn created(&self, id: SandboxId) -> BoxFuture<'_, Result<(), RuntimeError>> {
        Box::pin(async move { self.created_process(id).await.map(drop) })
    }

    fn restore_into<'a>(&'a self, launch: &'a Launch, from: &'a Path) -> BoxFuture<'a, Result<(), RuntimeError>> {
        Box::pin(self.fill(launch, from))
    }

    fn whole<'a>(&'a self, id: SandboxId, dir: &'a Path) -> BoxFuture<'a, Result<(), NotWhole>> {
        Box::pin(async move {
            match (self.runsc.whole(&id.to_string(), WHOLE_LIMIT).await, NotBrought::of(dir)) {
                (Ok(()), _) => Ok(()),
                (Err(_), Some(why)) if why.unreadable => Err(NotWhole::Unreadable(watch::not_whole(&why))),
                (Err(CallError::TimedOut { limit, .. }), _) => Err(NotWhole::TooLate(limit)),
                (Err(_), _) => Err(NotWhole::Ended),
            }
        })
    }

    fn pause<'a>(&'a self, id: SandboxId, dir: &'a Path) -> BoxFuture<'a, Result<(), RuntimeError>> {
        Box::pin(save::freeze(&self.runsc, id, dir))
    }

    fn resume<'a>(&'a self, id: SandboxId, dir: &'a Path) -> BoxFuture<'a, Result<(), RuntimeError>> {
        Box::pin(save::thaw(&self.runsc, id, dir))
    }

    fn remove<'a>(&'a self, id: SandboxId, dir: &'a Path) -> BoxFuture<'a, Result<(), RuntimeError>> {
        Box::pin(self.remove_all(id, dir))
    }
}

async fn end_unknown(name: &str, dir: &Path) -> Result<(), String> {
    let unsure = |error: io::Error| format!("its process can't be found out: {error}");
    let record = Record::read(dir).map_err(unsure)?.filter(|record| record.phase == Phase::Running);
    let process = record.map(|record| Process::find(&record.process)).transpose().map_err(unsure)?.flatten();
    if let Some(process) = process {
        process.kill();
        timeout(KILL_LIMIT, process.ended()).await.map_err(|_| "its process does not end".to_owned())?;
        process.reap();
    }
    kill_by_name(name, dir).await;
    Ok(())
}

/// Ends what a start that was cut off may have left, runsc itself and the sandbox's process, and whoever brings it its memory.
async fn kill_by_name(name: &str, dir: &Path) {
    for process in processes_of(name, dir) {
        process.kill();
        if timeout(KILL_LIMIT, process.ended()).await.is_ok() {
            process.reap();
        }
    }
}

fn run_of(launch: &Launch) -> Run {
    let dir = launch.dir.as_path();
    Run {
        id: launch.id.to_string(),
        bundle: dir.to_owned(),
        pid_file: pid_file(dir),
        files: Files { log: dir.join("runsc.log"), boot_log: Some(dir.join(fifo::BOOT)), panic_log: panic_log(dir) },
    }
}

fn write_bundle(launch: &Launch, image: PathBuf) -> Result<(), String> {
    let config = serde_json::to_string(&launch.config).map_err(|error| error.to_string())?;
    let spec = SandboxSpec { image, env: vec![format!("{}={config}", AgentConfig::VARIABLE)] };
    let json = spec.to_json().map_err(|error| error.to_string())?;
    let written = fs::create_dir_all(launch.dir.join("rootfs")).and_then(|()| fs::write(launch.dir.join("config.json"), json));
    written.map_err(|error| format!("{}: {error}", launch.dir.display()))
}

fn refused(what: &'static str, error: &CallError) -> RuntimeError {
    if error.is_not_found() { RuntimeError::NotFound } else { RuntimeError::Failed { what, why: error.to_string() } }
}

fn unavailable(path: &Path) -> impl Fn(io::Error) -> RuntimeError {
    move |error| RuntimeError::Unavailable(format!("{}: {error}", path.display()))
}

fn pid_file(dir: &Path) -> PathBuf {
    dir.join("pid")
}

fn panic_log(dir: &Path) -> PathBuf {
    dir.join("panic.log")
}

//! Sandboxes by runsc alone: the same image, the same agent as its first process, no server and no limits of the host around it.

use std::{
    fs,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use futures_util::future::try_join_all;
use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::{
        signal::{Signal, kill},
        stat::Mode,
        wait::waitpid,
    },
    unistd::{Pid, mkfifo},
};
use sandboxer_protocol::agent::{AgentConfig, MARKER_BYTES, Marker};
use sandboxer_runsc::{Checkpoint, Features, Files, Global, Restore, Run, Runsc, SandboxSpec};
use sandboxer_runtime::{
    Ended, Instance,
    link::{self, Link},
};
use tokio::{net::unix::pipe, process::Command, time::timeout};

use crate::{
    programs::Program,
    timing::{Timing, timed},
};

pub(crate) const LIMIT: Duration = Duration::from_secs(120);
const CALL_LIMIT: Duration = Duration::from_secs(30);
const MIB: u64 = 1024 * 1024;
/// As the server makes them.
const OUT_PIPE_BYTES: i32 = 1024 * 1024;
/// Where the image keeps the system that user code sees. To runsc it is no root, so programs are started by their own loader.
pub(crate) const SYSTEM: &str = "/rootfs";
const LIBRARIES: &str =
    if cfg!(target_arch = "aarch64") { "/rootfs/usr/lib/aarch64-linux-gnu" } else { "/rootfs/usr/lib/x86_64-linux-gnu" };
const LOADER: &str = if cfg!(target_arch = "aarch64") { "ld-linux-aarch64.so.1" } else { "ld-linux-x86-64.so.2" };

/// What the server tells an agent where a client has not asked for anything else.
pub(crate) fn agent_config(marker: &Marker) -> AgentConfig {
    AgentConfig {
        marker: marker.to_hex(),
        disk_bytes: 512 * MIB,
        disk_inodes: 512 * MIB / 4096,
        memory_bytes: Some(1024 * MIB),
        pids: Some(256),
        output_window_bytes: 8 * MIB,
        stdin_window_bytes: 8 * MIB,
        spares: None,
    }
}

/// The binary and the image.
pub(crate) struct Raw {
    runsc: Runsc,
    binary: PathBuf,
    state: PathBuf,
    home: PathBuf,
    image: PathBuf,
    next: AtomicU32,
}

/// A sandbox that answered.
pub(crate) struct RawSandbox {
    id: String,
    pub(crate) dir: PathBuf,
    /// Held open: without it the agent would poll for a server that comes back.
    _link: Link,
}

impl Raw {
    pub(crate) async fn open(binary: PathBuf, home: &Path, image: PathBuf) -> Result<Self> {
        // By its commands, as anybody would.
        let features = Features { control_socket: false, ..Features::probe(&binary).await? };
        let state = home.join("state");
        fs::create_dir_all(&state)?;
        let runsc = Runsc::new(binary.clone(), Global { root: state.clone(), features });
        Ok(Self { runsc, binary, state, home: home.to_owned(), image, next: AtomicU32::new(0) })
    }

    pub(crate) fn version(&self) -> &str {
        &self.runsc.global().features.version_text
    }

    /// Everything of these sandboxes is below it.
    pub(crate) fn home(&self) -> &Path {
        &self.home
    }

    /// Starts a sandbox. The time is from the spawning of `runsc run` until the agent has answered over its FIFO.
    pub(crate) async fn create(&mut self) -> Result<(RawSandbox, f64)> {
        let marker = Marker::new(rand::random::<[u8; MARKER_BYTES]>());
        let image = self.image.clone();
        self.launch(&image, &marker, None).await
    }

    /// Starts a sandbox from a checkpoint. The time is from the spawning of `runsc restore` until the agent has answered over its FIFO.
    pub(crate) async fn restore(&mut self, image: &Path, marker: &Marker, from: &Path) -> Result<(RawSandbox, f64)> {
        self.launch(image, marker, Some(from)).await
    }

    /// `runsc checkpoint` of a sandbox whose state is in `state`, which goes on.
    pub(crate) async fn checkpoint(&self, state: PathBuf, id: &str, into: &Path) -> Result<f64> {
        let runsc = Runsc::new(self.binary.clone(), Global { root: state, features: self.runsc.global().features.clone() });
        fs::create_dir(into)?;
        let checkpoint = Checkpoint { id: id.to_owned(), into: into.to_owned(), leave_running: true };
        let begun = Instant::now();
        runsc.checkpoint(&checkpoint, None, LIMIT).await?;
        Ok(ms_since(begun))
    }

    /// Starts so many at once. The time is until the last agent has answered.
    pub(crate) async fn restore_many(&self, image: &Path, marker: &Marker, from: &Path, count: usize) -> Result<(Vec<RawSandbox>, f64)> {
        let started = try_join_all((0..count).map(|_| self.launch(image, marker, Some(from)))).await?;
        let slowest = started.iter().map(|(_, taken)| *taken).fold(0.0, f64::max);
        Ok((started.into_iter().map(|(sandbox, _)| sandbox).collect(), slowest))
    }

    async fn launch(&self, image: &Path, marker: &Marker, from: Option<&Path>) -> Result<(RawSandbox, f64)> {
        // Of one length: runsc takes a beginning for the whole.
        let id = format!("raw-{:06}", self.next.fetch_add(1, Ordering::Relaxed));
        let dir = self.home.join(&id);
        fs::create_dir_all(dir.join("rootfs"))?;
        let config = serde_json::to_string(&agent_config(marker))?;
        let spec = SandboxSpec { image: image.to_owned(), env: vec![format!("{}={config}", AgentConfig::VARIABLE)] };
        fs::write(dir.join("config.json"), spec.to_json()?)?;
        let ends = Ends::create(&dir)?;
        let files = Files { log: dir.join("runsc.log"), boot_log: None, panic_log: dir.join("panic.log") };
        let run = Run { id: id.clone(), bundle: dir.clone(), pid_file: dir.join("pid"), files };
        let begun = Instant::now();
        let mut child = match from {
            None => self.runsc.spawn_run(&run, ends.guest_stdin, ends.guest_stdout)?,
            Some(from) => self.runsc.spawn_restore(&Restore { run, image: from.to_owned() }, ends.guest_stdin, ends.guest_stdout)?,
        };
        // Nobody tells of its end, which nobody asks for.
        let (_, ended) = Ended::channel();
        let instance = Instance { from_agent: Box::new(ends.from_agent), to_agent: Box::new(ends.to_agent), ended };
        let opened = link::open(instance, marker, LIMIT).await;
        let taken = ms_since(begun);
        let status = timeout(CALL_LIMIT, child.wait()).await.context("runsc does not end")??;
        ensure!(status.success(), "runsc ended with {status}: {}", fs::read_to_string(dir.join("runsc.log")).unwrap_or_default());
        Ok((RawSandbox { id, dir, _link: opened? }, taken))
    }

    pub(crate) async fn remove(&self, sandbox: RawSandbox) -> Result<()> {
        let pid = Pid::from_raw(fs::read_to_string(sandbox.dir.join("pid"))?.trim().parse()?);
        kill(pid, Signal::SIGKILL)?;
        tokio::task::spawn_blocking(move || waitpid(pid, None)).await??;
        self.runsc.delete_force(&sandbox.id, CALL_LIMIT).await?;
        Ok(fs::remove_dir_all(&sandbox.dir)?)
    }

    /// `runsc exec` of a program, its output read to the end.
    pub(crate) async fn exec(&self, sandbox: &RawSandbox, program: &Program) -> Result<Timing> {
        let [interpreter, flag, code] = program.argv();
        let mut command = Command::new(&self.binary);
        command
            .env_clear()
            .arg("--root")
            .arg(&self.state)
            .args(["--platform=systrap", "--network=none", "--overlay2=none", "--ignore-cgroups", "exec"])
            .args(["-cwd", "/", "-env", "PATH=/usr/bin", "-env", "PYTHONUNBUFFERED=1"])
            .args(["-env", &format!("PYTHONHOME={SYSTEM}/usr"), &sandbox.id])
            .arg(format!("{LIBRARIES}/{LOADER}"))
            .args(["--library-path", LIBRARIES, &format!("{SYSTEM}/usr/bin/{interpreter}"), flag, code]);
        timed(&mut command, program).await
    }
}

pub(crate) fn ms_since(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1000.0
}

/// The four ends of the two FIFOs.
struct Ends {
    guest_stdin: OwnedFd,
    guest_stdout: OwnedFd,
    to_agent: pipe::Sender,
    from_agent: pipe::Receiver,
}

impl Ends {
    fn create(dir: &Path) -> Result<Self> {
        let open = |path: &Path, how| nix::fcntl::open(path, how | OFlag::O_CLOEXEC, Mode::empty());
        let (to, from) = (dir.join("in"), dir.join("out"));
        for path in [&to, &from] {
            mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR)?;
        }
        // Open for both while the real ends are opened, so that none of them waits.
        let (_both_in, both_out) = (open(&to, OFlag::O_RDWR)?, open(&from, OFlag::O_RDWR)?);
        fcntl(&both_out, FcntlArg::F_SETPIPE_SZ(OUT_PIPE_BYTES)).ok();
        Ok(Self {
            to_agent: pipe::OpenOptions::new().open_sender(&to)?,
            from_agent: pipe::OpenOptions::new().open_receiver(&from)?,
            guest_stdin: open(&to, OFlag::O_RDONLY)?,
            guest_stdout: open(&from, OFlag::O_WRONLY)?,
        })
    }
}

//! `docker run --runtime=runsc` and `docker exec`, by the command line, with an engine of this run's own and the system of our base image.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;
use tokio::{
    process::{Child, Command},
    time::{sleep, timeout},
};

use crate::{
    leftovers::unmount_below,
    programs::Program,
    raw::{LIMIT, SYSTEM, ms_since},
    timing::{Timing, timed},
};

/// Where Debian puts the engine, which is in no ordinary user's PATH.
const PLACES: [&str; 4] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"];
const IMAGE: &str = "sandboxer-bench";
/// How long an engine may take to answer, and to end.
const ENGINE_LIMIT: Duration = Duration::from_secs(30);

pub(crate) struct Docker {
    home: PathBuf,
    engine: Child,
    /// The container that programs run in.
    container: String,
    /// Those whose memory is counted.
    kept: Vec<String>,
}

impl Docker {
    /// Starts an engine that knows `runsc`, gives it our image's system, and starts a container for the programs.
    pub(crate) async fn start(runsc: &Path, image: &Path, home: &Path) -> Result<Self> {
        let dockerd = PLACES.iter().map(|place| Path::new(place).join("dockerd")).find(|path| path.exists());
        let dockerd = dockerd.context("dockerd is not installed")?;
        // As raw runsc is called here.
        let runtime = json!({"path": runsc, "runtimeArgs": ["--platform=systrap", "--network=none"]});
        fs::write(home.join("daemon.json"), serde_json::to_vec(&json!({"runtimes": {"runsc": runtime}}))?)?;
        let engine = Command::new(dockerd)
            .arg("--data-root")
            .arg(home.join("data"))
            .arg("--exec-root")
            .arg(home.join("exec"))
            .arg("--host")
            .arg(host(home))
            .arg("--pidfile")
            .arg(home.join("pid"))
            .arg("--config-file")
            .arg(home.join("daemon.json"))
            // Nothing of the machine's network is touched.
            .args(["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false", "--bridge=none"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(home.join("log"))?)
            .kill_on_drop(true)
            .spawn()?;
        let mut docker = Self { home: home.to_owned(), engine, container: String::new(), kept: Vec::new() };
        docker.answers().await?;
        docker.import(image).await.context("giving it the image")?;
        docker.container = docker.run().await?.0;
        Ok(docker)
    }

    async fn answers(&mut self) -> Result<()> {
        let begun = Instant::now();
        // Its socket is there before it answers, and nothing tells when it does.
        while !self.command(&["version"]).stderr(Stdio::null()).output().await?.status.success() {
            let log = || fs::read_to_string(self.home.join("log")).unwrap_or_default();
            let ended = self.engine.try_wait()?;
            ensure!(ended.is_none() && begun.elapsed() < ENGINE_LIMIT, "dockerd does not answer: {}", log().lines().last().unwrap_or(""));
            sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    async fn import(&self, image: &Path) -> Result<()> {
        let tree = self.home.join("tree");
        let mut extract = std::ffi::OsString::from("--extract=");
        extract.push(&tree);
        let extracted = Command::new("fsck.erofs").arg(extract).arg(image).stdin(Stdio::null()).output().await.context("fsck.erofs")?;
        ensure!(extracted.status.success(), "fsck.erofs: {}", String::from_utf8_lossy(&extracted.stderr).trim());
        let root = tree.join(SYSTEM.trim_start_matches('/'));
        let mut tar = Command::new("tar").arg("-C").arg(root).args(["-c", "."]).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let packed: Stdio = tar.stdout.take().context("tar's output is not there")?.try_into()?;
        let imported = timeout(LIMIT, self.command(&["import", "-", IMAGE]).stdin(packed).output()).await.context("docker import")??;
        ensure!(imported.status.success(), "docker import: {}", String::from_utf8_lossy(&imported.stderr).trim());
        ensure!(tar.wait().await?.success(), "tar failed");
        Ok(fs::remove_dir_all(tree)?)
    }

    /// Until `docker run -d` has returned: its first process runs then.
    pub(crate) async fn create(&self) -> Result<f64> {
        let (container, ms) = self.run().await?;
        self.remove(&container).await?;
        Ok(ms)
    }

    /// Until the first byte of a program in a new container.
    pub(crate) async fn create_to_output(&self, program: &Program) -> Result<f64> {
        let mut command = self.command(&["run", "--rm", "--runtime=runsc", "--network=none", IMAGE]);
        timed(command.args(program.argv()), program).await?.first_ms.context("it printed nothing")
    }

    pub(crate) async fn exec(&self, program: &Program) -> Result<Timing> {
        let mut command = self.command(&["exec", "--env", "PYTHONUNBUFFERED=1", &self.container]);
        timed(command.args(program.argv()), program).await
    }

    /// Starts containers that stay until the end.
    pub(crate) async fn keep(&mut self, count: usize) -> Result<()> {
        for _ in 0..count {
            let (container, _) = self.run().await?;
            self.kept.push(container);
        }
        Ok(())
    }

    pub(crate) async fn end(mut self) -> Result<()> {
        for container in self.kept.iter().chain([&self.container]).filter(|container| !container.is_empty()) {
            self.remove(container).await?;
        }
        if let Some(pid) = self.engine.id().and_then(|pid| i32::try_from(pid).ok()) {
            kill(Pid::from_raw(pid), Signal::SIGTERM)?;
        }
        timeout(ENGINE_LIMIT, self.engine.wait()).await.context("dockerd does not end")??;
        unmount_below(&self.home);
        Ok(())
    }

    async fn run(&self) -> Result<(String, f64)> {
        let begun = Instant::now();
        let args = ["run", "--detach", "--runtime=runsc", "--network=none", IMAGE, "sleep", "infinity"];
        let container = self.said(&args).await?;
        Ok((container, ms_since(begun)))
    }

    async fn remove(&self, container: &str) -> Result<()> {
        self.said(&["rm", "--force", "--volumes", container]).await.map(drop)
    }

    /// What a command prints, which has to succeed.
    async fn said(&self, args: &[&str]) -> Result<String> {
        let output = timeout(LIMIT, self.command(args).output()).await.with_context(|| format!("docker {}: no end", args.join(" ")))??;
        ensure!(output.status.success(), "docker {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("docker");
        command.arg("--host").arg(host(&self.home)).args(args).stdin(Stdio::null()).kill_on_drop(true);
        command
    }
}

fn host(home: &Path) -> std::ffi::OsString {
    let mut host = std::ffi::OsString::from("unix://");
    host.push(home.join("docker.sock"));
    host
}

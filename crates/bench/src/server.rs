//! The server under test: the release binary as a process of its own, on a data directory of its own.

use std::{
    fs::{self, File},
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use sandboxer_protocol::agent::Marker;
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    process::{Child, Command},
    time::{sleep, timeout},
};

/// The first start on a machine builds the base image.
const READY_LIMIT: Duration = Duration::from_secs(600);
const END_LIMIT: Duration = Duration::from_secs(30);
/// More than are measured at once.
const MAX_SANDBOXES: &str = "1000";

/// After this the interpreters of a sandbox wait too, their modules loaded.
pub(crate) const COME_TO_REST: Duration = Duration::from_millis(700);

/// What is ready before anybody asks.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Waits {
    Sandbox,
    Container,
}

pub(crate) struct Server {
    child: Child,
    pub(crate) address: SocketAddr,
    pub(crate) data: PathBuf,
}

impl Server {
    /// Starts it; with a volume, it keeps checkpoints there. Of what waits, it has what is said (sandboxes and containers, interpreters of each language), or
    /// else as much as servers have.
    pub(crate) async fn start(
        binary: &Path,
        runsc: &Path,
        image_dir: Option<&Path>,
        home: &Path,
        volume: Option<&Path>,
        pool: Option<usize>,
        spares: Option<usize>,
    ) -> Result<Self> {
        let data = home.join("data");
        let log = home.join("server.log");
        let mut command = Command::new(binary);
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"SANDBOXER_")) {
            command.env_remove(name);
        }
        command.args(["serve", "--listen", "127.0.0.1:0", "--max-sandboxes", MAX_SANDBOXES, "--data-dir"]).arg(&data);
        command.arg("--runsc").arg(runsc);
        if let Some(image_dir) = image_dir {
            command.arg("--image-dir").arg(image_dir);
        }
        if let Some(pool) = pool {
            command.args(["--pool", &pool.to_string(), "--restore-pool", &pool.to_string()]);
        }
        if let Some(spares) = spares {
            command.args(["--spare-interpreters", &spares.to_string()]);
        }
        if let Some(volume) = volume {
            command.arg("--checkpoint-path").arg(volume);
        }
        let mut child = command
            .env_remove("PORT")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&log)?)
            .spawn()
            .with_context(|| format!("{} can't be started; `make build` makes it", binary.display()))?;
        let failed = || format!("the server does not start; its log:\n{}", fs::read_to_string(&log).unwrap_or_default());
        let stdout = child.stdout.take().context("its output is not there")?;
        let line = timeout(READY_LIMIT, BufReader::new(stdout).lines().next_line()).await.with_context(failed)??.with_context(failed)?;
        let address = line.strip_prefix("sandboxer listening on http://").and_then(|address| address.trim_end_matches('/').parse().ok());
        let server = Self { child, address: address.with_context(failed)?, data };
        let begun = Instant::now();
        while !server.is_ready().await {
            if begun.elapsed() > READY_LIMIT {
                bail!(failed());
            }
            sleep(Duration::from_millis(50)).await;
        }
        Ok(server)
    }

    async fn is_ready(&self) -> bool {
        self.get("/readyz").await.is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
    }

    async fn get(&self, path: &str) -> io::Result<String> {
        let mut stream = TcpStream::connect(self.address).await?;
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer)
    }

    /// Waits until a sandbox, or a container for a restore, waits.
    pub(crate) async fn one_waits(&self, what: Waits) -> Result<()> {
        let name = match what {
            Waits::Sandbox => "sandboxer_pooled_sandboxes ",
            Waits::Container => "sandboxer_pooled_containers ",
        };
        let begun = Instant::now();
        loop {
            let metrics = self.get("/metrics").await?;
            if metrics.lines().filter_map(|line| line.strip_prefix(name)).any(|count| count.trim() != "0") {
                sleep(COME_TO_REST).await;
                return Ok(());
            }
            if begun.elapsed() > END_LIMIT {
                bail!("nothing waits in the pool");
            }
            sleep(Duration::from_millis(10)).await;
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id().unwrap_or_default()
    }

    /// What a sandbox is to runsc: one that was restored into a container that waited has the name of that.
    pub(crate) fn container_of(&self, sandbox_id: &str) -> Result<String> {
        let sandboxes = self.data.join("sandboxes");
        for entry in fs::read_dir(&sandboxes)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let record = fs::read(sandboxes.join(&name).join("record.json")).unwrap_or_default();
            let record: Value = serde_json::from_slice(&record).unwrap_or_default();
            if record["id"] == sandbox_id && record["standby"] != true {
                return Ok(name);
            }
        }
        bail!("the server does not have {sandbox_id}")
    }

    /// The image that a sandbox of this server was started from.
    pub(crate) fn image_of(&self, sandbox_id: &str) -> Result<PathBuf> {
        let path = self.data.join("sandboxes").join(self.container_of(sandbox_id)?).join("config.json");
        let spec: Value = serde_json::from_slice(&fs::read(&path).with_context(|| path.display().to_string())?)?;
        let image = spec["annotations"]["dev.gvisor.spec.rootfs.source"].as_str().context("its OCI spec names no image")?;
        Ok(image.into())
    }

    /// What opens a conversation with the agent of a sandbox.
    pub(crate) fn marker_of(&self, sandbox_id: &str) -> Result<Marker> {
        let path = self.data.join("sandboxes").join(self.container_of(sandbox_id)?).join("record.json");
        let record: Value = serde_json::from_slice(&fs::read(&path).with_context(|| path.display().to_string())?)?;
        Ok(serde_json::from_value(record["marker"].clone())?)
    }

    /// Where runsc keeps the state of the sandboxes.
    pub(crate) fn runsc_state(&self) -> PathBuf {
        self.data.join("runsc")
    }

    pub(crate) async fn end(mut self) -> Result<()> {
        kill(Pid::from_raw(i32::try_from(self.pid())?), Signal::SIGTERM)?;
        if timeout(END_LIMIT, self.child.wait()).await.is_err() {
            self.child.kill().await?;
            bail!("the server did not end by SIGTERM");
        }
        Ok(())
    }
}

//! The PyPI package `gvisor`, driven by a script of ours that does one thing at a time, so that rounds interleave.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::timeout,
};

use crate::{leftovers::unmount_below, orphans::reaping, programs::Program, raw::LIMIT, timing::Timing};

const SCRIPT: &str = include_str!("package.py");
/// Closing all sandboxes, one after the other.
const END_LIMIT: Duration = Duration::from_secs(60);

pub(crate) struct Package {
    child: Child,
    requests: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    home: PathBuf,
}

#[derive(Debug, Deserialize)]
struct Answer {
    ms: Option<f64>,
    bytes: Option<u64>,
    error: Option<String>,
}

/// Where `scripts/setup --bench` puts it.
pub(crate) fn default_python() -> Option<PathBuf> {
    let data = std::env::var_os("XDG_DATA_HOME").map(PathBuf::from).filter(|dir| dir.is_absolute());
    let data = data.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".local/share")));
    data.map(|data| data.join("sandboxer/bench-venv/bin/python"))
}

impl Package {
    /// Starts the script, and one sandbox in it for the programs.
    pub(crate) async fn start(python: &Path, runsc: &Path, home: &Path) -> Result<Self> {
        let mut child = Command::new(python)
            .args(["-c", SCRIPT])
            .env("RUNSC_PATH", runsc)
            .env("TMPDIR", home)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("{} can't be started; scripts/setup --bench installs it", python.display()))?;
        let (Some(requests), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else { bail!("its streams are not there") };
        let mut package = Self { child, requests, answers: BufReader::new(stdout).lines(), home: home.to_owned() };
        package.answer().await.context("the package gvisor is not there; scripts/setup --bench installs it")?;
        package.keep(1).await?;
        Ok(package)
    }

    /// Until the constructor has returned: its first process runs then.
    pub(crate) async fn create(&mut self) -> Result<f64> {
        self.timed_create(&json!({"op": "create"})).await
    }

    /// Until a program has returned in a new sandbox; the package shows no output before that.
    pub(crate) async fn create_to_output(&mut self, program: &Program) -> Result<f64> {
        self.timed_create(&json!({"op": "create_to_output", "argv": program.argv()})).await
    }

    async fn timed_create(&mut self, request: &Value) -> Result<f64> {
        let created = self.ask(request).await?;
        // It is closed now; the sandbox's process became ours when runsc run ended.
        reaping(self.answer()).await?;
        // It leaves a mount of runsc's behind with each sandbox (`null-netns`).
        unmount_below(&self.home);
        created.ms.context("an answer without a time")
    }

    pub(crate) async fn exec(&mut self, program: &Program) -> Result<Timing> {
        let answer = self.ask(&json!({"op": "exec", "argv": program.argv()})).await?;
        let (Some(done_ms), Some(bytes)) = (answer.ms, answer.bytes) else { bail!("an answer without a time") };
        Timing { first_ms: None, done_ms, agent_ms: None, bytes }.checked(program)
    }

    /// Makes sandboxes that stay until the end.
    pub(crate) async fn keep(&mut self, count: usize) -> Result<()> {
        self.ask(&json!({"op": "keep", "count": count})).await.map(drop)
    }

    pub(crate) async fn end(mut self) -> Result<()> {
        drop(self.requests);
        let closed = async { while let Ok(Some(_)) = self.answers.next_line().await {} };
        timeout(END_LIMIT, reaping(closed)).await.context("the package does not close its sandboxes")?;
        // Reaped already, most likely.
        let _ = self.child.start_kill();
        unmount_below(&self.home);
        Ok(())
    }

    async fn ask(&mut self, request: &Value) -> Result<Answer> {
        self.requests.write_all(format!("{request}\n").as_bytes()).await?;
        self.answer().await
    }

    async fn answer(&mut self) -> Result<Answer> {
        let line = timeout(LIMIT, self.answers.next_line()).await.context("no answer")??.context("it ended")?;
        let answer: Answer = serde_json::from_str(&line).with_context(|| format!("an unreadable answer: {line:?}"))?;
        match answer.error {
            Some(error) => bail!("{error}"),
            None => Ok(answer),
        }
    }
}

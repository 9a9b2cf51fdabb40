//! The task that follows one sandbox from its start to its end, and tells why it ended.

mod growth;

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError},
    time::Duration,
};

use sandboxer_runsc::NotBrought;
use tokio::{
    io::AsyncReadExt,
    net::unix::pipe,
    process::Child,
    sync::watch as channel,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{KILL_LIMIT, START_LIMIT, Waiting, panic_log, pid_file};
use crate::{
    End, EndedSender,
    cgroup::SandboxCgroup,
    process::{Process, ProcessEnd},
    record::{Phase, Record},
};

/// The end of the boot log that is kept of a failed start.
const BOOT_LOG_BYTES: usize = 64 * 1024;
/// How long whoever brings memory may take to follow its sandbox, before that is told to have ended.
const NOTED_WITHIN: Duration = Duration::from_secs(1);
/// What of a log goes into a text for people.
const SHOWN_BYTES: usize = 2 * 1024;

/// How far a start is.
#[derive(Debug, Clone)]
pub(super) enum Started {
    NotYet,
    Running(Arc<Process>),
    Failed,
}

/// What is being started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Starting {
    Sandbox,
    /// What a sandbox is to be restored into. To the next server it is no sandbox yet.
    Container,
}

/// What a watching task tells, and what it is told.
pub(super) struct Watch {
    pub(super) ended: EndedSender,
    pub(super) started: channel::Sender<Started>,
    pub(super) give_up: CancellationToken,
    /// Whoever waits to bring it its memory, and who follows that one and notes how it ended.
    pub(super) files: Waiting,
    pub(super) bringing: TaskTracker,
}

impl Watch {
    /// Follows a sandbox from the spawning of runsc on.
    pub(super) async fn start(self, dir: PathBuf, cgroup: SandboxCgroup, mut child: Child, boot_log: pipe::Receiver, what: Starting) {
        match wait_for_start(&dir, &cgroup, &mut child, boot_log, &self.give_up, what).await {
            Ok(process) => self.follow(dir, cgroup, Arc::new(process)).await,
            Err(why) => {
                self.ended.tell(if cgroup.ran_out_of_memory() { End::OutOfMemory } else { End::StartFailed(why) });
                self.started.send_replace(Started::Failed);
            }
        }
    }

    /// Follows a sandbox that runs.
    pub(super) async fn follow(self, dir: PathBuf, cgroup: SandboxCgroup, process: Arc<Process>) {
        self.started.send_replace(Started::Running(Arc::clone(&process)));
        let outgrew = tokio::select! {
            () = process.ended() => false,
            () = growth::too_large(process.identity().pid, &dir, &cgroup) => {
                process.kill();
                process.ended().await;
                true
            }
        };
        let end = process.reap();
        // Whoever brings it its memory goes with it, unless it went first: then that is why.
        drop(self.files.lock().unwrap_or_else(PoisonError::into_inner).take());
        let _ = timeout(NOTED_WITHIN, self.bringing.wait()).await;
        self.ended.tell(if outgrew { End::OutOfMemory } else { why_ended(end, &dir, &cgroup) });
    }
}

async fn wait_for_start(
    dir: &Path,
    cgroup: &SandboxCgroup,
    child: &mut Child,
    mut boot_log: pipe::Receiver,
    give_up: &CancellationToken,
    what: Starting,
) -> Result<Process, String> {
    let deadline = Instant::now() + START_LIMIT;
    let mut tail = Tail::default();
    let status = loop {
        tokio::select! {
            status = child.wait() => break status,
            () = tail.read_from(&mut boot_log) => {}
            () = sleep_until(deadline) => break Err(io::Error::other(format!("it did not start within {} s", START_LIMIT.as_secs()))),
            () = give_up.cancelled() => break Err(io::Error::other("it was removed before it had started")),
        }
    };
    let why = match status {
        Ok(status) if status.success() => match take_over(dir, cgroup, what) {
            Ok(process) => return Ok(process),
            Err(error) => format!("its process can't be followed: {error}"),
        },
        Ok(status) => last_error(dir).unwrap_or_else(|| format!("runsc ended with {status}")),
        Err(error) => {
            // Waited for as well, so that nothing of it starts anything any longer.
            timeout(KILL_LIMIT, child.kill()).await.ok();
            error.to_string()
        }
    };
    tail.read_rest(&mut boot_log);
    fs::write(dir.join("boot.log"), &tail.0).ok();
    Err(with_panic(why, dir))
}

fn take_over(dir: &Path, cgroup: &SandboxCgroup, what: Starting) -> io::Result<Process> {
    let pid = fs::read_to_string(pid_file(dir))?.trim().parse().map_err(io::Error::other)?;
    let process = Process::open(pid)?;
    if what == Starting::Sandbox {
        settle(dir, cgroup, &process)?;
    }
    Ok(process)
}

/// It runs: its limits hold, and which process it is is written down for the next server.
fn settle(dir: &Path, cgroup: &SandboxCgroup, process: &Process) -> io::Result<()> {
    cgroup.hold()?;
    note_running(dir, cgroup, process)
}

pub(super) fn note_running(dir: &Path, cgroup: &SandboxCgroup, process: &Process) -> io::Result<()> {
    Record::new(Phase::Running, process.identity().clone(), cgroup.clone()).write(dir)
}

fn why_ended(end: ProcessEnd, dir: &Path, cgroup: &SandboxCgroup) -> End {
    if cgroup.ran_out_of_memory() {
        return End::OutOfMemory;
    }
    if let Some(not_brought) = NotBrought::of(dir) {
        return End::Failed(not_whole(&not_brought));
    }
    let panic = last_words(&panic_log(dir));
    match end {
        _ if panic.is_some() => End::Failed(with_panic("gVisor failed".to_owned(), dir)),
        // One that was taken up is nobody's child here, and the agent does not end by itself.
        ProcessEnd::Signalled(9 | 15) | ProcessEnd::Unknown => End::Killed,
        ProcessEnd::Signalled(signal) => End::Failed(format!("gVisor ended by signal {signal}")),
        ProcessEnd::Exited(_) => End::Exited,
    }
}

pub(super) fn not_whole(not_brought: &NotBrought) -> String {
    format!("what was saved of it could not be brought whole: {}", not_brought.why)
}

/// What runsc itself gives as the reason.
fn last_error(dir: &Path) -> Option<String> {
    let log = fs::read_to_string(dir.join("runsc.log")).ok()?;
    let line = log.lines().rev().find(|line| !line.trim().is_empty())?;
    let message = serde_json::from_str::<serde_json::Value>(line).ok().and_then(|json| json.get("msg")?.as_str().map(str::to_owned));
    Some(shorten(message.as_deref().unwrap_or(line)))
}

fn with_panic(why: String, dir: &Path) -> String {
    match last_words(&panic_log(dir)) {
        Some(panic) => format!("{why}; its last words: {panic}"),
        None => why,
    }
}

/// The beginning of a panic says what happened; the rest is stacks.
fn last_words(file: &Path) -> Option<String> {
    use io::Read;
    let mut text = Vec::new();
    fs::File::open(file).ok()?.take(SHOWN_BYTES as u64).read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text);
    (!text.trim().is_empty()).then(|| shorten(&text))
}

fn shorten(text: &str) -> String {
    let end = (0..=SHOWN_BYTES.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    text[..end].trim().to_owned()
}

/// The last bytes of a stream.
#[derive(Default)]
struct Tail(Vec<u8>);

impl Tail {
    async fn read_from(&mut self, from: &mut pipe::Receiver) {
        match from.read_buf(&mut self.0).await {
            // Nobody writes it any longer, or it can't be read; the caller waits for something else anyway.
            Ok(0) | Err(_) => std::future::pending().await,
            Ok(_) => self.trim(),
        }
    }

    fn read_rest(&mut self, from: &mut pipe::Receiver) {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = from.try_read(&mut bytes) {
            self.0.extend_from_slice(&bytes[..count]);
            self.trim();
        }
    }

    fn trim(&mut self) {
        if self.0.len() > 2 * BOOT_LOG_BYTES {
            self.0.drain(..self.0.len() - BOOT_LOG_BYTES);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_what_runsc_logged_last() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(last_error(dir.path()), None);
        fs::write(dir.path().join("runsc.log"), "{\"msg\":\"first\"}\n{\"msg\":\"no such file\",\"level\":\"error\"}\n\n").unwrap();
        assert_eq!(last_error(dir.path()), Some("no such file".to_owned()));
    }

    #[test]
    fn a_panic_of_gvisor_is_told_with_its_first_lines() {
        let dir = tempfile::tempdir().unwrap();
        let cgroup = SandboxCgroup::default();
        assert_eq!(why_ended(ProcessEnd::Exited(2), dir.path(), &cgroup), End::Exited);
        assert_eq!(why_ended(ProcessEnd::Signalled(9), dir.path(), &cgroup), End::Killed);
        fs::write(panic_log(dir.path()), format!("panic: out of fds\n{}", "ü".repeat(4000))).unwrap();
        let End::Failed(text) = why_ended(ProcessEnd::Exited(2), dir.path(), &cgroup) else { panic!("not failed") };
        assert!(text.contains("out of fds") && text.len() < 3 * SHOWN_BYTES, "{text}");
    }
}

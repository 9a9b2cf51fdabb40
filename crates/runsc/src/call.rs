//! Calling the binary: no shell, no environment, always a time limit.

use std::{
    ffi::{OsStr, OsString},
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use tokio::{
    io::AsyncReadExt,
    process::{Child, Command},
    time::timeout,
};

use crate::{
    FileServer, Written,
    command::{Checkpoint, Global, Restore, Run, State},
    control::{Control, ControlError},
};

/// Most that is kept of what a call says.
const KEPT_BYTES: u64 = 64 * 1024;
/// The end of it that an error shows.
const SHOWN_BYTES: usize = 2 * 1024;

/// Why a call did not do what it was to do.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    #[error("runsc {command} could not be started: {source}")]
    Spawn { command: String, source: io::Error },
    #[error("runsc {command} did not end within {} s", .limit.as_secs())]
    TimedOut { command: String, limit: Duration },
    #[error("runsc {command} failed ({status}): {}", said(.stdout, .stderr))]
    Failed { command: String, status: ExitStatus, stdout: String, stderr: String },
    #[error("runsc {command} said what can't be understood: {why}")]
    Unreadable { command: String, why: String },
    #[error("the sandbox could not be told to {command}: {why}")]
    Control { command: &'static str, why: String },
}

impl CallError {
    /// The container is not known to runsc.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Failed { stderr, .. } if stderr.contains("does not exist") || stderr.contains("no such container")
            || (stderr.contains("loading container") && stderr.contains("file does not exist")))
    }
}

fn said(stdout: &str, stderr: &str) -> String {
    let text = if stderr.trim().is_empty() { stdout } else { stderr };
    let start = text.len().saturating_sub(SHOWN_BYTES);
    let start = (start..=text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len());
    text[start..].trim().to_owned()
}

/// The runsc binary with the flags that all its calls here share.
#[derive(Debug, Clone)]
pub struct Runsc {
    binary: PathBuf,
    global: Global,
}

impl Runsc {
    #[must_use]
    pub fn new(binary: PathBuf, global: Global) -> Self {
        Self { binary, global }
    }

    #[must_use]
    pub fn global(&self) -> &Global {
        &self.global
    }

    /// Spawns `runsc run -detach` with the sandbox's standard streams. The child ends when the sandbox is up or has failed; it is not
    /// killed when dropped, since it may be about to succeed for whoever takes the sandbox up later.
    ///
    /// # Errors
    /// The binary could not be executed.
    pub fn spawn_run(&self, run: &Run, stdin: OwnedFd, stdout: OwnedFd) -> Result<Child, CallError> {
        self.spawn_detached(&run.files.global_arguments(), run.arguments(), stdin, stdout)
    }

    /// Likewise for `runsc create`, which leaves a container that waits for [`Self::restore_into`].
    ///
    /// # Errors
    /// The binary could not be executed.
    pub fn spawn_create(&self, run: &Run, stdin: OwnedFd, stdout: OwnedFd) -> Result<Child, CallError> {
        self.spawn_detached(&run.files.global_arguments(), run.create_arguments(), stdin, stdout)
    }

    /// Brings what was saved into a container that was made by [`Self::spawn_create`]. It runs when this returns. `files` is of use only to a sandbox that
    /// can be spoken to ([`crate::Features::control_socket`]).
    ///
    /// # Errors
    /// It could not be restored.
    pub async fn restore_into(&self, restore: &Restore, files: Option<FileServer>, limit: Duration) -> Result<(), CallError> {
        let say = async |control: &mut Control| control.restore(&restore.image, files).await;
        let directly = self.directly("restore", &restore.run.id, limit, say);
        match directly.await {
            Some(done) => done,
            None => self.call(restore.arguments(), limit).await.map(drop),
        }
    }

    /// Waits until all memory of a sandbox is there that [`Self::restore_into`] brings.
    ///
    /// # Errors
    /// It will not be.
    pub async fn whole(&self, id: &str, limit: Duration) -> Result<(), CallError> {
        const WHOLE: &str = "be whole";
        match self.directly(WHOLE, id, limit, Control::whole).await {
            Some(done) => done,
            // The command returns when it is.
            None if !self.global.features.control_socket => Ok(()),
            None => Err(CallError::Control { command: WHOLE, why: "it is gone".to_owned() }),
        }
    }

    /// Likewise for `runsc restore -detach`.
    ///
    /// # Errors
    /// The binary could not be executed.
    pub fn spawn_restore(&self, restore: &Restore, stdin: OwnedFd, stdout: OwnedFd) -> Result<Child, CallError> {
        self.spawn_detached(&restore.run.files.global_arguments(), restore.arguments(), stdin, stdout)
    }

    fn spawn_detached(&self, files: &[OsString], arguments: Vec<OsString>, stdin: OwnedFd, stdout: OwnedFd) -> Result<Child, CallError> {
        let name = name_of(&arguments);
        self.command(files)
            .args(arguments)
            .stdin(stdin)
            .stdout(stdout)
            // Its standard error is the sandbox's too, and nothing of the sandbox may grow on the host. Failures are told by the log.
            .stderr(Stdio::null())
            .spawn()
            .map_err(|source| CallError::Spawn { command: name, source })
    }

    /// `written` is told how much of the pages can be read already, where that is known.
    ///
    /// # Errors
    /// The container could not be saved.
    pub async fn checkpoint(&self, checkpoint: &Checkpoint, written: Option<Written<'_>>, limit: Duration) -> Result<(), CallError> {
        let say = async |control: &mut Control| control.checkpoint(&checkpoint.into, written).await;
        let directly = self.directly("checkpoint", &checkpoint.id, limit, say);
        let directly = if checkpoint.leave_running { directly.await } else { None };
        match directly {
            Some(done) => done,
            None => self.call(checkpoint.arguments(), limit).await.map(drop),
        }
    }

    /// Says something to a sandbox by its control socket. None: that can't be done, and nothing was said.
    async fn directly(
        &self,
        command: &'static str,
        id: &str,
        limit: Duration,
        say: impl AsyncFnOnce(&mut Control) -> Result<(), ControlError>,
    ) -> Option<Result<(), CallError>> {
        if !self.global.features.control_socket {
            return None;
        }
        let mut control = Control::connect(&self.global.root, id).await.ok()?;
        Some(match timeout(limit, say(&mut control)).await {
            Ok(done) => done.map_err(|error| CallError::Control { command, why: error.to_string() }),
            Err(_) => Err(CallError::TimedOut { command: command.to_owned(), limit }),
        })
    }

    /// # Errors
    /// The container is not known, or its state can't be read.
    pub async fn state(&self, id: &str, limit: Duration) -> Result<State, CallError> {
        let text = self.call(plain("state", id), limit).await?;
        serde_json::from_str(&text).map_err(|error| CallError::Unreadable { command: "state".to_owned(), why: error.to_string() })
    }

    /// # Errors
    /// The container does not run.
    pub async fn pause(&self, id: &str, limit: Duration) -> Result<(), CallError> {
        self.call(plain("pause", id), limit).await.map(drop)
    }

    /// # Errors
    /// The container is not paused.
    pub async fn resume(&self, id: &str, limit: Duration) -> Result<(), CallError> {
        self.call(plain("resume", id), limit).await.map(drop)
    }

    /// Ends the container if it runs and forgets it.
    ///
    /// # Errors
    /// Something of it could not be removed.
    pub async fn delete_force(&self, id: &str, limit: Duration) -> Result<(), CallError> {
        self.call(vec!["delete".into(), "-force".into(), id.into()], limit).await.map(drop)
    }

    async fn call(&self, arguments: Vec<OsString>, limit: Duration) -> Result<String, CallError> {
        let name = name_of(&arguments);
        let mut command = self.command(&[]);
        command.args(arguments);
        Ok(run_to_end(command, name, limit).await?.0)
    }

    fn command(&self, more: &[OsString]) -> Command {
        let mut command = Command::new(&self.binary);
        command.env_clear().args(self.global.arguments()).args(more);
        command
    }
}

fn plain(command: &str, id: &str) -> Vec<OsString> {
    vec![command.into(), id.into()]
}

fn name_of(arguments: &[OsString]) -> String {
    arguments.first().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// What the binary answers to a question about itself, on either stream: `runsc flags` says it on stderr.
pub(crate) async fn capture<A: AsRef<OsStr>>(binary: &Path, arguments: &[A], limit: Duration) -> Result<String, CallError> {
    let name = arguments.iter().map(|a| a.as_ref().to_string_lossy()).collect::<Vec<_>>().join(" ");
    let mut command = Command::new(binary);
    command.env_clear().args(arguments);
    let (stdout, stderr) = run_to_end(command, name, limit).await?;
    Ok(stdout + &stderr)
}

async fn run_to_end(mut command: Command, name: String, limit: Duration) -> Result<(String, String), CallError> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|source| CallError::Spawn { command: name.clone(), source })?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let all = async { tokio::join!(child.wait(), read_bounded(stdout), read_bounded(stderr)) };
    let Ok((status, stdout, stderr)) = timeout(limit, all).await else {
        // Waited for, so that it is not there any longer when the caller goes on; a kill can't be refused.
        child.kill().await.ok();
        return Err(CallError::TimedOut { command: name, limit });
    };
    let status = status.map_err(|source| CallError::Spawn { command: name.clone(), source })?;
    if status.success() { Ok((stdout, stderr)) } else { Err(CallError::Failed { command: name, status, stdout, stderr }) }
}

/// All of a stream is read, so that the writer never blocks; only its beginning is kept.
async fn read_bounded(stream: Option<impl tokio::io::AsyncRead + Unpin>) -> String {
    let Some(mut stream) = stream else { return String::new() };
    let mut kept = Vec::new();
    // What can't be read is not there: the status tells whether the call worked.
    (&mut stream).take(KEPT_BYTES).read_to_end(&mut kept).await.ok();
    tokio::io::copy(&mut stream, &mut tokio::io::sink()).await.ok();
    String::from_utf8_lossy(&kept).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_call_that_hangs_is_ended_and_told() {
        let error = capture(Path::new("/bin/sleep"), &["60"], Duration::from_millis(50)).await.unwrap_err();
        assert!(matches!(error, CallError::TimedOut { .. }), "{error}");
    }

    #[tokio::test]
    async fn a_call_that_fails_carries_what_it_said() {
        let error = capture(Path::new("/bin/ls"), &["/nowhere"], Duration::from_secs(5)).await.unwrap_err();
        assert!(error.to_string().contains("/nowhere") && matches!(error, CallError::Failed { .. }), "{error}");
    }

    #[tokio::test]
    async fn an_answer_counts_on_either_stream() {
        let answer = capture(Path::new("/bin/sh"), &["-c", "echo out; echo err >&2"], Duration::from_secs(5)).await.unwrap();
        assert_eq!(answer, "out\nerr\n");
    }

    #[tokio::test]
    async fn a_call_sees_none_of_our_environment() {
        assert_eq!(capture(Path::new("/usr/bin/env"), &[] as &[&str], Duration::from_secs(5)).await.unwrap(), "");
    }
}

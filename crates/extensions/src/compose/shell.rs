//! Runs constant scripts on a host: over ssh, or on this machine.

use std::{
    collections::HashMap,
    io,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    process::{ChildStdin, Command},
    time::timeout,
};

use super::ssh::Connection;
use crate::{
    ExtensionError, Host, HostName, Place, SshTarget,
    child::{Group, read_all},
};

/// What is kept of an output. The resolved configuration of a large project is well below it.
const MAX_STDOUT_BYTES: usize = 4 * 1024 * 1024;
const MAX_STDERR_BYTES: usize = 64 * 1024;
/// What is shown of what a host says.
const MAX_WORDS: usize = 1000;
/// The most that is copied of a local directory.
const MAX_UPLOAD_BYTES: u64 = 8 * 1024 * 1024 * 1024;
/// What ssh itself exits with.
const SSH_FAILED: i32 = 255;

/// A script with its arguments and its input.
pub(super) struct Task {
    script: &'static str,
    arguments: Vec<String>,
    input: Input,
    within: Duration,
}

pub(super) enum Input {
    None,
    Bytes(Vec<u8>),
    /// A tar of a directory of this machine.
    Directory(PathBuf),
}

impl Task {
    pub(super) fn new(script: &'static str, within: Duration) -> Self {
        Self { script, arguments: Vec::new(), input: Input::None, within }
    }

    pub(super) fn arg(mut self, argument: &str) -> Self {
        self.arguments.push(argument.to_owned());
        self
    }

    pub(super) fn input(mut self, input: Input) -> Self {
        self.input = input;
        self
    }

    /// What is executed: the script is an argument, and what is behind it are its own.
    fn command_line(&self) -> Vec<&str> {
        ["sh", "-c", self.script, "sandboxer"].into_iter().chain(self.arguments.iter().map(String::as_str)).collect()
    }
}

/// How a script ended and what it said.
#[derive(Debug)]
pub(super) struct Said {
    pub(super) status: i32,
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: String,
}

impl Said {
    /// The end of what it said, fit to be shown.
    pub(super) fn last_words(&self) -> String {
        let text = if self.stderr.trim().is_empty() { String::from_utf8_lossy(&self.stdout).into_owned() } else { self.stderr.clone() };
        words(&text)
    }
}

pub(super) fn words(text: &str) -> String {
    let clean: String = text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let from = clean.chars().count().saturating_sub(MAX_WORDS);
    clean.chars().skip(from).collect()
}

pub(super) struct Shell {
    dir: PathBuf,
    connections: Mutex<HashMap<HostName, Connection>>,
}

impl Shell {
    pub(super) fn open(run_dir: &Path) -> io::Result<Self> {
        Ok(Self { dir: super::ssh::directory(run_dir)?, connections: Mutex::default() })
    }

    fn connection(&self, host: &HostName, target: &SshTarget) -> Connection {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.entry(host.clone()).or_insert_with(|| Connection::new(&self.dir, host, target)).clone()
    }

    pub(super) async fn run(&self, host: &Host, task: Task) -> Result<Said, ExtensionError> {
        let mut command = match &host.place {
            Place::Local => {
                let line = task.command_line();
                let mut command = Command::new(line[0]);
                command.args(&line[1..]);
                command
            }
            Place::Ssh(target) => {
                let unusable = |error| ExtensionError::failed(format!("An argument can't be passed to host {}: {error}", host.name));
                let line = shlex::try_join(task.command_line()).map_err(unusable)?;
                self.connection(&host.name, target).command(&line).await?
            }
        };
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command.as_std_mut().process_group(0);
        let within = task.within;
        let ran = timeout(within, execute(command, task.input)).await;
        let said = ran.map_err(|_| ExtensionError::unavailable(format!("Host {} took longer than {} s.", host.name, within.as_secs())))?;
        let said = said.map_err(|error| ExtensionError::unavailable(format!("Host {} can't be used: {error}.", host.name)))?;
        if said.status == SSH_FAILED && matches!(host.place, Place::Ssh(_)) {
            let words = said.last_words();
            let why = if words.is_empty() { "it was cut" } else { words.trim_end_matches('.') };
            return Err(ExtensionError::unavailable(format!("The connection to host {} failed: {why}.", host.name)));
        }
        Ok(said)
    }
}

async fn execute(mut command: Command, input: Input) -> io::Result<Said> {
    let mut child = command.spawn()?;
    let group = Group::of(&child);
    let (Some(stdin), Some(stdout), Some(stderr)) = (child.stdin.take(), child.stdout.take(), child.stderr.take()) else {
        return Err(io::Error::other("it has no pipes"));
    };
    let ending = async {
        let status = child.wait().await;
        drop(group);
        status
    };
    let (fed, (stdout, dropped), (stderr, _), status) =
        tokio::join!(feed(stdin, input), read_all(stdout, MAX_STDOUT_BYTES), read_all(stderr, MAX_STDERR_BYTES), ending);
    let status = status?;
    // One that ended well without reading everything did not need it; one that did not says why itself.
    if status.success() {
        fed?;
    }
    if dropped > 0 {
        return Err(io::Error::other(format!("it said more than {MAX_STDOUT_BYTES} bytes")));
    }
    Ok(Said { status: status.code().unwrap_or(SSH_FAILED), stdout, stderr: String::from_utf8_lossy(&stderr).into_owned() })
}

async fn feed(mut stdin: ChildStdin, input: Input) -> io::Result<()> {
    match input {
        Input::None => Ok(()),
        Input::Bytes(bytes) => stdin.write_all(&bytes).await,
        Input::Directory(dir) => pack(&dir, &mut stdin).await,
    }
}

/// Links are packed as links: what they point at is not read.
async fn pack(dir: &Path, to: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
    let mut command = Command::new("tar");
    command.arg("-C").arg(dir).args(["-cf", "-", "."]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
    let mut tar = command.spawn()?;
    let Some(stdout) = tar.stdout.take() else { return Err(io::Error::other("tar has no output")) };
    let copied = tokio::io::copy(&mut stdout.take(MAX_UPLOAD_BYTES + 1), to).await?;
    if copied > MAX_UPLOAD_BYTES {
        return Err(io::Error::other(format!("the directory is larger than {MAX_UPLOAD_BYTES} bytes")));
    }
    // Files that change meanwhile are no reason to fail.
    match tar.wait().await?.code() {
        Some(0 | 1) => Ok(()),
        _ => Err(io::Error::other("the directory could not be read")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: [&str; 9] = ["; rm -rf /", "$(id)", "`id`", "a\nb", "'", "\"", "\\", "-o ProxyCommand=id", "*"];
    const ECHO: &str = r#"for a; do printf '<%s>' "$a"; done; cat"#;

    /// The line that ssh would hand to the shell of the host, run by a shell.
    #[tokio::test]
    async fn arguments_arrive_as_they_are_whatever_is_in_them() {
        let mut task = Task::new(ECHO, Duration::from_secs(30));
        for argument in HOSTILE {
            task = task.arg(argument);
        }
        let line = shlex::try_join(task.command_line()).unwrap();
        let expected: String = HOSTILE.iter().map(|argument| format!("<{argument}>")).collect();
        for shell in ["sh", "bash"] {
            let output = std::process::Command::new(shell).arg("-c").arg(&line).stdin(Stdio::null()).output().unwrap();
            assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{shell}");
        }
        assert!(shlex::try_join(["a\0b"]).is_err());
    }

    #[tokio::test]
    async fn a_local_host_runs_scripts_with_their_input_and_is_bounded_in_time() {
        let dir = tempfile::tempdir().unwrap();
        let shell = Shell::open(dir.path()).unwrap();
        let host = Host { name: "local".parse().unwrap(), place: Place::Local, base_dir: None, trust_repos: false };
        let task = Task::new(ECHO, Duration::from_secs(30)).arg("$(id)").input(Input::Bytes(b"input".to_vec()));
        let said = shell.run(&host, task).await.unwrap();
        assert_eq!((said.status, said.stdout.as_slice()), (0, b"<$(id)>input".as_slice()));
        let error = shell.run(&host, Task::new("sleep 1000 & sleep 1000", Duration::from_millis(300))).await.unwrap_err();
        assert!(error.message.contains("took longer"), "{error}");
    }
}

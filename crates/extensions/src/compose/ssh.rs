//! A kept connection to a host, by OpenSSH.
//!
//! ssh reads nothing but a configuration file that is written here: no user's or system's own, no agent, no password, no forwarding.
//! Keys of hosts must be known. So it works in the server's user namespace too, where ssh takes itself for root.
//!
//! One task owns the connection of a host. Its process is `ssh … cat`: what is written to it comes back, which says that the connection
//! stands, and when this server dies its input ends, and it with it. Every script goes through its control socket.

use std::{
    fs, io,
    io::Write as _,
    os::unix::{
        fs::{DirBuilderExt as _, OpenOptionsExt as _},
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use sha2::{Digest as _, Sha256};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, ChildStdin, ChildStdout, Command},
    sync::{mpsc, oneshot},
    time::timeout,
};
use tracing::{debug, info};

use super::shell::words;
use crate::{ExtensionError, HostName, SshTarget};

/// What the host is called in the configuration that is written for it.
const ALIAS: &str = "placement";
/// How long a connection may take to stand.
const CONNECT_WITHIN: Duration = Duration::from_secs(30);
/// Requests for a connection that may wait for it.
const WAITING: usize = 1024;
const MAX_STDERR_BYTES: u64 = 16 * 1024;

type Reply = oneshot::Sender<Result<(), String>>;

#[derive(Clone)]
pub(super) struct Connection {
    host: HostName,
    files: Files,
    requests: mpsc::Sender<Reply>,
}

#[derive(Clone)]
struct Files {
    configuration: PathBuf,
    socket: PathBuf,
    text: String,
}

/// The directory of configurations and sockets, empty.
pub(super) fn directory(run_dir: &Path) -> io::Result<PathBuf> {
    let dir = run_dir.join("ssh");
    match fs::remove_dir_all(&dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
    Ok(dir)
}

fn configuration(target: &SshTarget) -> String {
    let SshTarget { user, address, port, key, known_hosts } = target;
    // Every value was checked when the hosts file was read: none can be more than one word.
    format!(
        "Host {ALIAS}\n HostName {address}\n User {user}\n Port {port}\n IdentityFile {key}\n UserKnownHostsFile {known_hosts}\n \
         GlobalKnownHostsFile /dev/null\n IdentitiesOnly yes\n IdentityAgent none\n StrictHostKeyChecking yes\n \
         UpdateHostKeys no\n VerifyHostKeyDNS no\n BatchMode yes\n PreferredAuthentications publickey\n PasswordAuthentication no\n \
         KbdInteractiveAuthentication no\n ForwardAgent no\n ForwardX11 no\n ClearAllForwardings yes\n PermitLocalCommand no\n \
         ProxyCommand none\n CanonicalizeHostname no\n EscapeChar none\n RequestTTY no\n ConnectTimeout 10\n ConnectionAttempts 1\n \
         ServerAliveInterval 5\n ServerAliveCountMax 3\n TCPKeepAlive yes\n LogLevel ERROR\n",
        key = key.display(),
        known_hosts = known_hosts.display(),
    )
}

impl Connection {
    pub(super) fn new(dir: &Path, host: &HostName, target: &SshTarget) -> Self {
        // The path of a socket is short, and ssh adds to it while it makes one.
        let digest = Sha256::digest(host.as_str().as_bytes());
        let short: String = digest.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
        let files = Files { configuration: dir.join(format!("{short}.conf")), socket: dir.join(short), text: configuration(target) };
        let (requests, waiting) = mpsc::channel(WAITING);
        tokio::spawn(keep(host.clone(), files.clone(), waiting));
        Self { host: host.clone(), files, requests }
    }

    /// The command that runs this line on the host, once the connection stands.
    pub(super) async fn command(&self, line: &str) -> Result<Command, ExtensionError> {
        let (reply, answer) = oneshot::channel();
        let lost = || ExtensionError::unavailable(format!("The connection to host {} was given up.", self.host));
        self.requests.try_send(reply).map_err(|_| lost())?;
        let connected = answer.await.map_err(|_| lost())?;
        connected
            .map_err(|why| ExtensionError::unavailable(format!("Host {} can't be reached: {}.", self.host, why.trim_end_matches('.'))))?;
        let mut command = ssh(&self.files, "no");
        command.args(["--", ALIAS, line]);
        Ok(command)
    }
}

/// An environment of ours would be one more thing that decides.
fn ssh(files: &Files, master: &str) -> Command {
    let mut command = Command::new("ssh");
    command.env_clear().env("PATH", "/usr/local/bin:/usr/bin:/bin").env("LANG", "C.UTF-8");
    command.arg("-F").arg(&files.configuration).arg("-S").arg(&files.socket).arg("-o").arg(format!("ControlMaster={master}"));
    command
}

/// The process that holds the connection, with the ends of its pipes.
struct Master {
    child: Child,
    _stdin: ChildStdin,
    _stdout: BufReader<ChildStdout>,
}

/// Makes the connection when somebody needs it, and again when it has ended.
async fn keep(host: HostName, files: Files, mut waiting: mpsc::Receiver<Reply>) {
    let mut master: Option<Master> = None;
    while let Some(reply) = waiting.recv().await {
        let stands = master.as_mut().is_some_and(|master| matches!(master.child.try_wait(), Ok(None)));
        if !stands {
            match connect(&files).await {
                Ok(made) => {
                    info!(%host, "connected");
                    master = Some(made);
                }
                Err(why) => {
                    debug!(%host, why, "not connected");
                    master = None;
                    // Whoever waited for the same attempt is not made to wait for another.
                    let _ = reply.send(Err(why.clone()));
                    while let Ok(other) = waiting.try_recv() {
                        let _ = other.send(Err(why.clone()));
                    }
                    continue;
                }
            }
        }
        // Who no longer waits needs no answer.
        let _ = reply.send(Ok(()));
    }
}

async fn connect(files: &Files) -> Result<Master, String> {
    write(files).map_err(|error| format!("{}: {error}", files.configuration.display()))?;
    let mut command = ssh(files, "yes");
    command.args(["--", ALIAS, "cat"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command.as_std_mut().process_group(0);
    let mut child = command.spawn().map_err(|error| format!("ssh can't be started: {error}"))?;
    let (Some(mut stdin), Some(stdout), Some(stderr)) = (child.stdin.take(), child.stdout.take(), child.stderr.take()) else {
        return Err("ssh has no pipes".to_owned());
    };
    let mut stdout = BufReader::new(stdout);
    let standing = async {
        stdin.write_all(b"up\n").await?;
        // Bounded: a host that says more than it was asked is not one that echoes.
        let mut line = Vec::new();
        (&mut stdout).take(64).read_until(b'\n', &mut line).await?;
        Ok::<bool, io::Error>(line == b"up\n")
    };
    let stands = timeout(CONNECT_WITHIN, standing).await;
    if let Ok(Ok(true)) = stands {
        // Nobody reads what it may say later, and it must not wait for that.
        tokio::spawn(async move {
            let mut stderr = stderr;
            tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await.ok();
        });
        return Ok(Master { child, _stdin: stdin, _stdout: stdout });
    }
    drop(stdin);
    // One that has said why has ended; one that hangs is ended.
    let said = async {
        let mut text = Vec::new();
        stderr.take(MAX_STDERR_BYTES).read_to_end(&mut text).await.ok();
        // What comes before its last line is advice for whoever sits at a terminal, and names files of this machine.
        let text = String::from_utf8_lossy(&text).into_owned();
        words(text.trim_end().lines().last().unwrap_or_default())
    };
    let why = match timeout(Duration::from_secs(5), said).await {
        Ok(why) if !why.is_empty() => why,
        _ if stands.is_err() => format!("it did not answer within {} s", CONNECT_WITHIN.as_secs()),
        _ => "its shell does not echo what is sent to it".to_owned(),
    };
    child.start_kill().ok();
    child.wait().await.ok();
    Err(why)
}

fn write(files: &Files) -> io::Result<()> {
    match fs::remove_file(&files.socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = fs::File::options().create(true).truncate(true).write(true).mode(0o600).open(&files.configuration)?;
    file.write_all(files.text.as_bytes())
}

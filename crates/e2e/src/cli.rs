//! `sandboxer`, as a user has it at hand: with a server and a state directory of its own.

use std::{
    ffi::OsStr,
    io::{BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::{Arc, Mutex},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crate::{DEADLINE, Server, binary, stderr_of, stdout_of};

pub struct Cli {
    state: tempfile::TempDir,
    servers: String,
}

impl Cli {
    #[must_use]
    pub fn new(server: &Server) -> Self {
        Self::at(&[server.address()])
    }

    #[must_use]
    pub fn at(servers: &[SocketAddr]) -> Self {
        let servers: Vec<String> = servers.iter().map(|address| format!("http://{address}")).collect();
        Self { state: tempfile::tempdir().unwrap(), servers: servers.join(",") }
    }

    /// Where it keeps tokens.
    #[must_use]
    pub fn tokens(&self) -> PathBuf {
        self.state.path().join("sandboxer/tokens")
    }

    pub fn command<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Command {
        let mut command = binary::command();
        command.args(arguments).env("SANDBOXER_SERVER", &self.servers).env("XDG_STATE_HOME", self.state.path());
        command
    }

    /// With nothing to read.
    pub fn output<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// What it prints, if it succeeds.
    pub fn ok<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> String {
        let output = self.output(arguments);
        assert!(output.status.success(), "{:?}: {}", output.status, stderr_of(&output));
        stdout_of(&output)
    }

    /// What it complains of.
    pub fn fails<A: AsRef<OsStr>>(&self, code: i32, arguments: impl IntoIterator<Item = A>) -> String {
        let output = self.output(arguments);
        assert_eq!(output.status.code(), Some(code), "{}{}", stdout_of(&output), stderr_of(&output));
        let said = stderr_of(&output);
        assert!(!said.contains("panicked") && !said.contains("backtrace"), "{said}");
        said
    }

    /// A sandbox made by `create` with these options.
    #[must_use]
    pub fn create(&self, options: &[&str]) -> String {
        let id = self.ok(["create"].iter().chain(options)).trim().to_owned();
        assert_eq!(id.len(), 36, "{id}");
        id
    }

    /// With its input and output in the caller's hands.
    pub fn spawn<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Running {
        let mut child = self.command(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (stdout, first) = collect(child.stdout.take().unwrap());
        let (stderr, second) = collect(child.stderr.take().unwrap());
        Running { child, stdout, stderr, readers: vec![first, second] }
    }
}

/// A port that nobody listens on, for a server that comes back to it.
#[must_use]
pub fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn collect(from: impl std::io::Read + Send + 'static) -> (Arc<Mutex<Vec<String>>>, JoinHandle<()>) {
    let lines: Arc<Mutex<Vec<String>>> = Arc::default();
    let into = Arc::clone(&lines);
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            into.lock().unwrap().push(line);
        }
    });
    (lines, reader)
}

/// A command that runs.
pub struct Running {
    pub child: Child,
    stdout: Arc<Mutex<Vec<String>>>,
    stderr: Arc<Mutex<Vec<String>>>,
    readers: Vec<JoinHandle<()>>,
}

impl Running {
    #[must_use]
    pub fn stdout(&self) -> Vec<String> {
        self.stdout.lock().unwrap().clone()
    }

    #[must_use]
    pub fn stderr(&self) -> Vec<String> {
        self.stderr.lock().unwrap().clone()
    }

    pub fn say(&mut self, text: &str) {
        self.child.stdin.as_mut().unwrap().write_all(text.as_bytes()).unwrap();
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(i32::try_from(self.child.id()).unwrap()), signal).unwrap();
    }

    /// Waits until it has printed so many more lines than by now.
    pub async fn prints_more(&self, lines: usize) {
        let printed = self.stdout.lock().unwrap().len();
        self.printed(printed + lines).await;
    }

    /// Waits until it has printed so many lines.
    pub async fn printed(&self, wanted: usize) {
        let start = Instant::now();
        while self.stdout.lock().unwrap().len() < wanted {
            assert!(start.elapsed() < DEADLINE, "it prints nothing more; its errors: {:?}", self.stderr());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits for its end, and for all that it said.
    pub async fn exited(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                self.readers.drain(..).for_each(|reader| reader.join().unwrap());
                return status;
            }
            assert!(start.elapsed() < DEADLINE, "it does not end: {:?}", self.stderr());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

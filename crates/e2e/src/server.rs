//! A server process of the test's own: started, restarted, ended, and cleaned up after however the test ends.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    net::SocketAddr,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{LazyLock, Mutex, mpsc},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use serde_json::Value;

use crate::{DEADLINE, User, host, http, sha256};

/// The first start on a machine builds the base image.
const READY_DEADLINE: Duration = Duration::from_secs(600);
const LOG_TAIL_LINES: usize = 60;

/// Ends what a server left, should this process die before it could: it waits for the end of its input, which is ours to hold.
const WATCHDOG: &str = r#"
read -r _
ours() { tr '\0' ' ' </proc/$1/cmdline 2>/dev/null | grep -qF -- "$2"; }
ours "$1" "$2" && kill -TERM "$1"
i=0; while ours "$1" "$2" && [ $i -lt 150 ]; do sleep 0.1; i=$((i+1)); done
for p in /proc/[0-9]*; do p=${p#/proc/}; [ "$p" != $$ ] && ours "$p" "$2" && kill -KILL "$p"; done 2>/dev/null
rm -rf -- "$2"
"#;

/// The one server of a test binary, for the tests that don't disturb each other. It ends with the process.
#[must_use]
pub fn shared() -> &'static Server {
    static SHARED: LazyLock<Server> = LazyLock::new(|| Options::default().start());
    &SHARED
}

/// The same as [`shared`], as this user.
#[must_use]
pub fn shared_as(user: User) -> &'static Server {
    static ORDINARY: LazyLock<Server> = LazyLock::new(|| Options::default().user(User::Ordinary).start());
    match user {
        User::Current => shared(),
        User::Ordinary => &ORDINARY,
    }
}

/// How to start a server.
#[derive(Debug, Clone)]
pub struct Options {
    user: User,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    listen: Option<String>,
    ready: bool,
    image: bool,
    prefix: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            user: User::Current,
            arguments: Vec::new(),
            environment: Vec::new(),
            listen: Some("127.0.0.1:0".to_owned()),
            ready: true,
            image: true,
            prefix: Vec::new(),
        }
    }
}

impl Options {
    #[must_use]
    pub fn arg(mut self, argument: impl Into<String>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    /// As whom it runs.
    #[must_use]
    pub fn user(mut self, user: User) -> Self {
        self.user = user;
        self
    }

    /// None: no `--listen`.
    #[must_use]
    pub fn listen(mut self, address: Option<&str>) -> Self {
        self.listen = address.map(str::to_owned);
        self
    }

    /// Started by this command, which is given the server's own, and becomes it. As whoever runs the tests only.
    #[must_use]
    pub fn under(mut self, prefix: &[&str]) -> Self {
        self.prefix = prefix.iter().map(|&word| word.to_owned()).collect();
        self
    }

    /// The server finds no image and builds one of its own.
    #[must_use]
    pub fn without_image(mut self) -> Self {
        self.image = false;
        self
    }

    /// Don't wait for `/readyz`.
    #[must_use]
    pub fn not_waiting(mut self) -> Self {
        self.ready = false;
        self
    }

    #[must_use]
    pub fn start(self) -> Server {
        // Short: there are socket paths below it.
        let home = tempfile::Builder::new().prefix("sbx-").tempdir_in("/tmp").unwrap().keep();
        let data = home.join("data");
        let log = home.join("server.log");
        self.user.settle(&home, self.image);
        let running = Running::start(&self, &home, &data, &log);
        Server { options: self, home, data, log, running }
    }

    fn command(&self, home: &Path, data: &Path) -> Command {
        let mut command = self.user.command(home);
        if !self.image {
            command.env("SANDBOXER_IMAGE_DIR", home.join("images"));
        }
        if let Some((first, rest)) = self.prefix.split_first() {
            let mut outer = Command::new(first);
            outer.args(rest).arg(command.get_program()).stdin(Stdio::null());
            for (name, value) in command.get_envs() {
                match value {
                    Some(value) => outer.env(name, value),
                    None => outer.env_remove(name),
                };
            }
            command = outer;
        }
        command.arg("serve").arg("--data-dir").arg(data);
        if let Some(listen) = &self.listen {
            command.args(["--listen", listen]);
        }
        command.args(&self.arguments).envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }
}

/// A server process and its data directory.
#[derive(Debug)]
pub struct Server {
    options: Options,
    home: PathBuf,
    data: PathBuf,
    log: PathBuf,
    running: Running,
}

#[derive(Debug)]
struct Running {
    child: Child,
    watchdog: Child,
    address: SocketAddr,
    /// What it says on its standard output behind its address.
    said: Mutex<mpsc::Receiver<String>>,
}

impl Running {
    fn start(options: &Options, home: &Path, data: &Path, log: &Path) -> Self {
        let file = File::options().create(true).append(true).open(log).unwrap();
        let mut child = options.command(home, data).stdout(Stdio::piped()).stderr(file).process_group(0).spawn().unwrap();
        let watchdog = watchdog(child.id(), home);
        let lines = lines_of(child.stdout.take().unwrap());
        let address = match lines.recv_timeout(READY_DEADLINE) {
            Ok(line) => line
                .strip_prefix("sandboxer listening on http")
                .and_then(|rest| rest.trim_start_matches('s').strip_prefix("://")?.trim_end_matches('/').parse().ok())
                .unwrap_or_else(|| panic!("the first line of the server's stdout is {line:?}")),
            Err(_) => panic!("the server said no address (exit: {:?}); its log:\n{}", child.wait(), tail(log, LOG_TAIL_LINES)),
        };
        let running = Self { child, watchdog, address, said: Mutex::new(lines) };
        if options.ready {
            running.wait_until_ready(log);
        }
        running
    }

    fn wait_until_ready(&self, log: &Path) {
        let start = Instant::now();
        loop {
            if http::try_get(self.address, "/readyz", &[]).is_ok_and(|answer| answer.status == 200) {
                return;
            }
            assert!(start.elapsed() < READY_DEADLINE, "the server does not get ready; its log:\n{}", tail(log, LOG_TAIL_LINES));
            assert!(host::alive(self.child.id()), "the server ended while starting; its log:\n{}", tail(log, LOG_TAIL_LINES));
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Ends a process that names `home` and everything else that does, and removes `home`, should this process die first.
pub(crate) fn watchdog(pid: u32, home: &Path) -> Child {
    let mut command = Command::new("sh");
    command.args(["-c", WATCHDOG, "watchdog", &pid.to_string()]).arg(home);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0).spawn().unwrap()
}

/// The lines of a child's output; read to the end on a thread, so that the child never blocks on it.
fn lines_of(stdout: std::process::ChildStdout) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    receiver
}

impl Server {
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.running.address
    }

    #[must_use]
    pub fn pid(&self) -> u32 {
        self.running.child.id()
    }

    #[must_use]
    pub fn data_dir(&self) -> &Path {
        &self.data
    }

    #[must_use]
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// Waits until `/readyz` answers 200.
    pub fn wait_until_ready(&self) {
        self.running.wait_until_ready(&self.log);
    }

    /// The next line of its standard output, behind the one with its address.
    #[must_use]
    pub fn said(&self) -> String {
        self.running.said.lock().unwrap().recv_timeout(DEADLINE).expect("it says nothing more")
    }

    /// All that the server has written to its log so far.
    #[must_use]
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// `SIGTERM`: drain and exit.
    pub fn term(&self) {
        self.signal(Signal::SIGTERM);
    }

    /// `SIGUSR2`: restart, sandboxes left running.
    pub fn usr2(&self) {
        self.signal(Signal::SIGUSR2);
    }

    /// `SIGKILL`, and reaped.
    pub fn kill9(&mut self) {
        self.signal(Signal::SIGKILL);
        let _ = self.running.child.wait();
    }

    /// `SIGSTOP`: it stands still, and its sandboxes run on.
    pub fn halt(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// `SIGCONT`.
    pub fn go_on(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Its name in the records of a volume.
    #[must_use]
    pub fn instance(&self) -> String {
        std::fs::read_to_string(self.data.join("instance")).unwrap().trim().to_owned()
    }

    /// What it says of a sandbox: in which epoch it has it, and whether it serves it now. None: it does not have it.
    #[must_use]
    pub fn view_of(&self, sandbox_id: &str) -> Option<Value> {
        let wanted = sha256(sandbox_id.as_bytes());
        let view = self.get("/v1/instance").json();
        view["sandboxes"].as_array().unwrap().iter().find(|seen| seen["id_sha256"] == wanted.as_str()).cloned()
    }

    fn signal(&self, signal: Signal) {
        let _ = kill(Pid::from_raw(i32::try_from(self.pid()).unwrap()), signal);
    }

    /// Waits until the process was killed: by a fail point, say.
    pub async fn killed(&mut self) {
        let status = self.exited().await;
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9), "{status:?}");
    }

    /// The machine burns down: the server and all its sandboxes at once.
    pub fn burn_down(&mut self) {
        self.kill9();
        for process in self.every_process() {
            let _ = kill(Pid::from_raw(i32::try_from(process.pid).unwrap()), Signal::SIGKILL);
        }
    }

    /// Waits for the process to end.
    pub async fn exited(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.running.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < DEADLINE, "the server does not end; its log:\n{}", tail(&self.log, LOG_TAIL_LINES));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Starts it again with other settings, on the data that it left.
    pub fn restart_with(&mut self, options: Options) {
        self.options = options;
        self.restart();
    }

    /// Starts it again on the same data directory, once the old process is gone.
    pub fn restart(&mut self) {
        let _ = self.running.child.wait();
        self.running.dismiss_watchdog();
        self.running = Running::start(&self.options, &self.home, &self.data, &self.log);
    }

    /// What it counts under this name; none before the first.
    #[must_use]
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").body;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map_or(0.0, |value| value.parse().unwrap())
    }

    /// `GET`, answered.
    #[must_use]
    pub fn get(&self, path: &str) -> http::Answer {
        http::try_get(self.address(), path, &[]).unwrap()
    }
}

impl Running {
    /// A watchdog whose input says something, rather than ends, would act too; so it is killed.
    fn dismiss_watchdog(&mut self) {
        let _ = self.watchdog.kill();
        let _ = self.watchdog.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the end of the server's log ---\n{}", tail(&self.log, LOG_TAIL_LINES));
        }
        self.go_on();
        self.term();
        let start = Instant::now();
        while self.running.child.try_wait().is_ok_and(|status| status.is_none()) {
            if start.elapsed() > Duration::from_secs(15) {
                self.kill9();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // What a server that was killed, or that has a fault, left behind.
        for process in host::processes_naming(&self.home) {
            if process.pid != self.running.watchdog.id() {
                let _ = kill(Pid::from_raw(i32::try_from(process.pid).unwrap()), Signal::SIGKILL);
            }
        }
        for mount in host::mounts_under(&self.home) {
            let _ = nix::mount::umount2(&mount, nix::mount::MntFlags::MNT_DETACH);
        }
        let _ = std::fs::remove_dir_all(&self.home);
        self.running.dismiss_watchdog();
    }
}

/// The last lines of a file.
pub(crate) fn tail(path: &Path, lines: usize) -> String {
    let text = String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned();
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

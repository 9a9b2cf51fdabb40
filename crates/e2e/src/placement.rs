//! A placement host: a real sshd on loopback with throwaway keys, and a real docker engine of its own, both ended with it.

use std::{
    fs,
    io::Read as _,
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{Arc, Mutex, PoisonError, Weak},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, chown, geteuid},
};
use tokio::{
    net::TcpStream as AsyncTcpStream,
    sync::watch,
    task::{JoinHandle, JoinSet},
};

use crate::{host, server::watchdog};

/// How long an engine may take to answer.
const UP_WITHIN: Duration = Duration::from_secs(90);
const NOBODY: u32 = 65_534;
/// An image with a web server in it: one static program.
const IMAGE: &str = "sbx-test-web";

pub struct Placement {
    home: PathBuf,
    sshd: Child,
    dockerd: Child,
    watchdogs: Vec<Child>,
    port: u16,
}

fn program(name: &str) -> PathBuf {
    let places = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];
    let found = places.iter().map(|place| Path::new(place).join(name)).find(|path| path.exists());
    found.unwrap_or_else(|| panic!("{name} is not installed: run scripts/setup --dev"))
}

fn done(command: &mut Command) -> Output {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < UP_WITHIN, "still not so after {UP_WITHIN:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

impl Placement {
    /// The one of this process: started by the first test that needs it, and ended by the last.
    #[must_use]
    pub fn shared() -> Arc<Self> {
        static SHARED: Mutex<Weak<Placement>> = Mutex::new(Weak::new());
        assert!(geteuid().is_root(), "only root can start a docker engine: run these tests as root");
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = shared.upgrade() {
            return running;
        }
        let started = Arc::new(Self::start());
        *shared = Arc::downgrade(&started);
        started
    }

    fn start() -> Self {
        let home = tempfile::Builder::new().prefix("sbx-place-").tempdir_in("/tmp").unwrap().keep();
        for dir in ["repos", "docker"] {
            fs::create_dir(home.join(dir)).unwrap();
        }
        for key in ["host_key", "other_key", "client_key"] {
            done(Command::new(program("ssh-keygen")).args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(home.join(key)));
        }
        // A server of an ordinary user has a key of its own.
        fs::copy(home.join("client_key"), home.join("ordinary_key")).unwrap();
        chown(&home.join("ordinary_key"), Some(NOBODY.into()), Some(NOBODY.into())).unwrap();
        fs::set_permissions(&home, fs::Permissions::from_mode(0o711)).unwrap();
        let dockerd = Self::start_dockerd(&home);
        let (sshd, port) = Self::start_sshd(&home);
        let public = |key: &str| fs::read_to_string(home.join(format!("{key}.pub"))).unwrap();
        fs::write(home.join("known_hosts"), format!("[127.0.0.1]:{port} {}", public("host_key"))).unwrap();
        fs::write(home.join("wrong_hosts"), format!("[127.0.0.1]:{port} {}", public("other_key"))).unwrap();
        let watchdogs = [&dockerd, &sshd].map(|child| watchdog(child.id(), &home)).into();
        let placement = Self { home, sshd, dockerd, watchdogs, port };
        until("the engine answers", || placement.docker().arg("version").output().unwrap().status.success());
        placement.import();
        placement
    }

    /// Without rules in the firewall: nothing of the machine's network is changed for good.
    fn start_dockerd(home: &Path) -> Child {
        let docker = home.join("docker");
        fs::write(docker.join("daemon.json"), "{}").unwrap();
        let log = fs::File::create(home.join("dockerd.log")).unwrap();
        let mut command = Command::new(program("dockerd"));
        command.arg("--data-root").arg(docker.join("data")).arg("--exec-root").arg(docker.join("exec"));
        command.arg("--host").arg(format!("unix://{}", docker.join("docker.sock").display()));
        command.arg("--pidfile").arg(docker.join("pid")).arg("--config-file").arg(docker.join("daemon.json"));
        command.args(["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false", "--bridge=none"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).process_group(0).spawn().unwrap()
    }

    fn start_sshd(home: &Path) -> (Child, u16) {
        // It wants this directory, whoever starts it.
        fs::create_dir_all("/run/sshd").unwrap();
        fs::copy(home.join("client_key.pub"), home.join("authorized_keys")).unwrap();
        // Nothing else takes it in this moment, unless it was asked for by number.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let config = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {home}/host_key\nAuthorizedKeysFile {home}/authorized_keys\nPidFile none\n\
             UsePAM no\nStrictModes no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n\
             MaxSessions 200\nMaxStartups 200\nPrintMotd no\nSetEnv DOCKER_HOST=unix://{home}/docker/docker.sock\n",
            home = home.display()
        );
        fs::write(home.join("sshd_config"), config).unwrap();
        let mut command = Command::new(program("sshd"));
        command.arg("-D").arg("-f").arg(home.join("sshd_config")).arg("-E").arg(home.join("sshd.log"));
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0).spawn().unwrap();
        until("sshd answers", || {
            let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { return false };
            stream.read_exact(&mut [0; 4]).is_ok()
        });
        (child, port)
    }

    /// There is no registry: the image is made of one static program.
    fn import(&self) {
        let root = self.home.join("image");
        for dir in ["bin", "www", "tmp"] {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
        fs::copy(program("busybox"), root.join("bin/busybox")).unwrap();
        let archive = self.home.join("image.tar");
        done(Command::new("tar").arg("-C").arg(&root).arg("-cf").arg(&archive).arg("."));
        done(self.docker().arg("import").arg(&archive).arg(IMAGE));
    }

    /// docker, for this engine.
    #[must_use]
    pub fn docker(&self) -> Command {
        let mut command = Command::new(program("docker"));
        command.env("DOCKER_HOST", format!("unix://{}/docker/docker.sock", self.home.display())).stdin(Stdio::null());
        command
    }

    #[must_use]
    pub fn ssh_address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    #[must_use]
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// The entry of this host in a hosts file. `known_hosts` is `known_hosts`, or `wrong_hosts` with another key in it.
    #[must_use]
    pub fn entry(&self, name: &str, port: u16, known_hosts: &str, base_dir: &Path) -> String {
        let home = self.home.display();
        format!(
            "[hosts.{name}]\nkind = \"ssh\"\ntarget = \"root@127.0.0.1\"\nport = {port}\nkey = \"{home}/client_key\"\n\
             known_hosts = \"{home}/{known_hosts}\"\nbase_dir = \"{}\"\n",
            base_dir.display()
        )
    }

    /// A repository of a web server whose files are in `www`; `more` goes into the service.
    #[must_use]
    pub fn repo(&self, name: &str, more: &str) -> PathBuf {
        let repo = self.home.join("repos").join(name);
        fs::create_dir_all(repo.join("www")).unwrap();
        fs::write(repo.join("www/index.html"), "from the repository\n").unwrap();
        let compose = format!(
            "services:\n  web:\n    image: {IMAGE}\n    init: false\n    stop_signal: SIGKILL\n    \
             command: [\"/bin/busybox\", \"httpd\", \"-f\", \"-p\", \"8080\", \"-h\", \"/www\"]\n    \
             ports: [\"127.0.0.1::8080\"]\n    volumes: [\"./www:/www\"]\n{more}"
        );
        fs::write(repo.join("compose.yaml"), compose).unwrap();
        repo
    }

    /// Containers of this engine that run.
    #[must_use]
    pub fn containers(&self) -> Vec<String> {
        let output = done(self.docker().args(["ps", "--format", "{{.Names}}"]));
        String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        let left = self.docker().args(["ps", "-aq"]).output().map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        let left = left.unwrap_or_default();
        if !left.trim().is_empty() {
            let _ = self.docker().args(["rm", "-f"]).args(left.split_whitespace()).output();
        }
        let _ = self.docker().args(["network", "prune", "-f"]).output();
        for child in [&mut self.sshd, &mut self.dockerd] {
            let _ = kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGTERM);
            let _ = child.wait();
        }
        for process in host::processes_naming(&self.home) {
            if !self.watchdogs.iter().any(|watchdog| watchdog.id() == process.pid) {
                let _ = kill(Pid::from_raw(i32::try_from(process.pid).unwrap()), Signal::SIGKILL);
            }
        }
        for mount in host::mounts_under(&self.home) {
            let _ = nix::mount::umount2(&mount, nix::mount::MntFlags::MNT_DETACH);
        }
        let _ = fs::remove_dir_all(&self.home);
        for watchdog in &mut self.watchdogs {
            let _ = (watchdog.kill(), watchdog.wait());
        }
    }
}

/// A way to a host that can be cut, and opened again.
pub struct Gate {
    address: SocketAddr,
    open: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Gate {
    pub async fn start(target: SocketAddr) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let open = watch::Sender::new(true);
        let state = open.subscribe();
        let task = tokio::spawn(async move {
            let mut lines = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let mut state = state.clone();
                lines.spawn(async move { carry(client, target, &mut state).await });
            }
        });
        Self { address, open, task }
    }

    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Cuts every connection, and every new one at once.
    pub fn cut(&self) {
        self.open.send_replace(false);
    }

    pub fn mend(&self) {
        self.open.send_replace(true);
    }
}

async fn carry(mut client: AsyncTcpStream, target: SocketAddr, open: &mut watch::Receiver<bool>) {
    if !*open.borrow() {
        return;
    }
    let Ok(mut server) = AsyncTcpStream::connect(target).await else { return };
    let carrying = tokio::io::copy_bidirectional(&mut client, &mut server);
    tokio::select! {
        _ = carrying => {}
        _ = open.wait_for(|open| !open) => {}
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.task.abort();
    }
}

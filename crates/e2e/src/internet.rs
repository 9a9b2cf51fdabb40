//! The internet of a test: servers on loopback addresses, with names that the server under test has from a file of hosts.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;

use crate::{Options, binary::stderr_of, http};

const SCRIPT: &str = include_str!("internet.py");
/// A wheel of a package that says one thing.
const WHEEL: &str = r#"
import sys, zipfile
with zipfile.ZipFile(sys.argv[1], "w") as wheel:
    wheel.writestr("demo/__init__.py", "said = 'from the index'\n")
    wheel.writestr("demo-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
    wheel.writestr("demo-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr("demo-1.0.dist-info/RECORD", "demo/__init__.py,,\ndemo-1.0.dist-info/METADATA,,\ndemo-1.0.dist-info/WHEEL,,\ndemo-1.0.dist-info/RECORD,,\n")
"#;

/// Names that lead to the test's own servers.
const NAMES: [&str; 3] = ["index.test", "plain.test", "other.test"];

/// Servers: `https` and `http` with files and more, `raw` that says the hash of all it heard, `held` that greets and waits.
#[derive(Debug)]
pub struct Internet {
    child: Child,
    ports: Value,
    dir: TempDir,
}

impl Internet {
    #[must_use]
    pub fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        certificates(dir.path());
        let root = path("root");
        fs::create_dir_all(root.join("simple/demo")).unwrap();
        let name = "demo-1.0-py3-none-any.whl";
        run(Command::new("python3").args(["-c", WHEEL]).arg(root.join("simple/demo").join(name)));
        fs::write(root.join("simple/demo/index.html"), format!("<!DOCTYPE html><a href=\"{name}\">{name}</a>")).unwrap();
        fs::write(root.join("hello.txt"), "hello from outside\n").unwrap();
        repository(&path("work"), &root.join("repo.git"));
        fs::write(path("internet.py"), SCRIPT).unwrap();
        let mut child = Command::new("python3")
            .arg(path("internet.py"))
            .args([&root, &path("cert.pem"), &path("key.pem")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let internet = Self { child, ports: serde_json::from_str(&line).unwrap(), dir };
        internet.hosts(&NAMES.map(|name| ("127.0.0.1", name)));
        internet
    }

    #[must_use]
    pub fn port(&self, server: &str) -> u16 {
        u16::try_from(self.ports[server].as_u64().unwrap()).unwrap()
    }

    /// How many connections to `held` were cut off at their other end.
    #[must_use]
    pub fn resets(&self) -> u64 {
        let told = http::try_get(SocketAddr::from((Ipv4Addr::LOCALHOST, self.port("http"))), "/ends", &[]).unwrap();
        told.json()["reset"].as_u64().unwrap()
    }

    /// The certificate of who signed the server's.
    #[must_use]
    pub fn ca(&self) -> String {
        fs::read_to_string(self.dir.path().join("ca.pem")).unwrap()
    }

    fn hosts_file(&self) -> PathBuf {
        self.dir.path().join("hosts")
    }

    /// From now on the names are these.
    pub fn hosts(&self, names: &[(&str, &str)]) {
        let text: String = names.iter().map(|(address, name)| format!("{address} {name}\n")).collect();
        fs::write(self.hosts_file(), text).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(self.dir.path(), mode).unwrap();
    }

    /// A server that allows its sandboxes all names, and this internet's addresses.
    #[must_use]
    pub fn options(&self, options: Options) -> Options {
        let mut options = options.arg("--network-hosts").arg(self.hosts_file().to_str().unwrap()).arg("--network-allow=*:*");
        for port in self.ports.as_object().unwrap().values() {
            options = options.arg(format!("--network-allow-address=127.0.0.1:{port}"));
        }
        options
    }
}

impl Drop for Internet {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", stderr_of(&output));
}

fn certificates(dir: &Path) {
    let openssl = || {
        let mut command = Command::new("openssl");
        command.current_dir(dir);
        command
    };
    let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
    run(openssl().args(["req", "-x509", "-days", "2", "-subj", "/CN=test CA", "-keyout", "ca.key", "-out", "ca.pem"]).args(key));
    run(openssl().args(["req", "-subj", "/CN=index.test", "-keyout", "key.pem", "-out", "request.pem"]).args(key));
    let names: Vec<String> = NAMES.iter().map(|name| format!("DNS:{name}")).collect();
    fs::write(dir.join("names"), format!("subjectAltName={}\n", names.join(","))).unwrap();
    run(openssl()
        .args(["x509", "-req", "-in", "request.pem", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"])
        .args(["-extfile", "names", "-out", "cert.pem"]));
}

/// A repository that can be cloned from where it lies, by whoever serves files.
fn repository(work: &Path, bare: &Path) {
    let git = |dir: &Path, arguments: &[&str]| {
        let mut command = Command::new("git");
        command.args(["-C", dir.to_str().unwrap(), "-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main"]);
        run(command.args(arguments).env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_SYSTEM", "/dev/null"));
    };
    fs::create_dir_all(work).unwrap();
    git(work, &["init", "-q"]);
    fs::write(work.join("file"), "from the repository\n").unwrap();
    git(work, &["add", "file"]);
    git(work, &["commit", "-q", "-m", "first"]);
    git(work, &["clone", "-q", "--bare", ".", bare.to_str().unwrap()]);
    git(bare, &["update-server-info"]);
}

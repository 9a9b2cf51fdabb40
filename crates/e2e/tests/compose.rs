//! `ext.compose-ssh` against a real sshd on loopback and a real docker engine: what it promises, and everything that can go wrong on a host.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use sandboxer_e2e::{Gate, Options, Placement, Server, User, command, eventually, host, http, stderr_of, stdout_of};
use serde_json::{Value, json};

const WITHIN: Duration = Duration::from_secs(120);
const PROFILE: &str = "profile.compose-checkpoint";

/// A server that knows one host by its right key, by a wrong one, and one where nobody listens; its own directory on that host.
struct Fixture {
    server: Server,
    base: PathBuf,
    _config: tempfile::TempDir,
    place: Arc<Placement>,
}

impl Fixture {
    fn start(place: &Arc<Placement>, name: &str, more: &str) -> Self {
        Self::start_as(place, name, more, User::Current)
    }

    fn start_as(place: &Arc<Placement>, name: &str, more: &str, user: User) -> Self {
        let base = place.home().join(name);
        let config = tempfile::tempdir().unwrap();
        let port = place.ssh_address().port();
        let hosts = format!(
            "[repos]\nlocal = [\"{}/repos\"]\nschemes = [\"https\", \"git\"]\n{}{}{}{more}",
            place.home().display(),
            place.entry("east", port, "known_hosts", &base),
            place.entry("imposter", port, "wrong_hosts", &base),
            place.entry("nowhere", 1, "known_hosts", &base),
        );
        let hosts = if user == User::Ordinary { hosts.replace("client_key", "ordinary_key") } else { hosts };
        fs::write(config.path().join("hosts.toml"), hosts).unwrap();
        fs::set_permissions(config.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let server = Options::default().user(user).arg("--config-dir").arg(config.path().to_str().unwrap()).start();
        Self { server, base, _config: config, place: Arc::clone(place) }
    }

    fn ask(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let answer = http::json(self.server.address(), method, path, &[], body).unwrap();
        (answer.status, if answer.body.is_empty() { Value::Null } else { answer.json() })
    }

    fn made(&self, path: &str, body: &Value) -> Value {
        let (status, body) = self.ask("POST", path, body);
        assert_eq!(status, 201, "{path}: {body}");
        body
    }

    fn refused(&self, path: &str, body: &Value, status: u16, code: &str) -> String {
        let (found, body) = self.ask("POST", path, body);
        assert_eq!((found, body["error"]["code"].as_str()), (status, Some(code)), "{path}: {body}");
        body["error"]["message"].as_str().unwrap().to_owned()
    }

    fn order(host: &str, repo: &Path) -> Value {
        json!({ "profile": PROFILE, "host": host, "inputs": { "repo": repo } })
    }

    fn create(&self, host: &str, repo: &Path) -> Value {
        self.made("/v1/sandboxes", &Self::order(host, repo))
    }

    fn items(&self, path: &str) -> Vec<Value> {
        self.ask("GET", path, &Value::Null).1["items"].as_array().unwrap().clone()
    }

    fn remove(&self, path: &str) {
        let (status, body) = self.ask("DELETE", path, &Value::Null);
        assert_eq!(status, 204, "{path}: {body}");
    }

    /// Names in a directory of the host.
    fn names(dir: &Path) -> Vec<String> {
        let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
    }

    fn nothing_of(&self, sandbox: &str) -> bool {
        !self.place.containers().iter().any(|name| name.contains(sandbox))
    }
}

fn id(object: &Value) -> &str {
    object["id"].as_str().unwrap()
}

fn dir_of(sandbox: &Value) -> PathBuf {
    PathBuf::from(sandbox["handle"]["remote_dir"].as_str().unwrap())
}

fn snapshot_of(sandbox: &Value) -> String {
    format!("/v1/sandboxes/{}/snapshot", id(sandbox))
}

/// What the web server of a sandbox answers.
fn served(sandbox: &Value, path: &str) -> String {
    let ports = sandbox["handle"]["ports"].as_str().unwrap();
    let address = ports.strip_prefix("web:8080=").unwrap_or_else(|| panic!("{ports}")).parse().unwrap();
    http::try_get(address, path, &[]).unwrap().body
}

#[test]
fn what_was_snapshotted_is_served_by_a_new_sandbox_while_the_first_serves_its_own() {
    let place = Placement::shared();
    let fixture = Fixture::start(&place, "main", "");
    let healthy = "    healthcheck:\n      test: [\"CMD\", \"/bin/busybox\", \"wget\", \"-q\", \"-O\", \"-\", \"http://127.0.0.1:8080/\"]\n      interval: 1s\n      retries: 60\n";
    let repo = place.repo("healthy", healthy);
    let cli = |args: &[&str]| {
        let url = format!("http://{}", fixture.server.address());
        let output = command().args(args).env("SANDBOXER_SERVER", url).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", stderr_of(&output));
        stdout_of(&output).trim().to_owned()
    };
    let input = format!("repo={}", repo.display());
    let first = cli(&["create", "--profile", PROFILE, "--host", "east", "--input", &input]);
    let first: Value = serde_json::from_str(&cli(&["get", &first, "--json"])).unwrap();
    assert_eq!(
        (first["status"].as_str(), first["host"].as_str(), first["kind"].as_str()),
        (Some("ready"), Some("east"), Some("compose-ssh"))
    );
    assert_eq!(dir_of(&first), fixture.base.join("sandboxes").join(id(&first)));
    assert_eq!(served(&first, "/index.html"), "from the repository\n");
    fs::write(dir_of(&first).join("www/note.txt"), "old").unwrap();
    assert_eq!(served(&first, "/note.txt"), "old");

    let snapshot = cli(&["snapshot", id(&first)]);
    let snapshot: Value = serde_json::from_str(&cli(&["snapshots", "get", &snapshot, "--json"])).unwrap();
    let artifact = fixture.base.join("snapshots").join(format!("{}.tar.gz", id(&snapshot)));
    assert_eq!(snapshot["size_bytes"].as_u64(), Some(fs::metadata(&artifact).unwrap().len()));
    assert_eq!(snapshot["meta"]["sha256"], sandboxer_e2e::sha256(&fs::read(&artifact).unwrap()));
    assert_eq!(Fixture::names(artifact.parent().unwrap()).len(), 1, "and nothing beside it");
    fs::write(dir_of(&first).join("www/note.txt"), "new").unwrap();

    let second = cli(&["restore", id(&snapshot)]);
    let second: Value = serde_json::from_str(&cli(&["get", &second, "--json"])).unwrap();
    assert_eq!(served(&second, "/note.txt"), "old");
    assert_eq!(served(&first, "/note.txt"), "new");
    assert_ne!(first["handle"]["project"], second["handle"]["project"]);

    let message = fixture.refused(&format!("/v1/snapshots/{}/restore", id(&snapshot)), &json!({ "host": "nowhere" }), 422, "other_host");
    assert!(message.contains("east") && message.contains("nowhere"), "{message}");
    for sandbox in [&first, &second] {
        cli(&["rm", id(sandbox)]);
        assert!(fixture.nothing_of(id(sandbox)) && !dir_of(sandbox).exists());
    }
    cli(&["snapshots", "delete", id(&snapshot)]);
    assert!(!artifact.exists());
    // Without the hook in its profile it is the same sandbox, and not snapshotted.
    let plain = fixture.made("/v1/sandboxes", &json!({ "profile": "profile.compose-e2e", "host": "east", "inputs": { "repo": repo } }));
    fixture.refused(&snapshot_of(&plain), &Value::Null, 501, "snapshots_not_supported");
    // One whose containers have ended is not ready.
    assert!(place.docker().args(["kill", &format!("sbx-{}-web-1", id(&plain))]).output().unwrap().status.success());
    assert_eq!(fixture.ask("GET", &format!("/v1/sandboxes/{}", id(&plain)), &Value::Null).1["status"], "failed");
    fixture.remove(&format!("/v1/sandboxes/{}", id(&plain)));
}

#[test]
fn the_server_of_an_ordinary_user_reaches_hosts_from_its_own_namespace() {
    let place = Placement::shared();
    let fixture = Fixture::start_as(&place, "ordinary", "", User::Ordinary);
    let sandbox = fixture.create("east", &place.repo("plain-ordinary", ""));
    assert_eq!(served(&sandbox, "/index.html"), "from the repository\n");
    let snapshot = fixture.made(&snapshot_of(&sandbox), &Value::Null);
    assert_eq!(snapshot["status"], "completed");
    fixture.remove(&format!("/v1/snapshots/{}", id(&snapshot)));
    fixture.remove(&format!("/v1/sandboxes/{}", id(&sandbox)));
}

#[test]
fn a_git_repository_is_fetched_by_the_host_and_a_missing_one_leaves_nothing() {
    let place = Placement::shared();
    let fixture = Fixture::start(&place, "git", "");
    let repo = place.repo("over-git", "");
    let git = |args: &[&str]| {
        let identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"];
        let output = Command::new("git").args(identity).args(args).current_dir(&repo).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", stderr_of(&output));
    };
    git(&["init", "-q"]);
    git(&["add", "."]);
    git(&["commit", "-q", "-m", "all"]);
    git(&["tag", "v1"]);
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut daemon = Command::new("git");
    daemon.args(["daemon", "--export-all", "--listen=127.0.0.1", &format!("--port={port}")]);
    daemon.arg(format!("--base-path={}", place.home().join("repos").display())).arg(place.home().join("repos"));
    let mut daemon = daemon.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0).spawn().unwrap();
    let listens = || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok();
    let start = std::time::Instant::now();
    while !listens() {
        assert!(start.elapsed() < WITHIN, "git daemon does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    let order = |repo: &str, reference: &str| {
        let url = format!("git://127.0.0.1:{port}/{repo}");
        json!({ "profile": PROFILE, "host": "east", "inputs": { "repo": url, "ref": reference } })
    };
    let sandbox = fixture.made("/v1/sandboxes", &order("over-git", "v1"));
    assert_eq!(served(&sandbox, "/index.html"), "from the repository\n");
    fixture.refused("/v1/sandboxes", &order("none", "v1"), 503, "host_failed");
    fixture.refused("/v1/sandboxes", &order("over-git", "no-such-tag"), 503, "host_failed");
    fixture.remove(&format!("/v1/sandboxes/{}", id(&sandbox)));
    assert_eq!(Fixture::names(&fixture.base.join("sandboxes")), Vec::<String>::new(), "nothing half-made is left");
    assert_eq!(fixture.items("/v1/sandboxes"), Vec::<Value>::new());
    // git leaves a child that listens.
    let _ = nix::sys::signal::killpg(nix::unistd::Pid::from_raw(i32::try_from(daemon.id()).unwrap()), nix::sys::signal::Signal::SIGKILL);
    let _ = daemon.wait();
}

#[test]
fn a_hostile_repository_is_refused_and_nothing_is_executed() {
    let place = Placement::shared();
    let fixture = Fixture::start(&place, "hostile", "");
    let marker = place.home().join("executed");
    let touch = format!("touch {}", marker.display());
    for repo in [
        format!("; {touch}"),
        format!("$({touch})"),
        format!("`{touch}`"),
        format!("https://example.org/x; {touch}"),
        format!("https://example.org/x\n{touch}"),
        format!("-o ProxyCommand={touch}"),
        format!("--upload-pack={touch}"),
        format!("ssh://-oProxyCommand={touch}/x"),
        format!("ext::sh -c {touch}"),
        "/etc".to_owned(),
        "../repos".to_owned(),
        format!("{}/repos/../client_key", place.home().display()),
        "file:///etc".to_owned(),
    ] {
        let body = json!({ "profile": PROFILE, "host": "east", "inputs": { "repo": repo } });
        fixture.refused("/v1/sandboxes", &body, 422, "invalid_input");
    }
    for host in ["-oProxyCommand=x", "east; x", "east\n"] {
        fixture.refused(
            "/v1/sandboxes",
            &json!({ "profile": PROFILE, "host": host, "inputs": { "repo": "https://e.org/x" } }),
            422,
            "invalid_field",
        );
    }
    // A name that a shell would read is a directory like any other.
    let odd = place.repo("odd; touch executed $(touch executed) 'x", "");
    let sandbox = fixture.create("east", &odd);
    assert_eq!(served(&sandbox, "/index.html"), "from the repository\n");
    fixture.remove(&format!("/v1/sandboxes/{}", id(&sandbox)));

    // What a repository asks for is held against what a sandbox may have.
    let secret = place.home().join("client_key");
    for (name, more) in [
        ("privileged", "    privileged: true\n".to_owned()),
        ("env-file", format!("    env_file: {}\n", secret.display())),
        ("driver", "  other:\n    image: sbx-test-web\n    volumes: [\"data:/v\"]\nvolumes:\n  data:\n    driver_opts: { type: none, o: bind, device: / }\n".to_owned()),
    ] {
        let message = fixture.refused("/v1/sandboxes", &Fixture::order("east", &place.repo(name, &more)), 422, "repo_refused");
        assert!(!message.contains("PRIVATE KEY"), "{message}");
    }
    let link = place.repo("link", "");
    fs::remove_dir_all(link.join("www")).unwrap();
    std::os::unix::fs::symlink("/etc", link.join("www")).unwrap();
    let message = fixture.refused("/v1/sandboxes", &Fixture::order("east", &link), 422, "repo_refused");
    assert!(message.contains("symbolic link"), "{message}");

    assert!(!marker.exists() && !Path::new("executed").exists(), "nothing was executed");
    assert_eq!(fixture.items("/v1/sandboxes"), Vec::<Value>::new());
    assert_eq!(Fixture::names(&fixture.base.join("sandboxes")), Vec::<String>::new());
}

#[test]
fn a_wrong_host_key_and_a_host_that_is_not_there_are_clear_errors() {
    let place = Placement::shared();
    let fixture = Fixture::start(&place, "key", "");
    let repo = place.repo("plain", "");
    let message = fixture.refused("/v1/sandboxes", &Fixture::order("imposter", &repo), 503, "host_unavailable");
    assert!(message.contains("imposter") && message.to_lowercase().contains("host key"), "{message}");
    let message = fixture.refused("/v1/sandboxes", &Fixture::order("nowhere", &repo), 503, "host_unavailable");
    assert!(message.contains("nowhere") && message.contains("refused"), "{message}");
    assert!(!fixture.base.exists(), "nothing was done on the host");
    // What could not be removed, since nobody answers, is listed as failed and can be forgotten.
    for row in fixture.items("/v1/sandboxes") {
        assert_eq!(row["status"], "failed");
        assert_eq!(fixture.ask("DELETE", &format!("/v1/sandboxes/{}", id(&row)), &Value::Null).0, 503);
        fixture.remove(&format!("/v1/sandboxes/{}?force=true", id(&row)));
    }
}

// The way to the host is carried by a task, while the test waits for answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_is_cut_in_the_middle_of_a_snapshot_leaves_nothing_that_counts() {
    let place = Placement::shared();
    let gate = Gate::start(place.ssh_address()).await;
    let base = place.home().join("cut-base");
    let port = gate.address().port();
    let known = fs::read_to_string(place.home().join("known_hosts")).unwrap();
    let known = known.replace(&place.ssh_address().port().to_string(), &port.to_string());
    fs::write(place.home().join("gate_hosts"), known).unwrap();
    let fixture = Arc::new(Fixture::start(&place, "cut", &place.entry("gated", port, "gate_hosts", &base)));
    let repo = place.repo("plain-cut", "");
    let asked = Arc::clone(&fixture);
    let sandbox = tokio::task::spawn_blocking(move || asked.create("gated", &repo)).await.unwrap();
    // Large enough that its archive takes a while, and made of nothing.
    let large = dir_of(&sandbox).join("large");
    fs::File::create(&large).unwrap().set_len(4 << 30).unwrap();
    let (asked, path) = (Arc::clone(&fixture), snapshot_of(&sandbox));
    let snapshot = tokio::task::spawn_blocking(move || asked.ask("POST", &path, &Value::Null));
    let snapshots = base.join("snapshots");
    eventually("the archive is being written", WITHIN, || Fixture::names(&snapshots).iter().any(|name| name.ends_with(".part"))).await;
    gate.cut();
    let (status, body) = snapshot.await.unwrap();
    assert_eq!((status, body["error"]["code"].as_str()), (503, Some("host_unavailable")), "{body}");
    let rows = fixture.items("/v1/snapshots");
    assert_eq!((rows.len(), rows[0]["status"].as_str()), (1, Some("failed")));
    assert!(!Fixture::names(&snapshots).iter().any(|name| name.ends_with(".tar.gz")), "nothing has the name of a whole one");

    // It knows nothing of the cut and would go on for a while.
    for process in host::processes_naming(&snapshots) {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(i32::try_from(process.pid).unwrap()), nix::sys::signal::Signal::SIGKILL);
    }
    // The host vanishes altogether, and comes back.
    let answer = fixture.ask("POST", &snapshot_of(&sandbox), &Value::Null);
    assert_eq!((answer.0, answer.1["error"]["code"].as_str()), (503, Some("host_unavailable")), "{}", answer.1);
    let looked = fixture.ask("GET", &format!("/v1/sandboxes/{}", id(&sandbox)), &Value::Null).1;
    assert!(looked["error"].as_str().is_some_and(|why| why.contains("gated")), "{looked}");
    gate.mend();
    fs::remove_file(&large).unwrap();
    fixture.remove(&format!("/v1/snapshots/{}", id(&rows[0])));
    assert_eq!(Fixture::names(&snapshots), Vec::<String>::new(), "deleting the failed one removes what it left");
    fixture.refused(&format!("/v1/snapshots/{}/restore", id(&rows[0])), &Value::Null, 404, "not_found");
    let whole = fixture.made(&snapshot_of(&sandbox), &Value::Null);
    assert_eq!(whole["status"], "completed");
    assert_eq!(served(&sandbox, "/index.html"), "from the repository\n", "the sandbox went on all the while");
    fixture.remove(&format!("/v1/sandboxes/{}", id(&sandbox)));
}

#[test]
fn a_full_disk_on_the_host_is_told_and_leaves_nothing() {
    let place = Placement::shared();
    let base = place.home().join("small");
    fs::create_dir(&base).unwrap();
    let options = Some("size=4m");
    nix::mount::mount(Some("none"), &base, Some("tmpfs"), nix::mount::MsFlags::empty(), options).unwrap();
    let fixture = Fixture::start(&place, "full", &place.entry("small", place.ssh_address().port(), "known_hosts", &base));
    let sandbox = fixture.create("small", &place.repo("plain-full", ""));
    let mut noise = vec![0; 3 << 20];
    std::io::Read::read_exact(&mut fs::File::open("/dev/urandom").unwrap(), &mut noise).unwrap();
    fs::write(dir_of(&sandbox).join("noise"), &noise).unwrap();
    let message = fixture.refused(&snapshot_of(&sandbox), &Value::Null, 503, "host_disk_full");
    assert!(message.contains("small") && message.contains("full"), "{message}");
    assert_eq!(Fixture::names(&base.join("snapshots")), Vec::<String>::new());
    assert_eq!(fixture.items("/v1/snapshots")[0]["status"], "failed");
    assert_eq!(fixture.ask("GET", &format!("/v1/sandboxes/{}", id(&sandbox)), &Value::Null).1["status"], "ready");
    fs::remove_file(dir_of(&sandbox).join("noise")).unwrap();
    fixture.made(&snapshot_of(&sandbox), &Value::Null);
    fixture.remove(&format!("/v1/sandboxes/{}", id(&sandbox)));
    nix::mount::umount2(&base, nix::mount::MntFlags::MNT_DETACH).unwrap();
}

#[test]
fn an_archive_that_was_exchanged_or_points_outside_is_not_restored() {
    let place = Placement::shared();
    let fixture = Fixture::start(&place, "archive", "");
    let sandbox = fixture.create("east", &place.repo("plain-archive", ""));
    let snapshot = fixture.made(&snapshot_of(&sandbox), &Value::Null);
    let artifact = fixture.base.join("snapshots").join(format!("{}.tar.gz", id(&snapshot)));
    let restore = format!("/v1/snapshots/{}/restore", id(&snapshot));
    let good = fs::read(&artifact).unwrap();
    let outside = fixture.base.join("outside");
    fs::write(place.home().join("outside"), "it got out").unwrap();
    for (names, inner) in [(["../../outside"], "s,^,../../,"), (["/outside"], "s,^,/,")] {
        // GNU tar writes such names when it is told to.
        let made = Command::new("tar")
            .arg("-C")
            .arg(place.home())
            .args(["-P", "--transform", inner, "-czf"])
            .arg(&artifact)
            .arg("outside")
            .output()
            .unwrap();
        assert!(made.status.success(), "{names:?}: {}", stderr_of(&made));
        let message = fixture.refused(&restore, &Value::Null, 503, "artifact_changed");
        assert!(message.contains("east") && message.contains("digest"), "{message}");
        // Even if its digest were the one that is known.
        let file = fixture.server.data_dir().join("snapshots.json");
        let text = fs::read_to_string(&file).unwrap();
        let known = serde_json::from_str::<Value>(&text).unwrap()["snapshots"][0]["meta"]["sha256"].as_str().unwrap().to_owned();
        fs::write(&file, text.replace(&known, &sandboxer_e2e::sha256(&fs::read(&artifact).unwrap()))).unwrap();
        let message = fixture.refused(&restore, &Value::Null, 503, "artifact_unsafe");
        assert!(message.contains("outside"), "{message}");
        fs::write(&file, text).unwrap();
    }
    assert!(!outside.exists() && !Path::new("/outside").exists());
    fs::remove_file(&artifact).unwrap();
    fixture.refused(&restore, &Value::Null, 503, "artifact_missing");
    std::os::unix::fs::symlink("/etc/passwd", &artifact).unwrap();
    fixture.refused(&restore, &Value::Null, 503, "artifact_missing");
    fs::remove_file(&artifact).unwrap();
    fs::write(&artifact, &good).unwrap();
    let restored = fixture.made(&restore, &Value::Null);
    assert_eq!(served(&restored, "/index.html"), "from the repository\n");
    assert_eq!(fixture.items("/v1/sandboxes").len(), 2, "of all those attempts only the last is there");
    assert_eq!(Fixture::names(&fixture.base.join("sandboxes")).len(), 2);
    for one in [&sandbox, &restored] {
        fixture.remove(&format!("/v1/sandboxes/{}", id(one)));
    }
}

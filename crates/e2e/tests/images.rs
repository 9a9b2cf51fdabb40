//! Two images side by side, and the command line's own way to run something.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    io::Write,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use sandboxer_e2e::{Cli, DEADLINE, Options, User, Ws, command, eventually, shared, stderr_of, stdout_of};
use serde_json::{Value, json};

/// Notes what it was told when it was started, and goes on waiting.
const NOT_PYTHON: &[u8] = b"#!/bin/bash\nwarm=$(<\"$PYTHONPATH/warm\")\necho ${warm//$'\\n'/ } >>/tmp/warm\nread -r\n";

/// Bash, what it needs, maybe something in the place of Python, and a file that tells the image: as `docker save` writes it.
fn archive(dir: &Path, python: Option<&[u8]>, process: Value) -> PathBuf {
    let mut layer = tar::Builder::new(Vec::new());
    let mut add = |path: &str, bytes: &[u8], mode: u32| {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(mode);
        layer.append_data(&mut header, path.trim_start_matches('/'), bytes).unwrap();
    };
    add("/bin/bash", &std::fs::read("/bin/bash").unwrap(), 0o755);
    if let Some(python) = python {
        add("/usr/bin/python3", python, 0o755);
    }
    add("/etc/which-image", b"the small one\n", 0o644);
    let linked = Command::new("ldd").arg("/bin/bash").output().unwrap();
    let libraries = stdout_of(&linked);
    for library in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
        add(library, &std::fs::read(library).unwrap(), 0o755);
    }
    let layer = layer.into_inner().unwrap();
    let config = json!({"architecture": "amd64", "os": "linux", "config": process, "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{}", sandboxer_e2e::sha256(&layer))]}}).to_string();
    let config_name = format!("{}.json", sandboxer_e2e::sha256(config.as_bytes()));
    let manifest = json!([{"Config": config_name, "RepoTags": ["small:latest"], "Layers": ["layer.tar"]}]).to_string();
    let path = dir.join("small.tar");
    let mut image = tar::Builder::new(std::fs::File::create(&path).unwrap());
    for (name, bytes) in [(config_name.as_str(), config.as_bytes()), ("layer.tar", &layer), ("manifest.json", manifest.as_bytes())] {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        image.append_data(&mut header, name, bytes).unwrap();
    }
    image.into_inner().unwrap().flush().unwrap();
    path
}

/// A directory for `PATH` that has every program of the real one but the named ones.
fn path_without(missing: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::Builder::new().prefix("sbx-path-").tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    for from in std::env::split_paths(&std::env::var_os("PATH").unwrap()) {
        for entry in std::fs::read_dir(from).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if !missing.iter().any(|missing| *missing == name) {
                // The first of a name is the one that a shell would find.
                let _ = std::os::unix::fs::symlink(entry.path(), dir.path().join(name));
            }
        }
    }
    dir
}

#[tokio::test]
async fn first_serve_of_an_ordinary_user_builds_the_image() {
    let path = path_without(&["mmdebstrap", "fakeroot"]);
    let options = Options::default().user(User::Ordinary).without_image().not_waiting();
    let server = options.env("PATH", path.path().to_str().unwrap()).start();
    let told = || server.get("/readyz").body;
    let missing = || told().contains("apt-get install mmdebstrap fakeroot");
    eventually("the server says what is missing", DEADLINE, missing).await;
    let client = Cli::new(&server);
    let refused = client.output(["run", "--language", "python", "print('first')"]);
    assert!(!refused.status.success() && stderr_of(&refused).contains("apt-get install"), "{}", stderr_of(&refused));

    // Once the administrator has installed it, the server goes on by itself.
    for program in ["mmdebstrap", "fakeroot"] {
        std::os::unix::fs::symlink(Path::new("/usr/bin").join(program), path.path().join(program)).unwrap();
    }
    server.wait_until_ready();
    let first = client.output(["run", "--language", "python", "print('first')"]);
    assert_eq!((stdout_of(&first).as_str(), first.status.code()), ("first\n", Some(0)), "{}", stderr_of(&first));
}

/// An image of its own name, gone when the test is.
struct Imported(String);

impl Imported {
    fn new(what: &str, python: Option<&[u8]>, arguments: &[&str]) -> Self {
        Self::with_process(what, python, arguments, json!({}))
    }

    fn with_process(what: &str, python: Option<&[u8]>, arguments: &[&str], process: Value) -> Self {
        let name = format!("e2e-{what}-{}", std::process::id());
        let dir = tempfile::tempdir().unwrap();
        let output = command()
            .args(["image", "import", "--name", &name])
            .args(arguments)
            .arg(archive(dir.path(), python, process))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", stderr_of(&output));
        Self(name)
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        let _ = command().args(["image", "rm", &self.0]).output();
    }
}

#[tokio::test]
async fn imported_image_gives_its_environment_and_directory() {
    let process = json!({"Env": ["PATH=/opt/none:/usr/bin:/bin", "FROM_IMAGE=yes", "BOTH=image"], "WorkingDir": "/etc",
        "User": "1000", "Entrypoint": ["/bin/bash"], "Cmd": ["-l"]});
    let image = Imported::with_process("process", None, &[], process);
    let mut ws = Ws::create_with(shared(), json!({"image": image.0, "env": {"BOTH": "creator"}})).await;
    let code = "pwd; echo $PATH $FROM_IMAGE $BOTH $UID";
    assert_eq!(ws.bash(code).await.ok(), "/etc\n/opt/none:/usr/bin:/bin yes creator 0\n");
    let mut ws = Ws::create_with(shared(), json!({"image": image.0, "cwd": "/"})).await;
    assert_eq!(ws.bash("pwd").await.ok(), "/\n", "the creator's directory wins");
    let listed: Value = serde_json::from_str(&stdout_of(&command().args(["image", "ls", "--json"]).output().unwrap())).unwrap();
    let shown = listed["items"].as_array().unwrap().iter().find(|item| item["name"] == image.0.as_str()).unwrap();
    assert_eq!((&shown["user"], &shown["cmd"]), (&json!("1000"), &json!(["-l"])), "{shown}");
}

#[tokio::test]
async fn extra_authorities_are_trusted_in_new_images() {
    let dir = tempfile::tempdir().unwrap();
    let (key, certificate) = (dir.path().join("key.pem"), dir.path().join("ca.pem"));
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=sandboxer test", "-keyout"])
        .arg(&key)
        .arg("-out")
        .arg(&certificate)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", stderr_of(&made));
    let image = Imported::new("authorities", None, &["--extra-ca-file", certificate.to_str().unwrap()]);
    let mut ws = Ws::create_with(shared(), json!({"image": image.0})).await;
    let seen = ws.bash("echo \"$(</usr/local/share/ca-certificates/sandboxer-extra.crt)\"").await;
    assert_eq!(seen.ok().trim(), std::fs::read_to_string(&certificate).unwrap().trim());

    let both = dir.path().join("both.pem");
    std::fs::write(&both, [std::fs::read(&certificate).unwrap(), std::fs::read(&key).unwrap()].concat()).unwrap();
    let refused = command().args(["image", "ls", "--extra-ca-file", both.to_str().unwrap()]).output().unwrap();
    assert!(!refused.status.success() && stderr_of(&refused).contains("private key"), "{}", stderr_of(&refused));
}

#[tokio::test]
async fn two_images_side_by_side_work() {
    let server = shared();
    // Imported while the server runs.
    let image = Imported::new("two", None, &[]);
    let listed: Value = serde_json::from_str(&stdout_of(&command().args(["image", "ls", "--json"]).output().unwrap())).unwrap();
    let digest = listed["items"].as_array().unwrap().iter().find(|item| item["name"] == image.0.as_str()).unwrap()["digest"].clone();

    let mut base = Ws::create(server).await;
    let mut small = Ws::create_with(server, json!({"image": image.0})).await;
    let mut by_digest = Ws::create_with(server, json!({"image": digest})).await;
    let code = "if [ -e /etc/which-image ]; then echo $(</etc/which-image); else echo base; fi; echo mine >/file; pwd";
    assert_eq!(base.bash(code).await.ok(), "base\n/root\n");
    assert_eq!(small.bash(code).await.ok(), "the small one\n/root\n");
    assert_eq!(by_digest.bash(code).await.ok(), "the small one\n/root\n");
    // It has no Python, and says so.
    small.send(json!({"language": "python", "code": "print(1)"})).await;
    small.expect_status("SANDBOX_EXECUTION_ERROR").await;
    small.expect_error("start_failed").await;
    assert_eq!(small.bash("echo $(</file)").await.ok(), "mine\n");
}

/// Waits until this many bash run, itself among them, and says what those in the place of Python were told.
const WAITING: &str = r#"
for ((i = 0; i < 600; i++)); do
    n=0
    for p in /proc/[0-9]*/comm; do { read -r name <$p; } 2>/dev/null && [[ $name == bash ]] && n=$((n + 1)); done
    [[ -e /tmp/warm ]] && mapfile -t told </tmp/warm
    ((n >= 3 && ${#told[@]} >= 2)) && break
    read -r -t 0.1
done
echo $n; printf '%s\n' "${told[@]}""#;

#[tokio::test]
async fn an_image_says_how_many_interpreters_wait_and_what_they_have_imported() {
    let image = Imported::new("spares", Some(NOT_PYTHON), &["--spare-interpreters", "2", "--warm-modules", "decimal,numpy.linalg"]);
    let server = Options::default().arg("--spare-interpreters").arg("1").start();
    let mut ws = Ws::create_with(&server, json!({"image": image.0})).await;
    assert_eq!(ws.bash(WAITING).await.ok(), "3\ndecimal numpy.linalg\ndecimal numpy.linalg\n");
    // The count of a server that keeps none is not an image's to raise.
    let none = Options::default().arg("--spare-interpreters").arg("0").start();
    let mut ws = Ws::create_with(&none, json!({"image": image.0})).await;
    assert_eq!(ws.bash(&WAITING.replace("600", "10")).await.ok(), "1\n\n");
}

#[tokio::test]
async fn run_prints_what_the_program_prints_and_ends_as_it_ends() {
    let url = format!("http://{}", shared().address());
    let run = |arguments: Vec<&'static str>| {
        let mut command = command();
        command.arg("run").args(["--server", &url]).args(arguments);
        tokio::task::spawn_blocking(move || command.output().unwrap())
    };
    let output = run(vec!["--language", "python", "print(\"hello\")"]).await.unwrap();
    assert_eq!((stdout_of(&output).as_str(), output.status.code()), ("hello\n", Some(0)), "{}", stderr_of(&output));
    let output = run(vec!["--language", "bash", "echo error >&2; exit 7"]).await.unwrap();
    assert_eq!((stderr_of(&output).as_str(), output.status.code()), ("error\n", Some(7)));
}

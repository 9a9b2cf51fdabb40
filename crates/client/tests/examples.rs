//! Every example, as it is, against real servers.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    collections::BTreeSet,
    io::Write as _,
    path::Path,
    process::{Command, Output, Stdio},
};

use sandboxer_e2e::{Server, Volume, stderr_of, stdout_of};

fn command(name: &str, servers: &[&Server]) -> Command {
    let test = std::env::current_exe().unwrap();
    // target/debug/deps/<test> → target/debug/examples/<name>
    let path = test.parent().and_then(Path::parent).unwrap().join("examples").join(name);
    assert!(path.exists(), "{} is not there: cargo build -p sandboxer-client --examples", path.display());
    let mut command = Command::new(path);
    command.args(servers.iter().map(|server| format!("http://{}", server.address()))).stdin(Stdio::null());
    command
}

fn run(name: &str, servers: &[&Server]) -> String {
    said(name, &command(name, servers).output().unwrap())
}

fn said(name: &str, output: &Output) -> String {
    assert!(output.status.success(), "{name}: {}\n{}{}", output.status, stdout_of(output), stderr_of(output));
    stdout_of(output)
}

#[test]
fn every_example_does_what_it_says() {
    let (volume, filesystems) = (Volume::default(), Volume::default());
    let options = || volume.options().env("FILESYSTEM_SNAPSHOT_MOUNT_PATH", filesystems.path().to_str().unwrap());
    let (here, there) = (options().start(), options().start());

    assert_eq!(run("basic", &[&here]), "0\n1\n2\nexit code Some(0)\nsorted: \"a\\nb\\n\"\n");

    let mut shell = command("shell", &[&here]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    shell.stdin.take().unwrap().write_all(b"tty; echo $((6*7)) is it; exit 3\n").unwrap();
    let shell = shell.wait_with_output().unwrap();
    assert_eq!(shell.status.code(), Some(3), "{}", stdout_of(&shell));
    assert!(stdout_of(&shell).contains("/dev/pts/") && stdout_of(&shell).contains("42 is it"), "{}", stdout_of(&shell));

    let checkpoint = run("checkpoint", &[&here, &there]);
    assert!(checkpoint.starts_with("here: 1, 2\n") && checkpoint.ends_with("there: 3\n"), "{checkpoint}");
    assert!(run("filesystem_snapshot", &[&here]).ends_with("hello from the tool\n"));
    let handoff = run("handoff", &[&here, &there]);
    assert!(handoff.starts_with("at the first server: heard one\n"), "{handoff}");
    assert!(handoff.contains("the first client: The sandbox was") && handoff.ends_with("at the second server: heard two\n"), "{handoff}");
    assert!(run("reconnect", &[&here]).ends_with("bytes, each once\n"));
    assert!(run("fork", &[&here]).contains("the best is 3, in sandbox"));
    let steps = run("agent_loop", &[&here]);
    let expected = "step 0: kept\nstep 1: failed, and never happened\nstep 2: failed, and never happened\nstep 3: kept\nstep 4: kept\n";
    assert_eq!(steps, format!("{expected}the answer is 42\n"));

    for server in [here, there] {
        assert_eq!(server.found(None, "/v1/sandboxes")["items"].as_array().unwrap().len(), 0, "an example left a sandbox");
    }
}

#[test]
fn every_file_in_the_directory_of_examples_is_one() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = std::fs::read_dir(crates.join("../../examples")).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let files: BTreeSet<String> = files.filter_map(|file| file.strip_suffix(".rs").map(str::to_owned)).collect();
    let manifest = std::fs::read_to_string(crates.join("Cargo.toml")).unwrap();
    for file in &files {
        assert!(manifest.contains(&format!("path = \"../../examples/{file}.rs\"")), "{file} is not in Cargo.toml");
    }
    assert_eq!(files.len(), 8);
}

//! Programs as extensions: one that does what it must, and those that don't.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use sandboxer_extensions::{
    Health, Hosts, Inputs, Map, Profile, Sandbox, SandboxExtension, SnapshotId,
    conformance::{self, Check},
    external::{External, Program},
};
use sandboxer_protocol::SandboxId;

const WITHIN: Duration = Duration::from_secs(60);

fn profile() -> Profile {
    Profile::parse("name = \"profile.t\"\nextension = \"ext.t\"\ndescription = \"d\"\n").unwrap()
}

fn sandbox() -> Sandbox {
    let hosts = Hosts::load(None).unwrap();
    let host = hosts.get(&Hosts::local_name()).unwrap().clone();
    Sandbox { id: SandboxId::random(), profile: profile(), inputs: Inputs::new(), host, metadata: Map::new(), handle: Map::new() }
}

fn shell(dir: &Path, script: &str, within: Duration) -> External {
    let args = vec!["-c".to_owned(), script.to_owned()];
    let program = Program { path: PathBuf::from("/bin/sh"), args, env: BTreeMap::new(), state_dir: dir.to_owned(), within };
    External::new("ext.t".parse().unwrap(), program)
}

fn faults(checks: &[Check]) -> Vec<&Check> {
    checks.iter().filter(|check| check.fault.is_some()).collect()
}

#[tokio::test]
async fn the_python_example_keeps_every_promise() {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../sdk/extension-python/examples/directories.py");
    assert!(std::fs::read_to_string(&example).unwrap().lines().count() < 60, "an extension is one short file");
    let dir = tempfile::tempdir().unwrap();
    let program = Program {
        path: example.canonicalize().unwrap(),
        args: Vec::new(),
        env: BTreeMap::new(),
        state_dir: dir.path().to_owned(),
        within: WITHIN,
    };
    let extension = External::introduce(program).await.unwrap();
    assert_eq!(extension.name().as_str(), "ext.directories");
    let checks = conformance::check_program(&extension).await;
    assert_eq!(faults(&checks), Vec::<&Check>::new());
    let sandbox = sandbox();
    let checks = conformance::check(&extension, &sandbox.profile, &sandbox.inputs, &sandbox.host).await;
    assert_eq!(faults(&checks), Vec::<&Check>::new());
    assert_eq!(checks.len(), 15, "{checks:?}");
    for kept in ["sandboxes", "snapshots"] {
        assert_eq!(std::fs::read_dir(dir.path().join(kept)).unwrap().count(), 0, "{kept} are all removed");
    }
}

#[tokio::test]
async fn the_built_in_stub_keeps_every_promise() {
    let sandbox = sandbox();
    let stub = sandboxer_extensions::stub::SaasStub::default();
    let checks = conformance::check(&stub, &sandbox.profile, &sandbox.inputs, &sandbox.host).await;
    assert_eq!(faults(&checks), Vec::<&Check>::new());
}

/// Everything that reads the request's id, so that only what a case is about is wrong.
const READ: &str = r#"request=$(cat); id=$(printf %s "$request" | sed 's/.*"id":"\([^"]*\)".*/\1/');
    sandbox=$(printf %s "$request" | sed 's/.*"sandbox_id":"\([^"]*\)".*/\1/'); "#;

#[tokio::test]
async fn a_program_that_breaks_the_protocol_is_told_so_and_nothing_is_believed() {
    let dir = tempfile::tempdir().unwrap();
    for (what, script, words) in [
        ("exits", "exit 3", "said nothing"),
        ("fails after an answer", "cat >/dev/null; echo '{}'; exit 3", "failed"),
        ("dies", "kill -9 $$", "said nothing"),
        ("does not speak JSON", "cat >/dev/null; echo hello", "not the JSON"),
        ("answers another call", r#"cat >/dev/null; echo '{"id":"x","result":{}}'"#, "another call"),
        ("lies about the sandbox", r#"printf '{"id":"%s","sandbox_id":"%s","result":{}}' "$id" other"#, "another sandbox"),
        ("leaves out the sandbox", r#"printf '{"id":"%s","result":{}}' "$id""#, "another sandbox"),
        ("says nothing", r#"printf '{"id":"%s","sandbox_id":"%s"}' "$id" "$sandbox""#, "either a result or an error"),
        ("returns no texts", r#"printf '{"id":"%s","sandbox_id":"%s","result":{"a":[1]}}' "$id" "$sandbox""#, "texts by their names"),
        ("two answers", r#"printf '{"id":"%s","sandbox_id":"%s","result":{}}{}' "$id" "$sandbox""#, "not the JSON"),
    ] {
        let extension = shell(dir.path(), &format!("{READ}{script}"), WITHIN);
        let error = extension.provision(&sandbox()).await.unwrap_err();
        assert!(error.message.contains(words), "{what}: {error}");
    }
    let many = format!("{READ}{}", r#"printf '{"id":"%s","sandbox_id":"%s","result":{"a":"%5000s"}}' "$id" "$sandbox" x"#);
    let error = shell(dir.path(), &many, WITHIN).provision(&sandbox()).await.unwrap_err();
    assert!(error.message.contains("too large"), "{error}");
    let error = shell(dir.path(), "exit 0", WITHIN).snapshot(SnapshotId::random(), &sandbox()).await.unwrap_err();
    assert!(error.message.contains("said nothing"), "{error}");
}

#[tokio::test]
async fn a_program_that_says_it_is_another_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!("{READ}{}", r#"printf '{"id":"%s","result":{"name":"ext.other","protocol":1}}' "$id""#);
    let error = shell(dir.path(), &script, WITHIN).describe().await.unwrap_err();
    assert!(error.message.contains("says that it is ext.other"), "{error}");
    let script = script.replace("\"protocol\":1", "\"protocol\":2");
    assert!(shell(dir.path(), &script, WITHIN).describe().await.unwrap_err().message.contains("version 2"));
}

/// Whether any process has this in its command line.
fn runs(marker: &str) -> bool {
    let Ok(entries) = std::fs::read_dir("/proc") else { return false };
    let lines = entries.flatten().filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    lines.into_iter().any(|line| String::from_utf8_lossy(&line).contains(marker))
}

#[tokio::test]
async fn a_program_that_hangs_is_ended_with_everything_it_started() {
    let dir = tempfile::tempdir().unwrap();
    let marker = format!("7{}.25", std::process::id());
    let script = format!("sleep {marker} & sleep {marker}");
    let error = shell(dir.path(), &script, Duration::from_millis(500)).provision(&sandbox()).await.unwrap_err();
    assert!(error.message.contains("took longer"), "{error}");
    let began = Instant::now();
    while runs(&marker) {
        assert!(began.elapsed() < WITHIN, "it still runs");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_program_that_floods_is_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    let error = shell(dir.path(), "exec yes", WITHIN).provision(&sandbox()).await.unwrap_err();
    assert!(error.message.contains("larger than"), "{error}");
    // Any amount of it on the other stream is no reason to fail.
    let loud =
        format!("{READ}{}", r#"head -c 3000000 /dev/zero >&2; printf '{"id":"%s","sandbox_id":"%s","result":{"a":"b"}}' "$id" "$sandbox""#);
    let handle = shell(dir.path(), &loud, WITHIN).provision(&sandbox()).await.unwrap();
    assert_eq!(handle, Map::from([("a".to_owned(), "b".to_owned())]));
}

#[tokio::test]
async fn what_a_program_leaves_behind_does_not_hold_up_its_answer() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!("{READ}{}", r#"sleep 1000 & printf '{"id":"%s","sandbox_id":"%s","result":{"status":"gone"}}' "$id" "$sandbox""#);
    assert_eq!(shell(dir.path(), &script, WITHIN).status(&sandbox()).await.unwrap(), Health::Gone);
}

#[tokio::test]
async fn a_program_gets_nothing_of_the_servers_environment() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!(
        "{READ}{}",
        r#"printf '{"id":"%s","sandbox_id":"%s","result":{"env":"%s"}}' "$id" "$sandbox" "$(env | cut -d= -f1 | sort | tr '\n' ' ')""#
    );
    let handle = shell(dir.path(), &script, WITHIN).provision(&sandbox()).await.unwrap();
    let names: Vec<&str> = handle["env"].split_whitespace().filter(|name| !["PWD", "OLDPWD", "SHLVL", "_"].contains(name)).collect();
    assert_eq!(names, ["HOME", "LANG", "PATH"]);
}

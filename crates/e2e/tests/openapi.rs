//! A program that knows nothing of the server but its own description of its HTTP API tries it with whatever that allows: schemathesis, from PyPI.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

use sandboxer_e2e::{Server, Volume, count, seed, soak, stderr_of, stdout_of};
use serde_json::{Value, json};

/// `scripts/setup --dev` puts it there.
fn schemathesis() -> PathBuf {
    let data = std::env::var_os("XDG_DATA_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let data = data.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/share")));
    let path = data.unwrap().join("sandboxer/schemathesis-venv/bin/schemathesis");
    assert!(path.exists(), "{} is not there: run scripts/setup --dev", path.display());
    path
}

/// 501 and 503 are told by the contract; every other 5xx, an answer that the document does not know, or one that is not of its schema, is a fault.
const CONFIG: &str = r#"
[checks.not_a_server_error]
expected-statuses = ["2xx", "4xx", 501, 503]
"#;
/// An archive is bytes.
const HOOKS: &str = "import schemathesis\n\nschemathesis.serializer.alias('application/x-tar', 'application/octet-stream')\n";
const CHECKS: &str =
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance";

/// Tries some operations, with `id` and `name` in the address being these.
fn fuzz(server: &Server, (id, name): (&str, &str), filters: &[&str], examples: usize) -> String {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("schemathesis.toml");
    std::fs::write(&config, format!("{CONFIG}\n[parameters]\n\"path.id\" = \"{id}\"\n\"path.name\" = \"{name}\"\n")).unwrap();
    std::fs::write(dir.path().join("hooks.py"), HOOKS).unwrap();
    let mut command = Command::new(schemathesis());
    command.env("PYTHONPATH", dir.path()).env("SCHEMATHESIS_HOOKS", "hooks").env("PYTHONDONTWRITEBYTECODE", "1");
    command.arg("--config-file").arg(&config).arg("run").args(["--checks", CHECKS]);
    command.args(["--max-examples", &examples.to_string()]);
    // Neither keeps examples anywhere. The small run is the same every time; the large one says by which seed it is found again.
    let seed = u64::from(std::process::id()) ^ seed();
    if soak() {
        command.args(["--phases", "examples,coverage,fuzzing", "--generation-database", "none", "--seed", &seed.to_string()]);
    } else {
        command.args(["--phases", "fuzzing", "--generation-deterministic"]);
    }
    command.args(["--request-timeout", "120", "--suppress-health-check", "all", "--workers", "1"]);
    command.args(["--continue-on-failure", "--warnings", "off", "--no-color"]);
    command.args(filters).arg(format!("http://{}/v1/openapi.json", server.address()));
    let output = command.current_dir(dir.path()).stdin(Stdio::null()).output().unwrap();
    let said = stdout_of(&output);
    assert!(output.status.success(), "{:?}, seed {seed}:\n{said}\n{}", output.status, stderr_of(&output));
    said
}

/// What the last lines of a run say: how many operations were tried, and how often.
fn summary(said: &str) -> Vec<&str> {
    said.lines().filter(|line| ["Selected:", "Tested:", "generated,"].iter().any(|word| line.contains(word))).map(str::trim).collect()
}

fn sandbox(server: &Server) -> String {
    let made = server.made(None, "/v1/sandboxes", &json!({ "enable_checkpoint": true, "limits": { "memory_mb": 256, "disk_mb": 64 } }));
    made["id"].as_str().unwrap().to_owned()
}

/// What makes sandboxes is slow and bounded; what ends the one that all is tried on comes last.
const MAKING: [&str; 3] = ["create_sandbox", "fork_sandbox", "restore_snapshot"];
const ENDING: [&str; 4] = ["checkpoint_sandbox", "delete_sandbox", "delete_snapshot", "roll_back_sandbox"];
/// Its answer has no end as long as the sandbox is there; the tests of files read it.
const ENDLESS: &str = "watch_files";

#[test]
fn whatever_the_document_allows_is_answered_as_it_says_and_never_by_a_fault_of_the_server() {
    let volume = Volume::default();
    let options = volume.options().env("FILESYSTEM_SNAPSHOT_MOUNT_PATH", volume.path().to_str().unwrap());
    let server = options.arg("--max-sandboxes").arg("4").start();
    let (id, only) = (sandbox(&server), |names: &[&'static str]| -> Vec<&'static str> {
        names.iter().flat_map(|name| ["--include-operation-id", *name]).collect()
    });
    let others = MAKING.iter().chain(&ENDING).chain(&[ENDLESS]);
    let filters: Vec<&str> = others.flat_map(|name| ["--exclude-operation-id", *name]).collect();
    let said = fuzz(&server, (&id, "a-name"), &filters, count(4, 100));
    println!("{}", summary(&said).join(", "));
    assert!(summary(&said).iter().any(|line| line.starts_with("Tested:")), "nothing was tried:\n{said}");
    let alive = server.api(None, "POST", &format!("/v1/sandboxes/{id}/executions"), &json!({ "language": "bash", "code": "echo alive" }));
    assert_eq!((alive.0, alive.1["stdout"].as_str()), (200, Some("alive\n")), "{}", alive.1);

    let snapshot = server.made(None, &format!("/v1/sandboxes/{id}/snapshot"), &Value::Null);
    let snapshot = snapshot["id"].as_str().unwrap();
    fuzz(&server, (snapshot, "a-name"), &only(&["get_snapshot", "restore_snapshot"]), count(2, 20));
    fuzz(&server, (&id, "a-name"), &only(&["create_sandbox", "fork_sandbox", "roll_back_sandbox"]), count(2, 40));
    fuzz(&server, (snapshot, "a-name"), &only(&["delete_snapshot"]), 1);
    // Each ends what it is tried on, and is then tried on what is there no more.
    fuzz(&server, (&id, "a-name"), &only(&["checkpoint_sandbox"]), count(2, 10));
    fuzz(&server, (&id, "a-name"), &only(&["delete_sandbox"]), count(2, 10));
    fuzz(&server, (&id, "a-name"), &only(&[ENDLESS]), count(2, 10));
    for left in server.found(None, "/v1/sandboxes")["items"].as_array().unwrap() {
        let (status, body) = server.api(None, "DELETE", &format!("/v1/sandboxes/{}", left["id"].as_str().unwrap()), &Value::Null);
        assert_eq!(status, 204, "{body}");
    }
    assert!(!server.log().contains("panicked"), "{}", server.log());
}

/// A directory below the one where `scripts/setup --dev` puts the tools of the tests.
fn tools(name: &str) -> PathBuf {
    schemathesis().ancestors().nth(3).unwrap().join(name)
}

/// Every operation of the document.
fn operations(document: &Value) -> Vec<String> {
    let paths = document["paths"].as_object().unwrap().values();
    let operations = paths.flat_map(|path| path.as_object().unwrap().values());
    operations.map(|operation| operation["operationId"].as_str().unwrap().to_owned()).collect()
}

/// The generator knows no archives: to it they are bytes, as to everybody.
const GENERATOR: &str = "project_name_override: client
package_name_override: client
post_hooks: []
content_type_overrides:
  application/x-tar: application/octet-stream
  application/vnd.oci.image.layer.v1.tar: application/octet-stream
";

#[test]
fn python_generator_makes_every_operation() {
    let dir = tempfile::tempdir().unwrap();
    let document = dir.path().join("openapi.json");
    let text = include_str!("../../../docs/openapi.json");
    std::fs::write(&document, text).unwrap();
    std::fs::write(dir.path().join("config.yaml"), GENERATOR).unwrap();
    let python = tools("schemathesis-venv").join("bin");
    let made = Command::new("timeout")
        .arg("120")
        .arg(python.join("openapi-python-client"))
        .args(["generate", "--config", "config.yaml", "--output-path", "out", "--fail-on-warning", "--path"])
        .arg(&document)
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(made.status.success(), "{}{}", stdout_of(&made), stderr_of(&made));
    // Each operation can be imported, and a body of bytes is a file and not a list of numbers.
    let names = operations(&serde_json::from_str(text).unwrap()).join(" ");
    let script = "
import importlib, pkgutil, sys
import client.api, client
found = {name.rsplit('.', 1)[1]: name for _, name, _ in pkgutil.walk_packages(client.api.__path__, 'client.api.')}
missing = [name for name in sys.argv[1:] if name not in found]
assert not missing, missing
for name in sys.argv[1:]: importlib.import_module(found[name])
written = open(importlib.import_module(found['write_file']).__file__).read()
assert 'list[int]' not in written and 'File' in written, written[:2000]
print('all', len(sys.argv) - 1)
";
    let imported = Command::new(python.join("python"))
        .args(["-c", script])
        .args(names.split(' '))
        .env("PYTHONPATH", dir.path().join("out"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .unwrap();
    assert!(stdout_of(&imported).starts_with("all "), "{}{}", stdout_of(&imported), stderr_of(&imported));
}

#[test]
fn typescript_generator_makes_every_operation() {
    let dir = tempfile::tempdir().unwrap();
    let document: Value = serde_json::from_str(include_str!("../../../docs/openapi.json")).unwrap();
    std::fs::write(dir.path().join("openapi.json"), document.to_string()).unwrap();
    let tools = tools("openapi-node").join("node_modules/.bin");
    let run = |program: &str, arguments: &[&str]| {
        let output = Command::new("timeout")
            .arg("120")
            .arg(tools.join(program))
            .args(arguments)
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert!(output.status.success(), "{program}: {}{}", stdout_of(&output), stderr_of(&output));
    };
    run("openapi-typescript", &["openapi.json", "-o", "api.d.ts"]);
    let types = std::fs::read_to_string(dir.path().join("api.d.ts")).unwrap();
    assert!(!types.contains("number[]"), "a body of bytes is no list of numbers");
    // The compiler finds each operation by its name.
    let uses: Vec<String> = operations(&document).iter().map(|name| format!("operations[{name:?}]")).collect();
    let program = format!("import type {{ operations }} from './api';\nexport type All = [{}];\n", uses.join(", "));
    std::fs::write(dir.path().join("all.ts"), program).unwrap();
    run("tsc", &["--noEmit", "--strict", "--skipLibCheck", "false", "all.ts"]);
}

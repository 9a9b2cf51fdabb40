//! Sandboxes of other kinds by HTTP and by commands: stubs, and a program as an extension. Those on hosts are in `compose.rs`.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Output,
};

use sandboxer_e2e::{DEADLINE, Options, Server, Ws, command, eventually, http, shared, stderr_of, stdout_of};
use serde_json::{Value, json};

const UNKNOWN: &str = "5e1f5e0a-6f0c-4d5c-8a70-0b8f3f2b8f11";

fn ask(server: &Server, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let answer = http::json(server.address(), method, path, &[], body).unwrap();
    (answer.status, if answer.body.is_empty() { Value::Null } else { answer.json() })
}

fn get(server: &Server, path: &str) -> Value {
    let (status, body) = ask(server, "GET", path, &Value::Null);
    assert_eq!(status, 200, "{path}: {body}");
    body
}

fn made(server: &Server, path: &str, body: &Value) -> Value {
    let (status, body) = ask(server, "POST", path, body);
    assert_eq!(status, 201, "{path}: {body}");
    body
}

fn id(object: &Value) -> &str {
    object["id"].as_str().unwrap()
}

fn refused(server: &Server, method: &str, path: &str, body: &Value, status: u16, code: &str) -> String {
    let (found, body) = ask(server, method, path, body);
    assert_eq!((found, body["error"]["code"].as_str()), (status, Some(code)), "{method} {path}: {body}");
    body["error"]["message"].as_str().unwrap().to_owned()
}

fn stub(server: &Server, inputs: Value) -> Value {
    made(server, "/v1/sandboxes", &json!({ "profile": "profile.saas-stub", "inputs": inputs, "metadata": { "customer": "7" } }))
}

fn ids(list: &Value) -> Vec<String> {
    list["items"].as_array().unwrap().iter().map(|item| id(item).to_owned()).collect()
}

#[test]
fn a_stub_is_made_snapshotted_restored_and_removed_over_http() {
    let server = Options::default().start();
    let first = stub(&server, json!({ "plan": "gold", "status": 402 }));
    assert_eq!(
        (first["kind"].as_str(), first["status"].as_str(), first["host"].as_str()),
        (Some("saas-stub"), Some("ready"), Some("local"))
    );
    assert_eq!((first["profile"].as_str(), first["extension"].as_str()), (Some("profile.saas-stub"), Some("ext.saas-stub")));
    let endpoint = first["handle"]["endpoint"].as_str().unwrap().to_owned();
    let (status, echo) = ask(&server, "POST", &format!("{endpoint}/pay/now"), &json!({ "any": "body" }));
    assert_eq!((status, &echo["inputs"]["plan"], &echo["metadata"]["customer"]), (402, &json!("gold"), &json!("7")));
    assert_eq!(echo["request"], json!({ "method": "POST", "path": "/pay/now" }));

    let snapshot = made(&server, &format!("/v1/sandboxes/{}/snapshot", id(&first)), &Value::Null);
    assert_eq!((snapshot["status"].as_str(), snapshot["sandbox_id"].as_str()), (Some("completed"), first["id"].as_str()));
    assert_eq!(get(&server, &format!("/v1/snapshots/{}", id(&snapshot)))["id"], snapshot["id"]);
    let path = format!("/v1/snapshots/{}/restore", id(&snapshot));
    let second = made(&server, &path, &json!({ "inputs": { "plan": "lead", "status": "200" } }));
    assert_ne!(second["handle"]["endpoint"], first["handle"]["endpoint"], "a fresh endpoint");
    let echo = get(&server, second["handle"]["endpoint"].as_str().unwrap());
    assert_eq!(
        (&echo["inputs"]["plan"], &echo["metadata"]["customer"], &echo["restored_from"]),
        (&json!("lead"), &json!("7"), &snapshot["id"])
    );
    let three = made(&server, &path, &json!({ "count": 3 }));
    assert_eq!(three["items"].as_array().unwrap().len(), 3);
    assert_eq!(get(&server, "/v1/sandboxes")["items"].as_array().unwrap().len(), 5);

    for gone in [&first, &second] {
        assert_eq!(ask(&server, "DELETE", &format!("/v1/sandboxes/{}", id(gone)), &Value::Null).0, 204);
        refused(&server, "GET", &format!("/v1/sandboxes/{}", id(gone)), &Value::Null, 404, "not_found");
    }
    refused(&server, "GET", &endpoint, &Value::Null, 404, "not_found");
    made(&server, &path, &json!({}));
    assert_eq!(ask(&server, "DELETE", &format!("/v1/snapshots/{}", id(&snapshot)), &Value::Null).0, 204);
    refused(&server, "POST", &path, &json!({}), 404, "not_found");
    assert_eq!(get(&server, "/v1/snapshots"), json!({ "items": [], "next_cursor": null }));
}

#[test]
fn what_can_not_be_done_is_refused_as_http_means_it() {
    let server = shared();
    let sandboxes = "/v1/sandboxes";
    refused(server, "POST", sandboxes, &json!({ "profile": "profile.none" }), 422, "unknown_profile");
    refused(server, "POST", sandboxes, &json!({ "profile": "../x" }), 422, "invalid_field");
    refused(server, "POST", sandboxes, &json!({ "profile": 7 }), 422, "invalid_field");
    refused(server, "POST", sandboxes, &json!({ "profile": "profile.saas-stub", "inputs": { "nonsense": 1 } }), 422, "invalid_input");
    refused(server, "POST", sandboxes, &json!({ "profile": "profile.saas-stub", "inputs": { "status": 99 } }), 422, "invalid_input");
    refused(server, "POST", sandboxes, &json!({ "profile": "profile.saas-stub", "host": "nowhere" }), 422, "unknown_host");
    refused(server, "POST", sandboxes, &json!({ "profile": "profile.saas-stub", "code": "x" }), 422, "invalid_field");
    refused(server, "POST", sandboxes, &json!([]), 400, "bad_request");
    refused(server, "GET", "/v1/sandboxes?limit=0", &Value::Null, 400, "bad_request");
    for path in [
        format!("/v1/sandboxes/{UNKNOWN}"),
        format!("/v1/snapshots/{UNKNOWN}"),
        "/v1/sandboxes/x".to_owned(),
        "/v1/snapshots/..%2fx".to_owned(),
    ] {
        refused(server, "GET", &path, &Value::Null, 404, "not_found");
        refused(server, "DELETE", &path, &Value::Null, 404, "not_found");
    }
    refused(server, "POST", &format!("/v1/sandboxes/{UNKNOWN}/snapshot"), &Value::Null, 404, "not_found");
    refused(server, "POST", &format!("/v1/snapshots/{UNKNOWN}/restore"), &Value::Null, 404, "not_found");
    refused(server, "PUT", sandboxes, &json!({}), 405, "method_not_allowed");
    assert_eq!(get(server, "/v1/openapi.json")["openapi"], "3.1.0");
    // One byte beyond 1 MiB, all of which the server has read when it notices.
    let huge = json!({ "metadata": { "a": "x".repeat((1 << 20) + 1 - r#"{"metadata":{"a":""}}"#.len()) } });
    refused(server, "POST", sandboxes, &huge, 413, "too_large");
    assert_eq!(http::request(server.address(), "GET", "/v1/snapshots", &[("Origin", "http://evil.example")]).unwrap().status, 403);
    // A host that nobody has configured gets nothing, and is told what is missing.
    let message = refused(
        server,
        "POST",
        sandboxes,
        &json!({ "profile": "profile.compose-e2e", "inputs": { "repo": "https://x.example/y" } }),
        422,
        "invalid_input",
    );
    assert!(message.contains("local"), "{message}");
    let message = refused(
        server,
        "POST",
        sandboxes,
        &json!({ "profile": "profile.compose-e2e", "host": "local", "inputs": { "repo": "/etc" } }),
        422,
        "invalid_input",
    );
    assert!(message.contains("base_dir"), "{message}");
}

#[tokio::test]
async fn a_native_sandbox_is_made_listed_used_and_removed_by_the_same_calls() {
    let server = Options::default().start();
    let sandbox = made(&server, "/v1/sandboxes", &json!({ "idle_timeout": 60, "env": { "GREETING": "hello" }, "metadata": { "a": "b" } }));
    assert_eq!((sandbox["kind"].as_str(), sandbox["status"].as_str()), (Some("gvisor"), Some("ready")));
    assert!(sandbox["token"].as_str().is_some_and(|token| token.len() > 20));
    let path = format!("/v1/sandboxes/{}", id(&sandbox));
    let found = get(&server, &path);
    assert_eq!((&found["metadata"]["a"], found.get("token")), (&json!("b"), None));
    let mut ws = Ws::attach(&server, id(&sandbox)).await;
    assert_eq!(ws.bash("echo $GREETING").await.ok(), "hello\n");
    for (method, what, code) in [
        ("POST", "snapshot", "snapshots_not_configured"),
        ("POST", "rollback", "snapshots_not_configured"),
        ("POST", "fork", "snapshots_not_configured"),
        ("POST", "checkpoint", "checkpoint_not_configured"),
        ("GET", "checkpoints", "checkpoint_not_configured"),
    ] {
        refused(&server, method, &format!("{path}/{what}"), &Value::Null, 501, code);
    }
    ws.expect_alive().await;
    drop(ws);
    eventually("nobody is attached", DEADLINE, || ask(&server, "DELETE", &path, &Value::Null).0 == 204).await;
    refused(&server, "GET", &path, &Value::Null, 410, "gone");
    let profile = made(&server, "/v1/sandboxes", &json!({ "profile": "profile.gvisor", "inputs": { "memory_mb": "256" } }));
    assert_eq!(ids(&get(&server, "/v1/sandboxes")), [id(&profile)]);
    refused(&server, "POST", "/v1/sandboxes", &json!({ "limits": { "memory_mb": 1_u64 << 40 } }), 422, "limit_too_high");
    refused(&server, "POST", "/v1/sandboxes", &json!({ "idle_timeout": "soon" }), 422, "invalid_field");
}

#[test]
fn each_key_sees_its_own_and_nobody_elses() {
    let (one, two) = ("key-of-the-first-one-0123", "key-of-the-second-one-0123");
    let server = Options::default().env("SANDBOXER_API_KEYS", format!("one:{one},two:{two}")).start();
    let ask = |key: &str, method: &str, path: &str, body: &Value| {
        let answer = http::json(server.address(), method, path, &[("X-API-Key", key)], body).unwrap();
        (answer.status, if answer.body.is_empty() { Value::Null } else { answer.json() })
    };
    assert_eq!(http::request(server.address(), "GET", "/v1/snapshots", &[]).unwrap().status, 401);
    let (status, sandbox) = ask(one, "POST", "/v1/sandboxes", &json!({ "profile": "profile.saas-stub" }));
    assert_eq!(status, 201);
    let (_, snapshot) = ask(one, "POST", &format!("/v1/sandboxes/{}/snapshot", id(&sandbox)), &Value::Null);
    for (method, path) in [
        ("GET", format!("/v1/sandboxes/{}", id(&sandbox))),
        ("DELETE", format!("/v1/sandboxes/{}", id(&sandbox))),
        ("POST", format!("/v1/sandboxes/{}/snapshot", id(&sandbox))),
        ("GET", format!("/v1/snapshots/{}", id(&snapshot))),
        ("DELETE", format!("/v1/snapshots/{}", id(&snapshot))),
        ("POST", format!("/v1/snapshots/{}/restore", id(&snapshot))),
        ("GET", format!("/v1/stubs/{}", id(&sandbox))),
    ] {
        assert_eq!(ask(two, method, &path, &Value::Null).0, 404, "{method} {path}");
    }
    assert_eq!(ask(two, "GET", "/v1/sandboxes", &Value::Null).1["items"], json!([]));
    assert_eq!(ids(&ask(one, "GET", "/v1/sandboxes", &Value::Null).1), [id(&sandbox)]);
}

#[test]
fn a_request_that_is_sent_again_under_its_key_is_done_once_and_lists_come_in_pages() {
    let server = Options::default().start();
    let again = |key: &str, body: &Value| http::json(server.address(), "POST", "/v1/sandboxes", &[("Idempotency-Key", key)], body).unwrap();
    let body = json!({ "profile": "profile.saas-stub" });
    let (first, second) = (again("k1", &body), again("k1", &body));
    assert_eq!((first.status, first.body), (201, second.body));
    assert_eq!(again("k1", &json!({ "profile": "profile.saas-stub", "inputs": { "plan": "x" } })).status, 422);
    for number in 0..4 {
        again(&format!("other-{number}"), &body);
    }
    let (mut found, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = get(&server, &format!("/v1/sandboxes?limit=2{cursor}"));
        found.extend(ids(&page));
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    assert_eq!(found, ids(&get(&server, "/v1/sandboxes")));
    assert_eq!(found.len(), 5);
}

#[tokio::test]
async fn a_client_that_does_not_wait_finds_the_work_done_later() {
    let server = Options::default().start();
    let prefer = [("Prefer", "respond-async")];
    let answer = http::json(server.address(), "POST", "/v1/sandboxes", &prefer, &json!({ "profile": "profile.saas-stub" })).unwrap();
    assert_eq!((answer.status, answer.json()["status"].as_str()), (202, Some("provisioning")));
    let path = format!("/v1/sandboxes/{}", id(&answer.json()));
    eventually("it is ready", DEADLINE, || get(&server, &path)["status"] == "ready").await;
    let answer = http::json(server.address(), "POST", &format!("{path}/snapshot"), &prefer, &Value::Null).unwrap();
    assert_eq!((answer.status, answer.json()["status"].as_str()), (202, Some("pending")));
    let path = format!("/v1/snapshots/{}", id(&answer.json()));
    eventually("it is completed", DEADLINE, || get(&server, &path)["status"] == "completed").await;
}

#[test]
fn a_restarted_server_knows_what_there_is_and_a_damaged_file_is_set_aside() {
    let mut server = Options::default().start();
    let sandbox = stub(&server, json!({}));
    let snapshot = made(&server, &format!("/v1/sandboxes/{}/snapshot", id(&sandbox)), &Value::Null);
    server.kill9();
    server.restart();
    assert_eq!(get(&server, &format!("/v1/sandboxes/{}", id(&sandbox)))["status"], "ready");
    made(&server, &format!("/v1/snapshots/{}/restore", id(&snapshot)), &Value::Null);
    server.kill9();
    let file = server.data_dir().join("snapshots.json");
    let cut = fs::read_to_string(&file).unwrap().replace("\"version\": 1", "\"version\": ");
    fs::write(&file, &cut).unwrap();
    server.restart();
    let list = get(&server, "/v1/snapshots");
    assert_eq!(list["items"], json!([]));
    let warning = list["warnings"][0].as_str().unwrap();
    let aside =
        warning.split_whitespace().map(|word| word.trim_end_matches(':')).find(|word| word.starts_with("snapshots.json.damaged-")).unwrap();
    assert_eq!(fs::read_to_string(server.data_dir().join(aside)).unwrap(), cut, "nothing of it is lost");
    assert!(server.log().contains("damaged"), "and it is in the log");
    made(&server, &format!("/v1/sandboxes/{}/snapshot", id(&sandbox)), &Value::Null);
}

fn cli(server: &Server, args: &[&str]) -> Output {
    command().args(args).env("SANDBOXER_SERVER", format!("http://{}", server.address())).output().unwrap()
}

fn said(server: &Server, args: &[&str]) -> String {
    let output = cli(server, args);
    assert!(output.status.success(), "{args:?}: {}", stderr_of(&output));
    stdout_of(&output)
}

#[test]
fn the_commands_do_what_the_calls_do() {
    let server = Options::default().start();
    let first = said(&server, &["create", "--profile", "profile.saas-stub", "--input", "plan=gold"]).trim().to_owned();
    assert!(said(&server, &["ls"]).contains(&first));
    let object: Value = serde_json::from_str(&said(&server, &["get", &first, "--json"])).unwrap();
    assert_eq!(object, get(&server, &format!("/v1/sandboxes/{first}")));
    let snapshot = said(&server, &["snapshot", &first]).trim().to_owned();
    assert!(said(&server, &["snapshots", "list"]).contains(&snapshot));
    let object: Value = serde_json::from_str(&said(&server, &["snapshots", "get", &snapshot, "--json"])).unwrap();
    assert_eq!(object["status"], "completed");
    let second = said(&server, &["restore", &snapshot, "--input", "plan=lead"]).trim().to_owned();
    assert_eq!(get(&server, &format!("/v1/sandboxes/{second}"))["inputs"]["plan"], "lead");
    assert_eq!(said(&server, &["restore", &snapshot, "--count", "2"]).lines().count(), 2);
    said(&server, &["rm", &first]);
    said(&server, &["snapshots", "delete", &snapshot]);
    assert_eq!(said(&server, &["snapshots", "list"]), "");
    for wrong in [
        vec!["get", &first],
        vec!["snapshot", &first],
        vec!["restore", &snapshot],
        vec!["get", "../../x"],
        vec!["snapshots", "get", &snapshot],
    ] {
        let output = cli(&server, &wrong);
        assert_eq!(output.status.code(), Some(1), "{wrong:?}");
        assert!(stderr_of(&output).starts_with("sandboxer: "), "{}", stderr_of(&output));
    }
    assert!(said(&server, &["profiles", "list"]).contains("profile.compose-checkpoint"));
    assert!(said(&server, &["profiles", "get", "profile.compose-checkpoint"]).contains("--input repo=…"));
}

#[test]
fn a_profile_is_checked_without_a_server() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("p.toml");
    fs::write(&file, "name = \"profile.p\"\nextension = \"ext.e\"\ndescription = \"d\"\n").unwrap();
    assert!(command().args(["profiles", "check"]).arg(&file).output().unwrap().status.success());
    fs::write(
        &file,
        "name = \"profile.p\"\nextension = \"ext.e\"\ndescription = \"\"\n[inputs.A]\ntype = \"string\"\ndescription = \"\"\n",
    )
    .unwrap();
    let output = command().args(["profiles", "check"]).arg(&file).output().unwrap();
    assert_eq!((output.status.code(), stderr_of(&output).lines().count()), (Some(64), 3), "{}", stderr_of(&output));
}

fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../sdk/extension-python/examples/directories.py").canonicalize().unwrap()
}

/// A configuration with the example as an extension, and some others.
fn configured(dir: &Path) -> Options {
    fs::create_dir(dir.join("profiles")).unwrap();
    let programs = format!(
        "[extensions.\"ext.directories\"]\nprogram = \"{}\"\n\
         [extensions.\"ext.hangs\"]\nprogram = \"/bin/sh\"\nargs = [\"-c\", \"sleep 1000 & sleep 1000\"]\ntimeout_seconds = 0.5\n\
         [extensions.\"ext.floods\"]\nprogram = \"/usr/bin/yes\"\n\
         [extensions.\"ext.exits\"]\nprogram = \"/bin/false\"\n\
         [extensions.\"ext.lies\"]\nprogram = \"{}\"\n",
        example().display(),
        example().display()
    );
    fs::write(dir.join("extensions.toml"), programs).unwrap();
    for name in ["directories", "hangs", "floods", "exits", "lies"] {
        let profile = format!(
            "name = \"profile.{name}\"\nextension = \"ext.{name}\"\ndescription = \"d\"\nhost = \"local\"\nsnapshots = true\n\
             [inputs.content]\ntype = \"string\"\ndescription = \"What is in its file\"\n"
        );
        fs::write(dir.join("profiles").join(format!("{name}.toml")), profile).unwrap();
    }
    Options::default().arg("--config-dir").arg(dir.to_str().unwrap())
}

#[test]
fn a_short_python_program_is_an_extension() {
    let dir = tempfile::tempdir().unwrap();
    let server = configured(dir.path()).start();
    let create = |content: &str| json!({ "profile": "profile.directories", "inputs": { "content": content } });
    let first = made(&server, "/v1/sandboxes", &create("one"));
    let content = |sandbox: &Value| fs::read_to_string(Path::new(sandbox["handle"]["path"].as_str().unwrap()).join("content")).unwrap();
    assert_eq!(content(&first), "one");
    let snapshot = made(&server, &format!("/v1/sandboxes/{}/snapshot", id(&first)), &Value::Null);
    assert_eq!((snapshot["size_bytes"].as_u64(), snapshot["status"].as_str()), (Some(3), Some("completed")));
    fs::write(Path::new(first["handle"]["path"].as_str().unwrap()).join("content"), "changed").unwrap();
    let second = made(&server, &format!("/v1/snapshots/{}/restore", id(&snapshot)), &Value::Null);
    assert_eq!((content(&first), content(&second)), ("changed".to_owned(), "one".to_owned()));
    refused(&server, "POST", "/v1/sandboxes", &create("refused"), 422, "invalid_input");
    // Behind the server's back: it says so, and a snapshot is refused.
    fs::remove_dir_all(first["handle"]["path"].as_str().unwrap()).unwrap();
    assert_eq!(get(&server, &format!("/v1/sandboxes/{}", id(&first)))["status"], "gone");
    refused(&server, "POST", &format!("/v1/sandboxes/{}/snapshot", id(&first)), &Value::Null, 409, "not_ready");
    assert_eq!(ask(&server, "DELETE", &format!("/v1/sandboxes/{}", id(&second)), &Value::Null).0, 204);
    assert!(!Path::new(second["handle"]["path"].as_str().unwrap()).exists());
    assert_eq!(ask(&server, "DELETE", &format!("/v1/snapshots/{}", id(&snapshot)), &Value::Null).0, 204);
    assert!(!Path::new(snapshot["meta"]["path"].as_str().unwrap()).exists());
}

#[test]
fn a_program_that_misbehaves_is_contained() {
    let dir = tempfile::tempdir().unwrap();
    let server = configured(dir.path()).start();
    for (name, words) in
        [("hangs", "took longer"), ("floods", "larger than"), ("exits", "said nothing"), ("lies", "says that it is ext.directories")]
    {
        let body = json!({ "profile": format!("profile.{name}") });
        let message = refused(&server, "POST", "/v1/sandboxes", &body, 503, "extension_failed");
        assert!(message.contains(words), "{name}: {message}");
    }
    assert_eq!(get(&server, "/v1/sandboxes")["items"], json!([]), "nothing half-made is left");
    stub(&server, json!({}));
}

#[test]
fn the_check_of_an_extension_passes_a_good_one_and_names_what_is_wrong_with_others() {
    let check = |args: &[&str]| command().args(["extension", "check"]).args(args).output().unwrap();
    let example = example();
    let output = check(&["--json", example.to_str().unwrap()]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &report["good"]), (Some(0), &json!(true)), "{report}");
    assert!(report["checks"].as_array().unwrap().len() > 15, "{report}");
    for (args, words) in [
        (vec!["/bin/false"], "said nothing"),
        (vec!["/usr/bin/yes"], "larger than"),
        (vec!["--timeout", "1", "/bin/sh", "-c", "sleep 1000"], "took longer"),
        (vec!["/bin/echo", "hello"], "not the JSON"),
    ] {
        let output = check(&args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(stdout_of(&output).contains(words), "{args:?}: {}", stdout_of(&output));
    }
}

//! Opening `/create`: both kinds of client, the grace for the configuration, and everything that makes it fail.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use sandboxer_e2e::{DEADLINE, DelayProxy, Opcode, Options, Raw, Ws, shared};
use serde_json::{Value, json};

/// The grace in which a configuration may follow the pong.
const GRACE: Duration = Duration::from_millis(250);

/// Does this in less than the grace, counted from the moment that is returned. The machine may be busy with other tests: one of five
/// tries has to do.
async fn at_once<T>(mut what: impl AsyncFnMut() -> T) -> (Instant, T) {
    let mut took = Vec::new();
    for _ in 0..5 {
        let begun = Instant::now();
        let done = what().await;
        if begun.elapsed() < GRACE {
            return (begun, done);
        }
        took.push(begun.elapsed());
    }
    panic!("it does not come at once, but after {took:?}");
}

#[tokio::test]
async fn a_configuration_sent_first_is_honoured() {
    let mut ws = Ws::open(shared(), "/create").await;
    ws.send(json!({"env": {"COLOUR": "grün"}, "cwd": "/tmp", "idle_timeout": 60, "metadata": {"owner": "e2e"}, "network": "none"})).await;
    ws.expect_created().await;
    assert_eq!(ws.bash("echo $COLOUR; pwd").await.ok(), "grün\n/tmp\n");
    assert_eq!(ws.python("import os; print(os.environ['COLOUR'], os.getcwd())").await.ok(), "grün /tmp\n");
}

#[tokio::test]
async fn a_client_that_waits_for_running_gets_the_defaults() {
    let (connected, mut ws) = at_once(async || {
        let mut ws = Ws::open(shared(), "/create").await;
        ws.expect_status("SANDBOX_CREATING").await;
        ws
    })
    .await;
    ws.expect_running_with_id().await;
    assert!(connected.elapsed() >= GRACE, "a configuration could still have come");
    ws.expect_alive().await;
}

#[tokio::test]
async fn a_client_that_answers_no_ping_gets_the_defaults_after_five_seconds() {
    let mut tried = Vec::new();
    loop {
        let connected = Instant::now();
        let mut raw = Raw::connect(shared().address(), "/create", None).await;
        assert_eq!(raw.message().await["status"], "SANDBOX_CREATING");
        assert_eq!(raw.message().await["event"], "sandbox_id");
        assert_eq!(raw.message().await["status"], "SANDBOX_RUNNING");
        let took = connected.elapsed();
        assert!(took >= Duration::from_millis(4900), "{took:?}");
        if took < Duration::from_secs(9) {
            break;
        }
        // The machine may have been busy with something else.
        tried.push(took);
        assert!(tried.len() < 3, "{tried:?}");
    }
}

#[tokio::test]
async fn a_ping_and_creating_come_right_behind_the_101() {
    at_once(async || {
        let mut raw = Raw::connect(shared().address(), "/create", None).await;
        let mut opcodes = Vec::new();
        for _ in 0..2 {
            let frame = raw.frame().await.unwrap();
            if frame.opcode == Opcode::Text {
                assert_eq!(frame.json(), json!({"event": "status_update", "status": "SANDBOX_CREATING"}));
            }
            opcodes.push(frame.opcode);
        }
        assert!(opcodes.contains(&Opcode::Ping) && opcodes.contains(&Opcode::Text), "{opcodes:?}");
    })
    .await;
}

#[tokio::test]
async fn the_grace_counts_from_the_pong_and_not_from_the_101() {
    let mut raw = Raw::connect(shared().address(), "/create", None).await;
    let ping = loop {
        let frame = raw.frame().await.unwrap();
        if frame.opcode == Opcode::Ping {
            break frame;
        }
    };
    // Well beyond the grace, if it counted from the 101.
    let early = raw.frame_within(GRACE * 3).await;
    assert!(early.is_none_or(|frame| frame.json()["status"] == "SANDBOX_CREATING"), "the server did not wait for the pong");
    raw.send(true, Opcode::Pong, &ping.payload).await;
    raw.send_text(r#"{"cwd":"/var"}"#).await;
    raw.answers = usize::MAX;
    let mut message = raw.message().await;
    if message["status"] == "SANDBOX_CREATING" {
        message = raw.message().await;
    }
    assert_eq!(message["event"], "sandbox_id");
    assert_eq!(raw.message().await["status"], "SANDBOX_RUNNING");
    raw.send_text(r#"{"language":"bash","code":"pwd"}"#).await;
    assert_eq!(raw.message().await["status"], "SANDBOX_EXECUTION_RUNNING");
    assert_eq!(raw.message().await["data"], "/var\n");
}

async fn far_away(address: SocketAddr) -> (DelayProxy, Ws) {
    let proxy = DelayProxy::start(address, Duration::from_millis(200)).await;
    let ws = Ws::connect(proxy.address(), "/create", &[("Host", &address.to_string())]).await.unwrap();
    (proxy, ws)
}

#[tokio::test]
async fn the_configuration_of_a_client_400_ms_away_is_honoured() {
    let (_proxy, mut ws) = far_away(shared().address()).await;
    ws.send(json!({"cwd": "/usr", "env": {"FAR": "away"}})).await;
    ws.expect_created().await;
    assert_eq!(ws.bash("echo $FAR; pwd").await.ok(), "away\n/usr\n");
}

#[tokio::test]
async fn a_client_400_ms_away_that_waits_gets_the_defaults() {
    let (_proxy, mut ws) = far_away(shared().address()).await;
    ws.expect_created().await;
    assert_eq!(ws.bash("pwd").await.ok(), "/root\n");
}

#[tokio::test]
async fn a_late_configuration_is_refused_and_nothing_changes() {
    let mut ws = Ws::open(shared(), "/create").await;
    ws.expect_created().await;
    for late in [json!({"cwd": "/tmp"}), json!({}), json!({"idle_timeout": 1})] {
        ws.send(late).await;
        ws.expect_error("late_configuration").await;
    }
    assert_eq!(ws.bash("pwd").await.ok(), "/root\n");
}

#[tokio::test]
async fn a_second_configuration_is_refused() {
    let mut ws = Ws::create_with(shared(), json!({"cwd": "/tmp"})).await;
    ws.send(json!({"cwd": "/var"})).await;
    ws.expect_error("late_configuration").await;
    assert_eq!(ws.bash("pwd").await.ok(), "/tmp\n");
}

#[tokio::test]
async fn an_execution_request_as_first_message_means_defaults_and_is_carried_out() {
    let mut ws = Ws::open(shared(), "/create").await;
    ws.send(json!({"language": "bash", "code": "echo first; pwd"})).await;
    ws.expect_created().await;
    ws.expect_status("SANDBOX_EXECUTION_RUNNING").await;
    let outcome = ws.until_done().await;
    assert_eq!((outcome.ok(), outcome.between.len()), ("first\n/root\n", 0));
}

#[tokio::test]
async fn an_action_as_first_message_means_defaults_and_is_carried_out() {
    let mut ws = Ws::open(shared(), "/create").await;
    ws.send(json!({"action": "kill_process"})).await;
    ws.expect_created().await;
    ws.expect_status("SANDBOX_EXECUTION_FORCE_KILLED").await;
    ws.expect_alive().await;

    let mut ws = Ws::open(shared(), "/create").await;
    ws.send(json!({"action": "kill_sandbox"})).await;
    ws.expect_created().await;
    ws.expect_status("SANDBOX_KILLING").await;
    ws.expect_status("SANDBOX_KILLED").await;
    ws.expect_close(1000).await;
}

#[tokio::test]
async fn input_behind_an_execution_request_that_came_first_is_not_lost() {
    let mut ws = Ws::open(shared(), "/create").await;
    ws.send(json!({"language": "bash", "code": "read -r line; echo \"got $line\""})).await;
    ws.send(json!({"event": "stdin", "data": "hello\n"})).await;
    ws.expect_created().await;
    ws.expect_status("SANDBOX_EXECUTION_RUNNING").await;
    assert_eq!(ws.until_done().await.ok(), "got hello\n");
}

#[tokio::test]
async fn a_bad_first_message_changes_nothing_and_the_configuration_may_still_come() {
    let mut ws = Ws::open(shared(), "/create").await;
    ws.send_text("{not json").await;
    ws.send(json!([1, 2])).await;
    ws.send(json!({"cwd": "/opt"})).await;
    ws.expect_status("SANDBOX_CREATING").await;
    ws.expect_error("malformed_json").await;
    ws.expect_error("not_an_object").await;
    ws.expect_running_with_id().await;
    assert_eq!(ws.bash("pwd").await.ok(), "/opt\n");
}

#[tokio::test]
async fn unknown_fields_of_the_configuration_are_ignored() {
    let mut ws = Ws::create_with(shared(), json!({"of_tomorrow": {"a": [1]}, "cwd": "/tmp"})).await;
    assert_eq!(ws.bash("pwd").await.ok(), "/tmp\n");
}

#[tokio::test]
async fn every_sandbox_has_an_id_and_a_token_of_its_own() {
    let (one, two) = (Ws::create(shared()).await, Ws::create(shared()).await);
    for ws in [&one, &two] {
        let id = uuid::Uuid::parse_str(&ws.sandbox_id).unwrap();
        assert_eq!((id.get_version_num(), id.hyphenated().to_string()), (4, ws.sandbox_id.clone()));
        assert!(ws.sandbox_token.len() >= 32, "a token that can't be guessed");
    }
    assert!(one.sandbox_id != two.sandbox_id && one.sandbox_token != two.sandbox_token && one.sandbox_token != one.sandbox_id);
}

#[tokio::test]
async fn limited_sandbox_sees_its_limit_as_its_memory() {
    let mut ws = Ws::create_with(shared(), json!({"limits": {"memory_mb": 192, "disk_mb": 64}})).await;
    let code = "
import time
def seen(): return {line.split(':')[0]: int(line.split()[1]) for line in open('/proc/meminfo')}
before = seen()
held = bytearray(b'x') * (80 << 20)
until = time.monotonic() + 30
while seen()['MemAvailable'] > before['MemAvailable'] - (70 << 10) and time.monotonic() < until: time.sleep(0.02)
after = seen()
print(before['MemTotal'], after['MemTotal'], before['MemAvailable'] - after['MemAvailable'] > 70 << 10)
";
    assert_eq!(ws.python(code).await.ok(), "196608 196608 True\n");
    assert_eq!(ws.bash("free -m | awk '/Mem/ {print $2}'").await.ok(), "192\n");
}

#[tokio::test]
async fn resource_api_shows_what_was_made() {
    let server = shared();
    let asked = json!({"limits": {"memory_mb": 256, "disk_mb": 64, "pids": 40, "cpus": 0.5}, "idle_timeout": 77, "env": {"SECRET": "s"}, "cwd": "/tmp"});
    let made = server.made(None, "/v1/sandboxes", &asked);
    let shown = &made["configuration"];
    assert_eq!(shown["limits"], asked["limits"], "{made}");
    assert_eq!((&shown["idle_timeout"], &shown["cwd"], &shown["network"]), (&json!(77.0), &json!("/tmp"), &json!([])), "{made}");
    assert_eq!((shown["image"].as_str().unwrap().len(), &shown["env"]), (64, &json!(["SECRET"])), "names only: {made}");
    let path = format!("/v1/sandboxes/{}", made["id"].as_str().unwrap());
    assert!(server.found(None, &path).get("execution").is_none(), "nothing has run yet");
    let run = json!({"language": "bash", "code": "true", "execution_id": "mine"});
    assert_eq!(server.api(None, "POST", &format!("{path}/executions"), &run).0, 200);
    assert_eq!(server.found(None, &path)["execution"], json!({"id": "mine", "running": false}));
}

#[tokio::test]
async fn resource_api_refuses_misspelt_fields() {
    let server = shared();
    for (body, meant) in [
        (json!({"idel_timeout": 5}), "idle_timeout"),
        (json!({"limits": {"memory": 64}}), "limits.memory_mb"),
        (json!({"profil": "profile.gvisor"}), "profile"),
    ] {
        let why = server.refuses(None, "POST", "/v1/sandboxes", &body, 422, "invalid_field");
        assert!(why.contains(&format!("Did you mean \"{meant}\"?")), "{why}");
    }
    let made = server.made(None, "/v1/sandboxes", &json!({}));
    let path = format!("/v1/sandboxes/{}", made["id"].as_str().unwrap());
    let run = json!({"language": "bash", "code": "true", "timout": 1});
    let why = server.refuses(None, "POST", &format!("{path}/executions"), &run, 422, "invalid_field");
    assert!(why.contains("\"timeout\""), "{why}");
}

/// `SANDBOX_CREATING` → `SANDBOX_CREATION_ERROR` → `error` → close 4000.
async fn creation_fails(configuration: Value, codes: &[&str]) -> String {
    let mut ws = Ws::open(shared(), "/create").await;
    ws.send(configuration.clone()).await;
    ws.expect_status("SANDBOX_CREATING").await;
    ws.expect_status("SANDBOX_CREATION_ERROR").await;
    let error = ws.next().await;
    assert_eq!(error["event"], "error", "{configuration}: {error}");
    assert!(codes.contains(&error["code"].as_str().unwrap()), "{configuration}: {error}");
    ws.expect_close(4000).await;
    error["message"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_wrong_type_in_the_configuration_fails_the_creation_and_names_the_field() {
    for (field, value) in [
        ("idle_timeout", json!("soon")),
        ("idle_timeout", json!(-1)),
        ("enable_checkpoint", json!("yes")),
        ("filesystem_snapshot_name", json!(7)),
        ("image", json!(["base"])),
        ("env", json!(["A=b"])),
        ("env", json!({"A": 1})),
        ("env", json!({"A=B": "c"})),
        ("cwd", json!("relative/path")),
        ("limits", json!(5)),
        ("limits", json!({"memory_mb": -1})),
        ("limits", json!({"pids": "many"})),
        ("network", json!("all")),
        ("network", json!({"allow": "example.com"})),
        ("enable_sandbox_handoff", json!(1)),
        ("autosave_seconds", json!("often")),
        ("detached_output", json!("lose")),
        ("metadata", json!({"a": 1})),
    ] {
        let message = creation_fails(json!({field: value}), &["invalid_field"]).await;
        assert!(message.contains(field), "{field}: {message}");
    }
}

#[tokio::test]
async fn what_this_server_can_not_do_fails_the_creation() {
    creation_fails(json!({"enable_checkpoint": true}), &["checkpoint_not_configured"]).await;
    creation_fails(json!({"enable_checkpoint": true, "enable_sandbox_handoff": true}), &["checkpoint_not_configured"]).await;
    creation_fails(json!({"filesystem_snapshot_name": "mine"}), &["filesystem_snapshots_not_configured"]).await;
    creation_fails(json!({"filesystem_snapshot_name": "../mine"}), &["filesystem_snapshots_not_configured", "invalid_name"]).await;
    creation_fails(json!({"network": {"allow": ["example.com"]}}), &["network_not_available"]).await;
    let message = creation_fails(json!({"image": "no-such-image"}), &["unknown_image"]).await;
    assert!(message.contains("no-such-image"), "{message}");
}

#[tokio::test]
async fn what_needs_enable_checkpoint_fails_the_creation_without_it() {
    let codes = ["checkpoint_not_enabled", "checkpoint_not_configured", "invalid_field"];
    creation_fails(json!({"enable_sandbox_handoff": true}), &codes).await;
    creation_fails(json!({"autosave_seconds": 10}), &codes).await;
}

#[tokio::test]
async fn no_capacity_fails_the_creation_until_a_place_is_free() {
    let server = Options::default().arg("--max-sandboxes").arg("1").start();
    let mut first = Ws::create(&server).await;
    let mut second = Ws::open(&server, "/create").await;
    second.send(json!({})).await;
    second.expect_status("SANDBOX_CREATING").await;
    second.expect_status("SANDBOX_CREATION_ERROR").await;
    second.expect_error("no_capacity").await;
    second.expect_close(4000).await;
    first.expect_alive().await;
    first.send(json!({"action": "kill_sandbox"})).await;
    first.expect_status("SANDBOX_KILLING").await;
    first.expect_status("SANDBOX_KILLED").await;
    // The place is free when KILLED was said.
    Ws::create(&server).await.expect_alive().await;
}

#[tokio::test]
async fn a_client_that_leaves_while_its_sandbox_is_made_leaves_nothing_that_can_not_be_used() {
    let server = Options::default().arg("--max-sandboxes").arg("2").start();
    for _ in 0..4 {
        let mut ws = Ws::open(&server, "/create").await;
        ws.send(json!({"idle_timeout": 0.2})).await;
        ws.expect_status("SANDBOX_CREATING").await;
        ws.vanish();
    }
    // Idle sandboxes go, so that a place comes free.
    let start = Instant::now();
    loop {
        let mut ws = Ws::open(&server, "/create").await;
        ws.send(json!({})).await;
        ws.expect_status("SANDBOX_CREATING").await;
        let message = ws.next().await;
        if message["event"] == "sandbox_id" {
            ws.expect_status("SANDBOX_RUNNING").await;
            ws.expect_alive().await;
            return;
        }
        assert_eq!(message["status"], "SANDBOX_CREATION_ERROR", "{message}");
        assert!(start.elapsed() < DEADLINE, "no place comes free");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

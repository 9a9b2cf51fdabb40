//! What this server is not set up for is answered with the error that the contract names, and never harms the sandbox.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use sandboxer_e2e::{Ws, http, shared};
use serde_json::{Value, json};

async fn running() -> Ws {
    let mut ws = Ws::create(shared()).await;
    ws.start(json!({"language": "bash", "code": "echo one; read -r line; echo two", "execution_id": "e"})).await;
    ws.until_output("stdout", "one\n").await;
    ws
}

async fn finish(ws: &mut Ws) {
    ws.send(json!({"event": "stdin", "data": "\n"})).await;
    assert_eq!(ws.until_done().await.ok(), "two\n");
    ws.expect_alive().await;
}

async fn expect_one_of(ws: &mut Ws, codes: &[&str]) -> Value {
    let error = ws.next().await;
    assert_eq!(error["event"], "error", "{error}");
    assert!(codes.contains(&error["code"].as_str().unwrap()), "{error}");
    error
}

const NO_CHECKPOINT: [&str; 2] = ["checkpoint_not_enabled", "checkpoint_not_configured"];

#[tokio::test]
async fn a_checkpoint_of_a_sandbox_without_it_fails_with_4000_and_keeps_the_sandbox() {
    let mut ws = Ws::create(shared()).await;
    ws.bash("echo kept >file").await;
    let id = ws.sandbox_id.clone();
    ws.send(json!({"action": "checkpoint"})).await;
    ws.expect_status("SANDBOX_CHECKPOINTING").await;
    ws.expect_status("SANDBOX_CHECKPOINT_ERROR").await;
    expect_one_of(&mut ws, &NO_CHECKPOINT).await;
    ws.expect_close(4000).await;
    let mut ws = Ws::attach(shared(), &id).await;
    assert_eq!(ws.bash("cat file").await.ok(), "kept\n");
}

#[tokio::test]
async fn a_checkpoint_while_an_execution_runs_is_refused_and_its_output_goes_on() {
    let mut ws = running().await;
    ws.send(json!({"action": "checkpoint"})).await;
    ws.expect_status("SANDBOX_CHECKPOINTING").await;
    ws.expect_status("SANDBOX_EXECUTION_IN_PROGRESS_ERROR").await;
    let error = ws.expect_error("execution_in_progress").await;
    assert_eq!(error["message"], "Cannot checkpoint while an execution is in progress.");
    finish(&mut ws).await;
}

#[tokio::test]
async fn a_checkpoint_with_its_execution_fails_with_4000_and_the_execution_goes_on() {
    let mut ws = running().await;
    let id = ws.sandbox_id.clone();
    ws.send(json!({"action": "checkpoint", "include_execution": true})).await;
    ws.expect_status("SANDBOX_CHECKPOINTING").await;
    ws.expect_status("SANDBOX_CHECKPOINT_ERROR").await;
    expect_one_of(&mut ws, &NO_CHECKPOINT).await;
    ws.expect_close(4000).await;
    let mut ws = Ws::attach(shared(), &id).await;
    ws.send(json!({"event": "stdin", "data": "\n"})).await;
    let outcome = ws.until_done().await;
    assert!(outcome.ok().ends_with("two\n"), "{:?}", outcome.out());
}

#[tokio::test]
async fn a_snapshot_without_a_checkpoint_path_fails_and_the_connection_stays_open() {
    for mut ws in [Ws::create(shared()).await, running().await] {
        for message in [json!({"action": "snapshot"}), json!({"action": "snapshot", "name": "mine"})] {
            ws.send(message).await;
            ws.expect_status("SANDBOX_SNAPSHOT_CREATING").await;
            ws.expect_status("SANDBOX_SNAPSHOT_ERROR").await;
            expect_one_of(&mut ws, &["snapshots_not_configured", "checkpoint_not_configured"]).await;
        }
        ws.send(json!({"action": "kill_process"})).await;
        ws.expect_status("SANDBOX_EXECUTION_FORCE_KILLED").await;
    }
}

#[tokio::test]
async fn a_rollback_without_a_checkpoint_path_fails_and_the_sandbox_is_unharmed() {
    let mut ws = running().await;
    for message in [json!({"action": "rollback", "snapshot_id": "s"}), json!({"action": "rollback", "checkpoint": "checkpoint_1.img"})] {
        ws.send(message).await;
        ws.expect_status("SANDBOX_RESTORING").await;
        ws.expect_status("SANDBOX_RESTORE_ERROR").await;
        expect_one_of(&mut ws, &["snapshots_not_configured", "checkpoint_not_configured"]).await;
    }
    finish(&mut ws).await;
}

#[tokio::test]
async fn a_filesystem_snapshot_that_is_not_configured_fails_and_the_connection_stays_open() {
    let mut ws = running().await;
    for name in ["mine", "../escape", ".hidden", ""] {
        ws.send(json!({"action": "snapshot_filesystem", "name": name})).await;
        ws.expect_status("SANDBOX_FILESYSTEM_SNAPSHOT_CREATING").await;
        ws.expect_status("SANDBOX_FILESYSTEM_SNAPSHOT_ERROR").await;
        expect_one_of(&mut ws, &["filesystem_snapshots_not_configured", "invalid_name"]).await;
    }
    finish(&mut ws).await;
}

#[test]
fn an_address_that_does_not_exist_is_not_found() {
    let address = shared().address();
    for (method, path) in [("GET", "/v1"), ("GET", "/v1/nothing-of-the-kind")] {
        let answer = http::request(address, method, path, &[]).unwrap();
        assert_eq!(answer.status, 404, "{method} {path}");
        let error = answer.json()["error"].clone();
        assert_eq!(error["code"], "not_found", "{method} {path}: {error}");
        assert!(error["message"].as_str().is_some_and(|message| message.len() > 10), "{error}");
    }
}

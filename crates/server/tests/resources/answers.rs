//! Answers by caller: keys and tokens, the reason of an end, status codes.

use sandboxer_runtime::End;

use super::*;

const EXECUTIONS: [&str; 2] = ["", "/executions"];

/// The status and the code of the error.
async fn refusal(server: &Running, key: &str, method: &str, path: &str, body: Value) -> (u16, String) {
    let (status, body) = ask(server.address, key, method, path, body).await;
    (status, body["error"]["code"].as_str().unwrap_or_default().to_owned())
}

#[tokio::test]
async fn the_key_that_made_a_sandbox_needs_no_token() {
    let ground = Ground::new();
    let a = ground.serve("a").await;
    let sandbox = a.create(json!({"enable_checkpoint": true})).await;
    for saved in [false, true] {
        if saved {
            a.save(&sandbox).await;
        }
        a.attach_as(BOB, &sandbox, None).await.expect("SANDBOX_PERMISSION_DENIAL_ERROR").await;
        a.attach_as(ALICE, &sandbox, Some("wrong")).await.expect("SANDBOX_PERMISSION_DENIAL_ERROR").await;
        a.attach_as(ALICE, &sandbox, None).await.expect("SANDBOX_RUNNING").await;
    }
    let mut bobs = a.attach_as(BOB, &sandbox, Some(&sandbox.token)).await;
    // The client before may not have been seen to go.
    while bobs.status_but(&[]).await["status"] != "SANDBOX_RUNNING" {
        bobs = a.attach_as(BOB, &sandbox, Some(&sandbox.token)).await;
    }
    drop(bobs);
    let asked = json!({"language": "bash", "code": "echo mine"});
    let path = format!("{}/executions", sandbox.path);
    assert_eq!(refusal(&a, BOB, "POST", &path, asked).await.0, 404, "a token is for an attach alone");
}

#[tokio::test]
async fn the_reason_of_an_end_is_told_to_the_key_that_made_it() {
    let ground = Ground::new();
    let a = ground.serve("a").await;
    for (end, code, word) in [
        (End::OutOfMemory, "out_of_memory", "memory limit"),
        (End::Killed, "sandbox_killed", "killed from outside"),
        (End::Failed("of a test".to_owned()), "runtime_failed", "of a test"),
    ] {
        let sandbox = a.create(json!({})).await;
        a.runtime.inner.end_from_outside(sandbox.id.parse().unwrap(), end).await;
        let gone = async { while a.ask(ALICE, "GET", &sandbox.path).await.0 == 200 {} };
        timeout(PATIENCE, gone).await.unwrap();
        for below in EXECUTIONS {
            let (method, body) =
                if below.is_empty() { ("GET", Value::Null) } else { ("POST", json!({"language": "bash", "code": "true"})) };
            let (status, told) = ask(a.address, ALICE, method, &format!("{}{below}", sandbox.path), body.clone()).await;
            assert_eq!((status, told["error"]["code"].as_str()), (410, Some(code)), "{told}");
            assert!(told["error"]["message"].as_str().unwrap().contains(word), "{told}");
            assert_eq!(ask(a.address, BOB, method, &format!("{}{below}", sandbox.path), body).await.0, 404, "it is not Bob's");
        }
    }
    let sandbox = a.create(json!({})).await;
    assert_eq!(a.ask(ALICE, "DELETE", &sandbox.path).await.0, 204);
    assert_eq!(refusal(&a, ALICE, "GET", &sandbox.path, Value::Null).await, (410, "gone".to_owned()));
    a.attach_as(ALICE, &sandbox, None).await.expect("SANDBOX_NOT_FOUND").await;

    // A sandbox that was kept on the volume, and that another instance ended.
    let b = ground.serve("b").await;
    let kept = a.create(json!({"enable_checkpoint": true})).await;
    a.save(&kept).await;
    assert_eq!(b.ask(ALICE, "DELETE", &kept.path).await.0, 204);
    for server in [&a, &b] {
        let (status, told) = server.ask(ALICE, "GET", &kept.path).await;
        assert_eq!((status, &told["error"]["code"]), (410, &json!("gone")), "{told}");
        assert!(told["error"]["message"].as_str().unwrap().contains("deleted by its owner"), "{told}");
        assert_eq!(server.ask(BOB, "GET", &kept.path).await.0, 404, "it is not Bob's");
    }
}

#[tokio::test]
async fn a_sandbox_ends_with_its_client_where_its_creator_said_so() {
    let ground = Ground::new();
    let a = ground.serve("a").await;
    let (short, usual) = (a.create(json!({"client_gone_timeout": 0.5})).await, a.create(json!({})).await);
    for sandbox in [&short, &usual] {
        let mut ws = a.attach(sandbox).await;
        ws.expect("SANDBOX_RUNNING").await;
        ws.run("sleep 100000").await;
    }
    // Both clients went without a word, and both programs go on.
    let gone = async { while a.ask(ALICE, "GET", &short.path).await.0 == 200 {} };
    timeout(PATIENCE, gone).await.unwrap();
    let (status, told) = a.ask(ALICE, "GET", &short.path).await;
    assert_eq!(status, 410, "{told}");
    assert!(told["error"]["message"].as_str().unwrap().contains("without a client"), "{told}");
    assert_eq!(a.ask(ALICE, "GET", &usual.path).await.0, 200);
    // A client that stays keeps its sandbox beyond that time.
    let kept = a.create(json!({"client_gone_timeout": 3})).await;
    let mut ws = a.attach(&kept).await;
    ws.expect("SANDBOX_RUNNING").await;
    ws.run("sleep 5").await;
    let done = ws.status_but(&[]).await;
    assert_eq!((&done["status"], &done["exit_code"]), (&json!("SANDBOX_EXECUTION_DONE"), &json!(0)), "{done}");
    let both = json!({"client_gone_timeout": 60, "enable_checkpoint": true});
    assert_eq!(refusal(&a, ALICE, "POST", "/v1/sandboxes", both).await, (422, "invalid_field".to_owned()));
}

#[tokio::test]
async fn a_running_sandbox_without_checkpoints_is_ready_in_its_tree() {
    let ground = Ground::new();
    let a = ground.serve("a").await;
    let sandbox = a.create(json!({})).await;
    assert_eq!(ask(a.address, ALICE, "POST", &format!("{}/snapshot", sandbox.path), json!({})).await.0, 201);
    let (status, tree) = a.ask(ALICE, "GET", &format!("{}/tree", sandbox.path)).await;
    assert_eq!((status, &tree["items"][0]["status"]), (200, &json!("ready")), "{tree}");
}

#[tokio::test]
async fn a_wrong_request_is_the_clients_fault_by_its_status() {
    let ground = Ground::new();
    let a = ground.serve("a").await;
    for path in ["/v1", "/v1/nothing-of-the-kind"] {
        assert_eq!(refusal(&a, ALICE, "GET", path, Value::Null).await, (404, "not_found".to_owned()), "{path}");
    }
    let malformed = json!({"network": {"allow": ["https://example.com/"]}});
    assert_eq!(refusal(&a, ALICE, "POST", "/v1/sandboxes", malformed).await, (422, "invalid_field".to_owned()));
    // This server gives no sandbox a network.
    let allowed = json!({"network": {"allow": ["example.com"]}});
    assert_eq!(refusal(&a, ALICE, "POST", "/v1/sandboxes", allowed).await, (501, "network_not_available".to_owned()));
}

//! Attaching: what is still there, who may have it, and who has lost it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::{Duration, Instant};

use sandboxer_e2e::{Assembly, Raw, Ws, shared};
use serde_json::json;

#[tokio::test]
async fn files_and_processes_are_there_after_a_disconnect() {
    let mut ws = Ws::create_with(shared(), json!({"env": {"KEPT": "yes"}})).await;
    let pid = ws.bash("echo kept >file; sleep 8181 & echo $!").await.ok().trim().to_owned();
    let id = ws.sandbox_id.clone();
    ws.close().await;
    let mut ws = Ws::attach(shared(), &id).await;
    assert_eq!(ws.bash(&format!("cat file; echo $KEPT; kill -0 {pid} && echo running")).await.ok(), "kept\nyes\nrunning\n");
    ws.vanish();
    let mut ws = Ws::attach(shared(), &id).await;
    assert_eq!(ws.bash("cat file").await.ok(), "kept\n");
}

#[tokio::test]
async fn attaching_is_answered_by_running_alone() {
    let ws = Ws::create(shared()).await;
    let id = ws.sandbox_id.clone();
    ws.close().await;
    for _ in 0..3 {
        let mut ws = Ws::attach(shared(), &id).await;
        // The answer to this comes next: nothing else was said.
        ws.send(json!({"action": "kill_process"})).await;
        ws.expect_status("SANDBOX_EXECUTION_FORCE_KILLED").await;
        ws.close().await;
    }
}

/// Put together by offset, what the two connections saw is exact.
#[tokio::test]
async fn a_program_runs_on_without_its_client_and_its_output_goes_on_at_the_next() {
    for clean in [true, false] {
        let mut ws = Ws::create(shared()).await;
        let id = ws.sandbox_id.clone();
        ws.start(json!({"language": "bash", "code": "for i in {1..60}; do echo line $i; sleep 0.02; done", "execution_id": "lines"})).await;
        let mut assembly = Assembly::default();
        while assembly.bytes.len() < 100 {
            let message = ws.next().await;
            assembly.take(&message);
        }
        if clean {
            ws.close().await
        } else {
            ws.vanish()
        }
        let mut ws = Ws::attach(shared(), &id).await;
        let done = loop {
            let message = ws.next().await;
            match message["event"].as_str() {
                Some("stdout") => assembly.take(&message),
                _ => break message,
            }
        };
        assert_eq!(
            (&done["status"], &done["execution_id"], &done["exit_code"]),
            (&json!("SANDBOX_EXECUTION_DONE"), &json!("lines"), &json!(0))
        );
        let expected: String = (1..=60).map(|i| format!("line {i}\n")).collect();
        assert_eq!(String::from_utf8(assembly.bytes).unwrap(), expected, "closed cleanly: {clean}");
        ws.expect_alive().await;
    }
}

#[tokio::test]
async fn a_program_that_ended_without_its_client_is_told_of_at_the_next_attach() {
    let mut ws = Ws::create(shared()).await;
    let id = ws.sandbox_id.clone();
    ws.start(json!({"language": "bash", "code": "echo ready; sleep 0.3; echo late; exit 4", "execution_id": "late"})).await;
    ws.until_output("stdout", "ready\n").await;
    ws.close().await;
    // Not a wait for something that could be seen: whether it ends before or after the attach, the client sees the same.
    tokio::time::sleep(Duration::from_millis(600)).await;
    let mut ws = Ws::attach(shared(), &id).await;
    let outcome = ws.until_done().await;
    assert!(outcome.between.is_empty(), "{:?}", outcome.between);
    assert!(outcome.out().ends_with("late\n"), "{:?}", outcome.out());
    assert_eq!((&outcome.done["execution_id"], outcome.exit_code()), (&json!("late"), Some(4)));
}

#[tokio::test]
async fn a_running_execution_is_still_the_one_after_an_attach() {
    let mut ws = Ws::create(shared()).await;
    let id = ws.sandbox_id.clone();
    ws.start(json!({"language": "bash", "code": "read -r line; echo got $line"})).await;
    ws.vanish();
    let mut ws = Ws::attach(shared(), &id).await;
    ws.send(json!({"language": "bash", "code": "echo no"})).await;
    ws.expect_status("SANDBOX_EXECUTION_ERROR").await;
    ws.expect_error("execution_in_progress").await;
    ws.send(json!({"event": "stdin", "data": "input of the second client\n"})).await;
    assert_eq!(ws.until_done().await.ok(), "got input of the second client\n");
}

#[tokio::test]
async fn a_sandbox_with_a_client_is_in_use_and_its_client_is_not_disturbed() {
    let mut first = Ws::create(shared()).await;
    first.start(json!({"language": "bash", "code": "echo ready; read -r line; echo end"})).await;
    first.until_output("stdout", "ready\n").await;
    let id = first.sandbox_id.clone();
    // The first client has to answer the ping by which the server finds out whether it is there, and hears nothing else of it.
    tokio::select! {
        incoming = first.incoming() => panic!("the first client heard of it: {incoming:?}"),
        () = async {
            let mut second = Ws::open(shared(), &format!("/attach/{id}")).await;
            second.expect_status("SANDBOX_IN_USE").await;
            second.expect_close(1011).await;
        } => {}
    }
    first.send(json!({"event": "stdin", "data": "\n"})).await;
    assert_eq!(first.until_done().await.ok(), "end\n");
}

#[tokio::test]
async fn a_client_that_does_not_answer_a_ping_is_dropped_within_two_seconds_for_a_newcomer() {
    let mut tried = Vec::new();
    let (mut dead, mut ws) = loop {
        let (mut dead, id) = Raw::create(shared().address(), None).await;
        dead.send_text(r#"{"language":"bash","code":"echo of the dead >/tmp/file"}"#).await;
        while dead.message().await["status"] != "SANDBOX_EXECUTION_DONE" {}
        let start = Instant::now();
        let mut ws = Ws::open(shared(), &format!("/attach/{id}")).await;
        ws.expect_status("SANDBOX_RUNNING").await;
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(1500), "{took:?}");
        if took < Duration::from_secs(4) {
            break (dead, ws);
        }
        // The machine may have been busy with something else.
        tried.push(took);
        assert!(tried.len() < 3, "{tried:?}");
    };
    // Its output and its end may be said again, since no pong ever came.
    ws.repeats_allowed = true;
    ws.send(json!({"language": "bash", "code": "cat /tmp/file", "execution_id": "mine"})).await;
    let outcome = loop {
        let outcome = ws.until_done().await;
        if outcome.done["execution_id"] == "mine" {
            break outcome;
        }
    };
    assert!(outcome.out().ends_with("of the dead\n"), "{:?}", outcome.out());
    // The dead one is cut off, whatever it says.
    dead.send_text(r#"{"language":"bash","code":"echo again"}"#).await;
    let end = Instant::now();
    while dead.frame().await.is_some() {
        assert!(end.elapsed() < Duration::from_secs(10), "the dead client still has its connection");
    }
}

#[tokio::test]
async fn a_sandbox_that_never_was_is_not_found() {
    for id in [uuid::Uuid::new_v4().to_string(), "not-a-uuid".to_owned(), "..%2F..%2Fetc%2Fpasswd".to_owned(), "x".repeat(2000)] {
        let mut ws = Ws::open(shared(), &format!("/attach/{id}")).await;
        ws.expect_status("SANDBOX_NOT_FOUND").await;
        ws.expect_close(1011).await;
    }
}

#[tokio::test]
async fn a_configuration_after_an_attach_is_late() {
    let ws = Ws::create(shared()).await;
    let id = ws.sandbox_id.clone();
    ws.close().await;
    let mut ws = Ws::attach(shared(), &id).await;
    ws.send(json!({"cwd": "/tmp"})).await;
    ws.expect_error("late_configuration").await;
    assert_eq!(ws.bash("pwd").await.ok(), "/root\n");
}

#[tokio::test]
async fn of_many_that_attach_at_once_one_gets_it_and_the_others_are_told() {
    let ws = Ws::create(shared()).await;
    let id = ws.sandbox_id.clone();
    ws.close().await;
    let attempts = (0..8).map(|_| {
        let id = id.clone();
        async move {
            let mut ws = Ws::open(shared(), &format!("/attach/{id}")).await;
            let status = ws.next().await["status"].as_str().unwrap().to_owned();
            if status == "SANDBOX_IN_USE" {
                ws.expect_close(1011).await;
                return None;
            }
            assert_eq!(status, "SANDBOX_RUNNING");
            // Answers pings until the others have heard.
            assert_eq!(ws.incoming_within(Duration::from_secs(3)).await, None);
            Some(ws)
        }
    });
    let mut winners: Vec<Ws> = futures_util::future::join_all(attempts).await.into_iter().flatten().collect();
    assert_eq!(winners.len(), 1);
    winners[0].expect_alive().await;
}

#[tokio::test]
async fn a_sandbox_made_by_a_client_that_vanished_at_once_can_be_attached() {
    let (raw, id) = Raw::create(shared().address(), None).await;
    drop(raw);
    let mut ws = Ws::attach(shared(), &id).await;
    ws.expect_alive().await;
}

//! Executions over HTTP: how long a caller keeps a sandbox, what a request that is sent again gets, and who wins of two.

use super::*;

/// Asks for an execution that does not end, and waits until it is the so-manieth that was begun.
async fn begin(server: &Running, sandbox: &Sandbox, more: &str, count: usize) -> TcpStream {
    let path = format!("{}/executions", sandbox.path);
    let asked = json!({"language": "bash", "code": "sleep 100000", "execution_id": "endless"});
    let stream = send(server.address, ALICE, "POST", &path, more, &asked).await;
    let wanted = format!("sandboxer_executions_total {count}");
    let running = async {
        while !text(server.metrics, "/metrics").await.contains(&wanted) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, running).await.unwrap();
    stream
}

#[tokio::test]
async fn an_execution_keeps_its_sandbox_for_as_long_as_its_caller_is_there() {
    let ground = Ground::new();
    let a = ground.serve("a").await;
    for (more, count) in [("", 1), ("Idempotency-Key: one\r\n", 3)] {
        let sandbox = a.create(json!({})).await;
        let caller = begin(&a, &sandbox, more, count).await;
        a.attach(&sandbox).await.expect("SANDBOX_IN_USE").await;
        drop(caller);
        // The server may take a moment to notice that the caller has gone.
        let attached = async {
            loop {
                let mut ws = a.attach(&sandbox).await;
                let told = ws.status_but(&[]).await;
                if told["status"] == "SANDBOX_RUNNING" {
                    break ws;
                }
                assert_eq!(told["status"], "SANDBOX_IN_USE", "{told}");
            }
        };
        let mut ws = timeout(PATIENCE, attached).await.unwrap();
        // The program goes on, and the client that attaches may end it.
        ws.0.send(Message::text(json!({"action": "kill_process"}).to_string())).await.unwrap();
        loop {
            let told = ws.status_but(&[]).await;
            if told["status"] == "SANDBOX_EXECUTION_DONE" {
                assert_eq!(told["execution_id"], "endless", "{told}");
                break;
            }
        }
        ws.run("sleep 0.01").await;
    }
}

#[tokio::test]
async fn who_asks_again_under_its_key_is_as_good_as_who_asked_first() {
    let ground = Ground::new();
    let a = ground.serve("a").await;
    let sandbox = a.create(json!({})).await;
    let key = "Idempotency-Key: one\r\n";
    drop(begin(&a, &sandbox, key, 1).await);
    let mut again = begin(&a, &sandbox, key, 1).await;
    a.attach(&sandbox).await.expect("SANDBOX_IN_USE").await;
    let kill = format!("{}/executions/kill", sandbox.path);
    assert_eq!(ask(a.address, ALICE, "POST", &kill, json!({})).await.0, 200);
    let mut answer = Vec::new();
    let read = async {
        while !String::from_utf8_lossy(&answer).contains("SIGKILL") {
            assert!(again.read_buf(&mut answer).await.unwrap() > 0, "{}", String::from_utf8_lossy(&answer));
        }
    };
    timeout(PATIENCE, read).await.unwrap();
}

/// A collected execution.
async fn execute(server: &Running, sandbox: &Sandbox, id: &str, code: &str) -> (u16, Value) {
    let asked = json!({"language": "bash", "code": code, "execution_id": id});
    ask(server.address, ALICE, "POST", &format!("{}/executions", sandbox.path), asked).await
}

/// Sends the request again until the server has seen that the caller before has gone.
async fn execute_again(server: &Running, sandbox: &Sandbox, id: &str, code: &str) -> Value {
    let collected = async {
        loop {
            match execute(server, sandbox, id, code).await {
                (200, body) => return body,
                (status, body) => assert_eq!((status, &body["error"]["code"]), (409, &json!("in_use")), "{body}"),
            }
        }
    };
    timeout(PATIENCE, collected).await.unwrap()
}

async fn executions(server: &Running) -> String {
    let text = text(server.metrics, "/metrics").await;
    text.lines().find(|line| line.starts_with("sandboxer_executions_total")).unwrap().to_owned()
}

#[tokio::test]
async fn a_request_sent_again_collects_all_output() {
    let ground = Ground::new();
    let a = ground.serve("a").await;
    let sandbox = a.create(json!({})).await;
    let code = "for i in $(seq 1 200); do echo out $i; echo err $i >&2; done; exit 3";
    let (status, first) = execute(&a, &sandbox, "whole", code).await;
    assert_eq!((status, &first["exit_code"], &first["truncated"]), (200, &json!(3), &json!(false)), "{first}");
    assert!(first["stdout"].as_str().unwrap().ends_with("out 200\n"), "{first}");
    assert_eq!(execute(&a, &sandbox, "whole", code).await, (200, first.clone()), "the answer was lost on its way");

    // Cut while the program runs.
    let cut = "echo before; sleep 0.5; echo after; exit 4";
    let asked = json!({"language": "bash", "code": cut, "execution_id": "cut"});
    let caller = send(a.address, ALICE, "POST", &format!("{}/executions", sandbox.path), "", &asked).await;
    let started = async { while executions(&a).await != "sandboxer_executions_total 2" {} };
    timeout(PATIENCE, started).await.unwrap();
    drop(caller);
    let whole = execute_again(&a, &sandbox, "cut", cut).await;
    assert_eq!((&whole["stdout"], &whole["exit_code"]), (&json!("before\nafter\n"), &json!(4)), "{whole}");
    assert_eq!((&whole["truncated"], &whole["stdout_offset"]), (&json!(false), &json!(0)), "{whole}");
    assert_eq!(executions(&a).await, "sandboxer_executions_total 2", "nothing ran twice");

    // The server is another one, and the sandbox the same.
    let Running { runtime, stop, task, .. } = a;
    stop.send(StopHow::Restart).unwrap();
    task.await.unwrap();
    let a = ground.serve_on("a", runtime).await;
    let again = execute_again(&a, &sandbox, "cut", cut).await;
    assert_eq!((&again["stdout"], &again["exit_code"]), (&json!("before\nafter\n"), &json!(4)), "{again}");

    // A client that attaches hears nothing of what was collected.
    let mut ws = a.attach(&sandbox).await;
    ws.expect("SANDBOX_RUNNING").await;
    ws.run("echo mine").await;
    let done = ws.status_but(&[]).await;
    assert_eq!((&done["status"], &done["exit_code"]), (&json!("SANDBOX_EXECUTION_DONE"), &json!(0)), "{done}");
}

#[tokio::test]
async fn a_request_sent_again_says_which_output_is_gone() {
    const WRITTEN: u64 = 9_000_000;
    let ground = Ground::new();
    let a = ground.serve("a").await;
    let sandbox = a.create(json!({})).await;
    let code = format!("head -c {WRITTEN} /dev/zero | tr '\\0' x");
    let (_, first) = execute(&a, &sandbox, "large", &code).await;
    assert_eq!((&first["truncated"], &first["stdout_offset"]), (&json!(true), &json!(0)));
    assert_eq!(first["stdout"].as_str().unwrap().len(), 8 << 20);
    let (status, again) = execute(&a, &sandbox, "large", &code).await;
    assert_eq!((status, &again["truncated"], &again["exit_code"]), (200, &json!(true), &json!(0)));
    let (offset, length) = (again["stdout_offset"].as_u64().unwrap(), again["stdout"].as_str().unwrap().len() as u64);
    assert!(offset > 0 && offset + length == WRITTEN, "{length} bytes from {offset}");
}

#[tokio::test]
async fn of_two_executions_at_once_one_wins_at_once() {
    let ground = Ground::new();
    let a = ground.serve("a").await;
    let sandbox = a.create(json!({})).await;
    for round in 0..10 {
        let (one, two) = (format!("one-{round}"), format!("two-{round}"));
        let code = "sleep 0.3; echo done";
        let mut both = <[_; 2]>::from(tokio::join!(execute(&a, &sandbox, &one, code), execute(&a, &sandbox, &two, code)));
        both.sort_by_key(|(status, _)| *status);
        let [(won, collected), (lost, refused)] = &both;
        assert_eq!((won, &collected["stdout"]), (&200, &json!("done\n")), "{both:?}");
        assert_eq!((lost, &refused["error"]["code"]), (&409, &json!("in_use")), "{both:?}");
        assert_eq!(executions(&a).await, format!("sandboxer_executions_total {}", round + 1), "the other one was not started");
    }
}

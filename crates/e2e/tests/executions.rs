//! Executions over plain HTTP: collected, or told as they happen.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{io::Write as _, net::TcpStream, time::Duration};

use sandboxer_e2e::{DEADLINE, Ws, eventually, http, shared};
use serde_json::{Value, json};

fn run(id: &str, body: &Value) -> (u16, Value) {
    shared().api(None, "POST", &format!("/v1/sandboxes/{id}/executions"), body)
}

/// Events by name, with what they say.
fn events(body: &str) -> Vec<(String, Value)> {
    let event = |text: &str| {
        let (name, data) = text.split_once('\n').unwrap();
        let data = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        (name.strip_prefix("event: ").unwrap().to_owned(), data)
    };
    body.split("\n\n").filter(|text| !text.is_empty()).map(event).collect()
}

#[tokio::test]
async fn an_execution_is_collected_with_all_that_it_said() {
    let server = shared();
    let id = server.made(None, "/v1/sandboxes", &json!({}))["id"].as_str().unwrap().to_owned();
    let (status, body) = run(&id, &json!({"language": "bash", "code": "echo out; echo err >&2; exit 3", "execution_id": "mine"}));
    assert_eq!((status, &body["execution_id"], &body["exit_code"]), (200, &json!("mine"), &json!(3)), "{body}");
    assert_eq!((&body["stdout"], &body["stderr"], &body["truncated"]), (&json!("out\n"), &json!("err\n"), &json!(false)));
    // The same one again is not run again.
    let (_, again) = run(&id, &json!({"language": "bash", "code": "echo out; echo err >&2; exit 3", "execution_id": "mine"}));
    assert_eq!(again["exit_code"], json!(3), "{again}");
    let (_, body) = run(&id, &json!({"language": "python", "code": "print(input()[::-1])", "input": "abc\n"}));
    assert_eq!((&body["stdout"], &body["exit_code"]), (&json!("cba\n"), &json!(0)), "{body}");
    let (_, body) = run(&id, &json!({"language": "bash", "code": "cat"}));
    assert_eq!(body["stdout"], json!(""), "without input it is at its end");
    let (_, body) = run(&id, &json!({"language": "bash", "code": "sleep 100", "timeout": 0.3}));
    assert_eq!((&body["timed_out"], &body["signal"]), (&json!(true), &json!("SIGKILL")), "{body}");
    let (_, body) = run(&id, &json!({"language": "bash", "code": "printf '\\xff'", "encoding": "base64"}));
    assert_eq!(body["stdout"], json!("/w=="));
    let (_, body) = run(&id, &json!({"language": "bash", "code": "head -c 9000000 /dev/zero | tr '\\0' x"}));
    assert_eq!((body["stdout"].as_str().unwrap().len(), &body["truncated"]), (8 << 20, &json!(true)));
    for (request, status, code) in [
        (json!({}), 422, "invalid_field"),
        (json!({"language": "bash"}), 422, "invalid_field"),
        (json!({"language": "bash", "code": "true", "stdin": true}), 422, "invalid_field"),
        (json!({"language": "cobol", "code": "true"}), 422, "unsupported_language"),
        (json!({"language": "bash", "code": "true", "cwd": "/nowhere"}), 422, "start_failed"),
    ] {
        let (found, body) = run(&id, &request);
        assert_eq!((found, body["error"]["code"].as_str()), (status, Some(code)), "{request}: {body}");
    }
    assert_eq!(run("00000000-0000-4000-8000-000000000000", &json!({"language": "bash", "code": "true"})).0, 404);
}

#[tokio::test]
async fn an_execution_is_told_as_it_happens_and_an_attached_client_keeps_its_sandbox() {
    let server = shared();
    let mut ws = Ws::create(server).await;
    let id = ws.sandbox_id.clone();
    let request = json!({"language": "bash", "code": "echo one; echo two >&2; exit 4"});
    let (asked, of) = (request.clone(), id.clone());
    let refused = tokio::task::spawn_blocking(move || run(&of, &asked));
    // It answers when it is asked for a sign of life.
    while !refused.is_finished() {
        assert_eq!(ws.incoming_within(Duration::from_millis(20)).await, None);
    }
    let (status, body) = refused.await.unwrap();
    assert_eq!((status, &body["error"]["code"]), (409, &json!("in_use")), "{body}");
    ws.expect_alive().await;
    ws.close().await;
    let path = format!("/v1/sandboxes/{id}/executions");
    let mut answer = http::json(server.address(), "POST", &path, &[("Accept", "text/event-stream")], &request).unwrap();
    // It may take a moment until the server knows that the client has gone.
    for _ in 0..50 {
        if answer.status != 409 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        answer = http::json(server.address(), "POST", &path, &[("Accept", "text/event-stream")], &request).unwrap();
    }
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("text/event-stream")));
    let events = events(&answer.body);
    let (first, last) = (&events[0].1, &events[events.len() - 1].1);
    assert_eq!((&first["status"], &last["status"]), (&json!("SANDBOX_EXECUTION_RUNNING"), &json!("SANDBOX_EXECUTION_DONE")));
    assert_eq!(last["exit_code"], json!(4));
    let said =
        |name: &str| events.iter().filter(|(event, _)| event == name).map(|(_, data)| data["data"].as_str().unwrap()).collect::<String>();
    assert_eq!((said("stdout"), said("stderr")), ("one\n".to_owned(), "two\n".to_owned()));
}

#[tokio::test]
async fn an_execution_that_its_caller_has_left_keeps_nobody_out() {
    let server = shared();
    for more in ["", "Idempotency-Key: abandoned\r\n"] {
        let id = server.made(None, "/v1/sandboxes", &json!({}))["id"].as_str().unwrap().to_owned();
        let body = json!({"language": "bash", "code": "touch /root/up; sleep infinity"}).to_string();
        let mut caller = TcpStream::connect(server.address()).unwrap();
        write!(
            caller,
            "POST /v1/sandboxes/{id}/executions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{more}\r\n{body}",
            body.len()
        )
        .unwrap();
        let up = format!("/v1/sandboxes/{id}/files/stat?path=/root/up");
        eventually("the program runs", DEADLINE, || server.get(&up).status == 200).await;
        let mut ws = Ws::open(server, &format!("/attach/{id}")).await;
        ws.expect_status("SANDBOX_IN_USE").await;
        // As after Ctrl-C.
        drop(caller);
        // As soon as the server has seen that.
        let attached = async {
            loop {
                let mut ws = Ws::open(server, &format!("/attach/{id}")).await;
                let said = ws.next().await;
                if said["status"] == "SANDBOX_RUNNING" {
                    break ws;
                }
                assert_eq!(said["status"], "SANDBOX_IN_USE", "{said}");
            }
        };
        let mut ws = tokio::time::timeout(DEADLINE, attached).await.expect("nobody is kept out");
        ws.send(json!({"action": "kill_process"})).await;
        ws.expect_status("SANDBOX_EXECUTION_FORCE_KILLED").await;
        ws.expect_status("SANDBOX_EXECUTION_DONE").await;
        assert_eq!(ws.bash("echo mine").await.ok(), "mine\n");
    }
}

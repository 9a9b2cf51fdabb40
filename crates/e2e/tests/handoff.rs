//! Several servers share one volume: a sandbox goes where its client is, and its program does not notice.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::Duration;

use sandboxer_e2e::{Assembly, Server, Volume, Ws, count, eventually};
use serde_json::{Value, json};

/// Prints numbered lines on both streams and echoes its input, until its input ends.
const PROGRAM: &str = "
import sys, threading, time
def echo():
    for line in sys.stdin:
        print('echo', line.strip(), flush=True)
    print('bye', flush=True)
reader = threading.Thread(target=echo); reader.start()
n = 0
while reader.is_alive():
    print('n', n, file=sys.stderr, flush=True); n += 1; time.sleep(0.005)
";

/// Attaches wherever the sandbox is.
async fn attach(server: &Server, id: &str) -> (Ws, Value) {
    let mut ws = Ws::open(server, &format!("/attach/{id}")).await;
    ws.repeats_allowed = true;
    id.clone_into(&mut ws.sandbox_id);
    let first = ws.next().await;
    if first["status"] == "SANDBOX_RUNNING" {
        return (ws, first);
    }
    assert_eq!(first["status"], "SANDBOX_RESTORING", "{first}");
    let running = ws.expect_status("SANDBOX_RUNNING").await;
    (ws, running)
}

#[tokio::test]
async fn a_client_that_goes_from_instance_to_instance_misses_and_repeats_nothing() {
    let volume = Volume::default();
    let servers = [volume.serve(), volume.serve(), volume.serve()];
    let mut ws = Ws::create_with(&servers[0], json!({"enable_checkpoint": true})).await;
    let id = ws.sandbox_id.clone();
    ws.start(json!({"language": "python", "code": PROGRAM, "execution_id": "e"})).await;
    let (mut out, mut err, mut sent) = (Assembly::default(), Assembly::default(), String::new());
    let bounces = count(15, 200);
    for bounce in 1..=bounces {
        let line = format!("line {bounce}\n");
        ws.send(json!({"event": "stdin", "data": line, "offset": sent.len()})).await;
        sent += &line;
        let wanted = err.bytes.len() + 100;
        while err.bytes.len() < wanted {
            let message = ws.next().await;
            match message["event"].as_str().unwrap() {
                "stdout" => out.take(&message),
                "stderr" => err.take(&message),
                "stdin_ack" => {}
                _ => panic!("{message}"),
            }
        }
        // Every other time without a word.
        if bounce % 2 == 0 {
            ws.vanish()
        } else {
            ws.close().await
        }
        let (next, running) = attach(&servers[bounce % servers.len()], &id).await;
        assert!(running.get("rewound").is_none(), "{running}");
        ws = next;
        let from = json!({"action": "reconnect", "execution_id": "e", "stdout_offset": out.bytes.len(), "stderr_offset": err.bytes.len()});
        ws.send(from).await;
        let resumed = ws.next().await;
        assert_eq!((&resumed["event"], &resumed["running"]), (&json!("resumed"), &json!(true)), "{resumed}");
        let taken = usize::try_from(resumed["stdin_offset"].as_u64().unwrap()).unwrap();
        if taken < sent.len() {
            ws.send(json!({"event": "stdin", "data": sent[taken..], "offset": taken})).await;
        }
    }
    ws.send(json!({"event": "stdin_eof", "offset": sent.len()})).await;
    loop {
        let message = ws.next().await;
        match message["event"].as_str().unwrap() {
            "stdout" => out.take(&message),
            "stderr" => err.take(&message),
            "stdin_ack" => {}
            _ => {
                assert_eq!((&message["status"], &message["exit_code"]), (&json!("SANDBOX_EXECUTION_DONE"), &json!(0)), "{message}");
                break;
            }
        }
    }
    let echoed: String = (1..=bounces).map(|bounce| format!("echo line {bounce}\n")).collect();
    assert_eq!(String::from_utf8_lossy(&out.bytes), echoed + "bye\n");
    for (number, line) in String::from_utf8(err.bytes).unwrap().lines().enumerate() {
        assert_eq!(line, format!("n {number}"));
    }
}

#[tokio::test]
async fn an_attached_client_keeps_its_sandbox_unless_it_was_made_to_give_way() {
    let volume = Volume::default();
    let (a, b) = (volume.serve(), volume.serve());
    let mut kept = Ws::create_with(&a, json!({"enable_checkpoint": true})).await;
    let mut ws = Ws::open(&b, &format!("/attach/{}", kept.sandbox_id)).await;
    ws.expect_status("SANDBOX_RESTORING").await;
    ws.expect_status("SANDBOX_IN_USE").await;
    ws.expect_close(1011).await;
    kept.expect_alive().await;

    let mut giving = Ws::create_with(&a, json!({"enable_checkpoint": true, "enable_sandbox_handoff": true})).await;
    let _ = giving.bash("echo kept > f").await.ok();
    let id = giving.sandbox_id.clone();
    let mut ws = Ws::open(&b, &format!("/attach/{id}")).await;
    ws.expect_status("SANDBOX_RESTORING").await;
    giving.expect_status("SANDBOX_LOCK_RELEASE_REQUESTED").await;
    giving.expect_status("SANDBOX_CHECKPOINTING").await;
    giving.expect_status("SANDBOX_CHECKPOINTED").await;
    giving.expect_close(1000).await;
    ws.expect_status("SANDBOX_RUNNING").await;
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
}

#[tokio::test]
async fn a_server_that_was_killed_takes_up_what_it_holds_and_gives_it_on() {
    let volume = Volume::default();
    let (mut a, b) = (volume.serve(), volume.serve());
    let mut ws = Ws::create_with(&a, json!({"enable_checkpoint": true})).await;
    let id = ws.sandbox_id.clone();
    let _ = ws.bash("echo kept > f").await.ok();
    a.kill9();
    a.restart();
    let (mut ws, running) = attach(&a, &id).await;
    assert!(running.get("rewound").is_none(), "{running}");
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
    ws.close().await;
    let (mut ws, running) = attach(&b, &id).await;
    assert!(running.get("rewound").is_none(), "{running}");
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
}

#[tokio::test]
async fn what_an_instance_left_that_died_comes_back_from_its_last_save_and_says_so() {
    let volume = Volume::default();
    let (mut a, b) = (volume.serve(), volume.serve());
    let mut ws = Ws::create_with(&a, json!({"enable_checkpoint": true})).await;
    let id = ws.sandbox_id.clone();
    let _ = ws.bash("echo saved > f").await.ok();
    ws.close().await;
    eventually("the disconnect is saved", sandboxer_e2e::DEADLINE, || volume.record(&id)["latest"].is_string()).await;
    let mut ws = Ws::attach(&a, &id).await;
    let _ = ws.bash("echo lost > f").await.ok();
    // The machine burns down.
    a.kill9();
    for process in a.sandbox_processes() {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(i32::try_from(process.pid).unwrap()), nix::sys::signal::Signal::SIGKILL);
    }
    let mut ws = Ws::open(&b, &format!("/attach/{id}")).await;
    ws.expect_status("SANDBOX_RESTORING").await;
    let running = match ws.incoming_within(Duration::from_secs(60)).await {
        Some(sandboxer_e2e::Incoming::Message(message)) => message,
        other => panic!("{other:?}"),
    };
    assert_eq!((&running["status"], &running["rewound"]), (&json!("SANDBOX_RUNNING"), &json!(true)), "{running}");
    assert_eq!(running["generation"], 2, "{running}");
    assert_eq!(ws.bash("cat f").await.ok(), "saved\n");
    ws.close().await;
    // Who missed that knows it by the generation.
    let (_, running) = attach(&b, &id).await;
    assert_eq!(running["generation"], 2, "{running}");

    // The old instance comes back, and has nothing to say in it.
    a.restart();
    let (mut ws, _) = attach(&a, &id).await;
    assert_eq!(ws.bash("cat f").await.ok(), "saved\n");
}

//! A server that is told to stop saves what it has, the sandbox that was used last first, and loses nothing that it could not save.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::Duration;

use sandboxer_e2e::{Assembly, Incoming, Volume, Ws, eventually};
use serde_json::json;

#[tokio::test]
async fn sigterm_saves_every_sandbox_the_last_used_first_and_another_instance_goes_on_with_each() {
    const ORDER: [usize; 5] = [2, 0, 4, 1, 3];
    let volume = Volume::default();
    let (mut a, b) = (volume.options().arg("--stop-grace").arg("60").start(), volume.serve());
    let mut clients = Vec::new();
    for number in 0..ORDER.len() {
        let mut ws = Ws::create_with(&a, json!({"enable_checkpoint": true})).await;
        let _ = ws.bash(&format!("echo {number} > f")).await.ok();
        clients.push(ws);
    }
    for number in ORDER {
        // So that no two are used in the same millisecond.
        tokio::time::sleep(Duration::from_millis(5)).await;
        let _ = clients[number].bash("true").await.ok();
    }
    // The one that is used last runs a program.
    let code = "
import time
for n in range(10**9): print(n, flush=True); time.sleep(0.02)
";
    let last = ORDER[ORDER.len() - 1];
    tokio::time::sleep(Duration::from_millis(5)).await;
    clients[last].start(json!({"language": "python", "code": code, "execution_id": "e"})).await;
    let mut numbers = Assembly::default();
    while numbers.bytes.len() < 20 {
        numbers.take(&clients[last].next().await);
    }

    a.term();
    let mut ids = Vec::new();
    for (number, mut ws) in clients.into_iter().enumerate() {
        let mut statuses = Vec::new();
        loop {
            match ws.incoming().await {
                Incoming::Message(message) if number == last && message["event"] == "stdout" => numbers.take(&message),
                Incoming::Message(message) => statuses.push(message["status"].as_str().unwrap_or_else(|| panic!("{message}")).to_owned()),
                end => {
                    assert_eq!(end, Incoming::Closed(1001));
                    break;
                }
            }
        }
        assert_eq!(statuses, ["SANDBOX_CHECKPOINTING", "SANDBOX_CHECKPOINTED"]);
        ids.push(ws.sandbox_id.clone());
    }
    assert!(a.exited().await.success());
    assert!(a.sandbox_processes().is_empty(), "{:#?}", a.sandbox_processes());
    let log = a.log();
    let turns: Vec<usize> = log
        .lines()
        .filter(|line| line.contains("its turn to be saved"))
        .map(|line| ids.iter().position(|id| line.contains(id)).unwrap())
        .collect();
    assert_eq!(turns, ORDER.into_iter().rev().collect::<Vec<_>>(), "{log}");
    assert!(log.contains("when it is told to stop, this server can save about"), "{log}");

    for (number, id) in ids.iter().enumerate() {
        assert!(volume.record(id)["owner"].is_null(), "it is given up");
        let (mut ws, running) = Ws::reach(&b, id).await;
        assert!(running.get("rewound").is_none(), "{running}");
        if number == last {
            ws.send(json!({"action": "reconnect", "execution_id": "e", "stdout_offset": numbers.bytes.len()})).await;
            assert_eq!(ws.next().await["running"], true);
            let wanted = numbers.bytes.len() + 100;
            while numbers.bytes.len() < wanted {
                numbers.take(&ws.next().await);
            }
            ws.send(json!({"action": "kill_process"})).await;
            let _ = ws.until_done().await;
        }
        assert_eq!(ws.bash("cat f").await.ok(), format!("{number}\n"));
    }
    let text = String::from_utf8(numbers.bytes).unwrap();
    let whole = &text[..=text.rfind('\n').unwrap()];
    for (number, line) in whole.lines().enumerate() {
        assert_eq!(line, number.to_string());
    }
}

#[tokio::test]
async fn what_does_not_fit_into_the_grace_period_is_there_at_the_next_start() {
    let volume = Volume::default();
    let mut a = volume.options().arg("--stop-grace").arg("0.05").start();
    let mut clients = Vec::new();
    for number in 0..4 {
        let mut ws = Ws::create_with(&a, json!({"enable_checkpoint": true})).await;
        let pid = ws.bash(&format!("echo {number} > f; sleep 10000 & echo $!")).await.ok().trim().to_owned();
        clients.push((ws, pid));
    }
    a.term();
    assert!(a.exited().await.success());
    assert!(a.log().contains("not everything could be saved in time"), "{}", a.log());
    a.restart();
    for (number, (ws, pid)) in clients.into_iter().enumerate() {
        let (mut ws, running) = Ws::reach(&a, &ws.sandbox_id).await;
        assert!(running.get("rewound").is_none(), "{running}");
        assert_eq!(ws.bash(&format!("cat f; kill -0 {pid} && echo runs")).await.ok(), format!("{number}\nruns\n"));
    }
}

#[tokio::test]
async fn who_waits_at_a_server_that_stops_is_sent_elsewhere() {
    let volume = Volume::default();
    let (a, mut b) = (volume.serve(), volume.serve());
    let id = volume.saved_sandbox(&a, "kept").await;
    a.halt();
    let mut ws = Ws::open(&b, &format!("/attach/{id}")).await;
    ws.expect_status("SANDBOX_RESTORING").await;
    volume.awaited_by(&id, &b).await;
    b.term();
    ws.expect_error("server_stopping").await;
    ws.expect_close(1001).await;
    assert!(b.exited().await.success());
    eventually("nobody waits any more", sandboxer_e2e::DEADLINE, || volume.record(&id)["waiter"].is_null()).await;
    a.go_on();
    let mut ws = Ws::attach(&a, &id).await;
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
}

//! What can come between an instance that wants a sandbox and the one that has it.
//!
//! An owner that is stopped (`SIGSTOP`) neither hands over nor answers: that is how these tests hold a handoff in its middle.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{fs, time::Duration};

use futures_util::future::join_all;
use sandboxer_e2e::{CutProxy, DEADLINE, FailPoints, Fault, Incoming, Options, Server, Volume, Ws, eventually, host};
use serde_json::{Value, json};
use tokio::time::timeout;

/// How long anything may take that waits for a lease to run out.
const LONG: Duration = Duration::from_secs(120);

/// A client of an instance that has to wait for the sandbox.
async fn wait_at(server: &Server, id: &str) -> Ws {
    let mut ws = Ws::open(server, &format!("/attach/{id}")).await;
    id.clone_into(&mut ws.sandbox_id);
    ws.expect_status("SANDBOX_RESTORING").await;
    ws
}

#[tokio::test]
async fn a_waiter_that_died_is_not_waited_for() {
    let volume = Volume::default();
    let (a, mut b, c) = (volume.serve(), volume.serve(), volume.serve());
    let id = volume.saved_sandbox(&a, "kept").await;
    a.halt();
    let _waiting = wait_at(&b, &id).await;
    volume.awaited_by(&id, &b).await;
    b.kill9();
    let mut ws = wait_at(&c, &id).await;
    let third = c.instance();
    eventually("its registration runs out, and the next one takes its place", LONG, || {
        let record = volume.record(&id);
        record["waiter"]["instance"] == third.as_str() || record["owner"] == third.as_str()
    })
    .await;
    a.go_on();
    ws.expect_running_after(LONG).await;
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
}

#[tokio::test]
async fn of_two_that_want_it_one_gets_it_and_the_other_is_told_so() {
    let volume = Volume::default();
    let (a, b, c) = (volume.serve(), volume.serve(), volume.serve());
    let id = volume.saved_sandbox(&a, "kept").await;
    a.halt();
    let mut first = wait_at(&b, &id).await;
    volume.awaited_by(&id, &b).await;
    let mut second = wait_at(&c, &id).await;
    second.expect_status("SANDBOX_HANDOFF_IN_PROGRESS").await;
    second.expect_close(1011).await;
    a.go_on();
    first.expect_running_after(LONG).await;
    assert_eq!(first.bash("cat f").await.ok(), "kept\n");
}

#[tokio::test]
async fn who_gives_up_waiting_leaves_no_trace() {
    let volume = Volume::default();
    let (a, b) = (volume.serve(), volume.serve());
    let id = volume.saved_sandbox(&a, "kept").await;
    a.halt();
    let waiting = wait_at(&b, &id).await;
    volume.awaited_by(&id, &b).await;
    waiting.close().await;
    eventually("the registration is withdrawn", DEADLINE, || volume.record(&id)["waiter"].is_null()).await;
    a.go_on();
    // It is where it was.
    let mut ws = Ws::attach(&a, &id).await;
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
    assert_eq!(volume.record(&id)["epoch"], 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_clients_say_while_they_wait_is_bounded_and_their_going_is_noticed() {
    const CLIENTS: usize = 12;
    const PIECES: usize = 16;
    // The owner is silent, and not for so long that it loses its sandbox.
    const LEASE: Duration = Duration::from_secs(60);
    let volume = Volume::default();
    let (a, b) = (volume.serve_with_lease(LEASE), volume.serve_with_lease(LEASE));
    let id = volume.saved_sandbox(&a, "kept").await;
    a.halt();
    let before = host::rss(b.pid());
    // The first of them is the one that is registered; the others wait for their turn behind it.
    let mut waiting = vec![wait_at(&b, &id).await];
    volume.awaited_by(&id, &b).await;
    while waiting.len() < CLIENTS {
        waiting.push(wait_at(&b, &id).await);
    }
    let piece = json!({"event": "stdin", "data": "x".repeat(4 << 20)}).to_string();
    let talk = |mut ws: Ws| async {
        let mut taken = 0;
        while taken < PIECES && timeout(Duration::from_secs(10), ws.send_text(piece.clone())).await.is_ok() {
            taken += 1;
        }
        (ws, taken)
    };
    let (mut waiting, taken): (Vec<_>, Vec<_>) = join_all(waiting.into_iter().map(talk)).await.into_iter().unzip();
    let more = host::rss(b.pid()).saturating_sub(before) >> 20;
    println!("of {PIECES} pieces of 4 MiB each client could send {taken:?}; the server has {more} MiB more");
    // Large messages of all clients of one tenant share a budget of 32 MiB: some send, the rest wait.
    assert!(taken.iter().all(|taken| *taken < PIECES) && taken.iter().any(|taken| *taken > 0), "{taken:?}");
    assert!(more < 128, "{more} MiB");
    // Whoever is still there when the registered one goes takes its place in the record: so that one goes last.
    let first = waiting.remove(0);
    drop(waiting);
    eventually("their going is noticed", DEADLINE, || b.metric("sandboxer_clients") <= 1.0).await;
    drop(first);
    eventually("the registration is withdrawn", DEADLINE, || volume.record(&id)["waiter"].is_null()).await;
    a.go_on();
    let mut ws = Ws::attach(&a, &id).await;
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
    assert_eq!(volume.record(&id)["epoch"], 1);
}

#[tokio::test]
async fn an_owner_that_cannot_save_keeps_the_sandbox_and_says_why() {
    let volume = Volume::default();
    let (a, b) = (volume.serve(), volume.serve());
    let mut ws = Ws::create_with(&a, json!({"enable_checkpoint": true})).await;
    let id = ws.sandbox_id.clone();
    let code = "for line in iter(input, 'end'): print('heard', line, flush=True)";
    ws.start(json!({"language": "python", "code": code, "execution_id": "e"})).await;
    ws.send(json!({"event": "stdin", "data": "one\n"})).await;
    ws.until_output("stdout", "heard one\n").await;
    // Where it captures what it saves there is now something else.
    let captures = a.data_dir().join("saving");
    fs::remove_dir_all(&captures).unwrap();
    fs::write(&captures, "").unwrap();
    ws.close().await;

    let mut newcomer = wait_at(&b, &id).await;
    let status = newcomer.expect_status("SANDBOX_RESTORE_ERROR").await;
    assert!(status["message"].as_str().unwrap().contains("can't save it, and keeps it"), "{status}");
    newcomer.expect_error("restore_failed").await;
    newcomer.expect_close(4000).await;
    let record = volume.record(&id);
    assert_eq!((record["owner"].as_str().unwrap(), &record["epoch"]), (a.instance().as_str(), &json!(1)), "{record}");

    let mut ws = Ws::attach(&a, &id).await;
    ws.send(json!({"action": "reconnect", "execution_id": "e"})).await;
    assert_eq!(ws.next().await["running"], true);
    ws.send(json!({"event": "stdin", "data": "two\n"})).await;
    ws.until_output("stdout", "heard two\n").await;
    ws.close().await;

    fs::remove_file(&captures).unwrap();
    fs::create_dir(&captures).unwrap();
    let (mut ws, running) = Ws::reach(&b, &id).await;
    assert!(running.get("rewound").is_none(), "{running}");
    ws.send(json!({"action": "reconnect", "execution_id": "e"})).await;
    assert_eq!(ws.next().await["running"], true);
    ws.send(json!({"event": "stdin", "data": "three\nend\n"})).await;
    assert!(ws.until_done().await.out().ends_with("heard three\n"));
}

/// What two clients are told in the end. Both are read from until both know, since only who answers is attached.
async fn verdicts(first: &mut Ws, second: &mut Ws) -> [Value; 2] {
    let mut told = [Value::Null, Value::Null];
    while told.iter().any(Value::is_null) {
        let (at, incoming) = tokio::select! {
            incoming = first.incoming_within(LONG), if told[0].is_null() || told[0] == "SANDBOX_RUNNING" => (0, incoming),
            incoming = second.incoming_within(LONG), if told[1].is_null() || told[1] == "SANDBOX_RUNNING" => (1, incoming),
        };
        match incoming {
            Some(Incoming::Message(message)) if message["status"] == "SANDBOX_RESTORING" => {}
            Some(Incoming::Message(message)) if told[at].is_null() => told[at] = message["status"].clone(),
            other => panic!("{at}: {other:?}, {told:?}"),
        }
    }
    told
}

#[tokio::test]
async fn of_two_clients_one_at_the_old_owner_while_it_saves_exactly_one_gets_the_sandbox() {
    let volume = Volume::default();
    let (a, b) = (volume.serve(), volume.serve());
    let mut ws = Ws::create_with(&a, json!({"enable_checkpoint": true})).await;
    let id = ws.sandbox_id.clone();
    // Something that takes a while to save.
    let code = "
import os, time
held = os.urandom(96 << 20)
open('/root/there', 'w').write('there')
time.sleep(10000)
";
    let _ = ws.bash(&format!("python3 -c \"{code}\" & until [ -s there ]; do sleep 0.05; done; echo kept > f")).await.ok();
    ws.vanish();
    let mut at_b = Ws::open(&b, &format!("/attach/{id}")).await;
    eventually("the owner is asked", DEADLINE, || a.log().contains("another instance asks for the sandbox")).await;
    let mut at_a = Ws::open(&a, &format!("/attach/{id}")).await;
    let told = verdicts(&mut at_b, &mut at_a).await;
    let got: Vec<bool> = told.iter().map(|status| status == "SANDBOX_RUNNING").collect();
    assert_eq!(got.iter().filter(|got| **got).count(), 1, "{told:?}");
    for (status, got) in told.iter().zip(&got) {
        assert!(*got || status == "SANDBOX_IN_USE" || status == "SANDBOX_HANDOFF_IN_PROGRESS", "{told:?}");
    }
    let mut owner = if got[0] { at_b } else { at_a };
    assert_eq!(owner.bash("cat f; pgrep -fc 'python3 -c'").await.ok(), "kept\n1\n");
}

#[tokio::test]
async fn a_client_that_is_only_said_to_be_attached_keeps_nothing() {
    let volume = Volume::default();
    let (a, b) = (volume.serve(), volume.serve());
    let network = CutProxy::start(a.address(), 1, 4000..4001, &[Fault::HalfOpen]).await;
    let mut ws = Ws::connect(network.address(), "/create", &[]).await.unwrap();
    ws.send(json!({"enable_checkpoint": true})).await;
    ws.expect_created().await;
    let id = ws.sandbox_id.clone();
    ws.send(json!({"language": "bash", "code": "echo kept > f; yes | head -c 100000"})).await;
    eventually("nothing passes any more", DEADLINE, || network.happened() == 1).await;
    // Neither side has heard of it.
    let (mut next, running) = Ws::reach(&b, &id).await;
    assert!(running.get("rewound").is_none(), "{running}");
    assert_eq!(next.bash("cat f").await.ok(), "kept\n");
    drop(ws);
}

/// A client is told within two seconds that it waits; the rest is for a busy machine.
const TOLD_WITHIN: Duration = Duration::from_secs(5);

async fn told_to_wait(ws: &mut Ws) {
    told_to_wait_within(ws, TOLD_WITHIN).await;
}

/// The next that it hears is that it waits, but for the end of what ran before.
async fn told_to_wait_within(ws: &mut Ws, time: Duration) {
    ws.hears_waiting = true;
    loop {
        match ws.incoming_within(time).await {
            Some(Incoming::Message(told)) if told["status"] == "SANDBOX_WAITING" => {
                assert!(told["message"].is_string(), "{told}");
                break;
            }
            Some(Incoming::Message(told)) if told["status"] == "SANDBOX_EXECUTION_DONE" => {}
            other => panic!("{other:?}"),
        }
    }
    ws.hears_waiting = false;
}

/// A lease that is over soon.
fn with_short_lease(options: Options) -> Options {
    options.arg("--lease").arg("4")
}

#[tokio::test]
async fn a_checkpoint_and_an_attach_on_a_hanging_volume_are_told() {
    let (volume, points) = (Volume::default(), FailPoints::default());
    let server = points.on(volume.options()).start();
    let mut ws = Ws::create_kept(&server).await;
    let id = ws.sandbox_id.clone();
    points.stall();
    ws.send(json!({"action": "checkpoint"})).await;
    ws.expect_status("SANDBOX_CHECKPOINTING").await;
    told_to_wait(&mut ws).await;
    let mut late = Ws::open(&server, &format!("/attach/{id}")).await;
    told_to_wait(&mut late).await;
    points.go_on();
    ws.expect_status("SANDBOX_CHECKPOINTED").await;
    ws.expect_close(1000).await;
    late.expect_status("SANDBOX_RESTORING").await;
    late.expect_running_after(LONG).await;
}

#[tokio::test]
async fn a_client_of_an_owner_without_its_volume_is_told() {
    let (volume, points) = (Volume::default(), FailPoints::default());
    let server = with_short_lease(points.on(volume.options())).start();
    let id = volume.saved_sandbox(&server, "kept").await;
    let mut ws = Ws::attach(&server, &id).await;
    points.stall();
    told_to_wait_within(&mut ws, LONG).await;
    ws.vanish();
    let mut late = Ws::open(&server, &format!("/attach/{id}")).await;
    told_to_wait(&mut late).await;
    points.go_on();
    late.expect_running_after(LONG).await;
    late.may_repeat();
    assert_eq!(late.bash("cat f").await.ok(), "kept\n");
}

#[tokio::test]
async fn a_silent_owner_before_its_first_save_is_not_called_lost() {
    let (volume, points) = (Volume::default(), FailPoints::default());
    let (a, b) = (with_short_lease(points.on(volume.options())).start(), with_short_lease(volume.options()).start());
    let mut ws = Ws::create_kept(&a).await;
    let _ = ws.bash("echo mine > f").await.ok();
    points.stall();
    let mut other = wait_at(&b, &ws.sandbox_id).await;
    // Its own client is there, and says so when it is asked.
    let said = tokio::select! {
        said = other.incoming_within(LONG) => said,
        said = ws.incoming_within(LONG) => panic!("{said:?}"),
    };
    match said {
        Some(Incoming::Message(told)) if told["status"] == "SANDBOX_HANDOFF_IN_PROGRESS" => {
            assert!(told["message"].as_str().unwrap().contains("not saved the sandbox yet"), "{told}");
        }
        said => panic!("{said:?}"),
    }
    other.expect_close(1011).await;
    points.go_on();
    assert_eq!(ws.bash("cat f").await.ok(), "mine\n");
}

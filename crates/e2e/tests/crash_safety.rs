//! A server that is killed in the middle of a save loses nothing: the sandbox still runs, or the newest complete checkpoint is what comes back.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use sandboxer_e2e::{DEADLINE, FailPoints, Incoming, Server, Talk, Volume, Ws, count, eventually, seed, soak};
use serde_json::{Value, json};

/// A lease runs out in 15 s; others then take over.
const TAKEN_OVER: Duration = Duration::from_secs(90);

/// A program that keeps a number in memory and tells it to whoever asks.
const MEMORY: &str = r#"
python3 - <<'PY' &
import socket
held, server = b'0', socket.create_server(('127.0.0.1', 8000))
while True:
    peer, _ = server.accept()
    with peer:
        said = peer.recv(100)
        held = said if said != b'?' else held
        peer.sendall(held)
PY
until (exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.1; done
"#;

/// Puts a number into a file and into the program's memory.
async fn remember(ws: &mut Ws, number: usize) {
    let code = format!("echo {number} > /root/file; exec 3<>/dev/tcp/127.0.0.1/8000; printf {number} >&3; cat <&3");
    assert_eq!(ws.bash(&code).await.ok(), number.to_string());
}

/// What is remembered, which has to be the same in both places.
async fn remembered(ws: &mut Ws) -> usize {
    let told = ws.bash("cat /root/file; exec 3<>/dev/tcp/127.0.0.1/8000; printf '?' >&3; cat <&3").await.ok().to_owned();
    let (file, memory) = told.split_once('\n').unwrap();
    assert_eq!(file, memory);
    file.parse().unwrap()
}

#[tokio::test]
async fn a_kill_at_any_point_of_a_save_costs_a_restarted_server_nothing() {
    let (volume, points) = (Volume::default(), FailPoints::default());
    let mut server = points.on(volume.options()).start();
    let mut ws = Ws::create_kept(&server).await;
    let id = ws.sandbox_id.clone();
    let _ = ws.bash(MEMORY).await.ok();
    // The image is on the volume from here on: what is written later is written for the sandbox.
    ws.checkpoint().await;
    (ws, _) = Ws::restore(&server, &id).await;
    for (number, (kind, stage)) in FailPoints::all().enumerate() {
        let (point, before) = (format!("{kind}:{stage}"), volume.record_now(&id)["latest"].clone());
        remember(&mut ws, number).await;
        points.arm(&format!("{point}=kill"));
        ws.send(json!({"action": "checkpoint"})).await;
        server.killed().await;
        points.disarm();
        assert_eq!(volume.record_now(&id)["latest"] != before, FailPoints::counts(kind, stage), "{point}");
        volume.verify_quickly();
        server.restart();
        let (back, running) = Ws::reach(&server, &id).await;
        ws = back;
        assert!(running.get("rewound").is_none(), "{point}: {running}");
        assert_eq!(remembered(&mut ws).await, number, "{point}");
    }
    // And it can be saved as ever.
    ws.checkpoint().await;
    volume.verify();
    let other = volume.serve();
    let (mut ws, running) = Ws::restore(&other, &id).await;
    assert!(running.get("rewound").is_none(), "{running}");
    assert_eq!(remembered(&mut ws).await, FailPoints::all().count() - 1);
}

/// A server of its own dies with its sandbox at this point of its second save. Another one brings back what counts.
async fn dies_at(volume: &Volume, other: &Server, kind: &str, stage: &str) {
    let points = FailPoints::default();
    let mut server = points.on(volume.options()).start();
    let mut ws = Ws::create_kept(&server).await;
    let id = ws.sandbox_id.clone();
    let _ = ws.bash(MEMORY).await.ok();
    remember(&mut ws, 1).await;
    ws.checkpoint().await;
    (ws, _) = Ws::restore(&server, &id).await;
    remember(&mut ws, 2).await;
    points.arm(&format!("{kind}:{stage}=kill"));
    ws.send(json!({"action": "checkpoint"})).await;
    server.killed().await;
    server.burn_down();
    let (mut ws, running) = taken_over(other, &id).await;
    let (counts, rewound) = (FailPoints::counts(kind, stage), running["rewound"] == true);
    assert_eq!((remembered(&mut ws).await, rewound), if counts { (2, false) } else { (1, true) }, "{kind}:{stage}: {running}");
    remember(&mut ws, 3).await;
    ws.checkpoint().await;
    let (mut ws, _) = Ws::restore(other, &id).await;
    assert_eq!(remembered(&mut ws).await, 3, "{kind}:{stage}");
}

/// Attaches where it may take as long as a lease.
async fn taken_over(server: &Server, id: &str) -> (Ws, Value) {
    let mut ws = Ws::open(server, &format!("/attach/{id}")).await;
    id.clone_into(&mut ws.sandbox_id);
    ws.repeats_allowed = true;
    ws.expect_status("SANDBOX_RESTORING").await;
    match ws.incoming_within(TAKEN_OVER).await {
        Some(Incoming::Message(running)) if running["status"] == "SANDBOX_RUNNING" => (ws, running),
        other => panic!("{other:?}"),
    }
}

/// Nothing was ever saved of it when its server died.
async fn dies_before_its_first_save(volume: &Volume, other: &Server) {
    let mut server = volume.serve();
    let ws = Ws::create_kept(&server).await;
    let id = ws.sandbox_id.clone();
    server.burn_down();
    let mut ws = Ws::open(other, &format!("/attach/{id}")).await;
    ws.expect_status("SANDBOX_RESTORING").await;
    let Some(Incoming::Message(told)) = ws.incoming_within(TAKEN_OVER).await else { panic!("no answer") };
    // Whether that server lives is not known: the client is told what is, and may wait.
    assert_eq!(told["status"], "SANDBOX_HANDOFF_IN_PROGRESS", "{told}");
    assert!(told["message"].as_str().unwrap().contains("not saved the sandbox yet"), "{told}");
    ws.expect_close(1011).await;
}

#[tokio::test]
async fn a_server_that_dies_with_its_sandbox_leaves_the_newest_complete_checkpoint_to_others() {
    let volume = Volume::default();
    let other = volume.serve();
    // The image is put there once, not by each of those who come.
    Ws::create_kept(&other).await.checkpoint().await;
    let ends = [("pack", "synced"), ("manifest", "named"), ("publish", "synced"), ("publish", "named"), ("latest", "written")];
    let points: Vec<_> = FailPoints::all().filter(|point| soak() || ends.contains(point)).collect();
    let first = async {
        for points in points.chunks(ends.len()) {
            join_all(points.iter().map(|(kind, stage)| dies_at(&volume, &other, kind, stage))).await;
        }
    };
    tokio::join!(first, dies_before_its_first_save(&volume, &other));
    volume.verify();
}

#[tokio::test]
async fn kills_at_random_moments_of_saves_lose_and_repeat_nothing() {
    let mut rng = StdRng::seed_from_u64(seed());
    let volume = Volume::default();
    let mut server = volume.serve();
    let mut ws = Ws::create_kept(&server).await;
    let id = ws.sandbox_id.clone();
    let mut talk = Talk::begin(&mut ws).await;
    // How long a save takes when the image is on the volume.
    let mut span = Duration::ZERO;
    for _ in 0..2 {
        talk.go_on(&mut ws, 100).await;
        let began = Instant::now();
        for message in ws.checkpoint_with_execution().await {
            talk.take(&message);
        }
        span = began.elapsed();
        (ws, _) = Ws::restore(&server, &id).await;
        talk.resume(&mut ws).await;
    }
    let (kills, mut counted) = (count(6, 200), 0);
    for kill in 1..=kills {
        talk.go_on(&mut ws, 100).await;
        let before = volume.record_now(&id)["latest"].clone();
        let moment = rng.random_range(Duration::ZERO..span);
        // Some saves are asked for, some are made because the client goes.
        if kill % 3 == 0 {
            ws.vanish();
            tokio::time::sleep(moment).await;
        } else {
            ws.send(json!({"action": "checkpoint", "include_execution": true})).await;
            let saved = async {
                while let Some(Incoming::Message(message)) = ws.incoming_within(DEADLINE).await {
                    talk.take(&message);
                }
            };
            // A third of the kills come behind the save, however fast the machine is at the moment.
            let finished = tokio::time::timeout(moment, saved).await.is_ok();
            span = if finished { span * 9 / 10 } else { (span * 21 / 20).min(DEADLINE / 4) };
        }
        server.kill9();
        counted += usize::from(volume.record_now(&id)["latest"] != before);
        server.restart();
        let (back, running) = Ws::reach(&server, &id).await;
        assert!(running.get("rewound").is_none(), "kill {kill}: {running}");
        ws = back;
        talk.resume(&mut ws).await;
        if kill % 20 == 0 {
            volume.verify();
        }
    }
    talk.finish(&mut ws).await;
    println!("{kills} kills, {counted} of them behind a save that counted; within {span:?} in the end");
    assert!(!soak() || (counted > 0 && counted < kills), "all of them came too early, or all too late: {counted}");
    ws.checkpoint().await;
    volume.verify();
    eventually("nothing is left of it", DEADLINE, || server.sandbox_processes().is_empty()).await;
}

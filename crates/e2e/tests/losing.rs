//! An instance that can't be certain of its sandbox lets it stand still; one that has lost it ends it and writes nothing.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    collections::BTreeMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use sandboxer_e2e::{DEADLINE, Runsc, Server, Volume, Ws, count, eventually, soak};
use serde_json::json;

/// Shorter than usual, so that it runs out while the test waits.
const LEASE: Duration = Duration::from_secs(6);

/// Long enough that somebody can get ready between silence and its end, however slow the disk is.
const SLOW: Duration = Duration::from_secs(20);

fn runs(server: &Server, id: &str) -> bool {
    let container = server.container_of(id).unwrap_or_else(|| id.to_owned());
    server.sandbox_processes().iter().any(|process| process.command.contains(&container))
}

/// One that keeps nothing in a pool, so that what is there was got ready for somebody.
fn serve_without_pool(volume: &Volume) -> Server {
    let options = volume.options().arg("--lease").arg(SLOW.as_secs_f64().to_string());
    options.arg("--pool").arg("0").arg("--restore-pool").arg("0").start()
}

/// Until an instance has what it needs to go on with the sandbox, while that is still another's.
async fn got_ready(server: &Server, volume: &Volume, id: &str, owner: &Server) {
    eventually("a container waits for it", DEADLINE, || !server.sandbox_directories().is_empty()).await;
    assert!(server.log().contains("its owner is silent"), "{}", server.log());
    assert_eq!(volume.record(id)["owner"], owner.instance().as_str(), "it is not yet anybody else's");
}

/// A sandbox whose owner stands still, with what was not saved, its client there, and who waits for it at an instance that has got it ready.
async fn silent_and_awaited(volume: &Volume, owner: &Server, other: &Server) -> (String, Ws, Ws) {
    let id = volume.saved_sandbox(owner, "saved").await;
    let mut old = Ws::attach(owner, &id).await;
    let _ = old.bash("echo unsaved > f").await.ok();
    owner.halt();
    let mut waiting = Ws::open(other, &format!("/attach/{id}")).await;
    waiting.expect_status("SANDBOX_RESTORING").await;
    got_ready(other, volume, &id, owner).await;
    (id, old, waiting)
}

/// All that is saved. The records are left out: whoever has the sandbox renews its own.
fn saved_on(volume: &Volume) -> BTreeMap<PathBuf, String> {
    let mut contents = volume.contents();
    contents.retain(|path, _| !path.starts_with(volume.path().join("locks")));
    contents
}

#[tokio::test]
async fn a_volume_that_is_gone_freezes_a_sandbox_and_one_that_comes_back_lets_it_go_on() {
    let volume = Volume::default();
    let a = volume.serve_with_lease(LEASE);
    let mut ws = Ws::create_with(&a, json!({"enable_checkpoint": true})).await;
    let id = ws.sandbox_id.clone();
    let code = "
import time
last = time.monotonic()
for n in range(10**9):
    now = time.monotonic()
    if now - last > 1: print('stood still', flush=True)
    last = now
    print(n, flush=True)
    time.sleep(0.02)
";
    ws.start(json!({"language": "python", "code": code})).await;
    ws.until_output("stdout", "\n10\n").await;
    let before = volume.record(&id);

    volume.hide();
    eventually("it is no longer served", DEADLINE, || a.view_of(&id).is_some_and(|view| view["serving"] == false)).await;
    eventually("it is frozen", DEADLINE, || a.log().contains("the lease could run out: the sandbox is frozen")).await;
    // What was on its way is read; then nothing comes, for longer than the program ever pauses.
    while ws.incoming_within(Duration::from_millis(500)).await.is_some() {}
    assert!(ws.incoming_within(Duration::from_secs(2)).await.is_none());
    assert!(runs(&a, &id), "unknown is frozen, not ended");

    volume.show();
    // The client itself checks that its output goes on where it stopped. Had only its output stood still, the program would not know.
    ws.until_output("stdout", "stood still\n").await;
    assert_eq!(a.view_of(&id).unwrap(), json!({"id_sha256": sandboxer_e2e::sha256(id.as_bytes()), "epoch": 1, "serving": true}));
    let after = volume.record(&id);
    assert_eq!((&after["owner"], &after["epoch"]), (&before["owner"], &json!(1)), "{after}");
    ws.send(json!({"action": "kill_process"})).await;
    assert_eq!(ws.until_done().await.signal(), Some("SIGKILL"));
    ws.expect_alive().await;
}

#[tokio::test]
async fn an_instance_that_was_stopped_for_too_long_ends_what_another_has_taken_over() {
    let volume = Volume::default();
    let (a, b) = (volume.serve_with_lease(LEASE), volume.serve_with_lease(LEASE));
    let id = volume.saved_sandbox(&a, "saved").await;
    let mut old = Ws::attach(&a, &id).await;
    let _ = old.bash("echo unsaved > f").await.ok();
    a.halt();
    let (mut ws, running) = Ws::reach(&b, &id).await;
    assert_eq!((&running["rewound"], &running["generation"]), (&json!(true), &json!(2)), "{running}");
    let kept = saved_on(&volume);
    a.go_on();
    old.expect_error("sandbox_moved").await;
    old.expect_close(1001).await;
    eventually("it is ended", DEADLINE, || !runs(&a, &id)).await;
    eventually("it is forgotten", DEADLINE, || a.view_of(&id).is_none()).await;
    assert_eq!(saved_on(&volume), kept, "nothing was written");
    let record = volume.record(&id);
    assert_eq!((record["owner"].as_str().unwrap(), &record["epoch"]), (b.instance().as_str(), &json!(2)), "{record}");
    assert_eq!(ws.bash("cat f").await.ok(), "saved\n");
}

#[tokio::test]
async fn what_was_got_ready_for_a_silent_owner_goes_again_with_who_wanted_it() {
    let volume = Volume::default();
    let (a, b) = (volume.serve_with_lease(SLOW), serve_without_pool(&volume));
    let (id, mut old, waiting) = silent_and_awaited(&volume, &a, &b).await;
    waiting.vanish();
    // It comes back before its lease is over, and nothing has happened to it.
    a.go_on();
    eventually("nothing is left of it", DEADLINE, || b.sandbox_directories().is_empty() && b.every_process().is_empty()).await;
    assert_eq!(old.bash("cat f").await.ok(), "unsaved\n");
    assert_eq!(volume.record(&id)["epoch"], 1);
}

#[tokio::test]
async fn an_instance_that_dies_with_something_got_ready_harms_nobody() {
    let volume = Volume::default();
    let (a, mut b) = (volume.serve_with_lease(SLOW), serve_without_pool(&volume));
    let (id, mut old, _waiting) = silent_and_awaited(&volume, &a, &b).await;
    b.kill9();
    a.go_on();
    b.restart();
    eventually("nothing is left of it", DEADLINE, || b.sandbox_directories().is_empty() && b.every_process().is_empty()).await;
    assert!(volume.record(&id)["tombstone"].is_null(), "{}", volume.record(&id));
    assert_eq!(old.bash("cat f").await.ok(), "unsaved\n");
}

#[tokio::test]
async fn a_server_that_comes_back_ends_what_is_no_longer_its_own() {
    let volume = Volume::default();
    let (mut a, b) = (volume.serve_with_lease(LEASE), volume.serve_with_lease(LEASE));
    let id = volume.saved_sandbox(&a, "saved").await;
    a.kill9();
    assert!(runs(&a, &id), "a sandbox outlives its server");
    let (mut ws, running) = Ws::reach(&b, &id).await;
    assert_eq!(running["rewound"], true, "{running}");
    let kept = saved_on(&volume);
    a.restart();
    eventually("it is ended", DEADLINE, || !runs(&a, &id)).await;
    assert!(a.log().contains("is no longer this instance's"), "{}", a.log());
    assert_eq!(saved_on(&volume), kept, "nothing was written");
    assert_eq!(volume.record(&id)["owner"], b.instance().as_str());
    assert_eq!(ws.bash("cat f").await.ok(), "saved\n");
}

#[tokio::test]
async fn a_server_that_died_with_a_frozen_sandbox_finds_it_again() {
    let volume = Volume::default();
    let mut a = volume.serve_with_lease(LEASE);
    let id = volume.saved_sandbox(&a, "kept").await;
    volume.hide();
    eventually("it is frozen", DEADLINE, || a.log().contains("the lease could run out: the sandbox is frozen")).await;
    a.kill9();
    volume.show();
    a.restart();
    // Frozen by the process before, taken up by this one.
    let mut ws = Ws::attach(&a, &id).await;
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
    assert_eq!(volume.record(&id)["epoch"], 1);
}

/// Takes the volume away until the sandbox is frozen. A slow disk may have frozen it before, which does not count.
async fn hide_until_frozen(volume: &Volume, server: &Server, id: &str) {
    let frozen = || server.log().matches("the lease could run out: the sandbox is frozen").count();
    eventually("it is served", DEADLINE, || server.view_of(id).is_some_and(|view| view["serving"] == true)).await;
    let before = frozen();
    volume.hide();
    eventually("it is frozen", DEADLINE, || frozen() > before).await;
}

#[tokio::test]
async fn a_sandbox_that_can_not_be_thawed_at_first_is_thawed_in_the_end() {
    let (volume, runsc) = (Volume::default(), Runsc::default());
    let mut a = runsc.on(volume.options().arg("--lease").arg(LEASE.as_secs_f64().to_string())).start();
    let id = volume.saved_sandbox(&a, "kept").await;
    hide_until_frozen(&volume, &a, &id).await;
    runsc.fail("resume", 2);
    volume.show();
    eventually("it was tried", DEADLINE, || runsc.failures_left() == 0).await;
    let mut ws = Ws::attach(&a, &id).await;
    assert_eq!(ws.bash("cat f; echo unsaved > f").await.ok(), "kept\n");

    // The same by a server that finds it frozen: it is told to be there, is not restored beside itself, and comes back as it was.
    hide_until_frozen(&volume, &a, &id).await;
    let frozen_one = a.container_of(&id).unwrap_or_else(|| id.clone());
    a.kill9();
    runsc.fail("resume", 3);
    volume.show();
    a.restart();
    let begun = Instant::now();
    let mut ws = loop {
        assert!(begun.elapsed() < DEADLINE, "{}", a.log());
        let mut ws = Ws::open(&a, &format!("/attach/{id}")).await;
        let mut first = ws.next().await;
        if first["status"] == "SANDBOX_RUNNING" {
            break ws;
        }
        assert_eq!(first["status"], "SANDBOX_RESTORING", "{first}");
        first = ws.expect_status("SANDBOX_HANDOFF_IN_PROGRESS").await;
        assert!(first["message"].as_str().unwrap().contains("Attach again"), "{first}");
        ws.expect_close(1011).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
    };
    assert_eq!(runsc.failures_left(), 0);
    assert_eq!(ws.bash("cat f").await.ok(), "unsaved\n");
    assert_eq!(a.container_of(&id).unwrap_or_else(|| id.clone()), frozen_one);
    assert_eq!(volume.record(&id)["epoch"], 1);
}

#[tokio::test]
async fn a_sandbox_that_was_killed_while_the_volume_was_away_stays_killed_whatever_becomes_of_its_server() {
    let volume = Volume::default();
    let mut a = volume.serve();
    let id = volume.saved_sandbox(&a, "saved").await;
    let mut ws = Ws::attach(&a, &id).await;
    volume.hide();
    ws.send(json!({"action": "kill_sandbox"})).await;
    ws.expect_status("SANDBOX_KILLING").await;
    ws.expect_status("SANDBOX_KILLED").await;
    a.kill9();
    volume.show();
    assert!(volume.record_now(&id)["tombstone"].is_null(), "the volume does not know it yet");
    a.restart();
    let mut gone = Ws::open(&a, &format!("/attach/{id}")).await;
    gone.expect_status("SANDBOX_RESTORING").await;
    let status = gone.expect_status("SANDBOX_NOT_FOUND").await;
    assert!(status["message"].as_str().unwrap().contains("killed"), "{status}");
    eventually("the volume knows it", DEADLINE, || volume.record_now(&id)["tombstone"].is_object()).await;
    eventually("and so does who reads it", DEADLINE, || volume.metadata(&id)["status"] == "killed").await;
    assert!(!runs(&a, &id));
}

#[tokio::test]
async fn all_that_a_lost_machine_had_is_back_at_another_soon_after_its_lease() {
    let volume = Volume::default();
    let (mut a, b) = (volume.serve_with_lease(LEASE), volume.serve_with_lease(LEASE));
    let ids = join_all((0..count(4, 20)).map(|number| {
        let (volume, a) = (&volume, &a);
        async move { volume.saved_sandbox(a, &number.to_string()).await }
    }))
    .await;
    a.burn_down();
    let begun = Instant::now();
    let took = join_all(ids.iter().enumerate().map(|(number, id)| {
        let b = &b;
        async move {
            let (mut ws, running) = Ws::reach(b, id).await;
            let took = begun.elapsed();
            assert_eq!(running["rewound"], true, "{running}");
            assert_eq!(ws.bash("cat f").await.ok(), format!("{number}\n"));
            took
        }
    }))
    .await;
    let longest = took.iter().max().unwrap();
    println!(
        "{} sandboxes of a lost machine, lease {LEASE:?}: the first after {:?}, the last after {longest:?}",
        ids.len(),
        took.iter().min().unwrap()
    );
    assert!(!soak() || *longest <= LEASE + Duration::from_secs(5), "the last came after {longest:?}");
}

//! Snapshots of a running sandbox, going back to them, and saves that nobody asked for.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs;

use sandboxer_e2e::{Counting, DEADLINE, Volume, Ws, count, eventually};
use serde_json::json;

#[tokio::test]
async fn a_snapshot_leaves_the_program_running_and_the_sandbox_goes_back_to_it() {
    let volume = Volume::default();
    let (a, b) = (volume.serve(), volume.serve());
    let ws = Ws::create_with(&a, json!({"enable_checkpoint": true})).await;
    let id = ws.sandbox_id.clone();
    let mut counting = Counting::start(ws).await;
    counting.expect_count(1).await;
    let one = counting.snapshot(Some("after one")).await;
    counting.expect_count(2).await;
    counting.expect_count(3).await;
    let three = counting.snapshot(None).await;
    counting.expect_count(4).await;
    assert!(volume.record(&id)["latest"].is_null(), "a snapshot is no checkpoint");

    let running = counting.roll_back(json!({"action": "rollback", "snapshot_id": one})).await;
    assert_eq!(running["generation"], 1);
    counting.expect_count(2).await;
    let running = counting.roll_back(json!({"action": "rollback", "snapshot_id": three})).await;
    assert_eq!(running["generation"], 2);
    counting.expect_count(4).await;
    // A new point in history, which is safe on the volume.
    let latest = volume.record(&id)["latest"].as_str().unwrap().to_owned();
    let running = counting.roll_back(json!({"action": "rollback", "checkpoint": latest})).await;
    assert_eq!(running["generation"], 3);
    counting.expect_count(4).await;

    // It moves as any other.
    counting.ws.send(json!({"action": "checkpoint", "include_execution": true})).await;
    assert_eq!(counting.status().await["status"], "SANDBOX_CHECKPOINTING");
    assert_eq!(counting.status().await["status"], "SANDBOX_CHECKPOINTED");
    let mut ws = Ws::open(&b, &format!("/attach/{id}")).await;
    ws.may_repeat();
    ws.expect_status("SANDBOX_RESTORING").await;
    let running = ws.expect_status("SANDBOX_RUNNING").await;
    assert_eq!((&running["generation"], running.get("rewound")), (&json!(3), None), "{running}");
    counting.ws = ws;
    counting.ws.send(json!({"action": "reconnect", "execution_id": "counter", "stdout_offset": counting.out.bytes.len()})).await;
    assert_eq!(counting.ws.next().await["event"], "resumed");
    counting.expect_count(5).await;
    counting.ws.send(json!({"action": "kill_process"})).await;
    assert_eq!(counting.status().await["status"], "SANDBOX_EXECUTION_FORCE_KILLED");
    assert_eq!(counting.status().await["status"], "SANDBOX_EXECUTION_DONE");
    assert_eq!(counting.ws.bash("cat /run/sandboxer/generation").await.ok(), "3\n");
    eventually("nothing is left where it was", DEADLINE, || a.sandbox_processes().is_empty()).await;
    volume.verify();
}

#[tokio::test]
async fn a_sandbox_that_is_not_kept_on_the_volume_can_be_snapshotted_and_go_back_too() {
    let volume = Volume::default();
    let mut server = volume.serve();
    let mut ws = Ws::create(&server).await;
    let id = ws.sandbox_id.clone();
    assert_eq!(ws.bash("echo old > f; cat /run/sandboxer/generation; hostname").await.ok(), format!("0\nsandbox-{}\n", &id[..8]));
    ws.send(json!({"action": "snapshot"})).await;
    ws.expect_status("SANDBOX_SNAPSHOT_CREATING").await;
    let created = ws.expect_status("SANDBOX_SNAPSHOT_CREATED").await;
    let snapshot = created["snapshot_id"].as_str().unwrap().to_owned();
    assert!(!volume.path().join(&id).exists() && volume.path().join("snapshots").join(format!("{snapshot}.img")).is_file());
    let _ = ws.bash("echo new > f").await.ok();
    ws.send(json!({"action": "rollback", "snapshot_id": snapshot})).await;
    ws.expect_status("SANDBOX_RESTORING").await;
    let running = ws.expect_status("SANDBOX_RUNNING").await;
    assert_eq!((&running["rewound"], &running["generation"]), (&json!(true), &json!(1)), "{running}");
    ws.may_repeat();
    assert_eq!(ws.bash("cat f; cat /run/sandboxer/generation").await.ok(), "old\n1\n");
    // A restart finds the one that took its place.
    server.kill9();
    server.restart();
    let mut ws = Ws::open(&server, &format!("/attach/{id}")).await;
    ws.may_repeat();
    assert_eq!(ws.expect_status("SANDBOX_RUNNING").await["generation"], 1);
    assert_eq!(ws.bash("cat f").await.ok(), "old\n");
    ws.send(json!({"action": "kill_sandbox"})).await;
    ws.expect_status("SANDBOX_KILLING").await;
    ws.expect_status("SANDBOX_KILLED").await;
    eventually("nothing is left", DEADLINE, || {
        server.sandbox_processes().is_empty() && fs::read_dir(server.data_dir().join("sandboxes")).unwrap().next().is_none()
    })
    .await;
    assert!(volume.path().join("snapshots").join(format!("{snapshot}.img")).is_file(), "a snapshot outlives its sandbox");
}

#[tokio::test]
async fn a_rollback_that_fails_leaves_the_sandbox_unharmed() {
    let volume = Volume::default();
    let server = volume.serve();
    let mut counting = Counting::start(Ws::create_with(&server, json!({"enable_checkpoint": true})).await).await;
    counting.expect_count(1).await;
    let damaged = counting.snapshot(None).await;
    let file = volume.path().join("snapshots").join(format!("{damaged}.img"));
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, bytes).unwrap();
    for (request, code) in [
        (json!({"action": "rollback", "snapshot_id": damaged}), "restore_failed"),
        (json!({"action": "rollback", "snapshot_id": "5e1f5e0a-6f0c-4d5c-8a70-0b8f3f2b8f11"}), "restore_failed"),
        (json!({"action": "rollback", "checkpoint": "checkpoint_1.img"}), "restore_failed"),
        (json!({"action": "rollback", "checkpoint": "../checkpoint_1.img"}), "invalid_field"),
        (json!({"action": "rollback", "snapshot_id": "..", "checkpoint": "checkpoint_1.img"}), "invalid_field"),
        (json!({"action": "rollback"}), "invalid_field"),
    ] {
        counting.ws.send(request.clone()).await;
        assert_eq!(counting.status().await["status"], "SANDBOX_RESTORING", "{request}");
        let failed = counting.status().await;
        assert_eq!(failed["status"], "SANDBOX_RESTORE_ERROR", "{request}: {failed}");
        counting.ws.expect_error(code).await;
    }
    counting.expect_count(2).await;
    counting.ws.send(json!({"action": "snapshot", "name": "a\u{7}b"})).await;
    assert_eq!(counting.status().await["status"], "SANDBOX_SNAPSHOT_CREATING");
    assert_eq!(counting.status().await["status"], "SANDBOX_SNAPSHOT_ERROR");
    counting.ws.expect_error("invalid_name").await;
    counting.expect_count(3).await;
}

#[tokio::test]
async fn going_back_and_forth_leaves_nothing_behind() {
    let volume = Volume::default();
    let server = volume.serve();
    let mut counting = Counting::start(Ws::create_with(&server, json!({"enable_checkpoint": true})).await).await;
    counting.expect_count(1).await;
    let one = counting.snapshot(None).await;
    counting.expect_count(2).await;
    let two = counting.snapshot(None).await;
    let alone = server.sandbox_processes().len();
    for round in 0..count(3, 25) {
        let first = counting.roll_back(json!({"action": "rollback", "snapshot_id": one})).await;
        counting.expect_count(2).await;
        let second = counting.roll_back(json!({"action": "rollback", "snapshot_id": two})).await;
        counting.expect_count(3).await;
        assert_eq!((&first["generation"], &second["generation"]), (&json!(2 * round + 1), &json!(2 * round + 2)));
    }
    eventually("those left behind are gone", DEADLINE, || {
        server.sandbox_processes().len() <= alone && fs::read_dir(server.data_dir().join("sandboxes")).unwrap().count() == 1
    })
    .await;
    volume.verify();
}

#[tokio::test]
async fn a_sandbox_that_saves_itself_loses_little_when_everything_burns_down() {
    let volume = Volume::default();
    let (mut a, b) = (volume.serve(), volume.serve());
    let ws = Ws::create_with(&a, json!({"enable_checkpoint": true, "autosave_seconds": 1})).await;
    let id = ws.sandbox_id.clone();
    let mut counting = Counting::start(ws).await;
    counting.expect_count(1).await;
    // Two saves further on, the count is in one for sure.
    let mut seen = std::collections::BTreeSet::new();
    eventually("it saves itself", DEADLINE, || {
        seen.extend(volume.record(&id)["latest"].as_str().map(str::to_owned));
        seen.len() > 2
    })
    .await;
    a.burn_down();
    let mut ws = Ws::open(&b, &format!("/attach/{id}")).await;
    ws.may_repeat();
    ws.expect_status("SANDBOX_RESTORING").await;
    let running = ws.expect_status("SANDBOX_RUNNING").await;
    assert_eq!((&running["rewound"], &running["execution_id"]), (&json!(true), &json!("counter")), "{running}");
    assert!(running["generation"].as_u64() >= Some(1) && running["stdout_offset"].is_u64(), "{running}");
    counting.ws = ws;
    counting.ws.send(json!({"action": "reconnect", "execution_id": "counter", "stdout_offset": counting.out.bytes.len()})).await;
    assert_eq!(counting.ws.next().await["event"], "resumed");
    counting.expect_count(2).await;

    let mut ws = Ws::open(&b, "/create").await;
    ws.expect_status("SANDBOX_CREATING").await;
    ws.send(json!({"autosave_seconds": 1})).await;
    ws.expect_status("SANDBOX_CREATION_ERROR").await;
    ws.expect_error("checkpoint_not_enabled").await;
    ws.expect_close(4000).await;
}

//! Snapshots of a running sandbox, going back to them, and saves that nobody asked for.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs;

use sandboxer_e2e::{Counting, DEADLINE, Server, Volume, Ws, command, count, eventually, host, stderr_of, stdout_of};
use serde_json::{Value, json};

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
    eventually("nothing is left", DEADLINE, || server.sandbox_processes().is_empty() && server.sandbox_directories().is_empty()).await;
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

/// Directories of sandboxes, what runsc knows of containers, mounts, cgroups of this server's: how many. What waits for a restore is not
/// counted.
fn held(server: &Server) -> [usize; 4] {
    let ids = server.sandbox_directories();
    let known = |name: &std::ffi::OsStr| !server.waiting().iter().any(|id| name.to_str().unwrap().contains(id));
    let runsc = fs::read_dir(server.data_dir().join("runsc")).unwrap().filter(|entry| known(&entry.as_ref().unwrap().file_name())).count();
    let mounts = host::mounts_under(server.data_dir()).len();
    [ids.len(), runsc, mounts, host::cgroups_of_any(&ids.into_iter().collect()).len()]
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
    let (alone, held) = (server.sandbox_processes().len(), held(&server));
    for round in 0..count(3, 25) {
        let first = counting.roll_back(json!({"action": "rollback", "snapshot_id": one})).await;
        counting.expect_count(2).await;
        let second = counting.roll_back(json!({"action": "rollback", "snapshot_id": two})).await;
        counting.expect_count(3).await;
        assert_eq!((&first["generation"], &second["generation"]), (&json!(2 * round + 1), &json!(2 * round + 2)));
    }
    eventually("those left behind are gone", DEADLINE, || server.sandbox_processes().len() <= alone && self::held(&server) == held).await;
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

#[tokio::test]
async fn a_sandbox_in_which_nothing_happens_does_not_save_itself_again() {
    let volume = Volume::default();
    let server = volume.serve();
    let mut ws = Ws::create_with(&server, json!({"enable_checkpoint": true, "autosave_seconds": 1})).await;
    let id = ws.sandbox_id.clone();
    let latest = || volume.record(&id)["latest"].clone();
    let skipped = || server.metric("sandboxer_autosaves_skipped_total");
    // What was done is saved, and from then on there is nothing to save.
    let _ = ws.bash("echo one > f").await.ok();
    eventually("it rests", DEADLINE, || skipped() >= 2.0).await;
    let (saved, rested) = (latest(), skipped());
    eventually("it goes on resting", DEADLINE, || skipped() >= rested + 2.0).await;
    assert_eq!(latest(), saved, "nothing was saved meanwhile");
    assert!(server.metric("sandboxer_save_pause_seconds_count") >= 1.0);
    // A process that the execution leaves behind may do something at any time.
    let _ = ws.bash("echo two > f; sleep 1000 > /dev/null 2>&1 & echo $! > pid").await.ok();
    let mut seen = std::collections::BTreeSet::new();
    eventually("it saves itself again and again", DEADLINE, || {
        seen.extend(latest().as_str().map(str::to_owned));
        seen.len() > 2
    })
    .await;
    let _ = ws.bash("kill $(cat pid)").await.ok();
    let rested = skipped();
    eventually("it rests again", DEADLINE, || skipped() >= rested + 2.0).await;
    let mut server = server;
    server.burn_down();
    let b = volume.serve();
    let (mut ws, _) = Ws::restore(&b, &id).await;
    assert_eq!(ws.bash("cat f").await.ok(), "two\n");
}

#[tokio::test]
async fn a_sandbox_that_does_not_run_goes_back_and_its_next_client_is_told() {
    let volume = Volume::default();
    let (a, b) = (volume.serve(), volume.serve());
    let mut ws = Ws::create_kept(&a).await;
    let _ = ws.bash("echo old > f").await.ok();
    let id = ws.checkpoint().await;
    let path = format!("/v1/sandboxes/{id}");
    let names = |server: &Server| -> Vec<String> {
        let list = server.found(None, &format!("{path}/checkpoints"));
        let items = list["items"].as_array().unwrap();
        assert!(items.iter().rev().skip(1).all(|item| item["latest"] == false) && items.last().unwrap()["latest"] == true, "{list}");
        items.iter().map(|item| item["name"].as_str().unwrap().to_owned()).collect()
    };
    let old = names(&a).pop().unwrap();
    let (mut ws, _) = Ws::restore(&a, &id).await;
    let _ = ws.bash("echo new > f").await.ok();
    ws.checkpoint().await;
    let before = names(&b);
    let new = before.last().unwrap().clone();

    let back = b.made(None, &format!("{path}/rollback"), &json!({"checkpoint": old}));
    assert_eq!((&back["id"], &back["status"]), (&json!(id), &json!("saved")), "{back}");
    let after = names(&a);
    assert!(after.starts_with(&before) && after.len() == before.len() + 1, "nothing newer is deleted: {before:?} {after:?}");
    let (mut ws, running) = Ws::restore(&a, &id).await;
    assert_eq!(running["rewound"], true, "{running}");
    let generation = running["generation"].as_u64().unwrap();
    assert_eq!(ws.bash("cat f /run/sandboxer/generation").await.ok(), format!("old\n{generation}\n"));
    ws.checkpoint().await;

    // This is how one that can't be restored any longer is left behind.
    let damaged = volume.latest(&id);
    let mut bytes = fs::read(&damaged).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&damaged, bytes).unwrap();
    Ws::expect_restore_error(&b, &id).await;
    b.refuses(None, "POST", &format!("{path}/rollback"), &json!({"checkpoint": "checkpoint_1.img"}), 404, "not_found");
    let _ = b.made(None, &format!("{path}/rollback"), &json!({"checkpoint": new}));
    let (mut ws, running) = Ws::restore(&b, &id).await;
    assert!(running["rewound"] == true && running["generation"].as_u64().unwrap() > generation, "{running}");
    assert_eq!(ws.bash("cat f").await.ok(), "new\n");
}

fn sandboxer(server: &Server, arguments: &[&str]) -> String {
    let output = command().args(arguments).args(["--server", &format!("http://{}", server.address())]).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", stderr_of(&output));
    stdout_of(&output)
}

#[tokio::test]
async fn commands_save_go_back_and_copy_while_a_client_is_attached_or_none() {
    let volume = Volume::default();
    let server = volume.serve();
    let ws = Ws::create_kept(&server).await;
    let id = ws.sandbox_id.clone();
    let mut counting = Counting::start(ws).await;
    counting.expect_count(1).await;
    let one = sandboxer(&server, &["snapshot", &id, "--name", "one"]).trim().to_owned();
    counting.expect_count(2).await;
    let told: Value = serde_json::from_str(&sandboxer(&server, &["snapshots", "get", &one, "--json"])).unwrap();
    assert_eq!((&told["sandbox_id"], &told["meta"]["name"], &told["status"]), (&json!(id), &json!("one"), &json!("completed")), "{told}");
    let bytes = |value: &Value| value.as_str().unwrap().parse::<u64>().unwrap();
    assert!(bytes(&told["meta"]["raw_bytes"]) >= bytes(&told["meta"]["reused_bytes"]) && told["size_bytes"].as_u64() > Some(0), "{told}");

    // The client hears of it, as if it had asked for it itself.
    let asked = (server.address(), id.clone(), one.clone());
    let rolling = tokio::task::spawn_blocking(move || {
        let server = format!("http://{}", asked.0);
        command().args(["rollback", &asked.1, &asked.2, "--server", &server]).output().unwrap()
    });
    let running = counting.rolled_back().await;
    assert_eq!(running["generation"], 1);
    let output = rolling.await.unwrap();
    assert_eq!(stdout_of(&output), format!("{id} ready generation 1\n"), "{}", stderr_of(&output));
    counting.expect_count(2).await;
    let mut ws = counting.stop().await;
    assert_eq!(ws.bash("cat /root/count").await.ok(), "xx");
    ws.close().await;
    // Who attaches later is told which history it is.
    let mut ws = Ws::open(&server, &format!("/attach/{id}")).await;
    assert_eq!(ws.expect_status("SANDBOX_RUNNING").await["generation"], 1);
    ws.close().await;

    let copies = sandboxer(&server, &["fork", &one, "--count", "2"]);
    let copy = sandboxer(&server, &["fork", &id]);
    assert_eq!((copies.lines().count(), copy.lines().count()), (2, 1));
    let saved = sandboxer(&server, &["checkpoint", &id]);
    assert!(sandboxer(&server, &["checkpoints", &id]).contains(saved.trim()));
    assert!(sandboxer(&server, &["get", &id]).contains("status: saved"));
    let was = sandboxer(&server, &["fork", &id, "--checkpoint", saved.trim()]);
    assert!(sandboxer(&server, &["rollback", &id, &one]).starts_with(&format!("{id} saved")));
    // A name does as well as an id, and the list shows it.
    assert!(sandboxer(&server, &["snapshots", "list"]).lines().any(|line| line.contains(&one) && line.contains("  one  ")));
    assert!(sandboxer(&server, &["rollback", &id, "one"]).starts_with(&format!("{id} saved")));
    let list = sandboxer(&server, &["ls"]);
    for line in copies.lines().chain(copy.lines()).chain(was.lines()) {
        assert!(list.contains(line), "{line} is not among\n{list}");
    }
    sandboxer(&server, &["snapshots", "delete", &one]);
    assert_eq!(sandboxer(&server, &["snapshots", "list"]), "");
    let output = command().args(["fork", &one, "--server", &format!("http://{}", server.address())]).output().unwrap();
    assert!(!output.status.success() && stderr_of(&output).contains("There is no such sandbox"), "{}", stderr_of(&output));
}

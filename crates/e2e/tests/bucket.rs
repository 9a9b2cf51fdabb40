//! Servers that share nothing but a bucket.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::{Duration, Instant};

use sandboxer_e2e::{Bucket, Counting, DEADLINE, Server, Trouble, Ws, command, eventually, http, stderr_of, stdout_of};
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_is_kept_in_a_bucket_and_goes_on_at_another_server() {
    let bucket = Bucket::start().await;
    let (a, b) = (bucket.serve(), bucket.serve());
    let mut counting = Counting::start(Ws::create_kept(&a).await).await;
    counting.expect_count(1).await;
    let snapshot = counting.snapshot(None).await;
    counting.expect_count(2).await;
    let back = counting.roll_back(json!({"action": "rollback", "snapshot_id": snapshot})).await;
    assert_eq!(back["rewound"], true, "{back}");
    counting.expect_count(2).await;
    let id = counting.ws.sandbox_id.clone();
    drop(counting);

    let fork = b.made(None, &format!("/v1/snapshots/{snapshot}/restore"), &json!({}));
    let (mut copy, _) = Ws::reach(&b, fork["id"].as_str().unwrap()).await;
    copy.may_repeat();
    copy.send(json!({"action": "kill_process"})).await;
    while copy.next().await["status"] != "SANDBOX_EXECUTION_DONE" {}
    let _ = copy.bash("echo warm > /data && rm /etc/issue").await.ok();
    copy.send(json!({"action": "snapshot_filesystem", "name": "warm"})).await;
    copy.expect_status("SANDBOX_FILESYSTEM_SNAPSHOT_CREATING").await;
    copy.expect_status("SANDBOX_FILESYSTEM_SNAPSHOT_CREATED").await;
    let mut made = Ws::create_with(&a, json!({"filesystem_snapshot_name": "warm"})).await;
    assert_eq!(made.bash("cat /data; ls /etc/issue 2>&1 | wc -l").await.ok(), "warm\n1\n");

    let (ws, running) = Ws::reach(&b, &id).await;
    assert!(running.get("rewound").is_none(), "a planned handoff: {running}");
    drop(ws);
    for command in [&["ls"][..], &["verify"], &["du"], &["gc"], &["verify"]] {
        let said = bucket.store(command);
        assert!(said.status.success(), "{command:?}: {}{}", stdout_of(&said), stderr_of(&said));
    }
}

/// What happens to a sandbox is known to exactly one of the servers, which runs it.
fn runs_once(servers: [&Server; 2], id: &str) {
    let views = servers.map(|server| server.view_of(id));
    let serving = views.iter().flatten().filter(|view| view["serving"] == true).count();
    assert_eq!(serving, 1, "{id}: {views:?}");
}

async fn runs_nowhere(servers: [&Server; 2], id: &str) {
    for server in servers {
        eventually("it is forgotten", DEADLINE, || server.view_of(id).is_none()).await;
        let mut ws = Ws::open(server, &format!("/attach/{id}")).await;
        ws.expect_status("SANDBOX_RESTORING").await;
        ws.expect_status("SANDBOX_NOT_FOUND").await;
        ws.expect_close(1011).await;
    }
}

async fn kill(mut ws: Ws) -> String {
    ws.send(json!({"action": "kill_sandbox"})).await;
    ws.expect_status("SANDBOX_KILLING").await;
    ws.expect_status("SANDBOX_KILLED").await;
    ws.expect_close(1000).await;
    ws.sandbox_id.clone()
}

/// A copy of what was saved; its id.
async fn fork(server: &Server, snapshot: &str) -> String {
    let (address, path) = (server.address(), format!("/v1/snapshots/{snapshot}/restore"));
    let asked = tokio::task::spawn_blocking(move || http::json(address, "POST", &path, &[], &json!({})));
    let answer = asked.await.unwrap().unwrap();
    assert_eq!(answer.status, 201, "{}", answer.body);
    answer.json()["id"].as_str().unwrap().to_owned()
}

/// One that is saved and runs nowhere.
async fn resting(server: &Server) -> String {
    let mut ws = Ws::create_kept(server).await;
    let _ = ws.bash("head -c 3000000 /dev/urandom > f; sha256sum f > sum").await.ok();
    ws.checkpoint().await
}

async fn is_whole((mut ws, running): (Ws, Value)) -> Ws {
    assert!(running.get("rewound").is_none(), "{running}");
    assert_eq!(ws.bash("sha256sum -c sum").await.ok(), "f: OK\n");
    ws
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_bucket_fails_at_now_and_then_nobody_notices() {
    let bucket = Bucket::start().await;
    let (a, b) = (bucket.serve(), bucket.serve());
    for trouble in [Trouble::Lossy, Trouble::Slow(Duration::from_millis(200)), Trouble::Torn] {
        println!("{trouble:?}");
        bucket.trouble(trouble);
        // Saved, restored at another, and back while it runs.
        let id = resting(&a).await;
        is_whole(Ws::reach(&b, &id).await).await.close().await;
        let ws = is_whole(Ws::reach(&a, &id).await).await;
        runs_once([&a, &b], &id);
        let killed = kill(ws).await;
        runs_nowhere([&a, &b], &killed).await;

        // With a program that would show if it ran twice, was set back, or missed anything.
        let mut counting = Counting::start(Ws::create_kept(&a).await).await;
        counting.expect_count(1).await;
        let (snapshot, then) = (counting.snapshot(None).await, counting.now());
        counting.expect_count(2).await;
        let (id, now) = (counting.ws.sandbox_id.clone(), counting.now());
        counting.ws.close().await;
        let (ws, running) = Ws::reach(&b, &id).await;
        assert!(running.get("rewound").is_none(), "{running}");
        let mut counting = now.goes_on(ws).await;
        counting.expect_count(3).await;
        runs_once([&a, &b], &id);

        let copy = fork(&a, &snapshot).await;
        let mut copied = then.goes_on(Ws::reach(&a, &copy).await.0).await;
        copied.expect_count(2).await;
        runs_once([&a, &b], &copy);
        counting.roll_back(json!({"action": "rollback", "snapshot_id": snapshot})).await;
        counting.expect_count(2).await;
        runs_once([&a, &b], &id);
        counting.ws.send(json!({"action": "snapshot_filesystem", "name": "kept", "replace": true})).await;
        assert_eq!(counting.status().await["status"], "SANDBOX_FILESYSTEM_SNAPSHOT_CREATING");
        assert_eq!(counting.status().await["status"], "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED");
        let mut made = Ws::create_with(&a, json!({"filesystem_snapshot_name": "kept"})).await;
        assert_eq!(made.bash("cat count").await.ok(), "xx");
        for ended in [kill(counting.stop().await).await, kill(copied.stop().await).await] {
            runs_nowhere([&a, &b], &ended).await;
        }
        bucket.trouble(Trouble::None);
    }
    let verified = bucket.store(&["verify"]);
    assert!(verified.status.success(), "{}", stdout_of(&verified));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_asked_while_a_bucket_is_away_is_done_when_it_is_back() {
    let bucket = Bucket::start().await;
    let (a, b) = (bucket.serve(), bucket.serve());
    for trouble in [Trouble::Unavailable, Trouble::Missing, Trouble::Silent] {
        println!("{trouble:?}");
        let rests = resting(&a).await;
        let mut counting = Counting::start(Ws::create_kept(&a).await).await;
        counting.expect_count(1).await;
        let (snapshot, then) = (counting.snapshot(None).await, counting.now());
        let mut doomed = Ws::create_kept(&a).await;
        doomed.expect_alive().await;

        bucket.trouble(trouble);
        let ends = async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            bucket.trouble(Trouble::None);
        };
        let counts = async {
            counting.expect_count(2).await;
            let newer = counting.snapshot(None).await;
            counting.expect_count(3).await;
            newer
        };
        let (made, restored, newer, copy, killed, ()) =
            tokio::join!(Ws::create_kept(&a), Ws::reach(&b, &rests), counts, fork(&b, &snapshot), kill(doomed), ends);
        let mut made = made;
        made.expect_alive().await;
        let restored = is_whole(restored).await;
        counting.expect_count(4).await;
        let mut copied = then.goes_on(Ws::reach(&b, &copy).await.0).await;
        copied.expect_count(2).await;
        for id in [&made.sandbox_id, &restored.sandbox_id, &counting.ws.sandbox_id, &copy] {
            runs_once([&a, &b], id);
        }
        runs_nowhere([&a, &b], &killed).await;
        let second = fork(&b, &newer).await;
        assert_ne!(second, copy);
        // What was made meanwhile is there for good.
        let id = made.checkpoint().await;
        let (mut made, running) = Ws::reach(&b, &id).await;
        assert!(running.get("rewound").is_none(), "{running}");
        made.expect_alive().await;
        for ended in [made, restored, counting.stop().await, copied.stop().await] {
            kill(ended).await;
        }
        let (deleted, said) = b.api(None, "DELETE", &format!("/v1/sandboxes/{second}"), &Value::Null);
        assert_eq!(deleted, 204, "{said}");
    }
    let verified = bucket.store(&["verify"]);
    assert!(verified.status.success(), "{}", stdout_of(&verified));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_that_is_not_there_ends_no_sandbox() {
    const LEASE: Duration = Duration::from_secs(6);
    let bucket = Bucket::start().await;
    let a = bucket.options().arg("--lease").arg(LEASE.as_secs().to_string()).start();
    let mut counting = Counting::start(Ws::create_kept(&a).await).await;
    let id = counting.ws.sandbox_id.clone();
    let mut counted = 0;

    // Every other answer is wrong, for as long as takes many renewals.
    bucket.trouble(Trouble::HalfMissing);
    let until = Instant::now() + LEASE * 3;
    while Instant::now() < until {
        counted += 1;
        counting.expect_count(counted).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    // Nothing is there, for longer than a lease lasts: it is frozen meanwhile, and nothing else.
    bucket.trouble(Trouble::Missing);
    eventually("it is frozen", DEADLINE, || a.log().contains("the lease could run out: the sandbox is frozen")).await;
    tokio::time::sleep(LEASE * 3).await;
    bucket.trouble(Trouble::None);
    counting.expect_count(counted + 1).await;
    let view = a.view_of(&id).unwrap();
    assert_eq!((&view["epoch"], &view["serving"]), (&json!(1), &json!(true)), "{view}");

    // The same if the server is started anew on it.
    let now = counting.now();
    drop(counting);
    let mut a = a;
    a.kill9();
    a.restart();
    bucket.trouble(Trouble::Missing);
    tokio::time::sleep(LEASE).await;
    bucket.trouble(Trouble::None);
    let mut counting = now.goes_on(Ws::attach(&a, &id).await).await;
    counting.expect_count(counted + 2).await;
    assert!(!a.log().contains("its record is gone"), "{}", a.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_that_says_nothing_for_a_while_is_asked_again() {
    let bucket = Bucket::start().await;
    let (a, b) = (bucket.serve(), bucket.serve());
    let mut ws = Ws::create_kept(&a).await;
    let _ = ws.bash("head -c 3000000 /dev/urandom > f; sha256sum f > sum").await.ok();
    bucket.trouble(Trouble::Silent);
    let ends = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        bucket.trouble(Trouble::None);
    };
    // What is asked in these seconds is never answered: a record is asked for again after 3 s, data after 30.
    let (id, ()) = tokio::join!(ws.checkpoint(), ends);
    let (mut ws, running) = Ws::reach(&b, &id).await;
    assert!(running.get("rewound").is_none(), "{running}");
    assert_eq!(ws.bash("sha256sum -c sum").await.ok(), "f: OK\n");
    let verified = bucket.store(&["verify"]);
    assert!(verified.status.success(), "{}", stdout_of(&verified));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_without_conditions_is_not_used() {
    let bucket = Bucket::start().await;
    bucket.trouble(Trouble::Unconditional);
    let home = tempfile::tempdir().unwrap();
    let start = |volume: &str| {
        let mut command = command();
        command.args(["serve", "--listen", "127.0.0.1:0", "--checkpoint-path", volume, "--data-dir"]).arg(home.path());
        command.envs(bucket.environment()).output().unwrap()
    };
    let refused = start(&bucket.url());
    assert!(!refused.status.success() && stderr_of(&refused).contains("ignores the conditions of a write"), "{}", stderr_of(&refused));
    for bad in ["http://bucket/x", "s3://", "s3://bucket/../x"] {
        let refused = start(bad);
        assert_eq!(refused.status.code(), Some(64));
        assert!(stderr_of(&refused).contains("s3://BUCKET/PREFIX"), "{}", stderr_of(&refused));
    }
}

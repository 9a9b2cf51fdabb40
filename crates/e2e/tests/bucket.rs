//! Servers that share nothing but a bucket.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::Duration;

use sandboxer_e2e::{Bucket, Counting, Trouble, Ws, command, stderr_of, stdout_of};
use serde_json::json;

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_bucket_fails_at_for_a_while_nobody_notices() {
    let bucket = Bucket::start().await;
    let (a, b) = (bucket.serve(), bucket.serve());
    for trouble in [Trouble::Lossy, Trouble::Slow(Duration::from_millis(200)), Trouble::Torn, Trouble::Unavailable] {
        let mut ws = Ws::create_kept(&a).await;
        let _ = ws.bash("head -c 3000000 /dev/urandom > f; sha256sum f > sum").await.ok();
        bucket.trouble(trouble);
        let ends = async {
            if trouble == Trouble::Unavailable {
                tokio::time::sleep(Duration::from_secs(5)).await;
                bucket.trouble(Trouble::None);
            }
        };
        let (id, ()) = tokio::join!(ws.checkpoint(), ends);
        let (mut ws, running) = Ws::reach(&b, &id).await;
        assert!(running.get("rewound").is_none(), "{trouble:?}: {running}");
        assert_eq!(ws.bash("sha256sum -c sum").await.ok(), "f: OK\n", "{trouble:?}");
        ws.close().await;
        // And back, while it runs.
        let (mut ws, running) = Ws::reach(&a, &id).await;
        assert!(running.get("rewound").is_none(), "{trouble:?}: {running}");
        assert_eq!(ws.bash("sha256sum -c sum").await.ok(), "f: OK\n", "{trouble:?}");
        bucket.trouble(Trouble::None);
        ws.send(json!({"action": "kill_sandbox"})).await;
        ws.expect_status("SANDBOX_KILLING").await;
        ws.expect_status("SANDBOX_KILLED").await;
    }
    let verified = bucket.store(&["verify"]);
    assert!(verified.status.success(), "{}", stdout_of(&verified));
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

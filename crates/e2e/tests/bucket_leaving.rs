//! A server that is told to stop saves what it has to a bucket with little memory of its own, and says what did not fit.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::{Duration, Instant};

use sandboxer_e2e::{Bucket, Incoming, Store, Trouble, Ws, count, host, soak};
use serde_json::json;

const MIB: u64 = 1 << 20;
/// What ending may take beyond the grace period; where only liveness is meant, much longer.
const MARGIN: Duration = Duration::from_secs(5);
const MARGIN_BESIDE_OTHER_TESTS: Duration = Duration::from_secs(60);

/// None once it has ended.
fn peak_of(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kib| kib << 10)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_are_saved_at_once_with_little_memory_and_what_does_not_fit_is_told_and_kept() {
    let (sandboxes, mib) = (count(3, 20), count(30, 100));
    let bucket = Bucket::start_on(Store::Seaweed).await;
    let grace = Duration::from_secs(if soak() { 10 } else { 2 });
    let mut a = bucket.options().arg("--stop-grace").arg(grace.as_secs().to_string()).arg("--idle-timeout").arg("0").start();
    let mut clients = Vec::new();
    for _ in 0..sandboxes {
        let mut ws = Ws::create_with(&a, json!({"enable_checkpoint": true})).await;
        let _ = ws.bash(&format!("head -c {mib}M /dev/urandom > f; sha256sum f > sum")).await.ok();
        clients.push(ws);
    }
    let before = host::rss(a.pid());
    if !soak() {
        // So that not all of it fits however fast the machine is.
        bucket.trouble(Trouble::Slow(Duration::from_millis(400)));
    }
    let begun = Instant::now();
    a.term();
    let (mut peak, mut saved) = (before, 0);
    let watched = async {
        loop {
            peak = peak.max(peak_of(a.pid()).unwrap_or_default());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let told = async {
        let mut ids = Vec::new();
        for mut ws in clients {
            while let Incoming::Message(message) = ws.incoming().await {
                saved += usize::from(message["status"] == "SANDBOX_CHECKPOINTED");
            }
            ids.push(ws.sandbox_id.clone());
        }
        ids
    };
    let ids = tokio::select! {
        ids = told => ids,
        () = watched => unreachable!(),
    };
    assert!(a.exited().await.success());
    let took = begun.elapsed();
    println!(
        "{sandboxes} sandboxes of {mib} MiB: {saved} saved in {:.1} s, the server had {} MiB before and {} MiB at most",
        took.as_secs_f64(),
        before / MIB,
        peak / MIB
    );
    assert!(peak <= 256 * MIB, "{} MiB", peak / MIB);
    let margin = if soak() { MARGIN } else { MARGIN_BESIDE_OTHER_TESTS };
    assert!(took <= grace + margin, "the grace period is kept: {took:?}");
    let log = a.log();
    assert_eq!(saved < sandboxes, log.contains("not everything could be saved in time"), "{log}");
    assert!(soak() || saved < sandboxes, "all of it fitted");

    bucket.trouble(Trouble::None);
    a.restart();
    for id in ids {
        let (mut ws, running) = Ws::reach(&a, &id).await;
        assert!(running.get("rewound").is_none(), "{running}");
        assert_eq!(ws.bash("sha256sum -c sum").await.ok(), "f: OK\n");
    }
}

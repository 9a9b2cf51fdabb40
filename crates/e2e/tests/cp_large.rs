//! `sandboxer cp` of what is large, changes meanwhile, or can't be read.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    fs,
    io::Write as _,
    path::Path,
    process::{Child, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use sandboxer_e2e::{Options, Server, Ws, command, count, shared, soak, stderr_of};
use serde_json::json;

const MIB: usize = 1024 * 1024;
/// What the command and its libraries need by themselves, and some MiB for what passes through.
const MOST_KIB: u64 = 64 * 1024;

fn cp(server: &Server, from: &str, to: &str) -> Child {
    let mut command = command();
    command.args(["cp", "--server", &format!("http://{}", server.address()), from, to]);
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Copies; returns how long it took and the most memory that the command had, in KiB.
fn measured(server: &Server, from: &str, to: &str) -> (Duration, u64) {
    let (began, mut most) = (Instant::now(), 0);
    let mut child = cp(server, from, to);
    let status = format!("/proc/{}/status", child.id());
    while child.try_wait().unwrap().is_none() {
        let text = fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")).and_then(|line| line.split_whitespace().next()?.parse().ok());
        most = most.max(line.unwrap_or(0));
        std::thread::sleep(Duration::from_millis(5));
    }
    let took = began.elapsed();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{from} {to}: {}", stderr_of(&output));
    (took, most)
}

#[expect(clippy::cast_precision_loss, reason = "it is printed")]
fn rate(bytes: usize, took: Duration) -> f64 {
    bytes as f64 / 1e6 / took.as_secs_f64()
}

#[tokio::test]
async fn a_large_file_is_copied_both_ways_in_flat_memory() {
    let (size, disk) = (count(64, 1024) * MIB, count(512, 2500));
    let server = Options::default().start();
    let mut ws = Ws::create_with(&server, json!({"limits": {"memory_mb": disk * 2, "disk_mb": disk, "cpus": 2}})).await;
    let there = format!("{}:/root/large", ws.sandbox_id);
    let began = Instant::now();
    let _ = ws.run(json!({"language": "bash", "code": format!("head -c {} /dev/zero", 64 * MIB), "encoding": "base64"})).await;
    let fifo = rate(64 * MIB, began.elapsed());
    let place = tempfile::tempdir().unwrap();
    let (from, back) = (place.path().join("from"), place.path().join("back"));
    let piece: Vec<u8> = (0..MIB).map(|n| (n % 251) as u8).collect();
    let mut file = fs::File::create(&from).unwrap();
    for _ in 0..size / MIB {
        file.write_all(&piece).unwrap();
    }
    drop(file);
    let (up, held_up) = measured(&server, from.to_str().unwrap(), &there);
    let (down, held_down) = measured(&server, &there, back.to_str().unwrap());
    let (up, down) = (rate(size, up), rate(size, down));
    println!("cp of {} MiB: in {up:.0} MB/s, out {down:.0} MB/s, output {fifo:.0} MB/s; memory {held_up} and {held_down} KiB", size / MIB);
    assert!(held_up < MOST_KIB && held_down < MOST_KIB, "cp held {held_up} and {held_down} KiB");
    assert!(!soak() || [up, down].into_iter().all(|rate| rate > 150.0 || rate > fifo * 0.6), "{up:.0} and {down:.0} MB/s");
    assert!(same(&from, &back));
}

fn same(one: &Path, other: &Path) -> bool {
    std::process::Command::new("cmp").arg("-s").arg(one).arg(other).status().unwrap().success()
}

#[tokio::test]
async fn what_changes_while_it_is_copied_or_can_not_be_read_is_told() {
    let server = shared();
    let mut ws = Ws::create(server).await;
    let there = |path: &str| format!("{}:{path}", ws.sandbox_id);
    // Not on the disk: it may pause for as long as the copy takes.
    let place = tempfile::tempdir_in("/dev/shm").unwrap();
    let local = place.path().join("growing");
    fs::write(&local, vec![7; 16 * MIB]).unwrap();
    let done = AtomicBool::new(false);
    let output = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut file = fs::File::options().append(true).open(&local).unwrap();
            while !done.load(Ordering::Relaxed) {
                file.write_all(b"more").unwrap();
            }
        });
        let output = cp(server, local.to_str().unwrap(), &there("/root/copy")).wait_with_output().unwrap();
        done.store(true, Ordering::Relaxed);
        output
    });
    assert!(!output.status.success() && stderr_of(&output).contains("chang"), "{}", stderr_of(&output));

    // The same inside.
    let (growing, unread) = (there("/root/growing"), there("/root/x"));
    ws.start(json!({"language": "bash", "code": "head -c 16777216 /dev/zero >growing; echo ready; while echo more >>growing; do :; done"}))
        .await;
    ws.until_output("stdout", "ready\n").await;
    let back = place.path().join("back");
    let output = cp(server, &growing, back.to_str().unwrap()).wait_with_output().unwrap();
    assert!(!output.status.success() && !back.exists(), "{}", stderr_of(&output));
    // Nobody can read this, root included.
    let output = cp(server, "/proc/self/mem", &unread).wait_with_output().unwrap();
    assert!(!output.status.success() && stderr_of(&output).contains("/proc/self/mem"), "{}", stderr_of(&output));
    ws.send(json!({"action": "kill_process"})).await;
    let _ = ws.until_done().await;
    // Of what was copied in it was said that it may be a mixture; what could not be read at all has no name.
    assert_eq!(ws.bash("ls -A | grep -v '^[.]'").await.ok(), "copy\ngrowing\n");
}

//! What becomes of a file that is on its way when something else happens: a cut connection, a change, a save, a snapshot, a restart; and how much of it
//! the server holds meanwhile.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    io::{Read as _, Write as _},
    time::{Duration, Instant},
};

use sandboxer_e2e::{DEADLINE, Files, Server, Volume, Ws, count, eventually, http, shared, skip, soak};
use serde_json::{Value, json};

const MIB: usize = 1 << 20;
/// Nothing of an upload is left beside the file.
const LEFT: &str = "ls -A /root | grep -c sandboxer; cat /root/f | md5sum | cut -c1-8";

/// More than fits between a sandbox and a client that does not read.
const LARGE: usize = 24 * MIB;

async fn with_old_file(ws: &mut Ws) {
    let seen = ws.bash("echo old > /root/f; md5sum < /root/f | cut -c1-8").await;
    assert_eq!(seen.ok().trim().len(), 8);
}

/// The most that the server has ever had in memory, in KiB.
fn peak_kib(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

fn forget_peak(server: &Server) {
    std::fs::write(format!("/proc/{}/clear_refs", server.pid()), "5").unwrap();
}

#[tokio::test]
async fn a_cut_upload_leaves_the_old_file_and_nothing_beside_it() {
    let server = shared();
    let mut ws = Ws::create(server).await;
    with_old_file(&mut ws).await;
    let files = Files::of(server, &ws.sandbox_id.clone());
    let mut stream = files.sending("", "/root/f", "", 4 * MIB);
    stream.write_all(&vec![1; 2 * MIB]).unwrap();
    let seen = ws.bash("until [ $(cat /root/.sandboxer-* 2>/dev/null | wc -c) -gt 1000000 ]; do sleep 0.02; done; cat /root/f").await;
    assert_eq!(seen.ok(), "old\n", "until it is whole the old one is there");
    drop(stream);
    let gone = ws.bash("until [ -z \"$(ls -A /root | grep sandboxer)\" ]; do sleep 0.02; done; cat /root/f").await;
    assert_eq!(gone.ok(), "old\n");
    // An archive: of the file that was on its way nothing is left, and what was there is.
    let mut stream = files.sending("/archive", "/root", "", 4 * MIB);
    let archive = files.call("GET", "/archive", "/root", "", b"").bytes;
    stream.write_all(&archive[..archive.len() / 2]).unwrap();
    drop(stream);
    let gone = ws.bash("until [ -z \"$(ls -A /root | grep sandboxer)\" ]; do sleep 0.02; done; cat /root/f").await;
    assert_eq!(gone.ok(), "old\n");
    ws.expect_alive().await;
}

#[tokio::test]
async fn a_file_that_changes_while_it_is_read_breaks_off_unless_that_is_wanted() {
    let server = shared();
    let mut ws = Ws::create(server).await;
    let files = Files::of(server, &ws.sandbox_id.clone());
    for (live, below) in [("", ""), ("&live=true", ""), ("", "/archive")] {
        let _ = ws.bash(&format!("mkdir -p d; yes | head -c {LARGE} > d/large")).await.ok();
        let path = if below.is_empty() { "/root/d/large" } else { "/root/d" };
        let mut stream = files.reading(below, path, live);
        let _ = ws.bash("echo more >> d/large").await.ok();
        let answer = http::answer(&mut stream, "GET");
        match (live, answer) {
            ("", answer) => assert!(answer.is_err(), "it can't be whole"),
            (_, answer) => assert_eq!(answer.unwrap().bytes.len(), LARGE),
        }
    }
    // The next one is whole.
    assert_eq!(files.get("/root/d/large").len(), LARGE + 5);
    ws.expect_alive().await;
}

#[tokio::test]
async fn a_save_that_leaves_the_sandbox_running_waits_for_no_transfer_and_harms_none() {
    let volume = Volume::default();
    let server = volume.serve();
    let mut ws = Ws::create_kept(&server).await;
    with_old_file(&mut ws).await;
    let files = Files::of(&server, &ws.sandbox_id.clone());
    let sum = ws.bash(&format!("seq 1 9999999 | head -c {LARGE} > large; sha256sum < large | cut -d' ' -f1")).await;
    let sum = sum.ok().trim().to_owned();
    let mut reading = files.reading("", "/root/large", "");
    let content: Vec<u8> = (0..8 * MIB).map(|n| (n / 3) as u8).collect();
    let mut sending = files.sending("", "/root/f", "", content.len());
    sending.write_all(&content[..3 * MIB]).unwrap();
    let snapshot = server.made(None, &format!("/v1/sandboxes/{}/snapshot", ws.sandbox_id), &json!({}));
    sending.write_all(&content[3 * MIB..]).unwrap();
    assert_eq!(http::answer(&mut sending, "PUT").unwrap().status, 200);
    let read = http::answer(&mut reading, "GET").unwrap();
    assert_eq!(sandboxer_e2e::sha256(&read.bytes), sum);
    assert!(files.get("/root/f") == content);
    // In the copy there is no one who sends: the old file is there, and nothing beside it.
    let copy = server.made(None, &format!("/v1/snapshots/{}/restore", snapshot["id"].as_str().unwrap()), &json!({}));
    let id = copy["id"].as_str().unwrap();
    let mut other = Ws::attach(&server, id).await;
    assert_eq!(other.bash(LEFT).await.out(), format!("0\n{}\n", old_sum(&mut ws).await));
    assert_eq!(Files::of(&server, id).get("/root/f"), b"old\n");
    ws.expect_alive().await;
}

async fn old_sum(ws: &mut Ws) -> String {
    ws.bash("echo old | md5sum | cut -c1-8").await.ok().trim().to_owned()
}

#[tokio::test]
async fn a_save_that_ends_the_sandbox_here_cuts_transfers_off_and_the_old_file_is_restored() {
    let volume = Volume::default();
    let server = volume.serve();
    let mut ws = Ws::create_kept(&server).await;
    with_old_file(&mut ws).await;
    let id = ws.sandbox_id.clone();
    let files = Files::of(&server, &id);
    let _ = ws.bash(&format!("seq 1 9999999 | head -c {LARGE} > large")).await.ok();
    let mut reading = files.reading("", "/root/large", "");
    let mut sending = files.sending("", "/root/f", "", 8 * MIB);
    sending.write_all(&vec![1; 3 * MIB]).unwrap();
    ws.checkpoint().await;
    let answer = http::answer(&mut sending, "PUT").unwrap();
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (503, &json!("not_ready")), "{}", answer.body);
    assert!(http::answer(&mut reading, "GET").is_err(), "what was not read can't be whole");
    let _ = files.refuses("GET", "", "/root/f", "", 409, "not_ready");
    let (mut ws, _) = Ws::restore(&server, &id).await;
    let old = old_sum(&mut ws).await;
    assert_eq!(ws.bash(LEFT).await.out(), format!("0\n{old}\n"));
    assert_eq!(files.get("/root/f"), b"old\n");
    assert_eq!(files.put("/root/f", "", b"new")["size"], json!(3));
}

#[tokio::test]
async fn a_restarted_server_finds_nothing_of_what_was_on_its_way() {
    let mut server = sandboxer_e2e::Options::default().start();
    let mut ws = Ws::create(&server).await;
    with_old_file(&mut ws).await;
    let id = ws.sandbox_id.clone();
    let files = Files::of(&server, &id);
    let mut sending = files.sending("", "/root/f", "", 8 * MIB);
    sending.write_all(&vec![1; 3 * MIB]).unwrap();
    let _ = ws.bash("until ls /root/.sandboxer-* >/dev/null 2>&1; do sleep 0.02; done").await.ok();
    server.kill9();
    server.restart();
    let mut ws = Ws::attach(&server, &id).await;
    let old = old_sum(&mut ws).await;
    assert_eq!(ws.bash(LEFT).await.out(), format!("0\n{old}\n"));
    assert_eq!(Files::of(&server, &id).get("/root/f"), b"old\n");
}

#[tokio::test]
async fn a_filesystem_snapshot_and_an_upload_keep_out_of_each_others_way() {
    let volume = Volume::default();
    let server = volume.filesystems().start();
    let mut ws = Ws::create(&server).await;
    with_old_file(&mut ws).await;
    let files = Files::of(&server, &ws.sandbox_id.clone());
    let mut sending = files.sending("", "/root/f", "", 2 * MIB);
    sending.write_all(&vec![1; MIB]).unwrap();
    let _ = ws.bash("until ls /root/.sandboxer-* >/dev/null 2>&1; do sleep 0.02; done").await.ok();
    let message = ws.expect_no_filesystem_snapshot(json!({"action": "snapshot_filesystem", "name": "n"}), "not_now").await;
    assert!(message.contains("being written"), "{message}");
    sending.write_all(&vec![2; MIB]).unwrap();
    assert_eq!(http::answer(&mut sending, "PUT").unwrap().status, 200);
    ws.snapshot_filesystem("n").await;
    let mut from = Ws::create_from(&server, "n").await;
    assert_eq!(from.bash("stat -c %s f; ls -A | grep -c sandboxer").await.out(), "2097152\n0\n");
    // A file of one made from a snapshot is reached like any other.
    assert_eq!(Files::of(&server, &from.sandbox_id).get("/root/f").len(), 2 * MIB);
}

#[tokio::test]
async fn no_more_than_so_many_at_once_and_the_next_when_one_has_gone() {
    let server = shared();
    let mut ws = Ws::create(server).await;
    let files = Files::of(server, &ws.sandbox_id.clone());
    let _ = ws.bash(&format!("head -c {LARGE} /dev/zero > large")).await.ok();
    let mut open: Vec<_> = (0..16).map(|_| files.reading("", "/root/large", "")).collect();
    let _ = files.refuses("GET", "/stat", "/root", "", 429, "rate_limited");
    // A program, its output and its input are not held up by any of them.
    assert_eq!(ws.bash("echo still here").await.ok(), "still here\n");
    drop(open.pop());
    eventually("there is room for another one", DEADLINE, || files.call("GET", "/stat", "/root", "", b"").status == 200).await;
    for stream in &mut open {
        let _ = skip(stream, 1000).unwrap();
    }
}

/// What the pipe of a sandbox carries: output of a program that does nothing else.
async fn fifo_rate(ws: &mut Ws, bytes: usize) -> f64 {
    let began = Instant::now();
    let run = json!({"language": "bash", "code": format!("head -c {bytes} /dev/zero"), "encoding": "base64"});
    let _ = ws.run(run).await;
    rate(bytes, began.elapsed())
}

#[expect(clippy::cast_precision_loss, reason = "it is printed")]
fn rate(bytes: usize, took: Duration) -> f64 {
    bytes as f64 / 1e6 / took.as_secs_f64()
}

#[tokio::test]
async fn large_files_pass_both_ways_and_the_server_holds_little_of_them() {
    let size = count(64, 1024) * MIB;
    let server = sandboxer_e2e::Options::default().start();
    let disk = count(512, 2500);
    let mut ws = Ws::create_with(&server, json!({"limits": {"memory_mb": disk * 2, "disk_mb": disk, "cpus": 2}})).await;
    let files = Files::of(&server, &ws.sandbox_id.clone());
    let fifo = fifo_rate(&mut ws, 64 * MIB).await;
    // No page of zeros in it, and the server and the client make it as they go.
    let piece: Vec<u8> = (0..MIB).map(|n| (n % 251) as u8).collect();
    forget_peak(&server);
    let before = peak_kib(&server);
    let began = Instant::now();
    let mut sending = files.sending("", "/root/large", "", size);
    for _ in 0..size / MIB {
        sending.write_all(&piece).unwrap();
    }
    let answer = http::answer(&mut sending, "PUT").unwrap();
    let (up, grown_up) = (rate(size, began.elapsed()), peak_kib(&server) - before);
    assert_eq!((answer.status, &answer.json()["size"]), (200, &json!(size)));
    let began = Instant::now();
    let mut reading = files.reading("", "/root/large", "");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        reading.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    let mut buffer = vec![0; MIB];
    for _ in 0..size / MIB {
        reading.read_exact(&mut buffer).unwrap();
        assert!(buffer == piece);
    }
    let (down, grown) = (rate(size, began.elapsed()), peak_kib(&server) - before);
    println!("{} MiB: up {up:.0} MB/s, down {down:.0} MB/s, output {fifo:.0} MB/s; memory {grown_up} KiB up, {grown} KiB both", size / MIB);
    assert!(grown < 32 * 1024, "the server grew by {grown} KiB");
    assert!(!soak() || down > fifo * 0.6 || down > 150.0, "down {down:.0} MB/s");
    let _: Value = files.object("/stat", "/root/large", "");
    ws.expect_alive().await;
}

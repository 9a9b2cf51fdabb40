//! Attacks with one API key harm no other key: stalled bodies, large messages, compressed
//! archives and connections are bounded, and another key's sandboxes go on as before.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    fs,
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use sandboxer_e2e::{DEADLINE, Options, Server, Volume, Ws, eventually, http};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
    time::timeout,
};

const ALICE: (&str, &str) = ("X-API-Key", "key-of-alice-0123456789");
const BOB: (&str, &str) = ("X-API-Key", "key-of-bob-0123456789");
/// The memory that the server may need during all attacks of one key.
const MAX_RSS_KIB: u64 = 256 * 1024;
/// How much slower another key's sandbox may answer then.
const SLOWER: u32 = 3;
/// A sandbox that is frozen for want of its lease takes longer than this.
const FROZEN: Duration = Duration::from_secs(3);

fn options(volume: &Volume) -> Options {
    let options = volume.filesystems().env("CHECKPOINT_AND_RESTORE_PATH", volume.path().to_str().unwrap());
    options.env("SANDBOXER_API_KEYS", format!("alice:{},bob:{}", ALICE.1, BOB.1)).arg("--lease").arg("6")
}

async fn creates(server: &Server, key: (&str, &str)) -> Ws {
    let mut ws = Ws::connect(server.address(), "/create", &[key]).await.unwrap();
    ws.send(json!({"enable_checkpoint": true})).await;
    ws.expect_created().await;
    ws
}

/// Sends the head of a request, and all of these bytes as its body's beginning.
async fn begins(server: std::net::SocketAddr, method: &str, path: &str, headers: &str, body: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(server).await.unwrap();
    let head = format!("{method} {path} HTTP/1.1\r\nHost: {server}\r\n{}: {}\r\n{headers}\r\n", ALICE.0, ALICE.1);
    stream.write_all(head.as_bytes()).await.unwrap();
    // A server that takes no more of it makes this wait, which is for its caller to bound.
    let _ = stream.write_all(body).await;
    stream
}

fn rss_kib(server: &Server) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// A layer that is small only as long as it is compressed.
fn bomb(dir: &std::path::Path) -> Vec<u8> {
    let file = fs::File::create(dir.join("zeros")).unwrap();
    file.set_len(600 << 20).unwrap();
    let mut tar = Command::new("tar").arg("-cf").arg("-").arg("-C").arg(dir).arg("zeros").stdout(Stdio::piped()).spawn().unwrap();
    let packed = Command::new("gzip").arg("-1").stdin(tar.stdout.take().unwrap()).output().unwrap();
    assert!(tar.wait().unwrap().success() && packed.status.success());
    packed.stdout
}

/// How long each echo took.
async fn echo(ws: &mut Ws, times: usize) -> Vec<Duration> {
    let mut took = Vec::new();
    for _ in 0..times {
        let begun = Instant::now();
        assert_eq!(ws.bash("echo bob").await.ok(), "bob\n");
        took.push(begun.elapsed());
    }
    took
}

fn median(mut took: Vec<Duration>) -> Duration {
    took.sort();
    took[took.len() / 2]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_connections_of_one_key_leave_another_alone() {
    let (volume, dir) = (Volume::default(), tempfile::tempdir().unwrap());
    let bomb = Arc::new(bomb(dir.path()));
    let server = options(&volume).start();
    let address = server.address();
    let mut bob = creates(&server, BOB).await;
    let mut idle = echo(&mut bob, 30).await;
    let upgrade =
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    // The header of a frame of 8 MiB, with a mask of zeros, and nearly all of it.
    let mut frame = vec![0x81, 0xff];
    frame.extend((8_u64 << 20).to_be_bytes());
    frame.extend([0; 4]);
    frame.resize((8 << 20) - 100, b'x');
    let frame = Arc::new(frame);
    let mut hostile = JoinSet::new();
    for number in 0..64 {
        let (bomb, frame) = (Arc::clone(&bomb), Arc::clone(&frame));
        hostile.spawn(async move {
            loop {
                let layer = format!("/v1/filesystem-snapshots/n{number}/layer");
                let mut stream = match number % 4 {
                    0 => begins(address, "PUT", &layer, "Content-Length: 1000000\r\n", b"\x1f").await,
                    1 => begins(address, "GET", "/create", upgrade, &frame).await,
                    2 => begins(address, "PUT", &layer, &format!("Content-Length: {}\r\n", bomb.len()), &bomb).await,
                    _ => begins(address, "POST", "/v1/sandboxes", "Content-Length: 1000000\r\n", &vec![b' '; 900_000]).await,
                };
                let mut answer = [0; 4096];
                // Until the server has had enough of it; then once more.
                while stream.read(&mut answer).await.is_ok_and(|read| read > 0) {}
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
    }
    let (begun, mut attacked, mut largest) = (Instant::now(), Vec::new(), 0);
    while begun.elapsed() < Duration::from_secs(15) {
        attacked.extend(echo(&mut bob, 9).await);
        largest = largest.max(rss_kib(&server));
        assert_eq!(server.found(Some(BOB), "/v1/filesystem-snapshots")["items"], json!([]));
        assert_eq!(server.get("/readyz").status, 200);
    }
    assert_eq!(hostile.len(), 64, "all of them are at it");
    hostile.shutdown().await;
    // The machine may have been busier with other things at one end than at the other.
    idle.extend(echo(&mut bob, 30).await);
    let (worst, idle, attacked) = (attacked.iter().max().copied().unwrap(), median(idle), median(attacked));
    println!("idle {idle:?}, under attack {attacked:?}, at worst {worst:?}, RSS {} MiB", largest / 1024);
    assert!(attacked <= idle * SLOWER, "an echo took {idle:?} without and {attacked:?} under attack");
    assert!(worst <= FROZEN, "an echo took {worst:?}");
    assert!(largest <= MAX_RSS_KIB, "the server had {largest} KiB");
    // A refused archive is removed.
    let left = || fs::read_dir(server.data_dir().join("packing")).unwrap().count();
    eventually("nothing of it is left", DEADLINE, || left() == 0).await;
}

#[tokio::test]
async fn clients_without_a_key_never_keep_others_out() {
    let volume = Volume::default();
    let server = options(&volume).start();
    let half = format!("GET /healthz HTTP/1.1\r\nHost: {}\r\n", server.address());
    let mut idle = Vec::new();
    for _ in 0..1100 {
        let mut stream = TcpStream::connect(server.address()).await.unwrap();
        stream.write_all(half.as_bytes()).await.unwrap();
        idle.push(stream);
    }
    // The oldest make room, whatever they were about to ask.
    let mut answer = Vec::new();
    let ended = timeout(Duration::from_secs(5), idle[0].read_to_end(&mut answer)).await;
    assert!(ended.is_ok(), "it is held for ever");
    assert_eq!(http::try_get(server.address(), "/v1/sandboxes", &[BOB]).unwrap().status, 200);
    creates(&server, BOB).await.expect_alive().await;
}

#[tokio::test]
async fn metrics_of_several_keys_are_shown_to_none_of_them() {
    let volume = Volume::default();
    let server = options(&volume).arg("--metrics-listen").arg("127.0.0.1:0").start();
    server.refuses(Some(ALICE), "GET", "/metrics", &Value::Null, 403, "metrics_elsewhere");
}

#[tokio::test]
async fn a_key_beyond_its_quota_saves_no_more_and_loses_nothing() {
    let volume = Volume::default();
    let mut server = options(&volume).arg("--key-volume-mb").arg("16").start();
    let mut ws = creates(&server, ALICE).await;
    let _ = ws.bash("head -c 30000000 /dev/urandom > f; echo kept > g").await.ok();
    let message =
        ws.expect_no_filesystem_snapshot(json!({"action": "snapshot_filesystem", "name": "n"}), "filesystem_snapshot_failed").await;
    assert!(message.contains("16 MiB") && message.contains("--key-volume-mb"), "{message}");
    let (path, token) = (format!("/attach/{}", ws.sandbox_id), ws.sandbox_token.clone());
    let message = ws.expect_checkpoint_error("checkpoint_failed").await;
    assert!(message.contains("--key-volume-mb"), "{message}");
    let mut ws = Ws::connect(server.address(), &path, &[ALICE, ("X-Sandbox-Token", &token)]).await.unwrap();
    ws.expect_status("SANDBOX_RUNNING").await;
    ws.expect_alive().await;
    // Another key has its own.
    creates(&server, BOB).await.snapshot_filesystem("n").await;
    // Where the sandbox would be lost it is saved all the same.
    ws.close().await;
    server.term();
    assert!(server.exited().await.success());
    server.restart();
    let mut ws = Ws::connect(server.address(), &path, &[ALICE, ("X-Sandbox-Token", &token)]).await.unwrap();
    ws.expect_status("SANDBOX_RESTORING").await;
    ws.expect_running_after(DEADLINE).await;
    assert_eq!(ws.bash("cat g").await.ok(), "kept\n");
}

#[tokio::test]
async fn a_damaged_record_is_reported_and_hides_no_others() {
    let volume = Volume::default();
    let server = options(&volume).start();
    let mut ids = Vec::new();
    for _ in 0..2 {
        let mut ws = creates(&server, ALICE).await;
        ws.send(json!({"action": "checkpoint"})).await;
        ws.expect_status("SANDBOX_CHECKPOINTING").await;
        ws.expect_status("SANDBOX_CHECKPOINTED").await;
        ws.expect_close(1000).await;
        eventually("it was given up", DEADLINE, || volume.record(&ws.sandbox_id)["owner"].is_null()).await;
        ids.push(ws.sandbox_id.clone());
    }
    let versions = volume.path().join(format!("locks/{}.versions", ids[0]));
    fs::remove_dir_all(&versions).unwrap();
    std::os::unix::fs::symlink(volume.path(), &versions).unwrap();
    let listed = server.found(Some(ALICE), "/v1/sandboxes?saved=true");
    assert_eq!(listed["items"].as_array().unwrap().iter().map(|item| &item["id"]).collect::<Vec<_>>(), [&json!(ids[1])]);
    assert!(listed["warnings"].to_string().contains(&ids[0]), "{listed}");
}

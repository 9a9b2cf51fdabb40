//! What a key may use, and what becomes of those who hold a connection without using it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use sandboxer_e2e::{Options, Server, Volume, Ws, shared};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

const ALICE: (&str, &str) = ("X-API-Key", "key-of-alice-0123456789");
const BOB: (&str, &str) = ("X-API-Key", "key-of-bob-0123456789");

fn server(option: &str, value: &str) -> Server {
    let keys = format!("alice:{},bob:{}", ALICE.1, BOB.1);
    Options::default().env("SANDBOXER_API_KEYS", keys).arg(option).arg(value).start()
}

async fn asks(server: &Server, key: (&str, &str)) -> Ws {
    let mut ws = Ws::connect(server.address(), "/create", &[key]).await.unwrap();
    ws.send(json!({})).await;
    ws
}

async fn creates(server: &Server, key: (&str, &str)) -> Ws {
    let mut ws = asks(server, key).await;
    ws.expect_created().await;
    ws
}

async fn is_refused(server: &Server, key: (&str, &str), message: &str) {
    let mut ws = asks(server, key).await;
    ws.expect_status("SANDBOX_CREATING").await;
    let status = ws.expect_status("SANDBOX_CREATION_ERROR").await;
    let error = ws.expect_error("rate_limited").await;
    assert_eq!((status["message"].as_str(), error["message"].as_str()), (Some(message), Some(message)));
    ws.expect_close(4000).await;
}

#[tokio::test]
async fn a_key_has_so_many_sandboxes_at_once_and_others_are_not_affected() {
    let mut server = server("--key-max-sandboxes", "1");
    let message = "This API key has 1 sandboxes, and that is all it may have at once. End one first.";
    let mut alice = creates(&server, ALICE).await;
    is_refused(&server, ALICE, message).await;
    creates(&server, BOB).await.expect_alive().await;
    // It counts across a restart, and no longer once it is killed.
    server.kill9();
    server.restart();
    is_refused(&server, ALICE, message).await;
    let path = format!("/attach/{}", alice.sandbox_id);
    alice = Ws::connect(server.address(), &path, &[ALICE, ("X-Sandbox-Token", &alice.sandbox_token)]).await.unwrap();
    alice.expect_status("SANDBOX_RUNNING").await;
    alice.expect_alive().await;
    alice.send(json!({"action": "kill_sandbox"})).await;
    alice.expect_status("SANDBOX_KILLING").await;
    alice.expect_status("SANDBOX_KILLED").await;
    creates(&server, ALICE).await.expect_alive().await;
}

#[tokio::test]
async fn sandboxes_that_come_back_from_the_volume_count_too() {
    let volume = Volume::default();
    let keys = format!("alice:{},bob:{}", ALICE.1, BOB.1);
    let options = || volume.options().env("SANDBOXER_API_KEYS", keys.clone());
    let (maker, server) = (options().start(), options().arg("--key-max-sandboxes").arg("1").start());
    let mut saved = Vec::new();
    for _ in 0..2 {
        let mut ws = Ws::connect(maker.address(), "/create", &[ALICE]).await.unwrap();
        ws.send(json!({"enable_checkpoint": true})).await;
        ws.expect_created().await;
        ws.send(json!({"action": "checkpoint"})).await;
        ws.expect_status("SANDBOX_CHECKPOINTING").await;
        ws.expect_status("SANDBOX_CHECKPOINTED").await;
        saved.push((format!("/attach/{}", ws.sandbox_id), ws.sandbox_token.clone()));
    }
    let attach = async |(path, token): &(String, String)| {
        let mut ws = Ws::connect(server.address(), path, &[ALICE, ("X-Sandbox-Token", token)]).await.unwrap();
        ws.expect_status("SANDBOX_RESTORING").await;
        ws
    };
    let mut first = attach(&saved[0]).await;
    first.expect_status("SANDBOX_RUNNING").await;
    let mut second = attach(&saved[1]).await;
    let status = second.expect_status("SANDBOX_RESTORE_ERROR").await;
    assert!(status["message"].as_str().unwrap().contains("that is all it may have at once"), "{status}");
    second.expect_error("restore_failed").await;
    second.expect_close(4000).await;
    // It is as it was, and comes when there is room.
    first.send(json!({"action": "kill_sandbox"})).await;
    first.expect_status("SANDBOX_KILLING").await;
    first.expect_status("SANDBOX_KILLED").await;
    first.expect_close(1000).await;
    let mut second = attach(&saved[1]).await;
    second.expect_status("SANDBOX_RUNNING").await;
    second.expect_alive().await;
}

#[tokio::test]
async fn a_key_makes_so_many_sandboxes_a_minute_and_others_are_not_affected() {
    let server = server("--key-creates-per-minute", "2");
    for _ in 0..2 {
        let mut ws = creates(&server, ALICE).await;
        ws.send(json!({"action": "kill_sandbox"})).await;
        ws.expect_status("SANDBOX_KILLING").await;
        ws.expect_status("SANDBOX_KILLED").await;
    }
    is_refused(&server, ALICE, "This API key has made 2 sandboxes within a minute, and may not make more. Try again later.").await;
    creates(&server, BOB).await.expect_alive().await;
}

/// How long the server keeps a connection on which `first` was sent and nothing more.
async fn held_for(server: &Server, first: &[u8]) -> Duration {
    let mut stream = TcpStream::connect(server.address()).await.unwrap();
    stream.write_all(first).await.unwrap();
    let begun = Instant::now();
    let mut answer = Vec::new();
    let read = timeout(Duration::from_secs(20), stream.read_to_end(&mut answer)).await;
    assert!(read.is_ok(), "{:?} is served for ever", String::from_utf8_lossy(first));
    begun.elapsed()
}

#[tokio::test]
async fn a_connection_that_asks_for_nothing_is_cut_off() {
    let server = shared();
    let host = format!("Host: {}\r\n", server.address());
    let half = format!("GET /healthz HTTP/1.1\r\n{host}X-Slow: ");
    let whole = format!("GET /healthz HTTP/1.1\r\n{host}\r\n");
    let requests: [&[u8]; 3] = [b"", half.as_bytes(), whole.as_bytes()];
    for (request, held) in requests.iter().zip(join_all(requests.iter().map(|request| held_for(server, request))).await) {
        let expected = Duration::from_secs(8)..Duration::from_secs(16);
        assert!(expected.contains(&held), "{:?} was held for {held:?}", String::from_utf8_lossy(request));
    }
}

#[tokio::test]
async fn a_limit_above_what_the_server_allows_fails_the_creation_and_is_named() {
    let options = ["--max-memory-mb", "512", "--max-cpus", "0.5", "--max-pids", "64", "--max-disk-mb", "128"];
    let server = options.iter().fold(Options::default(), |server, argument| server.arg(*argument)).start();
    for (limit, asked, most) in [
        ("memory_mb", json!(513), "512"),
        ("cpus", json!(0.75), "0.5"),
        ("pids", json!(65), "64"),
        ("disk_mb", json!(129), "128"),
        ("memory_mb", json!(u64::MAX), "512"),
    ] {
        let mut ws = Ws::open(&server, "/create").await;
        ws.send(json!({"limits": {limit: asked}})).await;
        ws.expect_status("SANDBOX_CREATING").await;
        ws.expect_status("SANDBOX_CREATION_ERROR").await;
        let error = ws.expect_error("limit_too_high").await;
        assert_eq!(error["message"], Value::from(format!("limits.{limit}: {asked} is more than the {most} that this server allows.")));
        ws.expect_close(4000).await;
    }
    // Who asks for nothing gets what is allowed.
    let mut ws = Ws::create(&server).await;
    let code = "
import os, time
made = 0
try:
    while made < 100:
        if os.fork() == 0: time.sleep(1000)
        made += 1
except BlockingIOError: print(made)
";
    let output = ws.python(code).await;
    assert!(output.ok().trim().parse::<usize>().is_ok_and(|made| (50..64).contains(&made)), "{output:?}");
}

/// CHECKPOINTED is said before the sandbox is off the machine; its place is another's all the same, of one that is new and of one that comes back.
#[tokio::test]
async fn whoever_hears_that_a_sandbox_is_saved_may_have_another_at_once() {
    let volume = Volume::default();
    let keys = format!("alice:{},bob:{}", ALICE.1, BOB.1);
    let options = || volume.options().env("SANDBOXER_API_KEYS", keys.clone());
    for option in ["--max-sandboxes", "--key-max-sandboxes"] {
        let server = options().arg(option).arg("1").start();
        let mut resting: Vec<(String, String)> = Vec::new();
        for turn in 0..6 {
            // By turns a new one, and the one that has rested for longest: never the one that has just been saved.
            let mut ws = if turn < 2 || turn % 2 == 0 {
                let mut ws = Ws::connect(server.address(), "/create", &[ALICE]).await.unwrap();
                ws.send(json!({"enable_checkpoint": true})).await;
                ws.expect_created().await;
                ws
            } else {
                let (path, token) = resting.remove(0);
                let mut ws = Ws::connect(server.address(), &path, &[ALICE, ("X-Sandbox-Token", &token)]).await.unwrap();
                ws.expect_status("SANDBOX_RESTORING").await;
                let status = ws.next().await;
                assert_eq!(status["status"], "SANDBOX_RUNNING", "{option}, turn {turn}: {status}");
                (ws.sandbox_id, ws.sandbox_token) = (path.trim_start_matches("/attach/").to_owned(), token);
                ws
            };
            ws.send(json!({"action": "checkpoint"})).await;
            ws.expect_status("SANDBOX_CHECKPOINTING").await;
            ws.expect_status("SANDBOX_CHECKPOINTED").await;
            resting.push((format!("/attach/{}", ws.sandbox_id), ws.sandbox_token.clone()));
        }
    }
}

/// A rate is mended by no place that becomes free: who is over it hears so at once, though a sandbox is just leaving.
#[tokio::test]
async fn a_rate_is_told_at_once_though_a_sandbox_is_leaving() {
    let volume = Volume::default();
    let server = volume.options().env("SANDBOXER_API_KEYS", format!("alice:{}", ALICE.1)).arg("--key-creates-per-minute").arg("1").start();
    let mut ws = Ws::connect(server.address(), "/create", &[ALICE]).await.unwrap();
    ws.send(json!({"enable_checkpoint": true})).await;
    ws.expect_created().await;
    ws.send(json!({"action": "checkpoint"})).await;
    ws.expect_status("SANDBOX_CHECKPOINTING").await;
    ws.expect_status("SANDBOX_CHECKPOINTED").await;
    is_refused(&server, ALICE, "This API key has made 1 sandboxes within a minute, and may not make more. Try again later.").await;
}

/// A request whose body never comes to its end.
async fn stalls(server: &Server, method: &str, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(server.address()).await.unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {}\r\n{}: {}\r\nContent-Length: 1000000\r\n\r\n\x1f",
        server.address(),
        ALICE.0,
        ALICE.1
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

#[tokio::test]
async fn stalled_uploads_of_one_key_freeze_nobody() {
    let volume = Volume::default();
    let keys = format!("alice:{},bob:{}", ALICE.1, BOB.1);
    let options = volume.filesystems().env("CHECKPOINT_AND_RESTORE_PATH", volume.path().to_str().unwrap());
    let server = options.env("SANDBOXER_API_KEYS", keys).arg("--lease").arg("6").start();
    let mut bob = Ws::connect(server.address(), "/create", &[BOB]).await.unwrap();
    bob.send(json!({"enable_checkpoint": true})).await;
    bob.expect_created().await;
    let mut stalled = Vec::new();
    for number in 0..64 {
        stalled.push(stalls(&server, "PUT", &format!("/v1/filesystem-snapshots/n{number}/layer")).await);
    }
    // Longer than a lease lasts that is not renewed.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(8) {
        let asked = Instant::now();
        assert_eq!(bob.bash("echo bob").await.ok(), "bob\n");
        let listed = server.found(Some(BOB), "/v1/filesystem-snapshots");
        assert_eq!(listed["items"], json!([]));
        assert!(asked.elapsed() < Duration::from_secs(3), "it took {:?}", asked.elapsed());
        assert_eq!(server.get("/readyz").status, 200);
    }
    // Those beyond the key's share were refused; none was dropped by this side.
    let busy = server.refuses(Some(ALICE), "PUT", "/v1/filesystem-snapshots/one-more/layer", &Value::Null, 429, "rate_limited");
    assert!(busy.contains("archives"), "{busy}");
    drop(stalled);
}

#[tokio::test]
async fn readyz_fails_while_the_volume_is_gone_and_livez_does_not() {
    let volume = Volume::default();
    let server = volume.serve();
    assert_eq!(server.get("/readyz").status, 200);
    volume.hide();
    sandboxer_e2e::eventually("it is not ready", sandboxer_e2e::DEADLINE, || server.get("/readyz").status == 503).await;
    assert!(server.get("/readyz").body.contains("volume"));
    assert_eq!(server.get("/livez").status, 200);
    volume.show();
    sandboxer_e2e::eventually("it is ready again", sandboxer_e2e::DEADLINE, || server.get("/readyz").status == 200).await;
}

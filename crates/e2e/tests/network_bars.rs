//! What the network of a sandbox carries, and what its flood leaves to others: each beside its peer, in the same run.
//!
//! With `SANDBOXER_SOAK=1` at full size, and the bars are held; without it the same goes on with less, and only that it works is asserted.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[path = "network_bars/bare.rs"]
mod bare;

use std::{sync::LazyLock, time::Instant};

use bare::Bare;
use sandboxer_e2e::{DEADLINE, Internet, Options, Server, Ws, count, eventually, sha256, soak};
use serde_json::{Value, json};
use tokio::sync::Mutex;

static INTERNET: LazyLock<Internet> = LazyLock::new(Internet::start);
static SERVER: LazyLock<Server> = LazyLock::new(|| INTERNET.options(Options::default()).start());
/// One measures at a time.
static ALONE: Mutex<()> = Mutex::const_new(());

/// The least part of what the FIFO carries to the same program, with nothing but a writer at the other end, that a download comes to.
const DOWNLOAD_AT_LEAST: f64 = 0.6;
/// How many times its idle value a neighbour's round trip stays below.
const FLOODED_BELOW: f64 = 3.0;

async fn connected() -> Ws {
    let allow: Vec<String> = ["http", "held"].iter().map(|server| format!("plain.test:{}", INTERNET.port(server))).collect();
    Ws::create_with(&SERVER, json!({ "network": { "allow": allow } })).await
}

fn log_of(ws: &Ws) -> Vec<Value> {
    SERVER.found(None, &format!("/v1/sandboxes/{}/network", ws.sandbox_id))["items"].as_array().unwrap().clone()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A large download beside what the FIFO carries to the same program: the same bytes to the same agent and the same curl in a sandbox by runsc alone, from a bare
/// writer. What the FIFO carries to an agent that discards all of it is told too; no program in gVisor can take that much from a socket
/// (docs/design/2026-11-17-network-through-the-agent.md).
#[tokio::test]
async fn a_large_download_comes_whole_and_fast() {
    let _alone = ALONE.lock().await;
    let (mut ws, mut bare) = (connected().await, Bare::start().await);
    let http = INTERNET.port("http");
    let whole = ws.bash(&format!("curl -sS http://plain.test:{http}/big/{} | sha256sum", 8 << 20)).await;
    let expected = sha256(&(0..=255).collect::<Vec<u8>>().repeat(32 << 10));
    assert_eq!(whole.ok().split(' ').next(), Some(expected.as_str()));
    let bytes = count(32 << 20, 1 << 30);
    let code = format!("curl -sS -o /dev/null -w '%{{size_download}}' http://plain.test:{http}/big/{bytes}");
    let [mut downloads, mut carried, mut served] = [(); 3].map(|()| Vec::new());
    for _ in 0..count(1, 5) {
        carried.push(bare.carries(bytes as u64).await / 1e6);
        let begun = Instant::now();
        let got = ws.bash(&code).await;
        downloads.push(bytes as f64 / begun.elapsed().as_secs_f64() / 1e6);
        assert_eq!(got.ok(), bytes.to_string());
        served.push(bare.serves(&code, bytes as u64).await / 1e6);
    }
    println!("MB/s in each round: download {downloads:.0?}, the FIFO {carried:.0?}, download from a bare writer {served:.0?}");
    let [download, carried, served] = [downloads, carried, served].map(median);
    println!(
        "medians: download {download:.0} MB/s, the FIFO carries {carried:.0} MB/s: {:.2}; from a bare writer {served:.0} MB/s: {:.2}",
        download / carried,
        download / served
    );
    if soak() {
        assert!(download >= DOWNLOAD_AT_LEAST * served, "{download} of {served}");
    }
}

/// The time that a line takes to a program and back, in the middle of many.
async fn round_trip(ws: &mut Ws, lines: usize) -> f64 {
    let mut times = Vec::new();
    for number in 0..lines {
        let begun = Instant::now();
        ws.send(json!({"event": "stdin", "data": format!("{number}.\n")})).await;
        ws.until_output("stdout", &format!("{number}.\n")).await;
        times.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    median(times)
}

/// Four downloads without an end; and connections one after the other, each to where it may and to where it may not.
const FLOOD: &str = r#"
import os, socket, subprocess, threading
proxy = ('127.0.0.1', int(os.environ['all_proxy'].rsplit(':', 1)[1]))
def ask(to):
    with socket.create_connection(proxy) as s:
        s.sendall(f'CONNECT {to} HTTP/1.1\r\n\r\n'.encode())
        s.recv(100)
def connect():
    while True:
        for to in ('plain.test:HELD', 'plain.test:22'):
            try: ask(to)
            except OSError: pass
loop = 'while :; do curl -s -o /dev/null http://plain.test:HTTP/big/1073741824; done'
downloads = [subprocess.Popen(['bash', '-c', loop]) for _ in range(4)]
threads = [threading.Thread(target=connect, daemon=True) for _ in range(4)]
for thread in threads: thread.start()
print('on', flush=True)
threads[0].join()
"#;

/// Downloads that are going, and the newest connection of the others.
fn seen(ws: &Ws) -> (usize, Option<String>) {
    let log = log_of(ws);
    let downloads = log.iter().filter(|one| one["port"] == INTERNET.port("http") && one["duration_ms"].is_null()).count();
    let other = log.iter().rev().find(|one| one["port"] == INTERNET.port("held") && one["verdict"] == "allowed");
    (downloads, other.map(|one| one["time"].as_str().unwrap().to_owned()))
}

#[tokio::test]
async fn the_flood_of_one_sandbox_does_not_drown_another() {
    let _alone = ALONE.lock().await;
    let (mut flooding, mut quiet) = (connected().await, Ws::create(&SERVER).await);
    quiet.start(json!({"language": "bash", "code": "exec cat"})).await;
    let (http, held) = (INTERNET.port("http"), INTERNET.port("held"));
    let flood = FLOOD.replace("HTTP/big", &format!("{http}/big")).replace("HELD", &held.to_string());
    let (mut idle, mut flooded) = (Vec::new(), Vec::new());
    let lines = count(20, 200);
    for _ in 0..count(1, 5) {
        let _ = round_trip(&mut quiet, lines / 10).await;
        idle.push(round_trip(&mut quiet, lines).await);
        flooding.start(json!({"language": "python", "code": flood})).await;
        flooding.until_output("stdout", "on\n").await;
        eventually("four downloads are going", DEADLINE, || seen(&flooding).0 == 4).await;
        let (_, newest) = seen(&flooding);
        eventually("connections come and go", DEADLINE, || seen(&flooding).1 != newest).await;
        let (_, newest) = seen(&flooding);
        flooded.push(round_trip(&mut quiet, lines).await);
        // A few lines may be through before the next connection comes.
        assert!(seen(&flooding).0 > 0, "the downloads went on");
        eventually("connections went on", DEADLINE, || seen(&flooding).1 != newest).await;
        flooding.send(json!({"action": "kill_process"})).await;
        let _ = flooding.until_done().await;
        eventually("the flood is over", DEADLINE, || seen(&flooding).0 == 0).await;
    }
    println!("round trip of a line in each round, ms: idle {idle:.2?}, beside a flood {flooded:.2?}");
    let [idle, flooded] = [idle, flooded].map(median);
    println!("medians: idle {idle:.2} ms, beside a flood {flooded:.2} ms: {:.2} times", flooded / idle);
    if soak() {
        assert!(flooded < FLOODED_BELOW * idle, "{idle} ms, {flooded} ms");
    }
}

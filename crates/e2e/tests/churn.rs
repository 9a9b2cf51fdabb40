//! Sandboxes come and go, in every way they can, and in the end everything is as it was.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use sandboxer_e2e::{Options, Server, Ws, eventually, host, seed, soak};
use serde_json::json;

const AT_ONCE: usize = 20;
/// What an allocator may keep.
const MEMORY_SLACK: u64 = 8 << 20;

fn churn_for() -> Duration {
    let asked = std::env::var("CHURN_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(asked.unwrap_or(if soak() { 3600 } else { 20 }))
}

/// How many sandboxes wait in the pool, as the server is started.
const POOL: usize = 2;

/// What a server holds, apart from its sandboxes and what waits to become one.
#[derive(Debug, PartialEq, Eq)]
struct Held {
    children: usize,
    mounts: usize,
    files: BTreeSet<String>,
    bytes: u64,
}

impl Held {
    fn by(server: &Server) -> Self {
        let waiting = server.waiting();
        let mut children = host::descendants(server.pid());
        // What they started themselves has no words of its own.
        let waits: BTreeSet<u32> = (children.iter().filter(|process| waiting.iter().any(|id| process.command.contains(id))))
            .flat_map(|process| host::descendants(process.pid).into_iter().map(|child| child.pid).chain([process.pid]))
            .collect();
        children.retain(|process| !waits.contains(&process.pid));
        let mut held = Self {
            children: children.len() + server.sandbox_processes().len(),
            mounts: host::mounts_under(server.data_dir()).len(),
            files: BTreeSet::new(),
            bytes: 0,
        };
        held.add(server.data_dir(), &waiting);
        held
    }

    fn add(&mut self, dir: &Path, waiting: &BTreeSet<String>) {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if waiting.iter().any(|id| entry.file_name().to_string_lossy().contains(id)) {
                continue;
            }
            self.files.insert(entry.path().display().to_string());
            match entry.metadata() {
                Ok(meta) if meta.is_dir() => self.add(&entry.path(), waiting),
                Ok(meta) => self.bytes += meta.len(),
                Err(_) => {}
            }
        }
    }
}

/// How a sandbox's life goes on once it has answered.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// Killed while it is idle.
    Killed,
    /// Killed while a program floods, which takes the most memory.
    KilledInAFlood,
    /// Cut in the middle of a program, found again, heard to its end.
    Cut,
    /// A program is killed, with what it started.
    ProcessKilled,
    /// Left behind, to be deleted when its time is over.
    Closed,
    Vanished,
}

const EVERY_WAY: [Way; 6] = [Way::Killed, Way::KilledInAFlood, Way::Cut, Way::ProcessKilled, Way::Closed, Way::Vanished];

/// What one client does again and again. Returns the ids of its sandboxes.
async fn client(server: &Server, number: u64, until: Instant, ways: &[Way]) -> Vec<String> {
    let mut random = StdRng::seed_from_u64(seed() + number);
    let mut ids = Vec::new();
    while Instant::now() < until {
        let mut ws = Ws::create_with(server, json!({"idle_timeout": 1})).await;
        let id = ws.sandbox_id.clone();
        ids.push(id.clone());
        assert_eq!(ws.bash("echo $((6 * 7))").await.ok(), "42\n");
        match ways[random.random_range(0..ways.len())] {
            Way::Killed => kill_sandbox(ws).await,
            Way::KilledInAFlood => {
                ws.start(json!({"language": "bash", "code": "yes"})).await;
                ws.until_output("stdout", "y\ny\n").await;
                ws.send(json!({"action": "kill_sandbox"})).await;
                while ws.next().await["status"] != "SANDBOX_KILLED" {}
                ws.expect_close(1000).await;
            }
            Way::Cut => {
                ws.start(
                    json!({"language": "python", "code": "import sys\nfor i in range(2000): print(i)\nsys.stdin.readline()\nprint('end')"}),
                )
                .await;
                ws.vanish();
                let mut ws = back(server, &id).await;
                ws.repeats_allowed = true;
                ws.send(json!({"event": "stdin", "data": "\n"})).await;
                assert!(ws.until_done().await.out().ends_with("end\n"));
                kill_sandbox(ws).await;
            }
            Way::ProcessKilled => {
                ws.start(json!({"language": "bash", "code": "sleep 1000 & sleep 1000"})).await;
                ws.send(json!({"action": "kill_process"})).await;
                ws.expect_status("SANDBOX_EXECUTION_FORCE_KILLED").await;
                ws.expect_status("SANDBOX_EXECUTION_DONE").await;
                kill_sandbox(ws).await;
            }
            Way::Closed => ws.close().await,
            Way::Vanished => ws.vanish(),
        }
    }
    ids
}

async fn kill_sandbox(mut ws: Ws) {
    ws.send(json!({"action": "kill_sandbox"})).await;
    ws.expect_status("SANDBOX_KILLING").await;
    ws.expect_status("SANDBOX_KILLED").await;
    ws.expect_close(1000).await;
}

/// Attaches as soon as the server has noticed that the connection before is gone.
async fn back(server: &Server, id: &str) -> Ws {
    for _ in 0..100 {
        let mut ws = Ws::open(server, &format!("/attach/{id}")).await;
        let message = ws.next().await;
        if message["status"] == "SANDBOX_RUNNING" {
            return ws;
        }
        assert_eq!(message["status"], "SANDBOX_IN_USE", "{message}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{id} stays in use");
}

async fn churn(server: &Server, time: Duration, ways: &[Way]) -> Vec<String> {
    let until = Instant::now() + time;
    let ids: Vec<String> =
        join_all((0..AT_ONCE as u64).map(|number| client(server, number, until, ways))).await.into_iter().flatten().collect();
    eventually("every sandbox is gone", sandboxer_e2e::DEADLINE, || {
        let none_live = server.get("/metrics").body.contains("sandboxer_live_sandboxes 0\n");
        none_live && server.sandbox_processes().is_empty() && server.sandbox_directories().is_empty()
    })
    .await;
    // Why they ended is remembered for a second here, and forgotten when somebody asks.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let mut ws = Ws::open(server, &format!("/attach/{}", ids[0])).await;
    ws.expect_status("SANDBOX_NOT_FOUND").await;
    ws.expect_close(1011).await;
    server.filled(POOL, 0).await;
    ids
}

#[tokio::test]
async fn sandboxes_come_and_go_and_everything_is_as_it_was() {
    let server = Options::default().arg("--max-sandboxes").arg("200").arg("--remember").arg("1");
    // The C library gives back at once what is freed, so that what it still has is in use.
    let server = server.env("MALLOC_ARENA_MAX", "1").env("MALLOC_TRIM_THRESHOLD_", "65536").env("MALLOC_MMAP_THRESHOLD_", "65536");
    let server = server.start();
    // The most that is ever in use at once has been after this: what an allocator keeps of it, it keeps.
    let mut ids = churn(&server, Duration::from_secs(6), &[Way::KilledInAFlood]).await;
    let (before, memory_before) = (Held::by(&server), host::rss(server.pid()));
    let descriptors = host::descriptors(server.pid());
    assert_eq!(before.children, 0, "{:#?}", host::descendants(server.pid()));

    ids.extend(churn(&server, churn_for(), &EVERY_WAY).await);
    // The last connections close in their own time.
    eventually("the connections are closed", sandboxer_e2e::DEADLINE, || host::descriptors(server.pid()) <= descriptors).await;
    let (after, memory_after) = (Held::by(&server), host::rss(server.pid()));
    println!("{} sandboxes; memory {} → {} KiB; {after:?}", ids.len(), memory_before >> 10, memory_after >> 10);
    assert_eq!(after, before);
    assert!(memory_after <= memory_before + MEMORY_SLACK, "the server had {memory_before} bytes and has {memory_after}");
    let left: Vec<_> = host::cgroups_of_any(&ids.into_iter().collect());
    assert!(left.is_empty(), "cgroups: {left:#?}");
}

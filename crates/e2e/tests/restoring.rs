//! A sandbox runs before all of its memory is there. Nobody may notice: neither when its server ends meanwhile, nor by what is counted as its memory.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use sandboxer_e2e::{DEADLINE, Server, Volume, Ws, eventually, host};
use serde_json::json;

const MIB: u64 = 1 << 20;

/// Holds so much memory that is like no other, and tells for each line of input what is in it.
fn program(mib: u32) -> String {
    format!(
        "
import hashlib, os, sys
held = [os.urandom(1 << 20) for _ in range({mib})]
for line in sys.stdin:
    sum = hashlib.sha256()
    for piece in held: sum.update(piece)
    print(line.strip(), sum.hexdigest(), flush=True)
"
    )
}

/// The sum that the program answers with. What it said before may come once more.
async fn ask(ws: &mut Ws, word: &str) -> String {
    ws.send(json!({"event": "stdin", "data": format!("{word}\n")})).await;
    let mut said = String::new();
    loop {
        let message = ws.next().await;
        if message["event"] == "stdout" {
            said += message["data"].as_str().unwrap();
        }
        if let Some((_, sum)) = said.split_once(&format!("{word} "))
            && let Some(sum) = sum.strip_suffix('\n')
        {
            return sum.to_owned();
        }
    }
}

/// Those that serve the files of a restore, or wait for one.
fn processes_serving(server: &Server) -> Vec<String> {
    server.every_process().into_iter().map(|process| process.command).filter(|command| command.contains("serve-files")).collect()
}

fn file_servers(server: &Server) -> usize {
    processes_serving(server).len()
}

/// Lets whoever waits to bring a sandbox its memory work for a small part of the time, so that the sandbox runs long before all of it is there, however busy the machine is.
struct Slowed {
    name: String,
    pid: Pid,
    last: mpsc::Sender<Signal>,
    at_it: thread::JoinHandle<()>,
}

impl Slowed {
    /// There is just one container that waits.
    fn of(server: &Server) -> Self {
        const WORKING: Duration = Duration::from_micros(500);
        const STOPPED: Duration = Duration::from_millis(30);
        /// So much longer than it has worked.
        const SHARE: u32 = 40;
        let waiting: Vec<String> = server.waiting().into_iter().collect();
        let [name] = <[String; 1]>::try_from(waiting).unwrap();
        let every = server.every_process().into_iter();
        let bringing: Vec<_> = every.filter(|process| process.command.contains("serve-files") && process.command.contains(&name)).collect();
        assert_eq!(bringing.len(), 1, "{name}");
        let pid = Pid::from_raw(bringing[0].pid.cast_signed());
        let (last, told) = mpsc::channel();
        // Until it has gone, or somebody has said how it is left.
        let at_it = thread::spawn(move || {
            // Before whoever it stops, which goes first otherwise; where that is allowed.
            let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), -20);
            while kill(pid, Signal::SIGCONT).is_ok() {
                let begun = Instant::now();
                thread::sleep(WORKING);
                if kill(pid, Signal::SIGSTOP).is_err() {
                    break;
                }
                // On a busy machine it may have worked for much longer than was meant.
                match told.recv_timeout(STOPPED.max(begun.elapsed() * SHARE)) {
                    Err(RecvTimeoutError::Timeout) => {}
                    last => {
                        let _ = kill(pid, last.unwrap_or(Signal::SIGCONT));
                        break;
                    }
                }
            }
        });
        Self { name, pid, last, at_it }
    }

    /// It is slow no more, and has been sent this.
    fn leave(self, signal: Signal) {
        // It may have gone.
        let _ = self.last.send(signal);
        self.at_it.join().unwrap();
    }

    /// Asked of a process that is there.
    fn nice(&self) -> i32 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap();
        stat.rsplit_once(") ").unwrap().1.split(' ').nth(16).unwrap().parse().unwrap()
    }
}

/// What is counted of a sandbox, of memory alone: what was read from the disk for it is counted too, elsewhere.
fn shared_memory(name: &str) -> u64 {
    let shared = |path: PathBuf| -> Option<u64> {
        let counts = fs::read_to_string(path.join("memory.stat")).ok()?;
        counts.lines().find_map(|line| line.strip_prefix("shmem ")?.parse().ok())
    };
    host::cgroups_of(name).into_iter().filter_map(shared).max().unwrap_or(0)
}

#[tokio::test]
async fn a_rollback_whose_memory_never_comes_leaves_the_sandbox_as_it_is() {
    let volume = Volume::default();
    let server = volume.options().arg("--pool").arg("0").start();
    let mut ws = Ws::create_with(&server, json!({"enable_checkpoint": true, "limits": {"memory_mb": 2048}})).await;
    ws.start(json!({"language": "python", "code": program(600), "execution_id": "e"})).await;
    let before = ask(&mut ws, "before").await;
    ws.send(json!({"action": "snapshot"})).await;
    let snapshot = loop {
        if let Some(id) = ws.next().await["snapshot_id"].as_str() {
            break id.to_owned();
        }
    };
    server.filled(0, 1).await;
    let slowed = Slowed::of(&server);
    ws.send(json!({"action": "rollback", "snapshot_id": snapshot})).await;
    ws.expect_status("SANDBOX_RESTORING").await;
    // It runs by now, and most of its memory is to come.
    let begun = Instant::now();
    while shared_memory(&slowed.name) < 200 * MIB {
        assert!(begun.elapsed() < DEADLINE, "nobody brings its memory");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    slowed.leave(Signal::SIGKILL);
    ws.expect_status("SANDBOX_RESTORE_ERROR").await;
    assert_eq!(ws.next().await["event"], "error");
    assert_eq!(ask(&mut ws, "after").await, before);
}

#[tokio::test]
async fn a_sandbox_whose_memory_stops_coming_ends_and_says_why_and_the_next_attach_restores_it() {
    let volume = Volume::default();
    let server = volume.options().arg("--pool").arg("0").start();
    let mut ws = Ws::create_with(&server, json!({"enable_checkpoint": true, "limits": {"memory_mb": 2048}})).await;
    let id = ws.sandbox_id.clone();
    ws.start(json!({"language": "python", "code": program(600), "execution_id": "e"})).await;
    let before = ask(&mut ws, "before").await;
    ws.checkpoint_with_execution().await;
    server.filled(0, 1).await;
    let slowed = Slowed::of(&server);
    let (mut cut_off, _) = Ws::restore(&server, &id).await;
    // Until its memory is there it does not have the whole machine, and whoever brings that comes first.
    assert!(host::holds_one_cpu(&slowed.name), "its limit of processor time");
    if nix::unistd::geteuid().is_root() {
        assert_eq!(slowed.nice(), -20);
    }
    slowed.leave(Signal::SIGKILL);
    let told = loop {
        let message = cut_off.next().await;
        if message["status"] == "SANDBOX_ERROR" {
            break message;
        }
    };
    assert_eq!(told["reason"], "runtime_failed", "{told}");
    assert!(told["message"].as_str().unwrap().contains("whoever brought it ended too early: signal: 9"), "{told}");
    let (mut ws, _) = Ws::reach(&server, &id).await;
    ws.send(json!({"action": "reconnect", "execution_id": "e"})).await;
    while ws.next().await["event"] != "resumed" {}
    assert_eq!(ask(&mut ws, "after").await, before);
}

#[tokio::test]
async fn a_sandbox_that_is_being_restored_outlives_its_server() {
    let volume = Volume::default();
    let mut server = volume.options().arg("--pool").arg("0").start();
    // So much that it takes a while.
    let mut ws = Ws::create_with(&server, json!({"enable_checkpoint": true, "limits": {"memory_mb": 2048}})).await;
    let id = ws.sandbox_id.clone();
    ws.start(json!({"language": "python", "code": program(600), "execution_id": "e"})).await;
    let before = ask(&mut ws, "before").await;
    for turn in 0..3 {
        ws.send(json!({"action": "checkpoint", "include_execution": true})).await;
        ws.expect_status("SANDBOX_CHECKPOINTING").await;
        ws.expect_status("SANDBOX_CHECKPOINTED").await;
        drop(ws);
        server.filled(0, 1).await;
        let slowed = Slowed::of(&server);
        let (restored, running) = Ws::restore(&server, &id).await;
        assert!(running.get("rewound").is_none(), "{running}");
        server.kill9();
        // Whoever waits with a container goes with the server, so this one brings memory.
        assert!(processes_serving(&server).iter().any(|command| command.contains(&slowed.name)), "all of its memory is there already");
        drop(restored);
        server.restart();
        slowed.leave(Signal::SIGCONT);
        let (mut again, running) = Ws::reach(&server, &id).await;
        assert!(running.get("rewound").is_none(), "it is the same one, not a copy of what was saved: {running}");
        again.send(json!({"action": "reconnect", "execution_id": "e"})).await;
        while again.next().await["event"] != "resumed" {}
        assert_eq!(ask(&mut again, &format!("turn{turn}")).await, before);
        // Which the server was to set that is gone, as it was to see whoever brought its memory through.
        let container = server.container_of(&id).unwrap();
        assert!(host::holds_one_cpu(&container), "its limit of processor time");
        let log = server.data_dir().join("sandboxes").join(&container).join("serve-files.log");
        eventually("nobody brings it anything any more", DEADLINE, || !log.exists()).await;
        ws = again;
    }
}

#[tokio::test]
async fn what_is_restored_is_counted_as_the_sandboxs_and_whoever_brought_it_goes() {
    let volume = Volume::default();
    let server = volume.options().arg("--pool").arg("0").start();
    let mut ws = Ws::create_kept(&server).await;
    let id = ws.sandbox_id.clone();
    ws.start(json!({"language": "python", "code": program(300), "execution_id": "e"})).await;
    let before = ask(&mut ws, "before").await;
    ws.send(json!({"action": "checkpoint", "include_execution": true})).await;
    ws.expect_status("SANDBOX_CHECKPOINTING").await;
    ws.expect_status("SANDBOX_CHECKPOINTED").await;
    drop(ws);
    server.filled(0, 1).await;
    let waiting: Vec<String> = server.waiting().into_iter().collect();
    assert_eq!(file_servers(&server), 1, "one waits with the container");
    let (mut ws, _) = Ws::restore(&server, &id).await;
    ws.send(json!({"action": "reconnect", "execution_id": "e"})).await;
    while ws.next().await["event"] != "resumed" {}
    assert_eq!(ask(&mut ws, "after").await, before);
    // The next one waits, and nobody else is left.
    server.filled(0, 1).await;
    eventually("it has gone", DEADLINE, || file_servers(&server) == 1).await;
    let of_sandbox = waiting.iter().map(|name| shared_memory(name)).max();
    assert!(of_sandbox.is_some_and(|bytes| bytes > 300 * MIB), "{of_sandbox:?}");
    assert!(host::rss(server.pid()) < 200 * MIB);
    // It goes back, and goes on, with the same memory.
    ws.send(json!({"action": "snapshot"})).await;
    let snapshot = loop {
        if let Some(id) = ws.next().await["snapshot_id"].as_str() {
            break id.to_owned();
        }
    };
    ws.send(json!({"action": "rollback", "snapshot_id": snapshot})).await;
    while ws.next().await["status"] != "SANDBOX_RUNNING" {}
    ws.send(json!({"action": "reconnect", "execution_id": "e"})).await;
    while ws.next().await["event"] != "resumed" {}
    assert_eq!(ask(&mut ws, "again").await, before);
}

#[tokio::test]
async fn whoever_brings_memory_need_not_be_allowed_to_look_for_it() {
    let volume = Volume::default();
    let server = volume.options().arg("--pool").arg("0").start();
    let mut ws = Ws::create_kept(&server).await;
    let id = ws.sandbox_id.clone();
    let _ = ws.bash("echo kept > /root/file").await.ok();
    ws.checkpoint().await;
    server.filled(0, 1).await;
    assert_eq!(file_servers(&server), 1);
    // A directory of somebody else's, into which root looks because it is root.
    if nix::unistd::geteuid().is_root() {
        nix::unistd::chown(server.data_dir(), Some(65534.into()), None).unwrap();
    }
    fs::set_permissions(server.data_dir(), fs::Permissions::from_mode(0o700)).unwrap();
    let (mut ws, _) = Ws::restore(&server, &id).await;
    assert_eq!(ws.bash("cat /root/file").await.ok(), "kept\n");
    assert!(!server.log().contains("could not be restored"), "the container that waited served");
}

#[tokio::test]
async fn whoever_waits_to_bring_memory_costs_nothing_when_it_dies_and_goes_with_the_server() {
    let volume = Volume::default();
    let mut server = volume.options().arg("--pool").arg("0").start();
    let mut ws = Ws::create_kept(&server).await;
    let id = ws.sandbox_id.clone();
    let _ = ws.bash("echo kept > /root/file").await.ok();
    ws.checkpoint().await;
    server.filled(0, 1).await;
    for process in server.every_process().iter().filter(|process| process.command.contains("serve-files")) {
        kill(Pid::from_raw(process.pid.cast_signed()), Signal::SIGKILL).unwrap();
    }
    eventually("it is dead", DEADLINE, || file_servers(&server) == 0).await;
    let hits = server.metric("sandboxer_restore_pool_hits_total");
    let (mut ws, _) = Ws::restore(&server, &id).await;
    assert_eq!(ws.bash("cat /root/file").await.ok(), "kept\n");
    assert_eq!(server.metric("sandboxer_restore_pool_hits_total"), hits + 1.0);
    assert!(!server.log().contains("could not be restored"), "the container served all the same");
    ws.checkpoint().await;
    // A container that waits, and who waits with it, are gone at once when the server is.
    server.filled(0, 1).await;
    let waiting: Vec<String> = server.waiting().into_iter().collect();
    let begun = Instant::now();
    server.term();
    server.exited().await;
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    assert_eq!(file_servers(&server), 0);
    assert!(waiting.iter().all(|name| host::cgroups_of(name).is_empty()));
}

//! What is ready before anybody asks: it is given out as if it had just been made, and it costs nobody anything.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    collections::BTreeSet,
    fs,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use futures_util::future::join_all;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use sandboxer_e2e::{DEADLINE, Options, Server, Volume, Ws, eventually, host};
use serde_json::json;

fn pool(size: usize) -> Options {
    Options::default().arg("--pool").arg(size.to_string())
}

fn hits(server: &Server) -> f64 {
    server.metric("sandboxer_pool_hits_total")
}

/// Everything about itself that a program finds the same in every new sandbox. Processes are listed before those that sort the list are there: one that is just
/// being started still has the name of its parent.
const SAME: &str = r#"
env | sort; pwd; id; umask; ulimit -a; nproc; uname -a | sed s/$HOSTNAME/NAME/; df -P / | tail -1 | tr -s ' '
cat /run/sandboxer/generation; cat /sys/fs/cgroup/pids.max /sys/fs/cgroup/memory.max 2>&1
ls -A /root /tmp /run /var/tmp; cat /proc/self/mounts | wc -l; processes=$(ps -e -o comm=); echo "$processes" | sort | uniq -c; grep -c . /proc/net/dev
"#;
/// What is another one in each.
const OWN: &str = "
import os, random, socket, uuid
print(socket.gethostname(), os.urandom(8).hex(), uuid.uuid4(), random.random(), hash('text'))
";

#[tokio::test]
async fn a_sandbox_from_the_pool_can_not_be_told_from_a_fresh_one() {
    // Interpreters come to wait in a new sandbox after a while; that those of the pool have them already is another test's.
    let [ready, fresh] = [pool(2), pool(0)].map(|options| options.arg("--spare-interpreters").arg("0").start());
    ready.filled(2, 0).await;
    let waiting = ready.waiting();
    assert_eq!((waiting.len(), ready.sandbox_directories().len()), (2, 0));
    // Nobody can see it, let alone have it.
    assert_eq!(ready.get("/v1/sandboxes").json()["items"], json!([]));
    for id in &waiting {
        let mut ws = Ws::open(&ready, &format!("/attach/{id}")).await;
        ws.expect_status("SANDBOX_NOT_FOUND").await;
        ws.expect_close(1011).await;
    }
    let config = json!({"env": {"COLOUR": "red"}, "cwd": "/usr", "idle_timeout": 77, "metadata": {"whose": "mine"}});
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    let (mut selves, mut owns) = (Vec::new(), BTreeSet::new());
    for server in [&ready, &ready, &fresh] {
        let before = now();
        let mut ws = Ws::create_with(server, config.clone()).await;
        let created = server.get(&format!("/v1/sandboxes/{}", ws.sandbox_id)).json();
        assert_eq!(created["metadata"], json!({"whose": "mine"}), "{created}");
        let at: jiff::Timestamp = created["created_at"].as_str().unwrap().parse().unwrap();
        let at = at.as_duration().as_secs_f64();
        assert!((before - 0.01..now()).contains(&at), "made at {at}, asked for at {before}");
        selves.push(ws.bash(SAME).await.out().to_owned());
        let own = ws.python(OWN).await.ok().to_owned();
        assert!(own.starts_with(&format!("sandbox-{} ", &ws.sandbox_id[..8])), "{own}");
        owns.extend(own.split_whitespace().map(str::to_owned));
        let clock: f64 = ws.python("import time; print(time.time())").await.ok().trim().parse().unwrap();
        assert!((before..now()).contains(&clock), "its clock is {clock}");
        assert_eq!(waiting.contains(&ws.sandbox_id), !std::ptr::eq(server, &raw const fresh), "{}", ws.sandbox_id);
    }
    assert_eq!((&selves[0], &selves[1]), (&selves[2], &selves[2]));
    assert_eq!(owns.len(), 15, "{owns:?}");
    assert!(hits(&ready) >= 2.0 && hits(&fresh) == 0.0);
}

#[tokio::test]
async fn its_age_counts_from_when_it_was_asked_for() {
    let server = pool(1).arg("--max-lifetime").arg("8").start();
    server.filled(1, 0).await;
    let waited = server.waiting();
    // Not a wait for something: longer than it may live.
    tokio::time::sleep(Duration::from_millis(8500)).await;
    assert_eq!(server.waiting(), waited);
    let mut ws = Ws::create(&server).await;
    assert!(waited.contains(&ws.sandbox_id));
    ws.expect_alive().await;
    assert_eq!(ws.expect_status("SANDBOX_ERROR").await["reason"], "lifetime");
}

#[tokio::test]
async fn a_burst_larger_than_the_pool_is_served_and_the_pool_is_filled_again() {
    let server = pool(2).start();
    server.filled(2, 0).await;
    let mut clients = join_all((0..6).map(|_| Ws::create(&server))).await;
    join_all(clients.iter_mut().map(Ws::expect_alive)).await;
    assert_eq!(clients.iter().map(|ws| &ws.sandbox_id).collect::<BTreeSet<_>>().len(), 6);
    assert!(hits(&server) >= 2.0);
    server.filled(2, 0).await;
    assert_eq!(server.sandbox_directories().len(), 6);
}

#[tokio::test]
async fn what_waits_gives_way_to_those_who_come() {
    let server = pool(2).arg("--max-sandboxes").arg("2").start();
    server.filled(2, 0).await;
    // Of another kind than those that wait.
    let other = json!({"limits": {"memory_mb": 256}});
    let mut one = Ws::create_with(&server, other.clone()).await;
    let mut two = Ws::create_with(&server, other).await;
    server.filled(0, 0).await;
    eventually("nothing is left of what waited", DEADLINE, || server.waiting().is_empty()).await;
    let mut three = Ws::open(&server, "/create").await;
    three.send(json!({})).await;
    three.expect_status("SANDBOX_CREATING").await;
    three.expect_status("SANDBOX_CREATION_ERROR").await;
    three.expect_error("no_capacity").await;
    one.expect_alive().await;
    two.send(json!({"action": "kill_sandbox"})).await;
    two.expect_status("SANDBOX_KILLING").await;
    two.expect_status("SANDBOX_KILLED").await;
    server.filled(1, 0).await;
    Ws::create(&server).await.expect_alive().await;
}

#[tokio::test]
async fn limits_that_are_asked_for_again_and_again_wait_too() {
    let server = pool(1).start();
    let config = json!({"limits": {"memory_mb": 200, "pids": 33}});
    for _ in 0..2 {
        Ws::create_with(&server, config.clone()).await.expect_alive().await;
    }
    server.filled(2, 0).await;
    let before = hits(&server);
    let mut ws = Ws::create_with(&server, config).await;
    assert_eq!(hits(&server), before + 1.0);
    let said = ws
        .python(
            "
import os, time
children = []
try:
    while len(children) < 60:
        pid = os.fork()
        if not pid: time.sleep(60)
        children.append(pid)
except OSError: pass
print(len(children) <= 33)
",
        )
        .await;
    assert_eq!(said.ok(), "True\n");
}

/// Nothing of these is left anywhere.
async fn gone(server: &Server, ids: &BTreeSet<String>) {
    eventually("nothing is left of what waited", DEADLINE, || {
        let named = |text: &str| ids.iter().any(|id| text.contains(id));
        !server.every_process().iter().any(|process| named(&process.command))
            && ids.iter().all(|id| host::files_of(server.data_dir(), id).is_empty() && host::cgroups_of(id).is_empty())
    })
    .await;
}

#[tokio::test]
async fn kill_9_of_the_server_leaves_nothing_of_the_pool() {
    let volume = Volume::default();
    let mut server = volume.options().start();
    server.filled(2, 1).await;
    let ids = server.waiting();
    assert_eq!(ids.len(), 3);
    server.kill9();
    assert!(!server.every_process().is_empty(), "the harness finds their processes");
    server.restart();
    gone(&server, &ids).await;
    server.filled(2, 1).await;
    Ws::create(&server).await.expect_alive().await;
}

#[tokio::test]
async fn a_server_that_ends_takes_its_pool_with_it() {
    let volume = Volume::default();
    for restart in [false, true] {
        let mut server = volume.options().start();
        server.filled(2, 1).await;
        let ids = server.waiting();
        if restart {
            server.usr2();
        } else {
            server.term();
        }
        assert!(server.exited().await.success());
        assert!(server.every_process().is_empty(), "{:#?}", server.every_process());
        assert_eq!(fs::read_dir(server.data_dir().join("sandboxes")).unwrap().count(), 0);
        gone(&server, &ids).await;
    }
}

#[tokio::test]
async fn nothing_waits_while_memory_is_short() {
    let dir = tempfile::tempdir().unwrap();
    let says = |available: &str| {
        let new = dir.path().join("new");
        fs::write(&new, format!("MemTotal: 99999999 kB\nMemAvailable: {available} kB\n")).unwrap();
        fs::rename(new, dir.path().join("meminfo")).unwrap();
    };
    says("99999999");
    let server = pool(2).arg("--pool-min-free-mb").arg("64").env("SANDBOXER_MEMINFO", dir.path().join("meminfo").to_str().unwrap()).start();
    server.filled(2, 0).await;
    let ids = server.waiting();
    says("60000");
    server.filled(0, 0).await;
    gone(&server, &ids).await;
    let mut ws = Ws::create(&server).await;
    ws.expect_alive().await;
    assert!(server.waiting().is_empty());
    says("99999999");
    server.filled(2, 0).await;
    assert!(server.metric("sandboxer_pool_given_up_total") >= 2.0);
}

fn signal_all(server: &Server, id: &str, signal: Signal) {
    for process in server.every_process().iter().filter(|process| process.command.contains(id)) {
        let _ = kill(Pid::from_raw(i32::try_from(process.pid).unwrap()), signal);
    }
}

#[tokio::test]
async fn one_that_died_or_hangs_is_never_given_to_anybody_and_is_replaced() {
    let server = pool(1).start();
    for signal in [Signal::SIGKILL, Signal::SIGSTOP] {
        server.filled(1, 0).await;
        let ids = server.waiting();
        let id = ids.first().unwrap();
        signal_all(&server, id, signal);
        let mut ws = Ws::create(&server).await;
        assert_ne!(&ws.sandbox_id, id);
        ws.expect_alive().await;
        gone(&server, &ids).await;
        ws.send(json!({"action": "kill_sandbox"})).await;
        ws.expect_status("SANDBOX_KILLING").await;
        ws.expect_status("SANDBOX_KILLED").await;
    }
}

#[tokio::test]
async fn a_restore_goes_into_a_container_that_waited_and_has_the_limits_of_its_own() {
    // Less than the container has, and more.
    for memory_mb in [300, 900] {
        restored_with(memory_mb).await;
    }
}

async fn restored_with(memory_mb: u64) {
    let volume = Volume::default();
    let mut server = volume.options().start();
    let mut ws = Ws::create_with(&server, json!({"enable_checkpoint": true, "limits": {"memory_mb": memory_mb}})).await;
    let id = ws.sandbox_id.clone();
    let _ = ws.bash("echo kept > f").await.ok();
    ws.checkpoint().await;
    server.filled(2, 1).await;
    let waiting = server.waiting();
    let (mut ws, _) = Ws::reach(&server, &id).await;
    assert_eq!(server.metric("sandboxer_restore_pool_hits_total"), 1.0);
    let container = server.container_of(&id).unwrap();
    assert!(waiting.contains(&container));
    assert_eq!(ws.bash("cat f; hostname").await.ok(), format!("kept\nsandbox-{}\n", &id[..8]));
    let bound = (memory_mb + 256) << 20;
    for cgroup in host::cgroups_of(&container) {
        for file in ["memory.max", "memory.limit_in_bytes"] {
            if let Ok(text) = fs::read_to_string(cgroup.join(file)) {
                assert_eq!(text.trim().parse(), Ok(bound), "{}", cgroup.display());
            }
        }
    }
    eventually("all of its memory is there, and the limit of its processor time holds", DEADLINE, || host::holds_one_cpu(&container)).await;
    // The next server knows it by its own name.
    server.kill9();
    server.restart();
    let mut ws = Ws::attach(&server, &id).await;
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
    ws.send(json!({"action": "kill_sandbox"})).await;
    ws.expect_status("SANDBOX_KILLING").await;
    ws.expect_status("SANDBOX_KILLED").await;
    gone(&server, &BTreeSet::from([container])).await;
    volume.verify();
}

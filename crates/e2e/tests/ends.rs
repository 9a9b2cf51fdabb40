//! How sandboxes end that nobody asked to: the client has the reason, and so has whoever comes later.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use sandboxer_e2e::{DEADLINE, Options, Server, User, Ws, as_both_users, eventually, host, shared, shared_as};
use serde_json::json;

/// `SANDBOX_ERROR` with its reason → `error` → close 4000; and then `SANDBOX_NOT_FOUND` with the same message, also after a restart.
async fn is_told(ws: &mut Ws, server: &Server, reason: &str, code: &str) -> String {
    let status = ws.expect_status("SANDBOX_ERROR").await;
    assert_eq!(status["reason"], reason, "{status}");
    let error = ws.expect_error(code).await;
    assert_eq!(error["message"], status["message"]);
    ws.expect_close(4000).await;
    let message = status["message"].as_str().unwrap().to_owned();
    is_remembered(server, &ws.sandbox_id, &message).await;
    eventually("its processes are gone", DEADLINE, || processes(server, &ws.sandbox_id).is_empty()).await;
    assert!(host::cgroups_of(&ws.sandbox_id).is_empty());
    message
}

async fn is_remembered(server: &Server, id: &str, message: &str) {
    let mut late = Ws::open(server, &format!("/attach/{id}")).await;
    assert_eq!(late.expect_status("SANDBOX_NOT_FOUND").await["message"], message);
    late.expect_close(1011).await;
}

fn processes(server: &Server, id: &str) -> Vec<host::Process> {
    server.sandbox_processes().into_iter().filter(|process| process.command.contains(id)).collect()
}

/// The process in which gVisor runs, not the runsc that waits for it.
fn signal_sandbox(server: &Server, id: &str, signal: Signal) {
    let found = processes(server, id);
    let boot: Vec<_> = found.iter().filter(|process| process.command.contains(" boot ")).collect();
    assert!(!boot.is_empty(), "{found:#?}");
    for process in boot {
        kill(Pid::from_raw(i32::try_from(process.pid).unwrap()), signal).unwrap();
    }
}

#[tokio::test]
async fn a_sandbox_that_is_killed_from_outside_says_so_and_it_is_remembered() {
    let mut server = Options::default().start();
    let mut ws = Ws::create(&server).await;
    ws.start(json!({"language": "bash", "code": "sleep 1000"})).await;
    signal_sandbox(&server, &ws.sandbox_id, Signal::SIGKILL);
    assert_eq!(is_told(&mut ws, &server, "killed", "sandbox_killed").await, "The sandbox was killed from outside.");
    // Whoever was not there when it happened is told as well, and so is who comes after a restart.
    let absent = Ws::create(&server).await;
    let (id, before) = (absent.sandbox_id.clone(), ws.sandbox_id.clone());
    absent.close().await;
    signal_sandbox(&server, &id, Signal::SIGKILL);
    // Whoever comes before the server knows is told a moment later.
    let mut early = Ws::open(&server, &format!("/attach/{id}")).await;
    if early.next().await["status"] == "SANDBOX_RUNNING" {
        assert_eq!(early.expect_status("SANDBOX_ERROR").await["reason"], "killed");
    }
    is_remembered(&server, &id, "The sandbox was killed from outside.").await;
    server.kill9();
    server.restart();
    for id in [&id, &before] {
        is_remembered(&server, id, "The sandbox was killed from outside.").await;
    }
}

#[tokio::test]
async fn a_sandbox_whose_agent_ends_says_that_it_failed() {
    let server = shared();
    let mut ws = Ws::create(server).await;
    // gVisor hands this one on to the first process inside.
    signal_sandbox(server, &ws.sandbox_id, Signal::SIGABRT);
    assert_eq!(is_told(&mut ws, server, "runtime_failed", "runtime_failed").await, "The agent in the sandbox ended.");
}

#[tokio::test]
async fn a_sandbox_ends_with_its_lifetime_whoever_is_attached() {
    let server = Options::default().arg("--max-lifetime").arg("10").start();
    let message = "The sandbox reached the longest lifetime that this server allows, 10 s.";
    let alone = Ws::create_with(&server, json!({"idle_timeout": 0})).await;
    let id = alone.sandbox_id.clone();
    alone.close().await;
    let mut ws = Ws::create(&server).await;
    ws.start(json!({"language": "bash", "code": "sleep 1000"})).await;
    assert_eq!(is_told(&mut ws, &server, "lifetime", "lifetime_over").await, message);
    is_remembered(&server, &id, message).await;
}

/// Its programs are killed before it comes to that, so what grows here is gVisor's own memory, which no program can be blamed for. The host's
/// cgroup sees to it, and where there is none, the server.
async fn a_sandbox_whose_gvisor_takes_too_much_memory_is_killed_and_says_so(user: User) {
    let server = shared_as(user);
    let mut neighbour = Ws::create(server).await;
    let mut ws = Ws::create_with(server, json!({"limits": {"memory_mb": 64}})).await;
    let code = "
import socket
kept = []
while True:
    a, b = socket.socketpair()
    a.setblocking(False); kept += [a, b]
    try:
        while True: a.send(b'x' * 65536)
    except BlockingIOError: pass
";
    ws.start(json!({"language": "python", "code": code})).await;
    assert_eq!(
        is_told(&mut ws, server, "out_of_memory", "out_of_memory").await,
        "The sandbox was killed because it went over its memory limit."
    );
    neighbour.expect_alive().await;
}

#[tokio::test]
async fn a_limit_that_nobody_can_enforce_is_refused_to_who_asks_for_it_and_no_one_else() {
    let server = Options::default().user(User::Ordinary).start();
    let mut ws = Ws::open(&server, "/create").await;
    ws.send(json!({"limits": {"cpus": 0.5}})).await;
    ws.expect_status("SANDBOX_CREATING").await;
    ws.expect_status("SANDBOX_CREATION_ERROR").await;
    let error = ws.expect_error("limit_not_enforceable").await;
    let message = error["message"].as_str().unwrap();
    assert!(message.starts_with("limits.cpus can't be enforced on this server: "), "{message}");
    assert!(message.ends_with(". Leave it out, or ask a server that can."), "{message}");
    ws.expect_close(4000).await;
    let mut ws = Ws::create_with(&server, json!({"limits": {"memory_mb": 128, "pids": 32, "disk_mb": 64}})).await;
    ws.expect_alive().await;
}

as_both_users!(a_sandbox_whose_gvisor_takes_too_much_memory_is_killed_and_says_so);

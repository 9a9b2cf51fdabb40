//! Signals, `kill_process` and `kill_sandbox`.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use sandboxer_e2e::{Server, Ws, eventually, host, shared};
use serde_json::{Value, json};

fn bash(code: &str) -> Value {
    json!({"language": "bash", "code": code})
}

#[tokio::test]
async fn a_signal_reaches_the_program() {
    let mut ws = Ws::create(shared()).await;
    ws.start(bash("trap 'echo caught; exit 9' USR1; echo ready; while :; do sleep 0.01; done")).await;
    ws.until_output("stdout", "ready\n").await;
    ws.send(json!({"action": "signal", "signal": "SIGUSR1"})).await;
    let outcome = ws.until_done().await;
    assert_eq!((outcome.out(), outcome.exit_code()), ("caught\n", Some(9)));

    ws.start(json!({"language": "python", "code": "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.05)"})).await;
    ws.until_output("stdout", "ready\n").await;
    ws.send(json!({"action": "signal", "signal": "SIGINT"})).await;
    let outcome = ws.until_done().await;
    assert!(outcome.err().contains("KeyboardInterrupt"), "{}", outcome.err());

    ws.start(bash("echo ready; exec sleep 1000")).await;
    ws.until_output("stdout", "ready\n").await;
    ws.send(json!({"action": "signal", "signal": "SIGTERM"})).await;
    assert_eq!(ws.until_done().await.signal(), Some("SIGTERM"));
}

#[tokio::test]
async fn a_signal_that_fits_nothing_is_an_error_and_the_connection_stays_open() {
    let mut ws = Ws::create(shared()).await;
    for message in [json!({"action": "signal", "signal": "SIGNONE"}), json!({"action": "signal", "signal": 9}), json!({"action": "signal"})]
    {
        ws.send(message.clone()).await;
        let error = ws.expect_error("invalid_field").await;
        assert!(error["message"].as_str().unwrap().contains("signal"), "{message}: {error}");
    }
    ws.send(json!({"action": "signal", "signal": "SIGTERM"})).await;
    ws.expect_error("nothing_running").await;
    ws.expect_alive().await;
}

#[tokio::test]
async fn kill_process_kills_the_whole_tree_however_it_hides() {
    let mut ws = Ws::create(shared()).await;
    let code = "
import os, signal, sys, time
for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(s, signal.SIG_IGN)
def sleeper(n): os.execvp('sleep', ['sleep', str(n)])
if os.fork() == 0: sleeper(6161)
if os.fork() == 0:
    os.setsid(); sleeper(6162)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: sleeper(6163)
        os._exit(0)
    os._exit(0)
while True:
    import subprocess
    if subprocess.run('ps ax | grep -c \"[s]leep 616\"', shell=True, capture_output=True).stdout == b'3\\n': break
print('ready', flush=True)
while True: time.sleep(1)
";
    ws.start(json!({"language": "python", "code": code, "execution_id": "tree"})).await;
    ws.until_output("stdout", "ready\n").await;
    ws.send(json!({"action": "kill_process"})).await;
    ws.expect_status("SANDBOX_EXECUTION_FORCE_KILLED").await;
    let done = ws.expect_status("SANDBOX_EXECUTION_DONE").await;
    assert_eq!((&done["execution_id"], &done["signal"]), (&json!("tree"), &json!("SIGKILL")), "{done}");
    assert_eq!(ws.bash("ps ax | grep -c '[s]leep 616'").await.out(), "0\n");
}

#[tokio::test]
async fn kill_process_leaves_what_earlier_executions_left_running() {
    let mut ws = Ws::create(shared()).await;
    // It ends when both are seen: until then they are copies of its shell.
    ws.bash("sleep 7171 & setsid sleep 7171 & until [ $(ps ax | grep -c '[s]leep 7171') = 2 ]; do sleep 0.05; done").await;
    ws.start(bash("sleep 7172 & echo ready; wait")).await;
    ws.until_output("stdout", "ready\n").await;
    ws.send(json!({"action": "kill_process"})).await;
    ws.expect_status("SANDBOX_EXECUTION_FORCE_KILLED").await;
    ws.expect_status("SANDBOX_EXECUTION_DONE").await;
    assert_eq!(ws.bash("ps ax | grep -c '[s]leep 7171'; ps ax | grep -c '[s]leep 7172'").await.out(), "2\n0\n");
}

#[tokio::test]
async fn kill_process_with_nothing_running_is_force_killed_alone() {
    let mut ws = Ws::create(shared()).await;
    for _ in 0..2 {
        ws.send(json!({"action": "kill_process"})).await;
        ws.expect_status("SANDBOX_EXECUTION_FORCE_KILLED").await;
    }
    ws.expect_alive().await;
    ws.send(json!({"action": "kill_process"})).await;
    ws.expect_status("SANDBOX_EXECUTION_FORCE_KILLED").await;
    ws.expect_alive().await;
}

#[tokio::test]
async fn output_before_a_kill_comes_before_done() {
    let mut ws = Ws::create(shared()).await;
    ws.start(
        json!({"language": "python", "code": "import os, time\nos.write(1, b'x' * 100000)\nos.write(2, b'written')\ntime.sleep(1000)"}),
    )
    .await;
    ws.repeats_allowed = false;
    let mut seen = 0;
    let mut message = ws.next().await;
    while message["event"] == "stdout" {
        seen = message["end"].as_u64().unwrap();
        message = ws.next().await;
    }
    assert_eq!(message["data"], "written");
    ws.send(json!({"action": "kill_process"})).await;
    let outcome = ws.until_done().await;
    assert_eq!(outcome.between.len(), 1, "{:?}", outcome.between);
    assert_eq!(
        (outcome.between[0]["status"].as_str(), seen + outcome.stdout.len() as u64),
        (Some("SANDBOX_EXECUTION_FORCE_KILLED"), 100_000)
    );
}

async fn nothing_left_of(server: &Server, id: &str) {
    let id = id.to_owned();
    eventually("no process of a killed sandbox", sandboxer_e2e::DEADLINE, || {
        server.sandbox_processes().iter().all(|process| !process.command.contains(&id))
    })
    .await;
    eventually("no directory of a killed sandbox", sandboxer_e2e::DEADLINE, || {
        host::files_of(server.data_dir(), &id).iter().all(|path| path.is_file())
    })
    .await;
    eventually("no cgroup of a killed sandbox", sandboxer_e2e::DEADLINE, || host::cgroups_of(&id).is_empty()).await;
}

#[tokio::test]
async fn kill_sandbox_ends_it_and_whoever_attaches_later_is_told() {
    let server = shared();
    let mut ws = Ws::create(server).await;
    ws.expect_alive().await;
    let id = ws.sandbox_id.clone();
    assert!(server.sandbox_processes().iter().any(|process| process.command.contains(&id)), "the harness finds its processes");
    ws.send(json!({"action": "kill_sandbox"})).await;
    ws.expect_status("SANDBOX_KILLING").await;
    ws.expect_status("SANDBOX_KILLED").await;
    ws.expect_close(1000).await;
    let mut ws = Ws::open(server, &format!("/attach/{id}")).await;
    let status = ws.expect_status("SANDBOX_NOT_FOUND").await;
    assert!(status["message"].as_str().unwrap().contains("killed"), "{status}");
    ws.expect_close(1011).await;
    nothing_left_of(server, &id).await;
}

#[tokio::test]
async fn kill_sandbox_ends_it_while_an_execution_runs() {
    let server = shared();
    let mut ws = Ws::create(server).await;
    let id = ws.sandbox_id.clone();
    ws.start(bash("setsid sleep 1000 & echo ready; sleep 1000")).await;
    ws.until_output("stdout", "ready\n").await;
    ws.send(json!({"action": "kill_sandbox"})).await;
    ws.expect_status("SANDBOX_KILLING").await;
    ws.expect_status("SANDBOX_KILLED").await;
    ws.expect_close(1000).await;
    nothing_left_of(server, &id).await;
}

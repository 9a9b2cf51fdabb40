//! Executions on a terminal.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use sandboxer_e2e::{Outcome, Ws, shared};
use serde_json::{Value, json};

fn terminal(language: &str, code: &str) -> Value {
    json!({"language": language, "code": code, "tty": {"rows": 30, "cols": 100}})
}

#[tokio::test]
async fn a_terminal_is_one_with_its_size_and_everything_comes_as_stdout() {
    let mut ws = Ws::create(shared()).await;
    let outcome = ws.run(terminal("bash", "test -t 0 && test -t 1 && test -t 2 && echo tty; stty size; echo error >&2")).await;
    assert_eq!((outcome.ok(), outcome.err()), ("tty\r\n30 100\r\nerror\r\n", ""));
    let outcome = ws.run(terminal("python", "import os, sys; print(sys.stdout.isatty(), os.get_terminal_size())")).await;
    assert_eq!(outcome.ok(), "True os.terminal_size(columns=100, lines=30)\r\n");
    assert_eq!(ws.run(terminal("bash", "exit 5")).await.exit_code(), Some(5));
    // And without one there is none.
    assert_eq!(ws.bash("test -t 1 || echo none").await.ok(), "none\n");
}

#[tokio::test]
async fn a_resize_reaches_the_program() {
    let mut ws = Ws::create(shared()).await;
    let code = "
import os, signal, sys
def resized(*_):
    size = os.get_terminal_size()
    print('now', size.lines, size.columns, flush=True)
    sys.exit()
signal.signal(signal.SIGWINCH, resized)
print('ready', flush=True)
while True: signal.pause()
";
    ws.start(terminal("python", code)).await;
    ws.until_output("stdout", "ready\r\n").await;
    ws.send(json!({"action": "resize", "rows": 50, "cols": 132})).await;
    assert_eq!(ws.until_done().await.ok(), "now 50 132\r\n");
}

/// Starts a program on a terminal, presses Ctrl-C once it is ready, and waits for its end.
async fn interrupted(language: &str, code: &str) -> (Ws, Outcome) {
    let mut ws = Ws::create(shared()).await;
    ws.start(terminal(language, code)).await;
    ws.until_output("stdout", "ready\r\n").await;
    ws.send(json!({"event": "stdin", "data": "\u{3}"})).await;
    let outcome = ws.until_done().await;
    (ws, outcome)
}

/// Neither program can miss the signal: bash becomes `sleep` and handles nothing itself, and Python
/// looks for signals between short sleeps. A bash that waits for a child may spin instead
/// (docs/design/2026-11-18-a-signal-that-is-not-told.md).
#[tokio::test]
async fn control_c_interrupts_the_foreground_program() {
    let (mut ws, outcome) = interrupted("bash", "echo ready; exec sleep 1000").await;
    assert!(outcome.signal() == Some("SIGINT") || outcome.exit_code() == Some(130), "{}", outcome.done);
    let code = "
import time
try:
    print('ready')
    while True: time.sleep(0.05)
except KeyboardInterrupt: print('interrupted')
";
    assert!(interrupted("python", code).await.1.ok().contains("interrupted\r\n"));
    ws.expect_alive().await;
}

/// As on every terminal: what was typed before the key and nobody has read is forgotten.
#[tokio::test]
async fn control_c_is_heard_behind_lines_that_nobody_reads_and_they_are_forgotten() {
    let mut ws = Ws::create(shared()).await;
    let code = "
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
print('ready', flush=True)
signal.sigwait([signal.SIGINT])
print('interrupted', flush=True)
print('read', sys.stdin.readline().strip(), flush=True)
sys.exit(7)
";
    ws.start(terminal("python", code)).await;
    ws.until_output("stdout", "ready\r\n").await;
    // One behind the other, and all at once.
    for typed in ["impatient\r", "\r", "ly\r\r\u{3}"] {
        ws.send(json!({"event": "stdin", "data": typed})).await;
    }
    ws.until_output("stdout", "interrupted\r\n").await;
    ws.send(json!({"event": "stdin", "data": "later\r"})).await;
    let outcome = ws.until_done().await;
    assert!(outcome.out().contains("read later\r\n"), "{:?}", outcome.out());
    assert_eq!(outcome.exit_code(), Some(7));

    // Where keys mean nothing but themselves, nothing is forgotten.
    let code = "import sys, tty; tty.setraw(0); print('ready', flush=True); print(ascii(sys.stdin.buffer.read(6)))";
    ws.start(terminal("python", code)).await;
    ws.until_output("stdout", "ready").await;
    ws.send(json!({"event": "stdin", "data": "a\r\u{3}\u{1a}\u{1c}b"})).await;
    assert!(ws.until_done().await.ok().contains(r"b'a\r\x03\x1a\x1cb'"));
}

#[tokio::test]
async fn a_terminal_takes_lines_and_control_d_ends_them() {
    let mut ws = Ws::create(shared()).await;
    ws.start(terminal("bash", "stty -echo; echo ready; cat; echo end")).await;
    ws.until_output("stdout", "ready\r\n").await;
    ws.send(json!({"event": "stdin", "data": "line ü\n"})).await;
    ws.until_output("stdout", "line ü\r\n").await;
    ws.send(json!({"event": "stdin", "data": "\u{4}"})).await;
    assert_eq!(ws.until_done().await.ok(), "end\r\n");
}

#[tokio::test]
async fn the_end_of_input_ends_it_on_a_terminal_too() {
    let mut ws = Ws::create(shared()).await;
    ws.start(terminal("bash", "echo ready; cat >/dev/null; echo end")).await;
    ws.until_output("stdout", "ready\r\n").await;
    ws.send(json!({"event": "stdin_eof"})).await;
    assert!(ws.until_done().await.ok().ends_with("end\r\n"));
}

#[tokio::test]
async fn a_terminal_without_numbers_has_the_usual_size() {
    let mut ws = Ws::create(shared()).await;
    assert_eq!(ws.run(json!({"language": "bash", "code": "stty size", "tty": {}})).await.ok(), "24 80\r\n");
}

#[tokio::test]
async fn a_program_on_a_terminal_is_killed_with_its_tree() {
    let mut ws = Ws::create(shared()).await;
    ws.start(terminal("bash", "setsid sleep 5151 & sleep 5152 & echo ready; wait")).await;
    ws.until_output("stdout", "ready\r\n").await;
    ws.send(json!({"action": "kill_process"})).await;
    ws.expect_status("SANDBOX_EXECUTION_FORCE_KILLED").await;
    ws.expect_status("SANDBOX_EXECUTION_DONE").await;
    assert_eq!(ws.bash("ps ax | grep -c '[s]leep 515'").await.out(), "0\n");
}

#[tokio::test]
async fn a_resize_that_fits_nothing_is_an_error_and_the_connection_stays_open() {
    let mut ws = Ws::create(shared()).await;
    for (message, field) in [
        (json!({"action": "resize"}), "rows"),
        (json!({"action": "resize", "rows": "a", "cols": 80}), "rows"),
        (json!({"action": "resize", "rows": 24, "cols": -1}), "cols"),
        (json!({"action": "resize", "rows": 24, "cols": 70000}), "cols"),
    ] {
        ws.send(message.clone()).await;
        let error = ws.expect_error("invalid_field").await;
        assert!(error["message"].as_str().unwrap().contains(field), "{message}: {error}");
    }
    ws.send(json!({"action": "resize", "rows": 24, "cols": 80})).await;
    assert_eq!(ws.next().await["event"], "error");
    ws.expect_alive().await;
}

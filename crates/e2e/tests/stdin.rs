//! Input: never lost, ended when asked, refused when nobody can take it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use sandboxer_e2e::{Ws, sha256, shared};
use serde_json::{Value, json};

fn stdin(data: &str) -> Value {
    json!({"event": "stdin", "data": data})
}

fn eof() -> Value {
    json!({"event": "stdin_eof"})
}

#[tokio::test]
async fn a_program_reads_what_is_sent() {
    let mut ws = Ws::create(shared()).await;
    ws.start(json!({"language": "python", "code": "while True:\n    line = input()\n    print('got', line, flush=True)"})).await;
    for line in ["one", "two äöü", "three 🦀"] {
        ws.send(stdin(&format!("{line}\n"))).await;
        assert_eq!(ws.until_output("stdout", "\n").await, format!("got {line}\n"));
    }
    ws.send(eof()).await;
    let outcome = ws.until_done().await;
    assert_eq!(outcome.exit_code(), Some(1));
    assert!(outcome.err().contains("EOFError"), "{}", outcome.err());
}

#[tokio::test]
async fn input_sent_right_behind_the_request_is_never_lost() {
    let mut ws = Ws::create(shared()).await;
    for language in ["bash", "python"].repeat(5) {
        let code = if language == "bash" { "cat" } else { "import sys; print(sys.stdin.read(), end='')" };
        ws.send(json!({"language": language, "code": code})).await;
        ws.send(stdin("a")).await;
        ws.send(stdin("b\n")).await;
        ws.send(eof()).await;
        ws.expect_status("SANDBOX_EXECUTION_RUNNING").await;
        assert_eq!(ws.until_done().await.ok(), "ab\n");
    }
}

#[tokio::test]
async fn the_end_of_input_ends_a_program_that_reads_to_it() {
    let mut ws = Ws::create(shared()).await;
    ws.start(json!({"language": "bash", "code": "wc -c"})).await;
    ws.send(eof()).await;
    assert_eq!(ws.until_done().await.ok(), "0\n");
}

#[tokio::test]
async fn without_stdin_input_is_at_its_end_from_the_start() {
    let mut ws = Ws::create(shared()).await;
    let outcome = ws.run(json!({"language": "bash", "code": "cat; echo end", "stdin": false})).await;
    assert_eq!(outcome.ok(), "end\n");
    ws.start(json!({"language": "bash", "code": "sleep 1000", "stdin": false})).await;
    ws.send(stdin("x")).await;
    ws.expect_status("SANDBOX_STDIN_ERROR").await;
    ws.expect_error("stdin_closed").await;
    kill(&mut ws).await;
}

async fn kill(ws: &mut Ws) {
    ws.send(json!({"action": "kill_process"})).await;
    ws.expect_status("SANDBOX_EXECUTION_FORCE_KILLED").await;
    ws.expect_status("SANDBOX_EXECUTION_DONE").await;
    ws.expect_alive().await;
}

#[tokio::test]
async fn input_after_its_end_is_refused_and_the_program_goes_on() {
    let mut ws = Ws::create(shared()).await;
    ws.start(json!({"language": "bash", "code": "cat; sleep 1000"})).await;
    ws.send(stdin("last\n")).await;
    ws.send(eof()).await;
    assert_eq!(ws.until_output("stdout", "\n").await, "last\n");
    ws.send(stdin("too late\n")).await;
    ws.expect_status("SANDBOX_STDIN_ERROR").await;
    ws.expect_error("stdin_closed").await;
    kill(&mut ws).await;
}

#[tokio::test]
async fn input_for_nothing_is_refused_and_the_connection_stays_open() {
    let mut ws = Ws::create(shared()).await;
    for message in [stdin("x"), eof()] {
        ws.send(message.clone()).await;
        ws.expect_status("SANDBOX_STDIN_ERROR").await;
        ws.expect_error("nothing_running").await;
        ws.expect_alive().await;
        ws.send(message).await;
        ws.expect_status("SANDBOX_STDIN_ERROR").await;
        ws.expect_error("nothing_running").await;
    }
}

/// The program reads only once it gets a signal; then it reads all that was accepted, and nothing of what was refused.
#[tokio::test]
async fn input_beyond_eight_mebibytes_is_refused_and_what_was_taken_is_kept() {
    let mut ws = Ws::create(shared()).await;
    let code = "
import hashlib, signal, sys
def read(*_):
    data = sys.stdin.buffer.read()
    print(len(data), hashlib.sha256(data).hexdigest(), flush=True)
    sys.exit()
signal.signal(signal.SIGUSR1, read)
print('ready', flush=True)
while True: signal.pause()
";
    ws.start(json!({"language": "python", "code": code})).await;
    ws.until_output("stdout", "ready\n").await;
    let piece = |number: usize| format!("{number:07}\n").repeat(128 * 1024);
    for number in 0..8 {
        ws.send(stdin(&piece(number))).await;
    }
    // A pipe's worth may have gone to the program already, but not another two mebibytes.
    ws.send(stdin(&piece(8))).await;
    ws.send(stdin(&piece(9))).await;
    ws.expect_status("SANDBOX_STDIN_ERROR").await;
    ws.expect_error("stdin_full").await;
    // Whether the ninth was taken depends on the pipe; the tenth was not if the ninth was, else neither.
    let mut refused = 1;
    ws.send(json!({"action": "signal", "signal": "SIGUSR1"})).await;
    ws.send(eof()).await;
    let outcome = ws.until_done().await;
    for message in &outcome.between {
        if message["event"] == "error" {
            assert_eq!(message["code"], "stdin_full", "{message}");
            refused += 1;
        }
    }
    let taken: String = (0..10 - refused).map(piece).collect();
    assert_eq!(outcome.ok(), format!("{} {}\n", taken.len(), sha256(taken.as_bytes())), "{refused} refused");
}

#[tokio::test]
async fn large_input_in_many_pieces_arrives_whole() {
    let mut ws = Ws::create(shared()).await;
    ws.start(json!({"language": "bash", "code": "sha256sum"})).await;
    let mut all = String::new();
    for number in 0..48 {
        let piece: String = (0..8192).map(|line| format!("{number}-{line} ß\n")).collect();
        ws.send(stdin(&piece)).await;
        all += &piece;
    }
    ws.send(eof()).await;
    assert_eq!(ws.until_done().await.ok(), format!("{}  -\n", sha256(all.as_bytes())));
}

#[tokio::test]
async fn input_that_was_not_read_is_not_seen_by_the_next_execution() {
    let mut ws = Ws::create(shared()).await;
    ws.send(json!({"language": "bash", "code": "read -r line; echo $line"})).await;
    ws.send(stdin("first\nleft over\n")).await;
    ws.expect_status("SANDBOX_EXECUTION_RUNNING").await;
    assert_eq!(ws.until_done().await.ok(), "first\n");
    ws.send(json!({"language": "bash", "code": "cat"})).await;
    ws.send(eof()).await;
    ws.expect_status("SANDBOX_EXECUTION_RUNNING").await;
    assert_eq!(ws.until_done().await.ok(), "");
}

#[tokio::test]
async fn input_to_a_program_that_closed_its_own_end_does_no_harm() {
    let mut ws = Ws::create(shared()).await;
    let code = "trap 'echo end; exit' USR1; exec <&-; echo closed; while :; do sleep 0.05; done";
    ws.start(json!({"language": "bash", "code": code})).await;
    ws.until_output("stdout", "closed\n").await;
    ws.send(stdin("into nothing\n")).await;
    ws.send(json!({"action": "signal", "signal": "SIGUSR1"})).await;
    let outcome = ws.until_done().await;
    assert_eq!(outcome.ok(), "end\n");
    ws.expect_alive().await;
}

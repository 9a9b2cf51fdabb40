//! Output: whole, in order, unbroken characters, raw bytes where asked for, and back-pressure instead of memory.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::{Duration, Instant};

use base64::{Engine, prelude::BASE64_STANDARD};
use sandboxer_e2e::{Opcode, Options, Raw, Ws, host, sha256, shared};
use serde_json::json;

const MIB: u64 = 1024 * 1024;

/// Prints `lines` numbered lines of 64 printable bytes each.
fn numbered(lines: u64) -> String {
    let code = "
import sys
for i in range(0, LINES, 1024):
    sys.stdout.write(''.join(f'{n:015d} {n * 2654435761:047d}\\n' for n in range(i, min(i + 1024, LINES))))
";
    code.replace("LINES", &lines.to_string())
}

fn numbered_bytes(lines: u64) -> Vec<u8> {
    let text: String = (0..lines).map(|n| format!("{n:015} {:047}\n", n * 2_654_435_761)).collect();
    text.into_bytes()
}

#[tokio::test]
async fn sixty_four_mebibytes_of_stdout_arrive_whole_and_in_order() {
    let mut ws = Ws::create(shared()).await;
    let lines = MIB;
    let outcome = ws.python(&numbered(lines)).await;
    assert_eq!((outcome.exit_code(), outcome.stdout.len() as u64), (Some(0), 64 * MIB), "{:?}", outcome.err());
    assert_eq!(sha256(&outcome.stdout), sha256(&numbered_bytes(lines)));
}

#[tokio::test]
async fn both_streams_at_once_are_each_whole_and_in_order() {
    let mut ws = Ws::create(shared()).await;
    let code = "
import sys, threading
def write(stream):
    for i in range(40000):
        stream.write(f'{stream.name} {i}\\n')
threads = [threading.Thread(target=write, args=(s,)) for s in (sys.stdout, sys.stderr)]
[t.start() for t in threads]
[t.join() for t in threads]
";
    let outcome = ws.python(code).await;
    let expected = |name: &str| (0..40_000).map(|i| format!("<{name}> {i}\n")).collect::<String>();
    assert!(outcome.out() == expected("stdout") && outcome.err() == expected("stderr"), "{}", outcome.done);
}

#[tokio::test]
async fn a_character_on_any_boundary_arrives_unbroken() {
    let mut ws = Ws::create(shared()).await;
    // Byte by byte, so that every boundary within a character is a boundary between writes.
    let code = "
import os, time
for byte in 'aé€😀ß終'.encode() * 3:
    os.write(1, bytes([byte]))
    time.sleep(0.003)
";
    assert_eq!(ws.python(code).await.ok(), "aé€😀ß終".repeat(3));
    // Long runs of characters whose length divides no power of two, at every phase.
    for phase in 0..3 {
        let code = format!("import os\nos.write(1, b'x' * {phase})\nfor _ in range(64): os.write(1, '€'.encode() * 21845)");
        let outcome = ws.python(&code).await;
        assert!(outcome.ok() == "x".repeat(phase) + &"€".repeat(21845 * 64), "phase {phase}: {} bytes", outcome.stdout.len());
    }
}

#[tokio::test]
async fn a_character_that_is_not_finished_yet_does_not_hold_back_what_came_before() {
    let mut ws = Ws::create(shared()).await;
    let code = "import os, sys\nos.write(1, b'before\\xe2\\x82')\nsys.stdin.readline()\nos.write(1, b'\\xac')";
    ws.start(json!({"language": "python", "code": code})).await;
    assert_eq!(ws.until_output("stdout", "before").await, "before");
    ws.send(json!({"event": "stdin", "data": "\n"})).await;
    assert_eq!(ws.until_done().await.ok(), "€");
}

#[tokio::test]
async fn what_is_not_utf8_arrives_as_replacement_and_end_counts_raw_bytes() {
    let mut ws = Ws::create(shared()).await;
    let outcome = ws.python("import os; os.write(1, b'a\\xff\\xfeb')").await;
    assert_eq!(outcome.ok(), "a\u{fffd}\u{fffd}b");

    ws.start(json!({"language": "python", "code": "import os; os.write(1, b'ab\\xe2\\x82')"})).await;
    let (mut text, mut end) = (String::new(), 0);
    let done = loop {
        let message = ws.next().await;
        if message["event"] != "stdout" {
            break message;
        }
        text += message["data"].as_str().unwrap();
        end = message["end"].as_u64().unwrap();
    };
    assert_eq!(done["status"], "SANDBOX_EXECUTION_DONE");
    assert_eq!((text.trim_end_matches('\u{fffd}'), end), ("ab", 4));
    assert!(text.contains('\u{fffd}'), "half a character at the end is told as not UTF-8: {text:?}");
}

#[tokio::test]
async fn base64_carries_every_byte() {
    let mut ws = Ws::create(shared()).await;
    let code = "import os\nfor s in (1, 2):\n    os.write(s, bytes(range(256)) * 300)";
    let outcome = ws.run(json!({"language": "python", "code": code, "encoding": "base64"})).await;
    let expected: Vec<u8> = (0..=255).cycle().take(256 * 300).collect();
    assert!(outcome.stdout == expected && outcome.stderr == expected);
    // And it is for this execution only.
    assert_eq!(ws.bash("echo text").await.ok(), "text\n");
}

#[tokio::test]
async fn base64_is_what_data_holds() {
    let mut ws = Ws::create(shared()).await;
    ws.start(json!({"language": "bash", "code": "printf 'a\\377'", "encoding": "base64"})).await;
    let message = ws.next().await;
    assert_eq!(BASE64_STANDARD.decode(message["data"].as_str().unwrap()).unwrap(), b"a\xff");
    assert_eq!((&message["offset"], &message["end"]), (&json!(0), &json!(2)));
    ws.until_done().await;
}

#[tokio::test]
async fn no_message_of_output_is_empty_and_control_characters_survive() {
    let mut ws = Ws::create(shared()).await;
    let outcome = ws.python(r#"import os; os.write(1, bytes(range(128)) + b'"\\/')"#).await;
    let expected: String = (0..128_u8).map(char::from).chain("\"\\/".chars()).collect();
    assert_eq!(outcome.ok(), expected);
}

/// The writer counts what it has got rid of in a file, which is looked at once it has been killed.
#[tokio::test]
async fn a_slow_reader_makes_the_program_block_and_the_server_does_not_grow() {
    let server = Options::default().start();
    let (mut raw, id) = Raw::create(server.address(), Some(64 * 1024)).await;
    raw.answers = usize::MAX;
    let before = host::rss(server.pid());
    let code = "
import os
piece = b'0123456789abcde\\n' * 4096
for i in range(4096):
    view = memoryview(piece)
    while view:
        view = view[os.write(1, view):]
    open('/tmp/count', 'w').write(str((i + 1) * len(piece)))
";
    raw.send_text(&json!({"language": "python", "code": code, "execution_id": "flood"}).to_string()).await;
    // Nobody reads for three seconds, in which 256 MiB could have been written.
    let (start, mut most) = (Instant::now(), before);
    while start.elapsed() < Duration::from_secs(3) {
        most = most.max(host::rss(server.pid()));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(most - before <= 32 * MIB, "the server grew by {} KiB", (most - before) / 1024);
    raw.send_text(r#"{"action":"kill_process"}"#).await;
    let (mut received, mut killed) = (0, false);
    loop {
        let frame = raw.frame().await.unwrap();
        if frame.opcode == Opcode::Ping {
            raw.send(true, Opcode::Pong, &frame.payload).await;
            continue;
        }
        let message = frame.json();
        match message["event"].as_str().unwrap() {
            "stdout" => {
                assert_eq!(message["offset"].as_u64(), Some(received), "{id}");
                received = message["end"].as_u64().unwrap();
            }
            _ if message["status"] == "SANDBOX_EXECUTION_FORCE_KILLED" => killed = true,
            _ if message["status"] == "SANDBOX_EXECUTION_DONE" => break,
            _ => assert_eq!(message["status"], "SANDBOX_EXECUTION_RUNNING", "{message}"),
        }
        most = most.max(host::rss(server.pid()));
    }
    assert!(killed);
    assert!(most - before <= 32 * MIB, "the server grew by {} KiB", (most - before) / 1024);
    raw.send_text(r#"{"language":"bash","code":"cat /tmp/count"}"#).await;
    assert_eq!(raw.message().await["status"], "SANDBOX_EXECUTION_RUNNING");
    let written: u64 = raw.message().await["data"].as_str().unwrap().trim().parse().unwrap();
    assert!(written < 32 * MIB, "the program did not block: it wrote {written} bytes");
    assert!(received >= written, "{written} bytes were written and {received} arrived");
}

#[tokio::test]
async fn a_reader_that_stalls_and_goes_on_gets_everything() {
    let mut ws = Ws::create(shared()).await;
    let lines = 32 * MIB / 64;
    ws.start(json!({"language": "python", "code": numbered(lines)})).await;
    let mut received = ws.next().await["data"].as_str().unwrap().as_bytes().to_vec();
    // Not a wait for something: this is the stall itself.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let outcome = ws.until_done().await;
    received.extend(outcome.stdout);
    assert_eq!((received.len() as u64, sha256(&received)), (lines * 64, sha256(&numbered_bytes(lines))));
}

#[tokio::test]
async fn a_program_that_never_stops_printing_can_be_killed_at_any_time() {
    let mut ws = Ws::create(shared()).await;
    ws.start(json!({"language": "bash", "code": "yes"})).await;
    for _ in 0..20 {
        assert_eq!(ws.next().await["event"], "stdout");
    }
    ws.send(json!({"action": "kill_process"})).await;
    let outcome = ws.until_done().await;
    assert_eq!(outcome.between.len(), 1, "{:?}", outcome.between);
    assert_eq!(outcome.between[0]["status"], "SANDBOX_EXECUTION_FORCE_KILLED");
    ws.expect_alive().await;
}

#[tokio::test]
async fn output_is_not_held_back_while_the_program_goes_on() {
    let mut ws = Ws::create(shared()).await;
    ws.start(json!({"language": "bash", "code": "printf no-newline; read -r line"})).await;
    let start = Instant::now();
    assert_eq!(ws.next().await["data"], "no-newline");
    assert!(start.elapsed() < Duration::from_secs(5));
    ws.send(json!({"event": "stdin_eof"})).await;
    ws.until_done().await;
}

//! The client on the real server and the real runsc.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod affinity;
mod cli;
mod exact;
mod room;
mod tls;
mod travel;
mod watch;

use std::time::Duration;

use sandboxer_client::{Connection, Ended, Error, ErrorCode, Execution, Options, OutputStream, Sandbox};
use sandboxer_e2e::{Server, shared};

/// Programs on a busy machine take their time.
const DEADLINE: Duration = Duration::from_secs(120);

fn url(server: &Server) -> String {
    format!("http://{}", server.address())
}

/// Notices soon that a connection is dead.
fn quick() -> Connection {
    Connection::default().pings(Duration::from_millis(500), Duration::from_secs(2)).open_within(DEADLINE)
}

#[tokio::test]
async fn programs_run_and_are_collected() {
    let sandbox = Sandbox::create(&url(shared()), Options::default().env("WHO", "world")).await.unwrap();
    let output = sandbox.python("import os, sys\nprint('hello', os.environ['WHO'])\nprint('oops', file=sys.stderr)\nsys.exit(3)").await;
    let output = output.unwrap().output().await.unwrap();
    assert_eq!((output.stdout.as_slice(), output.stderr.as_slice()), (&b"hello world\n"[..], &b"oops\n"[..]));
    assert_eq!((output.exit.code, output.exit.shell_code(), output.truncated), (Some(3), 3, false));
    let execution = Execution::bash("pwd; echo $A; cat").cwd("/tmp").env("A", "b").stdin(false);
    assert_eq!(sandbox.run(execution).await.unwrap().output().await.unwrap().stdout, b"/tmp\nb\n");
    let bytes = sandbox.run(Execution::bash(r"printf '\xff\x00\xfe'").raw(true)).await.unwrap().output().await.unwrap();
    assert_eq!(bytes.stdout, b"\xff\x00\xfe");
    let text = sandbox.bash(r"printf 'a\xffb'").await.unwrap().output().await.unwrap();
    assert_eq!(text.stdout, "a\u{fffd}b".as_bytes());
    sandbox.kill_sandbox().await.unwrap();
}

#[tokio::test]
async fn input_signals_terminals_and_kills_reach_the_program() {
    let sandbox = Sandbox::create(&url(shared()), Options::default()).await.unwrap();
    let mut run = sandbox.bash("trap 'echo got it; exit 7' INT; echo ready; while :; do read -t 0.1; done").await.unwrap();
    assert_eq!(run.next().await.unwrap().data, b"ready\n"[..]);
    run.signal("SIGINT").await.unwrap();
    assert_eq!(run.output().await.unwrap().exit.code, Some(7));

    let mut run = sandbox.run(Execution::bash("stty size; read line; stty size; echo $line").tty(10, 20)).await.unwrap();
    assert_eq!(run.next().await.unwrap().data, b"10 20\r\n"[..]);
    run.resize(30, 40).await.unwrap();
    run.stdin().write("typed\n").await.unwrap();
    let mut text = Vec::new();
    while let Some(piece) = run.next().await {
        assert_eq!(piece.stream, OutputStream::Stdout);
        text.extend_from_slice(&piece.data);
    }
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("30 40") && text.ends_with("typed\r\n"), "{text:?}");

    let mut run = sandbox.python("import time; time.sleep(1000)").await.unwrap();
    run.kill().await.unwrap();
    assert_eq!(run.wait().await.unwrap().signal.as_deref(), Some("SIGKILL"));

    let run = sandbox.run(Execution::bash("sleep 1000").timeout(Duration::from_millis(300))).await.unwrap();
    let exit = run.output().await.unwrap().exit;
    assert!(exit.timed_out && exit.signal.is_some(), "{exit:?}");
    sandbox.kill_sandbox().await.unwrap();
}

#[tokio::test]
async fn refusals_say_why_and_the_sandbox_stays() {
    let server = url(shared());
    let sandbox = Sandbox::create(&server, Options::default()).await.unwrap();
    let error = sandbox.run(Execution::new("cobol", "x")).await.unwrap_err();
    assert!(matches!(error, Error::Refused { code: ErrorCode::UnsupportedLanguage, .. }), "{error:?}");
    assert_eq!(sandbox.bash("echo fine").await.unwrap().output().await.unwrap().stdout, b"fine\n");
    let error = Sandbox::attach(&server, sandbox.id(), sandbox.token()).await.unwrap_err();
    assert!(matches!(error, Error::InUse { .. }), "{error:?}");
    let error = Sandbox::attach(&server, sandbox.id(), Some("wrong")).await.unwrap_err();
    assert!(matches!(error, Error::Denied { .. }), "{error:?}");
    let (id, mut run) = (sandbox.id(), sandbox.bash("sleep 1000").await.unwrap());
    sandbox.kill_sandbox().await.unwrap();
    assert!(matches!(run.wait().await, Err(Error::SandboxEnded { reason: Ended::Killed, .. })));
    let error = Sandbox::attach(&server, id, None).await.unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error:?}");
    let error = Sandbox::create(&server, Options::default().memory_mb(1 << 40)).await.unwrap_err();
    assert!(matches!(error, Error::Refused { code: ErrorCode::LimitTooHigh, .. }), "{error:?}");
}

#[tokio::test]
async fn a_client_that_comes_later_takes_up_what_runs() {
    let server = url(shared());
    let sandbox = Sandbox::create(&server, Options::default()).await.unwrap();
    let mut run = sandbox.bash("for i in 1 2 3; do echo $i; done; read line; echo $line").await.unwrap();
    let mut seen = Vec::new();
    while seen.len() < 6 {
        seen.extend_from_slice(&run.next().await.unwrap().data);
    }
    let (id, token) = (sandbox.id(), sandbox.token().unwrap().to_owned());
    drop(run);
    sandbox.close().await;
    let sandbox = Sandbox::attach(&server, id, Some(&token)).await.unwrap();
    let mut run = sandbox.resume().await.unwrap().expect("it runs");
    run.stdin().write("later\n").await.unwrap();
    assert_eq!(run.output().await.unwrap().stdout, b"later\n");
    assert!(sandbox.resume().await.unwrap().is_none());
    sandbox.kill_sandbox().await.unwrap();
}

#[tokio::test]
async fn a_consumer_that_sleeps_makes_the_program_wait_and_gets_everything() {
    const BYTES: usize = 48 << 20;
    let sandbox = Sandbox::create(&url(shared()), Options::default()).await.unwrap();
    let mut run = sandbox.python(format!("import sys\nfor i in range({}): sys.stdout.write('%063d\\n' % i)", BYTES / 64)).await.unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let mut next = 0;
    let mut rest = Vec::new();
    while let Some(piece) = run.next().await {
        rest.extend_from_slice(&piece.data);
        let whole = rest.len() - rest.len() % 64;
        for line in rest[..whole].chunks(64) {
            assert_eq!(line, format!("{next:063}\n").as_bytes());
            next += 1;
        }
        rest.drain(..whole);
    }
    assert!(run.wait().await.unwrap().success());
    assert_eq!((next, rest.len()), (BYTES / 64, 0));
    sandbox.kill_sandbox().await.unwrap();
}

#[tokio::test]
async fn input_of_many_windows_reaches_a_program_that_reads_late() {
    const BYTES: usize = 20 << 20;
    let sandbox = Sandbox::create(&url(shared()), Options::default()).await.unwrap();
    let mut run = sandbox.bash("sleep 2; sha256sum | cut -d' ' -f1").await.unwrap();
    let data: Vec<u8> = (0..BYTES).map(|n| u8::try_from(n * 31 % 251).unwrap()).collect();
    run.stdin().write(&data).await.unwrap();
    run.stdin_eof().await.unwrap();
    let output = tokio::time::timeout(DEADLINE, run.output()).await.unwrap().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap().trim_end(), sandboxer_e2e::sha256(&data));
    sandbox.kill_sandbox().await.unwrap();
}

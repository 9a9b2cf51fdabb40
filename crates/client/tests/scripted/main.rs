//! The whole client against a server in this process, over a network that fails.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
#![allow(unreachable_pub, dead_code, reason = "the model is shared with the tests of the session")]

#[path = "../../src/session/model.rs"]
mod model;
mod server;

use std::time::{Duration, Instant};

use sandboxer_client::{Connection, Ended, Error, ErrorCode, Execution, Options, OutputStream, ResumeFrom, Sandbox};
use sandboxer_e2e::{CutProxy, Fault, count, seed};
use sandboxer_protocol::client::Status;
use server::{Manner, Scripted};
use tokio::time::{sleep, timeout};

const DEADLINE: Duration = Duration::from_secs(60);

/// Notices everything soon.
fn quick() -> Connection {
    Connection::default().pings(Duration::from_millis(600), Duration::from_secs(1)).connect_timeout(Duration::from_secs(3))
}

fn options() -> Options {
    Options::default().connection(quick())
}

/// Runs a program of so many lines that echoes `input`; returns what came of it.
async fn echo(sandbox: &Sandbox, lines: usize, raw: bool, input: Vec<u8>) -> (Vec<u8>, Vec<u8>) {
    let run = sandbox.run(Execution::python(lines.to_string()).raw(raw));
    let mut run = timeout(DEADLINE, run).await.expect("it does not start").unwrap();
    // Writes as it reads, so that both directions are under way when the connection breaks.
    let mut stdin = run.take_stdin();
    let writing = tokio::spawn(async move {
        for piece in input.chunks(700) {
            stdin.write(piece).await.unwrap();
            sleep(Duration::from_millis(2)).await;
        }
        stdin.eof().await.unwrap();
    });
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    while let Some(piece) = timeout(DEADLINE, run.next()).await.expect("it hangs") {
        let collected = if piece.stream == OutputStream::Stdout { &mut stdout } else { &mut stderr };
        assert_eq!(piece.offset, collected.len() as u64);
        collected.extend_from_slice(&piece.data);
    }
    assert_eq!(run.wait().await.unwrap().code, Some(0));
    writing.await.unwrap();
    (stdout, stderr)
}

#[tokio::test]
async fn a_failing_network_is_not_noticed() {
    let cuts = count(40, 500);
    let server = Scripted::start(seed(), []).await;
    let faults = [Fault::Cut, Fault::Cut, Fault::Cut, Fault::HalfOpen, Fault::Silent(Duration::from_secs(2))];
    let proxy = CutProxy::start(server.address(), seed(), 500..20_000, &faults).await;
    let options = Options::default().connection(quick().open_within(DEADLINE));
    let sandbox = Sandbox::create(&format!("http://{}", proxy.address()), options).await.unwrap();
    let mut runs = 0;
    while proxy.happened() < cuts {
        let input: Vec<u8> = (0..300).flat_map(|line| format!("input {runs} {line}\n").into_bytes()).collect();
        let (stdout, stderr) = echo(&sandbox, 100, runs % 2 == 0, input.clone()).await;
        let model = server.model();
        let program = model.program.as_ref().unwrap();
        assert!(program.input == input, "run {runs}: stdin differs");
        assert!(program.output.stdout == stdout, "run {runs}: stdout differs");
        assert!(program.output.stderr == stderr, "run {runs}: stderr differs");
        runs += 1;
    }
    {
        let model = server.model();
        assert_eq!(model.started.len(), runs);
        assert!(model.started.values().all(|count| *count == 1), "{:?}", model.started);
    }
    proxy.heal();
    timeout(DEADLINE, sandbox.kill_sandbox()).await.expect("it is not killed").unwrap();
    assert!(server.model().killed);
}

#[tokio::test]
async fn cookies_lead_back_to_the_instance() {
    let manner = |set_cookies: &[&'static str]| Manner { set_cookies: set_cookies.to_vec(), ..Manner::default() };
    let manners = [manner(&["route=a; Path=/", "other=1"]), manner(&["route=b"]), manner(&["other=; Max-Age=0"]), Manner::default()];
    let server = Scripted::start(1, manners).await;
    let sandbox = Sandbox::create(&server.url(), options().api_key("key")).await.unwrap();
    for _ in 0..3 {
        assert_eq!(sandbox.python("3").await.unwrap().output().await.unwrap().exit.code, Some(0));
        server.cut();
        sleep(Duration::from_millis(50)).await;
    }
    sandbox.python("3").await.unwrap().output().await.unwrap();
    let sent: Vec<_> = server
        .handshakes()
        .iter()
        .map(|(path, headers)| {
            assert_eq!(headers["authorization"], "Bearer key");
            let attach = path.starts_with("/attach/");
            assert_eq!(headers.contains_key("x-sandbox-token"), attach);
            headers.get("cookie").map(|value| value.to_str().unwrap().to_owned())
        })
        .collect();
    let expected = [None, Some("route=a; other=1"), Some("other=1; route=b"), Some("route=b")];
    assert_eq!(sent, expected.map(|cookie| cookie.map(str::to_owned)));
}

#[tokio::test]
async fn a_dead_connection_is_left_within_the_time_that_was_set() {
    let mut tried = Vec::new();
    loop {
        let server = Scripted::start(1, [Manner::default(), Manner { mute: true, ..Manner::default() }, Manner::default()]).await;
        let sandbox = Sandbox::create(&server.url(), options()).await.unwrap();
        let start = Instant::now();
        server.cut();
        // The next connection is the mute one.
        sandbox.python("3").await.unwrap().output().await.unwrap();
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(1600), "{took:?}");
        if took < Duration::from_secs(6) {
            assert_eq!(server.handshakes().len(), 3);
            break;
        }
        // The machine may have been busy with something else.
        tried.push(took);
        assert!(tried.len() < 3, "{tried:?}");
    }
}

/// It takes longer than the client would wait for a server that is not there, or that is silent.
#[tokio::test]
async fn a_restore_is_waited_for_as_long_as_the_server_answers() {
    let restoring = Manner { restoring: Duration::from_secs(5), ..Manner::default() };
    // What the last one would have to wait for.
    let longer = Manner { restoring: Duration::from_secs(60), ..Manner::default() };
    let server = Scripted::start(1, [Manner::default(), restoring.clone(), restoring.clone(), restoring, longer]).await;
    let options = Options::default().connection(quick().give_up_after(Duration::from_millis(1200)));
    let sandbox = Sandbox::create(&server.url(), options).await.unwrap();
    let mut run = sandbox.python("50").await.unwrap();
    run.stdin_eof().await.unwrap();
    server.cut();
    assert!(run.wait().await.unwrap().success());
    assert_eq!(server.handshakes().len(), 2);
    // The same if it is cut in the middle: up to then the server was there.
    let mut run = sandbox.python("50").await.unwrap();
    run.stdin_eof().await.unwrap();
    server.cut();
    sleep(Duration::from_secs(3)).await;
    server.cut();
    assert!(run.wait().await.unwrap().success());
    assert_eq!(server.handshakes().len(), 4);

    let (id, token) = (sandbox.id(), sandbox.token().unwrap().to_owned());
    sandbox.close().await;
    let impatient = quick().restore_timeout(Duration::from_millis(300)).open_within(Duration::from_millis(600));
    let start = Instant::now();
    let error = Sandbox::attach_with(&server.url(), id, Some(&token), impatient, ResumeFrom::default()).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
    assert!(start.elapsed() < Duration::from_secs(30));
}

#[tokio::test]
async fn a_sandbox_that_was_set_back_is_told_of_and_what_runs_in_it_can_be_had() {
    let server = Scripted::start(1, []).await;
    let sandbox = Sandbox::create(&server.url(), options()).await.unwrap();
    let mut run = sandbox.python("1000000").await.unwrap();
    run.next().await.unwrap();
    assert_eq!(sandbox.generation(), 0);
    server.model().rewind(7, "earlier".parse().unwrap());
    server.cut();
    assert_eq!(run.wait().await, Err(Error::Rewound { generation: 7 }));
    assert_eq!(run.stdin().write("lost").await, Err(Error::InputClosed));
    assert_eq!(sandbox.generation(), 7);
    let busy = sandbox.python("3").await.unwrap_err();
    assert!(matches!(&busy, Error::Refused { code: ErrorCode::ExecutionInProgress, message } if message.contains("resume")), "{busy:?}");
    // The other execution is not taken for the lost one, and stays to be had.
    let lost = sandbox.resume_execution(run.id()).await.unwrap_err();
    assert_eq!(lost, Error::ExecutionLost { id: run.id().clone(), now: Some("earlier".parse().unwrap()) });
    let earlier = sandbox.resume_execution(&"earlier".parse().unwrap()).await.unwrap();
    assert_eq!(earlier.id().to_string(), "earlier");
    let output = earlier.output().await.unwrap();
    assert!(output.exit.success() && output.stdout == server.model().program.as_ref().unwrap().output.stdout);

    // While nothing ran, whoever uses it next is told, once.
    server.model().rewind(8, "much-earlier".parse().unwrap());
    server.cut();
    assert_eq!(sandbox.python("3").await.unwrap_err(), Error::Rewound { generation: 8 });
    let earlier = sandbox.resume().await.unwrap().expect("it runs");
    assert!(earlier.output().await.unwrap().exit.success());
    assert!(sandbox.python("3").await.unwrap().output().await.unwrap().exit.success());
}

#[tokio::test]
async fn in_use_is_borne_after_an_own_cut_and_told_at_once_otherwise() {
    let away = |status| Manner { turn_away: Some(status), ..Manner::default() };
    let (in_use, moving) = (away(Status::InUse), away(Status::HandoffInProgress));
    let server = Scripted::start(1, [Manner::default(), in_use.clone(), in_use.clone(), moving, Manner::default()]).await;
    let sandbox = Sandbox::create(&server.url(), options()).await.unwrap();
    server.cut();
    sandbox.python("3").await.unwrap().output().await.unwrap();
    assert_eq!(server.handshakes().len(), 5);

    let server = Scripted::start(1, [in_use]).await;
    let start = Instant::now();
    let patient = Connection::default().in_use_for(Duration::from_secs(60));
    let error = Sandbox::attach_with(&server.url(), sandbox.id(), None, patient, ResumeFrom::default()).await.unwrap_err();
    assert!(matches!(error, Error::InUse { .. }), "{error:?}");
    assert!(start.elapsed() < Duration::from_secs(30));
}

#[tokio::test]
async fn in_use_for_too_long_is_an_error() {
    let in_use = Manner { turn_away: Some(Status::InUse), ..Manner::default() };
    let server = Scripted::start(1, [Manner::default(), in_use]).await;
    let options = Options::default().connection(quick().in_use_for(Duration::from_millis(500)));
    let sandbox = Sandbox::create(&server.url(), options).await.unwrap();
    server.cut();
    let error = sandbox.python("3").await.unwrap_err();
    assert!(matches!(error, Error::InUse { .. }), "{error:?}");
}

#[tokio::test]
async fn a_server_that_stays_away_is_given_up() {
    let server = Scripted::start(1, []).await;
    let url = server.url();
    let options = Options::default().connection(quick().give_up_after(Duration::from_millis(600)));
    let sandbox = Sandbox::create(&url, options).await.unwrap();
    let mut run = sandbox.python("1000000").await.unwrap();
    server.cut();
    drop(server);
    let start = Instant::now();
    let error = run.wait().await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
    assert!(start.elapsed() < Duration::from_secs(30));
    // And it stays so, for every handle.
    assert_eq!(run.wait().await.unwrap_err(), error);
    assert_eq!(run.kill().await.unwrap_err(), error);
    assert_eq!(sandbox.python("1").await.unwrap_err(), error);
    assert_eq!(run.stdin().write("x").await.unwrap_err(), Error::InputClosed);
    let connection = quick().open_within(Duration::from_millis(100));
    let error = Sandbox::attach_with(&url, sandbox.id(), None, connection, ResumeFrom::default()).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
}

#[tokio::test]
async fn a_refused_handshake_says_what_to_do() {
    for (status, expected) in [(401, "Denied"), (403, "Denied"), (404, "Refused"), (302, "Refused")] {
        let server = Scripted::start(1, [Manner { status: Some(status), ..Manner::default() }]).await;
        let error = Sandbox::create(&server.url(), options()).await.unwrap_err();
        assert!(format!("{error:?}").starts_with(expected), "{status}: {error:?}");
        assert_eq!(server.handshakes().len(), 1, "{status} is final");
    }
    let busy = Manner { status: Some(503), ..Manner::default() };
    let server = Scripted::start(1, [busy.clone(), busy, Manner::default()]).await;
    Sandbox::create(&server.url(), options()).await.unwrap();
    assert_eq!(server.handshakes().len(), 3);
}

#[tokio::test]
async fn a_program_that_is_too_large_for_the_server_is_not_sent_for_ever() {
    let too_large = Manner { close: Some(1009), ..Manner::default() };
    // The configuration is a message too; it passes.
    let server = Scripted::start(1, [Manner::default(), too_large, Manner::default()]).await;
    let sandbox = Sandbox::create(&server.url(), options()).await.unwrap();
    server.cut();
    sleep(Duration::from_millis(200)).await;
    let error = sandbox.python("3").await.unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
    sandbox.python("3").await.unwrap().output().await.unwrap();
}

#[tokio::test]
async fn one_program_runs_at_a_time_and_a_dropped_one_is_not_in_the_way() {
    let server = Scripted::start(1, []).await;
    let sandbox = Sandbox::create(&server.url(), options()).await.unwrap();
    let run = sandbox.python("5").await.unwrap();
    let error = sandbox.python("1").await.unwrap_err();
    assert!(matches!(error, Error::Refused { code: ErrorCode::ExecutionInProgress, .. }), "{error:?}");
    assert!(error.is_temporary());
    let killer = run.controller();
    drop(run);
    killer.kill().await.unwrap();
    // It is gone when it is gone.
    let deadline = Instant::now() + DEADLINE;
    loop {
        match sandbox.python("1").await {
            Ok(run) => {
                run.output().await.unwrap();
                break;
            }
            Err(error) => assert!(error.is_temporary() && Instant::now() < deadline, "{error:?}"),
        }
    }
}

#[tokio::test]
async fn signals_kills_and_ends_get_through() {
    let server = Scripted::start(1, []).await;
    let sandbox = Sandbox::create(&server.url(), options()).await.unwrap();
    let mut run = sandbox.python("5").await.unwrap();
    run.signal("SIGINT").await.unwrap();
    assert!(matches!(run.signal("SIGNOT").await, Err(Error::Invalid { .. })));
    run.resize(3, 4).await.unwrap();
    run.kill().await.unwrap();
    let exit = run.wait().await.unwrap();
    assert_eq!((exit.signal.as_deref(), exit.shell_code(), exit.duration), (Some("SIGKILL"), 137, Duration::from_micros(1500)));
    {
        let model = server.model();
        assert_eq!((model.signals.as_slice(), model.size), (&[2][..], Some((3, 4))));
    }
    run.kill().await.unwrap();
    assert!(matches!(run.signal("SIGINT").await, Err(Error::Refused { code: ErrorCode::NothingRunning, .. })));
    assert_eq!(run.stdin().write("x").await, Err(Error::InputClosed));
}

#[tokio::test]
async fn another_client_goes_on_where_the_first_had_got_to() {
    let server = Scripted::start(1, []).await;
    let sandbox = Sandbox::create(&server.url(), options()).await.unwrap();
    let mut run = sandbox.python("50").await.unwrap();
    run.stdin().write("first ").await.unwrap();
    run.stdin().flush().await.unwrap();
    let mut stdout = Vec::new();
    while stdout.len() < 500 {
        let piece = run.next().await.unwrap();
        if piece.stream == OutputStream::Stdout {
            stdout.extend_from_slice(&piece.data);
        }
    }
    let (id, token) = (sandbox.id(), sandbox.token().unwrap().to_owned());
    let from = ResumeFrom::offsets(run.id().clone(), run.offsets().0, run.offsets().1);
    drop((sandbox, run));
    let sandbox = Sandbox::attach_with(&server.url(), id, Some(&token), quick(), from).await.unwrap();
    let mut run = sandbox.resume().await.unwrap().expect("it runs");
    assert!(sandbox.resume().await.unwrap().is_none());
    run.stdin().write("second").await.unwrap();
    run.stdin_eof().await.unwrap();
    // What the first client's connection had acknowledged by its pongs and not consumed is gone, and is seen to be.
    let mut expected = stdout.len() as u64;
    let mut gone = 0;
    while let Some(piece) = run.next().await {
        if piece.stream == OutputStream::Stdout {
            gone += piece.offset - expected;
            expected = piece.end;
            stdout.extend_from_slice(&piece.data);
        }
    }
    assert!(run.wait().await.unwrap().success());
    let model = server.model();
    let program = model.program.as_ref().unwrap();
    assert_eq!(program.input, b"first second");
    assert_eq!(stdout.len() as u64 + gone, program.output.stdout.len() as u64);
}

#[tokio::test]
async fn a_killed_sandbox_is_gone_for_every_handle() {
    let server = Scripted::start(1, []).await;
    let sandbox = Sandbox::create(&server.url(), options()).await.unwrap();
    let (id, token) = (sandbox.id(), sandbox.token().unwrap().to_owned());
    let mut run = sandbox.python("5").await.unwrap();
    sandbox.kill_sandbox().await.unwrap();
    let error = run.wait().await.unwrap_err();
    assert!(matches!(error, Error::SandboxEnded { reason: Ended::Killed, .. }), "{error:?}");
    let error = Sandbox::attach(&server.url(), id, Some(&token)).await.unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error:?}");
}

#[tokio::test]
async fn a_closed_sandbox_goes_on_without_its_client() {
    let server = Scripted::start(1, []).await;
    let sandbox = Sandbox::create(&server.url(), options()).await.unwrap();
    let (id, token) = (sandbox.id(), sandbox.token().unwrap().to_owned());
    let mut run = sandbox.python("1000").await.unwrap();
    sandbox.close().await;
    assert_eq!(run.wait().await, Err(Error::Closed));
    assert!(!server.model().killed);
    let sandbox = Sandbox::attach(&server.url(), id, Some(&token)).await.unwrap();
    let output = sandbox.resume().await.unwrap().expect("it runs").output().await.unwrap();
    assert!(output.exit.success() && !output.stdout.is_empty());
}

#[tokio::test]
async fn a_slow_consumer_stops_the_server_and_loses_nothing() {
    let server = Scripted::start(1, []).await;
    let options = Options::default().connection(quick().output_buffer(2048));
    let sandbox = Sandbox::create(&server.url(), options).await.unwrap();
    let mut run = sandbox.python("400").await.unwrap();
    run.stdin_eof().await.unwrap();
    // Nothing is read and nothing ponged meanwhile, and that is no reason to leave the connection.
    sleep(Duration::from_secs(4)).await;
    assert!(server.model().program.as_ref().unwrap().ended.is_none(), "the program waits");
    assert_eq!(server.handshakes().len(), 1);
    let output = run.output().await.unwrap();
    let model = server.model();
    let program = model.program.as_ref().unwrap();
    assert!(output.stdout == program.output.stdout && output.stderr == program.output.stderr && !output.truncated);
}

#[tokio::test]
async fn collecting_can_be_limited() {
    let server = Scripted::start(1, []).await;
    let sandbox = Sandbox::create(&server.url(), options()).await.unwrap();
    let output = sandbox.python("200").await.unwrap().output_up_to(100).await.unwrap();
    assert_eq!((output.stdout.len(), output.stderr.len(), output.truncated, output.exit.success()), (100, 100, true, true));
}

//! The promises, each a test.

use std::time::Duration;

use bytes::BytesMut;
use sandboxer_protocol::{
    SandboxId,
    agent::{AGENT_PROTOCOL_VERSION, Exit, ExitCause, FromAgent, PerStream, StdinRefusal, ToAgent, encode_to_agent},
};
use tokio::time::timeout;

use super::{
    Subject,
    session::{PLENTY, SEQUENCE, Session, WINDOW, launch, text},
};
use crate::{AfterSave, End, Ended, RuntimeError};

/// How long "at once" may take on a loaded machine.
const AT_ONCE: Duration = Duration::from_secs(30);
/// It is in the middle whenever something is done to it.
const COUNTER: &str = "for i in $(seq 1 100000); do echo line $i; sleep 0.02; done";

/// The counter goes on where it was, without gap or repetition, and can be ended.
async fn goes_on(session: &mut Session) {
    session.until_stdout(session.received.stdout.len() + 40).await;
    session.send(ToAgent::Kill { number: session.number, cause: None }).await;
    assert_eq!(code(&session.until_exit().await), (None, Some(9)));
    let said = text(&session.received.stdout);
    let whole = said.rfind('\n').expect("lines");
    for (at, line) in said[..whole].lines().enumerate() {
        assert_eq!(line, format!("line {}", at + 1));
    }
}

fn code(exit: &Exit) -> (Option<i32>, Option<i32>) {
    (exit.code, exit.signal)
}

async fn end_of(ended: &Ended) -> End {
    timeout(AT_ONCE, ended.wait()).await.expect("the end is told at once")
}

pub async fn an_agent_answers_with_its_version(subject: &dyn Subject) {
    let session = Session::start(subject).await;
    let FromAgent::HelloReply { version, execution, .. } = &session.link.hello else { panic!("no reply") };
    assert_eq!((*version, execution.is_none()), (AGENT_PROTOCOL_VERSION, true));
    assert_eq!(session.link.ended.now(), None);
    session.remove(subject).await;
}

pub async fn output_and_exit_code_are_exact(subject: &dyn Subject) {
    let mut session = Session::start(subject).await;
    let (stdout, stderr, exit) = session.run("echo hello; echo oops >&2; echo 'a b'; exit 3").await;
    assert_eq!((stdout.as_str(), stderr.as_str(), code(&exit)), ("hello\na b\n", "oops\n", (Some(3), None)));
    assert_eq!(exit.end, PerStream { stdout: 10, stderr: 5 });
    session.remove(subject).await;
}

pub async fn a_program_that_a_signal_ended_says_which(subject: &dyn Subject) {
    let mut session = Session::start(subject).await;
    let (_, _, exit) = session.run("kill -9 $$").await;
    assert_eq!(code(&exit), (None, Some(9)));
    session.remove(subject).await;
}

pub async fn input_is_taken_once_and_in_order(subject: &dyn Subject) {
    let mut session = Session::start(subject).await;
    let number = session.exec("cat").await;
    session.allow(PLENTY).await;
    let writer = &mut session.link.writer;
    for (offset, piece) in [(0, &b"hel"[..]), (3, b"lo\n"), (0, b"hello\n"), (100, b"gap")] {
        writer.stdin(number, offset, piece).await.expect("it is sent");
    }
    let mut answers = Vec::new();
    while answers.len() < 4 {
        match session.control().await {
            FromAgent::StdinAck { offset, .. } => answers.push(Ok(offset)),
            FromAgent::StdinRefused { reason, taken, .. } => answers.push(Err((reason, taken))),
            _ => {}
        }
    }
    assert_eq!(answers, [Ok(3), Ok(6), Ok(6), Err((StdinRefusal::Gap, 6))]);
    session.send(ToAgent::StdinEof { number, offset: 6 }).await;
    let exit = session.until_exit().await;
    assert_eq!((text(&session.received.stdout).as_str(), code(&exit)), ("hello\n", (Some(0), None)));
    session.remove(subject).await;
}

pub async fn a_killed_program_says_so(subject: &dyn Subject) {
    let mut session = Session::start(subject).await;
    let number = session.exec("echo begun; sleep 600").await;
    session.allow(PLENTY).await;
    session.until_stdout(6).await;
    session.send(ToAgent::Kill { number, cause: Some(ExitCause::TimedOut) }).await;
    let exit = timeout(AT_ONCE, session.until_exit()).await.expect("it ends at once");
    assert_eq!((code(&exit), exit.cause), ((None, Some(9)), Some(ExitCause::TimedOut)));
    session.remove(subject).await;
}

pub async fn a_program_killed_at_once_says_so(subject: &dyn Subject) {
    let mut session = Session::start(subject).await;
    for wait in 0..10 {
        let number = session.exec("sleep 600").await;
        tokio::time::sleep(Duration::from_millis(wait)).await;
        session.send(ToAgent::Kill { number, cause: Some(ExitCause::ForceKilled) }).await;
        let exit = timeout(AT_ONCE, session.until_exit()).await.expect("it ends at once");
        assert_eq!((code(&exit), exit.cause), ((None, Some(9)), Some(ExitCause::ForceKilled)));
    }
    assert_eq!(session.run("echo still there").await.0, "still there\n");
    session.remove(subject).await;
}

pub async fn what_the_agent_keeps_for_the_next_server_comes_back(subject: &dyn Subject) {
    let mut session = Session::start(subject).await;
    session.run("echo one").await;
    for end in [false, true] {
        let runtime = subject.restarted().await;
        session = session.handed_to(&*runtime, &[]).await;
        let FromAgent::HelloReply { execution: Some(execution), last_number, .. } = &session.link.hello else { panic!("no execution") };
        assert_eq!((execution.end_acknowledged, execution.end.stdout, *last_number), (end, 4, Some(execution.number)));
        let number = execution.number;
        session.send(ToAgent::Ack { number, upto: execution.end, end: true }).await;
        session.settle().await;
    }
    session.run("echo two").await;
    let runtime = subject.restarted().await;
    session = session.handed_to(&*runtime, &[]).await;
    let FromAgent::HelloReply { execution: Some(execution), .. } = &session.link.hello else { panic!("no execution") };
    assert!(!execution.end_acknowledged, "that was another one's");
    session.remove(subject).await;
}

pub async fn a_second_program_finds_the_files_of_the_first(subject: &dyn Subject) {
    let mut session = Session::start(subject).await;
    session.run("echo kept > /root/file").await;
    let (stdout, _, exit) = session.run("cat /root/file").await;
    assert_eq!((stdout.as_str(), code(&exit)), ("kept\n", (Some(0), None)));
    session.remove(subject).await;
}

pub async fn output_waits_for_credit(subject: &dyn Subject) {
    let mut session = Session::start(subject).await;
    session.exec("head -c 100000 /dev/zero | tr '\\0' x; exit 4").await;
    session.allow(1000).await;
    session.until_stdout(1000).await;
    if session.exit.is_none() {
        // It all fits into the window, so the program is not held up by it.
        while !matches!(session.control().await, FromAgent::Exited { .. }) {}
    }
    session.expect_silence().await;
    assert_eq!(session.received.stdout.len(), 1000);
    session.allow(PLENTY).await;
    session.until_stdout(100_000).await;
    assert!(session.received.stdout.iter().all(|byte| *byte == b'x'));
    session.remove(subject).await;
}

pub async fn a_full_window_blocks_until_it_is_acknowledged(subject: &dyn Subject) {
    // More than the window and all pipes on the way hold.
    const COUNT: usize = 5_000_000;
    let mut session = Session::start(subject).await;
    let number = session.exec(&format!("head -c {COUNT} /dev/zero | tr '\\0' y")).await;
    session.allow(PLENTY).await;
    session.until_stdout(WINDOW as usize).await;
    session.expect_silence().await;
    assert_eq!(session.received.stdout.len(), WINDOW as usize, "no more than the window is held");
    while session.received.stdout.len() < COUNT {
        let had = session.received.stdout.len();
        session.send(ToAgent::Ack { number, upto: PerStream { stdout: had as u64, stderr: 0 }, end: false }).await;
        session.until_stdout((had + 1).min(COUNT)).await;
    }
    let exit = session.until_exit().await;
    assert_eq!((exit.code, exit.end.stdout), (Some(0), COUNT as u64));
    session.remove(subject).await;
}

pub async fn a_resumed_stream_repeats_exactly(subject: &dyn Subject) {
    let mut session = Session::start(subject).await;
    session.run("echo 0123456789").await;
    session.received.stdout.truncate(4);
    session.resume().await;
    let resumed = session.control().await;
    let FromAgent::Resumed { from, end, sequence, .. } = resumed else { panic!("not resumed: {resumed:?}") };
    assert_eq!((from.stdout, end.stdout, sequence), (4, 11, SEQUENCE));
    session.until_stdout(11).await;
    assert_eq!(text(&session.received.stdout), "0123456789\n");
    session.remove(subject).await;
}

pub async fn a_server_that_died_in_the_middle_of_a_frame_loses_nothing(subject: &dyn Subject) {
    let mut session = Session::start(subject).await;
    session.exec(COUNTER).await;
    session.allow(PLENTY).await;
    session.until_stdout(40).await;
    let mut frame = BytesMut::new();
    encode_to_agent(&mut frame, &ToAgent::Ping { value: 1 });
    for keep in [frame.len() / 2, 3, frame.len()] {
        let runtime = subject.restarted().await;
        session = session.handed_to(&*runtime, &frame[..keep]).await;
        let FromAgent::HelloReply { execution: Some(execution), .. } = &session.link.hello else { panic!("no execution") };
        assert_eq!(execution.note, "of the test");
        session.resume().await;
        let had = session.received.stdout.len();
        session.until_stdout(had + 20).await;
    }
    goes_on(&mut session).await;
    session.remove(subject).await;
}

pub async fn nobody_can_take_up_what_is_not_there(subject: &dyn Subject) {
    let home = tempfile::tempdir().expect("a directory");
    let error = subject.runtime().take_up(SandboxId::random(), home.path()).await.expect_err("there is none");
    assert!(matches!(error, RuntimeError::NotFound), "{error}");
}

pub async fn a_removed_sandbox_leaves_nothing(subject: &dyn Subject) {
    let mut session = Session::start(subject).await;
    session.exec("sleep 600").await;
    session.settle().await;
    let (id, dir, ended) = (session.launch.id, session.launch.dir.clone(), session.link.ended.clone());
    let removed = timeout(Duration::from_secs(60), subject.runtime().remove(id, &dir)).await;
    removed.expect("it does not wait for the program").expect("it is removed");
    assert_eq!(subject.leftovers(id, &dir), Vec::<String>::new());
    assert_eq!(end_of(&ended).await, End::Killed);
    subject.runtime().remove(id, &dir).await.expect("and again");
    let error = subject.runtime().take_up(id, &dir).await.expect_err("it is gone");
    assert!(matches!(error, RuntimeError::NotFound), "{error}");
}

pub async fn a_half_started_sandbox_leaves_nothing(subject: &dyn Subject) {
    for wait in [0, 20, 60] {
        let (launch, _, _home) = launch(subject);
        let instance = subject.runtime().start(&launch).await.expect("it starts");
        tokio::time::sleep(Duration::from_millis(wait)).await;
        subject.runtime().remove(launch.id, &launch.dir).await.expect("it is removed");
        assert_eq!(subject.leftovers(launch.id, &launch.dir), Vec::<String>::new(), "after {wait} ms");
        end_of(&instance.ended).await;
    }
}

pub async fn a_sandbox_of_an_earlier_server_can_be_removed(subject: &dyn Subject) {
    let session = Session::start(subject).await;
    let later = subject.restarted().await;
    later.remove(session.launch.id, &session.launch.dir).await.expect("it is removed");
    assert_eq!(subject.leftovers(session.launch.id, &session.launch.dir), Vec::<String>::new());
    end_of(&session.link.ended).await;
    // The earlier one has still heard of it.
    session.remove(subject).await;
}

pub async fn a_sandbox_killed_from_outside_is_noticed_at_once(subject: &dyn Subject) {
    let session = Session::start(subject).await;
    subject.kill_from_outside(session.launch.id, &session.launch.dir).await;
    assert_eq!(end_of(&session.link.ended).await, End::Killed);
    session.remove(subject).await;
}

pub async fn a_sandbox_taken_up_and_killed_is_noticed_at_once(subject: &dyn Subject) {
    let session = Session::start(subject).await;
    let runtime = subject.restarted().await;
    let session = session.handed_to(&*runtime, &[]).await;
    subject.kill_from_outside(session.launch.id, &session.launch.dir).await;
    assert_eq!(end_of(&session.link.ended).await, End::Killed);
    runtime.remove(session.launch.id, &session.launch.dir).await.expect("it is removed");
    assert_eq!(subject.leftovers(session.launch.id, &session.launch.dir), Vec::<String>::new());
    session.remove(subject).await;
}

pub async fn a_saved_sandbox_goes_on_and_so_does_its_copy(subject: &dyn Subject) {
    let mut session = Session::start(subject).await;
    session.exec(COUNTER).await;
    session.allow(PLENTY).await;
    session.until_stdout(40).await;
    session.settle().await;
    let (id, dir) = (session.launch.id, session.launch.dir.clone());
    subject.runtime().checkpoint(id, &dir, &session.save_dir(), AfterSave::GoOn, None).await.expect("it is saved");
    let mut copy = session.restored(subject).await;
    goes_on(&mut session).await;
    goes_on(&mut copy).await;
    copy.remove(subject).await;
    session.remove(subject).await;
}

pub async fn a_restore_may_begin_before_anything_is_there(subject: &dyn Subject) {
    let mut session = Session::start(subject).await;
    session.exec(COUNTER).await;
    session.allow(PLENTY).await;
    session.until_stdout(40).await;
    session.settle().await;
    let (id, dir) = (session.launch.id, session.launch.dir.clone());
    subject.runtime().checkpoint(id, &dir, &session.save_dir(), AfterSave::GoOn, None).await.expect("it is saved");
    let mut copy = session.restored_late(subject).await;
    goes_on(&mut copy).await;
    // It is a sandbox as any other, also to the next server.
    let runtime = subject.restarted().await;
    let copy = copy.handed_to(&*runtime, &[]).await;
    subject.kill_from_outside(copy.launch.id, &copy.launch.dir).await;
    assert_eq!(end_of(&copy.link.ended).await, End::Killed);
    runtime.remove(copy.launch.id, &copy.launch.dir).await.expect("it is removed");
    copy.remove(subject).await;
    session.remove(subject).await;
}

pub async fn a_restore_that_was_only_begun_leaves_nothing(subject: &dyn Subject) {
    let (launch, _, _home) = launch(subject);
    let instance = subject.runtime().create(&launch).await.expect("a container is made");
    subject.runtime().remove(launch.id, &launch.dir).await.expect("it is removed");
    assert_eq!(subject.leftovers(launch.id, &launch.dir), Vec::<String>::new());
    drop(instance);
    // Nor is it a sandbox to the next server.
    let (launch, _, _home) = super::session::launch(subject);
    let _instance = subject.runtime().create(&launch).await.expect("a container is made");
    let runtime = subject.restarted().await;
    let found = runtime.take_up(launch.id, &launch.dir).await;
    assert!(matches!(found, Err(RuntimeError::NotFound | RuntimeError::Unavailable(_))), "{found:?}");
    runtime.remove(launch.id, &launch.dir).await.expect("it is removed");
    assert_eq!(subject.leftovers(launch.id, &launch.dir), Vec::<String>::new());
}

pub async fn a_sandbox_saved_to_stop_goes_on_elsewhere(subject: &dyn Subject) {
    let mut session = Session::start(subject).await;
    session.exec(COUNTER).await;
    session.allow(PLENTY).await;
    session.until_stdout(40).await;
    session.settle().await;
    let (id, dir) = (session.launch.id, session.launch.dir.clone());
    subject.runtime().checkpoint(id, &dir, &session.save_dir(), AfterSave::Freeze, None).await.expect("it is saved");
    // What was in the pipe still comes.
    while session.try_control(Duration::from_millis(200)).await.is_ok() {}
    session.expect_silence().await;
    subject.runtime().remove(id, &dir).await.expect("it is removed");
    assert_eq!(subject.leftovers(id, &dir), Vec::<String>::new());
    let mut copy = session.restored(subject).await;
    goes_on(&mut copy).await;
    copy.remove(subject).await;
}

pub async fn a_sandbox_saved_to_stop_can_be_thawed(subject: &dyn Subject) {
    let mut session = Session::start(subject).await;
    session.exec(COUNTER).await;
    session.allow(PLENTY).await;
    session.until_stdout(40).await;
    session.settle().await;
    let (id, dir) = (session.launch.id, session.launch.dir.clone());
    subject.runtime().checkpoint(id, &dir, &session.save_dir(), AfterSave::Freeze, None).await.expect("it is saved");
    subject.runtime().resume(id, &dir).await.expect("it is thawed");
    session.allow(PLENTY).await;
    goes_on(&mut session).await;
    session.remove(subject).await;
}

pub async fn a_failed_save_keeps_the_sandbox_running(subject: &dyn Subject) {
    let mut session = Session::start(subject).await;
    let (id, dir) = (session.launch.id, session.launch.dir.clone());
    let file = session.save_dir().join("file");
    std::fs::write(&file, "").expect("a file");
    for after in [AfterSave::GoOn, AfterSave::Freeze] {
        let error = subject.runtime().checkpoint(id, &dir, &file.join("below"), after, None).await.expect_err("there is no such directory");
        assert!(matches!(error, RuntimeError::Failed { .. }), "{error}");
        assert_eq!(session.run("echo alive").await.0, "alive\n");
    }
    session.remove(subject).await;
}

pub async fn a_frozen_sandbox_waits(subject: &dyn Subject) {
    let mut session = Session::start(subject).await;
    session.exec(COUNTER).await;
    session.allow(PLENTY).await;
    session.until_stdout(40).await;
    let (id, dir) = (session.launch.id, session.launch.dir.clone());
    subject.runtime().pause(id, &dir).await.expect("it is frozen");
    // What was in the pipe still comes.
    while session.try_control(Duration::from_millis(200)).await.is_ok() {}
    session.expect_silence().await;
    subject.runtime().resume(id, &dir).await.expect("it is thawed");
    subject.runtime().resume(id, &dir).await.expect("it is not frozen, which is no error");
    goes_on(&mut session).await;
    session.remove(subject).await;
}

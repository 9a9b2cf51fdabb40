use std::os::fd::OwnedFd;

use nix::{fcntl::OFlag, unistd::pipe2};
use sandboxer_protocol::agent::Language;

use super::*;
use crate::sample::program;

const WINDOW: u64 = 1000;
/// Writes of 4 KiB and more, all at once, that are a torrent.
const TORRENT_TURNS: usize = 70;

fn execution(detached: DetachedOutput) -> (Execution, File) {
    let config = AgentConfig {
        marker: String::new(),
        disk_bytes: 0,
        disk_inodes: 0,
        memory_bytes: None,
        pids: None,
        output_window_bytes: WINDOW,
        stdin_window_bytes: 100,
        spares: None,
    };
    let spec = ExecSpec { detached_output: detached, ..program(Language::Bash) };
    let mut execution = Execution::new(&spec, 1, &config, Instant::now());
    execution.phase = Phase::Running;
    let (read, write) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).unwrap();
    execution.output.stdout.connect(read);
    (execution, write.into())
}

fn held(execution: &mut Execution) -> Vec<u8> {
    let window = &mut execution.output.stdout.window;
    window.resume(0, u64::MAX);
    window.next_piece(usize::MAX).map(|piece| piece.data.concat()).unwrap_or_default()
}

fn numbered(count: usize) -> Vec<u8> {
    (0..count).map(|i| (i % 251) as u8).collect()
}

#[test]
fn a_full_window_leaves_the_rest_in_the_pipe_and_the_end_takes_it_all() {
    let (mut execution, mut program) = execution(DetachedOutput::Block);
    program.write_all(&numbered(5000)).unwrap();
    while execution.fill(Stream::Stdout, Instant::now()) {}
    assert_eq!(execution.output.stdout.window.end(), WINDOW);
    let (exit, left) = execution.finish(Some(0), None, None, Instant::now());
    assert_eq!(exit.end.stdout, 5000);
    assert_eq!(held(&mut execution), numbered(5000));
    assert_eq!(left.len(), 1, "somebody else may still hold the pipe");
}

#[test]
fn with_nobody_attached_the_oldest_goes_if_asked_for() {
    let (mut execution, mut program) = execution(DetachedOutput::DropOldest);
    execution.pause();
    program.write_all(&numbered(5000)).unwrap();
    while execution.fill(Stream::Stdout, Instant::now()) {}
    assert_eq!(execution.output.stdout.window.end(), 5000);
    assert_eq!(held(&mut execution), numbered(5000)[4000..]);
}

/// A line on one stream neither ends a torrent on the other nor makes anybody wait that has more to be read.
#[test]
fn a_torrent_gathers_whatever_the_other_stream_does() {
    let (mut execution, mut program) = execution(DetachedOutput::Block);
    execution.output.stdout.window.extend(1 << 20);
    let (read, write) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).unwrap();
    execution.output.stderr.connect(read);
    let mut stderr = File::from(write);
    let now = Instant::now();
    let mut gathered = 0;
    for _ in 0..20 {
        print(&mut execution, &mut program, 32 * 1024, now);
        stderr.write_all(b"x").unwrap();
        execution.output.stderr.readable = true;
        assert_eq!(execution.should_gather(), None, "there is more to be read");
        assert!(!execution.fill(Stream::Stderr, now));
        gathered += u32::from(execution.should_gather().is_some());
        assert_eq!(execution.should_gather(), None, "once");
    }
    // From a quarter of a MiB on.
    assert_eq!(gathered, 13);
    // What is closed is not waited for.
    drop(stderr);
    execution.output.stderr.readable = true;
    assert!(!execution.fill(Stream::Stderr, now));
    print(&mut execution, &mut program, 32 * 1024, now);
    assert!(execution.output.stderr.source.is_none());
    assert!(execution.should_gather().is_some());
}

/// The program writes, an edge tells of it, and all of it is read.
fn print(execution: &mut Execution, program: &mut File, count: usize, now: Instant) {
    program.write_all(&numbered(count)).unwrap();
    execution.output.stdout.readable = true;
    while execution.fill(Stream::Stdout, now) {}
}

#[test]
fn a_torrent_that_nobody_hears_and_whose_oldest_goes_gathers_too() {
    let (mut execution, mut program) = execution(DetachedOutput::DropOldest);
    execution.pause();
    let now = Instant::now();
    for _ in 0..TORRENT_TURNS {
        print(&mut execution, &mut program, 4096, now);
    }
    assert!(execution.should_gather().is_some());
    assert_eq!(execution.should_gather(), None, "once");
    assert_eq!(execution.output.stdout.window.held(), usize::try_from(WINDOW).unwrap(), "nothing was dropped but for what came");
    print(&mut execution, &mut program, 4096, now);
    assert!(execution.should_gather().is_some(), "and again");
    print(&mut execution, &mut program, 4096, now);
    execution.output.stdout.source = None;
    assert_eq!(execution.should_gather(), None, "nobody waits for what is closed");
}

/// A read that got all that was asked for does not know whether it was all that there was.
#[test]
fn a_torrent_whose_writes_are_as_large_as_the_reads_gathers_too() {
    let (mut execution, mut program) = execution(DetachedOutput::Block);
    execution.output.stdout.window.extend(4 << 20);
    let now = Instant::now();
    for _ in 0..TORRENT_TURNS {
        execution.output.stdout.read_bytes = FIRST_READ_BYTES;
        print(&mut execution, &mut program, FIRST_READ_BYTES, now);
    }
    assert!(execution.should_gather().is_some());
}

#[test]
fn a_terminal_never_gathers() {
    let (mut execution, mut program) = execution(DetachedOutput::Block);
    execution.output.stdout.window.extend(1 << 20);
    execution.tty = true;
    let now = Instant::now();
    for _ in 0..TORRENT_TURNS {
        print(&mut execution, &mut program, 8 * 1024, now);
        assert_eq!(execution.should_gather(), None);
    }
}

#[test]
fn what_comes_after_the_end_is_not_its_output() {
    let (mut execution, mut program) = execution(DetachedOutput::Block);
    program.write_all(b"mine").unwrap();
    let (exit, left) = execution.finish(None, Some(9), Some(ExitCause::NamespaceEnded), Instant::now());
    program.write_all(b"not mine").unwrap();
    assert!(!execution.fill(Stream::Stdout, Instant::now()));
    assert_eq!((exit.end.stdout, exit.cause), (4, Some(ExitCause::NamespaceEnded)));
    assert_eq!(left.len(), 1);
}

#[test]
fn a_program_that_closes_its_input_is_no_error() {
    let (mut execution, _program) = execution(DetachedOutput::Block);
    let (read, write): (OwnedFd, OwnedFd) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).unwrap();
    execution.sink = Some(write.into());
    drop(read);
    assert_eq!(execution.take_input(0, Bytes::from_static(b"unread")), Ok(6));
    execution.feed();
    assert!(execution.sink.is_none());
    assert_eq!(execution.take_input(6, Bytes::from(vec![0; 5000])), Ok(5006));
}

//! The agent with a scripted init, and a scripted server.

use std::{fs::File, os::fd::OwnedFd};

use bytes::{BufMut, Bytes, BytesMut};
use nix::{
    fcntl::OFlag,
    sys::socket::{AddressFamily, SockFlag, SockType, socketpair},
    unistd::pipe2,
};
use sandboxer_protocol::agent::{
    ExecSpec, Exit, ExitCause, FromAgentFrame, Language, Nonce, PerStream, ServerDecoder, SpareConfig, StdinRefusal, encode_exec,
    encode_opening, encode_to_agent,
};

use super::*;
use crate::{
    ipc::{self, Report, Request},
    sample::program,
    setup::InitProcess,
};

const NONCE: [u8; 32] = [5; 32];

/// No process: another test waits for any child of this one's.
fn scripted_init() -> (Supervisor, OwnedFd) {
    let (ours, init) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK).unwrap();
    (Supervisor::of(InitProcess { pid: i32::MAX, socket: ours }), init)
}

struct Scripted {
    agent: Agent,
    init: OwnedFd,
    to_agent: File,
    from_agent: File,
    decoder: ServerDecoder,
}

impl Scripted {
    fn new() -> Self {
        let config = AgentConfig {
            marker: String::new(),
            disk_bytes: 0,
            disk_inodes: 0,
            memory_bytes: None,
            pids: None,
            output_window_bytes: 4096,
            stdin_window_bytes: 4096,
            spares: None,
        };
        let marker = Marker::new([3; 32]);
        let (supervisor, init) = scripted_init();
        let ((input, to_agent), (from_agent, output)) = (pipe2(OFlag::O_CLOEXEC).unwrap(), pipe2(OFlag::O_CLOEXEC).unwrap());
        sys::set_nonblocking(from_agent.as_fd(), true).unwrap();
        let children = SignalFd::with_flags(&SigSet::empty(), SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).unwrap();
        let link = Link::over(input, output, marker).unwrap();
        let agent = Agent::assemble(config, link, children, supervisor, Enforced::default(), None).unwrap();
        let decoder = ServerDecoder::new(Nonce::new(NONCE));
        let mut scripted = Self { agent, init, to_agent: to_agent.into(), from_agent: from_agent.into(), decoder };
        scripted.open();
        scripted
    }

    fn write(&mut self, bytes: &[u8]) {
        io::Write::write_all(&mut self.to_agent, bytes).unwrap();
        self.agent.link.readable = true;
        self.rounds();
    }

    fn rounds(&mut self) {
        self.agent.init_spoke = true;
        while self.agent.round().is_any() {}
    }

    /// Opens a conversation, as another server would, and returns the agent's answer.
    fn open(&mut self) -> FromAgent {
        self.decoder = ServerDecoder::new(Nonce::new(NONCE));
        self.write(&encode_opening(&Marker::new([3; 32]), 1, Nonce::new(NONCE)));
        let [hello] = <[FromAgent; 1]>::try_from(self.heard()).unwrap();
        hello
    }

    fn exec(&mut self, number: u64) {
        let spec = ExecSpec { number, ..program(Language::Bash) };
        let mut out = BytesMut::new();
        encode_exec(&mut out, &spec, b"true");
        self.write(&out);
    }

    fn send(&mut self, message: &ToAgent) {
        let mut out = BytesMut::new();
        encode_to_agent(&mut out, message);
        self.write(&out);
    }

    fn kill(&mut self, number: u64, cause: ExitCause) {
        self.send(&ToAgent::Kill { number, cause: Some(cause) });
    }

    fn heard(&mut self) -> Vec<FromAgent> {
        let control = |frame| match frame {
            FromAgentFrame::Control(message) => Some(message),
            FromAgentFrame::Output { .. } | FromAgentFrame::Files { .. } | FromAgentFrame::Tunnel { .. } => None,
        };
        self.frames().into_iter().filter_map(control).collect()
    }

    fn frames(&mut self) -> Vec<FromAgentFrame> {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = io::Read::read(&mut self.from_agent, &mut bytes) {
            self.decoder.buffer().put_slice(&bytes[..count]);
        }
        let mut frames = Vec::new();
        while let Some(frame) = self.decoder.next().unwrap() {
            frames.push(frame);
        }
        frames
    }

    /// The end of an execution, with whether it was said to have started before, and nothing else.
    fn end(&mut self) -> (bool, Exit) {
        match &self.heard()[..] {
            [FromAgent::Exited { exit, .. }] => (false, exit.clone()),
            [FromAgent::Started { .. }, FromAgent::Exited { exit, .. }] => (true, exit.clone()),
            other => panic!("{other:?}"),
        }
    }

    fn asked_of_init(&mut self) -> Option<Request> {
        ipc::receive(self.init.as_fd()).ok().flatten().map(|(request, _)| request)
    }

    /// The serial of the program that init is asked to start.
    fn spawned(&mut self) -> u64 {
        match self.asked_of_init() {
            Some(Request::Spawn { serial, .. }) => serial,
            other => panic!("{other:?}"),
        }
    }

    fn another_init(&mut self) {
        (self.agent.supervisor, self.init) = scripted_init();
    }

    fn init_says(&mut self, report: &Report) {
        ipc::send(self.init.as_fd(), report, &[]).unwrap();
        self.rounds();
    }
}

#[test]
fn a_program_that_writes_before_it_is_said_to_run_is_heard_after_that() {
    let mut scripted = Scripted::new();
    scripted.exec(1);
    let (request, mut descriptors) = ipc::receive::<Request>(scripted.init.as_fd()).unwrap().unwrap();
    let Request::Spawn { serial, .. } = request else { panic!("{request:?}") };
    scripted.send(&ToAgent::Credit { number: 1, upto: PerStream { stdout: 100, stderr: 100 } });
    // Its standard input, output and error come last.
    let mut stdout = File::from(descriptors.remove(descriptors.len() - 2));
    io::Write::write_all(&mut stdout, b"early").unwrap();
    scripted.agent.execution.as_mut().unwrap().output.stdout.readable = true;
    scripted.rounds();
    assert!(scripted.frames().is_empty());
    scripted.init_says(&Report::Started { serial });
    match &scripted.frames()[..] {
        [FromAgentFrame::Control(FromAgent::Started { .. }), FromAgentFrame::Output { data, .. }] => assert_eq!(&data[..], b"early"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_program_killed_while_it_is_started_ends_by_that() {
    let mut scripted = Scripted::new();
    scripted.exec(1);
    let serial = scripted.spawned();
    scripted.kill(1, ExitCause::TimedOut);
    // The first reason counts.
    scripted.kill(1, ExitCause::ForceKilled);
    assert!(matches!(scripted.asked_of_init(), Some(Request::Kill { serial: killed }) if killed == serial));
    assert!(scripted.heard().is_empty());
    scripted.init_says(&Report::Started { serial });
    scripted.init_says(&Report::Exited { serial, code: None, signal: Some(9) });
    let (started, exit) = scripted.end();
    assert_eq!((started, exit.signal, exit.cause), (true, Some(9), Some(ExitCause::TimedOut)));
}

#[test]
fn a_program_killed_while_it_is_started_never_fails_to_start() {
    let mut scripted = Scripted::new();
    scripted.exec(1);
    let serial = scripted.spawned();
    scripted.kill(1, ExitCause::ForceKilled);
    scripted.init_says(&Report::Failed { serial, message: "it was killed".to_owned() });
    let (started, exit) = scripted.end();
    assert_eq!((started, exit.signal, exit.cause), (false, Some(9), Some(ExitCause::ForceKilled)));
    assert!(scripted.agent.killing.is_empty());
    assert!(matches!(scripted.asked_of_init(), Some(Request::Kill { .. })));
    scripted.exec(2);
    scripted.spawned();
    scripted.kill(2, ExitCause::ForceKilled);
    scripted.agent.namespace_ended();
    scripted.agent.link.flush();
    assert_eq!(scripted.end().1.cause, Some(ExitCause::ForceKilled));
}

#[test]
fn a_slow_start_that_is_killed_ends_without_init_and_is_killed_when_it_comes() {
    let mut scripted = Scripted::new();
    scripted.exec(1);
    let first = scripted.spawned();
    scripted.kill(1, ExitCause::TimedOut);
    let later = |seconds| Instant::now() + Duration::from_secs(seconds);
    assert!(!scripted.agent.watch_start(later(4)));
    assert!(scripted.heard().is_empty());
    assert!(!scripted.agent.watch_start(later(10)), "init is not to blame");
    let (started, exit) = scripted.end();
    assert_eq!((started, exit.signal, exit.cause), (false, Some(9), Some(ExitCause::TimedOut)));
    // What is still being started is no business of the next one's, but it is not forgotten.
    scripted.exec(2);
    assert!(matches!(scripted.asked_of_init(), Some(Request::Kill { serial }) if serial == first));
    let second = scripted.spawned();
    assert_eq!(scripted.agent.killing.len(), 1);
    scripted.init_says(&Report::Started { serial: first });
    scripted.init_says(&Report::Exited { serial: first, code: None, signal: Some(9) });
    assert!(scripted.heard().is_empty() && scripted.agent.killing.is_empty());
    scripted.init_says(&Report::Started { serial: second });
    scripted.init_says(&Report::Exited { serial: second, code: Some(0), signal: None });
    let (started, exit) = scripted.end();
    assert_eq!((started, exit.code, exit.cause), (true, Some(0), None));
    // One that takes for ever is init's fault.
    scripted.exec(3);
    scripted.kill(3, ExitCause::TimedOut);
    assert!(!scripted.agent.watch_start(later(10)));
    assert!(scripted.agent.watch_start(later(100)));
}

#[test]
fn numbers_that_begin_anew_name_nothing_that_was_there_before() {
    let mut scripted = Scripted::new();
    scripted.exec(7);
    let first = scripted.spawned();
    scripted.init_says(&Report::Failed { serial: first, message: "no".to_owned() });
    assert!(matches!(&scripted.heard()[..], [FromAgent::StartFailed { number: 7, .. }]));
    let hello = scripted.open();
    assert!(matches!(hello, FromAgent::HelloReply { execution: None, last_number: Some(7), .. }), "{hello:?}");
    scripted.exec(7);
    assert!(scripted.spawned() > first);
    // What init says of the earlier one means nothing.
    scripted.init_says(&Report::Started { serial: first });
    assert!(scripted.heard().is_empty());
}

#[test]
fn what_is_kept_for_the_server_comes_back() {
    let mut scripted = Scripted::new();
    scripted.exec(1);
    let serial = scripted.spawned();
    scripted.init_says(&Report::Started { serial });
    scripted.agent.take_input(1, 0, Bytes::from_static(b"abc"));
    scripted.agent.take_input(1, 5, Bytes::from_static(b"f"));
    scripted.send(&ToAgent::Resume { number: 1, from: Default::default(), credit: 10, sequence: 4 });
    scripted.init_says(&Report::Exited { serial, code: Some(0), signal: None });
    let heard = scripted.heard();
    assert!(heard.contains(&FromAgent::StdinRefused { number: 1, offset: 5, reason: StdinRefusal::Gap, taken: 3 }), "{heard:?}");
    assert!(heard.iter().any(|message| matches!(message, FromAgent::Resumed { sequence: 4, .. })), "{heard:?}");
    for end in [false, true] {
        let FromAgent::HelloReply { execution: Some(execution), .. } = scripted.open() else { panic!("it is held") };
        assert_eq!(execution.end_acknowledged, end);
        scripted.send(&ToAgent::Ack { number: 1, upto: Default::default(), end: true });
    }
}

/// With one bash that waits as number 100, which nobody has started, and a directory for its root.
fn one_waits(waits: bool) -> (Scripted, tempfile::TempDir) {
    let mut scripted = Scripted::new();
    scripted.agent.config.spares = Some(SpareConfig { each: 1, env: Default::default(), warm_modules: Vec::new() });
    scripted.agent.identify_spares("sandbox-1".to_owned(), 0);
    let root = tempfile::tempdir().unwrap();
    scripted.agent.transfers.root = Some(File::open(root.path()).unwrap().into());
    let script = root.path().join("run/sandboxer/exec/100/main.sh");
    std::fs::create_dir_all(script.parent().unwrap()).unwrap();
    std::fs::write(&script, "\n").unwrap();
    let file = File::options().write(true).open(script).unwrap();
    scripted.agent.spares.add(100, Language::Bash, waits.then(|| file.into()));
    (scripted, root)
}

fn script(root: &tempfile::TempDir) -> std::path::PathBuf {
    root.path().join("run/sandboxer/exec/100/main.sh")
}

/// Says that it runs, a moment later at the latest.
fn started_by_spare(scripted: &mut Scripted) -> bool {
    let now = Instant::now() + Duration::from_millis(10);
    let started = scripted.agent.execution.as_mut().unwrap().announcement(now);
    matches!(started, Some(FromAgent::Started { number: 1, by_spare: true, .. }))
}

#[test]
fn one_that_waits_gets_the_code_and_nobody_else_is_asked() {
    let (mut scripted, root) = one_waits(true);
    scripted.exec(1);
    assert!(started_by_spare(&mut scripted));
    assert_eq!(std::fs::read(script(&root)).unwrap(), b"true");
    assert!(scripted.asked_of_init().is_none());
    scripted.agent.handed.as_ref().unwrap().takes_word();
    scripted.init_says(&Report::Exited { serial: 100, code: Some(7), signal: None });
    let (_, exit) = scripted.end();
    assert_eq!(exit.code, Some(7));
    assert!(scripted.agent.handed.is_none());
}

#[test]
fn one_that_ended_with_its_word_untaken_never_began_and_the_program_is_started_once() {
    let (mut scripted, _root) = one_waits(true);
    scripted.exec(1);
    assert!(started_by_spare(&mut scripted));
    scripted.init_says(&Report::Exited { serial: 100, code: None, signal: Some(9) });
    let serial = scripted.spawned();
    assert_ne!(serial, 100);
    scripted.init_says(&Report::Started { serial });
    scripted.init_says(&Report::Exited { serial, code: Some(0), signal: None });
    // It was said to run already.
    let (started, exit) = scripted.end();
    assert_eq!((started, exit.code), (false, Some(0)));
}

/// Whether a bash is started to wait, as soon as it may be.
fn another_may_wait(scripted: &Scripted, after: Duration) -> bool {
    scripted.agent.spares.missing(1, Instant::now() + after) == Ok(Language::Bash)
}

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn one_that_runs_the_code_without_its_word_has_run_it_however_it_ended() {
    for (code, signal) in [(Some(0), None), (Some(3), None), (None, Some(9))] {
        let (mut scripted, root) = one_waits(true);
        scripted.exec(1);
        assert!(started_by_spare(&mut scripted));
        // It has read it.
        let read = std::fs::FileTimes::new().set_accessed(std::time::SystemTime::now() + SECOND);
        File::open(script(&root)).unwrap().set_times(read).unwrap();
        scripted.init_says(&Report::Exited { serial: 100, code, signal });
        let (_, exit) = scripted.end();
        assert_eq!((exit.code, exit.signal), (code, signal));
        assert!(scripted.asked_of_init().is_none());
        assert!(!another_may_wait(&scripted, HOUR), "it does not wait");
    }
}

#[test]
fn one_that_runs_the_code_without_its_word_is_left_alone_while_it_does() {
    let (mut scripted, root) = one_waits(true);
    scripted.exec(1);
    let read = std::fs::FileTimes::new().set_accessed(std::time::SystemTime::now() + SECOND);
    File::open(script(&root)).unwrap().set_times(read).unwrap();
    scripted.agent.watch_handed(Instant::now() + SECOND);
    assert!(scripted.agent.handed.is_none() && !another_may_wait(&scripted, HOUR));
}

#[test]
fn one_that_has_printed_is_not_started_again_though_nobody_has_read_that_yet() {
    let (mut scripted, _root) = one_waits(true);
    scripted.exec(1);
    assert!(started_by_spare(&mut scripted));
    scripted.agent.handed.as_ref().unwrap().prints();
    scripted.init_says(&Report::Exited { serial: 100, code: None, signal: Some(9) });
    let (_, exit) = scripted.end();
    assert_eq!((exit.signal, exit.end.stdout), (Some(9), 1));
    assert!(scripted.asked_of_init().is_none());
}

#[test]
fn one_that_ended_by_itself_before_it_had_the_code_never_began_and_is_no_example_to_the_next() {
    for (code, next) in [(0, false), (1, false), (3, true)] {
        let (mut scripted, _root) = one_waits(true);
        scripted.exec(1);
        scripted.init_says(&Report::Exited { serial: 100, code: Some(code), signal: None });
        assert_ne!(scripted.spawned(), 100);
        assert_eq!(another_may_wait(&scripted, HOUR), next, "{code}");
        let (mut scripted, _root) = one_waits(true);
        scripted.init_says(&Report::Exited { serial: 100, code: Some(code), signal: None });
        assert_eq!(another_may_wait(&scripted, HOUR), next, "{code}");
    }
}

#[test]
fn one_that_nobody_could_use_is_followed_by_another_later_and_one_that_began_at_once() {
    let spoil = |root: &tempfile::TempDir| std::fs::remove_file(script(root)).unwrap();
    for spoilt in [true, false] {
        let (mut scripted, root) = one_waits(true);
        if spoilt {
            spoil(&root);
        }
        scripted.exec(1);
        if !spoilt {
            scripted.init_says(&Report::Exited { serial: 100, code: None, signal: Some(9) });
        }
        assert!(!another_may_wait(&scripted, Duration::ZERO) && another_may_wait(&scripted, SECOND), "{spoilt}");
    }
    for later in [false, true] {
        let (mut scripted, _root) = one_waits(true);
        scripted.agent.spares.add(99, Language::Bash, None);
        scripted.agent.spare_spoilt(99);
        scripted.exec(1);
        assert!(!another_may_wait(&scripted, Duration::ZERO), "nobody knows yet");
        scripted.agent.handed.as_ref().unwrap().takes_word();
        if later {
            scripted.agent.watch_handed(Instant::now() + SECOND);
        } else {
            scripted.init_says(&Report::Exited { serial: 100, code: Some(1), signal: None });
        }
        assert!(another_may_wait(&scripted, Duration::ZERO));
    }
}

#[test]
fn one_that_had_not_begun_when_the_namespace_ended_is_the_next_init_s() {
    let (mut scripted, _root) = one_waits(true);
    scripted.exec(1);
    assert!(started_by_spare(&mut scripted));
    scripted.agent.namespace_ended();
    scripted.agent.link.flush();
    assert!(scripted.heard().is_empty());
    scripted.another_init();
    scripted.init_says(&Report::Ready);
    assert!(matches!(&scripted.heard()[..], [FromAgent::NamespaceRestarted]));
    let serial = scripted.spawned();
    scripted.init_says(&Report::Started { serial });
    scripted.init_says(&Report::Exited { serial, code: Some(0), signal: None });
    let (started, exit) = scripted.end();
    assert_eq!((started, exit.code, exit.cause), (false, Some(0), None));
    // One that had begun has ended with it.
    let (mut scripted, _root) = one_waits(true);
    scripted.exec(1);
    scripted.agent.handed.as_ref().unwrap().takes_word();
    scripted.agent.namespace_ended();
    scripted.agent.link.flush();
    assert_eq!(scripted.end().1.cause, Some(ExitCause::NamespaceEnded));
}

#[test]
fn one_that_was_said_to_run_and_can_not_be_started_says_why() {
    let (mut scripted, _root) = one_waits(true);
    scripted.exec(1);
    assert!(started_by_spare(&mut scripted));
    scripted.send(&ToAgent::Credit { number: 1, upto: PerStream { stdout: 100, stderr: 100 } });
    scripted.init_says(&Report::Exited { serial: 100, code: None, signal: Some(9) });
    let serial = scripted.spawned();
    scripted.init_says(&Report::Failed { serial, message: "no such directory".to_owned() });
    let frames = scripted.frames();
    let said = frames.iter().find_map(|frame| match frame {
        FromAgentFrame::Output { stream: Stream::Stderr, data, .. } => Some(&data[..]),
        _ => None,
    });
    assert_eq!(said, Some(&b"no such directory\n"[..]));
    let end = |frame: &FromAgentFrame| matches!(frame, FromAgentFrame::Control(FromAgent::Exited { exit, .. }) if exit.signal == Some(9));
    assert!(frames.iter().any(end), "{frames:?}");
}

#[test]
fn one_that_was_killed_for_its_user_has_ended_whether_it_began_or_not() {
    let (mut scripted, _root) = one_waits(true);
    scripted.exec(1);
    scripted.kill(1, ExitCause::ForceKilled);
    assert!(matches!(scripted.asked_of_init(), Some(Request::Kill { serial: 100 })));
    scripted.init_says(&Report::Exited { serial: 100, code: None, signal: Some(9) });
    let (started, exit) = scripted.end();
    assert_eq!((started, exit.signal, exit.cause), (true, Some(9), Some(ExitCause::ForceKilled)));
    assert!(scripted.asked_of_init().is_none());
}

#[test]
fn a_file_for_code_that_the_guest_has_touched_is_not_used() {
    let spoil: [fn(&std::path::Path); 4] = [
        |path| std::fs::remove_file(path).unwrap(),
        |path| std::fs::write(path, "mine").unwrap(),
        |path| std::fs::hard_link(path, path.with_extension("other")).unwrap(),
        |path| {
            std::fs::rename(path, path.with_extension("old")).unwrap();
            std::fs::write(path, "\n").unwrap();
        },
    ];
    for spoil in spoil {
        let (mut scripted, root) = one_waits(true);
        spoil(&script(&root));
        scripted.exec(1);
        assert!(matches!(scripted.asked_of_init(), Some(Request::Drop { serial: 100 })));
        assert_ne!(scripted.spawned(), 100);
    }
}

#[test]
fn an_execution_waits_for_one_that_is_being_started_and_is_not_lost_with_it() {
    let (mut scripted, _root) = one_waits(false);
    scripted.exec(1);
    assert!(scripted.asked_of_init().is_none() && scripted.heard().is_empty());
    scripted.init_says(&Report::Failed { serial: 100, message: "no".to_owned() });
    assert!(matches!(scripted.asked_of_init(), Some(Request::Drop { serial: 100 })));
    assert_ne!(scripted.spawned(), 100);
}

#[test]
fn an_execution_that_waits_for_one_is_started_when_all_of_them_have_to_go() {
    let (mut scripted, _root) = one_waits(false);
    scripted.exec(1);
    assert!(scripted.asked_of_init().is_none());
    scripted.agent.give_up_spares(Instant::now());
    assert!(matches!(scripted.asked_of_init(), Some(Request::Drop { serial: 100 })));
    assert_ne!(scripted.spawned(), 100);
}

#[test]
fn one_that_was_taken_for_an_execution_that_fails_to_start_is_followed_by_another() {
    let (mut scripted, root) = one_waits(true);
    std::fs::remove_file(script(&root)).unwrap();
    scripted.exec(1);
    assert!(matches!(scripted.asked_of_init(), Some(Request::Drop { serial: 100 })));
    let serial = scripted.spawned();
    // Put off, since a program is being started.
    scripted.agent.keep_spares(Instant::now() + Duration::from_secs(1));
    let before = scripted.agent.last_serial;
    scripted.init_says(&Report::Failed { serial, message: "no such directory".to_owned() });
    assert!(matches!(&scripted.heard()[..], [FromAgent::StartFailed { number: 1, .. }]));
    // There are no groups here, so it stays with the attempt, which takes a number.
    scripted.agent.keep_spares(Instant::now() + SECOND);
    assert_eq!(scripted.agent.last_serial, before + 1);
}

#[test]
fn one_that_can_not_be_used_is_ended_as_soon_as_init_listens() {
    let (mut scripted, root) = one_waits(true);
    std::fs::remove_file(script(&root)).unwrap();
    let begun = Instant::now();
    let flood = Request::Generation { generation: 0 };
    let init = scripted.agent.supervisor.ready().unwrap().socket.as_fd();
    while ipc::send(init, &flood, &[]).is_ok() {}
    scripted.exec(1);
    assert!(matches!(&scripted.heard()[..], [FromAgent::StartFailed { number: 1, .. }]));
    // It is tried again, though nothing else happens, and the agent does not spin until then.
    assert!(scripted.agent.spares.due().is_some_and(|due| due >= begun + Duration::from_millis(50)));
    while let Some(request) = scripted.asked_of_init() {
        assert!(matches!(request, Request::Generation { .. }), "{request:?}");
    }
    scripted.rounds();
    assert!(matches!(scripted.asked_of_init(), Some(Request::Drop { serial: 100 })));
    assert!(scripted.asked_of_init().is_none());
}

/// Two environments as large as they may be, each byte of which takes six to write.
#[test]
fn the_largest_head_passes() {
    let spec = ExecSpec { env: (0..2).map(|i| (format!("A{i}"), "\u{1}".repeat(256 * 1024))).collect(), ..program(Language::Bash) };
    let mut scripted = Scripted::new();
    let mut out = BytesMut::new();
    encode_exec(&mut out, &spec, b"true");
    for piece in out.chunks(4096) {
        scripted.write(piece);
    }
    let Some(Request::Spawn { head, .. }) = scripted.asked_of_init() else { panic!("not asked: {:?}", scripted.heard()) };
    assert!(head > 3 << 20 && head <= sandboxer_protocol::limits::MAX_CONTROL_BYTES);
}

/// Output that can be sent is sent first, and nobody else's work waits for a program that prints much.
#[test]
fn output_gathers_only_while_there_is_nothing_else_to_do() {
    const NOTHING: More = More { of_output: false, of_others: false };
    let mut scripted = Scripted::new();
    let agent = &mut scripted.agent;
    let spec = ExecSpec { detached_output: sandboxer_protocol::agent::DetachedOutput::DropOldest, ..program(Language::Bash) };
    let now = Instant::now();
    let mut execution = Execution::new(&spec, 1, &agent.config, now);
    let (read, write) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).unwrap();
    execution.output.stdout.connect(read);
    execution.pause();
    let mut write = File::from(write);
    let mut torrent = |execution: &mut Execution| {
        for _ in 0..70 {
            io::Write::write_all(&mut write, &[b'x'; 4096]).unwrap();
            execution.output.stdout.readable = true;
            while execution.fill(Stream::Stdout, now) {}
        }
    };
    torrent(&mut execution);
    agent.execution = Some(execution);
    assert_eq!(agent.should_gather(More { of_others: true, ..NOTHING }), None, "others have work");
    assert!(agent.should_gather(NOTHING).is_some());
    let execution = agent.execution.as_mut().unwrap();
    torrent(execution);
    execution.output.stdout.window.resume(0, u64::MAX);
    assert_eq!(agent.should_gather(NOTHING), None, "it can be sent");
    agent.link.writable = false;
    assert!(agent.should_gather(NOTHING).is_some(), "it can't be sent now");
    agent.link.writable = true;
}

use std::collections::VecDeque;

use proptest::prelude::*;
use tokio::time::Duration;

use super::{
    model::{Model, Offsets, ToClient},
    *,
};
use crate::OutputStream as Stream;

/// Client and server with a network between them that can be cut anywhere.
struct World {
    session: Session,
    model: Model,
    to_server: VecDeque<ToServer>,
    to_client: VecDeque<ToClient>,
    connected: bool,
    now: Instant,
    /// What the user got.
    output: PerStream<Vec<u8>>,
    end: Option<Result<Exit, Error>>,
    over: Option<Error>,
    cuts: usize,
}

enum ToServer {
    Text(String),
    Pong(Offsets),
}

impl World {
    fn new(seed: u64) -> Self {
        Self {
            session: Session::create(CreateConfig::default()),
            model: Model::new(seed),
            to_server: VecDeque::new(),
            to_client: VecDeque::new(),
            connected: false,
            now: Instant::now(),
            output: PerStream::default(),
            end: None,
            over: None,
            cuts: 0,
        }
    }

    fn connect(&mut self) {
        self.connected = true;
        match self.session.target() {
            Target::Create => self.model.create(),
            Target::Attach { id, token } => self.model.attach(id, token.as_deref()),
        }
        self.session.opened();
    }

    fn cut(&mut self) {
        self.cuts += 1;
        // Some of what was on its way still arrives.
        for _ in 0..self.model.below(4) {
            self.serve_one();
        }
        for _ in 0..self.model.below(4) {
            self.hear_one();
        }
        self.disconnect();
    }

    fn disconnect(&mut self) {
        self.to_server.clear();
        self.to_client.clear();
        self.model.cut();
        self.session.cut();
        self.connected = false;
    }

    fn serve_one(&mut self) {
        match self.to_server.pop_front() {
            Some(ToServer::Text(text)) => self.model.receive(&text),
            Some(ToServer::Pong(offsets)) => self.model.pong(&offsets),
            None => {}
        }
    }

    fn hear_one(&mut self) {
        while let Some(out) = self.model.next_out() {
            self.to_client.push_back(out);
        }
        let effect = match self.to_client.pop_front() {
            None => None,
            Some(ToClient::Ping(offsets)) => {
                self.to_server.push_back(ToServer::Pong(offsets));
                None
            }
            Some(ToClient::Text(text)) => self.session.received(&text, self.now),
            Some(ToClient::Close(code)) => Some(self.session.closed(Some(code), "")),
        };
        match effect {
            Some(Effect::Piece(piece)) => self.output.get_mut(piece.stream).extend_from_slice(&piece.data),
            Some(Effect::Done(exit)) => self.end = Some(Ok(exit)),
            Some(Effect::Failed(error)) => self.end = Some(Err(error)),
            Some(Effect::Again(_)) => self.disconnect(),
            Some(Effect::Over(error)) => self.over = Some(error),
            Some(Effect::Rewound(_)) => panic!("nothing was rewound"),
            Some(Effect::Ready(_) | Effect::Started | Effect::Progress) | None => {}
        }
    }

    fn step(&mut self, cut_every: usize) {
        if !self.connected {
            self.connect();
        }
        match self.model.below(10) {
            0 | 1 => {
                if let Some(message) = self.session.next_message(self.now) {
                    self.to_server.push_back(ToServer::Text(message));
                }
            }
            2 | 3 => self.serve_one(),
            4 | 5 => self.hear_one(),
            6 => self.model.step(),
            7 => self.model.pump(),
            8 => {
                // The user takes what is there, or only later.
                let have = self.session.run.as_ref().map(|run| run.have);
                if let Some(have) = have.filter(|_| self.model.below(2) == 0) {
                    self.session.consumed(have, self.now);
                }
                self.now += Duration::from_millis(self.model.below(100) as u64);
            }
            _ => {
                if self.model.below(40) == 0 {
                    self.model.grace_over();
                }
                if self.model.below(cut_every) == 0 {
                    self.cut();
                }
            }
        }
    }

    /// Runs one program to its end, feeding it `input`.
    fn execute(&mut self, lines: usize, raw: bool, input: &[u8], cut_every: usize) -> ExecutionId {
        self.output = PerStream::default();
        self.end = None;
        let (id, message) = crate::Execution::new("python", lines.to_string()).raw(raw).into_message().unwrap();
        self.session.start(id.clone(), message).unwrap();
        let mut input = VecDeque::from_iter(input.chunks(97).map(<[u8]>::to_vec));
        for _ in 0..2_000_000 {
            if self.end.is_some() {
                return id;
            }
            if self.session.wants_input() && self.model.below(8) == 0 {
                match input.pop_front() {
                    Some(piece) => self.session.write(&piece),
                    None => self.session.end_input(),
                }
            }
            self.step(cut_every);
        }
        panic!("it never ended: {:?} {:?}", self.session, self.model);
    }
}

fn input(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|n| [b'a', 0xff, b'\n', b'z'][n % 4].wrapping_add(u8::from(n % 7 == 0))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if std::env::var_os("SANDBOXER_SOAK").is_some() { 5000 } else { 150 }))]

    #[test]
    fn every_byte_arrives_once_and_nothing_runs_twice(seed: u64, cut_every in 3usize..60, raw: bool, lines in 0usize..200, bytes in 0usize..5000) {
        let mut world = World::new(seed);
        for _ in 0..2 {
            let input = input(bytes);
            // Text can't carry every byte.
            let input: Vec<u8> = if raw { input } else { input.iter().map(|byte| byte & 0x7f).collect() };
            let id = world.execute(lines, raw, &input, cut_every);
            prop_assert_eq!(world.end.as_ref().unwrap().as_ref().map(|exit| exit.code), Ok(Some(0)));
            let program = world.model.program.as_ref().unwrap();
            prop_assert_eq!(&program.id, &id);
            prop_assert_eq!(&program.input, &input);
            prop_assert!(world.output.stdout == program.output.stdout, "stdout differs");
            prop_assert!(world.output.stderr == program.output.stderr, "stderr differs");
        }
        prop_assert!(world.model.started.values().all(|count| *count == 1), "{:?}", world.model.started);
        prop_assert_eq!(world.model.started.len(), 2);
    }

    #[test]
    fn a_kill_gets_through_whatever_is_cut(seed: u64, cut_every in 1usize..20) {
        let mut world = World::new(seed);
        let (id, message) = crate::Execution::bash("5").into_message().unwrap();
        world.session.start(id.clone(), message).unwrap();
        world.session.kill(&id);
        for _ in 0..100_000 {
            if world.end.is_some() { break }
            world.step(cut_every);
        }
        prop_assert_eq!(world.end.unwrap().unwrap().signal, Some("SIGKILL".to_owned()));
    }

    #[test]
    fn a_sandbox_is_killed_whatever_is_cut(seed: u64, cut_every in 1usize..20) {
        let mut world = World::new(seed);
        while world.session.identity().is_none() {
            world.step(50);
        }
        world.session.kill_sandbox();
        for _ in 0..100_000 {
            if world.over.is_some() { break }
            world.step(cut_every);
        }
        prop_assert!(world.model.killed);
        prop_assert!(matches!(world.over, Some(Error::SandboxEnded { reason: Ended::Killed, .. })), "{:?}", world.over);
    }

    #[test]
    fn no_message_of_a_server_makes_it_panic(texts in proptest::collection::vec(message(), 0..30)) {
        let mut session = Session::attach(Identity { id: SandboxId::random(), token: None }, OffsetsRequest::default());
        session.opened();
        let now = Instant::now();
        for text in texts {
            if let Some(Effect::Again(_)) = session.received(&text, now) {
                session.cut();
                session.opened();
            }
            while session.next_message(now).is_some() {}
            if !session.is_busy() {
                // Refused after a rewinding, which is as good.
                let _ = session.start("e".parse().unwrap(), "{}".into());
            }
        }
    }
}

/// Something that a confused server might say.
fn message() -> impl Strategy<Value = String> {
    let status =
        proptest::sample::select(Status::ALL).prop_map(|status| format!(r#""event":"status_update","status":"{}""#, status.as_str()));
    let event = prop_oneof![
        status,
        Just(r#""event":"stdout","data":"ä€x""#.to_owned()),
        Just(r#""event":"stderr","data":"/w==","encoding":"base64""#.to_owned()),
        Just(r#""event":"resumed""#.to_owned()),
        Just(r#""event":"stdin_ack""#.to_owned()),
        Just(r#""event":"error","code":"output_gone","message":"m""#.to_owned()),
        Just(r#""event":"error","code":"stdin_full","message":"m""#.to_owned()),
        Just(r#""event":"of_tomorrow""#.to_owned()),
    ];
    let number = prop_oneof![0u64..9, Just(u64::MAX)];
    (event, number.clone(), number, proptest::option::of(Just(r#","execution_id":"e""#)), any::<bool>()).prop_map(
        |(event, offset, end, id, rewound)| {
            let id = id.unwrap_or_default();
            let rewound = if rewound { r#","rewound":true,"generation":3"# } else { "" };
            format!(r#"{{{event}{id}{rewound},"offset":{offset},"end":{end},"stdout_offset":{offset},"stdin_offset":{end}}}"#)
        },
    )
}

fn attached() -> Session {
    let mut session = Session::attach(Identity { id: SandboxId::random(), token: None }, OffsetsRequest::default());
    session.opened();
    let now = Instant::now();
    assert_eq!(session.received(r#"{"event":"status_update","status":"SANDBOX_RUNNING"}"#, now), None);
    assert_eq!(session.next_message(now).as_deref(), Some(r#"{"action":"reconnect"}"#));
    let nothing = r#"{"event":"resumed","execution_id":null,"running":null,"stdout_offset":null,"stderr_offset":null,"stdin_offset":null}"#;
    assert_eq!(session.received(nothing, now), Some(Effect::Ready(None)));
    session
}

fn running() -> (Session, Instant) {
    let mut session = attached();
    let now = Instant::now();
    session.start("e".parse().unwrap(), "{}".into()).unwrap();
    assert_eq!(session.next_message(now).as_deref(), Some("{}"));
    let started = r#"{"event":"status_update","status":"SANDBOX_EXECUTION_RUNNING","execution_id":"e"}"#;
    assert_eq!(session.received(started, now), Some(Effect::Started));
    (session, now)
}

#[test]
fn an_execution_that_is_there_is_taken_up_by_an_attach() {
    let mut session = Session::attach(Identity { id: SandboxId::random(), token: None }, OffsetsRequest::default());
    session.opened();
    let now = Instant::now();
    session.received(r#"{"event":"status_update","status":"SANDBOX_RUNNING"}"#, now);
    session.next_message(now);
    let resumed = r#"{"event":"resumed","execution_id":"x","running":true,"stdout_offset":5,"stderr_offset":0,"stdin_offset":2}"#;
    let found =
        Found { id: "x".parse().unwrap(), running: true, from: PerStream { stdout: 5, stderr: 0 }, stdin_offset: 2, end: None, tty: false };
    assert_eq!(session.received(resumed, now), Some(Effect::Ready(Some(found))));
    let piece = session.received(r#"{"event":"stdout","data":"ab","offset":5,"end":7,"execution_id":"x"}"#, now);
    assert!(matches!(piece, Some(Effect::Piece(Piece { offset: 5, end: 7, .. }))));
    session.write(b"in");
    assert_eq!(session.next_message(now).as_deref(), Some(r#"{"event":"stdin","data":"in","offset":2}"#));
}

#[test]
fn who_only_looks_acknowledges_nothing_and_says_so_again_after_a_cut() {
    let peek = OffsetsRequest { stdout_offset: Some(0), stderr_offset: Some(0), peek: Some(true), ..OffsetsRequest::default() };
    let mut session = Session::attach(Identity { id: SandboxId::random(), token: None }, peek);
    let now = Instant::now();
    let running = r#"{"event":"status_update","status":"SANDBOX_RUNNING"}"#;
    let resumed = r#"{"event":"resumed","execution_id":"x","running":true,"stdout_offset":3,"stderr_offset":0,"stdin_offset":0,"stdout_end":5,"stderr_end":0,"tty":true}"#;
    session.opened();
    session.received(running, now);
    assert_eq!(session.next_message(now).as_deref(), Some(r#"{"action":"reconnect","stdout_offset":0,"stderr_offset":0,"peek":true}"#));
    let Some(Effect::Ready(Some(found))) = session.received(resumed, now) else { panic!("it is there") };
    assert_eq!((found.end, found.tty), (Some(PerStream { stdout: 5, stderr: 0 }), true));
    session.received(r#"{"event":"stdout","data":"ab","offset":3,"end":5,"execution_id":"x"}"#, now);
    session.consumed(PerStream { stdout: 5, stderr: 0 }, now);
    assert_eq!((session.deadline(), session.next_message(now + Duration::from_secs(10))), (None, None));
    session.cut();
    session.opened();
    session.received(running, now);
    let again = r#"{"action":"reconnect","execution_id":"x","stdout_offset":5,"stderr_offset":0,"peek":true}"#;
    assert_eq!(session.next_message(now).as_deref(), Some(again));
}

#[test]
fn a_rewinding_voids_the_execution_and_is_told_once() {
    let (mut session, now) = running();
    let rewound = r#"{"event":"status_update","status":"SANDBOX_RUNNING","rewound":true,"generation":4}"#;
    session.cut();
    session.opened();
    assert_eq!(session.received(rewound, now), Some(Effect::Rewound(4)));
    // What is there now is taken up.
    assert_eq!(session.next_message(now).as_deref(), Some(r#"{"action":"reconnect"}"#));
    assert!(session.start("f".parse().unwrap(), "{}".into()).is_ok());

    let mut idle = attached();
    assert_eq!(idle.received(rewound, now), Some(Effect::Rewound(4)));
    assert_eq!(idle.start("f".parse().unwrap(), "{}".into()), Err(Error::Rewound { generation: 4 }));
    assert!(idle.start("f".parse().unwrap(), "{}".into()).is_ok());
}

#[test]
fn a_rewinding_is_known_by_its_generation() {
    let (mut session, now) = running();
    let again = |session: &mut Session| {
        session.cut();
        session.opened();
    };
    // What first told of it was lost with its connection.
    again(&mut session);
    let later = r#"{"event":"status_update","status":"SANDBOX_RUNNING","generation":4}"#;
    assert_eq!(session.received(later, now), Some(Effect::Rewound(4)));
    session.start("f".parse().unwrap(), "{}".into()).unwrap();
    again(&mut session);
    let told_again = r#"{"event":"status_update","status":"SANDBOX_RUNNING","rewound":true,"generation":4}"#;
    assert_eq!(session.received(told_again, now), None);
    assert!(session.is_busy());
}

#[test]
fn input_acknowledged_late_counts_before_the_output_goes_on() {
    let (mut session, now) = running();
    session.write(b"abcdef");
    assert_eq!(session.next_message(now).as_deref(), Some(r#"{"event":"stdin","data":"abcdef","offset":0}"#));
    session.cut();
    session.opened();
    session.received(r#"{"event":"status_update","status":"SANDBOX_RUNNING"}"#, now);
    session.next_message(now);
    let late = r#"{"event":"stdin_ack","offset":4,"execution_id":"e"}"#;
    assert_eq!(session.received(late, now), Some(Effect::Progress));
    assert_eq!(session.next_message(now), None, "nothing goes out before it is known where to go on");
    let resumed = r#"{"event":"resumed","execution_id":"e","running":true,"stdout_offset":0,"stderr_offset":0,"stdin_offset":4}"#;
    assert_eq!(session.received(resumed, now), Some(Effect::Ready(None)));
    assert_eq!(session.next_message(now).as_deref(), Some(r#"{"event":"stdin","data":"ef","offset":4}"#));
    // Of an execution that is not this client's.
    let foreign = r#"{"event":"stdin_ack","offset":1000,"execution_id":"other"}"#;
    assert_eq!(session.received(foreign, now), None);
}

#[test]
fn text_that_is_not_what_was_written_is_never_cut_in_two() {
    let (mut session, now) = running();
    let first = r#"{"event":"stdout","data":"ab","offset":0,"end":2,"execution_id":"e"}"#;
    assert!(matches!(session.received(first, now), Some(Effect::Piece(_))));
    // Bytes 1 to 4, of which one is not UTF-8: where the second begins can't be told.
    let overlap = "{\"event\":\"stdout\",\"data\":\"b\u{fffd}c\",\"offset\":1,\"end\":4,\"execution_id\":\"e\"}";
    assert!(matches!(session.received(overlap, now), Some(Effect::Again(_))));
    session.cut();
    session.opened();
    session.received(r#"{"event":"status_update","status":"SANDBOX_RUNNING"}"#, now);
    let expected = r#"{"action":"reconnect","execution_id":"e","stdout_offset":2,"stderr_offset":0}"#;
    assert_eq!(session.next_message(now).as_deref(), Some(expected));
}

#[test]
fn output_that_is_gone_is_stepped_over() {
    let (mut session, now) = running();
    session.cut();
    session.opened();
    session.received(r#"{"event":"status_update","status":"SANDBOX_RUNNING"}"#, now);
    session.next_message(now);
    let gone = r#"{"event":"error","code":"output_gone","message":"m","available_from":{"stdout_offset":9,"stderr_offset":0}}"#;
    assert_eq!(session.received(gone, now), None);
    let resumed = r#"{"event":"resumed","execution_id":"e","running":true,"stdout_offset":9,"stderr_offset":0,"stdin_offset":0}"#;
    assert_eq!(session.received(resumed, now), Some(Effect::Ready(None)));
    let piece = session.received(r#"{"event":"stdout","data":"x","offset":9,"end":10,"execution_id":"e"}"#, now);
    assert!(matches!(piece, Some(Effect::Piece(Piece { offset: 9, stream: Stream::Stdout, .. }))));
}

#[test]
fn what_is_final_and_what_is_not() {
    let now = Instant::now();
    let status = |status: &str| format!(r#"{{"event":"status_update","status":"{status}","message":"why"}}"#);
    let error = |code: &str| format!(r#"{{"event":"error","code":"{code}","message":"why"}}"#);
    let message = || "why".to_owned();
    let fresh = || {
        let mut session = Session::attach(Identity { id: SandboxId::random(), token: None }, OffsetsRequest::default());
        session.opened();
        session
    };
    let again = |session: &mut Session| {
        session.cut();
        session.opened();
    };
    assert_eq!(fresh().received(&status("SANDBOX_NOT_FOUND"), now), Some(Effect::Over(Error::NotFound { message: message() })));
    assert_eq!(fresh().received(&status("SANDBOX_IN_USE"), now), Some(Effect::Over(Error::InUse { message: message() })));
    let mut known = attached();
    again(&mut known);
    assert_eq!(known.received(&status("SANDBOX_IN_USE"), now), Some(Effect::Again(Setback::InUse(message()))));
    assert_eq!(known.received(&status("SANDBOX_HANDOFF_IN_PROGRESS"), now), Some(Effect::Again(Setback::Cut(message()))));

    let cases = [
        ("SANDBOX_PERMISSION_DENIAL_ERROR", "permission_denied", Error::Denied { message: message() }),
        ("SANDBOX_RESTORE_ERROR", "internal", Error::refused(ErrorCode::Internal, "why")),
        ("SANDBOX_CREATION_ERROR", "no_capacity", Error::refused(ErrorCode::NoCapacity, "why")),
        ("SANDBOX_RESTORE_ERROR", "no_capacity", Error::refused(ErrorCode::NoCapacity, "why")),
        ("SANDBOX_ERROR", "out_of_memory", Error::SandboxEnded { reason: Ended::Unknown, message: message() }),
    ];
    for (name, code, expected) in cases {
        let mut session = fresh();
        assert_eq!(session.received(&status(name), now), None);
        assert_eq!(session.received(&error(code), now), Some(Effect::Over(expected)), "{name}");
        // The same if the connection breaks before the reason comes.
        let mut session = fresh();
        session.received(&status(name), now);
        assert!(matches!(session.closed(None, ""), Effect::Over(_)), "{name}");
    }

    let settled = || {
        let mut session = attached();
        again(&mut session);
        session
    };
    for (mut session, name, code) in [
        (fresh(), "SANDBOX_RESTORE_ERROR", "volume_unavailable"),
        (fresh(), "SANDBOX_CREATION_ERROR", "volume_unavailable"),
        (settled(), "SANDBOX_RESTORE_ERROR", "volume_unavailable"),
        (settled(), "SANDBOX_RESTORE_ERROR", "no_capacity"),
    ] {
        session.received(&status(name), now);
        assert_eq!(session.received(&error(code), now), Some(Effect::Again(Setback::Cut(message()))), "{name} {code}");
    }

    let mut saved = attached();
    saved.received(&status("SANDBOX_CHECKPOINTED"), now);
    assert!(matches!(saved.closed(Some(1000), ""), Effect::Over(Error::SandboxEnded { reason: Ended::Checkpointed, .. })));
    let mut moved = attached();
    moved.received(&status("SANDBOX_CHECKPOINTED"), now);
    assert!(matches!(moved.closed(Some(1001), ""), Effect::Again(_)), "a server that stops has saved it for the next");
    let mut given = attached();
    given.received(&status("SANDBOX_LOCK_RELEASE_REQUESTED"), now);
    given.received(&status("SANDBOX_CHECKPOINTED"), now);
    assert!(matches!(given.closed(None, ""), Effect::Over(Error::SandboxEnded { reason: Ended::HandedOff, .. })));
}

#[test]
fn a_refused_execution_leaves_the_sandbox_usable() {
    let mut session = attached();
    let now = Instant::now();
    session.start("e".parse().unwrap(), "{}".into()).unwrap();
    session.next_message(now);
    session.received(r#"{"event":"status_update","status":"SANDBOX_EXECUTION_UNSUPPORTED_LANGUAGE_ERROR"}"#, now);
    let refused = session.received(r#"{"event":"error","code":"unsupported_language","message":"why"}"#, now);
    assert_eq!(refused, Some(Effect::Failed(Error::refused(ErrorCode::UnsupportedLanguage, "why"))));
    session.start("f".parse().unwrap(), "{}".into()).unwrap();
    session.next_message(now);
    // Belongs to the refused one.
    assert_eq!(session.received(r#"{"event":"status_update","status":"SANDBOX_EXECUTION_DONE"}"#, now), None);
    assert!(session.is_busy());
}

#[test]
fn a_timeout_is_an_end_and_no_refusal() {
    let (mut session, now) = running();
    session.received(r#"{"event":"status_update","status":"SANDBOX_EXECUTION_ERROR"}"#, now);
    assert_eq!(session.received(r#"{"event":"error","code":"timed_out","message":"why"}"#, now), None);
    let done = r#"{"event":"status_update","status":"SANDBOX_EXECUTION_DONE","execution_id":"e","signal":"SIGKILL","timed_out":true,"duration_ms":1000}"#;
    let Some(Effect::Done(exit)) = session.received(done, now) else { panic!() };
    assert!(exit.timed_out && exit.signal.as_deref() == Some("SIGKILL") && exit.duration == Duration::from_secs(1));
}

#[test]
fn consumed_output_is_acknowledged_in_large_steps_or_after_a_pause() {
    let (mut session, now) = running();
    let big = "x".repeat(300 * 1024);
    let piece = format!(r#"{{"event":"stdout","data":"{big}","offset":0,"end":{},"execution_id":"e"}}"#, big.len());
    session.received(&piece, now);
    assert_eq!(session.outstanding(), big.len() as u64);
    session.consumed(PerStream { stdout: 1000, stderr: 0 }, now);
    assert_eq!(session.next_message(now), None);
    let later = session.deadline().unwrap();
    let ack = |offset: usize| format!(r#"{{"action":"ack","execution_id":"e","stdout_offset":{offset},"stderr_offset":0}}"#);
    assert_eq!(session.next_message(later), Some(ack(1000)));
    assert_eq!(session.deadline(), None);
    session.consumed(PerStream { stdout: big.len() as u64, stderr: 0 }, later);
    assert_eq!(session.next_message(later), Some(ack(big.len())));
    assert_eq!(session.outstanding(), 0);
    // It may have been lost with the connection.
    session.cut();
    session.opened();
    session.received(r#"{"event":"status_update","status":"SANDBOX_RUNNING"}"#, later);
    session.next_message(later);
    let resumed = r#"{"event":"resumed","execution_id":"e","running":true,"stdout_offset":307200,"stderr_offset":0,"stdin_offset":0}"#;
    assert_eq!(session.received(resumed, later), Some(Effect::Ready(None)));
    assert_eq!(session.next_message(later), Some(ack(big.len())));
}

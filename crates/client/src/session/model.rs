//! A server and a program in a few lines, as simple as the contract allows and without any I/O. The tests of the session drive it
//! directly; those of the whole client speak to it over a WebSocket.
//!
//! The program writes numbered lines to both streams and echoes its input to stdout; it ends when all lines are written and its input
//! is at its end.

use std::collections::{BTreeMap, VecDeque};

use sandboxer_protocol::{
    ExecutionId, SandboxId,
    agent::{PerStream, Stream},
    client::{
        Encoding, ErrorCode, ErrorEvent, OffsetsEvent, OffsetsRequest, Request, Resumed, SandboxIdEvent, ServerEvent, Status, StatusUpdate,
        StdinAck, encode_output,
    },
};

/// What the agent holds of a stream. Small, so that the tests meet it.
const WINDOW: usize = 4096;
/// Input that the program has not read.
const INPUT_WINDOW: usize = 1024;

/// What goes to the client.
#[derive(Debug, Clone, PartialEq)]
pub enum ToClient {
    Text(String),
    /// Its pong acknowledges these offsets.
    Ping(Offsets),
    Close(u16),
}

#[derive(Debug, Clone, PartialEq)]
pub struct Offsets {
    pub id: ExecutionId,
    pub upto: PerStream<u64>,
}

/// A program that runs or ran.
#[derive(Debug)]
pub struct Program {
    pub id: ExecutionId,
    encoding: Encoding,
    lines: usize,
    written: usize,
    /// All that it ever wrote; what is held begins at `held_from`.
    pub output: PerStream<Vec<u8>>,
    held_from: PerStream<u64>,
    pub input: Vec<u8>,
    read: usize,
    eof: bool,
    pub ended: Option<Ending>,
}

impl Program {
    fn new(id: ExecutionId, encoding: Encoding, lines: usize, eof: bool) -> Self {
        Self {
            id,
            encoding,
            lines,
            written: 0,
            output: PerStream::default(),
            held_from: PerStream::default(),
            input: Vec::new(),
            read: 0,
            eof,
            ended: None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    Itself,
    Killed,
}

/// The connection, and what went over it.
#[derive(Debug, Default)]
struct Client {
    /// None until it is known where to go on.
    sent: Option<PerStream<u64>>,
    done_sent: bool,
    pinged: bool,
}

#[derive(Debug, Default)]
pub struct Model {
    pub sandbox: Option<(SandboxId, String)>,
    pub created: usize,
    pub program: Option<Program>,
    /// How often each execution was started.
    pub started: BTreeMap<String, usize>,
    pub signals: Vec<i32>,
    pub size: Option<(u16, u16)>,
    pub killed: bool,
    /// The next attach is told that it was set back.
    rewound: Option<u64>,
    client: Option<Client>,
    outbox: VecDeque<ToClient>,
    /// A small generator of its own, so that a seed repeats everything.
    pub random: u64,
}

impl Model {
    pub fn new(seed: u64) -> Self {
        Self { random: seed | 1, ..Self::default() }
    }

    /// Somewhat random, below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random >> 33).unwrap_or(0) % n.max(1)
    }

    /// What is to be sent next.
    pub fn next_out(&mut self) -> Option<ToClient> {
        self.outbox.pop_front()
    }

    fn say(&mut self, event: impl Into<ServerEvent>) {
        self.outbox.push_back(ToClient::Text(event.into().to_json()));
    }

    fn complain(&mut self, status: Status, code: ErrorCode) {
        self.say(status);
        self.say(ServerEvent::Error(ErrorEvent::new(code, code.as_str())));
    }

    pub fn create(&mut self) {
        self.say(Status::Creating);
        let id = SandboxId::random();
        self.created += 1;
        *self = Self { sandbox: Some((id, format!("token-{id}"))), program: None, client: Some(Client::default()), ..std::mem::take(self) };
        self.say(ServerEvent::SandboxId(SandboxIdEvent { sandbox_id: id, sandbox_token: format!("token-{id}") }));
        self.say(Status::Running);
    }

    pub fn attach(&mut self, id: SandboxId, token: Option<&str>) {
        match &self.sandbox {
            Some((known, secret)) if *known == id && token == Some(secret) && !self.killed => {}
            _ => {
                self.say(Status::NotFound);
                self.outbox.push_back(ToClient::Close(1011));
                return;
            }
        }
        self.client = Some(Client::default());
        if self.below(4) == 0 {
            self.say(Status::Restoring);
        }
        let mut running = StatusUpdate::new(Status::Running);
        running.generation = self.rewound.take();
        running.rewound = running.generation.map(|_| true);
        self.say(ServerEvent::StatusUpdate(running));
    }

    /// The sandbox goes back to a time at which another program ran.
    pub fn rewind(&mut self, generation: u64, then: ExecutionId) {
        self.rewound = Some(generation);
        self.program = Some(Program::new(then, Encoding::Text, 10, false));
    }

    /// The connection is gone with everything that was on its way.
    pub fn cut(&mut self) {
        self.client = None;
        self.outbox.clear();
    }

    /// No `reconnect` came in time: goes on with what is not acknowledged.
    pub fn grace_over(&mut self) {
        if let (Some(client), Some(program)) = (&mut self.client, &self.program) {
            client.sent.get_or_insert(program.held_from);
        }
    }

    pub fn pong(&mut self, offsets: &Offsets) {
        if let Some(client) = &mut self.client {
            client.pinged = false;
        }
        self.acknowledge(&OffsetsRequest {
            execution_id: Some(offsets.id.clone()),
            stdout_offset: Some(offsets.upto.stdout),
            stderr_offset: Some(offsets.upto.stderr),
            ..OffsetsRequest::default()
        });
    }

    fn acknowledge(&mut self, offsets: &OffsetsRequest) {
        let Some(program) = self.program.as_mut().filter(|program| offsets.execution_id.as_ref() == Some(&program.id)) else { return };
        for (stream, offset) in [(Stream::Stdout, offsets.stdout_offset), (Stream::Stderr, offsets.stderr_offset)] {
            let end = program.output.get(stream).len() as u64;
            let offset = offset.unwrap_or(0);
            assert!(offset <= end, "acknowledged {offset} of {end}");
            let held = program.held_from.get_mut(stream);
            *held = offset.max(*held);
        }
    }

    pub fn receive(&mut self, text: &str) {
        let request = Request::parse(text).unwrap_or_else(|error| panic!("the client sent {text}: {error}"));
        match request {
            Request::Configure(_) => {}
            Request::Execute(execute) => {
                let id = execute.execution_id.clone().expect("the client names its executions");
                match &self.program {
                    Some(program) if program.id == id => self.reconnect(&OffsetsRequest::default(), false),
                    Some(program) if program.ended.is_none() => self.complain(Status::ExecutionError, ErrorCode::ExecutionInProgress),
                    _ => {
                        *self.started.entry(id.to_string()).or_default() += 1;
                        let running = StatusUpdate { execution_id: Some(id.clone()), ..StatusUpdate::new(Status::ExecutionRunning) };
                        self.say(ServerEvent::StatusUpdate(running));
                        let lines = execute.code.parse().unwrap_or(10);
                        self.program = Some(Program::new(id, execute.encoding.unwrap_or_default(), lines, execute.stdin == Some(false)));
                        self.client = Some(Client { sent: Some(PerStream::default()), ..Client::default() });
                    }
                }
            }
            Request::Reconnect(offsets) => self.reconnect(&offsets, true),
            Request::Ack(offsets) => self.acknowledge(&offsets),
            Request::Stdin { data, offset } => self.stdin(&data, offset.expect("the client numbers its input")),
            Request::StdinEof { .. } => {
                if let Some(program) = self.program.as_mut().filter(|program| program.ended.is_none()) {
                    program.eof = true;
                } else {
                    self.complain(Status::StdinError, ErrorCode::NothingRunning);
                }
            }
            Request::KillProcess => {
                self.say(Status::ExecutionForceKilled);
                if let Some(program) = self.program.as_mut().filter(|program| program.ended.is_none()) {
                    program.ended = Some(Ending::Killed);
                }
            }
            Request::Signal { signal } => self.signals.push(signal),
            Request::Resize { rows, cols } => self.size = Some((rows, cols)),
            Request::KillSandbox => {
                self.killed = true;
                self.say(Status::Killing);
                self.say(Status::Killed);
                self.outbox.push_back(ToClient::Close(1000));
            }
            other => panic!("the client sent {other:?}"),
        }
    }

    fn reconnect(&mut self, offsets: &OffsetsRequest, answer: bool) {
        let Some(program) = &self.program else {
            self.say(ServerEvent::Resumed(Resumed::default()));
            return;
        };
        if offsets.execution_id.as_ref().is_some_and(|id| *id != program.id) {
            self.say(ServerEvent::Error(ErrorEvent::new(ErrorCode::UnknownExecution, "no such execution")));
            return;
        }
        let held = program.held_from;
        let wanted =
            PerStream { stdout: offsets.stdout_offset.unwrap_or(held.stdout), stderr: offsets.stderr_offset.unwrap_or(held.stderr) };
        let from = PerStream { stdout: wanted.stdout.max(held.stdout), stderr: wanted.stderr.max(held.stderr) };
        let resumed = Resumed {
            execution_id: Some(program.id.clone()),
            running: Some(program.ended.is_none()),
            stdout_offset: Some(from.stdout),
            stderr_offset: Some(from.stderr),
            stdin_offset: Some(program.input.len() as u64),
            ..Resumed::default()
        };
        let mut error = ErrorEvent::new(ErrorCode::OutputGone, "gone");
        error.available_from = Some(OffsetsEvent { stdout_offset: from.stdout, stderr_offset: from.stderr });
        if from != wanted {
            self.say(ServerEvent::Error(error));
        }
        if answer {
            self.say(ServerEvent::Resumed(resumed));
        }
        self.client = Some(Client { sent: Some(from), ..Client::default() });
    }

    fn stdin(&mut self, data: &[u8], offset: u64) {
        let Some(program) = self.program.as_mut().filter(|program| program.ended.is_none()) else {
            return self.complain(Status::StdinError, ErrorCode::NothingRunning);
        };
        let have = program.input.len() as u64;
        let end = offset + data.len() as u64;
        if offset > have {
            return self.complain(Status::StdinError, ErrorCode::StdinGap);
        }
        if end > have {
            if program.eof {
                return self.complain(Status::StdinError, ErrorCode::StdinClosed);
            }
            // One piece always fits, or a large one never would.
            if program.input.len() > program.read && program.input.len() - program.read + data.len() > INPUT_WINDOW {
                return self.complain(Status::StdinError, ErrorCode::StdinFull);
            }
            program.input.extend_from_slice(&data[usize::try_from(have - offset).unwrap()..]);
        }
        let ack = StdinAck { offset: program.input.len() as u64, execution_id: Some(program.id.clone()) };
        self.say(ServerEvent::StdinAck(ack));
    }

    /// Lets the program do something.
    pub fn step(&mut self) {
        let (read, ahead) = (self.below(400) + 1, self.below(3));
        let Some(program) = self.program.as_mut().filter(|program| program.ended.is_none()) else { return };
        let has_room = |stream| program.output.get(stream).len() - usize::try_from(*program.held_from.get(stream)).unwrap() < WINDOW;
        if !has_room(Stream::Stdout) || !has_room(Stream::Stderr) {
            return;
        }
        let end = program.input.len().min(program.read + read);
        program.output.stdout.extend_from_slice(&program.input[program.read..end]);
        program.read = end;
        for _ in 0..ahead {
            if program.written < program.lines {
                let line = format!("{} ünïcödé ✓ \u{1f600} \"quoted\"\n", program.written);
                program.output.stdout.extend_from_slice(line.as_bytes());
                program.output.stderr.extend_from_slice(format!("err {line}").as_bytes());
                program.written += 1;
            }
        }
        if program.written == program.lines && program.eof && program.read == program.input.len() {
            program.ended = Some(Ending::Itself);
        }
    }

    /// Sends some output, if there is any to send and the client has said from where.
    pub fn pump(&mut self) {
        let (size, stderr_first, ping) = (self.below(700) + 4, self.below(2) == 0, self.below(3) == 0);
        let (Some(program), Some(client)) = (&self.program, &mut self.client) else { return };
        let Some(sent) = &mut client.sent else { return };
        let order = if stderr_first { [Stream::Stderr, Stream::Stdout] } else { [Stream::Stdout, Stream::Stderr] };
        for stream in order {
            let all = program.output.get(stream);
            let from = usize::try_from(*sent.get(stream)).unwrap();
            let mut end = all.len().min(from + size);
            if program.encoding == Encoding::Text {
                // Never within a character; the end of the output is the end of one.
                while end > from && end < all.len() && all[end] & 0xc0 == 0x80 {
                    end -= 1;
                }
            }
            if end > from {
                let text = encode_output(stream, program.encoding, &all[from..end], from as u64, end as u64, &program.id);
                *sent.get_mut(stream) = end as u64;
                self.outbox.push_back(ToClient::Text(text));
                if ping && !client.pinged {
                    client.pinged = true;
                    self.outbox.push_back(ToClient::Ping(Offsets { id: program.id.clone(), upto: *sent }));
                }
                return;
            }
        }
        if let (Some(ending), false) = (program.ended, client.done_sent) {
            client.done_sent = true;
            let (exit_code, signal) = match ending {
                Ending::Itself => (Some(0), None),
                Ending::Killed => (None, Some("SIGKILL".to_owned())),
            };
            let done = StatusUpdate {
                execution_id: Some(program.id.clone()),
                duration_ms: Some(1.5),
                exit_code,
                signal,
                ..StatusUpdate::new(Status::ExecutionDone)
            };
            self.outbox.push_back(ToClient::Text(ServerEvent::StatusUpdate(done).to_json()));
        }
    }
}

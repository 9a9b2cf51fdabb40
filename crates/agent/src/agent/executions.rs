//! What the server asks of executions, and what init tells of them.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::{Duration, Instant},
};

use bytes::Bytes;
use nix::{
    fcntl::OFlag,
    sys::epoll::{Epoll, EpollFlags},
    unistd::pipe2,
};
use sandboxer_protocol::agent::{ExecSpec, ExecutionNumber, ExitCause, FromAgent, Language, PerStream, StdinRefusal, Stream, ToAgent};

use super::{Agent, files::Files, token, token_of, watch};
use crate::{
    execution::{Execution, Phase, STREAMS},
    hold,
    ipc::{self, Program, Report, Request, Serial},
    sys::{self, MAX_PIPE_BYTES, MIN_PIPE_BYTES},
};

/// Signals and sizes kept for a program that is being started.
const MAX_EARLY: usize = 16;

/// A sensible init says two things an execution.
const REPORTS_A_ROUND: usize = 64;
/// How long init may take to start a program: a loaded machine needs seconds.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long whoever had a program killed waits for it to be started first.
const KILLED_START_LIMIT: Duration = Duration::from_secs(5);

/// A request to init that waits to be sent.
pub(super) struct Waiting {
    file: OwnedFd,
    head: usize,
    /// An interpreter that waits can be what it asks for.
    by_spare: Option<Language>,
}

/// An execution whose processes are to be killed until none is left.
pub(super) struct Killing {
    serial: Serial,
    /// Since when init is starting it: as long as that lasts, there may be processes to come.
    starting: Option<Instant>,
}

/// The agent's ends of a program's pipes, and the program's.
pub(super) struct Pipes {
    pub(super) input: Option<OwnedFd>,
    pub(super) output: PerStream<OwnedFd>,
    pub(super) theirs: [OwnedFd; 3],
}

impl Agent {
    pub(super) fn control(&mut self, message: ToAgent) {
        if let ToAgent::Signal { number, .. } | ToAgent::Resize { number, .. } = &message
            && let Some(execution) = self.current(*number)
            && matches!(execution.phase, Phase::Waiting | Phase::Starting { .. })
        {
            // Sent right behind the request: it is for the program, which is not there yet.
            if execution.early.len() < MAX_EARLY {
                execution.early.push(message);
            }
            return;
        }
        match message {
            // Carried out by the caller, since it opens the conversation.
            ToAgent::Hello { .. } => {}
            ToAgent::Ping { value } => {
                let alone = self.is_alone();
                self.link.say(&FromAgent::Pong { value, alone });
            }
            ToAgent::Identify { hostname, generation } => {
                // Without a name of its own it has that of the one it was copied from, which harms nobody.
                let _ = nix::unistd::sethostname(&hostname);
                self.generation = Some(generation);
                self.identify_spares(hostname, generation);
                self.tell_generation();
            }
            ToAgent::PackFiles { sequence, credit } => self.pack_files(sequence, credit),
            // The server's numbers are never those of both.
            ToAgent::FilesCredit { sequence, upto } => {
                self.credit_files(sequence, upto);
                self.credit_file(sequence, upto);
            }
            ToAgent::FilesCancel { sequence } => {
                self.cancel_files(sequence);
                self.cancel_file(sequence);
            }
            ToAgent::UnpackFiles { sequence } => self.unpack_files(sequence),
            ToAgent::FilesEnd { sequence } => {
                self.end_files(sequence);
                self.end_file(sequence);
            }
            ToAgent::File { sequence, ask, credit } => self.begin_file(sequence, ask, credit),
            ToAgent::Proxy { on } => self.offer_proxy(on),
            ToAgent::TunnelConnect { stream, port, credit } => self.connect_stream(stream, port, credit),
            ToAgent::TunnelCredit { stream, upto } => self.credit_stream(stream, upto),
            ToAgent::TunnelEnd { stream } => self.end_stream(stream),
            ToAgent::TunnelReset { stream } => self.reset_stream(stream),
            ToAgent::StdinEof { number, offset } => {
                // Once it has ended, nobody is left to tell.
                if let Some(execution) = self.current(number).filter(|execution| execution.is_running())
                    && let Err(reason) = execution.input.end(offset)
                {
                    let taken = execution.input.taken();
                    self.link.say(&FromAgent::StdinRefused { number, offset, reason, taken });
                }
            }
            ToAgent::Signal { number, signal } => self.signal(number, signal),
            ToAgent::Resize { number, size } => {
                if let Some(execution) = self.current(number)
                    && execution.tty
                    && let Some(terminal) = &execution.output.stdout.source
                {
                    let _ = sys::set_terminal_size(terminal.as_fd(), size);
                }
            }
            ToAgent::Kill { number, cause } => self.kill(number, cause),
            ToAgent::Resume { number, from, credit, sequence } => self.resume(number, from, credit, sequence),
            ToAgent::Pause { number } => {
                if let Some(execution) = self.current(number) {
                    execution.pause();
                }
            }
            ToAgent::Credit { number, upto } => {
                if let Some(execution) = self.current(number) {
                    for stream in STREAMS {
                        execution.output.get_mut(stream).window.allow(*upto.get(stream));
                    }
                }
            }
            ToAgent::Ack { number, upto, end } => {
                if let Some(execution) = self.current(number) {
                    execution.end_acknowledged |= end;
                    let ended = !execution.is_running();
                    for stream in STREAMS {
                        let window = &mut execution.output.get_mut(stream).window;
                        window.ack(*upto.get(stream));
                        if ended {
                            window.shrink();
                        }
                    }
                }
            }
        }
    }

    /// Whether nothing changes here until the server says something.
    fn is_alone(&self) -> bool {
        let busy = self.execution.as_ref().is_some_and(Execution::is_running)
            || self.waiting.is_some()
            || !self.killing.is_empty()
            || !matches!(self.files, Files::Nothing)
            || self.transfers.are_going()
            || self.tunnel.is_busy();
        // An init that is being replaced is not known to be anybody's.
        let Some(init) = self.supervisor.ready().map(|init| init.pid) else { return false };
        // Those that wait for executions do nothing but wait.
        let mut ours = self.spares.processes(self.groups.as_ref());
        ours.push(init);
        !busy && hold::nobody_but(&ours)
    }

    fn current(&mut self, number: ExecutionNumber) -> Option<&mut Execution> {
        self.execution.as_mut().filter(|execution| execution.number == number)
    }

    fn resume(&mut self, number: ExecutionNumber, from: PerStream<u64>, credit: u64, sequence: u64) {
        let Some(execution) = self.current(number) else { return };
        let mut goes_on = from;
        for stream in STREAMS {
            *goes_on.get_mut(stream) = execution.output.get_mut(stream).window.resume(*from.get(stream), credit);
        }
        let state = execution.state();
        self.link.say(&FromAgent::Resumed { number, from: goes_on, end: state.end, stdin_offset: state.stdin_offset, sequence });
    }

    pub(super) fn take_input(&mut self, number: ExecutionNumber, offset: u64, data: Bytes) {
        let (outcome, taken) = match self.current(number) {
            Some(execution) => (execution.take_input(offset, data), execution.input.taken()),
            None => (Err(StdinRefusal::Closed), 0),
        };
        self.link.say(&match outcome {
            Ok(offset) => FromAgent::StdinAck { number, offset },
            Err(reason) => FromAgent::StdinRefused { number, offset, reason, taken },
        });
    }

    pub(super) fn begin(&mut self, mut spec: ExecSpec, code: &[u8]) {
        self.tunnel.add_to_environment(&mut spec.env);
        let number = spec.number;
        self.last_number = self.last_number.max(Some(number));
        if let Some(execution) = &self.execution {
            match &execution.phase {
                // Asked for twice: it is the same one.
                Phase::Ended(exit) if execution.number == number => {
                    let exit = exit.clone();
                    return self.link.say(&FromAgent::Exited { number, exit });
                }
                _ if execution.number == number => return,
                Phase::Ended(_) if execution.number < number => {}
                Phase::Ended(_) => return self.refuse(number, "its number is lower than that of an execution before"),
                _ => return self.refuse(number, "another execution is running"),
            }
        }
        self.last_serial += 1;
        let execution = Execution::new(&spec, self.last_serial, &self.config, Instant::now());
        let by_spare = self.suits(&spec).then_some(spec.language);
        match write_request(spec, code) {
            Ok((file, head)) => {
                self.waiting = Some(Waiting { file, head, by_spare });
                self.execution = Some(execution);
                self.ask_init();
            }
            Err(error) => self.refuse(number, &format!("cannot pass the code on: {error}")),
        }
    }

    fn refuse(&mut self, number: ExecutionNumber, message: &str) {
        self.link.say(&FromAgent::StartFailed { number, message: message.to_owned() });
    }

    /// The current execution could not be started: it is as if it had never been asked for.
    fn start_failed(&mut self, message: &str) {
        self.waiting = None;
        if let Some(execution) = self.execution.take() {
            self.refuse(execution.number, message);
            // It may have had one that waited.
            self.spares.refill(Instant::now());
        }
    }

    pub(super) fn give_up_waiting(&mut self) {
        if self.waiting.is_some() {
            let reason = self.supervisor.last_error.take().unwrap_or_else(|| "it ends at once".to_owned());
            self.start_failed(&format!("the sandbox's user namespace cannot be started: {reason}"));
        }
    }

    /// Hands the waiting request to init, if both are there and the files stand still for nobody.
    pub(super) fn ask_init(&mut self) {
        if self.files.hold() {
            return;
        }
        let (Some(init), Some(execution)) = (self.supervisor.ready(), &mut self.execution) else { return };
        let Some(waiting) = self.waiting.take() else { return };
        let spare = waiting.by_spare.and_then(|language| self.spares.take(language, Instant::now()));
        let taken = spare.as_ref().map(|spare| spare.serial);
        if let Some(serial) = taken {
            // It knows its code by this number.
            execution.serial = serial;
        }
        let serial = execution.serial;
        let asked = (|| -> io::Result<()> {
            if let Some(spare) = spare {
                connect(&self.epoll, execution, spare.input.filter(|_| execution.has_input), spare.output)?;
                let request = Request::HandOver { serial, head: waiting.head, input: execution.has_input };
                return ipc::send(init.socket.as_fd(), &request, &[waiting.file.as_raw_fd()]);
            }
            let group = self.groups.as_ref().map(|groups| groups.create(serial)).transpose()?;
            let mut descriptors = vec![waiting.file.as_raw_fd()];
            descriptors.extend(group.as_ref().map(AsRawFd::as_raw_fd));
            let pipes =
                if execution.tty { None } else { Some(make_pipes(execution.has_input, pipe_bytes(self.config.output_window_bytes))?) };
            let theirs = if let Some(Pipes { input, output, theirs }) = pipes {
                connect(&self.epoll, execution, input, output)?;
                Some(theirs)
            } else {
                None
            };
            descriptors.extend(theirs.iter().flatten().map(AsRawFd::as_raw_fd));
            let request = Request::Spawn { serial, head: waiting.head, group: group.is_some() };
            // The last step: nothing is started of what could not be prepared.
            ipc::send(init.socket.as_fd(), &request, &descriptors)
        })();
        execution.began = Instant::now();
        execution.phase = Phase::Starting { killed: None };
        if let Err(error) = asked {
            if let Some(serial) = taken {
                // Nobody else will have it.
                self.drop_spare(serial);
            }
            self.start_failed(&format!("cannot pass the request on: {error}"));
        }
    }

    /// What init has said since.
    pub(super) fn hear_init(&mut self) {
        if !self.read_init() {
            self.abandon_init();
        }
    }

    /// Returns false if nothing sensible will come from this init any more.
    fn read_init(&mut self) -> bool {
        self.init_spoke = false;
        for _ in 0..REPORTS_A_ROUND {
            let Some(init) = self.supervisor.process() else { return true };
            match ipc::receive::<Report>(init.socket.as_fd()) {
                Ok(Some((report, descriptors))) => self.hear(report, descriptors),
                Ok(None) => return false,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Not our words: the guest has got hold of it.
                Err(_) => return false,
            }
        }
        self.init_spoke = true;
        true
    }

    /// Returns whether init was given up for a start that does not come.
    pub(super) fn watch_start(&mut self, now: Instant) -> bool {
        let passed = |since: Instant, limit: Duration| now.saturating_duration_since(since) > limit;
        let mut hopeless = self.killing.iter().filter_map(|killing| killing.starting).any(|since| passed(since, START_LIMIT));
        if let Some(execution) = &self.execution
            && let Phase::Starting { killed } = execution.phase
        {
            hopeless |= passed(execution.began, START_LIMIT);
            if !hopeless && killed.is_some_and(|since| passed(since, KILLED_START_LIMIT)) {
                // Its end is told. If it is started after all, it is killed then; init and what else it runs have not deserved to go for it.
                self.finish(None, Some(libc::SIGKILL), None);
            }
        }
        if hopeless {
            // A start that takes so long is not going to happen: init is in the guest's hands or worse.
            self.abandon_init();
        }
        hopeless
    }

    /// It no longer speaks: whatever state it is in, it goes, and with it the namespace. Its end is then noticed.
    fn abandon_init(&mut self) {
        if let Some(init) = self.supervisor.process() {
            let _ = sys::kill(init.pid, libc::SIGKILL);
        }
    }

    /// An init that is not ready is told when it is.
    fn tell_generation(&self) {
        if let Some(generation) = self.generation
            && let Some(init) = self.supervisor.ready()
        {
            // One that is gone is followed by another.
            let _ = ipc::send(init.socket.as_fd(), &ipc::Request::Generation { generation }, &[]);
        }
    }

    fn hear(&mut self, report: Report, descriptors: Vec<OwnedFd>) {
        match report {
            Report::Ready => {
                self.supervisor.became_ready();
                self.transfers.root = descriptors.into_iter().next();
                if std::mem::take(&mut self.restarting) {
                    self.link.say(&FromAgent::NamespaceRestarted);
                }
                self.tell_generation();
                self.ask_init();
                self.spares.begin(Instant::now());
            }
            Report::SpareGone { serial } => self.spare_gone(serial),
            Report::Started { serial, by_spare } => {
                if let Some(killing) = self.killing.iter_mut().find(|killing| killing.serial == serial) {
                    // All that is to be killed is there now.
                    killing.starting = None;
                }
                self.started(serial, by_spare, descriptors);
            }
            Report::Failed { serial, message } => {
                self.killing.retain(|killing| killing.serial != serial);
                if self.known_to_init(serial).is_some() {
                    self.not_started(&message);
                }
            }
            Report::Exited { serial, code, signal } => {
                if self.known_to_init(serial).is_some_and(|execution| matches!(execution.phase, Phase::Running)) {
                    self.finish(code, signal, None);
                }
            }
        }
    }

    /// The current execution, if it is the one that init speaks of.
    fn known_to_init(&mut self, serial: Serial) -> Option<&mut Execution> {
        self.execution.as_mut().filter(|execution| execution.serial == serial)
    }

    /// The execution that was being started will not be.
    fn not_started(&mut self, message: &str) {
        match self.execution.as_ref().map(|execution| &execution.phase) {
            // That is what was wanted.
            Some(Phase::Starting { killed: Some(_) }) => self.finish(None, Some(libc::SIGKILL), None),
            Some(Phase::Starting { killed: None }) => self.start_failed(message),
            _ => {}
        }
    }

    fn started(&mut self, serial: Serial, by_spare: bool, descriptors: Vec<OwnedFd>) {
        let now = Instant::now();
        let Some(execution) = self.execution.as_mut().filter(|execution| execution.serial == serial) else { return };
        let Phase::Starting { .. } = execution.phase else { return };
        let number = execution.number;
        execution.phase = Phase::Running;
        if execution.tty
            && let Some(terminal) = descriptors.into_iter().next()
            && sys::set_nonblocking(terminal.as_fd()).is_ok()
            && watch(&self.epoll, terminal.as_fd(), token::STDOUT, EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT).is_ok()
        {
            execution.output.stdout.connect(terminal);
        }
        let spawn_us = u64::try_from(now.saturating_duration_since(execution.asked).as_micros()).unwrap_or(u64::MAX);
        let early = std::mem::take(&mut execution.early);
        self.link.say(&FromAgent::Started { number, spawn_us, by_spare });
        if let Some(memory) = &mut self.memory {
            memory.start(now);
        }
        for message in early {
            self.control(message);
        }
    }

    fn finish(&mut self, code: Option<i32>, signal: Option<i32>, cause: Option<ExitCause>) {
        let Some(execution) = &mut self.execution else { return };
        let number = execution.number;
        let (exit, left) = execution.finish(code, signal, cause, Instant::now());
        for source in left {
            self.lingering.add(&self.epoll, source);
        }
        self.link.say(&FromAgent::Exited { number, exit });
        // Said before anything else is done about it.
        self.link.flush();
        if let Some(groups) = &self.groups {
            // One that is being started may have nobody in it yet.
            groups.tidy(|serial| self.killing.iter().any(|killing| killing.serial == serial) || self.spares.has(serial));
        }
        self.spares.refill(Instant::now());
    }

    fn signal(&mut self, number: ExecutionNumber, signal: i32) {
        if let Some(serial) =
            self.current(number).filter(|execution| matches!(execution.phase, Phase::Running)).map(|execution| execution.serial)
            && let Some(init) = self.supervisor.ready()
        {
            let _ = ipc::send(init.socket.as_fd(), &Request::Signal { serial, signal }, &[]);
        }
    }

    fn kill(&mut self, number: ExecutionNumber, cause: Option<ExitCause>) {
        let Some(execution) = self.current(number) else { return };
        execution.kill_cause = execution.kill_cause.or(cause);
        let (serial, began) = (execution.serial, execution.began);
        let starting = match &mut execution.phase {
            Phase::Waiting => {
                self.waiting = None;
                return self.finish(None, Some(libc::SIGKILL), None);
            }
            Phase::Starting { killed } => {
                killed.get_or_insert_with(Instant::now);
                Some(began)
            }
            Phase::Running => None,
            Phase::Ended(_) => return,
        };
        if self.killing.iter().any(|killing| killing.serial == serial) {
            return;
        }
        if let Some(init) = self.supervisor.ready() {
            // Init does one thing after the other: if it still starts the program, it kills it right after that, where there are no groups.
            // Where there are, it knows that one that was handed its code and is gone is not to be started again.
            let _ = ipc::send(init.socket.as_fd(), &Request::Kill { serial, tree: self.groups.is_none() }, &[]);
        }
        self.killing.push(Killing { serial, starting });
        self.kill_again();
    }

    /// Goes on killing what is left of executions that are to be killed.
    pub(super) fn kill_again(&mut self) {
        let Self { groups, killing, .. } = self;
        killing.retain(|killing| {
            let left = groups.as_ref().is_some_and(|groups| groups.kill(killing.serial));
            left || killing.starting.is_some()
        });
    }

    /// Init has ended, and with it every process of the guest.
    pub(super) fn namespace_ended(&mut self) {
        // What it said before it went still counts.
        self.read_init();
        self.supervisor.ended(Instant::now());
        // Of what was mounted there nothing is left.
        self.transfers.root = None;
        self.spares.forget();
        self.restarting = true;
        self.killing.clear();
        match self.execution.as_ref().map(|execution| &execution.phase) {
            Some(Phase::Running) => self.finish(None, Some(libc::SIGKILL), Some(ExitCause::NamespaceEnded)),
            _ => self.not_started("the sandbox's processes were all killed while it was being started"),
        }
    }
}

/// The execution reads and writes through these.
fn connect(epoll: &Epoll, execution: &mut Execution, input: Option<OwnedFd>, output: PerStream<OwnedFd>) -> io::Result<()> {
    if let Some(input) = input {
        watch(epoll, input.as_fd(), token::STDIN, EpollFlags::EPOLLOUT)?;
        execution.sink = Some(input.into());
    }
    for (stream, source) in [(Stream::Stdout, output.stdout), (Stream::Stderr, output.stderr)] {
        watch(epoll, source.as_fd(), token_of(stream), EpollFlags::EPOLLIN)?;
        execution.output.get_mut(stream).connect(source);
    }
    Ok(())
}

fn write_request(spec: ExecSpec, code: &[u8]) -> io::Result<(OwnedFd, usize)> {
    let program = Program { language: spec.language, env: spec.env, cwd: spec.cwd, tty: spec.tty };
    in_memory(&program, code)
}

/// A file that holds something as JSON, how long that is, and more behind it.
pub(super) fn in_memory(head: &impl serde::Serialize, more: &[u8]) -> io::Result<(OwnedFd, usize)> {
    let head = serde_json::to_vec(head)?;
    let mut file = File::from(sys::memory_file()?);
    file.write_all(&head)?;
    file.write_all(more)?;
    io::Seek::rewind(&mut file)?;
    Ok((file.into(), head.len()))
}

/// Large, but in proportion to the window: what a program may be ahead of its reader is both together.
pub(super) fn pipe_bytes(window: u64) -> i32 {
    i32::try_from(window / 4).unwrap_or(i32::MAX).clamp(MIN_PIPE_BYTES, MAX_PIPE_BYTES)
}

pub(super) fn make_pipes(input: bool, bytes: i32) -> io::Result<Pipes> {
    let (their_input, input) = if input {
        let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
        sys::set_nonblocking(write.as_fd())?;
        let _ = sys::set_pipe_size(write.as_fd(), MAX_PIPE_BYTES);
        (read, Some(write))
    } else {
        (File::open("/dev/null")?.into(), None)
    };
    let output = || -> io::Result<(OwnedFd, OwnedFd)> {
        let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
        sys::set_nonblocking(read.as_fd())?;
        // Smaller pipes are slower, nothing else.
        let _ = sys::set_pipe_size(read.as_fd(), bytes);
        Ok((read, write))
    };
    let (stdout, their_stdout) = output()?;
    let (stderr, their_stderr) = output()?;
    Ok(Pipes { input, output: PerStream { stdout, stderr }, theirs: [their_input, their_stdout, their_stderr] })
}

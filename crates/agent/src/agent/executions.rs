//! What the server asks of executions, and what init tells of them.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use bytes::Bytes;
use nix::{
    fcntl::OFlag,
    sys::epoll::{Epoll, EpollFlags},
    unistd::pipe2,
};
use sandboxer_protocol::agent::{ExecSpec, ExecutionNumber, ExitCause, FromAgent, PerStream, StdinRefusal, Stream, ToAgent};

use super::{Agent, files::Files, spares::Found, token, watch};
use crate::{
    execution::{Execution, Phase, STREAMS},
    hold,
    ipc::{self, Program, Report, Request, Serial},
    sys::{self, MAX_PIPE_BYTES},
};

/// Signals and sizes kept for a program that is being started.
const MAX_EARLY: usize = 16;

/// A sensible init says two things an execution.
const REPORTS_A_ROUND: usize = 64;
/// How long init may take to start a program: a loaded machine needs seconds.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long it may take until it is said that a program runs that was handed over.
const ANNOUNCED_WITHIN: Duration = Duration::from_millis(2);
/// How long whoever had a program killed waits for it to be started first.
const KILLED_START_LIMIT: Duration = Duration::from_secs(5);

/// A program that waits to be started.
pub(super) struct Waiting {
    pub(super) spec: ExecSpec,
    pub(super) code: Bytes,
    /// Its ends of pipes that are there already: it was handed to an interpreter that never began.
    pub(super) theirs: Option<[OwnedFd; 3]>,
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

    pub(super) fn begin(&mut self, mut spec: ExecSpec, code: Bytes) {
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
        let now = Instant::now();
        self.spares.asked(now);
        self.execution = Some(Execution::new(&spec, self.last_serial, &self.config, now));
        self.waiting = Some(Waiting { spec, code, theirs: None });
        self.ask_init();
    }

    fn refuse(&mut self, number: ExecutionNumber, message: &str) {
        self.link.say(&FromAgent::StartFailed { number, message: message.to_owned() });
    }

    /// The current execution could not be started: it is as if it had never been asked for.
    fn start_failed(&mut self, message: &str) {
        self.waiting = None;
        // What was to be said of it later is not said at all.
        if let Some(execution) = &mut self.execution
            && execution.announcement.take().is_none()
            && execution.announced
        {
            // It was said to run, so it has to end, and only its own output can say why.
            execution.explain(message);
            return self.finish(None, Some(libc::SIGKILL), None);
        }
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

    /// Hands the waiting program to an interpreter that waits for it, or to init, if the files stand still for nobody.
    pub(super) fn ask_init(&mut self) {
        if self.files.hold() || self.supervisor.ready().is_none() || self.execution.is_none() {
            return;
        }
        let Some(waiting) = self.waiting.take() else { return };
        let found =
            if waiting.theirs.is_none() && self.may_wait(&waiting) { self.spares.take(&waiting, Instant::now()) } else { Found::None };
        let waiting = match found {
            Found::Ready(spare) => match self.hand_over(*spare, waiting) {
                None => return,
                Some(waiting) => waiting,
            },
            Found::Starting => {
                if let Some(execution) = &mut self.execution {
                    execution.began = Instant::now();
                }
                return self.waiting = Some(waiting);
            }
            Found::None => waiting,
        };
        if let Err(error) = self.ask_to_spawn(waiting) {
            self.start_failed(&format!("cannot pass the request on: {error}"));
        }
    }

    fn ask_to_spawn(&mut self, Waiting { spec, code, theirs }: Waiting) -> io::Result<()> {
        let (Some(init), Some(execution)) = (self.supervisor.ready(), &mut self.execution) else { return Ok(()) };
        execution.began = Instant::now();
        execution.phase = Phase::Starting { killed: None };
        let serial = execution.serial;
        self.spares.code_comes(serial, spec.language);
        let (file, head) = write_request(spec, &code)?;
        let group = self.groups.as_ref().map(|groups| groups.create(serial)).transpose()?;
        let mut descriptors = vec![file.as_raw_fd()];
        descriptors.extend(group.as_ref().map(AsRawFd::as_raw_fd));
        let theirs = match theirs {
            Some([input, output, errors]) => {
                let input = if execution.has_input { input } else { File::open("/dev/null")?.into() };
                for (stream, output) in STREAMS.map(|stream| (stream, execution.output.get(stream))) {
                    // They were watched under another number.
                    if let Some(source) = &output.source {
                        epoll_again(&self.epoll, source.as_fd(), token::of_output(serial, stream))?;
                    }
                }
                Some([input, output, errors])
            }
            None if execution.tty => None,
            None => {
                let Pipes { input, output, theirs } = make_pipes(execution.has_input, sys::pipe_bytes(self.config.output_window_bytes))?;
                execution.sink = input.map(File::from);
                for (stream, source) in [(Stream::Stdout, output.stdout), (Stream::Stderr, output.stderr)] {
                    watch(&self.epoll, source.as_fd(), token::of_output(serial, stream), EpollFlags::EPOLLIN)?;
                    execution.output.get_mut(stream).source = Some(source.into());
                }
                Some(theirs)
            }
        };
        descriptors.extend(theirs.iter().flatten().map(AsRawFd::as_raw_fd));
        // The last step: nothing is started of what could not be prepared.
        ipc::send(init.socket.as_fd(), &Request::Spawn { serial, head, group: group.is_some() }, &descriptors)
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
        // An interpreter that is to wait for it is being started.
        let waits = self.waiting.is_some() && self.supervisor.ready().is_some() && !self.files.hold();
        if let Some(execution) = self.execution.as_ref().filter(|_| waits) {
            hopeless |= passed(execution.began, START_LIMIT);
        }
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
                let mut descriptors = descriptors.into_iter();
                self.transfers.root = descriptors.next();
                if let Some(memory) = &mut self.memory {
                    memory.show_in(descriptors.next().map(File::from));
                }
                if std::mem::take(&mut self.restarting) {
                    self.link.say(&FromAgent::NamespaceRestarted);
                }
                self.tell_generation();
                self.ask_init();
                self.spares.begin(Instant::now());
            }
            Report::Waits { serial } => self.spare_waits(serial, descriptors.into_iter().next()),
            Report::Started { serial } => {
                if let Some(killing) = self.killing.iter_mut().find(|killing| killing.serial == serial) {
                    // All that is to be killed is there now.
                    killing.starting = None;
                }
                self.started(serial, descriptors);
            }
            Report::Failed { serial, .. } if self.spares.has(serial) => self.spare_spoilt(serial),
            Report::Exited { serial, code, .. } if self.spares.has(serial) => self.spare_ended(serial, code),
            Report::Failed { serial, message } => {
                self.killing.retain(|killing| killing.serial != serial);
                if self.known_to_init(serial).is_some() {
                    self.not_started(&message);
                }
            }
            Report::Exited { serial, code, signal } => {
                if self.known_to_init(serial).is_some_and(|execution| matches!(execution.phase, Phase::Running))
                    && !self.start_unbegun(serial, code)
                {
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

    fn started(&mut self, serial: Serial, descriptors: Vec<OwnedFd>) {
        let Some(execution) = self.execution.as_mut().filter(|execution| execution.serial == serial) else { return };
        let Phase::Starting { .. } = execution.phase else { return };
        execution.phase = Phase::Running;
        if execution.tty
            && let Some(terminal) = descriptors.into_iter().next()
            && sys::set_nonblocking(terminal.as_fd(), true).is_ok()
            && watch(&self.epoll, terminal.as_fd(), token::of_output(serial, Stream::Stdout), EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT)
                .is_ok()
        {
            execution.output.stdout.connect(terminal);
        }
        self.announce(false);
    }

    /// The current execution runs.
    pub(super) fn announce(&mut self, by_spare: bool) {
        let now = Instant::now();
        let Some(execution) = &mut self.execution else { return };
        let early = std::mem::take(&mut execution.early);
        if !std::mem::replace(&mut execution.announced, true) {
            let spawn_us = u64::try_from(now.saturating_duration_since(execution.asked).as_micros()).unwrap_or(u64::MAX);
            let started = FromAgent::Started { number: execution.number, spawn_us, by_spare };
            if by_spare {
                // It is quick: nobody has to wake up twice if its first output comes with this, and meanwhile it has the processor.
                execution.announcement = Some((now + ANNOUNCED_WITHIN, started));
            } else {
                self.link.say(&started);
            }
        }
        let files_come = self.transfers.are_going();
        if let Some(memory) = &mut self.memory {
            if files_come {
                memory.unsure();
            }
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
        if let Some((_, started)) = execution.announcement.take() {
            self.link.say(&started);
        }
        self.link.say(&FromAgent::Exited { number, exit });
        // Said before anything else is done about it.
        self.link.flush();
        if let Some(execution) = &mut self.execution {
            execution.sink = None;
        }
        self.handed = None;
        for source in left {
            self.lingering.add(&self.epoll, source);
        }
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
            if let Some(handed) = &mut self.handed {
                handed.signal(signal);
            }
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
        if let Some(handed) = &mut self.handed {
            handed.signalled = true;
        }
        if self.groups.is_none()
            && let Some(init) = self.supervisor.ready()
        {
            // Init does one thing after the other: if it still starts the program, it kills it right after that.
            let _ = ipc::send(init.socket.as_fd(), &Request::Kill { serial }, &[]);
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
        if let Some(serial) = self.execution.as_ref().map(|execution| execution.serial) {
            // One that has not begun is the next init's.
            self.start_unbegun(serial, None);
        }
        self.spares.forget();
        self.handed = None;
        self.restarting = true;
        self.killing.clear();
        match self.execution.as_ref().map(|execution| &execution.phase) {
            Some(Phase::Running) => self.finish(None, Some(libc::SIGKILL), Some(ExitCause::NamespaceEnded)),
            _ => self.not_started("the sandbox's processes were all killed while it was being started"),
        }
    }
}

fn epoll_again(epoll: &Epoll, source: BorrowedFd<'_>, token: u64) -> io::Result<()> {
    // It may not be watched any more.
    let _ = epoll.delete(source);
    watch(epoll, source, token, EpollFlags::EPOLLIN)
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

pub(super) fn make_pipes(input: bool, bytes: i32) -> io::Result<Pipes> {
    let (their_input, input) = if input {
        let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
        sys::set_nonblocking(write.as_fd(), true)?;
        let _ = sys::set_pipe_size(write.as_fd(), MAX_PIPE_BYTES);
        (read, Some(write))
    } else {
        (File::open("/dev/null")?.into(), None)
    };
    let output = || -> io::Result<(OwnedFd, OwnedFd)> {
        let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
        sys::set_nonblocking(read.as_fd(), true)?;
        // Smaller pipes are slower, nothing else.
        let _ = sys::set_pipe_size(read.as_fd(), bytes);
        Ok((read, write))
    };
    let (stdout, their_stdout) = output()?;
    let (stderr, their_stderr) = output()?;
    Ok(Pipes { input, output: PerStream { stdout, stderr }, theirs: [their_input, their_stdout, their_stderr] })
}

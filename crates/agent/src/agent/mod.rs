//! The agent's loop: one thread, nothing in it blocks, no locks.
//!
//! Every descriptor is watched for edges; flags remember what is ready. A round reads what is new, carries it out, moves
//! output and input as far as they go, and sleeps only when nothing could be moved, or for a moment to let a torrent of output gather.

mod executions;
mod files;
mod lingering;
mod spares;
mod transfers;
mod tunnel;

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        signal::{SigSet, SigmaskHow, Signal, sigprocmask},
        signalfd::{SfdFlags, SignalFd},
    },
};
use sandboxer_protocol::agent::{
    AGENT_PROTOCOL_VERSION, AgentConfig, AgentEvent, Enforced, ExecutionNumber, FromAgent, Marker, Stream, ToAgent, ToAgentFrame,
};

use crate::{
    cgroup::Groups,
    execution::{Execution, Phase, STREAMS},
    ipc::Serial,
    link::{Heard, Link},
    memory::{MemoryWatch, Pressure},
    setup,
    supervisor::Supervisor,
    sys::{self, ChildEvent},
};
use lingering::Lingering;
use spares::{Handed, Spares};

/// How long the agent sleeps at most while nobody is at the other end: an edge tells it of a newcomer, this is for a gVisor that misses it.
const ALONE_RUNNING: Duration = Duration::from_millis(250);
const ALONE_IDLE: Duration = Duration::from_secs(2);
/// Without output for this long, buffers are given back.
const REST: Duration = Duration::from_secs(1);
/// How often a kill that has no single call for it is repeated.
const KILL_AGAIN: Duration = Duration::from_millis(5);
const SCRATCH_BYTES: usize = 64 * 1024;
/// Frames carried out, and reads, before output gets its turn.
const FRAMES_A_ROUND: usize = 64;

/// What an event is about.
mod token {
    use super::{Serial, Stream};

    pub(super) const LINK_IN: u64 = 0;
    pub(super) const LINK_OUT: u64 = 1;
    pub(super) const CHILDREN: u64 = 2;
    pub(super) const INIT: u64 = 3;
    pub(super) const STDIN: u64 = 6;
    /// Something has changed in a directory that is watched.
    pub(super) const CHANGES: u64 = 7;
    pub(super) const PROXY: u64 = 8;
    /// And all above.
    pub(super) const LINGERING: u64 = 16;
    /// With the serial of an execution and one of its outputs; above all of those.
    pub(super) const OUTPUT: u64 = 1 << 62;
    /// With the number of a stream; above all of those.
    pub(super) const TUNNEL: u64 = 1 << 63;

    pub(super) fn of_output(serial: Serial, stream: Stream) -> u64 {
        OUTPUT | serial << 1 | u64::from(stream == Stream::Stderr)
    }

    /// The other way round.
    pub(super) fn output(token: u64) -> (Serial, Stream) {
        ((token & !OUTPUT) >> 1, if token & 1 == 0 { Stream::Stdout } else { Stream::Stderr })
    }
}

pub(crate) struct Agent {
    config: AgentConfig,
    enforced: Enforced,
    groups: Option<Groups>,
    link: Link,
    epoll: Epoll,
    children: SignalFd,
    supervisor: Supervisor,
    /// What programs are to know of this copy of the sandbox.
    generation: Option<u64>,
    /// A namespace has ended and the next one has not been announced yet.
    restarting: bool,
    init_spoke: bool,
    execution: Option<Execution>,
    /// The highest number that an execution was asked for with.
    last_number: Option<ExecutionNumber>,
    /// The serial of the last execution.
    last_serial: Serial,
    /// What init is to be asked for when it is ready.
    waiting: Option<executions::Waiting>,
    /// Executions whose processes are to be killed until none is left.
    killing: Vec<executions::Killing>,
    lingering: Lingering,
    spares: Spares,
    /// The current execution was handed to one of those, and may not have begun.
    handed: Option<Handed>,
    files: files::Files,
    transfers: transfers::Transfers,
    tunnel: tunnel::Tunnel,
    memory: Option<MemoryWatch>,
    scratch: Box<[u8]>,
}

/// What a round has left to be done at once.
#[derive(Debug, Clone, Copy)]
struct More {
    /// Output of the execution was moved, or can be read on.
    of_output: bool,
    /// Anything else: what was heard, files, streams.
    of_others: bool,
}

impl More {
    fn is_any(self) -> bool {
        self.of_output || self.of_others
    }
}

fn watch(epoll: &Epoll, fd: BorrowedFd<'_>, token: u64, flags: EpollFlags) -> io::Result<()> {
    Ok(epoll.add(fd, EpollEvent::new(flags | EpollFlags::EPOLLET, token))?)
}

impl Agent {
    pub(crate) fn new(config: AgentConfig) -> io::Result<Self> {
        let marker = Marker::from_hex(&config.marker).ok_or_else(|| io::Error::other("the marker is not 32 bytes in hex"))?;
        let mut signals = SigSet::empty();
        signals.add(Signal::SIGCHLD);
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(&signals), None)?;
        let children = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        let link = Link::new(marker)?;
        let (enforced, groups) = setup::prepare(&config)?;
        let config = AgentConfig { spares: spares::wanted(config.spares, config.memory_bytes), ..config };
        let supervisor = Supervisor::new(Instant::now(), config.memory_bytes);
        Self::assemble(config, link, children, supervisor, enforced, groups)
    }

    fn assemble(
        config: AgentConfig,
        link: Link,
        children: SignalFd,
        supervisor: Supervisor,
        enforced: Enforced,
        groups: Option<Groups>,
    ) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let (input, output) = link.descriptors();
        watch(&epoll, input, token::LINK_IN, EpollFlags::EPOLLIN)?;
        watch(&epoll, output, token::LINK_OUT, EpollFlags::EPOLLOUT)?;
        watch(&epoll, children.as_fd(), token::CHILDREN, EpollFlags::EPOLLIN)?;
        let memory = config.memory_bytes.and_then(MemoryWatch::new);
        Ok(Self {
            enforced: Enforced { memory: memory.is_some(), ..enforced },
            config,
            groups,
            link,
            epoll,
            children,
            supervisor,
            generation: None,
            restarting: false,
            init_spoke: false,
            execution: None,
            last_number: None,
            last_serial: 0,
            waiting: None,
            killing: Vec::new(),
            lingering: Lingering::default(),
            spares: Spares::default(),
            handed: None,
            files: files::Files::default(),
            transfers: transfers::Transfers::default(),
            tunnel: tunnel::Tunnel::default(),
            memory,
            scratch: vec![0; SCRATCH_BYTES].into_boxed_slice(),
        })
    }

    /// Runs for as long as the sandbox does.
    pub(crate) fn run(&mut self) -> io::Result<()> {
        let mut events = [EpollEvent::empty(); 64];
        loop {
            let more = self.round();
            let gather = self.should_gather(more);
            if let Some(gather) = gather {
                // Not by waiting for events: each write would be one.
                thread::sleep(gather);
            }
            let now_resting = !more.is_any() && gather.is_none();
            let timeout = if now_resting { self.timeout() } else { EpollTimeout::ZERO };
            match self.epoll.wait(&mut events, timeout) {
                Ok(0) if now_resting => self.nothing_happened(),
                Ok(count) => events[..count].iter().for_each(|event| self.note(event)),
                // A restore looks like this: the other end may be a new one.
                Err(Errno::EINTR) => {
                    self.link.readable = true;
                    self.link.ended = true;
                    self.link.writable = true;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// For how long to let output gather now, if at all: not while there is other work that can be done.
    fn should_gather(&mut self, more: More) -> Option<Duration> {
        // With no room on the way out, to read on by single writes would bring nothing either.
        let held_up = !self.link.writable;
        let execution = self.execution.as_mut().filter(|execution| !more.of_others && (execution.all_sent() || held_up))?;
        execution.should_gather()
    }

    fn note(&mut self, event: &EpollEvent) {
        match event.data() {
            token::LINK_IN => {
                self.link.readable = true;
                self.link.ended = event.events().contains(EpollFlags::EPOLLHUP);
            }
            token::LINK_OUT => self.link.writable = true,
            token::CHILDREN => self.reap(),
            token::INIT => self.init_spoke = true,
            token::CHANGES => self.transfers.note_changes(),
            token::PROXY => self.tunnel.proxy_ready(),
            stream if stream >= token::TUNNEL => self.tunnel.stream_ready(stream & !token::TUNNEL),
            output if output >= token::OUTPUT => {
                let (serial, stream) = token::output(output);
                match self.execution.as_mut().filter(|execution| execution.serial == serial) {
                    Some(execution) => {
                        execution.output.get_mut(stream).readable = true;
                        execution.sink_writable |= execution.tty;
                    }
                    None => self.spare_spoilt(serial),
                }
            }
            lingering if lingering >= token::LINGERING => self.lingering.ready(lingering),
            token::STDIN => {
                if let Some(execution) = &mut self.execution {
                    execution.sink_writable = true;
                }
            }
            _ => {}
        }
    }

    /// Does everything that can be done now.
    fn round(&mut self) -> More {
        let now = Instant::now();
        self.keep_init(now);
        let mut of_output = false;
        let mut more = true;
        for _ in 0..FRAMES_A_ROUND {
            match self.link.hear(&mut self.scratch) {
                Heard::Event(event) => self.carry_out(event),
                Heard::Bytes => {}
                // Nobody there: as with no client.
                Heard::Gone => {
                    self.drop_files();
                    self.drop_transfers();
                    self.tunnel.drop_all();
                    if let Some(execution) = &mut self.execution {
                        execution.pause();
                    }
                }
                Heard::Nothing => {
                    more = false;
                    break;
                }
            }
        }
        if self.init_spoke {
            self.hear_init();
            more |= self.init_spoke;
        }
        if let Some(execution) = &mut self.execution {
            execution.feed();
            execution.watch_sink(|sink| watch(&self.epoll, sink, token::STDIN, EpollFlags::EPOLLOUT));
            for stream in STREAMS {
                of_output |= execution.fill(stream, now);
            }
            if let Some(started) = execution.announcement(now) {
                self.link.say(&started);
            }
        }
        let output_first = self.execution.as_ref().is_some_and(|execution| !execution.all_sent());
        if !output_first {
            self.link.flush();
        }
        if self.streams_first() {
            more |= self.go_on_with_streams();
        }
        // A program may write before init has had the time to say that it runs; whoever listens hears that first.
        if let Some(execution) = self.execution.as_mut().filter(|execution| !matches!(execution.phase, Phase::Starting { .. })) {
            for stream in STREAMS {
                of_output |= self.link.send_output(execution.number, stream, &mut execution.output.get_mut(stream).window);
            }
        }
        self.link.flush();
        more |= self.send_files(now);
        more |= self.go_on_with_files();
        more |= self.go_on_with_streams();
        more |= self.lingering.drain(&mut self.scratch);
        self.watch_memory(now);
        self.watch_start(now);
        self.watch_handed(now);
        self.kill_again();
        self.keep_spares(now);
        self.tidy(now);
        // There may be room for answers again, or a read was interrupted; no edge tells of either.
        More { of_output, of_others: more || self.link.wants_to_read() }
    }

    /// Until when to sleep.
    fn timeout(&self) -> EpollTimeout {
        let now = Instant::now();
        let running = self.execution.as_ref().is_some_and(Execution::is_running);
        let mut sleep: Option<Duration> = None;
        let mut at_most = |duration: Duration| sleep = Some(sleep.map_or(duration, |sleep| sleep.min(duration)));
        if self.link.alone {
            at_most(if running { ALONE_RUNNING } else { ALONE_IDLE });
        }
        let until = |at: Instant| at.saturating_duration_since(now);
        self.supervisor.retry().map(until).map(&mut at_most);
        self.memory.as_ref().and_then(MemoryWatch::next).map(until).map(&mut at_most);
        self.spares.due().map(until).map(&mut at_most);
        self.spares.tidy_at.map(until).map(&mut at_most);
        self.handed.as_ref().map(|handed| handed.look).map(until).map(&mut at_most);
        let announcement = self.execution.as_ref().and_then(|execution| execution.announcement.as_ref());
        announcement.map(|(due, _)| *due).map(until).map(&mut at_most);
        self.files_deadline().map(until).map(&mut at_most);
        if !self.killing.is_empty() {
            at_most(KILL_AGAIN);
        }
        let starts = |phase: &Phase| matches!(phase, Phase::Waiting | Phase::Starting { .. });
        let busy = self.execution.as_ref().is_some_and(|execution| execution.busy || starts(&execution.phase));
        if busy || self.link.holds_room() {
            at_most(REST);
        }
        match sleep {
            None => EpollTimeout::NONE,
            // Rounded up: waking a moment too early only to sleep again costs twice.
            Some(sleep) => EpollTimeout::try_from(sleep.as_millis().saturating_add(1).min(60_000) as u32).unwrap_or(EpollTimeout::ZERO),
        }
    }

    fn nothing_happened(&mut self) {
        if self.link.alone {
            self.link.readable = true;
        }
        self.link.rest();
        if let Some(execution) = &mut self.execution {
            execution.rest();
        }
    }

    fn carry_out(&mut self, event: AgentEvent) {
        let frame = match event {
            AgentEvent::Opened => {
                self.link.close();
                self.drop_files();
                self.drop_transfers();
                self.tunnel.drop_all();
                if let Some(execution) = &mut self.execution {
                    execution.pause();
                }
                return;
            }
            AgentEvent::Frame(frame) => frame,
        };
        match frame {
            ToAgentFrame::Control(ToAgent::Hello { nonce, .. }) => {
                let reply = FromAgent::HelloReply {
                    version: AGENT_PROTOCOL_VERSION,
                    agent: concat!("sandboxer-agent ", env!("CARGO_PKG_VERSION")).to_owned(),
                    enforced: self.enforced,
                    execution: self.execution.as_ref().map(Execution::state),
                    last_number: self.last_number,
                    identifies: true,
                    files: true,
                    single_files: true,
                    watches: true,
                    tunnel: true,
                };
                self.link.answer_opening(&nonce, &reply);
            }
            // Without its Hello there is no conversation.
            _ if !self.link.is_open() => {}
            ToAgentFrame::Control(message) => self.control(message),
            ToAgentFrame::Exec { spec, code } => self.begin(spec, code),
            ToAgentFrame::Stdin { number, offset, data } => self.take_input(number, offset, data),
            ToAgentFrame::Files { sequence, offset, data } => {
                self.take_files(sequence, offset, &data);
                self.take_file(sequence, offset, &data);
            }
            ToAgentFrame::Tunnel { stream, data } => self.take_stream(stream, &data),
        }
    }

    /// Starts an init where there is none.
    fn keep_init(&mut self, now: Instant) {
        if let Some(init) = self.supervisor.start_if_due(now) {
            if watch(&self.epoll, init.socket.as_fd(), token::INIT, EpollFlags::EPOLLIN).is_err() {
                // It can't be heard, so it is of no use; its end is noticed as any other's.
                let _ = sys::kill(init.pid, libc::SIGKILL);
            }
            self.init_spoke = true;
        }
        if self.supervisor.is_hopeless() {
            self.give_up_waiting();
        }
    }

    fn reap(&mut self) {
        while let Ok(Some(_)) = self.children.read_signal() {}
        while let Some(event) = sys::next_child_event(true) {
            let init = self.supervisor.process().map(|init| init.pid);
            match event {
                // The guest may stop its own init; that must not stop us.
                ChildEvent::Stopped(pid) if init == Some(pid) => {
                    let _ = sys::kill(pid, libc::SIGCONT);
                }
                ChildEvent::Stopped(_) => {}
                ChildEvent::Ended(pid, _) if init == Some(pid) => self.namespace_ended(),
                ChildEvent::Ended(..) => {}
            }
        }
    }

    fn watch_memory(&mut self, now: Instant) {
        let Some(memory) = self.memory.as_mut().filter(|memory| memory.is_due(now)) else { return };
        let spares = self.spares.processes(self.groups.as_ref());
        let victim = match memory.tick(now, self.supervisor.process().map(|init| init.pid), &spares) {
            None => return,
            Some(Pressure::Spares) => return self.give_up_spares(now),
            Some(Pressure::Killed(victim)) => victim,
        };
        if let Some(execution) = self.execution.as_mut().filter(|execution| execution.is_running()) {
            // It is the first process of its group: the oldest one, and it is still there.
            let main = self.groups.as_ref().and_then(|groups| groups.members(execution.serial).into_iter().min());
            if main.is_none_or(|main| main == victim.pid) {
                execution.out_of_memory = true;
                return;
            }
        }
        self.link.say(&FromAgent::MemoryKill { command: victim.command, resident_bytes: victim.resident_bytes });
    }
}

#[cfg(test)]
mod tests;

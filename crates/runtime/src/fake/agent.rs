//! The agent's side of the conversation, as a task.

use std::{collections::VecDeque, path::PathBuf};

use bytes::{Bytes, BytesMut};
use sandboxer_agent::{input::Input, window::Window};
use sandboxer_protocol::{
    agent::{
        AGENT_PROTOCOL_VERSION, AgentConfig, AgentDecoder, AgentEvent, DetachedOutput, Enforced, ExecSpec, ExecState, ExecutionNumber,
        Exit, ExitCause, FromAgent, Marker, PerStream, Stream, ToAgent, ToAgentFrame, encode_from_agent, encode_output,
        encode_reply_opening,
    },
    limits::MAX_OUTPUT_PIECE_BYTES,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream},
    sync::{mpsc, oneshot},
    task::yield_now,
    time::{Instant, sleep_until},
};

use super::program::{Disk, Program, Step};
use crate::{End, RuntimeError};

/// What may wait to be written; beyond it no more output is put into frames.
const OUT_BYTES: usize = 512 * 1024;
/// How much a program does before the conversation gets its turn.
const STEPS: usize = 64;
const STREAMS: [Stream; 2] = [Stream::Stdout, Stream::Stderr];

/// What the runtime wants of a sandbox.
pub(super) enum Order {
    Connect(DuplexStream),
    Freeze { frozen: bool, reply: oneshot::Sender<()> },
    Save { into: PathBuf, refuse_execution: bool, reply: oneshot::Sender<Result<(), RuntimeError>> },
    End(End),
}

pub(super) struct Execution {
    pub(super) spec: ExecSpec,
    pub(super) program: Program,
    pub(super) windows: PerStream<Window>,
    /// The windows don't tell theirs, and a save must not change it.
    pub(super) credit: PerStream<u64>,
    pub(super) attached: bool,
    pub(super) input: Input,
    /// Written by the program and not yet in a window.
    pub(super) pending: VecDeque<(Stream, Bytes)>,
    pub(super) wake: Option<Instant>,
    pub(super) started: Instant,
    pub(super) exit: Option<Exit>,
    pub(super) end_acknowledged: bool,
}

pub(super) struct Agent {
    pub(super) marker: Marker,
    pub(super) output_window: u64,
    pub(super) stdin_window: u64,
    pub(super) disk: Disk,
    pub(super) execution: Option<Execution>,
    pub(super) last_number: Option<ExecutionNumber>,
    decoder: AgentDecoder,
    out: BytesMut,
    /// A conversation was opened and not cut since.
    open: bool,
    frozen: bool,
}

impl Agent {
    pub(super) fn new(marker: Marker, config: &AgentConfig) -> Self {
        Self {
            marker,
            output_window: config.output_window_bytes,
            stdin_window: config.stdin_window_bytes,
            disk: Disk::new(),
            execution: None,
            last_number: None,
            decoder: AgentDecoder::new(marker),
            out: BytesMut::new(),
            open: false,
            frozen: false,
        }
    }

    /// Lives until it is ended.
    pub(super) async fn run(mut self, link: DuplexStream, mut orders: mpsc::Receiver<Order>) -> End {
        let mut link = Some(link);
        loop {
            let more = !self.frozen && self.work();
            let wake = self.execution.as_ref().and_then(|execution| execution.wake).filter(|_| !self.frozen);
            let has_out = !self.out.is_empty();
            tokio::select! {
                biased;
                order = orders.recv() => match order {
                    None => return End::Killed,
                    Some(Order::End(end)) => return end,
                    Some(Order::Connect(new)) => {
                        self.take_what_is_there(link.as_mut()).await;
                        link = Some(new);
                    }
                    Some(Order::Freeze { frozen, reply }) => {
                        self.frozen = frozen;
                        reply.send(()).ok();
                    }
                    Some(Order::Save { into, refuse_execution, reply }) => {
                        let running = self.execution.as_ref().is_some_and(|execution| execution.exit.is_none());
                        let saved = if refuse_execution && running { Err(RuntimeError::Busy) } else { self.save(&into) };
                        reply.send(saved).ok();
                    }
                },
                usable = converse(link.as_mut(), &mut self.decoder, &mut self.out, has_out), if !self.frozen => {
                    if !usable {
                        link = None;
                        self.cut();
                    }
                    self.hear();
                }
                () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {}
                () = yield_now(), if more => {}
            }
        }
    }

    /// As with a FIFO, what the last server wrote before it went is read before what the next one writes.
    async fn take_what_is_there(&mut self, link: Option<&mut DuplexStream>) {
        let Some(link) = link else { return };
        loop {
            tokio::select! {
                biased;
                read = link.read_buf(self.decoder.buffer()) => if !matches!(read, Ok(1..)) { return },
                () = std::future::ready(()) => return,
            }
            self.hear();
        }
    }

    fn cut(&mut self) {
        self.decoder.end_of_input();
        self.out.clear();
        self.open = false;
    }

    /// Runs the program a little and puts its output into frames; says whether there is more to do at once.
    fn work(&mut self) -> bool {
        let Self { execution: Some(execution), disk, out, open, .. } = self else { return false };
        let more = execution.advance(disk, out, *open);
        execution.send(out, *open) || more
    }

    fn say(&mut self, message: &FromAgent) {
        if self.open {
            encode_from_agent(&mut self.out, message);
        }
    }

    fn hear(&mut self) {
        while let Some(event) = self.decoder.next() {
            match event {
                // What was being said belongs to the last conversation.
                AgentEvent::Opened => {
                    self.out.clear();
                    self.open = false;
                    if let Some(execution) = &mut self.execution {
                        STREAMS.iter().for_each(|stream| execution.windows.get_mut(*stream).pause());
                        execution.attached = false;
                    }
                }
                AgentEvent::Frame(ToAgentFrame::Control(ToAgent::Hello { nonce, .. })) => {
                    self.open = true;
                    let reply = FromAgent::HelloReply {
                        version: AGENT_PROTOCOL_VERSION,
                        agent: "fake".to_owned(),
                        enforced: Enforced::default(),
                        execution: self.execution.as_ref().map(Execution::state),
                        last_number: self.last_number,
                        identifies: true,
                        files: false,
                        single_files: false,
                        watches: false,
                        tunnel: false,
                    };
                    encode_reply_opening(&mut self.out, &nonce, &reply);
                }
                AgentEvent::Frame(frame) if self.open => self.obey(frame),
                AgentEvent::Frame(_) => {}
            }
        }
    }

    fn obey(&mut self, frame: ToAgentFrame) {
        match frame {
            ToAgentFrame::Exec { spec, code } => self.execute(spec, &code),
            ToAgentFrame::Stdin { number, offset, data } => {
                let Some(execution) = self.numbered(number) else { return };
                let answer = match execution.input.take(offset, data) {
                    Ok(offset) => FromAgent::StdinAck { number, offset },
                    Err(reason) => FromAgent::StdinRefused { number, offset, reason, taken: execution.input.taken() },
                };
                self.say(&answer);
            }
            ToAgentFrame::Files { .. } | ToAgentFrame::Tunnel { .. } => {}
            ToAgentFrame::Control(control) => self.control(control),
        }
    }

    fn execute(&mut self, spec: ExecSpec, code: &[u8]) {
        let number = spec.number;
        self.last_number = self.last_number.max(Some(number));
        if self.execution.as_ref().is_some_and(|execution| execution.exit.is_none()) {
            return self.say(&FromAgent::StartFailed { number, message: "another execution runs".to_owned() });
        }
        self.execution = Some(Execution::new(spec, Program::parse(&String::from_utf8_lossy(code)), self.output_window, self.stdin_window));
        self.say(&FromAgent::Started { number, spawn_us: 0, by_spare: false });
    }

    fn control(&mut self, control: ToAgent) {
        match control {
            ToAgent::Ping { value } => self.say(&FromAgent::Pong { value, alone: false }),
            ToAgent::Identify { .. } => {}
            // It has said that it can't.
            ToAgent::PackFiles { .. } | ToAgent::FilesCredit { .. } | ToAgent::FilesCancel { .. } => {}
            ToAgent::UnpackFiles { .. } | ToAgent::FilesEnd { .. } | ToAgent::File { .. } => {}
            ToAgent::Proxy { .. } | ToAgent::TunnelConnect { .. } | ToAgent::TunnelCredit { .. } => {}
            ToAgent::TunnelEnd { .. } | ToAgent::TunnelReset { .. } => {}
            ToAgent::Hello { .. } | ToAgent::Resize { .. } => {}
            ToAgent::StdinEof { number, offset } => {
                let Some(execution) = self.numbered(number) else { return };
                let answer = match execution.input.end(offset) {
                    Ok(()) => FromAgent::StdinAck { number, offset },
                    Err(reason) => FromAgent::StdinRefused { number, offset, reason, taken: execution.input.taken() },
                };
                self.say(&answer);
            }
            ToAgent::Signal { number, signal } => self.stop(number, signal, None),
            ToAgent::Kill { number, cause } => self.stop(number, 9, cause),
            ToAgent::Resume { number, from, credit, sequence } => {
                let Some(execution) = self.numbered(number) else { return };
                let resumed = execution.resume(from, credit, sequence);
                self.say(&resumed);
            }
            ToAgent::Pause { number } => {
                if let Some(execution) = self.numbered(number) {
                    STREAMS.iter().for_each(|stream| execution.windows.get_mut(*stream).pause());
                    execution.attached = false;
                }
            }
            ToAgent::Credit { number, upto } => {
                if let Some(execution) = self.numbered(number) {
                    for stream in STREAMS {
                        let credit = execution.credit.get_mut(stream);
                        *credit = (*credit).max(*upto.get(stream));
                        execution.windows.get_mut(stream).allow(*upto.get(stream));
                    }
                }
            }
            ToAgent::Ack { number, upto, end } => {
                if let Some(execution) = self.numbered(number) {
                    execution.end_acknowledged |= end;
                    STREAMS.iter().for_each(|stream| execution.windows.get_mut(*stream).ack(*upto.get(*stream)));
                }
            }
        }
    }

    fn stop(&mut self, number: ExecutionNumber, signal: i32, cause: Option<ExitCause>) {
        let Self { execution: Some(execution), out, open, .. } = self else { return };
        if execution.spec.number == number {
            execution.pending.clear();
            execution.finish(None, Some(signal), cause, out, *open);
        }
    }

    fn numbered(&mut self, number: ExecutionNumber) -> Option<&mut Execution> {
        self.execution.as_mut().filter(|execution| execution.spec.number == number)
    }
}

/// Reads or writes what can be; false: the other side is gone. Waits for ever without a link. Cancel-safe.
async fn converse(link: Option<&mut DuplexStream>, decoder: &mut AgentDecoder, out: &mut BytesMut, has_out: bool) -> bool {
    let Some(link) = link else { return std::future::pending().await };
    let (mut reader, mut writer) = tokio::io::split(link);
    tokio::select! {
        read = reader.read_buf(decoder.buffer()) => matches!(read, Ok(1..)),
        written = writer.write_buf(out), if has_out => matches!(written, Ok(1..)),
    }
}

impl Execution {
    fn new(spec: ExecSpec, program: Program, output_window: u64, stdin_window: u64) -> Self {
        let mut input = Input::new(stdin_window);
        if !spec.stdin {
            // Nothing was taken, so the end can be there.
            input.end(0).ok();
        }
        Self {
            spec,
            program,
            windows: PerStream { stdout: Window::new(output_window), stderr: Window::new(output_window) },
            credit: PerStream::default(),
            attached: true,
            input,
            pending: VecDeque::new(),
            wake: None,
            started: Instant::now(),
            exit: None,
            end_acknowledged: false,
        }
    }

    fn state(&self) -> ExecState {
        ExecState {
            number: self.spec.number,
            id: self.spec.id.clone(),
            exit: self.exit.clone(),
            held_from: PerStream { stdout: self.windows.stdout.held_from(), stderr: self.windows.stderr.held_from() },
            end: self.end(),
            stdin_offset: self.input.taken(),
            stdin_eof: self.input.ended(),
            end_acknowledged: self.end_acknowledged,
            tty: self.spec.tty.is_some(),
            note: self.spec.note.clone(),
        }
    }

    fn end(&self) -> PerStream<u64> {
        PerStream { stdout: self.windows.stdout.end(), stderr: self.windows.stderr.end() }
    }

    fn resume(&mut self, from: PerStream<u64>, credit: u64, sequence: u64) -> FromAgent {
        let mut goes_on = PerStream::default();
        for stream in STREAMS {
            let start = self.windows.get_mut(stream).resume(*from.get(stream), credit);
            *goes_on.get_mut(stream) = start;
            *self.credit.get_mut(stream) = start.saturating_add(credit);
        }
        self.attached = true;
        FromAgent::Resumed { number: self.spec.number, from: goes_on, end: self.end(), stdin_offset: self.input.taken(), sequence }
    }

    /// Runs the program until it has to wait or had its turn; says whether it could go on.
    fn advance(&mut self, disk: &mut Disk, out: &mut BytesMut, open: bool) -> bool {
        for _ in 0..STEPS {
            if !self.settle_pending() || self.exit.is_some() {
                return false;
            }
            match self.wake {
                Some(wake) if wake > Instant::now() => return false,
                _ => self.wake = None,
            }
            match self.program.step(&mut self.input, disk) {
                Step::Write(stream, bytes) => self.pending.push_back((stream, bytes.into())),
                Step::Sleep(duration) => self.wake = Some(Instant::now() + duration),
                Step::WaitForInput => return false,
                Step::Nothing => {}
                Step::Exit(code) => self.finish(Some(code), None, None, out, open),
                Step::Signal(signal) => self.finish(None, Some(signal), None, out, open),
            }
        }
        true
    }

    /// Moves what the program wrote into the windows; false: the window is full and the program blocks.
    fn settle_pending(&mut self) -> bool {
        while let Some((stream, bytes)) = self.pending.front_mut() {
            let window = self.windows.get_mut(*stream);
            if !self.attached && self.spec.detached_output == DetachedOutput::DropOldest {
                window.append_dropping_oldest(bytes);
            } else {
                let taken = window.append(bytes);
                if taken < bytes.len() {
                    *bytes = bytes.slice(taken..);
                    return false;
                }
            }
            self.pending.pop_front();
        }
        true
    }

    fn finish(&mut self, code: Option<i32>, signal: Option<i32>, cause: Option<ExitCause>, out: &mut BytesMut, open: bool) {
        if self.exit.is_some() {
            return;
        }
        let duration_us = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        let exit = Exit { code, signal, duration_us, end: self.end(), cause };
        self.exit = Some(exit.clone());
        self.wake = None;
        self.input.discard();
        if open {
            encode_from_agent(out, &FromAgent::Exited { number: self.spec.number, exit });
        }
    }

    /// Puts output into frames as far as credit and the link allow; says whether it stopped for want of room in `out`.
    fn send(&mut self, out: &mut BytesMut, open: bool) -> bool {
        let mut sent = false;
        for stream in STREAMS {
            while open && out.len() < OUT_BYTES {
                let window = self.windows.get_mut(stream);
                let Some(piece) = window.next_piece(MAX_OUTPUT_PIECE_BYTES) else { break };
                let length = piece.len();
                encode_output(out, self.spec.number, stream, piece.offset, &piece.data);
                window.mark_sent(length);
                sent = true;
            }
        }
        // Sending makes no room for the program by itself; only an acknowledgement does.
        sent && out.len() < OUT_BYTES
    }
}

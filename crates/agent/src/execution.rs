//! One execution: its output, its input, how it stands.

use std::{
    fs::File,
    io::{self, IoSliceMut, Read, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use bytes::Bytes;
use sandboxer_agent::{flow::Flow, input::Input, window::Window};
use sandboxer_protocol::{
    ExecutionId,
    agent::{AgentConfig, DetachedOutput, ExecSpec, ExecState, ExecutionNumber, Exit, ExitCause, FromAgent, PerStream, Stream, ToAgent},
};

use crate::{ipc::Serial, sys};

/// How much is read from a program at once: little at first, more while it keeps coming.
const FIRST_READ_BYTES: usize = 16 * 1024;
const MAX_READ_BYTES: usize = 1024 * 1024;
/// What a terminal may hold when its program ends.
const MAX_TERMINAL_REST_BYTES: usize = 1024 * 1024;
const END_OF_TRANSMISSION: u8 = 4;

pub(crate) const STREAMS: [Stream; 2] = [Stream::Stdout, Stream::Stderr];

/// How it stands.
#[derive(Debug)]
pub(crate) enum Phase {
    /// Waits for an init that can start it.
    Waiting,
    /// Init was asked. `killed`: since when it is to be killed as soon as it is there.
    Starting {
        killed: Option<Instant>,
    },
    Running,
    Ended(Exit),
}

/// One output stream: where it comes from and what is held of it.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) source: Option<File>,
    pub(crate) readable: bool,
    pub(crate) window: Window,
    flow: Flow,
    read_bytes: usize,
}

pub(crate) struct Execution {
    pub(crate) number: ExecutionNumber,
    pub(crate) serial: Serial,
    pub(crate) id: ExecutionId,
    pub(crate) tty: bool,
    /// The server's own; only kept.
    note: String,
    detached: DetachedOutput,
    pub(crate) phase: Phase,
    pub(crate) asked: Instant,
    pub(crate) began: Instant,
    pub(crate) output: PerStream<Output>,
    /// Standard input is a pipe, not empty from the start.
    pub(crate) has_input: bool,
    pub(crate) input: Input,
    /// Where input goes; with a terminal that is the source of its output.
    pub(crate) sink: Option<File>,
    pub(crate) sink_writable: bool,
    /// It is watched for room: only once there was none.
    sink_watched: bool,
    /// How much went there.
    pub(crate) fed: usize,
    end_sent: bool,
    /// It was said to run, or will be.
    pub(crate) announced: bool,
    /// What says so, and when at the latest: before its first output in any case, and with that if it comes soon.
    pub(crate) announcement: Option<(Instant, FromAgent)>,
    /// What was asked for before it was there.
    pub(crate) early: Vec<ToAgent>,
    /// It was killed for its use of memory.
    pub(crate) out_of_memory: bool,
    /// Why the server had it killed; the first reason counts.
    pub(crate) kill_cause: Option<ExitCause>,
    /// A client has been told the end.
    pub(crate) end_acknowledged: bool,
    /// Output came since the last rest: see [`Execution::rest`].
    pub(crate) busy: bool,
}

impl Execution {
    pub(crate) fn new(spec: &ExecSpec, serial: Serial, config: &AgentConfig, now: Instant) -> Self {
        let pipe_bytes = sys::pipe_bytes(config.output_window_bytes).unsigned_abs().into();
        let output = || Output {
            source: None,
            readable: false,
            window: Window::new(config.output_window_bytes),
            flow: Flow::new(now, pipe_bytes),
            read_bytes: FIRST_READ_BYTES,
        };
        let mut input = Input::new(config.stdin_window_bytes);
        if !spec.stdin {
            // At its end from the start; nothing was taken, so this can't be refused.
            let _ = input.end(0);
        }
        Self {
            number: spec.number,
            serial,
            id: spec.id.clone(),
            tty: spec.tty.is_some(),
            note: spec.note.clone(),
            detached: spec.detached_output,
            phase: Phase::Waiting,
            asked: now,
            began: now,
            output: PerStream { stdout: output(), stderr: output() },
            has_input: spec.stdin,
            input,
            sink: None,
            sink_writable: true,
            sink_watched: false,
            fed: 0,
            end_sent: false,
            announced: false,
            announcement: None,
            early: Vec::new(),
            out_of_memory: false,
            kill_cause: None,
            end_acknowledged: false,
            busy: false,
        }
    }

    pub(crate) fn state(&self) -> ExecState {
        ExecState {
            number: self.number,
            id: self.id.clone(),
            exit: match &self.phase {
                Phase::Ended(exit) => Some(exit.clone()),
                _ => None,
            },
            held_from: self.each(Window::held_from),
            end: self.each(Window::end),
            stdin_offset: self.input.taken(),
            stdin_eof: self.input.ended(),
            end_acknowledged: self.end_acknowledged,
            tty: self.tty,
            note: self.note.clone(),
        }
    }

    fn each(&self, of: impl Fn(&Window) -> u64) -> PerStream<u64> {
        PerStream { stdout: of(&self.output.stdout.window), stderr: of(&self.output.stderr.window) }
    }

    /// Whether anything was written in its name, read or not.
    pub(crate) fn has_printed(&self) -> bool {
        let is_empty = |source: &File| sys::bytes_waiting(source.as_fd()).is_ok_and(|bytes| bytes == 0);
        STREAMS
            .iter()
            .map(|stream| self.output.get(*stream))
            .any(|Output { window, source, .. }| window.end() > 0 || source.as_ref().is_some_and(|source| !is_empty(source)))
    }

    /// Says why it ends, in its own output.
    pub(crate) fn explain(&mut self, message: &str) {
        let line = format!("{message}\n");
        let window = &mut self.output.stderr.window;
        window.extend(line.len().saturating_sub(window.space()));
        window.append(line.as_bytes());
    }

    pub(crate) fn is_running(&self) -> bool {
        !matches!(self.phase, Phase::Ended(_))
    }

    pub(crate) fn pause(&mut self) {
        for stream in STREAMS {
            self.output.get_mut(stream).window.pause();
        }
    }

    /// What says that it runs, if that is to be said now.
    pub(crate) fn announcement(&mut self, now: Instant) -> Option<FromAgent> {
        let due = self.announcement.as_ref().is_some_and(|(due, _)| now >= *due) || !self.all_sent();
        self.announcement.take_if(|_| due).map(|(_, started)| started)
    }

    /// Whatever may be sent has been.
    pub(crate) fn all_sent(&self) -> bool {
        STREAMS.iter().all(|stream| self.output.get(*stream).window.next_piece(1).is_none())
    }

    /// Reads once from a stream into its window, if both allow it. Returns whether to come back at once.
    pub(crate) fn fill(&mut self, stream: Stream, now: Instant) -> bool {
        let drop_oldest = self.detached == DetachedOutput::DropOldest;
        let output = self.output.get_mut(stream);
        let Some(source) = output.source.as_mut().filter(|_| output.readable) else { return false };
        let mut emptied = false;
        if drop_oldest && output.window.is_paused() {
            let waiting = sys::bytes_waiting(source.as_fd());
            emptied = matches!(waiting, Ok(0));
            output.window.make_room(output.read_bytes.min(waiting.unwrap_or(0)));
        }
        if output.window.space() == 0 {
            if emptied {
                // Nothing was dropped to look for it: the next byte makes an edge, as does the end.
                output.flow.note(0, !self.tty, now);
            }
            return false;
        }
        let asked = output.read_bytes.min(output.window.space());
        match read_into(source, &mut output.window, asked) {
            Ok(0) => {
                output.source = None;
                false
            }
            Ok(count) => {
                self.busy = true;
                // Less than there was room for: it is empty, and the next byte makes an edge. A terminal gives a line at a time.
                output.readable = self.tty || count == asked;
                output.flow.note(count, !output.readable, now);
                if count == output.read_bytes {
                    output.read_bytes = (output.read_bytes * 4).min(MAX_READ_BYTES);
                } else if count < output.read_bytes / 16 {
                    output.read_bytes = (output.read_bytes / 4).max(FIRST_READ_BYTES);
                }
                output.readable
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => true,
            Err(_) => {
                // Empty for now; a terminal also says EIO while no process has it open.
                output.readable = false;
                output.flow.note(0, !self.tty, now);
                false
            }
        }
    }

    /// For how long to let output gather now, if at all: only while nothing can be read of either stream.
    pub(crate) fn should_gather(&mut self) -> Option<Duration> {
        if STREAMS.iter().any(|stream| self.output.get(*stream).can_be_read()) {
            return None;
        }
        let [stdout, stderr] = STREAMS.map(|stream| {
            let output = self.output.get_mut(stream);
            output.source.as_ref().and_then(|_| output.flow.should_gather())
        });
        stdout.into_iter().chain(stderr).min()
    }

    /// Gives the program input, as far as it goes now.
    pub(crate) fn feed(&mut self) {
        let sink = if self.tty { self.output.stdout.source.as_mut() } else { self.sink.as_mut() };
        let Some(sink) = sink else { return };
        while self.sink_writable
            && let Some(front) = self.input.front()
        {
            let piece = if self.tty { up_to_signal(sink, front) } else { front };
            match sink.write(piece) {
                Ok(count) => {
                    self.fed += count;
                    self.input.fed(count);
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => self.sink_writable = false,
                    _ => {
                        self.input.discard();
                        self.sink = None;
                        return;
                    }
                },
            }
        }
        if self.input.finished() {
            if !self.tty {
                self.sink = None;
            } else if self.sink_writable && !self.end_sent {
                self.end_sent = sink.write(&[END_OF_TRANSMISSION]).is_ok();
            }
        }
    }

    /// Has input that does not go on watched for room, if it is not yet.
    pub(crate) fn watch_sink(&mut self, watch: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>) {
        if let Some(sink) = self.sink.as_ref().filter(|_| !self.sink_writable && !self.sink_watched) {
            // Without it, it is tried again with the next round.
            self.sink_watched = watch(sink.as_fd()).is_ok();
            self.sink_writable = !self.sink_watched;
        }
    }

    /// The main process has ended: takes what its pipes hold now. What comes later is no longer its output; the sources are
    /// returned, to be drained for as long as others hold them.
    pub(crate) fn finish(
        &mut self,
        code: Option<i32>,
        signal: Option<i32>,
        cause: Option<ExitCause>,
        now: Instant,
    ) -> (Exit, Vec<OwnedFd>) {
        let mut left = Vec::new();
        for stream in STREAMS {
            let drop_oldest = self.detached == DetachedOutput::DropOldest;
            let output = self.output.get_mut(stream);
            let Some(mut source) = output.source.take() else { continue };
            let mut rest = if self.tty { MAX_TERMINAL_REST_BYTES } else { sys::bytes_waiting(source.as_fd()).unwrap_or(0) };
            let mut open = true;
            while rest > 0 && open {
                let want = rest.min(MAX_READ_BYTES);
                if drop_oldest && output.window.is_paused() {
                    output.window.make_room(want);
                } else if !self.tty || output.window.space() < FIRST_READ_BYTES {
                    output.window.extend(want.min(if self.tty { FIRST_READ_BYTES } else { want }).saturating_sub(output.window.space()));
                }
                match read_into(&mut source, &mut output.window, want) {
                    Ok(0) => open = false,
                    Ok(count) => rest -= count.min(rest),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => {
                        open = error.kind() == io::ErrorKind::WouldBlock;
                        rest = 0;
                    }
                }
            }
            if open {
                left.push(source.into());
            }
        }
        self.input.discard();
        let out_of_memory = (self.out_of_memory && signal == Some(libc::SIGKILL)).then_some(ExitCause::OutOfMemory);
        let exit = Exit {
            code,
            signal,
            duration_us: u64::try_from(now.saturating_duration_since(self.began).as_micros()).unwrap_or(u64::MAX),
            end: self.each(Window::end),
            cause: cause.or(out_of_memory).or(self.kill_cause),
        };
        self.phase = Phase::Ended(exit.clone());
        (exit, left)
    }

    pub(crate) fn take_input(&mut self, offset: u64, data: Bytes) -> Result<u64, sandboxer_protocol::agent::StdinRefusal> {
        if !self.is_running() {
            return Err(sandboxer_protocol::agent::StdinRefusal::Closed);
        }
        self.input.take(offset, data)
    }

    /// Nothing came for a while: gives memory back.
    pub(crate) fn rest(&mut self) {
        self.busy = false;
        for stream in STREAMS {
            self.output.get_mut(stream).window.shrink();
        }
    }
}

impl Output {
    fn can_be_read(&self) -> bool {
        self.source.is_some() && self.readable && self.window.space() > 0
    }

    pub(crate) fn connect(&mut self, source: OwnedFd) {
        self.source = Some(source.into());
        self.readable = true;
    }
}

/// What of this may be typed at once. A key that means a signal is typed alone, and what was typed before it and nobody has read is forgotten, as on
/// every terminal. gVisor does not do that by itself: it does not even look at such a key while a line before it waits to be read, so that nothing could
/// interrupt a program that does not read.
fn up_to_signal<'a>(terminal: &File, keys: &'a [u8]) -> &'a [u8] {
    let Some(signals) = sys::signal_keys(terminal.as_fd()) else { return keys };
    // Zero is no key: the terminal has none for that signal.
    match keys.iter().position(|key| *key != 0 && signals.contains(key)) {
        None => keys,
        Some(0) => {
            // A gVisor that can't forget has the key wait for the reader.
            let _ = sys::forget_typed(terminal.as_fd());
            &keys[..1]
        }
        Some(at) => &keys[..at],
    }
}

fn read_into(source: &mut File, window: &mut Window, want: usize) -> io::Result<usize> {
    let [first, second] = window.spare(want);
    let count = source.read_vectored(&mut [IoSliceMut::new(first), IoSliceMut::new(second)])?;
    window.commit(count);
    Ok(count)
}

#[cfg(test)]
mod tests;

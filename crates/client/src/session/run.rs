//! One execution as the client sees it: what of its output is here, what of its input is there.

use bytes::Bytes;
use sandboxer_protocol::{
    ExecutionId,
    agent::{PerStream, Stream},
    client::{OffsetsRequest, Request},
};
use tokio::time::{Duration, Instant};

use super::input::Input;

/// How much is consumed before it is acknowledged without waiting for a pause.
const ACK_BYTES: u64 = 256 * 1024;
/// A pause after which whatever was consumed is acknowledged.
const ACK_AFTER: Duration = Duration::from_millis(200);

/// A piece of output as the program wrote it.
///
/// ```no_run
/// # async fn example(mut run: sandboxer_client::Run) {
/// use sandboxer_client::OutputStream;
///
/// while let Some(piece) = run.next().await {
///     let from = if piece.stream == OutputStream::Stdout { "out" } else { "err" };
///     println!("{from} {}..{}: {}", piece.offset, piece.end, String::from_utf8_lossy(&piece.data));
/// }
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Piece {
    /// Where the program wrote it to.
    pub stream: Stream,
    /// The bytes before it on this stream. Where it is more than the `end` of the piece before, the server had to let output go
    /// that nobody was attached for.
    pub offset: u64,
    /// The bytes up to its end on this stream. With text it may be other than `offset` and the length of `data`, since what is not
    /// UTF-8 arrives as U+FFFD.
    pub end: u64,
    /// The bytes, or the text as UTF-8.
    pub data: Bytes,
}

/// How far an execution is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Not known to have been received.
    Requested {
        sent: bool,
        in_doubt: bool,
    },
    Running,
    Done,
}

#[derive(Debug)]
pub(super) struct Run {
    pub(super) id: ExecutionId,
    /// The message that starts it; empty if it was found running.
    pub(super) message: String,
    pub(super) phase: Phase,
    /// Output before this is here.
    pub(super) have: PerStream<u64>,
    /// Output before this was consumed.
    consumed: PerStream<u64>,
    acknowledged: PerStream<u64>,
    consumed_at: Option<Instant>,
    pub(super) input: Input,
    pub(super) kill: Option<Wish>,
    pub(super) resize: Option<(u16, u16, Wish)>,
    /// Sent at most once each.
    pub(super) signals: Vec<i32>,
    /// Nothing is acknowledged: it is there for the next client too.
    peek: bool,
    /// Output is missing in front of what came, and the server has not said that it is gone.
    pub(super) gap: bool,
}

/// Something that is wanted until the execution ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish {
    Unsent,
    Sent,
}

/// What a piece of output means here.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Taken {
    New(Piece),
    /// All of it was here before.
    Known,
    /// Something before it is missing, or it can't be cut where it is known.
    Unusable,
}

impl Run {
    pub(super) fn requested(id: ExecutionId, message: String) -> Self {
        Self::new(id, message, Phase::Requested { sent: false, in_doubt: false }, PerStream::default(), 0)
    }

    pub(super) fn found(id: ExecutionId, from: PerStream<u64>, stdin_offset: u64, peek: bool) -> Self {
        Self { peek, ..Self::new(id, String::new(), Phase::Running, from, stdin_offset) }
    }

    fn new(id: ExecutionId, message: String, phase: Phase, from: PerStream<u64>, stdin_offset: u64) -> Self {
        Self {
            id,
            message,
            phase,
            have: from,
            consumed: from,
            acknowledged: from,
            consumed_at: None,
            input: Input::starting_at(stdin_offset),
            kill: None,
            resize: None,
            signals: Vec::new(),
            peek: false,
            gap: false,
        }
    }

    /// Whether the server may know of it, so that it has to be asked after a cut.
    pub(super) fn may_be_there(&self) -> bool {
        matches!(self.phase, Phase::Running | Phase::Requested { in_doubt: true, .. })
    }

    pub(super) fn cut(&mut self) {
        if let Phase::Requested { sent, in_doubt } = &mut self.phase {
            *in_doubt |= *sent;
            *sent = false;
        }
        self.input.cut();
        self.kill = self.kill.map(|_| Wish::Unsent);
        self.resize = self.resize.map(|(rows, cols, _)| (rows, cols, Wish::Unsent));
        // The last acknowledgement may be lost too, and with it the room that the program waits for.
        self.acknowledged = PerStream::default();
        self.gap = false;
    }

    /// Where to go on after a cut.
    pub(super) fn reconnect(&self) -> Request {
        Request::Reconnect(self.offsets(self.have))
    }

    fn offsets(&self, at: PerStream<u64>) -> OffsetsRequest {
        OffsetsRequest {
            execution_id: Some(self.id.clone()),
            stdout_offset: Some(at.stdout),
            stderr_offset: Some(at.stderr),
            peek: self.peek.then_some(true),
        }
    }

    /// Takes a piece, or what is new of it.
    pub(super) fn take(&mut self, stream: Stream, offset: u64, end: u64, data: Bytes) -> Taken {
        let have = self.have.get_mut(stream);
        if end <= *have {
            return Taken::Known;
        }
        if offset > *have {
            self.gap = true;
            return Taken::Unusable;
        }
        let known = *have - offset;
        let data = if known == 0 {
            data
        } else if data.len() as u64 == end - offset {
            // Every byte stands for itself. A cut within a character is as good as any: the other half is here.
            data.slice(usize::try_from(known).unwrap_or(data.len())..)
        } else {
            return Taken::Unusable;
        };
        let offset = *have;
        *have = end;
        Taken::New(Piece { stream, offset, end, data })
    }

    /// What is before these offsets is not to be had any more.
    pub(super) fn skip_to(&mut self, stdout: u64, stderr: u64) {
        self.have.stdout = self.have.stdout.max(stdout);
        self.have.stderr = self.have.stderr.max(stderr);
        self.gap = false;
    }

    pub(super) fn consume(&mut self, upto: PerStream<u64>, now: Instant) {
        if upto != self.consumed {
            self.consumed = upto;
            self.consumed_at = Some(now);
        }
    }

    /// Bytes that are here and not yet consumed.
    pub(super) fn outstanding(&self) -> u64 {
        self.have.stdout.saturating_sub(self.consumed.stdout) + self.have.stderr.saturating_sub(self.consumed.stderr)
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let ack = self.consumed_at.filter(|_| !self.peek && self.consumed != self.acknowledged).map(|at| at + ACK_AFTER);
        ack.into_iter().chain(self.input.deadline()).min()
    }

    /// The next message about this execution, if one is to go out now.
    pub(super) fn next_message(&mut self, now: Instant) -> Option<String> {
        if let Phase::Requested { sent: sent @ false, .. } = &mut self.phase {
            *sent = true;
            return Some(self.message.clone());
        }
        if self.phase == Phase::Running {
            if self.kill == Some(Wish::Unsent) {
                self.kill = Some(Wish::Sent);
                return Some(Request::KillProcess.to_json());
            }
            if !self.signals.is_empty() {
                return Some(Request::Signal { signal: self.signals.remove(0) }.to_json());
            }
            if let Some((rows, cols, wish @ Wish::Unsent)) = &mut self.resize {
                *wish = Wish::Sent;
                return Some(Request::Resize { rows: *rows, cols: *cols }.to_json());
            }
        }
        if self.phase != Phase::Done
            && let Some(message) = self.input.next_message(now)
        {
            return Some(message);
        }
        self.next_ack(now)
    }

    fn next_ack(&mut self, now: Instant) -> Option<String> {
        let behind = |stream| self.consumed.get(stream).saturating_sub(*self.acknowledged.get(stream));
        let most = behind(Stream::Stdout).max(behind(Stream::Stderr));
        let paused = self.consumed_at.is_some_and(|at| now >= at + ACK_AFTER);
        if self.peek || most == 0 || !(most >= ACK_BYTES || paused) {
            return None;
        }
        self.acknowledged = self.consumed;
        Some(Request::Ack(self.offsets(self.consumed)).to_json())
    }
}

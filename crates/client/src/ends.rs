//! The two ends of an execution: the user's and the driver's, and the bounded channels between them.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use bytes::Bytes;
use sandboxer_protocol::{
    ExecutionId,
    agent::{PerStream, Stream},
};
use tokio::sync::{Notify, mpsc, oneshot, watch};

use crate::{Error, Exit, session::Piece};

/// Pieces that wait for the user, however small they are. One more place is kept for the end.
const MAX_WAITING_PIECES: usize = 256;
/// Pieces of input on their way to the driver.
const MAX_WAITING_INPUT: usize = 2;

/// What the user gets of an execution.
#[derive(Debug)]
pub(crate) enum Delivery {
    Piece(Piece),
    End(Result<Exit, Error>),
}

/// What the user says to the program.
#[derive(Debug)]
pub(crate) enum Written {
    Data(Bytes),
    End,
}

/// How much of the output the user has taken.
#[derive(Debug, Default)]
pub(crate) struct Consumed {
    stdout: AtomicU64,
    stderr: AtomicU64,
    changed: Notify,
}

impl Consumed {
    fn starting_at(from: PerStream<u64>) -> Self {
        Self { stdout: from.stdout.into(), stderr: from.stderr.into(), changed: Notify::new() }
    }

    pub(crate) fn upto(&self) -> PerStream<u64> {
        PerStream { stdout: self.stdout.load(Ordering::Relaxed), stderr: self.stderr.load(Ordering::Relaxed) }
    }

    pub(crate) fn advance(&self, stream: Stream, end: u64) {
        let counter = match stream {
            Stream::Stdout => &self.stdout,
            Stream::Stderr => &self.stderr,
        };
        counter.store(end, Ordering::Relaxed);
        self.changed.notify_one();
    }

    /// Wakes the driver, which then looks whether anybody is still interested.
    pub(crate) fn wake(&self) {
        self.changed.notify_one();
    }

    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }
}

/// The user's end.
#[derive(Debug)]
pub(crate) struct UserEnd {
    pub(crate) id: ExecutionId,
    pub(crate) pieces: mpsc::Receiver<Delivery>,
    pub(crate) consumed: Arc<Consumed>,
    pub(crate) input: mpsc::Sender<Written>,
    /// How much input was acknowledged; none: no more is taken.
    pub(crate) acknowledged: watch::Receiver<Option<u64>>,
    /// How much input there was before this.
    pub(crate) input_from: u64,
    /// How far the output of one that was found went, as far as is known.
    pub(crate) held_to: Option<PerStream<u64>>,
    pub(crate) tty: bool,
}

impl Drop for UserEnd {
    fn drop(&mut self) {
        self.pieces.close();
        self.consumed.wake();
    }
}

/// The driver's end.
#[derive(Debug)]
pub(crate) struct DriverEnd {
    pieces: mpsc::Sender<Delivery>,
    pub(crate) consumed: Arc<Consumed>,
    /// None when no more input is wanted or nobody can write any.
    pub(crate) input: Option<mpsc::Receiver<Written>>,
    acknowledged: watch::Sender<Option<u64>>,
    /// Waits for the execution to be started.
    starting: Option<(oneshot::Sender<Result<UserEnd, Error>>, UserEnd)>,
    ended: bool,
    discard: bool,
}

/// Makes both ends of an execution.
pub(crate) fn ends(id: ExecutionId, from: PerStream<u64>, input_from: u64) -> (DriverEnd, UserEnd) {
    let (piece_sender, piece_receiver) = mpsc::channel(MAX_WAITING_PIECES + 1);
    let (input_sender, input_receiver) = mpsc::channel(MAX_WAITING_INPUT);
    let (acknowledged_sender, acknowledged) = watch::channel(Some(input_from));
    let consumed = Arc::new(Consumed::starting_at(from));
    let driver = DriverEnd {
        pieces: piece_sender,
        consumed: consumed.clone(),
        input: Some(input_receiver),
        acknowledged: acknowledged_sender,
        starting: None,
        ended: false,
        discard: false,
    };
    (driver, UserEnd { id, pieces: piece_receiver, consumed, input: input_sender, acknowledged, input_from, held_to: None, tty: false })
}

impl DriverEnd {
    /// Hands over the user's end when the execution has started.
    pub(crate) fn when_started(&mut self, user: UserEnd, reply: oneshot::Sender<Result<UserEnd, Error>>) {
        self.starting = Some((reply, user));
    }

    pub(crate) fn started(&mut self) {
        if let Some((reply, user)) = self.starting.take() {
            // Nobody waits any more: dropping the user's end discards the output.
            let _ = reply.send(Ok(user));
        }
    }

    /// Whether nobody wants its output.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.discard || self.pieces.is_closed() || self.starting.as_ref().is_some_and(|(reply, _)| reply.is_closed())
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.ended
    }

    /// Lets go of the output, so that nothing waits for its consumer.
    pub(crate) fn discard(&mut self) {
        self.discard = true;
    }

    /// Whether there is room for one more piece.
    pub(crate) fn has_room(&self) -> bool {
        self.ended || self.is_abandoned() || self.pieces.capacity() > 1
    }

    pub(crate) fn deliver(&mut self, piece: Piece) {
        self.started();
        if !self.discard {
            // There is room, since nothing is read otherwise; and if nobody listens, nothing is missed.
            let _ = self.pieces.try_send(Delivery::Piece(piece));
        }
    }

    pub(crate) fn acknowledge(&mut self, upto: Option<u64>) {
        self.acknowledged.send_if_modified(|known| std::mem::replace(known, upto) != upto);
        if upto.is_none() {
            self.input = None;
        }
    }

    pub(crate) fn end(&mut self, result: Result<Exit, Error>) {
        if self.ended {
            return;
        }
        self.ended = true;
        self.acknowledge(None);
        match (self.starting.take(), result) {
            (Some((reply, _)), Err(error)) => {
                let _ = reply.send(Err(error));
            }
            (starting, result) => {
                let _ = self.pieces.try_send(Delivery::End(result));
                self.starting = starting;
                self.started();
            }
        }
    }
}

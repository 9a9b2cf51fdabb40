//! Streams of the network between a sandbox's agent and tasks of this server, multiplexed over the one conversation.
//!
//! A task has a [`TunnelStream`] that reads and writes as a socket does. The driver has the [`Tunnel`]: it puts in what the agent says, and takes out what is
//! to be said to it, one stream after the other. What is held is bounded: of a stream by the credit that the agent was given and by [`OUTBOX_BYTES`], and
//! in all by the number of streams.

mod stream;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::Waker,
};

use bytes::BytesMut;
use sandboxer_protocol::{
    agent::{ToAgent, TunnelFault, TunnelStream as Number},
    limits::{MAX_PROXY_STREAMS, MAX_TUNNEL_PIECE_BYTES, MAX_TUNNEL_STREAMS, tunnel_credit},
};
use tokio::sync::Notify;

pub(crate) use self::stream::{TunnelStream, Watch};

/// What of a stream waits for its turn on the way to the agent.
const OUTBOX_BYTES: usize = 2 * MAX_TUNNEL_PIECE_BYTES;

/// Streams that are known here, those among them that are over and have a task that has not noticed.
const MAX_KNOWN_STREAMS: usize = 2 * MAX_TUNNEL_STREAMS;

/// All streams of a conversation, as the driver sees them.
#[derive(Debug, Default)]
pub(super) struct Tunnel {
    shared: Arc<Shared>,
    /// The highest number that the agent has used.
    last_of_agent: Number,
    /// The last that was used here.
    last: Number,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Something waits to be said to the agent.
    stirred: Notify,
}

#[derive(Debug, Default)]
struct State {
    streams: BTreeMap<Number, Stream>,
    /// Those that have something to say, each once.
    queue: VecDeque<Number>,
    /// How many were opened from here.
    served: usize,
    /// The last of those has gone since the driver looked.
    deserted: bool,
    /// The conversation is over.
    over: bool,
}

#[derive(Debug)]
struct Stream {
    phase: Phase,
    // From the agent.
    inbox: BytesMut,
    received: u64,
    granted: u64,
    window: u64,
    /// The agent sends nothing more.
    ended: bool,
    reader: Option<Waker>,
    // To the agent.
    outbox: BytesMut,
    sent: u64,
    allowed: u64,
    closing: Closing,
    writer: Option<Waker>,
    /// Wants to know when it breaks, whoever reads or writes.
    watcher: Option<Waker>,
    queued: bool,
    /// Nobody here has it any longer.
    abandoned: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The agent is to be asked for this port.
    Wanted(u16),
    Asked,
    Open,
    Broken(TunnelFault),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Closing {
    Open,
    /// The end is to be told once everything was said.
    Wanted,
    Told,
}

impl Stream {
    fn new(phase: Phase, window: u64, allowed: u64) -> Self {
        Self {
            phase,
            inbox: BytesMut::new(),
            received: 0,
            granted: window,
            window,
            ended: false,
            reader: None,
            outbox: BytesMut::new(),
            sent: 0,
            allowed,
            closing: Closing::Open,
            writer: None,
            watcher: None,
            queued: false,
            abandoned: false,
        }
    }

    fn wake(&mut self) {
        let watcher = self.watcher.take_if(|_| matches!(self.phase, Phase::Broken(_)));
        [self.reader.take(), self.writer.take(), watcher].into_iter().flatten().for_each(Waker::wake);
    }

    /// How far the agent may send now, if that is news.
    fn more_credit(&self) -> Option<u64> {
        let upto = self.received - self.inbox.len() as u64 + self.window;
        (!self.ended && upto >= self.granted + self.window / 4).then_some(upto)
    }

    /// The agent has nothing of it any longer.
    fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Broken(_)) || self.ended && self.closing == Closing::Told
    }

    fn has_something_to_say(&self) -> bool {
        let credit = usize::try_from(self.allowed - self.sent).unwrap_or(usize::MAX);
        match self.phase {
            Phase::Wanted(_) => true,
            Phase::Broken(_) => false,
            Phase::Asked if !self.abandoned => false,
            Phase::Asked | Phase::Open => {
                self.abandoned
                    || !self.outbox.is_empty() && credit > 0
                    || self.outbox.is_empty() && self.closing == Closing::Wanted
                    || self.more_credit().is_some()
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change is whole when the lock is let go.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a stream into the queue if it has something to say.
    fn stir(&self, state: &mut State, number: Number) {
        if let Some(stream) = state.streams.get_mut(&number)
            && !stream.queued
            && stream.has_something_to_say()
        {
            stream.queued = true;
            state.queue.push_back(number);
            self.stirred.notify_one();
        }
    }
}

/// What the agent is to be told.
pub(super) enum Say {
    Control(ToAgent),
    Data(Number, BytesMut),
}

impl Tunnel {
    /// Whether somebody outside uses a port of the sandbox.
    pub(super) fn serves(&self) -> bool {
        self.shared.lock().served > 0
    }

    /// Until something waits to be said, or nobody uses a port any longer. Cancel-safe.
    pub(super) async fn stirred(&self) {
        let calm = || {
            let state = self.shared.lock();
            state.queue.is_empty() && !state.deserted
        };
        while calm() {
            self.shared.stirred.notified().await;
        }
    }

    /// The next thing to be said, of the stream whose turn it is.
    pub(super) fn next(&mut self) -> Option<Say> {
        let mut state = self.shared.lock();
        state.deserted = false;
        loop {
            let number = state.queue.pop_front()?;
            let said = state.say(number);
            self.shared.stir(&mut state, number);
            if said.is_some() {
                return said;
            }
        }
    }

    /// A way to a port of the sandbox's loopback, which the agent is asked for. None: there are too many.
    pub(super) fn connect(&mut self, port: u16) -> Option<TunnelStream> {
        let mut state = self.shared.lock();
        let others = state.streams.len();
        if others >= MAX_TUNNEL_STREAMS {
            return None;
        }
        self.last += 2;
        let number = self.last;
        state.streams.insert(number, Stream::new(Phase::Wanted(port), tunnel_credit(others), 0));
        state.served += 1;
        self.shared.stir(&mut state, number);
        drop(state);
        Some(TunnelStream { shared: Arc::clone(&self.shared), number })
    }

    /// A program has connected to the proxy. None: it is cut off when its turn comes. An error is a break of the agent's protocol, as everywhere here.
    pub(super) fn opened_by_agent(&mut self, number: Number, credit: u64) -> Result<Option<TunnelStream>, &'static str> {
        let mut state = self.shared.lock();
        if number.is_multiple_of(2) || number <= self.last_of_agent {
            return Err("a stream by a number that is not its to give");
        }
        // An honest agent has every one of these.
        let proxied = state.streams.iter().filter(|(number, stream)| *number % 2 == 1 && !stream.is_over()).count();
        if proxied >= MAX_PROXY_STREAMS {
            return Err("more streams than there may be");
        }
        self.last_of_agent = number;
        let known = state.streams.len();
        let mut stream = Stream::new(Phase::Open, tunnel_credit(known), credit);
        // It is told its credit when its turn comes: while the sandbox is brought to rest nothing is said.
        stream.granted = 0;
        // Beyond this there are tasks that have not noticed yet that theirs is over.
        stream.abandoned = known >= MAX_KNOWN_STREAMS;
        let taken = !stream.abandoned;
        state.streams.insert(number, stream);
        self.shared.stir(&mut state, number);
        drop(state);
        Ok(taken.then(|| TunnelStream { shared: Arc::clone(&self.shared), number }))
    }

    pub(super) fn opened(&mut self, number: Number, credit: u64) {
        self.change(number, |stream| {
            if stream.phase == Phase::Asked {
                stream.phase = Phase::Open;
                stream.allowed = credit;
            }
        });
    }

    pub(super) fn data(&mut self, number: Number, data: &[u8]) -> Result<(), &'static str> {
        let mut within = true;
        self.change(number, |stream| {
            within = !stream.ended && stream.phase == Phase::Open && data.len() as u64 <= stream.granted - stream.received;
            if within {
                stream.received += data.len() as u64;
                if stream.abandoned {
                    return;
                }
                stream.inbox.extend_from_slice(data);
            }
        });
        if within { Ok(()) } else { Err("more of a stream than was asked for") }
    }

    pub(super) fn credit(&mut self, number: Number, upto: u64) {
        self.change(number, |stream| stream.allowed = stream.allowed.max(upto));
    }

    pub(super) fn ended(&mut self, number: Number) {
        self.change(number, |stream| stream.ended = true);
    }

    pub(super) fn reset(&mut self, number: Number, fault: TunnelFault) {
        self.change(number, |stream| stream.phase = Phase::Broken(fault));
    }

    /// Changes a stream as the agent says; one that is not there was given up here meanwhile.
    fn change(&mut self, number: Number, change: impl FnOnce(&mut Stream)) {
        let mut state = self.shared.lock();
        let Some(stream) = state.streams.get_mut(&number) else { return };
        change(stream);
        stream.wake();
        state.tidy(number);
        self.shared.stir(&mut state, number);
    }

    /// The conversation is over: every stream is cut off, and nothing can be opened until [`Self::begin_again`].
    fn end(&self) {
        let mut state = self.shared.lock();
        state.over = true;
        state.queue.clear();
        for stream in state.streams.values_mut() {
            stream.phase = Phase::Broken(TunnelFault::Reset);
            stream.wake();
        }
    }

    pub(super) fn begin_again(&mut self) {
        *self = Self::default();
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.end();
    }
}

impl State {
    /// What a stream has to say, a piece at a time.
    fn say(&mut self, number: Number) -> Option<Say> {
        let stream = self.streams.get_mut(&number)?;
        stream.queued = false;
        match stream.phase {
            Phase::Wanted(_) if stream.abandoned => {
                self.remove(number);
                return None;
            }
            Phase::Wanted(port) => {
                stream.phase = Phase::Asked;
                return Some(Say::Control(ToAgent::TunnelConnect { stream: number, port, credit: stream.granted }));
            }
            Phase::Broken(_) => return None,
            Phase::Asked | Phase::Open if stream.abandoned => {
                self.remove(number);
                return Some(Say::Control(ToAgent::TunnelReset { stream: number }));
            }
            Phase::Asked => return None,
            Phase::Open => {}
        }
        if let Some(upto) = stream.more_credit() {
            stream.granted = upto;
            return Some(Say::Control(ToAgent::TunnelCredit { stream: number, upto }));
        }
        let credit = usize::try_from(stream.allowed - stream.sent).unwrap_or(usize::MAX);
        let length = stream.outbox.len().min(credit).min(MAX_TUNNEL_PIECE_BYTES);
        if length > 0 {
            let piece = stream.outbox.split_to(length);
            stream.sent += length as u64;
            if stream.closing == Closing::Open {
                stream.writer.take().into_iter().for_each(Waker::wake);
            }
            return Some(Say::Data(number, piece));
        }
        if stream.outbox.is_empty() && stream.closing == Closing::Wanted {
            stream.closing = Closing::Told;
            stream.wake();
            self.tidy(number);
            return Some(Say::Control(ToAgent::TunnelEnd { stream: number }));
        }
        None
    }

    /// One that both ends are done with is no more.
    fn tidy(&mut self, number: Number) {
        let Some(stream) = self.streams.get(&number) else { return };
        if stream.abandoned && stream.is_over() {
            self.remove(number);
        }
    }

    fn remove(&mut self, number: Number) {
        let Some(stream) = self.streams.remove(&number) else { return };
        if stream.queued {
            // An agent that opens and cuts off, and reads nothing, must not let it grow.
            self.queue.retain(|queued| *queued != number);
        }
        if number.is_multiple_of(2) {
            self.served -= 1;
            self.deserted = self.served == 0;
        }
    }
}

#[cfg(test)]
mod tests;

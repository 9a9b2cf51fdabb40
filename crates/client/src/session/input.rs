//! The input of an execution: what the server has not acknowledged is kept and can be sent again.

use std::{collections::VecDeque, time::Duration};

use bytes::Bytes;
use sandboxer_protocol::client::Request;
use tokio::time::Instant;

/// What is held of input that the server has not acknowledged; then the writer waits.
pub(crate) const INPUT_BUFFER_BYTES: usize = 512 * 1024;
/// One message of input.
pub(crate) const INPUT_PIECE_BYTES: usize = 32 * 1024;

/// However small they are.
const MAX_PIECES: usize = 4096;
const FIRST_RETRY: Duration = Duration::from_millis(20);
const LONGEST_RETRY: Duration = Duration::from_millis(1000);

#[derive(Debug, Default)]
pub(crate) struct Input {
    /// What is not acknowledged, from `acknowledged` on.
    held: VecDeque<Bytes>,
    held_bytes: usize,
    acknowledged: u64,
    /// How many of `held` went out on this connection.
    sent: usize,
    sent_bytes: usize,
    /// End of input was asked for.
    eof: bool,
    eof_sent: bool,
    /// The server takes no more.
    closed: bool,
    /// The server had no room: not again before this.
    retry_at: Option<Instant>,
    retry_after: Duration,
}

impl Input {
    /// The input of an execution that has taken this much already.
    pub(crate) fn starting_at(offset: u64) -> Self {
        Self { acknowledged: offset, ..Self::default() }
    }

    /// Whether more can be taken from the writer.
    pub(crate) fn has_room(&self) -> bool {
        self.closed || (!self.eof && self.held_bytes < INPUT_BUFFER_BYTES && self.held.len() < MAX_PIECES)
    }

    pub(crate) fn push(&mut self, data: Bytes) {
        if !self.closed && !self.eof && !data.is_empty() {
            self.held_bytes += data.len();
            self.held.push_back(data);
        }
    }

    pub(crate) fn end(&mut self) {
        self.eof = true;
    }

    /// Nothing more will be taken; what is held is of no use any more.
    pub(crate) fn close(&mut self) {
        self.closed = true;
        self.held.clear();
        self.held_bytes = 0;
        self.unsend();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    pub(crate) fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// Where the input ends that was taken from the writer.
    pub(crate) fn taken(&self) -> u64 {
        self.acknowledged + self.held_bytes as u64
    }

    /// The agent has everything before `offset`. Returns false if it claims more than there ever was.
    pub(crate) fn acknowledge(&mut self, offset: u64) -> bool {
        if offset > self.taken() {
            return self.closed;
        }
        let mut surplus = usize::try_from(offset.saturating_sub(self.acknowledged)).unwrap_or(usize::MAX);
        if surplus == 0 {
            return true;
        }
        self.acknowledged = offset;
        self.held_bytes -= surplus;
        self.retry_after = Duration::ZERO;
        while surplus > 0 {
            let Some(front) = self.held.front_mut() else { break };
            let taken = front.len().min(surplus);
            surplus -= taken;
            if self.sent > 0 {
                self.sent_bytes -= taken;
            }
            if taken < front.len() {
                *front = front.slice(taken..);
            } else {
                self.held.pop_front();
                self.sent = self.sent.saturating_sub(1);
            }
        }
        true
    }

    /// The server did not take a piece for which it had no room: everything from there on goes out again after a while.
    pub(crate) fn refused(&mut self, now: Instant) {
        if self.retry_at.is_none() {
            self.retry_after = (self.retry_after * 2).clamp(FIRST_RETRY, LONGEST_RETRY);
            self.retry_at = Some(now + self.retry_after);
        }
        self.unsend();
    }

    /// The connection is gone, and what was not acknowledged with it.
    pub(crate) fn cut(&mut self) {
        self.unsend();
        self.retry_at = None;
    }

    fn unsend(&mut self) {
        self.sent = 0;
        self.sent_bytes = 0;
        self.eof_sent = false;
    }

    /// When there may be something to send without anything else happening.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        if self.closed { None } else { self.retry_at }
    }

    /// The next message, if one is to go out now.
    pub(crate) fn next_message(&mut self, now: Instant) -> Option<String> {
        if self.closed {
            return None;
        }
        if let Some(at) = self.retry_at {
            if now < at {
                return None;
            }
            self.retry_at = None;
        }
        if let Some(data) = self.held.get(self.sent) {
            let offset = self.acknowledged + self.sent_bytes as u64;
            self.sent += 1;
            self.sent_bytes += data.len();
            return Some(Request::Stdin { data: data.clone(), offset: Some(offset) }.to_json());
        }
        // Behind everything else has been taken, so that it can't overtake a piece that has to be sent again.
        if self.eof && self.held.is_empty() && !self.eof_sent {
            self.eof_sent = true;
            return Some(Request::StdinEof { offset: Some(self.acknowledged) }.to_json());
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(pieces: &[&'static str]) -> Input {
        let mut input = Input::default();
        pieces.iter().for_each(|piece| input.push(Bytes::from_static(piece.as_bytes())));
        input
    }

    fn messages(input: &mut Input, now: Instant) -> Vec<Request> {
        std::iter::from_fn(|| input.next_message(now)).map(|text| Request::parse(&text).unwrap()).collect()
    }

    fn stdin(data: &'static str, offset: u64) -> Request {
        Request::Stdin { data: Bytes::from_static(data.as_bytes()), offset: Some(offset) }
    }

    #[test]
    fn what_was_not_acknowledged_goes_out_again_after_a_cut() {
        let now = Instant::now();
        let mut input = input(&["abc", "de", "f"]);
        assert_eq!(messages(&mut input, now), [stdin("abc", 0), stdin("de", 3), stdin("f", 5)]);
        assert!(input.acknowledge(4));
        assert_eq!(messages(&mut input, now), []);
        input.cut();
        assert_eq!(messages(&mut input, now), [stdin("e", 4), stdin("f", 5)]);
    }

    #[test]
    fn the_end_goes_out_behind_the_last_acknowledged_byte() {
        let now = Instant::now();
        let mut input = input(&["abc"]);
        input.end();
        assert_eq!(messages(&mut input, now), [stdin("abc", 0)]);
        assert!(input.acknowledge(3));
        assert_eq!(messages(&mut input, now), [Request::StdinEof { offset: Some(3) }]);
        input.cut();
        assert_eq!(messages(&mut input, now), [Request::StdinEof { offset: Some(3) }]);
    }

    #[test]
    fn a_refused_piece_is_tried_again_ever_more_patiently() {
        let now = Instant::now();
        let mut input = input(&["abc"]);
        assert_eq!(messages(&mut input, now).len(), 1);
        input.refused(now);
        assert_eq!(messages(&mut input, now), []);
        let first = input.deadline().unwrap();
        assert_eq!(messages(&mut input, first), [stdin("abc", 0)]);
        input.refused(first);
        assert!(input.deadline().unwrap() - first > first - now);
    }

    #[test]
    fn an_acknowledgement_of_the_future_is_not_believed() {
        let mut input = input(&["abc"]);
        assert!(!input.acknowledge(4));
        assert_eq!((input.acknowledged(), input.taken()), (0, 3));
        assert!(input.acknowledge(2) && input.acknowledge(1));
        assert_eq!(input.acknowledged(), 2);
    }

    #[test]
    fn no_more_is_taken_than_the_buffer_holds() {
        let mut input = Input::default();
        let piece = Bytes::from(vec![b'x'; INPUT_PIECE_BYTES]);
        while input.has_room() {
            input.push(piece.clone());
        }
        assert!(input.taken() < (INPUT_BUFFER_BYTES + INPUT_PIECE_BYTES) as u64);
    }
}

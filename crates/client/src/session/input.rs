//! The input of an execution: what the server has not acknowledged is kept and can be sent again.

use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use sandboxer_protocol::client::Request;
use tokio::time::Instant;

/// What is held of input that the server has not acknowledged; then the writer waits.
pub(crate) const INPUT_BUFFER_BYTES: usize = 512 * 1024;
/// One message of input.
pub(crate) const INPUT_PIECE_BYTES: usize = 32 * 1024;

const FIRST_RETRY: Duration = Duration::from_millis(20);
const LONGEST_RETRY: Duration = Duration::from_millis(1000);

#[derive(Debug, Default)]
pub(crate) struct Input {
    /// What is not acknowledged, from `acknowledged` on.
    held: BytesMut,
    acknowledged: u64,
    /// How many bytes of `held` went out on this connection.
    sent: usize,
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
        self.closed || (!self.eof && self.held.len() < INPUT_BUFFER_BYTES)
    }

    pub(crate) fn push(&mut self, data: &[u8]) {
        if !self.closed && !self.eof {
            self.held.extend_from_slice(data);
        }
    }

    pub(crate) fn end(&mut self) {
        self.eof = true;
    }

    /// Nothing more will be taken; what is held is of no use any more.
    pub(crate) fn close(&mut self) {
        self.closed = true;
        self.held = BytesMut::new();
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
        self.acknowledged + self.held.len() as u64
    }

    /// The agent has everything before `offset`. Returns false if it claims more than there ever was.
    pub(crate) fn acknowledge(&mut self, offset: u64) -> bool {
        if offset > self.taken() {
            return self.closed;
        }
        let surplus = usize::try_from(offset.saturating_sub(self.acknowledged)).unwrap_or(usize::MAX);
        if surplus > 0 {
            self.acknowledged = offset;
            self.held.advance(surplus);
            self.sent = self.sent.saturating_sub(surplus);
            self.retry_after = Duration::ZERO;
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
        let rest = &self.held[self.sent..];
        if !rest.is_empty() {
            // However small the writes were: what is there goes out together.
            let piece = Bytes::copy_from_slice(&rest[..piece_length(rest)]);
            let offset = self.acknowledged + self.sent as u64;
            self.sent += piece.len();
            return Some(Request::Stdin { data: piece, offset: Some(offset) }.to_json());
        }
        // Behind everything else has been taken, so that it can't overtake a piece that has to be sent again.
        if self.eof && self.held.is_empty() && !self.eof_sent {
            self.eof_sent = true;
            return Some(Request::StdinEof { offset: Some(self.acknowledged) }.to_json());
        }
        None
    }
}

/// How much to send at once: not within a character, if these are characters, so that it can go as text.
fn piece_length(rest: &[u8]) -> usize {
    let most = rest.len().min(INPUT_PIECE_BYTES);
    if most == rest.len() {
        return most;
    }
    let is_start = |at: &usize| rest[*at] & 0xc0 != 0x80;
    (most.saturating_sub(3)..=most).rev().find(is_start).filter(|at| *at > 0).unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(pieces: &[&'static str]) -> Input {
        let mut input = Input::default();
        pieces.iter().for_each(|piece| input.push(piece.as_bytes()));
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
        let mut input = input(&["abc"]);
        assert_eq!(messages(&mut input, now), [stdin("abc", 0)]);
        input.push(b"de");
        input.push(b"f");
        assert_eq!(messages(&mut input, now), [stdin("def", 3)]);
        assert!(input.acknowledge(4));
        assert_eq!(messages(&mut input, now), []);
        input.cut();
        assert_eq!(messages(&mut input, now), [stdin("ef", 4)]);
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
        while input.has_room() {
            input.push(&[b'x'; INPUT_PIECE_BYTES]);
        }
        assert!(input.taken() < (INPUT_BUFFER_BYTES + INPUT_PIECE_BYTES) as u64);
    }

    #[test]
    fn long_text_goes_as_text_and_other_bytes_as_they_are() {
        for (unit, text) in [("€".as_bytes(), true), (b"\xff\x80", false)] {
            let bytes = unit.repeat(INPUT_PIECE_BYTES);
            let mut input = Input::default();
            input.push(&bytes);
            let mut all = Vec::new();
            while let Some(message) = input.next_message(Instant::now()) {
                assert_eq!(message.contains("base64"), !text);
                let Ok(Request::Stdin { data, offset }) = Request::parse(&message) else { panic!("{message}") };
                assert_eq!(offset, Some(all.len() as u64));
                all.extend_from_slice(&data);
            }
            assert!(all == bytes);
        }
    }
}

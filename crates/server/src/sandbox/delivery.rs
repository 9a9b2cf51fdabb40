//! How the output of one execution reaches one client: which bytes are next, what the agent may still send, and what was handed out.
//!
//! Pure: bytes in, pieces out. A client that comes later gets a delivery of its own, which starts by asking the agent to go on from
//! some offset; until the agent has answered, output that still arrives belongs to the delivery before it.

use std::sync::Arc;

use bytes::Bytes;
use sandboxer_protocol::{
    ExecutionId,
    agent::{ExecutionNumber, PerStream, Stream},
    client::{Encoding, Utf8Pieces},
    limits::OUTPUT_CREDIT_BYTES,
};

use super::client::{Data, Piece};

const STREAMS: [Stream; 2] = [Stream::Stdout, Stream::Stderr];

/// The agent sent what it was not asked for.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("output of {stream:?} came at byte {offset} where {expected} was next and {granted} the end of what was allowed")]
pub(crate) struct Violation {
    stream: Stream,
    offset: u64,
    expected: u64,
    granted: u64,
}

#[derive(Debug)]
pub(crate) struct Delivery {
    pub(crate) number: ExecutionNumber,
    execution: Arc<ExecutionId>,
    encoding: Encoding,
    /// The last question to the agent from where it goes on, until it has answered that one. Output before the answer belongs to an
    /// earlier question, maybe of an earlier client.
    unanswered: Option<u64>,
    streams: PerStream<Way>,
    /// Whether the end of the execution is still to be told on this delivery.
    pub(crate) end_due: bool,
    /// The end was handed to the connection.
    pub(crate) end_handed: bool,
}

/// One stream on its way. `next ≥ sent ≥ handed`, and the difference of the first two is an unfinished character.
#[derive(Debug, Default)]
struct Way {
    /// The byte that the agent sends next.
    next: u64,
    /// Before this everything is in the outbox or beyond.
    sent: u64,
    /// Before this everything was handed to the connection.
    handed: u64,
    /// The agent may send up to here.
    granted: u64,
    text: Utf8Pieces,
}

impl Delivery {
    /// Of an execution that starts now.
    pub(crate) fn from_the_start(number: ExecutionNumber, execution: Arc<ExecutionId>, encoding: Encoding) -> Self {
        let mut delivery =
            Self { number, execution, encoding, unanswered: None, streams: PerStream::default(), end_due: true, end_handed: false };
        delivery.set_out(PerStream::default());
        delivery
    }

    /// Of an execution that goes on from where the agent will say in answer to question `sequence`.
    pub(crate) fn resuming(number: ExecutionNumber, execution: Arc<ExecutionId>, encoding: Encoding, end_due: bool, sequence: u64) -> Self {
        let streams = PerStream::default();
        Self { number, execution, encoding, unanswered: Some(sequence), streams, end_due, end_handed: false }
    }

    /// The agent answered a question. True: it was the last one, and output now comes from `from`.
    pub(crate) fn answered(&mut self, sequence: u64, from: PerStream<u64>) -> bool {
        if self.unanswered != Some(sequence) {
            return false;
        }
        self.unanswered = None;
        self.set_out(from);
        true
    }

    pub(crate) fn is_answered(&self) -> bool {
        self.unanswered.is_none()
    }

    fn set_out(&mut self, from: PerStream<u64>) {
        for stream in STREAMS {
            let at = *from.get(stream);
            let granted = at.saturating_add(OUTPUT_CREDIT_BYTES);
            *self.streams.get_mut(stream) = Way { next: at, sent: at, handed: at, granted, text: Utf8Pieces::default() };
        }
    }

    /// What the agent may send, to be told to it.
    pub(crate) fn granted(&self) -> PerStream<u64> {
        self.each(|way| way.granted)
    }

    /// What was handed to the connection.
    pub(crate) fn handed(&self) -> PerStream<u64> {
        self.each(|way| way.handed)
    }

    fn each(&self, value: impl Fn(&Way) -> u64) -> PerStream<u64> {
        PerStream { stdout: value(&self.streams.stdout), stderr: value(&self.streams.stderr) }
    }

    /// Takes output of the agent and returns what goes to the client now.
    pub(crate) fn output(&mut self, stream: Stream, offset: u64, data: Bytes) -> Result<Option<Piece>, Violation> {
        if self.unanswered.is_some() {
            return Ok(None);
        }
        let way = self.streams.get_mut(stream);
        let violation = Violation { stream, offset, expected: way.next, granted: way.granted };
        let end = offset.checked_add(data.len() as u64).filter(|end| *end <= way.granted).ok_or(violation)?;
        if offset != way.next {
            return Err(Violation { stream, offset, expected: way.next, granted: way.granted });
        }
        way.next = end;
        let data = match self.encoding {
            Encoding::Text => way.text.push(data),
            Encoding::Base64 => data,
        };
        Ok(self.piece(stream, data))
    }

    /// The execution ended with its output at `end`. Once all of it is on its way, what was held back of it; before that nothing.
    pub(crate) fn finish(&mut self, end: PerStream<u64>) -> Option<Vec<Piece>> {
        let complete = self.unanswered.is_none() && STREAMS.iter().all(|stream| self.streams.get(*stream).next >= *end.get(*stream));
        if !complete {
            return None;
        }
        let mut pieces = Vec::new();
        for stream in STREAMS {
            let rest = self.streams.get_mut(stream).text.finish();
            pieces.extend(self.piece(stream, rest));
        }
        Some(pieces)
    }

    fn piece(&mut self, stream: Stream, data: Bytes) -> Option<Piece> {
        if data.is_empty() {
            return None;
        }
        let way = self.streams.get_mut(stream);
        let offset = way.sent;
        way.sent += data.len() as u64;
        Some(Piece {
            execution: Arc::clone(&self.execution),
            stream,
            encoding: self.encoding,
            data: Data::Shared(data),
            offset,
            end: way.sent,
        })
    }

    /// A piece left for the connection. Returns whether the agent should be told that it may send more.
    pub(crate) fn hand(&mut self, piece: &Piece) -> bool {
        let way = self.streams.get_mut(piece.stream);
        way.handed = way.handed.max(piece.end);
        let more = way.granted - way.next.min(way.granted) < OUTPUT_CREDIT_BYTES / 2;
        if more {
            way.granted = way.granted.max(way.handed.saturating_add(OUTPUT_CREDIT_BYTES));
        }
        more
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn delivery() -> Delivery {
        Delivery::from_the_start(1, Arc::new("e".parse().unwrap()), Encoding::Text)
    }

    #[test]
    fn output_before_the_agent_answered_is_not_passed_on() {
        let mut delivery = Delivery::resuming(1, Arc::new("e".parse().unwrap()), Encoding::Text, true, 7);
        assert!(delivery.output(Stream::Stdout, 7, Bytes::from_static(b"stale")).unwrap().is_none());
        assert!(!delivery.answered(6, PerStream { stdout: 3, stderr: 0 }), "the answer to an earlier client's question");
        assert!(delivery.output(Stream::Stdout, 3, Bytes::from_static(b"stale too")).unwrap().is_none());
        assert!(delivery.answered(7, PerStream { stdout: 5, stderr: 0 }));
        let piece = delivery.output(Stream::Stdout, 5, Bytes::from_static(b"new")).unwrap().unwrap();
        assert_eq!((piece.offset, piece.end), (5, 8));
    }

    #[test]
    fn an_agent_that_skips_repeats_or_floods_is_found_out() {
        let data = || Bytes::from_static(b"x");
        assert!(delivery().output(Stream::Stdout, 1, data()).is_err());
        let mut twice = delivery();
        twice.output(Stream::Stdout, 0, data()).unwrap();
        assert!(twice.output(Stream::Stdout, 0, data()).is_err());
        assert!(delivery().output(Stream::Stdout, 0, Bytes::from(vec![0; OUTPUT_CREDIT_BYTES as usize + 1])).is_err());
        assert!(delivery().output(Stream::Stdout, u64::MAX, data()).is_err());
    }

    #[test]
    fn an_unfinished_character_comes_with_the_end() {
        let mut delivery = delivery();
        let piece = delivery.output(Stream::Stdout, 0, Bytes::from_static(b"a\xc3")).unwrap().unwrap();
        assert_eq!((piece.offset, piece.end), (0, 1));
        assert!(delivery.finish(PerStream { stdout: 3, stderr: 0 }).is_none());
        let rest = delivery.finish(PerStream { stdout: 2, stderr: 0 }).unwrap();
        assert_eq!(rest.iter().map(|piece| (piece.offset, piece.end)).collect::<Vec<_>>(), [(1, 2)]);
    }

    proptest! {
        #[test]
        fn whatever_is_handed_out_the_agent_never_runs_dry_and_never_gets_far_ahead(sizes in proptest::collection::vec(1u64..200_000, 1..200)) {
            let mut delivery = delivery();
            let mut at = 0;
            for size in sizes {
                prop_assert!(delivery.granted().stdout >= at + size, "stuck at {at} of {}", delivery.granted().stdout);
                let piece = delivery.output(Stream::Stdout, at, Bytes::from(vec![b'x'; size as usize])).unwrap().unwrap();
                at += size;
                delivery.hand(&piece);
                prop_assert!(delivery.granted().stdout <= at + OUTPUT_CREDIT_BYTES);
                prop_assert!(delivery.granted().stdout >= at + OUTPUT_CREDIT_BYTES / 2);
            }
        }
    }
}

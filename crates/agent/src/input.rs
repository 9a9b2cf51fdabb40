//! What the agent holds of a program's standard input: bytes that were taken from the server and not yet read by the program.
//!
//! Pieces carry their offset, so that a server which does not know whether a piece arrived can send it again.

use std::collections::VecDeque;

use bytes::{Buf, Bytes};
use sandboxer_protocol::agent::StdinRefusal;

/// Pieces are kept as they came; many tiny ones are joined so that their bookkeeping stays in proportion to their bytes.
const JOIN_BELOW_BYTES: usize = 4096;

#[derive(Debug)]
pub struct Input {
    capacity: usize,
    pieces: VecDeque<Bytes>,
    held: usize,
    /// How much was taken so far: the offset of the next new byte.
    taken: u64,
    /// The end was announced: nothing is taken beyond `taken`.
    ended: bool,
    /// The program closed its end, or is gone: what comes is taken and thrown away.
    discarding: bool,
}

impl Input {
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        Self {
            capacity: usize::try_from(capacity).unwrap_or(usize::MAX),
            pieces: VecDeque::new(),
            held: 0,
            taken: 0,
            ended: false,
            discarding: false,
        }
    }

    /// How much was taken so far.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.taken
    }

    #[must_use]
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Bytes taken that the program has not been given yet.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held
    }

    /// Takes what is new of a piece and says how much was taken in all, which is what to acknowledge.
    ///
    /// # Errors
    /// Nothing of it was taken: it begins after a gap, does not fit, or the input has ended.
    pub fn take(&mut self, offset: u64, mut data: Bytes) -> Result<u64, StdinRefusal> {
        let Some(known) = self.taken.checked_sub(offset) else { return Err(StdinRefusal::Gap) };
        data.advance(usize::try_from(known).unwrap_or(usize::MAX).min(data.len()));
        if data.is_empty() {
            return Ok(self.taken);
        }
        if self.ended {
            return Err(StdinRefusal::Closed);
        }
        if !self.discarding {
            if data.len() > self.capacity - self.held {
                return Err(StdinRefusal::Full);
            }
            self.held += data.len();
            self.taken += data.len() as u64;
            self.push(data);
        } else {
            self.taken += data.len() as u64;
        }
        Ok(self.taken)
    }

    /// The input ends at this offset.
    ///
    /// # Errors
    /// Something before it is missing, or more was taken already: the input goes on.
    pub fn end(&mut self, offset: u64) -> Result<(), StdinRefusal> {
        match offset.cmp(&self.taken) {
            std::cmp::Ordering::Greater => Err(StdinRefusal::Gap),
            std::cmp::Ordering::Less if !self.ended => Err(StdinRefusal::Gap),
            _ => {
                self.ended = true;
                Ok(())
            }
        }
    }

    /// The program reads no more. Not an error: many programs never read their input.
    pub fn discard(&mut self) {
        self.discarding = true;
        self.pieces = VecDeque::new();
        self.held = 0;
    }

    /// The next bytes for the program. Follow with [`Input::fed`].
    #[must_use]
    pub fn front(&self) -> Option<&[u8]> {
        self.pieces.front().map(|piece| &piece[..])
    }

    /// The program was given `count` bytes of [`Input::front`].
    pub fn fed(&mut self, count: usize) {
        let Some(front) = self.pieces.front_mut() else { return };
        let count = count.min(front.len());
        front.advance(count);
        self.held -= count;
        if front.is_empty() {
            self.pieces.pop_front();
        }
    }

    /// Everything was given to the program and the end was announced: its input can be closed.
    #[must_use]
    pub fn finished(&self) -> bool {
        self.ended && self.pieces.is_empty()
    }

    fn push(&mut self, data: Bytes) {
        if let Some(last) = self.pieces.back_mut()
            && last.len() + data.len() <= JOIN_BELOW_BYTES
        {
            *last = [&last[..], &data[..]].concat().into();
            return;
        }
        // A copy, not a slice: a slice would keep the whole buffer it was read into alive.
        self.pieces.push_back(Bytes::copy_from_slice(&data));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn drain(input: &mut Input, into: &mut Vec<u8>, most: usize) {
        let front = input.front().unwrap_or_default();
        let count = front.len().min(most);
        into.extend_from_slice(&front[..count]);
        input.fed(count);
    }

    proptest! {
        #[test]
        fn pieces_repeated_overlapping_or_too_early_make_one_exact_stream(
            capacity in 1..200u64,
            pieces in prop::collection::vec((0..400u64, 0..60usize, 0..80usize), 0..80),
        ) {
            let stream: Vec<u8> = (0..1000u32).map(|i| (i % 251) as u8).collect();
            let mut input = Input::new(capacity);
            let mut read = Vec::new();
            for (offset, length, eat) in pieces {
                let at = usize::try_from(offset).unwrap();
                let before = input.taken();
                let outcome = input.take(offset, Bytes::copy_from_slice(&stream[at..at + length]));
                let new = (offset + length as u64).saturating_sub(before);
                match outcome {
                    Ok(taken) => prop_assert_eq!(taken, before + new),
                    Err(StdinRefusal::Gap) => prop_assert!(offset > before),
                    Err(StdinRefusal::Full) => prop_assert!(new > capacity - input.held() as u64),
                    Err(StdinRefusal::Closed) => prop_assert!(false),
                }
                if outcome.is_err() {
                    prop_assert_eq!(input.taken(), before);
                }
                prop_assert!(input.held() as u64 <= capacity);
                drain(&mut input, &mut read, eat);
            }
            while input.front().is_some() {
                drain(&mut input, &mut read, usize::MAX);
            }
            prop_assert_eq!(read.len() as u64, input.taken());
            prop_assert_eq!(&read[..], &stream[..read.len()]);
        }
    }

    #[test]
    fn the_end_comes_after_everything_before_it() {
        let mut input = Input::new(10);
        assert_eq!(input.take(0, Bytes::from_static(b"abc")), Ok(3));
        assert_eq!(input.end(5), Err(StdinRefusal::Gap));
        assert_eq!(input.end(3), Ok(()));
        assert!(!input.finished());
        assert_eq!(input.take(3, Bytes::from_static(b"d")), Err(StdinRefusal::Closed));
        assert_eq!(input.take(0, Bytes::from_static(b"abc")), Ok(3));
        input.fed(3);
        assert!(input.finished());
        assert_eq!(input.end(3), Ok(()));
    }

    #[test]
    fn input_that_nobody_reads_is_taken_and_thrown_away() {
        let mut input = Input::new(4);
        input.discard();
        assert_eq!(input.take(0, Bytes::from_static(b"more than fits")), Ok(14));
        assert_eq!(input.held(), 0);
        assert_eq!(input.take(3, Bytes::from_static(b"again")), Ok(14));
    }
}

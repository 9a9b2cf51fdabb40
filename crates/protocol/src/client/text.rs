//! Cutting a stream of bytes into pieces that never split a character.

use bytes::{Bytes, BytesMut};

/// Holds back the beginning of a character until the rest of it comes.
#[derive(Debug, Default)]
pub struct Utf8Pieces {
    /// At most three bytes: an unfinished character.
    held: BytesMut,
}

impl Utf8Pieces {
    /// Takes the next bytes of the stream and returns what can be passed on: everything but an unfinished character at its end.
    pub fn push(&mut self, data: Bytes) -> Bytes {
        let joined = if self.held.is_empty() {
            data
        } else {
            let mut joined = std::mem::take(&mut self.held);
            joined.extend_from_slice(&data);
            joined.freeze()
        };
        let whole = joined.len() - unfinished(&joined);
        self.held.extend_from_slice(&joined[whole..]);
        joined.slice(..whole)
    }

    /// The stream has ended: what was held back comes as it is.
    pub fn finish(&mut self) -> Bytes {
        std::mem::take(&mut self.held).freeze()
    }

    /// How many bytes are held back.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.len()
    }
}

/// How many bytes at the end begin a character that is not finished.
fn unfinished(bytes: &[u8]) -> usize {
    let from = bytes.len().saturating_sub(3);
    for (back, byte) in bytes[from..].iter().rev().enumerate() {
        let have = back + 1;
        let need = match byte {
            0x00..=0x7f => return 0,
            0x80..=0xbf => continue,
            0xc2..=0xdf => 2,
            0xe0..=0xef => 3,
            0xf0..=0xf4 => 4,
            _ => return 0,
        };
        let start = bytes.len() - have;
        // A beginning that no character continues is not worth waiting for.
        let hopeful = std::str::from_utf8(&bytes[start..]).is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none());
        return if have < need && hopeful { have } else { 0 };
    }
    0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pieces(bytes: &[u8], step: usize) -> Vec<Bytes> {
        let mut cut = Utf8Pieces::default();
        let mut pieces: Vec<Bytes> = bytes.chunks(step).map(|chunk| cut.push(Bytes::copy_from_slice(chunk))).collect();
        pieces.push(cut.finish());
        pieces
    }

    proptest! {
        #[test]
        fn characters_stay_whole_wherever_the_stream_is_cut(text in "\\PC{0,40}", step in 1usize..9) {
            let pieces = pieces(text.as_bytes(), step);
            prop_assert!(pieces.iter().all(|piece| std::str::from_utf8(piece).is_ok()));
            prop_assert_eq!(pieces.concat(), text.as_bytes());
        }

        #[test]
        fn no_byte_is_lost_whatever_the_bytes_are(bytes in proptest::collection::vec(any::<u8>(), 0..60), step in 1usize..9) {
            let pieces = pieces(&bytes, step);
            prop_assert_eq!(pieces.concat(), bytes);
        }

        #[test]
        fn never_more_than_three_bytes_are_held_back(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            let mut cut = Utf8Pieces::default();
            for byte in bytes {
                cut.push(Bytes::copy_from_slice(&[byte]));
                prop_assert!(cut.held() <= 3);
            }
        }
    }
}

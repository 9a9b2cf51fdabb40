//! Where a file is cut: at page boundaries only, decided by what the pages hold, so that an inserted or removed page moves the cuts around it and no others.
//!
//! A page ends a chunk if a few words sampled from it hash to a value that one page in [`ONE_IN`] has. Sampling is enough: a change elsewhere in the page leaves
//! the cut where it was, which is what is wanted.

pub const PAGE: usize = 4096;
pub const MIN_CHUNK: usize = 4 * PAGE;
pub const MAX_CHUNK: usize = 64 * PAGE;

const ONE_IN: u64 = 16;
/// One word of every fourth cache line.
const STRIDE: usize = 256;

/// The length of the chunk that begins at the start of `data`. `None` if more data is needed to tell; `last`: there is no more.
#[must_use]
pub fn cut(data: &[u8], last: bool) -> Option<usize> {
    let window = &data[..data.len().min(MAX_CHUNK)];
    for (index, page) in window.chunks_exact(PAGE).enumerate().skip(MIN_CHUNK / PAGE - 1) {
        if ends_chunk(page) {
            return Some((index + 1) * PAGE);
        }
    }
    if window.len() == MAX_CHUNK || (last && !window.is_empty()) { Some(window.len()) } else { None }
}

fn ends_chunk(page: &[u8]) -> bool {
    let mut sum = 0_u64;
    for piece in page.chunks_exact(STRIDE) {
        if let Some(word) = piece.first_chunk::<8>() {
            sum = (sum ^ u64::from_le_bytes(*word)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
        }
    }
    // The high bits are the well-mixed ones. A page of zeros ends none: a run of them is cut at the maximum.
    (sum.wrapping_mul(0xD6E8_FEB8_6659_FD93) >> 32) % ONE_IN == 1
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng, rngs::StdRng};

    use super::*;

    fn cuts(mut data: &[u8]) -> Vec<&[u8]> {
        let mut chunks = Vec::new();
        while let Some(length) = cut(data, true) {
            let (chunk, rest) = data.split_at(length);
            chunks.push(chunk);
            data = rest;
        }
        chunks
    }

    fn random(bytes: usize, seed: u64) -> Vec<u8> {
        let mut data = vec![0; bytes];
        StdRng::seed_from_u64(seed).fill(&mut data[..]);
        data
    }

    #[test]
    fn zeros_are_cut_at_the_maximum() {
        let data = vec![0; MAX_CHUNK * 3 + 5];
        assert_eq!(cuts(&data).iter().map(|chunk| chunk.len()).collect::<Vec<_>>(), [MAX_CHUNK, MAX_CHUNK, MAX_CHUNK, 5]);
    }

    #[test]
    fn chunks_have_their_intended_size() {
        let data = random(32 << 20, 1);
        let chunks = cuts(&data);
        let average = data.len() / chunks.len();
        assert!((64 << 10..96 << 10).contains(&average), "{average}");
    }

    #[test]
    fn one_changed_mebibyte_changes_little_more() {
        let before = random(32 << 20, 2);
        let mut after = before.clone();
        after[7_000_000..8_048_576].copy_from_slice(&random(1 << 20, 3)[..1_048_576]);
        let known: HashSet<&[u8]> = cuts(&before).into_iter().collect();
        let new: usize = cuts(&after).into_iter().filter(|chunk| !known.contains(chunk)).map(<[u8]>::len).sum();
        assert!(new < (1 << 20) + 2 * MAX_CHUNK, "{new}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn the_chunks_are_the_data(seed: u64, bytes in 0_usize..3 << 20) {
            let data = random(bytes, seed);
            let chunks = cuts(&data);
            prop_assert!(chunks.concat() == data);
            for chunk in chunks.iter().take(chunks.len().saturating_sub(1)) {
                prop_assert!(chunk.len() % PAGE == 0 && (MIN_CHUNK..=MAX_CHUNK).contains(&chunk.len()));
            }
        }

        #[test]
        fn what_comes_later_does_not_move_a_cut(seed: u64, bytes in 0_usize..1 << 20, shown in 0_usize..1 << 20) {
            let data = random(bytes, seed);
            if let Some(early) = cut(&data[..shown.min(bytes)], false) {
                prop_assert_eq!(cut(&data, true), Some(early));
            }
        }

        #[test]
        fn inserted_and_removed_pages_shift_little(seed: u64, at in 0_usize..1024, pages in 1_usize..8, remove: bool) {
            let before = random(1024 * PAGE, seed);
            let mut after = before.clone();
            let place = at * PAGE;
            if remove {
                after.drain(place..(place + pages * PAGE).min(before.len()));
            } else {
                let inserted = random(pages * PAGE, !seed);
                after.splice(place..place, inserted);
            }
            let known: HashSet<&[u8]> = cuts(&before).into_iter().collect();
            let new: usize = cuts(&after).into_iter().filter(|chunk| !known.contains(chunk)).map(<[u8]>::len).sum();
            prop_assert!(new <= pages * PAGE + 6 * MAX_CHUNK, "{} bytes are new", new);
        }
    }
}

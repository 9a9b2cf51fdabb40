//! In which pieces the packs are read: about in the order of the files, what lies together in one piece, and none of it twice.
//!
//! What was saved often lies in many packs, some chunks here and some there, so that in the order of the files nearly every chunk would be a request of its own. So
//! the next chunks are put in the order of their packs, a window of them at a time, and what lies close there is read in one piece, with what lies between. The pieces
//! of a window come in the order in which the files want the first of each.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::iter::Peekable;
use std::ops::Range;

use crate::manifest::{Chunk, Codec, Manifest};

/// Chunks of a window, however small they are.
const MAX_GATHERED: usize = 8192;

/// What a request is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reach {
    /// Bytes of a piece at most, but for one chunk that is larger.
    span: u64,
    /// Reading over so much that is not wanted is cheaper than asking twice. Of one piece more is not wanted only if still more of it is.
    gap: u64,
    /// Stored bytes of the chunks that are put in order at once, but for one that is larger.
    window: u64,
}

impl Reach {
    /// In a directory.
    pub(super) const NEAR: Self = Self { span: 1 << 20, gap: 64 << 10, window: 1 << 20 };
    /// In a bucket, where a request takes as long as this gap and more.
    pub(super) const FAR: Self = Self { span: 1 << 20, gap: 256 << 10, window: 32 << 20 };
}

/// A chunk, and where it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) file: usize,
    pub(super) offset: u64,
    pub(super) chunk: Chunk,
}

/// A part of a pack, and what is wanted of it.
#[derive(Debug)]
pub(super) struct Span {
    pub(super) pack: usize,
    pub(super) range: Range<u64>,
    pub(super) places: Vec<Place>,
    /// Bytes of the range that are not.
    unwanted: u64,
}

impl Span {
    fn of(place: Place) -> Self {
        Self { pack: place.chunk.pack as usize, range: range_of(&place.chunk), places: vec![place], unwanted: 0 }
    }

    /// Takes it in, or gives it back. They come in the order in which they lie.
    fn take(&mut self, place: Place, reach: Reach) -> Option<Place> {
        let new = range_of(&place.chunk);
        let (end, gap) = (self.range.end.max(new.end), new.start.saturating_sub(self.range.end));
        let (length, unwanted) = (end - self.range.start, self.unwanted + gap);
        let close = gap <= reach.gap && length <= reach.span && unwanted <= (length - unwanted).max(reach.gap);
        if self.pack != place.chunk.pack as usize || !close {
            return Some(place);
        }
        (self.range.end, self.unwanted) = (end, unwanted);
        self.places.push(place);
        None
    }
}

fn range_of(chunk: &Chunk) -> Range<u64> {
    u64::from(chunk.offset)..u64::from(chunk.offset) + u64::from(chunk.stored)
}

/// Of the chunks that `wanted` takes. Lazily: of a manifest's pieces only a window's are in memory.
pub(super) fn spans<'a>(
    manifest: &'a Manifest,
    reach: Reach,
    mut wanted: impl FnMut(&Chunk) -> bool + Send + 'a,
) -> impl Iterator<Item = Span> + Send + 'a {
    let places = manifest.files_with_chunks().enumerate().flat_map(|(file, (_, chunks))| {
        let mut end = 0;
        chunks.iter().map(move |chunk| {
            let offset = end;
            end += u64::from(chunk.raw);
            Place { file, offset, chunk: *chunk }
        })
    });
    let mut places = places.filter(move |place| place.chunk.codec != Codec::Zero && wanted(&place.chunk)).peekable();
    let mut ready = VecDeque::new();
    std::iter::from_fn(move || {
        if ready.is_empty() {
            ready = arrange(gather(&mut places, reach), reach);
        }
        ready.pop_front()
    })
}

/// The next window.
fn gather(places: &mut Peekable<impl Iterator<Item = Place>>, reach: Reach) -> Vec<Place> {
    let mut bytes = 0;
    let mut gathered = Vec::new();
    while let Some(place) = places.next_if(|next| {
        let fits = bytes + u64::from(next.chunk.stored) <= reach.window && gathered.len() < MAX_GATHERED;
        fits || gathered.is_empty()
    }) {
        bytes += u64::from(place.chunk.stored);
        gathered.push(place);
    }
    gathered
}

fn arrange(window: Vec<Place>, reach: Reach) -> VecDeque<Span> {
    let mut lying: Vec<(usize, Place)> = window.into_iter().enumerate().collect();
    lying.sort_unstable_by_key(|(number, place)| (place.chunk.pack, place.chunk.offset, *number));
    let mut spans: Vec<(usize, Span)> = Vec::new();
    for (number, place) in lying {
        let rest = match spans.last_mut() {
            Some((first, span)) => {
                let rest = span.take(place, reach);
                if rest.is_none() {
                    *first = (*first).min(number);
                }
                rest
            }
            None => Some(place),
        };
        spans.extend(rest.map(|place| (number, Span::of(place))));
    }
    spans.sort_unstable_by_key(|(first, _)| *first);
    spans.into_iter().map(|(_, span)| span).collect()
}

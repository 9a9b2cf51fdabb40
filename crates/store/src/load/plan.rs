//! In which pieces the packs are read: in the order of the files, chunks that lie together together.

use std::ops::Range;

use crate::manifest::{Chunk, Codec, Manifest};

const MAX_SPAN: u64 = 1 << 20;
/// Reading over so much that is not wanted is cheaper than asking twice.
const MAX_GAP: u64 = 64 << 10;

/// A part of a pack, and the chunks of one file in it with where they go.
#[derive(Debug)]
pub(super) struct Span {
    pub(super) file: usize,
    pub(super) pack: usize,
    pub(super) range: Range<u64>,
    pub(super) chunks: Vec<(Chunk, u64)>,
}

impl Span {
    fn takes(&self, file: usize, chunk: &Chunk) -> bool {
        let (from, to) = (u64::from(chunk.offset), u64::from(chunk.offset) + u64::from(chunk.stored));
        self.file == file
            && self.pack == chunk.pack as usize
            && from >= self.range.end
            && from - self.range.end <= MAX_GAP
            && to - self.range.start <= MAX_SPAN
    }
}

/// Lazily: a manifest's spans are never all in memory.
pub(super) fn spans(manifest: &Manifest) -> impl Iterator<Item = Span> + Send {
    wanted_spans(manifest, |_| true)
}

/// Those of the chunks that `wanted` takes.
pub(super) fn wanted_spans<'a>(
    manifest: &'a Manifest,
    mut wanted: impl FnMut(&Chunk) -> bool + Send + 'a,
) -> impl Iterator<Item = Span> + Send + 'a {
    let places = manifest.files_with_chunks().enumerate().flat_map(|(file, (_, chunks))| {
        let mut offset = 0;
        chunks.iter().map(move |chunk| {
            let at = offset;
            offset += u64::from(chunk.raw);
            (file, *chunk, at)
        })
    });
    let mut places = places.filter(move |(_, chunk, _)| chunk.codec != Codec::Zero && wanted(chunk)).peekable();
    std::iter::from_fn(move || {
        let (file, chunk, offset) = places.next()?;
        let from = u64::from(chunk.offset);
        let mut span = Span { file, pack: chunk.pack as usize, range: from..from + u64::from(chunk.stored), chunks: vec![(chunk, offset)] };
        while let Some((_, chunk, offset)) = places.next_if(|(file, chunk, _)| span.takes(*file, chunk)) {
            span.range.end = u64::from(chunk.offset) + u64::from(chunk.stored);
            span.chunks.push((chunk, offset));
        }
        Some(span)
    })
}

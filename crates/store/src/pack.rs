//! A pack: chunks one after another behind a head that says which pack it is.
//!
//! ```text
//!  0  magic    8   "SBXPACK\n"
//!  8  version  u32
//! 12  zeros    4
//! 16  id      16
//! 32  chunks
//! ```

use crate::layout::PackId;
use crate::manifest::{Chunk, ChunkHash, Codec};

pub const HEAD_BYTES: usize = 32;
/// A pack is closed when it has this much. Two of them are in memory during a save.
pub const TARGET_BYTES: usize = 12 << 20;

const MAGIC: [u8; 8] = *b"SBXPACK\n";
const FORMAT: u32 = 1;

#[must_use]
pub(crate) fn head(id: PackId) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..8].copy_from_slice(&MAGIC);
    head[8..12].copy_from_slice(&FORMAT.to_le_bytes());
    head[16..].copy_from_slice(id.as_bytes());
    head
}

/// zstd's fastest ordinary level.
const LEVEL: i32 = 1;

/// What turns raw chunks into stored ones: one a thread.
pub(crate) struct Encoder {
    zstd: zstd::bulk::Compressor<'static>,
    buffer: Vec<u8>,
}

impl Encoder {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self { zstd: zstd::bulk::Compressor::new(LEVEL)?, buffer: Vec::new() })
    }

    /// The stored form: raw where compressing gains less than a sixteenth.
    pub(crate) fn encode<'a>(&'a mut self, raw: &'a [u8]) -> std::io::Result<(Codec, &'a [u8])> {
        let bound = zstd::zstd_safe::compress_bound(raw.len());
        if self.buffer.len() < bound {
            self.buffer.resize(bound, 0);
        }
        let length = self.zstd.compress_to_buffer(raw, &mut self.buffer)?;
        if length + raw.len() / 16 < raw.len() { Ok((Codec::Zstd, &self.buffer[..length])) } else { Ok((Codec::Raw, raw)) }
    }
}

/// What turns stored chunks into raw ones, checking each: one a thread.
pub(crate) struct Decoder {
    zstd: zstd::bulk::Decompressor<'static>,
    buffer: Vec<u8>,
}

impl Decoder {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self { zstd: zstd::bulk::Decompressor::new()?, buffer: Vec::new() })
    }

    /// The raw bytes, `None` if they are not those of `chunk`.
    pub(crate) fn decode<'a>(&'a mut self, key: &[u8; 32], chunk: &Chunk, stored: &'a [u8]) -> Option<&'a [u8]> {
        let raw = match chunk.codec {
            Codec::Zero => return None,
            Codec::Raw => stored,
            Codec::Zstd => {
                let length = chunk.raw as usize;
                if self.buffer.len() < length {
                    self.buffer.resize(length, 0);
                }
                // The slice bounds what a hostile frame can unfold to.
                let written = self.zstd.decompress_to_buffer(stored, &mut self.buffer[..length]).ok()?;
                &self.buffer[..written]
            }
        };
        (raw.len() == chunk.raw as usize && ChunkHash::of(key, raw) == chunk.hash).then_some(raw)
    }
}

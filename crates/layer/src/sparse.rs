//! Holes: finding them, and the map that stands before the content of a file that has some.

use crate::{BLOCK, Extent};

/// Parts of one file. Beyond it, holes are written as zeros.
pub const MAX_EXTENTS: usize = 16 * 1024;
/// Holes are whole pages.
const PAGE: usize = 4096;
/// A number of the map: sixteen digits would do for the largest file there can be.
const MAX_DIGITS: usize = 20;

/// The map of a file of this size, padded to whole blocks. Behind a hole at its end there is an empty part, as GNU tar has it: without one it makes the file
/// end with its last byte that is not in a hole.
pub(crate) fn map(extents: &[Extent], size: u64) -> Vec<u8> {
    let end = extents.last().map_or(0, |last| last.offset + last.length);
    let last = (end < size && extents.len() < MAX_EXTENTS).then_some(Extent { offset: size, length: 0 });
    let mut text = format!("{}\n", extents.len() + usize::from(last.is_some()));
    for extent in extents.iter().chain(&last) {
        text.push_str(&format!("{}\n{}\n", extent.offset, extent.length));
    }
    let mut map = text.into_bytes();
    map.resize(map.len().next_multiple_of(BLOCK), 0);
    map
}

/// Finds the parts of a file that are not zeros, from its bytes in order.
#[derive(Debug, Default)]
pub struct Scan {
    extents: Vec<Extent>,
    position: u64,
}

impl Scan {
    /// The next bytes: whole pages, but for the last ones of the file.
    pub fn push(&mut self, bytes: &[u8]) {
        for page in bytes.chunks(PAGE) {
            let length = page.len() as u64;
            if !is_zero(page) || self.extents.len() >= MAX_EXTENTS {
                let full = self.extents.len() >= MAX_EXTENTS;
                match self.extents.last_mut() {
                    Some(last) if full || last.offset + last.length == self.position => last.length = self.position + length - last.offset,
                    _ => self.extents.push(Extent { offset: self.position, length }),
                }
            }
            self.position += length;
        }
    }

    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The parts, if it is worth it: if holes are more than this many bytes.
    #[must_use]
    pub fn finish(self, worth: u64) -> Option<Vec<Extent>> {
        let data: u64 = self.extents.iter().map(|extent| extent.length).sum();
        (self.position - data >= worth.max(1)).then_some(self.extents)
    }
}

/// Many bytes at a time: the compiler makes wide words of it.
fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(256).all(|part| part.iter().fold(0, |all, byte| all | byte) == 0)
}

/// Reads a map, in whole blocks.
#[derive(Debug, Default)]
pub(crate) struct MapReader {
    number: Option<u64>,
    digits: usize,
    count: Option<usize>,
    offset: Option<u64>,
    extents: Vec<Extent>,
    bytes: u64,
}

impl MapReader {
    /// Takes a block. True if it was the last one of the map.
    pub(crate) fn push(&mut self, block: &[u8], size: u64) -> Result<bool, &'static str> {
        self.bytes += block.len() as u64;
        for byte in block {
            if self.is_whole() {
                return Ok(true);
            }
            match byte {
                b'0'..=b'9' if self.digits < MAX_DIGITS => {
                    let more = self.number.unwrap_or(0).checked_mul(10).and_then(|number| number.checked_add(u64::from(byte - b'0')));
                    self.number = Some(more.ok_or("a number in its map is too large")?);
                    self.digits += 1;
                }
                b'\n' => {
                    let number = self.number.take().ok_or("its map is malformed")?;
                    self.digits = 0;
                    self.take(number, size)?;
                }
                _ => return Err("its map is malformed"),
            }
        }
        Ok(self.is_whole())
    }

    fn take(&mut self, number: u64, size: u64) -> Result<(), &'static str> {
        if self.count.is_none() {
            let count = usize::try_from(number).ok().filter(|count| *count <= MAX_EXTENTS);
            self.count = Some(count.ok_or("its map has too many parts")?);
        } else if let Some(offset) = self.offset.take() {
            let end = offset.checked_add(number).filter(|end| *end <= size).ok_or("a part of it lies beyond its end")?;
            let before = self.extents.last().map_or(0, |last| last.offset + last.length);
            if offset < before {
                return Err("its parts overlap");
            }
            if end > offset {
                self.extents.push(Extent { offset, length: number });
            } else if let Some(count) = &mut self.count {
                // GNU tar ends a map with an empty part.
                *count -= 1;
            }
        } else {
            self.offset = Some(number);
        }
        Ok(())
    }

    fn is_whole(&self) -> bool {
        self.count == Some(self.extents.len()) && self.offset.is_none()
    }

    /// The parts, and how long the map was.
    pub(crate) fn finish(self) -> (Vec<Extent>, u64) {
        (self.extents, self.bytes)
    }
}

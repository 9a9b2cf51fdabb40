//! The 512 bytes before every entry.

use crate::BLOCK;

pub(crate) const NAME: std::ops::Range<usize> = 0..100;
pub(crate) const MODE: std::ops::Range<usize> = 100..108;
pub(crate) const UID: std::ops::Range<usize> = 108..116;
pub(crate) const GID: std::ops::Range<usize> = 116..124;
pub(crate) const SIZE: std::ops::Range<usize> = 124..136;
pub(crate) const MTIME: std::ops::Range<usize> = 136..148;
pub(crate) const CHECKSUM: std::ops::Range<usize> = 148..156;
pub(crate) const KIND: usize = 156;
pub(crate) const LINK: std::ops::Range<usize> = 157..257;
pub(crate) const MAGIC: std::ops::Range<usize> = 257..265;
pub(crate) const PREFIX: std::ops::Range<usize> = 345..500;
/// Of the form that POSIX knows; GNU's has spaces here and no prefix.
pub(crate) const POSIX: &[u8; 8] = b"ustar\x0000";

pub(crate) type Block = [u8; BLOCK];

/// The sum of all bytes, those of the sum itself counted as spaces.
pub(crate) fn checksum(block: &Block) -> u64 {
    let outside = block[..CHECKSUM.start].iter().chain(&block[CHECKSUM.end..]);
    outside.map(|byte| u64::from(*byte)).sum::<u64>() + CHECKSUM.len() as u64 * u64::from(b' ')
}

/// Up to the first zero.
pub(crate) fn text(field: &[u8]) -> &[u8] {
    &field[..field.iter().position(|byte| *byte == 0).unwrap_or(field.len())]
}

/// Octal digits, or GNU's binary form for what they can't say. None: neither, or too large.
pub(crate) fn number(field: &[u8]) -> Option<u64> {
    if let Some((first, rest)) = field.split_first()
        && first & 0x80 != 0
    {
        // The next bit is the sign; nothing here is negative.
        let mut value = u64::from(first & 0x7f);
        for byte in rest {
            value = value.checked_mul(256)?.checked_add(u64::from(*byte))?;
        }
        return Some(value);
    }
    let digits = field.iter().copied().skip_while(|byte| *byte == b' ').take_while(|byte| *byte != b' ' && *byte != 0);
    digits.into_iter().try_fold(0u64, |value, digit| match digit {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(u64::from(digit - b'0')),
        _ => None,
    })
}

/// Octal digits and a zero, if it fits.
pub(crate) fn put_number(field: &mut [u8], value: u64) -> bool {
    let digits = field.len() - 1;
    let text = format!("{value:0digits$o}");
    let fits = text.len() == digits;
    if fits {
        field[..digits].copy_from_slice(text.as_bytes());
    }
    fits
}

//! One layer of a file system as a tar archive, in the form that OCI images have: pax headers, deletions as `.wh.NAME`, directories that hide what is below
//! as `.wh..wh..opq`, holes in GNU's form 1.0.
//!
//! No I/O: [`write`] makes bytes of entries, [`Decoder`] takes bytes as they come and tells a [`Sink`] what they are. Whoever wrote an archive may be hostile:
//! paths are checked ([`EntryPath`]), lengths and counts bounded ([`Limits`]), and nothing is held in memory but one header.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test"))]

mod entry;
mod entry_path;
mod header;
mod read;
mod sparse;
#[cfg(test)]
mod tests;
pub mod write;

pub use entry::{Entry, Extent, Kind, Meta, Time, Xattr};
pub use entry_path::{EntryPath, PathFault, check_symlink_target};
pub use read::{Decoder, Fault, Limits, Sink, Summary};
pub use sparse::{MAX_EXTENTS, Scan};

/// What tar counts in.
pub const BLOCK: usize = 512;

/// Before the name of what is deleted.
const WHITEOUT: &[u8] = b".wh.";
/// In a directory that hides what is below.
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Other bookkeeping of the union file system that this form comes from.
const WHITEOUT_META: &[u8] = b".wh..wh.";
/// Of an entry that is really called `.wh.…`, or deletes one, for our own reader: without it others take it for a deletion, or for bookkeeping.
const LITERAL: &str = "SANDBOXER.literal";
const XATTR: &str = "SCHILY.xattr.";

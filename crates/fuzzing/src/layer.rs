//! Archives of files that a sandbox, or somebody who imports one, has made.
//!
//! As with images, the checksums are put right first: whoever means harm can do that too.

use sandboxer_agent::unpack::Unpacker;
use sandboxer_layer::Limits;

use crate::archive::{MAX_BYTES, MAX_ENTRIES, Place, with_checksums};

/// The first byte says in what pieces it comes.
///
/// Whatever comes of it, nothing is written outside of the layer, and no more into it than is allowed; and it does not matter how it was cut.
pub fn layer(data: &[u8]) {
    let Some((cut, data)) = data.split_first() else { return };
    let archive = with_checksums(data);
    let whole = unpacked(&archive, archive.len());
    let pieces = unpacked(&archive, usize::from(*cut) + 1);
    assert_eq!(whole, pieces, "it matters how it was cut");
}

/// Whether it was taken, and what of it.
fn unpacked(archive: &[u8], piece: usize) -> Result<(u64, u64), String> {
    let place = Place::new();
    let limits = Limits { bytes: 4 * MAX_BYTES, content: MAX_BYTES, entries: MAX_ENTRIES };
    let mut unpacker = Unpacker::new(&place.tree, Some(&place.work), limits).unwrap();
    let pushed = archive.chunks(piece.max(1)).try_for_each(|piece| unpacker.push(piece));
    let taken = pushed.and_then(|()| unpacker.finish());
    place.check();
    taken.map(|summary| (summary.entries, summary.content)).map_err(|failure| failure.to_string())
}

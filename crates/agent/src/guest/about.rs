//! What is known of a file.

use nix::sys::stat::{FileStat, SFlag};
use sandboxer_protocol::agent::{FileAbout, FileKind, Raw};

use crate::pack::time;

pub(super) fn kind_of(found: &FileStat) -> FileKind {
    match SFlag::from_bits_truncate(found.st_mode & SFlag::S_IFMT.bits()) {
        SFlag::S_IFREG => FileKind::File,
        SFlag::S_IFDIR => FileKind::Directory,
        SFlag::S_IFLNK => FileKind::Symlink,
        _ => FileKind::Other,
    }
}

pub(super) fn about(found: &FileStat, target: Option<Vec<u8>>) -> FileAbout {
    let kind = kind_of(found);
    let modified = time(found.st_mtime, found.st_mtime_nsec);
    FileAbout {
        name: None,
        kind,
        // What a directory has as its size means nothing.
        size: if kind == FileKind::Directory { 0 } else { u64::try_from(found.st_size).unwrap_or(0) },
        mode: found.st_mode & 0o7777,
        uid: found.st_uid,
        gid: found.st_gid,
        modified: (modified.seconds, modified.nanos),
        target: target.map(Raw::new),
    }
}

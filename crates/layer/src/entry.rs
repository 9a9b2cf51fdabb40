//! What an archive says.

use crate::EntryPath;

/// A moment, to the nanosecond.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time {
    pub seconds: i64,
    /// Below a thousand million, and counted forwards also before 1970.
    pub nanos: u32,
}

/// An extended attribute.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Xattr {
    pub name: Vec<u8>,
    pub value: Vec<u8>,
}

/// A part of a file that is not a hole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    pub offset: u64,
    pub length: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Meta {
    /// The twelve bits of it.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub mtime: Time,
    pub atime: Option<Time>,
    pub xattrs: Vec<Xattr>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// Its content follows, piece by piece.
    File {
        size: u64,
    },
    Directory,
    Symlink {
        target: Vec<u8>,
    },
    /// Another name of an entry that came before.
    HardLink {
        target: EntryPath,
    },
    Fifo,
    /// What is at this path below this layer is deleted.
    Whiteout,
    /// Nothing that is in this directory below this layer can be seen.
    Opaque,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub path: EntryPath,
    pub kind: Kind,
    pub meta: Meta,
}

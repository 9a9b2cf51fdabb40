//! What is asked of single files and directories, and what is told of them.

use serde::{Deserialize, Serialize};

use super::raw::{GuestPath, Raw};

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum FileAsk {
    Stat {
        path: GuestPath,
        /// Of a link: of what it leads to.
        follow: bool,
    },
    /// Sends a [`FileList`] in JSON.
    List {
        path: GuestPath,
        /// Only names behind this one.
        after: Option<Raw>,
        limit: u32,
    },
    /// Sends the content.
    Read {
        path: GuestPath,
        range: Option<ByteRange>,
        /// That it changes meanwhile is no fault.
        live: bool,
    },
    /// Takes the content.
    Write {
        path: GuestPath,
        /// Of a new file; none: 0644, or what the one had that is replaced.
        mode: Option<u32>,
        /// Makes the directories that are missing.
        parents: bool,
    },
    Remove {
        path: GuestPath,
        recursive: bool,
    },
    Rename {
        path: GuestPath,
        to: GuestPath,
        replace: bool,
    },
    MakeDirectory {
        path: GuestPath,
        mode: Option<u32>,
        /// Makes those above it too, and it is no fault if it is there.
        parents: bool,
    },
    /// Sends all that is in a directory, as a tar archive.
    Pack {
        path: GuestPath,
        /// That files change meanwhile is no fault.
        live: bool,
    },
    /// Sends what changes in a directory, or anywhere below it, until it is cancelled or the directory is gone: lines of JSON, each a [`FileChange`]. One
    /// piece is sent, and the next one when the credit has risen. Only to an agent that said `watches`.
    Watch {
        path: GuestPath,
        recursive: bool,
    },
    /// Takes an archive and puts what is in it into a directory.
    Unpack {
        path: GuestPath,
        parents: bool,
    },
}

impl FileAsk {
    #[must_use]
    pub fn path(&self) -> &GuestPath {
        match self {
            Self::Stat { path, .. }
            | Self::List { path, .. }
            | Self::Read { path, .. }
            | Self::Write { path, .. }
            | Self::Remove { path, .. }
            | Self::Rename { path, .. }
            | Self::MakeDirectory { path, .. }
            | Self::Pack { path, .. }
            | Self::Watch { path, .. }
            | Self::Unpack { path, .. } => path,
        }
    }

    /// Whether it changes anything.
    #[must_use]
    pub fn changes(&self) -> bool {
        !matches!(self, Self::Stat { .. } | Self::List { .. } | Self::Read { .. } | Self::Pack { .. } | Self::Watch { .. })
    }
}

/// Something that changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileChange {
    pub kind: ChangeKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<Raw>,
    #[serde(default)]
    pub directory: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    /// From here on nothing is missed.
    Watching,
    Created,
    /// Its content.
    Changed,
    /// Whoever wrote to it is done.
    Written,
    Attributes,
    Removed,
    /// There were more changes than were taken: look again.
    Dropped,
    /// There are more directories than can be watched; this one and those that were found after it are not.
    Incomplete,
    #[serde(other)]
    Other,
}

/// A part of a file, as HTTP counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ByteRange {
    /// From the first of these bytes to the last of them, or to the end.
    From(u64, Option<u64>),
    /// The last so many.
    Last(u64),
}

impl ByteRange {
    /// Where it begins in a file of this size, and how long it is; none: nowhere.
    #[must_use]
    pub fn within(self, size: u64) -> Option<(u64, u64)> {
        match self {
            Self::From(first, _) if first >= size => None,
            Self::From(first, Some(last)) if last < first => None,
            Self::From(first, last) => {
                let end = last.map_or(size, |last| last.saturating_add(1).min(size));
                Some((first, end - first))
            }
            Self::Last(0) => None,
            Self::Last(count) => Some((size.saturating_sub(count), count.min(size))).filter(|_| size > 0),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    File,
    Directory,
    Symlink,
    /// A FIFO, a socket, a device.
    #[serde(other)]
    Other,
}

/// What is known of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileAbout {
    /// In a list: its name in the directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Raw>,
    pub kind: FileKind,
    pub size: u64,
    /// The twelve bits of it.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// When it was last changed: seconds since 1970, and nanoseconds counted forwards.
    pub modified: (i64, u32),
    /// Of a link: where it leads to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<Raw>,
}

/// A part of a directory, by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileList {
    pub items: Vec<FileAbout>,
    /// There are names behind the last of these.
    pub more: bool,
}

/// Why something was not done with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileFault {
    NotFound,
    IsADirectory,
    NotADirectory,
    /// Neither a file nor a directory, or a file that the kernel makes up.
    NotAFile,
    /// Links that lead to each other.
    Loop,
    Denied,
    NoRoom,
    Exists,
    NotEmpty,
    TooLong,
    /// It was changed while it was read.
    Changed,
    /// No byte of the range is in it.
    Range,
    /// The archive is not one that can be unpacked.
    Refused,
    /// Too much is being done already.
    Busy,
    #[serde(other)]
    Failed,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_to_the_file() {
        for (range, size, is) in [
            (ByteRange::From(0, None), 10, Some((0, 10))),
            (ByteRange::From(3, Some(5)), 10, Some((3, 3))),
            (ByteRange::From(3, Some(u64::MAX)), 10, Some((3, 7))),
            (ByteRange::From(10, None), 10, None),
            (ByteRange::From(5, Some(4)), 10, None),
            (ByteRange::From(0, None), 0, None),
            (ByteRange::Last(3), 10, Some((7, 3))),
            (ByteRange::Last(30), 10, Some((0, 10))),
            (ByteRange::Last(0), 10, None),
            (ByteRange::Last(3), 0, None),
        ] {
            assert_eq!(range.within(size), is, "{range:?} of {size}");
        }
    }

    #[test]
    fn what_later_agents_say_is_understood() {
        assert_eq!(serde_json::from_str::<FileFault>("\"something_new\"").unwrap(), FileFault::Failed);
        assert_eq!(serde_json::from_str::<FileKind>("\"something_new\"").unwrap(), FileKind::Other);
    }
}

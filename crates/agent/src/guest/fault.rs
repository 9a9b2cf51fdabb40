//! What goes wrong, in the words of who asked.

use std::{fmt::Display, io};

use nix::errno::Errno;
use sandboxer_protocol::agent::FileFault;

/// Why something was not done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub kind: FileFault,
    pub message: String,
    /// How large the file is, where that is why.
    pub size: Option<u64>,
}

impl Fault {
    pub(super) fn new(kind: FileFault, path: &impl Display, why: &str) -> Self {
        Self { kind, message: format!("{path}: {why}"), size: None }
    }

    pub(super) fn of_io(path: &str, error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(number) => at(&path)(Errno::from_raw(number)),
            // So says who finds less than there was.
            None if error.kind() == io::ErrorKind::UnexpectedEof => Self::new(FileFault::Changed, &path, &error.to_string()),
            None => Self::new(FileFault::Failed, &path, &error.to_string()),
        }
    }
}

/// An error of the kernel about a path.
pub(super) fn at(path: &impl Display) -> impl Fn(Errno) -> Fault {
    move |error| {
        let kind = match error {
            Errno::ENOENT => FileFault::NotFound,
            Errno::EISDIR => FileFault::IsADirectory,
            Errno::ENOTDIR => FileFault::NotADirectory,
            Errno::ELOOP => FileFault::Loop,
            Errno::EACCES | Errno::EPERM | Errno::EROFS => FileFault::Denied,
            Errno::ENOSPC | Errno::EDQUOT => FileFault::NoRoom,
            Errno::EEXIST => FileFault::Exists,
            Errno::ENOTEMPTY => FileFault::NotEmpty,
            Errno::ENAMETOOLONG => FileFault::TooLong,
            _ => FileFault::Failed,
        };
        Fault::new(kind, path, error.desc())
    }
}

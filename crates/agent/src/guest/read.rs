//! Reading a file.

use std::{
    fs::File,
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::fs::FileExt as _,
    },
};

use nix::{
    fcntl::{OFlag, openat},
    sys::{
        stat::{FileStat, Mode, fstat},
        statfs::{CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC, FsType, PROC_SUPER_MAGIC, SYSFS_MAGIC, fstatfs},
    },
};
use sandboxer_protocol::agent::{ByteRange, FileAbout, FileFault, FileKind, GuestPath};

use super::{
    about::{about, kind_of},
    fault::{Fault, at},
    place::{Last, find},
};

/// Files that the kernel makes up while they are read. What they say is of the process that reads.
const MADE_UP: [FsType; 4] = [PROC_SUPER_MAGIC, SYSFS_MAGIC, CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC];

/// A file that is being read.
pub struct Reading {
    file: File,
    path: String,
    position: u64,
    end: u64,
    /// As it was when it was opened; none: it may change.
    before: Option<FileStat>,
}

impl Reading {
    pub(super) fn new(
        root: BorrowedFd<'_>,
        path: &GuestPath,
        range: Option<ByteRange>,
        live: bool,
    ) -> Result<(Self, FileAbout, u64, u64), Fault> {
        let place = find(root, path, Last::Follow, false)?;
        let Some(name) = &place.name else { return Err(at(path)(nix::Error::EISDIR)) };
        check(&place.stat().map_err(at(path))?, path)?;
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let file = File::from(openat(&place.dir, name.as_os_str(), flags, Mode::empty()).map_err(at(path))?);
        let found = fstat(&file).map_err(at(path))?;
        check(&found, path)?;
        if is_made_up(file.as_fd()) {
            return Err(Fault::new(FileFault::NotAFile, path, "the kernel makes it up; read it with a program in the sandbox"));
        }
        let about = about(&found, None);
        let (start, length) = match range {
            None => (0, about.size),
            Some(range) => range.within(about.size).ok_or_else(|| Fault {
                size: Some(about.size),
                ..Fault::new(FileFault::Range, path, &format!("none of these bytes is in it; it has {}", about.size))
            })?,
        };
        let before = (!live).then_some(found);
        Ok((Self { file, path: path.to_string(), position: start, end: start + length, before }, about, start, length))
    }

    /// The last bytes are given out only when the file is seen to be what it was: who has all of them has a file that was really there.
    pub(super) fn fill(&mut self, out: &mut Vec<u8>, wanted: usize) -> Result<bool, Fault> {
        let length = usize::try_from(self.end - self.position).unwrap_or(usize::MAX).min(wanted);
        let start = out.len();
        out.resize(start + length, 0);
        self.file.read_exact_at(&mut out[start..], self.position).map_err(|error| {
            if error.kind() == std::io::ErrorKind::UnexpectedEof { self.changed() } else { Fault::of_io(&self.path, &error) }
        })?;
        self.position += length as u64;
        if self.position < self.end {
            return Ok(true);
        }
        if let Some(before) = &self.before {
            let now = fstat(&self.file).map_err(at(&self.path))?;
            let seen = |of: &FileStat| (of.st_size, of.st_mtime, of.st_mtime_nsec);
            if seen(before) != seen(&now) {
                return Err(self.changed());
            }
        }
        Ok(false)
    }

    fn changed(&self) -> Fault {
        Fault::new(FileFault::Changed, &self.path, "it was changed while it was read")
    }
}

/// Only a file is read, or replaced: opening anything else may wait, or do something.
pub(super) fn check(found: &FileStat, path: &GuestPath) -> Result<(), Fault> {
    match kind_of(found) {
        FileKind::File => Ok(()),
        FileKind::Directory => Err(at(path)(nix::Error::EISDIR)),
        FileKind::Symlink | FileKind::Other => Err(Fault::new(FileFault::NotAFile, path, "it is neither a file nor a directory")),
    }
}

pub(super) fn is_made_up(file: BorrowedFd<'_>) -> bool {
    fstatfs(file).is_ok_and(|found| MADE_UP.contains(&found.filesystem_type()))
}

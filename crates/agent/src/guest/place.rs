//! Where a path leads to: from the guest's root down, one component at a time. Links are followed here and not by the kernel, so `..` and absolute targets
//! end at the guest's root.

use std::{
    collections::VecDeque,
    ffi::{OsStr, OsString},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::ffi::{OsStrExt as _, OsStringExt as _},
    },
};

use nix::{
    errno::Errno,
    fcntl::{AtFlags, OFlag, openat, readlinkat},
    sys::stat::{FileStat, Mode, fstat, fstatat, mkdirat},
};
use sandboxer_protocol::agent::{FileAbout, FileFault, FileKind, GuestPath};

use super::{
    about::{about, kind_of},
    fault::{Fault, at},
};

pub(super) const DIRECTORY: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);
/// As many as the kernel follows.
const MAX_LINKS: usize = 40;
/// Each is an open directory.
const MAX_DEPTH: usize = 1024;

/// What becomes of a link at the very end of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Last {
    Follow,
    Keep,
}

/// A name in a directory, whether or not there is anything of that name; without a name, the directory itself.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) dir: OwnedFd,
    pub(super) name: Option<OsString>,
}

impl Place {
    pub(super) fn stat(&self) -> Result<FileStat, Errno> {
        match &self.name {
            Some(name) => fstatat(&self.dir, name.as_os_str(), AtFlags::AT_SYMLINK_NOFOLLOW),
            None => fstat(&self.dir),
        }
    }

    pub(super) fn about(&self) -> Result<FileAbout, Errno> {
        let found = self.stat()?;
        let target = match &self.name {
            Some(name) if kind_of(&found) == FileKind::Symlink => readlinkat(&self.dir, name.as_os_str()).ok().map(OsString::into_vec),
            _ => None,
        };
        Ok(about(&found, target))
    }
}

/// Finds the place of a path. `make`: directories that are missing on the way are made.
pub(super) fn find(root: BorrowedFd<'_>, path: &GuestPath, last: Last, make: bool) -> Result<Place, Fault> {
    let fault = at(path);
    let mut left: VecDeque<Vec<u8>> = components(path.as_bytes()).collect();
    let mut above: Vec<OwnedFd> = Vec::new();
    let mut links = 0;
    while let Some(component) = left.pop_front() {
        if component == b".." {
            above.pop();
            continue;
        }
        let here = above.last().map_or(root, OwnedFd::as_fd);
        let name = OsStr::from_bytes(&component);
        let end = left.is_empty();
        let place = || -> Result<Place, Errno> {
            let dir = here.try_clone_to_owned().map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EMFILE)))?;
            Ok(Place { dir, name: Some(name.to_owned()) })
        };
        if end && last == Last::Keep {
            return place().map_err(&fault);
        }
        match fstatat(here, name, AtFlags::AT_SYMLINK_NOFOLLOW).map(|found| kind_of(&found)) {
            Ok(FileKind::Symlink) => {
                links += 1;
                if links > MAX_LINKS {
                    return Err(fault(Errno::ELOOP));
                }
                let target = readlinkat(here, name).map_err(&fault)?.into_vec();
                if target.starts_with(b"/") {
                    above.clear();
                }
                for (index, component) in components(&target).enumerate() {
                    left.insert(index, component);
                }
                continue;
            }
            Ok(_) if end => return place().map_err(&fault),
            Ok(FileKind::Directory) => {}
            Ok(_) => return Err(fault(Errno::ENOTDIR)),
            Err(Errno::ENOENT) if end => return place().map_err(&fault),
            Err(Errno::ENOENT) if make => match mkdirat(here, name, Mode::from_bits_truncate(super::NEW_DIRECTORY)) {
                Ok(()) | Err(Errno::EEXIST) => {}
                Err(error) => return Err(fault(error)),
            },
            Err(error) => return Err(fault(error)),
        }
        if above.len() >= MAX_DEPTH {
            return Err(Fault::new(FileFault::TooLong, path, "it is too deep"));
        }
        let dir = open_directory(here, name).map_err(&fault)?;
        above.push(dir);
    }
    let dir = match above.pop() {
        Some(dir) => dir,
        None => root.try_clone_to_owned().map_err(|error| Fault::of_io(&path.to_string(), &error))?,
    };
    Ok(Place { dir, name: None })
}

/// The directory at a path, opened. `make`: made if it is missing.
pub(super) fn directory(root: BorrowedFd<'_>, path: &GuestPath, make: bool) -> Result<OwnedFd, Fault> {
    let place = find(root, path, Last::Follow, make)?;
    // Opened anew, or whoever reads it would go on where the last one ended.
    let Some(name) = &place.name else { return openat(&place.dir, c".", DIRECTORY, Mode::empty()).map_err(at(path)) };
    let open = || open_directory(place.dir.as_fd(), name.as_os_str());
    match open() {
        Err(Errno::ENOENT) if make => {
            mkdirat(&place.dir, name.as_os_str(), Mode::from_bits_truncate(super::NEW_DIRECTORY)).map_err(at(path))?;
            open().map_err(at(path))
        }
        opened => opened.map_err(at(path)),
    }
}

/// Opens a directory that is not a symbolic link.
///
/// gVisor ignores `O_NOFOLLOW` where `O_DIRECTORY` is given too, and resolves the link from the
/// agent's own root. Every directory of the guest is therefore opened here, and the result counts
/// only if it has the identity of the name that stood in `parent` before.
///
/// # Errors
/// The name does not exist, is a link or no directory, or changed meanwhile.
pub fn open_directory(parent: BorrowedFd<'_>, name: &OsStr) -> Result<OwnedFd, Errno> {
    let there = fstatat(parent, name, AtFlags::AT_SYMLINK_NOFOLLOW)?;
    match kind_of(&there) {
        FileKind::Directory => {}
        FileKind::Symlink => return Err(Errno::ELOOP),
        FileKind::File | FileKind::Other => return Err(Errno::ENOTDIR),
    }
    let dir = openat(parent, name, DIRECTORY, Mode::empty())?;
    let opened = fstat(&dir)?;
    if (opened.st_dev, opened.st_ino) == (there.st_dev, there.st_ino) { Ok(dir) } else { Err(Errno::ELOOP) }
}

fn components(path: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    path.split(|byte| *byte == b'/').filter(|component| !matches!(*component, b"" | b".")).map(<[u8]>::to_vec)
}

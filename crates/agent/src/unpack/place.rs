//! Finding the place of an entry: from the root of the layer down, one component at a time, no link followed.

use std::{
    ffi::{OsStr, OsString},
    io,
    os::fd::{AsFd, BorrowedFd},
    path::{Component, Path},
};

use nix::{
    errno::Errno,
    fcntl::{AtFlags, OFlag},
    sys::stat::{Mode, SFlag, fchmod, fstat, fstatat, mkdirat},
    unistd::fchown,
};
use sandboxer_layer::EntryPath;

use super::{Directory, Failure, at, at_errno};
use crate::guest::open_directory;

const OPEN: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

/// What is at a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    Nothing,
    Directory,
    Whiteout,
    Other,
}

pub(super) struct Place {
    root: Directory,
    lower: Option<Directory>,
    /// The directories from the root down to where the last entry was: archives are in order, so the next one is mostly near.
    open: Vec<(OsString, Directory)>,
}

impl Place {
    pub(super) fn new(upper: &Path, lower: Option<&Path>) -> io::Result<Self> {
        let open = |path: &Path| nix::fcntl::open(path, OPEN, Mode::empty());
        Ok(Self { root: open(upper)?, lower: lower.map(open).transpose()?, open: Vec::new() })
    }

    /// Below an open directory.
    pub(super) fn of(root: Directory) -> Self {
        Self { root, lower: None, open: Vec::new() }
    }

    /// The directory that an entry is in. Made if it is not there.
    pub(super) fn parent(&mut self, path: &EntryPath) -> Result<BorrowedFd<'_>, Failure> {
        self.walk(path.as_path().parent().unwrap_or_else(|| Path::new("")), path)
    }

    /// The directory at this path itself. Made if it is not there.
    pub(super) fn directory(&mut self, path: &EntryPath) -> Result<BorrowedFd<'_>, Failure> {
        self.walk(path.as_path(), path)
    }

    pub(super) fn look(&mut self, path: &EntryPath) -> Result<Found, Failure> {
        let Some((_, name)) = path.split() else { return Ok(Found::Directory) };
        let name = name.to_owned();
        match fstatat(self.parent(path)?, &*name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(about) => Ok(match SFlag::from_bits_truncate(about.st_mode & SFlag::S_IFMT.bits()) {
                SFlag::S_IFDIR => Found::Directory,
                SFlag::S_IFCHR if about.st_rdev == 0 => Found::Whiteout,
                _ => Found::Other,
            }),
            Err(Errno::ENOENT) => Ok(Found::Nothing),
            Err(error) => Err(at_errno(path)(error)),
        }
    }

    fn walk(&mut self, dir: &Path, path: &EntryPath) -> Result<BorrowedFd<'_>, Failure> {
        let names: Vec<&OsStr> = dir
            .components()
            .filter_map(|component| match component {
                Component::Normal(name) => Some(name),
                _ => None,
            })
            .collect();
        let known = self.open.iter().zip(&names).take_while(|((open, _), name)| open == *name).count();
        self.open.truncate(known);
        for (depth, name) in names.iter().enumerate().skip(known) {
            let parent = self.open.last().map_or(&self.root, |(_, dir)| dir);
            let dir = match open_directory(parent.as_fd(), name) {
                Ok(dir) => dir,
                Err(Errno::ENOENT) => self.imply(parent, &names[..=depth], path)?,
                Err(Errno::ELOOP | Errno::ENOTDIR) => {
                    return Err(Failure::Refused(format!("{path}: it leads through something that is not a directory")));
                }
                Err(error) => return Err(at_errno(path)(error)),
            };
            self.open.push(((*name).to_owned(), dir));
        }
        Ok(self.open.last().map_or(&self.root, |(_, dir)| dir).as_fd())
    }

    /// Makes a directory that the archive does not speak of, as the one is that it will lie on.
    fn imply(&self, parent: &Directory, names: &[&OsStr], path: &EntryPath) -> Result<Directory, Failure> {
        let Some(name) = names.last() else { return Err(at(path)(io::ErrorKind::NotFound.into())) };
        let below = self.below(names, path)?;
        mkdirat(parent, *name, Mode::from_bits_truncate(0o755)).map_err(at_errno(path))?;
        // The guest may have put a link in the place of the new directory, and gVisor would follow it
        // in spite of `O_NOFOLLOW`.
        let dir = open_directory(parent.as_fd(), name).map_err(at_errno(path))?;
        if let Some(below) = below {
            let about = fstat(&below).map_err(at_errno(path))?;
            fchown(&dir, Some(about.st_uid.into()), Some(about.st_gid.into())).map_err(at_errno(path))?;
            fchmod(&dir, Mode::from_bits_truncate(about.st_mode & 0o7777)).map_err(at_errno(path))?;
        }
        Ok(dir)
    }

    /// The directory of this path below the layer, if there is one.
    fn below(&self, names: &[&OsStr], path: &EntryPath) -> Result<Option<Directory>, Failure> {
        let Some(lower) = &self.lower else { return Ok(None) };
        let mut found: Option<Directory> = None;
        for name in names {
            match open_directory(found.as_ref().unwrap_or(lower).as_fd(), name) {
                Ok(dir) => found = Some(dir),
                Err(Errno::ENOENT) => return Ok(None),
                // A directory in its place would hide where it leads to.
                Err(Errno::ELOOP | Errno::ENOTDIR) => {
                    let name = name.to_string_lossy();
                    return Err(Failure::Refused(format!(
                        "{path}: {name} is no directory in the image; the archive is made for another one"
                    )));
                }
                Err(error) => return Err(at_errno(path)(error)),
            }
        }
        Ok(found)
    }
}

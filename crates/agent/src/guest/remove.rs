//! Removing something, with all that is in it if that is wanted. No link is followed.

use std::{
    ffi::{CString, OsStr, OsString},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::ffi::{OsStrExt as _, OsStringExt as _},
    },
};

use nix::{
    dir::{Dir, OwningIter},
    errno::Errno,
    fcntl::openat,
    sys::stat::Mode,
    unistd::{UnlinkatFlags, unlinkat},
};
use sandboxer_protocol::agent::{FileFault, GuestPath};

use super::{
    fault::{Fault, at},
    place::{DIRECTORY, Place, open_directory},
};

/// What is removed in one go.
const NAMES_AT_ONCE: usize = 512;
/// Each is an open directory.
const MAX_DEPTH: usize = 1024;

/// A tree that is being removed.
pub struct Removing {
    path: String,
    levels: Vec<Level>,
}

/// A directory that is being emptied.
struct Level {
    /// Where it is in.
    parent: OwnedFd,
    name: CString,
    dir: OwnedFd,
    names: OwningIter,
}

impl Removing {
    /// None: it is removed already.
    pub(super) fn new(place: &Place, path: &GuestPath, recursive: bool) -> Result<Option<Self>, Fault> {
        let fault = at(path);
        let Some(name) = &place.name else {
            return Err(Fault::new(FileFault::Denied, path, "the root itself can't be removed, nor what ends in .."));
        };
        let name = CString::new(OsString::into_vec(name.clone())).map_err(|_| fault(Errno::EINVAL))?;
        match unlinkat(&place.dir, &*name, UnlinkatFlags::NoRemoveDir) {
            Ok(()) => return Ok(None),
            Err(Errno::EISDIR | Errno::EPERM) => {}
            Err(error) => return Err(fault(error)),
        }
        match unlinkat(&place.dir, &*name, UnlinkatFlags::RemoveDir) {
            Ok(()) => Ok(None),
            Err(Errno::ENOTEMPTY | Errno::EEXIST) if recursive => {
                let parent = place.dir.try_clone().map_err(|error| Fault::of_io(&path.to_string(), &error))?;
                let mut removing = Self { path: path.to_string(), levels: Vec::new() };
                removing.enter(parent, name)?;
                Ok(Some(removing))
            }
            Err(Errno::EEXIST) => Err(fault(Errno::ENOTEMPTY)),
            Err(error) => Err(fault(error)),
        }
    }

    fn enter(&mut self, parent: OwnedFd, name: CString) -> Result<(), Fault> {
        if self.levels.len() >= MAX_DEPTH {
            return Err(Fault::new(FileFault::TooLong, &self.path, "it is too deep to be removed from outside"));
        }
        let dir = open_directory(parent.as_fd(), OsStr::from_bytes(name.to_bytes())).map_err(at(&self.path))?;
        let names = names(&dir).map_err(at(&self.path))?;
        self.levels.push(Level { parent, name, dir, names });
        Ok(())
    }

    /// Goes on for a while. Returns whether it is done.
    pub(super) fn go_on(&mut self) -> Result<bool, Fault> {
        let path = self.path.clone();
        let fault = at(&path);
        for _ in 0..NAMES_AT_ONCE {
            let Some(level) = self.levels.last_mut() else { return Ok(true) };
            let Some(entry) = level.names.next() else {
                match unlinkat(&level.parent, &*level.name, UnlinkatFlags::RemoveDir) {
                    // Not all was seen, or somebody has put something into it since: that is removed too.
                    Err(Errno::ENOTEMPTY | Errno::EEXIST) => level.names = names(&level.dir).map_err(&fault)?,
                    Ok(()) | Err(Errno::ENOENT) => drop(self.levels.pop()),
                    Err(error) => return Err(fault(error)),
                }
                continue;
            };
            let name = entry.map_err(&fault)?.file_name().to_owned();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            match unlinkat(&level.dir, &*name, UnlinkatFlags::NoRemoveDir) {
                Ok(()) | Err(Errno::ENOENT) => {}
                Err(Errno::EISDIR | Errno::EPERM) => match unlinkat(&level.dir, &*name, UnlinkatFlags::RemoveDir) {
                    Ok(()) | Err(Errno::ENOENT) => {}
                    Err(Errno::ENOTEMPTY | Errno::EEXIST) => {
                        let parent = level.dir.try_clone().map_err(|error| Fault::of_io(&path, &error))?;
                        self.enter(parent, name)?;
                    }
                    Err(error) => return Err(fault(error)),
                },
                Err(error) => return Err(fault(error)),
            }
        }
        Ok(false)
    }
}

fn names(dir: &OwnedFd) -> Result<OwningIter, Errno> {
    // Opened anew: a directory that was read before goes on where that ended.
    let again = openat(dir, c".", DIRECTORY, Mode::empty())?;
    Ok(Dir::from_fd(again)?.into_iter())
}

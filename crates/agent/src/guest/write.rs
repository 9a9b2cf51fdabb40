//! Writing a file: beside the one that it replaces, under a name of its own, until it is whole.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::fs::FileExt as _,
    },
    time::{SystemTime, UNIX_EPOCH},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, openat, renameat},
    sys::stat::{Mode, fchmod, fstat},
    unistd::{UnlinkatFlags, fchown, unlinkat},
};
use sandboxer_protocol::agent::{FileAbout, FileFault, GuestPath};

use super::{
    about::about,
    fault::{Fault, at},
    place::{Last, find},
    read::{check, is_made_up},
};
use crate::unpack::runs;

const NEW_FILE: u32 = 0o644;
/// Names that are tried. The guest may have made some.
const ATTEMPTS: u32 = 100;

/// A file that is being written. Dropped before it is finished, nothing is left of it.
pub struct Writing {
    file: File,
    path: String,
    dir: OwnedFd,
    name: OsString,
    temporary: Option<OsString>,
    mode: u32,
    owner: Option<(u32, u32)>,
    length: u64,
    /// How much of it is really there; the rest is a hole.
    written: u64,
}

impl Writing {
    pub(super) fn new(root: BorrowedFd<'_>, path: &GuestPath, mode: Option<u32>, parents: bool) -> Result<Self, Fault> {
        let place = find(root, path, Last::Follow, parents)?;
        let (mut new_mode, mut owner) = (NEW_FILE, None);
        match place.stat() {
            Ok(found) => {
                check(&found, path)?;
                new_mode = found.st_mode & 0o777;
                owner = Some((found.st_uid, found.st_gid)).filter(|owner| *owner != (0, 0));
            }
            Err(Errno::ENOENT) => {}
            Err(error) => return Err(at(path)(error)),
        }
        let Some(name) = place.name else { return Err(at(path)(Errno::EISDIR)) };
        if is_made_up(place.dir.as_fd()) {
            return Err(Fault::new(FileFault::NotAFile, path, "the kernel makes up what is there"));
        }
        if name.len() > 255 {
            return Err(at(path)(Errno::ENAMETOOLONG));
        }
        let (file, temporary) = create_beside(place.dir.as_fd()).map_err(at(path))?;
        let mode = mode.unwrap_or(new_mode) & 0o7777;
        Ok(Self { file, path: path.to_string(), dir: place.dir, name, temporary: Some(temporary), mode, owner, length: 0, written: 0 })
    }

    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        for run in runs(bytes) {
            let (start, end) = (self.length + run.start as u64, self.length + run.end as u64);
            self.file.write_all_at(&bytes[run], start).map_err(|error| Fault::of_io(&self.path, &error))?;
            self.written = end;
        }
        self.length += bytes.len() as u64;
        Ok(())
    }

    pub(super) fn finish(mut self) -> Result<FileAbout, Fault> {
        let fault = at(&self.path);
        if self.written < self.length {
            self.file.set_len(self.length).map_err(|error| Fault::of_io(&self.path, &error))?;
        }
        if let Some((uid, gid)) = self.owner {
            fchown(&self.file, Some(uid.into()), Some(gid.into())).map_err(&fault)?;
        }
        fchmod(&self.file, Mode::from_bits_truncate(self.mode)).map_err(&fault)?;
        if let Some(temporary) = &self.temporary {
            renameat(&self.dir, temporary.as_os_str(), &self.dir, self.name.as_os_str()).map_err(&fault)?;
        }
        self.temporary = None;
        Ok(about(&fstat(&self.file).map_err(fault)?, None))
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            let _ = unlinkat(&self.dir, temporary.as_os_str(), UnlinkatFlags::NoRemoveDir);
        }
    }
}

/// A new file of a name that nobody else has.
pub(crate) fn create_beside(dir: BorrowedFd<'_>) -> Result<(File, OsString), Errno> {
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    for attempt in 0..ATTEMPTS {
        let name = OsString::from(format!(".sandboxer-{now:x}-{attempt}"));
        match openat(dir, OsStr::new(&name), flags, Mode::S_IRUSR | Mode::S_IWUSR) {
            Ok(file) => return Ok((file.into(), name)),
            Err(Errno::EEXIST) => {}
            Err(error) => return Err(error),
        }
    }
    Err(Errno::EEXIST)
}

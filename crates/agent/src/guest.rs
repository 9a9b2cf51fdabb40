//! Single files and directories of the guest, done by the agent on its behalf.
//!
//! Everything begins at the guest's root and goes down by open directories ([`place`]), so nothing outside of it is reached, whatever links say and
//! whoever changes them meanwhile. Nothing here waits: only files and directories are opened, and what is long is done piece by piece.

mod about;
mod fault;
mod list;
mod place;
mod read;
mod remove;
mod watch;
mod write;

use std::{
    os::fd::{AsFd as _, BorrowedFd},
    path::Path,
};

use nix::{
    fcntl::{RenameFlags, renameat, renameat2},
    sys::stat::{FileStat, Mode, fchmod, mkdirat},
};
use sandboxer_layer::Limits;
use sandboxer_protocol::{
    agent::{FileAbout, FileAsk, FileFault, GuestPath},
    limits::MAX_FILE_LIST,
};

pub use self::place::open_directory;
pub(crate) use self::write::create_beside;
use self::{
    about::{about, kind_of},
    fault::at,
    list::Listing,
    place::{Last, Place, find},
    read::Reading,
    remove::Removing,
    write::Writing,
};
pub use self::{fault::Fault, watch::Watching};
use crate::{
    pack::Packer,
    unpack::{Failure, Unpacker},
};

const NEW_DIRECTORY: u32 = 0o755;
/// What an archive is gone on with at once: entries, or parts of files that are looked through for holes.
const STEPS: usize = 64;

/// What became of an ask.
#[expect(clippy::large_enum_variant, reason = "taken apart at once, never kept")]
pub enum Begun {
    Done(Option<FileAbout>),
    /// There is more to be done.
    Going {
        work: Work,
        about: Option<FileAbout>,
        start: u64,
        length: Option<u64>,
    },
}

/// What is done piece by piece.
pub enum Work {
    Send(Source),
    Take(Target),
    Remove(Removing),
    Watch(Box<Watching>),
}

/// Where bytes come from.
pub enum Source {
    File(Reading),
    List(Listing),
    Archive { path: String, packer: Box<Packer> },
}

/// Where bytes go to.
pub enum Target {
    File(Box<Writing>),
    Archive { path: String, unpacker: Box<Unpacker> },
}

/// What a path leads to in this root, by whatever links.
#[must_use]
pub fn stat(root: BorrowedFd<'_>, path: &GuestPath) -> Option<FileStat> {
    find(root, path, Last::Follow, false).ok()?.stat().ok()
}

/// Begins what is asked for, in this root.
///
/// # Errors
/// It can't be done.
pub fn begin(root: BorrowedFd<'_>, ask: FileAsk, limits: Limits) -> Result<Begun, Fault> {
    match ask {
        FileAsk::Stat { path, follow } => {
            let place = find(root, &path, if follow { Last::Follow } else { Last::Keep }, false)?;
            Ok(Begun::Done(Some(place.about().map_err(at(&path))?)))
        }
        FileAsk::List { path, after, limit } => {
            let listing = Listing::new(place::directory(root, &path, false)?, &path, after, limit.clamp(1, MAX_FILE_LIST))?;
            Ok(Begun::Going { work: Work::Send(Source::List(listing)), about: None, start: 0, length: None })
        }
        FileAsk::Read { path, range, live } => {
            let (reading, about, start, length) = Reading::new(root, &path, range, live)?;
            Ok(Begun::Going { work: Work::Send(Source::File(reading)), about: Some(about), start, length: Some(length) })
        }
        FileAsk::Write { path, mode, parents } => {
            let writing = Box::new(Writing::new(root, &path, mode, parents)?);
            Ok(Begun::Going { work: Work::Take(Target::File(writing)), about: None, start: 0, length: None })
        }
        FileAsk::Remove { path, recursive } => {
            let place = find(root, &path, Last::Keep, false)?;
            Ok(match Removing::new(&place, &path, recursive)? {
                Some(removing) => Begun::Going { work: Work::Remove(removing), about: None, start: 0, length: None },
                None => Begun::Done(None),
            })
        }
        FileAsk::Rename { path, to, replace } => rename(root, &path, &to, replace).map(|about| Begun::Done(Some(about))),
        FileAsk::MakeDirectory { path, mode, parents } => make_directory(root, &path, mode, parents).map(|about| Begun::Done(Some(about))),
        FileAsk::Watch { path, recursive } => {
            let watching = Box::new(Watching::new(root, place::directory(root, &path, false)?, &path, recursive)?);
            Ok(Begun::Going { work: Work::Watch(watching), about: None, start: 0, length: None })
        }
        FileAsk::Pack { path, live } => {
            let packer = Packer::of(place::directory(root, &path, false)?, live);
            let source = Source::Archive { path: path.to_string(), packer: Box::new(packer) };
            Ok(Begun::Going { work: Work::Send(source), about: None, start: 0, length: None })
        }
        FileAsk::Unpack { path, parents } => {
            let unpacker = Unpacker::into_tree(place::directory(root, &path, parents)?, limits);
            let target = Target::Archive { path: path.to_string(), unpacker: Box::new(unpacker) };
            Ok(Begun::Going { work: Work::Take(target), about: None, start: 0, length: None })
        }
    }
}

impl Source {
    /// Goes on until so many bytes are there, or for a while. Returns whether there will be more than these.
    ///
    /// # Errors
    /// It can't be read to its end.
    pub fn fill(&mut self, out: &mut Vec<u8>, wanted: usize) -> Result<bool, Fault> {
        match self {
            Self::File(reading) => reading.fill(out, wanted),
            Self::List(listing) => listing.fill(out),
            Self::Archive { path, packer } => {
                let failed = |error: std::io::Error| Fault::of_io(path, &error);
                packer.go_on(STEPS, wanted).map_err(failed)?;
                out.append(packer.out());
                Ok(!packer.is_done())
            }
        }
    }
}

impl Target {
    /// Takes the next bytes.
    ///
    /// # Errors
    /// They can't be written.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        match self {
            Self::File(writing) => writing.push(bytes),
            Self::Archive { path, unpacker } => unpacker.push(bytes).map_err(|failure| unpacking(path, failure)),
        }
    }

    /// All bytes are there.
    ///
    /// # Errors
    /// It can't be finished; of a file, the one that was there before is still.
    pub fn finish(self) -> Result<Option<FileAbout>, Fault> {
        match self {
            Self::File(writing) => writing.finish().map(Some),
            Self::Archive { path, unpacker } => match unpacker.finish() {
                Ok(_) => Ok(None),
                Err(failure) => Err(unpacking(&path, failure)),
            },
        }
    }
}

impl Work {
    /// Of what neither sends nor takes: goes on for a while. Returns whether it is done.
    ///
    /// # Errors
    /// It can't go on.
    pub fn go_on(&mut self) -> Result<bool, Fault> {
        match self {
            Self::Remove(removing) => removing.go_on(),
            Self::Send(_) | Self::Take(_) | Self::Watch(_) => Ok(false),
        }
    }
}

fn unpacking(path: &str, failure: Failure) -> Fault {
    match failure {
        Failure::Refused(why) => Fault { kind: FileFault::Refused, message: why, size: None },
        Failure::Io(at, error) => Fault::of_io(&format!("{}{at}", path.trim_end_matches('/')), &error),
    }
}

fn rename(root: BorrowedFd<'_>, path: &GuestPath, to: &GuestPath, replace: bool) -> Result<FileAbout, Fault> {
    let from = find(root, path, Last::Keep, false)?;
    let into = find(root, to, Last::Keep, false)?;
    let (Some(old), Some(new)) = (&from.name, &into.name) else {
        return Err(Fault::new(FileFault::Denied, path, "a directory that it is in itself can't be renamed"));
    };
    // Told by which of the two is missing.
    from.about().map_err(at(path))?;
    if replace {
        renameat(&from.dir, Path::new(old), &into.dir, Path::new(new)).map_err(at(to))?;
    } else {
        let exclusive = renameat2(&from.dir, Path::new(old), &into.dir, Path::new(new), RenameFlags::RENAME_NOREPLACE);
        match exclusive {
            // This file system can't say it in one.
            Err(nix::Error::EINVAL | nix::Error::ENOSYS) => {
                if into.about().is_ok() {
                    return Err(at(to)(nix::Error::EEXIST));
                }
                renameat(&from.dir, Path::new(old), &into.dir, Path::new(new)).map_err(at(to))?;
            }
            other => other.map_err(at(to))?,
        }
    }
    into.about().map_err(at(to))
}

fn make_directory(root: BorrowedFd<'_>, path: &GuestPath, mode: Option<u32>, parents: bool) -> Result<FileAbout, Fault> {
    let place = find(root, path, Last::Follow, parents)?;
    let Some(name) = &place.name else {
        return if parents { place.about().map_err(at(path)) } else { Err(at(path)(nix::Error::EEXIST)) };
    };
    match mkdirat(&place.dir, Path::new(name), Mode::from_bits_truncate(NEW_DIRECTORY)) {
        Ok(()) => {
            let made = open_directory(place.dir.as_fd(), name).map_err(at(path))?;
            fchmod(&made, Mode::from_bits_truncate(mode.unwrap_or(NEW_DIRECTORY) & 0o7777)).map_err(at(path))?;
            Ok(about(&nix::sys::stat::fstat(&made).map_err(at(path))?, None))
        }
        Err(nix::Error::EEXIST) if parents && place.is_directory() => place.about().map_err(at(path)),
        Err(error) => Err(at(path)(error)),
    }
}

impl Place {
    fn is_directory(&self) -> bool {
        self.stat().is_ok_and(|found| kind_of(&found) == sandboxer_protocol::agent::FileKind::Directory)
    }
}

//! A directory by name, so many at a time. However many names there are, only those of one part are held.

use std::{
    collections::BinaryHeap,
    ffi::OsStr,
    os::{
        fd::OwnedFd,
        unix::ffi::{OsStrExt as _, OsStringExt as _},
    },
};

use nix::{
    dir::{Dir, OwningIter},
    fcntl::{AtFlags, readlinkat},
    sys::stat::fstatat,
};
use sandboxer_protocol::agent::{FileFault, FileKind, FileList, GuestPath, Raw};

use super::{
    about::{about, kind_of},
    fault::{Fault, at},
};

/// Names that are looked at in one go.
const NAMES_AT_ONCE: usize = 4096;

/// A directory that is being read.
pub struct Listing {
    dir: OwnedFd,
    path: String,
    names: OwningIter,
    after: Option<Raw>,
    limit: usize,
    /// The first ones so far, the last of them on top.
    first: BinaryHeap<Vec<u8>>,
    more: bool,
}

impl Listing {
    pub(super) fn new(dir: OwnedFd, path: &GuestPath, after: Option<Raw>, limit: u32) -> Result<Self, Fault> {
        let again = dir.try_clone().map_err(|error| Fault::of_io(&path.to_string(), &error))?;
        let names = Dir::from_fd(again).map_err(at(path))?.into_iter();
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        Ok(Self { dir, path: path.to_string(), names, after, limit, first: BinaryHeap::new(), more: false })
    }

    /// Returns whether there is more to do; what is put out comes at the end, in one piece.
    pub(super) fn fill(&mut self, out: &mut Vec<u8>) -> Result<bool, Fault> {
        for _ in 0..NAMES_AT_ONCE {
            let Some(entry) = self.names.next() else {
                self.finish(out)?;
                return Ok(false);
            };
            let entry = entry.map_err(at(&self.path))?;
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") || self.after.as_ref().is_some_and(|after| name <= after.as_bytes()) {
                continue;
            }
            if self.first.len() < self.limit {
                self.first.push(name.to_vec());
                continue;
            }
            self.more = true;
            if self.first.peek().is_some_and(|last| name < last.as_slice()) {
                self.first.pop();
                self.first.push(name.to_vec());
            }
        }
        Ok(true)
    }

    fn finish(&mut self, out: &mut Vec<u8>) -> Result<(), Fault> {
        let mut items = Vec::new();
        for name in std::mem::take(&mut self.first).into_sorted_vec() {
            let file = OsStr::from_bytes(&name);
            let found = match fstatat(&self.dir, file, AtFlags::AT_SYMLINK_NOFOLLOW) {
                Ok(found) => found,
                // Removed since.
                Err(nix::Error::ENOENT) => continue,
                Err(error) => return Err(at(&self.path)(error)),
            };
            let link = kind_of(&found) == FileKind::Symlink;
            let target = link.then(|| readlinkat(&self.dir, file).ok().map(std::ffi::OsString::into_vec)).flatten();
            let mut item = about(&found, target);
            item.name = Some(Raw::new(name));
            items.push(item);
        }
        let list = FileList { items, more: self.more };
        serde_json::to_writer(out, &list).map_err(|error| Fault::new(FileFault::Failed, &self.path, &error.to_string()))
    }
}

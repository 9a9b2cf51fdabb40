//! What changes in a directory, or anywhere below it, as it happens.
//!
//! Every directory needs a watch of its own. A new one is watched first and looked through then, so what is made in it meanwhile is told, perhaps twice.
//! There is a bound on watches and one on what waits to be sent; beyond either something is missing, which is told.

use std::{
    collections::{BTreeMap, VecDeque},
    ffi::OsStr,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
};

use nix::{
    dir::{Dir, OwningIter},
    fcntl::{AtFlags, openat},
    sys::stat::{FileStat, Mode, fstat, fstatat},
};
use sandboxer_protocol::{
    agent::{ChangeKind, FileChange, FileKind, GuestPath, Raw},
    limits::MAX_WATCHED_DIRECTORIES,
};

use super::{
    about::kind_of,
    fault::{Fault, at},
    place::{DIRECTORY, open_directory},
};
use crate::inotify::{Event, Inotify};

/// Beyond this much that waits, changes are dropped.
const MAX_WAITING_BYTES: usize = 256 * 1024;
/// What is done in one go.
const READS_AT_ONCE: usize = 8;
const NAMES_AT_ONCE: usize = 512;
/// Names that uploads have before they are whole.
const OURS: &[u8] = b".sandboxer-";

const MASK: u32 = libc::IN_CREATE
    | libc::IN_DELETE
    | libc::IN_MODIFY
    | libc::IN_CLOSE_WRITE
    | libc::IN_ATTRIB
    | libc::IN_MOVED_FROM
    | libc::IN_MOVED_TO
    | libc::IN_DELETE_SELF
    | libc::IN_MOVE_SELF;

/// A directory that is watched.
pub struct Watching {
    inotify: Inotify,
    dir: OwnedFd,
    path: Vec<u8>,
    recursive: bool,
    /// The directory that it is in: as long as somebody has a directory open, as this has, it does not itself tell of its end. None: of the root.
    parent: Option<i32>,
    /// Directories by their watches, as paths below the one that was asked for; that one is empty.
    watched: BTreeMap<i32, Vec<u8>>,
    /// Directories that are to be watched and looked through, and whether what is in them is news.
    found: VecDeque<(Vec<u8>, bool)>,
    scan: Option<Scan>,
    /// The kernel has said that there is something.
    pub readable: bool,
    announced: bool,
    incomplete: bool,
    dropped: bool,
    last: Option<FileChange>,
}

struct Scan {
    dir: OwnedFd,
    names: OwningIter,
    path: Vec<u8>,
    news: bool,
}

impl Watching {
    pub(super) fn new(guest_root: BorrowedFd<'_>, dir: OwnedFd, path: &GuestPath, recursive: bool) -> Result<Self, Fault> {
        let failed = |error: std::io::Error| Fault::of_io(&path.to_string(), &error);
        let inotify = Inotify::new().map_err(failed)?;
        let root = inotify.add(dir.as_fd(), MASK).map_err(failed)?;
        // A path such as `/a/..` names the guest's root, whose parent belongs to the agent.
        let is_root = same_directory(guest_root, dir.as_fd()).map_err(at(path))?;
        let parent = if is_root { None } else { openat(&dir, c"..", DIRECTORY, Mode::empty()).ok() };
        let parent = parent.map(|parent| inotify.add(parent.as_fd(), libc::IN_DELETE)).transpose().map_err(failed)?;
        let mut watching = Self {
            inotify,
            dir,
            parent,
            path: path.as_bytes().to_vec(),
            recursive,
            watched: BTreeMap::from([(root, Vec::new())]),
            found: VecDeque::new(),
            scan: None,
            readable: true,
            announced: false,
            incomplete: false,
            dropped: false,
            last: None,
        };
        if recursive {
            let again = openat(&watching.dir, c".", DIRECTORY, Mode::empty());
            watching.begin_scan(again.map_err(at(path))?, Vec::new(), false);
        }
        Ok(watching)
    }

    /// What tells that there is something.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }

    /// Whether something can be done now, with something waiting to be sent or nothing.
    #[must_use]
    pub fn has_work(&self, waits: bool) -> bool {
        self.readable || self.scan.is_some() || !self.found.is_empty() || !self.announced || (self.dropped && !waits)
    }

    /// Goes on for a while, and puts out what there is to tell, a line of JSON each. Returns whether it goes on at all: the directory may be gone.
    ///
    /// # Errors
    /// It can no longer be watched.
    pub fn fill(&mut self, out: &mut Vec<u8>) -> Result<bool, Fault> {
        if self.dropped && out.is_empty() {
            self.dropped = false;
            self.tell(out, FileChange { kind: ChangeKind::Dropped, path: None, directory: false });
        }
        self.scan(out);
        if self.scan.is_none() && self.found.is_empty() && !self.announced {
            self.announced = true;
            self.tell(out, FileChange { kind: ChangeKind::Watching, path: None, directory: true });
        }
        for _ in 0..READS_AT_ONCE {
            if !self.readable {
                break;
            }
            let events = self.inotify.read().map_err(|error| Fault::of_io(&String::from_utf8_lossy(&self.path), &error))?;
            self.readable = !events.is_empty();
            for event in events {
                if !self.note(&event, out) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Whether there is still something to watch.
    fn note(&mut self, event: &Event, out: &mut Vec<u8>) -> bool {
        let is = |mask: u32| event.mask & mask != 0;
        if is(libc::IN_Q_OVERFLOW) {
            self.dropped = true;
            return true;
        }
        if self.parent == Some(event.watch) {
            let gone = is(libc::IN_DELETE) && self.is_gone(event.name.as_deref());
            if gone {
                self.tell_of_the_end(out);
            }
            return !gone;
        }
        let Some(within) = self.watched.get(&event.watch).cloned() else { return true };
        if is(libc::IN_IGNORED) {
            self.watched.remove(&event.watch);
            return true;
        }
        if is(libc::IN_DELETE_SELF | libc::IN_MOVE_SELF) {
            // Of the others whoever holds them tells.
            if within.is_empty() {
                self.tell_of_the_end(out);
            }
            return !within.is_empty();
        }
        let Some(name) = &event.name else { return true };
        if name.starts_with(OURS) {
            return true;
        }
        let (below, directory) = (join(&within, name), is(libc::IN_ISDIR));
        let kind = if is(libc::IN_CREATE | libc::IN_MOVED_TO) {
            if directory && self.recursive {
                self.find(below.clone(), true, out);
            }
            ChangeKind::Created
        } else if is(libc::IN_DELETE | libc::IN_MOVED_FROM) {
            if directory {
                self.forget(&below);
            }
            ChangeKind::Removed
        } else if is(libc::IN_MODIFY) {
            ChangeKind::Changed
        } else if is(libc::IN_CLOSE_WRITE) {
            ChangeKind::Written
        } else if is(libc::IN_ATTRIB) {
            ChangeKind::Attributes
        } else {
            return true;
        };
        self.tell_of(out, kind, &below, directory);
        true
    }

    /// Whether the removal of something of this name beside the directory was its own.
    fn is_gone(&self, name: Option<&[u8]>) -> bool {
        let own = self.path.rsplit(|byte| *byte == b'/').find(|part| !part.is_empty());
        fstat(&self.dir).is_ok_and(|found| found.st_nlink == 0) || name == own
    }

    fn tell_of_the_end(&mut self, out: &mut Vec<u8>) {
        self.tell(out, FileChange { kind: ChangeKind::Removed, path: Some(Raw::new(self.path.clone())), directory: true });
    }

    fn tell_of(&mut self, out: &mut Vec<u8>, kind: ChangeKind, below: &[u8], directory: bool) {
        let above = self.path.strip_suffix(b"/").unwrap_or(&self.path);
        let path = Some(Raw::new([above, b"/", below].concat()));
        self.tell(out, FileChange { kind, path, directory });
    }

    fn tell(&mut self, out: &mut Vec<u8>, change: FileChange) {
        // A program that writes and writes says nothing new.
        if !out.is_empty() && self.last.as_ref() == Some(&change) {
            return;
        }
        if out.len() >= MAX_WAITING_BYTES {
            self.dropped = true;
            return;
        }
        if serde_json::to_writer(&mut *out, &change).is_ok() {
            out.push(b'\n');
        }
        self.last = Some(change);
    }

    /// A directory that is to be watched too, if it may.
    fn find(&mut self, below: Vec<u8>, news: bool, out: &mut Vec<u8>) {
        if self.watched.len() + self.found.len() < MAX_WATCHED_DIRECTORIES {
            return self.found.push_back((below, news));
        }
        if !std::mem::replace(&mut self.incomplete, true) {
            self.tell_of(out, ChangeKind::Incomplete, &below, true);
        }
    }

    /// What was below a directory that has gone, or has another name now.
    fn forget(&mut self, below: &[u8]) {
        let inside = |path: &[u8]| path == below || path.strip_prefix(below).is_some_and(|rest| rest.starts_with(b"/"));
        self.found.retain(|(path, _)| !inside(path));
        let inotify = &self.inotify;
        self.watched.retain(|watch, path| {
            let gone = inside(path);
            if gone {
                inotify.remove(*watch);
            }
            !gone
        });
    }

    fn begin_scan(&mut self, dir: OwnedFd, path: Vec<u8>, news: bool) {
        let names = dir.try_clone().ok().and_then(|again| Dir::from_fd(again).ok());
        self.scan = names.map(|names| Scan { dir, names: names.into_iter(), path, news });
    }

    fn scan(&mut self, out: &mut Vec<u8>) {
        for _ in 0..NAMES_AT_ONCE {
            let Some(scan) = &mut self.scan else {
                let Some((path, news)) = self.found.pop_front() else { return };
                // What is not there any more needs no watch.
                if let Ok(dir) = self.open(&path)
                    && let Ok(watch) = self.inotify.add(dir.as_fd(), MASK)
                {
                    self.watched.insert(watch, path.clone());
                    self.begin_scan(dir, path, news);
                }
                continue;
            };
            let Some(Ok(entry)) = scan.names.next() else {
                self.scan = None;
                continue;
            };
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") || name.starts_with(OURS) {
                continue;
            }
            let kind = fstatat(&scan.dir, OsStr::from_bytes(name), AtFlags::AT_SYMLINK_NOFOLLOW).map(|found| kind_of(&found));
            let (below, news, directory) = (join(&scan.path, name), scan.news, kind == Ok(FileKind::Directory));
            if news {
                self.tell_of(out, ChangeKind::Created, &below, directory);
            }
            if directory {
                self.find(below, news, out);
            }
        }
    }

    fn open(&self, below: &[u8]) -> Result<OwnedFd, nix::Error> {
        let mut dir = self.dir.try_clone().map_err(|_| nix::Error::EMFILE)?;
        for part in below.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
            dir = open_directory(dir.as_fd(), OsStr::from_bytes(part))?;
        }
        Ok(dir)
    }
}

fn same_directory(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> Result<bool, nix::Error> {
    let identity = |found: FileStat| (found.st_dev, found.st_ino);
    Ok(identity(fstat(one)?) == identity(fstat(other)?))
}

fn join(above: &[u8], name: &[u8]) -> Vec<u8> {
    if above.is_empty() { name.to_vec() } else { [above, b"/", name].concat() }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn watch(dir: &std::path::Path, recursive: bool) -> Watching {
        let path = GuestPath::try_from(Raw::new("/watched")).unwrap();
        let root = fs::File::open("/").unwrap();
        Watching::new(root.as_fd(), fs::File::open(dir).unwrap().into(), &path, recursive).unwrap()
    }

    #[test]
    fn watched_root_has_no_watched_parent() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::File::open(dir.path()).unwrap();
        let path = GuestPath::try_from(Raw::new("/a/..")).unwrap();
        let again = root.try_clone().unwrap().into();
        let watching = Watching::new(root.as_fd(), again, &path, false).unwrap();
        assert!(watching.parent.is_none());
    }

    /// All that is told until nothing is, as `kind path`.
    fn told(watching: &mut Watching) -> Vec<String> {
        let mut out = Vec::new();
        watching.readable = true;
        while watching.has_work(!out.is_empty()) {
            if !watching.fill(&mut out).unwrap() {
                break;
            }
        }
        let line = |line: &[u8]| {
            let change: FileChange = serde_json::from_slice(line).unwrap();
            format!("{:?} {}", change.kind, change.path.map(|path| path.encoded()).unwrap_or_default())
        };
        out.split(|byte| *byte == b'\n').filter(|part| !part.is_empty()).map(line).collect()
    }

    #[test]
    fn what_happens_below_a_directory_is_told() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("old")).unwrap();
        let mut watching = watch(dir.path(), true);
        assert_eq!(told(&mut watching), ["Watching "]);
        fs::write(dir.path().join("old/a\n"), "1").unwrap();
        assert_eq!(told(&mut watching), ["Created /watched/old/a%0A", "Changed /watched/old/a%0A", "Written /watched/old/a%0A"]);
        fs::create_dir(dir.path().join("new")).unwrap();
        fs::write(dir.path().join("new/b"), "").unwrap();
        let news = told(&mut watching);
        assert!(news.contains(&"Created /watched/new".to_owned()) && news.contains(&"Created /watched/new/b".to_owned()), "{news:?}");
        fs::rename(dir.path().join("new"), dir.path().join("old/moved")).unwrap();
        let news = told(&mut watching);
        assert!(news.contains(&"Removed /watched/new".to_owned()) && news.contains(&"Created /watched/old/moved/b".to_owned()), "{news:?}");
        fs::remove_file(dir.path().join("old/moved/b")).unwrap();
        assert_eq!(told(&mut watching), ["Removed /watched/old/moved/b"]);
        fs::remove_dir_all(dir.path()).unwrap();
        assert_eq!(told(&mut watching).last().unwrap(), "Removed /watched");
    }

    #[test]
    fn more_directories_than_can_be_watched_are_told_of_and_more_changes_than_anybody_takes() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..=MAX_WATCHED_DIRECTORIES {
            fs::create_dir(dir.path().join(number.to_string())).unwrap();
        }
        let mut watching = watch(dir.path(), true);
        let news = told(&mut watching);
        assert_eq!(news.iter().filter(|line| line.starts_with("Incomplete")).count(), 1, "{news:?}");
        let mut watching = watch(dir.path(), false);
        assert_eq!(told(&mut watching), ["Watching "]);
        let mut full = vec![b'\n'; MAX_WAITING_BYTES];
        fs::write(dir.path().join("x"), "").unwrap();
        watching.readable = true;
        assert!(watching.fill(&mut full).unwrap());
        assert_eq!(full.len(), MAX_WAITING_BYTES);
        assert_eq!(told(&mut watching), ["Dropped "]);
    }
}

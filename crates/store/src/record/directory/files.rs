//! The blocking work on the files of one record. Everything here runs off the async threads.

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Read as _, Write as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use nix::sys::statfs;
use sandboxer_protocol::SandboxId;
use uuid::Uuid;

use super::{KEEP, Step, StepHook};
use crate::{
    beneath::{self, Dir},
    failpoint::{FailPoints, Kind, Stage},
    owner::Owner,
    record::{BadRecord, Codec, MAX_RECORD_BYTES, ReadError, Record, Stored, SwapError, Tag},
};

const VERSIONS: &str = ".versions";
const COPY: &str = ".lock";
const UNFINISHED: &str = ".new";
/// A copy that is behind for longer was left so by a writer that died.
const FINISH_AFTER: Duration = Duration::from_secs(5);
/// Clients of a network filesystem may see a directory as it was this long ago: until then its names stay, so that whoever acts on what
/// it saw collides with them.
const STALE_VIEW: Duration = Duration::from_secs(120);
/// A reader that finds the newest version gone this often in a row reads something else than a record.
const MAX_TRIES: usize = 64;

pub(super) struct Files {
    root: PathBuf,
    owner: Owner,
    /// Which directory that was when it was opened; none if that could not be found out.
    inode: Option<u64>,
    codec: Codec,
    points: FailPoints,
    hook: Option<StepHook>,
    stale_views: bool,
}

/// What there is of a record, from one listing.
struct Names {
    /// In ascending order.
    versions: Vec<u64>,
    unfinished: Vec<(u64, PathBuf)>,
}

impl Names {
    fn newest(&self) -> Option<u64> {
        self.versions.last().copied()
    }
}

impl Files {
    /// Makes the directory of records if it is missing.
    pub(super) fn open(root: PathBuf, codec: Codec, points: FailPoints) -> io::Result<Self> {
        let top = beneath::open_root(&root)?;
        let owner = Owner::of(&top.metadata()?);
        make_directory(owner, &top.at(locks_name()))?;
        let stale_views = is_network(top.path());
        let inode = beneath::open_below(&root, &locks_name())?.metadata().ok().map(|meta| meta.ino());
        Ok(Self { root, owner, inode, codec, points, hook: None, stale_views })
    }

    pub(super) fn hooked(&self, hook: StepHook) -> Self {
        Self {
            root: self.root.clone(),
            owner: self.owner,
            inode: self.inode,
            codec: self.codec.clone(),
            points: self.points.clone(),
            hook: Some(hook),
            stale_views: self.stale_views,
        }
    }

    fn locks(&self) -> io::Result<Dir> {
        beneath::open_below(&self.root, &locks_name())
    }

    /// The versions of a record; none if it has none.
    pub(super) fn versions(&self, id: SandboxId) -> io::Result<Option<Dir>> {
        match beneath::open_below(&self.root, &locks_name().join(versions_name(id))) {
            Ok(dir) => Ok(Some(dir)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(super) fn read(&self, id: SandboxId) -> Result<Option<Stored>, ReadError> {
        for _ in 0..MAX_TRIES {
            let Some(dir) = self.versions(id).map_err(unreadable)? else { return self.still_here().map(|()| None) };
            let Some(newest) = names(dir.path()).map_err(unreadable)?.newest() else { return self.still_here().map(|()| None) };
            let Some(file) = open_version(&dir, newest).map_err(unreadable)? else { continue };
            let record = self.decode(id, newest, &file)?;
            self.finish_copy(id, newest, &file, &dir);
            return Ok(Some(Stored { record, tag: Tag::default() }));
        }
        Err(ReadError::Unavailable("its newest version is gone whenever it is opened".to_owned()))
    }

    /// That a record is not there means something only where the records are. A volume that is not mounted, or another in its place, has
    /// none: whoever took that for an answer would end every sandbox.
    fn still_here(&self) -> Result<(), ReadError> {
        let there = self.locks().and_then(|locks| locks.metadata());
        let there = there.map_err(|error| ReadError::Unavailable(format!("the volume is not there: {error}")))?;
        match self.inode {
            Some(inode) if inode != there.ino() => Err(ReadError::Unavailable("another volume is in its place".to_owned())),
            _ => Ok(()),
        }
    }

    pub(super) fn create(&self, id: SandboxId, first: &Record) -> Result<Stored, SwapError> {
        follows(0, first)?;
        let unwritten = |error: io::Error| SwapError::Unavailable(error.to_string());
        let locks = self.locks().map_err(unwritten)?;
        make_directory(self.owner, &locks.at(versions_name(id))).map_err(unwritten)?;
        locks.sync().map_err(unwritten)?;
        let stored = self.link_next(id, None, first)?;
        // The copy's name is what makes the sandbox visible to people: durable from the start.
        locks.sync().map_err(|error| SwapError::Unknown(error.to_string()))?;
        Ok(stored)
    }

    pub(super) fn swap(&self, id: SandboxId, expected: &Stored, next: &Record) -> Result<Stored, SwapError> {
        follows(expected.record.sequence, next)?;
        self.link_next(id, Some(expected), next)
    }

    fn link_next(&self, id: SandboxId, expected: Option<&Stored>, next: &Record) -> Result<Stored, SwapError> {
        let bytes = self.codec.encode(id, next)?;
        let publishes = next.latest.is_some() && next.latest != expected.and_then(|expected| expected.record.latest);
        let kind = if publishes { Kind::Publish } else { Kind::Record };
        self.step(kind, Step::Begun).map_err(|error| SwapError::Unavailable(error.to_string()))?;
        let there = self.read_back(id)?;
        let as_expected = match (&there, expected) {
            (None, None) => true,
            (Some(there), Some(expected)) => there.is(expected),
            _ => false,
        };
        if !as_expected {
            return settle(there, next);
        }
        let refused = |error: io::Error| SwapError::Unavailable(error.to_string());
        // Without a directory there is no version of it any more: the collection was first.
        let Some(open) = self.versions(id).map_err(refused)? else { return settle(self.read_back(id)?, next) };
        let locks = self.locks().map_err(refused)?;
        let dir = open.path();
        let unfinished = dir.join(format!("{}.{}{UNFINISHED}", next.sequence, Uuid::new_v4().simple()));
        let written = self
            .write_somehow(kind, dir, &unfinished, &bytes)
            .and_then(|()| fs::hard_link(&unfinished, dir.join(version_name(next.sequence))));
        if let Err(error) = written {
            let _ = fs::remove_file(&unfinished);
            return match error.kind() {
                // Someone was first, or the collection was: then the version is gone with its directory.
                ErrorKind::AlreadyExists | ErrorKind::NotFound => settle(self.read_back(id)?, next),
                ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::PermissionDenied => {
                    Err(SwapError::Unavailable(error.to_string()))
                }
                _ => Err(SwapError::Unknown(error.to_string())),
            };
        }
        let unknown = |error: io::Error| SwapError::Unknown(error.to_string());
        self.step(kind, Step::Linked).map_err(unknown)?;
        let names = names(dir).map_err(unknown)?;
        if names.newest() > Some(next.sequence) {
            let _ = fs::remove_file(&unfinished);
            return Err(SwapError::Unknown("overtaken by a later version".to_owned()));
        }
        if expected.is_some_and(|expected| !names.versions.contains(&expected.record.sequence)) {
            let _ = fs::remove_file(dir.join(version_name(next.sequence)));
            let _ = fs::remove_file(&unfinished);
            return Err(SwapError::Conflict(None));
        }
        sync_directory(dir).map_err(unknown)?;
        self.step(kind, Step::Settled).map_err(unknown)?;
        // From here on the swap has happened, whatever becomes of the copy and of what is old.
        if fs::rename(&unfinished, locks.at(copy_name(id))).is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        if self.step(kind, Step::Copied).is_ok() {
            self.clean(kind, dir, &names);
        }
        Ok(Stored { record: next.clone(), tag: Tag::default() })
    }

    /// A volume that is full to the last byte must not cost an owner its lease: the oldest version gives its room to the new one.
    fn write_somehow(&self, kind: Kind, dir: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
        match self.write(kind, path, bytes) {
            Err(full) if matches!(full.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
                gone(fs::remove_file(path))?;
                if !self.make_room(dir)? {
                    return Err(full);
                }
                self.write(kind, path, bytes)
            }
            written => written,
        }
    }

    /// Removes the oldest version, if there is another and nobody may act on an old view.
    fn make_room(&self, dir: &Path) -> io::Result<bool> {
        let [oldest, _, ..] = names(dir)?.versions[..] else { return Ok(false) };
        if self.stale_views {
            return Ok(false);
        }
        sync_directory(dir)?;
        gone(fs::remove_file(dir.join(version_name(oldest))))?;
        Ok(true)
    }

    fn write(&self, kind: Kind, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut file = self.owner.create(path)?;
        file.write_all(bytes)?;
        self.step(kind, Step::Written)?;
        file.sync_all()?;
        self.step(kind, Step::Synced)
    }

    pub(super) fn remove(&self, id: SandboxId, expected: &Stored) -> Result<(), SwapError> {
        let there = self.read_back(id)?;
        match &there {
            Some(there) if there.is(expected) && there.record.tombstone.is_some() => {}
            _ => return Err(SwapError::Conflict(there.map(Box::new))),
        }
        self.erase(id).map_err(|error| SwapError::Unknown(error.to_string()))
    }

    /// The copy goes first and last: a writer that was stopped before its rename may have put it there again, until its directory is gone.
    fn erase(&self, id: SandboxId) -> io::Result<()> {
        let locks = self.locks()?;
        let copy = locks.at(copy_name(id));
        gone(fs::remove_file(&copy))?;
        for _ in 0..MAX_TRIES {
            let Some(open) = self.versions(id)? else { break };
            let dir = open.path();
            let names = names(dir)?;
            for sequence in names.versions {
                gone(fs::remove_file(dir.join(version_name(sequence))))?;
            }
            for (_, path) in names.unfinished {
                gone(fs::remove_file(path))?;
            }
            match fs::remove_dir(locks.at(versions_name(id))) {
                Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {}
                other => {
                    gone(other)?;
                    break;
                }
            }
        }
        gone(fs::remove_file(&copy))?;
        locks.sync()
    }

    pub(super) fn list(&self, after: Option<SandboxId>, limit: usize) -> Result<Vec<SandboxId>, ReadError> {
        let mut found = std::collections::BTreeSet::new();
        for entry in fs::read_dir(self.locks().map_err(unreadable)?.path()).map_err(unreadable)? {
            let name = entry.map_err(unreadable)?.file_name();
            let id = name.to_str().and_then(|name| name.strip_suffix(VERSIONS)).and_then(|id| id.parse::<SandboxId>().ok());
            let Some(id) = id.filter(|id| after.is_none_or(|after| *id > after)) else { continue };
            found.insert(id);
            if found.len() > limit {
                found.pop_last();
            }
        }
        Ok(found.into_iter().collect())
    }

    fn read_back(&self, id: SandboxId) -> Result<Option<Stored>, SwapError> {
        self.read(id).map_err(|error| match error {
            ReadError::Unavailable(reason) => SwapError::Unavailable(reason),
            ReadError::Bad(bad) => SwapError::Bad(bad),
        })
    }

    fn decode(&self, id: SandboxId, sequence: u64, file: &File) -> Result<Record, ReadError> {
        let mut bytes = Vec::new();
        file.take(MAX_RECORD_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        let record = self.codec.decode(id, &bytes)?;
        if record.sequence != sequence {
            return Err(BadRecord::Malformed(format!("version {sequence} says that it is {}", record.sequence)).into());
        }
        Ok(record)
    }

    /// Puts the copy right for a writer that died before it did.
    fn finish_copy(&self, id: SandboxId, newest: u64, version: &File, dir: &Dir) {
        let (Ok(version), Ok(locks)) = (version.metadata(), self.locks()) else { return };
        let copy = locks.at(copy_name(id));
        if fs::symlink_metadata(&copy).is_ok_and(|copy| copy.ino() == version.ino()) {
            return;
        }
        let age = version.modified().ok().and_then(|at| SystemTime::now().duration_since(at).ok());
        if age.is_some_and(|age| age < FINISH_AFTER) {
            return;
        }
        let unfinished = dir.at(format!("{newest}.{}{UNFINISHED}", Uuid::new_v4().simple()));
        if fs::hard_link(dir.at(version_name(newest)), &unfinished).is_ok() && fs::rename(&unfinished, copy).is_err() {
            let _ = fs::remove_file(&unfinished);
        }
    }

    /// Removes what is old, from the lowest up. What can't be removed now is removed by a later writer.
    fn clean(&self, kind: Kind, dir: &Path, names: &Names) {
        let Some(keep_from) = names.newest().and_then(|newest| (newest + 1).checked_sub(KEEP)) else { return };
        let newest = if self.stale_views { modified(dir, names.newest()) } else { None };
        for sequence in names.versions.iter().copied().take_while(|sequence| *sequence < keep_from) {
            // Both times are the file server's.
            let age = newest.zip(modified(dir, Some(sequence))).and_then(|(newest, old)| newest.duration_since(old).ok());
            if self.stale_views && age.is_none_or(|age| age < STALE_VIEW) {
                break;
            }
            let removed = gone(fs::remove_file(dir.join(version_name(sequence)))).is_ok();
            if !removed || self.step(kind, Step::Cleaned).is_err() {
                return;
            }
        }
        for (_, path) in names.unfinished.iter().filter(|(sequence, _)| *sequence < keep_from) {
            let _ = fs::remove_file(path);
        }
    }

    fn step(&self, kind: Kind, step: Step) -> io::Result<()> {
        if let Some(hook) = &self.hook {
            hook(step);
        }
        let stage = match step {
            Step::Begun => Stage::Before,
            Step::Written => Stage::Written,
            Step::Synced => Stage::Synced,
            Step::Linked => Stage::Named,
            Step::Settled => Stage::After,
            Step::Copied | Step::Cleaned => return Ok(()),
        };
        self.points.hit(kind, stage)
    }
}

fn follows(sequence: u64, next: &Record) -> Result<(), SwapError> {
    if next.sequence == sequence + 1 {
        return Ok(());
    }
    Err(BadRecord::Malformed("a version must follow the one it replaces".to_owned()).into())
}

/// A writer that was not the first, unless that was itself.
fn settle(there: Option<Stored>, wanted: &Record) -> Result<Stored, SwapError> {
    match there {
        Some(there) if there.record.sequence == wanted.sequence && there.record.nonce == wanted.nonce => Ok(there),
        there => Err(SwapError::Conflict(there.map(Box::new))),
    }
}

fn locks_name() -> PathBuf {
    crate::layout::locks().as_ref().into()
}

fn versions_name(id: SandboxId) -> String {
    format!("{id}{VERSIONS}")
}

fn copy_name(id: SandboxId) -> String {
    format!("{id}{COPY}")
}

fn version_name(sequence: u64) -> String {
    format!("{sequence:020}")
}

fn names(dir: &Path) -> io::Result<Names> {
    let mut names = Names { versions: Vec::new(), unfinished: Vec::new() };
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(names),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if let Some(sequence) = name.strip_suffix(UNFINISHED).and_then(|name| name.split('.').next()?.parse().ok()) {
            names.unfinished.push((sequence, entry.path()));
        } else if let Some(sequence) = name.parse().ok().filter(|sequence| version_name(*sequence) == name) {
            names.versions.push(sequence);
        }
    }
    names.versions.sort_unstable();
    Ok(names)
}

/// A version, if it is still there. Nothing that a volume may hold in its place blocks or leads elsewhere.
fn open_version(dir: &Dir, sequence: u64) -> io::Result<Option<File>> {
    match dir.open_file(version_name(sequence)) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}

fn modified(dir: &Path, sequence: Option<u64>) -> Option<SystemTime> {
    fs::symlink_metadata(dir.join(version_name(sequence?))).and_then(|meta| meta.modified()).ok()
}

pub(super) fn make_directory(owner: Owner, path: &Path) -> io::Result<()> {
    match owner.make_dir(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

fn gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn unreadable(error: io::Error) -> ReadError {
    ReadError::Unavailable(error.to_string())
}

/// Whether names may be seen late there.
pub(crate) fn is_network(path: &Path) -> bool {
    const LOCAL: [statfs::FsType; 5] =
        [statfs::EXT4_SUPER_MAGIC, statfs::XFS_SUPER_MAGIC, statfs::BTRFS_SUPER_MAGIC, statfs::TMPFS_MAGIC, statfs::OVERLAYFS_SUPER_MAGIC];
    statfs::statfs(path).is_ok_and(|fs| !LOCAL.contains(&fs.filesystem_type()))
}

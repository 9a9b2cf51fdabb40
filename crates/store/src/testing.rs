//! A directory that forgets: what was not synced when the power went is lost or torn, at every point of its history.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use object_store::PutPayload;

use crate::failpoint::FailPoints;
use crate::local::{LocalStore, Step};
use crate::volume::Volume;

/// What becomes of what was not synced. A filesystem may do any of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Names and bytes are gone.
    Lost,
    /// Names are there, of bytes the first half.
    Torn,
    /// Names are there, bytes are zeros.
    Zeroed,
}

impl Fate {
    pub const ALL: [Self; 3] = [Self::Lost, Self::Torn, Self::Zeroed];
}

/// The store of [`Volume::open_directory`], every step noted, so that the directory can be had as it would be after a power cut behind any of them.
#[derive(Debug, Clone)]
pub struct ForgetfulStore {
    root: PathBuf,
    journal: Arc<Mutex<Vec<Step>>>,
    store: LocalStore,
}

impl ForgetfulStore {
    /// On an empty directory.
    ///
    /// # Errors
    /// It is none.
    pub fn new(root: &Path, points: FailPoints) -> io::Result<Self> {
        let journal = Arc::new(Mutex::default());
        let root = root.canonicalize()?;
        let store = LocalStore::open(&root, points)?.with_journal(Arc::clone(&journal));
        Ok(Self { root, journal, store })
    }

    #[must_use]
    pub fn volume(&self) -> Volume {
        Volume::in_directory(self.store.clone())
    }

    /// How many steps were taken.
    #[must_use]
    pub fn steps(&self) -> usize {
        self.journal.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Makes in the empty directory `into` what a power cut behind the first `steps` would have left.
    ///
    /// # Errors
    /// It can't be written.
    pub fn replay(&self, steps: usize, fate: Fate, into: &Path) -> io::Result<()> {
        let journal = self.journal.lock().unwrap_or_else(PoisonError::into_inner);
        let mut disk = Disk::new(&self.root);
        for step in journal.iter().take(steps) {
            disk.apply(step);
        }
        disk.write(fate, &self.root, into)
    }
}

struct Inode {
    payload: PutPayload,
    synced: bool,
}

#[derive(Default, Clone)]
struct Names {
    files: BTreeMap<PathBuf, usize>,
    dirs: BTreeSet<PathBuf>,
}

#[derive(Default)]
struct Disk {
    inodes: Vec<Inode>,
    seen: Names,
    durable: Names,
}

impl Disk {
    fn new(root: &Path) -> Self {
        let mut disk = Self::default();
        disk.seen.dirs.insert(root.to_owned());
        disk.durable.dirs.insert(root.to_owned());
        disk
    }

    fn apply(&mut self, step: &Step) {
        match step {
            Step::MakeDir(path) => drop(self.seen.dirs.insert(path.clone())),
            Step::Write { path, payload } => {
                self.inodes.push(Inode { payload: payload.clone(), synced: false });
                self.seen.files.insert(path.clone(), self.inodes.len() - 1);
            }
            Step::SyncFile(path) => {
                if let Some(inode) = self.seen.files.get(path) {
                    self.inodes[*inode].synced = true;
                }
            }
            Step::Link { from, to } => {
                if let Some(inode) = self.seen.files.get(from).copied() {
                    self.seen.files.insert(to.clone(), inode);
                }
            }
            Step::Rename { from, to } => {
                if let Some(inode) = self.seen.files.remove(from) {
                    self.seen.files.insert(to.clone(), inode);
                }
            }
            Step::Unlink(path) => drop(self.seen.files.remove(path)),
            Step::SyncDir(dir) => {
                let inside = |path: &Path| path.parent() == Some(dir);
                self.durable.files.retain(|path, _| !inside(path));
                self.durable
                    .files
                    .extend(self.seen.files.iter().filter(|(path, _)| inside(path)).map(|(path, inode)| (path.clone(), *inode)));
                self.durable.dirs.extend(self.seen.dirs.iter().filter(|path| inside(path)).cloned());
            }
        }
    }

    fn write(&self, fate: Fate, root: &Path, into: &Path) -> io::Result<()> {
        let names = if fate == Fate::Lost { &self.durable } else { &self.seen };
        let here = |path: &Path| path.strip_prefix(root).map(|inside| into.join(inside)).map_err(io::Error::other);
        // A directory is reached through its parents only; parents sort first.
        let mut reached = BTreeSet::new();
        for dir in &names.dirs {
            if dir == root || dir.parent().is_some_and(|parent| reached.contains(parent)) {
                fs::create_dir_all(here(dir)?)?;
                reached.insert(dir.as_path());
            }
        }
        for (path, inode) in names.files.iter().filter(|(path, _)| path.parent().is_some_and(|parent| reached.contains(parent))) {
            let inode = &self.inodes[*inode];
            let mut bytes: Vec<u8> = inode.payload.iter().flat_map(|piece| piece.iter().copied()).collect();
            match fate {
                _ if inode.synced => {}
                Fate::Lost => bytes.clear(),
                Fate::Torn => bytes.truncate(bytes.len() / 2),
                Fate::Zeroed => bytes.fill(0),
            }
            fs::write(here(path)?, bytes)?;
        }
        Ok(())
    }
}

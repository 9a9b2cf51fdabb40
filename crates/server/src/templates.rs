//! The template cache: sandboxes that were just made from a filesystem snapshot, saved on this machine's own disk before anything ran in them. The next one
//! from the same snapshot is a restore.
//!
//! ```text
//! dir/work-{id}/        being filled; whatever is left of it is removed when the server starts
//! dir/{key}/            runsc's files, and `template.json`: what they looked like when they were made. Its time is that of the last use
//! ```
//!
//! The key says all that a template depends on: the snapshot by its digest, so that a snapshot that was replaced has another; the image, which has the agent in
//! it; what the agent was told; what the host limits; gVisor and the processor.
//!
//! runsc restores whatever it finds in its files, also where they were changed. These were written by this server into a directory that nobody else may enter,
//! and nothing can change a file without changing what the kernel says of it. So a look at that is enough: device, inode, size, both times, and that it was in
//! this boot, since a power cut may lose what was never synced. What does not look right is removed, and made anew from the snapshot: it holds nothing that is
//! not there too.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    fs, io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use sandboxer_protocol::{SandboxId, agent::Marker};
use sandboxer_runtime::Launch;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::warn;

use crate::checkpoints::{Facts, private_dir};

const ABOUT: &str = "template.json";
const WORK: &str = "work-";
/// Raised when templates of an older server are of no use to this one.
const VERSION: u32 = 1;
/// Keys that are remembered as not worth another try.
const MAX_HOPELESS: usize = 256;
/// Templates that nobody has asked for, and that wait to be made or are being made.
const MAX_AHEAD: usize = 4;

/// How templates are kept.
#[derive(Debug, Clone)]
pub struct TemplateSettings {
    /// All of them together.
    pub max_bytes: u64,
    /// What a template is bound to besides its snapshot.
    pub facts: Facts,
}

/// What a template depends on, as the name of its directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key(String);

/// Cloned, they are one.
#[derive(Clone)]
pub(crate) struct Templates {
    inner: Arc<Inner>,
    /// One is made at a time.
    pub(crate) turn: Arc<Semaphore>,
    ahead: Arc<Semaphore>,
}

/// Why a template is made.
pub(crate) enum Wanted {
    /// A sandbox like it was asked for.
    Now,
    /// The snapshot was just taken. Holds a place among the few that may wait.
    ByNobodyYet(#[expect(dead_code, reason = "held until it is made")] OwnedSemaphorePermit),
}

struct Inner {
    dir: PathBuf,
    settings: TemplateSettings,
    boot: String,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// How many restore from it now: it stays.
    used: HashMap<Key, usize>,
    making: BTreeSet<Key>,
    /// What could not be made, or was too large: the newest last.
    hopeless: VecDeque<Key>,
}

/// What a file looks like to the kernel.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Look {
    name: String,
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

#[derive(Debug, Serialize, Deserialize)]
struct About {
    boot: String,
    /// Opens a conversation with the agent in it.
    marker: Marker,
    files: Vec<Look>,
}

/// A template that stays while this lives.
pub(crate) struct Held {
    inner: Arc<Inner>,
    key: Key,
    pub(crate) marker: Marker,
}

impl Held {
    pub(crate) fn dir(&self) -> PathBuf {
        self.inner.place(&self.key)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        if let Some(used) = state.used.get_mut(&self.key) {
            *used = used.saturating_sub(1);
            if *used == 0 {
                state.used.remove(&self.key);
            }
        }
    }
}

/// A template that is being made. Nothing is left of it unless it is finished.
pub(crate) struct Work {
    inner: Arc<Inner>,
    key: Key,
    dir: PathBuf,
}

impl Work {
    /// Empty, for runsc to save into.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// It is not worth another try until the server is started again.
    pub(crate) fn give_up(self) {
        let mut state = self.inner.lock();
        if state.hopeless.len() >= MAX_HOPELESS {
            state.hopeless.pop_front();
        }
        state.hopeless.push_back(self.key.clone());
    }

    /// Gives it its name, and makes room for it; one that was not used yet goes before all that were. False: it is larger than all of them may be together. Blocks.
    pub(crate) fn finish(self, marker: Marker, used: bool) -> io::Result<bool> {
        let inner = Arc::clone(&self.inner);
        if disk_bytes(&self.dir) > inner.settings.max_bytes {
            self.give_up();
            return Ok(false);
        }
        let about = About { boot: inner.boot.clone(), marker, files: looks(&self.dir)? };
        let file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(self.dir.join(ABOUT))?;
        serde_json::to_writer(&file, &about)?;
        // By the clock of those who use one, which is finer than that of the file system.
        file.set_modified(if used { SystemTime::now() } else { SystemTime::UNIX_EPOCH })?;
        fs::rename(&self.dir, inner.place(&self.key))?;
        inner.evict();
        Ok(true)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // Gone already if it was finished.
        remove(&self.dir);
        self.inner.lock().making.remove(&self.key);
    }
}

impl Templates {
    /// Removes what an earlier process left half done, and what was made before the machine was started. Blocks.
    pub(crate) fn open(dir: PathBuf, settings: TemplateSettings) -> io::Result<Self> {
        private_dir(&dir)?;
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let inner = Inner { dir, settings, boot, state: Mutex::default() };
        for entry in fs::read_dir(&inner.dir)?.flatten() {
            let is_work = entry.file_name().as_encoded_bytes().starts_with(WORK.as_bytes());
            if is_work || inner.read(&entry.path()).is_none() {
                remove(&entry.path());
            }
        }
        inner.evict();
        Ok(Self { inner: Arc::new(inner), turn: Arc::new(Semaphore::new(1)), ahead: Arc::new(Semaphore::new(MAX_AHEAD)) })
    }

    /// A place for one that nobody has asked for. None: enough of them wait.
    pub(crate) fn ahead(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.ahead).try_acquire_owned().ok()
    }

    /// All that the sandbox of this launch depends on, if it is made from the snapshot of this digest.
    pub(crate) fn key(&self, snapshot: &[u8; 32], launch: &Launch) -> Option<Key> {
        let mut config = launch.config.clone();
        // Each has another one, and a copy has that of its template.
        config.marker = String::new();
        let Facts { runsc_version, platform, cpu_features } = &self.inner.settings.facts;
        let resources = format!("{:?}", launch.resources);
        let all = (VERSION, snapshot, &launch.image, config, resources, (runsc_version, platform, cpu_features), env!("CARGO_PKG_VERSION"));
        let bytes = serde_json::to_vec(&all).ok()?;
        Some(Key(Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// A template that is there and looks right. Blocks for a moment.
    pub(crate) fn find(&self, key: &Key) -> Option<Held> {
        let place = self.inner.place(key);
        *self.inner.lock().used.entry(key.clone()).or_default() += 1;
        let mut held = Held { inner: Arc::clone(&self.inner), key: key.clone(), marker: Marker::new([0; 32]) };
        if !place.exists() {
            return None;
        }
        let Some(About { marker, .. }) = self.inner.read(&place) else {
            warn!(key = key.0, "a template is not what it was when it was made, and is removed");
            self.discard(held);
            return None;
        };
        held.marker = marker;
        // A wrong time only means a worse choice of what goes first.
        let _ = fs::OpenOptions::new().write(true).open(place.join(ABOUT)).and_then(|file| file.set_modified(SystemTime::now()));
        Some(held)
    }

    /// It is of no use; the next one is made anew. Blocks.
    pub(crate) fn discard(&self, held: Held) {
        self.inner.discard(&held.key);
    }

    /// A place to make one. None: there is one, or one is being made, or it is not worth a try.
    pub(crate) fn begin(&self, key: &Key) -> Option<Work> {
        {
            let mut state = self.inner.lock();
            if state.hopeless.contains(key) || state.making.contains(key) {
                return None;
            }
            state.making.insert(key.clone());
        }
        let dir = self.inner.dir.join(format!("{WORK}{}", SandboxId::random()));
        let work = Work { inner: Arc::clone(&self.inner), key: key.clone(), dir };
        if self.inner.place(key).exists() {
            return None;
        }
        match fs::DirBuilder::new().mode(0o700).create(&work.dir) {
            Ok(()) => Some(work),
            Err(error) => {
                warn!(%error, "no template can be made");
                None
            }
        }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, key: &Key) -> PathBuf {
        self.dir.join(&key.0)
    }

    /// What is known of a template, if its files still are what they were.
    fn read(&self, place: &Path) -> Option<About> {
        let about: About = serde_json::from_slice(&fs::read(place.join(ABOUT)).ok()?).ok()?;
        let same = about.boot == self.boot && !about.files.is_empty() && looks(place).ok()? == about.files;
        same.then_some(about)
    }

    fn discard(&self, key: &Key) {
        // Out of sight at once, and removed by the next server if we die here.
        let trash = self.dir.join(format!("{WORK}{}", SandboxId::random()));
        if fs::rename(self.place(key), &trash).is_ok() {
            remove(&trash);
        }
    }

    /// Removes what was not used for the longest time until the rest fits.
    fn evict(&self) {
        let Ok(entries) = fs::read_dir(&self.dir) else { return };
        let mut found: Vec<(SystemTime, u64, Key)> = entries
            .flatten()
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok().filter(|name| !name.starts_with(WORK))?;
                let used = fs::metadata(entry.path().join(ABOUT)).and_then(|about| about.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
                Some((used, disk_bytes(&entry.path()), Key(name)))
            })
            .collect();
        found.sort_unstable();
        let mut total: u64 = found.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, bytes, key) in found {
            if total <= self.settings.max_bytes {
                return;
            }
            if !self.lock().used.contains_key(&key) {
                self.discard(&key);
                total -= bytes;
            }
        }
    }
}

/// Of all of runsc's files, by their names.
fn looks(dir: &Path) -> io::Result<Vec<Look>> {
    let mut looks = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().into_string().map_err(|_| io::ErrorKind::InvalidData)?;
        if name == ABOUT {
            continue;
        }
        let about = entry.metadata()?;
        looks.push(Look {
            name,
            device: about.dev(),
            inode: about.ino(),
            bytes: about.len(),
            modified: (about.mtime(), about.mtime_nsec()),
            changed: (about.ctime(), about.ctime_nsec()),
        });
    }
    looks.sort_unstable_by(|one, other| one.name.cmp(&other.name));
    Ok(looks)
}

fn disk_bytes(dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    entries.flatten().filter_map(|entry| entry.metadata().ok()).map(|about| about.blocks() * 512).sum()
}

fn remove(dir: &Path) {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            warn!(%error, dir = %dir.display(), "could not be removed; the next start of the server tries again");
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests;

//! The local cache: whole file sets, ready for `runsc restore` where they lie, no copy and no second check.
//!
//! ```text
//! dir/lock                    shared while one is begun, exclusive while what nobody holds is swept
//! dir/work-{uuid}/            being filled; its `lock` is held by whoever does
//! dir/sets/{digest}/image/    the files, by the manifest's digest
//! dir/sets/{digest}/seal      what the files looked like when they were last known to be right
//! dir/sets/{digest}/lock      held shared while in use; its time is that of the last use
//! ```
//!
//! A set is trusted if its seal holds: same boot, and every file with the inode, size and change time that it had when its bytes were checked (or written by this
//! very save). Nothing can change a file without its change time, and the directory is private to the server's user. If the seal does not hold (after a power
//! cut, which may lose what was never synced; after any write) every chunk is hashed again before the set is used, and a set that fails is dropped and loaded
//! anew. Locks are the kernel's, so a killed server leaves none.

mod seal;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::SystemTime;

use tokio::sync::Semaphore;

use self::seal::Seal;
use crate::error::{Error, Result};
use crate::load::Loader;
use crate::manifest::Manifest;

/// Cloned, they are one.
#[derive(Debug, Clone)]
pub struct Cache {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    max_bytes: u64,
    loader: Loader,
    /// One load of a set at a time; the others then find it.
    flights: Mutex<HashMap<[u8; 32], Weak<Semaphore>>>,
}

/// How a set came to be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// In the cache, seal intact.
    Cached,
    /// In the cache, and hashed again.
    Checked,
    /// From the volume.
    Loaded,
}

/// The files of a checkpoint in a directory, kept while this lives. Read them only.
#[derive(Debug)]
pub struct FileSet {
    dir: PathBuf,
    pub origin: Origin,
    _lock: File,
}

impl FileSet {
    /// What `runsc restore -image-path` wants.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Cache {
    /// Opens or makes the cache and removes what servers that died left half done. Blocks.
    ///
    /// # Errors
    /// The directory can't be made or read.
    pub fn open(dir: &Path, max_bytes: u64, loader: Loader) -> Result<Self> {
        let fail = |source| Error::local("open the cache", dir, source);
        private_dir(dir).and_then(|()| private_dir(&dir.join("sets"))).map_err(fail)?;
        let inner = Inner { dir: dir.to_owned(), max_bytes, loader, flights: Mutex::default() };
        inner.sweep().map_err(fail)?;
        inner.evict(max_bytes);
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Whether the manifest's files are likely to be here.
    pub async fn has(&self, manifest: &Manifest) -> bool {
        let set = self.inner.set_dir(manifest);
        blocking(move || Ok(set.join("lock").exists())).await.unwrap_or(false)
    }

    /// The manifest's files, from here or else from the volume. `limit` bounds their bytes.
    ///
    /// # Errors
    /// As [`Loader::load`].
    pub async fn files(&self, manifest: &Arc<Manifest>, limit: u64) -> Result<FileSet> {
        let flight = self.flight(manifest.digest());
        let _turn = flight.acquire().await.map_err(|_| Error::Interrupted)?;
        let (inner, wanted) = (Arc::clone(&self.inner), Arc::clone(manifest));
        if let Some(found) = blocking(move || Ok(inner.find(&wanted))).await? {
            return Ok(found);
        }
        let first = self.load(manifest, limit).await;
        match first {
            Err(Error::Local { source, .. }) if source.raw_os_error() == Some(nix::libc::ENOSPC) => {
                let inner = Arc::clone(&self.inner);
                blocking(move || {
                    inner.evict(0);
                    Ok(())
                })
                .await?;
                self.load(manifest, limit).await
            }
            other => other,
        }
    }

    /// Takes over the files that were just saved as this manifest: `from` has them under their names. False if they are on another filesystem or not as long as
    /// the manifest says; they stay where they were then.
    ///
    /// # Errors
    /// The cache can't be written.
    pub async fn adopt(&self, manifest: &Arc<Manifest>, from: &Path) -> Result<bool> {
        let (inner, manifest, from) = (Arc::clone(&self.inner), Arc::clone(manifest), from.to_owned());
        blocking(move || inner.adopt(&manifest, &from)).await
    }

    async fn load(&self, manifest: &Arc<Manifest>, limit: u64) -> Result<FileSet> {
        let inner = Arc::clone(&self.inner);
        let work = blocking(move || inner.begin()).await?;
        self.inner.loader.load(manifest, &work.image(), limit).await?;
        let (inner, manifest) = (Arc::clone(&self.inner), Arc::clone(manifest));
        blocking(move || {
            inner.finish(work, &manifest)?;
            // Held before room is made: this one is not to go.
            let (dir, lock) = inner.open_set(&manifest).ok_or(Error::Interrupted)?;
            inner.evict(inner.max_bytes);
            Ok(FileSet { dir, origin: Origin::Loaded, _lock: lock })
        })
        .await
    }

    fn flight(&self, digest: &[u8; 32]) -> Arc<Semaphore> {
        let mut flights = self.inner.flights.lock().unwrap_or_else(PoisonError::into_inner);
        flights.retain(|_, flight| flight.strong_count() > 0);
        if let Some(flight) = flights.get(digest).and_then(Weak::upgrade) {
            return flight;
        }
        let flight = Arc::new(Semaphore::new(1));
        flights.insert(*digest, Arc::downgrade(&flight));
        flight
    }
}

/// A directory being filled, removed if it is not finished.
struct WorkDir {
    path: PathBuf,
    _lock: File,
}

impl WorkDir {
    fn image(&self) -> PathBuf {
        self.path.join("image")
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        // Gone already if it was finished; else the next sweep tries again.
        let _ = fs::remove_dir_all(&self.path);
    }
}

impl Inner {
    fn set_dir(&self, manifest: &Manifest) -> PathBuf {
        self.dir.join("sets").join(blake3::Hash::from_bytes(*manifest.digest()).to_hex().as_str())
    }

    /// A set that is there and right, held.
    fn find(&self, manifest: &Manifest) -> Option<FileSet> {
        let (dir, lock) = self.open_set(manifest)?;
        let seal = self.set_dir(manifest).join("seal");
        let now = Seal::of(manifest, &dir).ok()?;
        let origin = if now.is_written_in(&seal) {
            Origin::Cached
        } else if seal::files_match(manifest, &dir) {
            // Without it the next use hashes again.
            let _ = now.write(&seal);
            Origin::Checked
        } else {
            // Also from under whoever uses it: it is wrong for them too.
            self.discard(&self.set_dir(manifest));
            return None;
        };
        Some(FileSet { dir, origin, _lock: lock })
    }

    fn open_set(&self, manifest: &Manifest) -> Option<(PathBuf, File)> {
        let set = self.set_dir(manifest);
        let path = set.join("lock");
        let lock = OpenOptions::new().write(true).open(&path).ok()?;
        lock.lock_shared().ok()?;
        // It may have been dropped while we waited.
        let still = fs::metadata(&path).ok()?;
        let held = lock.metadata().ok()?;
        if (still.dev(), still.ino()) != (held.dev(), held.ino()) {
            return None;
        }
        // A wrong time only means a worse choice of what goes first.
        let _ = lock.set_modified(SystemTime::now());
        Some((set.join("image"), lock))
    }

    fn begin(&self) -> Result<WorkDir> {
        let path = self.dir.join(format!("work-{}", uuid::Uuid::new_v4()));
        let make = || {
            // A sweep between the directory and its lock would take it for a dead one's.
            let everything = open_lock(&self.dir.join("lock"))?;
            everything.lock_shared()?;
            private_dir(&path)?;
            private_dir(&path.join("image"))?;
            let lock = open_lock(&path.join("lock"))?;
            lock.lock()?;
            Ok(lock)
        };
        let lock = make().map_err(|source| Error::local("make", &path, source))?;
        Ok(WorkDir { path, _lock: lock })
    }

    /// Seals the files and gives them their name. One of that name that is there already is as good.
    fn finish(&self, work: WorkDir, manifest: &Manifest) -> Result<()> {
        let set = self.set_dir(manifest);
        let name = || {
            Seal::of(manifest, &work.image())?.write(&work.path.join("seal"))?;
            fs::rename(&work.path, &set)
        };
        match name() {
            Err(error) if matches!(error.kind(), io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists) => Ok(()),
            other => other.map_err(|source| Error::local("make", &set, source)),
        }
    }

    fn adopt(&self, manifest: &Manifest, from: &Path) -> Result<bool> {
        let work = self.begin()?;
        let mut moved: Vec<(PathBuf, PathBuf)> = Vec::new();
        for file in manifest.files() {
            let (source, target) = (from.join(file.name.as_str()), work.image().join(file.name.as_str()));
            let fits = fs::symlink_metadata(&source).is_ok_and(|about| about.is_file() && about.len() == file.bytes);
            if !fits || fs::rename(&source, &target).is_err() {
                for (source, target) in moved {
                    fs::rename(target, &source).map_err(|error| Error::local("put back", &source, error))?;
                }
                return Ok(false);
            }
            moved.push((source, target));
        }
        self.finish(work, manifest)?;
        self.evict(self.max_bytes);
        Ok(true)
    }

    /// Drops sets, the longest unused first, until they fit. What is in use stays.
    fn evict(&self, max_bytes: u64) {
        let Ok(entries) = fs::read_dir(self.dir.join("sets")) else { return };
        let mut sets: Vec<(SystemTime, u64, PathBuf)> = entries
            .flatten()
            .map(|entry| {
                let used = fs::metadata(entry.path().join("lock")).and_then(|about| about.modified());
                (used.unwrap_or(SystemTime::UNIX_EPOCH), disk_bytes(&entry.path().join("image")), entry.path())
            })
            .collect();
        sets.sort_unstable();
        let mut total: u64 = sets.iter().map(|set| set.1).sum();
        for (_, bytes, path) in sets {
            if total <= max_bytes {
                return;
            }
            if self.drop_set(&path) {
                total -= bytes;
            }
        }
    }

    fn drop_set(&self, set: &Path) -> bool {
        let Ok(lock) = OpenOptions::new().write(true).open(set.join("lock")) else {
            return fs::remove_dir_all(set).is_ok();
        };
        if lock.try_lock().is_err() {
            return false;
        }
        self.discard(set)
    }

    /// Out of sight at once, and swept if we die here.
    fn discard(&self, set: &Path) -> bool {
        let trash = self.dir.join(format!("work-{}", uuid::Uuid::new_v4()));
        if fs::rename(set, &trash).is_err() {
            return false;
        }
        let _ = fs::remove_dir_all(&trash);
        true
    }

    /// Removes what servers that died were filling or dropping.
    fn sweep(&self) -> io::Result<()> {
        let everything = open_lock(&self.dir.join("lock"))?;
        everything.lock()?;
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if !path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"work-")) {
                continue;
            }
            let held = OpenOptions::new().write(true).open(path.join("lock")).is_ok_and(|lock| lock.try_lock().is_err());
            if !held {
                // Somebody may be removing it as well.
                let _ = fs::remove_dir_all(&path);
            }
        }
        Ok(())
    }
}

fn disk_bytes(image: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(image) else { return 0 };
    entries.flatten().filter_map(|entry| entry.metadata().ok()).map(|about| about.blocks() * 512).sum()
}

fn private_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

fn open_lock(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(|_| Error::Interrupted)?
}

//! Records in a directory that any number of processes and machines share, without file locks.
//!
//! ```text
//! locks/{id}.versions/00000000000000000042      one version; the highest is the record
//! locks/{id}.versions/43.{nonce}.new            being written
//! locks/{id}.lock                               a copy of the newest, for people and tools
//! ```
//!
//! A swap writes its version under a name of its own, syncs it, and links it to the name of the next sequence, which only one writer
//! can make. The record is whatever has the highest name, and the highest name never goes down:
//! - a name that is not the highest may be removed, and a late writer may then make it again; it looks for a higher one after its
//!   link, finds it, and knows that it may have lost;
//! - names are removed from the lowest up, and the newest [`KEEP`] stay (one less while the volume is full), so whoever lists the directory misses the highest only if
//!   that many swaps come between, and then the one it found is gone when it opens it, and it lists again;
//! - nothing is removed before the directory that holds the higher names is synced.
//!
//! The copy is renamed into place after the link and may be behind for a while; nothing reads it back. Whoever next reads or swaps
//! finishes it for a writer that died.

mod files;
mod watch;

use std::{io, path::Path, sync::Arc};

use async_trait::async_trait;
use sandboxer_protocol::SandboxId;

pub(crate) use self::files::is_network;
use self::{files::Files, watch::Watch};
use super::{Changes, Codec, ReadError, Record, RecordStore, Stored, SwapError};
use crate::{Threads, failpoint::FailPoints};

/// How far a write has come; between any two of these a writer may die or stop for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// Nothing has happened yet.
    Begun,
    /// The bytes are in a file of another name, not synced.
    Written,
    /// That file is synced.
    Synced,
    /// It has its name; the directory is not synced.
    Linked,
    /// The swap is durable.
    Settled,
    /// The copy follows it.
    Copied,
    /// One old name is gone.
    Cleaned,
}

impl Step {
    pub const ALL: [Self; 7] = [Self::Begun, Self::Written, Self::Synced, Self::Linked, Self::Settled, Self::Copied, Self::Cleaned];
}

/// Called at every step of every write, for tests that kill or stop a writer there.
pub type StepHook = Arc<dyn Fn(Step) + Send + Sync>;

/// How many of the newest versions are kept.
const KEEP: u64 = 8;
/// Threads for the files of one set of records. They do nothing else, so that no other work delays
/// the renewal of a lease.
const THREADS: usize = 8;

/// The records below one directory.
pub struct DirectoryRecords {
    files: Arc<Files>,
    watch: Watch,
    threads: Threads,
}

impl DirectoryRecords {
    /// `root` is the volume; `locks` is made below it.
    ///
    /// # Errors
    /// It is not there, or can't be written.
    pub fn open(root: &Path, codec: Codec, points: FailPoints) -> io::Result<Self> {
        // A link to the volume is the operator's, and is followed once.
        let files = Arc::new(Files::open(root.canonicalize()?, codec, points)?);
        Ok(Self { files, watch: Watch::default(), threads: Threads::new("records", THREADS) })
    }

    /// Calls `hook` at every step.
    #[must_use]
    pub fn with_hook(mut self, hook: StepHook) -> Self {
        self.files = Arc::new(self.files.hooked(hook));
        self
    }

    async fn blocking<T: Send + 'static, E: Send + 'static>(
        &self,
        work: impl FnOnce(&Files) -> Result<T, E> + Send + 'static,
        lost: impl FnOnce(String) -> E,
    ) -> Result<T, E> {
        let files = Arc::clone(&self.files);
        self.threads.run(move || work(&files)).await.unwrap_or_else(|error| Err(lost(error.to_string())))
    }
}

#[async_trait]
impl RecordStore for DirectoryRecords {
    async fn read(&self, id: SandboxId) -> Result<Option<Stored>, ReadError> {
        self.blocking(move |files| files.read(id), ReadError::Unavailable).await
    }

    async fn create(&self, id: SandboxId, first: &Record) -> Result<Stored, SwapError> {
        let first = first.clone();
        self.blocking(move |files| files.create(id, &first), SwapError::Unknown).await
    }

    async fn swap(&self, id: SandboxId, expected: &Stored, next: &Record) -> Result<Stored, SwapError> {
        let (expected, next) = (expected.clone(), next.clone());
        self.blocking(move |files| files.swap(id, &expected, &next), SwapError::Unknown).await
    }

    async fn remove(&self, id: SandboxId, expected: &Stored) -> Result<(), SwapError> {
        let expected = expected.clone();
        self.blocking(move |files| files.remove(id, &expected), SwapError::Unknown).await
    }

    async fn list(&self, after: Option<SandboxId>, limit: usize) -> Result<Vec<SandboxId>, ReadError> {
        self.blocking(move |files| files.list(after, limit), ReadError::Unavailable).await
    }

    fn changes(&self, id: SandboxId) -> Changes {
        let dir = self.files.versions(id).ok().flatten();
        dir.and_then(|dir| self.watch.subscribe(dir.path())).map_or_else(Changes::none, Changes::from_counter)
    }
}

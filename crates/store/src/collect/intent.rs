//! A writer says that it is at work before it looks at anything that it did not write.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use object_store::path::Path;
use object_store::{ObjectStoreExt, PutMode, PutPayload};
use serde::{Deserialize, Serialize};

use super::{CollectFaults, Condemned};
use crate::error::{Error, Result};
use crate::layout;
use crate::lease::{BootClock, Clock, Moment};
use crate::record::{InstanceId, Nonce};
use crate::volume::Volume;

/// How long a save may take unless somebody says otherwise.
pub const LONGEST_SAVE: Duration = Duration::from_secs(900);
/// An intent that says more is not believed.
const LONGEST_OF_ALL: Duration = Duration::from_secs(24 * 3600);
const MAX_INTENT_BYTES: usize = 4096;

/// What an intent says of its writer. That it is there is what counts.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Words {
    by: InstanceId,
    /// For people.
    timestamp: u64,
    /// Milliseconds that its writer takes at most.
    longest: u64,
}

impl Words {
    pub(super) fn longest(&self) -> Duration {
        Duration::from_millis(self.longest).min(LONGEST_OF_ALL)
    }

    pub(super) fn timestamp(&self) -> Duration {
        Duration::from_secs(self.timestamp)
    }
}

/// What the intent says, none if nothing that makes sense; an error if it is gone.
pub(super) async fn read(volume: &Volume, name: Nonce) -> Result<Option<Words>> {
    match volume.read(&layout::intent(name), MAX_INTENT_BYTES).await {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(Error::Damaged { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Who writes, by which clock, and for how long at most.
#[derive(Clone)]
pub struct Writer {
    by: InstanceId,
    clock: Arc<dyn Clock>,
    longest: Duration,
    faults: CollectFaults,
}

impl Default for Writer {
    fn default() -> Self {
        Self::new(InstanceId::random(), Arc::new(BootClock), LONGEST_SAVE)
    }
}

impl Writer {
    #[must_use]
    pub fn new(by: InstanceId, clock: Arc<dyn Clock>, longest: Duration) -> Self {
        Self { by, clock, longest, faults: CollectFaults::default() }
    }

    #[must_use]
    pub fn with_faults(mut self, faults: CollectFaults) -> Self {
        self.faults = faults;
        self
    }

    /// From here on nothing is collected that the writer may rely on.
    ///
    /// # Errors
    /// The volume can't be written or read.
    pub async fn begin(&self, volume: &Volume) -> Result<Intent> {
        let until = self.clock.now() + self.longest;
        let path = layout::intent(self.clock.nonce());
        let longest = u64::try_from(self.longest.as_millis()).unwrap_or(u64::MAX);
        let words = Words { by: self.by.clone(), timestamp: self.clock.unix_time().as_secs(), longest };
        let bytes = serde_json::to_vec(&words).map_err(|error| Error::Invalid(format!("{path}: {error}")))?;
        let said = Arc::new(Said {
            writer: self.clone(),
            volume: volume.clone(),
            path,
            until,
            committing: AtomicBool::new(false),
            over: AtomicBool::new(false),
        });
        if !self.faults.says_nothing() {
            let said = Arc::clone(&said);
            to_its_end(async move { said.volume.put(&said.path, bytes.into(), PutMode::Create).await }).await?;
        }
        let condemned = if self.faults.ignores_condemned() { Condemned::default() } else { Condemned::read(volume).await? };
        Ok(Intent { said, condemned: Arc::new(condemned) })
    }
}

impl fmt::Debug for Writer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Writer").field("by", &self.by).field("longest", &self.longest).finish_non_exhaustive()
    }
}

/// A writer at work. When it is dropped the volume is told in the background, once nothing of it is on its way there any more.
#[derive(Debug)]
pub struct Intent {
    said: Arc<Said>,
    condemned: Arc<Condemned>,
}

/// What the volume was told. Whoever writes there in the writer's name holds it, so that the volume is told of the end behind the last of them.
#[derive(Debug)]
struct Said {
    writer: Writer,
    volume: Volume,
    path: Path,
    until: Moment,
    /// A manifest is on its way, or may be.
    committing: AtomicBool,
    over: AtomicBool,
}

impl Intent {
    /// What must not be relied upon.
    #[must_use]
    pub fn condemned(&self) -> &Arc<Condemned> {
        &self.condemned
    }

    /// Makes what was written count, by putting `payload` at `path`, if that is still allowed. If this is dropped, it is put there or not, and the intent goes behind that.
    /// What may replace something in a bucket is tried no longer than somebody waits for it: it could come behind what was put there later. Its intent is then left to be taken for dead.
    ///
    /// # Errors
    /// [`Error::TookTooLong`], and nothing was put there; or those of the volume.
    pub async fn commit(&self, path: Path, payload: PutPayload, mode: PutMode) -> Result<()> {
        let said = Arc::clone(&self.said);
        let goes_on = mode == PutMode::Create || said.volume.is_directory();
        let put = async move {
            said.check().await?;
            said.committing.store(true, Ordering::Release);
            let done = said.volume.put(&path, payload, mode).await;
            // A request that failed on its way may still arrive, except in a directory.
            if said.volume.is_directory() || !matches!(done, Err(Error::Volume { .. })) {
                said.committing.store(false, Ordering::Release);
            }
            done
        };
        if goes_on { to_its_end(put).await } else { put.await }
    }

    /// The manifest is there, or never will be.
    pub async fn finish(self) {
        if self.said.begin_to_end() {
            // What can't be removed is taken for dead in time.
            let _ = self.said.volume.store().delete(&self.said.path).await;
        }
    }
}

impl Said {
    async fn check(&self) -> Result<()> {
        if self.writer.faults.never_gives_up() || self.writer.faults.says_nothing() {
            return Ok(());
        }
        let late = || Error::TookTooLong { longest: self.writer.longest };
        // A clock that stood still does not know; whoever took this writer for dead removed its intent.
        match self.volume.store().head(&self.path).await {
            Ok(_) => {}
            Err(object_store::Error::NotFound { .. }) => return Err(late()),
            Err(error) => return Err(Error::volume("look at", &self.path, error)),
        }
        if self.writer.clock.now() < self.until { Ok(()) } else { Err(late()) }
    }

    /// Whether it is to be removed, which is said once.
    fn begin_to_end(&self) -> bool {
        !self.committing.load(Ordering::Acquire) && !self.over.swap(true, Ordering::AcqRel)
    }
}

impl Drop for Said {
    fn drop(&mut self) {
        if !self.begin_to_end() {
            return;
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let (volume, path) = (self.volume.clone(), self.path.clone());
            runtime.spawn(async move {
                let _ = volume.store().delete(&path).await;
            });
        }
    }
}

/// Goes on when nobody waits for it any more: a write that was begun gets there, and whoever is told of the end is told behind it. Where there is no runtime, as in the
/// simulator, it ends with its caller.
async fn to_its_end<T: Send + 'static>(work: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) => runtime.spawn(work).await.map_err(|_| Error::Interrupted).flatten(),
        Err(_) => work.await,
    }
}

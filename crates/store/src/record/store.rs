//! The seam to what holds the records.

use async_trait::async_trait;
use sandboxer_protocol::SandboxId;
use tokio::sync::watch;

use super::{BadRecord, Record};

/// What a store itself knows a version by: an ETag, a generation. A directory needs none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tag(pub String);

/// A version that is, or was, in the store. It is what a swap expects.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    pub record: Record,
    pub tag: Tag,
}

impl Stored {
    /// Whether both are one version.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        self.record.sequence == other.record.sequence && self.record.nonce == other.record.nonce
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Try again.
    #[error("the record could not be read: {0}")]
    Unavailable(String),
    /// Trying again does not help.
    #[error(transparent)]
    Bad(#[from] BadRecord),
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SwapError {
    /// Not written: this is there instead (or nothing is). A repeated request may find its own write there.
    #[error("the record was changed by someone else")]
    Conflict(Option<Box<Stored>>),
    /// Written or not. Read, and see whether the nonce or what was wanted is there; until a later version is seen it may still come.
    #[error("it is not known whether the record was written: {0}")]
    Unknown(String),
    /// Not written.
    #[error("the record could not be written: {0}")]
    Unavailable(String),
    /// Not written, and what is there is no record.
    #[error(transparent)]
    Bad(#[from] BadRecord),
}

/// Where the records are. Each call stands for one request: nothing is retried here, since only the caller knows what it wanted.
///
/// Not cancel-safe: a call that is dropped may still take effect, like one whose reply was lost.
#[async_trait]
pub trait RecordStore: Send + Sync {
    /// The newest version at some moment between the call and its return; none if there is no such record.
    async fn read(&self, id: SandboxId) -> Result<Option<Stored>, ReadError>;

    /// Writes the first version. A conflict if there is one already.
    async fn create(&self, id: SandboxId, first: &Record) -> Result<Stored, SwapError>;

    /// Replaces `expected` by `next`, whose sequence is one higher, and is durable when it returns. A conflict if anything else is there.
    async fn swap(&self, id: SandboxId, expected: &Stored, next: &Record) -> Result<Stored, SwapError>;

    /// Removes a record that bears a tombstone, in its expected version. For the collection.
    async fn remove(&self, id: SandboxId, expected: &Stored) -> Result<(), SwapError>;

    /// Up to `limit` ids in their order, behind `after`. What is created or removed meanwhile may be missing.
    async fn list(&self, after: Option<SandboxId>, limit: usize) -> Result<Vec<SandboxId>, ReadError>;

    /// Tells of changes, at best: some may be missed, and some may be none. Whoever needs to know reads now and then.
    fn changes(&self, id: SandboxId) -> Changes;
}

/// Hints that a record may have changed.
#[derive(Debug)]
pub struct Changes {
    counter: Option<watch::Receiver<u64>>,
    from_afar: bool,
}

impl Changes {
    /// Never a hint.
    #[must_use]
    pub fn none() -> Self {
        Self { counter: None, from_afar: false }
    }

    pub(super) fn from_counter(counter: watch::Receiver<u64>) -> Self {
        Self { counter: Some(counter), from_afar: false }
    }

    /// Hints of whoever waits for a sandbox, wherever it is: the counter goes up with each.
    #[must_use]
    pub fn from_afar(counter: watch::Receiver<u64>) -> Self {
        Self { counter: Some(counter), from_afar: true }
    }

    /// Whether an owner hears of those who wait on other machines too, so that it need not look for them between its renewals.
    #[must_use]
    pub fn are_from_afar(&self) -> bool {
        self.from_afar && self.are_told()
    }

    /// Whether hints can be expected at all.
    #[must_use]
    pub fn are_told(&self) -> bool {
        self.counter.is_some()
    }

    /// Waits for the next hint. Cancel-safe.
    pub async fn next(&mut self) {
        if let Some(counter) = &mut self.counter {
            if counter.changed().await.is_ok() {
                return;
            }
            self.counter = None;
        }
        std::future::pending().await
    }
}

//! Records in a bucket: one object each, replaced under the condition that it still is the version that was read.
//!
//! The nonce in a record makes every version's bytes differ, and so its ETag, which for S3 is a digest of the content.
//! A bucket tells nobody of changes; whoever registers as a waiter rings the owner's bell ([`super::bell`]).

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use object_store::{Error as StoreError, ObjectStore, ObjectStoreExt, PutMode, PutOptions, UpdateVersion, path::Path};
use sandboxer_protocol::SandboxId;

use super::bell::Bells;
use super::{BadRecord, Changes, Codec, InstanceId, MAX_RECORD_BYTES, ReadError, Record, RecordStore, Stored, SwapError, Tag};
use crate::bucket::{Attested, Evidence};
use crate::layout;

/// What telling an owner may add to a swap.
const RING: Duration = Duration::from_secs(1);

pub struct BucketRecords {
    /// Asks again where an answer is lost.
    reading: Arc<dyn ObjectStore>,
    /// Asks once.
    writing: Arc<dyn ObjectStore>,
    bells: Bells,
    codec: Codec,
}

impl BucketRecords {
    /// As instance `me` sees them; whoever is none is told of nothing.
    #[must_use]
    pub fn new(reading: Arc<dyn ObjectStore>, writing: Arc<dyn ObjectStore>, codec: Codec, me: Option<InstanceId>) -> Self {
        let bells = Bells::new(Arc::clone(&reading), Arc::clone(&writing), me);
        Self { reading, writing, bells, codec }
    }

    /// That a record is not there is believed on this evidence only. Bells are hints, and looked at too often for it.
    #[must_use]
    pub(crate) fn attested_by(mut self, evidence: Evidence) -> Self {
        // Whoever asks knows for how long to ask again.
        let attested = |store| Arc::new(Attested::new(store, evidence, Duration::ZERO));
        (self.reading, self.writing) = (attested(self.reading), attested(self.writing));
        self
    }

    async fn put(&self, id: SandboxId, record: &Record, mode: PutMode) -> Result<Stored, SwapError> {
        let bytes = Bytes::from(self.codec.encode(id, record)?);
        let error = match self.writing.put_opts(&layout::record(id), bytes.into(), PutOptions::from(mode)).await {
            Ok(put) => return Ok(Stored { record: record.clone(), tag: tag(put.e_tag, put.version) }),
            Err(error) => error,
        };
        match error {
            StoreError::AlreadyExists { .. } | StoreError::Precondition { .. } | StoreError::NotFound { .. } => self.conflict(id).await,
            StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. } | StoreError::NotImplemented { .. } => {
                Err(SwapError::Unavailable(error.to_string()))
            }
            error => Err(SwapError::Unknown(error.to_string())),
        }
    }

    /// Something else is there: what it is.
    async fn conflict<T>(&self, id: SandboxId) -> Result<T, SwapError> {
        match self.read(id).await {
            Ok(there) => Err(SwapError::Conflict(there.map(Box::new))),
            Err(ReadError::Bad(bad)) => Err(SwapError::Bad(bad)),
            // It may be there by an earlier request whose answer was lost.
            Err(ReadError::Unavailable(why)) => Err(SwapError::Unknown(why)),
        }
    }
}

/// Both names of a version, of which each kind of store wants its own.
fn tag(e_tag: Option<String>, version: Option<String>) -> Tag {
    Tag(format!("{}\n{}", version.unwrap_or_default(), e_tag.unwrap_or_default()))
}

fn version(tag: &Tag) -> UpdateVersion {
    let (version, e_tag) = tag.0.split_once('\n').unwrap_or_default();
    let named = |name: &str| (!name.is_empty()).then(|| name.to_owned());
    UpdateVersion { e_tag: named(e_tag), version: named(version) }
}

fn unavailable(error: &StoreError) -> ReadError {
    ReadError::Unavailable(error.to_string())
}

#[async_trait]
impl RecordStore for BucketRecords {
    async fn read(&self, id: SandboxId) -> Result<Option<Stored>, ReadError> {
        let got = match self.reading.get(&layout::record(id)).await {
            Err(StoreError::NotFound { .. }) => return Ok(None),
            got => got.map_err(|error| unavailable(&error))?,
        };
        if got.meta.size > MAX_RECORD_BYTES as u64 {
            return Err(BadRecord::TooLarge.into());
        }
        let tag = tag(got.meta.e_tag.clone(), got.meta.version.clone());
        let mut bytes = Vec::new();
        let mut pieces = got.into_stream();
        while let Some(piece) = pieces.try_next().await.map_err(|error| unavailable(&error))? {
            bytes.extend_from_slice(&piece);
            if bytes.len() > MAX_RECORD_BYTES {
                return Err(BadRecord::TooLarge.into());
            }
        }
        Ok(Some(Stored { record: self.codec.decode(id, &bytes)?, tag }))
    }

    async fn create(&self, id: SandboxId, first: &Record) -> Result<Stored, SwapError> {
        self.put(id, first, PutMode::Create).await
    }

    async fn swap(&self, id: SandboxId, expected: &Stored, next: &Record) -> Result<Stored, SwapError> {
        if next.sequence != expected.record.sequence + 1 {
            return Err(BadRecord::Malformed("a version must follow the one it replaces".to_owned()).into());
        }
        let swapped = self.put(id, next, PutMode::Update(version(&expected.tag))).await?;
        let asks = |record: &Record| record.waiter.as_ref().map(|waiter| waiter.nonce);
        // Once for each that waits, not for each sign of life that it gives.
        if let Some(owner) = next.owner.as_ref().filter(|_| asks(next).is_some() && asks(next) != asks(&expected.record)) {
            // Whoever can't be told in time finds out by itself.
            let _ = tokio::time::timeout(RING, self.bells.ring(owner, id)).await;
        }
        Ok(swapped)
    }

    /// There is no removing of one version alone. None is needed: nobody writes behind a tombstone, nor makes a record for an id that has had one.
    async fn remove(&self, id: SandboxId, expected: &Stored) -> Result<(), SwapError> {
        match self.read(id).await {
            Ok(Some(there)) if there.is(expected) && there.record.tombstone.is_some() => {}
            Ok(there) => return Err(SwapError::Conflict(there.map(Box::new))),
            Err(ReadError::Bad(bad)) => return Err(SwapError::Bad(bad)),
            Err(ReadError::Unavailable(why)) => return Err(SwapError::Unavailable(why)),
        }
        match self.writing.delete(&layout::record(id)).await {
            Ok(()) | Err(StoreError::NotFound { .. }) => Ok(()),
            Err(error) => Err(SwapError::Unknown(error.to_string())),
        }
    }

    async fn list(&self, after: Option<SandboxId>, limit: usize) -> Result<Vec<SandboxId>, ReadError> {
        let dir = layout::locks();
        let listed = match after {
            Some(id) => self.reading.list_with_offset(Some(&dir), &layout::record(id)),
            None => self.reading.list(Some(&dir)),
        };
        let found = |path: &Path| path.filename()?.strip_suffix(".lock")?.parse::<SandboxId>().ok();
        // Buckets list in order. Not all know of an offset.
        let found = move |path: &Path| found(path).filter(|id| after.is_none_or(|after| *id > after));
        let ids = listed.try_filter_map(move |object| std::future::ready(Ok(found(&object.location))));
        ids.take(limit).try_collect().await.map_err(|error: StoreError| unavailable(&error))
    }

    fn changes(&self, id: SandboxId) -> Changes {
        self.bells.subscribe(id).map_or_else(Changes::none, Changes::from_afar)
    }
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;
    use crate::record::conformance::Subject;

    #[derive(Default)]
    struct Memory(Arc<InMemory>);

    impl Subject for Memory {
        fn view(&self) -> Arc<dyn RecordStore> {
            let store: Arc<dyn ObjectStore> = Arc::<InMemory>::clone(&self.0);
            Arc::new(BucketRecords::new(Arc::clone(&store), store, Codec::default(), "one".parse().ok()))
        }
    }

    crate::record_conformance_tests!(Memory::default());
}

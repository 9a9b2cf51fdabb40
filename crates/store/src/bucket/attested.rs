//! A bucket that vouches for what it does not have.
//!
//! That an object is not there means something only where the bucket is. A gateway that restarts, a bucket that was removed, another one in its place: all
//! of them answer 404 to everything, and whoever took that for an answer would end every sandbox. So a 404 is believed when the bucket is seen to be there
//! behind it, and the object is then still not there. Nothing else costs a request more.

use std::{fmt, future::Future, ops::Range, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream::BoxStream};
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result, path::Path,
};
use tokio::time::Instant;

use crate::layout;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// By what a bucket is seen to be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Evidence {
    /// It lists what lies below a prefix, be it nothing.
    Answer,
    /// It has the marker that was put there: it is the same bucket, and not an empty one in its place.
    Marker,
}

/// A handle; cloning is cheap.
#[derive(Debug, Clone)]
pub(crate) struct Attested {
    store: Arc<dyn ObjectStore>,
    evidence: Evidence,
    /// How long one that is not there is asked again.
    patience: Duration,
}

impl Attested {
    pub(crate) fn new(store: Arc<dyn ObjectStore>, evidence: Evidence, patience: Duration) -> Self {
        Self { store, evidence, patience }
    }

    async fn attest(&self) -> Result<()> {
        let seen = match self.evidence {
            Evidence::Answer => self.store.list(Some(&layout::probes())).try_next().await.map(drop),
            Evidence::Marker => self.store.head(&layout::marker()).await.map(drop),
        };
        seen.map_err(not_there)
    }

    /// For what may be missing.
    async fn look<T, F>(&self, ask: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        self.ask(ask, true).await
    }

    /// For what a bucket that is there always has an answer to.
    async fn make<T, F>(&self, ask: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        self.ask(ask, false).await
    }

    async fn ask<T, F>(&self, ask: impl Fn() -> F, may_be_missing: bool) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let (begun, mut pause) = (Instant::now(), FIRST_PAUSE);
        loop {
            let missing = match ask().await {
                Err(missing @ Error::NotFound { .. }) => missing,
                answered => return answered,
            };
            let fault = match self.attest().await {
                // It may have come back only now: what it says itself counts.
                Ok(()) if may_be_missing => return ask().await,
                Ok(()) => not_there(missing),
                Err(fault) => fault,
            };
            let wait = pause.mul_f64(rand::random_range(0.5..1.5));
            if begun.elapsed() + wait > self.patience {
                return Err(fault);
            }
            tokio::time::sleep(wait).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

fn not_there(error: Error) -> Error {
    Error::Generic { store: "bucket", source: format!("the bucket does not seem to be there: {error}").into() }
}

/// A list of nothing is an empty one.
fn listed(object: Result<ObjectMeta>) -> Result<ObjectMeta> {
    object.map_err(|error| if matches!(error, Error::NotFound { .. }) { not_there(error) } else { error })
}

impl fmt::Display for Attested {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(formatter)
    }
}

#[async_trait]
impl ObjectStore for Attested {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let put = || self.store.put_opts(location, payload.clone(), options.clone());
        if matches!(options.mode, PutMode::Update(_)) { self.look(put).await } else { self.make(put).await }
    }

    async fn put_multipart_opts(&self, location: &Path, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.make(|| self.store.put_multipart_opts(location, options.clone())).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.look(|| self.store.get_opts(location, options.clone())).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.look(|| self.store.get_ranges(location, ranges)).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let bucket = self.clone();
        let deleted = self.store.delete_stream(locations).then(move |deleted| {
            let bucket = bucket.clone();
            async move {
                if let Err(Error::NotFound { .. }) = &deleted {
                    bucket.attest().await?;
                }
                deleted
            }
        });
        deleted.boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.store.list(prefix).map(listed).boxed()
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        self.store.list_with_offset(prefix, offset).map(listed).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.make(|| self.store.list_with_delimiter(prefix)).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.look(|| self.store.copy_opts(from, to, options.clone())).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.look(|| self.store.rename_opts(from, to, options.clone())).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use object_store::memory::InMemory;

    use super::*;

    fn on(store: &Arc<InMemory>, evidence: Evidence, patience: Duration) -> Attested {
        let store: Arc<dyn ObjectStore> = Arc::<InMemory>::clone(store);
        Attested::new(store, evidence, patience)
    }

    fn missing<T>() -> Result<T> {
        Err(Error::NotFound { path: "x".to_owned(), source: "404".into() })
    }

    #[tokio::test]
    async fn what_is_missing_is_missing_only_where_the_marker_is() {
        let memory = Arc::new(InMemory::new());
        let (marked, answering) = (on(&memory, Evidence::Marker, Duration::ZERO), on(&memory, Evidence::Answer, Duration::ZERO));
        let path = Path::from("locks/x");
        assert!(matches!(answering.head(&path).await, Err(Error::NotFound { .. })));
        let away = marked.head(&path).await.unwrap_err();
        assert!(matches!(&away, Error::Generic { .. }) && away.to_string().contains("does not seem to be there"), "{away}");
        memory.put(&layout::marker(), "here".into()).await.unwrap();
        assert!(matches!(marked.head(&path).await, Err(Error::NotFound { .. })));
        memory.put(&path, "x".into()).await.unwrap();
        assert_eq!(marked.head(&path).await.unwrap().size, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_bucket_that_comes_back_is_asked_again_and_heard_itself() {
        let memory = Arc::new(InMemory::new());
        let patient = on(&memory, Evidence::Marker, Duration::from_secs(10));
        let asked = AtomicUsize::new(0);
        // The first answer comes from something else; by the time of the evidence the bucket is back.
        memory.put(&layout::marker(), "here".into()).await.unwrap();
        let answer = patient.look(|| async { if asked.fetch_add(1, Ordering::Relaxed) == 0 { missing() } else { Ok(7) } }).await;
        assert_eq!((answer.unwrap(), asked.load(Ordering::Relaxed)), (7, 2));

        memory.delete(&layout::marker()).await.unwrap();
        let begun = Instant::now();
        let back = || async { if begun.elapsed() < Duration::from_secs(5) { missing() } else { Ok(7) } };
        assert_eq!(patient.look(back).await.unwrap(), 7);
        let begun = Instant::now();
        assert!(matches!(patient.look(|| async { missing::<()>() }).await, Err(Error::Generic { .. })));
        assert!(begun.elapsed() <= Duration::from_secs(10) && begun.elapsed() > Duration::from_secs(5), "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_made_is_never_missing() {
        let memory = Arc::new(InMemory::new());
        let once = on(&memory, Evidence::Answer, Duration::ZERO);
        assert!(matches!(once.make(|| async { missing::<()>() }).await, Err(Error::Generic { .. })));
        let asked = AtomicUsize::new(0);
        let patient = on(&memory, Evidence::Answer, Duration::from_secs(10));
        let made = patient.make(|| async { if asked.fetch_add(1, Ordering::Relaxed) < 3 { missing() } else { Ok(()) } }).await;
        assert!(made.is_ok());
    }
}

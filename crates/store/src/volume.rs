//! The volume: where everything lies, read with bounds and written durably.

use std::collections::BTreeMap;
use std::path::{Path as OsPath, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{ListResult, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use sandboxer_protocol::SandboxId;

use crate::bucket::DATA_PATIENCE;
use crate::error::{Error, Fault, Result};
use crate::failpoint::FailPoints;
use crate::key::VolumeKey;
use crate::layout::{self, CheckpointName, ImageDigest, ManifestAt, PackId, SnapshotId, Tenant};
use crate::local::LocalStore;
use crate::manifest::{MAX_MANIFEST_BYTES, Manifest};
use crate::metadata::Metadata;
use crate::record::Nonce;

const MAX_METADATA_BYTES: usize = 1 << 20;
const MAX_LATEST_BYTES: usize = 256;
const LOOKS_AT_ONCE: usize = 16;
/// Twice what a bucket's list may be behind. Amazon's and Google's are not; what speaks like them may be, a little.
const LISTED_LATE: Duration = Duration::from_secs(2);
/// Between a list that was torn and the next try.
pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(50);
pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// A handle; cloning is cheap.
#[derive(Debug, Clone)]
pub struct Volume {
    store: Arc<dyn ObjectStore>,
    /// The same, where it is a directory.
    directory: Option<Arc<LocalStore>>,
    /// Its client asks again where an answer is lost, and so do we.
    asks_again: bool,
    /// Twice what a list of it may be behind, unless it is a directory.
    listed_late: Duration,
    key: Option<Arc<VolumeKey>>,
}

impl Volume {
    /// The volume in a directory, which has to exist.
    ///
    /// # Errors
    /// It is no directory, or `SANDBOXER_FAILPOINTS` can't be understood.
    pub fn open_directory(root: &OsPath) -> Result<Self> {
        let open = || LocalStore::open(root, FailPoints::from_env()?);
        Ok(Self::in_directory(open().map_err(|source| Error::local("open the volume", root, source))?))
    }

    #[must_use]
    pub fn in_directory(store: LocalStore) -> Self {
        let store = Arc::new(store);
        Self { directory: Some(Arc::clone(&store)), store, asks_again: false, listed_late: Duration::ZERO, key: None }
    }

    /// The volume on any store whose writes are durable when they return.
    #[must_use]
    pub fn on(store: Arc<dyn ObjectStore>) -> Self {
        Self { store, directory: None, asks_again: false, listed_late: Duration::ZERO, key: None }
    }

    /// The same on a store whose client repeats a request that got no answer.
    #[must_use]
    pub fn asking_again(mut self) -> Self {
        self.asks_again = true;
        self.listed_late(LISTED_LATE)
    }

    /// The same on a store whose lists may be behind by half of this.
    #[must_use]
    pub fn listed_late(mut self, late: Duration) -> Self {
        self.listed_late = late;
        self
    }

    /// Everything read has to be authenticated with this key, everything written is.
    #[must_use]
    pub fn with_key(mut self, key: VolumeKey) -> Self {
        self.key = Some(Arc::new(key));
        self
    }

    /// For what is written here but not known to this type: the record and its lease.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    #[must_use]
    pub fn key(&self) -> Option<&VolumeKey> {
        self.key.as_deref()
    }

    /// Checks that the volume is there and answers.
    ///
    /// # Errors
    /// It does not.
    pub async fn answers(&self) -> Result<()> {
        if let Some(directory) = self.directory.clone() {
            let asked = tokio::task::spawn_blocking(move || directory.is_there()).await.map_err(|_| Error::Interrupted)?;
            return asked.map_err(|source| Error::Local { verb: "look at", path: "the volume".into(), source });
        }
        let path = layout::latest(SandboxId::random());
        match self.store.head(&path).await {
            Ok(_) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(Error::volume("look at", &path, error)),
        }
    }

    /// # Errors
    /// [`Error::Exists`] if there is one of that name.
    pub async fn put_manifest(&self, manifest: &Manifest) -> Result<()> {
        let bytes = manifest.encode(self.key())?;
        self.put(&manifest.path(), bytes.into(), PutMode::Create).await
    }

    /// # Errors
    /// [`Error::NotFound`], or [`Error::Damaged`] with the check that failed.
    pub async fn manifest(&self, at: ManifestAt) -> Result<Manifest> {
        let bytes = self.read(&at.path(), MAX_MANIFEST_BYTES).await?;
        Manifest::decode(at, &bytes, self.key())
    }

    /// # Errors
    /// As [`Volume::manifest`].
    pub async fn checkpoint(&self, sandbox_id: SandboxId, name: CheckpointName) -> Result<Manifest> {
        self.manifest(ManifestAt::Checkpoint { sandbox_id, name }).await
    }

    /// Writes the copy for people and tools. The record decides.
    ///
    /// # Errors
    /// The volume can't be written.
    pub async fn put_latest(&self, sandbox: SandboxId, name: CheckpointName) -> Result<()> {
        self.put(&layout::latest(sandbox), format!("{name}\n").into(), PutMode::Overwrite).await
    }

    /// What `latest` says, for where there is no record.
    ///
    /// # Errors
    /// It holds something else than a name.
    pub async fn latest(&self, sandbox: SandboxId) -> Result<Option<CheckpointName>> {
        let path = layout::latest(sandbox);
        let bytes = match self.read(&path, MAX_LATEST_BYTES).await {
            Err(Error::NotFound { .. }) => return Ok(None),
            other => other?,
        };
        let name = std::str::from_utf8(&bytes).ok().and_then(|text| text.trim_end().parse().ok());
        name.map(Some).ok_or_else(|| Error::damaged(&path, Fault::Malformed("it holds no checkpoint's name")))
    }

    /// # Errors
    /// The volume can't be written.
    pub async fn put_metadata(&self, sandbox: SandboxId, metadata: &Metadata) -> Result<()> {
        let path = layout::metadata(sandbox);
        let mut bytes = serde_json::to_vec_pretty(metadata).map_err(|error| Error::Invalid(format!("{path}: {error}")))?;
        bytes.push(b'\n');
        if bytes.len() > MAX_METADATA_BYTES {
            return Err(Error::TooLarge { what: path.to_string(), limit: MAX_METADATA_BYTES as u64 });
        }
        self.put(&path, bytes.into(), PutMode::Overwrite).await
    }

    /// # Errors
    /// [`Error::NotFound`], or it can't be understood.
    pub async fn metadata(&self, sandbox: SandboxId) -> Result<Metadata> {
        let path = layout::metadata(sandbox);
        let bytes = self.read(&path, MAX_METADATA_BYTES).await?;
        serde_json::from_slice(&bytes).map_err(|error| Error::damaged(&path, Fault::Unreadable(error.to_string())))
    }

    /// Sandboxes that left anything on the volume, in order.
    ///
    /// # Errors
    /// The volume can't be listed.
    pub async fn sandboxes(&self) -> Result<Vec<SandboxId>> {
        let root = Path::default();
        let listed = self.list(None).await.map_err(|error| Error::volume("list", &root, error))?;
        let mut ids: Vec<SandboxId> = listed.common_prefixes.iter().filter_map(|dir| dir.filename()?.parse().ok()).collect();
        ids.sort_unstable();
        Ok(ids)
    }

    /// Manifests of a sandbox, oldest first. Not all need be complete checkpoints: those count that the record has named.
    ///
    /// # Errors
    /// The volume can't be listed.
    pub async fn checkpoints(&self, sandbox: SandboxId) -> Result<Vec<CheckpointName>> {
        self.names(&layout::checkpoints(sandbox), |name| name.parse().ok()).await
    }

    /// # Errors
    /// The volume can't be listed.
    pub async fn snapshots(&self) -> Result<Vec<SnapshotId>> {
        self.names(&layout::snapshots(), |name| name.strip_suffix(".img")?.parse().ok()).await
    }

    /// # Errors
    /// The volume can't be listed.
    pub async fn images(&self) -> Result<Vec<ImageDigest>> {
        self.names(&layout::images(), |name| name.strip_suffix(".img")?.parse().ok()).await
    }

    /// # Errors
    /// The volume can't be listed.
    pub async fn packs(&self, tenant: Tenant) -> Result<Vec<PackId>> {
        self.names(&layout::packs(tenant), |name| name.strip_suffix(".pack")?.parse().ok()).await
    }

    /// Bytes of all packs of a tenant.
    pub(crate) async fn packs_bytes(&self, tenant: Tenant) -> Result<u64> {
        let packs = self.listed(&layout::packs(tenant), |name| name.strip_suffix(".pack")?.parse::<PackId>().ok()).await?;
        Ok(packs.into_iter().map(|(_, bytes)| bytes).sum())
    }

    pub(crate) async fn checkpoints_with_bytes(&self, sandbox: SandboxId) -> Result<Vec<(CheckpointName, u64)>> {
        self.listed(&layout::checkpoints(sandbox), |name| name.parse().ok()).await
    }

    /// Those of all sandboxes that left anything on the volume, by one list of everything: a page for a thousand objects.
    pub(crate) async fn all_checkpoints(&self) -> Result<BTreeMap<SandboxId, Vec<(CheckpointName, u64)>>> {
        let (root, mut pause) = (Path::default(), FIRST_PAUSE);
        loop {
            let mut all: BTreeMap<SandboxId, Vec<_>> = BTreeMap::new();
            let mut objects = self.store.list(None);
            let listed = loop {
                let object = match objects.next().await {
                    Some(Ok(object)) => object,
                    Some(Err(error)) => break Err(error),
                    None => break Ok(()),
                };
                let mut parts = object.location.parts();
                let Some(id) = parts.next().and_then(|first| first.as_ref().parse::<SandboxId>().ok()) else { continue };
                let of_sandbox = all.entry(id).or_default();
                if object.location.prefix_matches(&layout::checkpoints(id))
                    && let Some(name) = object.location.filename().and_then(|name| name.parse().ok())
                {
                    of_sandbox.push((name, object.size));
                }
            };
            match listed {
                Err(object_store::Error::Generic { .. }) if self.asks_again && pause < LONGEST_PAUSE => {
                    tokio::time::sleep(pause.mul_f64(rand::random_range(0.5..1.5))).await;
                    pause *= 2;
                }
                Err(error) => return Err(Error::volume("list", &root, error)),
                Ok(()) => {
                    all.values_mut().for_each(|listed| listed.sort_unstable());
                    return Ok(all);
                }
            }
        }
    }

    pub(crate) async fn snapshots_with_bytes(&self) -> Result<Vec<(SnapshotId, u64)>> {
        self.listed(&layout::snapshots(), |name| name.strip_suffix(".img")?.parse().ok()).await
    }

    pub(crate) async fn images_with_bytes(&self) -> Result<Vec<(ImageDigest, u64)>> {
        self.listed(&layout::images(), |name| name.strip_suffix(".img")?.parse().ok()).await
    }

    /// Every pack with its bytes.
    pub(crate) async fn all_packs(&self) -> Result<BTreeMap<(Tenant, PackId), u64>> {
        let dir = layout::all_packs();
        let listed = match self.list(Some(&dir)).await {
            Err(object_store::Error::NotFound { .. }) => return Ok(BTreeMap::new()),
            other => other.map_err(|error| Error::volume("list", &dir, error))?,
        };
        let mut packs = BTreeMap::new();
        for tenant in listed.common_prefixes.iter().filter_map(|dir| dir.filename()?.parse::<Tenant>().ok()) {
            let of_tenant = self.listed(&layout::packs(tenant), |name| name.strip_suffix(".pack")?.parse().ok()).await?;
            packs.extend(of_tenant.into_iter().map(|(pack, bytes)| ((tenant, pack), bytes)));
        }
        Ok(packs)
    }

    /// Writers that are at work, or died at it.
    pub(crate) async fn intents(&self) -> Result<Vec<Nonce>> {
        self.names(&layout::intents(), |name| name.parse().ok()).await
    }

    pub(crate) async fn condemned_lists(&self) -> Result<Vec<Nonce>> {
        self.names(&layout::condemned_lists(), |name| name.parse().ok()).await
    }

    /// Every request has a way to go: more of them at once are faster.
    pub(crate) fn is_far(&self) -> bool {
        self.asks_again
    }

    pub(crate) fn is_directory(&self) -> bool {
        self.directory.is_some()
    }

    /// How old a listing may be.
    pub(crate) fn seen_late(&self) -> Duration {
        self.directory.as_ref().map_or(self.listed_late, |directory| directory.seen_late())
    }

    /// What writers have not named yet, or died before they could, with its bytes.
    pub(crate) async fn staged(&self) -> Result<BTreeMap<PathBuf, u64>> {
        let Some(directory) = self.directory.clone() else { return Ok(BTreeMap::new()) };
        let find = move || directory.staged();
        let found = tokio::task::spawn_blocking(find).await.map_err(|_| Error::Interrupted)?;
        found.map_err(|source| Error::Local { verb: "list", path: "what is staged on the volume".into(), source })
    }

    pub(crate) async fn remove_staged(&self, path: PathBuf) -> Result<()> {
        let Some(directory) = self.directory.clone() else { return Ok(()) };
        let shown = path.clone();
        let removed = tokio::task::spawn_blocking(move || directory.remove_staged(&path)).await.map_err(|_| Error::Interrupted)?;
        match removed {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::local("remove", &shown, error)),
            _ => Ok(()),
        }
    }

    /// A client asks a bucket again for everything but a list whose answer ends too early.
    async fn list(&self, dir: Option<&Path>) -> object_store::Result<ListResult> {
        let mut pause = FIRST_PAUSE;
        loop {
            match self.store.list_with_delimiter(dir).await {
                Err(object_store::Error::Generic { .. }) if self.asks_again && pause < LONGEST_PAUSE => {
                    tokio::time::sleep(pause.mul_f64(rand::random_range(0.5..1.5))).await;
                    pause *= 2;
                }
                done => return done,
            }
        }
    }

    pub(crate) async fn names<T: Ord>(&self, dir: &Path, parse: impl Fn(&str) -> Option<T>) -> Result<Vec<T>> {
        Ok(self.listed(dir, parse).await?.into_iter().map(|(name, _)| name).collect())
    }

    /// Names with their bytes, in order.
    pub(crate) async fn listed<T: Ord>(&self, dir: &Path, parse: impl Fn(&str) -> Option<T>) -> Result<Vec<(T, u64)>> {
        let listed = match self.list(Some(dir)).await {
            Err(object_store::Error::NotFound { .. }) => return Ok(Vec::new()),
            other => other.map_err(|error| Error::volume("list", dir, error))?,
        };
        let mut names: Vec<_> =
            listed.objects.iter().filter_map(|object| Some((parse(object.location.filename()?)?, object.size))).collect();
        names.sort_unstable();
        Ok(names)
    }

    /// Bytes of a pack, `None` if it is not there.
    pub(crate) async fn pack_bytes(&self, tenant: Tenant, id: PackId) -> Result<Option<u64>> {
        let path = layout::pack(tenant, id);
        match self.store.head(&path).await {
            Ok(about) => Ok(Some(about.size)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(Error::volume("look at", &path, error)),
        }
    }

    /// The same of many, in no order.
    pub(crate) async fn sizes_of(&self, tenant: Tenant, ids: Vec<PackId>) -> Result<Vec<(PackId, Option<u64>)>> {
        let volume = self.clone();
        let looks = stream::iter(ids).map(move |id| {
            let volume = volume.clone();
            async move { Ok((id, volume.pack_bytes(tenant, id).await?)) }
        });
        looks.buffer_unordered(LOOKS_AT_ONCE).try_collect().await
    }

    pub(crate) async fn put(&self, path: &Path, payload: PutPayload, mode: PutMode) -> Result<()> {
        if mode == PutMode::Create && self.asks_again {
            return self.create_far(path, payload).await;
        }
        let put = self.store.put_opts(path, payload, PutOptions::from(mode)).await;
        put.map(drop).map_err(|error| Error::volume("write", path, error))
    }

    /// A client does not repeat a conditional write that got no answer, since it can't know what became of it. Here that can be seen.
    async fn create_far(&self, path: &Path, payload: PutPayload) -> Result<()> {
        let (begun, mut pause) = (Instant::now(), FIRST_PAUSE);
        loop {
            match self.store.put_opts(path, payload.clone(), PutOptions::from(PutMode::Create)).await {
                // What is there may be this very write.
                Err(object_store::Error::AlreadyExists { .. }) if self.holds(path, &payload).await? => return Ok(()),
                Err(object_store::Error::Generic { .. }) if begun.elapsed() < DATA_PATIENCE => {
                    tokio::time::sleep(pause.mul_f64(rand::random_range(0.5..1.5))).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                put => return put.map(drop).map_err(|error| Error::volume("write", path, error)),
            }
        }
    }

    /// Whether exactly this is there.
    async fn holds(&self, path: &Path, payload: &PutPayload) -> Result<bool> {
        match self.read(path, payload.content_length()).await {
            Ok(there) => Ok(payload.iter().flatten().eq(there.iter())),
            Err(Error::NotFound { .. } | Error::Damaged { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The whole of a file, if it is not larger than `limit`: never more is read than that.
    pub(crate) async fn read(&self, path: &Path, limit: usize) -> Result<Bytes> {
        let fail = |error| Error::volume("read", path, error);
        let got = self.store.get(path).await.map_err(fail)?;
        let too_large = |found| Error::damaged(path, Fault::TooLarge { found, limit: limit as u64 });
        if got.meta.size > limit as u64 {
            return Err(too_large(got.meta.size));
        }
        let mut bytes = Vec::with_capacity(usize::try_from(got.meta.size).unwrap_or(0));
        let mut stream = got.into_stream().boxed();
        while let Some(piece) = stream.try_next().await.map_err(fail)? {
            if bytes.len() + piece.len() > limit {
                return Err(too_large((bytes.len() + piece.len()) as u64));
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes.into())
    }
}

//! The volume as one node sees it: requests that are late, refused or not answered, and that go their way when whoever sent them is dead.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{FutureExt as _, StreamExt as _, stream::BoxStream};
use object_store::{
    CopyOptions, Error as StoreError, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt as _,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result as StoreResult, memory::InMemory, path::Path,
};
use sandboxer_protocol::SandboxId;
use sandboxer_store::{
    Manifest, ManifestAt,
    record::{Changes, MemoryRecords, ReadError, Record, RecordStore, Stored, SwapError},
};
use tokio::sync::oneshot;

use super::CollectionCounts;
use crate::{
    network::Kept,
    world::{World, lock},
};

/// What all nodes share, and what an observer knows of it.
pub(super) struct Shared {
    pub(super) world: Arc<World>,
    objects: InMemory,
    pub(super) records: MemoryRecords,
    state: Mutex<State>,
    kept: Kept,
}

/// What a bucket's list is behind at most.
const BEHIND: Duration = Duration::from_secs(1);

#[derive(Default)]
struct State {
    /// Manifests that are or were there, and the packs that each names.
    names: BTreeMap<Path, BTreeSet<Path>>,
    there: BTreeSet<Path>,
    counts: CollectionCounts,
    calm: bool,
    /// What came to a bucket, and when; and what left it.
    came: BTreeMap<Path, Duration>,
    went: Vec<(ObjectMeta, Duration)>,
}

impl Shared {
    pub(super) fn new(world: &Arc<World>, kept: Kept) -> Arc<Self> {
        let (objects, records) = (InMemory::new(), MemoryRecords::default());
        Arc::new(Self { world: Arc::clone(world), objects, records, state: Mutex::default(), kept })
    }

    pub(super) fn listed_late(&self) -> Duration {
        if self.kept == Kept::Bucket { BEHIND } else { Duration::ZERO }
    }

    pub(super) fn count(&self, count: impl FnOnce(&mut CollectionCounts)) {
        count(&mut lock(&self.state).counts);
    }

    pub(super) fn counts(&self) -> CollectionCounts {
        lock(&self.state).counts
    }

    /// From now on nothing is late or refused.
    pub(super) fn calm_down(&self) {
        lock(&self.state).calm = true;
    }

    /// What is there below a directory.
    pub(super) fn below(&self, dir: &str) -> BTreeSet<Path> {
        lock(&self.state).there.iter().filter(|path| path.as_ref().starts_with(dir)).cloned().collect()
    }

    /// The packs that a manifest names which is there.
    pub(super) fn needed(&self) -> BTreeSet<Path> {
        let state = lock(&self.state);
        state.names.iter().filter(|(path, _)| state.there.contains(*path)).flat_map(|(_, packs)| packs.iter().cloned()).collect()
    }

    fn arrived(&self, path: &Path, payload: &PutPayload) {
        let lacking = {
            let mut state = lock(&self.state);
            if let Some(at) = manifest_at(path) {
                let packs = Manifest::decode(at, &Bytes::from(payload.clone()), None).map(|manifest| packs_of(&manifest));
                state.names.insert(path.clone(), packs.unwrap_or_default());
            }
            state.there.insert(path.clone());
            state.came.insert(path.clone(), self.world.now());
            state.names.get(path).and_then(|packs| packs.iter().find(|pack| !state.there.contains(*pack)).cloned())
        };
        if let Some(pack) = lacking {
            self.world.violated(format!("{path} needs {pack}, which is not there"));
        }
    }

    fn left(&self, path: &Path) {
        let needs = {
            let mut state = lock(&self.state);
            if !state.there.remove(path) {
                return;
            }
            if path.as_ref().starts_with("packs/") {
                state.counts.packs_removed += 1;
            }
            state
                .names
                .iter()
                .find(|(manifest, packs)| state.there.contains(*manifest) && packs.contains(path))
                .map(|(path, _)| path.clone())
        };
        if let Some(manifest) = needs {
            self.world.violated(format!("{path} was removed, and {manifest} needs it"));
        }
        if let Some((id, name)) = checkpoint_of(path)
            && let Some(stored) = self.records.read_now(id)
            && stored.record.tombstone.is_none()
            && stored.record.latest.is_some_and(|latest| latest.to_string() == name)
        {
            self.world.violated(format!("{path} was removed, and its record names it"));
        }
    }

    fn gone(&self, about: ObjectMeta) {
        let at = self.world.now();
        let mut state = lock(&self.state);
        state.went.retain(|(_, went)| *went + BEHIND >= at);
        state.went.push((about, at));
    }

    /// A list, of a bucket as it was a moment ago.
    fn listed(&self, prefix: Option<&Path>) -> StoreResult<ListResult> {
        let mut listed = now(self.objects.list_with_delimiter(prefix))?;
        if self.kept == Kept::Directory || !self.is_lucky(50) {
            return Ok(listed);
        }
        let then = self.world.now().saturating_sub(self.world.random(|rng| rng.millis(0..BEHIND.as_millis() as u64)));
        let state = lock(&self.state);
        listed.objects.retain(|object| state.came.get(&object.location).is_none_or(|came| *came <= then));
        let before = |object: &ObjectMeta| state.came.get(&object.location).is_some_and(|came| *came <= then);
        for (object, _) in state.went.iter().filter(|(object, went)| *went > then && before(object)) {
            let root = Path::default();
            let Some(mut rest) = object.location.prefix_match(prefix.unwrap_or(&root)) else { continue };
            let (Some(first), more) = (rest.next(), rest.next().is_some()) else { continue };
            let place = prefix.unwrap_or(&root).clone().join(first);
            if more && !listed.common_prefixes.contains(&place) {
                listed.common_prefixes.push(place);
            } else if !more && !listed.objects.iter().any(|there| there.location == object.location) {
                listed.objects.push(object.clone());
            }
        }
        Ok(listed)
    }

    fn delay(&self) -> Duration {
        let calm = lock(&self.state).calm;
        self.world.random(|rng| if !calm && rng.chance(6) { rng.millis(50..3000) } else { rng.millis(1..15) })
    }

    fn is_lucky(&self, percent: u64) -> bool {
        !lock(&self.state).calm && self.world.random(|rng| rng.chance(percent))
    }
}

fn packs_of(manifest: &Manifest) -> BTreeSet<Path> {
    let tenant = manifest.tenant();
    manifest.packs().iter().map(|pack| Path::from(format!("packs/{tenant}/{}.pack", pack.id))).collect()
}

fn manifest_at(path: &Path) -> Option<ManifestAt> {
    if let Some((sandbox_id, name)) = checkpoint_of(path) {
        return Some(ManifestAt::Checkpoint { sandbox_id, name: name.parse().ok()? });
    }
    let snapshot_id = path.as_ref().strip_prefix("snapshots/")?.strip_suffix(".img")?.parse().ok()?;
    Some(ManifestAt::Snapshot { snapshot_id })
}

fn checkpoint_of(path: &Path) -> Option<(SandboxId, String)> {
    let parts: Vec<_> = path.parts().collect();
    let [id, dir, name] = &parts[..] else { return None };
    (dir.as_ref() == "checkpoints").then(|| Some((id.as_ref().parse().ok()?, name.as_ref().to_owned())))?
}

/// The way of one node to the volume. It is the same for all: only the requests differ.
#[derive(Clone)]
pub(super) struct Link(pub(super) Arc<Shared>);

impl Link {
    async fn request<T: Send + 'static>(&self, apply: impl FnOnce(&Shared) -> StoreResult<T> + Send + 'static) -> StoreResult<T> {
        let shared = &self.0;
        if shared.is_lucky(1) {
            shared.world.sleep(shared.delay()).await;
            return Err(broken("refused"));
        }
        let (sender, reply) = oneshot::channel();
        let way = Arc::clone(shared);
        shared.world.after(
            shared.delay(),
            Box::new(move |world| {
                let outcome = apply(&way);
                let outcome = if way.is_lucky(1) { Err(broken("the reply was lost")) } else { outcome };
                world.after(way.delay(), Box::new(move |_| drop(sender.send(outcome))));
            }),
        );
        reply.await.unwrap_or_else(|_| Err(broken("gone")))
    }
}

fn broken(what: &'static str) -> StoreError {
    StoreError::Generic { store: "simulated", source: what.into() }
}

/// What memory does, it does at once.
fn now<T>(work: impl Future<Output = StoreResult<T>>) -> StoreResult<T> {
    work.now_or_never().unwrap_or_else(|| Err(broken("memory waits")))
}

impl fmt::Debug for Link {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Link")
    }
}

impl fmt::Display for Link {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a simulated volume")
    }
}

#[async_trait]
impl ObjectStore for Link {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> StoreResult<PutResult> {
        let location = location.clone();
        self.request(move |shared| {
            let put = now(shared.objects.put_opts(&location, payload.clone(), options))?;
            shared.world.note(|| format!("put {location}"));
            shared.arrived(&location, &payload);
            Ok(put)
        })
        .await
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> StoreResult<Box<dyn MultipartUpload>> {
        Err(broken("nobody does that"))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> StoreResult<GetResult> {
        let location = location.clone();
        self.request(move |shared| now(shared.objects.get_opts(&location, options))).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, StoreResult<Path>>) -> BoxStream<'static, StoreResult<Path>> {
        let link = self.clone();
        let removed = locations.then(move |location| {
            let link = link.clone();
            async move {
                let location = location?;
                let target = location.clone();
                link.request(move |shared| {
                    let about = now(shared.objects.head(&target));
                    let removed = now(shared.objects.delete(&target));
                    if let Ok(about) = about {
                        shared.gone(about);
                    }
                    shared.world.note(|| format!("removed {target}"));
                    shared.left(&target);
                    removed
                })
                .await?;
                Ok(location)
            }
        });
        removed.boxed()
    }

    fn list(&self, _: Option<&Path>) -> BoxStream<'static, StoreResult<ObjectMeta>> {
        futures_util::stream::empty().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> StoreResult<ListResult> {
        let prefix = prefix.cloned();
        self.request(move |shared| shared.listed(prefix.as_ref())).await
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> StoreResult<()> {
        Err(broken("nobody does that"))
    }
}

#[async_trait]
impl RecordStore for Link {
    async fn read(&self, id: SandboxId) -> Result<Option<Stored>, ReadError> {
        let read = self.request(move |shared| Ok(shared.records.read_now(id))).await;
        read.map_err(|error| ReadError::Unavailable(error.to_string()))
    }

    async fn create(&self, id: SandboxId, first: &Record) -> Result<Stored, SwapError> {
        let first = first.clone();
        let made = self.request(move |shared| Ok(shared.records.swap_now(id, None, &first))).await;
        made.unwrap_or_else(|error| Err(SwapError::Unknown(error.to_string())))
    }

    async fn swap(&self, id: SandboxId, expected: &Stored, next: &Record) -> Result<Stored, SwapError> {
        let (expected, next) = (expected.clone(), next.clone());
        let swapped = self.request(move |shared| {
            let swapped = shared.records.swap_now(id, Some(&expected), &next);
            if swapped.is_ok() && next.latest != expected.record.latest {
                shared.published(id, &next);
            }
            Ok(swapped)
        });
        swapped.await.unwrap_or_else(|error| Err(SwapError::Unknown(error.to_string())))
    }

    async fn remove(&self, id: SandboxId, expected: &Stored) -> Result<(), SwapError> {
        let expected = expected.clone();
        let removed = self.request(move |shared| Ok(now_removed(shared, id, &expected))).await;
        removed.unwrap_or_else(|error| Err(SwapError::Unknown(error.to_string())))
    }

    async fn list(&self, after: Option<SandboxId>, limit: usize) -> Result<Vec<SandboxId>, ReadError> {
        self.0.records.list(after, limit).await
    }

    fn changes(&self, _: SandboxId) -> Changes {
        Changes::none()
    }
}

fn now_removed(shared: &Shared, id: SandboxId, expected: &Stored) -> Result<(), SwapError> {
    shared.records.remove(id, expected).now_or_never().unwrap_or_else(|| Err(SwapError::Unavailable("memory waits".to_owned())))
}

impl Shared {
    fn published(&self, id: SandboxId, record: &Record) {
        let Some(latest) = record.latest else { return };
        let path = Path::from(format!("{id}/checkpoints/{latest}"));
        self.count(|counts| counts.published += 1);
        self.world.note(|| format!("published {path}"));
        if !lock(&self.state).there.contains(&path) {
            self.world.violated(format!("{path} was published, and is not there"));
        }
    }
}

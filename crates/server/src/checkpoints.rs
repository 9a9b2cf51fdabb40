//! The persistent volume, as this server uses it: what a sandbox is saved as, what it is restored from, and the lease on it.
//!
//! Everything that comes from the volume is hostile input. It is parsed by [`sandboxer_store`], and what is run is always made from the
//! server's own template.

mod burials;
mod catalogue;
mod collecting;
mod facts;
mod family;
mod images;
mod resting;
mod state;

use std::{
    collections::BTreeMap,
    fs, future, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use sandboxer_protocol::SandboxId;
use sandboxer_runtime::{AfterSave, PAGES};
use sandboxer_store::{
    Cache, CheckpointName, ChunkIndex, Contract, Error, FileSet, Growth, ImageDigest, KeptName, Loader, Manifest, ManifestAt, Metadata,
    Place, Prepared, SandboxStatus, Saved as SavedFiles, Saver, SnapshotId, Source, Tenant, Volume, VolumeKey,
    collect::{LONGEST_SAVE, Retention, Writer},
    failpoint::FailPoints,
    key::Purpose,
    lease::{BootClock, Leases, Spawn, Terms},
    record::{Codec, InstanceId, ReadError, Stored},
};
use serde_json::Value;
use tokio::{
    sync::{Semaphore, watch},
    task::JoinHandle,
    time::Instant,
};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tracing::{debug, warn};

pub(crate) use self::burials::Burial;
use self::burials::Burials;
pub(crate) use self::catalogue::{About, Origin, SavedCheckpoint, SavedSnapshot};
use self::catalogue::{Known, Saving};
pub(crate) use self::collecting::tell as tell_collected;
pub use self::facts::Facts;
pub(crate) use self::family::{Branch, Family, Relative};
pub(crate) use self::images::StoredImages;
use self::resting::Resting;
pub(crate) use self::resting::{Rest, Resters};
pub(crate) use self::state::SavedState;
use crate::{images::Images, sandbox::record::Record};

/// Where the hash of a sandbox's token is kept on the volume.
const TOKEN: &str = "token_sha256";
/// Where `metadata.json` says that the sandbox is in the list of this tenant.
const TENANT: &str = "tenant";
/// The files that runsc makes, that which is read as it grows before the others.
const FILES: [&str; 3] = [PAGES, "checkpoint.img", "pages_meta.img"];
/// What may be restored besides the memory and the disk of the largest sandbox: gVisor's own state.
const ROOM_BYTES: u64 = 1 << 30;

/// How checkpoints are kept.
#[derive(Debug, Clone)]
pub struct CheckpointSettings {
    /// The volume that all instances share.
    pub place: Place,
    /// Authenticates what is read from it.
    pub key_file: Option<PathBuf>,
    /// What is kept on this machine's own disk, so that a sandbox that comes back is there at once.
    pub cache_bytes: u64,
    pub terms: Terms,
    pub facts: Facts,
    pub collection: Collection,
}

/// What is removed from the volume, and when.
#[derive(Debug, Clone, Copy)]
pub struct Collection {
    /// How often this instance collects; none: never.
    pub every: Option<Duration>,
    /// Checkpoints of a sandbox that somebody asked for.
    pub keep_checkpoints: usize,
    /// A save that takes longer fails.
    pub longest_save: Duration,
}

impl Default for Collection {
    fn default() -> Self {
        Self { every: Some(Duration::from_secs(600)), keep_checkpoints: Retention::default().checkpoints, longest_save: LONGEST_SAVE }
    }
}

pub(crate) struct Checkpoints {
    volume: Volume,
    saver: Saver,
    cache: Cache,
    pub(crate) leases: Leases,
    facts: Facts,
    /// Captures that are on their way to the volume.
    work: PathBuf,
    images: StoredImages,
    largest_bytes: u64,
    tasks: TaskTracker,
    known: Known,
    resting: Resting,
    collection: Collection,
    burials: Burials,
    /// Who saves by itself takes it.
    pub(crate) autosaves: Arc<Semaphore>,
}

/// What is stored of a capture: its data, and the digest of its image.
type Data = (SavedFiles, ImageDigest);

/// A capture that is being made, while what there is of it is stored already. Once it is dropped there will be none, and what was stored is withdrawn, in the background.
pub(crate) struct Capturing {
    dir: tempfile::TempDir,
    growth: watch::Sender<Growth>,
    stored: JoinHandle<Result<Data, Error>>,
}

impl Capturing {
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// So much is there of what is large.
    pub(crate) fn written(&self, bytes: u64) {
        self.growth.send_modify(|growth| growth.bytes = bytes);
    }
}

/// A sandbox at one moment, on this machine's disk.
pub(crate) struct Capture {
    dir: tempfile::TempDir,
    state: SavedState,
    image: PathBuf,
    created_at: jiff::Timestamp,
    automatic: bool,
    /// It goes on here, so that hardly anybody asks for what is saved of it.
    goes_on: bool,
    parent: Option<CheckpointName>,
    /// Its data, if it was stored while it was captured.
    stored: Option<AbortOnDropHandle<Result<Data, Error>>>,
}

/// Something that was saved, but for its data.
pub(crate) struct Found {
    pub(crate) state: SavedState,
    pub(crate) image: PathBuf,
    pub(crate) manifest: Arc<Manifest>,
}

impl Checkpoints {
    pub(crate) fn open(
        settings: CheckpointSettings,
        data_dir: &Path,
        largest_bytes: u64,
        quota: Option<u64>,
        tasks: TaskTracker,
    ) -> io::Result<Self> {
        let CheckpointSettings { place, key_file, cache_bytes, terms, facts, collection } = settings;
        let key = key_file.as_deref().map(VolumeKey::read).transpose().map_err(other)?;
        let points = FailPoints::from_env()?;
        let mut volume = place.volume(points.clone())?;
        let codec = match key.clone() {
            Some(key) => Codec::sealed(Arc::new(move |bytes| key.mac(Purpose::Record, bytes))),
            None => Codec::default(),
        };
        if let Some(key) = key {
            volume = volume.with_key(key);
        }
        let instance = instance(data_dir)?;
        let records = place.records(codec.clone(), points.clone(), Some(instance.clone()))?;
        // Lists and attaches read by other threads than those that renew leases. A bucket needs none.
        let looks = match place.directory() {
            Some(_) => place.records(codec, points, Some(instance.clone()))?,
            None => Arc::clone(&records),
        };
        let index = ChunkIndex::default();
        let loader = Loader::new(volume.clone(), index.clone());
        let work = data_dir.join("saving");
        // What an earlier process did not finish is of no use: the sandbox is still there, or was never given up.
        fs::remove_dir_all(&work).or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })?;
        private_dir(&work)?;
        let cache = Cache::open(&data_dir.join("cache"), cache_bytes, loader.clone()).map_err(other)?;
        let writer = Writer::new(instance.clone(), Arc::new(BootClock), collection.longest_save);
        let saver = Saver::new(volume.clone(), index).with_writer(writer).with_quota(quota);
        let spawn: Spawn = {
            let tasks = tasks.clone();
            Arc::new(move |task| drop(tasks.spawn(task)))
        };
        Ok(Self {
            images: StoredImages::new(saver.clone(), loader.clone(), data_dir.join("images")),
            saver,
            volume,
            cache,
            leases: Leases::new(records, Arc::new(BootClock), instance, terms, spawn).with_looks(looks),
            facts,
            work,
            largest_bytes: largest_bytes.saturating_add(ROOM_BYTES),
            tasks,
            known: Known::default(),
            resting: Resting::default(),
            collection,
            burials: Burials::open(data_dir.join("burials"))?,
            autosaves: Arc::new(Semaphore::new(1)),
        })
    }

    /// Checks that the volume answers, also by the means that leases depend on.
    pub(crate) async fn answers(&self) -> Result<(), String> {
        let (records, data) = tokio::join!(self.leases.answers(), self.volume.answers());
        records.map_err(|error| error.to_string())?;
        data.map_err(|error| error.whole())
    }

    /// What the record of a sandbox tells before it is locked.
    pub(crate) async fn look(&self, id: SandboxId) -> Result<Option<Stored>, ReadError> {
        self.leases.records().read(id).await
    }

    /// The hash of the token that opens the sandbox of a record.
    pub(crate) fn token_sha256(stored: &Stored) -> &str {
        stored.record.attributes.get(TOKEN).and_then(Value::as_str).unwrap_or_default()
    }

    pub(crate) fn attributes(record: &Record) -> BTreeMap<String, Value> {
        BTreeMap::from([(TOKEN.to_owned(), Value::from(record.token_sha256.clone()))])
    }

    /// Puts the image of a sandbox on the volume, in the background, so that its first save does not wait for it.
    pub(crate) fn keep_image(self: &Arc<Self>, image: PathBuf) {
        let checkpoints = Arc::clone(self);
        self.tasks.spawn(async move {
            if let Err(error) = checkpoints.images.put(&image).await {
                warn!(error = error.whole(), "the image could not be put on the volume; the first save tries again");
            }
        });
    }

    /// An empty directory to save into.
    pub(crate) fn work_dir(&self) -> io::Result<tempfile::TempDir> {
        tempfile::Builder::new().prefix("save-").tempdir_in(&self.work)
    }

    /// A sandbox that stops by itself, with its server or for another, would be lost without its save: that
    /// is not refused for want of a quota.
    fn saver_for(&self, bounded: bool) -> Saver {
        if bounded { self.saver.clone() } else { self.saver.without_quota() }
    }

    /// Begins to store a capture of which nothing is there yet.
    pub(crate) fn begin(
        self: &Arc<Self>,
        dir: tempfile::TempDir,
        record: &Record,
        automatic: bool,
        parent: Option<CheckpointName>,
    ) -> Result<Capturing, Error> {
        let (growth, grows) = watch::channel(Growth::default());
        let (checkpoints, id, tenant, image) = (Arc::clone(self), record.id, tenant(record.owner.as_deref()), record.image.clone());
        let first = source(dir.path(), PAGES)?;
        let saver = self.saver_for(!automatic);
        let stored = self.tasks.spawn(async move {
            let mut told = grows.clone();
            let given_up = async {
                if told.wait_for(|growth| growth.files.is_some()).await.is_ok() {
                    future::pending::<()>().await;
                }
            };
            let (digest, parent) = tokio::select! {
                before = checkpoints.before(id, &image, parent) => before?,
                () = given_up => return Err(Error::Interrupted),
            };
            let parents: Vec<&Manifest> = parent.iter().collect();
            Ok((saver.save_growing(tenant, &first, grows, &parents).await?, digest))
        });
        Ok(Capturing { dir, growth, stored })
    }

    /// What was captured, with what the next server has to know of it.
    pub(crate) fn capture(
        &self,
        dir: tempfile::TempDir,
        record: &Record,
        automatic: bool,
        after: AfterSave,
        parent: Option<CheckpointName>,
    ) -> Capture {
        let (created_at, goes_on) = (jiff::Timestamp::now(), after == AfterSave::GoOn);
        Capture { dir, state: SavedState::of(record), image: record.image.clone(), created_at, automatic, goes_on, parent, stored: None }
    }

    /// The same of one that is whole now.
    pub(crate) fn captured(
        &self,
        capturing: Capturing,
        record: &Record,
        automatic: bool,
        after: AfterSave,
        parent: Option<CheckpointName>,
    ) -> Result<Capture, Error> {
        let files = sources(capturing.dir())?;
        let Capturing { dir, growth, stored } = capturing;
        // Whoever stores it has it, or has failed and says so.
        growth.send_modify(|growth| growth.files = Some(files));
        Ok(Capture { stored: Some(AbortOnDropHandle::new(stored)), ..self.capture(dir, record, automatic, after, parent) })
    }

    /// Makes a capture durable. Nothing counts yet. What is left to be done on the volume is done meanwhile, by the task that it returns.
    pub(crate) async fn persist(
        &self,
        id: SandboxId,
        mut capture: Capture,
        epoch: u64,
        wanted: CheckpointName,
    ) -> Result<(CheckpointName, JoinHandle<()>), Error> {
        let (stored, there) = tokio::join!(self.store(id, &mut capture, epoch, None), self.volume.checkpoints(id));
        let (saved, contract) = stored?;
        let prepared = match there {
            Ok(there) => {
                let last = there.last().copied().max(CheckpointName::at(wanted.ms().saturating_sub(1)));
                self.volume.prepare_behind(&saved, contract, last).await
            }
            Err(error) => Err(error),
        };
        // Whoever waits for the sandbox need not wait for this as well.
        let finishing = self.tasks.spawn(saved.finish());
        let Prepared { name, manifest, .. } = prepared?;
        self.adopt(manifest, &capture).await;
        Ok((name, finishing))
    }

    /// Makes a capture a snapshot that stands on its own.
    pub(crate) async fn put_snapshot(
        &self,
        id: SandboxId,
        mut capture: Capture,
        epoch: u64,
        (snapshot_id, name): (SnapshotId, Option<String>),
    ) -> Result<Manifest, Error> {
        let (saved, contract) = self.store(id, &mut capture, epoch, name).await?;
        let manifest = self.volume.put_snapshot(&saved, contract, snapshot_id).await;
        saved.finish().await;
        let manifest = manifest?;
        self.adopt(manifest.clone(), &capture).await;
        Ok(manifest)
    }

    /// Without it the next restore here reads the volume. What a sandbox that goes on saves by itself is not kept: it would be written to this machine's disk
    /// again and again, and the sandbox would wait for the disk at its next save.
    async fn adopt(&self, manifest: Manifest, capture: &Capture) {
        if capture.automatic && capture.goes_on {
            return;
        }
        if let Err(error) = self.cache.adopt(&Arc::new(manifest), capture.dir.path()).await {
            warn!(error = error.whole(), "what was saved could not be kept in the cache");
        }
    }

    /// What has to be there before the data of a sandbox: its image, and what it may have in common with its last checkpoint.
    async fn before(&self, id: SandboxId, image: &Path, parent: Option<CheckpointName>) -> Result<(ImageDigest, Option<Manifest>), Error> {
        let parent = async {
            match parent {
                Some(name) => self.volume.checkpoint(id, name).await.ok(),
                None => None,
            }
        };
        let (digest, parent) = tokio::join!(self.images.put(image), parent);
        Ok((digest?, parent))
    }

    async fn store_data(&self, id: SandboxId, capture: &Capture) -> Result<Data, Error> {
        let sources = sources(capture.dir.path())?;
        let (digest, parent) = self.before(id, &capture.image, capture.parent).await?;
        let parents: Vec<&Manifest> = parent.iter().collect();
        let saver = self.saver_for(capture.goes_on || !capture.automatic);
        Ok((saver.save(tenant(capture.state.owner.as_deref()), &sources, &parents).await?, digest))
    }

    /// Writes the data of a capture, to which nothing refers yet.
    async fn store(&self, id: SandboxId, capture: &mut Capture, epoch: u64, name: Option<String>) -> Result<(SavedFiles, Contract), Error> {
        let (saved, digest) = match capture.stored.take() {
            Some(stored) => stored.await.map_err(|_| Error::Interrupted).flatten()?,
            None => self.store_data(id, capture).await?,
        };
        let contract = Contract {
            sandbox_id: id,
            created_at: capture.created_at,
            parent: capture.parent,
            epoch,
            automatic: capture.automatic,
            name,
            runsc_version: self.facts.runsc_version.clone(),
            platform: self.facts.platform.clone(),
            cpu_features: self.facts.cpu_features.clone(),
            image: digest,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            spec: Value::Null,
            state: serde_json::to_value(&capture.state).map_err(invalid)?,
            other: Saving { written_bytes: saved.stats.written_bytes, reused_bytes: saved.stats.reused_bytes }.noted(),
        };
        Ok((saved, contract))
    }

    /// What was saved, once more: a new checkpoint of a sandbox with old content. Nothing counts yet. `files` are that content: what is no longer on the volume
    /// is written from them.
    pub(crate) async fn again(
        &self,
        of: &Manifest,
        files: &FileSet,
        record: &Record,
        after: Option<CheckpointName>,
    ) -> Result<CheckpointName, Error> {
        let contract = of.contract().ok_or_else(|| Error::Invalid(format!("{} is not that of a sandbox", of.at())))?;
        let parent = match of.at() {
            ManifestAt::Checkpoint { sandbox_id, name } if sandbox_id == record.id => Some(name),
            _ => None,
        };
        let saved = self.saver.without_quota().save_again(of, &sources(files.dir())?).await?;
        let saving = Saving { written_bytes: saved.stats.written_bytes, reused_bytes: saved.stats.reused_bytes };
        let mut other = saving.noted();
        if parent.is_none() {
            other.extend(Origin::of(of).map(Origin::noted).unwrap_or_default());
        }
        let contract = Contract {
            sandbox_id: record.id,
            created_at: jiff::Timestamp::now(),
            parent,
            epoch: record.epoch.unwrap_or_default(),
            automatic: false,
            name: None,
            state: serde_json::to_value(SavedState::of(record)).map_err(invalid)?,
            other,
            ..contract.clone()
        };
        let prepared = self.volume.prepare(&saved, contract, after).await;
        saved.finish().await;
        Ok(prepared?.name)
    }

    /// What was saved there, checked but for its data, for somebody who may know of it. None: it is not there, or of an owner that does not
    /// pass, which is the same to those who ask.
    pub(crate) async fn find_for(
        &self,
        at: ManifestAt,
        images: &Images,
        passes: impl Fn(Option<&str>) -> bool,
    ) -> Result<Option<Found>, String> {
        let Some(manifest) = self.manifest_for(at, passes).await? else { return Ok(None) };
        match self.understand(at, Arc::new(manifest), images).await {
            Ok(found) => Ok(Some(found)),
            Err(why) => Err(self.advised(at, why).await),
        }
    }

    /// What was saved there, checked but for its data.
    pub(crate) async fn find(&self, at: ManifestAt, images: &Images) -> Result<Found, String> {
        match self.try_find(at, images).await {
            Ok(found) => Ok(found),
            Err(why) => Err(self.advised(at, why).await),
        }
    }

    /// Whether its data is on this machine already.
    pub(crate) async fn has(&self, found: &Found) -> bool {
        self.cache.has(&found.manifest).await
    }

    /// The data of what was found, checked: from this machine's own disk, or else from the volume.
    pub(crate) async fn bring(&self, found: &Found) -> Result<FileSet, String> {
        let begun = Instant::now();
        match self.cache.files(&found.manifest, self.largest_bytes).await {
            Ok(files) => {
                debug!(ms = begun.elapsed().as_millis(), origin = ?files.origin, "what was saved is here");
                Ok(files)
            }
            // Retention may have let it go while it was read.
            Err(_) if self.is_there(found.manifest.at()).await == Ok(false) => {
                Err(format!("{} was deleted meanwhile", found.manifest.at()))
            }
            Err(error) => Err(self.advised(found.manifest.at(), error.whole()).await),
        }
    }

    /// Why it can't be restored, and what can. Nothing is changed by looking.
    async fn advised(&self, at: ManifestAt, why: String) -> String {
        let ManifestAt::Checkpoint { sandbox_id, name } = at else { return why };
        let older = self.volume.intact_before(sandbox_id, name).await.ok().flatten();
        let advice = older.map(|older| format!(" The older checkpoint {older} is intact."));
        format!("{why}.{}", advice.unwrap_or_default())
    }

    async fn try_find(&self, at: ManifestAt, images: &Images) -> Result<Found, String> {
        let manifest = Arc::new(self.volume.manifest(at).await.map_err(|error| error.whole())?);
        self.understand(at, manifest, images).await
    }

    async fn understand(&self, at: ManifestAt, manifest: Arc<Manifest>, images: &Images) -> Result<Found, String> {
        let name = match at {
            ManifestAt::Checkpoint { name, .. } => name.to_string(),
            other => other.to_string(),
        };
        let contract = manifest.contract().ok_or_else(|| format!("{name} is not that of a sandbox"))?;
        if let ManifestAt::Checkpoint { sandbox_id, .. } = at
            && contract.sandbox_id != sandbox_id
        {
            return Err(format!("{name} is that of another sandbox, {}", contract.sandbox_id));
        }
        contract.check(&self.facts.host()).map_err(|mismatch| format!("{name}: {mismatch}"))?;
        let state = SavedState::read(&contract.state).map_err(|why| format!("{name}: {why}"))?;
        manifest.expect_tenant(tenant(state.owner.as_deref())).map_err(|error| error.whole())?;
        let image =
            self.images.find(contract.image, images).await.map_err(|why| format!("{name} needs the image {}: {why}", contract.image))?;
        Ok(Found { state, image, manifest })
    }

    /// Says where people look what a sandbox was made from: that outlives its first checkpoint.
    pub(crate) async fn note_origin(&self, id: SandboxId, origin: Option<Origin>) -> Result<(), Error> {
        let Some(origin) = origin else { return Ok(()) };
        let mut metadata = self.volume.metadata(id).await?;
        metadata.other.extend(origin.noted());
        self.volume.put_metadata(id, &metadata).await
    }

    /// Says where people look that a sandbox is gone.
    pub(crate) async fn describe_killed(&self, id: SandboxId) -> Result<(), Error> {
        let mut metadata = self.volume.metadata(id).await?;
        metadata.status = SandboxStatus::Killed;
        let unlisted = self.unlist(id, &mut metadata).await;
        self.volume.put_metadata(id, &metadata).await?;
        unlisted
    }

    /// Puts a sandbox that was saved into the list of its tenant, once.
    async fn list_for_owner(&self, record: &Record, metadata: &mut Metadata) -> Result<(), Error> {
        let tenant = tenant(record.owner.as_deref());
        let noted = Value::from(tenant.to_string());
        if metadata.other.get(TENANT) != Some(&noted) {
            self.volume.put_kept(tenant, KeptName::made_at(metadata.created_at, record.id)).await?;
            metadata.other.insert(TENANT.to_owned(), noted);
        }
        Ok(())
    }

    /// Takes it out again. What is missed is removed when the volume is collected.
    async fn unlist(&self, id: SandboxId, metadata: &mut Metadata) -> Result<(), Error> {
        let Some(noted) = metadata.other.remove(TENANT) else { return Ok(()) };
        match noted.as_str().and_then(|noted| noted.parse().ok()) {
            Some(tenant) => self.volume.remove_kept(tenant, KeptName::made_at(metadata.created_at, id)).await,
            None => Ok(()),
        }
    }

    /// Brings the copies up to date that people and tools read.
    pub(crate) async fn describe(&self, record: &Record, status: SandboxStatus, latest: Option<CheckpointName>) -> Result<(), Error> {
        let follow = async {
            match latest {
                Some(name) => self.volume.put_latest(record.id, name).await,
                None => Ok(()),
            }
        };
        let (followed, metadata) = tokio::join!(follow, self.volume.metadata(record.id));
        followed?;
        let mut metadata = match metadata {
            Ok(metadata) => metadata,
            Err(_) => Metadata {
                status,
                created_at: record.created_at,
                last_checkpointed_at: None,
                idle_timeout: None,
                image: None,
                other: serde_json::Map::new(),
            },
        };
        metadata.status = status;
        if latest.is_some() {
            metadata.last_checkpointed_at = Some(jiff::Timestamp::now());
        }
        metadata.idle_timeout = serde_json::Number::from_f64(record.config.idle_timeout.unwrap_or(Duration::ZERO).as_secs_f64());
        metadata.image = record.image.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned);
        let listed = match status {
            SandboxStatus::Killed => self.unlist(record.id, &mut metadata).await,
            _ if latest.is_some() => self.list_for_owner(record, &mut metadata).await,
            _ => Ok(()),
        };
        self.volume.put_metadata(record.id, &metadata).await?;
        listed
    }
}

/// runsc's files in a directory.
fn sources(dir: &Path) -> Result<Vec<Source>, Error> {
    FILES.into_iter().filter(|name| dir.join(name).exists()).map(|name| source(dir, name)).collect()
}

fn source(dir: &Path, name: &str) -> Result<Source, Error> {
    Ok(Source { name: name.parse().map_err(invalid)?, path: dir.join(name) })
}

/// Whose data it is.
pub(crate) fn tenant(owner: Option<&str>) -> Tenant {
    owner.map_or_else(Tenant::open, |owner| Tenant::of_key(owner.as_bytes()))
}

/// The name of this instance: it outlives the process, since the sandboxes do.
fn instance(data_dir: &Path) -> io::Result<InstanceId> {
    let file = data_dir.join("instance");
    match fs::read_to_string(&file) {
        Ok(text) => text.trim().parse().map_err(|error| io::Error::other(format!("{}: {error}", file.display()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let id = InstanceId::random();
            fs::write(&file, format!("{id}\n"))?;
            Ok(id)
        }
        Err(error) => Err(error),
    }
}

pub(crate) fn private_dir(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

pub(crate) fn other(error: Error) -> io::Error {
    io::Error::other(error.whole())
}

fn invalid(error: impl std::fmt::Display) -> Error {
    Error::Invalid(error.to_string())
}

//! Saving files: cut, hashed, compressed on a bounded number of threads, and only what is not known written, in packs.
//!
//! ```text
//! workers (threads of their own)                      the caller's task
//! take the next MiB of the files under a lock (of one that is still written: when it is there)
//! hash each chunk ── known ─────────────────────────┐
//!   └─ new: compress                                 │
//! append the MiB's new chunks to the open pack ──────┤ full packs ─► written and synced while the next one fills
//! note where each chunk lies ◄──────────────────────┘ the last pack, while every pack that is relied upon is looked at
//! ```
//!
//! Memory: [`PACKS_IN_MEMORY`] packs, or [`PACKS_IN_MEMORY_FAR`], and a few MiB a worker, however large the files.

mod job;
mod quota;
#[cfg(feature = "simulated")]
mod simulated;
#[cfg(test)]
pub(crate) mod tests;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use object_store::{ObjectStoreExt, PutMode};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

use self::job::{BATCH, Files, Hints, Job, Pack, Piece};
use self::quota::Quota;
use crate::collect::{Condemned, Intent, Writer};
use crate::contract::{About, Contract};
use crate::error::{Error, Fault, Result};
use crate::index::{ChunkIndex, Place, places};
use crate::layout::{self, FileName, ManifestAt, PackId, Tenant};
use crate::manifest::{Chunk, ChunkHash, Codec, FileEntry, Manifest, PackRef, file_digest};
use crate::pack;
use crate::volume::Volume;

/// Of all saves together: one fills while one is written. At least as many as saves at once, or those would wait for each other.
const PACKS_IN_MEMORY: usize = 2;
/// The same for a bucket: each is sent by a connection of its own, which alone is slower than the processors are.
const PACKS_IN_MEMORY_FAR: usize = 4;
/// More would not be faster on the machine's cores.
const SAVES_AT_ONCE: usize = 2;

/// A file to save, and what it is called in the checkpoint.
#[derive(Debug, Clone)]
pub struct Source {
    pub name: FileName,
    pub path: PathBuf,
}

/// Files that are still being written while they are saved.
#[derive(Debug, Clone, Default)]
pub struct Growth {
    /// So much of the first of them is there, and will not change any more.
    pub bytes: u64,
    /// All of them, once they are written, the first one first.
    pub files: Option<Vec<Source>>,
}

/// What a save did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SaveStats {
    /// Bytes of the files.
    pub raw_bytes: u64,
    /// Of these, zeros, which cost nothing.
    pub zero_bytes: u64,
    /// Of these, already on the volume.
    pub reused_bytes: u64,
    /// Bytes of the packs that were written.
    pub written_bytes: u64,
    pub packs_written: u64,
    pub took: Duration,
}

/// Data that is durable in packs and has no name yet.
#[derive(Debug)]
#[must_use]
pub struct Saved {
    pub(crate) tenant: Tenant,
    pub(crate) packs: Vec<PackRef>,
    pub(crate) files: Vec<FileEntry>,
    pub(crate) chunks: Vec<Chunk>,
    pub stats: SaveStats,
    /// Packs that it did not write itself.
    pub relied_on: Vec<PackId>,
    /// What keeps them until the manifest is there.
    pub(crate) intent: Intent,
}

impl Saved {
    /// The manifest of a checkpoint or snapshot.
    ///
    /// # Errors
    /// The contract is too large, or not of that place.
    pub fn describe(&self, at: ManifestAt, contract: Contract) -> Result<Manifest> {
        self.manifest(at, About::Sandbox(Box::new(contract)))
    }

    pub(crate) fn manifest(&self, at: ManifestAt, about: About) -> Result<Manifest> {
        Manifest::new(at, about, self.tenant, self.packs.clone(), self.files.clone(), self.chunks.clone())
    }
}

/// Saves to one volume. Cloned, they share their bounds and what they know.
#[derive(Debug, Clone)]
pub struct Saver {
    volume: Volume,
    index: ChunkIndex,
    workers: usize,
    pack_bytes: usize,
    turns: Arc<Semaphore>,
    /// Of those who have a turn, one alone may wait for what it saves to be written.
    growing: Arc<Semaphore>,
    memory: Arc<Semaphore>,
    /// As many as there is room for.
    packs: usize,
    writer: Writer,
    quota: Option<Quota>,
}

impl Saver {
    #[must_use]
    pub fn new(volume: Volume, index: ChunkIndex) -> Self {
        let packs = if volume.is_far() { PACKS_IN_MEMORY_FAR } else { PACKS_IN_MEMORY };
        Self {
            volume,
            index,
            workers: crate::workers(),
            pack_bytes: pack::TARGET_BYTES,
            turns: Arc::new(Semaphore::new(SAVES_AT_ONCE)),
            growing: Arc::new(Semaphore::new(1)),
            memory: Arc::new(Semaphore::new(packs)),
            packs,
            writer: Writer::default(),
            quota: None,
        }
    }

    /// Who it says to be before it relies on what others wrote, and how long a save may take.
    #[must_use]
    pub fn with_writer(mut self, writer: Writer) -> Self {
        self.writer = writer;
        self
    }

    /// Saves fail beyond so many bytes of a tenant on the volume; none: there is no such bound.
    #[must_use]
    pub fn with_quota(mut self, bytes: Option<u64>) -> Self {
        self.quota = bytes.map(Quota::new);
        self
    }

    /// The same for a save that must not fail for want of a quota: without it a sandbox would be lost.
    #[must_use]
    pub fn without_quota(&self) -> Self {
        Self { quota: None, ..self.clone() }
    }

    /// Packs of at most about this size, [`pack::TARGET_BYTES`] at most.
    #[must_use]
    pub fn with_pack_bytes(mut self, bytes: usize) -> Self {
        self.pack_bytes = bytes.clamp(pack::HEAD_BYTES, pack::TARGET_BYTES);
        self
    }

    #[must_use]
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Makes the files' data durable on the volume. `parents`: manifests whose chunks may be there already. If this is dropped, the workers end soon; packs that
    /// they had written stay unreferenced.
    ///
    /// # Errors
    /// A file can't be read or the volume not written; nothing that anyone reads has changed then.
    pub async fn save(&self, tenant: Tenant, sources: &[Source], parents: &[&Manifest]) -> Result<Saved> {
        self.save_from(tenant, Input::Written(sources), parents).await
    }

    /// The same of files that somebody is about to write, of which the first is read as it grows. Whoever writes them tells of it; when nobody does any more and they
    /// are not there, this has failed.
    ///
    /// # Errors
    /// As [`Saver::save`].
    pub async fn save_growing(
        &self,
        tenant: Tenant,
        first: &Source,
        growth: watch::Receiver<Growth>,
        parents: &[&Manifest],
    ) -> Result<Saved> {
        self.save_from(tenant, Input::Growing { first, growth, place: None }, parents).await
    }

    async fn save_from(&self, tenant: Tenant, mut from: Input<'_>, parents: &[&Manifest]) -> Result<Saved> {
        from.begun(&self.growing).await?;
        let _turn = self.turns.acquire().await.map_err(|_| Error::Interrupted)?;
        let began = Instant::now();
        if let Some(quota) = self.quota_of(tenant) {
            quota.check(&self.volume, tenant).await?;
        }
        // Before anything is looked at that it did not write.
        let intent = self.writer.begin(&self.volume).await?;
        let mut known = known_to(tenant, parents);
        known.retain(|_, place| !intent.condemned().has(tenant, place.pack));
        let mut written = HashMap::new();
        let finished = match self.save_new(tenant, from, known, intent.condemned(), &mut written).await {
            Ok(finished) => finished,
            Err(error) => {
                self.withdraw(tenant, written.into_keys()).await;
                intent.finish().await;
                return Err(error);
            }
        };
        let mut saved = finished.with(tenant, intent);
        saved.stats.took = began.elapsed();
        self.index.learn(tenant, saved.places());
        Ok(saved)
    }

    /// Images are shared by all tenants, and count for none.
    fn quota_of(&self, tenant: Tenant) -> Option<&Quota> {
        self.quota.as_ref().filter(|_| tenant != Tenant::images())
    }

    /// What a manifest describes, once more under a name of its own. `sources` are its files: what is not on the volume any more, or soon will not be, is
    /// written anew from them.
    ///
    /// # Errors
    /// As [`Saver::save`].
    pub async fn save_again(&self, of: &Manifest, sources: &[Source]) -> Result<Saved> {
        match self.rely_on(of).await? {
            Some(saved) => Ok(saved),
            None => self.save(of.tenant(), sources, &[of]).await,
        }
    }

    /// The same without writing any of it; none if something of it is gone or condemned.
    ///
    /// # Errors
    /// The volume can't be written or read.
    pub async fn rely_on(&self, of: &Manifest) -> Result<Option<Saved>> {
        let began = Instant::now();
        let intent = self.writer.begin(&self.volume).await?;
        let tenant = of.tenant();
        let condemned = of.packs().iter().any(|pack| intent.condemned().has(tenant, pack.id));
        let there = if condemned { Ok(false) } else { self.volume.check_packs(of).await.map(|()| true) };
        match there {
            Ok(true) => {}
            Ok(false) | Err(Error::Damaged { .. }) => {
                intent.finish().await;
                return Ok(None);
            }
            Err(error) => {
                intent.finish().await;
                return Err(error);
            }
        }
        let stats = SaveStats { raw_bytes: of.raw_bytes(), reused_bytes: of.raw_bytes(), took: began.elapsed(), ..SaveStats::default() };
        let finished = Finished {
            packs: of.packs().to_vec(),
            files: of.files().to_vec(),
            chunks: of.chunks().to_vec(),
            stats,
            relied_on: of.packs().iter().map(|pack| pack.id).collect(),
        };
        Ok(Some(finished.with(tenant, intent)))
    }

    async fn save_new(
        &self,
        tenant: Tenant,
        mut from: Input<'_>,
        known: HashMap<ChunkHash, Place>,
        condemned: &Arc<Condemned>,
        written: &mut HashMap<PackId, u64>,
    ) -> Result<Finished> {
        let (mut attempt, mut gone) = self.attempt(tenant, from.files(), known, condemned, written).await?;
        let sources = &*from.all()?;
        if !gone.is_empty() {
            // Collected, or lost, since they became known. What was just written is still good.
            self.index.forget(&gone);
            let mut known = std::mem::take(&mut attempt.known);
            known.retain(|_, place| !gone.contains(&place.pack));
            (attempt, gone) = self.attempt(tenant, Files::new(sources), known, condemned, written).await?;
        }
        match gone.into_iter().next() {
            Some(id) => Err(Error::damaged(&layout::pack(tenant, id), Fault::MissingPack { needed_by: "this save".into() })),
            None => attempt.finish(sources, written),
        }
    }

    /// Removes the packs of a save that failed, which nothing refers to: the volume may be full. What can't be removed is left to collection.
    async fn withdraw(&self, tenant: Tenant, packs: impl Iterator<Item = PackId>) {
        for id in packs {
            let _ = self.volume.store().delete(&layout::pack(tenant, id)).await;
        }
        if let Some(quota) = &self.quota {
            quota.forget(tenant);
        }
    }

    /// One pass over the files, and what of all that it relies on is not there.
    async fn attempt(
        &self,
        tenant: Tenant,
        files: Files,
        known: HashMap<ChunkHash, Place>,
        condemned: &Arc<Condemned>,
        written: &mut HashMap<PackId, u64>,
    ) -> Result<(Attempt, HashSet<PackId>)> {
        let known = Hints { known, index: self.index.clone(), condemned: Arc::clone(condemned) };
        let job = Arc::new(Job::new(tenant, files, known, Arc::clone(&self.memory), self.pack_bytes));
        let stop = StopOnDrop(&job);
        let (full, packs) = mpsc::channel(self.packs);
        let mut workers = Vec::new();
        for _ in 0..self.workers {
            let (job, full) = (Arc::clone(&job), full.clone());
            match on_its_own(move || job.work(&full).inspect_err(|_| job.stop())) {
                Ok(worker) => workers.push(worker),
                // Fewer take longer.
                Err(_) if !workers.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        drop(full);
        let uploads = stream::unfold(packs, |mut packs| async move { Some((packs.recv().await?, packs)) });
        let uploader = self.clone();
        let mut uploads = std::pin::pin!(uploads.map(move |pack| uploader.clone().upload(tenant, pack)).buffer_unordered(self.packs));
        let mut uploaded = Ok(());
        // To the end also after a failure: a write that was begun goes on whether it is waited for or not.
        while let Some(upload) = uploads.next().await {
            match upload {
                Ok(pack) => written.extend([pack]),
                Err(error) => {
                    job.stop();
                    uploaded = Err(error);
                }
            }
        }
        let mut worked = Ok(());
        for worker in workers {
            match worker.await.map_err(|_| Error::Interrupted).flatten() {
                // Another's error made it stop.
                Err(Error::Interrupted) if worked.is_err() => {}
                Err(error) => worked = Err(error),
                Ok(()) => {}
            }
        }
        uploaded?;
        worked?;
        let last = job.last_pack();
        let (pieces, known) = job.results();
        drop(stop);
        let mut attempt = Attempt { pieces, known, relied: HashMap::new() };
        // What others wrote is looked at when the condemned lists have been read, which they have; it need not wait for what is written here.
        let relied = attempt.others(|id| written.contains_key(id) || last.as_ref().is_some_and(|last| last.id == *id));
        let upload = async {
            match last {
                Some(last) => self.clone().upload(tenant, last).await.map(Some),
                None => Ok(None),
            }
        };
        let (uploaded, sizes) = tokio::join!(upload, self.volume.sizes_of(tenant, relied));
        written.extend(uploaded?);
        let gone = attempt.rely_on(sizes?);
        Ok((attempt, gone))
    }

    async fn upload(self, tenant: Tenant, pack: Pack) -> Result<(PackId, u64)> {
        let Pack { id, pieces, bytes, permit } = pack;
        let (path, length) = (layout::pack(tenant, id), bytes as u64);
        if let Some(quota) = self.quota_of(tenant) {
            quota.add(tenant, length)?;
        }
        match self.volume.put(&path, pieces.into_iter().collect(), PutMode::Create).await {
            // The name is random: only this very write, its reply lost, can have made it.
            Err(Error::Exists { .. }) if self.volume.pack_bytes(tenant, id).await? == Some(length) => {}
            other => other?,
        }
        drop(permit);
        Ok((id, length))
    }
}

/// What a save reads.
enum Input<'a> {
    Written(&'a [Source]),
    Growing {
        first: &'a Source,
        growth: watch::Receiver<Growth>,
        /// Held until they are whole.
        place: Option<OwnedSemaphorePermit>,
    },
}

impl Input<'_> {
    fn files(&mut self) -> Files {
        match self {
            Self::Written(sources) => Files::new(sources),
            Self::Growing { first, growth, place } => Files::growing(first, growth.clone(), place.take()),
        }
    }

    /// Waits until there is something to read: without a turn, since how long that takes is not ours to say. Of those that are still being written one may be read; the others when they are
    /// whole.
    async fn begun(&mut self, growing: &Arc<Semaphore>) -> Result<()> {
        let Self::Growing { growth, place, .. } = self else { return Ok(()) };
        let mut grows = growth.clone();
        let first = async {
            let place = Arc::clone(growing).acquire_owned().await.map_err(|_| Error::Interrupted)?;
            let there = |growth: &Growth| growth.files.is_some() || growth.bytes >= BATCH as u64;
            let whole = grows.wait_for(there).await.map_err(|_| Error::Interrupted)?.files.is_some();
            Ok((!whole).then_some(place))
        };
        *place = tokio::select! {
            biased;
            whole = growth.wait_for(|growth| growth.files.is_some()) => whole.map(|_| None).map_err(|_| Error::Interrupted),
            first = first => first,
        }?;
        Ok(())
    }

    /// When they have been read.
    fn all(&self) -> Result<Cow<'_, [Source]>> {
        match self {
            Self::Written(sources) => Ok(Cow::Borrowed(sources)),
            Self::Growing { growth, .. } => growth.borrow().files.clone().map(Cow::Owned).ok_or(Error::Interrupted),
        }
    }
}

fn known_to(tenant: Tenant, parents: &[&Manifest]) -> HashMap<ChunkHash, Place> {
    parents.iter().filter(|parent| parent.tenant() == tenant).flat_map(|parent| places(parent)).collect()
}

/// One pass over the files.
struct Attempt {
    pieces: Vec<Piece>,
    known: HashMap<ChunkHash, Place>,
    relied: HashMap<PackId, u64>,
}

impl Attempt {
    /// The packs that chunks lie in, but for one's own.
    fn others(&self, is_own: impl Fn(&PackId) -> bool) -> Vec<PackId> {
        let used: HashSet<PackId> = self.pieces.iter().filter_map(|piece| piece.place.map(|place| place.pack)).collect();
        used.into_iter().filter(|id| !is_own(id)).collect()
    }

    /// Takes note of the packs that are there, and tells which are not.
    fn rely_on(&mut self, sizes: Vec<(PackId, Option<u64>)>) -> HashSet<PackId> {
        let mut gone = HashSet::new();
        for (id, bytes) in sizes {
            match bytes.filter(|bytes| self.end_of(id) <= *bytes) {
                Some(bytes) => drop(self.relied.insert(id, bytes)),
                None => drop(gone.insert(id)),
            }
        }
        gone
    }

    /// How long the pack must be at least.
    fn end_of(&self, id: PackId) -> u64 {
        let places = self.pieces.iter().filter_map(|piece| piece.place).filter(|place| place.pack == id);
        places.map(|place| u64::from(place.offset) + u64::from(place.stored)).max().unwrap_or(0)
    }

    fn finish(self, sources: &[Source], written: &HashMap<PackId, u64>) -> Result<Finished> {
        let mut stats = SaveStats { written_bytes: written.values().sum(), packs_written: written.len() as u64, ..SaveStats::default() };
        let (mut packs, mut numbers) = (Vec::new(), HashMap::new());
        let mut chunks = Vec::with_capacity(self.pieces.len());
        let mut files = Vec::with_capacity(sources.len());
        let mut pieces = self.pieces.into_iter().peekable();
        for (number, source) in sources.iter().enumerate() {
            let (first, mut bytes) = (chunks.len(), 0);
            while let Some(piece) = pieces.next_if(|piece| piece.file == number) {
                bytes += u64::from(piece.raw);
                let Some(place) = piece.place else {
                    stats.zero_bytes += u64::from(piece.raw);
                    chunks.push(Chunk { hash: ChunkHash::ZERO, pack: 0, offset: 0, stored: 0, raw: piece.raw, codec: Codec::Zero });
                    continue;
                };
                if piece.reused {
                    stats.reused_bytes += u64::from(piece.raw);
                }
                let bytes = written.get(&place.pack).or_else(|| self.relied.get(&place.pack)).copied().ok_or(Error::Interrupted)?;
                let pack = *numbers.entry(place.pack).or_insert_with(|| {
                    packs.push(PackRef { id: place.pack, bytes });
                    packs.len() - 1
                });
                let pack =
                    u32::try_from(pack).map_err(|_| Error::TooLarge { what: "the list of packs".into(), limit: u64::from(u32::MAX) })?;
                chunks.push(Chunk {
                    hash: piece.hash,
                    pack,
                    offset: place.offset,
                    stored: place.stored,
                    raw: place.raw,
                    codec: place.codec,
                });
            }
            let own = &chunks[first..];
            let count =
                u32::try_from(own.len()).map_err(|_| Error::TooLarge { what: "the list of chunks".into(), limit: u64::from(u32::MAX) })?;
            files.push(FileEntry { name: source.name.clone(), bytes, chunks: count, digest: file_digest(own) });
            stats.raw_bytes += bytes;
        }
        Ok(Finished { packs, files, chunks, stats, relied_on: self.relied.into_keys().collect() })
    }
}

/// What a save has made, without what keeps it.
struct Finished {
    packs: Vec<PackRef>,
    files: Vec<FileEntry>,
    chunks: Vec<Chunk>,
    stats: SaveStats,
    relied_on: Vec<PackId>,
}

impl Finished {
    fn with(self, tenant: Tenant, intent: Intent) -> Saved {
        let Self { packs, files, chunks, stats, relied_on } = self;
        Saved { tenant, packs, files, chunks, stats, relied_on, intent }
    }
}

impl Saved {
    /// Its manifest is there, or never will be. Without this the volume is told in the background, when it is dropped.
    pub async fn finish(self) {
        self.intent.finish().await;
    }

    fn places(&self) -> impl Iterator<Item = (ChunkHash, Place)> {
        self.chunks.iter().filter(|chunk| chunk.codec != Codec::Zero).map(|chunk| {
            let pack = self.packs[chunk.pack as usize].id;
            (chunk.hash, Place { pack, offset: chunk.offset, stored: chunk.stored, raw: chunk.raw, codec: chunk.codec })
        })
    }
}

/// Begins this on a thread of its own, of which there are [`SAVES_AT_ONCE`] times as many as workers. It waits for what is written meanwhile: on the threads that everybody's files are
/// read and written by, it could wait for one that itself keeps from being done.
fn on_its_own(work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<oneshot::Receiver<Result<()>>> {
    let (tell, told) = oneshot::channel();
    let began = thread::Builder::new().name("save".into()).spawn(move || {
        // Nobody may want to know any more.
        let _ = tell.send(work());
    });
    began.map(|_| told).map_err(|source| Error::Local { verb: "start", path: "a thread".into(), source })
}

struct StopOnDrop<'a>(&'a Job);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

//! Loading: from a manifest to the files, every chunk checked, in parallel and with bounded memory.

mod plan;
#[cfg(test)]
mod tests;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{Stream, StreamExt, TryStreamExt, stream};
use object_store::{GetOptions, GetResultPayload, ObjectStore, ObjectStoreExt};
use tokio::sync::Semaphore;

use self::plan::{Place, Reach, Span, spans};
use crate::error::{Error, Fault, Result};
use crate::index::ChunkIndex;
use crate::layout;
use crate::manifest::{Chunk, FileEntry, Manifest};
use crate::pack::{self, Decoder};
use crate::volume::Volume;

/// Spans that are fetched while others are decoded, about in the order in which a restore wants them. They are a MiB at most.
const READ_AHEAD: usize = 2;
/// The same of a bucket, where each takes some tens of milliseconds before its first byte comes.
const READ_AHEAD_FAR: usize = 16;
const LOADS_AT_ONCE: usize = 2;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoadStats {
    pub raw_bytes: u64,
    /// Bytes that came from packs.
    pub read_bytes: u64,
    pub took: Duration,
}

/// Loads from one volume. Cloned, they share their bounds.
#[derive(Debug, Clone)]
pub struct Loader {
    volume: Volume,
    index: ChunkIndex,
    workers: usize,
    turns: Arc<Semaphore>,
}

impl Loader {
    #[must_use]
    pub fn new(volume: Volume, index: ChunkIndex) -> Self {
        Self { volume, index, workers: crate::workers(), turns: Arc::new(Semaphore::new(LOADS_AT_ONCE)) }
    }

    #[must_use]
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Writes the manifest's files into the directory `into`, which must have none of their names. `limit` bounds their bytes.
    ///
    /// # Errors
    /// [`Error::Damaged`] with the pack and the check that failed. What is in the directory then is of no use.
    pub async fn load(&self, manifest: &Manifest, into: &Path, limit: u64) -> Result<LoadStats> {
        let paths = manifest.files().iter().map(|file| into.join(file.name.as_str())).collect();
        self.load_as(manifest, paths, limit).await
    }

    /// The same with a path for each file in order.
    pub(crate) async fn load_as(&self, manifest: &Manifest, paths: Vec<PathBuf>, limit: u64) -> Result<LoadStats> {
        let _turn = self.turns.acquire().await.map_err(|_| Error::Interrupted)?;
        let began = Instant::now();
        let found = manifest.raw_bytes();
        if found > limit {
            return Err(Error::damaged(&manifest.path(), Fault::TooLarge { found, limit }));
        }
        let files = create(manifest, paths)?;
        let read_bytes =
            self.each_span(manifest, Sink::Files(files), |_| true).try_fold(0, |sum, length| std::future::ready(Ok(sum + length))).await?;
        self.index.learn_manifest(manifest);
        Ok(LoadStats { raw_bytes: found, read_bytes, took: began.elapsed() })
    }

    /// Reads and checks the data that the manifest refers to and keeps nothing. Chunks that `wanted` declines are passed over. Tells every fault.
    pub(crate) async fn faults(&self, manifest: &Manifest, wanted: impl FnMut(&Chunk) -> bool + Send) -> (u64, Vec<Error>) {
        let results = self.each_span(manifest, Sink::Nowhere, wanted);
        let (mut read, mut faults) = (0, Vec::new());
        let mut results = std::pin::pin!(results);
        while let Some(result) = results.next().await {
            match result {
                Ok(length) => read += length,
                Err(error) => faults.push(error),
            }
        }
        (read, faults)
    }

    /// Each part's bytes read, in no order.
    fn each_span<'a>(
        &'a self,
        manifest: &'a Manifest,
        sink: Sink,
        wanted: impl FnMut(&Chunk) -> bool + Send + 'a,
    ) -> impl Stream<Item = Result<u64>> + Send + 'a {
        let (reach, read_ahead) = if self.volume.is_far() { (Reach::FAR, READ_AHEAD_FAR) } else { (Reach::NEAR, READ_AHEAD) };
        let work = Arc::new(Work { chunk_key: manifest.tenant().chunk_key(), sink, idle: Mutex::default() });
        let fetches = stream::iter(spans(manifest, reach, wanted))
            .map(move |span| async move { (self.fetch(manifest, &span).await, span) })
            .buffered(read_ahead);
        let decodes = fetches.map(move |(fetched, span)| {
            let work = Arc::clone(&work);
            async move {
                let part = fetched?;
                let length = span.range.end - span.range.start;
                let done = tokio::task::spawn_blocking(move || work.decode(&span, &part)).await.map_err(|_| Error::Interrupted)?;
                match done {
                    Ok(()) => Ok(length),
                    Err(Trouble::Chunk { pack, chunk }) => Err(self.diagnose(manifest, pack, Some(chunk)).await),
                    Err(Trouble::Write(error)) => Err(error),
                }
            }
        });
        decodes.buffer_unordered(self.workers)
    }

    /// The part of a pack. From a directory it is only opened here: the worker that decodes it reads it into the buffer that it has.
    async fn fetch(&self, manifest: &Manifest, span: &Span) -> Result<Part> {
        let Some(pack) = manifest.packs().get(span.pack) else { return Err(Error::Interrupted) };
        let path = layout::pack(manifest.tenant(), pack.id);
        let options = GetOptions::new().with_range(Some(span.range.clone()));
        let got = match self.volume.store().get_opts(&path, options).await {
            Ok(got) if got.range == span.range => match got.payload {
                GetResultPayload::File(file, _) => Ok(Part::File(file)),
                GetResultPayload::Stream(_) => got.bytes().await.map(Part::Bytes),
            },
            Ok(_) => return Err(self.diagnose(manifest, span.pack, None).await),
            Err(error) => Err(error),
        };
        match got {
            Ok(part) => Ok(part),
            Err(error) => match self.diagnose(manifest, span.pack, None).await {
                Error::Interrupted => Err(Error::volume("read", &path, error)),
                damage => Err(damage),
            },
        }
    }

    /// What is wrong with a pack of which something could not be read or did not match; [`Error::Interrupted`] if nothing is.
    async fn diagnose(&self, manifest: &Manifest, number: usize, chunk: Option<Chunk>) -> Error {
        let Some(expected) = manifest.packs().get(number) else { return Error::Interrupted };
        let path = layout::pack(manifest.tenant(), expected.id);
        let needed_by = manifest.at().to_string();
        let found = match self.volume.pack_bytes(manifest.tenant(), expected.id).await {
            Ok(Some(found)) => found,
            Ok(None) => return Error::damaged(&path, Fault::MissingPack { needed_by }),
            Err(error) => return error,
        };
        if found != expected.bytes {
            return Error::damaged(&path, Fault::TornPack { expected: expected.bytes, found, needed_by });
        }
        match self.volume.store().get_range(&path, 0..pack::HEAD_BYTES as u64).await {
            Ok(head) if head[..] != pack::head(expected.id) => return Error::damaged(&path, Fault::ForeignPack { needed_by }),
            Ok(_) => {}
            Err(error) => return Error::volume("read", &path, error),
        }
        match chunk {
            Some(chunk) => {
                Error::damaged(&path, Fault::Chunk { offset: u64::from(chunk.offset), length: u64::from(chunk.stored), needed_by })
            }
            None => Error::Interrupted,
        }
    }
}

fn create(manifest: &Manifest, paths: Vec<PathBuf>) -> Result<Vec<Target>> {
    let create = |(file, path): (&FileEntry, PathBuf)| {
        let open = || {
            let created = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
            created.set_len(file.bytes)?;
            Ok(created)
        };
        open().map_err(|source| Error::local("create", &path, source)).map(|file| Target { file, path, turn: Mutex::default() })
    };
    manifest.files().iter().zip(paths).map(create).collect()
}

/// A file that is being written. The kernel lets one at a time write to a file, and has the others spin: they had better sleep, and leave the
/// processor to the sandbox that is being made meanwhile.
struct Target {
    file: File,
    path: PathBuf,
    turn: Mutex<()>,
}

enum Sink {
    Files(Vec<Target>),
    Nowhere,
}

enum Part {
    File(File),
    Bytes(Bytes),
}

/// What a worker keeps between spans.
struct Tools {
    decoder: Decoder,
    input: Vec<u8>,
}

enum Trouble {
    Chunk { pack: usize, chunk: Chunk },
    Write(Error),
}

struct Work {
    chunk_key: [u8; 32],
    sink: Sink,
    /// Between spans; as many as there are workers.
    idle: Mutex<Vec<Tools>>,
}

impl Work {
    fn decode(&self, span: &Span, part: &Part) -> std::result::Result<(), Trouble> {
        let broken = |source| Trouble::Write(Error::Local { verb: "start", path: "zstd".into(), source });
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let start = || Ok(Tools { decoder: Decoder::new()?, input: Vec::new() });
        let mut tools = idle.map_or_else(start, Ok).map_err(broken)?;
        let bytes: &[u8] = match part {
            Part::Bytes(bytes) => bytes,
            Part::File(file) => {
                tools.input.resize((span.range.end - span.range.start) as usize, 0);
                let read = file.read_exact_at(&mut tools.input, span.range.start);
                if let (Err(_), Some(first)) = (read, span.places.first()) {
                    // Cut off since it was opened, or the disk fails: what can't be read is not right.
                    return Err(Trouble::Chunk { pack: span.pack, chunk: first.chunk });
                }
                &tools.input
            }
        };
        for Place { file, offset, chunk } in &span.places {
            let from = (u64::from(chunk.offset) - span.range.start) as usize;
            let stored = bytes.get(from..from + chunk.stored as usize);
            let raw = stored
                .and_then(|stored| tools.decoder.decode(&self.chunk_key, chunk, stored))
                .ok_or(Trouble::Chunk { pack: span.pack, chunk: *chunk })?;
            if let Sink::Files(files) = &self.sink
                && let Some(target) = files.get(*file)
            {
                let _turn = target.turn.lock().unwrap_or_else(PoisonError::into_inner);
                target.file.write_all_at(raw, *offset).map_err(|source| Trouble::Write(Error::local("write", &target.path, source)))?;
            }
        }
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(tools);
        Ok(())
    }
}

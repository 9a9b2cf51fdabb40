//! One pass over the files by several threads.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::chunker::{self, PAGE};
use crate::collect::Condemned;
use crate::error::{Error, Result};
use crate::index::{ChunkIndex, Place};
use crate::layout::{PackId, Tenant};
use crate::manifest::{ChunkHash, Codec};
use crate::pack::{self, Encoder};
use crate::save::{Growth, Source};

/// What a worker takes at once: several of the longest chunks.
pub(super) const BATCH: usize = 1 << 20;

/// A chunk of a file, and where it lies; nowhere if it is zeros.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub(super) file: usize,
    offset: u64,
    pub(super) hash: ChunkHash,
    pub(super) raw: u32,
    pub(super) place: Option<Place>,
    pub(super) reused: bool,
}

/// A pack that fills or is full. Its permit is its place in memory.
pub(super) struct Pack {
    pub(super) id: PackId,
    /// In pieces, as they were encoded: one large buffer a pack would leave holes of its size in the heap.
    pub(super) pieces: Vec<Bytes>,
    pub(super) bytes: usize,
    pub(super) permit: OwnedSemaphorePermit,
}

/// What is thought to be on the volume.
pub(super) struct Hints {
    pub(super) known: HashMap<ChunkHash, Place>,
    pub(super) index: ChunkIndex,
    /// What is not to be relied upon, whatever the index says.
    pub(super) condemned: Arc<Condemned>,
}

pub(super) struct Job {
    tenant: Tenant,
    chunk_key: [u8; 32],
    reader: Mutex<Reader>,
    growth: Option<watch::Receiver<Growth>>,
    known: Mutex<HashMap<ChunkHash, Place>>,
    index: ChunkIndex,
    condemned: Arc<Condemned>,
    open: Mutex<Option<Pack>>,
    pieces: Mutex<Vec<Piece>>,
    stopped: CancellationToken,
    memory: Arc<Semaphore>,
    pack_bytes: usize,
    runtime: Handle,
}

impl Job {
    /// Within a runtime.
    pub(super) fn new(
        tenant: Tenant,
        files: Files,
        Hints { known, index, condemned }: Hints,
        memory: Arc<Semaphore>,
        pack_bytes: usize,
    ) -> Self {
        Self {
            tenant,
            chunk_key: tenant.chunk_key(),
            growth: files.growth.clone(),
            reader: Mutex::new(Reader { files, open: None, file: 0, offset: 0 }),
            known: Mutex::new(known),
            index,
            condemned,
            open: Mutex::new(None),
            pieces: Mutex::default(),
            stopped: CancellationToken::new(),
            memory,
            pack_bytes,
            runtime: Handle::current(),
        }
    }

    /// The workers end at their next step.
    pub(super) fn stop(&self) {
        self.stopped.cancel();
    }

    /// A worker, until the files are at their end.
    pub(super) fn work(&self, full: &mpsc::Sender<Pack>) -> Result<()> {
        let mut encoder = Encoder::new().map_err(|source| Error::Local { verb: "start", path: "zstd".into(), source })?;
        let mut buffer = vec![0; BATCH];
        let mut batch = Batch::default();
        loop {
            if self.stopped.is_cancelled() {
                return Err(Error::Interrupted);
            }
            // Not within what it is matched by: the lock is not held while there is nothing to take.
            let next = lock(&self.reader).take(&mut buffer)?;
            let taken = match next {
                Next::Taken(taken) => taken,
                Next::NotYet { from } => {
                    self.wait_beyond(from + BATCH as u64)?;
                    continue;
                }
                Next::End => return Ok(()),
            };
            batch.clear();
            let mut at = 0;
            for length in taken.lengths {
                let raw = &buffer[at..at + length];
                batch.pieces.push(self.piece(&taken.of, at, raw, &mut encoder, &mut batch.encoded, &mut batch.new)?);
                at += length;
            }
            self.append(&mut batch, full)?;
            lock(&self.pieces).append(&mut batch.pieces);
        }
    }

    /// Waits until so much is there of the file that grows, or all of it.
    fn wait_beyond(&self, bytes: u64) -> Result<()> {
        let mut growth = self.growth.clone().ok_or(Error::Interrupted)?;
        let grown = self.stopped.run_until_cancelled(growth.wait_for(|growth| growth.files.is_some() || growth.bytes >= bytes));
        // Otherwise whoever wrote it has given up.
        self.runtime.block_on(grown).is_some_and(|grown| grown.is_ok()).then_some(()).ok_or(Error::Interrupted)
    }

    /// Looks at one chunk; if it is new, its stored form goes behind `encoded`.
    fn piece(&self, of: &Origin, at: usize, raw: &[u8], encoder: &mut Encoder, encoded: &mut Vec<u8>, new: &mut Vec<New>) -> Result<Piece> {
        let mut piece = Piece {
            file: of.file,
            offset: of.offset + at as u64,
            hash: ChunkHash::ZERO,
            raw: u32::try_from(raw.len()).unwrap_or(u32::MAX),
            place: None,
            reused: true,
        };
        if is_zero(raw) {
            return Ok(piece);
        }
        piece.hash = ChunkHash::of(&self.chunk_key, raw);
        // Not with the lock of the shared one inside that of our own.
        let own = lock(&self.known).get(&piece.hash).copied();
        piece.place = own
            .or_else(|| self.index.find(self.tenant, &piece.hash).filter(|place| !self.condemned.has(self.tenant, place.pack)))
            .filter(|place| place.raw == piece.raw);
        if piece.place.is_none() {
            let (codec, stored) =
                encoder.encode(raw).map_err(|source| Error::Local { verb: "compress", path: "a chunk".into(), source })?;
            new.push(New { at: encoded.len(), length: stored.len(), codec });
            encoded.extend_from_slice(stored);
            piece.reused = false;
        }
        Ok(piece)
    }

    /// Puts the new chunks of a batch into the open pack, together, so that they can be read together.
    fn append(&self, batch: &mut Batch, full: &mpsc::Sender<Pack>) -> Result<()> {
        if batch.encoded.is_empty() {
            return Ok(());
        }
        let encoded = Bytes::copy_from_slice(&batch.encoded);
        let mut open = lock(&self.open);
        if open.as_ref().is_some_and(|pack| pack.bytes + batch.encoded.len() > self.pack_bytes)
            && let Some(pack) = open.take()
        {
            full.blocking_send(pack).map_err(|_| Error::Interrupted)?;
        }
        let pack = match &mut *open {
            Some(pack) => pack,
            none => none.insert(self.new_pack()?),
        };
        let (id, base) = (pack.id, pack.bytes);
        pack.bytes += encoded.len();
        pack.pieces.push(encoded);
        drop(open);

        let mut known = lock(&self.known);
        let new_pieces = batch.pieces.iter_mut().filter(|piece| !piece.reused);
        for (piece, new) in new_pieces.zip(&batch.new) {
            // Both are below the size of a pack.
            let place = Place { pack: id, offset: (base + new.at) as u32, stored: new.length as u32, raw: piece.raw, codec: new.codec };
            piece.place = Some(place);
            known.insert(piece.hash, place);
        }
        Ok(())
    }

    /// Waits until there is room in memory.
    fn new_pack(&self) -> Result<Pack> {
        let room = self.stopped.run_until_cancelled(Arc::clone(&self.memory).acquire_owned());
        let permit = self.runtime.block_on(room).and_then(std::result::Result::ok).ok_or(Error::Interrupted)?;
        let id = PackId::random();
        Ok(Pack { id, pieces: vec![Bytes::copy_from_slice(&pack::head(id))], bytes: pack::HEAD_BYTES, permit })
    }

    pub(super) fn last_pack(&self) -> Option<Pack> {
        lock(&self.open).take()
    }

    /// The chunks in the order of the files, and all that is known now.
    pub(super) fn results(&self) -> (Vec<Piece>, HashMap<ChunkHash, Place>) {
        let mut pieces = std::mem::take(&mut *lock(&self.pieces));
        pieces.sort_unstable_by_key(|piece| (piece.file, piece.offset));
        (pieces, std::mem::take(&mut *lock(&self.known)))
    }
}

struct New {
    at: usize,
    length: usize,
    codec: Codec,
}

#[derive(Default)]
struct Batch {
    pieces: Vec<Piece>,
    encoded: Vec<u8>,
    new: Vec<New>,
}

impl Batch {
    fn clear(&mut self) {
        self.pieces.clear();
        self.encoded.clear();
        self.new.clear();
    }
}

struct Origin {
    file: usize,
    offset: u64,
}

struct Taken {
    of: Origin,
    lengths: Vec<usize>,
}

/// What is read.
pub(super) struct Files {
    /// Of those that grow, the one alone that is read meanwhile, until all of them are there.
    paths: Vec<PathBuf>,
    growth: Option<watch::Receiver<Growth>>,
    /// Of who is read while it grows.
    place: Option<OwnedSemaphorePermit>,
}

impl Files {
    pub(super) fn new(sources: &[Source]) -> Self {
        Self { paths: sources.iter().map(|source| source.path.clone()).collect(), growth: None, place: None }
    }

    pub(super) fn growing(first: &Source, growth: watch::Receiver<Growth>, place: Option<OwnedSemaphorePermit>) -> Self {
        Self { growth: Some(growth), place, ..Self::new(std::slice::from_ref(first)) }
    }

    /// How much can be read of the file that is read now; none: all of it.
    fn there(&mut self) -> Option<u64> {
        let growth = self.growth.as_ref()?.borrow();
        let Some(all) = &growth.files else { return Some(growth.bytes) };
        self.paths = all.iter().map(|source| source.path.clone()).collect();
        drop(growth);
        (self.growth, self.place) = (None, None);
        None
    }
}

enum Next {
    Taken(Taken),
    /// The file grows, and there is not enough of it from here on.
    NotYet {
        from: u64,
    },
    End,
}

/// Where the files are read, each from its start to its end.
struct Reader {
    files: Files,
    open: Option<File>,
    file: usize,
    offset: u64,
}

impl Reader {
    /// The next whole chunks into `buffer`. What is left of it belongs to a chunk that is read again with its end.
    fn take(&mut self, buffer: &mut [u8]) -> Result<Next> {
        loop {
            // Before what there is of it is read.
            let there = self.files.there();
            if there.is_some_and(|there| there < self.offset + buffer.len() as u64) {
                return Ok(Next::NotYet { from: self.offset });
            }
            let Some(path) = self.files.paths.get(self.file) else { return Ok(Next::End) };
            let file = match &self.open {
                Some(file) => file,
                None => self.open.insert(File::open(path).map_err(|error| Error::local("open", path, error))?),
            };
            let filled = fill(file, buffer, self.offset).map_err(|source| Error::local("read", path, source))?;
            let last = filled < buffer.len();
            if last && there.is_some() {
                return Err(Error::local("read", path, io::ErrorKind::UnexpectedEof.into()));
            }
            let mut lengths = Vec::new();
            let mut at = 0;
            while let Some(length) = chunker::cut(&buffer[at..filled], last) {
                lengths.push(length);
                at += length;
            }
            let of = Origin { file: self.file, offset: self.offset };
            if last {
                (self.file, self.offset, self.open) = (self.file + 1, 0, None);
            } else {
                self.offset += at as u64;
            }
            if !lengths.is_empty() {
                return Ok(Next::Taken(Taken { of, lengths }));
            }
        }
    }
}

/// Reads until the buffer is full or the file at its end.
fn fill(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

fn is_zero(data: &[u8]) -> bool {
    const ZEROS: [u8; PAGE] = [0; PAGE];
    data.chunks(PAGE).all(|page| page == &ZEROS[..page.len()])
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

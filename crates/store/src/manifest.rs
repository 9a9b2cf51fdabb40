//! The manifest: `checkpoint_{ms}.img`, one file that is one complete checkpoint, its data in packs.
//!
//! ```text
//!  0  magic         8   "SBXCKPT\n"
//!  8  version       u32
//! 12  packs         u32        counts and lengths of the parts that follow
//! 16  files         u32
//! 20  chunks        u32
//! 24  about         u32
//! 28  reserved      u32        0
//! 32  tenant       16
//! 48  packs  × 24   id 16, bytes u64
//!     files  × 112  name 64 (padded by zeros), bytes u64, chunks u32, reserved u32, digest 32
//!     chunks × 52   hash 32, pack u32, offset u32, stored u32, raw u32, codec u8, zeros 3
//!     about         JSON: where the manifest lies and the restore contract
//!     digest       32          BLAKE3 of all before
//!     mac          32          with a volume key: over all before; else zeros
//! ```
//!
//! All integers are little-endian. It is read as hostile input: every length is checked against the bytes that are there before anything is allocated by it.

mod decode;
mod encode;
#[cfg(test)]
mod tests;

use object_store::path::Path;
use serde::{Deserialize, Serialize};

use crate::contract::{About, Contract};
use crate::error::{Error, Fault, Result};
use crate::layout::{FileName, ManifestAt, PackId, Tenant};

pub const FORMAT: u32 = 1;
/// 64 MiB describe a sandbox of nearly 100 GiB.
pub const MAX_MANIFEST_BYTES: usize = 64 << 20;
pub const MAX_ABOUT_BYTES: usize = 4 << 20;
pub const MAX_FILES: usize = 16;
pub const MAX_CHUNK_BYTES: u32 = 1 << 20;
pub const MAX_PACK_BYTES: u64 = 32 << 20;

const MAGIC: [u8; 8] = *b"SBXCKPT\n";
const HEAD_BYTES: usize = 48;
const PACK_ENTRY: usize = 24;
const FILE_ENTRY: usize = 112;
const CHUNK_ENTRY: usize = 52;
const TAIL_BYTES: usize = 64;

/// The keyed BLAKE3 of a chunk's raw bytes: its name within its tenant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkHash(pub [u8; 32]);

impl ChunkHash {
    pub(crate) const ZERO: Self = Self([0; 32]);

    #[must_use]
    pub fn of(key: &[u8; 32], raw: &[u8]) -> Self {
        Self(*blake3::keyed_hash(key, raw).as_bytes())
    }
}

impl std::fmt::Debug for ChunkHash {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0[..6].iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

/// How a chunk is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    /// Nothing but zeros, and nowhere.
    Zero,
    Raw,
    Zstd,
}

/// A pack that the manifest's chunks lie in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackRef {
    pub id: PackId,
    pub bytes: u64,
}

/// A piece of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    pub hash: ChunkHash,
    /// Index into [`Manifest::packs`]; of no meaning for zeros.
    pub pack: u32,
    pub offset: u32,
    pub stored: u32,
    pub raw: u32,
    pub codec: Codec,
}

/// One of the saved files: its chunks are the next `chunks` ones of the manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileEntry {
    pub name: FileName,
    pub bytes: u64,
    pub chunks: u32,
    /// BLAKE3 over the lengths and hashes of its chunks in order: which chunks, how long, in which order.
    pub digest: [u8; 32],
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Words {
    at: ManifestAt,
    about: About,
}

/// A manifest that holds together: what [`Manifest::decode`] returns and [`Manifest::new`] checks.
#[derive(Debug, Clone, PartialEq)]
pub struct Manifest {
    tenant: Tenant,
    packs: Vec<PackRef>,
    files: Vec<FileEntry>,
    chunks: Vec<Chunk>,
    words: Words,
    digest: [u8; 32],
}

impl Manifest {
    /// # Errors
    /// What [`Manifest::decode`] would refuse, or words beyond their bound.
    pub(crate) fn new(
        at: ManifestAt,
        about: About,
        tenant: Tenant,
        packs: Vec<PackRef>,
        files: Vec<FileEntry>,
        chunks: Vec<Chunk>,
    ) -> Result<Self> {
        let mut manifest = Self { tenant, packs, files, chunks, words: Words { at, about }, digest: [0; 32] };
        manifest.check().map_err(|fault| Error::damaged(&at.path(), fault))?;
        let (bytes, digest) = manifest.encode_parts()?;
        if bytes.len() + TAIL_BYTES > MAX_MANIFEST_BYTES {
            return Err(Error::TooLarge { what: format!("the manifest {at}"), limit: MAX_MANIFEST_BYTES as u64 });
        }
        manifest.digest = digest;
        Ok(manifest)
    }

    /// The same data elsewhere, under another contract.
    ///
    /// # Errors
    /// The contract is too large, or not of that place.
    pub fn again(&self, at: ManifestAt, contract: Contract) -> Result<Self> {
        let about = About::Sandbox(Box::new(contract));
        Self::new(at, about, self.tenant, self.packs.clone(), self.files.clone(), self.chunks.clone())
    }

    #[must_use]
    pub fn at(&self) -> ManifestAt {
        self.words.at
    }

    #[must_use]
    pub fn path(&self) -> Path {
        self.words.at.path()
    }

    #[must_use]
    pub fn tenant(&self) -> Tenant {
        self.tenant
    }

    /// All packs that the data lies in.
    #[must_use]
    pub fn packs(&self) -> &[PackRef] {
        &self.packs
    }

    #[must_use]
    pub fn files(&self) -> &[FileEntry] {
        &self.files
    }

    #[must_use]
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Bytes of all files together.
    #[must_use]
    pub fn raw_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Bytes of its chunks in packs, shared or not, each counted once.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        let mut places: Vec<(u32, u32, u32)> =
            self.chunks.iter().filter(|chunk| chunk.codec != Codec::Zero).map(|chunk| (chunk.pack, chunk.offset, chunk.stored)).collect();
        places.sort_unstable();
        places.dedup();
        places.iter().map(|place| u64::from(place.2)).sum()
    }

    /// The BLAKE3 of the manifest without its end: names exactly this content.
    #[must_use]
    pub fn digest(&self) -> &[u8; 32] {
        &self.digest
    }

    /// The restore contract; `None` for what is no sandbox.
    #[must_use]
    pub fn contract(&self) -> Option<&Contract> {
        match &self.words.about {
            About::Sandbox(contract) => Some(contract),
            About::Image {} | About::Filesystem(_) => None,
        }
    }

    pub(crate) fn about(&self) -> &About {
        &self.words.about
    }

    /// The files with their chunks.
    pub fn files_with_chunks(&self) -> impl Iterator<Item = (&FileEntry, &[Chunk])> {
        let mut rest = self.chunks.as_slice();
        self.files.iter().map(move |file| {
            let (own, after) = rest.split_at((file.chunks as usize).min(rest.len()));
            rest = after;
            (file, own)
        })
    }

    /// # Errors
    /// It is another tenant's.
    pub fn expect_tenant(&self, expected: Tenant) -> Result<()> {
        if self.tenant == expected {
            return Ok(());
        }
        Err(Error::damaged(&self.path(), Fault::ForeignTenant { expected, found: self.tenant }))
    }
}

/// The digest of a file, from its chunks.
pub(crate) fn file_digest(chunks: &[Chunk]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("sandboxer 2026-11-16 file of a checkpoint");
    for chunk in chunks {
        hasher.update(&chunk.raw.to_le_bytes());
        hasher.update(&chunk.hash.0);
    }
    *hasher.finalize().as_bytes()
}

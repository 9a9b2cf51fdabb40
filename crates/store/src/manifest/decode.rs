use super::{
    CHUNK_ENTRY, Chunk, ChunkHash, Codec, FILE_ENTRY, FORMAT, FileEntry, HEAD_BYTES, MAGIC, MAX_ABOUT_BYTES, MAX_CHUNK_BYTES, MAX_FILES,
    MAX_MANIFEST_BYTES, MAX_PACK_BYTES, Manifest, PACK_ENTRY, PackRef, TAIL_BYTES, Words, file_digest,
};
use crate::contract::About;
use crate::error::{Error, Fault, Result};
use crate::key::{MAC_BYTES, Purpose, VolumeKey};
use crate::layout::{FileName, ManifestAt, PackId, Tenant};
use crate::pack;

type Checked<T> = std::result::Result<T, Fault>;

impl Manifest {
    /// The manifest at `at`, if `bytes` are one, whole, unchanged, authenticated where a key asks for it, and of that place.
    ///
    /// # Errors
    /// The first check that failed.
    pub fn decode(at: ManifestAt, bytes: &[u8], key: Option<&VolumeKey>) -> Result<Self> {
        parse(at, bytes, key).map_err(|fault| Error::damaged(&at.path(), fault))
    }

    /// That everything in it refers to something in it, within the bounds.
    pub(super) fn check(&self) -> Checked<()> {
        if self.files.len() > MAX_FILES {
            return Err(Fault::Malformed("it names too many files"));
        }
        for pack in &self.packs {
            if pack.bytes > MAX_PACK_BYTES || pack.bytes < pack::HEAD_BYTES as u64 {
                return Err(Fault::Malformed("a pack has an impossible size"));
            }
        }
        for chunk in &self.chunks {
            self.check_chunk(chunk)?;
        }
        let mut counted = 0_usize;
        for (index, file) in self.files.iter().enumerate() {
            if self.files[..index].iter().any(|other| other.name == file.name) {
                return Err(Fault::Malformed("two of its files have one name"));
            }
            let from = counted;
            counted = counted
                .checked_add(file.chunks as usize)
                .filter(|end| *end <= self.chunks.len())
                .ok_or(Fault::Malformed("a file has more chunks than there are"))?;
            let own = &self.chunks[from..counted];
            // At most 2^32 chunks of at most 2^20 bytes: no overflow.
            if own.iter().map(|chunk| u64::from(chunk.raw)).sum::<u64>() != file.bytes {
                return Err(Fault::Malformed("a file's chunks do not add up to its size"));
            }
            if file_digest(own) != file.digest {
                return Err(Fault::Malformed("a file's chunks do not have its digest"));
            }
        }
        if counted != self.chunks.len() {
            return Err(Fault::Malformed("it has chunks of no file"));
        }
        let fits = match (&self.words.at, &self.words.about) {
            (ManifestAt::Checkpoint { sandbox_id, .. }, About::Sandbox(contract)) => contract.sandbox_id == *sandbox_id,
            (ManifestAt::Snapshot { .. }, About::Sandbox(_)) | (ManifestAt::Image { .. }, About::Image {}) => true,
            (ManifestAt::Filesystem { tenant, .. }, About::Filesystem(_)) => *tenant == self.tenant,
            _ => false,
        };
        if fits { Ok(()) } else { Err(Fault::Malformed("its contract is not of its place")) }
    }

    fn check_chunk(&self, chunk: &Chunk) -> Checked<()> {
        if chunk.raw == 0 || chunk.raw > MAX_CHUNK_BYTES {
            return Err(Fault::Malformed("a chunk has an impossible size"));
        }
        if chunk.codec == Codec::Zero {
            let nowhere = chunk.hash == ChunkHash::ZERO && (chunk.pack, chunk.offset, chunk.stored) == (0, 0, 0);
            return if nowhere { Ok(()) } else { Err(Fault::Malformed("a chunk of zeros lies somewhere")) };
        }
        let pack = self.packs.get(chunk.pack as usize).ok_or(Fault::Malformed("a chunk lies in a pack that is not listed"))?;
        let inside = chunk.offset as usize >= pack::HEAD_BYTES && u64::from(chunk.offset) + u64::from(chunk.stored) <= pack.bytes;
        let sized = match chunk.codec {
            Codec::Raw => chunk.stored == chunk.raw,
            _ => chunk.stored > 0 && chunk.stored < chunk.raw,
        };
        if !inside {
            return Err(Fault::Malformed("a chunk lies outside its pack"));
        }
        if sized { Ok(()) } else { Err(Fault::Malformed("a chunk has an impossible stored size")) }
    }
}

fn parse(at: ManifestAt, bytes: &[u8], key: Option<&VolumeKey>) -> Checked<Manifest> {
    let found = bytes.len() as u64;
    if bytes.len() > MAX_MANIFEST_BYTES {
        return Err(Fault::TooLarge { found, limit: MAX_MANIFEST_BYTES as u64 });
    }
    let mut reader = Reader(bytes);
    let torn = |_| Fault::Torn { expected: (HEAD_BYTES + TAIL_BYTES) as u64, found };
    let magic: [u8; 8] = reader.take().map_err(torn)?;
    if magic != MAGIC {
        return Err(Fault::Magic);
    }
    let version = reader.number().map_err(torn)?;
    if version != FORMAT {
        return Err(if version > FORMAT {
            Fault::NewerFormat { found: version, known: FORMAT }
        } else {
            Fault::Malformed("its format is none that ever was")
        });
    }
    let [packs, files, chunks, about, reserved] = reader.numbers().map_err(torn)?;
    let tenant = Tenant::from_bytes(reader.take().map_err(torn)?);
    // At most 2^32 of 112 bytes each, four times: no overflow in 64 bits.
    let expected = (HEAD_BYTES + TAIL_BYTES) as u64
        + u64::from(packs) * PACK_ENTRY as u64
        + u64::from(files) * FILE_ENTRY as u64
        + u64::from(chunks) * CHUNK_ENTRY as u64
        + u64::from(about);
    if expected != found {
        return Err(Fault::Torn { expected, found });
    }
    // From here on every count is covered by bytes that are there.
    let body = &bytes[..bytes.len() - TAIL_BYTES];
    let mut tail = Reader(&bytes[bytes.len() - TAIL_BYTES..]);
    let digest: [u8; 32] = tail.take()?;
    let mac: [u8; MAC_BYTES] = tail.take()?;
    if blake3::hash(body) != digest {
        return Err(Fault::Digest);
    }
    if let Some(key) = key {
        if mac == [0; MAC_BYTES] {
            return Err(Fault::NotAuthenticated);
        }
        if !key.is_mac(Purpose::Manifest, &bytes[..bytes.len() - MAC_BYTES], &mac) {
            return Err(Fault::Authentication);
        }
    }
    if reserved != 0 || about as usize > MAX_ABOUT_BYTES {
        return Err(Fault::Malformed("its head is none that was ever written"));
    }
    let packs = (0..packs)
        .map(|_| Ok(PackRef { id: PackId::from_bytes(reader.take()?), bytes: u64::from_le_bytes(reader.take()?) }))
        .collect::<Checked<_>>()?;
    let files = (0..files).map(|_| file(&mut reader)).collect::<Checked<_>>()?;
    let chunks = (0..chunks).map(|_| chunk(&mut reader)).collect::<Checked<_>>()?;
    let words: Words = serde_json::from_slice(&reader.0[..about as usize]).map_err(|error| Fault::Unreadable(error.to_string()))?;
    if words.at != at {
        return Err(Fault::Misplaced { says: words.at.to_string() });
    }
    let manifest = Manifest { tenant, packs, files, chunks, words, digest };
    manifest.check()?;
    Ok(manifest)
}

fn file(reader: &mut Reader<'_>) -> Checked<FileEntry> {
    let name: [u8; FileName::MAX_BYTES] = reader.take()?;
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    if name[end..].iter().any(|byte| *byte != 0) {
        return Err(Fault::Malformed("a file's name is none"));
    }
    let name =
        std::str::from_utf8(&name[..end]).ok().and_then(|name| name.parse().ok()).ok_or(Fault::Malformed("a file's name is none"))?;
    let bytes = u64::from_le_bytes(reader.take()?);
    let [chunks, _] = reader.numbers()?;
    Ok(FileEntry { name, bytes, chunks, digest: reader.take()? })
}

fn chunk(reader: &mut Reader<'_>) -> Checked<Chunk> {
    let hash = ChunkHash(reader.take()?);
    let [pack, offset, stored, raw] = reader.numbers()?;
    let codec = match reader.take()? {
        [0, 0, 0, 0] => Codec::Zero,
        [1, 0, 0, 0] => Codec::Raw,
        [2, 0, 0, 0] => Codec::Zstd,
        _ => return Err(Fault::Malformed("a chunk is stored in an unknown way")),
    };
    Ok(Chunk { hash, pack, offset, stored, raw, codec })
}

/// Takes from the front, never beyond the end.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Checked<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(Fault::Malformed("it ends too early"))?;
        self.0 = rest;
        Ok(*taken)
    }

    fn number(&mut self) -> Checked<u32> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    fn numbers<const N: usize>(&mut self) -> Checked<[u32; N]> {
        let mut numbers = [0; N];
        for number in &mut numbers {
            *number = self.number()?;
        }
        Ok(numbers)
    }
}

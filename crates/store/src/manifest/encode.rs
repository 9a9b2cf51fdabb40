use super::{CHUNK_ENTRY, Codec, FILE_ENTRY, FORMAT, HEAD_BYTES, MAGIC, MAX_ABOUT_BYTES, Manifest, PACK_ENTRY, TAIL_BYTES};
use crate::error::{Error, Result};
use crate::key::{MAC_BYTES, Purpose, VolumeKey};
use crate::layout::FileName;

impl Manifest {
    /// Its bytes on the volume, authenticated where there is a key.
    ///
    /// # Errors
    /// The contract is larger than [`MAX_ABOUT_BYTES`].
    pub fn encode(&self, key: Option<&VolumeKey>) -> Result<Vec<u8>> {
        let (mut bytes, digest) = self.encode_parts()?;
        bytes.extend_from_slice(&digest);
        let mac = key.map_or([0; MAC_BYTES], |key| key.mac(Purpose::Manifest, &bytes));
        bytes.extend_from_slice(&mac);
        Ok(bytes)
    }

    /// All but the end, and the digest of that.
    pub(super) fn encode_parts(&self) -> Result<(Vec<u8>, [u8; 32])> {
        let about = serde_json::to_vec(&self.words).map_err(|error| Error::Invalid(format!("the contract can't be written: {error}")))?;
        if about.len() > MAX_ABOUT_BYTES {
            return Err(Error::TooLarge { what: format!("the contract of {}", self.words.at), limit: MAX_ABOUT_BYTES as u64 });
        }
        let length =
            HEAD_BYTES + self.packs.len() * PACK_ENTRY + self.files.len() * FILE_ENTRY + self.chunks.len() * CHUNK_ENTRY + about.len();
        let mut bytes = Vec::with_capacity(length + TAIL_BYTES);
        bytes.extend_from_slice(&MAGIC);
        for number in [FORMAT, count(self.packs.len())?, count(self.files.len())?, count(self.chunks.len())?, count(about.len())?, 0] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(self.tenant.as_bytes());
        for pack in &self.packs {
            bytes.extend_from_slice(pack.id.as_bytes());
            bytes.extend_from_slice(&pack.bytes.to_le_bytes());
        }
        for file in &self.files {
            let mut name = [0; FileName::MAX_BYTES];
            name[..file.name.as_str().len()].copy_from_slice(file.name.as_str().as_bytes());
            bytes.extend_from_slice(&name);
            bytes.extend_from_slice(&file.bytes.to_le_bytes());
            bytes.extend_from_slice(&file.chunks.to_le_bytes());
            bytes.extend_from_slice(&[0; 4]);
            bytes.extend_from_slice(&file.digest);
        }
        for chunk in &self.chunks {
            bytes.extend_from_slice(&chunk.hash.0);
            for number in [chunk.pack, chunk.offset, chunk.stored, chunk.raw] {
                bytes.extend_from_slice(&number.to_le_bytes());
            }
            let codec = match chunk.codec {
                Codec::Zero => 0,
                Codec::Raw => 1,
                Codec::Zstd => 2,
            };
            bytes.extend_from_slice(&[codec, 0, 0, 0]);
        }
        bytes.extend_from_slice(&about);
        debug_assert_eq!(bytes.len(), length);
        let digest = *blake3::hash(&bytes).as_bytes();
        Ok((bytes, digest))
    }
}

fn count(length: usize) -> Result<u32> {
    u32::try_from(length).map_err(|_| Error::TooLarge { what: "a part of a manifest".into(), limit: u64::from(u32::MAX) })
}

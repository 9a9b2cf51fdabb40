//! The optional key that authenticates what lies on the volume (`--volume-key-file`).

use std::fmt;
use std::io::Read;
use std::path::Path;

use crate::error::{Error, Result};

/// Bytes of an authentication.
pub const MAC_BYTES: usize = 32;

const MIN_KEY_BYTES: usize = 16;
const MAX_KEY_BYTES: u64 = 4096;

/// What is authenticated: one kind can't be taken for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Manifest,
    Record,
}

/// All instances of a volume have the same.
#[derive(Clone)]
pub struct VolumeKey {
    manifest: [u8; 32],
    record: [u8; 32],
}

impl VolumeKey {
    /// # Errors
    /// The file can't be read, or is too short for a key or too long.
    pub fn read(path: &Path) -> Result<Self> {
        let mut bytes = Vec::new();
        let file = std::fs::File::open(path).map_err(|source| Error::local("open the volume key file", path, source))?;
        file.take(MAX_KEY_BYTES + 1).read_to_end(&mut bytes).map_err(|source| Error::local("read the volume key file", path, source))?;
        if bytes.len() as u64 > MAX_KEY_BYTES {
            return Err(Error::TooLarge { what: format!("the volume key file {}", path.display()), limit: MAX_KEY_BYTES });
        }
        let text = bytes.trim_ascii();
        if text.len() < MIN_KEY_BYTES {
            return Err(Error::Invalid(format!("the volume key file {} holds less than {MIN_KEY_BYTES} bytes", path.display())));
        }
        Ok(Self::from_bytes(text))
    }

    #[must_use]
    pub fn from_bytes(key: &[u8]) -> Self {
        Self {
            manifest: blake3::derive_key("sandboxer 2026-11-16 volume key, manifests", key),
            record: blake3::derive_key("sandboxer 2026-11-16 volume key, records", key),
        }
    }

    /// The authentication of `bytes`. What they are the value of (a path, an id) has to be in them.
    #[must_use]
    pub fn mac(&self, purpose: Purpose, bytes: &[u8]) -> [u8; MAC_BYTES] {
        *blake3::keyed_hash(self.of(purpose), bytes).as_bytes()
    }

    /// In constant time.
    #[must_use]
    pub fn is_mac(&self, purpose: Purpose, bytes: &[u8], mac: &[u8; MAC_BYTES]) -> bool {
        blake3::keyed_hash(self.of(purpose), bytes) == *mac
    }

    fn of(&self, purpose: Purpose) -> &[u8; 32] {
        match purpose {
            Purpose::Manifest => &self.manifest,
            Purpose::Record => &self.record,
        }
    }
}

impl fmt::Debug for VolumeKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("VolumeKey")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_authentication_holds_for_its_bytes_purpose_and_key_only() {
        let key = VolumeKey::from_bytes(b"0123456789abcdef");
        let mac = key.mac(Purpose::Manifest, b"bytes");
        assert!(key.is_mac(Purpose::Manifest, b"bytes", &mac));
        assert!(!key.is_mac(Purpose::Record, b"bytes", &mac));
        assert!(!key.is_mac(Purpose::Manifest, b"bytez", &mac));
        assert!(!VolumeKey::from_bytes(b"0123456789abcdeg").is_mac(Purpose::Manifest, b"bytes", &mac));
    }

    #[test]
    fn a_short_key_file_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "short\n").unwrap();
        assert!(VolumeKey::read(file.path()).is_err());
        std::fs::write(file.path(), "long enough to be one\n").unwrap();
        assert!(VolumeKey::read(file.path()).is_ok());
    }
}

//! Names and digests of images, parsed at the edge.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// The name of the image that the server uses unless asked for another.
pub const BASE_NAME: &str = "base";

const MAX_NAME_BYTES: usize = 64;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ParseError {
    #[error("{0:?} is no image name: use 1 to 64 of A-Z a-z 0-9 . _ - and do not begin with a dot")]
    Name(String),
    #[error("{0:?} is no digest: 64 hexadecimal digits, with or without sha256: before them")]
    Digest(String),
}

/// An image's name: 1–64 of `[A-Za-z0-9._-]`, not starting with a dot.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageName(String);

impl ImageName {
    pub fn base() -> Self {
        Self(BASE_NAME.to_owned())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ImageName {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        // A name that reads as a digest could never be told from one.
        let is_name = (1..=MAX_NAME_BYTES).contains(&text.len())
            && text.bytes().all(allowed)
            && !text.starts_with('.')
            && text.parse::<Digest>().is_err();
        if is_name { Ok(Self(text.to_owned())) } else { Err(ParseError::Name(text.chars().take(80).collect())) }
    }
}

impl TryFrom<String> for ImageName {
    type Error = ParseError;

    fn try_from(text: String) -> Result<Self, ParseError> {
        text.parse()
    }
}

impl From<ImageName> for String {
    fn from(name: ImageName) -> Self {
        name.0
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// A SHA-256, in lower-case hexadecimal.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

impl Digest {
    pub fn of(bytes: &[u8]) -> Self {
        let mut hasher = Hasher::default();
        hasher.update(bytes);
        hasher.finish()
    }

    pub fn of_file(mut file: &File) -> io::Result<Self> {
        let mut hasher = Hasher::default();
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(hasher.finish()),
                n => hasher.update(&buffer[..n]),
            }
        }
    }

    /// The 64 hexadecimal digits.
    pub fn as_hex(&self) -> &str {
        &self.0
    }
}

impl FromStr for Digest {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let hex = text.strip_prefix("sha256:").unwrap_or(text);
        if hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            Ok(Self(hex.to_ascii_lowercase()))
        } else {
            Err(ParseError::Digest(text.chars().take(80).collect()))
        }
    }
}

impl TryFrom<String> for Digest {
    type Error = ParseError;

    fn try_from(text: String) -> Result<Self, ParseError> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// Hashes piece by piece.
#[derive(Default)]
pub(crate) struct Hasher(Sha256);

impl Hasher {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn finish(self) -> Digest {
        let hex = self.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Digest(hex)
    }
}

/// What a user may give where an image is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageRef {
    Name(ImageName),
    Digest(Digest),
}

impl FromStr for ImageRef {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        text.parse().map(Self::Digest).or_else(|_| text.parse().map(Self::Name))
    }
}

impl From<ImageName> for ImageRef {
    fn from(name: ImageName) -> Self {
        Self::Name(name)
    }
}

impl From<Digest> for ImageRef {
    fn from(digest: Digest) -> Self {
        Self::Digest(digest)
    }
}

impl fmt::Display for ImageRef {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => name.fmt(formatter),
            Self::Digest(digest) => digest.fmt(formatter),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_plain_and_not_hidden() {
        for good in ["base", "a", "Py-3.11_slim", "x.", &"n".repeat(64)] {
            assert!(good.parse::<ImageName>().is_ok(), "{good}");
        }
        for bad in ["", ".", "..", ".hidden", "a/b", "a b", "ä", "a\0", "a\n", &"n".repeat(65), &"a".repeat(64)] {
            // 64 times "a" is a digest, 65 times "n" too long.
            assert!(bad.parse::<ImageName>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_reference_is_a_digest_or_a_name() {
        let hex = "0f".repeat(32);
        assert_eq!(hex.parse(), Ok(ImageRef::Digest(Digest(hex.clone()))));
        assert_eq!(format!("sha256:{}", hex.to_uppercase()).parse(), Ok(ImageRef::Digest(Digest(hex))));
        assert_eq!("base".parse(), Ok(ImageRef::Name(ImageName::base())));
        assert!("sha256:abc".parse::<ImageRef>().is_err());
    }

    #[test]
    fn a_digest_is_sha256() {
        assert_eq!(Digest::of(b"").as_hex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    }
}

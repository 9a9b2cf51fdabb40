//! Names and paths as Unix has them: any bytes but a zero. In JSON and in addresses they are percent-encoded.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use crate::limits::MAX_PATH_BYTES;

/// Bytes that may be no text.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Raw(Vec<u8>);

impl Raw {
    #[must_use]
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }

    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// As text in which every byte can be told from every other.
    #[must_use]
    pub fn encoded(&self) -> String {
        let mut out = String::with_capacity(self.0.len());
        for byte in &self.0 {
            match byte {
                b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' => out.push(char::from(*byte)),
                byte => out += &format!("%{byte:02X}"),
            }
        }
        out
    }

    /// None: half an escape, or one that is no number.
    #[must_use]
    pub fn decoded(text: &str) -> Option<Self> {
        let mut out = Vec::with_capacity(text.len());
        let mut bytes = text.bytes();
        while let Some(byte) = bytes.next() {
            out.push(match byte {
                b'%' => {
                    let digits = [bytes.next()?, bytes.next()?].map(|digit| char::from(digit).to_digit(16));
                    u8::try_from(digits[0]? * 16 + digits[1]?).ok()?
                }
                byte => byte,
            });
        }
        Some(Self(out))
    }
}

impl fmt::Debug for Raw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", String::from_utf8_lossy(&self.0))
    }
}

impl Serialize for Raw {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.encoded())
    }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::decoded(&text).ok_or_else(|| D::Error::custom("a broken escape"))
    }
}

/// An absolute path in a sandbox. It means what the guest's root and its links make of it; nothing is resolved here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Raw", into = "Raw")]
pub struct GuestPath(Raw);

/// Why something is no path in a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoPath {
    #[error("it has to be absolute, such as /root/file")]
    NotAbsolute,
    #[error("it has a zero byte in it")]
    Zero,
    #[error("it is longer than {MAX_PATH_BYTES} bytes")]
    TooLong,
}

impl GuestPath {
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    #[must_use]
    pub fn encoded(&self) -> String {
        self.0.encoded()
    }

    /// The path of something in the directory at this one.
    #[must_use]
    pub fn join(&self, name: &[u8]) -> Raw {
        let mut bytes = self.0.0.clone();
        while bytes.last() == Some(&b'/') {
            bytes.pop();
        }
        bytes.push(b'/');
        bytes.extend_from_slice(name);
        Raw(bytes)
    }

    #[must_use]
    pub fn raw(&self) -> &Raw {
        &self.0
    }
}

impl TryFrom<Raw> for GuestPath {
    type Error = NoPath;

    fn try_from(raw: Raw) -> Result<Self, NoPath> {
        match raw.as_bytes() {
            bytes if !bytes.starts_with(b"/") => Err(NoPath::NotAbsolute),
            bytes if bytes.contains(&0) => Err(NoPath::Zero),
            bytes if bytes.len() > MAX_PATH_BYTES => Err(NoPath::TooLong),
            _ => Ok(Self(raw)),
        }
    }
}

impl From<GuestPath> for Raw {
    fn from(path: GuestPath) -> Self {
        path.0
    }
}

impl fmt::Display for GuestPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(self.as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_comes_back() {
        let all = Raw::new((0..=255).collect::<Vec<u8>>());
        assert_eq!(Raw::decoded(&all.encoded()), Some(all.clone()));
        assert_eq!(serde_json::from_str::<Raw>(&serde_json::to_string(&all).unwrap()).unwrap(), all);
        assert_eq!(Raw::decoded("/a%0Ab+c").unwrap().as_bytes(), b"/a\nb+c");
        for broken in ["%", "%4", "%zz", "%é"] {
            assert_eq!(Raw::decoded(broken), None, "{broken}");
        }
    }

    #[test]
    fn a_path_is_absolute_and_bounded() {
        assert!(GuestPath::try_from(Raw::new("/")).is_ok());
        assert_eq!(GuestPath::try_from(Raw::new("a")), Err(NoPath::NotAbsolute));
        assert_eq!(GuestPath::try_from(Raw::new("")), Err(NoPath::NotAbsolute));
        assert_eq!(GuestPath::try_from(Raw::new("/a\0")), Err(NoPath::Zero));
        assert_eq!(GuestPath::try_from(Raw::new(vec![b'/'; MAX_PATH_BYTES + 1])), Err(NoPath::TooLong));
        assert_eq!(GuestPath::try_from(Raw::new("/a/")).unwrap().join(b"b").as_bytes(), b"/a/b");
        assert_eq!(GuestPath::try_from(Raw::new("/")).unwrap().join(b"b").as_bytes(), b"/b");
    }
}

//! Names and ids, parsed where they enter: each has one spelling and none that means something to a path, an option or a shell.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, de::Error as _};
use uuid::Uuid;

/// The longest part of a name behind its prefix.
const MAX_NAME: usize = 48;

/// Why a text is no such name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidName(String);

fn plain(text: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    (1..=MAX_NAME).contains(&text.len())
        && text.bytes().all(|byte| good(byte) || byte == b'-')
        && text.bytes().next().is_some_and(good)
        && text.bytes().last().is_some_and(good)
}

macro_rules! names {
    ($($(#[$doc:meta])* $name:ident = $prefix:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = InvalidName;

            fn from_str(text: &str) -> Result<Self, InvalidName> {
                if text.strip_prefix($prefix).is_some_and(plain) {
                    return Ok(Self(text.to_owned()));
                }
                let shown: String = text.chars().take(80).collect();
                Err(InvalidName(format!(
                    "{shown:?}: such a name is \"{}\" and 1 to {MAX_NAME} of a-z, 0-9 and -, not beginning or ending with -",
                    $prefix
                )))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
            }
        }
    )*};
}

names! {
    /// `profile.…`
    ProfileName = "profile.";
    /// `ext.…`
    ExtensionName = "ext.";
    /// The name of a placement host in the hosts file.
    HostName = "";
}

/// The identity of a snapshot: a v4 UUID in its one spelling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct SnapshotId(Uuid);

impl SnapshotId {
    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }
}

impl FromStr for SnapshotId {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        match Uuid::try_parse(text) {
            Ok(uuid) if uuid.get_version_num() == 4 && uuid.hyphenated().to_string() == text => Ok(Self(uuid)),
            _ => Err(InvalidName("a snapshot id is a version 4 UUID in lower case with hyphens".to_owned())),
        }
    }
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0.hyphenated(), f)
    }
}

impl<'de> Deserialize<'de> for SnapshotId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_means_nothing_to_a_path_or_a_shell() {
        assert!("profile.compose-e2e".parse::<ProfileName>().is_ok());
        assert!("h1".parse::<HostName>().is_ok());
        for bad in
            ["", "profile.", "profile.-a", "profile.a-", "profile.a/b", "profile.a b", "profile.A", "ext.a", "profile.a\n", "profile.ä"]
        {
            assert!(bad.parse::<ProfileName>().is_err(), "{bad}");
        }
        for bad in ["", "-o", "..", "a.b", "a;b", &"a".repeat(49)] {
            assert!(bad.parse::<HostName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_snapshot_id_has_one_spelling() {
        let id = SnapshotId::random();
        assert_eq!(id.to_string().parse::<SnapshotId>(), Ok(id));
        for bad in ["", "..", &id.to_string().to_uppercase(), "00000000-0000-0000-0000-000000000000"] {
            assert!(bad.parse::<SnapshotId>().is_err(), "{bad}");
        }
    }
}

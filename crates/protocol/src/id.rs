//! Identifiers, parsed where they enter.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, de::Error as _};
use uuid::Uuid;

use crate::limits::MAX_EXECUTION_ID_BYTES;

/// Why a text is not an identifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidId {
    #[error("a sandbox id is a version 4 UUID in lower case with hyphens")]
    Sandbox,
    #[error("an execution id has 1 to {MAX_EXECUTION_ID_BYTES} printable ASCII characters and no space")]
    Execution,
}

/// The identity of a sandbox: an unguessable v4 UUID.
///
/// It parses from its canonical spelling only, so that one sandbox has one name in paths and records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct SandboxId(Uuid);

impl SandboxId {
    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }
}

impl FromStr for SandboxId {
    type Err = InvalidId;

    fn from_str(text: &str) -> Result<Self, InvalidId> {
        let uuid = Uuid::try_parse(text).map_err(|_| InvalidId::Sandbox)?;
        if uuid.get_version_num() != 4 || uuid.hyphenated().to_string() != text {
            return Err(InvalidId::Sandbox);
        }
        Ok(Self(uuid))
    }
}

impl fmt::Display for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0.hyphenated(), f)
    }
}

impl<'de> Deserialize<'de> for SandboxId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// The identity of an execution within its sandbox, chosen by the client or else by the server.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct ExecutionId(String);

impl ExecutionId {
    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4().hyphenated().to_string())
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ExecutionId {
    type Err = InvalidId;

    fn from_str(text: &str) -> Result<Self, InvalidId> {
        let good = (1..=MAX_EXECUTION_ID_BYTES).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic());
        good.then(|| Self(text.to_owned())).ok_or(InvalidId::Execution)
    }
}

impl fmt::Display for ExecutionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for ExecutionId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_id_has_one_spelling() {
        let id = SandboxId::random();
        assert_eq!(id.to_string().parse::<SandboxId>(), Ok(id));
        for bad in ["", "..", "x", &id.to_string().to_uppercase(), "00000000-0000-0000-0000-000000000000", &format!("{{{id}}}")] {
            assert_eq!(bad.parse::<SandboxId>(), Err(InvalidId::Sandbox), "{bad}");
        }
    }

    #[test]
    fn an_execution_id_is_short_printable_text() {
        assert!("run-1".parse::<ExecutionId>().is_ok());
        for bad in ["", "a b", "a\n", "ä", &"x".repeat(129)] {
            assert_eq!(bad.parse::<ExecutionId>(), Err(InvalidId::Execution), "{bad}");
        }
    }
}

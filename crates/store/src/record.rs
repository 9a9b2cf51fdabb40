//! The one record of a sandbox, `locks/{id}.lock`: who owns it, what its newest checkpoint is, who waits for it.
//!
//! It is changed by compare-and-swap alone ([`RecordStore`]), and every change is a pure function from one [`Record`] to the next
//! (`change.rs`). A checkpoint counts when the record names it; nothing else on the volume decides anything. Nobody ever compares the
//! record's times with a clock: they are for people.

mod bell;
mod bucket;
mod change;
mod codec;
#[cfg(feature = "testing")]
pub mod conformance;
mod directory;
mod memory;
mod store;

use std::{collections::BTreeMap, fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uuid::Uuid;

pub(crate) use self::directory::is_network;
pub use self::{
    bucket::BucketRecords,
    change::{Holder, NotHeld, OwnerChange, Refused, Stamp},
    codec::{BadRecord, Codec, MacFn},
    directory::{DirectoryRecords, Step, StepHook},
    memory::{Hidden, MemoryRecords, RecordFault},
    store::{Changes, ReadError, RecordStore, Stored, SwapError, Tag},
};
use crate::layout::CheckpointName;

/// The format that this version writes, and the newest that it reads.
pub const RECORD_FORMAT: u32 = 1;
/// A record is a few hundred bytes; what is larger than this is none.
pub const MAX_RECORD_BYTES: usize = 16 * 1024;
/// The reason that an answer or a tombstone carries is cut to this.
pub const MAX_REASON_BYTES: usize = 1024;
/// No counter of a record comes near this; one that has is not ours.
pub const MAX_COUNT: u64 = 1 << 53;

/// The name of a server instance: 1 to 128 printable ASCII characters and no space.
///
/// One process at a time uses it; a server that is started again under its name may take up at once what it held before.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct InstanceId(String);

/// A text in a record that is not what it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadText {
    #[error("an instance id has 1 to {} printable ASCII characters and no space", InstanceId::MAX_BYTES)]
    Instance,
    #[error("a nonce has 32 lower-case hexadecimal digits")]
    Nonce,
}

impl InstanceId {
    pub const MAX_BYTES: usize = 128;

    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4().hyphenated().to_string())
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for InstanceId {
    type Err = BadText;

    fn from_str(text: &str) -> Result<Self, BadText> {
        let good = (1..=Self::MAX_BYTES).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
        good.then(|| Self(text.to_owned())).ok_or(BadText::Instance)
    }
}

impl TryFrom<String> for InstanceId {
    type Error = BadText;

    fn try_from(text: String) -> Result<Self, BadText> {
        text.parse()
    }
}

impl From<InstanceId> for String {
    fn from(id: InstanceId) -> Self {
        id.0
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// What makes every version of a record, and every registration of a waiter, differ from every other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Nonce(u128);

impl Nonce {
    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4().as_u128())
    }

    /// For whoever has randomness of their own, as the simulator does.
    #[must_use]
    pub fn from_bits(bits: u128) -> Self {
        Self(bits)
    }
}

impl FromStr for Nonce {
    type Err = BadText;

    fn from_str(text: &str) -> Result<Self, BadText> {
        let good = text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        good.then(|| u128::from_str_radix(text, 16).ok()).flatten().map(Self).ok_or(BadText::Nonce)
    }
}

impl TryFrom<String> for Nonce {
    type Error = BadText;

    fn try_from(text: String) -> Result<Self, BadText> {
        text.parse()
    }
}

impl From<Nonce> for String {
    fn from(nonce: Nonce) -> Self {
        nonce.to_string()
    }
}

impl fmt::Display for Nonce {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", self.0)
    }
}

impl fmt::Debug for Nonce {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

/// One version of the record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub format: u32,
    /// Who runs the sandbox; none after a release.
    pub owner: Option<InstanceId>,
    /// When this version was written, by its writer's clock, in seconds since 1970. For people.
    pub timestamp: u64,
    /// Raised by every new owner.
    pub epoch: u64,
    /// Raised by every change.
    pub sequence: u64,
    pub nonce: Nonce,
    /// The sequence of the owner's last change: what others watch to see that it lives. A waiter's changes leave it alone.
    pub renewed: u64,
    /// The newest checkpoint.
    pub latest: Option<CheckpointName>,
    /// Nothing ran since that checkpoint: it was given up with it.
    #[serde(default)]
    pub resting: bool,
    #[serde(default)]
    pub waiter: Option<Waiter>,
    #[serde(default)]
    pub answer: Option<Answer>,
    #[serde(default)]
    pub tombstone: Option<Tombstone>,
    /// What the server wants to know of a sandbox before it has read anything else. Kept by every change.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub attributes: BTreeMap<String, Value>,
    /// Fields of a newer version, which are kept.
    #[serde(flatten)]
    pub(crate) rest: Map<String, Value>,
}

/// The instance that asks the owner to hand over.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Waiter {
    pub instance: InstanceId,
    /// Names this registration; an answer is addressed to it.
    pub nonce: Nonce,
    /// The sequence of its last refreshment, by which others see that it lives.
    pub renewed: u64,
    /// For people.
    pub timestamp: u64,
    #[serde(flatten)]
    pub(crate) rest: Map<String, Value>,
}

/// What the owner tells a waiter that gets nothing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// The registration that is answered.
    pub to: Nonce,
    #[serde(flatten)]
    pub verdict: Verdict,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    /// A client is attached and keeps it.
    InUse,
    /// The sandbox goes on where it is.
    CannotSave { reason: String },
}

/// What a killed sandbox leaves until it is collected.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tombstone {
    pub reason: String,
    /// For people.
    pub timestamp: u64,
    #[serde(flatten)]
    pub(crate) rest: Map<String, Value>,
}

/// Cuts a reason to what a record may carry, at a character.
pub(crate) fn bounded_reason(reason: &str) -> String {
    let mut end = reason.len().min(MAX_REASON_BYTES);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    reason[..end].to_owned()
}

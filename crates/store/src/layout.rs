//! The names on the volume, parsed at the edge: nothing that was read from it is ever joined into a path raw.
//!
//! ```text
//! {sandbox_id}/metadata.json
//! {sandbox_id}/checkpoints/checkpoint_{ms}.img   a manifest
//! {sandbox_id}/checkpoints/latest                the file name of the newest complete one
//! locks/{sandbox_id}.lock…                       the record and its versions
//! snapshots/{snapshot_id}.img                    a manifest
//! filesystem/{tenant}/{name}.img                 the manifest of a filesystem snapshot
//! images/{sha256}.img                            the manifest of a base image
//! packs/{tenant}/{pack_id}.pack                  chunks, gathered
//! kept/{tenant}/{ns}_{sandbox_id}                a sandbox of the tenant was saved, for lists
//! bells/{digest}                                 an instance is told that somebody waits for a sandbox of its; in buckets alone
//! volume                                         says that this is the volume, and not an empty one in its place; in buckets alone
//! probes/{nonce}                                 a server tries what the bucket can; in buckets alone
//! collect/turn                                   who collected last
//! collect/intents/{nonce}                        a writer is at work
//! collect/condemned/{nonce}                      packs that a collector means to remove
//! collect/reserve                                room for such a list
//! ```

use std::fmt;
use std::str::FromStr;

use object_store::path::Path;
use sandboxer_protocol::SandboxId;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::failpoint::Kind;
use crate::filesystem::FilesystemName;
use crate::record::{InstanceId, Nonce};

/// A text on the volume that is not the name it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no {what}")]
pub struct BadName {
    what: &'static str,
    text: String,
}

impl BadName {
    pub(crate) fn new(what: &'static str, text: &str) -> Self {
        Self { what, text: text.chars().take(80).collect() }
    }
}

macro_rules! text_form {
    ($name:ident) => {
        impl TryFrom<String> for $name {
            type Error = BadName;

            fn try_from(text: String) -> Result<Self, BadName> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.to_string()
            }
        }
    };
}

/// `checkpoint_{ms}.img`: in the order of their time, which is unique within a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CheckpointName(u64);

impl CheckpointName {
    /// Beyond the year 5000, and far from where a successor would overflow.
    const MAX_MS: u64 = 100_000_000_000_000;

    /// `None` beyond what a clock could say.
    #[must_use]
    pub fn at(ms: u64) -> Option<Self> {
        (ms <= Self::MAX_MS).then_some(Self(ms))
    }

    /// The name for a save at `now_ms` that comes after `last`: increasing even if two come in one millisecond or the clock went back.
    #[must_use]
    pub fn after(last: Option<Self>, now_ms: u64) -> Option<Self> {
        Self::at(last.map_or(now_ms, |last| now_ms.max(last.0 + 1)))
    }

    #[must_use]
    pub fn ms(self) -> u64 {
        self.0
    }
}

impl fmt::Display for CheckpointName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "checkpoint_{}.img", self.0)
    }
}

impl FromStr for CheckpointName {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        let digits = text.strip_prefix("checkpoint_").and_then(|rest| rest.strip_suffix(".img"));
        let name = digits
            .filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))
            .and_then(|digits| digits.parse().ok())
            .and_then(Self::at);
        // One checkpoint has one spelling: no leading zeros.
        name.filter(|name| name.to_string() == text).ok_or_else(|| BadName::new("checkpoint name", text))
    }
}

text_form!(CheckpointName);

/// The identity of a whole-sandbox snapshot: a v4 UUID in its canonical spelling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SnapshotId(Uuid);

impl SnapshotId {
    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.hyphenated().fmt(formatter)
    }
}

impl FromStr for SnapshotId {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        let uuid = Uuid::try_parse(text).ok().filter(|uuid| uuid.get_version_num() == 4 && uuid.hyphenated().to_string() == text);
        uuid.map(Self).ok_or_else(|| BadName::new("snapshot id", text))
    }
}

text_form!(SnapshotId);

/// Whose data it is: chunks and packs are shared within a tenant and never beyond, since sharing tells what others hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Tenant([u8; 16]);

impl Tenant {
    /// The tenant of an API key. The key can't be had back from it.
    #[must_use]
    pub fn of_key(key: &[u8]) -> Self {
        Self::derive("sandboxer 2026-11-16 tenant of an API key", key)
    }

    /// The only tenant of a server without keys.
    #[must_use]
    pub fn open() -> Self {
        Self::derive("sandboxer 2026-11-16 tenant of a server without keys", b"")
    }

    /// Base images belong to all.
    #[must_use]
    pub fn images() -> Self {
        Self::derive("sandboxer 2026-11-16 tenant of base images", b"")
    }

    fn derive(context: &str, material: &[u8]) -> Self {
        let mut tag = [0; 16];
        tag.copy_from_slice(&blake3::derive_key(context, material)[..16]);
        Self(tag)
    }

    pub(crate) fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    pub(crate) fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// What chunks of this tenant are hashed with, so that equal data of two tenants has two names.
    #[must_use]
    pub fn chunk_key(&self) -> [u8; 32] {
        blake3::derive_key("sandboxer 2026-11-16 chunks of a tenant", &self.0)
    }
}

/// `{ns}_{sandbox_id}`: a sandbox that was saved, in the order of their making.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeptName {
    made_ns: u64,
    id: SandboxId,
}

impl KeptName {
    /// `made_ns`: nanoseconds since 1970.
    #[must_use]
    pub fn new(made_ns: u64, id: SandboxId) -> Self {
        Self { made_ns, id }
    }

    #[must_use]
    pub fn made_at(created_at: jiff::Timestamp, id: SandboxId) -> Self {
        Self::new(u64::try_from(created_at.as_nanosecond()).unwrap_or(0), id)
    }

    #[must_use]
    pub fn made_ns(self) -> u64 {
        self.made_ns
    }

    #[must_use]
    pub fn id(self) -> SandboxId {
        self.id
    }
}

impl fmt::Display for KeptName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // With all digits, so that names are in the order of time.
        write!(formatter, "{:020}_{}", self.made_ns, self.id)
    }
}

impl FromStr for KeptName {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        let parts = text.split_once('_').and_then(|(digits, id)| Some((digits.parse().ok()?, id.parse().ok()?)));
        let name = parts.map(|(made_ns, id)| Self { made_ns, id });
        name.filter(|name| name.to_string() == text).ok_or_else(|| BadName::new("name of a sandbox that was saved", text))
    }
}

/// The identity of a pack: random. What is in it is addressed by content, chunk by chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PackId([u8; 16]);

impl PackId {
    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4().into_bytes())
    }

    #[must_use]
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

/// A SHA-256 that names a base image, in lower-case hexadecimal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageDigest([u8; 32]);

impl ImageDigest {
    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

macro_rules! hexadecimal {
    ($name:ident, $what:literal, $bytes:literal) => {
        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
            }
        }

        impl FromStr for $name {
            type Err = BadName;

            fn from_str(text: &str) -> Result<Self, BadName> {
                let bytes = unhex::<$bytes>(text).ok_or_else(|| BadName::new($what, text))?;
                Ok(Self(bytes))
            }
        }

        text_form!($name);
    };
}

hexadecimal!(Tenant, "tenant", 16);
hexadecimal!(PackId, "pack id", 16);
hexadecimal!(ImageDigest, "image digest", 32);

fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let lower = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if text.len() != 2 * N || !lower {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

/// The name of a file that a checkpoint holds: `[a-z0-9_.]`, 1 to 64, not starting with a dot.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FileName(String);

impl FileName {
    pub const MAX_BYTES: usize = 64;

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl FromStr for FileName {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        let allowed = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.');
        let fits = (1..=Self::MAX_BYTES).contains(&text.len()) && text.bytes().all(allowed) && !text.starts_with('.');
        if fits { Ok(Self(text.to_owned())) } else { Err(BadName::new("name of a file in a checkpoint", text)) }
    }
}

text_form!(FileName);

/// Where a manifest lies, which it also says of itself: one that was moved or copied is not taken for another's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ManifestAt {
    Checkpoint { sandbox_id: SandboxId, name: CheckpointName },
    Snapshot { snapshot_id: SnapshotId },
    Image { digest: ImageDigest },
    Filesystem { tenant: Tenant, name: FilesystemName },
}

impl ManifestAt {
    #[must_use]
    pub fn path(&self) -> Path {
        match self {
            Self::Checkpoint { sandbox_id, name } => checkpoints(*sandbox_id).join(name.to_string()),
            Self::Snapshot { snapshot_id } => snapshots().join(format!("{snapshot_id}.img")),
            Self::Image { digest } => images().join(format!("{digest}.img")),
            Self::Filesystem { tenant, name } => filesystems(*tenant).join(format!("{name}.img")),
        }
    }
}

impl fmt::Display for ManifestAt {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path().fmt(formatter)
    }
}

pub(crate) fn checkpoints(sandbox: SandboxId) -> Path {
    Path::from(sandbox.to_string()).join("checkpoints")
}

pub(crate) fn latest(sandbox: SandboxId) -> Path {
    checkpoints(sandbox).join("latest")
}

pub(crate) fn metadata(sandbox: SandboxId) -> Path {
    Path::from(sandbox.to_string()).join("metadata.json")
}

pub(crate) fn snapshots() -> Path {
    Path::from("snapshots")
}

pub(crate) fn images() -> Path {
    Path::from("images")
}

pub(crate) fn all_kept() -> Path {
    Path::from("kept")
}

pub(crate) fn kept(tenant: Tenant) -> Path {
    all_kept().join(tenant.to_string())
}

pub(crate) fn kept_name(tenant: Tenant, name: KeptName) -> Path {
    kept(tenant).join(name.to_string())
}

pub(crate) fn all_filesystems() -> Path {
    Path::from("filesystem")
}

pub(crate) fn filesystems(tenant: Tenant) -> Path {
    all_filesystems().join(tenant.to_string())
}

pub(crate) fn packs(tenant: Tenant) -> Path {
    Path::from("packs").join(tenant.to_string())
}

pub(crate) fn pack(tenant: Tenant, id: PackId) -> Path {
    packs(tenant).join(format!("{id}.pack"))
}

pub(crate) fn all_packs() -> Path {
    Path::from("packs")
}

/// Where an instance is told of those who wait for its sandboxes. It may be called anything, so the name is a digest.
pub(crate) fn bell(instance: &InstanceId) -> Path {
    bells().join(blake3::hash(instance.as_str().as_bytes()).to_hex().as_str())
}

pub(crate) fn bells() -> Path {
    Path::from("bells")
}

/// What a server puts into a bucket when it starts.
pub(crate) fn marker() -> Path {
    Path::from("volume")
}

pub(crate) fn probes() -> Path {
    Path::from("probes")
}

pub(crate) fn intents() -> Path {
    Path::from("collect").join("intents")
}

pub(crate) fn intent(name: Nonce) -> Path {
    intents().join(name.to_string())
}

pub(crate) fn condemned_lists() -> Path {
    Path::from("collect").join("condemned")
}

pub(crate) fn condemned(name: Nonce) -> Path {
    condemned_lists().join(name.to_string())
}

/// Who collected last.
pub(crate) fn turn() -> Path {
    Path::from("collect").join("turn")
}

pub(crate) fn reserve() -> Path {
    Path::from("collect").join("reserve")
}

/// Whether it is of use only to those who live.
pub(crate) fn is_fleeting(path: &Path) -> bool {
    path.prefix_matches(&intents())
}

/// What lies at a path, for the fail points of its write.
pub(crate) fn kind_of(path: &Path) -> Option<Kind> {
    let text = path.as_ref();
    match (text.split('/').next(), path.filename()) {
        (Some("packs"), _) => Some(Kind::Pack),
        (Some("locks"), _) => Some(Kind::Publish),
        (_, Some("latest")) => Some(Kind::Latest),
        (_, Some("metadata.json")) => Some(Kind::Metadata),
        (_, Some(name)) if name.ends_with(".img") => Some(Kind::Manifest),
        _ => None,
    }
}

/// Records and their versions; what is in there is of [`crate::record`].
#[must_use]
pub fn locks() -> Path {
    Path::from("locks")
}

/// The record of a sandbox; in a directory, a copy of it.
#[must_use]
pub fn record(sandbox: SandboxId) -> Path {
    locks().join(format!("{sandbox}.lock"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_name_has_one_spelling() {
        let name: CheckpointName = "checkpoint_1700000000000.img".parse().unwrap();
        assert_eq!(name.ms(), 1_700_000_000_000);
        for bad in [
            "",
            "checkpoint_.img",
            "checkpoint_01.img",
            "checkpoint_-1.img",
            "checkpoint_+1.img",
            "checkpoint_1",
            "checkpoint_1.img/",
            "../checkpoint_1.img",
        ] {
            assert!(bad.parse::<CheckpointName>().is_err(), "{bad}");
        }
        assert!("checkpoint_18446744073709551616.img".parse::<CheckpointName>().is_err());
        assert!("checkpoint_18446744073709551615.img".parse::<CheckpointName>().is_err());
    }

    #[test]
    fn names_increase_when_the_clock_does_not() {
        let first = CheckpointName::after(None, 1000).unwrap();
        let second = CheckpointName::after(Some(first), 1000).unwrap();
        let third = CheckpointName::after(Some(second), 10).unwrap();
        assert!(first < second && second < third);
        assert_eq!(third.ms(), 1002);
    }

    #[test]
    fn names_of_saved_sandboxes_are_in_the_order_of_time_and_have_one_spelling() {
        let id = SandboxId::random();
        let (early, late) = (KeptName::new(7, id), KeptName::new(1_800_000_000_000_000_000, id));
        assert!(early < late && early.to_string() < late.to_string());
        assert_eq!(late.to_string().parse::<KeptName>(), Ok(late));
        let short = format!("7_{id}");
        for bad in ["", "_", &short, &format!("+0000000000000000007_{id}"), &format!("{late}/"), "00000000000000000007_.."] {
            assert!(bad.parse::<KeptName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn what_could_leave_a_directory_is_no_name() {
        for bad in ["", ".", "..", "a/b", "/a", ".hidden", "A", "a\0", &"a".repeat(65)] {
            assert!(bad.parse::<FileName>().is_err(), "{bad:?}");
        }
        for bad in ["", "..", "ABCDEF00ABCDEF00ABCDEF00ABCDEF00", "00", &"g".repeat(32)] {
            assert!(bad.parse::<PackId>().is_err(), "{bad:?}");
            assert!(bad.parse::<Tenant>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn tenants_hash_with_keys_of_their_own() {
        let (one, other) = (Tenant::of_key(b"one"), Tenant::of_key(b"other"));
        assert_ne!(one, other);
        assert_ne!(one.chunk_key(), other.chunk_key());
        assert_eq!(one.to_string().parse::<Tenant>(), Ok(one));
    }
}

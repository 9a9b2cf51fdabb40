//! The restore contract: what a checkpoint needs of the instance that restores it.

use sandboxer_protocol::SandboxId;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::filesystem::Filesystem;
use crate::layout::{CheckpointName, ImageDigest};

/// What a manifest says of itself beside its data. Only grows; unknown fields are kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Contract {
    /// The sandbox that was saved.
    pub sandbox_id: SandboxId,
    pub created_at: jiff::Timestamp,
    /// The checkpoint that the sandbox was at before, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<CheckpointName>,
    /// The lease under which it was saved.
    pub epoch: u64,
    /// Not asked for by anyone: autosave, disconnect, idle, shutdown. Kept for shorter.
    #[serde(default)]
    pub automatic: bool,
    /// What its owner calls it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub runsc_version: String,
    pub platform: String,
    pub cpu_features: Vec<String>,
    pub image: ImageDigest,
    pub agent_version: String,
    /// The OCI spec it ran with, for comparison only: a restore uses the server's own.
    pub spec: Value,
    /// What the server has to know of the sandbox, opaque here.
    pub state: Value,
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// What this instance can offer.
#[derive(Debug, Clone)]
pub struct Host<'a> {
    pub runsc_version: &'a str,
    pub platform: &'a str,
    pub cpu_features: &'a [String],
}

/// Why a checkpoint can't be restored here, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    #[error(
        "it was saved by runsc {saved}, and this instance has {here}: images don't cross versions; restore it on an instance with runsc {saved}"
    )]
    Runsc { saved: String, here: String },
    #[error("it was saved on platform {saved}, and this instance uses {here}: restore it on an instance with --platform={saved}")]
    Platform { saved: String, here: String },
    #[error("this machine's CPU lacks {}, which the saving one had: restore it on a machine that has them", missing.join(", "))]
    Cpu { missing: Vec<String> },
}

impl Contract {
    /// # Errors
    /// The first thing that this instance lacks.
    pub fn check(&self, host: &Host<'_>) -> Result<(), Mismatch> {
        if self.runsc_version != host.runsc_version {
            return Err(Mismatch::Runsc { saved: short(&self.runsc_version), here: host.runsc_version.to_owned() });
        }
        if self.platform != host.platform {
            return Err(Mismatch::Platform { saved: short(&self.platform), here: host.platform.to_owned() });
        }
        let missing: Vec<String> = self
            .cpu_features
            .iter()
            .filter(|feature| !host.cpu_features.contains(feature))
            .take(16)
            .map(|feature| short(feature))
            .collect();
        if missing.is_empty() { Ok(()) } else { Err(Mismatch::Cpu { missing }) }
    }
}

/// The volume's own words in a message: few, and printable.
fn short(text: &str) -> String {
    text.chars().take(64).map(|c| if c.is_ascii_graphic() || c == ' ' { c } else { '?' }).collect()
}

/// What a manifest describes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum About {
    Sandbox(Box<Contract>),
    /// A base image; its digest is its name.
    Image {},
    /// A filesystem snapshot.
    Filesystem(Box<Filesystem>),
}

#[cfg(any(test, feature = "testing"))]
pub(crate) fn example(sandbox_id: SandboxId) -> Contract {
    Contract {
        sandbox_id,
        created_at: jiff::Timestamp::UNIX_EPOCH,
        parent: None,
        epoch: 1,
        automatic: false,
        name: None,
        runsc_version: "release-20260905.0".into(),
        platform: "systrap".into(),
        cpu_features: vec!["avx2".into(), "sse4_2".into()],
        image: ImageDigest::from_bytes([7; 32]),
        agent_version: "0.1.0".into(),
        spec: serde_json::json!({"ociVersion": "1.1.0"}),
        state: serde_json::json!({"shells": 2}),
        other: Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_lack_has_its_own_answer() {
        let contract = example(SandboxId::random());
        let features = contract.cpu_features.clone();
        let host = Host { runsc_version: "release-20260905.0", platform: "systrap", cpu_features: &features };
        assert_eq!(contract.check(&host), Ok(()));
        let other = contract.check(&Host { runsc_version: "release-20240729.0", ..host.clone() });
        assert!(matches!(other, Err(Mismatch::Runsc { .. })), "{other:?}");
        assert!(matches!(contract.check(&Host { platform: "kvm", ..host.clone() }), Err(Mismatch::Platform { .. })));
        let fewer = contract.check(&Host { cpu_features: &features[..1], ..host });
        assert_eq!(fewer, Err(Mismatch::Cpu { missing: vec!["sse4_2".into()] }));
    }

    #[test]
    fn unknown_fields_are_kept() {
        let mut value = serde_json::to_value(example(SandboxId::random())).unwrap();
        value["newer"] = 1.into();
        let contract: Contract = serde_json::from_value(value.clone()).unwrap();
        assert_eq!(serde_json::to_value(&contract).unwrap(), value);
    }
}

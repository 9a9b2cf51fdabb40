//! What a checkpoint says of its sandbox, so that a server that has never heard of it can go on with it.

use sandboxer_protocol::agent::Marker;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::sandbox::record::{Record, SandboxConfig};

const VERSION: u32 = 1;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct SavedState {
    version: u32,
    pub(crate) created_at: jiff::Timestamp,
    pub(crate) marker: Marker,
    #[serde(default)]
    pub(crate) owner: Option<String>,
    /// How often it was rewound.
    #[serde(default)]
    pub(crate) generation: u64,
    pub(crate) config: SandboxConfig,
}

impl SavedState {
    pub(super) fn of(record: &Record) -> Self {
        Self {
            version: VERSION,
            created_at: record.created_at,
            marker: record.marker,
            owner: record.owner.clone(),
            generation: record.generation,
            config: record.config.clone(),
        }
    }

    /// What a manifest says, which is hostile input.
    pub(super) fn read(value: &Value) -> Result<Self, String> {
        let state = Self::deserialize(value).map_err(|error| format!("what it says of the sandbox makes no sense: {error}"))?;
        if state.version > VERSION {
            return Err(format!(
                "what it says of the sandbox is of version {}, and this server knows {VERSION}; use a newer one",
                state.version
            ));
        }
        Ok(state)
    }
}

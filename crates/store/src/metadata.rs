//! `metadata.json` of a sandbox: what people and tools read. It decides nothing.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxStatus {
    Created,
    Running,
    Checkpointed,
    Killed,
}

/// The contract's fields, and whatever else a server, this one or a newer, put there.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Metadata {
    pub status: SandboxStatus,
    #[serde(rename = "createdAt")]
    pub created_at: jiff::Timestamp,
    #[serde(rename = "lastCheckpointedAt", default, skip_serializing_if = "Option::is_none")]
    pub last_checkpointed_at: Option<jiff::Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout: Option<serde_json::Number>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_fields_are_kept() {
        let text = r#"{"status":"running","createdAt":"2026-11-16T00:00:00Z","idle_timeout":300,"image":"abc","newer":{"a":[1]}}"#;
        let metadata: Metadata = serde_json::from_str(text).unwrap();
        assert_eq!(metadata.other["newer"]["a"][0], 1);
        let again: Value = serde_json::to_value(&metadata).unwrap();
        assert_eq!(again, serde_json::from_str::<Value>(text).unwrap());
    }
}

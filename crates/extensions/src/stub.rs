//! `ext.saas-stub`: a sandbox that is nothing but an HTTP endpoint of the server, which echoes its inputs and metadata.
//!
//! Its snapshots are metadata only, and what is restored is a fresh endpoint. There is nothing outside of the server's own files.

use async_trait::async_trait;
use sandboxer_protocol::SandboxId;

use crate::{ExtensionError, ExtensionName, Health, Host, InputValue, Inputs, Map, Place, Profile, Sandbox, SandboxExtension, SnapshotId};

/// Where the server serves the endpoints.
pub const ENDPOINTS: &str = "/v1/stubs";

#[derive(Debug)]
pub struct SaasStub {
    name: ExtensionName,
}

impl Default for SaasStub {
    fn default() -> Self {
        Self { name: "ext.saas-stub".parse().expect("a name") }
    }
}

fn endpoint(id: SandboxId) -> Map {
    Map::from([("endpoint".to_owned(), format!("{ENDPOINTS}/{id}"))])
}

/// The status that an endpoint answers with.
#[must_use]
pub fn status(inputs: &Inputs) -> u16 {
    match inputs.get("status") {
        Some(InputValue::Integer(status)) => u16::try_from(*status).ok().filter(|status| (200..=599).contains(status)).unwrap_or(200),
        _ => 200,
    }
}

#[async_trait]
impl SandboxExtension for SaasStub {
    fn name(&self) -> ExtensionName {
        self.name.clone()
    }

    async fn validate(&self, _profile: &Profile, inputs: &Inputs, host: &Host) -> Result<(), ExtensionError> {
        if host.place != Place::Local {
            return Err(ExtensionError::invalid(format!(
                "host: a stub is served by the server itself, not by {}. Leave it out.",
                host.name
            )));
        }
        match inputs.get("status") {
            Some(InputValue::Integer(status)) if !(200..=599).contains(status) => {
                Err(ExtensionError::invalid("inputs.status: 200 to 599."))
            }
            _ => Ok(()),
        }
    }

    async fn provision(&self, sandbox: &Sandbox) -> Result<Map, ExtensionError> {
        Ok(endpoint(sandbox.id))
    }

    async fn status(&self, sandbox: &Sandbox) -> Result<Health, ExtensionError> {
        // It is there as long as the server knows it.
        Ok(if sandbox.handle.is_empty() { Health::Gone } else { Health::Ready })
    }

    async fn teardown(&self, _sandbox: &Sandbox) -> Result<(), ExtensionError> {
        Ok(())
    }

    async fn supports_snapshots(&self) -> Result<bool, ExtensionError> {
        Ok(true)
    }

    async fn snapshot(&self, _id: SnapshotId, sandbox: &Sandbox) -> Result<Map, ExtensionError> {
        let mut meta = Map::from([("size_bytes".to_owned(), "0".to_owned())]);
        meta.extend(sandbox.handle.get("endpoint").map(|endpoint| ("endpoint".to_owned(), endpoint.clone())));
        Ok(meta)
    }

    async fn restore_from_snapshot(&self, sandbox: &Sandbox, snapshot: SnapshotId, _meta: &Map) -> Result<Map, ExtensionError> {
        let mut handle = endpoint(sandbox.id);
        handle.insert("restored_from".to_owned(), snapshot.to_string());
        Ok(handle)
    }
}

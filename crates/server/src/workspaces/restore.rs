//! A snapshot becomes a new sandbox, or several.

use std::{collections::BTreeMap, sync::Arc};

use sandboxer_extensions::{ExtensionError, HostName, Kind, Map, SandboxRow, SandboxState, SnapshotId, SnapshotState};
use sandboxer_protocol::SandboxId;
use serde_json::{Value, json};

use super::{Begun, Workspaces, busy::Key, same_host};

/// Sandboxes that one request may ask for.
pub(crate) const MAX_COUNT: usize = 100;

/// What a client wants of a snapshot.
#[derive(Debug, Clone, Default)]
pub(crate) struct RestoreOrder {
    /// In place of those that the snapshotted sandbox had.
    pub(crate) inputs: BTreeMap<String, Value>,
    pub(crate) host: Option<HostName>,
    pub(crate) keep_failed: bool,
}

impl Workspaces {
    /// Begins to make one sandbox from a snapshot.
    pub(crate) async fn restore(
        self: &Arc<Self>,
        id: SnapshotId,
        order: RestoreOrder,
        owner: Option<String>,
    ) -> Result<Begun<SandboxRow>, ExtensionError> {
        let place = self.admit(owner.as_deref(), 1).await?;
        let held = self.busy.shared(Key::Snapshot(id)).await?;
        let snapshot = self.snapshot(id, owner.as_deref()).await?;
        if snapshot.status != SnapshotState::Completed {
            let message = format!("Snapshot {id} is not completed and can't be restored.");
            return Err(ExtensionError::new(Kind::Conflict, "not_completed", message));
        }
        same_host(order.host.as_ref(), &snapshot.host, id)?;
        let profile = self.profile(&snapshot.profile)?.clone();
        let host = self.host(Some(&snapshot.host), &profile)?.clone();
        // An input that the profile no longer has is not the client's fault.
        let had = snapshot.inputs.iter().filter(|(name, _)| profile.inputs.contains_key(*name));
        let mut given: BTreeMap<String, Value> = had.map(|(name, value)| (name.clone(), json!(value))).collect();
        given.extend(order.inputs);
        let inputs = profile.resolve(&given)?;
        let extension = self.extension(&snapshot.extension)?;
        extension.validate(&profile, &inputs, &host).await?;
        let row = SandboxRow {
            id: SandboxId::random(),
            profile: snapshot.profile,
            extension: snapshot.extension,
            host: snapshot.host,
            status: SandboxState::Provisioning,
            created_at: jiff::Timestamp::now(),
            metadata: snapshot.metadata,
            inputs,
            handle: Map::new(),
            error: None,
            snapshot_id: Some(id),
            owner,
        };
        let (_, sandbox) = self.known(&row)?;
        let meta = snapshot.meta;
        let making = async move {
            let _held = held;
            extension.restore_from_snapshot(&sandbox, id, &meta).await
        };
        self.make(row, place, order.keep_failed, making).await
    }

    /// Makes several at once: all of them, or none.
    pub(crate) async fn restore_many(
        self: &Arc<Self>,
        id: SnapshotId,
        order: &RestoreOrder,
        owner: Option<String>,
        count: usize,
    ) -> Result<Vec<SandboxRow>, ExtensionError> {
        if !(1..=MAX_COUNT).contains(&count) {
            return Err(ExtensionError::invalid(format!("count: 1 to {MAX_COUNT}.")));
        }
        drop(self.admit(owner.as_deref(), count).await?);
        let mut begun = Vec::new();
        let mut fault = None;
        for _ in 0..count {
            match self.restore(id, order.clone(), owner.clone()).await {
                Ok(one) => begun.push(one),
                Err(error) => {
                    fault = Some(error);
                    break;
                }
            }
        }
        let mut made = Vec::new();
        for one in begun {
            match one.finished().await {
                Ok(row) => made.push(row),
                Err(error) => drop(fault.get_or_insert(error)),
            }
        }
        let Some(fault) = fault else { return Ok(made) };
        for row in made {
            // What can't be removed is listed, and can be deleted.
            let _ = self.delete(row.id, owner.as_deref(), false).await;
        }
        Err(fault)
    }
}

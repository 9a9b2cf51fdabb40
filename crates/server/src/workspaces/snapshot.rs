//! Snapshots: made of ready sandboxes that go on, listed, removed with what they left on their hosts.

use std::sync::Arc;

use sandboxer_extensions::{ExtensionError, Health, Kind, Map, SandboxState, SnapshotId, SnapshotRow, SnapshotState, check_map};
use sandboxer_protocol::SandboxId;
use tracing::{info, warn};

use super::{Begun, Workspaces, busy::Key, may_see, not_found, store_error};

impl Workspaces {
    pub(crate) async fn snapshots(&self, owner: Option<&str>) -> Result<Vec<SnapshotRow>, ExtensionError> {
        let mut rows = self.store.snapshots().await.map_err(store_error)?;
        rows.retain(|row| may_see(row.owner.as_deref(), owner));
        Ok(rows)
    }

    pub(crate) async fn snapshot(&self, id: SnapshotId, owner: Option<&str>) -> Result<SnapshotRow, ExtensionError> {
        let row = self.store.snapshot(id).await.map_err(store_error)?;
        row.filter(|row| may_see(row.owner.as_deref(), owner)).ok_or_else(|| not_found("snapshot"))
    }

    /// Begins a snapshot of a sandbox that is ready.
    pub(crate) async fn take(self: &Arc<Self>, id: SandboxId, owner: Option<&str>) -> Result<Begun<SnapshotRow>, ExtensionError> {
        let place = self.place()?;
        let sandbox_held = self.busy.shared(Key::Sandbox(id)).await?;
        let sandbox_row = self.sandbox(id, owner).await?;
        let (extension, sandbox) = self.known(&sandbox_row)?;
        if !sandbox.profile.snapshots {
            return Err(ExtensionError::unsupported(format!("{} makes sandboxes that are not snapshotted.", sandbox.profile.name)));
        }
        if !extension.supports_snapshots().await? {
            return Err(ExtensionError::unsupported(format!("{} makes sandboxes that can't be snapshotted.", extension.name())));
        }
        let not_ready = |how: &str| {
            ExtensionError::new(
                Kind::Conflict,
                "not_ready",
                format!("Only a sandbox that is ready can be snapshotted, and this one is {how}."),
            )
        };
        if sandbox_row.status != SandboxState::Ready {
            return Err(not_ready("not"));
        }
        match self.look(&sandbox_row).await? {
            Health::Ready => {}
            Health::Provisioning => return Err(not_ready("still being made")),
            Health::Failed(why) => return Err(not_ready(&format!("not: {why}"))),
            Health::Gone => return Err(not_ready("gone")),
        }
        let row = SnapshotRow {
            id: SnapshotId::random(),
            sandbox_id: id,
            profile: sandbox_row.profile,
            extension: sandbox_row.extension,
            host: sandbox_row.host,
            status: SnapshotState::Pending,
            created_at: jiff::Timestamp::now(),
            size_bytes: None,
            meta: Map::new(),
            error: None,
            inputs: sandbox_row.inputs,
            metadata: sandbox_row.metadata,
            owner: sandbox_row.owner,
        };
        let held = (self.busy.alone(Key::Snapshot(row.id)).await?, sandbox_held, place);
        self.store.put_snapshot(row.clone()).await.map_err(store_error)?;
        let (this, mut made) = (Arc::clone(self), row.clone());
        let done = self.tasks.spawn(async move {
            let _held = held;
            let turn = this.turns.acquire().await;
            let result = extension.snapshot(made.id, &sandbox).await.and_then(|meta| check_map("snapshot", &meta).map(|()| meta));
            drop(turn);
            let error = match result {
                Ok(meta) => {
                    made.size_bytes = meta.get("size_bytes").and_then(|size| size.parse().ok());
                    (made.status, made.meta) = (SnapshotState::Completed, meta);
                    match this.store.put_snapshot(made.clone()).await {
                        Ok(()) => {
                            info!(id = %made.id, sandbox = %made.sandbox_id, host = %made.host, bytes = made.size_bytes, "snapshotted");
                            return Ok(made);
                        }
                        Err(error) => store_error(error),
                    }
                }
                Err(error) => error,
            };
            warn!(id = %made.id, sandbox = %made.sandbox_id, host = %made.host, %error, "could not be snapshotted");
            if let Err(error) = this.remove_artifact(&made).await {
                warn!(id = %made.id, %error, "and what is left of it could not be removed; deleting it tries again");
            }
            (made.status, made.error) = (SnapshotState::Failed, Some(error.message.clone()));
            if let Err(error) = this.store.put_snapshot(made).await {
                warn!(%error, "and that could not be written down");
            }
            Err(error)
        });
        Ok(Begun { row, done })
    }

    /// Removes a snapshot: what it left on its host, then its row.
    pub(crate) async fn delete_snapshot(self: &Arc<Self>, id: SnapshotId, owner: Option<&str>, force: bool) -> Result<(), ExtensionError> {
        let held = self.busy.alone(Key::Snapshot(id)).await?;
        let row = self.snapshot(id, owner).await?;
        let this = Arc::clone(self);
        let done = self.tasks.spawn(async move {
            let _held = held;
            let turn = this.turns.acquire().await;
            match this.remove_artifact(&row).await {
                Ok(()) => {}
                Err(error) if force => warn!(%id, %error, "its row is removed all the same, as was asked for"),
                Err(error) => return Err(error),
            }
            drop(turn);
            this.store.remove_snapshot(id).await.map_err(store_error)
        });
        done.await.unwrap_or_else(|_| Err(ExtensionError::failed("Removing it ended unexpectedly. Try again.")))
    }

    pub(super) async fn remove_artifact(&self, row: &SnapshotRow) -> Result<(), ExtensionError> {
        let profile = self.profile(&row.profile)?;
        let host = self.host(Some(&row.host), profile)?;
        self.extension(&row.extension)?.delete_snapshot(row.id, host, &row.meta).await
    }
}

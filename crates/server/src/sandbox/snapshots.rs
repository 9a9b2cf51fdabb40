//! Snapshots of a running sandbox, which goes on.

use std::sync::Arc;

use sandboxer_protocol::client::{ErrorCode, ServerEvent, Status, StatusUpdate};
use sandboxer_store::{Manifest, ManifestAt, SnapshotId};
use tracing::{info, warn};

use super::{
    asks::{Refused, Told, What},
    driver::Driver,
    saving::NO_CHECKPOINT_PATH,
};

/// A longer name is none that anybody reads.
const MAX_NAME_CHARS: usize = 128;

impl Driver {
    /// The client asked for a snapshot.
    pub(super) fn snapshot(&mut self, name: Option<String>) {
        self.tell(Status::SnapshotCreating);
        if let Err((code, message)) = self.begin_snapshot(SnapshotId::random(), name) {
            self.fail(Status::SnapshotError, code, &message);
        }
    }

    pub(super) fn begin_snapshot(&mut self, id: SnapshotId, name: Option<String>) -> Result<(), (ErrorCode, String)> {
        let Some(host) = self.saves.host.clone() else {
            return Err((ErrorCode::SnapshotsNotConfigured, NO_CHECKPOINT_PATH.to_owned()));
        };
        if self.saves.snapshot.is_some() {
            let message = "A snapshot is being made. Wait for SANDBOX_SNAPSHOT_CREATED.";
            return Err((ErrorCode::NotNow, message.to_owned()));
        }
        if name.as_ref().is_some_and(|name| name.chars().count() > MAX_NAME_CHARS || name.chars().any(char::is_control)) {
            let message = format!("name: at most {MAX_NAME_CHARS} characters, none of them a control character.");
            return Err((ErrorCode::InvalidName, message));
        }
        let keeper = self.saves.kept.as_ref().map(|kept| kept.keeper.clone());
        let epoch = self.record.epoch.unwrap_or_default();
        self.saves.snapshot = Some(Box::pin(async move {
            let may_act = || keeper.as_ref().is_none_or(|keeper| keeper.lease().may_act());
            Arc::clone(&host).snapshot(epoch, (id, name), may_act).await
        }));
        Ok(())
    }

    pub(super) fn on_snapshotted(&mut self, made: Result<Manifest, String>) {
        self.saves.snapshot = None;
        let asked = self.asks.take(What::Snapshot);
        match made {
            Ok(manifest) => {
                let ManifestAt::Snapshot { snapshot_id } = manifest.at() else { return };
                info!(%snapshot_id, bytes = manifest.stored_bytes(), "snapshot made");
                self.metrics.snapshots.inc();
                if let Some(reply) = asked {
                    let _ = reply.send(Ok(Told::Snapshot(Box::new(manifest))));
                    return;
                }
                let mut update = StatusUpdate::new(Status::SnapshotCreated);
                update.snapshot_id = Some(snapshot_id.to_string());
                if let Some(client) = &mut self.client {
                    client.outbox.event(ServerEvent::StatusUpdate(update));
                }
            }
            Err(why) => {
                warn!(why, "no snapshot could be made; the sandbox goes on");
                self.metrics.save_failures.inc();
                let message = format!("The snapshot could not be made: {why}. The sandbox goes on.");
                match asked {
                    Some(reply) => drop(reply.send(Err(Refused::Because(ErrorCode::SnapshotFailed, message)))),
                    None => self.fail(Status::SnapshotError, ErrorCode::SnapshotFailed, &message),
                }
            }
        }
    }
}

//! A sandbox goes back to something that was saved, with its client attached.

use std::sync::atomic::Ordering;

use sandboxer_protocol::{
    SandboxId,
    client::{ErrorCode, ServerEvent, SnapshotTarget, Status, StatusUpdate},
};
use sandboxer_store::ManifestAt;
use tokio::time::Instant;
use tracing::{info, warn};

use super::{
    asks::{Refused, Told, What},
    driver::{Driver, GRACE_AT_MOST, Grace},
    saving::NO_CHECKPOINT_PATH,
};
use crate::manager::{Going, RolledBack};

impl Driver {
    /// The client asked for it.
    pub(super) fn roll_back(&mut self, target: &SnapshotTarget) {
        if let Err((code, message)) = self.begin_rollback(target) {
            self.fail(Status::RestoreError, code, &message);
        }
    }

    /// An attached client hears of it, whoever asked for it.
    pub(super) fn begin_rollback(&mut self, target: &SnapshotTarget) -> Result<(), (ErrorCode, String)> {
        self.tell(Status::Restoring);
        let (Some(roller), Some(host)) = (&self.roller, &self.saves.host) else {
            return Err((ErrorCode::SnapshotsNotConfigured, NO_CHECKPOINT_PATH.to_owned()));
        };
        let to = place_of(self.id, target)
            .map_err(|why| (ErrorCode::InvalidField, format!("rollback: {why}. The sandbox goes on as it is.")))?;
        if self.saves.saving.is_some() || self.saves.snapshot.is_some() {
            return Err((ErrorCode::NotNow, "The sandbox is being saved. Try again in a moment.".to_owned()));
        }
        let keeper = self.saves.kept.as_ref().map(|kept| kept.keeper.clone());
        let going = Going { record: self.record.clone(), host: host.clone(), keeper };
        let answer = roller.roll_back(going, to);
        self.rollback = Some(Box::pin(async move { answer.await.unwrap_or_else(|_| Err("the server is stopping".to_owned())) }));
        Ok(())
    }

    pub(super) fn on_rolled_back(&mut self, rolled: Result<Box<RolledBack>, String>) {
        self.rollback = None;
        let asked = self.asks.take(What::RollBack);
        let rolled = match rolled {
            Ok(rolled) => *rolled,
            Err(why) => {
                warn!(why, "could not be rolled back, and goes on as it is");
                let message = format!("The sandbox could not go back: {why}. It goes on as it is.");
                self.fail(Status::RestoreError, ErrorCode::RestoreFailed, &message);
                if let Some(reply) = asked {
                    let _ = reply.send(Err(Refused::Because(ErrorCode::RestoreFailed, message)));
                }
                return;
            }
        };
        let RolledBack { record, dir, reader, writer, ended, execution, next_number, packs_files, single_files, tunnel, turn } = rolled;
        info!(generation = record.generation, "rolled back");
        self.metrics.rollbacks.inc();
        let left = (self.record.container(), std::mem::replace(&mut self.dir, dir));
        if let Some(roller) = &self.roller {
            roller.leave_behind(left.0, left.1);
        }
        (self.record, self.reader, self.writer, self.ended) = (record, reader, writer, ended);
        (self.execution, self.next_number, self.packs_files) = (execution, next_number, packs_files);
        self.single_files = single_files;
        self.cut_transfers();
        self.cut_streams(tunnel);
        (self.kill_deadline, self.link_closed) = (None, None);
        self.generation.store(self.record.generation, Ordering::Release);
        self.saves.begin_again();
        drop(turn);
        let mut update = StatusUpdate::new(Status::Running);
        update.rewound = Some(true);
        update.generation = Some(self.record.generation);
        if let Some(execution) = &self.execution {
            update.execution_id = Some((*execution.id).clone());
            update.stdout_offset = Some(execution.shown.stdout);
            update.stderr_offset = Some(execution.shown.stderr);
            update.stdin_offset = Some(execution.stdin_next);
        }
        if let Some(client) = &mut self.client {
            client.outbox.event(ServerEvent::StatusUpdate(update));
            // From here on it is as if it had just attached.
            client.begin_again(Grace::UntilPong(Instant::now() + GRACE_AT_MOST));
        }
        self.count_idleness_anew();
        if let Some(reply) = asked {
            let _ = reply.send(Ok(Told::RolledBack));
        }
    }
}

/// Where what a sandbox is to go back to lies.
pub(crate) fn place_of(sandbox_id: SandboxId, target: &SnapshotTarget) -> Result<ManifestAt, String> {
    match (&target.snapshot_id, &target.checkpoint) {
        (Some(id), None) => id.parse().map(|snapshot_id| ManifestAt::Snapshot { snapshot_id }).map_err(|error| error.to_string()),
        (None, Some(name)) => name.parse().map(|name| ManifestAt::Checkpoint { sandbox_id, name }).map_err(|error| error.to_string()),
        _ => Err("say either snapshot_id or checkpoint".to_owned()),
    }
}

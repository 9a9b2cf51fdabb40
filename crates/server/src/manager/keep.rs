//! Keeping a sandbox on the volume: it is known there before anybody hears of it, and its lease is kept for as long as it is driven.

use std::sync::Arc;

use sandboxer_protocol::client::ErrorCode;
use sandboxer_store::{
    Action, SandboxStatus,
    lease::{Held, handoff},
    record::SwapError,
};

use super::{CreateError, Manager, arrive::unanswered, handle::Wire};
use crate::{
    checkpoints::Checkpoints,
    sandbox::{host::SandboxHost, record::Record, saving::Kept},
};

/// How a sandbox is captured, where there is a volume, and its lease, where it is kept there.
#[derive(Default)]
pub(super) struct Keeping {
    pub(super) host: Option<Arc<SandboxHost>>,
    pub(super) kept: Option<Kept>,
}

impl Manager {
    /// Makes the volume know a sandbox that is to be kept there, before anybody hears of it.
    pub(super) async fn register(&self, record: &mut Record) -> Result<Option<(Arc<Checkpoints>, Held)>, CreateError> {
        let Some(checkpoints) = self.checkpoints.as_ref().filter(|_| record.config.checkpoint) else { return Ok(None) };
        let failed = |code, why: String| CreateError::new(code, format!("The volume can't be written: {why}. Try again later."));
        checkpoints.describe(record, SandboxStatus::Created, None).await.map_err(|error| {
            // A full volume answers, and is not waited for.
            let away = error.action() != Action::Invalid && !error.is_full();
            failed(if away { ErrorCode::VolumeUnavailable } else { ErrorCode::CheckpointFailed }, error.whole())
        })?;
        let held = checkpoints.leases.create(record.id, Checkpoints::attributes(record)).await.map_err(|error| match error {
            SwapError::Unknown(why) => CreateError::new(ErrorCode::VolumeUnavailable, unanswered(&why)),
            error => failed(ErrorCode::CheckpointFailed, error.to_string()),
        })?;
        record.epoch = Some(held.lease.epoch());
        checkpoints.keep_image(record.image.clone());
        Ok(Some((Arc::clone(checkpoints), held)))
    }

    /// How a sandbox that was made or taken up here is captured, and the keeping of its lease if it has one.
    pub(super) fn keep(&self, record: &Record, wire: &Wire, held: Option<(Arc<Checkpoints>, Held)>) -> Keeping {
        let Some(checkpoints) = &self.checkpoints else { return Keeping::default() };
        let place = (record.container(), self.dir(record.container()));
        let (runtime, metrics) = (Arc::clone(&self.runtime), Arc::clone(&self.metrics));
        let host = SandboxHost::new(record.id, place, runtime, Arc::clone(checkpoints), wire.sender.clone(), metrics, None);
        let kept = held.map(|(checkpoints, held)| {
            host.stands_on(held.lease.latest());
            let keeper = handoff::keep(&checkpoints.leases, held, Arc::clone(&host));
            Kept { keeper, checkpoints }
        });
        Keeping { host: Some(host), kept }
    }
}

//! Ending a sandbox for good that is not in memory: one that rests on the volume, or that another instance has and gives up for it.

use std::sync::Arc;

use sandboxer_protocol::SandboxId;
use sandboxer_store::lease::{LeaseError, LostReason, Sought};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, info, info_span, warn};

use super::{
    ArriveError, Manager,
    arrive::{not_found, not_held},
};

/// What those hear who attach later, wherever they do.
const DELETED: &str = "The sandbox was deleted by its owner.";

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Buried {
    /// Nobody can have it any more.
    Gone,
    /// It has come back into memory meanwhile, and is to be ended there.
    IsHere,
}

impl Manager {
    /// Leaves a tombstone for a sandbox that is not in memory, for somebody who may know of it. Whoever runs it is asked to give it up first, and
    /// keeps it if a client of its own is attached. What was begun runs to its end even if nobody waits; `give_up` ends the waiting for others.
    pub(crate) async fn bury(
        self: &Arc<Self>,
        id: SandboxId,
        who: Option<String>,
        give_up: CancellationToken,
    ) -> Result<Buried, ArriveError> {
        let manager = Arc::clone(self);
        let burying = async move { manager.bury_on_volume(id, who.as_deref(), &give_up).await };
        let burying = self.drivers.spawn(burying.instrument(info_span!(parent: None, "sandbox", %id)));
        burying.await.unwrap_or_else(|_| Err(ArriveError::Failed("Deleting the sandbox failed. Try again.".to_owned())))
    }

    async fn bury_on_volume(&self, id: SandboxId, who: Option<&str>, give_up: &CancellationToken) -> Result<Buried, ArriveError> {
        let Some(checkpoints) = self.checkpoints.clone() else { return Err(not_found()) };
        let turn = self.turn(id);
        let _turn = tokio::select! {
            biased;
            () = give_up.cancelled() => return Err(not_held(&Sought::GivenUp)),
            turn = turn.acquire() => turn,
        };
        if self.find_certainly(id).await?.is_some() {
            return Ok(Buried::IsHere);
        }
        // Whose it is can't change, so this holds also if it is saved once more meanwhile.
        self.on_volume(id, who).await.map_err(ArriveError::Failed)?.ok_or_else(not_found)?;
        let held = match checkpoints.leases.seize(id, give_up).await {
            Sought::Held(held) => held,
            Sought::Gone(_) => return Ok(Buried::Gone),
            other => return Err(not_held(&other)),
        };
        match held.lease.bury(DELETED.to_owned()).await {
            Ok(()) | Err(LeaseError::Lost(LostReason::Buried(_))) => info!("deleted while it did not run here"),
            Err(error) => return Err(ArriveError::Failed(format!("The volume could not be told: {error}. Try again later."))),
        }
        if let Err(error) = checkpoints.describe_killed(id).await {
            warn!(error = error.whole(), "it is gone, but its copies on the volume are out of date");
        }
        Ok(Buried::Gone)
    }

    /// Whether it is known here that a sandbox ended, for good.
    pub(crate) fn has_ended(&self, id: SandboxId) -> bool {
        self.obituaries.get(id).is_some()
    }
}

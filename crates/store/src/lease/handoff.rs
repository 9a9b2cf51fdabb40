//! A sandbox that is held: saved, published, handed over, given up. The decisions, without how any of it is done.
//!
//! ```text
//!           arrive: seek, restore                 a waiter, and the client consents
//!  (others) ─────────────────────► kept ─────────────────────────────────────────────► capture ► persist ► publish and release ► stop
//!                                   │ ▲                                                   │ any failure: answer, thaw
//!                                   │ └───────────────────────────────────────────────────┘
//!                                   └── the lease is lost: stop, and write nothing
//! ```
//!
//! The order is what keeps a user's state: everything of a checkpoint is durable before the record names it, the sandbox stands still
//! from its capture until the record says who goes on with it, and it is ended only when the record names the checkpoint or another
//! owner. [`Host`] is how a sandbox is frozen, saved and restored: the server's has runsc behind it, the simulator's has a number.

mod keeper;
mod save;

use std::sync::Arc;

use async_trait::async_trait;
use sandboxer_protocol::SandboxId;
use tokio_util::sync::CancellationToken;

pub use self::{keeper::Keeper, save::SaveError};
use super::{Held, LeaseError, Leases, LostReason, Sought};
use crate::{layout::CheckpointName, record::InstanceId};

/// Whether a waiter gets the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Consent {
    HandOver,
    /// A client is attached and keeps it.
    InUse,
}

/// What a sandbox does once it is captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stance {
    Still,
    GoesOn,
}

/// Why a sandbox is ended here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// It goes on at this instance, or at whoever comes next.
    HandedOver,
    /// It was saved and given up.
    Checkpointed,
    /// It was killed; its record bears a tombstone, or will as soon as that can be written.
    Killed,
    /// It is someone else's, or gone. Nothing of it may be written.
    Lost(LostReason),
}

/// How a sandbox is dealt with on this machine. Calls come one at a time, except that `freeze`, `thaw` and `stop` may come while a
/// `persist` is under way. `freeze` and `thaw` may be repeated.
#[async_trait]
pub trait Host: Send + Sync + 'static {
    /// The sandbox at one moment, on this machine's own disk.
    type Capture: Send + 'static;

    /// Someone else wants it. Tells the attached client, if there is one that gives way.
    async fn asked_for(&self, by: &InstanceId) -> Consent;

    async fn freeze(&self);

    async fn thaw(&self);

    /// Saves the sandbox locally. [`Stance::Still`]: it is frozen from then on, whatever comes out. [`Stance::GoesOn`]: it stands still for the
    /// capture only, and is afterwards as it was before.
    async fn capture(&self, stance: Stance) -> Result<Self::Capture, String>;

    /// Makes everything of a capture durable on the volume, under `wanted` or, if that name is taken, a later one. Nothing counts yet.
    async fn persist(&self, capture: Self::Capture, epoch: u64, wanted: CheckpointName) -> Result<CheckpointName, String>;

    /// A checkpoint counts: the copies of its name may follow.
    async fn published(&self, name: CheckpointName);

    /// This checkpoint will probably have to be restored in some seconds, unless its owner shows that it lives. Nothing of the volume may be changed, and
    /// nothing waited for.
    fn expect(&self, _latest: CheckpointName) {}

    /// Starts the sandbox from a checkpoint.
    async fn restore(&self, name: CheckpointName, epoch: u64) -> Result<(), String>;

    /// Ends the sandbox. The last call.
    async fn stop(&self, why: Ending);
}

/// What became of an attach to a sandbox that was not here.
pub enum Arrival {
    Running(Keeper),
    /// Never [`Sought::Held`].
    NotHeld(Sought),
    /// It was given up again, as it was.
    RestoreFailed(String),
}

/// Gets hold of a sandbox and restores its latest checkpoint.
pub async fn arrive<H: Host>(leases: &Leases, id: SandboxId, host: Arc<H>, give_up: &CancellationToken) -> Arrival {
    let held = match leases.seek_expecting(id, give_up, &|latest| host.expect(latest)).await {
        Sought::Held(held) => held,
        other => return Arrival::NotHeld(other),
    };
    let restored = match held.lease.latest() {
        Some(latest) => host.restore(latest, held.lease.epoch()).await,
        None => Err("its record names no checkpoint".to_owned()),
    };
    match restored {
        // A restore may take longer than a lease: nobody hears that it runs before that is certain.
        Ok(()) => match leases.patiently(held.lease.certain()).await {
            Some(Ok(())) => Arrival::Running(keep(leases, held, host)),
            Some(Err(LeaseError::Lost(reason))) => {
                host.stop(Ending::Lost(reason)).await;
                Arrival::NotHeld(Sought::HandoffInProgress)
            }
            // The server is going away, and the sandbox stays for the next.
            Some(Err(error)) => Arrival::NotHeld(Sought::Unavailable(error.to_string())),
            // Nobody has heard of what runs here, and what it came from is on the volume: it can be had again once that answers.
            None => {
                host.stop(Ending::Lost(LostReason::Unknown)).await;
                Arrival::NotHeld(Sought::Unavailable("no reply since it was restored".to_owned()))
            }
        },
        Err(reason) => {
            // Nobody else should have to wait for the lease to run out; if this can't be written, they do.
            let _ = leases.patiently(held.lease.release_untouched()).await;
            Arrival::RestoreFailed(reason)
        }
    }
}

/// Keeps a sandbox that runs here. The task ends with the sandbox, or without a trace when the [`Keeper`] is dropped.
pub fn keep<H: Host>(leases: &Leases, held: Held, host: Arc<H>) -> Keeper {
    keeper::start(leases, held, host)
}

//! Saving a sandbox: capture, persist, publish, in this order.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use super::{Consent, Host, Stance};
use crate::{
    layout::CheckpointName,
    lease::{Lease, LeaseError, Leases, Release},
    record::{InstanceId, Nonce, Verdict},
};

/// Why a sandbox was not saved. It goes on, unless the lease is lost.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SaveError {
    #[error("{0}")]
    Failed(String),
    #[error(transparent)]
    Lease(#[from] LeaseError),
}

/// What becomes of the sandbox when its checkpoint counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// It goes on; it stood still for the capture only.
    Keep,
    /// It is given up.
    GiveUp(Release),
}

/// Everything that a save needs.
pub(super) struct Saver<H: Host> {
    pub(super) leases: Leases,
    pub(super) lease: Lease,
    pub(super) host: Arc<H>,
    /// Whether a save holds the sandbox still.
    still: AtomicBool,
}

impl<H: Host> Saver<H> {
    pub(super) fn new(leases: Leases, lease: Lease, host: Arc<H>) -> Self {
        Self { leases, lease, host, still: AtomicBool::new(false) }
    }

    /// The lease is certain again: the sandbox goes on unless a save holds it.
    pub(super) async fn thaw_unless_saving(&self) {
        if !self.still.load(Ordering::Acquire) {
            self.host.thaw().await;
        }
    }

    /// Saves and publishes. After an error the sandbox goes on as far as its lease allows.
    pub(super) async fn save(&self, purpose: Purpose) -> Result<CheckpointName, SaveError> {
        let saved = self.try_save(purpose).await;
        if saved.is_err() {
            self.go_on().await;
        }
        saved
    }

    async fn try_save(&self, purpose: Purpose) -> Result<CheckpointName, SaveError> {
        let stance = if purpose == Purpose::Keep { Stance::GoesOn } else { Stance::Still };
        self.still.store(stance == Stance::Still, Ordering::Release);
        let capture = self.host.capture(stance).await.map_err(SaveError::Failed)?;
        let now = u64::try_from(self.leases.clock.unix_time().as_millis()).unwrap_or(u64::MAX);
        let wanted =
            CheckpointName::after(self.lease.latest(), now).ok_or_else(|| SaveError::Failed("the clock is beyond all years".to_owned()))?;
        if self.leases.faults.publishes_early() {
            self.publish(wanted, purpose).await?;
            return self.host.persist(capture, self.lease.epoch(), wanted).await.map_err(SaveError::Failed);
        }
        let name = self.host.persist(capture, self.lease.epoch(), wanted).await.map_err(SaveError::Failed)?;
        self.publish(name, purpose).await?;
        Ok(name)
    }

    async fn publish(&self, name: CheckpointName, purpose: Purpose) -> Result<(), SaveError> {
        match purpose {
            Purpose::Keep => self.lease.publish(name).await?,
            Purpose::GiveUp(to) => match self.lease.publish_and_release(name, to).await {
                Err(LeaseError::WaiterGone) => {
                    // Not in vain: it counts, and the sandbox goes on here.
                    self.lease.publish(name).await?;
                    self.host.published(name).await;
                    return Err(LeaseError::WaiterGone.into());
                }
                other => other?,
            },
        }
        self.host.published(name).await;
        Ok(())
    }

    /// Lets the sandbox go on, if a save holds it and as soon as its lease allows.
    async fn go_on(&self) {
        if self.still.load(Ordering::Acquire) && self.lease.certain().await.is_ok() {
            self.still.store(false, Ordering::Release);
            self.host.thaw().await;
        }
    }

    /// Deals with a waiter. True if the sandbox was given up.
    pub(super) async fn hand_over(&self, to: InstanceId, registration: Nonce) -> bool {
        let verdict = match self.host.asked_for(&to).await {
            Consent::InUse => Verdict::InUse,
            Consent::HandOver => match self.save(Purpose::GiveUp(Release::Waiter(registration))).await {
                Ok(_) => return true,
                Err(SaveError::Failed(reason)) => Verdict::CannotSave { reason },
                Err(SaveError::Lease(LeaseError::NotNewer { latest })) => Verdict::CannotSave { reason: format!("{latest} is newer") },
                Err(SaveError::Lease(_)) => return false,
            },
        };
        // If this is lost too the waiter hears nothing, and goes when its patience ends.
        let _ = self.lease.answer(registration, verdict).await;
        false
    }
}

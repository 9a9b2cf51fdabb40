//! What a newcomer does about the record that it sees. Pure.

use super::Sought;
use crate::{
    lease::{Faults, Moment, Terms, watch::Watch},
    record::{InstanceId, Nonce, Record, Verdict},
};

pub(super) enum Decision {
    Found(Sought),
    Acquire,
    /// Register as the waiter, or refresh the registration.
    Register,
    /// Look again in a while.
    Wait,
}

/// Where a newcomer stands in the queue of at most one.
pub(super) struct Position {
    me: InstanceId,
    /// Whether it is wanted also if there is nothing to restore.
    unsaved: bool,
    pub(super) registration: Nonce,
    /// When the registration was last written.
    registered_at: Option<Moment>,
    /// Whether it may have been written.
    asked: bool,
    /// The registration was seen in the record.
    seen: bool,
    /// The other waiter's last sign of life, and the epoch it was first seen in.
    other: Option<(Nonce, u64, u64)>,
}

impl Position {
    pub(super) fn new(me: InstanceId, registration: Nonce, unsaved: bool) -> Self {
        Self { me, unsaved, registration, registered_at: None, asked: false, seen: false, other: None }
    }

    pub(super) fn registered(&mut self, now: Moment) {
        self.registered_at = Some(now);
        self.seen = true;
    }

    pub(super) fn has_asked(&self) -> bool {
        self.asked
    }

    pub(super) fn decide(&mut self, record: &Record, watch: &Watch, now: Moment, unix: u64, terms: &Terms, faults: Faults) -> Decision {
        if let Some(tombstone) = &record.tombstone {
            return Decision::Found(Sought::Gone(tombstone.clone()));
        }
        if let Some(answer) = record.answer.as_ref().filter(|answer| answer.to == self.registration) {
            return Decision::Found(match &answer.verdict {
                Verdict::InUse => Sought::InUse,
                Verdict::CannotSave { reason } => Sought::CannotSave(reason.clone()),
            });
        }
        let mine = record.waited_on_by(self.registration);
        self.seen |= mine;
        if let Some((first, renewed, epoch)) = self.other
            && (record.epoch != epoch || record.waiter.as_ref().is_some_and(|waiter| waiter.nonce != first || waiter.renewed != renewed))
            && !mine
        {
            // Whoever was there before us lives: it was heard, or has got what it waited for, or another has taken its place.
            return Decision::Found(Sought::HandoffInProgress);
        }
        if let Some(waiter) = record.waiter.as_ref().filter(|_| !mine) {
            if self.seen {
                return Decision::Found(Sought::HandoffInProgress);
            }
            self.other.get_or_insert((waiter.nonce, waiter.renewed, record.epoch));
            if faults.ignores_expiry() || !watch.waiter_is_gone(now, terms) {
                return Decision::Wait;
            }
            self.other = None;
        }
        let owner_is_gone = match &record.owner {
            None => true,
            Some(owner) if *owner == self.me => true,
            Some(_) if faults.ignores_expiry() => false,
            Some(_) if faults.believes_wall_clocks() => unix >= record.timestamp + terms.lease.as_secs(),
            Some(_) => watch.owner_is_gone(now, terms),
        };
        if owner_is_gone {
            // An owner that was never saved and comes back may still go on: it is left alone.
            if self.unsaved || record.latest.is_some() {
                return Decision::Acquire;
            }
            let owner = record.owner.clone().filter(|owner| *owner != self.me);
            return Decision::Found(Sought::NeverSaved { owner });
        }
        if self.seen && !mine {
            return Decision::Found(Sought::HandoffInProgress);
        }
        let refresh = self.registered_at.is_none_or(|at| now >= at + terms.waiter_renewal);
        if mine && !refresh {
            return Decision::Wait;
        }
        self.asked = true;
        Decision::Register
    }
}

//! One swap that an owner tries, until it is known what became of it.

use super::{Driver, handle::Command};
use crate::{
    lease::{LeaseError, Moment},
    record::{Holder, OwnerChange, Record, Refused, Stored},
};

pub(super) struct Attempt {
    pub(super) base: Stored,
    pub(super) next: Record,
    /// Before its first request.
    pub(super) asked: Moment,
    /// How many of the pending commands it carries out.
    pub(super) commands: usize,
}

pub(super) enum Composed {
    Attempt(Box<Attempt>),
    /// Every command was refused; there is nothing to write.
    Nothing,
    Lost(Box<Stored>),
}

impl Driver {
    /// A renewal with all that is pending; what can't be done is refused and left out.
    pub(super) fn compose(&mut self, base: Stored) -> Composed {
        let asked = self.now();
        let stamp = self.leases.stamp();
        let holder = self.acting_holder(&base.record);
        let had_commands = !self.pending.is_empty();
        let mut changes: Vec<OwnerChange> = Vec::new();
        let mut commands = 0;
        while let Some(command) = self.pending.get(commands) {
            let mut with = changes.clone();
            with.extend_from_slice(&command.changes);
            let refused = match base.record.by_owner(&holder, &with, stamp) {
                _ if command.only_for.is_some_and(|waiter| !base.record.waited_on_by(waiter)) => LeaseError::WaiterGone,
                Ok(_) => {
                    changes = with;
                    commands += 1;
                    if ends(&changes) {
                        break;
                    }
                    continue;
                }
                Err(Refused::NotNewer { latest, .. }) => LeaseError::NotNewer { latest },
                Err(Refused::NotHeld(_)) => return Composed::Lost(Box::new(base)),
            };
            if let Some(command) = self.pending.remove(commands) {
                command.done(Err(refused));
            }
        }
        if had_commands && commands == 0 && self.now() < self.tenure.renew_at(&self.leases.terms) {
            return Composed::Nothing;
        }
        match base.record.by_owner(&holder, &changes, stamp) {
            Ok(next) => Composed::Attempt(Box::new(Attempt { base, next, asked, commands })),
            Err(_) => Composed::Lost(Box::new(base)),
        }
    }

    pub(super) fn is_releasing(&self) -> bool {
        self.pending.front().is_some_and(Command::ends)
    }

    fn acting_holder(&self, record: &Record) -> Holder {
        match record.holder() {
            Some(anyone) if self.leases.faults.releases_blindly() && self.is_releasing() => anyone,
            _ => self.holder.clone(),
        }
    }
}

/// Whether nothing can follow these.
pub(super) fn ends(changes: &[OwnerChange]) -> bool {
    changes.iter().any(|change| matches!(change, OwnerChange::Release { .. } | OwnerChange::Bury { .. }))
}

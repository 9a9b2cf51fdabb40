//! Every change of a record, as a pure function from one version to the next.
//!
//! A change keeps what it is not about, and every owner's change is refused unless the record is still held by that owner in that
//! epoch: the swap then makes sure that nothing came between.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::{Answer, InstanceId, Nonce, RECORD_FORMAT, Record, Tombstone, Verdict, Waiter, bounded_reason};
use crate::layout::CheckpointName;

/// Who holds a sandbox: an instance in an epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    pub instance: InstanceId,
    pub epoch: u64,
}

/// What makes a version differ from all others, and the time that people read.
#[derive(Debug, Clone, Copy)]
pub struct Stamp {
    pub unix: u64,
    pub nonce: Nonce,
}

/// What an owner changes besides showing that it lives.
#[derive(Debug, Clone, PartialEq)]
pub enum OwnerChange {
    /// This checkpoint counts from now on. Everything of it is durable.
    Publish(CheckpointName),
    /// Sends the waiter away.
    Answer { to: Nonce, verdict: Verdict },
    /// Nobody owns it any more. The sandbox neither runs here nor will again. `untouched`: it did not run under this owner.
    Release { untouched: bool },
    /// The sandbox is gone for good.
    Bury { reason: String },
}

/// The record is no longer this holder's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the record is not held in this epoch")]
pub struct NotHeld;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error(transparent)]
    NotHeld(#[from] NotHeld),
    /// The published history never goes back.
    #[error("{name} is not newer than {latest}, which is published")]
    NotNewer { name: CheckpointName, latest: CheckpointName },
}

impl Record {
    /// The first version of a sandbox that is being created.
    #[must_use]
    pub fn first(owner: InstanceId, stamp: Stamp, attributes: BTreeMap<String, Value>) -> Self {
        Self {
            format: RECORD_FORMAT,
            owner: Some(owner),
            timestamp: stamp.unix,
            epoch: 1,
            sequence: 1,
            nonce: stamp.nonce,
            renewed: 1,
            latest: None,
            resting: false,
            waiter: None,
            answer: None,
            tombstone: None,
            attributes,
            rest: Map::new(),
        }
    }

    #[must_use]
    pub fn holder(&self) -> Option<Holder> {
        self.owner.clone().map(|instance| Holder { instance, epoch: self.epoch })
    }

    #[must_use]
    pub fn held_by(&self, holder: &Holder) -> bool {
        self.tombstone.is_none() && self.epoch == holder.epoch && self.owner.as_ref() == Some(&holder.instance)
    }

    /// The owner shows that it lives, and changes what it wants to.
    ///
    /// # Errors
    /// [`Refused`]: nothing may be written.
    pub fn by_owner(&self, holder: &Holder, changes: &[OwnerChange], stamp: Stamp) -> Result<Self, Refused> {
        if !self.held_by(holder) {
            return Err(NotHeld.into());
        }
        let mut next = self.next(stamp);
        next.renewed = next.sequence;
        for change in changes {
            match change {
                OwnerChange::Publish(name) => next.publish(*name)?,
                OwnerChange::Answer { to, verdict } => next.reply(*to, verdict),
                OwnerChange::Release { untouched } => {
                    next.owner = None;
                    let saved_with_it = changes.iter().any(|change| matches!(change, OwnerChange::Publish(_)));
                    next.resting = saved_with_it || *untouched && self.resting;
                }
                OwnerChange::Bury { reason } => {
                    next.owner = None;
                    next.waiter = None;
                    next.tombstone = Some(Tombstone { reason: bounded_reason(reason), timestamp: stamp.unix, rest: Map::new() });
                }
            }
        }
        Ok(next)
    }

    /// A new owner, in a new epoch. Whether it may is the lease's to decide.
    #[must_use]
    pub fn acquired(&self, by: InstanceId, stamp: Stamp) -> Self {
        let mut next = self.next(stamp);
        next.resting &= self.owner.is_none();
        next.owner = Some(by);
        next.epoch += 1;
        next.renewed = next.sequence;
        next.waiter = None;
        next.answer = None;
        next
    }

    /// Registers a waiter in the place of whoever was there, or refreshes its registration.
    #[must_use]
    pub fn awaited(&self, by: &InstanceId, registration: Nonce, stamp: Stamp) -> Self {
        let mut next = self.next(stamp);
        if self.answer.as_ref().is_some_and(|answer| answer.to != registration) {
            next.answer = None;
        }
        let rest = self.waiter.as_ref().filter(|waiter| waiter.nonce == registration).map(|waiter| waiter.rest.clone());
        next.waiter = Some(Waiter {
            instance: by.clone(),
            nonce: registration,
            renewed: next.sequence,
            timestamp: stamp.unix,
            rest: rest.unwrap_or_default(),
        });
        next
    }

    /// Takes a registration back, if it is still there.
    #[must_use]
    pub fn withdrawn(&self, registration: Nonce, stamp: Stamp) -> Option<Self> {
        self.waited_on_by(registration).then(|| {
            let mut next = self.next(stamp);
            next.waiter = None;
            next
        })
    }

    #[must_use]
    pub fn waited_on_by(&self, registration: Nonce) -> bool {
        self.waiter.as_ref().is_some_and(|waiter| waiter.nonce == registration)
    }

    pub(crate) fn next(&self, stamp: Stamp) -> Self {
        let mut next = self.clone();
        next.format = RECORD_FORMAT;
        next.sequence += 1;
        next.nonce = stamp.nonce;
        next.timestamp = stamp.unix;
        next
    }

    fn publish(&mut self, name: CheckpointName) -> Result<(), Refused> {
        match self.latest {
            Some(latest) if latest >= name => Err(Refused::NotNewer { name, latest }),
            _ => {
                self.latest = Some(name);
                Ok(())
            }
        }
    }

    fn reply(&mut self, to: Nonce, verdict: &Verdict) {
        if !self.waited_on_by(to) {
            return;
        }
        let verdict = match verdict {
            Verdict::InUse => Verdict::InUse,
            Verdict::CannotSave { reason } => Verdict::CannotSave { reason: bounded_reason(reason) },
        };
        self.waiter = None;
        self.answer = Some(Answer { to, verdict });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(bits: u128) -> Stamp {
        Stamp { unix: 0, nonce: Nonce::from_bits(bits) }
    }

    fn at(ms: u64) -> CheckpointName {
        CheckpointName::at(ms).unwrap()
    }

    fn held() -> (Record, Holder) {
        let record = Record::first("a".parse().unwrap(), stamp(1), BTreeMap::from([("tenant".to_owned(), Value::from("t"))]));
        let holder = record.holder().unwrap();
        (record, holder)
    }

    #[test]
    fn nobody_changes_what_it_does_not_hold() {
        let (record, old) = held();
        let taken = record.acquired("b".parse().unwrap(), stamp(2));
        for change in
            [OwnerChange::Publish(at(1)), OwnerChange::Release { untouched: false }, OwnerChange::Bury { reason: "killed".to_owned() }]
        {
            assert_eq!(taken.by_owner(&old, &[change], stamp(3)), Err(Refused::NotHeld(NotHeld)));
        }
        let again = taken.acquired("a".parse().unwrap(), stamp(4));
        assert_eq!(again.by_owner(&old, &[], stamp(5)), Err(Refused::NotHeld(NotHeld)), "the same instance in a later epoch");
    }

    #[test]
    fn it_is_known_whether_anything_ran_since_the_latest_checkpoint() {
        let (record, a) = held();
        let (release, untouched) = (OwnerChange::Release { untouched: false }, OwnerChange::Release { untouched: true });
        let saved = record.by_owner(&a, &[OwnerChange::Publish(at(1)), release.clone()], stamp(2)).unwrap();
        let b = saved.acquired("b".parse().unwrap(), stamp(3));
        assert!(b.resting, "it goes on from where it was");
        let failed = b.by_owner(&b.holder().unwrap(), &[untouched], stamp(4)).unwrap();
        assert!(failed.acquired("c".parse().unwrap(), stamp(5)).resting, "a failed restore changes nothing");
        let died = b.by_owner(&b.holder().unwrap(), &[release], stamp(4)).unwrap();
        assert!(!died.acquired("c".parse().unwrap(), stamp(5)).resting, "it ran and died");
        assert!(!b.acquired("c".parse().unwrap(), stamp(4)).resting, "its owner was taken for dead");
        let kept = b.by_owner(&b.holder().unwrap(), &[OwnerChange::Publish(at(2))], stamp(4)).unwrap();
        assert!(!kept.acquired("c".parse().unwrap(), stamp(5)).resting, "it went on after its save");
    }

    #[test]
    fn the_published_history_never_goes_back() {
        let (record, holder) = held();
        let published = record.by_owner(&holder, &[OwnerChange::Publish(at(5))], stamp(2)).unwrap();
        for name in [at(4), at(5)] {
            let refused = published.by_owner(&holder, &[OwnerChange::Publish(name)], stamp(3));
            assert_eq!(refused, Err(Refused::NotNewer { name, latest: at(5) }));
        }
        let taken = published.acquired("b".parse().unwrap(), stamp(4));
        assert_eq!(taken.latest, Some(at(5)));
        assert_eq!(taken.attributes, record.attributes);
    }

    #[test]
    fn a_waiter_is_no_sign_of_life_of_the_owner() {
        let (record, holder) = held();
        let waited = record.awaited(&"b".parse().unwrap(), Nonce::from_bits(9), stamp(2));
        assert_eq!((waited.sequence, waited.renewed), (2, 1));
        let renewed = waited.by_owner(&holder, &[], stamp(3)).unwrap();
        assert_eq!((renewed.sequence, renewed.renewed), (3, 3));
        assert!(renewed.waited_on_by(Nonce::from_bits(9)));
    }

    #[test]
    fn an_answer_reaches_the_one_that_asked() {
        let (record, holder) = held();
        let (one, other) = (Nonce::from_bits(8), Nonce::from_bits(9));
        let waited = record.awaited(&"b".parse().unwrap(), one, stamp(2));
        let late = waited.by_owner(&holder, &[OwnerChange::Answer { to: other, verdict: Verdict::InUse }], stamp(3)).unwrap();
        assert!(late.answer.is_none() && late.waited_on_by(one), "an answer to one that is gone changes nothing");
        let told = waited.by_owner(&holder, &[OwnerChange::Answer { to: one, verdict: Verdict::InUse }], stamp(4)).unwrap();
        assert_eq!(told.answer, Some(Answer { to: one, verdict: Verdict::InUse }));
        assert!(told.waiter.is_none());
        assert!(told.awaited(&"c".parse().unwrap(), other, stamp(5)).answer.is_none());
        assert!(told.withdrawn(one, stamp(6)).is_none());
    }
}

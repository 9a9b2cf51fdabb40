//! What somebody else's silence means. Pure: what time it is comes from outside.

use std::time::Duration;

use super::{Moment, Terms};
use crate::record::{InstanceId, Nonce, Record};

/// A sign of life: as long as it is the same, nothing was heard.
#[derive(Debug, Clone, PartialEq, Eq)]
struct OwnerSign {
    owner: Option<InstanceId>,
    epoch: u64,
    renewed: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct WaiterSign {
    registration: Nonce,
    renewed: u64,
}

/// Since when the owner and the waiter of a record have been silent, by the watcher's clock.
///
/// A sign counts from when its watcher has seen it, which is after it was given: silence is never taken to be longer than it is.
#[derive(Debug, Default)]
pub(super) struct Watch {
    owner: Option<(OwnerSign, Moment)>,
    waiter: Option<(WaiterSign, Moment)>,
}

impl Watch {
    /// The record as it was read; `now` is after the reading.
    pub(super) fn saw(&mut self, record: &Record, now: Moment) {
        let sign = OwnerSign { owner: record.owner.clone(), epoch: record.epoch, renewed: record.renewed };
        if self.owner.as_ref().is_none_or(|(known, _)| *known != sign) {
            self.owner = Some((sign, now));
        }
        let sign = record.waiter.as_ref().map(|waiter| WaiterSign { registration: waiter.nonce, renewed: waiter.renewed });
        match (sign, &self.waiter) {
            (Some(sign), Some((known, _))) if *known == sign => {}
            (sign, _) => self.waiter = sign.map(|sign| (sign, now)),
        }
    }

    pub(super) fn owner_is_gone(&self, now: Moment, terms: &Terms) -> bool {
        silent_for(self.owner.as_ref().map(|(_, since)| *since), now) >= terms.lease
    }

    /// It has left out a renewal: most that do never come back.
    pub(super) fn owner_seems_gone(&self, now: Moment, terms: &Terms) -> bool {
        silent_for(self.owner.as_ref().map(|(_, since)| *since), now) >= terms.renewal.mul_f64(1.5)
    }

    pub(super) fn waiter_is_gone(&self, now: Moment, terms: &Terms) -> bool {
        silent_for(self.waiter.as_ref().map(|(_, since)| *since), now) >= terms.waiter_lease
    }
}

fn silent_for(since: Option<Moment>, now: Moment) -> Duration {
    since.map_or(Duration::ZERO, |since| now.since(since))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::record::Stamp;

    fn at(seconds: u64) -> Moment {
        Moment(Duration::from_secs(seconds))
    }

    fn stamp(bits: u128) -> Stamp {
        Stamp { unix: 0, nonce: Nonce::from_bits(bits) }
    }

    #[test]
    fn silence_is_counted_from_when_the_sign_was_seen() {
        let terms = Terms::default();
        let record = Record::first("a".parse().unwrap(), stamp(1), BTreeMap::new());
        let mut watch = Watch::default();
        watch.saw(&record, at(100));
        watch.saw(&record, at(110));
        assert!(!watch.owner_is_gone(at(114), &terms));
        assert!(watch.owner_is_gone(at(115), &terms));
        let renewed = record.by_owner(&record.holder().unwrap(), &[], stamp(2)).unwrap();
        watch.saw(&renewed, at(116));
        assert!(!watch.owner_is_gone(at(130), &terms));
    }

    #[test]
    fn a_waiter_neither_revives_an_owner_nor_the_other_way_round() {
        let terms = Terms::default();
        let record = Record::first("a".parse().unwrap(), stamp(1), BTreeMap::new());
        let mut watch = Watch::default();
        watch.saw(&record, at(0));
        let waited = record.awaited(&"b".parse().unwrap(), Nonce::from_bits(7), stamp(2));
        watch.saw(&waited, at(10));
        assert!(watch.owner_is_gone(at(15), &terms));
        let renewed = waited.by_owner(&waited.holder().unwrap(), &[], stamp(3)).unwrap();
        watch.saw(&renewed, at(16));
        assert!(watch.waiter_is_gone(at(18), &terms) && !watch.owner_is_gone(at(18), &terms));
        let refreshed = renewed.awaited(&"b".parse().unwrap(), Nonce::from_bits(7), stamp(4));
        watch.saw(&refreshed, at(19));
        assert!(!watch.waiter_is_gone(at(20), &terms));
    }
}

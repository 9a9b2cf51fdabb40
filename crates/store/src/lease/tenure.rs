//! How long an owner may still act. Pure: what time it is comes from outside.

use super::{Moment, Terms};

/// An owner's count of its own lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tenure {
    /// From before the request of the last renewal that succeeded; none if there was none yet.
    counted_from: Option<Moment>,
}

impl Tenure {
    pub(super) fn counted_from(moment: Option<Moment>) -> Self {
        Self { counted_from: moment }
    }

    /// A renewal that was asked for at `asked` has succeeded. One that comes late never shortens the count.
    pub(super) fn renewed(&mut self, asked: Moment) {
        self.counted_from = self.counted_from.max(Some(asked));
    }

    /// From here on the lease could run out before the sandbox is frozen.
    pub(super) fn freeze_at(&self, terms: &Terms) -> Moment {
        self.counted_from.map_or(Moment::START, |from| from + terms.lease.saturating_sub(terms.margin))
    }

    pub(super) fn renew_at(&self, terms: &Terms) -> Moment {
        self.counted_from.map_or(Moment::START, |from| from + terms.renewal)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment(Duration::from_secs(seconds))
    }

    #[test]
    fn an_owner_freezes_before_its_lease_is_over() {
        let terms = Terms::default();
        let mut tenure = Tenure::counted_from(Some(at(100)));
        assert_eq!((tenure.renew_at(&terms), tenure.freeze_at(&terms)), (at(105), at(112)));
        tenure.renewed(at(105));
        tenure.renewed(at(103));
        assert_eq!(tenure.freeze_at(&terms), at(117), "a late reply does not set it back");
    }

    #[test]
    fn what_was_never_renewed_is_frozen() {
        let tenure = Tenure::counted_from(None);
        assert!(tenure.freeze_at(&Terms::default()) <= at(0));
        assert!(tenure.renew_at(&Terms::default()) <= at(0));
    }
}

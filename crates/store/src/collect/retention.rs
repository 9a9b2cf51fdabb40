//! Which checkpoints of a sandbox are kept.

use std::collections::BTreeSet;

use crate::layout::CheckpointName;

/// What of a sandbox is kept beside the checkpoint that its record names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// The newest so many that somebody asked for.
    pub checkpoints: usize,
    /// The newest so many that nobody asked for.
    pub automatic: usize,
}

impl Default for Retention {
    fn default() -> Self {
        Self { checkpoints: 5, automatic: 2 }
    }
}

impl Retention {
    /// Those that go, of checkpoints and whether each is automatic. Nothing goes that is newer than `latest`: it may be a save under way.
    pub(super) fn goes(self, there: &[(CheckpointName, bool)], latest: Option<CheckpointName>) -> BTreeSet<CheckpointName> {
        let Some(latest) = latest else { return BTreeSet::new() };
        let mut past: Vec<_> = there.iter().filter(|(name, _)| *name <= latest).collect();
        past.sort_unstable_by(|one, other| other.cmp(one));
        let (mut asked, mut automatic) = (0, 0);
        let mut kept = |(name, by_itself): &(CheckpointName, bool)| {
            let (count, most) = if *by_itself { (&mut automatic, self.automatic) } else { (&mut asked, self.checkpoints) };
            *count += 1;
            *count <= most || *name == latest
        };
        past.into_iter().filter(|one| !kept(one)).map(|(name, _)| *name).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(ms: u64) -> CheckpointName {
        CheckpointName::at(ms).unwrap()
    }

    fn goes(there: &[(u64, bool)], latest: Option<u64>, retention: Retention) -> Vec<u64> {
        let there: Vec<_> = there.iter().map(|(ms, automatic)| (at(*ms), *automatic)).collect();
        retention.goes(&there, latest.map(at)).into_iter().map(CheckpointName::ms).collect()
    }

    #[test]
    fn automatic_ones_do_not_push_out_those_that_were_asked_for() {
        let retention = Retention { checkpoints: 2, automatic: 1 };
        let there = [(1, false), (2, true), (3, false), (4, true), (5, false), (6, true), (7, true)];
        assert_eq!(goes(&there, Some(7), retention), [1, 2, 4, 6]);
        assert_eq!(goes(&there, Some(4), retention), [2], "what is newer may be a save under way");
        assert!(goes(&there, None, retention).is_empty());
        assert_eq!(goes(&there, Some(7), Retention { checkpoints: 0, automatic: 0 }), [1, 2, 3, 4, 5, 6], "what the record names stays");
    }

    proptest! {
        #[test]
        fn what_the_record_names_and_what_is_newer_stays_and_what_went_once_never_stays_again(
            there in proptest::collection::btree_map(1_u64..50, any::<bool>(), 0..30),
            latest in 1_u64..60,
            later in 1_u64..60,
            checkpoints in 0_usize..6,
            automatic in 0_usize..3,
        ) {
            let retention = Retention { checkpoints, automatic };
            let there: Vec<_> = there.into_iter().collect();
            let gone = goes(&there, Some(latest), retention);
            prop_assert!(gone.iter().all(|ms| *ms < latest));
            let more = goes(&there, Some(latest.max(later)), retention);
            prop_assert!(gone.iter().all(|ms| more.contains(ms)), "{gone:?} {more:?}");
        }
    }
}

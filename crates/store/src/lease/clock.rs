//! Time and randomness, passed in.

use std::{
    ops::Add,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use async_trait::async_trait;
use nix::time::{ClockId, clock_gettime};

use crate::record::Nonce;

/// A reading of one clock, which only that clock's readings can be compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(pub Duration);

impl Moment {
    pub const START: Self = Self(Duration::ZERO);

    /// How long ago `earlier` was; nothing if it is yet to come.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Moment {
    type Output = Self;

    fn add(self, length: Duration) -> Self {
        Self(self.0.saturating_add(length))
    }
}

/// What an instance knows of time. Randomness comes from the same place, so that a seed fixes both.
#[async_trait]
pub trait Clock: Send + Sync {
    /// A clock that never goes back, and goes on while the machine sleeps.
    fn now(&self) -> Moment;

    /// Since 1970, for people: this may jump, and decides nothing.
    fn unix_time(&self) -> Duration;

    fn nonce(&self) -> Nonce;

    /// Returns at `moment` or soon after. Cancel-safe.
    async fn sleep_until(&self, moment: Moment);
}

/// `CLOCK_BOOTTIME`.
#[derive(Debug, Clone, Copy, Default)]
pub struct BootClock;

/// A sleep is at most this long at a time: tokio's timer does not count while the machine sleeps.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

#[async_trait]
impl Clock for BootClock {
    fn now(&self) -> Moment {
        // It can't fail on Linux; a clock that could not be read must not look young.
        Moment(clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::MAX, Duration::from))
    }

    fn unix_time(&self) -> Duration {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
    }

    fn nonce(&self) -> Nonce {
        Nonce::random()
    }

    async fn sleep_until(&self, moment: Moment) {
        loop {
            let left = moment.since(self.now());
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.min(LONGEST_SLEEP)).await;
        }
    }
}

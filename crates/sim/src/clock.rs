//! The clock of one node: it runs a little fast or slow, begins anywhere, and its wall clock jumps.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use sandboxer_store::{
    lease::{Clock, Moment},
    record::Nonce,
};

use crate::world::World;

/// The day on which everything happens.
const DAY: i64 = 1_800_000_000_000;

pub(crate) struct NodeClock {
    world: Arc<World>,
    begins_at: Duration,
    /// Parts per million that it runs fast.
    drift: i64,
    /// Milliseconds that the wall clock is ahead.
    skew: AtomicI64,
}

impl NodeClock {
    pub(crate) fn new(world: &Arc<World>) -> Self {
        let (begins_at, drift, skew) = world.random(|rng| {
            let drift = rng.within(0..20_000) as i64 - 10_000;
            (Duration::from_secs(rng.within(1..1_000_000)), drift, rng.within(0..120_000) as i64 - 60_000)
        });
        Self { world: Arc::clone(world), begins_at, drift, skew: AtomicI64::new(skew) }
    }

    pub(crate) fn jump(&self, millis: i64) {
        self.skew.store(millis, Ordering::Relaxed);
    }

    fn reading(&self, real: Duration) -> Duration {
        let micros = real.as_micros() as i128;
        self.begins_at + Duration::from_micros((micros + micros * i128::from(self.drift) / 1_000_000) as u64)
    }

    /// When the clock will show `reading`, or just after.
    fn when(&self, reading: Duration) -> Duration {
        let shown = reading.saturating_sub(self.begins_at).as_micros() as i128;
        Duration::from_micros((shown * 1_000_000 / (1_000_000 + i128::from(self.drift))) as u64 + 2)
    }
}

#[async_trait]
impl Clock for NodeClock {
    fn now(&self) -> Moment {
        Moment(self.reading(self.world.now()))
    }

    fn unix_time(&self) -> Duration {
        let millis = DAY + self.world.now().as_millis() as i64 + self.skew.load(Ordering::Relaxed);
        Duration::from_millis(millis.max(0) as u64)
    }

    fn nonce(&self) -> Nonce {
        let (high, low) = self.world.random(|rng| (rng.bits(), rng.bits()));
        Nonce::from_bits(u128::from(high) << 64 | u128::from(low))
    }

    async fn sleep_until(&self, moment: Moment) {
        while self.now() < moment {
            let late = self.world.random(|rng| rng.millis(0..3));
            self.world.sleep_until(self.when(moment.0) + late).await;
        }
    }
}

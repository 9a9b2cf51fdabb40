//! Removing from the volume what nobody needs, now and then, in the background.

use std::{sync::Arc, time::Duration};

use sandboxer_store::{
    collect::{Collected, Collector, Retention, Terms},
    lease::BootClock,
};
use tracing::{debug, info, warn};

use super::Checkpoints;
use crate::metrics::Metrics;

impl Checkpoints {
    /// Collects for ever. Dropped at any point: whoever collects next goes on with it.
    pub(crate) async fn collect_again_and_again(self: Arc<Self>, remember: Duration, metrics: Arc<Metrics>) {
        let retention = Retention { checkpoints: self.collection.keep_checkpoints, ..Retention::default() };
        let terms = Terms { retention, longest_save: self.collection.longest_save, remember: Some(remember) };
        let (records, me) = (Arc::clone(self.leases.records()), self.leases.instance().clone());
        let collector = Collector::new(self.volume.clone(), records, Arc::new(BootClock), me, terms);
        collector.keep_reserve().await;
        let Some(every) = self.collection.every else { return };
        if let Err(error) = collector.look_at_turn().await {
            debug!(error = error.whole(), "who collected last could not be seen");
        }
        loop {
            // Not all instances at the same moment.
            tokio::time::sleep(every.mul_f64(rand::random_range(0.75..1.25))).await;
            match collector.collect_in_turn().await {
                Ok(done) => tell(&done, &metrics),
                Err(error) => warn!(error = error.whole(), "the volume could not be collected; it is tried again"),
            }
        }
    }
}

/// What came of it.
pub(crate) fn tell(done: &Collected, metrics: &Metrics) {
    if done.left_to_another {
        debug!("another instance collects");
        return;
    }
    metrics.collections.inc();
    metrics.collected_bytes.inc_by(done.bytes());
    for file in &done.unreadable {
        warn!(file, "it can't be read, so no pack is collected: nobody knows which it needs");
    }
    for record in &done.bad_records {
        warn!(record, "it can't be read, so its sandbox is kept as it is");
    }
    let Collected { packs, checkpoints, sandboxes, tombstones, dead_writers, .. } = *done;
    if done.bytes() > 0 || sandboxes + tombstones + dead_writers > 0 {
        info!(bytes = done.bytes(), packs, checkpoints, sandboxes, tombstones, dead_writers, "collected");
    }
}

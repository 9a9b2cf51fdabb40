//! Removing from a volume of filesystem snapshots what nobody needs, now and then, in the background.

use std::{io, sync::Arc};

use sandboxer_store::{
    Place, Volume, VolumeKey,
    collect::{Collector, Retention, Terms},
    failpoint::FailPoints,
    key::Purpose,
    lease::BootClock,
    record::{Codec, InstanceId},
};
use tracing::warn;

use super::Filesystems;
use crate::{checkpoints::tell_collected, metrics::Metrics};

impl Filesystems {
    /// Collects for ever, unless the volume is that of the checkpoints, which is collected already. Dropped at any point: whoever collects next goes on with it.
    pub(crate) async fn collect_again_and_again(self: Arc<Self>, checkpoints: Option<Place>, metrics: Arc<Metrics>) {
        let Some(every) = self.collect_every.filter(|_| checkpoints.as_ref() != Some(&self.place)) else { return };
        let (place, volume, key) = (self.place.clone(), self.volume.clone(), self.key.clone());
        drop(self);
        let mut collector = None;
        loop {
            // Not all instances at the same moment.
            tokio::time::sleep(every.mul_f64(rand::random_range(0.75..1.25))).await;
            if collector.is_none() {
                collector = match open(&place, &volume, key.clone()) {
                    Ok(collector) => Some(collector),
                    Err(error) => {
                        warn!(%error, "the volume of filesystem snapshots can't be collected; it is tried again");
                        continue;
                    }
                };
            }
            let Some(collector) = &collector else { continue };
            match collector.collect_unless_another_does().await {
                Ok(done) => tell_collected(&done, &metrics),
                Err(error) => warn!(error = error.whole(), "the volume of filesystem snapshots could not be collected; it is tried again"),
            }
        }
    }
}

fn open(place: &Place, volume: &Volume, key: Option<VolumeKey>) -> io::Result<Collector> {
    let codec = match key {
        Some(key) => Codec::sealed(Arc::new(move |bytes| key.mac(Purpose::Record, bytes))),
        None => Codec::default(),
    };
    let records = place.records(codec, FailPoints::from_env()?, None)?;
    // Should there be checkpoints as well, how many are kept is for those to say whose they are.
    let retention = Retention { checkpoints: usize::MAX, automatic: usize::MAX };
    let terms = Terms { retention, remember: None, ..Terms::default() };
    Ok(Collector::new(volume.clone(), records, Arc::new(BootClock), InstanceId::random(), terms))
}

//! A save without files, for the simulator: packs are written and relied upon in the order of a real one.

use super::{Finished, PutMode, SaveStats, Saved, Saver, layout, pack};
use crate::error::Result;
use crate::layout::{PackId, Tenant};
use crate::manifest::PackRef;

impl Saver {
    /// Relies on those of `reuse` that are there and not condemned, and writes `new`; `work` is what takes the time between.
    ///
    /// # Errors
    /// As [`Saver::save`].
    pub async fn save_packs(&self, tenant: Tenant, reuse: &[PackId], new: &[PackId], work: impl Future<Output = ()>) -> Result<Saved> {
        let intent = self.writer.begin(&self.volume).await?;
        let relied: Vec<PackId> = reuse.iter().copied().filter(|id| !intent.condemned().has(tenant, *id)).collect();
        let mut packs = Vec::new();
        let write = async {
            for id in new {
                self.volume.put(&layout::pack(tenant, *id), pack::head(*id).to_vec().into(), PutMode::Create).await?;
                packs.push(PackRef { id: *id, bytes: pack::HEAD_BYTES as u64 });
            }
            work.await;
            Ok(())
        };
        let (written, sizes) = tokio::join!(write, self.volume.sizes_of(tenant, relied));
        written?;
        let mut relied_on = Vec::new();
        for (id, bytes) in sizes? {
            if let Some(bytes) = bytes {
                packs.push(PackRef { id, bytes });
                relied_on.push(id);
            }
        }
        let finished = Finished { packs, files: Vec::new(), chunks: Vec::new(), stats: SaveStats::default(), relied_on };
        Ok(finished.with(tenant, intent))
    }
}

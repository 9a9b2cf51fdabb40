//! Whose turn it is to collect. A collection reads every record and lists everything, so that however many instances there are, only about one of them
//! should do it at a time.
//!
//! `collect/turn` holds a nonce of whoever collected last. An instance whose period is over collects if nobody else did since it last looked, and says so
//! first; no two clocks are compared. Two that say so at the same moment both collect, which is safe and rare.

use object_store::PutMode;

use super::{Collected, Collector};
use crate::error::{Error, Result};
use crate::layout;
use crate::record::Nonce;

const MAX_TURN_BYTES: usize = 64;

impl Collector {
    /// Notes who collected last. To be called when an instance begins to wait for its turn.
    ///
    /// # Errors
    /// The volume can't be read.
    pub async fn look_at_turn(&self) -> Result<()> {
        let there = self.turn().await?;
        self.seen().turn = Some(there);
        Ok(())
    }

    /// Collects unless another did since this one last looked, or seems to be at it.
    ///
    /// # Errors
    /// As [`Collector::collect`].
    pub async fn collect_in_turn(&self) -> Result<Collected> {
        let there = self.turn().await?;
        if self.seen().turn.replace(there) != Some(there) {
            return Ok(Collected { left_to_another: true, ..Collected::default() });
        }
        let nonce = self.clock.nonce();
        // On a volume that is full it can't be said, and collecting is what helps.
        if self.volume.put(&layout::turn(), format!("{nonce}\n").into(), PutMode::Overwrite).await.is_ok() {
            self.seen().turn = Some(Some(nonce));
        }
        self.collect_unless_another_does().await
    }

    async fn turn(&self) -> Result<Option<Nonce>> {
        match self.volume.read(&layout::turn(), MAX_TURN_BYTES).await {
            Ok(bytes) => Ok(std::str::from_utf8(&bytes).ok().and_then(|text| text.trim_end().parse().ok())),
            Err(Error::NotFound { .. } | Error::Damaged { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, super::Seen> {
        self.seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

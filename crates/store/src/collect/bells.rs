//! Bells of instances that are gone: nobody hears them any more, and nobody removes them.

use object_store::ObjectStoreExt as _;

use super::Collector;
use crate::layout;

/// A bell that was not rung for a day. If its instance lives after all, the next ring makes it anew, so that the clocks of two machines may be compared here.
const OLD_SECONDS: i64 = 24 * 60 * 60;

impl Collector {
    /// What can't be removed now goes another time.
    pub(super) async fn remove_old_bells(&self) {
        if !self.volume.is_far() {
            return;
        }
        let Ok(listed) = self.volume.store().list_with_delimiter(Some(&layout::bells())).await else { return };
        let now = i64::try_from(self.clock.unix_time().as_secs()).unwrap_or_default();
        for bell in listed.objects.iter().filter(|bell| now - bell.last_modified.timestamp() > OLD_SECONDS) {
            let _ = self.volume.store().delete(&bell.location).await;
        }
    }
}

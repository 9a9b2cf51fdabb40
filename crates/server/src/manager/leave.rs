//! Stopping: what is kept on the volume is saved and given up, the sandbox that was used last first; what does not fit into the grace
//! period is left as it is for the next start, and lost by nobody.

use std::{cmp::Reverse, sync::Arc, time::Duration};

use tokio::{sync::Semaphore, time::Instant};
use tracing::{info, warn};

use super::{Handle, Manager};
use crate::sandbox::driver::{Command, Stop};

/// While one save waits for the disk another one computes.
const SAVES_PER_CPU: usize = 2;
/// What of the grace period is kept for leaving what could not be saved: its clients are told.
const TIME_TO_LEAVE: Duration = Duration::from_millis(2500);

/// Saves that run beside each other when the server stops. More of them would all be late.
pub(super) fn saves_at_once() -> usize {
    std::thread::available_parallelism().map_or(2, std::num::NonZero::get) * SAVES_PER_CPU
}

impl Manager {
    /// Saves, ends or leaves all sandboxes, and waits for it as long as the settings allow.
    pub(crate) async fn stop(&self, how: Stop) {
        let begun = Instant::now();
        let grace = self.settings.stop_grace;
        info!(sandboxes = self.lock().len(), ?how, "stopping");
        self.stop.send_replace(Some(how));
        self.drivers.close();
        if how == Stop::Drain {
            let leave_at = begun + grace.saturating_sub(TIME_TO_LEAVE.min(grace / 4));
            let all = async {
                tokio::join!(self.give_turns(), self.drivers.wait());
            };
            if tokio::time::timeout_at(leave_at, all).await.is_err() {
                warn!(left = self.lock().len(), "not everything could be saved in time; what is left is taken up by the next start");
                self.stop.send_replace(Some(Stop::Restart));
            }
        }
        if tokio::time::timeout_at(begun + grace, self.drivers.wait()).await.is_err() {
            warn!("not everything ended in time; what is left is taken up by the next start");
        }
        info!(ms = begun.elapsed().as_millis(), left = self.lock().len(), "nothing runs here any more but what is left");
    }

    /// Lets all that is kept be saved, as many at a time as do each other no harm.
    async fn give_turns(&self) {
        let mut kept: Vec<Handle> = self.lock().values().filter(|handle| handle.lease.is_some()).cloned().collect();
        kept.sort_by_key(|handle| Reverse(handle.last_use.get()));
        for handle in kept {
            give_turn(&self.turns, &handle).await;
        }
    }

    /// A sandbox that has come while the server stops goes with the others.
    pub(super) fn leave_too(&self, handle: &Handle) {
        if self.stopping() == Some(Stop::Drain) && handle.lease.is_some() {
            let (turns, handle) = (Arc::clone(&self.turns), handle.clone());
            self.drivers.spawn(async move { give_turn(&turns, &handle).await });
        }
    }
}

async fn give_turn(turns: &Arc<Semaphore>, handle: &Handle) {
    // The semaphore is never closed.
    let Ok(turn) = Arc::clone(turns).acquire_owned().await else { return };
    info!(id = %handle.id, "its turn to be saved");
    // One that has ended meanwhile needs no turn.
    let _ = handle.commands.send(Command::Leave { turn }).await;
}

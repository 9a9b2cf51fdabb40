//! Whether the volumes answer and leases are renewed, for `/readyz`.
//!
//! A request asks the volumes, at most one at a time and not more often than [`FRESH`]: load balancers
//! ask often, and no key is needed.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{Instant, timeout},
};

use crate::manager::Manager;

/// A result is good for this long.
const FRESH: Duration = Duration::from_secs(1);
/// A volume that takes longer than this does not answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(3);

type Answer = Result<(), String>;

#[derive(Default)]
pub(crate) struct Health {
    /// Since when the volumes are being asked.
    asking: Mutex<Option<Instant>>,
    newest: watch::Sender<Option<(Instant, Answer)>>,
}

impl Manager {
    /// Checks that the volumes answer and that leases are renewed.
    ///
    /// # Errors
    /// The reason, as a clause.
    pub(crate) async fn healthy(self: &Arc<Self>) -> Answer {
        let mut newest = self.health.newest.subscribe();
        let fresh = newest.borrow().clone().filter(|(at, _)| at.elapsed() < FRESH);
        if let Some((_, answer)) = fresh {
            return answer;
        }
        newest.mark_unchanged();
        let since = self.ask_volumes();
        match timeout(ANSWERS_WITHIN, newest.changed()).await {
            Ok(Ok(())) => newest.borrow().clone().map_or(Ok(()), |(_, answer)| answer),
            _ => Err(format!("the volume has not answered for {} s", since.elapsed().as_secs())),
        }
    }

    /// Begins to ask, unless that is under way. Returns when it began.
    fn ask_volumes(self: &Arc<Self>) -> Instant {
        let mut asking = self.health.asking.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(since) = *asking {
            return since;
        }
        let since = Instant::now();
        *asking = Some(since);
        let manager = Arc::clone(self);
        tokio::spawn(async move {
            let answer = manager.volumes_answer().await;
            *manager.health.asking.lock().unwrap_or_else(PoisonError::into_inner) = None;
            manager.health.newest.send_replace(Some((Instant::now(), answer)));
        });
        since
    }

    async fn volumes_answer(&self) -> Answer {
        if let Some(checkpoints) = &self.checkpoints {
            checkpoints.answers().await.map_err(|why| format!("the volume of checkpoints does not answer: {why}"))?;
            let (all, frozen) = checkpoints.leases.census();
            if all > 0 && all == frozen {
                return Err(format!("no lease could be renewed in time, and all {all} sandboxes are frozen"));
            }
        }
        if let Some(filesystems) = &self.filesystems {
            filesystems.answers().await.map_err(|why| format!("the volume of filesystem snapshots does not answer: {why}"))?;
        }
        Ok(())
    }
}

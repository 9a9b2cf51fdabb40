//! Who is at work on what, so that two requests that would disturb each other are told so instead.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use sandboxer_extensions::{ExtensionError, Kind, SnapshotId};
use sandboxer_protocol::SandboxId;
use tokio::{
    sync::Notify,
    time::{Instant, timeout_at},
};

/// How long a request waits for another that is just ending: its result can be seen a moment before it has let go.
const A_MOMENT: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Sandbox(SandboxId),
    Snapshot(SnapshotId),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    Alone,
    Shared(usize),
}

#[derive(Debug, Clone, Default)]
pub(super) struct Busy(Arc<State>);

#[derive(Debug, Default)]
struct State {
    uses: Mutex<HashMap<Key, Use>>,
    freed: Notify,
}

/// Somebody at work, until it is dropped.
#[derive(Debug)]
pub(super) struct Held {
    busy: Busy,
    key: Key,
}

impl Busy {
    /// For work beside which there can be no other.
    pub(super) async fn alone(&self, key: Key) -> Result<Held, ExtensionError> {
        self.soon(|| self.try_alone(key)).await
    }

    /// For work that others may do at the same time.
    pub(super) async fn shared(&self, key: Key) -> Result<Held, ExtensionError> {
        self.soon(|| self.try_shared(key)).await
    }

    async fn soon(&self, take: impl Fn() -> Result<Held, ExtensionError>) -> Result<Held, ExtensionError> {
        let until = Instant::now() + A_MOMENT;
        loop {
            let freed = self.0.freed.notified();
            tokio::pin!(freed);
            // From here on nothing that is freed is missed.
            freed.as_mut().enable();
            match take() {
                Err(conflict) if timeout_at(until, freed).await.is_err() => return Err(conflict),
                Err(_) => {}
                held => return held,
            }
        }
    }

    pub(super) fn try_alone(&self, key: Key) -> Result<Held, ExtensionError> {
        let mut uses = self.0.uses.lock().unwrap_or_else(PoisonError::into_inner);
        if uses.contains_key(&key) {
            return Err(conflict(key));
        }
        uses.insert(key, Use::Alone);
        Ok(Held { busy: self.clone(), key })
    }

    fn try_shared(&self, key: Key) -> Result<Held, ExtensionError> {
        let mut uses = self.0.uses.lock().unwrap_or_else(PoisonError::into_inner);
        match uses.entry(key).or_insert(Use::Shared(0)) {
            Use::Alone => Err(conflict(key)),
            Use::Shared(count) => {
                *count += 1;
                Ok(Held { busy: self.clone(), key })
            }
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut uses = self.busy.0.uses.lock().unwrap_or_else(PoisonError::into_inner);
        match uses.get_mut(&self.key) {
            Some(Use::Shared(count)) if *count > 1 => *count -= 1,
            _ => drop(uses.remove(&self.key)),
        }
        drop(uses);
        self.busy.0.freed.notify_waiters();
    }
}

fn conflict(key: Key) -> ExtensionError {
    let what = match key {
        Key::Sandbox(id) => format!("sandbox {id}"),
        Key::Snapshot(id) => format!("snapshot {id}"),
    };
    ExtensionError::new(Kind::Conflict, "busy", format!("Another request is at work on {what}. Try again when it has ended."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn work_alone_excludes_all_other_and_shared_work_only_that() {
        let busy = Busy::default();
        let key = Key::Snapshot(SnapshotId::random());
        let (one, two) = (busy.shared(key).await.unwrap(), busy.shared(key).await.unwrap());
        assert!(busy.alone(key).await.is_err());
        drop(one);
        assert!(busy.alone(key).await.is_err());
        drop(two);
        let alone = busy.alone(key).await.unwrap();
        assert!(busy.alone(key).await.is_err() && busy.shared(key).await.is_err());
        assert!(busy.alone(Key::Snapshot(SnapshotId::random())).await.is_ok());
        drop(alone);
        assert!(busy.shared(key).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_just_ending_is_waited_for() {
        let busy = Busy::default();
        let key = Key::Snapshot(SnapshotId::random());
        let ending = busy.alone(key).await.unwrap();
        let end = async {
            tokio::time::sleep(A_MOMENT / 2).await;
            drop(ending);
        };
        let (next, ()) = tokio::join!(busy.alone(key), end);
        assert!(next.is_ok());
    }
}

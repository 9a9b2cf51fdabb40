//! Sandboxes that are ending and still have their place.
//!
//! Whoever hears that its sandbox is saved may want another at once, and hears it before the old one is off this machine. So one who finds no room
//! waits for those that are leaving.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

/// To leave takes some ten milliseconds; longer than this nobody waits for it.
const LEAVES_WITHIN: Duration = Duration::from_secs(5);

type Owner = Option<Arc<str>>;

/// Whose sandboxes are leaving now.
#[derive(Debug, Clone, Default)]
pub(crate) struct Leaving(watch::Sender<Vec<Owner>>);

/// One that is, until it is dropped: then its place is free.
#[derive(Debug)]
pub(crate) struct Leaves {
    all: Leaving,
    owner: Owner,
}

impl Leaving {
    pub(crate) fn begin(&self, owner: Option<&str>) -> Leaves {
        let owner: Owner = owner.map(Arc::from);
        self.0.send_modify(|owners| owners.push(owner.clone()));
        Leaves { all: self.clone(), owner }
    }

    /// Takes a place of this server, as soon as there is one that somebody is leaving.
    pub(crate) async fn room<T, E>(&self, take: impl FnMut() -> Result<T, E>) -> Result<T, E> {
        self.wait(|leaving| !leaving.is_empty(), take).await
    }

    /// Likewise one of those that an API key has.
    pub(crate) async fn room_of<T, E>(&self, owner: Option<&str>, take: impl FnMut() -> Result<T, E>) -> Result<T, E> {
        self.wait(|leaving| leaving.iter().any(|one| one.as_deref() == owner), take).await
    }

    /// Cancel-safe.
    async fn wait<T, E>(&self, any: impl Fn(&[Owner]) -> bool, mut take: impl FnMut() -> Result<T, E>) -> Result<T, E> {
        let until = Instant::now() + LEAVES_WITHIN;
        let mut leaving = self.0.subscribe();
        loop {
            // Looked at first: who leaves after this has freed its place before the next look.
            let worth_it = any(&leaving.borrow_and_update());
            let taken = take();
            if taken.is_ok() || !worth_it || !matches!(timeout_at(until, leaving.changed()).await, Ok(Ok(()))) {
                return taken;
            }
        }
    }
}

impl Drop for Leaves {
    fn drop(&mut self) {
        self.all.0.send_modify(|owners| {
            if let Some(at) = owners.iter().position(|owner| *owner == self.owner) {
                owners.swap_remove(at);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_finds_no_room_waits_for_those_who_leave_and_for_nobody_else() {
        let leaving = Leaving::default();
        let tried = AtomicU32::new(0);
        let full = || {
            tried.fetch_add(1, Ordering::Relaxed);
            Err::<(), _>("full")
        };
        let begun = Instant::now();
        assert_eq!(leaving.room(full).await, Err("full"));
        assert_eq!((tried.swap(0, Ordering::Relaxed), begun.elapsed()), (1, Duration::ZERO), "nobody leaves");

        let (alice, bob) = (leaving.begin(Some("alice")), leaving.begin(Some("bob")));
        assert_eq!(leaving.room_of(Some("carol"), full).await, Err("full"));
        assert_eq!((tried.swap(0, Ordering::Relaxed), begun.elapsed()), (1, Duration::ZERO), "nobody of hers leaves");
        assert_eq!(leaving.room(full).await, Err("full"));
        assert_eq!((tried.swap(0, Ordering::Relaxed), begun.elapsed()), (1, LEAVES_WITHIN), "it does not wait for ever");

        let places = AtomicU32::new(0);
        let take = || if places.load(Ordering::Relaxed) > 0 { Ok(()) } else { Err("full") };
        let leave = async {
            // Somebody else's does not make room for alice.
            drop(bob);
            tokio::task::yield_now().await;
            places.fetch_add(1, Ordering::Relaxed);
            drop(alice);
        };
        assert_eq!(tokio::join!(leaving.room_of(Some("alice"), take), leave).0, Ok(()));
        assert!(leaving.0.borrow().is_empty());
    }
}

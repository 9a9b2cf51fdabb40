//! Sandboxes that are ending and still have their place.
//!
//! Whoever hears that its sandbox is saved may want another at once, and hears it before the old one is off this machine. So one who finds no room
//! waits for those that are leaving.

use std::{pin::pin, sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

/// To leave takes some ten milliseconds, and two seconds where a client does not read its last words; longer than this nobody waits for it.
const LEAVES_WITHIN: Duration = Duration::from_secs(2);

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

    /// Takes a place of this server, as soon as there is one that somebody is leaving. `stop` ends the waiting. Cancel-safe.
    pub(crate) async fn room<T, E>(&self, stop: impl Future<Output = ()>, take: impl FnMut() -> Result<T, E>) -> Result<T, E> {
        self.wait(|leaving| !leaving.is_empty(), stop, take).await
    }

    /// Likewise one of those that an API key has.
    pub(crate) async fn room_of<T, E>(
        &self,
        owner: Option<&str>,
        stop: impl Future<Output = ()>,
        take: impl FnMut() -> Result<T, E>,
    ) -> Result<T, E> {
        self.wait(|leaving| leaving.iter().any(|one| one.as_deref() == owner), stop, take).await
    }

    async fn wait<T, E>(
        &self,
        any: impl Fn(&[Owner]) -> bool,
        stop: impl Future<Output = ()>,
        mut take: impl FnMut() -> Result<T, E>,
    ) -> Result<T, E> {
        let until = Instant::now() + LEAVES_WITHIN;
        let mut leaving = self.0.subscribe();
        let mut stop = pin!(stop);
        loop {
            // Looked at first: who leaves after this has freed its place before the next look.
            let worth_it = any(&leaving.borrow_and_update());
            let taken = take();
            if taken.is_ok() || !worth_it {
                return taken;
            }
            tokio::select! {
                biased;
                () = &mut stop => return taken,
                changed = timeout_at(until, leaving.changed()) => if !matches!(changed, Ok(Ok(()))) {
                    return taken;
                },
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
    use std::{
        future::{pending, ready},
        sync::atomic::{AtomicU32, Ordering},
    };

    use super::*;

    /// As many places as are free, and how often somebody asked for one.
    #[derive(Default)]
    struct Places {
        free: AtomicU32,
        asked: AtomicU32,
    }

    impl Places {
        fn take(&self) -> Result<(), &'static str> {
            self.asked.fetch_add(1, Ordering::Relaxed);
            self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| free.checked_sub(1)).map(|_| ()).map_err(|_| "full")
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_finds_no_room_waits_for_those_who_leave_and_for_nobody_else() {
        let (leaving, places) = (Leaving::default(), Places::default());
        let begun = Instant::now();
        assert_eq!(leaving.room(pending(), || places.take()).await, Err("full"));
        let (alice, bob) = (leaving.begin(Some("alice")), leaving.begin(Some("bob")));
        assert_eq!(leaving.room_of(Some("carol"), pending(), || places.take()).await, Err("full"));
        assert_eq!(leaving.room_of(None, pending(), || places.take()).await, Err("full"));
        assert_eq!(leaving.room(ready(()), || places.take()).await, Err("full"), "the server stops");
        assert_eq!((places.asked.swap(0, Ordering::Relaxed), begun.elapsed()), (4, Duration::ZERO), "for these nobody leaves");
        assert_eq!(leaving.room(pending(), || places.take()).await, Err("full"));
        assert_eq!((places.asked.swap(0, Ordering::Relaxed), begun.elapsed()), (1, LEAVES_WITHIN), "it does not wait for ever");

        let leave = async {
            drop(bob);
            tokio::time::sleep(Duration::from_millis(10)).await;
            assert_eq!(places.asked.load(Ordering::Relaxed), 2, "it looked again, and waits on");
            places.free.store(1, Ordering::Relaxed);
            drop(alice);
        };
        assert_eq!(tokio::join!(leaving.room_of(Some("alice"), pending(), || places.take()), leave).0, Ok(()));
        assert!(leaving.0.borrow().is_empty());
    }
}

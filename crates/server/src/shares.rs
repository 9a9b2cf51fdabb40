//! Shares of a bounded resource: one API key never has more than half of it.
//!
//! [`Shares`] refuses what does not fit, [`Budget`] lets it wait. Without keys all clients are one
//! tenant.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// An API key's name, or none where the server has no keys.
type Tenant = Option<String>;

/// Amounts that are taken at once or not at all.
#[derive(Clone)]
pub(crate) struct Shares(Arc<Ledger>);

struct Ledger {
    each: u64,
    taken: Mutex<HashMap<Tenant, u64>>,
}

/// An amount that is given back when this is dropped.
pub(crate) struct Share {
    ledger: Arc<Ledger>,
    owner: Tenant,
    amount: u64,
}

impl Shares {
    /// `each` for one key, and twice as much for all.
    pub(crate) fn new(each: u64) -> Self {
        Self(Arc::new(Ledger { each, taken: Mutex::default() }))
    }

    /// None: neither this key nor, perhaps, any other may have as much now.
    pub(crate) fn take(&self, owner: Option<&str>, amount: u64) -> Option<Share> {
        let mut share = Share { ledger: Arc::clone(&self.0), owner: owner.map(str::to_owned), amount: 0 };
        share.grow(amount).then_some(share)
    }
}

impl Share {
    /// Takes more. False: that much is not to be had, and nothing has changed.
    pub(crate) fn grow(&mut self, more: u64) -> bool {
        let mut taken = self.ledger.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let all: u64 = taken.values().sum();
        let own = taken.get(&self.owner).copied().unwrap_or_default();
        let fits = own.saturating_add(more) <= self.ledger.each && all.saturating_add(more) <= self.ledger.each.saturating_mul(2);
        if fits && more > 0 {
            taken.insert(self.owner.clone(), own + more);
            self.amount += more;
        }
        fits
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.ledger.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = taken.get_mut(&self.owner) {
            *own = own.saturating_sub(self.amount);
            if *own == 0 {
                taken.remove(&self.owner);
            }
        }
    }
}

/// Amounts that are waited for, first come, first served within a key.
#[derive(Clone)]
pub(crate) struct Budget(Arc<Pools>);

struct Pools {
    each: u32,
    all: Arc<Semaphore>,
    owners: Mutex<HashMap<Tenant, Weak<Semaphore>>>,
}

/// An amount of a [`Budget`] that is given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    // Dropped in this order, so that the key's next one finds the pool of all open.
    _all: OwnedSemaphorePermit,
    _own: OwnedSemaphorePermit,
}

impl Budget {
    /// `each` for one key, and twice as much for all.
    pub(crate) fn new(each: u32) -> Self {
        Self(Arc::new(Pools { each, all: Arc::new(Semaphore::new(each as usize * 2)), owners: Mutex::default() }))
    }

    pub(crate) fn each(&self) -> u32 {
        self.0.each
    }

    /// Waits until so much is free, at most a key's whole share. Cancel-safe: a dropped wait has taken nothing.
    pub(crate) async fn take(&self, owner: Option<&str>, amount: u32) -> Held {
        let amount = amount.min(self.0.each);
        let own = self.pool_of(owner);
        // The key's own pool comes first: its waiters must not stand in the queue of all.
        let own = own.acquire_many_owned(amount).await;
        let all = Arc::clone(&self.0.all).acquire_many_owned(amount).await;
        match (own, all) {
            (Ok(own), Ok(all)) => Held { _all: all, _own: own },
            // Neither semaphore is ever closed.
            _ => std::future::pending().await,
        }
    }

    fn pool_of(&self, owner: Option<&str>) -> Arc<Semaphore> {
        let mut owners = self.0.owners.lock().unwrap_or_else(PoisonError::into_inner);
        let owner = owner.map(str::to_owned);
        if let Some(pool) = owners.get(&owner).and_then(Weak::upgrade) {
            return pool;
        }
        owners.retain(|_, pool| pool.strong_count() > 0);
        let pool = Arc::new(Semaphore::new(self.0.each as usize));
        owners.insert(owner, Arc::downgrade(&pool));
        pool
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn one_key_never_takes_the_turns_of_all_others() {
        let turns = Shares::new(3);
        let mut greedy: Vec<Share> = std::iter::from_fn(|| turns.take(Some("greedy"), 1)).collect();
        assert_eq!(greedy.len(), 3);
        let others: Vec<Share> = ["one", "two", "three"].into_iter().filter_map(|owner| turns.take(Some(owner), 1)).collect();
        assert_eq!(others.len(), 3);
        assert!(turns.take(Some("four"), 1).is_none(), "all of them have a bound");
        greedy.pop();
        assert!(turns.take(Some("four"), 1).is_some());
        drop((greedy, others));
        assert!(turns.0.taken.lock().unwrap().is_empty());
        let all: Vec<Share> = std::iter::from_fn(|| turns.take(None, 1)).collect();
        assert_eq!(all.len(), 3);
    }

    #[test]
    fn a_share_grows_within_the_bound_of_its_key() {
        let shares = Shares::new(10);
        let mut share = shares.take(Some("a"), 4).unwrap();
        assert!(share.grow(6) && !share.grow(1));
        assert!(shares.take(Some("b"), 10).is_some());
        let _others = [shares.take(Some("b"), 5).unwrap(), shares.take(Some("c"), 5).unwrap()];
        assert!(shares.take(Some("c"), 1).is_none(), "all together have a bound");
        drop(share);
        assert!(shares.take(Some("a"), 10).is_some());
    }

    #[tokio::test]
    async fn a_key_that_waits_for_its_budget_holds_up_no_other() {
        let budget = Budget::new(4);
        let held = budget.take(Some("greedy"), 100).await;
        assert!(budget.take(Some("greedy"), 1).now_or_never().is_none(), "its share is taken");
        let waiting: Vec<_> = (0..9).map(|_| Box::pin(budget.take(Some("greedy"), 3))).collect();
        let other = budget.take(Some("other"), 4).now_or_never().unwrap();
        drop((waiting, other));
        drop(held);
        assert!(budget.take(Some("greedy"), 4).now_or_never().is_some());
    }
}

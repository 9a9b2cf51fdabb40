//! How many leases an instance has, and how many of them are frozen.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

#[derive(Clone, Default)]
pub(crate) struct Census(Arc<Counts>);

#[derive(Default)]
struct Counts {
    all: AtomicUsize,
    frozen: AtomicUsize,
}

/// A lease that counts in the census until this value is dropped.
pub(super) struct Counted {
    census: Census,
    frozen: bool,
}

impl Census {
    pub(super) fn count(&self) -> (usize, usize) {
        (self.0.all.load(Ordering::Relaxed), self.0.frozen.load(Ordering::Relaxed))
    }

    pub(super) fn add(&self, frozen: bool) -> Counted {
        self.0.all.fetch_add(1, Ordering::Relaxed);
        let mut counted = Counted { census: self.clone(), frozen: false };
        counted.set(frozen);
        counted
    }
}

impl Counted {
    pub(super) fn set(&mut self, frozen: bool) {
        if frozen == self.frozen {
            return;
        }
        self.frozen = frozen;
        let count = &self.census.0.frozen;
        if frozen {
            count.fetch_add(1, Ordering::Relaxed)
        } else {
            count.fetch_sub(1, Ordering::Relaxed)
        };
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.set(false);
        self.census.0.all.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_count_until_they_are_dropped() {
        let census = Census::default();
        let (mut one, two) = (census.add(true), census.add(false));
        assert_eq!(census.count(), (2, 1));
        one.set(true);
        drop(two);
        assert_eq!(census.count(), (1, 1));
        one.set(false);
        assert_eq!(census.count(), (1, 0));
        one.set(true);
        drop(one);
        assert_eq!(census.count(), (0, 0));
    }
}

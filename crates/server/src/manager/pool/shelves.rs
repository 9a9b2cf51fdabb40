//! What waits, sorted by what it is for. It only decides; making and removing is others' work.
//!
//! One kind is always kept in stock, up to the size of the pool. Of any other kind there is one, as long as it is asked for again and again,
//! and never more such kinds than the pool is large: who asks for many different things makes nothing wait but himself.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

/// For how long a kind is remembered that was asked for.
const RECENT: Duration = Duration::from_secs(600);
/// Kinds that are remembered; the one that was not asked for the longest goes first.
const KINDS: usize = 64;
/// Asked for less often, a kind is none that comes back.
const OFTEN: u32 = 2;

/// Something that waits to be used.
pub(super) trait Waits {
    fn is_alive(&self) -> bool;
}

/// A stock of things of several kinds.
pub(super) struct Shelves<K, T> {
    size: usize,
    shelves: Vec<Shelf<K, T>>,
}

struct Shelf<K, T> {
    kind: K,
    ready: VecDeque<T>,
    asked: u32,
    asked_at: Instant,
}

impl<K: Clone + PartialEq, T: Waits> Shelves<K, T> {
    pub(super) fn new(size: usize) -> Self {
        Self { size, shelves: Vec::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.shelves.iter().map(|shelf| shelf.ready.len()).sum()
    }

    /// The one that has waited the longest, and the note that its kind was asked for.
    pub(super) fn take(&mut self, kind: &K, now: Instant) -> Option<T> {
        if self.size == 0 {
            return None;
        }
        let shelf = self.shelf(kind, now);
        shelf.asked = if now.duration_since(shelf.asked_at) > RECENT { 1 } else { shelf.asked.saturating_add(1) };
        shelf.asked_at = now;
        shelf.ready.pop_front()
    }

    pub(super) fn put(&mut self, kind: &K, thing: T, now: Instant) {
        self.shelf(kind, now).ready.push_back(thing);
    }

    /// What is to be made next, `stock` being the kind that is always there.
    pub(super) fn wanted(&self, stock: Option<&K>, now: Instant) -> Option<K> {
        let count = |kind: &K| self.shelves.iter().find(|shelf| shelf.kind == *kind).map_or(0, |shelf| shelf.ready.len());
        if let Some(stock) = stock.filter(|stock| count(stock) < self.size) {
            return Some(stock.clone());
        }
        self.others(stock, now).into_iter().find(|kind| count(kind) == 0)
    }

    /// Takes out what is dead, and what is more than is wanted, or than there may be in all.
    pub(super) fn surplus(&mut self, stock: Option<&K>, most: usize, now: Instant) -> Vec<T> {
        let others = self.others(stock, now);
        let mut out = Vec::new();
        for shelf in &mut self.shelves {
            let keep = match stock {
                Some(stock) if shelf.kind == *stock => self.size,
                _ => usize::from(others.contains(&shelf.kind)),
            };
            let (alive, dead): (VecDeque<T>, VecDeque<T>) = std::mem::take(&mut shelf.ready).into_iter().partition(Waits::is_alive);
            shelf.ready = alive;
            out.extend(dead);
            while shelf.ready.len() > keep {
                out.extend(shelf.ready.pop_back());
            }
        }
        out.extend(self.beyond(stock, most));
        self.shelves.retain(|shelf| !shelf.ready.is_empty() || now.duration_since(shelf.asked_at) <= RECENT);
        out
    }

    /// Takes out what is more than there may be in all. What is always kept goes last.
    pub(super) fn beyond(&mut self, stock: Option<&K>, most: usize) -> Vec<T> {
        let mut out = Vec::new();
        while self.len() > most {
            let rank = |shelf: &&mut Shelf<K, T>| (stock.is_some_and(|stock| shelf.kind == *stock), shelf.asked_at);
            let Some(shelf) = self.shelves.iter_mut().filter(|shelf| !shelf.ready.is_empty()).min_by_key(rank) else { break };
            out.extend(shelf.ready.pop_back());
        }
        out
    }

    /// The kinds beside the stock of which there is to be one, the last asked for first.
    fn others(&self, stock: Option<&K>, now: Instant) -> Vec<K> {
        let mut recent: Vec<_> = self
            .shelves
            .iter()
            .filter(|shelf| stock.is_none_or(|stock| shelf.kind != *stock))
            .filter(|shelf| shelf.asked >= OFTEN && now.duration_since(shelf.asked_at) <= RECENT)
            .collect();
        recent.sort_by_key(|shelf| std::cmp::Reverse(shelf.asked_at));
        recent.into_iter().take(self.size).map(|shelf| shelf.kind.clone()).collect()
    }

    fn shelf(&mut self, kind: &K, now: Instant) -> &mut Shelf<K, T> {
        let at = match self.shelves.iter().position(|shelf| shelf.kind == *kind) {
            Some(at) => at,
            None => {
                if self.shelves.len() >= KINDS
                    && let Some(oldest) =
                        (0..self.shelves.len()).filter(|at| self.shelves[*at].ready.is_empty()).min_by_key(|at| self.shelves[*at].asked_at)
                {
                    self.shelves.swap_remove(oldest);
                }
                self.shelves.push(Shelf { kind: kind.clone(), ready: VecDeque::new(), asked: 0, asked_at: now });
                self.shelves.len() - 1
            }
        };
        &mut self.shelves[at]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Thing(&'static str, bool);

    impl Waits for Thing {
        fn is_alive(&self) -> bool {
            self.1
        }
    }

    fn names(things: Vec<Thing>) -> Vec<&'static str> {
        things.into_iter().map(|thing| thing.0).collect()
    }

    #[test]
    fn the_stock_is_filled_up_and_what_waited_longest_goes_first() {
        let (mut shelves, now) = (Shelves::new(2), Instant::now());
        assert_eq!(shelves.wanted(Some(&"base"), now), Some("base"));
        shelves.put(&"base", Thing("a", true), now);
        shelves.put(&"base", Thing("b", true), now);
        assert_eq!(shelves.wanted(Some(&"base"), now), None);
        assert_eq!(shelves.take(&"base", now), Some(Thing("a", true)));
        assert_eq!(shelves.wanted(Some(&"base"), now), Some("base"));
        assert_eq!(shelves.wanted(None, now), None, "asked for once");
    }

    #[test]
    fn another_kind_is_kept_once_it_is_asked_for_again_and_until_it_no_longer_is() {
        let (mut shelves, now) = (Shelves::new(1), Instant::now());
        shelves.put(&"base", Thing("a", true), now);
        assert_eq!(shelves.take(&"large", now), None);
        assert_eq!(shelves.wanted(Some(&"base"), now), None);
        assert_eq!(shelves.take(&"large", now), None);
        assert_eq!(shelves.wanted(Some(&"base"), now), Some("large"));
        shelves.put(&"large", Thing("l", true), now);
        assert_eq!(shelves.wanted(Some(&"base"), now), None);
        assert!(shelves.surplus(Some(&"base"), 9, now).is_empty());
        let later = now + RECENT + Duration::from_secs(1);
        assert_eq!(names(shelves.surplus(Some(&"base"), 9, later)), ["l"]);
        assert_eq!(shelves.len(), 1);
    }

    #[test]
    fn many_kinds_make_no_more_wait_than_the_pool_is_large() {
        let (mut shelves, now) = (Shelves::<u32, Thing>::new(2), Instant::now());
        for kind in 0..500 {
            for _ in 0..3 {
                assert_eq!(shelves.take(&kind, now + Duration::from_millis(kind.into())), None);
            }
        }
        assert!(shelves.shelves.len() <= KINDS);
        let now = now + Duration::from_secs(1);
        while let Some(kind) = shelves.wanted(None, now) {
            shelves.put(&kind, Thing("x", true), now);
        }
        assert_eq!(shelves.len(), 2);
    }

    #[test]
    fn what_is_dead_or_beyond_the_bound_is_given_up_the_stock_last() {
        let (mut shelves, now) = (Shelves::new(2), Instant::now());
        for _ in 0..2 {
            let _ = shelves.take(&"large", now);
        }
        shelves.put(&"base", Thing("dead", false), now);
        shelves.put(&"base", Thing("base", true), now);
        shelves.put(&"large", Thing("large", true), now);
        assert_eq!(names(shelves.surplus(Some(&"base"), 9, now)), ["dead"]);
        assert_eq!(names(shelves.beyond(Some(&"base"), 1)), ["large"]);
        assert_eq!(names(shelves.beyond(Some(&"base"), 0)), ["base"]);
        assert_eq!(shelves.len(), 0);
    }

    #[test]
    fn a_pool_of_none_takes_no_notes() {
        let (mut shelves, now) = (Shelves::<_, Thing>::new(0), Instant::now());
        for _ in 0..3 {
            assert_eq!(shelves.take(&"base", now), None);
        }
        assert!(shelves.shelves.is_empty() && shelves.wanted(Some(&"base"), now).is_none());
    }
}

//! Turns for what is done with files: so many at once, and for one API key never more than half of them, so that nobody keeps all others out.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

#[derive(Clone)]
pub(super) struct Turns(Arc<Shared>);

struct Shared {
    most: usize,
    taken: Mutex<HashMap<Option<String>, usize>>,
}

/// Given back when it is dropped.
pub(crate) struct Turn {
    of: Arc<Shared>,
    owner: Option<String>,
}

impl Turns {
    /// So many for each, and twice as many for all.
    pub(super) fn new(most: usize) -> Self {
        Self(Arc::new(Shared { most, taken: Mutex::default() }))
    }

    /// None: there is no more, for this one or for anybody.
    pub(super) fn take(&self, owner: Option<&str>) -> Option<Turn> {
        let mut taken = self.0.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.values().sum::<usize>() >= self.0.most * 2 {
            return None;
        }
        let owner = owner.map(str::to_owned);
        let own = taken.entry(owner.clone()).or_default();
        if *own >= self.0.most {
            return None;
        }
        *own += 1;
        Some(Turn { of: Arc::clone(&self.0), owner })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut taken = self.of.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = taken.get_mut(&self.owner) {
            *own -= 1;
            if *own == 0 {
                taken.remove(&self.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_takes_the_turns_of_all_others() {
        let turns = Turns::new(3);
        let mut greedy: Vec<Turn> = std::iter::from_fn(|| turns.take(Some("greedy"))).collect();
        assert_eq!(greedy.len(), 3);
        let others: Vec<Turn> = ["one", "two", "three"].into_iter().filter_map(|owner| turns.take(Some(owner))).collect();
        assert_eq!(others.len(), 3);
        assert!(turns.take(Some("four")).is_none(), "there is an end to all of them");
        greedy.pop();
        assert!(turns.take(Some("four")).is_some());
        drop((greedy, others));
        assert!(turns.0.taken.lock().unwrap().is_empty());
        let all: Vec<Turn> = std::iter::from_fn(|| turns.take(None)).collect();
        assert_eq!(all.len(), 3);
    }
}

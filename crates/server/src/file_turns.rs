//! Turns for what is done with files: so many at once, and for one API key never more than half of them, so that nobody keeps all others out.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use sandboxer_protocol::agent::FileAsk;

/// What is done with files at once in all sandboxes of an API key, and twice as much in all. Content that passes through may hold some MiB here; what is only
/// asked for, or watched, next to nothing.
const MAX_TRANSFERS: usize = 128;
const MAX_FILE_ASKS: usize = 128;
const MAX_WATCHES: usize = 512;

/// By what is done: what takes long keeps nobody from what is done at once.
#[derive(Clone)]
pub(crate) struct FileTurns {
    transfers: Turns,
    asks: Turns,
    watches: Turns,
}

impl FileTurns {
    pub(crate) fn new() -> Self {
        Self { transfers: Turns::new(MAX_TRANSFERS), asks: Turns::new(MAX_FILE_ASKS), watches: Turns::new(MAX_WATCHES) }
    }

    /// None: there is no more, for this one or for anybody.
    pub(crate) fn take(&self, ask: &FileAsk, owner: Option<&str>) -> Option<Turn> {
        let turns = match ask {
            FileAsk::Watch { .. } => &self.watches,
            FileAsk::Read { .. } | FileAsk::Write { .. } | FileAsk::Pack { .. } | FileAsk::Unpack { .. } => &self.transfers,
            _ => &self.asks,
        };
        turns.take(owner)
    }
}

#[derive(Clone)]
struct Turns(Arc<Shared>);

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
    fn new(most: usize) -> Self {
        Self(Arc::new(Shared { most, taken: Mutex::default() }))
    }

    fn take(&self, owner: Option<&str>) -> Option<Turn> {
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

//! How many connections there may be: of one sandbox, and of all together, so that many of one owner leave some to everybody else.

use std::sync::Arc;

use nix::sys::resource::{Resource, getrlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Of all sandboxes together, however many descriptors this process may have; and however few.
const MOST: usize = 4096;
const LEAST: usize = 64;
/// A part of the descriptors: the others are for clients, agents and files.
const PART_OF_DESCRIPTORS: u64 = 4;
/// A sandbox with so many has none of the last quarter.
const ENOUGH: usize = 16;

/// Those of all sandboxes of a server: each takes a descriptor, and the server has to have some left.
#[derive(Debug, Clone)]
pub(crate) struct AllPlaces {
    free: Arc<Semaphore>,
    all: usize,
}

impl AllPlaces {
    pub(crate) fn new(all: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(all)), all }
    }

    /// As many as this process has descriptors for. To be asked when it has got all that it gets.
    pub(crate) fn of_this_process() -> Self {
        let descriptors = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
        Self::new(usize::try_from(descriptors / PART_OF_DESCRIPTORS).unwrap_or(MOST).clamp(LEAST, MOST))
    }
}

/// Those of one sandbox.
#[derive(Debug)]
pub(super) struct Places {
    free: Arc<Semaphore>,
    most: usize,
    of_all: AllPlaces,
}

/// One connection's.
#[derive(Debug)]
pub(super) struct Place {
    _own: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoPlace {
    /// The sandbox has as many as it may.
    Own,
    /// The server has as many as it can.
    OfAll,
}

impl Places {
    pub(super) fn new(most: usize, of_all: AllPlaces) -> Self {
        Self { free: Arc::new(Semaphore::new(most)), most, of_all }
    }

    pub(super) fn take(&self) -> Result<Place, NoPlace> {
        let own = Arc::clone(&self.free).try_acquire_owned().map_err(|_| NoPlace::Own)?;
        let has = self.most - self.free.available_permits();
        if has > ENOUGH && self.of_all.free.available_permits() <= self.of_all.all / 4 {
            return Err(NoPlace::OfAll);
        }
        let of_all = Arc::clone(&self.of_all.free).try_acquire_owned().map_err(|_| NoPlace::OfAll)?;
        Ok(Place { _own: own, _of_all: of_all })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_of_one_leave_some_to_others_and_give_back_what_they_had() {
        let all = AllPlaces::new(100);
        let [greedy, modest, strict] = [256, 256, 2].map(|most| Places::new(most, all.clone()));
        let take_all = |places: &Places| (0..300).map_while(|_| places.take().ok()).collect::<Vec<_>>();
        let taken = take_all(&greedy);
        assert_eq!((taken.len(), greedy.take().unwrap_err()), (75, NoPlace::OfAll));
        assert_eq!(take_all(&modest).len(), ENOUGH, "and given back");
        let two = take_all(&strict);
        assert_eq!((two.len(), strict.take().unwrap_err()), (2, NoPlace::Own));
        drop((taken, two));
        assert_eq!(all.free.available_permits(), 100);
    }

    #[test]
    fn there_are_fewer_than_descriptors() {
        let all = AllPlaces::of_this_process().all;
        assert!((LEAST..=MOST).contains(&all), "{all}");
    }
}

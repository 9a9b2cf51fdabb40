//! What each API key uses of the server.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use sandboxer_protocol::client::ErrorCode;
use tokio::time::Instant;

use crate::{manager::CreateError, settings::KeyLimits};

const MINUTE: Duration = Duration::from_secs(60);

/// Counts by the name of the key. Without keys everybody is the same tenant and nothing is counted.
#[derive(Debug)]
pub(crate) struct Tenants {
    limits: KeyLimits,
    used: Mutex<HashMap<String, Used>>,
}

#[derive(Debug, Default)]
struct Used {
    live: usize,
    /// When the sandboxes of the last minute were made; never longer than the limit.
    made: VecDeque<Instant>,
}

/// One sandbox of a key, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    tenants: Arc<Tenants>,
    owner: Option<String>,
}

impl Tenants {
    pub(crate) fn new(limits: KeyLimits) -> Self {
        Self { limits, used: Mutex::default() }
    }

    /// Another sandbox for a key, if it may have one.
    pub(crate) fn admit(self: &Arc<Self>, owner: Option<&str>) -> Result<Place, CreateError> {
        self.reserve(owner, 1)?;
        Ok(self.place(owner))
    }

    /// So many more, or none of them.
    pub(crate) fn admit_many(self: &Arc<Self>, owner: Option<&str>, count: usize) -> Result<Vec<Place>, CreateError> {
        self.reserve(owner, count)?;
        Ok((0..count).map(|_| self.place(owner)).collect())
    }

    /// One that was made before and comes from the volume: it is one more at once, and none that is made.
    pub(crate) fn admit_again(self: &Arc<Self>, owner: Option<&str>) -> Result<Place, CreateError> {
        if let Some(owner) = owner {
            let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
            let used = used.entry(owner.to_owned()).or_default();
            self.room_for(used, 1)?;
            used.live += 1;
        }
        Ok(self.place(owner))
    }

    /// Whether a key could make so many now if it had room for them: what it is refused for otherwise no place that becomes free mends.
    pub(crate) fn may_make(&self, owner: Option<&str>, count: usize) -> Result<(), CreateError> {
        let Some(owner) = owner else { return Ok(()) };
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let used = used.entry(owner.to_owned()).or_default();
        if self.limits.sandboxes.is_some_and(|most| count > most) {
            self.room_for(used, count)?;
        }
        self.rate_for(used, count)
    }

    fn room_for(&self, used: &Used, count: usize) -> Result<(), CreateError> {
        let (live, Some(most)) = (used.live, self.limits.sandboxes) else { return Ok(()) };
        if live.saturating_add(count) <= most {
            return Ok(());
        }
        let message = if live >= most {
            format!("This API key has {most} sandboxes, and that is all it may have at once. End one first.")
        } else {
            format!("This API key has {live} sandboxes and may have {most} at once: {count} more are too many.")
        };
        Err(CreateError::new(ErrorCode::RateLimited, message))
    }

    fn reserve(&self, owner: Option<&str>, count: usize) -> Result<(), CreateError> {
        let Some(owner) = owner else { return Ok(()) };
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let used = used.entry(owner.to_owned()).or_default();
        self.room_for(used, count)?;
        self.rate_for(used, count)?;
        if self.limits.creates_per_minute.is_some() {
            used.made.extend(std::iter::repeat_n(Instant::now(), count));
        }
        used.live += count;
        Ok(())
    }

    fn rate_for(&self, used: &mut Used, count: usize) -> Result<(), CreateError> {
        let Some(most) = self.limits.creates_per_minute else { return Ok(()) };
        let now = Instant::now();
        while used.made.front().is_some_and(|made| now.duration_since(*made) >= MINUTE) {
            used.made.pop_front();
        }
        let made = used.made.len();
        if made.saturating_add(count) <= most {
            return Ok(());
        }
        let message = if made >= most {
            format!("This API key has made {most} sandboxes within a minute, and may not make more. Try again later.")
        } else {
            format!("This API key has made {made} sandboxes within a minute and may make {most}: {count} more are too many now.")
        };
        Err(CreateError::new(ErrorCode::RateLimited, message))
    }

    /// A sandbox of an earlier server process: it counts, whatever the limit is now.
    pub(crate) fn readmit(self: &Arc<Self>, owner: Option<&str>) -> Place {
        if let Some(owner) = owner {
            self.used.lock().unwrap_or_else(PoisonError::into_inner).entry(owner.to_owned()).or_default().live += 1;
        }
        self.place(owner)
    }

    fn place(self: &Arc<Self>, owner: Option<&str>) -> Place {
        Place { tenants: Arc::clone(self), owner: owner.map(str::to_owned) }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(owner) = &self.owner
            && let Some(used) = self.tenants.used.lock().unwrap_or_else(PoisonError::into_inner).get_mut(owner)
        {
            used.live = used.live.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_key_has_its_own_sandboxes_and_its_own_rate() {
        let tenants = Arc::new(Tenants::new(KeyLimits { sandboxes: Some(2), creates_per_minute: Some(3), ..KeyLimits::default() }));
        let first = tenants.admit(Some("a")).unwrap();
        let _second = tenants.admit(Some("a")).unwrap();
        assert_eq!(tenants.admit(Some("a")).unwrap_err().code, ErrorCode::RateLimited);
        let _other = tenants.admit(Some("b")).unwrap();
        drop(first);
        let third = tenants.admit(Some("a")).unwrap();
        drop(third);
        assert!(tenants.admit(Some("a")).is_err(), "three were made within a minute");
        tokio::time::advance(MINUTE).await;
        assert!(tenants.admit(Some("a")).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn many_are_admitted_together_or_not_at_all() {
        let tenants = Arc::new(Tenants::new(KeyLimits { sandboxes: Some(4), creates_per_minute: Some(5), ..KeyLimits::default() }));
        let three = tenants.admit_many(Some("a"), 3).unwrap();
        assert!(tenants.admit_many(Some("a"), 2).is_err(), "four at once");
        let _one = tenants.admit(Some("a")).unwrap();
        drop(three);
        assert!(tenants.admit_many(Some("a"), 2).is_err(), "five a minute, and four were made");
        let _last = tenants.admit_many(Some("a"), 1).unwrap();
        assert!(tenants.admit_many(Some("a"), usize::MAX).is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_comes_back_is_one_more_at_once_and_none_that_was_made() {
        let tenants = Arc::new(Tenants::new(KeyLimits { sandboxes: Some(2), creates_per_minute: Some(1), ..KeyLimits::default() }));
        let made = tenants.admit(Some("a")).unwrap();
        let _back = tenants.admit_again(Some("a")).unwrap();
        assert_eq!(tenants.admit_again(Some("a")).unwrap_err().code, ErrorCode::RateLimited);
        drop(made);
        assert!(tenants.admit_again(Some("a")).is_ok());
    }

    #[test]
    fn without_keys_nothing_is_counted() {
        let tenants = Arc::new(Tenants::new(KeyLimits { sandboxes: Some(1), creates_per_minute: Some(1), ..KeyLimits::default() }));
        let _places: Vec<_> = (0..5).map(|_| tenants.admit(None).unwrap()).collect();
    }
}

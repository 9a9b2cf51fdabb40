//! How often a sandbox is refused something before its answers come slower: each costs this server a look, a line in its log, perhaps a question to a name
//! server, and a program could ask for nothing else.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};

/// What is answered at once before the pace is felt.
const AT_ONCE: u32 = 100;
/// And after how long each one then.
const EVERY: Duration = Duration::from_millis(100);
/// Nobody waits longer than this, so that an answer never looks like none.
const AT_MOST: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct Pace {
    /// When the last one would have come, had they come evenly.
    paid_until: Mutex<Option<Instant>>,
}

impl Pace {
    /// One more. Returns from when on it may be answered.
    pub(super) fn count(&self) -> Instant {
        let now = Instant::now();
        let mut paid = self.paid_until.lock().unwrap_or_else(PoisonError::into_inner);
        let until = (paid.unwrap_or(now).max(now) + EVERY).min(now + AT_ONCE * EVERY + AT_MOST);
        *paid = Some(until);
        answered_from(until)
    }

    /// Waits for what was counted before, and counts nothing.
    pub(super) async fn wait(&self) {
        let paid = *self.paid_until.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(until) = paid.map(answered_from).filter(|until| *until > Instant::now()) {
            sleep_until(until).await;
        }
    }
}

fn answered_from(paid_until: Instant) -> Instant {
    // A clock that has just begun has nothing before it.
    paid_until.checked_sub(AT_ONCE * EVERY).unwrap_or_else(Instant::now)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What timers are off by.
    const SHORT: Duration = Duration::from_millis(10);

    #[tokio::test(start_paused = true)]
    async fn a_few_are_answered_at_once_and_more_one_by_one() {
        let (pace, began) = (Pace::default(), Instant::now());
        for _ in 0..AT_ONCE {
            sleep_until(pace.count()).await;
        }
        assert!(began.elapsed() < SHORT, "{:?}", began.elapsed());
        for _ in 0..50 {
            sleep_until(pace.count()).await;
        }
        assert!((4.9..=5.1).contains(&began.elapsed().as_secs_f64()), "{:?}", began.elapsed());
        pace.wait().await;
        assert!(began.elapsed() < Duration::from_millis(5100), "who is counted for nothing does not wait for itself");
        // A pause makes up for it.
        tokio::time::sleep(AT_ONCE * EVERY).await;
        let again = Instant::now();
        for _ in 0..AT_ONCE {
            sleep_until(pace.count()).await;
        }
        assert!(again.elapsed() < SHORT, "{:?}", again.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_ever_for_those_who_did_not_wait() {
        let pace = Pace::default();
        for _ in 0..100_000 {
            pace.count();
        }
        let began = Instant::now();
        sleep_until(pace.count()).await;
        assert!(began.elapsed() <= AT_MOST + SHORT, "{:?}", began.elapsed());
    }
}

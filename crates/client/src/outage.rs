//! How long to wait before the next attempt, and when to stop trying. No clock of its own: the time is passed in.

use std::time::Duration;

use tokio::time::Instant;

use crate::{Connection, Error};

const FIRST_DELAY: Duration = Duration::from_millis(100);
const LONGEST_DELAY: Duration = Duration::from_secs(5);
/// A connection that held this long was a good one, also if nothing happened on it.
const STABLE_AFTER: Duration = Duration::from_secs(1);

/// Why an attempt failed, or a connection ended, without that being final.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Setback {
    /// The network, or the server that restarts.
    Cut(String),
    /// The server takes somebody for the sandbox's client; perhaps this one, before it was cut off.
    InUse(String),
}

/// The time in which the sandbox is out of reach.
#[derive(Debug)]
pub(crate) struct Outage {
    give_up_after: Duration,
    /// What holds instead until the sandbox was there for the first time.
    open_within: Option<Duration>,
    in_use_for: Duration,
    restore_timeout: Duration,
    /// When it began. None while all is well.
    since: Option<Instant>,
    in_use_since: Option<Instant>,
    /// Since when the sandbox has been waited for, of an outage in which a server said that it restores it.
    restoring_since: Option<Instant>,
    attempts: u32,
    ready_at: Option<Instant>,
}

impl Outage {
    /// Nothing is connected at first, so it begins as one.
    pub(crate) fn new(connection: &Connection, now: Instant) -> Self {
        Self {
            give_up_after: connection.give_up_after,
            open_within: Some(connection.open_within),
            in_use_for: connection.in_use_for,
            restore_timeout: connection.restore_timeout,
            since: Some(now),
            in_use_since: None,
            restoring_since: None,
            attempts: 0,
            ready_at: None,
        }
    }

    /// The sandbox is there and this client is attached.
    pub(crate) fn ready(&mut self, now: Instant) {
        self.ready_at = Some(now);
        self.open_within = None;
        self.restoring_since = None;
    }

    /// The connection was lost while the server was restoring the sandbox. Up to then it was there, so the time without it begins
    /// now; only all of them together have a limit of their own.
    pub(crate) fn lost_while_restoring(&mut self, now: Instant) {
        let began = self.since.unwrap_or(now);
        let began = *self.restoring_since.get_or_insert(began);
        if now.saturating_duration_since(began) < self.restore_timeout {
            self.since = Some(now);
        }
    }

    /// Something came of the connection: it counts as a recovery.
    pub(crate) fn progress(&mut self) {
        if self.ready_at.is_some() {
            self.since = None;
            self.in_use_since = None;
            self.attempts = 0;
        }
    }

    /// Notes a setback. Returns how long to wait before the next attempt; `random` is between 0 and 1.
    ///
    /// # Errors
    /// It has lasted too long.
    pub(crate) fn setback(&mut self, setback: &Setback, now: Instant, random: f64) -> Result<Duration, Error> {
        if self.ready_at.is_some_and(|at| now.saturating_duration_since(at) >= STABLE_AFTER) {
            self.progress();
        }
        self.ready_at = None;
        let since = *self.since.get_or_insert(now);
        match setback {
            Setback::InUse(message) => {
                let since = *self.in_use_since.get_or_insert(now);
                if now.saturating_duration_since(since) >= self.in_use_for {
                    return Err(Error::InUse { message: message.clone() });
                }
            }
            Setback::Cut(_) => self.in_use_since = None,
        }
        // The first cut is most likely a single one.
        let delay = match self.attempts.checked_sub(1) {
            None => Duration::ZERO,
            Some(doublings) => {
                let longest = FIRST_DELAY.saturating_mul(1 << doublings.min(10)).min(LONGEST_DELAY);
                longest.mul_f64(0.5 + random.clamp(0.0, 1.0) / 2.0)
            }
        };
        self.attempts += 1;
        if now.saturating_duration_since(since) + delay >= self.open_within.unwrap_or(self.give_up_after) {
            let (Setback::Cut(message) | Setback::InUse(message)) = setback;
            let seconds = now.saturating_duration_since(since).as_secs_f64();
            return Err(Error::unavailable(format!("Gave up after {seconds:.1} s and {} attempts: {message}", self.attempts)));
        }
        Ok(delay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outage(give_up: u64) -> (Outage, Instant) {
        let now = Instant::now();
        let mut outage = Outage::new(&Connection::default().give_up_after(Duration::from_secs(give_up)), now);
        outage.ready(now);
        (outage, now)
    }

    fn cut() -> Setback {
        Setback::Cut("reset".into())
    }

    #[test]
    fn the_first_attempt_after_a_cut_comes_at_once_and_later_ones_ever_later() {
        let (mut outage, now) = outage(3600);
        let delays: Vec<_> = (0..9).map(|_| outage.setback(&cut(), now, 1.0).unwrap().as_millis()).collect();
        assert_eq!(delays, [0, 100, 200, 400, 800, 1600, 3200, 5000, 5000]);
    }

    #[test]
    fn a_delay_is_spread_over_its_upper_half() {
        let (mut outage, now) = outage(3600);
        outage.setback(&cut(), now, 0.0).unwrap();
        assert_eq!(outage.setback(&cut(), now, 0.0).unwrap(), FIRST_DELAY / 2);
    }

    #[test]
    fn it_ends_after_its_limit_with_the_last_reason() {
        let (mut outage, now) = outage(10);
        outage.setback(&cut(), now, 0.5).unwrap();
        let error = outage.setback(&cut(), now + Duration::from_secs(11), 0.5).unwrap_err();
        assert!(matches!(&error, Error::Unavailable { message } if message.contains("reset")), "{error}");
    }

    #[test]
    fn a_recovery_starts_the_count_anew_and_a_moment_of_connection_does_not() {
        let (mut outage, now) = outage(10);
        let late = now + Duration::from_secs(9);
        outage.setback(&cut(), now, 1.0).unwrap();
        outage.ready(late);
        // Cut at once, with nothing come of it: still the same outage.
        assert_eq!(outage.setback(&cut(), late, 1.0), Ok(FIRST_DELAY));
        outage.ready(late);
        outage.progress();
        assert_eq!(outage.setback(&cut(), late, 1.0), Ok(Duration::ZERO));
        // Held for a while: as good as progress.
        outage.ready(late);
        assert_eq!(outage.setback(&cut(), late + Duration::from_secs(9), 1.0), Ok(Duration::ZERO));
    }

    #[test]
    fn a_server_that_was_never_there_is_waited_for_only_briefly() {
        let now = Instant::now();
        let mut outage = Outage::new(&Connection::default(), now);
        assert!(outage.setback(&cut(), now, 0.5).is_ok());
        assert!(outage.setback(&cut(), now + Duration::from_secs(11), 0.5).is_err());
    }

    #[test]
    fn a_server_that_restores_is_there_and_is_waited_for_with_another_patience() {
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let settings = Connection::default().give_up_after(Duration::from_secs(10)).restore_timeout(Duration::from_secs(100));
        let mut outage = Outage::new(&settings, now);
        for seconds in [30, 60, 90] {
            outage.lost_while_restoring(at(seconds));
            assert!(outage.setback(&cut(), at(seconds), 0.5).is_ok());
        }
        assert!(outage.setback(&cut(), at(91), 0.5).is_ok());
        outage.lost_while_restoring(at(110));
        assert!(outage.setback(&cut(), at(110), 0.5).is_err());
    }

    #[test]
    fn in_use_is_borne_for_a_while_only() {
        let (mut outage, now) = outage(100);
        let in_use = Setback::InUse("somebody".into());
        assert!(outage.setback(&in_use, now, 0.5).is_ok());
        assert!(outage.setback(&in_use, now + Duration::from_secs(9), 0.5).is_ok());
        assert_eq!(outage.setback(&in_use, now + Duration::from_secs(10), 0.5), Err(Error::InUse { message: "somebody".into() }));
    }
}

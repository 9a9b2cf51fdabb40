//! Keeps an init for the guest running: the guest may kill it, as often as it likes.

use std::{
    io,
    time::{Duration, Instant},
};

use crate::{
    setup::{self, InitProcess},
    sys,
};

/// An init that lived longer than this was a good one: the next starts at once.
const GOOD_LIFE: Duration = Duration::from_secs(1);
const FIRST_DELAY: Duration = Duration::from_millis(20);
const MAX_DELAY: Duration = Duration::from_secs(2);
/// So many in a row that never became ready: whoever waits is told that it does not work.
const HOPELESS: u32 = 5;

enum State {
    Up {
        process: InitProcess,
        ready: bool,
        since: Instant,
    },
    Down {
        retry: Instant,
    },
    /// None is wanted.
    Held,
}

pub(crate) struct Supervisor {
    state: State,
    short_lives: u32,
    never_ready: u32,
    pub(crate) last_error: Option<String>,
    /// The memory limit, in bytes.
    memory: Option<u64>,
}

impl Supervisor {
    pub(crate) fn new(now: Instant, memory: Option<u64>) -> Self {
        Self { state: State::Down { retry: now }, short_lives: 0, never_ready: 0, last_error: None, memory }
    }

    #[cfg(test)]
    pub(crate) fn of(process: InitProcess) -> Self {
        Self { state: State::Up { process, ready: true, since: Instant::now() }, ..Self::new(Instant::now(), None) }
    }

    /// Starts an init if one is due. Returns it if it was.
    pub(crate) fn start_if_due(&mut self, now: Instant) -> Option<&InitProcess> {
        let State::Down { retry } = self.state else { return None };
        if now < retry {
            return None;
        }
        match setup::start_init(self.memory) {
            Ok(process) => {
                self.state = State::Up { process, ready: false, since: now };
                self.process()
            }
            Err(error) => {
                self.fell(now, Duration::ZERO, false, Some(&error));
                None
            }
        }
    }

    pub(crate) fn process(&self) -> Option<&InitProcess> {
        match &self.state {
            State::Up { process, .. } => Some(process),
            State::Down { .. } | State::Held => None,
        }
    }

    /// Ends the init, if there is one; none is started until [`Self::go_on`].
    pub(crate) fn hold(&mut self) {
        if let State::Up { process, .. } = std::mem::replace(&mut self.state, State::Held) {
            sys::end(process.pid);
        }
    }

    pub(crate) fn go_on(&mut self, now: Instant) {
        if matches!(self.state, State::Held) {
            self.state = State::Down { retry: now };
        }
    }

    /// The init, if it takes requests.
    pub(crate) fn ready(&self) -> Option<&InitProcess> {
        match &self.state {
            State::Up { process, ready: true, .. } => Some(process),
            _ => None,
        }
    }

    pub(crate) fn became_ready(&mut self) {
        if let State::Up { ready, .. } = &mut self.state {
            *ready = true;
            self.never_ready = 0;
        }
    }

    /// The init has ended.
    pub(crate) fn ended(&mut self, now: Instant) {
        if let State::Up { ready, since, .. } = self.state {
            self.fell(now, now.saturating_duration_since(since), ready, None);
        }
    }

    fn fell(&mut self, now: Instant, lived: Duration, ready: bool, error: Option<&io::Error>) {
        self.short_lives = if lived >= GOOD_LIFE { 0 } else { self.short_lives.saturating_add(1) };
        self.never_ready = if ready { 0 } else { self.never_ready.saturating_add(1) };
        self.last_error = error.map(ToString::to_string);
        let delay = match self.short_lives {
            0 | 1 => Duration::ZERO,
            many => FIRST_DELAY.saturating_mul(1 << many.min(10)).min(MAX_DELAY),
        };
        self.state = State::Down { retry: now + delay };
    }

    /// Starting has failed so often that waiting for it makes no sense.
    pub(crate) fn is_hopeless(&self) -> bool {
        self.never_ready >= HOPELESS
    }

    /// When to try again.
    pub(crate) fn retry(&self) -> Option<Instant> {
        match self.state {
            State::Down { retry } => Some(retry),
            State::Up { .. } | State::Held => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_init_that_dies_young_again_and_again_is_started_less_and_less_often() {
        let now = Instant::now();
        let mut supervisor = Supervisor::new(now, None);
        let mut delays = Vec::new();
        for _ in 0..12 {
            supervisor.fell(now, Duration::from_millis(10), true, None);
            delays.push(supervisor.retry().unwrap().saturating_duration_since(now));
        }
        assert_eq!(delays[0], Duration::ZERO);
        assert!(delays.is_sorted());
        assert_eq!(delays[11], MAX_DELAY);
        assert!(!supervisor.is_hopeless(), "it did become ready each time");
        supervisor.fell(now, Duration::from_secs(5), true, None);
        assert_eq!(supervisor.retry(), Some(now));
    }

    #[test]
    fn one_that_never_becomes_ready_is_given_up() {
        let now = Instant::now();
        let mut supervisor = Supervisor::new(now, None);
        for _ in 0..HOPELESS {
            assert!(!supervisor.is_hopeless());
            supervisor.fell(now, Duration::ZERO, false, Some(&io::Error::other("no")));
        }
        assert!(supervisor.is_hopeless());
    }
}

//! Whether the other side is still there. No clock of its own: the time is passed in.

use std::time::Duration;

use tokio::time::Instant;

use crate::Connection;

/// Whether the other side is still there.
#[derive(Debug)]
pub(crate) struct Watch {
    ping_after: Duration,
    dead_after: Duration,
    heard: Instant,
    pinged: Option<Instant>,
    reading: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Silence {
    Bearable,
    Ping,
    Dead,
}

impl Watch {
    pub(crate) fn new(now: Instant, settings: &Connection) -> Self {
        Self { ping_after: settings.ping_after, dead_after: settings.dead_after, heard: now, pinged: None, reading: true }
    }

    pub(crate) fn heard(&mut self, now: Instant) {
        self.heard = now;
        self.pinged = None;
    }

    pub(crate) fn pinged(&mut self, now: Instant) {
        self.pinged = Some(now);
    }

    /// Who does not listen can't complain about silence.
    pub(crate) fn look(&mut self, now: Instant, reading: bool) -> Silence {
        if !reading || !self.reading {
            self.heard(now);
        }
        self.reading = reading;
        match self.pinged {
            Some(at) if now >= at + self.dead_after => Silence::Dead,
            None if now >= self.heard + self.ping_after => Silence::Ping,
            _ => Silence::Bearable,
        }
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.pinged.map_or(self.heard + self.ping_after, |at| at + self.dead_after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn watch() -> (Watch, Instant) {
        let now = Instant::now();
        (Watch::new(now, &Connection::default().pings(SECOND, 2 * SECOND)), now)
    }

    #[test]
    fn silence_is_asked_about_and_then_taken_for_death() {
        let (mut watch, now) = watch();
        assert_eq!(watch.look(now, true), Silence::Bearable);
        assert_eq!(watch.look(watch.deadline(), true), Silence::Ping);
        watch.pinged(now + SECOND);
        assert_eq!(watch.look(now + 2 * SECOND, true), Silence::Bearable);
        assert_eq!(watch.look(watch.deadline(), true), Silence::Dead);
        watch.heard(now + 3 * SECOND);
        assert_eq!(watch.look(now + 3 * SECOND, true), Silence::Bearable);
    }

    #[test]
    fn who_does_not_listen_hears_no_silence() {
        let (mut watch, now) = watch();
        watch.pinged(now);
        assert_eq!(watch.look(now + 100 * SECOND, false), Silence::Bearable);
        assert_eq!(watch.look(now + 200 * SECOND, true), Silence::Bearable);
        assert_eq!(watch.look(now + 201 * SECOND, true), Silence::Ping);
    }
}

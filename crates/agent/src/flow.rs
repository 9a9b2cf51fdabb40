//! When to let output gather before it is read.
//!
//! A program that writes much by small writes wakes the agent for each of them, and gVisor makes that dear: both sides spend their time
//! on waking. Of such a stream the agent reads what has gathered in a while. Whoever writes little is never made to wait: only a stream
//! that has been faster than [`SLOW_BYTES_PER_MS`] for a time is one.

use std::time::{Duration, Instant};

/// How long output gathers: less than what the pipe of a fast program takes to fill.
pub const GATHER: Duration = Duration::from_millis(1);
/// What a stream may bring without being one of those.
const SLOW_BYTES_PER_MS: u64 = 16 * 1024;
/// What it must have brought beyond that.
const TORRENT_BYTES: u64 = 256 * 1024;
/// What is counted at most, so that it is over soon after it is over.
const MAX_LEVEL: u64 = 2 * TORRENT_BYTES;

/// How much has come lately.
#[derive(Debug)]
pub struct Flow {
    level: u64,
    at: Instant,
    emptied: bool,
}

impl Flow {
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { level: 0, at: now, emptied: false }
    }

    /// `count` bytes were read; `emptied`: there were no more.
    pub fn note(&mut self, count: usize, emptied: bool, now: Instant) {
        let gone_by = u64::try_from(now.saturating_duration_since(self.at).as_micros()).unwrap_or(u64::MAX);
        self.level = self.level.saturating_sub(gone_by.saturating_mul(SLOW_BYTES_PER_MS) / 1000);
        self.level = self.level.saturating_add(count as u64).min(MAX_LEVEL);
        self.at = now;
        self.emptied = emptied;
    }

    /// Whether to let it gather now. Asked once for each time that it was read empty.
    pub fn should_gather(&mut self) -> bool {
        std::mem::take(&mut self.emptied) && self.level >= TORRENT_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(flow: &mut Flow, start: Instant, count: usize, every: Duration, times: u32) -> u32 {
        let mut gathered = 0;
        for turn in 1..=times {
            flow.note(count, true, start + every * turn);
            gathered += u32::from(flow.should_gather());
        }
        gathered
    }

    #[test]
    fn lines_and_slow_streams_are_never_made_to_wait() {
        let start = Instant::now();
        assert_eq!(feed(&mut Flow::new(start), start, 80, Duration::from_micros(20), 2_000), 0, "lines");
        assert_eq!(feed(&mut Flow::new(start), start, 8 * 1024, Duration::from_millis(1), 10_000), 0, "8 MB/s");
        assert_eq!(feed(&mut Flow::new(start), start, 200 * 1024, Duration::from_secs(1), 100), 0, "now and then");
    }

    #[test]
    fn a_torrent_of_small_writes_gathers_soon_and_stops_soon() {
        let start = Instant::now();
        let mut flow = Flow::new(start);
        assert!(feed(&mut flow, start, 4096, Duration::from_micros(40), 1_000) > 900);
        flow.note(4096, true, start + Duration::from_millis(40 + 20));
        assert!(!flow.should_gather());
    }

    #[test]
    fn what_was_not_read_empty_is_read_on() {
        let start = Instant::now();
        let mut flow = Flow::new(start);
        flow.note(1 << 20, false, start);
        assert!(!flow.should_gather());
        flow.note(1 << 10, true, start);
        assert!(flow.should_gather());
        assert!(!flow.should_gather());
    }
}

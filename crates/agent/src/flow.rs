//! When to let output gather before it is read.
//!
//! A program that writes much by small writes wakes the agent for each of them, and gVisor makes that dear: both sides spend their time
//! on waking. Of such a stream the agent reads what has gathered in a while; the sooner the program's pipe is full, the shorter that
//! while. Only a stream that has been faster than [`SLOW_BYTES_PER_MS`] for a time is one: a program that writes little is never made to wait. Beside one
//! that writes much, what the agent would hear of meanwhile waits up to [`MAX_GATHER`]; work that it knows of does not.

use std::time::{Duration, Instant};

/// How long output gathers at most: a program that writes little at once has filled about half of its pipe by then.
pub const MAX_GATHER: Duration = Duration::from_millis(1);
/// How long at least.
pub const MIN_GATHER: Duration = Duration::from_micros(125);
/// What a stream may bring without being one of those.
const SLOW_BYTES_PER_MS: u64 = 16 * 1024;
/// What it must have brought beyond that.
const TORRENT_BYTES: u64 = 256 * 1024;
/// What is counted at most, so that it is over soon after it is over.
const MAX_LEVEL: u64 = 2 * TORRENT_BYTES;

/// How much of one stream has come lately.
#[derive(Debug)]
pub struct Flow {
    level: u64,
    at: Instant,
    emptied: bool,
    /// What the program's pipe holds, if it is as large as was asked for.
    pipe_bytes: u64,
    gather: Duration,
    /// What was read since it gathered, until it was read empty.
    gathered: Option<u64>,
}

impl Flow {
    #[must_use]
    pub fn new(now: Instant, pipe_bytes: u64) -> Self {
        Self { level: 0, at: now, emptied: false, pipe_bytes, gather: MAX_GATHER, gathered: None }
    }

    /// `count` bytes were read; `emptied`: there were no more.
    pub fn note(&mut self, count: usize, emptied: bool, now: Instant) {
        let gone_by = u64::try_from(now.saturating_duration_since(self.at).as_micros()).unwrap_or(u64::MAX);
        self.level = self.level.saturating_sub(gone_by.saturating_mul(SLOW_BYTES_PER_MS) / 1000);
        self.level = self.level.saturating_add(count as u64).min(MAX_LEVEL);
        self.at = now;
        self.emptied = emptied;
        self.gathered = self.gathered.map(|gathered| gathered.saturating_add(count as u64));
        if let (true, Some(gathered)) = (emptied, self.gathered) {
            self.gather = self.fitting(gathered);
            self.gathered = None;
        }
    }

    /// For how long to let it gather now, if at all. Asked once for each time that it was read empty.
    pub fn should_gather(&mut self) -> Option<Duration> {
        let gather = std::mem::take(&mut self.emptied) && self.level >= TORRENT_BYTES;
        gather.then(|| {
            self.gathered = Some(0);
            self.gather
        })
    }

    /// A program whose pipe was full has waited for the agent; of one that had hardly begun there is more to come.
    fn fitting(&self, gathered: u64) -> Duration {
        if gathered >= self.pipe_bytes / 16 * 15 {
            (self.gather / 2).max(MIN_GATHER)
        } else if gathered < self.pipe_bytes / 8 * 3 {
            (self.gather * 2).min(MAX_GATHER)
        } else {
            self.gather
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIPE: u64 = 1024 * 1024;

    fn feed(flow: &mut Flow, start: Instant, count: usize, every: Duration, times: u32) -> u32 {
        let mut gathered = 0;
        for turn in 1..=times {
            flow.note(count, true, start + every * turn);
            gathered += u32::from(flow.should_gather().is_some());
        }
        gathered
    }

    #[test]
    fn lines_and_slow_streams_are_never_made_to_wait() {
        let start = Instant::now();
        assert_eq!(feed(&mut Flow::new(start, PIPE), start, 80, Duration::from_micros(20), 2_000), 0, "lines");
        assert_eq!(feed(&mut Flow::new(start, PIPE), start, 8 * 1024, Duration::from_millis(1), 10_000), 0, "8 MB/s");
        assert_eq!(feed(&mut Flow::new(start, PIPE), start, 200 * 1024, Duration::from_secs(1), 100), 0, "now and then");
    }

    #[test]
    fn a_torrent_of_small_writes_gathers_soon_and_stops_soon() {
        let start = Instant::now();
        let mut flow = Flow::new(start, PIPE);
        assert!(feed(&mut flow, start, 4096, Duration::from_micros(40), 1_000) > 900);
        flow.note(4096, true, start + Duration::from_millis(40 + 20));
        assert_eq!(flow.should_gather(), None);
    }

    #[test]
    fn what_was_not_read_empty_is_read_on() {
        let start = Instant::now();
        let mut flow = Flow::new(start, PIPE);
        flow.note(1 << 20, false, start);
        assert_eq!(flow.should_gather(), None);
        flow.note(1 << 10, true, start);
        assert_eq!(flow.should_gather(), Some(MAX_GATHER));
        assert_eq!(flow.should_gather(), None);
    }

    #[test]
    fn a_small_pipe_is_full_with_less() {
        let start = Instant::now();
        let small = 64 * 1024;
        let mut flow = Flow::new(start, small);
        let small = usize::try_from(small).unwrap();
        assert!(feed(&mut flow, start, small, Duration::ZERO, 8) > 0, "a torrent");
        assert_eq!(after(&mut flow, start, &[small / 16 * 15]), MIN_GATHER);
        assert_eq!(after(&mut flow, start, &[small / 16 * 15 - 1]), MIN_GATHER, "not full");
        assert_eq!(after(&mut flow, start, &[small / 8 * 3]), MIN_GATHER);
        assert_eq!(after(&mut flow, start, &[small / 8 * 3 - 1]), MIN_GATHER * 2);
        assert_eq!(after(&mut flow, start, &[0]), MIN_GATHER * 4, "nothing came at all");
    }

    /// What the next gathering takes, once the last one brought so much.
    fn after(flow: &mut Flow, start: Instant, reads: &[usize]) -> Duration {
        for (at, count) in reads.iter().enumerate() {
            flow.note(*count, at + 1 == reads.len(), start);
        }
        flow.should_gather().unwrap()
    }

    #[test]
    fn who_fills_its_pipe_sooner_is_read_sooner() {
        let start = Instant::now();
        let mut flow = Flow::new(start, PIPE);
        let pipe = usize::try_from(PIPE).unwrap();
        assert_eq!(after(&mut flow, start, &[pipe]), MAX_GATHER, "nothing has gathered yet");
        assert_eq!(after(&mut flow, start, &[pipe]), MAX_GATHER / 2);
        assert_eq!(after(&mut flow, start, &[pipe / 2, pipe / 2]), MAX_GATHER / 4, "in two reads");
        assert_eq!(after(&mut flow, start, &[pipe]), MIN_GATHER);
        assert_eq!(after(&mut flow, start, &[pipe]), MIN_GATHER, "never less");
        assert_eq!(after(&mut flow, start, &[pipe / 2]), MIN_GATHER, "about right");
        assert_eq!(after(&mut flow, start, &[pipe / 8]), MIN_GATHER * 2, "too soon");
        for _ in 0..3 {
            after(&mut flow, start, &[pipe / 8]);
        }
        assert_eq!(after(&mut flow, start, &[pipe / 8]), MAX_GATHER, "never more");
    }
}

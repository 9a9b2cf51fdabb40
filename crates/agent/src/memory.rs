//! Watching the sandbox's use of memory.
//!
//! gVisor accepts a memory limit inside the sandbox and ignores it, and the host's limit kills the sandbox as a whole. So the
//! agent looks itself, and ends the largest program of the user before it comes to that.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    time::{Duration, Instant},
};

use crate::{cgroup::reread, sys};

/// Of the limit; above it the largest process goes.
const KILL_AT_PERCENT: u64 = 95;
/// Those that wait go before that, so that their memory is back by then.
const SPARES_GO_AT_PERCENT: u64 = 80;
/// What may be borne of it meanwhile: a part of what the host allows beyond the limit.
const MOST_RETURNED: u64 = 64 * 1024 * 1024;
/// For so long at most, however slowly they end.
const RETURNED_WITHIN: Duration = Duration::from_secs(5);
/// How fast a program is expected to use memory up at most; sets how often we look.
const BYTES_PER_MILLISECOND: u64 = 4 * 1024 * 1024;
const OFTEN: Duration = Duration::from_millis(5);
const SELDOM: Duration = Duration::from_millis(100);
/// The first look at a program at the latest: most of them are over by then.
const FIRST: Duration = Duration::from_millis(30);
/// A killed process gets this long to give its memory back before the next one is killed: gVisor frees it a while after the process is gone.
const GRACE: Duration = Duration::from_millis(500);
/// Unless use grows by this part of the limit meanwhile: then it was not the only one.
const GROWTH_PART: u64 = 32;

pub(crate) struct MemoryWatch {
    limit: u64,
    meminfo: File,
    text: String,
    next: Option<Instant>,
    /// What was free when it was last looked, if nobody can have used it since.
    room: Option<u64>,
    /// When the last one was killed, and what was in use then.
    killed: Option<(Instant, u64)>,
    returning: Option<Returning>,
    /// The file that programs see as `/proc/meminfo`.
    shown: Option<File>,
}

/// The memory of those that waited and were ended. As long as it may be on its way back, it is not the user's.
struct Returning {
    bytes: u64,
    since: Instant,
    /// Those that have not ended yet.
    left: Vec<i32>,
    /// When none was left.
    gone: Option<Instant>,
}

/// What has to go, or has gone.
#[derive(Debug)]
pub(crate) enum Pressure {
    /// Those that wait for executions; nobody misses them.
    Spares,
    Killed(Victim),
}

/// A process that was killed.
#[derive(Debug)]
pub(crate) struct Victim {
    pub(crate) pid: i32,
    pub(crate) command: String,
    pub(crate) resident_bytes: u64,
}

impl MemoryWatch {
    pub(crate) fn new(limit: u64) -> Option<Self> {
        Some(Self {
            limit,
            meminfo: File::open("/proc/meminfo").ok()?,
            text: String::new(),
            next: None,
            room: None,
            killed: None,
            returning: None,
            shown: None,
        })
    }

    /// Programs see the use of memory in this file from now on.
    pub(crate) fn show_in(&mut self, file: Option<File>) {
        self.shown = file;
    }

    /// User processes may exist from now on.
    pub(crate) fn start(&mut self, now: Instant) {
        let first = self.room.take().map_or(OFTEN, pause).min(FIRST);
        self.next.get_or_insert(now + first);
    }

    /// Something else than a program uses memory.
    pub(crate) fn unsure(&mut self) {
        self.room = None;
    }

    /// When to look again; none while nothing of the user's runs.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.next
    }

    /// Whether it is time to look.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.next.is_some_and(|next| now >= next)
    }

    /// Whether a good part of the limit is unused.
    pub(crate) fn has_room(&mut self) -> bool {
        let used = self.used();
        self.room = used.filter(|_| self.next.is_none()).map(|used| (self.limit / 100 * KILL_AT_PERCENT).saturating_sub(used));
        used.is_some_and(|used| used < self.limit / 4 * 3)
    }

    /// Looks, if it is time to. Neither `init` nor the `spares` are the user's.
    pub(crate) fn tick(&mut self, now: Instant, init: Option<i32>, spares: &[i32]) -> Option<Pressure> {
        if !self.is_due(now) {
            return None;
        }
        let Some(used) = self.used() else {
            self.next = Some(now + SELDOM);
            return None;
        };
        if !spares.is_empty() && used >= self.limit / 100 * SPARES_GO_AT_PERCENT {
            self.returning = Some(Returning::new(spares, now));
            self.next = Some(now + OFTEN);
            return Some(Pressure::Spares);
        }
        self.returning = self.returning.take().and_then(|returning| returning.after(now, resident_bytes));
        let (returning, ending) = self.returning.as_ref().map_or((0, &[][..]), |returning| (returning.bytes, &returning.left[..]));
        let spared: Vec<i32> = init.into_iter().chain(spares.iter().copied()).chain(ending.iter().copied()).collect();
        let threshold = self.limit / 100 * KILL_AT_PERCENT + returning;
        let room = threshold.saturating_sub(used);
        if room > 0 {
            self.killed = None;
            let wait = pause(room);
            self.room = Some(room);
            self.next = if wait == SELDOM && user_processes(&spared).next().is_none() { None } else { Some(now + wait) };
            return None;
        }
        self.next = Some(now + OFTEN);
        if let Some((since, used_then)) = self.killed
            && now < since + GRACE
            && used < used_then + self.limit / GROWTH_PART
        {
            return None;
        }
        let victim = user_processes(&spared).filter_map(|pid| Some((resident_bytes(pid)?, pid))).max();
        let Some((resident_bytes, pid)) = victim else {
            // It is all in files.
            self.next = None;
            return None;
        };
        let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned();
        sys::kill(pid, libc::SIGKILL).ok()?;
        self.killed = Some((now, used));
        Some(Pressure::Killed(Victim { pid, command, resident_bytes }))
    }

    fn used(&mut self) -> Option<u64> {
        reread(&mut self.meminfo, &mut self.text).ok()?;
        let value = |name: &str| -> Option<u64> {
            let line = self.text.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        let used = value("MemTotal:")?.saturating_sub(value("MemFree:")?) * 1024;
        self.show(used);
        Some(used)
    }

    /// Tells programs how much of their limit is used.
    fn show(&self, used: u64) {
        let Some(file) = &self.shown else { return };
        let text = shown(&self.text, self.limit, used);
        // The guest may have filled the file system: it then sees older numbers.
        let _ = file.write_all_at(text.as_bytes(), 0).and_then(|()| file.set_len(text.len() as u64));
    }
}

/// The content of `/proc/meminfo` as it would be on a machine with this much memory.
pub(crate) fn shown(meminfo: &str, limit: u64, used: u64) -> String {
    let (total, free) = (limit / 1024, limit.saturating_sub(used) / 1024);
    let mut text = String::with_capacity(meminfo.len());
    for line in meminfo.lines() {
        let kib = match line.split(':').next() {
            Some("MemTotal") => Some(total),
            Some("MemFree" | "MemAvailable") => Some(free),
            _ => None,
        };
        match (kib, line.split_once(':')) {
            (Some(kib), Some((name, _))) => text.push_str(&format!("{:<16}{kib:>8} kB", format!("{name}:"))),
            _ => text.push_str(line),
        }
        text.push('\n');
    }
    text
}

/// How long it takes at least to use up so much.
fn pause(room: u64) -> Duration {
    Duration::from_millis(room / BYTES_PER_MILLISECOND).clamp(OFTEN, SELDOM)
}

impl Returning {
    fn new(spares: &[i32], now: Instant) -> Self {
        let bytes: u64 = spares.iter().filter_map(|pid| resident_bytes(*pid)).sum();
        Self { bytes: bytes.min(MOST_RETURNED), since: now, left: spares.to_vec(), gone: None }
    }

    /// What is left of it now. None: all of it must be back.
    fn after(mut self, now: Instant, resident_bytes: impl Fn(i32) -> Option<u64>) -> Option<Self> {
        self.left.retain(|pid| resident_bytes(*pid).is_some_and(|bytes| bytes > 0));
        if self.left.is_empty() {
            self.gone.get_or_insert(now);
        }
        let back = self.gone.is_some_and(|gone| now >= gone + GRACE) || now >= self.since + RETURNED_WITHIN;
        (!back).then_some(self)
    }
}

fn user_processes(spared: &[i32]) -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok()).filter(move |pid| *pid != 1 && !spared.contains(pid))
}

fn resident_bytes(pid: i32) -> Option<u64> {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    Some(statm.split(' ').nth(1)?.parse::<u64>().ok()? * 4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shown_memory_is_the_limit_and_the_rest_of_it() {
        let theirs = "MemTotal:       24684092 kB\nMemFree:        24672700 kB\nMemAvailable:   24672700 kB\nCached:            9728 kB\n";
        let ours = "MemTotal:         131072 kB\nMemFree:           98304 kB\nMemAvailable:      98304 kB\nCached:            9728 kB\n";
        assert_eq!(shown(theirs, 128 << 20, 32 << 20), ours);
        assert!(shown(theirs, 1 << 20, 2 << 20).contains("MemFree:               0 kB"));
    }

    #[test]
    fn what_those_that_waited_had_is_not_the_users_until_they_are_gone_and_for_a_moment_after() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let new = || Returning { bytes: 1, since: start, left: vec![7, 8], gone: None };
        let (all, none) = (|_| Some(4096), |_| None);
        let one = |pid| if pid == 7 { Some(4096) } else { Some(0) };
        // Slow to end, but not for ever.
        let slow = new().after(at(4000), all).unwrap();
        assert_eq!(slow.left, [7, 8]);
        assert!(slow.after(at(5000), all).is_none());
        let one_left = new().after(at(600), one).unwrap();
        assert_eq!(one_left.left, [7]);
        let gone = one_left.after(at(700), none).unwrap();
        assert!(gone.left.is_empty());
        let still = gone.after(at(1199), none).unwrap();
        assert!(still.after(at(1200), none).is_none());
    }
}

//! The machine that was measured on, and how quiet it was.

use std::{fs, hint::black_box, time::Instant};

use serde::Serialize;

use crate::samples::Summary;

/// About 10 ms of one core.
const SPINS: u64 = 10_000_000;

/// Times a fixed amount of work that nothing but the machine itself can slow down, in milliseconds.
pub(crate) fn spin() -> f64 {
    let begun = Instant::now();
    let mut value = black_box(1u64);
    for step in 0..SPINS {
        value = (value ^ step).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17);
    }
    black_box(value);
    begun.elapsed().as_secs_f64() * 1000.0
}

#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) cpus: usize,
    pub(crate) kernel: String,
    pub(crate) runsc: String,
    pub(crate) load_before: String,
    pub(crate) load_after: String,
    /// The same work each round, in milliseconds: how far the 99th is from the 50th is how far the machine is from quiet.
    pub(crate) spin_ms: Option<Summary>,
}

pub(crate) fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

pub(crate) fn kernel() -> String {
    line("/proc/sys/kernel/osrelease")
}

/// The load averages of the last 1, 5 and 15 minutes.
pub(crate) fn load() -> String {
    line("/proc/loadavg").split(' ').take(3).collect::<Vec<_>>().join(" ")
}

/// What all processors have done since the start of the machine.
pub(crate) struct Processors {
    busy: f64,
    all: f64,
}

impl Processors {
    pub(crate) fn now() -> Self {
        let times = line("/proc/stat");
        // Of user, nice, system, idle, waiting for a disk, and more, on the first line.
        let times: Vec<f64> = times.lines().next().unwrap_or_default().split_whitespace().skip(1).filter_map(|n| n.parse().ok()).collect();
        let all: f64 = times.iter().take(8).sum();
        Self { busy: all - times.iter().skip(3).take(2).sum::<f64>(), all }
    }

    /// How much of them was used since then, in percent.
    pub(crate) fn used_since(&self) -> f64 {
        let now = Self::now();
        100.0 * (now.busy - self.busy) / (now.all - self.all)
    }
}

fn line(path: &str) -> String {
    fs::read_to_string(path).map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
}

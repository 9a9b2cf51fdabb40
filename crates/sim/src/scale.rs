//! What a bucket has to do for so many sandboxes: an hour of their lives, request by request, with the counts that were measured of one.
//!
//! Each sandbox renews its lease, is saved now and then, and moves now and then; each instance looks at its bell; about one of them collects in a period; once
//! in the hour an instance is replaced and saves all that it has. The requests are counted in seconds, so that one sees the peaks too.

use std::io::{self, Write};

use clap::Args;

use crate::rng::Rng;

/// Requests of a save that changes little, as counted at a store (docs/scale.md): intent and its end, the lists of what is condemned, one pack, a look at each that
/// it relies on, the manifest, `latest`, what is told of the sandbox, the list of names, and the record.
const SAVE: Spent = Spent { writes: 7.0, lists: 2.0, reads: 11.2 };
/// Requests of a handoff besides its save, counted likewise: registered, told by the bell, asked for, acquired, restored.
const HANDOFF: Spent = Spent { writes: 4.2, lists: 0.0, reads: 18.0 };
/// Looks at a bell in a second, counted likewise.
const BELL: f64 = 1.7;
/// Objects that a page of a list has.
const PAGE: f64 = 1000.0;
/// Objects that a sandbox has: its record, `latest`, metadata, its kept manifests, and packs.
const OBJECTS: f64 = 16.0;
/// A collection looks twice.
const SCANS: f64 = 2.0;
/// Records that a scan reads in a second: 16 at once, 30 ms each.
const SCANNED_A_SECOND: f64 = 500.0;
/// Saves in a second of an instance that is told to stop.
const DRAINED_A_SECOND: f64 = 4.0;
const SECONDS: usize = 3600;

/// The sandboxes of the table.
const SIZES: [u64; 11] = [1, 10, 100, 1000, 2000, 5000, 10_000, 20_000, 50_000, 75_000, 100_000];

#[derive(Debug, Clone, Copy, Default)]
struct Spent {
    writes: f64,
    lists: f64,
    reads: f64,
}

/// The prices are those of S3 Standard in us-east-1 on 2026-11-01, in dollars; other stores' are given by options.
#[derive(Debug, Args)]
pub struct Scale {
    /// Seconds of a lease; it is renewed three times in that.
    #[arg(long, default_value_t = 15.0)]
    lease: f64,
    /// Saves of a sandbox in an hour: by its client, when that leaves, by itself.
    #[arg(long, default_value_t = 6.0)]
    saves: f64,
    /// How often a sandbox moves in an hour.
    #[arg(long, default_value_t = 0.5)]
    handoffs: f64,
    /// MiB that a save writes.
    #[arg(long, default_value_t = 4.0)]
    save_mib: f64,
    /// MiB that a sandbox keeps in the bucket.
    #[arg(long, default_value_t = 60.0)]
    kept_mib: f64,
    /// Sandboxes of an instance.
    #[arg(long, default_value_t = 100)]
    each: u64,
    /// Seconds between two collections.
    #[arg(long, default_value_t = 600.0)]
    collect_every: f64,
    /// A thousand writes or lists.
    #[arg(long, default_value_t = 0.005)]
    write_price: f64,
    /// A thousand reads.
    #[arg(long, default_value_t = 0.0004)]
    read_price: f64,
    /// A GiB for a month.
    #[arg(long, default_value_t = 0.023)]
    gib_price: f64,
    /// Writes in a second that a prefix takes at once; S3 divides a busy one after a while.
    #[arg(long, default_value_t = 3500.0)]
    most_writes: f64,
    /// Reads in a second likewise.
    #[arg(long, default_value_t = 5500.0)]
    most_reads: f64,
}

/// One size.
struct Row {
    sandboxes: u64,
    instances: u64,
    writes: Series,
    reads: Series,
    lists: f64,
}

/// Requests in each second.
struct Series(Vec<f64>);

impl Series {
    fn total(&self) -> f64 {
        self.0.iter().sum()
    }

    fn mean(&self) -> f64 {
        self.total() / SECONDS as f64
    }

    fn peak(&self) -> f64 {
        self.0.iter().copied().fold(0.0, f64::max)
    }

    fn add(&mut self, second: f64, count: f64) {
        if let Some(there) = self.0.get_mut(second as usize) {
            *there += count;
        }
    }
}

impl Scale {
    /// # Errors
    /// It can't be printed.
    pub fn run(&self) -> io::Result<()> {
        let mut out = io::stdout().lock();
        writeln!(
            out,
            "lease {} s, {} saves and {} handoffs an hour, {} MiB a save, {} sandboxes an instance",
            self.lease, self.saves, self.handoffs, self.save_mib, self.each
        )?;
        writeln!(
            out,
            "| sandboxes | instances | writes/s | at most | reads/s | at most | MiB/s | requests, $/month | for 1,000 | data, $/month | what is too much |"
        )?;
        writeln!(out, "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|")?;
        for sandboxes in SIZES {
            let row = self.hour(sandboxes);
            let month = 24.0 * 30.4;
            let writes = row.writes.total() + row.lists;
            let dollars = (writes * self.write_price + row.reads.total() * self.read_price) / 1000.0 * month;
            let data = sandboxes as f64 * self.kept_mib / 1024.0 * self.gib_price;
            let mib = sandboxes as f64 * (self.saves + self.handoffs) * self.save_mib / 3600.0;
            writeln!(
                out,
                "| {sandboxes} | {} | {:.1} | {:.0} | {:.1} | {:.0} | {mib:.1} | {dollars:.0} | {:.0} | {data:.0} | {} |",
                row.instances,
                row.writes.mean(),
                row.writes.peak(),
                row.reads.mean(),
                row.reads.peak(),
                dollars / sandboxes as f64 * 1000.0,
                self.too_much(&row)
            )?;
        }
        Ok(())
    }

    fn too_much(&self, row: &Row) -> String {
        let mut over = Vec::new();
        if row.writes.peak() > self.most_writes {
            over.push(format!("writes of one prefix: {:.1} times", row.writes.peak() / self.most_writes));
        }
        if row.reads.peak() > self.most_reads {
            over.push(format!("reads of one prefix: {:.1} times", row.reads.peak() / self.most_reads));
        }
        let scan = row.sandboxes as f64 / SCANNED_A_SECOND * SCANS;
        if scan > self.collect_every {
            over.push(format!("a collection takes {scan:.0} s"));
        }
        over.join(", ")
    }

    /// The same hour every time.
    fn hour(&self, sandboxes: u64) -> Row {
        let mut rng = Rng::new(sandboxes);
        let mut part = || rng.within(0..1 << 32) as f64 / (1_u64 << 32) as f64;
        let instances = sandboxes.div_ceil(self.each);
        let mut row = Row { sandboxes, instances, writes: Series(vec![0.0; SECONDS]), reads: Series(vec![0.0; SECONDS]), lists: 0.0 };
        let renewal = self.lease / 3.0;
        for _ in 0..sandboxes {
            let mut at = part() * renewal;
            while at < SECONDS as f64 {
                row.writes.add(at, 1.0);
                at += renewal;
            }
            for (rate, handoff) in [(self.saves, false), (self.handoffs, true)] {
                let mut at = 0.0;
                loop {
                    // As long between two as it happens.
                    at += -(1.0 - part()).ln() * 3600.0 / rate.max(1e-9);
                    if at >= SECONDS as f64 {
                        break;
                    }
                    row.spend(at, SAVE);
                    if handoff {
                        row.spend(at, HANDOFF);
                    }
                }
            }
        }
        for _ in 0..instances {
            (0..SECONDS).for_each(|second| row.reads.add(second as f64, BELL));
        }
        self.collect(&mut row, part());
        let drained = self.each.min(sandboxes);
        for number in 0..drained {
            row.spend(1800.0 + number as f64 / DRAINED_A_SECOND, SAVE);
        }
        row
    }

    fn collect(&self, row: &mut Row, part: f64) {
        let mut at = part * self.collect_every;
        while at < SECONDS as f64 {
            let records = row.sandboxes as f64 * SCANS;
            row.lists += (records * OBJECTS / PAGE).ceil().max(12.0);
            let (mut left, mut second) = (records, at);
            while left > 0.0 {
                row.reads.add(second, left.min(SCANNED_A_SECOND));
                (left, second) = (left - SCANNED_A_SECOND, second + 1.0);
            }
            at += self.collect_every.max(second - at);
        }
    }
}

impl Row {
    fn spend(&mut self, at: f64, spent: Spent) {
        self.writes.add(at, spent.writes);
        self.reads.add(at, spent.reads);
        self.lists += spent.lists;
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        scale: Scale,
    }

    #[test]
    fn what_a_bucket_does_grows_with_the_sandboxes_and_not_faster() {
        let scale = Only::parse_from(["scale"]).scale;
        let (small, large) = (scale.hour(100), scale.hour(1000));
        let ratio = large.writes.total() / small.writes.total();
        assert!((9.0..11.0).contains(&ratio), "{ratio}");
        // Renewals alone are one in five seconds.
        assert!((20.0..40.0).contains(&small.writes.mean()), "{}", small.writes.mean());
        assert!(small.writes.peak() >= small.writes.mean() && scale.too_much(&small).is_empty());
        let longer = Only::parse_from(["scale", "--lease", "60"]).scale.hour(1000);
        assert!(longer.writes.total() < large.writes.total() / 2.0);
    }
}

//! A process that swaps one record in a directory, again and again, and may die or stop at any step: for the tests of the directory.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{self, Write as _},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use clap::Args;
use sandboxer_protocol::SandboxId;
use sandboxer_store::{
    failpoint::FailPoints,
    record::{Codec, DirectoryRecords, InstanceId, Nonce, Record, RecordStore as _, Stamp, Step, SwapError},
};

use crate::rng::Rng;

#[derive(Debug, Args)]
pub struct Writer {
    #[arg(long)]
    volume: PathBuf,
    #[arg(long)]
    id: SandboxId,
    /// Gets a line for every version that this process was told is its own: sequence, nonce, nonce of the one before.
    #[arg(long)]
    journal: PathBuf,
    /// How many versions to win.
    #[arg(long)]
    wins: usize,
    #[arg(long)]
    seed: u64,
    /// The process aborts at this many of a thousand steps.
    #[arg(long, default_value_t = 0)]
    dies: u64,
    /// The process aborts at the first step of this kind.
    #[arg(long)]
    dies_at: Option<String>,
}

impl Writer {
    /// # Errors
    /// The directory can't be used, or what is there is no record.
    pub fn run(self) -> io::Result<()> {
        let records = DirectoryRecords::open(&self.volume, Codec::default(), FailPoints::default())?.with_hook(self.hook());
        let mut journal = OpenOptions::new().append(true).create(true).open(&self.journal)?;
        let me: InstanceId = format!("writer-{}", self.seed).parse().map_err(io::Error::other)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut wins = 0;
        while wins < self.wins {
            let there = runtime.block_on(records.read(self.id)).map_err(io::Error::other)?;
            let there = there.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
            let next = there.record.awaited(&me, Nonce::random(), Stamp { unix: 0, nonce: Nonce::random() });
            match runtime.block_on(records.swap(self.id, &there, &next)) {
                Ok(won) => {
                    wins += 1;
                    note(&mut journal, &format!("{} {} {}\n", won.record.sequence, won.record.nonce, there.record.nonce))?;
                }
                Err(SwapError::Conflict(_) | SwapError::Unknown(_)) => {}
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(())
    }

    fn hook(&self) -> Arc<dyn Fn(Step) + Send + Sync> {
        let (dies, dies_at, rng) = (self.dies, self.dies_at.clone(), Mutex::new(Rng::new(self.seed)));
        Arc::new(move |step| {
            let (fate, pause) = {
                let mut rng = rng.lock().unwrap_or_else(PoisonError::into_inner);
                (rng.within(0..1000), rng.millis(0..30))
            };
            if fate < dies || dies_at.as_deref() == Some(format!("{step:?}").as_str()) {
                std::process::abort();
            }
            // Long enough for others to make and to clean up many versions.
            if fate > 900 {
                thread::sleep(pause);
            } else if fate > 895 {
                thread::sleep(Duration::from_millis(300));
            }
        })
    }
}

/// In one write, so that a line is there whole or not at all.
fn note(journal: &mut File, line: &str) -> io::Result<()> {
    journal.write_all(line.as_bytes())
}

/// Measures what a read and a swap of one record cost.
#[derive(Debug, Args)]
pub struct Cost {
    #[arg(long)]
    volume: PathBuf,
    #[arg(long, default_value_t = 1000)]
    times: u32,
}

impl Cost {
    /// # Errors
    /// The directory can't be used.
    pub fn run(self) -> io::Result<()> {
        let records = DirectoryRecords::open(&self.volume, Codec::default(), FailPoints::default())?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let me: InstanceId = "cost".parse().map_err(io::Error::other)?;
        let (id, stamp) = (SandboxId::random(), || Stamp { unix: 0, nonce: Nonce::random() });
        let first = Record::first(me.clone(), stamp(), BTreeMap::new());
        let mut there = runtime.block_on(records.create(id, &first)).map_err(io::Error::other)?;
        let begun = Instant::now();
        for _ in 0..self.times {
            let next = there.record.awaited(&me, Nonce::random(), stamp());
            there = runtime.block_on(records.swap(id, &there, &next)).map_err(io::Error::other)?;
        }
        println!("swap {:?}", begun.elapsed() / self.times);
        let begun = Instant::now();
        for _ in 0..self.times {
            runtime.block_on(records.read(id)).map_err(io::Error::other)?;
        }
        println!("read {:?}", begun.elapsed() / self.times);
        Ok(())
    }
}

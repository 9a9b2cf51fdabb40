//! `sandboxer-sim`: runs seeds, and shows one step by step.

use std::{
    process::ExitCode,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

use clap::{Parser, Subcommand};
use sandboxer_sim::{Cost, Counts, Writer, run};
use sandboxer_store::lease::Faults;

/// Runs the lease and the handoff on seeded schedules of faults.
#[derive(Parser)]
struct Arguments {
    /// How many seeds.
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Only this seed, every step of which is printed.
    #[arg(long)]
    replay: Option<u64>,
    #[command(subcommand)]
    instead: Option<Instead>,
}

#[derive(Subcommand)]
enum Instead {
    /// Swaps a record in a directory until it has won often enough, or dies.
    #[command(hide = true)]
    Writer(Writer),
    /// Measures what a read and a swap of a record in a directory cost.
    Cost(Cost),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(instead) = arguments.instead {
        let done = match instead {
            Instead::Writer(writer) => writer.run(),
            Instead::Cost(cost) => cost.run(),
        };
        return match done {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    if let Some(seed) = arguments.replay {
        return report(run(seed, Faults::default(), true).violation.map(|what| (seed, what)));
    }
    let begun = Instant::now();
    let next = AtomicU64::new(arguments.from);
    let end = arguments.from + arguments.seeds;
    let failed = Mutex::new(None);
    let total = Mutex::new(Counts::default());
    let workers = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        return;
                    }
                    let outcome = run(seed, Faults::default(), false);
                    total.lock().unwrap_or_else(PoisonError::into_inner).add(&outcome.counts);
                    if let Some(what) = outcome.violation {
                        failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert((seed, what));
                        next.store(end, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    println!("{} seeds in {:.1} s", arguments.seeds, begun.elapsed().as_secs_f64());
    println!("{:?}", total.into_inner().unwrap_or_else(PoisonError::into_inner));
    report(failed.into_inner().unwrap_or_else(PoisonError::into_inner))
}

fn report(failed: Option<(u64, String)>) -> ExitCode {
    let Some((seed, what)) = failed else { return ExitCode::SUCCESS };
    eprintln!("seed {seed}: {what}\nreplay it with: cargo run --release -p sandboxer-sim -- --replay {seed}");
    ExitCode::FAILURE
}

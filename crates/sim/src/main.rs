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
use sandboxer_sim::{CollectionCounts, Cost, Counts, Kept, Scale, Writer, run_collection_on, run_on};
use sandboxer_store::{collect::CollectFaults, lease::Faults};

/// Runs the lease and the handoff, or collection, on seeded schedules of faults.
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
    /// Collection against writers, instead of lease and handoff.
    #[arg(long)]
    collection: bool,
    /// On a bucket: throttled, replies lost behind writes, lists that are behind, and nobody told of changes.
    #[arg(long)]
    bucket: bool,
    #[command(subcommand)]
    instead: Option<Instead>,
}

#[derive(Subcommand)]
enum Instead {
    /// Swaps a record in a directory until it has won often enough, or dies.
    #[command(hide = true)]
    Writer(Writer),
    /// What a bucket has to do for 1 to 100,000 sandboxes, and what that costs.
    Scale(Scale),
    /// Measures what a read and a swap of a record in a directory cost.
    Cost(Cost),
}

fn main() -> ExitCode {
    let mut arguments = Arguments::parse();
    if let Some(instead) = arguments.instead.take() {
        let done = match instead {
            Instead::Writer(writer) => writer.run(),
            Instead::Cost(cost) => cost.run(),
            Instead::Scale(scale) => scale.run(),
        };
        return match done {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    let kept = if arguments.bucket { Kept::Bucket } else { Kept::Directory };
    let option = |rest: &str| format!("{}{rest}", if arguments.bucket { "--bucket " } else { "" });
    if arguments.collection {
        let run = |seed, trace| {
            let outcome = run_collection_on(kept, seed, CollectFaults::default(), trace);
            (outcome.counts, outcome.violation)
        };
        return all(&arguments, CollectionCounts::default(), run, CollectionCounts::add, &option("--collection "));
    }
    let run = |seed, trace| {
        let outcome = run_on(kept, seed, Faults::default(), trace);
        (outcome.counts, outcome.violation)
    };
    all(&arguments, Counts::default(), run, Counts::add, &option(""))
}

/// Runs all seeds, on all cores, until one fails.
fn all<C: std::fmt::Debug + Send>(
    arguments: &Arguments,
    counts: C,
    run: impl Fn(u64, bool) -> (C, Option<String>) + Sync,
    add: impl Fn(&mut C, &C) + Sync,
    option: &str,
) -> ExitCode {
    if let Some(seed) = arguments.replay {
        return report(run(seed, true).1.map(|what| (seed, what)), option);
    }
    let begun = Instant::now();
    let next = AtomicU64::new(arguments.from);
    let end = arguments.from + arguments.seeds;
    let failed = Mutex::new(None);
    let total = Mutex::new(counts);
    let workers = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        return;
                    }
                    let (counts, violation) = run(seed, false);
                    add(&mut total.lock().unwrap_or_else(PoisonError::into_inner), &counts);
                    if let Some(what) = violation {
                        failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert((seed, what));
                        next.store(end, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    println!("{} seeds in {:.1} s", arguments.seeds, begun.elapsed().as_secs_f64());
    println!("{:?}", total.into_inner().unwrap_or_else(PoisonError::into_inner));
    report(failed.into_inner().unwrap_or_else(PoisonError::into_inner), option)
}

fn report(failed: Option<(u64, String)>, option: &str) -> ExitCode {
    let Some((seed, what)) = failed else { return ExitCode::SUCCESS };
    eprintln!("seed {seed}: {what}\nreplay it with: cargo run --release -p sandboxer-sim -- {option}--replay {seed}");
    ExitCode::FAILURE
}

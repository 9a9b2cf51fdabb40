//! Schedules on which nothing may go wrong.

use sandboxer_sim::{CollectionCounts, Counts, Kept, run, run_collection, run_collection_on, run_on};
use sandboxer_store::{collect::CollectFaults, lease::Faults};

#[test]
fn nothing_goes_wrong_on_five_hundred_schedules() {
    let mut counts = Counts::default();
    for seed in 0..500 {
        let outcome = run(seed, Faults::default(), false);
        assert_eq!(outcome.violation, None, "replay it with: cargo run --release -p sandboxer-sim -- --replay {seed}");
        counts.add(&outcome.counts);
    }
    // What never happens is not tested.
    let rare = [counts.taken_over, counts.lost, counts.frozen, counts.in_use, counts.in_progress, counts.cannot_save, counts.other_answers];
    assert!(rare.iter().all(|count| *count >= 50), "{counts:?}");
}

#[test]
fn nothing_goes_wrong_on_five_hundred_schedules_of_a_bucket() {
    let mut counts = Counts::default();
    // The last one is a bucket that says nothing for minutes, right behind a restore.
    for seed in (0..500).chain([9340]) {
        let outcome = run_on(Kept::Bucket, seed, Faults::default(), false);
        assert_eq!(outcome.violation, None, "replay it with: cargo run --release -p sandboxer-sim -- --bucket --replay {seed}");
        counts.add(&outcome.counts);
    }
    let rare = [counts.taken_over, counts.lost, counts.frozen, counts.in_use, counts.in_progress, counts.cannot_save, counts.other_answers];
    assert!(rare.iter().all(|count| *count >= 50), "{counts:?}");
}

#[test]
fn a_seed_always_goes_the_same_way() {
    for seed in 0..20 {
        let counts = || format!("{:?}", run(seed, Faults::default(), false).counts);
        assert_eq!(counts(), counts());
    }
}

#[test]
fn nothing_is_lost_and_nothing_is_left_on_five_hundred_schedules_of_collection() {
    let run = |seeds: std::ops::Range<u64>| {
        let mut counts = CollectionCounts::default();
        for seed in seeds {
            let outcome = run_collection(seed, CollectFaults::default(), false);
            assert_eq!(outcome.violation, None, "replay it with: cargo run --release -p sandboxer-sim -- --collection --replay {seed}");
            counts.add(&outcome.counts);
        }
        counts
    };
    let mut counts = CollectionCounts::default();
    std::thread::scope(|scope| {
        let halves = [0..250, 250..500].map(|seeds| scope.spawn(|| run(seeds)));
        halves.into_iter().for_each(|half| counts.add(&half.join().expect("no seed panics")));
    });
    let rare = [counts.late_saves, counts.written_anew, counts.spared, counts.dead_writers, counts.deleted, counts.kills, counts.crashes];
    assert!(rare.iter().all(|count| *count >= 50), "{counts:?}");
}

#[test]
fn a_seed_of_collection_always_goes_the_same_way() {
    for seed in 0..10 {
        let counts = || format!("{:?}", run_collection(seed, CollectFaults::default(), false).counts);
        assert_eq!(counts(), counts());
    }
}

#[test]
fn nothing_is_lost_by_collection_on_a_bucket_whose_lists_are_behind() {
    let mut counts = CollectionCounts::default();
    for seed in 0..100 {
        let outcome = run_collection_on(Kept::Bucket, seed, CollectFaults::default(), false);
        assert_eq!(
            outcome.violation, None,
            "replay it with: cargo run --release -p sandboxer-sim -- --bucket --collection --replay {seed}"
        );
        counts.add(&outcome.counts);
    }
    let rare = [counts.late_saves, counts.spared, counts.deleted, counts.kills, counts.crashes];
    assert!(rare.iter().all(|count| *count >= 10), "{counts:?}");
}

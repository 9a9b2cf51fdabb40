//! Schedules on which nothing may go wrong.

use sandboxer_sim::{Counts, run};
use sandboxer_store::lease::Faults;

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
fn a_seed_always_goes_the_same_way() {
    for seed in 0..20 {
        let counts = || format!("{:?}", run(seed, Faults::default(), false).counts);
        assert_eq!(counts(), counts());
    }
}

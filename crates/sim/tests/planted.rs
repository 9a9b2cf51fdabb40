//! Faults planted on purpose: the simulator finds each.

use sandboxer_sim::run;
use sandboxer_store::lease::Fault;

fn is_found_as(fault: Fault, expected: &[&str]) {
    let finds = |seed| {
        let what = run(seed, fault.into(), false).violation?;
        expected.iter().any(|expected| what.contains(expected)).then_some((seed, what))
    };
    match (0..1000).find_map(finds) {
        Some((seed, what)) => println!("{fault:?}: seed {seed}: {what}"),
        None => panic!("{fault:?} is not found within 1,000 seeds"),
    }
}

const TWO_ACT: [&str; 2] = [" acted in epoch ", "both acted"];

#[test]
fn a_release_without_the_epoch_check_is_found() {
    is_found_as(Fault::ReleaseWithoutEpoch, &["changed, as an owner, what"]);
}

#[test]
fn a_renewal_counted_from_its_reply_is_found() {
    is_found_as(Fault::RenewalFromReply, &TWO_ACT);
}

#[test]
fn a_checkpoint_published_before_it_is_durable_is_found() {
    is_found_as(Fault::PublishedBeforeDurable, &["which is not on the volume"]);
}

#[test]
fn a_waiter_that_ignores_expiry_is_found() {
    is_found_as(Fault::ExpiryIgnored, &["can't be reached", "never got an answer"]);
}

#[test]
fn a_takeover_by_wall_clock_is_found() {
    is_found_as(Fault::TakeoverByWallClock, &TWO_ACT);
}

//! Faults planted on purpose: the simulator finds each.

use sandboxer_sim::{Kept, run_collection, run_on};
use sandboxer_store::{collect::CollectFault, lease::Fault};

fn is_found_as(fault: Fault, expected: &[&str]) {
    for kept in [Kept::Directory, Kept::Bucket] {
        let finds = |seed| {
            let what = run_on(kept, seed, fault.into(), false).violation?;
            expected.iter().any(|expected| what.contains(expected)).then_some((seed, what))
        };
        match (0..1000).find_map(finds) {
            Some((seed, what)) => println!("{fault:?} in a {kept:?}: seed {seed}: {what}"),
            None => panic!("{fault:?} in a {kept:?} is not found within 1,000 seeds"),
        }
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

const LOST: [&str; 2] = ["needs", "which is not there"];

fn is_found_in_collection(fault: CollectFault) {
    let finds = |seed| {
        let what = run_collection(seed, fault.into(), false).violation?;
        LOST.iter().any(|lost| what.contains(lost)).then_some((seed, what))
    };
    match (0..1000).find_map(finds) {
        Some((seed, what)) => println!("{fault:?}: seed {seed}: {what}"),
        None => panic!("{fault:?} is not found within 1,000 seeds"),
    }
}

#[test]
fn a_writer_without_an_intent_is_found() {
    is_found_in_collection(CollectFault::NoIntent);
}

#[test]
fn a_removal_at_the_first_scan_is_found() {
    is_found_in_collection(CollectFault::DeletedAtFirstScan);
}

#[test]
fn a_writer_that_ignores_the_condemned_is_found() {
    is_found_in_collection(CollectFault::CondemnedIgnored);
}

#[test]
fn an_expiry_of_intents_by_wall_clock_is_found() {
    is_found_in_collection(CollectFault::ExpiryByWallClock);
}

#[test]
fn a_save_without_an_end_is_found() {
    is_found_in_collection(CollectFault::EndlessSave);
}

#[test]
fn a_list_that_another_takes_away_is_found() {
    is_found_in_collection(CollectFault::ForeignListsRemoved);
}

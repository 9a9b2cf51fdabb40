//! The lease and the search for one, on a store that fails as told and a clock that waits for nobody.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use sandboxer_protocol::SandboxId;
use sandboxer_store::{
    CheckpointName,
    lease::{Clock, Held, LeaseError, LeaseEvent, Leases, LostReason, Moment, Release, Sought, Terms},
    record::{MemoryRecords, Nonce, ReadError, Record, RecordFault, Stamp, Stored, SwapError, Verdict},
};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

/// The time of a runtime whose time is paused.
struct TokioClock(Instant);

#[async_trait]
impl Clock for TokioClock {
    fn now(&self) -> Moment {
        Moment(Duration::from_secs(1000) + self.0.elapsed())
    }

    fn unix_time(&self) -> Duration {
        Duration::from_secs(1_800_000_000)
    }

    fn nonce(&self) -> Nonce {
        Nonce::random()
    }

    async fn sleep_until(&self, moment: Moment) {
        sleep(moment.since(self.now())).await;
    }
}

struct Volume {
    records: Arc<MemoryRecords>,
    id: SandboxId,
}

impl Volume {
    fn new() -> Self {
        Self { records: Arc::default(), id: SandboxId::random() }
    }

    fn instance(&self, name: &str) -> Leases {
        let spawn = Arc::new(|task| drop(tokio::spawn(task)));
        Leases::new(self.records.clone(), Arc::new(TokioClock(Instant::now())), name.parse().unwrap(), Terms::default(), spawn)
    }

    async fn create(&self, name: &str) -> Held {
        self.instance(name).create(self.id, BTreeMap::new()).await.unwrap()
    }

    /// One that `name` has saved and given up.
    async fn saved(&self, name: &str) {
        let held = self.create(name).await;
        held.lease.publish_and_release(checkpoint(1), Release::Anyone).await.unwrap();
    }

    async fn seek(&self, name: &str) -> Sought {
        self.instance(name).seek(self.id, &CancellationToken::new()).await
    }

    fn there(&self) -> Stored {
        self.records.read_now(self.id).unwrap()
    }

    fn swap(&self, next: impl FnOnce(&Record) -> Record) {
        let there = self.there();
        self.records.swap_now(self.id, Some(&there), &next(&there.record)).unwrap();
    }
}

fn checkpoint(ms: u64) -> CheckpointName {
    CheckpointName::at(ms).unwrap()
}

fn stamp() -> Stamp {
    Stamp { unix: 0, nonce: Nonce::random() }
}

fn held(sought: Sought) -> Held {
    match sought {
        Sought::Held(held) => held,
        other => panic!("not held: {}", name_of(&other)),
    }
}

fn name_of(sought: &Sought) -> &'static str {
    match sought {
        Sought::Held(_) => "held",
        Sought::NotFound => "not found",
        Sought::NeverSaved { owner: None } => "never saved",
        Sought::NeverSaved { owner: Some(_) } => "silent and never saved",
        Sought::Gone(_) => "gone",
        Sought::InUse => "in use",
        Sought::HandoffInProgress => "in progress",
        Sought::CannotSave(_) => "cannot save",
        Sought::Unanswered => "unanswered",
        Sought::GivenUp => "given up",
        Sought::Unavailable(_) => "unavailable",
    }
}

#[tokio::test(start_paused = true)]
async fn a_lost_reply_is_settled_by_what_is_there() {
    let volume = Volume::new();
    let held = volume.create("a").await;
    for (ms, fault) in
        [(1, RecordFault::LostReply), (2, RecordFault::LostRequest), (3, RecordFault::Repeated), (4, RecordFault::Unavailable)]
    {
        let before = volume.there().record.sequence;
        volume.records.inject([fault.clone()]);
        held.lease.publish(checkpoint(ms)).await.unwrap();
        let there = volume.there().record;
        assert_eq!((there.latest, there.sequence), (Some(checkpoint(ms)), before + 1), "{fault:?}");
    }
    volume.records.inject([RecordFault::LostReply]);
    held.lease.publish_and_release(checkpoint(5), Release::Anyone).await.unwrap();
    assert_eq!((volume.there().record.latest, volume.there().record.owner), (Some(checkpoint(5)), None));
}

#[tokio::test(start_paused = true)]
async fn a_lost_reply_is_settled_even_if_others_wrote_meanwhile() {
    let volume = Volume::new();
    let held = volume.create("a").await;
    // The reply is lost, the read that follows fails, and a waiter comes before the next.
    volume.records.inject([RecordFault::LostReply, RecordFault::Unavailable]);
    let publishing = held.lease.publish(checkpoint(1));
    let waiting = async {
        sleep(Duration::from_millis(100)).await;
        volume.swap(|record| record.awaited(&"b".parse().unwrap(), Nonce::random(), stamp()));
    };
    let (published, ()) = tokio::join!(publishing, waiting);
    published.unwrap();
    assert_eq!(volume.there().record.latest, Some(checkpoint(1)));
}

#[tokio::test(start_paused = true)]
async fn a_creation_is_asked_for_until_it_is_known_and_takes_effect_once() {
    for faults in [
        vec![RecordFault::LostRequest; 3],
        vec![RecordFault::LostReply, RecordFault::LostRequest],
        vec![RecordFault::LostRequest, RecordFault::LostReply],
    ] {
        let volume = Volume::new();
        volume.records.inject(faults.clone());
        let Held { lease, .. } = volume.create("a").await;
        let there = volume.there().record;
        assert_eq!((there.sequence, there.epoch, there.owner), (1, lease.epoch(), Some("a".parse().unwrap())), "{faults:?}");
        lease.publish(checkpoint(1)).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_creation_and_a_look_that_get_no_answer_end_after_the_patience() {
    let volume = Volume::new();
    let (leases, patience) = (volume.instance("a"), Terms::default().patience);
    volume.records.inject(std::iter::repeat_n(RecordFault::LostRequest, 1000));
    let begun = Instant::now();
    let Err(refused) = leases.create(volume.id, BTreeMap::new()).await else { panic!("it can't have been created") };
    assert!(matches!(refused, SwapError::Unknown(_)), "{refused}");
    assert!(begun.elapsed() <= patience && begun.elapsed() > patience / 2, "{:?}", begun.elapsed());
    let begun = Instant::now();
    assert!(matches!(leases.look(volume.id).await, Err(ReadError::Unavailable(_))));
    assert!(begun.elapsed() <= patience && begun.elapsed() > patience / 2, "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn what_can_not_be_read_for_a_while_is_looked_at_again() {
    let volume = Volume::new();
    volume.saved("a").await;
    volume.records.inject(std::iter::repeat_n(RecordFault::Unavailable, 6));
    let looked = volume.instance("b").look(volume.id).await.unwrap();
    assert_eq!(looked, Some(volume.there()));
    assert_eq!(volume.instance("b").look(SandboxId::random()).await, Ok(None));
}

#[tokio::test(start_paused = true)]
async fn a_record_that_is_not_to_be_seen_for_a_while_loses_nobody_its_sandbox() {
    let volume = Volume::new();
    let Held { lease, mut events } = volume.create("a").await;
    // Reads and writes alike find nothing, for longer than a renewal and for less than a lease.
    let hidden = volume.records.hide(volume.id);
    sleep(Duration::from_secs(10)).await;
    drop(hidden);
    lease.publish(checkpoint(1)).await.unwrap();
    assert!(lease.may_act());
    assert_eq!(volume.there().record.latest, Some(checkpoint(1)));

    // Its owner freezes in time, and goes on with the same tenure.
    let begun = Instant::now();
    let hidden = volume.records.hide(volume.id);
    assert_eq!(events.next().await, Some(LeaseEvent::MustFreeze));
    assert!(begun.elapsed() <= Duration::from_millis(12_100), "{:?}", begun.elapsed());
    drop(hidden);
    assert_eq!(events.next().await, Some(LeaseEvent::Renewed));

    // What stays away is gone.
    let begun = Instant::now();
    let _hidden = volume.records.hide(volume.id);
    assert_eq!(events.next().await, Some(LeaseEvent::MustFreeze));
    assert_eq!(events.next().await, Some(LeaseEvent::Lost(LostReason::Removed)));
    let terms = Terms::default();
    assert!(begun.elapsed() <= terms.lease + terms.renewal + 2 * terms.retry, "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn one_that_was_left_running_is_not_lost_to_a_first_look_that_finds_nothing() {
    let volume = Volume::new();
    let epoch = volume.create("a").await.lease.epoch();
    let hidden = volume.records.hide(volume.id);
    let Held { lease, mut events } = volume.instance("a").resume(volume.id, epoch);
    sleep(Duration::from_secs(5)).await;
    assert!(!lease.may_act());
    drop(hidden);
    assert_eq!(events.next().await, Some(LeaseEvent::Renewed));
    assert!(lease.may_act());
}

#[tokio::test(start_paused = true)]
async fn an_owner_that_can_not_renew_is_frozen_before_its_lease_is_over_and_goes_on_when_it_can() {
    let volume = Volume::new();
    let begun = Instant::now();
    let Held { lease, mut events } = volume.create("a").await;
    volume.records.inject(std::iter::repeat_n(RecordFault::Unavailable, 60));
    assert_eq!(events.next().await, Some(LeaseEvent::MustFreeze));
    let after = begun.elapsed();
    assert!(after >= Duration::from_secs(11) && after <= Duration::from_millis(12_100), "{after:?}");
    assert!(!lease.may_act());
    assert_eq!(events.next().await, Some(LeaseEvent::Renewed));
    assert!(lease.may_act());
    assert_eq!(lease.epoch(), volume.there().record.epoch, "nobody took it, so it is the same tenure");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_hangs_does_not_keep_an_owner_from_freezing() {
    let volume = Volume::new();
    let begun = Instant::now();
    let Held { lease, mut events } = volume.create("a").await;
    let never = Arc::new(tokio::sync::Notify::new());
    volume.records.inject(std::iter::repeat_n(RecordFault::Delayed(never), 20));
    assert_eq!(events.next().await, Some(LeaseEvent::MustFreeze));
    assert!(begun.elapsed() <= Duration::from_millis(12_100), "{:?}", begun.elapsed());
    drop(lease);
}

#[tokio::test(start_paused = true)]
async fn a_late_owner_can_not_publish() {
    let volume = Volume::new();
    let Held { lease, mut events } = volume.create("a").await;
    lease.publish(checkpoint(1)).await.unwrap();
    volume.swap(|record| record.acquired("b".parse().unwrap(), stamp()));
    let before = volume.there();
    let lost = LostReason::TakenOver { by: Some("b".parse().unwrap()) };
    assert_eq!(lease.publish(checkpoint(2)).await, Err(LeaseError::Lost(lost.clone())));
    assert_eq!(events.next().await, Some(LeaseEvent::Lost(lost)));
    assert_eq!(events.next().await, None);
    assert!(!lease.may_act());
    assert!(lease.release(Release::Anyone).await.is_err());
    assert_eq!(volume.there(), before, "it has written nothing");
}

#[tokio::test(start_paused = true)]
async fn what_was_let_go_is_not_written() {
    let volume = Volume::new();
    let before = volume.create("a").await;
    let version = volume.there();
    volume.records.inject([RecordFault::Unavailable, RecordFault::LostRequest]);
    drop(before);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(volume.there(), version);
}

#[tokio::test(start_paused = true)]
async fn what_was_let_go_while_the_store_fails_is_not_written_either() {
    let volume = Volume::new();
    let owner = volume.create("a").await;
    let version = volume.there();
    volume.records.inject(std::iter::repeat_n(RecordFault::Unavailable, 40));
    sleep(Duration::from_secs(7)).await;
    drop(owner);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(volume.there(), version);
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_was_started_again_goes_on_in_its_epoch_or_learns_that_it_lost() {
    let volume = Volume::new();
    volume.create("a").await.lease.publish(checkpoint(1)).await.unwrap();
    let Held { lease, mut events } = volume.instance("a").resume(volume.id, 1);
    assert!(!lease.may_act(), "nobody knows how old its lease is");
    assert_eq!(events.next().await, Some(LeaseEvent::Renewed));
    assert!(lease.may_act());
    drop((lease, events));
    volume.swap(|record| record.acquired("b".parse().unwrap(), stamp()));
    let Held { lease, mut events } = volume.instance("a").resume(volume.id, 1);
    assert_eq!(events.next().await, Some(LeaseEvent::Lost(LostReason::TakenOver { by: Some("b".parse().unwrap()) })));
    assert!(!lease.may_act());
}

#[tokio::test(start_paused = true)]
async fn what_nobody_has_is_held_at_once() {
    let volume = Volume::new();
    assert_eq!(name_of(&volume.seek("b").await), "not found");
    volume.saved("a").await;
    let begun = Instant::now();
    let held = held(volume.seek("b").await);
    assert_eq!((held.lease.epoch(), held.lease.latest()), (2, Some(checkpoint(1))));
    assert!(begun.elapsed() < Duration::from_millis(50));
    held.lease.bury("killed".to_owned()).await.unwrap();
    assert_eq!(name_of(&volume.seek("c").await), "gone");
}

#[tokio::test(start_paused = true)]
async fn a_dead_owner_is_followed_when_its_lease_is_over() {
    let volume = Volume::new();
    let owner = volume.create("a").await;
    owner.lease.publish(checkpoint(1)).await.unwrap();
    drop(owner);
    let begun = Instant::now();
    let next = held(volume.seek("b").await);
    let after = begun.elapsed();
    assert!(after >= Duration::from_secs(15) && after < Duration::from_secs(16), "{after:?}");
    assert_eq!(next.lease.epoch(), 2);
    let begun = Instant::now();
    drop(next);
    held(volume.seek("b").await);
    assert!(begun.elapsed() < Duration::from_millis(50), "what an instance itself had it may have again");
}

#[tokio::test(start_paused = true)]
async fn what_was_never_saved_is_left_to_its_owner() {
    let volume = Volume::new();
    drop(volume.create("a").await);
    assert_eq!(name_of(&volume.seek("b").await), "silent and never saved");
    assert_eq!(volume.there().record.epoch, 1);
    let owner = volume.instance("a").resume(volume.id, 1);
    let mut events = owner.events;
    assert_eq!(events.next().await, Some(LeaseEvent::Renewed));
    drop((owner.lease, events));
    held(volume.instance("b").seize(volume.id, &CancellationToken::new()).await).lease.bury("killed".to_owned()).await.unwrap();
    assert_eq!(name_of(&volume.seek("c").await), "gone");
}

#[tokio::test(start_paused = true)]
async fn a_waiter_is_heard_answered_or_gets_it() {
    let volume = Volume::new();
    let Held { lease, mut events } = volume.create("a").await;
    for (verdict, expected) in [(Verdict::InUse, "in use"), (Verdict::CannotSave { reason: "full".to_owned() }, "cannot save")] {
        let (found, ()) = tokio::join!(volume.seek("b"), async {
            let Some(LeaseEvent::WaiterAppeared { registration, .. }) = events.next().await else { panic!("no waiter") };
            lease.answer(registration, verdict).await.unwrap();
            assert_eq!(events.next().await, Some(LeaseEvent::WaiterGone));
        });
        assert_eq!(name_of(&found), expected);
    }
    let begun = Instant::now();
    let (found, ()) = tokio::join!(volume.seek("b"), async {
        let Some(LeaseEvent::WaiterAppeared { registration, .. }) = events.next().await else { panic!("no waiter") };
        lease.publish_and_release(checkpoint(1), Release::Waiter(registration)).await.unwrap();
    });
    assert_eq!(held(found).lease.latest(), Some(checkpoint(1)));
    assert!(begun.elapsed() < Duration::from_millis(100), "{:?}", begun.elapsed());
    assert_eq!(events.next().await, Some(LeaseEvent::Released));
}

#[tokio::test(start_paused = true)]
async fn a_second_waiter_is_told_so_and_a_dead_one_is_followed() {
    let volume = Volume::new();
    let owner = volume.create("a").await;
    owner.lease.publish(checkpoint(1)).await.unwrap();
    let (first, give_up) = (volume.instance("b"), CancellationToken::new());
    let (id, told) = (volume.id, give_up.clone());
    let first = tokio::spawn(async move { first.seek(id, &told).await });
    sleep(Duration::from_millis(100)).await;
    assert_eq!(name_of(&timeout(Duration::from_secs(3), volume.seek("c")).await.unwrap()), "in progress");
    give_up.cancel();
    assert_eq!(name_of(&first.await.unwrap()), "given up");
    assert!(volume.there().record.waiter.is_none(), "it has withdrawn");
    // One that dies leaves its registration, which is not refreshed.
    volume.swap(|record| record.awaited(&"d".parse().unwrap(), Nonce::random(), stamp()));
    let begun = Instant::now();
    let (found, ()) = tokio::join!(volume.seek("c"), async {
        while volume.there().record.waiter.is_none_or(|waiter| waiter.instance.as_str() != "c") {
            sleep(Duration::from_millis(50)).await;
        }
        let registration = volume.there().record.waiter.unwrap().nonce;
        owner.lease.release(Release::Waiter(registration)).await.unwrap();
    });
    held(found);
    assert!(begun.elapsed() >= Duration::from_secs(8) && begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_owner_whose_waiter_has_gone_keeps_its_sandbox() {
    let volume = Volume::new();
    let owner = volume.create("a").await;
    let gone = owner.lease.publish_and_release(checkpoint(1), Release::Waiter(Nonce::random())).await;
    assert_eq!(gone, Err(LeaseError::WaiterGone));
    assert_eq!(volume.there().record.latest, None);
    owner.lease.publish(checkpoint(1)).await.unwrap();
    assert_eq!(owner.lease.publish(checkpoint(1)).await, Err(LeaseError::NotNewer { latest: checkpoint(1) }));
    assert!(owner.lease.may_act());
}

#[tokio::test(start_paused = true)]
async fn one_of_two_newcomers_gets_it() {
    let volume = Volume::new();
    volume.saved("a").await;
    let (b, c) = (volume.instance("b"), volume.instance("c"));
    let (id, give_up) = (volume.id, CancellationToken::new());
    let searches = [b, c].map(|instance| {
        let give_up = give_up.clone();
        tokio::spawn(async move { instance.seek(id, &give_up).await })
    });
    sleep(Duration::from_secs(5)).await;
    give_up.cancel();
    let mut names = Vec::new();
    for search in searches {
        names.push(name_of(&search.await.unwrap()));
    }
    names.sort_unstable();
    assert_eq!(names, ["given up", "held"], "the owner was never told to answer, so the other waits for it");
}

#[tokio::test(start_paused = true)]
async fn a_waiter_whose_owner_says_nothing_is_not_kept_for_ever() {
    let volume = Volume::new();
    let owner = volume.create("a").await;
    let begun = Instant::now();
    assert_eq!(name_of(&volume.seek("b").await), "unanswered");
    assert!(begun.elapsed() < Duration::from_secs(125), "{:?}", begun.elapsed());
    assert!(volume.there().record.waiter.is_none());
    drop(owner);
}

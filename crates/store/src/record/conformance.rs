//! What every [`RecordStore`] promises, as tests that each implementation runs: `record_conformance_tests!(subject())`.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use sandboxer_protocol::SandboxId;
use serde_json::json;
use tokio::task::JoinSet;

use super::{Nonce, OwnerChange, Record, RecordStore, Stamp, Stored, SwapError};

/// One implementation under test.
pub trait Subject: Sync {
    /// The store as one instance sees it. Every call is another instance; those that hear of waiters are all called `one`.
    fn view(&self) -> Arc<dyn RecordStore>;
}

/// A test for each promise. `$subject` is an expression.
#[macro_export]
macro_rules! record_conformance_tests {
    ($subject:expr) => {
        $crate::record_conformance_tests!($subject;
            what_was_created_is_there_for_all,
            a_second_creation_is_a_conflict,
            a_swap_of_an_old_version_is_a_conflict,
            a_repeated_swap_finds_itself,
            a_version_must_follow_the_one_it_replaces,
            one_writer_wins_each_version,
            everything_in_a_record_comes_back,
            a_list_comes_in_order_and_in_pages,
            only_a_tombstone_is_removed,
            what_was_removed_can_not_be_swapped,
            a_change_is_hinted_at_where_hints_are_told,
        );
    };
    ($subject:expr; $($promise:ident),* $(,)?) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $promise() {
                let subject = $subject;
                $crate::record::conformance::$promise(&subject).await;
            }
        )*
    };
}

fn stamp() -> Stamp {
    Stamp { unix: 1_800_000_000, nonce: Nonce::random() }
}

fn first() -> Record {
    Record::first("one".parse().unwrap(), stamp(), BTreeMap::new())
}

fn renewed(stored: &Stored) -> Record {
    let holder = stored.record.holder().unwrap();
    stored.record.by_owner(&holder, &[], stamp()).unwrap()
}

fn buried(stored: &Stored) -> Record {
    let holder = stored.record.holder().unwrap();
    stored.record.by_owner(&holder, &[OwnerChange::Bury { reason: "killed".to_owned() }], stamp()).unwrap()
}

fn conflict(result: Result<Stored, SwapError>) -> Option<Stored> {
    match result {
        Err(SwapError::Conflict(there)) => there.map(|there| *there),
        other => panic!("no conflict: {other:?}"),
    }
}

pub async fn what_was_created_is_there_for_all(subject: &impl Subject) {
    let (one, other, id) = (subject.view(), subject.view(), SandboxId::random());
    assert_eq!(one.read(id).await, Ok(None));
    let created = one.create(id, &first()).await.unwrap();
    assert_eq!(other.read(id).await, Ok(Some(created.clone())));
    let next = renewed(&created);
    let swapped = one.swap(id, &created, &next).await.unwrap();
    assert_eq!(swapped.record, next);
    assert_eq!(other.read(id).await, Ok(Some(swapped)));
    assert_eq!(other.read(SandboxId::random()).await, Ok(None));
}

pub async fn a_second_creation_is_a_conflict(subject: &impl Subject) {
    let (store, id) = (subject.view(), SandboxId::random());
    let created = store.create(id, &first()).await.unwrap();
    assert_eq!(conflict(subject.view().create(id, &first()).await), Some(created.clone()));
    let swapped = store.swap(id, &created, &renewed(&created)).await.unwrap();
    assert_eq!(conflict(subject.view().create(id, &first()).await), Some(swapped.clone()));
    assert_eq!(store.read(id).await, Ok(Some(swapped)));
}

pub async fn a_swap_of_an_old_version_is_a_conflict(subject: &impl Subject) {
    let (store, id) = (subject.view(), SandboxId::random());
    let created = store.create(id, &first()).await.unwrap();
    let mut newest = created.clone();
    for _ in 0..20 {
        newest = store.swap(id, &newest, &renewed(&newest)).await.unwrap();
        assert_eq!(conflict(subject.view().swap(id, &created, &renewed(&created)).await), Some(newest.clone()));
    }
    assert_eq!(store.read(id).await, Ok(Some(newest)));
}

pub async fn a_repeated_swap_finds_itself(subject: &impl Subject) {
    let (store, id) = (subject.view(), SandboxId::random());
    let created = store.create(id, &first()).await.unwrap();
    let next = renewed(&created);
    let swapped = store.swap(id, &created, &next).await.unwrap();
    let again = match store.swap(id, &created, &next).await {
        Ok(there) => there,
        other => conflict(other).unwrap(),
    };
    assert!(again.is(&swapped), "{again:?}");
}

pub async fn a_version_must_follow_the_one_it_replaces(subject: &impl Subject) {
    let (store, id) = (subject.view(), SandboxId::random());
    let created = store.create(id, &first()).await.unwrap();
    for sequence in [0, 1, 3] {
        let next = Record { sequence, ..renewed(&created) };
        assert!(matches!(store.swap(id, &created, &next).await, Err(SwapError::Bad(_))), "{sequence}");
    }
    assert_eq!(store.read(id).await, Ok(Some(created)));
}

/// Every acknowledged version has one writer, and each was made from the one before.
pub async fn one_writer_wins_each_version(subject: &impl Subject) {
    const WRITERS: usize = 6;
    const WINS: usize = 25;
    let id = SandboxId::random();
    subject.view().create(id, &first()).await.unwrap();
    let mut writers = JoinSet::new();
    for _ in 0..WRITERS {
        let store = subject.view();
        writers.spawn(async move {
            let mut won = Vec::new();
            let mut unknown = 0;
            while won.len() < WINS {
                let there = store.read(id).await.unwrap().unwrap();
                match store.swap(id, &there, &renewed(&there)).await {
                    Ok(stored) => won.push((stored.record.sequence, stored.record.nonce, there.record.nonce)),
                    Err(SwapError::Conflict(Some(newer))) => assert!(newer.record.sequence > there.record.sequence),
                    Err(SwapError::Unknown(_)) => unknown += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            (won, unknown)
        });
    }
    let (mut versions, mut unknown) = (BTreeMap::new(), 0);
    while let Some(done) = writers.join_next().await {
        let (won, unsure) = done.unwrap();
        unknown += unsure;
        for (sequence, nonce, from) in won {
            assert!(versions.insert(sequence, (nonce, from)).is_none(), "two writers won version {sequence}");
        }
    }
    for (sequence, (_, from)) in &versions {
        let before = versions.get(&(sequence - 1));
        assert!(before.is_none_or(|(nonce, _)| nonce == from), "version {sequence} was not made from the one before");
    }
    let last = subject.view().read(id).await.unwrap().unwrap().record.sequence;
    assert!((last - 1) as usize >= WRITERS * WINS && (last - 1) as usize <= WRITERS * WINS + unknown, "{last} versions, {unknown} unknown");
}

pub async fn everything_in_a_record_comes_back(subject: &impl Subject) {
    let (store, id) = (subject.view(), SandboxId::random());
    let attributes = BTreeMap::from([("tenant".to_owned(), json!("0123")), ("nested".to_owned(), json!({"list": [1, null, "x"]}))]);
    let mut record = Record::first("one".parse().unwrap(), stamp(), attributes);
    record.rest.insert("of a newer version".to_owned(), json!(true));
    let created = store.create(id, &record).await.unwrap();
    let registration = Nonce::random();
    let waited = created.record.awaited(&"two".parse().unwrap(), registration, stamp());
    let waited = store.swap(id, &created, &waited).await.unwrap();
    let read = subject.view().read(id).await.unwrap().unwrap();
    assert_eq!(read.record, waited.record);
    assert_eq!((read.record.attributes.len(), read.record.rest.len()), (2, 1));
    assert!(read.record.waited_on_by(registration));
}

pub async fn a_list_comes_in_order_and_in_pages(subject: &impl Subject) {
    let store = subject.view();
    let mut ids: Vec<_> = (0..10).map(|_| SandboxId::random()).collect();
    for id in &ids {
        store.create(*id, &first()).await.unwrap();
    }
    ids.sort_unstable();
    let mut found = Vec::new();
    loop {
        let page = subject.view().list(found.last().copied(), 3).await.unwrap();
        assert!(page.len() <= 3);
        if page.is_empty() {
            break;
        }
        found.extend(page);
    }
    assert_eq!(found, ids);
}

pub async fn only_a_tombstone_is_removed(subject: &impl Subject) {
    let (store, id) = (subject.view(), SandboxId::random());
    let created = store.create(id, &first()).await.unwrap();
    assert!(matches!(store.remove(id, &created).await, Err(SwapError::Conflict(Some(_)))));
    let dead = store.swap(id, &created, &buried(&created)).await.unwrap();
    assert!(matches!(store.remove(id, &created).await, Err(SwapError::Conflict(Some(_)))));
    store.remove(id, &dead).await.unwrap();
    assert_eq!(subject.view().read(id).await, Ok(None));
    assert!(!subject.view().list(None, 1000).await.unwrap().contains(&id));
}

pub async fn what_was_removed_can_not_be_swapped(subject: &impl Subject) {
    let (store, id) = (subject.view(), SandboxId::random());
    let created = store.create(id, &first()).await.unwrap();
    let dead = store.swap(id, &created, &buried(&created)).await.unwrap();
    store.remove(id, &dead).await.unwrap();
    assert_eq!(conflict(subject.view().swap(id, &created, &renewed(&created)).await), None);
    assert_eq!(store.read(id).await, Ok(None));
}

pub async fn a_change_is_hinted_at_where_hints_are_told(subject: &impl Subject) {
    let (store, id) = (subject.view(), SandboxId::random());
    let mut stored = store.create(id, &first()).await.unwrap();
    let mut changes = store.changes(id);
    for _ in 0..3 {
        // From afar only of those who wait for what the one who listens owns.
        let waits = changes.are_from_afar();
        let next = if waits { stored.record.awaited(&"two".parse().unwrap(), Nonce::random(), stamp()) } else { renewed(&stored) };
        stored = subject.view().swap(id, &stored, &next).await.unwrap();
        let hinted = tokio::time::timeout(Duration::from_secs(10), changes.next()).await;
        assert!(hinted.is_ok() || !changes.are_told());
    }
    // A registration that nobody heeds any more costs the others nothing.
    drop(changes);
    store.swap(id, &stored, &renewed(&stored)).await.unwrap();
}

//! The conformance suite of records, on a directory and in memory.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{collections::BTreeMap, sync::Arc};

use sandboxer_protocol::SandboxId;
use sandboxer_store::{
    failpoint::FailPoints,
    record::{Codec, DirectoryRecords, MemoryRecords, Nonce, Record, RecordStore, Stamp, SwapError, conformance::Subject},
};
use tempfile::TempDir;

/// Every view is a store of its own on the same directory, as another process would have it.
struct Directory {
    root: TempDir,
    codec: Codec,
}

impl Directory {
    fn new(codec: Codec) -> Self {
        Self { root: tempfile::tempdir().unwrap(), codec }
    }
}

impl Subject for Directory {
    fn view(&self) -> Arc<dyn RecordStore> {
        Arc::new(DirectoryRecords::open(self.root.path(), self.codec.clone(), FailPoints::default()).unwrap())
    }
}

struct Memory(Arc<MemoryRecords>);

impl Subject for Memory {
    fn view(&self) -> Arc<dyn RecordStore> {
        self.0.clone()
    }
}

fn key() -> Codec {
    Codec::sealed(Arc::new(|bytes| *blake3::keyed_hash(&[7; 32], bytes).as_bytes()))
}

mod directory {
    use super::*;
    sandboxer_store::record_conformance_tests!(Directory::new(Codec::default()));
}

mod sealed_directory {
    use super::*;
    sandboxer_store::record_conformance_tests!(Directory::new(key()));
}

mod memory {
    use super::*;
    sandboxer_store::record_conformance_tests!(Memory(Arc::new(MemoryRecords::default())));
}

#[tokio::test]
async fn a_full_volume_takes_the_room_of_an_old_version_for_a_new_one() {
    let root = tempfile::tempdir().unwrap();
    let points = FailPoints::parse("record:written=full").unwrap();
    let [plenty, full] =
        [FailPoints::default(), points].map(|points| DirectoryRecords::open(root.path(), Codec::default(), points).unwrap());
    let (id, stamp) = (SandboxId::random(), || Stamp { unix: 0, nonce: Nonce::random() });
    let first = Record::first("a".parse().unwrap(), stamp(), BTreeMap::new());
    let holder = first.holder().unwrap();
    let one = plenty.create(id, &first).await.unwrap();
    let refused = full.swap(id, &one, &one.record.by_owner(&holder, &[], stamp()).unwrap()).await;
    assert!(matches!(refused, Err(SwapError::Unavailable(_))), "the newest version stays: {refused:?}");

    let mut newest = one;
    for _ in 0..12 {
        newest = plenty.swap(id, &newest, &newest.record.by_owner(&holder, &[], stamp()).unwrap()).await.unwrap();
        // Full once, until something was removed.
        let points = FailPoints::parse("record:written=full@1").unwrap();
        let nearly = DirectoryRecords::open(root.path(), Codec::default(), points).unwrap();
        newest = nearly.swap(id, &newest, &newest.record.by_owner(&holder, &[], stamp()).unwrap()).await.unwrap();
        assert_eq!(plenty.read(id).await.unwrap(), Some(newest.clone()));
    }
}

/// Everything below a directory, with its content.
fn below(dir: &std::path::Path) -> BTreeMap<std::path::PathBuf, Vec<u8>> {
    std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
}

#[tokio::test]
async fn links_in_place_of_record_directories_lead_nothing_outside() {
    let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let locks = root.path().join("locks");
    let records = DirectoryRecords::open(root.path(), Codec::default(), FailPoints::default()).unwrap();
    let id = SandboxId::random();
    let stamp = Stamp { unix: 1, nonce: Nonce::from_bits(1) };
    let stored = records.create(id, &Record::first("me".parse().unwrap(), stamp, BTreeMap::new())).await.unwrap();
    // The versions of a record.
    let versions = locks.join(format!("{id}.versions"));
    std::fs::rename(&versions, outside.path().join("versions")).unwrap();
    std::os::unix::fs::symlink(outside.path().join("versions"), &versions).unwrap();
    let before = below(&outside.path().join("versions"));
    assert!(!before.is_empty());
    let mut next = stored.record.clone();
    next.sequence += 1;
    next.nonce = Nonce::from_bits(2);
    assert!(records.read(id).await.is_err());
    assert!(records.swap(id, &stored, &next).await.is_err());
    assert!(records.remove(id, &stored).await.is_err());
    assert!(records.create(id, &stored.record).await.is_err());
    assert_eq!(below(&outside.path().join("versions")), before);
    // All records.
    std::fs::rename(&locks, outside.path().join("locks")).unwrap();
    std::os::unix::fs::symlink(outside.path().join("locks"), &locks).unwrap();
    assert!(records.read(SandboxId::random()).await.is_err() && records.list(None, 10).await.is_err());
    let elsewhere = SandboxId::random();
    assert!(records.create(elsewhere, &stored.record).await.is_err());
    assert!(!outside.path().join("locks").join(format!("{elsewhere}.versions")).exists());
    assert!(DirectoryRecords::open(root.path(), Codec::default(), FailPoints::default()).is_err());
}

//! What a volume promises wherever it lies, as tests that each kind of place runs: `volume_conformance_tests!(subject())`.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{collections::BTreeMap, fs, path::Path, sync::Arc, time::Duration};

use object_store::ObjectStoreExt as _;
use sandboxer_protocol::SandboxId;

use crate::{
    CheckpointName, ChunkIndex, Error, Fault, Loader, Manifest, ManifestAt, Saver, Source, Tenant, Volume,
    collect::{Collector, Retention, Terms},
    contract::example,
    layout,
    lease::BootClock,
    record::{Nonce, OwnerChange, Record, RecordStore, Stamp},
};

/// Several of them are in a save.
const PACK_BYTES: usize = 512 << 10;
const SAVE_BYTES: usize = 3 << 20;

/// One kind of place under test.
pub trait Subject: Sync {
    /// The volume as one instance sees it; every call is another instance.
    fn volume(&self) -> Volume;
    /// The records beside it.
    fn records(&self) -> Arc<dyn RecordStore>;
    /// An empty directory of this machine.
    fn scratch(&self) -> &Path;
}

/// A test for each promise. `$subject` is an expression.
#[macro_export]
macro_rules! volume_conformance_tests {
    ($subject:expr) => {
        $crate::volume_conformance_tests!($subject;
            what_was_saved_comes_back_elsewhere,
            what_is_there_is_not_written_again,
            a_manifest_is_written_once,
            the_latest_can_be_named_again,
            names_are_listed_in_order_with_their_bytes,
            a_pack_that_is_gone_or_torn_is_told,
            what_nobody_needs_goes_and_all_else_stays,
        );
    };
    ($subject:expr; $($promise:ident),* $(,)?) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $promise() {
                let subject = $subject;
                $crate::conformance::$promise(&subject).await;
            }
        )*
    };
}

fn stamp() -> Stamp {
    Stamp { unix: 1_800_000_000, nonce: Nonce::random() }
}

fn content(seed: u64) -> Vec<u8> {
    let mut data = vec![0; SAVE_BYTES];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut data);
    // Some of it is zeros, and the end is no page.
    data[1 << 20..(1 << 20) + 100_000].fill(0);
    data.truncate(SAVE_BYTES - 1234);
    data
}

fn source(subject: &impl Subject, seed: u64) -> Vec<Source> {
    let path = subject.scratch().join(format!("source-{}", uuid::Uuid::new_v4()));
    fs::write(&path, content(seed)).unwrap();
    vec![Source { name: "pages.img".parse().unwrap(), path }]
}

async fn checkpoint(subject: &impl Subject, id: SandboxId, seed: u64) -> (CheckpointName, Manifest) {
    let volume = subject.volume();
    let saver = Saver::new(volume.clone(), ChunkIndex::default()).with_pack_bytes(PACK_BYTES);
    let saved = saver.save(Tenant::open(), &source(subject, seed), &[]).await.unwrap();
    let prepared = volume.prepare(&saved, example(id), None).await.unwrap();
    saved.finish().await;
    (prepared.name, prepared.manifest)
}

async fn load(subject: &impl Subject, manifest: &Manifest) -> crate::Result<Vec<u8>> {
    let into = subject.scratch().join(format!("loaded-{}", uuid::Uuid::new_v4()));
    fs::create_dir(&into).unwrap();
    Loader::new(subject.volume(), ChunkIndex::default()).load(manifest, &into, 1 << 30).await?;
    Ok(fs::read(into.join("pages.img")).unwrap())
}

pub async fn what_was_saved_comes_back_elsewhere(subject: &impl Subject) {
    let id = SandboxId::random();
    let (name, manifest) = checkpoint(subject, id, 1).await;
    assert!(manifest.packs().len() > 3, "it is in several packs");
    let read = subject.volume().checkpoint(id, name).await.unwrap();
    assert_eq!(read.packs(), manifest.packs());
    assert!(load(subject, &read).await.unwrap() == content(1));
    assert!(matches!(subject.volume().checkpoint(SandboxId::random(), name).await, Err(Error::NotFound { .. })));
}

pub async fn what_is_there_is_not_written_again(subject: &impl Subject) {
    let (_, manifest) = checkpoint(subject, SandboxId::random(), 2).await;
    let saver = Saver::new(subject.volume(), ChunkIndex::default());
    let saved = saver.save(Tenant::open(), &source(subject, 2), &[&manifest]).await.unwrap();
    assert_eq!((saved.stats.packs_written, saved.stats.written_bytes), (0, 0));
    assert_eq!(saved.relied_on.len(), manifest.packs().len());
    saved.finish().await;
}

pub async fn a_manifest_is_written_once(subject: &impl Subject) {
    let id = SandboxId::random();
    let (name, manifest) = checkpoint(subject, id, 3).await;
    let other = Saver::new(subject.volume(), ChunkIndex::default()).save(Tenant::open(), &source(subject, 4), &[]).await.unwrap();
    let at = ManifestAt::Checkpoint { sandbox_id: id, name };
    let second = subject.volume().put_manifest(&other.describe(at, example(id)).unwrap()).await;
    assert!(matches!(second, Err(Error::Exists { .. })), "{second:?}");
    assert_eq!(subject.volume().checkpoint(id, name).await.unwrap().packs(), manifest.packs());
    other.finish().await;
}

pub async fn the_latest_can_be_named_again(subject: &impl Subject) {
    let id = SandboxId::random();
    assert_eq!(subject.volume().latest(id).await.unwrap(), None);
    let names: Vec<_> = (1..4).map(|ms| CheckpointName::after(None, ms).unwrap()).collect();
    for name in names {
        subject.volume().put_latest(id, name).await.unwrap();
        assert_eq!(subject.volume().latest(id).await.unwrap(), Some(name));
    }
}

pub async fn names_are_listed_in_order_with_their_bytes(subject: &impl Subject) {
    let id = SandboxId::random();
    assert_eq!(subject.volume().checkpoints(id).await.unwrap(), []);
    let mut names = Vec::new();
    for seed in 10..13 {
        names.push(checkpoint(subject, id, seed).await.0);
    }
    assert_eq!(subject.volume().checkpoints(id).await.unwrap(), names);
    assert!(subject.volume().sandboxes().await.unwrap().contains(&id));
    let packs = subject.volume().all_packs().await.unwrap();
    let manifest = subject.volume().checkpoint(id, names[0]).await.unwrap();
    assert!(manifest.packs().iter().all(|pack| packs.get(&(manifest.tenant(), pack.id)) == Some(&pack.bytes)));
}

pub async fn a_pack_that_is_gone_or_torn_is_told(subject: &impl Subject) {
    let (_, manifest) = checkpoint(subject, SandboxId::random(), 20).await;
    let volume = subject.volume();
    let paths: Vec<_> = manifest.packs().iter().map(|pack| layout::pack(manifest.tenant(), pack.id)).collect();
    let whole = volume.store().get(&paths[1]).await.unwrap().bytes().await.unwrap();
    volume.store().put(&paths[1], whole.slice(..whole.len() / 2).into()).await.unwrap();
    let torn = load(subject, &manifest).await.unwrap_err();
    assert!(matches!(&torn, Error::Damaged { fault: Fault::TornPack { .. }, .. }), "{torn}");
    volume.store().put(&paths[1], whole.into()).await.unwrap();
    assert!(load(subject, &manifest).await.unwrap() == content(20));
    volume.store().delete(&paths[2]).await.unwrap();
    let gone = load(subject, &manifest).await.unwrap_err();
    assert!(matches!(&gone, Error::Damaged { fault: Fault::MissingPack { .. }, .. }), "{gone}");
}

pub async fn what_nobody_needs_goes_and_all_else_stays(subject: &impl Subject) {
    let records = subject.records();
    let ids = [SandboxId::random(), SandboxId::random()];
    let mut manifests = Vec::new();
    for (id, seed) in ids.iter().zip(30..) {
        let made = records.create(*id, &Record::first("i".parse().unwrap(), stamp(), BTreeMap::new())).await.unwrap();
        let (name, manifest) = checkpoint(subject, *id, seed).await;
        let published = made.record.by_owner(&made.record.holder().unwrap(), &[OwnerChange::Publish(name)], stamp()).unwrap();
        records.swap(*id, &made, &published).await.unwrap();
        manifests.push(manifest);
    }
    let there = records.read(ids[0]).await.unwrap().unwrap();
    let bury = OwnerChange::Bury { reason: "killed".to_owned() };
    let buried = there.record.by_owner(&there.record.holder().unwrap(), &[bury], stamp()).unwrap();
    records.swap(ids[0], &there, &buried).await.unwrap();
    let terms = Terms { retention: Retention::default(), longest_save: Duration::from_secs(5), remember: Some(Duration::ZERO) };
    let collector = Collector::new(subject.volume(), records, Arc::new(BootClock), "c".parse().unwrap(), terms);
    for _ in 0..2 {
        collector.collect().await.unwrap();
    }
    let left = subject.volume().all_packs().await.unwrap();
    let is_left = |manifest: &Manifest| manifest.packs().iter().filter(|pack| left.contains_key(&(manifest.tenant(), pack.id))).count();
    assert_eq!((is_left(&manifests[0]), is_left(&manifests[1])), (0, manifests[1].packs().len()));
    assert!(load(subject, &manifests[1]).await.unwrap() == content(31));
}

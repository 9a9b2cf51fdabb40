//! Collection beside writers: what is needed stays, whoever dies or dawdles, and what is not goes.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sandboxer_protocol::SandboxId;
use sandboxer_store::collect::{Collected, Collector, Retention, Terms, Writer};
use sandboxer_store::failpoint::FailPoints;
use sandboxer_store::lease::BootClock;
use sandboxer_store::record::{Codec, DirectoryRecords, Nonce, OwnerChange, Record, RecordStore, Stamp};
use sandboxer_store::{
    CheckpointName, ChunkIndex, Contract, Depth, Error, Filesystem, FilesystemName, ImageDigest, KeptName, Loader, Manifest, ManifestAt,
    Saved, Saver, SnapshotId, Source, Tenant, Volume, verify,
};

const LONGEST: Duration = Duration::from_millis(400);
const KEEP: Retention = Retention { checkpoints: 2, automatic: 1 };

struct Here {
    root: tempfile::TempDir,
    local: tempfile::TempDir,
    volume: Volume,
    records: Arc<DirectoryRecords>,
    index: ChunkIndex,
}

impl Here {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let volume = Volume::open_directory(root.path()).unwrap();
        let records = DirectoryRecords::open(root.path(), Codec::default(), FailPoints::default()).unwrap();
        Self { local: tempfile::tempdir().unwrap(), volume, records: Arc::new(records), root, index: ChunkIndex::default() }
    }

    fn saver(&self, longest: Duration) -> Saver {
        let writer = Writer::new("w".parse().unwrap(), Arc::new(BootClock), longest);
        Saver::new(self.volume.clone(), self.index.clone()).with_pack_bytes(256 << 10).with_writer(writer)
    }

    fn collector(&self, name: &str) -> Collector {
        self.patient_collector(name, LONGEST)
    }

    fn patient_collector(&self, name: &str, longest_save: Duration) -> Collector {
        let terms = Terms { retention: KEEP, longest_save, remember: Some(Duration::ZERO) };
        Collector::new(self.volume.clone(), self.records.clone(), Arc::new(BootClock), name.parse().unwrap(), terms)
    }

    async fn collect(&self) -> Collected {
        self.collector("c").collect().await.unwrap()
    }

    /// A MiB whose first half all have and whose second is the seed's own.
    fn sources(&self, seed: u64) -> Vec<Source> {
        let mut data = vec![0; 1 << 20];
        let (shared, own) = data.split_at_mut(1 << 19);
        blake3::Hasher::new().finalize_xof().fill(shared);
        blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(own);
        let path = self.local.path().join(format!("{}-{seed}", uuid::Uuid::new_v4()));
        fs::write(&path, data).unwrap();
        vec![Source { name: "pages.img".parse().unwrap(), path }]
    }

    async fn save(&self, seed: u64) -> Saved {
        self.saver(Duration::from_secs(60)).save(Tenant::open(), &self.sources(seed), &[]).await.unwrap()
    }

    async fn create(&self) -> SandboxId {
        let id = SandboxId::random();
        self.records.create(id, &Record::first("i".parse().unwrap(), stamp(), BTreeMap::new())).await.unwrap();
        id
    }

    async fn change(&self, id: SandboxId, change: OwnerChange) {
        let there = self.records.read(id).await.unwrap().unwrap();
        let next = there.record.by_owner(&there.record.holder().unwrap(), &[change], stamp()).unwrap();
        self.records.swap(id, &there, &next).await.unwrap();
    }

    async fn publish(&self, id: SandboxId, saved: Saved, automatic: bool) -> Result<Manifest, Error> {
        let latest = self.records.read(id).await.unwrap().unwrap().record.latest;
        let prepared = self.volume.prepare(&saved, Contract { automatic, ..contract(id) }, latest).await;
        saved.finish().await;
        let prepared = prepared?;
        self.change(id, OwnerChange::Publish(prepared.name)).await;
        Ok(prepared.manifest)
    }

    async fn checkpoint(&self, id: SandboxId, seed: u64) -> Manifest {
        let saved = self.save(seed).await;
        self.publish(id, saved, false).await.unwrap()
    }

    async fn kill(&self, id: SandboxId) {
        self.change(id, OwnerChange::Bury { reason: "killed".to_owned() }).await;
    }

    async fn is_whole(&self, manifest: &Manifest) -> bool {
        let into = tempfile::tempdir().unwrap();
        let loader = Loader::new(self.volume.clone(), ChunkIndex::default());
        loader.load(&self.volume.manifest(manifest.at()).await.unwrap(), into.path(), u64::MAX).await.is_ok()
    }

    async fn verify(&self) {
        let report = verify(&Loader::new(self.volume.clone(), ChunkIndex::default()), &[], Depth::Everything).await.unwrap();
        assert!(report.is_clean(), "{:?}", report.faults);
    }

    fn files(&self) -> Vec<PathBuf> {
        let mut found: Vec<_> =
            files(self.root.path()).into_iter().filter(|path| !path.starts_with(self.root.path().join("locks"))).collect();
        found.sort();
        found
    }

    fn below(&self, dir: &str) -> Vec<PathBuf> {
        // What is still being written has a number behind its name, and nobody sees it.
        let whole = |path: &PathBuf| !path.to_string_lossy().contains('#');
        self.files().into_iter().filter(|path| path.starts_with(self.root.path().join(dir)) && whole(path)).collect()
    }
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().unwrap().is_dir() { found.extend(files(&entry.path())) } else { found.push(entry.path()) }
    }
    found
}

fn stamp() -> Stamp {
    Stamp { unix: 0, nonce: Nonce::random() }
}

fn contract(sandbox_id: SandboxId) -> Contract {
    Contract {
        sandbox_id,
        created_at: jiff::Timestamp::now(),
        parent: None,
        epoch: 1,
        automatic: false,
        name: None,
        runsc_version: "release-20260905.0".into(),
        platform: "systrap".into(),
        cpu_features: Vec::new(),
        image: ImageDigest::from_bytes([1; 32]),
        agent_version: "0.1.0".into(),
        spec: serde_json::Value::Null,
        state: serde_json::Value::Null,
        other: serde_json::Map::new(),
    }
}

#[tokio::test]
async fn the_newest_stay_what_the_record_names_stays_and_the_rest_goes() {
    let here = Here::new();
    let id = here.create().await;
    let mut made = Vec::new();
    for (seed, automatic) in [(1, false), (2, true), (3, false), (4, false), (5, true), (6, true)] {
        let saved = here.save(seed).await;
        made.push(here.publish(id, saved, automatic).await.unwrap());
    }
    let saved = here.save(7).await;
    let snapshot = here.volume.put_snapshot(&saved, contract(id), SnapshotId::random()).await.unwrap();
    saved.finish().await;
    let before = here.files();
    let would = here.collector("c").plan().await.unwrap();
    assert_eq!(here.files(), before, "a look changes nothing");
    let done = here.collect().await;
    assert_eq!((would.checkpoints, would.packs, would.bytes()), (done.checkpoints, done.packs, done.bytes()));
    assert_eq!(done.checkpoints, 3, "{done:?}");
    assert!(done.packs >= 3 && done.pack_bytes > 3 << 18, "{done:?}");
    let left = here.volume.checkpoints(id).await.unwrap();
    let expected: Vec<_> = [2, 3, 5].iter().map(|n: &usize| made[*n].at()).collect();
    let left: Vec<_> = left.into_iter().map(|name| ManifestAt::Checkpoint { sandbox_id: id, name }).collect();
    assert_eq!(left, expected);
    for manifest in [&made[2], &made[3], &made[5], &snapshot] {
        assert!(here.is_whole(manifest).await);
    }
    here.verify().await;
    assert!(here.below("collect/intents").is_empty() && here.below("collect/condemned").is_empty());
    assert_eq!(here.collect().await, Collected::default(), "there is nothing more to do");
}

#[tokio::test]
async fn of_a_killed_sandbox_nothing_is_left_but_what_its_copies_and_snapshots_need() {
    let here = Here::new();
    let (id, copy) = (here.create().await, here.create().await);
    let manifest = here.checkpoint(id, 1).await;
    here.volume.put_latest(id, CheckpointName::at(1).unwrap()).await.unwrap();
    let again = here.saver(Duration::from_secs(60)).save_again(&manifest, &[]).await.unwrap();
    assert_eq!((again.stats.written_bytes, again.stats.reused_bytes), (0, 1 << 20));
    let copied = here.publish(copy, again, false).await.unwrap();
    here.kill(id).await;
    let done = here.collect().await;
    assert_eq!((done.checkpoints, done.packs, done.sandboxes, done.tombstones), (1, 0, 1, 1), "{done:?}");
    assert!(here.is_whole(&copied).await);
    assert!(!here.root.path().join(id.to_string()).exists() && here.records.read(id).await.unwrap().is_none());
    here.kill(copy).await;
    let done = here.collect().await;
    assert!(done.packs > 0 && here.below("packs").is_empty(), "{done:?}");
    let left: Vec<_> = here.files();
    assert_eq!(left, [here.root.path().join("collect/reserve")]);
}

#[tokio::test]
async fn a_sandbox_that_is_gone_goes_from_the_list_of_its_tenant_and_no_other_does() {
    let here = Here::new();
    let (resting, killed, tenant) = (here.create().await, here.create().await, Tenant::of_key(b"key"));
    for id in [resting, killed] {
        here.checkpoint(id, 1).await;
        here.volume.put_kept(tenant, KeptName::new(1, id)).await.unwrap();
    }
    // One whose record went already, and one that is being made by somebody else.
    here.volume.put_kept(tenant, KeptName::new(2, SandboxId::random())).await.unwrap();
    let unsaved = here.create().await;
    here.volume.put_kept(Tenant::open(), KeptName::new(3, unsaved)).await.unwrap();
    here.collect().await;
    let listed = |tenant| here.volume.kept(tenant, None, 10);
    assert_eq!(listed(tenant).await.unwrap().iter().filter(|name| [resting, killed].contains(&name.id())).count(), 2);
    assert_eq!(listed(tenant).await.unwrap().len(), 2, "nobody knows the third");
    here.kill(killed).await;
    here.collect().await;
    assert_eq!(listed(tenant).await.unwrap(), [KeptName::new(1, resting)]);
    assert_eq!(listed(Tenant::open()).await.unwrap(), [KeptName::new(3, unsaved)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_writer_relies_on_is_kept_until_it_is_done() {
    let here = Arc::new(Here::new());
    let (id, other) = (here.create().await, here.create().await);
    here.checkpoint(id, 1).await;
    let saved = here.save(1).await;
    assert!(!saved.relied_on.is_empty() && saved.stats.written_bytes == 0);
    here.kill(id).await;
    let collecting = tokio::spawn({
        let here = Arc::clone(&here);
        // However long the disk takes for the writer's intent.
        async move { here.patient_collector("c", Duration::from_secs(60)).collect().await.unwrap() }
    });
    // The list is there: the collector waits for the writer.
    while here.below("collect/condemned").is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Who comes now does not rely on it.
    let late = here.save(1).await;
    assert!(late.relied_on.is_empty() && late.stats.written_bytes > 0, "{:?}", late.stats);
    let manifest = here.publish(other, saved, false).await.unwrap();
    // The collector may have seen this one come as well, and waits for it then.
    let third = here.create().await;
    let late = here.publish(third, late, false).await.unwrap();
    let done = collecting.await.unwrap();
    assert!(done.spared > 0 && done.packs == 0, "{done:?}");
    assert!(here.is_whole(&manifest).await && here.is_whole(&late).await);
    here.verify().await;
}

#[tokio::test]
async fn a_writer_that_dies_is_waited_for_and_then_no_longer() {
    let here = Here::new();
    let id = here.create().await;
    let saved = here.saver(LONGEST).save(Tenant::open(), &here.sources(1), &[]).await.unwrap();
    let began = std::time::Instant::now();
    let done = here.collect().await;
    assert!(began.elapsed() >= 2 * LONGEST, "{:?}", began.elapsed());
    assert!(done.dead_writers == 1 && done.packs > 0 && here.below("packs").is_empty(), "{done:?}");
    // It was not dead, only slow: it fails, and can do it again.
    let late = here.publish(id, saved, false).await;
    assert!(matches!(late, Err(Error::TookTooLong { .. })), "{late:?}");
    assert!(here.volume.checkpoints(id).await.unwrap().is_empty());
    let manifest = here.checkpoint(id, 1).await;
    assert!(here.is_whole(&manifest).await);
}

#[tokio::test]
async fn a_save_that_takes_too_long_fails_also_if_nobody_collects() {
    let here = Here::new();
    let id = here.create().await;
    let saved = here.saver(Duration::from_millis(1)).save(Tenant::open(), &here.sources(1), &[]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert!(matches!(here.publish(id, saved, false).await, Err(Error::TookTooLong { .. })));
    assert!(here.below("collect/intents").is_empty());
}

#[tokio::test]
async fn what_is_gone_or_condemned_is_written_anew_for_a_copy() {
    let here = Here::new();
    let (id, copy) = (here.create().await, here.create().await);
    let sources = here.sources(1);
    let saved = here.saver(Duration::from_secs(60)).save(Tenant::open(), &sources, &[]).await.unwrap();
    let manifest = here.publish(id, saved, false).await.unwrap();
    here.kill(id).await;
    here.collect().await;
    assert!(here.below("packs").is_empty());
    let again = here.saver(Duration::from_secs(60)).save_again(&manifest, &sources).await.unwrap();
    assert!(again.stats.written_bytes > 0);
    let copied = here.publish(copy, again, false).await.unwrap();
    assert!(here.is_whole(&copied).await);
}

#[tokio::test]
async fn a_collection_that_was_cut_off_is_gone_on_with() {
    let here = Here::new();
    let mut kept = Vec::new();
    for round in 0..12 {
        let (id, other) = (here.create().await, here.create().await);
        here.checkpoint(id, round).await;
        kept.push(here.checkpoint(other, round + 1000).await);
        here.kill(id).await;
        // Somewhere in the middle.
        let _ = tokio::time::timeout(Duration::from_micros(600 * round), here.collector("dies").collect()).await;
    }
    // What was asked for may still be under way.
    let gone = async {
        loop {
            here.collect().await;
            if here.below("collect/condemned").is_empty() && here.below("collect/intents").is_empty() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), gone).await.expect("something of them is left");
    for manifest in &kept {
        assert!(here.is_whole(manifest).await);
    }
    let needed: std::collections::BTreeSet<_> = kept.iter().flat_map(|manifest| manifest.packs().iter().map(|pack| pack.id)).collect();
    let there = here.volume.packs(Tenant::open()).await.unwrap();
    assert_eq!(there, needed.into_iter().collect::<Vec<_>>());
    here.verify().await;
}

#[tokio::test]
async fn while_something_cannot_be_read_no_pack_goes() {
    let here = Here::new();
    let (id, dead) = (here.create().await, here.create().await);
    let manifest = here.checkpoint(id, 1).await;
    here.checkpoint(dead, 2).await;
    here.kill(dead).await;
    let path = here.root.path().join(manifest.path().to_string());
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let done = here.collect().await;
    assert!(done.packs == 0 && done.unreadable.len() == 1 && done.unreadable[0].contains("torn"), "{done:?}");
    fs::write(&path, bytes).unwrap();
    assert!(here.collect().await.packs > 0);
    assert!(here.is_whole(&manifest).await);
}

#[tokio::test]
async fn a_sandbox_without_a_record_and_what_is_newer_than_the_record_stay() {
    let here = Here::new();
    let (unknown, id) = (SandboxId::random(), here.create().await);
    let saved = here.save(1).await;
    let prepared = here.volume.prepare(&saved, contract(unknown), None).await.unwrap();
    drop(saved);
    here.checkpoint(id, 2).await;
    let saved = here.save(3).await;
    let later = here.volume.prepare(&saved, contract(id), None).await.unwrap();
    saved.finish().await;
    let done = here.collect().await;
    assert_eq!((done.checkpoints, done.packs), (0, 0), "{done:?}");
    assert!(here.is_whole(&prepared.manifest).await && here.is_whole(&later.manifest).await);
}

#[tokio::test]
async fn who_needs_what_is_told_to_the_byte() {
    let here = Here::new();
    let (one, other) = (here.create().await, here.create().await);
    for seed in [1, 2] {
        here.checkpoint(one, seed).await;
    }
    here.checkpoint(other, 3).await;
    let half = 1 << 19;
    let usage = here.volume.usage(|manifest| Some(manifest.contract().unwrap().sandbox_id)).await.unwrap();
    let (first, second) = (usage.shares[&one], usage.shares[&other]);
    // The half that all have, and the other half of each: chunks at the border may have a bit of both.
    let near = |found: u64, expected: u64| found.abs_diff(expected) <= half / 2;
    assert!(near(first.own, 2 * half) && near(second.own, half), "{usage:?}");
    assert!(near(first.shared, half) && first.shared == second.shared && usage.shared == first.shared, "{usage:?}");
    assert_eq!(usage.needed(), first.own + second.own + usage.shared);
    assert!(usage.packs >= usage.needed() && usage.packs < usage.needed() + (1 << 16), "{usage:?}");
}

#[tokio::test]
async fn a_full_volume_is_collected_by_shorter_lists_and_by_what_manifests_leave() {
    for reserve in [true, false] {
        let here = Here::new();
        let id = here.create().await;
        here.checkpoint(id, 1).await;
        here.kill(id).await;
        if reserve {
            here.collector("c").keep_reserve().await;
        }
        let tight = Volume::on(Arc::new(Tight {
            store: here.volume.store().clone(),
            root: here.root.path().to_owned(),
            was: files(here.root.path()).len(),
        }));
        let terms = Terms { retention: KEEP, longest_save: LONGEST, remember: None };
        let collector = Collector::new(tight, here.records.clone(), Arc::new(BootClock), "c".parse().unwrap(), terms);
        let done = collector.collect().await.unwrap();
        assert!(done.packs > 1 && here.below("packs").is_empty(), "{done:?}");
    }
}

/// A volume that has no room for a list until a file is gone.
#[derive(Debug)]
struct Tight {
    store: Arc<dyn object_store::ObjectStore>,
    root: PathBuf,
    was: usize,
}

impl std::fmt::Display for Tight {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("tight")
    }
}

#[async_trait::async_trait]
impl object_store::ObjectStore for Tight {
    async fn put_opts(
        &self,
        location: &object_store::path::Path,
        payload: object_store::PutPayload,
        options: object_store::PutOptions,
    ) -> object_store::Result<object_store::PutResult> {
        if location.as_ref().starts_with("collect/condemned") && files(&self.root).len() >= self.was {
            let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
            return Err(object_store::Error::Generic { store: "tight", source: full.into() });
        }
        self.store.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &object_store::path::Path,
        options: object_store::PutMultipartOptions,
    ) -> object_store::Result<Box<dyn object_store::MultipartUpload>> {
        self.store.put_multipart_opts(location, options).await
    }

    async fn get_opts(
        &self,
        location: &object_store::path::Path,
        options: object_store::GetOptions,
    ) -> object_store::Result<object_store::GetResult> {
        self.store.get_opts(location, options).await
    }

    fn delete_stream(
        &self,
        locations: futures_util::stream::BoxStream<'static, object_store::Result<object_store::path::Path>>,
    ) -> futures_util::stream::BoxStream<'static, object_store::Result<object_store::path::Path>> {
        self.store.delete_stream(locations)
    }

    fn list(
        &self,
        prefix: Option<&object_store::path::Path>,
    ) -> futures_util::stream::BoxStream<'static, object_store::Result<object_store::ObjectMeta>> {
        self.store.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&object_store::path::Path>) -> object_store::Result<object_store::ListResult> {
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(
        &self,
        from: &object_store::path::Path,
        to: &object_store::path::Path,
        options: object_store::CopyOptions,
    ) -> object_store::Result<()> {
        self.store.copy_opts(from, to, options).await
    }
}

#[tokio::test]
async fn what_writers_left_half_done_goes() {
    let here = Here::new();
    here.create().await;
    let dir = here.root.path().join("packs").join(Tenant::open().to_string());
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("0123.pack#42"), b"half").unwrap();
    let done = here.collect().await;
    assert_eq!((done.staged, done.staged_bytes), (1, 4));
    assert!(here.below("packs").is_empty());
}

#[tokio::test]
async fn a_list_that_a_collector_has_not_named_yet_is_its_own_for_as_long_as_one_that_it_has() {
    let here = Here::new();
    here.create().await;
    let dir = here.root.path().join("collect/condemned");
    fs::create_dir_all(&dir).unwrap();
    let list = dir.join("half-written#42");
    fs::write(&list, b"half").unwrap();
    // Whoever collects once does not know how long it has been there.
    assert_eq!((here.collect().await.staged, list.exists()), (0, true));
    let collector = here.patient_collector("patient", Duration::from_secs(600));
    for _ in 0..2 {
        assert_eq!((collector.collect().await.unwrap().staged, list.exists()), (0, true));
    }
    let collector = here.collector("hasty");
    assert_eq!(collector.collect().await.unwrap().staged, 0);
    tokio::time::sleep(2 * LONGEST).await;
    assert_eq!((collector.collect().await.unwrap().staged, list.exists()), (1, false));
}

#[tokio::test]
async fn a_background_collection_leaves_it_to_another_that_is_at_it() {
    let here = Here::new();
    let (id, writer) = (here.create().await, here.create().await);
    here.checkpoint(id, 1).await;
    let saved = here.save(2).await;
    here.kill(id).await;
    // One that never ends, as long as the writer is there.
    let other = here.collector("other");
    let listed = async {
        while here.below("collect/condemned").is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        done = other.collect() => panic!("a writer is there: {done:?}"),
        () = listed => {}
    }
    assert_eq!(here.below("collect/condemned").len(), 1);
    let collector = here.collector("c");
    assert!(collector.collect_unless_another_does().await.unwrap().left_to_another);
    here.publish(writer, saved, false).await.unwrap();
    tokio::time::sleep(2 * LONGEST).await;
    let done = collector.collect_unless_another_does().await.unwrap();
    assert!(!done.left_to_another && done.packs > 0, "{done:?}");
    assert_eq!(here.below("collect/condemned").len(), 1, "something that it names is in use");
    here.kill(writer).await;
    collector.collect().await.unwrap();
    assert!(here.below("collect/condemned").is_empty(), "what the other left goes when all of it is gone");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn writers_and_collectors_at_once_lose_nothing_and_leave_nothing() {
    const WRITERS: u64 = 3;
    const ROUNDS: u64 = 12;
    let here = Arc::new(Here::new());
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let collectors: Vec<_> = (0..2)
        .map(|number| {
            let (here, stop) = (Arc::clone(&here), Arc::clone(&stop));
            tokio::spawn(async move {
                // However long a writer's disk takes for an intent.
                let collector = here.patient_collector(&format!("c{number}"), Duration::from_secs(60));
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    collector.collect().await.unwrap();
                }
            })
        })
        .collect();
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let here = Arc::clone(&here);
            tokio::spawn(async move {
                let (mut kept, mut last) = (Vec::new(), None);
                for round in 0..ROUNDS {
                    let id = here.create().await;
                    // What another wrote, or will, or had collected.
                    let seed = (writer * 5 + round * 7) % 6;
                    let manifest = here.checkpoint(id, seed).await;
                    assert!(here.is_whole(&manifest).await, "{writer} {round}");
                    let copy = here.create().await;
                    let again = here.saver(Duration::from_secs(60)).save_again(&manifest, &here.sources(seed)).await.unwrap();
                    let copied = here.publish(copy, again, false).await.unwrap();
                    here.kill(id).await;
                    if let Some((id, manifest)) = last.replace((copy, copied)) {
                        if round % 3 == 0 { kept.push(manifest) } else { here.kill(id).await }
                    }
                }
                kept.extend(last.map(|(_, manifest)| manifest));
                kept
            })
        })
        .collect();
    let mut kept = Vec::new();
    for writer in writers {
        kept.extend(writer.await.unwrap());
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    for collector in collectors {
        collector.await.unwrap();
    }
    here.collect().await;
    for manifest in &kept {
        assert!(here.is_whole(manifest).await, "{}", manifest.at());
    }
    here.verify().await;
    let needed: std::collections::BTreeSet<_> = kept.iter().flat_map(|manifest| manifest.packs().iter().map(|pack| pack.id)).collect();
    assert_eq!(here.volume.packs(Tenant::open()).await.unwrap(), needed.into_iter().collect::<Vec<_>>());
    assert!(here.below("collect/condemned").is_empty() && here.below("collect/intents").is_empty());
}

#[tokio::test]
async fn a_filesystem_snapshot_keeps_its_data_until_it_is_replaced_or_deleted() {
    let here = Here::new();
    let collector = here.collector("c");
    let name: FilesystemName = "template".parse().unwrap();
    let put = async |seed: u64, replace: bool| {
        let saved = here.save(seed).await;
        let about = Filesystem {
            created_at: jiff::Timestamp::UNIX_EPOCH,
            sandbox_id: None,
            image: None,
            entries: 1,
            content_bytes: 1,
            other: serde_json::Map::new(),
        };
        let manifest = here.volume.put_filesystem(&saved, about, name, replace).await.unwrap();
        saved.finish().await;
        manifest
    };
    let first = put(1, false).await;
    collector.collect().await.unwrap();
    assert!(here.is_whole(&first).await);
    // The same collector: what it has read of the first one says nothing about the second.
    let second = put(2, true).await;
    let done = collector.collect().await.unwrap();
    assert!(done.packs > 0, "what only the first one needed is gone: {done:?}");
    assert!(here.is_whole(&second).await);
    here.verify().await;
    // A writer that says that it is at work and dawdles is waited for; the name is what counts in the end.
    let dawdling = here.save(3).await;
    assert!(!here.below("collect/intents").is_empty());
    drop(dawdling);
    assert!(here.volume.delete_filesystem(Tenant::open(), name).await.unwrap());
    collector.collect().await.unwrap();
    assert!(here.below("packs").is_empty() && here.below("collect/intents").is_empty(), "{:?}", here.files());
}

#[tokio::test]
async fn of_many_instances_one_collects_in_a_period() {
    let here = Here::new();
    let instances: Vec<_> = (0..10).map(|number| here.collector(&format!("c{number}"))).collect();
    for instance in &instances {
        instance.look_at_turn().await.unwrap();
    }
    for period in 0..3 {
        let mut collected = 0;
        for number in 0..instances.len() {
            // They come in another order each time.
            let instance = &instances[(number + period * 3) % instances.len()];
            collected += usize::from(!instance.collect_in_turn().await.unwrap().left_to_another);
        }
        assert!((1..=2).contains(&collected), "{collected} have collected");
    }
}

/// Dropped at whichever await it has got to after this many looks.
async fn cut_off<T>(work: impl Future<Output = T>, looks: usize) -> bool {
    let mut work = std::pin::pin!(work);
    for _ in 0..looks {
        if futures_util::poll!(&mut work).is_ready() {
            return false;
        }
        tokio::time::sleep(Duration::from_micros(50)).await;
    }
    true
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_cut_off_in_the_middle_of_a_save_keeps_no_collector_waiting() {
    let here = Here::new();
    let id = here.create().await;
    let (mut saves, mut commits) = (0, 0);
    for round in 0..60 {
        let (looks, sources) = (1 + round % 6, here.sources(round as u64));
        saves += usize::from(cut_off(here.saver(Duration::from_secs(60)).save(Tenant::open(), &sources, &[]), looks).await);
        let saved = here.save(1).await;
        commits += usize::from(cut_off(here.volume.prepare(&saved, contract(id), None), looks).await);
    }
    assert!(saves >= 10 && commits >= 10, "{saves} {commits}");
    // A minute and more before anybody is taken for dead.
    let gone = async {
        while !here.below("collect/intents").is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), gone).await.expect("nobody is at work any more");
}

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rand::{RngExt, SeedableRng, rngs::StdRng};
use sandboxer_protocol::SandboxId;

use super::*;
use crate::contract::example;
use crate::layout::CheckpointName;
use crate::{Error, Loader};

/// Half of it compresses.
pub(crate) fn memory(bytes: usize, seed: u64) -> Vec<u8> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut data = vec![0; bytes];
    for page in data.chunks_mut(4096) {
        if random.random() {
            random.fill(page);
        } else {
            let word: [u8; 16] = random.random();
            for (index, piece) in page.chunks_mut(16).enumerate() {
                piece.copy_from_slice(&word[..piece.len()]);
                piece[0] = index as u8;
            }
        }
    }
    data
}

pub(crate) struct Here {
    pub(crate) root: tempfile::TempDir,
    pub(crate) local: tempfile::TempDir,
    pub(crate) volume: Volume,
}

impl Here {
    pub(crate) fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let volume = Volume::open_directory(root.path()).unwrap();
        Self { root, local: tempfile::tempdir().unwrap(), volume }
    }

    pub(crate) fn saver(&self) -> Saver {
        Saver::new(self.volume.clone(), ChunkIndex::default())
    }

    pub(crate) fn loader(&self) -> Loader {
        Loader::new(self.volume.clone(), ChunkIndex::default())
    }

    pub(crate) fn source(&self, name: &str, data: &[u8]) -> Source {
        let path = self.local.path().join(name);
        fs::write(&path, data).unwrap();
        Source { name: name.parse().unwrap(), path }
    }

    /// A checkpoint of these files, its manifest written.
    pub(crate) async fn checkpoint(&self, sandbox_id: SandboxId, sources: &[Source], parents: &[&Manifest]) -> (Manifest, SaveStats) {
        let saved = self.saver().save(Tenant::open(), sources, parents).await.unwrap();
        let prepared = self.volume.prepare(&saved, example(sandbox_id), None).await.unwrap();
        (prepared.manifest, saved.stats)
    }

    pub(crate) fn file(&self, path: &object_store::path::Path) -> std::path::PathBuf {
        self.root.path().join(path.as_ref())
    }
}

async fn loaded(here: &Here, manifest: &Manifest) -> Vec<Vec<u8>> {
    let into = tempfile::tempdir().unwrap();
    here.loader().load(manifest, into.path(), u64::MAX).await.unwrap();
    manifest.files().iter().map(|file| fs::read(into.path().join(file.name.as_str())).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn files_come_back_as_they_were() {
    let here = Here::new();
    let mut mixed = memory(40 << 20, 1);
    mixed[3 << 20..9 << 20].fill(0);
    mixed.extend_from_slice(b"not a whole page");
    let contents = [memory(5000, 2), Vec::new(), mixed, vec![0; 3 << 20], b"x".to_vec()];
    let names = ["checkpoint.img", "empty", "pages.img", "zeros", "one"];
    let sources: Vec<_> = names.iter().zip(&contents).map(|(name, data)| here.source(name, data)).collect();
    let sandbox_id = SandboxId::random();
    let (manifest, stats) = here.checkpoint(sandbox_id, &sources, &[]).await;
    assert_eq!(loaded(&here, &manifest).await, contents);
    assert_eq!(stats.raw_bytes, contents.iter().map(|data| data.len() as u64).sum::<u64>());
    assert!(stats.zero_bytes >= 8 << 20, "{stats:?}");
    assert!(stats.packs_written >= 2, "{stats:?}");
    let ManifestAt::Checkpoint { name, .. } = manifest.at() else { panic!("{manifest:?}") };
    assert_eq!(here.volume.checkpoint(sandbox_id, name).await.unwrap(), manifest);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_save_writes_what_changed() {
    let here = Here::new();
    let sandbox_id = SandboxId::random();
    let mut data = memory(100 << 20, 3);
    let (first, stats) = here.checkpoint(sandbox_id, &[here.source("pages.img", &data)], &[]).await;
    assert!(stats.written_bytes < 60 << 20, "{stats:?}");
    StdRng::seed_from_u64(4).fill(&mut data[33_000_000..33_000_000 + (1 << 20)]);
    // Nothing known but the parent: another process saves.
    let (second, stats) = here.checkpoint(sandbox_id, &[here.source("pages.img", &data)], &[&first]).await;
    assert!(stats.written_bytes < 2 << 20, "{stats:?}");
    assert_eq!(stats.packs_written, 1);
    assert!(loaded(&here, &second).await == [data]);
}

#[tokio::test(flavor = "multi_thread")]
async fn sandboxes_of_one_tenant_share_and_others_do_not() {
    let here = Here::new();
    let saver = here.saver();
    let sources = [here.source("pages.img", &memory(8 << 20, 5))];
    let (one, other) = (Tenant::of_key(b"one"), Tenant::of_key(b"other"));
    let first = saver.save(one, &sources, &[]).await.unwrap();
    let again = saver.save(one, &sources, &[]).await.unwrap();
    assert_eq!((again.stats.written_bytes, again.stats.reused_bytes), (0, 8 << 20));
    let foreign = saver.save(other, &sources, &[]).await.unwrap();
    assert_eq!(foreign.stats.reused_bytes, 0);
    let hashes = |saved: &Saved| saved.chunks.iter().map(|chunk| chunk.hash).collect::<HashSet<_>>();
    assert!(hashes(&first).is_disjoint(&hashes(&foreign)));
    assert_eq!(here.volume.packs(one).await.unwrap().len(), 1);
    assert_eq!(here.volume.packs(other).await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pack_that_has_gone_is_written_again() {
    let here = Here::new();
    let saver = here.saver();
    let data = memory(8 << 20, 6);
    let sources = [here.source("pages.img", &data)];
    let first = saver.save(Tenant::open(), &sources, &[]).await.unwrap();
    fs::remove_file(here.file(&layout::pack(Tenant::open(), first.packs[0].id))).unwrap();
    let second = saver.save(Tenant::open(), &sources, &[]).await.unwrap();
    let prepared = here.volume.prepare(&second, example(SandboxId::random()), None).await.unwrap();
    assert!(loaded(&here, &prepared.manifest).await == [data]);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_saves_at_once_share_their_memory_and_all_end() {
    let here = Here::new();
    let saver = here.saver().with_pack_bytes(1 << 20);
    let sources: Vec<_> = (0..5).map(|n| here.source(&format!("file{n}"), &memory(6 << 20, 20 + n))).collect();
    let saves = sources.iter().map(|source| saver.save(Tenant::open(), std::slice::from_ref(source), &[]));
    let saved = futures_util::future::try_join_all(saves).await.unwrap();
    assert!(saved.iter().all(|saved| saved.stats.raw_bytes == 6 << 20 && saved.stats.packs_written > 2));
    assert_eq!(saver.memory.available_permits(), PACKS_IN_MEMORY);
}

#[tokio::test]
async fn a_file_that_is_not_there_fails_the_save_and_leaves_nothing() {
    let here = Here::new();
    let source = Source { name: "pages.img".parse().unwrap(), path: here.local.path().join("none") };
    assert!(matches!(here.saver().save(Tenant::open(), &[source], &[]).await, Err(Error::Local { .. })));
    let left = fs::read_dir(here.root.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    assert_eq!(left, ["collect"]);
    assert_eq!(fs::read_dir(here.root.path().join("collect/intents")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_save_that_is_given_up_ends() {
    let here = Here::new();
    let saver = here.saver();
    let sources = [here.source("pages.img", &memory(64 << 20, 7))];
    for millis in [0, 5, 20, 60] {
        let save = saver.save(Tenant::open(), &sources, &[]);
        let _ = tokio::time::timeout(Duration::from_millis(millis), save).await;
    }
    // The turns were given back, and what was left behind harms nobody.
    let saved = saver.save(Tenant::open(), &sources, &[]).await.unwrap();
    assert_eq!(saved.stats.raw_bytes, 64 << 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_volume_fails_the_save_and_nothing_half_written_is_visible() {
    let here = Here::new();
    let points = crate::failpoint::FailPoints::parse("pack:written=full@2").unwrap();
    let volume = Volume::on(Arc::new(crate::LocalStore::open(here.root.path(), points).unwrap()));
    let saver = Saver::new(volume.clone(), ChunkIndex::default());
    let sources = [here.source("pages.img", &memory(64 << 20, 8))];
    let error = saver.save(Tenant::open(), &sources, &[]).await.unwrap_err();
    assert_eq!(error.action(), crate::Action::Unavailable);
    assert!(error.whole().contains("No space left"), "{}", error.whole());
    let left = fs::read_dir(here.file(&layout::packs(Tenant::open()))).unwrap();
    assert_eq!(left.count(), 0);
    assert!(saver.save(Tenant::open(), &sources, &[]).await.is_ok());
}

#[tokio::test]
async fn names_increase_whatever_the_clock_says() {
    let here = Here::new();
    let sandbox_id = SandboxId::random();
    let saved = here.saver().save(Tenant::open(), &[here.source("a", b"a")], &[]).await.unwrap();
    let at = |ms: i64| {
        let mut contract = example(sandbox_id);
        contract.created_at = jiff::Timestamp::from_millisecond(ms).unwrap();
        contract
    };
    let mut names = Vec::new();
    for ms in [1000, 1000, 5, 2000, 1999] {
        names.push(here.volume.prepare(&saved, at(ms), None).await.unwrap().name.ms());
    }
    assert_eq!(names, [1000, 1001, 1002, 2000, 2001]);
    // The record knows of one whose manifest is not listed.
    let after = CheckpointName::at(9000);
    assert_eq!(here.volume.prepare(&saved, at(1), after).await.unwrap().name.ms(), 9001);
    let both = tokio::join!(here.volume.prepare(&saved, at(10_000), None), here.volume.prepare(&saved, at(10_000), None));
    let mut both = [both.0.unwrap().name.ms(), both.1.unwrap().name.ms()];
    both.sort_unstable();
    assert_eq!(both, [10_000, 10_001]);
}

#[tokio::test]
async fn everything_on_the_volume_is_private() {
    use std::os::unix::fs::PermissionsExt;
    let here = Here::new();
    let sandbox_id = SandboxId::random();
    here.checkpoint(sandbox_id, &[here.source("a", b"a")], &[]).await;
    here.volume.put_latest(sandbox_id, CheckpointName::at(1).unwrap()).await.unwrap();
    fn walk(dir: &Path) {
        for entry in fs::read_dir(dir).unwrap().flatten() {
            let about = entry.metadata().unwrap();
            let private = if about.is_dir() { 0o700 } else { 0o600 };
            assert_eq!(about.permissions().mode() & 0o777, private, "{:?}", entry.path());
            if about.is_dir() {
                walk(&entry.path());
            }
        }
    }
    walk(here.root.path());
}

#[test]
fn the_work_can_be_given_to_a_task() {
    fn takes<T: Send + 'static>(_: impl FnOnce(Here) -> T) {}
    takes(|here| async move {
        let saver = here.saver();
        let sources = [here.source("a", b"a")];
        let saved = saver.save(Tenant::open(), &sources, &[]).await?;
        let prepared = here.volume.prepare(&saved, example(SandboxId::random()), None).await?;
        here.loader().load(&prepared.manifest, here.local.path(), 1).await?;
        let cache = crate::Cache::open(here.local.path(), 1, here.loader())?;
        let manifest = Arc::new(prepared.manifest);
        cache.adopt(&manifest, here.local.path()).await?;
        cache.files(&manifest, 1).await?;
        saver.put_image(crate::ImageDigest::from_bytes([0; 32]), here.local.path()).await?;
        here.loader().fetch_image(crate::ImageDigest::from_bytes([0; 32]), here.local.path()).await?;
        here.volume.intact_before(SandboxId::random(), prepared.name).await?;
        crate::verify(&here.loader(), &[], crate::Depth::Everything).await
    });
}

/// What somebody writes while it is saved, and how far that has come.
fn growing(here: &Here, name: &str) -> (Source, fs::File, watch::Sender<Growth>) {
    let source = here.source(name, &[]);
    let file = fs::File::options().write(true).open(&source.path).unwrap();
    (source, file, watch::Sender::new(Growth::default()))
}

async fn until_some_is_stored(here: &Here) {
    let stored = async {
        while here.volume.packs(Tenant::open()).await.unwrap().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), stored).await.expect("it is stored before all of it is there");
}

#[tokio::test]
async fn a_file_is_stored_while_it_is_written_and_comes_back_as_it_was_in_the_end() {
    let here = Here::new();
    let (first, file, growth) = growing(&here, "pages");
    let data = memory(9 << 20, 1);
    let saver = here.saver().with_pack_bytes(1 << 20);
    let (by, of, grows) = (saver.clone(), first.clone(), growth.subscribe());
    let saving = tokio::spawn(async move { by.save_growing(Tenant::open(), &of, grows, &[]).await });
    // What is beyond what is told of is not there yet, whatever the file holds.
    file.write_all_at(&data[..5 << 20], 0).unwrap();
    file.write_all_at(&vec![0xEE; 1 << 20], 5 << 20).unwrap();
    growth.send_modify(|growth| growth.bytes = 5 << 20);
    until_some_is_stored(&here).await;
    file.write_all_at(&data[5 << 20..], 5 << 20).unwrap();
    let small = here.source("small", b"small");
    growth.send_modify(|growth| growth.files = Some(vec![first.clone(), small.clone()]));
    let saved = saving.await.unwrap().unwrap();
    // As if it had been there all the while.
    let at_once = here.saver().save(Tenant::open(), &[first, small], &[]).await.unwrap();
    assert_eq!(saved.files, at_once.files);
    let manifest = here.volume.prepare(&saved, example(SandboxId::random()), None).await.unwrap().manifest;
    let files = loaded(&here, &manifest).await;
    assert!(files[0] == data);
    assert_eq!(files[1], b"small");
    saved.finish().await;
    at_once.finish().await;
}

#[tokio::test]
async fn what_was_stored_of_a_file_that_nobody_finishes_is_withdrawn() {
    let here = Here::new();
    let (first, file, growth) = growing(&here, "pages");
    file.write_all_at(&memory(4 << 20, 2), 0).unwrap();
    growth.send_modify(|growth| growth.bytes = 4 << 20);
    let grows = growth.subscribe();
    let saver = here.saver().with_pack_bytes(1 << 20);
    let saving = tokio::spawn(async move { saver.save_growing(Tenant::open(), &first, grows, &[]).await });
    until_some_is_stored(&here).await;
    drop(growth);
    let failed = tokio::time::timeout(Duration::from_secs(60), saving).await.unwrap().unwrap();
    assert!(matches!(failed, Err(Error::Interrupted)), "{failed:?}");
    assert!(here.volume.packs(Tenant::open()).await.unwrap().is_empty());
}

#[tokio::test]
async fn one_file_may_be_all_that_there_is_and_another_than_was_expected() {
    let here = Here::new();
    let expected = Source { name: "pages".parse().unwrap(), path: here.local.path().join("pages") };
    let growth = watch::Sender::new(Growth { bytes: 0, files: Some(vec![here.source("all", b"all of it")]) });
    let saved = here.saver().save_growing(Tenant::open(), &expected, growth.subscribe(), &[]).await.unwrap();
    assert_eq!((saved.files.len(), saved.files[0].name.as_str()), (1, "all"));
    saved.finish().await;
}

#[tokio::test]
async fn others_are_saved_while_somebody_takes_forever_to_write() {
    let here = Here::new();
    let saver = here.saver().with_pack_bytes(1 << 20);
    // More than there are turns; of one there is something to read, of the others nothing.
    let mut slow = Vec::new();
    for number in 0..4 {
        let (first, file, growth) = growing(&here, &format!("slow_{number}"));
        file.write_all_at(&memory(2 << 20, number), 0).unwrap();
        growth.send_modify(|growth| growth.bytes = if number == 0 { 2 << 20 } else { 0 });
        let (by, of, grows) = (saver.clone(), first.clone(), growth.subscribe());
        let saving = tokio::spawn(async move { by.save_growing(Tenant::open(), &of, grows, &[]).await });
        slow.push((first, growth, saving));
    }
    let other = here.source("other", &memory(3 << 20, 9));
    let saved = tokio::time::timeout(Duration::from_secs(60), saver.save(Tenant::open(), &[other], &[])).await;
    saved.expect("it does not wait for them").unwrap().finish().await;
    // Each is whole in the end, whether it was read before or not.
    for (first, growth, saving) in slow.into_iter().rev() {
        growth.send_modify(|growth| growth.files = Some(vec![first]));
        let saved = tokio::time::timeout(Duration::from_secs(60), saving).await.expect("it is written").unwrap().unwrap();
        assert_eq!(saved.stats.raw_bytes, 2 << 20);
        saved.finish().await;
    }
}

/// What is read and written by the threads for files must not wait for those who save.
#[test]
fn saves_need_no_thread_of_those_that_files_are_written_by() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build().unwrap();
    runtime.block_on(async {
        let here = Here::new();
        let saver = here.saver().with_pack_bytes(1 << 20);
        let sources = [1, 2].map(|number| here.source(&format!("file_{number}"), &memory(8 << 20, number)));
        let saves = sources.each_ref().map(|source| saver.save(Tenant::open(), std::slice::from_ref(source), &[]));
        let saves = futures_util::future::join_all(saves);
        for saved in tokio::time::timeout(Duration::from_secs(60), saves).await.expect("they do not wait for each other") {
            saved.unwrap().finish().await;
        }
    });
}

use sandboxer_protocol::SandboxId;

use super::*;
use crate::save::tests::{Here, memory};

struct Cached {
    here: Here,
    dir: tempfile::TempDir,
}

impl Cached {
    fn new() -> Self {
        Self { here: Here::new(), dir: tempfile::tempdir().unwrap() }
    }

    fn cache(&self, max_bytes: u64) -> Cache {
        Cache::open(&self.dir.path().join("cache"), max_bytes, self.here.loader()).unwrap()
    }

    async fn manifest(&self, seed: u64) -> (Arc<Manifest>, Vec<u8>) {
        let data = memory(1 << 20, seed);
        let (manifest, _) = self.here.checkpoint(SandboxId::random(), &[self.here.source("pages.img", &data)], &[]).await;
        (Arc::new(manifest), data)
    }

    fn sets(&self) -> usize {
        fs::read_dir(self.dir.path().join("cache/sets")).unwrap().count()
    }

    /// Neither work nor trash.
    fn rest(&self) -> usize {
        fs::read_dir(self.dir.path().join("cache")).unwrap().count() - 2
    }
}

fn bytes(set: &FileSet) -> Vec<u8> {
    fs::read(set.dir().join("pages.img")).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_use_reads_nothing_from_the_volume() {
    let cached = Cached::new();
    let cache = cached.cache(u64::MAX);
    let (manifest, data) = cached.manifest(1).await;
    let first = cache.files(&manifest, u64::MAX).await.unwrap();
    assert_eq!((first.origin, bytes(&first) == data), (Origin::Loaded, true));
    drop(first);
    fs::remove_dir_all(cached.here.root.path().join("packs")).unwrap();
    // Also from another server on the machine.
    for cache in [cache, cached.cache(u64::MAX)] {
        let again = cache.files(&manifest, u64::MAX).await.unwrap();
        assert_eq!((again.origin, bytes(&again) == data), (Origin::Cached, true));
    }
    assert_eq!(cached.rest(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_touched_file_is_hashed_and_a_changed_one_loaded_anew() {
    let cached = Cached::new();
    let cache = cached.cache(u64::MAX);
    let (manifest, data) = cached.manifest(2).await;
    let path = cache.files(&manifest, u64::MAX).await.unwrap().dir().join("pages.img");
    fs::write(&path, &data).unwrap();
    assert_eq!(cache.files(&manifest, u64::MAX).await.unwrap().origin, Origin::Checked);
    assert_eq!(cache.files(&manifest, u64::MAX).await.unwrap().origin, Origin::Cached);
    let mut flipped = data.clone();
    flipped[500_000] ^= 1;
    for wrong in [&flipped[..], &data[..1000], b""] {
        fs::write(&path, wrong).unwrap();
        let set = cache.files(&manifest, u64::MAX).await.unwrap();
        assert_eq!((set.origin, bytes(&set) == data), (Origin::Loaded, true));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_set_goes_even_while_another_server_holds_it() {
    let cached = Cached::new();
    let (cache, other) = (cached.cache(u64::MAX), cached.cache(u64::MAX));
    let (manifest, data) = cached.manifest(7).await;
    let held = other.files(&manifest, u64::MAX).await.unwrap();
    fs::write(held.dir().join("pages.img"), vec![1; data.len()]).unwrap();
    let set = cache.files(&manifest, u64::MAX).await.unwrap();
    assert_eq!((set.origin, bytes(&set) == data), (Origin::Loaded, true));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seal_of_another_boot_or_a_torn_one_is_not_trusted() {
    let cached = Cached::new();
    let cache = cached.cache(u64::MAX);
    let (manifest, _) = cached.manifest(3).await;
    let set = cache.files(&manifest, u64::MAX).await.unwrap();
    let seal = set.dir().parent().unwrap().join("seal");
    drop(set);
    let text = fs::read_to_string(&seal).unwrap();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    for wrong in [text.replace(boot.trim(), "another"), text[..text.len() / 2].to_owned(), String::new()] {
        fs::write(&seal, wrong).unwrap();
        assert_eq!(cache.files(&manifest, u64::MAX).await.unwrap().origin, Origin::Checked);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_longest_unused_goes_first_and_what_is_in_use_stays() {
    let cached = Cached::new();
    let cache = cached.cache(2 << 20);
    let mut manifests = Vec::new();
    for seed in 10..14 {
        manifests.push(cached.manifest(seed).await.0);
    }
    let held = cache.files(&manifests[0], u64::MAX).await.unwrap();
    for manifest in &manifests[1..] {
        drop(cache.files(manifest, u64::MAX).await.unwrap());
    }
    assert_eq!(cached.sets(), 2);
    assert!(held.dir().join("pages.img").exists());
    assert_eq!(cache.files(&manifests[3], u64::MAX).await.unwrap().origin, Origin::Cached);
    assert_eq!(cache.files(&manifests[1], u64::MAX).await.unwrap().origin, Origin::Loaded);
    assert_eq!(cached.rest(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_just_saved_is_taken_over_without_a_copy() {
    use std::os::unix::fs::MetadataExt;
    let cached = Cached::new();
    let cache = cached.cache(u64::MAX);
    let (manifest, data) = cached.manifest(4).await;
    let from = cached.dir.path().join("image");
    fs::create_dir(&from).unwrap();
    fs::write(from.join("pages.img"), &data[..10]).unwrap();
    assert!(!cache.adopt(&manifest, &from).await.unwrap());
    assert!(from.join("pages.img").exists());
    fs::write(from.join("pages.img"), &data).unwrap();
    let inode = fs::metadata(from.join("pages.img")).unwrap().ino();
    assert!(cache.adopt(&manifest, &from).await.unwrap());
    let set = cache.files(&manifest, u64::MAX).await.unwrap();
    assert_eq!((set.origin, bytes(&set) == data), (Origin::Cached, true));
    assert_eq!(fs::metadata(set.dir().join("pages.img")).unwrap().ino(), inode);
    assert_eq!(cached.rest(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_at_once_load_once() {
    let cached = Cached::new();
    let cache = cached.cache(u64::MAX);
    let (manifest, _) = cached.manifest(5).await;
    let sets = futures_util::future::try_join_all((0..8).map(|_| cache.files(&manifest, u64::MAX))).await.unwrap();
    assert_eq!(sets.iter().filter(|set| set.origin == Origin::Loaded).count(), 1);
    assert_eq!(cached.sets(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_server_left_is_swept_and_what_a_living_one_fills_is_not() {
    let cached = Cached::new();
    let cache = cached.cache(u64::MAX);
    let living = cache.inner.begin().unwrap();
    let dead = cached.dir.path().join("cache/work-dead");
    fs::create_dir_all(dead.join("image")).unwrap();
    fs::write(dead.join("lock"), b"").unwrap();
    let _other = cached.cache(u64::MAX);
    assert!(!dead.exists());
    assert!(living.image().is_dir());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_load_that_fails_leaves_nothing() {
    let cached = Cached::new();
    let cache = cached.cache(u64::MAX);
    let (manifest, _) = cached.manifest(6).await;
    fs::remove_dir_all(cached.here.root.path().join("packs")).unwrap();
    assert!(matches!(cache.files(&manifest, u64::MAX).await, Err(Error::Damaged { .. })));
    assert_eq!((cached.sets(), cached.rest()), (0, 0));
}

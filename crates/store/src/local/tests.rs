use std::os::unix::fs::symlink;

use futures_util::TryStreamExt as _;
use object_store::ObjectStoreExt as _;

use super::*;

/// A volume and a directory outside of it that holds a file of every name that is tried.
struct Trap {
    root: tempfile::TempDir,
    outside: tempfile::TempDir,
}

impl Trap {
    fn new() -> Self {
        let trap = Self { root: tempfile::tempdir().unwrap(), outside: tempfile::tempdir().unwrap() };
        fs::create_dir(trap.outside.path().join("tenant")).unwrap();
        for name in ["file", "file#7", "tenant/file", "tenant/file#7"] {
            fs::write(trap.outside.path().join(name), "theirs").unwrap();
        }
        trap
    }

    /// A link to the outside in place of a directory of the volume.
    fn lead_outside(&self, dir: &str) {
        let link = self.root.path().join(dir);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        symlink(self.outside.path(), link).unwrap();
    }

    fn nothing_was_touched(&self) {
        let mut found: Vec<_> = ["", "tenant"]
            .iter()
            .flat_map(|dir| fs::read_dir(self.outside.path().join(dir)).unwrap())
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        found.sort();
        assert_eq!(found, ["file", "file", "file#7", "file#7", "tenant"]);
        assert_eq!(fs::read(self.outside.path().join("tenant/file")).unwrap(), b"theirs");
    }
}

#[tokio::test]
async fn links_in_place_of_directories_lead_nothing_outside() {
    for (link, dir) in
        [("packs", "packs/tenant"), ("packs/tenant", "packs/tenant"), ("kept", "kept/tenant"), ("kept/tenant", "kept/tenant")]
    {
        let trap = Trap::new();
        trap.lead_outside(link);
        let local = LocalStore::open(trap.root.path(), FailPoints::default()).unwrap();
        let store: Arc<dyn ObjectStore> = Arc::new(local.clone());
        let (dir, file) = (Path::from(dir), Path::from(format!("{dir}/file")));
        let missing_there = Path::from(format!("{dir}/new"));
        for mode in [PutMode::Create, PutMode::Overwrite] {
            for path in [&file, &missing_there] {
                let put = store.put_opts(path, "ours".into(), PutOptions::from(mode.clone())).await;
                assert!(matches!(put, Err(StoreError::Generic { .. })), "{link}: {put:?}");
            }
        }
        assert!(matches!(store.get(&file).await, Err(StoreError::Generic { .. })), "{link}");
        assert!(store.delete(&file).await.is_err(), "{link}");
        assert!(store.list_with_delimiter(Some(&dir)).await.is_err(), "{link}");
        assert!(store.list(Some(&dir)).try_collect::<Vec<_>>().await.is_err(), "{link}");
        assert!(store.list(None).try_collect::<Vec<_>>().await.unwrap().is_empty(), "{link}");
        assert!(local.staged().unwrap().is_empty(), "{link}");
        assert!(local.remove_staged(&trap.root.path().join(dir.as_ref()).join("file#7")).is_err(), "{link}");
        trap.nothing_was_touched();
    }
}

#[tokio::test]
async fn a_link_in_place_of_a_file_is_no_data() {
    let trap = Trap::new();
    fs::create_dir(trap.root.path().join("kept")).unwrap();
    symlink(trap.outside.path().join("file"), trap.root.path().join("kept/file")).unwrap();
    let local = LocalStore::open(trap.root.path(), FailPoints::default()).unwrap();
    let store: Arc<dyn ObjectStore> = Arc::new(local.clone());
    let file = Path::from("kept/file");
    assert!(store.get(&file).await.is_err());
    assert!(store.list(None).try_collect::<Vec<_>>().await.unwrap().is_empty());
    // Writing replaces the link and removing removes it, which is all that is there.
    store.put(&file, "ours".into()).await.unwrap();
    assert_eq!(store.get(&file).await.unwrap().bytes().await.unwrap(), "ours");
    assert_eq!(fs::read(trap.outside.path().join("file")).unwrap(), b"theirs");
}

#[tokio::test]
async fn writes_are_listed_and_read_in_parts() {
    let root = tempfile::tempdir().unwrap();
    let local = LocalStore::open(root.path(), FailPoints::default()).unwrap();
    let store: Arc<dyn ObjectStore> = Arc::new(local.clone());
    for name in ["a/b/one", "a/two", "three"] {
        store.put(&Path::from(name), name.into()).await.unwrap();
    }
    fs::write(root.path().join("a/unfinished#12"), "").unwrap();
    let mut all: Vec<_> = store.list(None).map_ok(|about| (about.location.to_string(), about.size)).try_collect().await.unwrap();
    all.sort();
    assert_eq!(all, [("a/b/one".to_owned(), 7), ("a/two".to_owned(), 5), ("three".to_owned(), 5)]);
    let one = store.list_with_delimiter(Some(&Path::from("a"))).await.unwrap();
    assert_eq!((one.objects.len(), one.common_prefixes), (1, vec![Path::from("a/b")]));
    assert_eq!(store.get_range(&Path::from("a/b/one"), 2..5).await.unwrap(), "b/o");
    assert_eq!(store.head(&Path::from("three")).await.unwrap().size, 5);
    assert!(matches!(store.get(&Path::from("a/none")).await, Err(StoreError::NotFound { .. })));
    assert!(matches!(store.get(&Path::from("none/none")).await, Err(StoreError::NotFound { .. })));
    assert!(store.list(Some(&Path::from("none"))).try_collect::<Vec<_>>().await.unwrap().is_empty());
}

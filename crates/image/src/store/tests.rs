use std::io;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde_json::{Value, json};
use tar::{Builder, EntryType, Header};
use tempfile::TempDir;

use super::*;
use crate::agent::AGENT;
use crate::progress::Silent;

fn tar(entries: &[(EntryType, &str, &str)]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (kind, path, text) in entries {
        let mut header = Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(0o755);
        header.set_mtime(1_600_000_000);
        if kind.is_file() {
            header.set_size(text.len() as u64);
            builder.append_data(&mut header, path, text.as_bytes()).unwrap();
        } else {
            header.set_size(0);
            builder.append_link(&mut header, path, text).unwrap();
        }
    }
    builder.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Writes an OCI layout and returns the paths of its layers' blobs.
fn oci_layout(directory: &Path, layers: &[Vec<u8>]) -> Vec<PathBuf> {
    let blobs = directory.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let put = |bytes: &[u8]| {
        let digest = Digest::of(bytes);
        fs::write(blobs.join(digest.as_hex()), bytes).unwrap();
        json!({"mediaType": "application/octet-stream", "digest": format!("sha256:{digest}"), "size": bytes.len()})
    };
    // One of each compression, in turn.
    let compressed: Vec<Vec<u8>> = layers
        .iter()
        .enumerate()
        .map(|(number, layer)| match number % 3 {
            0 => gzip(layer),
            1 => zstd::encode_all(layer.as_slice(), 1).unwrap(),
            _ => layer.clone(),
        })
        .collect();
    let diff_ids: Vec<String> = layers.iter().map(|layer| format!("sha256:{}", Digest::of(layer))).collect();
    let config = json!({"architecture": "", "os": "linux", "config": {"Env": ["PATH=/bin", "A=b"], "WorkingDir": "/srv"}, "rootfs": {"type": "layers", "diff_ids": diff_ids}});
    let config = put(config.to_string().as_bytes());
    let descriptors: Vec<Value> = compressed.iter().map(|layer| put(layer)).collect();
    let manifest = put(json!({"schemaVersion": 2, "config": config, "layers": descriptors}).to_string().as_bytes());
    fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    fs::write(directory.join("index.json"), json!({"schemaVersion": 2, "manifests": [manifest]}).to_string()).unwrap();
    compressed.iter().map(|layer| blobs.join(Digest::of(layer).as_hex())).collect()
}

fn docker_archive(path: &Path, layers: &[Vec<u8>]) {
    let diff_ids: Vec<String> = layers.iter().map(|layer| format!("sha256:{}", Digest::of(layer))).collect();
    let config = json!({"rootfs": {"type": "layers", "diff_ids": diff_ids}}).to_string();
    let mut builder = Builder::new(File::create(path).unwrap());
    let mut put = |name: &str, bytes: &[u8]| {
        let mut header = Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, bytes).unwrap();
    };
    let config_name = format!("{}.json", Digest::of(config.as_bytes()));
    put(&config_name, config.as_bytes());
    let names: Vec<String> = (0..layers.len()).map(|number| format!("layer{number}/layer.tar")).collect();
    for (name, layer) in names.iter().zip(layers) {
        put(name, layer);
    }
    put("manifest.json", json!([{"Config": config_name, "RepoTags": ["x:1"], "Layers": names}]).to_string().as_bytes());
    builder.finish().unwrap();
}

fn small_layers(marker: &str) -> Vec<Vec<u8>> {
    vec![
        tar(&[
            (EntryType::Regular, "bin/tool", "#!tool"),
            (EntryType::Regular, "etc/old", "gone"),
            (EntryType::Symlink, "sbin", "bin"),
            (EntryType::Link, "bin/same", "bin/tool"),
        ]),
        tar(&[(EntryType::Regular, "etc/.wh.old", ""), (EntryType::Regular, "etc/marker", marker)]),
        tar(&[(EntryType::Regular, "srv/third", "3")]),
    ]
}

fn name(text: &str) -> ImageName {
    text.parse().unwrap()
}

fn store() -> (TempDir, ImageStore) {
    let directory = tempfile::tempdir().unwrap();
    let store = ImageStore::open(directory.path().join("images")).unwrap();
    (directory, store)
}

/// What mkfs made, taken apart by the tool of the same package.
fn extract(image: &Image, into: &Path) -> PathBuf {
    let target = into.join(format!("extracted-{}", image.digest));
    let status =
        Command::new("fsck.erofs").arg(format!("--extract={}", target.display())).arg("--overwrite").arg(&image.path).output().unwrap();
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
    target
}

#[test]
fn an_imported_image_holds_its_layers_and_the_agent() {
    let (directory, store) = store();
    let layout = directory.path().join("layout");
    oci_layout(&layout, &small_layers("one"));
    let (image, left_out) = store.import(&layout, &name("small"), Limits::default(), &Silent).unwrap();
    assert_eq!(left_out, 0);
    assert_eq!(image.env, ["PATH=/bin", "A=b"]);
    assert_eq!(image.working_dir.as_deref(), Some("/srv"));
    assert_eq!(image.path.file_name().unwrap().to_str().unwrap(), format!("{}.erofs", image.digest));
    store.verify(&image.digest.clone().into()).unwrap();

    let root = extract(&image, directory.path());
    assert_eq!(fs::read(root.join("sandboxer/agent")).unwrap(), AGENT);
    for empty in
        ["sandboxer/rw", "sandboxer/root", "sandboxer/cgroup", "proc", "dev", "sys", "tmp", "rootfs/proc", "rootfs/root", "rootfs/tmp"]
    {
        assert_eq!(fs::read_dir(root.join(empty)).unwrap().count(), 0, "{empty}");
    }
    assert_eq!(fs::read_to_string(root.join("rootfs/bin/same")).unwrap(), "#!tool");
    assert_eq!(fs::read_to_string(root.join("rootfs/etc/marker")).unwrap(), "one");
    assert_eq!(fs::read_to_string(root.join("rootfs/srv/third")).unwrap(), "3");
    assert_eq!(fs::read_link(root.join("rootfs/sbin")).unwrap(), Path::new("bin"));
    assert!(!root.join("rootfs/etc/old").exists());
}

#[test]
fn the_same_content_gives_the_same_image_from_any_kind_of_archive() {
    let (directory, store) = store();
    let layers = small_layers("same");
    let layout = directory.path().join("layout");
    oci_layout(&layout, &layers);
    let docker = directory.path().join("saved.tar");
    docker_archive(&docker, &layers);
    let compressed = directory.path().join("saved.tar.gz");
    fs::write(&compressed, gzip(&fs::read(&docker).unwrap())).unwrap();
    let oci_archive = directory.path().join("oci.tar");
    let mut builder = Builder::new(File::create(&oci_archive).unwrap());
    builder.append_dir_all(".", &layout).unwrap();
    builder.finish().unwrap();
    let digests: HashSet<Digest> = [&layout, &docker, &compressed, &oci_archive]
        .iter()
        .enumerate()
        .map(|(number, source)| store.import(source, &name(&format!("image{number}")), Limits::default(), &Silent).unwrap().0.digest)
        .collect();
    assert_eq!(digests.len(), 1);
    assert_eq!(store.list().unwrap().len(), 4);
}

#[test]
fn two_images_stand_side_by_side_until_they_are_removed() {
    let (directory, store) = store();
    let mut images = Vec::new();
    for marker in ["one", "two"] {
        let layout = directory.path().join(marker);
        oci_layout(&layout, &small_layers(marker));
        images.push(store.import(&layout, &name(marker), Limits::default(), &Silent).unwrap().0);
        // A second name for the same content.
        store.import(&layout, &name(&format!("{marker}-too")), Limits::default(), &Silent).unwrap();
    }
    assert_ne!(images[0].digest, images[1].digest);
    for (image, marker) in images.iter().zip(["one", "two"]) {
        assert_eq!(fs::read_to_string(extract(image, directory.path()).join("rootfs/etc/marker")).unwrap(), marker);
    }
    store.remove(&name("one").into()).unwrap();
    assert!(images[0].path.exists(), "it has another name");
    store.remove(&name("one-too").into()).unwrap();
    assert!(!images[0].path.exists());
    assert!(matches!(store.resolve(&name("one").into()), Err(Error::NotFound(_))));
    store.remove(&images[1].digest.clone().into()).unwrap();
    assert!(store.list().unwrap().is_empty());
}

#[test]
fn a_name_that_is_taken_over_leaves_the_old_image_to_its_checkpoints() {
    let (directory, store) = store();
    let import = |marker: &str| {
        let layout = directory.path().join(marker);
        oci_layout(&layout, &small_layers(marker));
        store.import(&layout, &name("app"), Limits::default(), &Silent).unwrap().0
    };
    let (old, new) = (import("old"), import("new"));
    assert_eq!(store.resolve(&name("app").into()).unwrap().digest, new.digest);
    assert_eq!(store.resolve(&old.digest.clone().into()).unwrap().name, None);
    assert_eq!(store.list().unwrap().len(), 2);
}

#[test]
fn a_changed_layer_is_refused_and_leaves_nothing_behind() {
    let (directory, store) = store();
    let layout = directory.path().join("layout");
    let blobs = oci_layout(&layout, &small_layers("x"));
    fs::write(&blobs[2], &small_layers("changed")[0]).unwrap();
    let error = store.import(&layout, &name("bad"), Limits::default(), &Silent).unwrap_err();
    assert!(error.to_string().contains("damaged or has been changed"), "{error}");
    assert!(store.list().unwrap().is_empty());
    let left: Vec<_> = fs::read_dir(store.directory())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .filter(|name| name.to_string_lossy().starts_with("tmp-"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn what_is_no_image_is_refused_with_the_reason() {
    let (directory, store) = store();
    let file = directory.path().join("file");
    for (content, reason) in [
        (&b"hello"[..], "OCI layout"),
        (&tar(&[(EntryType::Regular, "a", "b")])[..], "neither index.json nor manifest.json"),
        (b"", "neither"),
    ] {
        fs::write(&file, content).unwrap();
        let error = store.import(&file, &name("x"), Limits::default(), &Silent).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
    }
    let layout = directory.path().join("layout");
    oci_layout(&layout, &small_layers("x"));
    let index = fs::read_to_string(layout.join("index.json")).unwrap();
    let mut index: Value = serde_json::from_str(&index).unwrap();
    index["manifests"][0]["platform"] = json!({"os": "linux", "architecture": "s390x"});
    fs::write(layout.join("index.json"), index.to_string()).unwrap();
    let error = store.import(&layout, &name("x"), Limits::default(), &Silent).unwrap_err();
    assert!(error.to_string().contains("nothing for linux/"), "{error}");
    assert!(matches!(store.import(&layout, &ImageName::base(), Limits::default(), &Silent), Err(Error::BaseIsReserved)));
}

#[test]
fn blobs_are_not_read_through_links_out_of_the_layout() {
    let (directory, store) = store();
    let layout = directory.path().join("layout");
    let blobs = oci_layout(&layout, &small_layers("x"));
    let outside = directory.path().join("elsewhere");
    fs::rename(&blobs[0], &outside).unwrap();
    std::os::unix::fs::symlink(&outside, &blobs[0]).unwrap();
    assert!(store.import(&layout, &name("x"), Limits::default(), &Silent).is_err());
}

#[test]
fn a_damaged_image_is_noticed() {
    let (directory, store) = store();
    let layout = directory.path().join("layout");
    oci_layout(&layout, &small_layers("x"));
    let (image, _) = store.import(&layout, &name("x"), Limits::default(), &Silent).unwrap();
    fs::set_permissions(&image.path, Permissions::from_mode(0o644)).unwrap();
    let mut content = fs::read(&image.path).unwrap();
    content[5000] ^= 1;
    fs::write(&image.path, content).unwrap();
    assert!(matches!(store.verify(&name("x").into()), Err(Error::Damaged { .. })));
}

#[test]
fn concurrent_writers_of_the_index_lose_nothing() {
    let (_directory, store) = store();
    let record = |number: usize| Record {
        digest: Digest::of(&number.to_le_bytes()),
        created_at: jiff::Timestamp::UNIX_EPOCH,
        source: Source::Imported { from: PathBuf::new() },
        agent: agent_digest().clone(),
        env: Vec::new(),
        working_dir: None,
        user: None,
        entrypoint: Vec::new(),
        cmd: Vec::new(),
    };
    let reads = AtomicUsize::new(0);
    thread::scope(|scope| {
        for writer in 0..8 {
            let (store, reads) = (&store, &reads);
            scope.spawn(move || {
                for round in 0..10 {
                    let number = writer * 10 + round;
                    Index::update(&store.directory, |index| Ok(index.images.insert(name(&format!("i{number}")), record(number)))).unwrap();
                    // A reader takes no lock and never sees half an index.
                    Index::read(&store.directory).unwrap();
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(reads.load(Ordering::Relaxed), 80);
    assert_eq!(Index::read(&store.directory).unwrap().images.len(), 80);
}

#[test]
fn an_index_of_a_later_version_is_not_overwritten() {
    let (_directory, store) = store();
    let path = store.directory().join("index.json");
    fs::write(&path, r#"{"version":99,"images":{}}"#).unwrap();
    assert!(matches!(store.list(), Err(Error::BadIndex { .. })));
    assert!(Index::update(&store.directory, |_| Ok(())).is_err());
    assert!(fs::read_to_string(path).unwrap().contains("99"));
}

#[test]
fn a_second_builder_waits_and_says_so() {
    let (_directory, store) = store();
    let held = store.build_lock(&Silent).unwrap();
    let told = Mutex::new(String::new());
    thread::scope(|scope| {
        let waiting =
            scope.spawn(|| store.build_lock(&|update: crate::Update<'_>| told.lock().unwrap().push_str(update.message)).map(drop));
        while told.lock().unwrap().is_empty() {
            thread::yield_now();
        }
        assert!(!waiting.is_finished());
        drop(held);
        waiting.join().unwrap().unwrap();
    });
    assert!(told.lock().unwrap().contains("waiting"));
}

/// Runs itself again without root where it has it: what an ordinary user can't read or write would not show otherwise.
#[test]
fn an_ordinary_user_makes_the_same_image_as_root() {
    const EXPECTED: &str = "SANDBOXER_TEST_EXPECTED_DIGEST";
    let (directory, store) = store();
    let layout = directory.path().join("layout");
    let mut layer = Builder::new(Vec::new());
    for (kind, path, mode) in [
        (EntryType::Directory, "locked/", 0o555),
        (EntryType::Directory, "locked/deeper/", 0o000),
        (EntryType::Regular, "locked/deeper/secret", 0o000),
        (EntryType::Regular, "locked/su", 0o4711),
    ] {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(12);
        header.set_size(0);
        layer.append_data(&mut header, path, io::empty()).unwrap();
    }
    let later = tar(&[(EntryType::Regular, "locked/deeper/.wh.secret", ""), (EntryType::Regular, "locked/new", "n")]);
    oci_layout(&layout, &[layer.into_inner().unwrap(), later]);
    let digest = store.import(&layout, &name("locked"), Limits::default(), &Silent).unwrap().0.digest;

    if let Ok(expected) = std::env::var(EXPECTED) {
        assert_eq!(digest.as_hex(), expected);
    } else if nix::unistd::Uid::effective().is_root() {
        // Where others may read it and write beside it, wherever the build directory is.
        let open = directory.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(&open, Permissions::from_mode(0o1777)).unwrap();
        let program = open.join("test");
        fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
        let mut again = Command::new("setpriv");
        again.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", "--"]);
        again.arg(&program).args(["--exact", "store::tests::an_ordinary_user_makes_the_same_image_as_root", "--nocapture"]);
        let output = again.env(EXPECTED, digest.as_hex()).env("TMPDIR", &open).output().unwrap();
        assert!(output.status.success(), "{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    }
}

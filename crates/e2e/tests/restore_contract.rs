//! What a checkpoint needs of the instance that restores it, and what is told where that is not so. Nothing is ever half alive.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{fs, path::Path};

use sandboxer_e2e::{Options, Runsc, Server, Volume, Ws, host};
use serde_json::Value;

/// Nothing of the sandbox is there.
fn expect_nothing_of(server: &Server, id: &str) {
    assert!(server.sandbox_processes().is_empty(), "{:?}", server.sandbox_processes());
    assert!(server.sandbox_directories().is_empty(), "{:?}", server.sandbox_directories());
    assert_eq!(host::files_of(&server.data_dir().join("runsc"), id), Vec::<std::path::PathBuf>::new());
    assert!(host::cgroups_of(id).is_empty());
}

/// A restore fails with a message that holds these words; neither the volume nor the server has changed by it.
async fn expect_refused(volume: &Volume, server: &Server, id: &str, words: &[&str]) {
    let before = volume.contents();
    let message = Ws::expect_restore_error(server, id).await;
    assert!(words.iter().all(|word| message.contains(word)), "{words:?}: {message}");
    assert_eq!(volume.contents(), before);
    expect_nothing_of(server, id);
}

#[tokio::test]
async fn a_restore_that_runsc_fails_is_tried_once_more_and_its_boot_log_is_kept() {
    let (volume, runsc) = (Volume::default(), Runsc::default());
    // Into a container that waits it is not the command that restores.
    let server = runsc.on(volume.options()).arg("--restore-pool").arg("0").start();
    let mut ws = Ws::create_kept(&server).await;
    let _ = ws.bash("echo kept > f").await.ok();
    let id = ws.checkpoint().await;
    runsc.fail("restore", 1);
    let (mut ws, running) = Ws::restore(&server, &id).await;
    assert!(running.get("rewound").is_none(), "{running}");
    assert_eq!((ws.bash("cat f").await.ok(), runsc.failures_left()), ("kept\n", 0));
    let log = server.data_dir().join("failed-restores").join(format!("{id}.log"));
    assert!(!fs::read(&log).unwrap().is_empty());
    fs::remove_file(&log).unwrap();

    ws.checkpoint().await;
    let before = volume.record(&id);
    runsc.fail("restore", 2);
    let message = Ws::expect_restore_error(&server, &id).await;
    assert!(message.contains("could not be restored") && message.contains("checkpoint_"), "{message}");
    assert_eq!(runsc.failures_left(), 0);
    expect_nothing_of(&server, &id);
    assert!(!fs::read(&log).unwrap().is_empty());
    // The lease was taken for it and given back: it says as before that nothing ran since.
    let after = volume.record(&id);
    for field in ["latest", "resting", "owner", "waiter", "tombstone", "attributes"] {
        assert_eq!(after[field], before[field], "{field}: {after}");
    }
    assert_eq!(volume.ls(&id)["status"], "saved");
    let (mut ws, running) = Ws::restore(&server, &id).await;
    assert!(running.get("rewound").is_none(), "{running}");
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");

    // A save that runsc itself fails: it freezes the sandbox first.
    runsc.fail("pause", 1);
    let message = ws.expect_checkpoint_error("checkpoint_failed").await;
    assert!(message.contains("goes on") && runsc.failures_left() == 0, "{message}");
    let mut ws = Ws::attach(&server, &id).await;
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
    ws.checkpoint().await;
}

#[tokio::test]
async fn another_runsc_and_a_cpu_that_can_less_are_told_with_what_to_do() {
    let volume = Volume::default();
    // A machine whose CPU can something that no other can.
    let cpu = tempfile::NamedTempFile::new().unwrap();
    let known = fs::read_to_string("/proc/cpuinfo").unwrap();
    let more: String = known.lines().map(|line| format!("{line}{}\n", if is_flags(line) { " e2e_more e2e_most" } else { "" })).collect();
    fs::write(cpu.path(), more).unwrap();
    let namespaces: &[&str] = if nix::unistd::geteuid().is_root() { &["--mount"] } else { &["--map-root-user", "--mount"] };
    let bound = ["sh", "-c", "mount --bind \"$0\" /proc/cpuinfo && exec \"$@\"", cpu.path().to_str().unwrap()];
    let prefix: Vec<&str> = ["unshare"].iter().chain(namespaces).chain(&bound).copied().collect();
    let better = volume.options().under(&prefix).start();
    let mut ws = Ws::create_kept(&better).await;
    let _ = ws.bash("echo kept > f").await.ok();
    let id = ws.checkpoint().await;
    let runsc = Runsc::default().saying("release-20991231.0");
    let (lesser, newer) = (volume.serve(), runsc.on(volume.options()).start());
    expect_refused(&volume, &lesser, &id, &["CPU lacks e2e_more, e2e_most", "restore it on a machine that has them"]).await;
    expect_refused(
        &volume,
        &newer,
        &id,
        &["saved by runsc", "this instance has release-20991231.0", "restore it on an instance with runsc"],
    )
    .await;
    let (mut ws, running) = Ws::restore(&better, &id).await;
    assert!(running.get("rewound").is_none(), "{running}");
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
}

fn is_flags(line: &str) -> bool {
    matches!(line.split(':').next().unwrap().trim(), "flags" | "Features")
}

#[tokio::test]
async fn an_image_that_is_nowhere_whole_is_told() {
    let volume = Volume::default();
    let id = Ws::create_kept(&volume.serve()).await.checkpoint().await;
    let empty = tempfile::tempdir().unwrap();
    let server = volume.options().arg("--image-dir").arg(empty.path().to_str().unwrap()).not_waiting().start();
    let image = fs::read_dir(volume.path().join("images")).unwrap().next().unwrap().unwrap().path();
    let digest = image.file_stem().unwrap().to_str().unwrap().to_owned();
    let manifest = fs::read(&image).unwrap();
    let named = format!("needs the image {digest}");

    fs::remove_file(&image).unwrap();
    expect_refused(&volume, &server, &id, &[&named, "not on the volume"]).await;
    // Another one in its place.
    let foreign = image.with_file_name(format!("{}.img", "0".repeat(64)));
    fs::write(&image, fs::read(volume.latest(&id)).unwrap()).unwrap();
    expect_refused(&volume, &server, &id, &[&named, "says of itself"]).await;
    fs::write(&foreign, &manifest).unwrap();
    assert_eq!(volume.store(&["verify", "--quick"]).status.code(), Some(1));
    fs::remove_file(&foreign).unwrap();
    fs::write(&image, &manifest).unwrap();
    // A byte of it.
    let pack = volume.packs().into_iter().find(|pack| contains(&manifest, pack)).unwrap();
    let mut bytes = fs::read(&pack).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&pack, &bytes).unwrap();
    expect_refused(&volume, &server, &id, &[&named, "do not match their digest"]).await;
    bytes[middle] ^= 1;
    fs::write(&pack, &bytes).unwrap();

    let (mut ws, running) = Ws::restore(&server, &id).await;
    assert!(running.get("rewound").is_none(), "nothing ran meanwhile: {running}");
    ws.expect_alive().await;
}

/// Whether a manifest names a pack.
fn contains(manifest: &[u8], pack: &Path) -> bool {
    let name = pack.file_stem().unwrap().to_str().unwrap();
    let id: Vec<u8> = (0..name.len() / 2).map(|at| u8::from_str_radix(&name[2 * at..2 * at + 2], 16).unwrap()).collect();
    manifest.windows(id.len()).any(|window| window == id)
}

#[tokio::test]
async fn with_a_volume_key_nothing_is_believed_that_was_not_written_with_it() {
    let (keys, volume) = (tempfile::tempdir().unwrap(), Volume::default());
    let keyed = |name: &str| -> Options {
        let file = keys.path().join(name);
        fs::write(&file, format!("a secret of all instances: {name}\n")).unwrap();
        volume.options().arg("--volume-key-file").arg(file.to_str().unwrap())
    };
    let (open, ours, others) = (volume.serve(), keyed("ours").start(), keyed("others").start());
    let mut ws = Ws::create_kept(&ours).await;
    let _ = ws.bash("echo kept > f").await.ok();
    let id = ws.checkpoint().await;
    expect_refused(&volume, &others, &id, &["sealed with this volume's key"]).await;
    // What was written without a key is not taken by who has one.
    let plain = Ws::create_kept(&open).await.checkpoint().await;
    expect_refused(&volume, &ours, &plain, &["sealed with this volume's key"]).await;

    // Who can write there changes what the record says.
    let versions = volume.path().join("locks").join(format!("{id}.versions"));
    let newest = fs::read_dir(&versions).unwrap().map(|entry| entry.unwrap().path()).max().unwrap();
    let record = fs::read(&newest).unwrap();
    let mut forged: Value = serde_json::from_slice(&record).unwrap();
    forged["attributes"]["token_sha256"] = Value::from("0".repeat(64));
    fs::write(&newest, forged.to_string()).unwrap();
    expect_refused(&volume, &ours, &id, &["sealed with this volume's key"]).await;
    fs::write(&newest, &record).unwrap();
    // Or puts another sandbox's manifest there, or one that carries no authentication.
    let manifest = volume.latest(&id);
    let whole = fs::read(&manifest).unwrap();
    fs::write(&manifest, fs::read(volume.latest(&plain)).unwrap()).unwrap();
    expect_refused(&volume, &ours, &id, &["checkpoint_"]).await;
    let mut torn = whole.clone();
    *torn.last_mut().unwrap() ^= 1;
    fs::write(&manifest, &torn).unwrap();
    expect_refused(&volume, &ours, &id, &["checkpoint_", "authenticated with this server's volume key"]).await;
    fs::write(&manifest, &whole).unwrap();
    let verified = sandboxer_e2e::command()
        .args(["store", "verify", "--checkpoint-path"])
        .arg(volume.path())
        .arg("--volume-key-file")
        .arg(keys.path().join("ours"))
        .output()
        .unwrap();
    assert_eq!(verified.status.code(), Some(1), "what was written without the key is told: {verified:?}");

    let next = keyed("ours").start();
    let (mut ws, running) = Ws::restore(&next, &id).await;
    assert!(running.get("rewound").is_none(), "{running}");
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
}

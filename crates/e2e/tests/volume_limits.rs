//! What is scarce or wrong around a save: room on the volume and on the server's own disk, the server's memory, the clock.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use nix::sys::statvfs::statvfs;
use sandboxer_e2e::{DEADLINE, FailPoints, Volume, Ws, eventually, host, soak};
use serde_json::json;

const MIB: u64 = 1 << 20;
/// Room for the base image and some checkpoints.
const SMALL: u64 = 768 * MIB;
/// What a sandbox makes before each save, so that there is something to write.
const MAKE: &str = "head -c 16000000 /dev/urandom > /root/bytes";

/// Fills the filesystem of a directory until only this much room is left.
fn fill(file: &Path, leave: u64) {
    let mut filler = fs::File::options().create(true).append(true).open(file).unwrap();
    loop {
        let about = statvfs(file.parent().unwrap()).unwrap();
        let free = about.blocks_available() * about.fragment_size();
        let Some(more) = free.checked_sub(leave).filter(|more| *more > 0) else { return };
        match filler.write(&vec![1; usize::try_from(more.min(MIB)).unwrap()]) {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => return,
            written => drop(written.unwrap()),
        }
    }
}

#[tokio::test]
async fn a_save_that_fills_the_volume_fails_and_the_sandbox_and_its_program_go_on() {
    // Who can't mount a small filesystem has the writes say that it is full.
    let small = Volume::small(SMALL);
    let mounted = small.is_some();
    let (volume, points) = (small.unwrap_or_default(), FailPoints::default());
    let server = points.on(volume.options()).start();
    let mut ws = Ws::create_kept(&server).await;
    let id = ws.sandbox_id.clone();
    let _ = ws.bash("(while true; do date +%s%N > /tmp/tick; sleep 0.02; done) &\necho kept > f").await.ok();
    ws.checkpoint().await;
    let filler = volume.path().join("filler");
    // Full in the middle of a pack, and full to the last byte.
    for (leave, point) in [(4 * MIB, "pack:written=full"), (0, "pack:before=full")] {
        let (mut ws, running) = Ws::restore(&server, &id).await;
        assert!(running.get("rewound").is_none(), "{running}");
        let _ = ws.bash(MAKE).await.ok();
        let (latest, known) = (volume.record(&id)["latest"].clone(), volume.sizes());
        if mounted {
            fill(&filler, leave)
        } else {
            points.arm(point)
        }
        let message = ws.expect_checkpoint_error("checkpoint_failed").await;
        assert!(message.contains("No space left") && message.contains("goes on"), "{message}");

        // Nothing is to be seen of it, and what was there is as it was.
        let record = volume.record_now(&id);
        assert_eq!((&record["latest"], record["owner"].is_string()), (&latest, true), "{record}");
        let there = volume.sizes();
        let packs = |mut sizes: BTreeMap<PathBuf, u64>| {
            sizes.retain(|file, _| file.starts_with(volume.path().join("packs")));
            sizes
        };
        assert_eq!(packs(there.clone()), packs(known), "what the save wrote is gone, and nothing else is");
        let staged: Vec<_> = there.into_keys().filter(|file| file.to_string_lossy().contains('#')).collect();
        assert!(staged.is_empty(), "{staged:?}");
        assert_eq!(volume.ls(&id)["latest"], latest);
        volume.verify_quickly();

        // The sandbox, its program and its client go on.
        let mut ws = Ws::attach(&server, &id).await;
        assert_eq!(
            ws.bash("cat f; old=$(cat /tmp/tick); until [ \"$(cat /tmp/tick)\" != \"$old\" ]; do sleep 0.02; done").await.ok(),
            "kept\n"
        );
        // A lease that could not be renewed would have it stand still.
        for _ in 0..2 {
            let before = volume.record_now(&id)["renewed"].as_u64();
            eventually("the lease is renewed", DEADLINE, || volume.record_now(&id)["renewed"].as_u64() > before).await;
        }
        if mounted {
            fs::remove_file(&filler).unwrap()
        } else {
            points.disarm()
        }
        ws.checkpoint().await;
        assert_ne!(volume.record(&id)["latest"], latest);
    }
    volume.verify();
}

#[tokio::test]
async fn a_save_that_fills_the_servers_own_disk_fails_and_the_sandbox_goes_on() {
    let volume = Volume::default();
    let server = volume.serve();
    let mut ws = Ws::create_kept(&server).await;
    let id = ws.sandbox_id.clone();
    let _ = ws.bash(&format!("{MAKE}; sha256sum bytes > f")).await.ok();
    let saving = server.data_dir().join("saving");
    // Only root can mount a small filesystem; who is not root finds no room in a directory that can't be written.
    let root = nix::unistd::geteuid().is_root();
    if root {
        nix::mount::mount(Some("sandboxer-e2e"), &saving, Some("tmpfs"), nix::mount::MsFlags::empty(), Some("size=4m")).unwrap();
    } else {
        fs::set_permissions(&saving, fs::Permissions::from_mode(0o500)).unwrap();
    }
    let message = ws.expect_checkpoint_error("checkpoint_failed").await;
    assert!(message.contains("goes on"), "{message}");
    assert_eq!(fs::read_dir(&saving).unwrap().count(), 0, "nothing is left of it");
    if root {
        nix::mount::umount2(&saving, nix::mount::MntFlags::MNT_DETACH).unwrap();
    } else {
        fs::set_permissions(&saving, fs::Permissions::from_mode(0o700)).unwrap();
    }
    let mut ws = Ws::attach(&server, &id).await;
    let _ = ws.bash("sha256sum --check --quiet f").await.ok();
    ws.checkpoint().await;
    let (mut ws, _) = Ws::restore(&server, &id).await;
    let _ = ws.bash("sha256sum --check --quiet f").await.ok();
}

#[tokio::test]
async fn the_servers_memory_stays_small_however_large_the_sandbox_is() {
    const MOST: u64 = 64 * MIB;
    let mib = if soak() { 2048 } else { 256 };
    let volume = Volume::default();
    let (a, b) = (volume.serve(), volume.serve());
    let mut ws = Ws::create_with(&a, json!({"enable_checkpoint": true, "limits": {"memory_mb": mib + 1024}})).await;
    let id = ws.sandbox_id.clone();
    // Half of it compresses, no two MiB are the same.
    let hold = format!(
        "import os, sys, time\nif os.fork(): os._exit(0)\nheld = []\nfor n in range({mib}):\n    \
         held.append(os.urandom(1 << 19) + (b'%09d ' % n) * 52428)\nopen('/tmp/held', 'w').write('yes')\nos.close(1); os.close(2)\ntime.sleep(1e6)\n"
    );
    let _ = ws.python(&hold).await.ok();
    eventually_held(&mut ws).await;
    for (from, to) in [(&a, &b), (&b, &a)] {
        ws.checkpoint().await;
        let saved = fs::metadata(volume.latest(&id)).unwrap().len();
        (ws, _) = Ws::restore(to, &id).await;
        assert_eq!(ws.bash("cat /tmp/held").await.ok(), "yes");
        for server in [from, to] {
            let peak = host::peak_rss(server.pid());
            println!("{mib} MiB in a sandbox (its manifest: {saved} bytes): the server had {} MiB at most", peak / MIB);
            assert!(peak <= MOST, "the server had {} MiB", peak / MIB);
        }
    }
}

async fn eventually_held(ws: &mut Ws) {
    assert_eq!(ws.run(json!({"language": "bash", "code": "until [ -e /tmp/held ]; do sleep 0.1; done; cat /tmp/held"})).await.ok(), "yes");
}

#[tokio::test]
async fn a_clock_that_goes_back_does_not_bring_back_what_was_before() {
    let volume = Volume::default();
    let server = volume.serve();
    let mut ws = Ws::create_kept(&server).await;
    let _ = ws.bash("echo 0 > f").await.ok();
    let id = ws.checkpoint().await;
    let name = |ms: u64| format!("checkpoint_{ms}.img");
    let number = |name: &str| name.strip_prefix("checkpoint_").unwrap().strip_suffix(".img").unwrap().parse::<u64>().unwrap();
    // What a server leaves whose clock was a day ahead and that died before its checkpoint counted.
    let first = volume.latest(&id);
    let ahead = number(first.file_name().unwrap().to_str().unwrap()) + 24 * 3600 * 1000;
    fs::copy(&first, first.with_file_name(name(ahead))).unwrap();
    for round in 1..=3_u64 {
        let (mut ws, running) = Ws::restore(&server, &id).await;
        assert!(running.get("rewound").is_none(), "{running}");
        assert_eq!(ws.bash("cat f").await.ok(), format!("{}\n", round - 1));
        let _ = ws.bash(&format!("echo {round} > f")).await.ok();
        ws.checkpoint().await;
        // One later each time, all within what is one and the same moment for that clock.
        assert_eq!(volume.record(&id)["latest"], name(ahead + round));
        let copy = fs::read_to_string(first.with_file_name("latest")).unwrap();
        assert_eq!(copy.trim(), name(ahead + round));
    }
    let other = volume.serve();
    let (mut ws, _) = Ws::restore(&other, &id).await;
    assert_eq!(ws.bash("cat f").await.ok(), "3\n");
    drop(ws);
    eventually("the disconnect is saved", DEADLINE, || volume.record(&id)["latest"] == name(ahead + 4)).await;
}

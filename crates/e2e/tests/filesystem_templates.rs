//! Sandboxes from a filesystem snapshot are restores of one that was just unpacked, and nobody can tell them from a new one: the first where the snapshot was taken,
//! the second elsewhere.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{collections::BTreeSet, fs};

use sandboxer_e2e::{DEADLINE, Runsc, Server, Volume, Ws, eventually, floor_runsc};
use serde_json::json;

const MAKE: &str = r#"
mkdir -p /srv/tree/deep; cd /srv/tree
for i in $(seq 200); do head -c $((i * 37)) /dev/urandom > deep/$i; done
ln -s deep link; ln deep/1 hard; mkfifo pipe; echo x > own; chown 7:8 own; chmod 4711 own; touch -d @1500000000.123456789 own
rm /etc/issue; rm -r /etc/skel; echo version 1 > /srv/version
"#;

/// All files that were made, with what can be told of them, and what is in them.
const LIST: &str = r#"
cd /srv && find . -printf '%p %M %U %G %T@ %n %l\n' | sort; find . -type f -print0 | sort -z | xargs -0 sha256sum
ls -d /etc/issue /etc/skel 2>&1; ls -A /root /tmp
"#;

/// Says how many processes it could start.
const MANY: &str = r"
import os, signal
started = []
try:
    while len(started) < 40:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        started.append(pid)
except BlockingIOError:
    pass
for pid in started: os.kill(pid, signal.SIGKILL)
print(len(started))
";

fn kept(server: &Server) -> f64 {
    server.metric("sandboxer_templates_total")
}

fn restored(server: &Server) -> f64 {
    server.metric("sandboxer_template_restores_total")
}

/// What is in the directory of templates.
fn templates(server: &Server) -> BTreeSet<String> {
    let Ok(entries) = fs::read_dir(server.data_dir().join("templates")) else { return BTreeSet::new() };
    entries.flatten().map(|entry| entry.file_name().into_string().unwrap()).collect()
}

async fn until_kept(server: &Server, count: f64) {
    eventually("a template is kept", DEADLINE, || kept(server) >= count).await;
}

async fn replace(ws: &mut Ws, name: &str) {
    ws.send(json!({"action": "snapshot_filesystem", "name": name, "replace": true})).await;
    ws.expect_status("SANDBOX_FILESYSTEM_SNAPSHOT_CREATING").await;
    ws.expect_status("SANDBOX_FILESYSTEM_SNAPSHOT_CREATED").await;
}

#[tokio::test]
async fn the_second_sandbox_from_a_snapshot_is_a_restore_that_is_new_in_every_respect() {
    let volume = Volume::default();
    let (maker, mut server) = (volume.filesystems().start(), volume.filesystems().start());
    let mut ws = Ws::create(&maker).await;
    let _ = ws.bash(MAKE).await.ok();
    ws.snapshot_filesystem("one").await;
    drop((ws, maker));
    let mut first = Ws::create_from(&server, "one").await;
    let files = first.bash(LIST).await.ok().to_owned();
    until_kept(&server, 1.0).await;
    assert_eq!((restored(&server), templates(&server).len()), (0.0, 1));

    let config = json!({"filesystem_snapshot_name": "one", "env": {"WHO": "second"}, "cwd": "/srv"});
    let mut second = Ws::create_with(&server, config).await;
    assert_eq!(restored(&server), 1.0);
    assert_eq!(second.bash(LIST).await.ok(), files);
    let about = "echo $WHO $PWD; hostname; ls /run/sandboxer 2>/dev/null; umask";
    let own = |ws: &Ws| format!("sandbox-{}", ws.sandbox_id.split('-').next().unwrap());
    let seen = second.bash(about).await.ok().to_owned();
    assert!(seen.starts_with(&format!("second /srv\n{}\n", own(&second))), "{seen}");
    let of_first = first.bash(about).await.ok().to_owned();
    assert_eq!(seen.replace("second /srv", "/root").replace(&own(&second), ""), of_first.replace(&own(&first), ""));
    let random = "head -c 16 /dev/urandom | sha256sum; python3 -c 'import random, uuid; print(random.random(), uuid.uuid4(), hash(\"a\"))'";
    let mut third = Ws::create_from(&server, "one").await;
    assert_eq!(restored(&server), 2.0);
    assert_ne!(second.bash(random).await.ok(), third.bash(random).await.ok());
    // They share nothing.
    let _ = second.bash("echo mine > /srv/version; rm /srv/tree/link").await.ok();
    assert_eq!(third.bash("cat /srv/version; readlink /srv/tree/link").await.ok(), "version 1\ndeep\n");
    // Its limits are those that were asked for: a template of others is none for it.
    let limits = json!({"filesystem_snapshot_name": "one", "limits": {"pids": 20}});
    let mut narrow = Ws::create_with(&server, limits.clone()).await;
    assert_eq!(restored(&server), 2.0);
    until_kept(&server, 2.0).await;
    let bounded = |text: &str| text.trim().parse::<usize>().unwrap() < 20;
    assert!(bounded(narrow.python(MANY).await.ok()));
    let mut narrow = Ws::create_with(&server, limits).await;
    assert_eq!(restored(&server), 3.0);
    assert!(bounded(narrow.python(MANY).await.ok()), "a restore keeps the limit");

    // A server that dies leaves them going, and the templates where they are.
    let id = second.sandbox_id.clone();
    server.kill9();
    drop(second);
    server.restart();
    assert_eq!(Ws::attach(&server, &id).await.bash("cat /srv/version").await.ok(), "mine\n");
    let mut fourth = Ws::create_from(&server, "one").await;
    assert_eq!((restored(&server), fourth.bash(LIST).await.ok()), (1.0, files.as_str()));
}

#[tokio::test]
async fn the_first_sandbox_where_the_snapshot_was_taken_is_a_restore_already() {
    let volume = Volume::default();
    let server = volume.filesystems().arg("--pool").arg("0").start();
    let config = json!({"limits": {"pids": 99, "memory_mb": 300}});
    let mut ws = Ws::create_with(&server, config.clone()).await;
    let _ = ws.bash(MAKE).await.ok();
    let files = ws.bash(LIST).await.ok().to_owned();
    ws.snapshot_filesystem("one").await;
    until_kept(&server, 1.0).await;
    assert_eq!((restored(&server), templates(&server).len()), (0.0, 1));
    // Into a container that waits, and without one; with the limits that it was taken with.
    server.filled(0, 1).await;
    let waiting = server.waiting();
    let from = json!({"filesystem_snapshot_name": "one", "limits": config["limits"]});
    for count in 1..=2 {
        let mut copy = Ws::create_with(&server, from.clone()).await;
        assert_eq!(restored(&server), f64::from(count));
        assert_eq!(copy.bash(LIST).await.ok(), files);
        assert!(!waiting.contains(&copy.sandbox_id), "its name is its own");
        // It can be saved and found again as any other.
        copy.snapshot_filesystem(&format!("again{count}")).await;
    }
    assert!(server.metric("sandboxer_restore_pool_hits_total") >= 1.0);
    // Taken of a copy it stands on its own.
    until_kept(&server, 3.0).await;
    let mut next = Ws::create_with(&server, json!({"filesystem_snapshot_name": "again2", "limits": config["limits"]})).await;
    assert_eq!((restored(&server), next.bash(LIST).await.ok()), (3.0, files.as_str()));
}

#[tokio::test]
async fn a_snapshot_that_was_replaced_is_never_served_stale() {
    let volume = Volume::default();
    let (server, other) = (volume.filesystems().start(), volume.filesystems().start());
    let mut ws = Ws::create(&server).await;
    for version in 1..=3 {
        let _ = ws.bash(&format!("echo {version} > /srv/version")).await.ok();
        replace(&mut ws, "moving").await;
        // Where it was taken all are restores; elsewhere the first is unpacked, and the next is one.
        until_kept(&server, f64::from(version)).await;
        for (server, restores) in [(&server, 2), (&other, 1)] {
            for turn in 0..2 {
                let mut from = Ws::create_from(server, "moving").await;
                assert_eq!(from.bash("cat /srv/version").await.ok(), format!("{version}\n"), "{turn}");
                until_kept(server, f64::from(version)).await;
            }
            assert_eq!(restored(server), f64::from(version * restores));
        }
    }
}

#[tokio::test]
async fn a_template_that_fails_is_removed_and_the_sandbox_is_unpacked() {
    let (volume, runsc) = (Volume::default(), Runsc::default());
    // Without containers that wait it is runsc's command that restores.
    let server = runsc.on(volume.filesystems()).arg("--restore-pool").arg("0").start();
    let mut ws = Ws::create(&server).await;
    let _ = ws.bash("echo whole > /srv/f").await.ok();
    ws.snapshot_filesystem("one").await;
    until_kept(&server, 1.0).await;
    let before = templates(&server);
    runsc.fail("restore", 1);
    assert_eq!(Ws::create_from(&server, "one").await.bash("cat /srv/f").await.ok(), "whole\n");
    assert_eq!((runsc.failures_left(), restored(&server)), (0, 0.0));
    // It is made anew.
    until_kept(&server, 2.0).await;
    assert_eq!(templates(&server), before);
    assert_eq!(Ws::create_from(&server, "one").await.bash("cat /srv/f").await.ok(), "whole\n");
    assert_eq!(restored(&server), 1.0);
    // What was changed is not restored: runsc would not notice.
    let pages = server.data_dir().join("templates").join(before.first().unwrap()).join("pages.img");
    let mut bytes = fs::read(&pages).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&pages, bytes).unwrap();
    assert_eq!(Ws::create_from(&server, "one").await.bash("cat /srv/f").await.ok(), "whole\n");
    assert_eq!(restored(&server), 1.0);
}

#[tokio::test]
async fn a_server_that_dies_while_it_makes_a_template_leaves_none() {
    let volume = Volume::default();
    let mut names = (0..5).map(|turn| format!("turn-{turn}"));
    let (mut server, ws, name) = loop {
        let name = names.next().expect("each was made before its server was dead");
        // Nothing else waits there.
        let mut server = volume.filesystems().arg("--pool").arg("0").arg("--restore-pool").arg("0").start();
        let mut ws = Ws::create(&server).await;
        let _ = ws.bash("head -c 30000000 /dev/urandom > /srv/large; echo whole > /srv/f").await.ok();
        ws.snapshot_filesystem(&name).await;
        eventually("a template is being made", DEADLINE, || !templates(&server).is_empty()).await;
        server.kill9();
        // It may have been made before that was seen.
        if templates(&server).iter().all(|entry| entry.starts_with("work-")) {
            break (server, ws, name);
        }
    };
    let ids = [ws.sandbox_id.clone()];
    drop(ws);
    server.restart();
    assert!(templates(&server).is_empty());
    for id in &ids {
        assert_eq!(Ws::attach(&server, id).await.bash("cat /srv/f").await.ok(), "whole\n");
    }
    eventually("what was to be a template is gone", DEADLINE, || {
        let dirs = fs::read_dir(server.data_dir().join("sandboxes")).unwrap().flatten();
        dirs.map(|entry| entry.file_name().into_string().unwrap()).collect::<BTreeSet<_>>() == ids.iter().cloned().collect()
    })
    .await;
    assert_eq!(Ws::create_from(&server, &name).await.bash("cat /srv/f").await.ok(), "whole\n");
    until_kept(&server, 1.0).await;
}

#[tokio::test]
async fn without_room_or_with_an_older_runsc_every_sandbox_is_unpacked() {
    let volume = Volume::default();
    let off = volume.filesystems().arg("--template-cache-mb").arg("0").start();
    let small = volume.filesystems().env("SANDBOXER_TEMPLATE_CACHE_MB", "1").start();
    let floor = volume.filesystems().env("SANDBOXER_RUNSC", floor_runsc()).start();
    let mut ws = Ws::create(&off).await;
    let _ = ws.bash("head -c 3000000 /dev/urandom > /srv/large; echo whole > /srv/f").await.ok();
    ws.snapshot_filesystem("one").await;
    for server in [&off, &small, &floor] {
        for _ in 0..2 {
            assert_eq!(Ws::create_from(server, "one").await.bash("cat /srv/f").await.ok(), "whole\n");
        }
    }
    eventually("it is found to be too large", DEADLINE, || small.log().contains("larger than the cache may be")).await;
    for server in [&off, &small, &floor] {
        assert_eq!((kept(server), restored(server)), (0.0, 0.0));
        eventually("nothing is left of it", DEADLINE, || templates(server).is_empty()).await;
    }
}

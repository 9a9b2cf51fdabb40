//! What nobody needs goes from the volume, and nothing else does, whoever writes meanwhile.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    fs,
    io::{self, Write as _},
    process::Output,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use sandboxer_e2e::{DEADLINE, Options, Server, Volume, Ws, command, eventually, seed, soak, stderr_of, stdout_of};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

fn ok(output: &Output) -> String {
    assert!(output.status.success(), "{}{}", stdout_of(output), stderr_of(output));
    stdout_of(output)
}

/// What `sandboxer store` says, as JSON.
fn told(volume: &Volume, arguments: &[&str]) -> Value {
    serde_json::from_str(&ok(&volume.store(&[arguments, &["--json"]].concat()))).unwrap()
}

fn checkpoints(server: &Server, id: &str) -> Vec<String> {
    let listed = server.found(None, &format!("/v1/sandboxes/{id}/checkpoints"));
    listed["items"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
}

async fn kill(server: &Server, id: &str) {
    let path = format!("/v1/sandboxes/{id}");
    eventually("nobody is attached", DEADLINE, || server.api(None, "DELETE", &path, &Value::Null).0 == 204).await;
}

/// Collects until there is nothing more to collect.
async fn collect_all(volume: &Volume) {
    eventually("all is collected", DEADLINE * 4, || {
        told(volume, &["gc"]);
        told(volume, &["gc", "--dry-run"])["bytes"] == 0
    })
    .await;
}

#[tokio::test]
async fn old_checkpoints_and_killed_sandboxes_go_and_the_rest_can_be_restored() {
    let volume = Volume::default();
    let server = volume.options().arg("--collect-every").arg("0").start();
    let mut ws = Ws::create_kept(&server).await;
    let id = ws.sandbox_id.clone();
    let mut snapshot = String::new();
    for round in 1..=4 {
        let _ = ws.bash(&format!("echo {round} > /root/round; head -c 2000000 /dev/urandom > /root/bytes")).await.ok();
        if round == 2 {
            let taken = server.made(None, &format!("/v1/sandboxes/{id}/snapshot"), &json!({"name": "two"}));
            taken["id"].as_str().unwrap().clone_into(&mut snapshot);
        }
        ws.checkpoint().await;
        (ws, _) = Ws::restore(&server, &id).await;
    }
    assert_eq!(checkpoints(&server, &id).len(), 4);
    // Without the records: who holds a sandbox renews its own all the while.
    let sizes = || {
        let mut sizes = volume.sizes();
        sizes.retain(|path, _| !path.starts_with(volume.path().join("locks")));
        sizes
    };
    let before = sizes();
    let would = told(&volume, &["gc", "--dry-run", "--keep-checkpoints", "2"]);
    assert_eq!((sizes(), &would["checkpoints"]), (before, &json!(2)), "{would}");
    let freed = ok(&volume.store(&["gc", "--keep-checkpoints", "2"]));
    assert!(freed.starts_with("freed ") && freed.contains("2 checkpoints"), "{freed}");
    let left = checkpoints(&server, &id);
    assert_eq!(left.len(), 2);
    volume.verify();

    // What is left can be gone back to, by another instance too, and so can the snapshot, of which a checkpoint is gone.
    let other = volume.serve();
    ws.checkpoint().await;
    for (to, round) in [(json!({"checkpoint": left[0]}), "3\n"), (json!({"snapshot_id": snapshot}), "2\n")] {
        let (status, back) = other.api(None, "POST", &format!("/v1/sandboxes/{id}/rollback"), &to);
        assert_eq!(status, 201, "{back}");
        let (mut ws, _) = Ws::restore(&other, &id).await;
        assert_eq!(ws.bash("cat /root/round").await.ok(), round);
        ws.checkpoint().await;
    }
    let used = told(&volume, &["du"]);
    assert_eq!((&used["items"][0]["id"], &used["items"][0]["snapshots"]), (&json!(id), &json!(1)), "{used}");
    assert!(used["items"][0]["own_bytes"].as_u64().unwrap() > MIB, "{used}");

    let (ws, _) = Ws::restore(&other, &id).await;
    ws.close().await;
    kill(&other, &id).await;
    collect_all(&volume).await;
    assert!(!volume.path().join(&id).exists(), "nothing is left of it");
    let copy = other.made(None, &format!("/v1/snapshots/{snapshot}/restore"), &json!({}));
    let copy = copy["id"].as_str().unwrap();
    let mut ws = Ws::attach(&other, copy).await;
    assert_eq!(ws.bash("cat /root/round").await.ok(), "2\n", "a snapshot outlives its sandbox");
    ws.close().await;
    kill(&other, copy).await;
    assert_eq!(other.api(None, "DELETE", &format!("/v1/snapshots/{snapshot}"), &Value::Null).0, 204);
    collect_all(&volume).await;
    let used = told(&volume, &["du"]);
    assert_eq!(
        (&used["items"], &used["freeable_bytes"], &used["held_bytes"]),
        (&json!([]), &json!(0), &json!(32 * images(&volume))),
        "{used}"
    );
    volume.verify();
}

/// Packs of base images: each has a head of 32 bytes that no chunk is in.
fn images(volume: &Volume) -> usize {
    volume.packs().len()
}

#[tokio::test]
async fn the_history_is_drawn_with_what_came_from_where() {
    let volume = Volume::default();
    let server = volume.serve();
    let ws = Ws::create_kept(&server).await;
    let id = ws.sandbox_id.clone();
    ws.checkpoint().await;
    let (ws, _) = Ws::restore(&server, &id).await;
    let taken = server.made(None, &format!("/v1/sandboxes/{id}/snapshot"), &json!({"name": "before"}));
    let snapshot = taken["id"].as_str().unwrap();
    ws.checkpoint().await;
    let first = checkpoints(&server, &id)[0].clone();
    let copy = server.made(None, &format!("/v1/snapshots/{snapshot}/restore"), &json!({}));
    let copy = copy["id"].as_str().unwrap();
    let (status, back) = server.api(None, "POST", &format!("/v1/sandboxes/{id}/rollback"), &json!({"checkpoint": first}));
    assert_eq!(status, 201, "{back}");
    eventually("the copy says where it came from", DEADLINE, || volume.metadata(copy)["from"]["snapshot_id"] == snapshot).await;
    let tree = |of: &str, more: &[&str]| {
        let url = format!("http://{}", server.address());
        ok(&command().args(["tree", of, "--server", &url]).args(more).output().unwrap())
    };
    let picture = tree(&id, &[]);
    let lines: Vec<&str> = picture.lines().collect();
    assert!(lines[0].starts_with(&format!("* {id}  saved")), "{picture}");
    assert!(lines[1].starts_with(&format!("├─ {first}")) && lines[1].contains("own ") && lines[1].contains("shared "), "{picture}");
    assert!(lines[2].contains(&format!("snapshot {snapshot}")) && lines[2].contains("\"before\""), "{picture}");
    assert!(lines[3].starts_with(&format!("│  └─ {copy}  ready  made from snapshot {snapshot} of {id}")), "{picture}");
    let last = lines.last().unwrap();
    assert!(last.starts_with("└─ ") && last.contains("latest") && last.ends_with(&format!("from {first}")), "{picture}");
    assert!(tree(copy, &[]).contains(&format!("* {copy}")), "the family is the same, whoever of it is asked for");
    let told: Value = serde_json::from_str(&tree(&id, &["--json"])).unwrap();
    assert_eq!(told["items"].as_array().unwrap().len(), 2);
    let stranger = format!("/v1/sandboxes/{}/tree", uuid::Uuid::new_v4());
    server.refuses(None, "GET", &stranger, &Value::Null, 404, "not_found");
}

#[tokio::test]
async fn a_full_volume_can_be_collected() {
    let Some(volume) = Volume::small(768 * MIB) else { return };
    let server = volume.serve();
    let mut ws = Ws::create_kept(&server).await;
    let _ = ws.bash("head -c 16000000 /dev/urandom > /root/bytes").await.ok();
    let id = ws.sandbox_id.clone();
    ws.checkpoint().await;
    let (ws, _) = Ws::restore(&server, &id).await;
    ws.close().await;
    kill(&server, &id).await;
    let mut filler = fs::File::create(volume.path().join("filler")).unwrap();
    let full = loop {
        if let Err(error) = filler.write_all(&vec![1; 4096]) {
            break error;
        }
    };
    assert_eq!(full.kind(), io::ErrorKind::StorageFull);
    let freed = told(&volume, &["gc"]);
    assert!(freed["bytes"].as_u64().unwrap() > 15_000_000, "{freed}");
    volume.verify();
}

/// What goes on at the same time.
struct Bustle {
    volume: Volume,
    servers: Vec<Server>,
    until: Instant,
    made: AtomicUsize,
    checked: AtomicUsize,
}

impl Bustle {
    fn server(&self, rng: &mut StdRng) -> &Server {
        &self.servers[rng.random_range(0..self.servers.len())]
    }

    /// Saves, forks, goes back, deletes and kills, and finds everything as it was each time.
    async fn work(&self, number: u64) {
        let mut rng = StdRng::seed_from_u64(seed() + number);
        while Instant::now() < self.until {
            let mut ws = Ws::create_kept(self.server(&mut rng)).await;
            let id = ws.sandbox_id.clone();
            let word = rng.random_range(0..3);
            // Much of it is what others have, or had.
            let make = format!("seq {word} 300000 > /root/numbers; echo {id} > /root/name; sha256sum /root/*");
            let sum = ws.bash(&make).await.ok().to_owned();
            for _ in 0..rng.random_range(1..4) {
                ws.checkpoint().await;
                let server = self.server(&mut rng);
                (ws, _) = Ws::restore(server, &id).await;
                assert_eq!(ws.bash("sha256sum /root/*").await.ok(), sum);
                self.checked.fetch_add(1, Ordering::Relaxed);
            }
            ws.checkpoint().await;
            let server = self.server(&mut rng);
            let (mut ws, _) = Ws::restore(server, &id).await;
            assert_eq!(ws.bash("sha256sum /root/*").await.ok(), sum);
            let taken = server.made(None, &format!("/v1/sandboxes/{id}/snapshot"), &json!({}));
            let snapshot = format!("/v1/snapshots/{}", taken["id"].as_str().unwrap());
            let maker = self.server(&mut rng);
            let copy = maker.made(None, &format!("{snapshot}/restore"), &json!({}));
            assert_eq!(maker.api(None, "DELETE", &snapshot, &Value::Null).0, 204);
            ws.close().await;
            kill(server, &id).await;
            // The copy needs what the killed one had.
            let copy = copy["id"].as_str().unwrap();
            let mut ws = Ws::attach(maker, copy).await;
            // The end of the execution before the snapshot may be told again.
            ws.repeats_allowed = true;
            assert_eq!(ws.bash("sha256sum /root/*").await.ok(), sum);
            ws.checkpoint().await;
            let server = self.server(&mut rng);
            let (mut ws, _) = Ws::restore(server, copy).await;
            assert_eq!(ws.bash("sha256sum /root/*").await.ok(), sum);
            self.checked.fetch_add(1, Ordering::Relaxed);
            let names = checkpoints(server, copy);
            ws.close().await;
            // One that retention has let go meanwhile is not there: that is an answer too.
            let to = json!({"checkpoint": names[rng.random_range(0..names.len())]});
            let (status, back) = server.api(None, "POST", &format!("/v1/sandboxes/{copy}/rollback"), &to);
            assert!(matches!(status, 201 | 404 | 409 | 503), "{status} {back}");
            if rng.random_bool(0.7) {
                kill(server, copy).await;
            }
            self.made.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Says so when it is dropped, also by a test that fails.
#[derive(Default)]
struct Over(Arc<AtomicBool>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// An instance that collects all the time.
fn busy(options: Options) -> Server {
    let options = options.arg("--collect-every").arg("0.5").arg("--longest-save").arg("60");
    options.arg("--keep-checkpoints").arg("2").arg("--remember").arg("1").start()
}

#[tokio::test(flavor = "multi_thread")]
async fn writers_and_collectors_on_several_instances_lose_nothing_and_leave_nothing() {
    let volume = Volume::default();
    let servers = vec![busy(volume.options()), busy(volume.options())];
    // The image is put there once.
    let first = Ws::create_kept(&servers[0]).await;
    let id = first.sandbox_id.clone();
    first.checkpoint().await;
    let length = if soak() { Duration::from_secs(600) } else { Duration::from_secs(12) };
    let until = Instant::now() + length;
    let bustle = Arc::new(Bustle { volume, servers, until, made: AtomicUsize::new(0), checked: AtomicUsize::new(0) });
    let over = Over::default();
    let by_hand = tokio::task::spawn_blocking({
        let (bustle, over) = (Arc::clone(&bustle), Arc::clone(&over.0));
        move || {
            while !over.load(Ordering::Relaxed) {
                ok(&bustle.volume.store(&["gc", "--keep-checkpoints", "2"]));
            }
        }
    });
    join_all((0..3).map(|number| bustle.work(number))).await;
    drop(over);
    by_hand.await.unwrap();
    let made = (bustle.made.load(Ordering::Relaxed), bustle.checked.load(Ordering::Relaxed));
    println!("{} sandboxes were saved, copied and killed; {} restores were checked", made.0, made.1);
    assert!(made.0 > 0);

    // Every checkpoint that counts can be restored.
    bustle.volume.verify();
    let listed = told(&bustle.volume, &["ls"]);
    let kept: Vec<&str> =
        listed["items"].as_array().unwrap().iter().filter(|one| one["status"] != "killed").filter_map(|one| one["id"].as_str()).collect();
    assert!(kept.contains(&id.as_str()));
    for id in kept {
        let (mut ws, _) = Ws::reach(&bustle.servers[0], id).await;
        ws.expect_alive().await;
        ws.close().await;
        kill(&bustle.servers[0], id).await;
    }
    collect_all(&bustle.volume).await;
    let used = told(&bustle.volume, &["du"]);
    assert_eq!((&used["items"], &used["freeable_bytes"]), (&json!([]), &json!(0)), "{used}");
    let collected = fs::read_dir(bustle.volume.path().join("collect/intents")).unwrap().count();
    assert_eq!(collected, 0, "nobody is at work any more");
}

//! One snapshot becomes many sandboxes: each goes on from there by itself, all of them come or none, and nobody else's can be had.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{collections::BTreeSet, fs, time::Duration};

use futures_util::future::join_all;
use sandboxer_e2e::{Counting, DEADLINE, FailPoints, Server, Volume, Ws, count, eventually, host, http};
use serde_json::{Value, json};

const ALICE: (&str, &str) = ("X-API-Key", "key-of-alice-0123456789");
const BOB: (&str, &str) = ("X-API-Key", "key-of-bob-0123456789");

/// What tells siblings apart, each a line: names, and what is random in a new process.
const SELF: &str = "
import os, random, socket, uuid
print(socket.gethostname(), open('/run/sandboxer/generation').read().strip())
print(random.random(), os.urandom(8).hex(), uuid.uuid4(), hash('text'))
";

fn restore(snapshot: &str) -> String {
    format!("/v1/snapshots/{snapshot}/restore")
}

fn items(made: &Value) -> &Vec<Value> {
    made["items"].as_array().unwrap()
}

fn id(sandbox: &Value) -> &str {
    sandbox["id"].as_str().unwrap()
}

/// Directories of sandboxes that a server has.
fn directories(server: &Server) -> usize {
    server.sandbox_directories().len()
}

/// What there is on the volume of which sandboxes.
fn on_volume(volume: &Volume) -> BTreeSet<String> {
    let names = fs::read_dir(volume.path()).unwrap().chain(fs::read_dir(volume.path().join("locks")).unwrap());
    names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[tokio::test]
async fn eight_copies_at_once_go_on_each_by_itself_and_the_original_is_undisturbed() {
    let volume = Volume::default();
    let server = volume.serve();
    let original = Ws::create_with(&server, json!({"enable_checkpoint": true, "metadata": {"of": "it"}})).await;
    let original_id = original.sandbox_id.clone();
    let mut counting = Counting::start(original).await;
    counting.expect_count(1).await;
    counting.expect_count(2).await;
    let snapshot = counting.snapshot(Some("two")).await;
    let then = counting.now();

    let alone = server.sandbox_processes().len();
    // The original counts on while they are made.
    let (address, path) = (server.address(), restore(&snapshot));
    let mut forking = tokio::task::spawn_blocking(move || http::json(address, "POST", &path, &[], &json!({"count": 8})).unwrap());
    let mut counted = 2;
    let forked = loop {
        counted += 1;
        counting.expect_count(counted).await;
        if forking.is_finished() {
            break (&mut forking).await.unwrap();
        }
    };
    assert_eq!(forked.status, 201, "{}", forked.body);
    let forked = forked.json();
    let forked = items(&forked);
    assert_eq!(forked.len(), 8);

    let copies = join_all(forked.iter().enumerate().map(async |(number, sandbox)| {
        assert_eq!((&sandbox["status"], &sandbox["snapshot_id"]), (&json!("ready"), &json!(snapshot)), "{sandbox}");
        assert_eq!(sandbox["metadata"]["of"], "it");
        // Safe on the volume before anybody heard of it.
        assert!(volume.record(id(sandbox))["latest"].is_string());
        let ws = Ws::attach(&server, id(sandbox)).await;
        let mut copy = then.goes_on(ws).await;
        for n in 3..=3 + number {
            copy.expect_count(n).await;
        }
        let mut ws = copy.stop().await;
        assert_eq!(ws.bash("wc -c < /root/count").await.ok(), format!("{}\n", 3 + number));
        ws.python(SELF).await.ok().to_owned()
    }));
    let mut selves = copies.await;
    counting.expect_count(counted + 1).await;
    let mut ws = counting.stop().await;
    selves.push(ws.python(SELF).await.ok().to_owned());

    for (sandbox, said) in forked.iter().zip(&selves) {
        let name = format!("sandbox-{} {}\n", &id(sandbox)[..8], sandbox["generation"]);
        assert!(said.starts_with(&name), "{said:?} does not begin with {name:?}");
    }
    assert!(selves[8].starts_with(&format!("sandbox-{} 0\n", &original_id[..8])), "{:?}", selves[8]);
    let words: Vec<&str> = selves.iter().flat_map(|said| said.split_whitespace()).collect();
    assert_eq!(words.iter().collect::<BTreeSet<_>>().len(), words.len(), "{selves:?}");
    let tokens: BTreeSet<&str> = forked.iter().map(|sandbox| sandbox["token"].as_str().unwrap()).collect();
    assert_eq!(tokens.len(), 8);
    assert!(server.get("/metrics").body.contains("sandboxer_forks_total 8"));

    for sandbox in forked {
        let path = format!("/v1/sandboxes/{}", id(sandbox));
        eventually("nobody is attached", DEADLINE, || server.api(None, "DELETE", &path, &Value::Null).0 == 204).await;
    }
    eventually("only the original is left", DEADLINE, || {
        let gone = |sandbox: &Value| host::cgroups_of(id(sandbox)).is_empty();
        directories(&server) == 1 && server.sandbox_processes().len() <= alone && forked.iter().all(gone)
    })
    .await;
    ws.expect_alive().await;
    volume.verify();
}

#[tokio::test]
async fn a_copy_survives_the_death_of_its_server_and_of_its_machine() {
    let volume = Volume::default();
    let (mut server, other) = (volume.serve(), volume.serve());
    let mut counting = Counting::start(Ws::create_kept(&server).await).await;
    counting.expect_count(1).await;
    let (snapshot, then) = (counting.snapshot(None).await, counting.now());
    let copy = server.made(None, &restore(&snapshot), &Value::Null);
    let mut copied = then.goes_on(Ws::attach(&server, id(&copy)).await).await;
    copied.expect_count(2).await;
    let further = copied.now();
    server.kill9();
    server.restart();
    let mut ws = Ws::open(&server, &format!("/attach/{}", id(&copy))).await;
    assert_eq!(ws.expect_status("SANDBOX_RUNNING").await["generation"], copy["generation"]);
    let mut copied = further.goes_on(ws).await;
    copied.expect_count(3).await;

    // One that was never saved by itself is where it began.
    let second = server.made(None, &restore(&snapshot), &Value::Null);
    server.burn_down();
    let mut ws = Ws::open(&other, &format!("/attach/{}", id(&second))).await;
    ws.expect_status("SANDBOX_RESTORING").await;
    let running = ws.expect_running_after(DEADLINE).await;
    assert_eq!((&running["rewound"], &running["execution_id"]), (&json!(true), &json!("counter")), "{running}");
    assert!(running["generation"].as_u64() > second["generation"].as_u64(), "{running}");
    then.goes_on(ws).await.expect_count(2).await;
    volume.verify();
}

#[tokio::test]
async fn a_sandbox_is_copied_as_it_is_as_it_was_and_when_it_rests() {
    let volume = Volume::default();
    let (a, b) = (volume.serve(), volume.serve());
    let mut ws = Ws::create_kept(&a).await;
    let sandbox = ws.sandbox_id.clone();
    let _ = ws.bash("echo old > f").await.ok();
    let path = format!("/v1/sandboxes/{sandbox}");
    let fork = format!("{path}/fork");
    // A client that answers keeps it.
    let (address, checkpoint) = (a.address(), format!("{path}/checkpoint"));
    let asking = tokio::task::spawn_blocking(move || http::json(address, "POST", &checkpoint, &[], &json!({})).unwrap());
    while !asking.is_finished() {
        assert_eq!(ws.incoming_within(Duration::from_millis(20)).await, None);
    }
    let answer = asking.await.unwrap();
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (409, &json!("in_use")), "{}", answer.body);
    ws.close().await;
    let checkpoint = a.made(None, &format!("{path}/checkpoint"), &json!({}));
    assert_eq!(
        (&checkpoint["sandbox_id"], &checkpoint["latest"], &checkpoint["automatic"]),
        (&json!(sandbox), &json!(true), &json!(false))
    );
    assert_eq!(a.found(None, &path)["status"], "saved");
    a.refuses(None, "POST", &format!("{path}/checkpoint"), &json!({}), 409, "not_ready");
    a.refuses(None, "POST", &format!("{path}/snapshot"), &json!({}), 409, "not_ready");

    // At another instance, which has to fetch it.
    let resting = b.made(None, &fork, &json!({"count": 2}));
    let (mut ws, _) = Ws::restore(&a, &sandbox).await;
    let _ = ws.bash("echo new > f").await.ok();
    let now = a.made(None, &fork, &json!({}));
    let was = a.made(None, &fork, &json!({"checkpoint": checkpoint["name"], "count": 1}));
    assert_eq!((now.get("snapshot_id"), a.found(None, "/v1/snapshots")["items"].clone()), (None, json!([])), "no snapshot is left of it");
    for (server, copy, content) in
        [(&b, &items(&resting)[0], "old\n"), (&b, &items(&resting)[1], "old\n"), (&a, &now, "new\n"), (&a, &items(&was)[0], "old\n")]
    {
        assert_eq!(Ws::attach(server, id(copy)).await.bash("cat f").await.ok(), content);
    }
    ws.expect_alive().await;
    for body in
        [json!({"count": 0}), json!({"count": 101}), json!({"count": "2"}), json!({"checkpoint": "checkpoint_x"}), json!({"nmae": 1})]
    {
        a.refuses(None, "POST", &fork, &body, 422, "invalid_field");
    }
    a.refuses(None, "POST", &fork, &json!({"checkpoint": "checkpoint_1.img"}), 404, "not_found");
}

#[tokio::test]
async fn what_belongs_to_another_key_is_unknown() {
    let volume = Volume::default();
    let server = volume.options().env("SANDBOXER_API_KEYS", format!("alice:{},bob:{}", ALICE.1, BOB.1)).start();
    let of = |key| server.made(Some(key), "/v1/sandboxes", &json!({"enable_checkpoint": true}));
    let (alices, bobs) = (of(ALICE), of(BOB));
    let path = format!("/v1/sandboxes/{}", id(&alices));
    let snapshot = server.made(Some(ALICE), &format!("{path}/snapshot"), &json!({"name": "mine"}));
    assert_eq!((&snapshot["status"], &snapshot["meta"]["name"]), (&json!("completed"), &json!("mine")), "{snapshot}");
    let snapshot_path = format!("/v1/snapshots/{}", id(&snapshot));
    let rollback = format!("/v1/sandboxes/{}/rollback", id(&bobs));
    for (method, path, body) in [
        ("GET", snapshot_path.as_str(), Value::Null),
        ("DELETE", &snapshot_path, Value::Null),
        ("POST", &restore(id(&snapshot)), json!({"count": 2})),
        ("POST", &rollback, json!({"snapshot_id": id(&snapshot)})),
        ("POST", &format!("{path}/fork"), json!({})),
        ("POST", &format!("{path}/snapshot"), json!({})),
        ("POST", &format!("{path}/checkpoint"), json!({})),
        ("GET", &format!("{path}/checkpoints"), Value::Null),
    ] {
        server.refuses(Some(BOB), method, path, &body, 404, "not_found");
    }
    assert_eq!(server.found(Some(BOB), "/v1/snapshots")["items"], json!([]));
    let path = format!("/attach/{}?sandbox_token={}", id(&bobs), bobs["token"].as_str().unwrap());
    let mut ws = Ws::connect(server.address(), &path, &[BOB]).await.unwrap();
    ws.expect_status("SANDBOX_RUNNING").await;
    ws.send(json!({"action": "rollback", "snapshot_id": id(&snapshot)})).await;
    ws.expect_status("SANDBOX_RESTORING").await;
    let failed = ws.expect_status("SANDBOX_RESTORE_ERROR").await;
    assert!(failed["message"].as_str().unwrap().contains("there is no such"), "{failed}");
    ws.expect_error("restore_failed").await;
    ws.expect_alive().await;
    assert_eq!(items(&server.found(Some(ALICE), "/v1/snapshots"))[0]["id"], snapshot["id"]);
    assert_eq!(directories(&server), 2);
}

#[tokio::test]
async fn where_not_all_can_be_made_none_is_and_nothing_is_left() {
    let volume = Volume::default();
    let (server, other) = (volume.options().arg("--max-sandboxes").arg("3").start(), volume.serve());
    let mut ws = Ws::create_kept(&server).await;
    let taken = server.made(None, &format!("/v1/sandboxes/{}/snapshot", ws.sandbox_id), &json!({}));
    let path = restore(id(&taken));
    let (before, processes) = (on_volume(&volume), server.sandbox_processes().len());
    server.refuses(None, "POST", &path, &json!({"count": 3}), 503, "no_capacity");
    server.refuses(None, "POST", &path, &json!({"inputs": {"memory_mb": 1}}), 422, "invalid_field");
    server.refuses(None, "POST", &path, &json!({"host": "elsewhere"}), 422, "invalid_field");
    assert_eq!((directories(&server), server.sandbox_processes().len(), on_volume(&volume)), (1, processes, before.clone()));
    // The places that were not taken are free.
    let key = ("Idempotency-Key", "once");
    let two = server.made(Some(key), &path, &json!({"count": 2}));
    assert_eq!(server.made(Some(key), &path, &json!({"count": 2})), two, "the same request is done once");
    assert_eq!(items(&two).len(), 2);
    server.refuses(None, "POST", &path, &json!({}), 503, "no_capacity");
    ws.expect_alive().await;

    // What is said of the copies on the volume comes behind the answer.
    let described = |copy: &Value| {
        fs::read_to_string(volume.path().join(id(copy)).join("metadata.json")).is_ok_and(|text| text.contains("lastCheckpointedAt"))
    };
    eventually("they are described on the volume", DEADLINE, || items(&two).iter().all(described)).await;

    // Data that is damaged, at an instance that has to read it.
    let before = on_volume(&volume);
    for pack in volume.packs() {
        let mut bytes = fs::read(&pack).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle..].fill(0);
        fs::write(&pack, bytes).unwrap();
    }
    let message = other.refuses(None, "POST", &path, &json!({"count": 3}), 503, "restore_failed");
    assert!(message.contains(".pack"), "{message}");
    eventually("nothing of it is left", DEADLINE, || directories(&other) == 0 && other.sandbox_processes().is_empty()).await;
    assert_eq!(on_volume(&volume), before);
}

#[tokio::test]
async fn copies_that_were_cut_off_by_the_death_of_the_server_are_gone_after_it() {
    let (volume, points) = (Volume::default(), FailPoints::default());
    let mut server = points.on(volume.options()).start();
    let ws = Ws::create_kept(&server).await;
    let taken = server.made(None, &format!("/v1/sandboxes/{}/snapshot", ws.sandbox_id), &json!({}));
    let stages = if count(0, 1) == 1 { FailPoints::STAGES.to_vec() } else { vec!["synced"] };
    for (kind, stage) in ["manifest", "publish"].into_iter().flat_map(|kind| stages.iter().map(move |stage| (kind, stage))) {
        points.arm(&format!("{kind}:{stage}=kill"));
        let (address, path) = (server.address(), restore(id(&taken)));
        let forking = tokio::task::spawn_blocking(move || http::json(address, "POST", &path, &[], &json!({"count": 2})));
        server.killed().await;
        assert!(forking.await.unwrap().is_err());
        points.disarm();
        server.restart();
        eventually("the original alone goes on", DEADLINE, || directories(&server) == 1).await;
        assert_eq!(server.found(None, "/v1/sandboxes")["items"].as_array().unwrap().len(), 1, "{kind}:{stage}");
    }
    let mut ws = Ws::attach(&server, &ws.sandbox_id).await;
    ws.expect_alive().await;
}

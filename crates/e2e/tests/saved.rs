//! Sandboxes that rest on the volume, in lists.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{fs, path::PathBuf};

use sandboxer_e2e::{Cli, DEADLINE, Key, Options, Server, Volume, Ws, eventually};
use serde_json::{Value, json};

const ALICE: (&str, &str) = ("X-API-Key", "key-of-alice-0123456789");
const BOB: (&str, &str) = ("X-API-Key", "key-of-bob-0123456789");

fn with_keys(volume: &Volume) -> Options {
    volume.options().env("SANDBOXER_API_KEYS", format!("alice:{},bob:{}", ALICE.1, BOB.1))
}

/// A sandbox that was saved, and no longer runs, unless it is to go on.
async fn saved(server: &Server, volume: &Volume, key: (&str, &str), name: &str, goes_on: bool) -> (String, String) {
    let mut ws = Ws::connect(server.address(), "/create", &[key]).await.unwrap();
    ws.send(json!({"enable_checkpoint": true, "metadata": {"name": name}})).await;
    ws.expect_created().await;
    let (id, token) = (ws.sandbox_id.clone(), ws.sandbox_token.clone());
    if goes_on {
        ws.close().await;
        eventually("the disconnect is saved", DEADLINE, || volume.metadata(&id)["lastCheckpointedAt"].is_string()).await;
    } else {
        ws.send(json!({"action": "checkpoint"})).await;
        ws.expect_status("SANDBOX_CHECKPOINTING").await;
        ws.expect_status("SANDBOX_CHECKPOINTED").await;
        ws.expect_close(1000).await;
        eventually("it was given up", DEADLINE, || volume.record(&id)["owner"].is_null()).await;
    }
    (id, token)
}

/// Names with their status, page by page, oldest first.
fn listed(server: &Server, key: Key<'_>, query: &str) -> Vec<(String, String)> {
    let (mut all, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = server.found(key, &format!("/v1/sandboxes?{query}{cursor}"));
        for item in page["items"].as_array().unwrap() {
            all.push((item["metadata"]["name"].as_str().unwrap().to_owned(), item["status"].as_str().unwrap().to_owned()));
        }
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => return all,
        }
    }
}

fn shown(names: &[(&str, &str)]) -> Vec<(String, String)> {
    names.iter().map(|(name, status)| ((*name).to_owned(), (*status).to_owned())).collect()
}

/// The names of saved sandboxes on the volume, by tenant.
fn names_on(volume: &Volume) -> Vec<PathBuf> {
    let tenants = fs::read_dir(volume.path().join("kept")).unwrap().map(|tenant| tenant.unwrap().path());
    tenants.flat_map(|tenant| fs::read_dir(tenant).unwrap().map(|name| name.unwrap().path())).collect()
}

#[tokio::test]
async fn saved_sandboxes_are_listed_to_their_key_alone_at_every_instance_until_they_are_deleted() {
    let volume = Volume::default();
    let (a, b) = (with_keys(&volume).start(), with_keys(&volume).start());
    let (alice, bob): (Key<'_>, Key<'_>) = (Some(ALICE), Some(BOB));
    let (first, token) = saved(&a, &volume, ALICE, "first", false).await;
    let (foreign, _) = saved(&a, &volume, BOB, "foreign", false).await;
    let (second, _) = saved(&a, &volume, ALICE, "second", false).await;
    let (_third, _) = saved(&a, &volume, ALICE, "third", true).await;
    for (server, elsewhere) in [(&a, false), (&b, true)] {
        let all = shown(&[("first", "saved"), ("second", "saved"), ("third", "ready")]);
        assert_eq!(listed(server, alice, "saved=true"), all);
        assert_eq!(listed(server, alice, "saved=true&limit=1"), all, "in pages");
        assert_eq!(
            listed(server, alice, "limit=2"),
            if elsewhere { vec![] } else { shown(&[("third", "ready")]) },
            "unless it is asked for"
        );
        assert_eq!(listed(server, bob, "saved=true"), shown(&[("foreign", "saved")]));
        server.refuses(None, "GET", "/v1/sandboxes?saved=true", &Value::Null, 401, "unauthorized");
        server.refuses(alice, "GET", "/v1/sandboxes?saved=maybe", &Value::Null, 400, "bad_request");
        server.refuses(alice, "GET", "/v1/sandboxes?saved=true&cursor=1.x", &Value::Null, 400, "bad_request");
    }
    // One that has come back is listed once.
    let path = format!("/attach/{first}");
    let mut ws = Ws::connect(b.address(), &path, &[ALICE, ("X-Sandbox-Token", &token)]).await.unwrap();
    ws.expect_status("SANDBOX_RESTORING").await;
    ws.expect_status("SANDBOX_RUNNING").await;
    for server in [&a, &b] {
        let now = shown(&[("first", "ready"), ("second", "saved"), ("third", "ready")]);
        assert_eq!(listed(server, alice, "saved=true"), now);
    }
    // A name that somebody put where it does not belong shows nothing to anybody.
    let names = names_on(&volume);
    let of_bob = names.iter().find(|name| name.to_str().unwrap().ends_with(&foreign)).unwrap();
    let of_alice = names.iter().find(|name| name.to_str().unwrap().ends_with(&second)).unwrap();
    fs::copy(of_alice, of_bob.parent().unwrap().join(of_alice.file_name().unwrap())).unwrap();
    fs::write(of_bob.parent().unwrap().join("nonsense"), "").unwrap();
    assert_eq!(listed(&b, bob, "saved=true"), shown(&[("foreign", "saved")]));
    // What is deleted is not listed, and neither is what was killed.
    let (status, _) = b.api(alice, "DELETE", &format!("/v1/sandboxes/{second}"), &Value::Null);
    assert_eq!(status, 204);
    ws.send(json!({"action": "kill_sandbox"})).await;
    ws.expect_status("SANDBOX_KILLING").await;
    ws.expect_status("SANDBOX_KILLED").await;
    // On a slow disk it is written after that was said.
    eventually("the volume knows", DEADLINE, || volume.metadata(&first)["status"] == "killed").await;
    for server in [&a, &b] {
        assert_eq!(listed(server, alice, "saved=true"), shown(&[("third", "ready")]));
    }
    let left = || names_on(&volume).iter().filter(|name| [&first, &second].iter().any(|id| name.to_str().unwrap().ends_with(*id))).count();
    eventually("their names are gone, but for the one that was put there", DEADLINE, || left() == 1).await;
    // A volume that is away is told of, and what is in memory is listed all the same.
    volume.hide();
    b.refuses(alice, "GET", "/v1/sandboxes?saved=true", &Value::Null, 503, "volume_unavailable");
    assert_eq!(listed(&b, alice, "limit=5"), shown(&[]));
    volume.show();
    assert_eq!(listed(&b, bob, "saved=true"), shown(&[("foreign", "saved")]));
}

#[tokio::test]
async fn the_command_lists_saved_sandboxes_where_it_is_told_to() {
    let volume = Volume::default();
    let server = volume.serve();
    let id = Ws::create_kept(&server).await.checkpoint().await;
    let cli = Cli::new(&server);
    eventually("it is no longer here", DEADLINE, || !cli.ok(["ls"]).contains(&id)).await;
    let is_listed = || cli.ok(["ls", "--saved"]).lines().any(|line| line.starts_with(&id) && line.contains("saved"));
    eventually("it is listed", DEADLINE, is_listed).await;
    // One that a server saved which kept no track of it is known by its id alone.
    let mut about = volume.metadata(&id);
    assert!(about.as_object_mut().unwrap().remove("tenant").is_some(), "{about}");
    fs::write(volume.path().join(&id).join("metadata.json"), about.to_string()).unwrap();
    for name in names_on(&volume) {
        fs::remove_file(name).unwrap();
    }
    assert!(!is_listed());
    assert!(cli.ok(["get", &id]).contains("saved"));
    // Saved once more, it is in the list.
    let (mut ws, _) = Ws::reach(&server, &id).await;
    ws.expect_alive().await;
    assert_eq!(ws.checkpoint().await, id);
    eventually("it is listed again", DEADLINE, is_listed).await;
}

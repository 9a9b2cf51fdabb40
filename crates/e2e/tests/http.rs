//! The plain HTTP side: health, metrics, and who is refused before the upgrade.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs::File;

use sandboxer_e2e::{DEADLINE, Options, Server, Volume, Ws, eventually, http, shared};
use serde_json::json;

#[test]
fn a_server_that_is_up_is_alive_and_ready() {
    assert_eq!(shared().get("/healthz").status, 200);
    assert_eq!(shared().get("/readyz").status, 200);
    assert_eq!(shared().get("/nothing/here").status, 404);
}

#[test]
fn what_is_no_upgrade_gets_an_error_of_http() {
    for path in ["/create", "/attach/5e1f5e0a-6f0c-4d5c-8a70-0b8f3f2b8f11"] {
        let status = shared().get(path).status;
        assert!((400..500).contains(&status), "{path}: {status}");
    }
    assert_eq!(http::request(shared().address(), "DELETE", "/create", &[]).unwrap().status, 405);
}

fn upgraded_with(path: &str, extra: &[(&str, &str)]) -> u16 {
    let headers: Vec<(&str, &str)> = http::UPGRADE.iter().chain(extra).copied().collect();
    http::request(shared().address(), "GET", path, &headers).unwrap().status
}

#[test]
fn a_foreign_host_is_refused_with_403_before_the_upgrade() {
    let port = shared().address().port();
    for path in ["/create", "/attach/5e1f5e0a-6f0c-4d5c-8a70-0b8f3f2b8f11", "/metrics", "/v1/sandboxes"] {
        for host in ["evil.example", &format!("evil.example:{port}"), "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1"] {
            assert_eq!(upgraded_with(path, &[("Host", host)]), 403, "{path} as {host}");
        }
    }
    for host in [format!("localhost:{port}"), format!("127.0.0.1:{port}"), format!("[::1]:{port}"), "LOCALHOST".to_owned()] {
        assert_eq!(upgraded_with("/attach/x", &[("Host", &host)]), 101, "{host}");
    }
}

#[test]
fn a_foreign_origin_is_refused_with_403_before_the_upgrade() {
    let port = shared().address().port();
    for path in ["/create", "/attach/5e1f5e0a-6f0c-4d5c-8a70-0b8f3f2b8f11"] {
        for origin in ["https://evil.example", "null", "http://127.0.0.1:1", "file://", "http://127.0.0.1.evil.example"] {
            assert_eq!(upgraded_with(path, &[("Origin", origin)]), 403, "{path} from {origin}");
        }
    }
    assert_eq!(upgraded_with("/attach/x", &[("Origin", &format!("http://127.0.0.1:{port}"))]), 101);
    assert_eq!(upgraded_with("/attach/x", &[]), 101);
}

/// The value of the one sample whose line begins like this.
fn sample(server: &Server, name: &str) -> f64 {
    let text = server.get("/metrics").body;
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#') && line.starts_with(name)).collect();
    assert!(!lines.is_empty(), "no {name} in\n{text}");
    lines.iter().map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum()
}

#[tokio::test]
async fn metrics_count_and_time_creates_and_executions_and_tell_the_live_sandboxes() {
    let server = Options::default().start();
    let answer = server.get("/metrics");
    assert_eq!(answer.status, 200);
    assert!(answer.header("content-type").unwrap().contains("text"), "{:?}", answer.headers);
    assert_eq!(sample(&server, "sandboxer_live_sandboxes"), 0.0);

    let mut one = Ws::create(&server).await;
    let two = Ws::create(&server).await;
    one.bash("true").await;
    one.python("pass").await;
    assert_eq!(one.bash("exit 1").await.exit_code(), Some(1));
    assert_eq!(sample(&server, "sandboxer_live_sandboxes"), 2.0);
    assert_eq!(sample(&server, "sandboxer_create_seconds_count"), 2.0);
    assert!(sample(&server, "sandboxer_create_seconds_bucket") > 0.0);
    assert_eq!(sample(&server, "sandboxer_execution_seconds_count"), 3.0);
    assert!(sample(&server, "sandboxer_execution_seconds_bucket") > 0.0);
    assert_eq!(sample(&server, "sandboxer_creates_total"), 2.0);
    assert_eq!(sample(&server, "sandboxer_executions_total"), 3.0);

    one.send(json!({"action": "kill_sandbox"})).await;
    one.expect_status("SANDBOX_KILLING").await;
    one.expect_status("SANDBOX_KILLED").await;
    eventually("one sandbox less", DEADLINE, || sample(&server, "sandboxer_live_sandboxes") == 1.0).await;
    drop(two);
}

#[tokio::test]
async fn the_log_names_the_sandbox_and_never_its_token_or_its_code() {
    let server = Options::default().start();
    let mut ws = Ws::create(&server).await;
    ws.bash("echo marker-in-the-code").await;
    ws.send(json!({"action": "kill_sandbox"})).await;
    ws.expect_status("SANDBOX_KILLING").await;
    ws.expect_status("SANDBOX_KILLED").await;
    ws.expect_close(1000).await;
    let log = server.log();
    assert!(log.contains(&ws.sandbox_id), "{log}");
    assert!(!log.contains(&ws.sandbox_token) && !log.contains("marker-in-the-code"), "{log}");
}

#[tokio::test]
async fn a_server_whose_image_is_being_built_is_alive_but_not_ready() {
    let images = tempfile::tempdir().unwrap();
    // Somebody else builds it, and takes long.
    let building = File::create(images.path().join("build.lock")).unwrap();
    building.lock().unwrap();
    let server = Options::default().arg("--image-dir").arg(images.path().to_str().unwrap()).not_waiting().start();
    eventually("it waits for the image", DEADLINE, || server.get("/readyz").body.contains("waiting for another process")).await;
    let answer = server.get("/readyz");
    let expected = "preparing the base image: 0 %, waiting for another process that is building it\n";
    assert_eq!((answer.status, answer.body.as_str()), (503, expected));
    assert_eq!(server.get("/healthz").status, 200);
    let mut ws = Ws::open(&server, "/create").await;
    ws.send(json!({})).await;
    ws.expect_status("SANDBOX_CREATING").await;
    ws.expect_status("SANDBOX_CREATION_ERROR").await;
    ws.expect_error("not_ready").await;
    ws.expect_close(4000).await;
}

#[tokio::test]
async fn a_server_that_is_draining_says_so_to_whoever_comes() {
    let volume = Volume::default();
    let mut server = volume.options().arg("--stop-grace").arg("60").start();
    let kept = Ws::create_kept(&server).await;
    let sandbox = kept.sandbox_id.clone();
    // It can't be saved before all of this was asked.
    let boots: Vec<_> = server.sandbox_processes().into_iter().filter(|process| process.command.contains(&sandbox)).collect();
    assert!(!boots.is_empty());
    let all = |signal| {
        for process in &boots {
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(process.pid.cast_signed()), signal).unwrap();
        }
    };
    all(nix::sys::signal::Signal::SIGSTOP);
    server.term();
    eventually("it is not ready", DEADLINE, || server.get("/readyz").status == 503).await;
    let answer = server.get("/readyz");
    assert_eq!((answer.status, answer.body.as_str()), (503, "stopping\n"));
    assert_eq!(server.get("/healthz").status, 200);
    let mut ws = Ws::open(&server, "/create").await;
    ws.send(json!({})).await;
    ws.expect_status("SANDBOX_CREATING").await;
    ws.expect_status("SANDBOX_CREATION_ERROR").await;
    ws.expect_error("server_stopping").await;
    ws.expect_close(4000).await;
    let mut ws = Ws::open(&server, &format!("/attach/{sandbox}")).await;
    ws.expect_error("server_stopping").await;
    ws.expect_close(1001).await;
    all(nix::sys::signal::Signal::SIGCONT);
    assert!(server.exited().await.success());
}

#[tokio::test]
async fn metrics_are_served_without_a_key_at_an_address_of_their_own() {
    let key = "key-of-the-tests-0123456789abcdef";
    let server = Options::default().env("SANDBOXER_API_KEYS", key).arg("--metrics-listen").arg("127.0.0.1:0").start();
    let said = server.said();
    let address = said.strip_prefix("sandboxer serving metrics on http://").and_then(|rest| rest.strip_suffix("/metrics"));
    let address = address.and_then(|address| address.parse().ok()).unwrap_or_else(|| panic!("{said:?}"));
    let answer = http::try_get(address, "/metrics", &[]).unwrap();
    assert_eq!(answer.status, 200);
    assert!(answer.body.contains("sandboxer_live_sandboxes 0"), "{}", answer.body);
    for path in ["/", "/healthz", "/create", "/attach/x", "/v1/sandboxes"] {
        assert_eq!(http::try_get(address, path, &http::UPGRADE).unwrap().status, 404, "{path}");
    }
    assert_eq!(server.get("/metrics").status, 401);
    assert_eq!(http::try_get(server.address(), "/metrics", &[("X-API-Key", key)]).unwrap().status, 200);
}

//! How a server starts and stops, how sandboxes age, and that nothing is left over.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{net::TcpListener, time::Duration};

use futures_util::future::join_all;
use sandboxer_e2e::{Options, Server, Ws, command, eventually, host, shared, stderr_of, stdout_of};
use serde_json::json;

/// Attached only to find out; whoever finds it there lets it be idle again.
async fn is_gone(server: &Server, id: &str) -> Option<String> {
    let mut ws = Ws::open(server, &format!("/attach/{id}")).await;
    let message = ws.next().await;
    if message["status"] == "SANDBOX_NOT_FOUND" {
        ws.expect_close(1011).await;
        return Some(message["message"].as_str().unwrap().to_owned());
    }
    assert_eq!(message["status"], "SANDBOX_RUNNING", "{message}");
    ws.close().await;
    None
}

fn has_processes(server: &Server, id: &str) -> bool {
    server.sandbox_processes().iter().any(|process| process.command.contains(id))
}

#[tokio::test]
async fn an_idle_sandbox_is_deleted_and_whoever_attaches_later_is_told() {
    let server = shared();
    let mut ws = Ws::create_with(server, json!({"idle_timeout": 1})).await;
    let id = ws.sandbox_id.clone();
    ws.expect_alive().await;
    assert!(has_processes(server, &id));
    ws.close().await;
    eventually("the idle sandbox ends", sandboxer_e2e::DEADLINE, || !has_processes(server, &id)).await;
    let why = is_gone(server, &id).await.expect("it is gone");
    assert!(why.contains("without a client"), "{why}");
}

#[tokio::test]
async fn a_sandbox_with_a_client_is_never_idle() {
    let server = shared();
    let mut ws = Ws::create_with(server, json!({"idle_timeout": 1})).await;
    assert_eq!(ws.incoming_within(Duration::from_secs(3)).await, None);
    ws.expect_alive().await;
}

#[tokio::test]
async fn a_sandbox_that_executes_is_not_idle_without_a_client() {
    let server = shared();
    let mut ws = Ws::create_with(server, json!({"idle_timeout": 1})).await;
    let id = ws.sandbox_id.clone();
    ws.start(json!({"language": "bash", "code": "sleep 10; echo end"})).await;
    ws.close().await;
    // Not a wait for something: the time in which it must not be deleted.
    tokio::time::sleep(Duration::from_millis(2300)).await;
    assert!(has_processes(server, &id));
    let mut ws = Ws::attach(server, &id).await;
    assert_eq!(ws.until_done().await.ok(), "end\n");
}

#[tokio::test]
async fn an_attach_starts_the_idle_time_anew_and_zero_means_never() {
    let server = shared();
    let brief = Ws::create_with(server, json!({"idle_timeout": 10})).await;
    let never = Ws::create_with(server, json!({"idle_timeout": 0})).await;
    let (brief_id, never_id) = (brief.sandbox_id.clone(), never.sandbox_id.clone());
    brief.close().await;
    never.close().await;
    for _ in 0..5 {
        tokio::time::sleep(Duration::from_millis(2500)).await;
        assert_eq!(is_gone(server, &brief_id).await, None);
    }
    assert_eq!(is_gone(server, &never_id).await, None);
}

/// The bar of issue 01: fifty at once, each answering, and nothing of them left after SIGTERM.
#[tokio::test]
async fn fifty_sandboxes_answer_and_nothing_of_them_is_left_after_sigterm() {
    const SANDBOXES: usize = 50;
    let mut server = Options::default().arg("--max-sandboxes").arg(SANDBOXES.to_string()).arg("--stop-grace").arg("120").start();
    let mut clients = Vec::new();
    for _ in 0..SANDBOXES / 10 {
        clients.extend(join_all((0..10).map(|_| Ws::create(&server))).await);
    }
    let answers = join_all(clients.iter_mut().enumerate().map(|(number, ws)| async move {
        ws.bash(&format!("echo {number} >/tmp/number; sleep 1000 & :")).await;
        ws.bash("cat /tmp/number").await.ok().trim().parse::<usize>().unwrap()
    }))
    .await;
    assert_eq!(answers, (0..SANDBOXES).collect::<Vec<_>>());
    // One of them has an execution under way, one has no client.
    clients[0].start(json!({"language": "bash", "code": "sleep 1000"})).await;
    let ids: Vec<String> = clients.iter().map(|ws| ws.sandbox_id.clone()).collect();
    clients.pop().unwrap().close().await;
    assert!(ids.iter().all(|id| has_processes(&server, id)), "the harness finds their processes");

    server.term();
    join_all(clients.iter_mut().map(|ws| async move {
        ws.expect_error("server_stopping").await;
        ws.expect_close(1001).await;
    }))
    .await;
    assert!(server.exited().await.success());
    let left = server.sandbox_processes();
    assert!(left.is_empty(), "processes: {left:#?}");
    let mounts = host::mounts_under(server.data_dir());
    assert!(mounts.is_empty(), "mounts: {mounts:#?}");
    for id in &ids {
        let cgroups = host::cgroups_of(id);
        assert!(cgroups.is_empty(), "cgroups: {cgroups:#?}");
        let directories: Vec<_> = host::files_of(server.data_dir(), id).into_iter().filter(|path| path.is_dir()).collect();
        assert!(directories.is_empty(), "directories: {directories:#?}");
    }
}

#[tokio::test]
async fn sigterm_ends_a_server_with_nothing_to_do_at_once_and_well() {
    let mut server = Options::default().start();
    server.term();
    assert!(server.exited().await.success());
}

#[tokio::test]
async fn a_stopped_server_starts_again_on_its_data_directory() {
    let mut server = Options::default().start();
    let id = Ws::create(&server).await.sandbox_id.clone();
    server.term();
    assert!(server.exited().await.success());
    server.restart();
    assert!(is_gone(&server, &id).await.is_some());
    Ws::create(&server).await.expect_alive().await;
}

#[tokio::test]
async fn port_is_honoured() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let server = Options::default().listen(None).env("PORT", port.to_string()).start();
    assert_eq!(server.address().port(), port);
    Ws::create(&server).await.expect_alive().await;
}

#[tokio::test]
async fn every_setting_can_come_from_the_environment() {
    let server = Options::default().listen(None).env("SANDBOXER_LISTEN", "127.0.0.1:0").env("SANDBOXER_MAX_SANDBOXES", "1").start();
    let _first = Ws::create(&server).await;
    let mut second = Ws::open(&server, "/create").await;
    second.send(json!({})).await;
    second.expect_status("SANDBOX_CREATING").await;
    second.expect_status("SANDBOX_CREATION_ERROR").await;
    second.expect_error("no_capacity").await;
    second.expect_close(4000).await;
}

#[test]
fn all_faults_of_the_configuration_are_reported_together_with_exit_64() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let output = command()
        .args(["serve", "--listen", "nonsense", "--max-sandboxes", "0", "--data-dir"])
        .arg(file.path())
        .env("SANDBOXER_RUNSC", "/no/such/runsc")
        .output()
        .unwrap();
    let told = stderr_of(&output);
    assert_eq!(output.status.code(), Some(64), "{told}");
    for fault in ["listen", "max-sandboxes", &file.path().display().to_string(), "/no/such/runsc"] {
        assert!(told.contains(fault), "{fault} is not told of:\n{told}");
    }
}

#[test]
fn an_unknown_option_is_a_usage_error() {
    let output = command().args(["serve", "--no-such-option"]).output().unwrap();
    assert_eq!(output.status.code(), Some(64), "{}", stderr_of(&output));
    assert!(stderr_of(&output).contains("--no-such-option"));
}

#[test]
fn help_names_every_setting_and_its_variable() {
    let output = command().args(["serve", "--help"]).output().unwrap();
    let help = stdout_of(&output);
    assert!(output.status.success());
    for setting in
        ["--listen", "--data-dir", "--image-dir", "--max-sandboxes", "SANDBOXER_LISTEN", "SANDBOXER_DATA_DIR", "SANDBOXER_MAX_SANDBOXES"]
    {
        assert!(help.contains(setting), "{setting} is not in\n{help}");
    }
}

#[tokio::test]
async fn a_second_instance_on_the_same_data_directory_is_refused_and_the_first_goes_on() {
    let server = Options::default().start();
    let mut ws = Ws::create(&server).await;
    let output = tokio::task::spawn_blocking({
        let data = server.data_dir().to_owned();
        move || command().args(["serve", "--listen", "127.0.0.1:0", "--data-dir"]).arg(data).output().unwrap()
    })
    .await
    .unwrap();
    assert!(!output.status.success());
    let told = stderr_of(&output);
    assert!(told.contains(&server.data_dir().display().to_string()), "{told}");
    ws.expect_alive().await;
}

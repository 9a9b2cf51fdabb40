//! A server that is killed, crashes or is restarted loses no sandbox and no byte.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use futures_util::future::join_all;
use sandboxer_e2e::{Assembly, DEADLINE, Incoming, Options, Server, Ws, count, eventually, host};
use serde_json::{Map, Value, json};

/// Prints numbered lines on both streams until it is told to stop.
const PROGRAM: &str = "
import select, sys
i = 0
while not select.select([sys.stdin], [], [], 0.02)[0]:
    print('out', i, flush=True)
    print('err', i, file=sys.stderr, flush=True)
    i += 1
print('stopped at', i)
";

struct Follower {
    id: String,
    stdout: Assembly,
    stderr: Assembly,
}

impl Follower {
    async fn start(server: &Server) -> Self {
        let mut ws = Ws::create(server).await;
        ws.start(json!({"language": "python", "code": PROGRAM, "execution_id": "e"})).await;
        Self { id: ws.sandbox_id.clone(), stdout: Assembly::default(), stderr: Assembly::default() }
    }

    /// Attaches, asks from what it has, and reads until `more` bytes came or the server is gone. With `stop`, to the end.
    async fn follow(&mut self, server: &Server, more: usize, stop: bool) {
        let mut ws = Ws::open(server, &format!("/attach/{}", self.id)).await;
        ws.repeats_allowed = true;
        ws.sandbox_id.clone_from(&self.id);
        ws.expect_status("SANDBOX_RUNNING").await;
        let (stdout, stderr) = (self.stdout.bytes.len(), self.stderr.bytes.len());
        ws.send(json!({"action": "reconnect", "execution_id": "e", "stdout_offset": stdout, "stderr_offset": stderr})).await;
        let resumed = ws.next().await;
        assert_eq!((&resumed["event"], &resumed["running"]), (&json!("resumed"), &json!(true)), "{resumed}");
        if stop {
            ws.send(json!({"event": "stdin", "data": "\n"})).await;
        }
        while stop || self.stdout.bytes.len() < stdout + more {
            match ws.incoming().await {
                Incoming::Message(message) => match message["event"].as_str().unwrap() {
                    "stdout" => self.stdout.take(&message),
                    "stderr" => self.stderr.take(&message),
                    _ => {
                        assert!(stop && message["status"] == "SANDBOX_EXECUTION_DONE" && message["exit_code"] == 0, "{message}");
                        return;
                    }
                },
                other => panic!("{other:?}"),
            }
        }
    }

    fn expect_exact(&self) {
        let text = std::str::from_utf8(&self.stdout.bytes).unwrap();
        let lines = text.lines().count() - 1;
        let expected: String = (0..lines).map(|i| format!("out {i}\n")).chain([format!("stopped at {lines}\n")]).collect();
        assert!(text == expected, "stdout of {} is not exact: {text}", self.id);
        let expected: String = (0..lines).map(|i| format!("err {i}\n")).collect();
        assert!(self.stderr.bytes == expected.as_bytes(), "stderr of {} is not exact", self.id);
    }
}

#[tokio::test]
async fn kill_9_of_the_server_loses_no_sandbox_and_no_byte() {
    const SANDBOXES: usize = 20;
    let mut server = Options::default().arg("--max-sandboxes").arg(SANDBOXES.to_string()).arg("--stop-grace").arg("120").start();
    let mut followers = join_all((0..SANDBOXES).map(|_| Follower::start(&server))).await;
    for _ in 0..count(10, 100) {
        join_all(followers.iter_mut().map(|follower| follower.follow(&server, 60, false))).await;
        server.kill9();
        server.restart();
    }
    join_all(followers.iter_mut().map(|follower| follower.follow(&server, 0, true))).await;
    for follower in &followers {
        follower.expect_exact();
    }
    server.term();
    assert!(server.exited().await.success());
    assert!(server.sandbox_processes().is_empty(), "{:#?}", server.sandbox_processes());
    assert!(host::mounts_under(server.data_dir()).is_empty());
    for follower in &followers {
        assert!(host::cgroups_of(&follower.id).is_empty());
        assert!(host::files_of(server.data_dir(), &follower.id).iter().all(|path| path.is_file()));
    }
}

#[tokio::test]
async fn sigusr2_tells_the_clients_and_leaves_every_sandbox_running() {
    let mut server = Options::default().start();
    let mut ws = Ws::create(&server).await;
    let id = ws.sandbox_id.clone();
    let pid = ws.bash("echo kept >file; sleep 1000 & echo $!").await.ok().trim().to_owned();
    let mut follower = Follower::start(&server).await;
    follower.follow(&server, 60, false).await;
    server.usr2();
    ws.expect_error("server_restarting").await;
    ws.expect_close(1001).await;
    assert!(server.exited().await.success());
    assert!(server.sandbox_processes().iter().any(|process| process.command.contains(&id)));
    server.restart();
    let mut ws = Ws::attach(&server, &id).await;
    assert_eq!(ws.bash(&format!("cat file; kill -0 {pid} && echo running")).await.ok(), "kept\nrunning\n");
    follower.follow(&server, 0, true).await;
    follower.expect_exact();
}

#[tokio::test]
async fn what_is_known_of_a_sandbox_outlives_the_server() {
    let mut server = Options::default().start();
    let kept = Ws::create_with(&server, json!({"env": {"KEPT": "yes"}, "cwd": "/tmp"})).await;
    let brief = Ws::create_with(&server, json!({"idle_timeout": 2})).await;
    let mut killed = Ws::create(&server).await;
    killed.send(json!({"action": "kill_sandbox"})).await;
    killed.expect_status("SANDBOX_KILLING").await;
    killed.expect_status("SANDBOX_KILLED").await;
    server.kill9();
    server.restart();

    let path = format!("/attach/{}", kept.sandbox_id);
    let mut wrong = Ws::connect(server.address(), &path, &[("X-Sandbox-Token", &killed.sandbox_token)]).await.unwrap();
    wrong.expect_status("SANDBOX_PERMISSION_DENIAL_ERROR").await;
    wrong.expect_error("permission_denied").await;
    wrong.expect_close(4000).await;
    let mut right = Ws::connect(server.address(), &path, &[("X-Sandbox-Token", &kept.sandbox_token)]).await.unwrap();
    right.expect_status("SANDBOX_RUNNING").await;
    assert_eq!(right.bash("echo $KEPT; pwd").await.ok(), "yes\n/tmp\n");

    let mut gone = Ws::open(&server, &format!("/attach/{}", killed.sandbox_id)).await;
    let status = gone.expect_status("SANDBOX_NOT_FOUND").await;
    assert!(status["message"].as_str().unwrap().contains("killed"), "{status}");

    let brief = brief.sandbox_id.clone();
    eventually("the idle time goes on", DEADLINE, || !server.sandbox_processes().iter().any(|process| process.command.contains(&brief)))
        .await;
}

#[tokio::test]
async fn a_server_killed_while_sandboxes_are_made_leaves_none_that_nobody_can_reach() {
    let mut server = Options::default().start();
    for round in 0..3 {
        let attempts: Vec<Ws> = join_all((0..3).map(|_| async {
            let mut ws = Ws::open(&server, "/create").await;
            ws.send(json!({"idle_timeout": 1})).await;
            ws.expect_status("SANDBOX_CREATING").await;
            ws
        }))
        .await;
        tokio::time::sleep(Duration::from_millis(40 * round)).await;
        server.kill9();
        drop(attempts);
        server.restart();
        Ws::create(&server).await.expect_alive().await;
    }
    let live = |server: &Server| server.sandbox_processes().len();
    // The ones that were made for the check above are idle for 300 s; they are ended with the server.
    server.term();
    assert!(server.exited().await.success());
    assert_eq!(live(&server), 0, "{:#?}", server.sandbox_processes());
}

/// Where the server keeps what it knows of a sandbox.
fn directory(server: &Server, id: &str) -> PathBuf {
    server.data_dir().join("sandboxes").join(id)
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// What is there now, with no more fields than the sample has: as it would have been written when the sample was.
fn reduced(now: &Value, sample: &Value) -> Value {
    match (now, sample) {
        // A map of the client's, not of ours.
        (now, Value::Object(fields)) if fields.is_empty() => now.clone(),
        (Value::Object(now), Value::Object(sample)) => {
            let field = |(name, sample): (&String, &Value)| {
                (name.clone(), reduced(now.get(name).unwrap_or_else(|| panic!("{name} is no longer written")), sample))
            };
            Value::Object(sample.iter().map(field).collect::<Map<_, _>>())
        }
        (now, _) => now.clone(),
    }
}

/// The samples are never changed: a server that writes another format gets another sample beside them, and still takes up these.
#[tokio::test]
async fn a_sandbox_that_was_written_down_in_the_first_format_is_taken_up() {
    let mut server = Options::default().start();
    let kept = Ws::create_with(&server, json!({"env": {"KEPT": "yes"}})).await;
    let mut follower = Follower::start(&server).await;
    follower.follow(&server, 60, false).await;
    server.kill9();
    for id in [&kept.sandbox_id, &follower.id] {
        for (file, sample) in
            [("record.json", include_str!("formats/record-1.json")), ("runtime.json", include_str!("formats/runtime-1.json"))]
        {
            let path = directory(&server, id).join(file);
            let old = reduced(&read(&path), &serde_json::from_str(sample).unwrap());
            assert_eq!(old["version"], 1, "{file} has a new version: it needs a sample of its own here");
            fs::write(&path, old.to_string()).unwrap();
        }
    }
    server.restart();
    let path = format!("/attach/{}", kept.sandbox_id);
    let mut ws = Ws::connect(server.address(), &path, &[("X-Sandbox-Token", &kept.sandbox_token)]).await.unwrap();
    ws.expect_status("SANDBOX_RUNNING").await;
    assert_eq!(ws.bash("echo $KEPT; pwd").await.ok(), "yes\n/root\n");
    follower.follow(&server, 0, true).await;
    follower.expect_exact();
}

#[tokio::test]
async fn a_sandbox_of_a_newer_server_is_left_alone_until_that_one_comes_back() {
    let mut server = Options::default().start();
    let mut follower = Follower::start(&server).await;
    server.kill9();
    let record = directory(&server, &follower.id).join("record.json");
    let known = fs::read(&record).unwrap();
    fs::write(&record, json!({"version": 2, "of": "tomorrow"}).to_string()).unwrap();
    server.restart();
    let mut ws = Ws::open(&server, &format!("/attach/{}", follower.id)).await;
    ws.expect_status("SANDBOX_NOT_FOUND").await;
    ws.expect_close(1011).await;
    server.kill9();
    fs::write(&record, known).unwrap();
    server.restart();
    follower.follow(&server, 60, false).await;
    follower.follow(&server, 0, true).await;
    follower.expect_exact();
}

//! A whole sandbox is saved to a volume and goes on at another server; whatever is wrong with a volume is told, and nothing is lost by it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{fs, path::Path};

use sandboxer_e2e::{Cli, Incoming, Options, Server, Talk, User, Volume, Ws};
use serde_json::json;

/// What is brought to life before a save, and must be alive after it.
const LIFE: &str = r#"
echo kept > /root/file; rm /etc/hostname
mkfifo /tmp/way
python3 - <<'PY' &
import http.server, os, threading, time
open('/tmp/deleted', 'w').write('still here')
held = open('/tmp/deleted'); os.remove('/tmp/deleted')
count = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        held.seek(0)
        body = f'{count} {held.read()}'.encode()
        self.send_response(200); self.send_header('Content-Length', len(body)); self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.HTTPServer(('127.0.0.1', 8000), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    count += 1
    time.sleep(0.01)
PY
(i=0; while true; do i=$((i+1)); echo $i; sleep 0.05; done > /tmp/way) &
(while read -r line; do echo $line > /tmp/newer; mv /tmp/newer /tmp/newest; done < /tmp/way) &
until curl -s 127.0.0.1:8000 > /dev/null && [ -s /tmp/newest ]; do sleep 0.1; done
"#;

const LOOK: &str = r#"
cat /root/file; ls /etc/hostname 2>/dev/null
curl -s 127.0.0.1:8000; echo
before=$(cat /tmp/newest); until [ "$(cat /tmp/newest)" -gt "$before" ]; do sleep 0.05; done; echo flows
"#;

#[tokio::test]
async fn a_saved_sandbox_goes_on_at_another_users_server_with_files_memory_and_processes() {
    let volume = Volume::of(User::Ordinary);
    let (a, b) = (volume.serve(), volume.serve_as(User::Ordinary));
    let mut ws = Ws::create_kept(&a).await;
    let id = ws.sandbox_id.clone();
    let created = volume.metadata(&id);
    assert_eq!((&created["status"], &created["idle_timeout"]), (&json!("created"), &json!(300.0)), "{created}");
    assert!(volume.record(&id)["owner"].is_string() && volume.record(&id)["latest"].is_null());
    let _ = ws.bash(LIFE).await.ok();
    let counted = |text: &str| text.lines().nth(1).unwrap().split(' ').next().unwrap().parse::<u64>().unwrap();
    let before = ws.bash(LOOK).await.ok().to_owned();
    ws.checkpoint().await;
    assert_eq!(volume.metadata(&id)["status"], "checkpointed");
    let record = volume.record(&id);
    assert!(record["owner"].is_null() && record["latest"].is_string(), "{record}");
    sandboxer_e2e::eventually("it no longer runs there", sandboxer_e2e::DEADLINE, || a.sandbox_processes().is_empty()).await;

    let (mut ws, running) = Ws::restore(&b, &id).await;
    assert!(running.get("rewound").is_none(), "{running}");
    let after = ws.bash(LOOK).await.ok().to_owned();
    for text in [&before, &after] {
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!((lines[0], lines.len()), ("kept", 3), "{text}");
        assert!(lines[1].ends_with(" still here") && lines[2] == "flows", "{text}");
    }
    assert!(counted(&after) > counted(&before), "it counts on in memory: {before} {after}");
    assert_eq!(volume.metadata(&id)["status"], "running");
    assert_eq!(volume.record(&id)["epoch"], 2);

    // And back, from where it is now.
    ws.checkpoint().await;
    let (mut ws, _) = Ws::restore(&a, &id).await;
    let back = ws.bash(LOOK).await.ok().to_owned();
    assert!(back.starts_with("kept\n") && back.ends_with(" still here\nflows\n") && counted(&back) > counted(&after), "{back}");
    volume.expect_private();
    ws.send(json!({"action": "kill_sandbox"})).await;
    ws.expect_status("SANDBOX_KILLING").await;
    ws.expect_status("SANDBOX_KILLED").await;
    ws.expect_close(1000).await;
    // On a slow disk it is written after that was said.
    sandboxer_e2e::eventually("the volume knows", sandboxer_e2e::DEADLINE, || volume.metadata(&id)["status"] == "killed").await;
    let mut ws = Ws::open(&b, &format!("/attach/{id}")).await;
    ws.expect_status("SANDBOX_RESTORING").await;
    let gone = ws.expect_status("SANDBOX_NOT_FOUND").await;
    assert!(gone["message"].as_str().unwrap().contains("killed by its client"), "{gone}");
    ws.expect_close(1011).await;
}

#[tokio::test]
async fn a_running_program_is_saved_along_if_asked_and_its_streams_are_exact() {
    let volume = Volume::of(User::Ordinary);
    let servers = [volume.serve(), volume.serve_as(User::Ordinary)];
    let mut ws = Ws::create_kept(&servers[0]).await;
    let id = ws.sandbox_id.clone();
    let mut talk = Talk::begin(&mut ws).await;
    for round in 1..=4 {
        talk.go_on(&mut ws, 400).await;
        for message in ws.checkpoint_with_execution().await {
            talk.take(&message);
        }
        (ws, _) = Ws::restore(&servers[round % 2], &id).await;
        talk.resume(&mut ws).await;
    }
    talk.finish(&mut ws).await;
}

/// Whatever of its memory gVisor reads late has to be there all the same.
#[tokio::test]
async fn a_sandbox_that_is_saved_again_as_soon_as_it_is_back_keeps_all_of_its_memory() {
    /// The program's answer to a line of input.
    async fn ask(ws: &mut Ws, offset: usize) -> String {
        ws.send(json!({"event": "stdin", "data": "\n", "offset": offset})).await;
        let mut answer = String::new();
        while !answer.ends_with('\n') {
            answer += ws.next().await["data"].as_str().unwrap_or_default();
        }
        answer
    }
    let volume = Volume::of(User::Ordinary);
    let servers = [volume.serve(), volume.serve_as(User::Ordinary)];
    let mut ws = Ws::create_kept(&servers[0]).await;
    let id = ws.sandbox_id.clone();
    let code = "import hashlib, os, sys\nheld = os.urandom(192 << 20)\n\
                for line in sys.stdin: print(hashlib.sha256(held).hexdigest(), flush=True)";
    ws.start(json!({"language": "python", "code": code, "execution_id": "holds"})).await;
    let digest = ask(&mut ws, 0).await;
    for round in 1..=4 {
        ws.checkpoint_with_execution().await;
        (ws, _) = Ws::restore(&servers[round % 2], &id).await;
    }
    ws.send(json!({"action": "reconnect", "execution_id": "holds", "stdout_offset": digest.len()})).await;
    assert_eq!(ws.next().await["event"], "resumed");
    assert_eq!(ask(&mut ws, 1).await, digest);
}

#[tokio::test]
async fn a_terminal_with_a_half_typed_line_goes_on_where_it_was() {
    /// Reads until the terminal shows this.
    async fn shown(ws: &mut Ws, text: &str) {
        let mut seen = String::new();
        while !seen.contains(text) {
            let message = ws.next().await;
            assert!(matches!(message["event"].as_str(), Some("stdout" | "stdin_ack")), "{message}; so far: {seen:?}");
            seen += message["data"].as_str().unwrap_or_default();
        }
    }
    let volume = Volume::of(User::Ordinary);
    let (a, b) = (volume.serve(), volume.serve_as(User::Ordinary));
    let mut ws = Ws::create_kept(&a).await;
    let id = ws.sandbox_id.clone();
    ws.start(json!({"language": "bash", "code": "PS1='> ' exec bash --norc -i", "tty": {"rows": 24, "cols": 80}, "execution_id": "t"}))
        .await;
    shown(&mut ws, "> ").await;
    let mut typed = 0;
    for (server, typing, shows) in [(&b, "echo one", "echo one"), (&a, " two", " two"), (&b, " three\r", "\rone two three\r")] {
        ws.send(json!({"event": "stdin", "data": typing, "offset": typed})).await;
        typed += typing.len();
        shown(&mut ws, shows).await;
        ws.checkpoint_with_execution().await;
        (ws, _) = Ws::restore(server, &id).await;
        ws.send(json!({"action": "reconnect", "execution_id": "t"})).await;
        assert_eq!(ws.next().await["event"], "resumed");
    }
}

#[tokio::test]
async fn a_checkpoint_during_an_execution_is_refused_and_the_output_goes_on() {
    let volume = Volume::default();
    let server = volume.serve();
    let mut ws = Ws::create_kept(&server).await;
    ws.start(json!({"language": "bash", "code": "read x; echo $x"})).await;
    ws.send(json!({"action": "checkpoint"})).await;
    ws.expect_status("SANDBOX_CHECKPOINTING").await;
    ws.expect_status("SANDBOX_EXECUTION_IN_PROGRESS_ERROR").await;
    let error = ws.expect_error("execution_in_progress").await;
    assert_eq!(error["message"], "Cannot checkpoint while an execution is in progress.");
    ws.send(json!({"event": "stdin", "data": "on\n"})).await;
    assert_eq!(ws.until_done().await.ok(), "on\n");
    assert!(volume.record(&ws.sandbox_id)["latest"].is_null());
    ws.checkpoint().await;
}

#[tokio::test]
async fn a_sandbox_that_can_not_be_saved_is_kept_running() {
    let volume = Volume::default();
    let server = volume.serve();
    let mut ws = Ws::create(&server).await;
    let id = ws.sandbox_id.clone();
    let _ = ws.bash("echo kept > f").await.ok();
    ws.expect_checkpoint_error("checkpoint_not_enabled").await;
    assert_eq!(Ws::attach(&server, &id).await.bash("cat f").await.ok(), "kept\n");
    assert!(!volume.path().join(&id).exists(), "a sandbox that is not kept leaves nothing on the volume");

    // A volume that can't be written any longer.
    let mut ws = Ws::create_kept(&server).await;
    let id = ws.sandbox_id.clone();
    let _ = ws.bash("echo kept > f").await.ok();
    let dir = volume.path().join(&id).join("checkpoints");
    fs::write(&dir, "in the way").unwrap();
    ws.expect_checkpoint_error("checkpoint_failed").await;
    fs::remove_file(&dir).unwrap();
    let mut ws = Ws::attach(&server, &id).await;
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
    ws.checkpoint().await;
}

#[tokio::test]
async fn what_is_not_there_is_not_found_and_no_lock_is_written() {
    let volume = Volume::default();
    let server = volume.serve();
    for id in ["3f0c8a52-3b1e-4c53-9d0e-0a7c1e1f2b3d", "nonsense", "..%2F..%2Fetc"] {
        let mut ws = Ws::open(&server, &format!("/attach/{id}")).await;
        ws.expect_status("SANDBOX_RESTORING").await;
        ws.expect_status("SANDBOX_NOT_FOUND").await;
        ws.expect_close(1011).await;
    }
    assert_eq!(fs::read_dir(volume.path().join("locks")).unwrap().count(), 0);
}

#[tokio::test]
async fn without_its_token_nothing_is_restored_or_locked() {
    let volume = Volume::default();
    let keyed = |volume: &Volume| {
        volume.options().env("SANDBOXER_API_KEYS", "mine:0123456789abcdef0123456789abcdef,other:fedcba9876543210fedcba9876543210").start()
    };
    let (a, b) = (keyed(&volume), keyed(&volume));
    let key = ("authorization", "Bearer 0123456789abcdef0123456789abcdef");
    let other = ("authorization", "Bearer fedcba9876543210fedcba9876543210");
    let mut ws = Ws::connect(a.address(), "/create", &[key]).await.unwrap();
    ws.send(json!({"enable_checkpoint": true})).await;
    ws.expect_created().await;
    let token = ws.sandbox_token.clone();
    let id = ws.checkpoint().await;
    let record = volume.record(&id);
    assert!(!record.to_string().contains(&token), "the token itself is nowhere: {record}");
    let wrong = "0".repeat(token.len());
    for (id, token) in
        [(id.as_str(), None), (id.as_str(), Some(wrong.as_str())), ("3f0c8a52-3b1e-4c53-9d0e-0a7c1e1f2b3d", Some(token.as_str()))]
    {
        let headers: Vec<_> = [other].into_iter().chain(token.map(|token| ("x-sandbox-token", token))).collect();
        let mut ws = Ws::connect(b.address(), &format!("/attach/{id}"), &headers).await.unwrap();
        ws.expect_status("SANDBOX_PERMISSION_DENIAL_ERROR").await;
        ws.expect_error("permission_denied").await;
        ws.expect_close(4000).await;
    }
    assert_eq!(volume.record(&id), record);
    let mut ws = Ws::connect(b.address(), &format!("/attach/{id}"), &[other, ("x-sandbox-token", &token)]).await.unwrap();
    ws.expect_status("SANDBOX_RESTORING").await;
    ws.expect_status("SANDBOX_RUNNING").await;
}

fn flip(file: &Path, at: u64) {
    let mut bytes = fs::read(file).unwrap();
    let at = usize::try_from(at).unwrap().min(bytes.len() - 1);
    bytes[at] ^= 1;
    fs::write(file, bytes).unwrap();
}

#[tokio::test]
async fn a_damaged_checkpoint_is_told_precisely_and_nothing_is_changed() {
    let volume = Volume::default();
    let a = volume.serve();
    let id = Ws::create_kept(&a).await.checkpoint().await;
    // A server that has nothing of it in a cache.
    let b = volume.serve();
    let manifest = volume.latest(&id);
    let whole = fs::read(&manifest).unwrap();
    // Packs of the image are only needed where the image is not.
    let packs: Vec<_> = volume.packs().into_iter().filter(|pack| damages(&whole, pack)).collect();
    assert!(!packs.is_empty());
    let pack = &packs[0];
    let packed = fs::read(pack).unwrap();
    let record = volume.path().join("locks").join(format!("{id}.lock"));
    type Damage<'a> = (&'a str, Box<dyn Fn() + 'a>, &'a [&'a str]);
    let faults: Vec<Damage> = vec![
        ("manifest torn", Box::new(|| fs::write(&manifest, &whole[..whole.len() / 2]).unwrap()), &["checkpoint_", "torn"]),
        ("manifest flipped", Box::new(|| flip(&manifest, whole.len() as u64 / 2)), &["checkpoint_", "digest"]),
        ("manifest gone", Box::new(|| fs::remove_file(&manifest).unwrap()), &["checkpoint_", "not on the volume"]),
        ("newer format", Box::new(|| flip(&manifest, 9)), &["checkpoint_", "format"]),
        ("pack flipped", Box::new(|| flip(pack, packed.len() as u64 / 2)), &["pack", "do not match their digest"]),
        ("pack torn", Box::new(|| fs::write(pack, &packed[..packed.len() / 3]).unwrap()), &["pack", "torn"]),
        ("pack gone", Box::new(|| fs::remove_file(pack).unwrap()), &["pack", "missing"]),
    ];
    for (what, damage, said) in faults {
        damage();
        let before = volume.contents();
        let text = Ws::expect_restore_error(&b, &id).await;
        assert!(said.iter().all(|word| text.contains(word)), "{what}: {text}");
        assert_eq!(volume.contents(), before, "{what}: nothing is changed, the record neither");
        let verified = volume.store(&["verify"]);
        assert_eq!(verified.status.code(), Some(1), "{what}: {verified:?}");
        assert!(b.sandbox_processes().is_empty(), "{what}");
        fs::write(&manifest, &whole).unwrap();
        fs::write(pack, &packed).unwrap();
    }
    assert!(record.exists());
    volume.verify();
    assert_eq!(volume.ls(&id)["status"], "saved");
    let (mut ws, running) = Ws::restore(&b, &id).await;
    assert!(running.get("rewound").is_none(), "nothing ran meanwhile: {running}");
    ws.expect_alive().await;
}

/// Whether a pack's name is in a manifest.
fn damages(manifest: &[u8], pack: &Path) -> bool {
    let name = pack.file_stem().unwrap().to_str().unwrap();
    let id: Vec<u8> = (0..name.len() / 2).map(|i| u8::from_str_radix(&name[2 * i..2 * i + 2], 16).unwrap()).collect();
    manifest.windows(id.len()).any(|window| window == id)
}

#[tokio::test]
async fn a_path_that_is_not_there_is_a_fault_of_the_configuration() {
    let output =
        sandboxer_e2e::command().args(["serve", "--listen", "127.0.0.1:0", "--checkpoint-path", "/nonexistent/volume"]).output().unwrap();
    assert_eq!(output.status.code(), Some(64));
    assert!(sandboxer_e2e::stderr_of(&output).contains("CHECKPOINT_AND_RESTORE_PATH"), "{output:?}");
}

#[tokio::test]
async fn an_idle_sandbox_is_saved_and_comes_back() {
    let volume = Volume::default();
    let server = volume.serve();
    let mut ws = Ws::create_with(&server, json!({"enable_checkpoint": true, "idle_timeout": 1})).await;
    let id = ws.sandbox_id.clone();
    let _ = ws.bash("echo kept > f").await.ok();
    ws.close().await;
    sandboxer_e2e::eventually("it is saved and released", sandboxer_e2e::DEADLINE, || volume.record(&id)["owner"].is_null()).await;
    sandboxer_e2e::eventually("it runs no longer", sandboxer_e2e::DEADLINE, || server.sandbox_processes().is_empty()).await;
    let (mut ws, running) = Ws::restore(&server, &id).await;
    assert!(running.get("rewound").is_none(), "{running}");
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
}

#[tokio::test]
async fn a_server_that_is_stopped_saves_its_sandboxes_first() {
    let volume = Volume::default();
    // However slow the disk is: what does not fit into the time is another promise.
    let (mut a, b) = (volume.options().arg("--stop-grace").arg("60").start(), volume.serve());
    let mut kept = Ws::create_kept(&a).await;
    let mut other = Ws::create(&a).await;
    let id = kept.sandbox_id.clone();
    kept.start(json!({"language": "bash", "code": "for i in $(seq 1 100000); do echo $i; sleep 0.01; done", "execution_id": "e"})).await;
    // What comes last may come before the signal.
    let mut out = vec![kept.next().await];
    a.term();
    let mut told = Vec::new();
    loop {
        match kept.incoming().await {
            Incoming::Message(message) if message["event"] == "stdout" => out.push(message),
            Incoming::Message(message) => told.push(message["status"].as_str().unwrap().to_owned()),
            Incoming::Closed(code) => {
                assert_eq!((code, told), (1001, vec!["SANDBOX_CHECKPOINTING".to_owned(), "SANDBOX_CHECKPOINTED".to_owned()]));
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    other.expect_error("server_stopping").await;
    other.expect_close(1001).await;
    assert!(a.exited().await.success());
    let (mut ws, running) = Ws::restore(&b, &id).await;
    assert!(running.get("rewound").is_none(), "{running}");
    let end = out.last().unwrap()["end"].as_u64().unwrap();
    ws.send(json!({"action": "reconnect", "execution_id": "e", "stdout_offset": end})).await;
    assert_eq!(ws.next().await["stdout_offset"], end);
    let next = ws.next().await;
    let last: u64 = out.last().unwrap()["data"].as_str().unwrap().lines().last().unwrap().parse().unwrap();
    assert_eq!(next["data"].as_str().unwrap().lines().next().unwrap().parse::<u64>().unwrap(), last + 1);
}

#[tokio::test]
async fn an_instance_without_the_image_fetches_it_from_the_volume() {
    let volume = Volume::default();
    let a = volume.serve();
    let mut ws = Ws::create_kept(&a).await;
    let _ = ws.bash("echo kept > f").await.ok();
    let id = ws.checkpoint().await;
    let images = tempfile::tempdir().unwrap();
    let b: Server = Options::default()
        .env("CHECKPOINT_AND_RESTORE_PATH", volume.path().to_str().unwrap())
        .arg("--image-dir")
        .arg(images.path().to_str().unwrap())
        .not_waiting()
        .start();
    let (mut ws, _) = Ws::restore(&b, &id).await;
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
}

#[tokio::test]
async fn a_saved_sandbox_that_is_deleted_is_gone_for_everybody() {
    let volume = Volume::default();
    let (a, b) = (volume.serve(), volume.serve());
    let cli = Cli::new(&b);
    let mut deleted = Vec::new();
    for by_command in [false, true] {
        let mut ws = Ws::create_kept(&a).await;
        let _ = ws.bash("echo kept > f").await.ok();
        let id = ws.checkpoint().await;
        let path = format!("/v1/sandboxes/{id}");
        assert_eq!(b.found(None, &path)["status"], "saved");
        if by_command {
            cli.ok(["rm", &id]);
        } else {
            assert_eq!(a.api(None, "DELETE", &path, &json!(null)).0, 204);
        }
        deleted.push(id);
    }
    for (server, id) in [&a, &b].into_iter().flat_map(|server| deleted.iter().map(move |id| (server, id))) {
        let path = format!("/v1/sandboxes/{id}");
        // The instance that has saved and released it may still be clearing up when another one deletes it.
        sandboxer_e2e::eventually("it is gone", sandboxer_e2e::DEADLINE, || matches!(server.get(&path).status, 404 | 410)).await;
        assert_eq!(server.api(None, "DELETE", &path, &json!(null)).0, 404);
        let mut ws = Ws::open(server, &format!("/attach/{id}")).await;
        ws.expect_status("SANDBOX_RESTORING").await;
        let told = ws.expect_status("SANDBOX_NOT_FOUND").await;
        assert!(told["message"].as_str().unwrap().contains("deleted by its owner"), "{told}");
    }
    assert!(volume.record(&deleted[0])["tombstone"].is_object());
    assert!(cli.fails(1, ["rm", &deleted[1]]).contains("no such sandbox"));
}

#[tokio::test]
async fn what_another_instance_runs_without_a_client_is_deleted_by_way_of_it() {
    let volume = Volume::default();
    let (a, b) = (volume.serve(), volume.serve());
    let id = Ws::create_kept(&a).await.checkpoint().await;
    let (ws, _) = Ws::restore(&a, &id).await;
    ws.close().await;
    assert_eq!(b.api(None, "DELETE", &format!("/v1/sandboxes/{id}"), &json!(null)).0, 204);
    sandboxer_e2e::eventually("it runs no longer", sandboxer_e2e::DEADLINE, || a.sandbox_processes().is_empty()).await;
    for server in [&a, &b] {
        let gone = || matches!(server.get(&format!("/v1/sandboxes/{id}")).status, 404 | 410);
        sandboxer_e2e::eventually("it is gone", sandboxer_e2e::DEADLINE, gone).await;
    }
}

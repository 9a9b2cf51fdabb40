//! A whole sandbox is saved to a volume and goes on at another server; whatever is wrong with a volume is told, and nothing is lost by it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{fs, path::Path};

use sandboxer_e2e::{Assembly, Incoming, Options, Server, Volume, Ws};
use serde_json::{Value, json};

async fn create(server: &Server) -> Ws {
    Ws::create_with(server, json!({"enable_checkpoint": true})).await
}

/// Saves the sandbox and returns its id.
async fn checkpoint(ws: Ws, request: Value) -> String {
    let (id, said) = checkpoint_with_output(ws, request).await;
    assert!(said.is_empty(), "nothing runs: {said:?}");
    id
}

/// Saves the sandbox and returns its id, and what a program that is saved along said meanwhile.
async fn checkpoint_with_output(mut ws: Ws, request: Value) -> (String, Vec<Value>) {
    let mut said = Vec::new();
    ws.send(request).await;
    for status in ["SANDBOX_CHECKPOINTING", "SANDBOX_CHECKPOINTED"] {
        loop {
            match ws.next().await {
                message if message["status"] == status => break,
                message if message["event"] == "stdin_ack" => {}
                message => {
                    assert!(matches!(message["event"].as_str(), Some("stdout" | "stderr")), "{message}");
                    said.push(message);
                }
            }
        }
    }
    ws.expect_close(1000).await;
    (ws.sandbox_id.clone(), said)
}

/// Attaches where the sandbox is not in memory.
async fn restore(server: &Server, id: &str) -> (Ws, Value) {
    let mut ws = Ws::open(server, &format!("/attach/{id}")).await;
    ws.repeats_allowed = true;
    id.clone_into(&mut ws.sandbox_id);
    ws.expect_status("SANDBOX_RESTORING").await;
    let running = ws.expect_status("SANDBOX_RUNNING").await;
    (ws, running)
}

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
(while read -r line; do echo $line > /tmp/newest; done < /tmp/way) &
until curl -s 127.0.0.1:8000 > /dev/null && [ -s /tmp/newest ]; do sleep 0.1; done
"#;

const LOOK: &str = r#"
cat /root/file; ls /etc/hostname 2>/dev/null
curl -s 127.0.0.1:8000; echo
before=$(cat /tmp/newest); until [ -s /tmp/newest ] && [ "$(cat /tmp/newest)" -gt "$before" ]; do sleep 0.05; done; echo flows
"#;

#[tokio::test]
async fn a_saved_sandbox_goes_on_at_another_server_with_files_memory_and_processes() {
    let volume = Volume::default();
    let (a, b) = (volume.serve(), volume.serve());
    let mut ws = create(&a).await;
    let id = ws.sandbox_id.clone();
    let created = volume.metadata(&id);
    assert_eq!((&created["status"], &created["idle_timeout"]), (&json!("created"), &json!(300.0)), "{created}");
    assert!(volume.record(&id)["owner"].is_string() && volume.record(&id)["latest"].is_null());
    let _ = ws.bash(LIFE).await.ok();
    let counted = |text: &str| text.lines().nth(1).unwrap().split(' ').next().unwrap().parse::<u64>().unwrap();
    let before = ws.bash(LOOK).await.ok().to_owned();
    checkpoint(ws, json!({"action": "checkpoint"})).await;
    assert_eq!(volume.metadata(&id)["status"], "checkpointed");
    let record = volume.record(&id);
    assert!(record["owner"].is_null() && record["latest"].is_string(), "{record}");
    sandboxer_e2e::eventually("it no longer runs there", sandboxer_e2e::DEADLINE, || a.sandbox_processes().is_empty()).await;

    let (mut ws, running) = restore(&b, &id).await;
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
    checkpoint(ws, json!({"action": "checkpoint"})).await;
    let (mut ws, _) = restore(&a, &id).await;
    assert_eq!(ws.bash("cat /root/file").await.ok(), "kept\n");
    ws.send(json!({"action": "kill_sandbox"})).await;
    ws.expect_status("SANDBOX_KILLING").await;
    ws.expect_status("SANDBOX_KILLED").await;
    ws.expect_close(1000).await;
    assert_eq!(volume.metadata(&id)["status"], "killed");
    let mut ws = Ws::open(&b, &format!("/attach/{id}")).await;
    ws.expect_status("SANDBOX_RESTORING").await;
    let gone = ws.expect_status("SANDBOX_NOT_FOUND").await;
    assert!(gone["message"].as_str().unwrap().contains("killed by its client"), "{gone}");
    ws.expect_close(1011).await;
}

#[tokio::test]
async fn a_running_program_is_saved_along_if_asked_and_its_streams_are_exact() {
    const PROGRAM: &str = "
import sys, threading, time
def echo():
    for line in sys.stdin:
        print('echo', line.strip(), flush=True)
    print('bye', flush=True)
reader = threading.Thread(target=echo); reader.start()
n = 0
while reader.is_alive():
    print('n', n, file=sys.stderr, flush=True); n += 1; time.sleep(0.005)
";
    let volume = Volume::default();
    let servers = [volume.serve(), volume.serve()];
    let mut ws = create(&servers[0]).await;
    let id = ws.sandbox_id.clone();
    ws.start(json!({"language": "python", "code": PROGRAM, "execution_id": "e"})).await;
    let (mut out, mut err) = (Assembly::default(), Assembly::default());
    let mut sent = String::new();
    for round in 1..=4 {
        let line = format!("line {round}\n");
        ws.send(json!({"event": "stdin", "data": line, "offset": sent.len()})).await;
        sent += &line;
        let wanted = err.bytes.len() + 400;
        while err.bytes.len() < wanted {
            let message = ws.next().await;
            match message["event"].as_str().unwrap() {
                "stdout" => out.take(&message),
                "stderr" => err.take(&message),
                "stdin_ack" | "resumed" => {}
                _ => panic!("{message}"),
            }
        }
        let (_, said) = checkpoint_with_output(ws, json!({"action": "checkpoint", "include_execution": true})).await;
        for message in said {
            if message["event"] == "stdout" { out.take(&message) } else { err.take(&message) }
        }
        (ws, _) = restore(&servers[round % 2], &id).await;
        ws.send(json!({"action": "reconnect", "execution_id": "e", "stdout_offset": out.bytes.len(), "stderr_offset": err.bytes.len()}))
            .await;
        let resumed = ws.next().await;
        assert_eq!((&resumed["event"], &resumed["running"]), (&json!("resumed"), &json!(true)), "{resumed}");
        // What was not taken is sent again.
        let taken = usize::try_from(resumed["stdin_offset"].as_u64().unwrap()).unwrap();
        if taken < sent.len() {
            ws.send(json!({"event": "stdin", "data": sent[taken..], "offset": taken})).await;
        }
    }
    ws.send(json!({"event": "stdin_eof", "offset": sent.len()})).await;
    loop {
        let message = ws.next().await;
        match message["event"].as_str().unwrap() {
            "stdout" => out.take(&message),
            "stderr" => err.take(&message),
            "stdin_ack" => {}
            _ => {
                assert_eq!((&message["status"], &message["exit_code"]), (&json!("SANDBOX_EXECUTION_DONE"), &json!(0)), "{message}");
                break;
            }
        }
    }
    assert_eq!(String::from_utf8_lossy(&out.bytes), "echo line 1\necho line 2\necho line 3\necho line 4\nbye\n");
    let numbers = String::from_utf8(err.bytes).unwrap();
    for (number, line) in numbers.lines().enumerate() {
        assert_eq!(line, format!("n {number}"));
    }
}

#[tokio::test]
async fn a_terminal_with_a_half_typed_line_goes_on_where_it_was() {
    let volume = Volume::default();
    let (a, b) = (volume.serve(), volume.serve());
    let mut ws = create(&a).await;
    let id = ws.sandbox_id.clone();
    ws.start(json!({"language": "bash", "code": "PS1='> ' exec bash --norc -i", "tty": {"rows": 24, "cols": 80}, "execution_id": "t"}))
        .await;
    ws.until_output("stdout", "> ").await;
    ws.send(json!({"event": "stdin", "data": "echo one two", "offset": 0})).await;
    let mut seen = String::new();
    while !seen.contains("echo one two") {
        let message = ws.next().await;
        if message["event"] == "stdout" {
            seen += message["data"].as_str().unwrap();
        }
    }
    checkpoint_with_output(ws, json!({"action": "checkpoint", "include_execution": true})).await;
    let (mut ws, _) = restore(&b, &id).await;
    ws.send(json!({"action": "reconnect", "execution_id": "t"})).await;
    assert_eq!(ws.next().await["event"], "resumed");
    ws.send(json!({"event": "stdin", "data": " three\r", "offset": 12})).await;
    let mut seen = String::new();
    while !seen.contains("\rone two three\r") {
        let message = ws.next().await;
        if message["event"] == "stdout" {
            seen += message["data"].as_str().unwrap();
        }
    }
}

#[tokio::test]
async fn a_checkpoint_during_an_execution_is_refused_and_the_output_goes_on() {
    let volume = Volume::default();
    let server = volume.serve();
    let mut ws = create(&server).await;
    ws.start(json!({"language": "bash", "code": "read x; echo $x"})).await;
    ws.send(json!({"action": "checkpoint"})).await;
    ws.expect_status("SANDBOX_CHECKPOINTING").await;
    ws.expect_status("SANDBOX_EXECUTION_IN_PROGRESS_ERROR").await;
    let error = ws.expect_error("execution_in_progress").await;
    assert_eq!(error["message"], "Cannot checkpoint while an execution is in progress.");
    ws.send(json!({"event": "stdin", "data": "on\n"})).await;
    assert_eq!(ws.until_done().await.ok(), "on\n");
    assert!(volume.record(&ws.sandbox_id)["latest"].is_null());
    checkpoint(ws, json!({"action": "checkpoint"})).await;
}

#[tokio::test]
async fn a_sandbox_that_can_not_be_saved_is_kept_running() {
    let volume = Volume::default();
    let server = volume.serve();
    let mut ws = Ws::create(&server).await;
    let _ = ws.bash("echo kept > f").await.ok();
    ws.send(json!({"action": "checkpoint"})).await;
    ws.expect_status("SANDBOX_CHECKPOINTING").await;
    ws.expect_status("SANDBOX_CHECKPOINT_ERROR").await;
    ws.expect_error("checkpoint_not_enabled").await;
    ws.expect_close(4000).await;
    let id = ws.sandbox_id.clone();
    assert_eq!(Ws::attach(&server, &id).await.bash("cat f").await.ok(), "kept\n");
    assert!(!volume.path().join(&id).exists(), "a sandbox that is not kept leaves nothing on the volume");

    // A volume that can't be written any longer.
    let mut ws = create(&server).await;
    let id = ws.sandbox_id.clone();
    let _ = ws.bash("echo kept > f").await.ok();
    let dir = volume.path().join(&id).join("checkpoints");
    fs::write(&dir, "in the way").unwrap();
    ws.send(json!({"action": "checkpoint"})).await;
    ws.expect_status("SANDBOX_CHECKPOINTING").await;
    ws.expect_status("SANDBOX_CHECKPOINT_ERROR").await;
    ws.expect_error("checkpoint_failed").await;
    ws.expect_close(4000).await;
    fs::remove_file(&dir).unwrap();
    let mut ws = Ws::attach(&server, &id).await;
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
    checkpoint(ws, json!({"action": "checkpoint"})).await;
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
    let keyed = |volume: &Volume| volume.options().env("SANDBOXER_API_KEYS", "mine:0123456789abcdef0123456789abcdef").start();
    let (a, b) = (keyed(&volume), keyed(&volume));
    let key = ("authorization", "Bearer 0123456789abcdef0123456789abcdef");
    let mut ws = Ws::connect(a.address(), "/create", &[key]).await.unwrap();
    ws.send(json!({"enable_checkpoint": true})).await;
    ws.expect_created().await;
    let token = ws.sandbox_token.clone();
    let id = checkpoint(ws, json!({"action": "checkpoint"})).await;
    let record = volume.record(&id);
    assert!(!record.to_string().contains(&token), "the token itself is nowhere: {record}");
    let wrong = "0".repeat(token.len());
    for (id, token) in
        [(id.as_str(), None), (id.as_str(), Some(wrong.as_str())), ("3f0c8a52-3b1e-4c53-9d0e-0a7c1e1f2b3d", Some(token.as_str()))]
    {
        let headers: Vec<_> = [key].into_iter().chain(token.map(|token| ("x-sandbox-token", token))).collect();
        let mut ws = Ws::connect(b.address(), &format!("/attach/{id}"), &headers).await.unwrap();
        ws.expect_status("SANDBOX_PERMISSION_DENIAL_ERROR").await;
        ws.expect_error("permission_denied").await;
        ws.expect_close(4000).await;
    }
    assert_eq!(volume.record(&id), record);
    let mut ws = Ws::connect(b.address(), &format!("/attach/{id}"), &[key, ("x-sandbox-token", &token)]).await.unwrap();
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
    let id = checkpoint(create(&a).await, json!({"action": "checkpoint"})).await;
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
        let mut ws = Ws::open(&b, &format!("/attach/{id}")).await;
        ws.expect_status("SANDBOX_RESTORING").await;
        let status = ws.expect_status("SANDBOX_RESTORE_ERROR").await;
        let text = status["message"].as_str().unwrap();
        assert!(said.iter().all(|word| text.contains(word)), "{what}: {text}");
        ws.expect_error("restore_failed").await;
        ws.expect_close(4000).await;
        assert_eq!(volume.contents(), before, "{what}: nothing is changed");
        let verified = sandboxer_e2e::command().args(["store", "verify", "--checkpoint-path"]).arg(volume.path()).output().unwrap();
        assert_eq!(verified.status.code(), Some(1), "{what}: {verified:?}");
        assert!(b.sandbox_processes().is_empty(), "{what}");
        fs::write(&manifest, &whole).unwrap();
        fs::write(pack, &packed).unwrap();
    }
    assert!(record.exists());
    let verified = sandboxer_e2e::command().args(["store", "verify", "--checkpoint-path"]).arg(volume.path()).output().unwrap();
    assert!(verified.status.success() && sandboxer_e2e::stdout_of(&verified).contains("no fault"), "{verified:?}");
    let listed = sandboxer_e2e::command().args(["store", "ls", "--json", "--checkpoint-path"]).arg(volume.path()).output().unwrap();
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!((&listed["items"][0]["id"], &listed["items"][0]["status"]), (&json!(id), &json!("saved")), "{listed}");
    let (mut ws, running) = restore(&b, &id).await;
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
    let (mut ws, running) = restore(&server, &id).await;
    assert!(running.get("rewound").is_none(), "{running}");
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
}

#[tokio::test]
async fn a_server_that_is_stopped_saves_its_sandboxes_first() {
    let volume = Volume::default();
    let (mut a, b) = (volume.serve(), volume.serve());
    let mut kept = create(&a).await;
    let mut other = Ws::create(&a).await;
    let id = kept.sandbox_id.clone();
    kept.start(json!({"language": "bash", "code": "for i in $(seq 1 100000); do echo $i; sleep 0.01; done", "execution_id": "e"})).await;
    kept.until_output("stdout", "20\n").await;
    a.term();
    let (mut out, mut told) = (Vec::new(), Vec::new());
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
    let (mut ws, running) = restore(&b, &id).await;
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
    let mut ws = create(&a).await;
    let _ = ws.bash("echo kept > f").await.ok();
    let id = checkpoint(ws, json!({"action": "checkpoint"})).await;
    let images = tempfile::tempdir().unwrap();
    let b: Server = Options::default()
        .env("CHECKPOINT_AND_RESTORE_PATH", volume.path().to_str().unwrap())
        .arg("--image-dir")
        .arg(images.path().to_str().unwrap())
        .not_waiting()
        .start();
    let (mut ws, _) = restore(&b, &id).await;
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
}

//! Who may connect, and what a guest can't find out. All of it for a server of root's and for one of an ordinary user.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::path::Path;

use sandboxer_e2e::{Options, Server, User, Ws, as_both_users, command, http, shared_as, stderr_of};
use serde_json::json;

const KEY: &str = "key-of-the-tests-0123456789abcdef";
const OTHER_KEY: &str = "key-of-others-0123456789abcdef0";

fn keyed(user: User) -> Server {
    Options::default().user(user).env("SANDBOXER_API_KEYS", format!("tests:{KEY},others:{OTHER_KEY}")).start()
}

async fn denied(server: &Server, path: &str, headers: &[(&str, &str)]) {
    let mut ws = Ws::connect(server.address(), path, headers).await.unwrap();
    ws.expect_status("SANDBOX_PERMISSION_DENIAL_ERROR").await;
    ws.expect_error("permission_denied").await;
    ws.expect_close(4000).await;
}

async fn with_keys_on_everything_but_health_needs_one(user: User) {
    let server = keyed(user);
    let get = |path, headers: &[(&str, &str)]| http::try_get(server.address(), path, headers).unwrap().status;
    for path in ["/healthz", "/readyz"] {
        assert_eq!(get(path, &[]), 200, "{path}");
    }
    let upgrade = |extra: &[(&'static str, &'static str)]| -> Vec<(&'static str, &'static str)> {
        http::UPGRADE.iter().chain(extra).copied().collect()
    };
    for path in ["/metrics", "/create", "/attach/x", "/v1/sandboxes"] {
        assert_eq!(get(path, &upgrade(&[])), 401, "{path}");
        assert_eq!(get(path, &upgrade(&[("Authorization", "Bearer wrong")])), 401, "{path}");
        assert_eq!(get(path, &upgrade(&[("X-API-Key", "")])), 401, "{path}");
    }
    assert_eq!(get("/v1/sandboxes", &[("Authorization", &format!("Bearer {KEY}"))]), 200);
    assert_eq!(get("/v1/sandboxes", &[("X-API-Key", KEY)]), 200);
    assert_eq!(get("/metrics", &[("X-API-Key", KEY)]), 403, "the numbers tell of the other key too");
}

async fn an_attach_needs_the_key_that_made_it_or_the_token(user: User) {
    let server = keyed(user);
    let (key, other) = (("X-API-Key", KEY), ("X-API-Key", OTHER_KEY));
    let mut ws = Ws::connect(server.address(), "/create", &[key]).await.unwrap();
    ws.send(json!({})).await;
    ws.expect_created().await;
    ws.expect_alive().await;
    let (id, token) = (ws.sandbox_id.clone(), ws.sandbox_token.clone());
    ws.close().await;
    let path = format!("/attach/{id}");
    denied(&server, &path, &[other]).await;
    for key in [key, other] {
        denied(&server, &path, &[key, ("X-Sandbox-Token", "wrong")]).await;
        denied(&server, &format!("{path}?sandbox_token=wrong"), &[key]).await;
    }
    // An unknown id gets the same answer.
    denied(&server, &format!("/attach/{}", uuid::Uuid::new_v4()), &[key]).await;
    denied(&server, &format!("/attach/{}", uuid::Uuid::new_v4()), &[key, ("X-Sandbox-Token", &token)]).await;
    for (path, headers) in [
        (path.clone(), vec![key]),
        (path.clone(), vec![other, ("X-Sandbox-Token", token.as_str())]),
        (format!("{path}?sandbox_token={token}"), vec![other]),
    ] {
        let mut ws = Ws::connect(server.address(), &path, &headers).await.unwrap();
        ws.expect_status("SANDBOX_RUNNING").await;
        ws.expect_alive().await;
        ws.close().await;
    }
    let log = server.log();
    assert!(!log.contains(KEY) && !log.contains(&token), "a secret is in the log");
    assert!(!found_in_files(server.data_dir(), &token) && !found_in_files(server.data_dir(), KEY), "a secret is on disk");
}

fn found_in_files(dir: &Path, text: &str) -> bool {
    std::fs::read_dir(dir).into_iter().flatten().flatten().any(|entry| {
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            return found_in_files(&entry.path(), text);
        }
        // FIFOs and sockets hold nothing to read.
        kind.is_file() && std::fs::read(entry.path()).is_ok_and(|bytes| bytes.windows(text.len()).any(|window| window == text.as_bytes()))
    })
}

async fn without_keys_the_id_opens_it_but_a_token_that_is_given_must_be_right(user: User) {
    let server = shared_as(user);
    let ws = Ws::create(server).await;
    let (id, token) = (ws.sandbox_id.clone(), ws.sandbox_token.clone());
    ws.close().await;
    denied(server, &format!("/attach/{id}"), &[("X-Sandbox-Token", "wrong")]).await;
    denied(server, &format!("/attach/{id}?sandbox_token=wrong"), &[]).await;
    let mut ws = Ws::connect(server.address(), &format!("/attach/{id}"), &[("X-Sandbox-Token", &token)]).await.unwrap();
    ws.expect_status("SANDBOX_RUNNING").await;
    ws.close().await;
    Ws::attach(server, &id).await.expect_alive().await;
}

#[test]
fn another_address_is_refused_without_keys() {
    let home = tempfile::tempdir().unwrap();
    let output = command().args(["serve", "--listen", "0.0.0.0:0", "--data-dir"]).arg(home.path()).output().unwrap();
    let told = stderr_of(&output);
    assert_eq!(output.status.code(), Some(64), "{told}");
    assert!(told.contains("--api-keys-file") && told.contains("--insecure-no-auth"), "{told}");
}

async fn nothing_of_the_host_can_be_read(user: User) {
    let marker = format!("marker-{}", uuid::Uuid::new_v4());
    let server = Options::default().user(user).env("MARKER_VARIABLE", &marker).start();
    let file = tempfile::Builder::new().prefix(&marker).tempfile_in("/tmp").unwrap();
    std::fs::write(file.path(), &marker).unwrap();
    std::fs::create_dir_all(server.data_dir().join("marker")).unwrap();
    std::fs::write(server.data_dir().join("marker").join(&marker), &marker).unwrap();
    let mut neighbour = Ws::create(&server).await;
    neighbour.bash(&format!("echo {marker} >/tmp/{marker}; sleep 77777 & :")).await;
    let mut ws = Ws::create(&server).await;
    // In two parts, so that the search does not find itself.
    let (head, rest) = marker.split_at(10);
    let search = format!("m={head}; m=$m{rest}; ");
    for probe in [
        "find / -xdev -name \"*$m*\" 2>/dev/null",
        "env | grep -c $m; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n' | grep \"MARKER_VARIABLE\"",
        "ps ax | grep '[7]7777'",
        "ps ax | grep -i 'sandboxer-agent\\|sandboxer serve\\|runsc\\|cargo' | grep -v grep",
        "cat /proc/mounts /proc/self/mountinfo | grep '/sbx-\\|e2e-images\\|erofs'",
        "cat /proc/*/cgroup 2>/dev/null | grep -i 'sandboxer\\|runsc\\|process_api'",
        "grep -a -l $m /tmp/* /root/* /etc/* 2>/dev/null",
    ] {
        let outcome = ws.bash(&format!("{search}{probe}")).await;
        assert!(outcome.out().is_empty() || outcome.out() == "0\n", "{probe}: {}", outcome.out());
    }
    let hostname = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    assert!(!ws.bash("hostname; cat /proc/sys/kernel/hostname /etc/hostname").await.out().contains(hostname.trim()));
    assert_eq!(
        ws.bash("ls /sys/class/net 2>/dev/null | grep -v '^lo$'; cut -d: -f1 /proc/net/dev | tail -n +3 | grep -v ' *lo'").await.out(),
        ""
    );
    let port = server.address().port();
    assert_eq!(ws.bash(&format!("(echo >/dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo reached")).await.out(), "");
}

/// Every byte of memory that the guest can open, searched for the secrets of its own sandbox.
async fn tokens_and_keys_are_in_no_memory_that_the_guest_can_reach(user: User) {
    let server = keyed(user);
    let mut ws = Ws::connect(server.address(), "/create", &[("X-API-Key", KEY)]).await.unwrap();
    ws.send(json!({})).await;
    ws.expect_created().await;
    let code = "
import os, re, sys
halves = sys.stdin.readline().split()
found = set()
for pid in [p for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid()]:
    try:
        maps, mem = open(f'/proc/{pid}/maps').read(), open(f'/proc/{pid}/mem', 'rb')
    except OSError: continue
    for start, end in re.findall(r'^([0-9a-f]+)-([0-9a-f]+) r', maps, re.M):
        try:
            mem.seek(int(start, 16)); data = mem.read(int(end, 16) - int(start, 16))
        except (OSError, ValueError, OverflowError): continue
        for a, b in zip(halves[::2], halves[1::2]):
            if (a + b).encode() in data: found.add(pid)
print('found in', sorted(found))
";
    let token = ws.sandbox_token.clone();
    let halves = |text: &str| format!("{} {}", &text[..text.len() / 2], &text[text.len() / 2..]);
    ws.start(json!({"language": "python", "code": code})).await;
    ws.send(json!({"event": "stdin", "data": format!("{} {}\n", halves(&token), halves(KEY))})).await;
    assert_eq!(ws.until_done().await.ok(), "found in []\n");
}

as_both_users!(
    with_keys_on_everything_but_health_needs_one,
    an_attach_needs_the_key_that_made_it_or_the_token,
    without_keys_the_id_opens_it_but_a_token_that_is_given_must_be_right,
    nothing_of_the_host_can_be_read,
    tokens_and_keys_are_in_no_memory_that_the_guest_can_reach,
);

//! The network of a sandbox: what it was allowed works as programs are used to, and nothing else does.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::LazyLock;

use sandboxer_e2e::{Internet, Options, Server, User, Ws, shared};
use serde_json::{Value, json};

static INTERNET: LazyLock<Internet> = LazyLock::new(Internet::start);
static SERVER: LazyLock<Server> = LazyLock::new(|| INTERNET.options(Options::default()).start());

/// A sandbox that may reach the test's own servers, each by a name of its own.
async fn connected(server: &Server) -> Ws {
    let rules = [("index.test", "https"), ("plain.test", "http"), ("plain.test", "raw"), ("*.test", "held")];
    let allow: Vec<String> = rules.iter().map(|(name, server)| format!("{name}:{}", INTERNET.port(server))).collect();
    let mut ws = Ws::create_with(server, json!({ "network": { "allow": allow } })).await;
    let _ = ws.python(&format!("open('/root/ca.pem', 'w').write({:?})", INTERNET.ca())).await.ok();
    ws
}

fn log_of(server: &Server, ws: &Ws) -> Vec<Value> {
    server.found(None, &format!("/v1/sandboxes/{}/network", ws.sandbox_id))["items"].as_array().unwrap().clone()
}

async fn what_people_use_works(server: &Server) {
    let mut ws = connected(server).await;
    let (https, http) = (INTERNET.port("https"), INTERNET.port("http"));
    let curl = ws.bash(&format!("curl -sS --cacert ca.pem https://index.test:{https}/hello.txt http://plain.test:{http}/hello.txt")).await;
    assert_eq!(curl.ok(), "hello from outside\n".repeat(2));
    let pip = format!(
        "pip install -q --break-system-packages --root-user-action=ignore --cert /root/ca.pem --index-url https://index.test:{https}/simple demo 2>&1 || exit 1
         python3 -c 'import demo; print(demo.said)'"
    );
    assert!(ws.bash(&pip).await.ok().ends_with("from the index\n"));
    let git = format!("GIT_SSL_CAINFO=/root/ca.pem git clone -q https://index.test:{https}/repo.git && cat repo/file");
    assert_eq!(ws.bash(&git).await.ok(), "from the repository\n");
    let urllib = format!(
        "import ssl, urllib.request
context = ssl.create_default_context(cafile='/root/ca.pem')
print(urllib.request.urlopen('https://index.test:{https}/hello.txt', context=context).read().decode(), end='')
print(urllib.request.urlopen('http://plain.test:{http}/hello.txt').read().decode(), end='')"
    );
    assert_eq!(ws.python(&urllib).await.ok(), "hello from outside\n".repeat(2));
    let socks = format!("curl -sS --noproxy '' --proxy ${{all_proxy/http:/socks5h:}} http://plain.test:{http}/hello.txt");
    assert_eq!(ws.bash(&socks).await.ok(), "hello from outside\n");
    // What a program says for itself goes before.
    assert_eq!(ws.bash("curl -sS --noproxy '*' --max-time 5 http://plain.test 2>/dev/null; echo $?").await.ok(), "6\n");
    let over = || log_of(server, &ws).iter().all(|one| !one["duration_ms"].is_null());
    sandboxer_e2e::eventually("all connections are over", sandboxer_e2e::DEADLINE, over).await;
    let log = log_of(server, &ws);
    assert!(log.len() >= 7 && log.iter().all(|one| one["verdict"] == "allowed" && one["address"] == "127.0.0.1"), "{log:?}");
    assert!(log.iter().any(|one| one["via"] == "socks5" && one["received"].as_u64() > Some(19)), "{log:?}");
}

#[tokio::test]
async fn pip_curl_git_and_python_reach_what_was_allowed() {
    what_people_use_works(&SERVER).await;
}

#[tokio::test]
async fn they_do_as_an_ordinary_user_too() {
    let server = INTERNET.options(Options::default()).user(User::Ordinary).start();
    what_people_use_works(&server).await;
}

#[tokio::test]
async fn without_it_there_is_neither_a_proxy_nor_a_word_of_one() {
    let mut ws = Ws::create(shared()).await;
    let seen = ws
        .bash(
            "env | grep -ci proxy; awk '$4 == \"0A\"' /proc/net/tcp | wc -l; curl -sS --max-time 5 http://index.test 2>/dev/null; echo $?",
        )
        .await;
    assert_eq!(seen.ok(), "0\n0\n6\n");
    for (host, code) in [("example.com", "network_not_available"), ("bücher.example", "invalid_field")] {
        let mut ws = Ws::open(shared(), "/create").await;
        ws.send(json!({"network": {"allow": [host]}})).await;
        ws.expect_status("SANDBOX_CREATING").await;
        ws.expect_status("SANDBOX_CREATION_ERROR").await;
        let error = ws.expect_error(code).await;
        assert!(error["message"].as_str().unwrap().contains("network.allow"), "{error}");
    }
}

#[tokio::test]
async fn plain_requests_are_written_anew() {
    let mut ws = connected(&SERVER).await;
    let http = INTERNET.port("http");
    let told = ws
        .bash(&format!(
            "curl -sS -H 'Connection: X-Secret' -H 'X-Secret: 1' -H 'Proxy-Authorization: Basic eA==' -H 'Host: other.test' -d abc http://plain.test:{http}/head?q=1"
        ))
        .await;
    let told: Value = serde_json::from_str(told.ok()).unwrap();
    assert_eq!((&told["line"], &told["body"]), (&json!("POST /head?q=1 HTTP/1.1"), &json!(3)));
    let headers = told["headers"].to_string().to_lowercase();
    assert!(headers.contains(&format!("[\"host\",\"plain.test:{http}\"]")), "{headers}");
    assert!(!headers.contains("secret") && !headers.contains("proxy"), "{headers}");
}

#[tokio::test]
async fn two_hundred_connections_half_closed_ones_silent_ones_and_slow_ones() {
    let mut ws = connected(&SERVER).await;
    let many = format!(
        "import hashlib, os, socket, threading
proxy = ('127.0.0.1', int(os.environ['all_proxy'].rsplit(':', 1)[1]))
def connect(port):
    s = socket.create_connection(proxy)
    s.sendall(f'CONNECT plain.test:{{port}} HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'.encode())
    head = b''
    while not head.endswith(b'\\r\\n\\r\\n'):
        piece = s.recv(1)
        assert piece, head
        head += piece
    assert head.startswith(b'HTTP/1.1 200'), head
    return s
held = [connect({held}) for _ in range({count})]
assert all(s.recv(6) == b'hello\\n' for s in held)
print(len(held), 'at once')
data = os.urandom(300000)
s = connect({raw})
threading.Thread(target=lambda: (s.sendall(data), s.shutdown(socket.SHUT_WR))).start()
answer = b''
while piece := s.recv(100):
    answer += piece
assert answer.decode() == hashlib.sha256(data).hexdigest(), answer
print('half closed')
for s in held: s.close()
",
        held = INTERNET.port("held"),
        raw = INTERNET.port("raw"),
        count = 200,
    );
    assert_eq!(ws.python(&many).await.ok(), "200 at once\nhalf closed\n");
    let http = INTERNET.port("http");
    let silent = ws.bash(&format!("curl -sS --max-time 2 http://plain.test:{http}/never 2>/dev/null; echo $?")).await;
    assert_eq!(silent.ok(), "28\n");
    let slow = ws.bash(&format!("curl -sSN --max-time 60 http://plain.test:{http}/slow/3")).await;
    assert_eq!(slow.ok(), "...");
    // What was closed is closed here too.
    let open = || log_of(&SERVER, &ws).iter().filter(|one| one["duration_ms"].is_null()).count();
    sandboxer_e2e::eventually("all connections are over", sandboxer_e2e::DEADLINE, || open() == 0).await;
}

/// Every way out that was thought of, from inside, at a server that connects to nothing: each is refused and written down.
#[tokio::test]
async fn no_escape_gets_through_and_each_is_logged() {
    let internet = Internet::start();
    internet.hosts(&[
        ("127.0.0.1", "loop.test"),
        ("169.254.169.254", "meta.test"),
        ("10.1.2.3", "private.test"),
        ("::ffff:127.0.0.1", "mapped.test"),
        ("1.2.3.4", "rebound.test"),
    ]);
    let server = internet.options(Options::default()).arg("--network-dry-run").arg("--network-deny=denied.test").start();
    let own = server.address().port();
    let allow = json!(["*.test", format!("*.test:{own}"), "xn--bcher-kva.test"]);
    let mut ws = Ws::create_with(&server, json!({ "network": { "allow": allow } })).await;
    let script = format!(
        r#"
import os, socket
proxy = ('127.0.0.1', int(os.environ['all_proxy'].rsplit(':', 1)[1]))
def ask(said):
    s = socket.create_connection(proxy)
    s.settimeout(60)
    s.sendall(said if isinstance(said, bytes) else said.encode())
    s.shutdown(socket.SHUT_WR) if said == b'' else None
    return s.recv(4096)
def connect(to):
    return ask(f'CONNECT {{to}} HTTP/1.1\r\nHost: {{to}}\r\n\r\n').split(b' ')[1].decode()
def plain(url, more=''):
    return ask(f'GET {{url}} HTTP/1.1\r\nHost: loop.test\r\n{{more}}\r\n').split(b' ')[1].decode()
def socks(kind, address, port):
    s = socket.create_connection(proxy)
    s.sendall(b'\x05\x01\x00'); assert s.recv(2) == b'\x05\x00'
    s.sendall(b'\x05\x01\x00' + kind + address + port.to_bytes(2, 'big'))
    return s.recv(10)[1]
print('literal', connect('127.0.0.1:443'), connect('[::1]:443'), connect('169.254.169.254:80'), connect('8.8.8.8:443'), plain('http://127.0.0.1/'))
def closing(version, more):
    s = socket.create_connection(proxy)
    s.settimeout(60)
    s.sendall(f'CONNECT evil.invalid:443 HTTP/{{version}}\r\nHost: x\r\n{{more}}\r\n'.encode())
    import time; time.sleep(0.3)  # The answer and the end are there before the first read.
    said = b''
    while piece := s.recv(4096): said += piece
    return said.split(b' ')[1].decode()
print('closing', closing('1.0', ''), closing('1.1', 'Connection: close\r\n'))
print('numbers', connect('2130706433:443'), connect('127.1:80'), plain('http://0x7f000001/'))
print('loopback', connect('loop.test:443'), connect('LOOP.TEST:443'), connect('loop.test.:443'))
print('metadata', connect('meta.test:80'), plain('http://meta.test/latest/'))
print('private', connect('private.test:443'))
print('mapped', connect('mapped.test:443'), connect('[::ffff:127.0.0.1]:443'))
print('port', connect('rebound.test:22'))
print('own', connect('loop.test:{own}'))
print('denied', connect('denied.test:443'))
print('idn', ask('CONNECT b\u00fccher.test:443 HTTP/1.1\r\n\r\n').split(b' ')[1].decode())
print('unlisted', connect('evil.invalid:443'), plain('http://evil.invalid/'))
print('injected', plain('http://rebound.test\r\nX: y/'), connect('rebound.test:443\r\nX: evil.invalid:443 '))
print('inside', plain('http://127.0.0.1:%d/' % proxy[1]))
print('tricks', plain('http://rebound.test@evil.invalid/'), plain('http://evil.invalid\\@rebound.test/'), plain('https://rebound.test/'), plain('/'), connect('rebound.test'))
print('socks', socks(b'\x01', b'\x7f\0\0\x01', 443), socks(b'\x04', b'\0' * 15 + b'\x01', 443), socks(b'\x03', b'\x09loop.test', 443), socks(b'\x03', b'\x0cevil.invalid', 443))
print('dialled', connect('rebound.test:443'), socks(b'\x03', b'\x0crebound.test', 443))
"#
    );
    let seen = ws.python(&script).await;
    assert_eq!(
        seen.ok(),
        "literal 403 403 403 403 403\nclosing 403 403\nnumbers 400 400 400\nloopback 403 403 403\nmetadata 403 403\nprivate 403\nmapped 403 403\nport 403\nown 403\n\
         denied 403\nidn 400\nunlisted 403 403\ninjected 400 400\ninside 403\ntricks 400 400 400 400 400\nsocks 2 2 2 2\ndialled 502 5\n"
    );
    let log = log_of(&server, &ws);
    let verdicts = |verdict: &str| log.iter().filter(|one| one["verdict"] == verdict).count();
    assert_eq!(verdicts("allowed"), 0, "{log:?}");
    // What would have been connected to is what is allowed, at the address that it has; the name means another one now.
    assert_eq!(verdicts("not_connected"), 2, "{log:?}");
    assert_eq!(
        ["not_allowed", "address_refused", "denied", "malformed"].map(verdicts),
        [15, 9, 1, 11],
        "each is written down, and none twice: {log:?}"
    );
    internet.hosts(&[("127.0.0.1", "rebound.test")]);
    let again = ws.bash("curl -sS -o /dev/null -w '%{http_connect}' https://rebound.test/ 2>/dev/null").await;
    assert_eq!(again.out(), "403");
    let told = ws.bash("curl -sS http://evil.invalid/").await;
    assert!(told.ok().contains("evil.invalid:80 is not allowed: no rule of this sandbox's network.allow"), "{}", told.ok());
    let listed = sandboxer_e2e::command()
        .args(["network", "log", &ws.sandbox_id, "--server", &format!("http://{}", server.address())])
        .output()
        .unwrap();
    assert!(sandboxer_e2e::stdout_of(&listed).contains("evil.invalid"), "{}", sandboxer_e2e::stderr_of(&listed));
}

#[tokio::test]
async fn neither_a_neighbour_nor_the_host_is_reached() {
    let (mut one, mut other) = (connected(&SERVER).await, connected(&SERVER).await);
    let serving = "cd /tmp && (python3 -m http.server 8123 --bind 127.0.0.1 >/dev/null 2>&1 &) ; for i in $(seq 100); do curl -s --noproxy '*' -o /dev/null 127.0.0.1:8123 && echo up && break; sleep 0.1; done";
    assert_eq!(one.bash(serving).await.ok(), "up\n");
    let host = SERVER.address().port();
    let tried = other
        .bash(&format!(
            "curl -s --noproxy '*' --max-time 5 127.0.0.1:8123; echo $?; curl -s --noproxy '*' --max-time 5 127.0.0.1:{host}/healthz; echo $?; \
             curl -s -o /dev/null -w '%{{http_code}}\\n' http://127.0.0.1:{host}/healthz; env -u no_proxy -u NO_PROXY curl -s -o /dev/null -w '%{{http_code}}\\n' http://127.0.0.1:{host}/healthz"
        ))
        .await;
    assert_eq!(tried.out(), "7\n7\n000\n403\n");
}

#[tokio::test]
async fn the_server_itself_is_never_reached_whatever_its_settings_allow() {
    let server = INTERNET.options(Options::default()).arg("--network-allow-address=127.0.0.0/8").start();
    let mut ws = Ws::create_with(&server, json!({ "network": { "allow": ["*:*"] } })).await;
    let (own, http) = (server.address().port(), INTERNET.port("http"));
    assert_eq!(ws.bash(&format!("curl -sS http://plain.test:{http}/hello.txt")).await.ok(), "hello from outside\n");
    let told = ws.bash(&format!("curl -sS http://plain.test:{own}/healthz")).await;
    assert!(told.ok().contains("where this server itself listens"), "{}", told.ok());
}

#[tokio::test]
async fn what_a_sandbox_may_use_of_it_is_bounded() {
    let server = INTERNET.options(Options::default()).arg("--network-connections=2").arg("--network-mb=4").start();
    let mut ws = connected(&server).await;
    let http = INTERNET.port("http");
    let held = INTERNET.port("held");
    let many = format!(
        "import os, socket
proxy = ('127.0.0.1', int(os.environ['all_proxy'].rsplit(':', 1)[1]))
held = []
for _ in range(3):
    s = socket.create_connection(proxy); s.sendall(b'CONNECT a.test:{held} HTTP/1.1\\r\\n\\r\\n'); held.append(s); print(s.recv(100).split()[1].decode())"
    );
    // Names that the file of hosts does not have are not resolved by anybody; so a name of it.
    let many = many.replace("a.test", "other.test");
    assert_eq!(ws.python(&many).await.ok(), "200\n200\n503\n");
    let over = || log_of(&server, &ws).iter().all(|one| !one["duration_ms"].is_null());
    sandboxer_e2e::eventually("their places are free", sandboxer_e2e::DEADLINE, over).await;
    let used = ws.bash(&format!("curl -sS -o /dev/null -w '%{{size_download}}' http://plain.test:{http}/big/{} 2>/dev/null; echo; curl -sS http://plain.test:{http}/hello.txt", 8 << 20)).await;
    assert!(used.out().contains("used up"), "{}", used.out());
}

#[tokio::test]
async fn a_sandbox_that_waited_in_the_pool_has_its_network_too() {
    let server = INTERNET.options(Options::default()).arg("--pool").arg("1").start();
    server.filled(1, 0).await;
    let mut ws = connected(&server).await;
    assert!(server.metric("sandboxer_pool_hits_total") > 0.0);
    let http = INTERNET.port("http");
    assert_eq!(ws.bash(&format!("curl -sS http://plain.test:{http}/hello.txt")).await.ok(), "hello from outside\n");
    // And who asked for none has none.
    server.filled(1, 0).await;
    let mut without = Ws::create(&server).await;
    assert_eq!(without.bash("env | grep -ci proxy; awk '$4 == \"0A\"' /proc/net/tcp | wc -l").await.out(), "0\n0\n");
}

/// A server that is started again with other settings: what was promised by the last one holds only as far as this one allows it.
#[tokio::test]
async fn a_sandbox_that_is_taken_up_by_a_server_that_allows_less_gets_less_and_lives() {
    let mut server = INTERNET.options(Options::default()).start();
    let mut ws = connected(&server).await;
    let ask = format!("curl -sS http://plain.test:{}/hello.txt", INTERNET.port("http"));
    assert_eq!(ws.bash(&ask).await.ok(), "hello from outside\n");
    let id = ws.sandbox_id.clone();
    ws.vanish();
    server.usr2();
    server.exited().await;
    server.restart_with(Options::default());
    let mut ws = Ws::attach(&server, &id).await;
    // There is no proxy any longer, and no name is resolved without one.
    assert_eq!(ws.bash("env | grep -ci proxy; curl -s --max-time 5 http://plain.test/; echo $?").await.out(), "0\n6\n");
    ws.expect_alive().await;
}

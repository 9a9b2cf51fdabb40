//! Servers that run in a sandbox, opened from outside: by key, by a link, by a browser, wherever the sandbox is.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    path::Path,
    process::{Command, Stdio},
    sync::LazyLock,
};

use futures_util::{SinkExt as _, StreamExt as _};
use sandboxer_e2e::{DEADLINE, Internet, Options, Server, Volume, Ws, eventually, http, sha256, stderr_of, stdout_of};
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::{Message, client::IntoClientRequest};

/// A web server of a program: says what it was asked, takes uploads, streams, and echoes over WebSockets; also what a browser makes a page of.
const WEB: &str = r#"
import base64, hashlib, http.server, json, os, socketserver, struct, sys, threading, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def log_message(self, *_): pass
    def say(self, text, kind='text/plain', **headers):
        data = text.encode()
        self.send_response(200)
        self.send_header('Content-Type', kind)
        self.send_header('Content-Length', str(len(data)))
        self.send_header('Set-Cookie', 'app=1; Path=/')
        for name, value in headers.items(): self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        path = self.path.split('?')[0]
        if self.headers.get('Upgrade', '').lower() == 'websocket': return self.websocket()
        if path == '/': return self.say('<!DOCTYPE html><title>inside</title><p id="a">page</p><script src="script.js"></script>', 'text/html')
        if path == '/script.js': return self.say('document.getElementById("a").textContent = "drawn by a script of the page";', 'text/javascript')
        if path == '/moved':
            self.send_response(302); self.send_header('Location', '/there'); self.send_header('Content-Length', '0'); self.end_headers(); return
        if path == '/big':
            self.send_response(200); self.send_header('Transfer-Encoding', 'chunked'); self.end_headers()
            for n in range(64):
                self.wfile.write(b'10000\r\n' + bytes([n]) * 65536 + b'\r\n')
            self.wfile.write(b'0\r\n\r\n'); return
        if path == '/unasked':
            self.wfile.write(b'HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nother'); self.close_connection = True; return
        if path == '/cut':
            self.send_response(200); self.send_header('Content-Length', '1000'); self.end_headers(); self.wfile.write(b'x'); self.close_connection = True; return
        self.say(json.dumps({'line': self.requestline, 'headers': self.headers.items()}), 'application/json')
    def do_POST(self):
        left, digest = int(self.headers['Content-Length']), hashlib.sha256()
        while left:
            piece = self.rfile.read(min(left, 65536)); digest.update(piece); left -= len(piece)
        self.say(digest.hexdigest())
    def websocket(self):
        key = self.headers['Sec-WebSocket-Key'] + '258EAFA5-E914-47DA-95CA-C5AB0DC85B11'
        self.send_response(101)
        self.send_header('Upgrade', 'websocket'); self.send_header('Connection', 'Upgrade')
        self.send_header('Sec-WebSocket-Accept', base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        while True:
            head = self.rfile.read(2)
            if len(head) < 2 or head[0] & 15 == 8: break
            mask = self.rfile.read(4)
            data = bytes(b ^ mask[i % 4] for i, b in enumerate(self.rfile.read(head[1] & 127)))
            self.wfile.write(bytes([0x81, len(data)]) + data)
        self.close_connection = True
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128
    def handle_error(self, *_): pass
server = Server(('127.0.0.1', 8000), Handler)
if os.fork() == 0:
    os.setsid()
    server.serve_forever()
"#;

static SERVER: LazyLock<Server> = LazyLock::new(|| Options::default().arg("--port-domain=localhost").start());

async fn serving(server: &Server, configuration: Value) -> Ws {
    let mut ws = Ws::create_with(server, configuration).await;
    let _ = ws.python(WEB).await.ok();
    ws
}

fn path(ws: &Ws, below: &str) -> String {
    format!("/v1/sandboxes/{}/ports/8000{below}", ws.sandbox_id)
}

#[tokio::test]
async fn a_server_inside_is_reached_with_bodies_of_any_size_in_both_directions() {
    let ws = serving(&SERVER, json!({})).await;
    let address = SERVER.address();
    let told = http::try_get(address, &path(&ws, "/a/b?c=d"), &[("X-Forwarded-For", "6.6.6.6"), ("X-Sandbox-Token", "secret")]).unwrap();
    assert_eq!(told.status, 200);
    let said = told.json();
    assert_eq!(said["line"], "GET /a/b?c=d HTTP/1.1");
    let headers = said["headers"].to_string().to_lowercase();
    for wanted in [
        format!("[\"host\",\"{address}\"]"),
        format!("[\"x-forwarded-host\",\"{address}\"]"),
        format!("[\"x-forwarded-prefix\",\"{}\"]", path(&ws, "")),
    ] {
        assert!(headers.contains(&wanted), "{headers}");
    }
    assert!(!headers.contains("6.6.6.6") && !headers.contains("secret"), "{headers}");
    // Without keys its pages are shut into an origin of their own.
    assert!(told.header("content-security-policy").is_some_and(|policy| policy.starts_with("sandbox")));
    assert_eq!(told.header("set-cookie"), Some(format!("app=1; Path={}", path(&ws, "/")).as_str()));
    assert_eq!(http::try_get(address, &path(&ws, "/moved"), &[]).unwrap().header("location"), Some(path(&ws, "/there").as_str()));
    let big = http::bytes(address, "GET", &path(&ws, "/big"), &[], b"").unwrap();
    assert_eq!(sha256(&big.bytes), sha256(&(0..64).flat_map(|n| vec![n; 65536]).collect::<Vec<u8>>()));
    let content = vec![5; 5 << 20];
    assert_eq!(http::bytes(address, "POST", &path(&ws, "/up"), &[], &content).unwrap().body, sha256(&content));
    assert!(http::bytes(address, "GET", &path(&ws, "/cut"), &[], b"").is_err(), "what breaks off is not whole");
    // Nor does it become something else than was asked for, for whoever is on the way.
    let unasked = http::try_get(address, &path(&ws, "/unasked"), &[]).unwrap();
    assert_eq!((unasked.status, unasked.json()["error"]["code"].as_str()), (502, Some("bad_gateway")), "{}", unasked.body);
    // Nobody there, no such sandbox, no such port.
    let at = |id: &str, port: &str| http::try_get(address, &format!("/v1/sandboxes/{id}/ports/{port}/"), &[]).unwrap();
    let nobody = at(&ws.sandbox_id, "8001");
    assert_eq!((nobody.status, nobody.json()["error"]["code"].as_str()), (502, Some("nothing_listens")));
    assert_eq!(at("00000000-0000-4000-8000-000000000000", "8000").status, 404);
    assert_eq!((at(&ws.sandbox_id, "0").status, at(&ws.sandbox_id, "65536").status), (404, 404));
    // A name of its own, where nothing but the program is.
    let host = format!("8000-{}.localhost:{}", ws.sandbox_id, address.port());
    let own = http::try_get(address, "/x", &[("Host", &host)]).unwrap();
    assert_eq!((own.status, own.json()["line"].as_str()), (200, Some("GET /x HTTP/1.1")));
    assert_eq!((own.header("content-security-policy"), own.header("set-cookie")), (None, Some("app=1; Path=/")));
    assert_eq!(http::try_get(address, &path(&ws, "/"), &[("Host", "evil.example")]).unwrap().status, 403);
}

#[tokio::test]
async fn pages_of_no_origin_need_the_path_of_the_ports_own_pages() {
    let (ws, other) = (serving(&SERVER, json!({})).await, serving(&SERVER, json!({})).await);
    let address = SERVER.address();
    let null = ("Origin", "null");
    let upgrade = [null, ("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13"), ("Sec-WebSocket-Key", "x")];
    let own_pages = |ws: &Ws| {
        let opened = http::try_get(address, &path(ws, "/"), &[("Accept", "text/html"), ("Sec-Fetch-Mode", "navigate")]).unwrap();
        assert_eq!(opened.status, 303);
        opened.header("location").unwrap().strip_prefix(&path(ws, "")).unwrap().trim_end_matches('/').to_owned()
    };
    let (own, foreign) = (own_pages(&ws), own_pages(&other));
    assert!(own.starts_with("/~") && own != foreign, "{own}");
    // A foreign page can put itself into a frame without an origin, but does not know the path.
    for part in ["", foreign.as_str()] {
        let refused = http::bytes(address, "POST", &path(&ws, &format!("{part}/up")), &[null], b"x").unwrap();
        assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (403, Some("foreign_origin")));
        assert_eq!(http::try_get(address, &path(&ws, &format!("{part}/socket")), &upgrade).unwrap().status, 403);
        assert_eq!(http::try_get(address, &path(&ws, &format!("{part}/x")), &[null]).unwrap().status, 403);
    }
    let scripted = [("Accept", "text/html"), ("Sec-Fetch-Mode", "no-cors")];
    assert_eq!(http::try_get(address, &path(&ws, "/"), &scripted).unwrap().status, 200, "a script is led nowhere");
    // The port's own pages go on as they did.
    let below = |name: &str| path(&ws, &format!("{own}/{name}"));
    assert_eq!(http::bytes(address, "POST", &below("up"), &[null], b"x").unwrap().body, sha256(b"x"));
    let said = http::try_get(address, &below("x?a=b"), &[null]).unwrap().json();
    assert_eq!(said["line"], "GET /x?a=b HTTP/1.1");
    assert_eq!(http::try_get(address, &below("moved"), &[]).unwrap().header("location"), Some(below("there").as_str()));
    let mut request = format!("ws://{address}{}", below("socket")).into_client_request().unwrap();
    request.headers_mut().insert("Origin", "null".parse().unwrap());
    let (mut socket, _) = tokio_tungstenite::connect_async(request).await.unwrap();
    socket.send(Message::text("own")).await.unwrap();
    assert_eq!(socket.next().await.unwrap().unwrap(), Message::text("own"));
    let evil = http::bytes(address, "POST", &below("up"), &[("Origin", "http://evil.example")], b"x").unwrap();
    assert_eq!(evil.status, 403);
}

#[tokio::test]
async fn programs_see_neither_keys_nor_referers_of_others() {
    let ws = serving(&SERVER, json!({})).await;
    let address = SERVER.address();
    let from = |referer: String, key: (&str, &str)| {
        let answer = http::try_get(address, &path(&ws, "/x"), &[("Referer", &referer), key]).unwrap();
        answer.json()["headers"].to_string()
    };
    let own = format!("http://{address}{}", path(&ws, "/page?a=b&sandboxer_link=secret"));
    let said = from(own, ("Authorization", "Bearer a-key-of-another-server"));
    assert!(said.contains("/page?a=b") && !said.contains("secret") && !said.contains("a-key-of"), "{said}");
    let elsewhere = format!("http://{address}/v1/sandboxes/another/ports/80/?sandboxer_link=secret");
    let said = from(elsewhere, ("X-API-Key", "a-key-of-another-server"));
    assert!(!said.contains("secret") && !said.contains("another"), "{said}");
    assert!(from(String::new(), ("Authorization", "Basic its-own")).contains("its-own"));
}

#[tokio::test]
async fn websockets_pass_through_and_end_with_the_sandbox() {
    let ws = serving(&SERVER, json!({})).await;
    let request = format!("ws://{}{}", SERVER.address(), path(&ws, "/socket")).into_client_request().unwrap();
    let (mut socket, _) = tokio_tungstenite::connect_async(request).await.unwrap();
    for text in ["one", "two"] {
        socket.send(Message::text(text)).await.unwrap();
        assert_eq!(socket.next().await.unwrap().unwrap(), Message::text(text));
    }
    let mut ws = ws;
    ws.send(json!({"action": "kill_sandbox"})).await;
    let ended = tokio::time::timeout(DEADLINE, async { while let Some(Ok(_)) = socket.next().await {} }).await;
    assert!(ended.is_ok(), "it hangs");
}

#[tokio::test]
async fn a_link_opens_one_port_until_it_expires_and_the_program_never_sees_what_opened_it() {
    let server = Options::default().env("SANDBOXER_API_KEYS", "alice:alice-0123456789abcdef,bob:bob-0123456789abcdef").start();
    let (alice, bob) = (Some(("Authorization", "Bearer alice-0123456789abcdef")), Some(("X-API-Key", "bob-0123456789abcdef")));
    let made = server.made(alice, "/v1/sandboxes", &json!({}));
    let id = made["id"].as_str().unwrap();
    let (status, _) = server.api(alice, "POST", &format!("/v1/sandboxes/{id}/executions"), &json!({"language": "python", "code": WEB}));
    assert!(status < 300, "{status}");
    let root = format!("/v1/sandboxes/{id}/ports/8000/");
    let get = |path: &str, headers: &[(&str, &str)]| http::try_get(server.address(), path, headers).unwrap();
    assert_eq!((get(&root, &[]).status, get(&root, bob.as_slice()).status), (401, 404));
    let with_key = get(&format!("{root}x"), alice.as_slice());
    assert!(with_key.status == 200 && !with_key.body.contains("alice"), "{}", with_key.body);
    assert_eq!(with_key.header("content-security-policy"), None);
    server.refuses(bob, "POST", &format!("/v1/sandboxes/{id}/ports"), &json!({"port": 8000}), 404, "not_found");
    server.refuses(alice, "POST", &format!("/v1/sandboxes/{id}/ports"), &json!({"port": 0}), 422, "invalid_field");
    let link = server.made(alice, &format!("/v1/sandboxes/{id}/ports"), &json!({"port": 8000, "expires_in": 600}));
    let opened = link["path"].as_str().unwrap();
    assert_eq!(link["url"], format!("http://{}{opened}", server.address()));
    // A program gets the answer, a browser a cookie and an address without the link.
    let direct = get(&opened.replace("/?", "/x?a=b&"), &[]);
    assert_eq!((direct.status, direct.json()["line"].as_str()), (200, Some("GET /x?a=b HTTP/1.1")));
    let page = get(opened, &[("Accept", "text/html")]);
    assert_eq!((page.status, page.header("location")), (303, Some(root.as_str())));
    let cookie = page.header("set-cookie").unwrap();
    assert!(cookie.contains(&format!("Path={root}; ")) && cookie.contains("HttpOnly; SameSite=Lax"), "{cookie}");
    let cookie = cookie.split(';').next().unwrap();
    let by_cookie = get(&format!("{root}x"), &[("Cookie", &format!("app=1; {cookie}"))]);
    assert!(
        by_cookie.status == 200 && by_cookie.body.contains("app=1") && !by_cookie.body.contains("sandboxer_port"),
        "{}",
        by_cookie.body
    );
    // Another port, another sandbox, a changed time, nothing else of the API.
    assert_eq!(get(&opened.replace("8000", "8001"), &[]).status, 401);
    let other = server.made(alice, "/v1/sandboxes", &json!({}));
    assert_eq!(get(&opened.replace(id, other["id"].as_str().unwrap()), &[]).status, 401);
    assert_eq!(get(&opened.replace("link=1", "link=2"), &[]).status, 401);
    assert_eq!(get(&opened.replace("ports/8000/", "network"), &[]).status, 401);
    let short = server.made(alice, &format!("/v1/sandboxes/{id}/ports"), &json!({"port": 8000, "expires_in": 1}));
    let short = short["path"].as_str().unwrap().to_owned();
    eventually("the link expires", DEADLINE, || get(&short, &[]).status == 401).await;
}

#[tokio::test]
async fn a_local_port_is_forwarded_as_it_is() {
    let ws = serving(&SERVER, json!({})).await;
    let url = format!("http://{}", SERVER.address());
    let printed = sandboxer_e2e::command().args(["port", &ws.sandbox_id, "8000", "--server", &url]).output().unwrap();
    assert!(stdout_of(&printed).starts_with(&format!("http://8000-{}.localhost:", ws.sandbox_id)), "{}", stderr_of(&printed));
    let mut forward = sandboxer_e2e::command()
        .args(["port", &ws.sandbox_id, "8000", "-L", "0", "--server", &url])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(forward.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let local = line.split_whitespace().nth(2).unwrap().trim_end_matches(',').to_owned();
    for _ in 0..3 {
        let mut stream = TcpStream::connect(&local).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.write_all(b"GET /raw HTTP/1.1\r\nHost: anything\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.contains("GET /raw HTTP/1.1") && answer.contains("anything"), "{answer}");
    }
    forward.kill().unwrap();
    forward.wait().unwrap();
}

/// The page as Chromium draws it, scripts run.
fn drawn_by_chromium(url: &str) -> String {
    let chromium = ["/usr/bin/chromium", "/usr/bin/chromium-browser"]
        .into_iter()
        .find(|path| Path::new(path).exists())
        .expect("chromium: scripts/setup --dev");
    let profile = tempfile::tempdir().unwrap();
    let output = Command::new(chromium)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server"])
        // Whatever else it would look for is nowhere.
        .arg("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1")
        .args(["--timeout=60000", "--dump-dom", url])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .env("HOME", profile.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr_of(&output));
    stdout_of(&output)
}

#[tokio::test]
async fn a_browser_sees_a_page_of_a_server_inside_also_after_the_sandbox_was_handed_over() {
    let volume = Volume::default();
    let keys = ("SANDBOXER_API_KEYS", "alice:alice-0123456789abcdef");
    let [a, b] = [(); 2].map(|()| volume.options().env(keys.0, keys.1).start());
    let alice = Some(("Authorization", "Bearer alice-0123456789abcdef"));
    let made = a.made(alice, "/v1/sandboxes", &json!({"enable_checkpoint": true}));
    let (id, token) = (made["id"].as_str().unwrap(), made["token"].as_str().unwrap());
    let (status, _) = a.api(alice, "POST", &format!("/v1/sandboxes/{id}/executions"), &json!({"language": "python", "code": WEB}));
    assert!(status < 300, "{status}");
    let link = a.made(alice, &format!("/v1/sandboxes/{id}/ports"), &json!({"port": 8000}));
    let page = drawn_by_chromium(link["url"].as_str().unwrap());
    assert!(page.contains("drawn by a script of the page"), "{page}");
    let attach = format!("/attach/{id}");
    let mut ws =
        Ws::connect(b.address(), &attach, &[("Authorization", "Bearer alice-0123456789abcdef"), ("X-Sandbox-Token", token)]).await.unwrap();
    ws.expect_status("SANDBOX_RESTORING").await;
    ws.expect_running_after(DEADLINE).await;
    // The same link, at the instance where it is now.
    let page = drawn_by_chromium(&format!("http://{}{}", b.address(), link["path"].as_str().unwrap()));
    assert!(page.contains("drawn by a script of the page"), "{page}");
    let gone = http::try_get(a.address(), &format!("/v1/sandboxes/{id}/ports/8000/"), alice.as_slice()).unwrap();
    assert_eq!(gone.status, 409, "{}", gone.body);
}

/// A program with a connection through the proxy, one within the sandbox, and a server; it tells what becomes of them.
const ACROSS: &str = r#"
import os, socket, sys, threading
proxy = ('127.0.0.1', int(os.environ['all_proxy'].rsplit(':', 1)[1]))
def out():
    s = socket.create_connection(proxy)
    s.sendall(b'CONNECT other.test:PORT HTTP/1.1\r\n\r\n')
    got = b''
    while not got.endswith(b'hello\n'):
        piece = s.recv(100)
        if not piece: return None
        got += piece
    return s
listener = socket.create_server(('127.0.0.1', 8000))
near = socket.create_connection(('127.0.0.1', 8000)); far, _ = listener.accept()
outside = out()
print('ready', flush=True)
for number, line in enumerate(sys.stdin, 1):
    near.sendall(b'ping'); inner = far.recv(4) == b'ping'
    try: seen = 'end' if outside.recv(1) == b'' else 'data'
    except ConnectionResetError: seen = 'reset'
    outside = out()
    print(f'{number}: inside', inner, 'outside', seen, 'again', outside is not None, flush=True)
"#;

/// A connection from outside to the server inside, as it is: open, and nobody says anything.
fn reach_inside(server: &Server, id: &str) -> TcpStream {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let request = format!(
        "GET /v1/sandboxes/{id}/ports/8000/ HTTP/1.1\r\nHost: {}\r\nConnection: upgrade\r\nUpgrade: sandboxer-tcp\r\n\r\n",
        server.address()
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    assert!(head.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&head));
    stream
}

/// Its end, however it is told.
fn is_cut_off(mut stream: TcpStream) {
    match stream.read(&mut [0; 1]) {
        Ok(count) => assert_eq!(count, 0, "nobody said anything"),
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "it hangs"),
    }
}

#[tokio::test]
async fn connections_are_cut_off_cleanly_wherever_the_sandbox_goes_on_and_new_ones_work() {
    let internet = Internet::start();
    let volume = Volume::default();
    let options = || internet.options(volume.options());
    let (mut a, b) = (options().start(), options().start());
    let held = internet.port("held");
    let allow = json!([format!("other.test:{held}")]);
    let mut ws = Ws::create_with(&a, json!({"enable_checkpoint": true, "network": {"allow": allow}})).await;
    let id = ws.sandbox_id.clone();
    ws.start(json!({"language": "python", "code": ACROSS.replace("PORT", &held.to_string()), "execution_id": "e"})).await;
    ws.until_output("stdout", "ready\n").await;
    // By its number: what was said before may come again first, and says nothing of where the program is now.
    async fn go_on(ws: &mut Ws, number: u32) {
        ws.send(json!({"event": "stdin", "data": "\n"})).await;
        ws.until_output("stdout", &format!("{number}: inside True outside reset again True\n")).await;
    }
    // A server that is killed, and comes back.
    a.kill9();
    a.restart();
    let mut ws = Ws::attach(&a, &id).await;
    ws.may_repeat();
    go_on(&mut ws, 1).await;
    // Back to what was saved.
    ws.send(json!({"action": "snapshot"})).await;
    ws.expect_status("SANDBOX_SNAPSHOT_CREATING").await;
    let snapshot = ws.expect_status("SANDBOX_SNAPSHOT_CREATED").await["snapshot_id"].clone();
    let (from_outside, resets) = (reach_inside(&a, &id), internet.resets());
    ws.send(json!({"action": "rollback", "snapshot_id": snapshot})).await;
    ws.expect_status("SANDBOX_RESTORING").await;
    ws.expect_running_after(DEADLINE).await;
    // Both ends see it, and those who came from outside.
    eventually("the server outside sees a reset", DEADLINE, || internet.resets() > resets).await;
    is_cut_off(from_outside);
    go_on(&mut ws, 2).await;
    // To another instance.
    let (from_outside, resets) = (reach_inside(&a, &id), internet.resets());
    ws.close().await;
    let (mut ws, _) = Ws::reach(&b, &id).await;
    ws.may_repeat();
    eventually("the server outside sees a reset", DEADLINE, || internet.resets() > resets).await;
    is_cut_off(from_outside);
    go_on(&mut ws, 3).await;
    drop(reach_inside(&b, &id));
    // A copy has none of its connections either, and its server listens.
    let copies = b.made(None, &format!("/v1/sandboxes/{id}/fork"), &json!({"count": 1}));
    let copy = copies["items"][0]["id"].as_str().unwrap().to_owned();
    let mut copied = Ws::attach(&b, &copy).await;
    copied.may_repeat();
    go_on(&mut copied, 4).await;
}

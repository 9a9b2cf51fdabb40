//! Clients that were written for other servers of this protocol, in Python and in TypeScript. What they send stands here as they send it, letter by letter;
//! of what comes they know `event`, `status`, `sandbox_id`, `sandbox_token`, `data` and `message`, and ignore the rest.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use sandboxer_e2e::{DEADLINE, Incoming, Options, Server, Volume, Ws};

const KEY: &str = "a-key-of-the-tests-0123456789";
/// What Python's websockets and Node's ws say of themselves and offer; whatever is offered need not be taken up.
const PYTHON: [(&str, &str); 2] =
    [("User-Agent", "Python/3.11 websockets/12.0"), ("Sec-WebSocket-Extensions", "permessage-deflate; client_max_window_bits")];
const NODE: [(&str, &str); 1] = [("Sec-WebSocket-Extensions", "permessage-deflate; client_max_window_bits")];

/// All that such a client makes of a connection.
struct Client {
    ws: Ws,
    /// The sandbox was there before it.
    attached: bool,
    sandbox_id: String,
    token: String,
    stdout: String,
    stderr: String,
    errors: Vec<String>,
}

/// What it was waiting for.
#[derive(Debug, PartialEq)]
enum Heard {
    Status(String),
    Closed(u16),
}

fn status(text: &str) -> Heard {
    Heard::Status(text.to_owned())
}

impl Client {
    async fn connect(server: &Server, path: &str, headers: &[(&str, &str)]) -> Self {
        let mut ws = Ws::connect(server.address(), path, headers).await.unwrap();
        // It does not look at offsets; where it must not see anything twice, the test says so.
        ws.repeats_allowed = true;
        Self {
            ws,
            attached: path.starts_with("/attach"),
            sandbox_id: String::new(),
            token: String::new(),
            stdout: String::new(),
            stderr: String::new(),
            errors: Vec::new(),
        }
    }

    async fn send(&mut self, text: &str) {
        self.ws.send_text(text).await;
    }

    /// The next status, or the end. Everything else that it knows is noted on the way.
    async fn next(&mut self) -> Heard {
        loop {
            let message = match self.ws.incoming_within(DEADLINE).await.expect("nothing comes") {
                Incoming::Message(message) => message,
                Incoming::Closed(code) => return Heard::Closed(code),
                Incoming::Dropped => panic!("the connection was cut"),
            };
            let text = |field: &str| message[field].as_str().unwrap_or_else(|| panic!("no {field} in {message}")).to_owned();
            match text("event").as_str() {
                "status_update" => return Heard::Status(text("status")),
                "sandbox_id" => (self.sandbox_id, self.token) = (text("sandbox_id"), text("sandbox_token")),
                "stdout" => self.stdout += &text("data"),
                "stderr" => self.stderr += &text("data"),
                "error" => self.errors.push(text("message")),
                _ => {}
            }
        }
    }

    async fn expect(&mut self, statuses: &[&str]) {
        for expected in statuses {
            assert_eq!(self.next().await, status(expected), "{:?}", self.errors);
        }
    }

    /// Runs a program to its end and returns what it wrote to stdout.
    async fn run(&mut self, request: &str) -> String {
        self.send(request).await;
        let mut heard = self.next().await;
        // A save right behind the end of a program may lose that the client has heard of it: then it is told again, with its output.
        if self.attached && heard == status("SANDBOX_EXECUTION_DONE") {
            heard = self.next().await;
        }
        assert_eq!(heard, status("SANDBOX_EXECUTION_RUNNING"), "{:?}", self.errors);
        self.stdout.clear();
        self.expect(&["SANDBOX_EXECUTION_DONE"]).await;
        std::mem::take(&mut self.stdout)
    }
}

/// As `json.dumps` writes: a blank behind each colon and comma, no letters beyond ASCII.
async fn a_session_in_python(server: &Server, headers: &[(&str, &str)]) {
    let headers: Vec<(&str, &str)> = headers.iter().chain(&PYTHON).copied().collect();
    let mut client = Client::connect(server, "/create", &headers).await;
    // It sends its configuration without having heard anything, with fields of its own.
    client
        .send(
            r#"{"idle_timeout": 120, "enable_checkpoint": true, "client": {"name": "sandbox-python", "version": "0.3.1"}, "debug": false}"#,
        )
        .await;
    client.expect(&["SANDBOX_CREATING", "SANDBOX_RUNNING"]).await;
    assert!(!client.sandbox_id.is_empty() && !client.token.is_empty());
    assert_eq!(client.run(r#"{"language": "python", "code": "print('gr\u00fc\u00dfe \ud83d\ude00')"}"#).await, "grüße 😀\n");
    assert_eq!(client.run(r#"{"language": "bash", "code": "echo out; echo err >&2", "session": null, "retries": 3}"#).await, "out\n");
    assert_eq!(client.stderr, "err\n");

    // Input, before it has heard that the program runs.
    client.send(r#"{"language": "bash", "code": "read -r a; read -r b; echo $b $a"}"#).await;
    client.send(r#"{"event": "stdin", "data": "one\n"}"#).await;
    client.send(r#"{"event": "stdin", "data": "two\n", "seq": 2}"#).await;
    client.expect(&["SANDBOX_EXECUTION_RUNNING", "SANDBOX_EXECUTION_DONE"]).await;
    assert_eq!(std::mem::take(&mut client.stdout), "two one\n");

    // What is killed says so, and is done; where nothing runs it only says so.
    client.send(r#"{"language": "python", "code": "import time\nwhile True: time.sleep(1)"}"#).await;
    client.expect(&["SANDBOX_EXECUTION_RUNNING"]).await;
    client.send(r#"{"action": "kill_process"}"#).await;
    client.expect(&["SANDBOX_EXECUTION_FORCE_KILLED", "SANDBOX_EXECUTION_DONE"]).await;
    client.send(r#"{"action": "kill_process", "reason": "user"}"#).await;
    client.expect(&["SANDBOX_EXECUTION_FORCE_KILLED"]).await;

    // A language that there is not, and a request without code: told, and the connection stays.
    client.send(r#"{"language": "cobol", "code": "DISPLAY 'HELLO'"}"#).await;
    client.expect(&["SANDBOX_EXECUTION_UNSUPPORTED_LANGUAGE_ERROR", "SANDBOX_EXECUTION_DONE"]).await;
    client.send(r#"{"language": "python"}"#).await;
    client.expect(&["SANDBOX_EXECUTION_ERROR"]).await;
    assert_eq!(client.run(r#"{"language": "bash", "code": "echo still here"}"#).await, "still here\n");
    assert_eq!(client.errors.len(), 2, "{:?}", client.errors);

    // It is cut off from a program that goes on, and comes back with its token in the address, without any offset.
    client.send(r#"{"language": "bash", "code": "echo before; read -r line; echo $line"}"#).await;
    client.expect(&["SANDBOX_EXECUTION_RUNNING"]).await;
    let (id, token) = (client.sandbox_id, client.token);
    client.ws.vanish();
    let path = format!("/attach/{id}?sandbox_token={token}");
    let mut client = Client::connect(server, &path, &headers).await;
    client.expect(&["SANDBOX_RUNNING"]).await;
    client.send(r#"{"action": "reconnect"}"#).await;
    client.send(r#"{"event": "stdin", "data": "after\n"}"#).await;
    client.expect(&["SANDBOX_EXECUTION_DONE"]).await;
    assert_eq!(client.stdout, "before\nafter\n");

    // One that knows nothing of `reconnect` gets the rest too.
    client.send(r#"{"language": "bash", "code": "read -r line; echo $line"}"#).await;
    client.expect(&["SANDBOX_EXECUTION_RUNNING"]).await;
    client.ws.close().await;
    let mut client = Client::connect(server, &path, &headers).await;
    client.expect(&["SANDBOX_RUNNING"]).await;
    client.send(r#"{"event": "stdin", "data": "silently\n"}"#).await;
    client.expect(&["SANDBOX_EXECUTION_DONE"]).await;
    assert_eq!(client.stdout, "silently\n");

    // Saved, and gone on with.
    client.send(r#"{"action": "checkpoint"}"#).await;
    client.expect(&["SANDBOX_CHECKPOINTING", "SANDBOX_CHECKPOINTED"]).await;
    assert_eq!(client.next().await, Heard::Closed(1000));
    let mut client = Client::connect(server, &path, &headers).await;
    client.expect(&["SANDBOX_RESTORING", "SANDBOX_RUNNING"]).await;
    assert_eq!(client.run(r#"{"language": "bash", "code": "echo restored"}"#).await, "restored\n");

    client.send(r#"{"action": "kill_sandbox"}"#).await;
    client.expect(&["SANDBOX_KILLING", "SANDBOX_KILLED"]).await;
    assert_eq!(client.next().await, Heard::Closed(1000));
}

#[tokio::test]
async fn the_client_in_python_works_unchanged() {
    let volume = Volume::default();
    let server = volume.options().start();
    a_session_in_python(&server, &[]).await;
}

#[tokio::test]
async fn the_client_in_python_works_unchanged_where_keys_are_asked_for() {
    let volume = Volume::default();
    let server = volume.options().env("SANDBOXER_API_KEYS", KEY).start();
    a_session_in_python(&server, &[("Authorization", &format!("Bearer {KEY}"))]).await;
    // Without its token it is not let in, and is told before anything else.
    let mut client = Client::connect(&server, "/create", &[("X-API-Key", KEY)]).await;
    client.expect(&["SANDBOX_CREATING", "SANDBOX_RUNNING"]).await;
    client.ws.close().await;
    let path = format!("/attach/{}?sandbox_token=another", client.sandbox_id);
    let mut client = Client::connect(&server, &path, &[("X-API-Key", KEY)]).await;
    client.expect(&["SANDBOX_PERMISSION_DENIAL_ERROR"]).await;
    assert_eq!(client.next().await, Heard::Closed(4000));
    assert_eq!(client.errors.len(), 1);
}

/// As `JSON.stringify` writes: no blanks, letters as they are, `undefined` left out and `null` written.
#[tokio::test]
async fn the_client_in_typescript_that_configures_nothing_works_unchanged() {
    let server = Options::default().start();
    let mut client = Client::connect(&server, "/create", &NODE).await;
    // It waits for its sandbox before it says anything.
    client.expect(&["SANDBOX_CREATING", "SANDBOX_RUNNING"]).await;
    assert_eq!(
        client.run(r#"{"language":"python","code":"print('hello — wörld')","execution_id":null,"cwd":null}"#).await,
        "hello — wörld\n"
    );
    // One at a time: the second is refused, and the first is not disturbed.
    client.send(r#"{"language":"bash","code":"read -r line; echo $line"}"#).await;
    client.expect(&["SANDBOX_EXECUTION_RUNNING"]).await;
    client.send(r#"{"language":"bash","code":"echo second"}"#).await;
    client.expect(&["SANDBOX_EXECUTION_ERROR"]).await;
    client.send(r#"{"event":"stdin","data":"first\n","timestamp":1731800000000.5}"#).await;
    client.expect(&["SANDBOX_EXECUTION_DONE"]).await;
    assert_eq!(client.stdout, "first\n");
    assert_eq!(client.errors.len(), 1, "{:?}", client.errors);
    // A message that nobody knows is told, and does no harm.
    client.send(r#"{"type":"ping"}"#).await;
    assert_eq!(client.run(r#"{"language":"bash","code":"echo third"}"#).await, "third\n");
    assert_eq!(client.errors.len(), 2, "{:?}", client.errors);

    // Somebody else is told that it is in use; when it has left, the id alone opens it here.
    let path = format!("/attach/{}", client.sandbox_id);
    let refused = async {
        let mut other = Client::connect(&server, &path, &NODE).await;
        other.expect(&["SANDBOX_IN_USE"]).await;
        assert_eq!(other.next().await, Heard::Closed(1011));
    };
    // Whoever is attached answers pings meanwhile, as every WebSocket does by itself.
    tokio::select! {
        () = refused => {}
        heard = client.next() => panic!("{heard:?}"),
    }
    client.ws.close().await;
    let mut client = Client::connect(&server, &path, &NODE).await;
    client.expect(&["SANDBOX_RUNNING"]).await;
    client.send(r#"{"action":"reconnect"}"#).await;
    client.send(r#"{"action":"kill_sandbox"}"#).await;
    while client.next().await != status("SANDBOX_KILLING") {}
    client.expect(&["SANDBOX_KILLED"]).await;
    assert_eq!(client.next().await, Heard::Closed(1000));
    let mut client = Client::connect(&server, &path, &NODE).await;
    client.expect(&["SANDBOX_NOT_FOUND"]).await;
    assert_eq!(client.next().await, Heard::Closed(1011));
}

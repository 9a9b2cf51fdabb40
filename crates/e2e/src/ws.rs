//! A client that checks what it is told: every piece of output fits the one before, and whatever is not expected is a failure.

use std::{
    collections::HashMap,
    net::SocketAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::{net::TcpStream, time::timeout};
use tokio_tungstenite::{
    WebSocketStream, client_async_with_config,
    tungstenite::{
        Error, Message,
        client::IntoClientRequest,
        http::{HeaderName, HeaderValue},
        protocol::WebSocketConfig,
    },
};

use crate::{DEADLINE, Outcome, Server, output::data_of, server::tail};

/// How long a sandbox may take to come from an instance that died.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// What the server may do next.
#[derive(Debug, Clone, PartialEq)]
pub enum Incoming {
    Message(Value),
    Closed(u16),
    /// The connection ended without a close frame.
    Dropped,
}

#[derive(Debug)]
pub struct Ws {
    stream: WebSocketStream<TcpStream>,
    transcript: Vec<String>,
    log: Option<PathBuf>,
    start: Instant,
    /// Where each stream of each execution has to go on.
    ends: HashMap<(String, String), u64>,
    /// An execution may be resumed here whose start was not seen.
    attached: bool,
    /// Pieces may come again; the test puts them together by offset itself.
    pub repeats_allowed: bool,
    /// `SANDBOX_WAITING` is not passed over.
    pub hears_waiting: bool,
    pub sandbox_id: String,
    pub sandbox_token: String,
}

impl Ws {
    /// Connects to any path of any address.
    ///
    /// # Errors
    /// The HTTP status with which the upgrade was refused; 0 if there was no answer.
    pub async fn connect(address: SocketAddr, path: &str, headers: &[(&str, &str)]) -> Result<Self, u16> {
        let mut request = format!("ws://{address}{path}").into_client_request().unwrap();
        for (name, value) in headers {
            let name: HeaderName = name.parse().unwrap();
            request.headers_mut().insert(name, HeaderValue::from_str(value).unwrap());
        }
        let stream = TcpStream::connect(address).await.map_err(|_| 0_u16)?;
        let _ = stream.set_nodelay(true);
        let config = WebSocketConfig::default().max_message_size(None).max_frame_size(None);
        match timeout(DEADLINE, client_async_with_config(request, stream, Some(config))).await.expect("no answer to the handshake") {
            Ok((stream, _)) => Ok(Self {
                stream,
                transcript: vec![format!("connected to {path}")],
                log: None,
                start: Instant::now(),
                ends: HashMap::new(),
                attached: path.starts_with("/attach"),
                repeats_allowed: false,
                hears_waiting: false,
                sandbox_id: String::new(),
                sandbox_token: String::new(),
            }),
            Err(Error::Http(response)) => Err(response.status().as_u16()),
            Err(_) => Err(0),
        }
    }

    /// Connects to a path of this server, whose log is shown if the test fails.
    pub async fn open(server: &Server, path: &str) -> Self {
        let mut ws = Self::connect(server.address(), path, &[]).await.unwrap_or_else(|status| panic!("{path} is refused with {status}"));
        ws.log = Some(server.log_path().to_owned());
        ws
    }

    /// A sandbox with the defaults, running.
    pub async fn create(server: &Server) -> Self {
        Self::create_with(server, json!({})).await
    }

    /// A sandbox with this configuration, running.
    pub async fn create_with(server: &Server, configuration: Value) -> Self {
        let mut ws = Self::open(server, "/create").await;
        ws.send(configuration).await;
        ws.expect_created().await;
        ws
    }

    /// A running sandbox, attached.
    pub async fn attach(server: &Server, sandbox_id: &str) -> Self {
        let mut ws = Self::open(server, &format!("/attach/{sandbox_id}")).await;
        sandbox_id.clone_into(&mut ws.sandbox_id);
        ws.expect_status("SANDBOX_RUNNING").await;
        ws
    }

    /// `SANDBOX_RUNNING` is the next thing to come, within this time.
    pub async fn expect_running_after(&mut self, time: Duration) -> Value {
        match self.incoming_within(time).await {
            Some(Incoming::Message(message)) if message["status"] == "SANDBOX_RUNNING" => message,
            other => panic!("SANDBOX_RUNNING was expected, not {other:?}"),
        }
    }

    /// `SANDBOX_CREATING` → `sandbox_id` → `SANDBOX_RUNNING`.
    pub async fn expect_created(&mut self) {
        self.expect_status("SANDBOX_CREATING").await;
        self.expect_running_with_id().await;
    }

    /// `sandbox_id` → `SANDBOX_RUNNING`.
    pub async fn expect_running_with_id(&mut self) {
        let message = self.next().await;
        assert_eq!(message["event"], "sandbox_id", "{message}");
        self.sandbox_id = message["sandbox_id"].as_str().unwrap().to_owned();
        self.sandbox_token = message["sandbox_token"].as_str().unwrap().to_owned();
        self.expect_status("SANDBOX_RUNNING").await;
    }

    pub async fn send(&mut self, message: Value) {
        self.send_text(message.to_string()).await;
    }

    pub async fn send_text(&mut self, text: impl Into<String>) {
        self.try_send(Message::text(text.into())).await.unwrap();
    }

    pub async fn send_binary(&mut self, bytes: Vec<u8>) {
        self.try_send(Message::binary(bytes)).await.unwrap();
    }

    /// # Errors
    /// The connection does not take it.
    pub async fn try_send(&mut self, message: Message) -> Result<(), String> {
        self.note(format!("→ {}", shorten(&message.to_string())));
        timeout(DEADLINE, self.stream.send(message)).await.map_err(|_| "timed out")?.map_err(|error| error.to_string())
    }

    /// The next thing to happen. Pings are answered on the way.
    pub async fn incoming(&mut self) -> Incoming {
        match self.incoming_within(DEADLINE).await {
            Some(incoming) => incoming,
            None => panic!("nothing came within {DEADLINE:?}"),
        }
    }

    /// The next thing to happen, if anything does in this time. Cancel-safe.
    pub async fn incoming_within(&mut self, time: Duration) -> Option<Incoming> {
        let deadline = tokio::time::Instant::now() + time;
        loop {
            let received = tokio::time::timeout_at(deadline, self.stream.next()).await.ok()?;
            let incoming = match received {
                // A slow disk is told of too. Clients that don't know this status ignore it.
                Some(Ok(Message::Text(text))) if !self.hears_waiting && text.contains("\"SANDBOX_WAITING\"") => continue,
                Some(Ok(Message::Text(text))) => {
                    self.note(format!("← {}", shorten(&text)));
                    let message = serde_json::from_str(&text).unwrap_or_else(|error| panic!("the server sent no JSON: {error}"));
                    self.check(&message);
                    Incoming::Message(message)
                }
                Some(Ok(Message::Ping(_))) => {
                    // The library has queued the answer; make sure that it leaves.
                    let _ = self.stream.flush().await;
                    continue;
                }
                Some(Ok(Message::Pong(_))) => continue,
                Some(Ok(Message::Close(frame))) => {
                    let code = frame.as_ref().map_or(1005, |frame| frame.code.into());
                    self.note(format!("← close {code}"));
                    // Answers the close.
                    let _ = self.stream.flush().await;
                    Incoming::Closed(code)
                }
                Some(Ok(other)) => panic!("the server sent {other:?}"),
                Some(Err(error)) => {
                    self.note(format!("← {error}"));
                    Incoming::Dropped
                }
                None => Incoming::Dropped,
            };
            return Some(incoming);
        }
    }

    pub async fn next(&mut self) -> Value {
        match self.incoming().await {
            Incoming::Message(message) => message,
            other => panic!("a message was expected, not {other:?}"),
        }
    }

    /// The next message is this status. An error status says what happened.
    pub async fn expect_status(&mut self, status: &str) -> Value {
        let message = self.next().await;
        assert_eq!((&message["event"], &message["status"]), (&json!("status_update"), &json!(status)), "{message}");
        let tells = status.contains("ERROR") || matches!(status, "SANDBOX_NOT_FOUND" | "SANDBOX_IN_USE" | "SANDBOX_HANDOFF_IN_PROGRESS");
        if tells {
            assert!(message["message"].as_str().is_some_and(|text| text.len() > 10), "an error status says what happened: {message}");
        }
        message
    }

    /// The next message is an `error` with this code.
    pub async fn expect_error(&mut self, code: &str) -> Value {
        let message = self.next().await;
        assert_eq!((&message["event"], &message["code"]), (&json!("error"), &json!(code)), "{message}");
        assert!(message["message"].as_str().is_some_and(|text| text.len() > 10), "an error says what happened: {message}");
        message
    }

    /// The server closes now, with this code.
    pub async fn expect_close(&mut self, code: u16) {
        let incoming = self.incoming().await;
        assert_eq!(incoming, Incoming::Closed(code));
    }

    /// Closes as a client does that reads to the end.
    pub async fn close(mut self) {
        self.note("→ close".to_owned());
        let _ = self.stream.close(None).await;
        while let Some(Incoming::Message(_)) = self.incoming_within(DEADLINE).await {}
    }

    /// From here on, what was not acknowledged before may be said again: it went back, or was found again.
    pub fn may_repeat(&mut self) {
        self.attached = true;
        self.repeats_allowed = true;
    }

    /// Drops the connection without a word.
    pub fn vanish(self) {
        drop(self);
    }

    /// Sends an execution request and waits until it is done.
    pub async fn run(&mut self, request: Value) -> Outcome {
        self.start(request).await;
        let outcome = self.until_done().await;
        assert!(outcome.between.is_empty(), "unexpected messages: {:?}", outcome.between);
        outcome
    }

    /// Sends an execution request and waits until it runs. Behind an attach, what the client before may not have seen may come first.
    pub async fn start(&mut self, request: Value) {
        self.send(request).await;
        let mut message = self.next().await;
        while self.attached
            && (matches!(message["event"].as_str(), Some("stdout" | "stderr")) || message["status"] == "SANDBOX_EXECUTION_DONE")
        {
            message = self.next().await;
        }
        assert_eq!(message["status"], "SANDBOX_EXECUTION_RUNNING", "{message}");
    }

    pub async fn bash(&mut self, code: &str) -> Outcome {
        self.run(json!({"language": "bash", "code": code})).await
    }

    pub async fn python(&mut self, code: &str) -> Outcome {
        self.run(json!({"language": "python", "code": code})).await
    }

    /// Collects everything up to `SANDBOX_EXECUTION_DONE`.
    pub async fn until_done(&mut self) -> Outcome {
        let mut outcome = Outcome { stdout: Vec::new(), stderr: Vec::new(), done: Value::Null, between: Vec::new(), pieces: 0 };
        loop {
            let message = self.next().await;
            match message["event"].as_str() {
                Some("stdout") => outcome.stdout.extend(data_of(&message)),
                Some("stderr") => outcome.stderr.extend(data_of(&message)),
                _ if message["status"] == "SANDBOX_EXECUTION_DONE" => {
                    outcome.done = message;
                    return outcome;
                }
                _ => {
                    outcome.between.push(message);
                    continue;
                }
            }
            outcome.pieces += 1;
        }
    }

    /// Reads output of one stream until it contains `text`; returns what came.
    pub async fn until_output(&mut self, stream: &str, text: &str) -> String {
        let mut seen = String::new();
        while !seen.contains(text) {
            let message = self.next().await;
            assert_eq!(message["event"], stream, "{message}; so far: {seen:?}");
            seen += message["data"].as_str().unwrap();
        }
        seen
    }

    /// The connection is open and the sandbox answers, with nothing left to be said before.
    pub async fn expect_alive(&mut self) {
        assert_eq!(self.bash("echo alive").await.ok(), "alive\n");
    }

    fn check(&mut self, message: &Value) {
        let event = message["event"].as_str().unwrap_or_else(|| panic!("a message without event: {message}"));
        if event != "stdout" && event != "stderr" {
            return;
        }
        let id = message["execution_id"].as_str().unwrap_or_else(|| panic!("output without execution_id: {message}"));
        let (offset, end) = (message["offset"].as_u64().unwrap(), message["end"].as_u64().unwrap());
        let data = message["data"].as_str().unwrap();
        assert!(end > offset, "an empty piece: {message}");
        if !data.contains('\u{fffd}') {
            let length = data_of(message).len() as u64;
            assert_eq!(length, end - offset, "offset {offset} and end {end} don't fit {length} bytes of data");
        }
        let key = (id.to_owned(), event.to_owned());
        let expected = self.ends.insert(key, end);
        match expected {
            _ if self.repeats_allowed => {}
            None if self.attached => {}
            expected => assert_eq!(offset, expected.unwrap_or(0), "{event} does not go on where it stopped"),
        }
    }

    fn note(&mut self, text: String) {
        self.transcript.push(format!("{:>8.3} {text}", self.start.elapsed().as_secs_f64()));
    }
}

impl Drop for Ws {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let skip = self.transcript.len().saturating_sub(80);
        eprintln!("--- transcript of {} ---\n{}", self.sandbox_id, self.transcript[skip..].join("\n"));
        if let Some(log) = &self.log {
            eprintln!("--- the end of the server's log ---\n{}", tail(log, 30));
        }
    }
}

pub(crate) fn shorten(text: &str) -> String {
    const MOST: usize = 300;
    match text.char_indices().nth(MOST) {
        Some((at, _)) => format!("{}… ({} bytes)", &text[..at], text.len()),
        None => text.to_owned(),
    }
}

//! Random sequences of requests, cuts, reconnects and restarts of the server, on the fake runtime, against a model: a text a stream.
//!
//! Whatever happens in between, every byte of every execution arrives in order under its own offset, the end is told, and nothing runs twice.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a failed unwrap is a failed test")]

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures_util::{SinkExt as _, StreamExt as _};
use proptest::{
    prelude::*,
    test_runner::{Config, RngSeed},
};
use sandboxer_runtime::{FakeRuntime, HostLimits};
use sandboxer_server::{Images, Server, Settings, StopHow};
use serde_json::{Value, json};
use tokio::{net::TcpStream, sync::oneshot, task::JoinHandle, time::timeout};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async, tungstenite::Message};

const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Debug, Clone)]
enum Step {
    /// A program that prints numbered lines on both streams, then its input to its end, and exits with a code.
    Execute {
        lines: u16,
        code: u8,
    },
    /// Another one while that runs, which is refused.
    Intrude,
    /// A program that can't be started.
    Fail,
    Read(u8),
    /// Some more input, and so much of what was sent before once again.
    Input {
        more: u8,
        again: u8,
    },
    /// Lose the connection, and attach again in one of the ways that there are.
    Cut(Back),
    /// Restart the server, and attach again.
    Restart(Back),
    /// Say several times where the output goes on, with the connection still there.
    Reconnect(u8),
    Acknowledge,
    AcknowledgeTheFuture,
    Finish,
    Kill,
    Nonsense,
}

#[derive(Debug, Clone, Copy)]
enum Back {
    ByOffset,
    ByRequest,
    Silently,
}

fn step() -> impl Strategy<Value = Step> {
    let back = || prop_oneof![Just(Back::ByOffset), Just(Back::ByRequest), Just(Back::Silently)];
    prop_oneof![
        4 => (0u16..400, any::<u8>()).prop_map(|(lines, code)| Step::Execute { lines, code }),
        1 => Just(Step::Intrude),
        1 => Just(Step::Fail),
        4 => (0u8..30).prop_map(Step::Read),
        4 => (any::<u8>(), any::<u8>()).prop_map(|(more, again)| Step::Input { more, again }),
        4 => back().prop_map(Step::Cut),
        1 => back().prop_map(Step::Restart),
        2 => (1u8..5).prop_map(Step::Reconnect),
        2 => Just(Step::Acknowledge),
        1 => Just(Step::AcknowledgeTheFuture),
        3 => Just(Step::Finish),
        1 => Just(Step::Kill),
        1 => Just(Step::Nonsense),
    ]
}

#[test]
fn every_byte_arrives_once_whatever_happens_in_between() {
    let cases = if std::env::var_os("SANDBOXER_SOAK").is_some() { 2000 } else { 60 };
    let config =
        Config { cases, rng_seed: RngSeed::Fixed(0x5a5a), failure_persistence: None, max_shrink_time: 300_000, ..Config::default() };
    proptest!(config, |(steps in proptest::collection::vec(step(), 1..25))| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let dir = tempfile::tempdir().unwrap();
            let mut world = World::start(dir.path()).await;
            for step in steps {
                world.take(step).await;
            }
            world.finish().await;
            world.stop(StopHow::Drain).await;
            assert!(world.server.runtime.ids().is_empty(), "a sandbox is left");
            assert_eq!(std::fs::read_dir(dir.path().join("sandboxes")).unwrap().count(), 0, "a directory is left");
        });
    });
}

/// A server on the fake runtime, which outlives it.
struct Running {
    runtime: FakeRuntime,
    address: SocketAddr,
    stop: Option<oneshot::Sender<StopHow>>,
    task: JoinHandle<()>,
}

impl Running {
    async fn start(runtime: FakeRuntime, dir: &Path) -> Self {
        let settings = Settings::new("127.0.0.1:0".parse().unwrap(), dir.to_owned());
        let images = Images::fixed("/no/image".into());
        let server = Server::start(settings, Arc::new(runtime.clone()), images, HostLimits::none("a test")).await.unwrap();
        let address = server.address().unwrap();
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(server.serve(async { stopped.await.unwrap_or(StopHow::Restart) }));
        Self { runtime, address, stop: Some(stop), task }
    }

    async fn stop(&mut self, how: StopHow) {
        self.stop.take().unwrap().send(how).unwrap();
        (&mut self.task).await.unwrap();
    }
}

/// What the model knows of the execution, and what was heard of it.
#[derive(Debug, Default)]
struct Expected {
    number: u32,
    lines: u16,
    code: u8,
    running: bool,
    killed: bool,
    out: String,
    err: String,
    input: String,
    /// The agent has so much of it.
    taken: usize,
}

impl Expected {
    fn id(&self) -> String {
        format!("run-{}", self.number)
    }

    fn request(&self) -> Value {
        let Self { number, lines, code, .. } = self;
        let body = format!("for i in $(seq 1 {lines}); do echo out {number} $i; echo err {number} $i >&2; done; cat; exit {code}");
        json!({"language": "bash", "code": body, "execution_id": self.id()})
    }

    fn text(&self, stream: &str) -> String {
        let (word, input) = if stream == "stdout" { ("out", self.input.as_str()) } else { ("err", "") };
        (1..=self.lines).map(|i| format!("{word} {} {i}\n", self.number)).chain([input.to_owned()]).collect()
    }

    /// All input from some offset on: what of it was lost with a connection is then there, and the rest is not taken twice.
    fn input_from(&self, offset: usize) -> Value {
        json!({"event": "stdin", "data": &self.input[offset..], "offset": offset})
    }

    fn offsets(&self, action: &str, beyond: usize) -> Value {
        let (out, err) = (self.out.len() + beyond, self.err.len() + beyond);
        json!({"action": action, "execution_id": self.id(), "stdout_offset": out, "stderr_offset": err})
    }
}

struct World {
    dir: PathBuf,
    server: Running,
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    id: String,
    expected: Expected,
}

impl World {
    async fn start(dir: &Path) -> Self {
        let server = Running::start(FakeRuntime::new(), dir).await;
        let (mut socket, _) = connect_async(format!("ws://{}/create", server.address)).await.unwrap();
        socket.send(Message::text("{}")).await.unwrap();
        let mut id = String::new();
        loop {
            let message = next(&mut socket).await.expect("the sandbox is made");
            if let Some(given) = message["sandbox_id"].as_str() {
                id = given.to_owned();
            }
            if message["status"] == "SANDBOX_RUNNING" {
                return Self { dir: dir.to_owned(), server, socket, id, expected: Expected::default() };
            }
        }
    }

    async fn send(&mut self, message: Value) {
        self.socket.send(Message::text(message.to_string())).await.unwrap();
    }

    async fn take(&mut self, step: Step) {
        let known = self.expected.number > 0;
        match step {
            Step::Execute { lines, code } => {
                self.finish().await;
                self.expected = Expected { number: self.expected.number + 1, lines, code, running: true, ..Expected::default() };
                self.send(self.expected.request()).await;
                self.await_status("SANDBOX_EXECUTION_RUNNING").await;
            }
            Step::Intrude if self.expected.running => {
                self.send(json!({"language": "bash", "code": "echo intruder", "execution_id": "intruder"})).await;
                self.await_status("SANDBOX_EXECUTION_ERROR").await;
            }
            Step::Fail if !self.expected.running => {
                self.send(json!({"language": "cobol", "code": ""})).await;
                self.await_status("SANDBOX_EXECUTION_UNSUPPORTED_LANGUAGE_ERROR").await;
                self.await_status("SANDBOX_EXECUTION_DONE").await;
            }
            Step::Nonsense => {
                self.send(json!({"action": "nonsense"})).await;
                self.await_error("unknown_action").await;
            }
            Step::Input { more, again } if self.expected.running => {
                // What follows what may be lost begins where it was surely taken.
                let from = self.expected.taken.min(self.expected.input.len().saturating_sub(again.into()));
                self.expected.input.extend((0..more).map(|n| char::from(b'a' + (n % 26))));
                self.send(self.expected.input_from(from)).await;
            }
            Step::Read(count) => {
                for _ in 0..count {
                    let Ok(Some(message)) = timeout(Duration::from_millis(5), next(&mut self.socket)).await else { break };
                    self.hear(&message);
                }
            }
            Step::Cut(back) => self.attach(back).await,
            Step::Restart(back) => {
                self.stop(StopHow::Restart).await;
                self.server = Running::start(self.server.runtime.clone(), &self.dir).await;
                self.attach(back).await;
            }
            Step::Reconnect(times) if known => self.reconnect(times).await,
            Step::Acknowledge if known => self.send(self.expected.offsets("ack", 0)).await,
            Step::AcknowledgeTheFuture if known => {
                self.send(self.expected.offsets("ack", 1 << 40)).await;
                self.await_error("invalid_field").await;
            }
            Step::Finish => self.finish().await,
            Step::Kill if self.expected.running => {
                self.expected.killed = true;
                self.send(json!({"action": "kill_process"})).await;
                self.until_done().await;
            }
            _ => {}
        }
    }

    /// Stops the server while the client reads to the end of what it says.
    async fn stop(&mut self, how: StopHow) {
        let mut last = Vec::new();
        let reading = async {
            while let Some(message) = next(&mut self.socket).await {
                last.push(message);
            }
            // Reading on answers the close.
            while let Some(Ok(_)) = self.socket.next().await {}
        };
        tokio::join!(self.server.stop(how), reading);
        last.iter().for_each(|message| self.hear(message));
    }

    async fn reconnect(&mut self, times: u8) {
        for _ in 0..times {
            self.send(self.expected.offsets("reconnect", 0)).await;
        }
        // Only the last question needs an answer; whoever asks again before one came asks for that one.
        let id = self.expected.id();
        self.until(|message| message["event"] == "resumed" && message["execution_id"] == id).await;
    }

    async fn attach(&mut self, back: Back) {
        // The old connection goes without a word; the server finds out by itself.
        let (socket, _) = connect_async(format!("ws://{}/attach/{}", self.server.address, self.id)).await.unwrap();
        drop(std::mem::replace(&mut self.socket, socket));
        let first = next(&mut self.socket).await.expect("an answer");
        assert_eq!(first["status"], "SANDBOX_RUNNING", "{first}");
        match back {
            Back::ByOffset if self.expected.number > 0 => self.reconnect(1).await,
            Back::ByRequest if self.expected.running => {
                self.send(self.expected.request()).await;
                self.await_status("SANDBOX_EXECUTION_RUNNING").await;
            }
            _ => {}
        }
    }

    async fn finish(&mut self) {
        if self.expected.running {
            self.send(self.expected.input_from(0)).await;
            self.send(json!({"event": "stdin_eof", "offset": self.expected.input.len()})).await;
            self.until_done().await;
        }
    }

    async fn until_done(&mut self) {
        while self.expected.running {
            let message = next(&mut self.socket).await.unwrap_or_else(|| panic!("closed before its end: {:?}", self.expected));
            self.hear(&message);
        }
    }

    async fn await_status(&mut self, status: &str) {
        self.until(|message| message["status"] == status).await;
    }

    async fn await_error(&mut self, code: &str) {
        self.until(|message| message["code"] == code).await;
    }

    async fn until(&mut self, wanted: impl Fn(&Value) -> bool) {
        loop {
            let message = next(&mut self.socket).await.unwrap_or_else(|| panic!("closed: {:?}", self.expected));
            let found = wanted(&message);
            self.hear(&message);
            if found {
                return;
            }
        }
    }

    /// Compares what came with the model.
    fn hear(&mut self, message: &Value) {
        let event = message["event"].as_str().unwrap();
        let ours = message["execution_id"] == self.expected.id();
        if event == "stdout" || event == "stderr" {
            assert!(ours, "{message}");
            let whole = self.expected.text(event);
            let data = message["data"].as_str().unwrap();
            let (offset, end) = (message["offset"].as_u64().unwrap() as usize, message["end"].as_u64().unwrap() as usize);
            assert_eq!(&whole[offset..end], data, "what is repeated is the same");
            let heard = if event == "stdout" { &mut self.expected.out } else { &mut self.expected.err };
            assert!(offset <= heard.len(), "a gap: {offset} after {}", heard.len());
            if end > heard.len() {
                heard.push_str(&whole[heard.len()..end]);
            }
        }
        if ours && event == "stdin_ack" {
            let offset = message["offset"].as_u64().unwrap() as usize;
            let Expected { input, taken, .. } = &mut self.expected;
            assert!(*taken <= offset && offset <= input.len(), "{message} after {taken}, {} sent", input.len());
            *taken = offset;
        }
        if ours && message["status"] == "SANDBOX_EXECUTION_DONE" {
            let Expected { killed, code, out, err, .. } = &self.expected;
            if *killed && message["signal"] == "SIGKILL" {
                assert!(self.expected.text("stdout").starts_with(out.as_str()));
            } else {
                assert_eq!(message["exit_code"], *code, "{message}");
                assert_eq!((out, err), (&self.expected.text("stdout"), &self.expected.text("stderr")));
            }
            self.expected.running = false;
        }
    }
}

async fn next(socket: &mut WebSocketStream<MaybeTlsStream<TcpStream>>) -> Option<Value> {
    loop {
        match timeout(PATIENCE, socket.next()).await.expect("a message in time") {
            Some(Ok(Message::Text(text))) => return Some(serde_json::from_str(&text).unwrap()),
            Some(Ok(Message::Close(_)) | Err(_)) | None => return None,
            Some(Ok(_)) => {}
        }
    }
}

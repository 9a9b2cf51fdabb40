//! A sandbox of an earlier process that can't be taken up at once: it is tried again, and nothing is made of it beside it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{net::SocketAddr, path::Path, sync::Arc, time::Duration};

use futures_util::{SinkExt as _, StreamExt as _};
use sandboxer_runtime::{FakeRuntime, Fault, HostLimits};
use sandboxer_server::{CheckpointSettings, Collection, Facts, Images, Server, Settings, StopHow, Terms};
use sandboxer_store::Place;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::{
    net::TcpStream,
    sync::oneshot,
    task::JoinHandle,
    time::{Instant, timeout},
};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async, tungstenite::Message};

const PATIENCE: Duration = Duration::from_secs(120);
const IMAGE: &[u8] = b"an image that the fake never looks at";

/// A server with a volume, on a runtime that outlives it.
struct Running {
    address: SocketAddr,
    stop: oneshot::Sender<StopHow>,
    task: JoinHandle<()>,
}

impl Running {
    async fn start(runtime: &FakeRuntime, home: &Path) -> Self {
        let (data, volume) = (home.join("data"), home.join("volume"));
        let digest: String = Sha256::digest(IMAGE).iter().map(|byte| format!("{byte:02x}")).collect();
        let image = home.join(digest).with_extension("erofs");
        [&data, &volume].iter().for_each(|dir| std::fs::create_dir_all(dir).unwrap());
        std::fs::write(&image, IMAGE).unwrap();
        let mut settings = Settings::new("127.0.0.1:0".parse().unwrap(), data);
        settings.checkpoints = Some(CheckpointSettings {
            place: Place::at(&volume).unwrap(),
            key_file: None,
            cache_bytes: 1 << 20,
            terms: Terms::default(),
            facts: Facts::here("20260905.0"),
            collection: Collection { every: None, ..Collection::default() },
        });
        let server = Server::start(settings, Arc::new(runtime.clone()), Images::fixed(image), HostLimits::none("a test")).await.unwrap();
        let address = server.address().unwrap();
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(server.serve(async { stopped.await.unwrap_or(StopHow::Restart) }));
        Self { address, stop, task }
    }

    async fn stop(self) {
        self.stop.send(StopHow::Restart).unwrap();
        self.task.await.unwrap();
    }
}

struct Client(WebSocketStream<MaybeTlsStream<TcpStream>>);

impl Client {
    async fn open(server: &Running, path: &str) -> Self {
        Self(connect_async(format!("ws://{}{path}", server.address)).await.unwrap().0)
    }

    async fn send(&mut self, message: Value) {
        self.0.send(Message::text(message.to_string())).await.unwrap();
    }

    /// None: it was closed.
    async fn next(&mut self) -> Option<Value> {
        loop {
            match timeout(PATIENCE, self.0.next()).await.expect("a message in time") {
                Some(Ok(Message::Text(text))) => return Some(serde_json::from_str(&text).unwrap()),
                Some(Ok(Message::Close(_)) | Err(_)) | None => return None,
                Some(Ok(_)) => {}
            }
        }
    }

    async fn until(&mut self, status: &str) -> Value {
        loop {
            let message = self.next().await.unwrap_or_else(|| panic!("closed before {status}"));
            if message["status"] == status {
                return message;
            }
        }
    }

    async fn create(server: &Running, configuration: Value) -> (Self, String) {
        let mut client = Self::open(server, "/create").await;
        client.send(configuration).await;
        let mut id = Value::Null;
        while id.is_null() {
            id = client.next().await.unwrap()["sandbox_id"].take();
        }
        client.until("SANDBOX_RUNNING").await;
        (client, id.as_str().unwrap().to_owned())
    }

    async fn attach(server: &Running, id: &str) -> Self {
        let mut client = Self::open(server, &format!("/attach/{id}")).await;
        client.until("SANDBOX_RUNNING").await;
        client
    }

    /// What a program says. The end of the one before may be told again.
    async fn run(&mut self, code: &str) -> String {
        let id = code.len().to_string();
        self.send(json!({"language": "bash", "code": code, "execution_id": id})).await;
        let mut said = String::new();
        loop {
            let message = self.next().await.expect("it goes on");
            match message["event"].as_str() {
                _ if message["execution_id"].as_str() != Some(id.as_str()) => {}
                Some("stdout") => said.push_str(message["data"].as_str().unwrap()),
                _ if message["status"] == "SANDBOX_EXECUTION_DONE" => return said,
                _ => {}
            }
        }
    }
}

/// What an attach is told before it is closed.
async fn told(server: &Running, id: &str) -> Vec<Value> {
    let mut client = Client::open(server, &format!("/attach/{id}")).await;
    let mut told = Vec::new();
    while let Some(mut message) = client.next().await {
        told.push(message["status"].take());
    }
    told
}

/// Has the sandbox not be taken up by the next server for a while, and attaches meanwhile and afterwards.
async fn comes_back(runtime: &FakeRuntime, home: &Path, id: &str) {
    let runs = runtime.ids();
    assert_eq!(runs.len(), 1);
    runtime.fail_until_mended(Fault::TakeUp, "not now");
    let server = Running::start(runtime, home).await;
    for _ in 0..2 {
        assert_eq!(told(&server, id).await, ["SANDBOX_RESTORING", "SANDBOX_HANDOFF_IN_PROGRESS"]);
        assert_eq!(runtime.ids(), runs, "nothing is made beside it");
    }
    runtime.mend(Fault::TakeUp);
    let begun = Instant::now();
    while told_at_once(&server, id).await != "SANDBOX_RUNNING" {
        assert!(begun.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let mut client = Client::attach(&server, id).await;
    assert_eq!(client.run("cat f").await, "newer\n");
    assert_eq!(runtime.ids(), runs);
    server.stop().await;
}

async fn told_at_once(server: &Running, id: &str) -> Value {
    Client::open(server, &format!("/attach/{id}")).await.next().await.unwrap()["status"].take()
}

#[tokio::test]
async fn what_can_not_be_taken_up_at_once_is_taken_up_later_and_not_restored_beside_itself() {
    let (home, runtime) = (tempfile::tempdir().unwrap(), FakeRuntime::new());
    let server = Running::start(&runtime, home.path()).await;
    let (mut client, id) = Client::create(&server, json!({"enable_checkpoint": true})).await;
    client.run("echo saved > f").await;
    client.send(json!({"action": "checkpoint"})).await;
    client.until("SANDBOX_CHECKPOINTED").await;
    let mut client = Client::attach(&server, &id).await;
    assert_eq!(client.run("cat f; echo newer > f").await, "saved\n");
    server.stop().await;
    comes_back(&runtime, home.path(), &id).await;
}

#[tokio::test]
async fn one_that_is_not_kept_on_the_volume_is_not_said_to_be_gone_either() {
    let (home, runtime) = (tempfile::tempdir().unwrap(), FakeRuntime::new());
    let server = Running::start(&runtime, home.path()).await;
    let (mut client, id) = Client::create(&server, json!({})).await;
    client.run("echo newer > f").await;
    server.stop().await;
    comes_back(&runtime, home.path(), &id).await;
}

//! A sandbox whose agent is of a version that carries no streams, as that of the fake runtime is: it is told what it can't do, and nothing hangs.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{net::SocketAddr, path::Path, sync::Arc, time::Duration};

use futures_util::{SinkExt as _, StreamExt as _};
use sandboxer_runtime::{FakeRuntime, HostLimits};
use sandboxer_server::{Images, Server, Settings, StopHow};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::oneshot,
    task::JoinHandle,
    time::timeout,
};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async, tungstenite::Message};

const PATIENCE: Duration = Duration::from_secs(120);

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

struct Running {
    address: SocketAddr,
    stop: oneshot::Sender<StopHow>,
    task: JoinHandle<()>,
}

impl Running {
    async fn start(runtime: &FakeRuntime, dir: &Path) -> Self {
        let mut settings = Settings::new("127.0.0.1:0".parse().unwrap(), dir.to_owned());
        settings.network.allow = vec!["*".parse().unwrap()];
        let images = Images::fixed("/no/image".into());
        let server = Server::start(settings, Arc::new(runtime.clone()), images, HostLimits::none("a test")).await.unwrap();
        let address = server.address().unwrap();
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(server.serve(async { stopped.await.unwrap_or(StopHow::Restart) }));
        Self { address, stop, task }
    }

    async fn stop(self, how: StopHow) {
        self.stop.send(how).unwrap();
        timeout(PATIENCE, self.task).await.expect("it stops").unwrap();
    }

    async fn open(&self, path: &str) -> Socket {
        connect_async(format!("ws://{}{path}", self.address)).await.unwrap().0
    }

    async fn create(&self, configuration: Value) -> Socket {
        let mut socket = self.open("/create").await;
        socket.send(Message::text(configuration.to_string())).await.unwrap();
        socket
    }

    /// The status and what was said.
    async fn get(&self, path: &str) -> (u16, Value) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.address);
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        timeout(PATIENCE, stream.read_to_string(&mut answer)).await.expect("an answer").unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), serde_json::from_str(body).unwrap())
    }
}

/// The next message of which this is true.
async fn until(socket: &mut Socket, wanted: impl Fn(&Value) -> bool) -> Value {
    loop {
        let message = timeout(PATIENCE, socket.next()).await.expect("a message").expect("it is open").unwrap();
        let Message::Text(text) = message else { continue };
        let message: Value = serde_json::from_str(&text).unwrap();
        if wanted(&message) {
            return message;
        }
    }
}

/// It does what it is told, as ever.
async fn works(socket: &mut Socket) {
    socket.send(Message::text(json!({"language": "bash", "code": "echo as ever"}).to_string())).await.unwrap();
    let output = until(socket, |message| message["event"] == "stdout").await;
    assert_eq!(output["data"], "as ever\n", "{output}");
    let done = until(socket, |message| message["status"] == "SANDBOX_EXECUTION_DONE").await;
    assert_eq!(done["exit_code"], 0, "{done}");
}

#[tokio::test]
async fn an_agent_that_carries_no_streams_says_so_and_all_else_works() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = FakeRuntime::new();
    let server = Running::start(&runtime, dir.path()).await;
    // A new one with a network is not made without it.
    let mut refused = server.create(json!({"network": {"allow": ["example.com"]}})).await;
    until(&mut refused, |message| message["status"] == "SANDBOX_CREATION_ERROR").await;
    let error = until(&mut refused, |message| message["event"] == "error").await;
    assert_eq!(error["code"], "network_not_available", "{error}");
    assert!(error["message"].as_str().unwrap().contains("older than this server"), "{error}");
    assert!(runtime.ids().is_empty(), "nothing is left of it");
    // One without has no ports, which is told at once.
    let mut socket = server.create(json!({})).await;
    let id = until(&mut socket, |message| message["event"] == "sandbox_id").await["sandbox_id"].as_str().unwrap().to_owned();
    until(&mut socket, |message| message["status"] == "SANDBOX_RUNNING").await;
    let port = format!("/v1/sandboxes/{id}/ports/8000/");
    let (status, said) = server.get(&port).await;
    assert_eq!((status, said["error"]["code"].as_str()), (501, Some("ports_not_supported")), "{said}");
    works(&mut socket).await;
    // It comes back with a network in its record: the agent hears nothing that it does not know, and goes on as it did.
    drop(socket);
    server.stop(StopHow::Restart).await;
    let file = dir.path().join("sandboxes").join(&id).join("record.json");
    let mut record: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    record["config"]["network"] = json!(["example.com"]);
    std::fs::write(&file, record.to_string()).unwrap();
    let server = Running::start(&runtime, dir.path()).await;
    let mut socket = server.open(&format!("/attach/{id}")).await;
    until(&mut socket, |message| message["status"] == "SANDBOX_RUNNING").await;
    works(&mut socket).await;
    let (status, said) = server.get(&port).await;
    assert_eq!((status, said["error"]["code"].as_str()), (501, Some("ports_not_supported")), "{said}");
    let (status, network) = server.get(&format!("/v1/sandboxes/{id}/network")).await;
    assert_eq!((status, &network["allow"], &network["items"]), (200, &json!(["example.com"]), &json!([])));
    socket.send(Message::text(json!({"action": "kill_sandbox"}).to_string())).await.unwrap();
    until(&mut socket, |message| message["status"] == "SANDBOX_KILLED").await;
    server.stop(StopHow::Drain).await;
    assert!(runtime.ids().is_empty());
}

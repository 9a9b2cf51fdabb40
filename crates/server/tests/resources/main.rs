//! The resource API on the fake runtime: what becomes of a sandbox that is deleted while it rests, is saved or runs elsewhere, and of an execution whose caller
//! has gone.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod answers;
mod executions;
mod filesystems;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::{SinkExt as _, StreamExt as _};
use sandboxer_protocol::SandboxId;
use sandboxer_runtime::{AfterSave, BoxFuture, FakeRuntime, Fault, HostLimits, Instance, Launch, NotWhole, Runtime, RuntimeError, Written};
use sandboxer_server::{
    Access, ApiKey, CheckpointSettings, Collection, Facts, FilesystemSettings, Images, Server, Settings, StopHow, Terms,
};
use sandboxer_store::Place;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::{Semaphore, oneshot},
    task::JoinHandle,
    time::timeout,
};
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream, connect_async,
    tungstenite::{Message, client::IntoClientRequest as _},
};

const MANY: usize = Semaphore::MAX_PERMITS / 2;
const PATIENCE: Duration = Duration::from_secs(120);
const ALICE: &str = "alice:key-of-alice-0123456789abcdef";
const BOB: &str = "bob:key-of-bob-0123456789abcdef00";

/// A runtime whose saves and starts wait until they may go on.
#[derive(Clone)]
struct Gated {
    inner: FakeRuntime,
    /// Starts that have begun, and how many of them were under way at once at most.
    starts: Arc<Semaphore>,
    starting: Arc<AtomicUsize>,
    most_starting: Arc<AtomicUsize>,
    may_start: Arc<Semaphore>,
    /// Saves that have begun.
    begun: Arc<Semaphore>,
    may_save: Arc<Semaphore>,
}

impl Default for Gated {
    fn default() -> Self {
        Self {
            inner: FakeRuntime::new(),
            starts: Arc::new(Semaphore::new(0)),
            starting: Arc::default(),
            most_starting: Arc::default(),
            may_start: Arc::new(Semaphore::new(MANY)),
            begun: Arc::new(Semaphore::new(0)),
            may_save: Arc::new(Semaphore::new(MANY)),
        }
    }
}

impl Runtime for Gated {
    fn start<'a>(&'a self, launch: &'a Launch) -> BoxFuture<'a, Result<Instance, RuntimeError>> {
        Box::pin(async move {
            let starting = self.starting.fetch_add(1, Ordering::SeqCst) + 1;
            self.most_starting.fetch_max(starting, Ordering::SeqCst);
            self.starts.add_permits(1);
            self.may_start.acquire().await.unwrap().forget();
            let started = self.inner.start(launch).await;
            self.starting.fetch_sub(1, Ordering::SeqCst);
            started
        })
    }

    fn take_up<'a>(&'a self, id: SandboxId, dir: &'a Path) -> BoxFuture<'a, Result<Instance, RuntimeError>> {
        self.inner.take_up(id, dir)
    }

    fn checkpoint<'a>(
        &'a self,
        id: SandboxId,
        dir: &'a Path,
        into: &'a Path,
        after: AfterSave,
        written: Option<Written<'a>>,
    ) -> BoxFuture<'a, Result<(), RuntimeError>> {
        Box::pin(async move {
            self.begun.add_permits(1);
            self.may_save.acquire().await.unwrap().forget();
            self.inner.checkpoint(id, dir, into, after, written).await
        })
    }

    fn restore<'a>(&'a self, launch: &'a Launch, from: &'a Path) -> BoxFuture<'a, Result<Instance, RuntimeError>> {
        self.inner.restore(launch, from)
    }

    fn create<'a>(&'a self, launch: &'a Launch) -> BoxFuture<'a, Result<Instance, RuntimeError>> {
        self.inner.create(launch)
    }

    fn created(&self, id: SandboxId) -> BoxFuture<'_, Result<(), RuntimeError>> {
        self.inner.created(id)
    }

    fn restore_into<'a>(&'a self, launch: &'a Launch, from: &'a Path) -> BoxFuture<'a, Result<(), RuntimeError>> {
        self.inner.restore_into(launch, from)
    }

    fn whole<'a>(&'a self, id: SandboxId, dir: &'a Path) -> BoxFuture<'a, Result<(), NotWhole>> {
        self.inner.whole(id, dir)
    }

    fn pause<'a>(&'a self, id: SandboxId, dir: &'a Path) -> BoxFuture<'a, Result<(), RuntimeError>> {
        self.inner.pause(id, dir)
    }

    fn resume<'a>(&'a self, id: SandboxId, dir: &'a Path) -> BoxFuture<'a, Result<(), RuntimeError>> {
        self.inner.resume(id, dir)
    }

    fn remove<'a>(&'a self, id: SandboxId, dir: &'a Path) -> BoxFuture<'a, Result<(), RuntimeError>> {
        self.inner.remove(id, dir)
    }
}

/// A directory of a test: the volume, and the data of each server.
struct Ground(tempfile::TempDir);

impl Ground {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("volume")).unwrap();
        let ground = Self(dir);
        std::fs::write(ground.image(), "an image").unwrap();
        ground
    }

    /// It is named by its digest, as all are.
    fn image(&self) -> PathBuf {
        self.0.path().join("a5df3fde7b200c3fa2791144c7e05c5c2bced4c6ad863d3a4cf76c972c1712f9.erofs")
    }

    async fn serve(&self, name: &str) -> Running {
        std::fs::create_dir(self.0.path().join(name)).unwrap();
        self.serve_on(name, Gated::default()).await
    }

    /// On a runtime and a data directory that may be those of a server before.
    async fn serve_on(&self, name: &str, runtime: Gated) -> Running {
        let data = self.0.path().join(name);
        let mut settings = Settings::new("127.0.0.1:0".parse().unwrap(), data);
        // Far longer than the tests wait for anything.
        settings.stop_grace = Duration::from_secs(600);
        settings.checkpoints = Some(CheckpointSettings {
            place: Place::at(&self.0.path().join("volume")).unwrap(),
            key_file: None,
            cache_bytes: 1 << 20,
            terms: Terms::default(),
            facts: Facts::default(),
            collection: Collection { every: None, ..Collection::default() },
        });
        settings.filesystems = Some(FilesystemSettings {
            place: Place::at(&self.0.path().join("volume")).unwrap(),
            key_file: None,
            cache_bytes: 1 << 20,
            templates: None,
            collect_every: None,
        });
        settings.access = Access { keys: ApiKey::parse_list(&format!("{ALICE}\n{BOB}")).unwrap(), ..Access::default() };
        // Of two keys neither sees the numbers at the address of clients.
        settings.metrics_listen = Some("127.0.0.1:0".parse().unwrap());
        let images = Images::fixed(self.image());
        let server = Server::start(settings, Arc::new(runtime.clone()), images, HostLimits::none("a test")).await.unwrap();
        let (address, metrics) = (server.address().unwrap(), server.metrics_address().unwrap().unwrap());
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(server.serve(async { stopped.await.unwrap_or(StopHow::Restart) }));
        Running { runtime, address, metrics, stop, task }
    }
}

struct Running {
    runtime: Gated,
    address: SocketAddr,
    metrics: SocketAddr,
    stop: oneshot::Sender<StopHow>,
    task: JoinHandle<()>,
}

fn secret(key: &str) -> &str {
    key.split_once(':').unwrap().1
}

/// A request as it is written, and its connection.
async fn send(address: SocketAddr, key: &str, method: &str, path: &str, more: &str, body: &Value) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nX-API-Key: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{more}\r\n{body}",
        secret(key),
        body.len()
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}

/// What is there, as it comes.
async fn text(address: SocketAddr, path: &str) -> String {
    let mut stream = send(address, ALICE, "GET", path, "Connection: close\r\n", &Value::Null).await;
    let mut answer = String::new();
    timeout(PATIENCE, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
    answer
}

async fn ask(address: SocketAddr, key: &str, method: &str, path: &str, body: Value) -> (u16, Value) {
    let mut stream = send(address, key, method, path, "Connection: close\r\n", &body).await;
    let mut answer = String::new();
    timeout(PATIENCE * 2, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, if body.is_empty() { Value::Null } else { serde_json::from_str(body).unwrap() })
}

/// A sandbox of Alice's.
struct Sandbox {
    id: String,
    token: String,
    path: String,
}

impl Running {
    async fn create(&self, config: Value) -> Sandbox {
        let (status, made) = ask(self.address, ALICE, "POST", "/v1/sandboxes", config).await;
        assert_eq!(status, 201, "{made}");
        let id = made["id"].as_str().unwrap().to_owned();
        Sandbox { token: made["token"].as_str().unwrap().to_owned(), path: format!("/v1/sandboxes/{id}"), id }
    }

    async fn ask(&self, key: &str, method: &str, path: &str) -> (u16, Value) {
        ask(self.address, key, method, path, Value::Null).await
    }

    async fn save(&self, sandbox: &Sandbox) {
        let (status, body) = ask(self.address, ALICE, "POST", &format!("{}/checkpoint", sandbox.path), json!({})).await;
        assert_eq!(status, 201, "{body}");
    }

    async fn attach(&self, sandbox: &Sandbox) -> Ws {
        self.attach_as(ALICE, sandbox, Some(&sandbox.token)).await
    }

    async fn attach_as(&self, key: &str, sandbox: &Sandbox, token: Option<&str>) -> Ws {
        let mut request = format!("ws://{}/attach/{}", self.address, sandbox.id).into_client_request().unwrap();
        request.headers_mut().insert("x-api-key", secret(key).parse().unwrap());
        if let Some(token) = token {
            request.headers_mut().insert("x-sandbox-token", token.parse().unwrap());
        }
        Ws(connect_async(request).await.unwrap().0)
    }

    /// Nobody can have it, here as elsewhere.
    async fn expect_gone(&self, sandbox: &Sandbox) {
        let (status, body) = self.ask(ALICE, "GET", &sandbox.path).await;
        assert!(matches!(status, 404 | 410), "{status}: {body}");
        let told = self.attach(sandbox).await.status_but(&["SANDBOX_RESTORING"]).await;
        assert_eq!(told["status"], "SANDBOX_NOT_FOUND", "{told}");
        assert!(told["message"].as_str().unwrap().contains("deleted by its owner"), "{told}");
    }
}

struct Ws(WebSocketStream<MaybeTlsStream<TcpStream>>);

impl Ws {
    async fn status_but(&mut self, skipped: &[&str]) -> Value {
        let next = async {
            loop {
                match self.0.next().await.unwrap().unwrap() {
                    Message::Text(text) => {
                        let message: Value = serde_json::from_str(&text).unwrap();
                        // Clients ignore that they wait.
                        let waits = message["status"] == "SANDBOX_WAITING";
                        if message["event"] == "status_update" && !waits && !skipped.iter().any(|status| message["status"] == **status) {
                            return message;
                        }
                    }
                    Message::Close(close) => panic!("closed: {close:?}"),
                    _ => {}
                }
            }
        };
        timeout(PATIENCE, next).await.unwrap()
    }

    async fn expect(&mut self, status: &str) {
        let told = self.status_but(&["SANDBOX_RESTORING"]).await;
        assert_eq!(told["status"], status, "{told}");
    }

    /// It answers whoever asks whether it is there.
    async fn stay(mut self) {
        while let Some(Ok(_)) = self.0.next().await {}
    }

    async fn run(&mut self, code: &str) {
        self.0.send(Message::text(json!({"language": "bash", "code": code}).to_string())).await.unwrap();
        self.expect("SANDBOX_EXECUTION_RUNNING").await;
    }
}

#[tokio::test]
async fn a_sandbox_that_rests_is_deleted_by_its_owner_alone_and_wherever_that_is_asked() {
    let ground = Ground::new();
    let (a, b) = (ground.serve("a").await, ground.serve("b").await);
    let sandbox = a.create(json!({"enable_checkpoint": true})).await;
    a.save(&sandbox).await;
    assert_eq!(b.ask(ALICE, "GET", &sandbox.path).await.1["status"], "saved");
    for server in [&a, &b] {
        assert_eq!(server.ask(BOB, "DELETE", &sandbox.path).await.0, 404);
    }
    assert_eq!(b.ask(ALICE, "GET", &sandbox.path).await.1["status"], "saved", "it is not Bob's");
    assert_eq!(b.ask(ALICE, "DELETE", &sandbox.path).await, (204, Value::Null));
    a.expect_gone(&sandbox).await;
    b.expect_gone(&sandbox).await;
    assert_eq!(b.ask(ALICE, "DELETE", &sandbox.path).await.0, 404);
    let metadata = ground.0.path().join("volume").join(&sandbox.id).join("metadata.json");
    let metadata: Value = serde_json::from_slice(&std::fs::read(metadata).unwrap()).unwrap();
    assert_eq!(metadata["status"], "killed");
}

#[tokio::test]
async fn whoever_creates_beyond_what_can_be_started_at_once_waits_for_a_turn() {
    let ground = Ground::new();
    let server = ground.serve("a").await;
    let at_once = 2 * std::thread::available_parallelism().unwrap().get();
    server.runtime.may_start.forget_permits(MANY);
    let create = || ask(server.address, ALICE, "POST", "/v1/sandboxes", json!({}));
    let creates = futures_util::future::join_all((0..at_once + 4).map(|_| create()));
    let gate = async {
        let begun = server.runtime.starts.acquire_many(u32::try_from(at_once).unwrap());
        timeout(PATIENCE, begun).await.expect("as many as may").unwrap().forget();
        // So long none of the others begins.
        let one_more = timeout(Duration::from_millis(300), server.runtime.starts.acquire()).await;
        assert!(one_more.is_err(), "they don't wait");
        server.runtime.may_start.add_permits(MANY);
    };
    let (made, ()) = tokio::join!(creates, gate);
    assert!(made.iter().all(|(status, _)| *status == 201), "{made:?}");
    assert_eq!(server.runtime.most_starting.load(Ordering::SeqCst), at_once);
}

#[tokio::test]
async fn whoever_waits_for_a_turn_when_the_server_stops_is_not_started_any_more() {
    let ground = Ground::new();
    let server = ground.serve("a").await;
    let at_once = 2 * std::thread::available_parallelism().unwrap().get();
    server.runtime.may_start.forget_permits(MANY);
    let (address, metrics) = (server.address, server.metrics);
    let creates = futures_util::future::join_all((0..at_once + 4).map(|_| ask(address, ALICE, "POST", "/v1/sandboxes", json!({}))));
    let stopping = async {
        let begun = server.runtime.starts.acquire_many(u32::try_from(at_once).unwrap());
        timeout(PATIENCE, begun).await.expect("as many as may").unwrap().forget();
        // All of them have been let in, and wait.
        let in_line = async {
            while !text(metrics, "/metrics").await.contains(&format!("sandboxer_creates_total {}", at_once + 4)) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(PATIENCE, in_line).await.unwrap();
        server.stop.send(StopHow::Restart).unwrap();
        while ask(address, ALICE, "POST", "/v1/sandboxes", json!({})).await.1["error"]["code"] != "server_stopping" {}
        server.runtime.may_start.add_permits(MANY);
    };
    let (made, ()) = tokio::join!(creates, stopping);
    let refused = made.iter().filter(|(_, answer)| answer["error"]["code"] == "server_stopping").count();
    assert_eq!(refused, 4, "{made:?}");
    assert_eq!(server.runtime.starts.available_permits(), 0, "none of them was begun");
}

/// Those on the volume that nobody has ended for good.
fn living(ground: &Ground) -> usize {
    let locks = std::fs::read_dir(ground.0.path().join("volume/locks")).unwrap().flatten().map(|entry| entry.path());
    let locks = locks.filter(|path| path.extension().is_some_and(|extension| extension == "lock"));
    locks.filter(|path| serde_json::from_slice::<Value>(&std::fs::read(path).unwrap()).unwrap()["tombstone"].is_null()).count()
}

#[tokio::test]
async fn a_fork_whose_memory_does_not_come_leaves_nothing_of_any_copy() {
    let ground = Ground::new();
    let a = ground.serve("a").await;
    let sandbox = a.create(json!({"enable_checkpoint": true})).await;
    a.save(&sandbox).await;
    assert_eq!((a.runtime.inner.ids().len(), living(&ground)), (0, 1));
    let path = format!("{}/fork", sandbox.path);
    let fork = || ask(a.address, ALICE, "POST", &path, json!({"count": 3}));
    for fault in [Fault::NotWhole, Fault::Unreadable] {
        a.runtime.inner.fail_until_mended(fault, "the disk is broken");
        let (status, told) = fork().await;
        assert!(status >= 500, "{told}");
        assert_eq!((a.runtime.inner.ids().len(), living(&ground)), (0, 1), "{fault:?}");
        assert_eq!(std::fs::read_dir(ground.0.path().join("a/sandboxes")).unwrap().count(), 0);
        a.runtime.inner.mend(fault);
    }
    // One that failed is restored once more.
    a.runtime.inner.fail_next(Fault::NotWhole, "a moment's weakness");
    let (status, made) = fork().await;
    assert_eq!((status, made["items"].as_array().map(Vec::len)), (201, Some(3)), "{made}");
    assert_eq!((a.runtime.inner.ids().len(), living(&ground)), (3, 4));
}

#[tokio::test]
async fn a_server_that_stops_does_not_wait_for_the_memory_of_a_fork() {
    let ground = Ground::new();
    let a = ground.serve("a").await;
    let sandbox = a.create(json!({"enable_checkpoint": true})).await;
    a.save(&sandbox).await;
    a.runtime.inner.fail_until_mended(Fault::NeverWhole, "");
    let (address, path) = (a.address, format!("{}/fork", sandbox.path));
    let forking = tokio::spawn(async move { ask(address, ALICE, "POST", &path, json!({"count": 2})).await });
    let begun = async {
        while a.runtime.inner.ids().len() < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(PATIENCE, begun).await.unwrap();
    a.stop.send(StopHow::Drain).unwrap();
    let (status, told) = timeout(PATIENCE, forking).await.unwrap().unwrap();
    assert!(status >= 500, "{told}");
    timeout(PATIENCE, a.task).await.unwrap().unwrap();
    assert!(a.runtime.inner.ids().is_empty(), "nothing is left of it");
}

#[tokio::test]
async fn a_sandbox_that_is_being_saved_is_deleted_too() {
    let ground = Ground::new();
    let a = ground.serve("a").await;
    let sandbox = a.create(json!({"enable_checkpoint": true})).await;
    a.runtime.may_save.forget_permits(Semaphore::MAX_PERMITS);
    let saving = a.save(&sandbox);
    let deleting = async {
        a.runtime.begun.acquire().await.unwrap().forget();
        let deleting = a.ask(ALICE, "DELETE", &sandbox.path);
        tokio::pin!(deleting);
        // It waits for what is under way.
        assert!(timeout(Duration::from_millis(300), &mut deleting).await.is_err());
        a.runtime.may_save.add_permits(1);
        deleting.await
    };
    let ((status, body), ()) = tokio::join!(deleting, async { drop(timeout(PATIENCE, saving).await) });
    assert_eq!(status, 204, "{body}");
    a.expect_gone(&sandbox).await;
}

#[tokio::test]
async fn what_another_instance_runs_is_deleted_when_that_gives_it_up_and_kept_for_its_client() {
    let ground = Ground::new();
    let (a, b) = (ground.serve("a").await, ground.serve("b").await);
    let sandbox = a.create(json!({"enable_checkpoint": true})).await;
    a.save(&sandbox).await;
    let mut ws = a.attach(&sandbox).await;
    ws.expect("SANDBOX_RUNNING").await;
    let attached = tokio::spawn(ws.stay());
    let (status, body) = b.ask(ALICE, "DELETE", &sandbox.path).await;
    assert_eq!((status, &body["error"]["code"]), (409, &json!("in_use")), "{body}");
    let (status, body) = a.ask(ALICE, "DELETE", &sandbox.path).await;
    assert_eq!((status, &body["error"]["code"]), (409, &json!("in_use")), "{body}");
    assert!(!attached.is_finished());
    attached.abort();
    let (status, body) = b.ask(ALICE, "DELETE", &sandbox.path).await;
    assert_eq!(status, 204, "{body}");
    a.expect_gone(&sandbox).await;
    b.expect_gone(&sandbox).await;
    assert!(a.runtime.inner.ids().is_empty() && b.runtime.inner.ids().is_empty(), "nothing runs");
}

#[tokio::test]
async fn a_sandbox_that_is_not_kept_is_deleted_while_it_runs() {
    let ground = Ground::new();
    let a = ground.serve("a").await;
    let sandbox = a.create(json!({})).await;
    assert_eq!(a.ask(BOB, "DELETE", &sandbox.path).await.0, 404);
    assert_eq!(a.ask(ALICE, "DELETE", &sandbox.path).await.0, 204);
    assert_eq!(a.ask(ALICE, "DELETE", &sandbox.path).await.0, 404);
    assert!(a.runtime.inner.ids().is_empty());
}

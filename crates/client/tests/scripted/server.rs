//! A server in this process: the model over a WebSocket, with faults by request.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::{SinkExt as _, StreamExt as _};
use sandboxer_client::{ExecutionId, SandboxId};
use sandboxer_protocol::{
    agent::PerStream,
    client::{ServerEvent, Status},
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Notify,
    task::{JoinHandle, JoinSet},
    time::{sleep, timeout},
};
use tokio_tungstenite::{
    WebSocketStream, accept_hdr_async,
    tungstenite::{
        Message,
        handshake::server::{ErrorResponse, Request, Response},
        http::{HeaderMap, HeaderValue, StatusCode, header::SET_COOKIE},
        protocol::{CloseFrame, frame::coding::CloseCode},
    },
};

use crate::model::{Model, Offsets, ToClient};

/// How long a client that attached may take to say where to go on.
const GRACE: Duration = Duration::from_millis(250);

/// What a connection is like; the last one holds for all that follow.
#[derive(Debug, Clone, Default)]
pub struct Manner {
    /// Refuses the handshake.
    pub status: Option<u16>,
    pub set_cookies: Vec<&'static str>,
    /// Says this and closes.
    pub turn_away: Option<Status>,
    /// Takes this long to restore the sandbox, and says so.
    pub restoring: Duration,
    /// Answers nothing any more after the handshake, not even a ping.
    pub mute: bool,
    /// Closes with this code after the first message of the client.
    pub close: Option<u16>,
}

#[derive(Debug)]
pub struct Scripted {
    address: SocketAddr,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    model: Mutex<Model>,
    manners: Mutex<VecDeque<Manner>>,
    /// The headers of every handshake.
    handshakes: Mutex<Vec<(String, HeaderMap)>>,
    /// A later connection takes the place of an earlier one.
    latest: AtomicUsize,
    cut: Notify,
}

impl Scripted {
    pub async fn start(seed: u64, manners: impl IntoIterator<Item = Manner>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            model: Mutex::new(Model::new(seed)),
            manners: Mutex::new(manners.into_iter().collect()),
            handshakes: Mutex::new(Vec::new()),
            latest: AtomicUsize::new(0),
            cut: Notify::new(),
        });
        let task = tokio::spawn({
            let shared = shared.clone();
            async move {
                let mut connections = JoinSet::new();
                while let Ok((stream, _)) = listener.accept().await {
                    connections.spawn(shared.clone().connection(stream));
                }
            }
        });
        Self { address, shared, task }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn model(&self) -> MutexGuard<'_, Model> {
        self.shared.model.lock().unwrap()
    }

    /// Path and headers of every handshake so far.
    pub fn handshakes(&self) -> Vec<(String, HeaderMap)> {
        self.shared.handshakes.lock().unwrap().clone()
    }

    /// Cuts whoever is connected.
    pub fn cut(&self) {
        self.shared.latest.fetch_add(1, Ordering::SeqCst);
        self.shared.cut.notify_waiters();
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Shared {
    async fn connection(self: Arc<Self>, stream: TcpStream) {
        let manner = {
            let mut manners = self.manners.lock().unwrap();
            if manners.len() > 1 { manners.pop_front() } else { manners.front().cloned() }.unwrap_or_default()
        };
        let mut path = String::new();
        let mut token = None;
        #[expect(clippy::result_large_err, reason = "the handshake wants it so")]
        let accept = |request: &Request, mut response: Response| -> Result<Response, ErrorResponse> {
            path = request.uri().path().to_owned();
            token = request.headers().get("x-sandbox-token").map(|value| value.to_str().unwrap().to_owned());
            self.handshakes.lock().unwrap().push((path.clone(), request.headers().clone()));
            for cookie in &manner.set_cookies {
                response.headers_mut().append(SET_COOKIE, HeaderValue::from_static(cookie));
            }
            match manner.status {
                None => Ok(response),
                Some(status) => {
                    let mut refusal = ErrorResponse::new(Some(r#"{"error":{"code":"c","message":"told why"}}"#.to_owned()));
                    *refusal.status_mut() = StatusCode::from_u16(status).unwrap();
                    Err(refusal)
                }
            }
        };
        let Ok(mut socket) = accept_hdr_async(stream, accept).await else { return };
        if manner.mute {
            sleep(Duration::from_secs(3600)).await;
        }
        if let Some(status) = manner.turn_away {
            let _ = socket.send(Message::text(ServerEvent::from(status).to_json())).await;
            let _ = socket.close(Some(CloseFrame { code: CloseCode::Error, reason: "".into() })).await;
            return;
        }
        if !manner.restoring.is_zero() {
            let _ = socket.send(Message::text(ServerEvent::from(Status::Restoring).to_json())).await;
            // Reading answers the client's pings.
            let read = async { while let Some(Ok(_)) = socket.next().await {} };
            tokio::select! {
                () = sleep(manner.restoring) => {}
                () = read => return,
                () = self.cut.notified() => return,
            }
        }
        let number = {
            let mut model = self.model.lock().unwrap();
            model.cut();
            match path.strip_prefix("/attach/") {
                None => model.create(),
                Some(id) => model.attach(id.parse::<SandboxId>().unwrap(), token.as_deref()),
            }
            self.latest.fetch_add(1, Ordering::SeqCst) + 1
        };
        self.serve(number, &mut socket, manner.close).await;
    }

    async fn serve(&self, number: usize, socket: &mut WebSocketStream<TcpStream>, close: Option<u16>) {
        let opened = std::time::Instant::now();
        while self.latest.load(Ordering::SeqCst) == number {
            let outgoing: Vec<_> = {
                let mut model = self.model.lock().unwrap();
                if opened.elapsed() > GRACE {
                    model.grace_over();
                }
                for _ in 0..4 {
                    model.step();
                    model.pump();
                }
                std::iter::from_fn(|| model.next_out()).collect()
            };
            for message in outgoing {
                let message = match message {
                    ToClient::Text(text) => Message::text(text),
                    ToClient::Ping(offsets) => Message::Ping(payload(&offsets).into()),
                    ToClient::Close(code) => Message::Close(Some(CloseFrame { code: code.into(), reason: "".into() })),
                };
                if socket.send(message).await.is_err() {
                    return;
                }
            }
            while let Ok(message) = timeout(Duration::from_millis(1), socket.next()).await {
                let Some(Ok(message)) = message else { return };
                if self.latest.load(Ordering::SeqCst) != number {
                    return;
                }
                if let Some(code) = close {
                    let _ = socket.close(Some(CloseFrame { code: code.into(), reason: "".into() })).await;
                    return;
                }
                let mut model = self.model.lock().unwrap();
                match message {
                    Message::Text(text) => model.receive(&text),
                    Message::Pong(payload) if !payload.is_empty() => model.pong(&offsets(&payload)),
                    _ => {}
                }
            }
        }
    }
}

/// At most 125 bytes.
fn payload(offsets: &Offsets) -> String {
    format!("{} {} {}", offsets.id, offsets.upto.stdout, offsets.upto.stderr)
}

fn offsets(payload: &[u8]) -> Offsets {
    let text = std::str::from_utf8(payload).unwrap();
    let mut words = text.split(' ');
    let number = |text: Option<&str>| text.unwrap().parse().unwrap();
    let id = words.next().unwrap().parse::<ExecutionId>().unwrap();
    Offsets { id, upto: PerStream { stdout: number(words.next()), stderr: number(words.next()) } }
}

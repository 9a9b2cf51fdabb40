//! The proxy that programs talk to: HTTP with CONNECT and with absolute addresses, and SOCKS5, told apart by the first byte.
//!
//! Plain requests are parsed and written anew, never passed on as they are: what goes out names the host that was checked, in each request of a connection.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Body as _, Frame, Incoming, SizeHint},
    header::{self, HeaderMap, HeaderName, HeaderValue},
    http::uri::{Authority, Scheme},
    server::conn::http1,
    service::service_fn,
    upgrade::OnUpgrade,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, copy_bidirectional_with_sizes},
    net::TcpStream,
    time::timeout,
};
use tokio_util::task::AbortOnDropHandle;
use tracing::debug;

use super::{
    Shared,
    lingering::Lingering,
    meter::Metered,
    policy::{self, Kind, Open, Record, Refusal},
    socks,
};
use crate::sandbox::tunnel::TunnelStream;

/// How long a program may take to say what it wants.
const HEAD_WITHIN: Duration = Duration::from_secs(60);
const MAX_HEAD_BYTES: usize = 64 * 1024;
/// What is copied at once.
const COPY_BYTES: usize = 64 * 1024;
/// A connection over which nothing passes for so long is given up: the agent can't tell a program that has gone from one that only listens.
const QUIET_AT_MOST: Duration = Duration::from_secs(900);
/// How long a connection may take to end once its answer is whole.
const ENDS_WITHIN: Duration = Duration::from_secs(5);
const HTTP_PORT: u16 = 80;

/// Headers that are for one connection only.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHORIZATION,
    header::PROXY_AUTHENTICATE,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Removes what is for one connection only, and what that names.
pub(crate) fn strip(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// Serves one connection of a program to the proxy. That it breaks is the end of everything that was done for it, also while only the other side is waited
/// for.
pub(super) async fn serve(stream: TunnelStream, shared: Arc<Shared>) {
    let watch = stream.watch();
    tokio::select! {
        () = converse(stream, shared) => {}
        () = watch.broken() => debug!("the program cut its connection off"),
    }
}

async fn converse(mut stream: TunnelStream, shared: Arc<Shared>) {
    let first = match timeout(HEAD_WITHIN, stream.peek()).await {
        Ok(Ok(Some(first))) => first,
        _ => return,
    };
    if first != socks::VERSION {
        return serve_http(stream, shared).await;
    }
    match timeout(HEAD_WITHIN, socks::greet(&mut stream, &shared)).await {
        Ok(Ok(Some(open))) => carry(stream, open).await,
        // It was told why, or did not say what it wants.
        _ => drop(stream.shutdown().await),
    }
}

/// Copies until both have ended, or nothing has passed for long.
async fn carry(mut program: impl AsyncRead + AsyncWrite + Unpin, open: Open) {
    let Open { mut stream, record } = open;
    // Whatever ends this before both sides have ended it: nobody takes for whole what is not.
    stream.cut_off_when_dropped(true);
    if copied(&mut program, &mut stream, &record).await {
        stream.cut_off_when_dropped(false);
    }
}

/// Whether both have come to their end.
async fn copied(program: &mut (impl AsyncRead + AsyncWrite + Unpin), stream: &mut Metered<TcpStream>, record: &Record) -> bool {
    let mut copying = std::pin::pin!(copy_bidirectional_with_sizes(program, stream, COPY_BYTES, COPY_BYTES));
    let mut passed = 0;
    loop {
        match timeout(QUIET_AT_MOST, &mut copying).await {
            Ok(Ok(_)) => return true,
            Ok(Err(error)) => debug!(%error, "a connection broke off"),
            Err(_) if record.bytes() == passed => debug!("a connection was given up: nothing passes"),
            Err(_) => {
                passed = record.bytes();
                continue;
            }
        }
        return false;
    }
}

/// The last tunnel that was asked for, and its connection unless it was refused. hyper hands over the
/// program's stream after the answer to any CONNECT that ends the connection, so a refused tunnel is
/// kept too: its stream has to be ended, not dropped.
type Asked = Arc<Mutex<Option<(OnUpgrade, Option<Open>)>>>;

async fn serve_http(stream: TunnelStream, shared: Arc<Shared>) {
    let asked = Asked::default();
    let service = service_fn(|request| {
        let (shared, asked) = (Arc::clone(&shared), Arc::clone(&asked));
        async move { Ok::<_, Infallible>(answer(request, &shared, &asked).await) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WITHIN)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(Lingering::new(stream)), service)
        .with_upgrades()
        .await;
    if let Err(error) = served {
        if error.is_parse() {
            // It was told so, by a 400.
            policy::was_refused(&shared, "http", &Refusal::new(Kind::Malformed, format!("this is no request: {error}")));
        }
        return debug!(%error, "a program did not speak to the proxy as one does");
    }
    let asked = asked.lock().ok().and_then(|mut asked| asked.take());
    let Some((upgrade, open)) = asked else { return };
    // Without an upgrade hyper has ended the stream itself.
    let Ok(upgraded) = upgrade.await else { return };
    let mut stream = TokioIo::new(upgraded);
    match open {
        Some(open) => carry(stream, open).await,
        // A stream that breaks now has no reader for the refusal.
        None => drop(stream.shutdown().await),
    }
}

async fn answer(request: Request<Incoming>, shared: &Arc<Shared>, asked: &Asked) -> Response<Body> {
    let answered = if request.method() == Method::CONNECT { tunnel(request, shared, asked).await } else { forward(request, shared).await };
    answered.unwrap_or_else(|refusal| refused(&refusal))
}

fn refused(Refusal { kind, message }: &Refusal) -> Response<Body> {
    let status = match kind {
        Kind::Malformed => StatusCode::BAD_REQUEST,
        Kind::NotAllowed | Kind::Denied | Kind::Address | Kind::UsedUp => StatusCode::FORBIDDEN,
        Kind::TooMany => StatusCode::SERVICE_UNAVAILABLE,
        Kind::NotResolved | Kind::NotConnected => StatusCode::BAD_GATEWAY,
    };
    let mut response = Response::new(Body::from(format!("sandboxer: {message}\n")));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    if let Ok(message) = HeaderValue::from_str(message) {
        headers.insert(HeaderName::from_static("x-sandboxer-refused"), message);
    }
    response
}

/// The host and port of an authority that has nothing else in it.
fn target(authority: &Authority, default: Option<u16>) -> Option<(String, u16)> {
    let text = authority.as_str();
    let host = authority.host();
    // A user before the host is there only to mislead.
    if text.contains('@') || host.is_empty() {
        return None;
    }
    let port = match text.strip_prefix(host)? {
        "" => default?,
        _ => authority.port_u16().filter(|port| *port > 0)?,
    };
    Some((host.to_owned(), port))
}

/// What is written down of an address: neither passwords nor what is asked for.
fn host_of(uri: &hyper::Uri) -> &str {
    uri.authority().map_or("", Authority::host)
}

async fn malformed(shared: &Arc<Shared>, via: &str, asked: &str, message: &str) -> Refusal {
    policy::refuse(shared, via, asked, 0, Refusal::new(Kind::Malformed, message)).await
}

async fn tunnel(mut request: Request<Incoming>, shared: &Arc<Shared>, asked: &Asked) -> Result<Response<Body>, Refusal> {
    let upgrade = hyper::upgrade::on(&mut request);
    let opened = opened(&request, shared).await;
    let (open, answer) = match opened {
        Ok(open) => (Some(open), Ok(Response::new(Body::empty()))),
        Err(refusal) => (None, Err(refusal)),
    };
    if let Ok(mut asked) = asked.lock() {
        *asked = Some((upgrade, open));
    }
    answer
}

/// The connection to where a CONNECT leads.
async fn opened(request: &Request<Incoming>, shared: &Arc<Shared>) -> Result<Open, Refusal> {
    let wanted = request.uri().authority().and_then(|authority| target(authority, None));
    let Some((host, port)) = wanted else {
        return Err(malformed(shared, "connect", host_of(request.uri()), "CONNECT needs a name and a port").await);
    };
    policy::open(shared, "connect", &host, port).await
}

async fn forward(mut request: Request<Incoming>, shared: &Arc<Shared>) -> Result<Response<Body>, Refusal> {
    let uri = request.uri().clone();
    let authority = match (uri.scheme(), uri.authority()) {
        (Some(scheme), Some(authority)) if *scheme == Scheme::HTTP => authority,
        (Some(_), Some(_)) => {
            return Err(malformed(shared, "http", host_of(&uri), "only http:// is passed on; for anything else use CONNECT").await);
        }
        _ => return Err(malformed(shared, "http", host_of(&uri), "this is a proxy: ask it for an absolute address").await),
    };
    let Some((host, port)) = target(authority, Some(HTTP_PORT)) else {
        return Err(malformed(shared, "http", host_of(&uri), "the address names no host, or more than that").await);
    };
    let Open { stream, record } = policy::open(shared, "http", &host, port).await?;
    let named = if port == HTTP_PORT { host.clone() } else { format!("{host}:{port}") };
    let headers = request.headers_mut();
    strip(headers);
    headers.remove(header::EXPECT);
    let named = HeaderValue::from_str(&named).map_err(|_| Refusal::new(Kind::Malformed, "the name of the host makes no header"))?;
    headers.insert(header::HOST, named);
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    *request.uri_mut() = path.parse().map_err(|_| Refusal::new(Kind::Malformed, "the path makes no sense"))?;
    *request.version_mut() = hyper::Version::HTTP_11;
    let failed = |error: hyper::Error| Refusal::new(Kind::NotConnected, format!("{host} did not answer as a web server does: {error}"));
    let (mut sender, connection) = hyper::client::conn::http1::Builder::new().handshake(TokioIo::new(stream)).await.map_err(failed)?;
    let connection = AbortOnDropHandle::new(tokio::spawn(async move {
        // Whoever reads the answer hears of it.
        let _ = connection.await;
    }));
    let response = sender.send_request(request).await.map_err(failed)?;
    let (mut parts, body) = response.into_parts();
    strip(&mut parts.headers);
    Ok(Response::from_parts(parts, Body::new(Answer::new(body, connection, record))))
}

/// The body of an answer, with what has to stay for as long as it is read.
pub(crate) struct Answer<T: Send + 'static> {
    body: Incoming,
    connection: Option<AbortOnDropHandle<()>>,
    /// Nothing more comes.
    whole: bool,
    held: Option<T>,
}

impl<T: Send + 'static> Answer<T> {
    pub(crate) fn new(body: Incoming, connection: AbortOnDropHandle<()>, held: T) -> Self {
        Self { body, connection: Some(connection), whole: false, held: Some(held) }
    }
}

impl<T: Send + 'static> Drop for Answer<T> {
    fn drop(&mut self) {
        // Who has said everything is not cut off at once: the connection ends by itself, since nobody asks for more over it. One that does not
        // end, since it does not read what was sent, is cut off then, and counts until then.
        if let Some(connection) = self.connection.take()
            && (self.whole || self.body.is_end_stream())
        {
            let held = self.held.take();
            tokio::spawn(async move {
                let _ = timeout(ENDS_WITHIN, connection).await;
                drop(held);
            });
        }
    }
}

impl<T: Unpin + Send + 'static> hyper::body::Body for Answer<T> {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        self.whole |= matches!(frame, Poll::Ready(None));
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

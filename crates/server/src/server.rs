//! From start to stop.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use axum::http::Request;
use hyper::{body::Incoming, server::conn::http1};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use sandboxer_runtime::{HostLimits, Runtime};
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt as _;
use tracing::{debug, warn};

use crate::{
    http::{
        self,
        connections::{Connection, Connections},
    },
    images::Images,
    manager::Manager,
    sandbox::driver::Stop,
    settings::Settings,
    workspaces::{WorkspaceSettings, Workspaces},
};

/// How long a TLS handshake may take.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// After how long the kernel asks a silent peer whether it is there, and how often before it gives it up.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(30);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEPALIVE_TRIES: u32 = 3;
/// How long a client may take to send its request.
const HEADERS_WITHIN: Duration = Duration::from_secs(10);
/// The largest head of a request. A connection holds as much while its head is not whole.
const MAX_HEAD_BYTES: usize = 64 * 1024;
/// How long connections may take to close once the sandboxes have ended.
const CONNECTIONS_GRACE: Duration = Duration::from_secs(3);
/// Connections at once to where only metrics are served. Beyond this new ones wait in the kernel.
const MAX_METRICS_CONNECTIONS: usize = 64;
/// How long to wait when the process has no descriptor left for another connection.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// What becomes of the sandboxes when the server stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopHow {
    /// They end.
    Drain,
    /// They are left running for the next start.
    Restart,
}

pub struct Server {
    manager: Arc<Manager>,
    workspaces: Arc<Workspaces>,
    listener: TcpListener,
    /// Where `/metrics` is served without a key.
    metrics: Option<TcpListener>,
    connections: TaskTracker,
    closing: CancellationToken,
}

impl Server {
    /// Binds the address and takes up the sandboxes that an earlier process left.
    ///
    /// # Errors
    /// The address can't be bound, or the data directory not be used.
    pub async fn start(mut settings: Settings, runtime: Arc<dyn Runtime>, images: Images, host: HostLimits) -> io::Result<Self> {
        let listener = bind(settings.listen).await?;
        let metrics = match settings.metrics_listen {
            Some(address) => Some(bind(address).await?),
            None => None,
        };
        settings.network.own.push(listener.local_addr()?);
        if let Some(metrics) = &metrics {
            settings.network.own.push(metrics.local_addr()?);
        }
        let workspaces = match settings.workspaces.clone() {
            Some(workspaces) => workspaces,
            None => WorkspaceSettings::unconfigured(&settings.data_dir)?,
        };
        let workspaces = Workspaces::open(workspaces, settings.key_limits.sandboxes).await?;
        let manager = Manager::open(settings, runtime, images, host)?;
        manager.take_up_all().await;
        manager.keep_pool();
        Ok(Self { manager, workspaces, listener, metrics, connections: TaskTracker::new(), closing: CancellationToken::new() })
    }

    /// # Errors
    /// The socket does not know its address, which does not happen.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Where `/metrics` is served without a key, if it is.
    ///
    /// # Errors
    /// The socket does not know its address, which does not happen.
    pub fn metrics_address(&self) -> io::Result<Option<SocketAddr>> {
        self.metrics.as_ref().map(TcpListener::local_addr).transpose()
    }

    /// Serves until `stop` says how to end, then ends. Whoever comes meanwhile is told so.
    pub async fn serve(self, stop: impl Future<Output = StopHow>) {
        let tls = self.manager.settings().tls.clone().map(|tls| TlsAcceptor::from(tls.0));
        let serving = self.serve_clients(http::router(Arc::clone(&self.manager), Arc::clone(&self.workspaces)), tls);
        let measured = async {
            match &self.metrics {
                Some(listener) => {
                    let router = http::metrics_router(Arc::clone(&self.manager));
                    self.serve_metrics(listener, router).await;
                }
                None => std::future::pending().await,
            }
        };
        let collecting = self.manager.collect();
        let ending = async {
            let stop = stop.await;
            // Saves come first; who collects next goes on with it.
            drop(collecting);
            let stop = match stop {
                StopHow::Drain => Stop::Drain,
                StopHow::Restart => Stop::Restart,
            };
            let grace = self.manager.settings().stop_grace;
            tokio::join!(self.manager.stop(stop), self.workspaces.stop(grace));
            self.manager.sockets.close();
            // An upgraded connection is served by a task of its own.
            if timeout(CONNECTIONS_GRACE, self.manager.sockets.wait()).await.is_err() {
                debug!("some clients did not close in time");
            }
        };
        tokio::select! {
            () = serving => {}
            () = measured => {}
            () = ending => {}
        }
        drop((self.listener, self.metrics));
        self.closing.cancel();
        self.connections.close();
        if timeout(CONNECTIONS_GRACE, self.connections.wait()).await.is_err() {
            debug!("some connections did not close in time");
        }
    }

    /// Serves clients, for ever.
    async fn serve_clients(&self, router: axum::Router, tls: Option<TlsAcceptor>) {
        let open = Connections::new(!self.manager.settings().access.keys.is_empty());
        loop {
            let Some((stream, peer)) = next_of(&self.listener).await else { continue };
            let (router, tls, closing, connection) = (router.clone(), tls.clone(), self.closing.clone(), open.open());
            self.connections.spawn(async move {
                let serving = accepted(stream, peer, tls, router, closing, Some(Arc::clone(&connection)));
                tokio::select! {
                    () = serving => {}
                    () = connection.ended() => debug!(%peer, "a connection without a key made room for another"),
                }
            });
        }
    }

    /// Serves metrics, for ever.
    async fn serve_metrics(&self, listener: &TcpListener, router: axum::Router) {
        let places = Arc::new(Semaphore::new(MAX_METRICS_CONNECTIONS));
        loop {
            // The semaphore is never closed.
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            let Some((stream, peer)) = next_of(listener).await else { continue };
            let (router, closing) = (router.clone(), self.closing.clone());
            self.connections.spawn(async move {
                accepted(stream, peer, None, router, closing, None).await;
                drop(place);
            });
        }
    }
}

/// The next connection. None: it could not be accepted, and there was a pause.
async fn next_of(listener: &TcpListener) -> Option<(TcpStream, SocketAddr)> {
    match listener.accept().await {
        Ok(accepted) => Some(accepted),
        Err(error) => {
            warn!(%error, "a connection could not be accepted");
            tokio::time::sleep(ACCEPT_AGAIN).await;
            None
        }
    }
}

async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| io::Error::new(error.kind(), format!("listen on {address}: {error}")))
}

async fn accepted(
    stream: TcpStream,
    peer: SocketAddr,
    tls: Option<TlsAcceptor>,
    router: axum::Router,
    closing: CancellationToken,
    counted: Option<Arc<Connection>>,
) {
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_AFTER).with_interval(KEEPALIVE_EVERY).with_retries(KEEPALIVE_TRIES);
    let socket = SockRef::from(&stream);
    // Small messages must not wait for large ones, and a peer that vanished must not hold its sandbox for ever.
    if let Err(error) = socket.set_tcp_nodelay(true).and_then(|()| socket.set_tcp_keepalive(&keepalive)) {
        debug!(%peer, %error, "the connection is gone already");
        return;
    }
    match tls {
        None => connection(stream, peer, router, closing, counted).await,
        Some(tls) => match timeout(HANDSHAKE_WITHIN, tls.accept(stream)).await {
            Ok(Ok(stream)) => connection(stream, peer, router, closing, counted).await,
            Ok(Err(error)) => debug!(%peer, %error, "a TLS handshake failed"),
            Err(_) => debug!(%peer, "a TLS handshake took too long"),
        },
    }
}

async fn connection<S>(stream: S, peer: SocketAddr, router: axum::Router, closing: CancellationToken, counted: Option<Arc<Connection>>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = TowerToHyperService::new(router.map_request(move |mut request: Request<Incoming>| {
        // Those who answer a request tell whom its connection is for.
        if let Some(counted) = &counted {
            request.extensions_mut().insert(Arc::clone(counted));
        }
        request
    }));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS_WITHIN)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    tokio::pin!(connection);
    let served = tokio::select! {
        served = &mut connection => served,
        () = closing.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = served {
        debug!(%peer, %error, "a connection ended badly");
    }
}

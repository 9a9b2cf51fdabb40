//! One attempt to connect: TCP, TLS, the WebSocket handshake.

use std::{sync::Arc, time::Duration};

use sandboxer_protocol::{SandboxId, client::ErrorCode};
use tokio::{net::TcpStream, time::timeout};
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream,
    tungstenite::{
        self,
        client::IntoClientRequest,
        http::{HeaderMap, HeaderValue, StatusCode, header},
        protocol::WebSocketConfig,
    },
};

use crate::{Address, Connection, Error, outage::Setback};

pub(crate) type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// One message of the server. Output comes in pieces of a quarter of a MiB, six times that as escaped text at the worst.
const MAX_SERVER_MESSAGE_BYTES: usize = 16 * 1024 * 1024;

/// What to become the client of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    Create,
    Attach { id: SandboxId, token: Option<String> },
}

/// Why an attempt failed.
#[derive(Debug)]
pub(crate) enum Failure {
    Again(Setback),
    Final(Error),
}

/// What a handshake brought. A failed one may have set cookies too.
pub(crate) struct Attempt {
    pub(crate) headers: HeaderMap,
    pub(crate) result: Result<Socket, Failure>,
}

/// Everything that an attempt needs and that stays the same.
#[derive(Clone)]
pub(crate) struct Connector {
    address: Arc<Address>,
    authorization: Option<HeaderValue>,
    tls: Option<Tls>,
    timeout: Duration,
}

impl Connector {
    /// # Errors
    /// The key can't be a header, or TLS is asked for and can't be had.
    pub(crate) fn new(address: Address, connection: &Connection) -> Result<Self, Error> {
        let authorization = match &connection.api_key {
            None => None,
            Some(key) => {
                let mut value = HeaderValue::from_str(&format!("Bearer {key}"))
                    .map_err(|_| Error::invalid("The API key has characters that a key can't have."))?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        let tls = if address.is_secure() { Some(tls()?) } else { None };
        Ok(Self { address: Arc::new(address), authorization, tls, timeout: connection.connect_timeout })
    }

    /// Connects. Dropping the future ends the attempt.
    pub(crate) async fn connect(self, target: Target, cookies: Option<HeaderValue>) -> Attempt {
        match timeout(self.timeout, self.handshake(&target, cookies)).await {
            Ok(attempt) => attempt,
            Err(_) => failed(Failure::Again(Setback::Cut(format!("{} did not answer within {:?}", self.address, self.timeout)))),
        }
    }

    async fn handshake(&self, target: &Target, cookies: Option<HeaderValue>) -> Attempt {
        let request = match self.request(target, cookies) {
            Ok(request) => request,
            Err(error) => return failed(Failure::Final(error)),
        };
        let tcp = match TcpStream::connect(self.address.socket()).await {
            Ok(tcp) => tcp,
            Err(error) => return failed(Failure::Again(Setback::Cut(format!("connecting to {}: {error}", self.address)))),
        };
        // A key press must not wait for the acknowledgement of the one before. Where it can't be set, it is only slower.
        let _ = tcp.set_nodelay(true);
        let config =
            WebSocketConfig::default().max_message_size(Some(MAX_SERVER_MESSAGE_BYTES)).max_frame_size(Some(MAX_SERVER_MESSAGE_BYTES));
        match open(request, tcp, config, self.tls.clone()).await {
            Ok((socket, response)) => Attempt { headers: response.headers().clone(), result: Ok(socket) },
            Err(tungstenite::Error::Http(response)) => {
                Attempt { headers: response.headers().clone(), result: Err(self.refusal(response.status(), response.body().as_deref())) }
            }
            // A certificate that is not trusted won't be by asking again.
            Err(tungstenite::Error::Io(error)) if error.kind() == std::io::ErrorKind::InvalidData => {
                failed(Failure::Final(Error::invalid(format!("{}: {error}", self.address))))
            }
            Err(error) => failed(Failure::Again(Setback::Cut(format!("connecting to {}: {error}", self.address)))),
        }
    }

    fn request(&self, target: &Target, cookies: Option<HeaderValue>) -> Result<tungstenite::handshake::client::Request, Error> {
        let url = match target {
            Target::Create => self.address.create_url(),
            Target::Attach { id, .. } => self.address.attach_url(*id),
        };
        let mut request = url.into_client_request().map_err(|error| Error::invalid(format!("{}: {error}", self.address)))?;
        let headers = request.headers_mut();
        if let Some(value) = &self.authorization {
            headers.insert(header::AUTHORIZATION, value.clone());
        }
        if let Some(value) = cookies {
            headers.insert(header::COOKIE, value);
        }
        if let Target::Attach { token: Some(token), .. } = target {
            let mut value =
                HeaderValue::from_str(token).map_err(|_| Error::invalid("The sandbox token has characters that a token can't have."))?;
            value.set_sensitive(true);
            headers.insert("x-sandbox-token", value);
        }
        Ok(request)
    }

    fn refusal(&self, status: StatusCode, body: Option<&[u8]>) -> Failure {
        #[derive(serde::Deserialize)]
        struct Body {
            error: Detail,
        }
        #[derive(serde::Deserialize)]
        struct Detail {
            message: String,
        }
        let detail = body.and_then(|body| serde_json::from_slice::<Body>(body).ok()).map(|body| body.error.message);
        let message = format!("{} answered {status}{}", self.address, detail.map(|text| format!(": {text}")).unwrap_or_default());
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Failure::Final(Error::Denied { message }),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => Failure::Again(Setback::Cut(message)),
            status if status.is_server_error() => Failure::Again(Setback::Cut(message)),
            _ => Failure::Final(Error::refused(ErrorCode::NotImplemented, format!("{message}; is this a sandboxer server?"))),
        }
    }
}

fn failed(failure: Failure) -> Attempt {
    Attempt { headers: HeaderMap::new(), result: Err(failure) }
}

type Opened = (Socket, tungstenite::handshake::client::Response);

#[cfg(feature = "tls")]
type Tls = tokio_tungstenite::Connector;

#[cfg(feature = "tls")]
async fn open(
    request: tungstenite::handshake::client::Request,
    tcp: TcpStream,
    config: WebSocketConfig,
    tls: Option<Tls>,
) -> tungstenite::Result<Opened> {
    tokio_tungstenite::client_async_tls_with_config(request, tcp, Some(config), tls).await
}

/// There is none.
#[cfg(not(feature = "tls"))]
#[derive(Clone)]
enum Tls {}

#[cfg(not(feature = "tls"))]
async fn open(
    request: tungstenite::handshake::client::Request,
    tcp: TcpStream,
    config: WebSocketConfig,
    _tls: Option<Tls>,
) -> tungstenite::Result<Opened> {
    tokio_tungstenite::client_async_with_config(request, MaybeTlsStream::Plain(tcp), Some(config)).await
}

#[cfg(feature = "tls")]
fn tls() -> Result<Tls, Error> {
    tls_config().map(tokio_tungstenite::Connector::Rustls)
}

/// The certificates that this machine trusts.
#[cfg(feature = "tls")]
pub(crate) fn tls_config() -> Result<Arc<rustls::ClientConfig>, Error> {
    let mut roots = rustls::RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    let (good, _) = roots.add_parsable_certificates(found.certs);
    if good == 0 {
        let errors: Vec<_> = found.errors.iter().map(ToString::to_string).collect();
        let hint = "Install ca-certificates, or name a file by SSL_CERT_FILE.";
        return Err(Error::invalid(format!("No certificate authority is known on this machine. {hint} {}", errors.join("; "))));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::invalid(format!("TLS: {error}")))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(config))
}

#[cfg(not(feature = "tls"))]
fn tls() -> Result<Tls, Error> {
    Err(Error::invalid("This client was built without TLS: use an http:// address, or build it with the feature \"tls\"."))
}

//! The resource API of a server: plain HTTP, one connection a request.

mod transfer;
mod upgrade;

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited, combinators::BoxBody};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Body, Frame, Incoming},
    client::conn::http1,
    header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue},
};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};

use crate::{Address, Connection, Error, route::Addresses};

/// The largest answer.
const MAX_ANSWER_BYTES: usize = 64 * 1024 * 1024;
/// How long an answer may take: the server works until what was asked for is done.
const ANSWER_WITHIN: Duration = Duration::from_secs(2 * 3600);
/// After how long the kernel asks a silent server whether its machine is there, and how often before it gives it up: a work may take hours without a word.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(15);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEPALIVE_TRIES: u32 = 4;
/// How long a server may pause in the middle of an answer: a little more than after which it gives up what does not move.
const NEXT_PIECE_WITHIN: Duration = Duration::from_secs(330);

/// What is sent with a request.
type Sent = BoxBody<Bytes, std::io::Error>;

/// What a server answered.
///
/// ```no_run
/// # async fn example(api: sandboxer_client::Api) -> Result<(), Box<dyn std::error::Error>> {
/// let answer = api.request("GET", "/v1/profiles", None).await?;
/// if answer.status != 404 {
///     println!("{}", answer.ok()?["items"]);
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Answer {
    /// As HTTP means it.
    pub status: u16,
    /// The object, or null where there is none.
    pub body: Value,
}

/// The resource API of a server, or of the first of several that can be reached.
///
/// ```no_run
/// # async fn example() -> Result<(), sandboxer_client::Error> {
/// use sandboxer_client::{Api, Connection};
///
/// let api = Api::new("http://127.0.0.1:8080", &Connection::default().api_key("key"))?;
/// for sandbox in api.sandboxes().await? {
///     println!("{} has {} things in /root", sandbox.id, api.files(sandbox.id).list("/root").await?.len());
/// }
/// // What this library has no words for can be asked for all the same.
/// let mut layer = Vec::new();
/// api.download("/v1/filesystem-snapshots/tools/layer", &mut layer).await?;
/// api.upload("/v1/filesystem-snapshots/copy/layer", std::io::Cursor::new(layer)).await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Api {
    addresses: Addresses,
    authorization: Option<HeaderValue>,
    connect_timeout: Duration,
}

impl Api {
    /// Several addresses are separated by commas.
    ///
    /// # Errors
    /// The address is none, or the key can't be a header.
    pub fn new(address: &str, connection: &Connection) -> Result<Self, Error> {
        Self::of(address.parse()?, connection)
    }

    pub(crate) fn of(addresses: Addresses, connection: &Connection) -> Result<Self, Error> {
        let key = |key: &String| {
            let mut value = HeaderValue::from_str(&format!("Bearer {key}"))
                .map_err(|_| Error::invalid("The API key has characters that a key can't have."))?;
            value.set_sensitive(true);
            Ok(value)
        };
        let authorization = connection.api_key.as_ref().map(key).transpose()?;
        Ok(Self { addresses, authorization, connect_timeout: connection.connect_timeout })
    }

    /// Asks for something below `/v1`, such as `GET /v1/snapshots`. What the server refuses is an answer too: look at its status.
    ///
    /// # Errors
    /// The server can't be reached, or does not answer in JSON.
    pub async fn request(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Answer, Error> {
        let bytes = body.map(|body| Bytes::from(body.to_string())).unwrap_or_default();
        let kind = body.map(|_| "application/json");
        let sent = Full::new(bytes).map_err(|never| match never {}).boxed();
        let response = self.send(method, path, kind, sent).await?;
        timeout(ANSWER_WITHIN, self.answer(response)).await.unwrap_or_else(|_| Err(self.cut("it did not answer in time")))
    }

    fn cut(&self, why: impl std::fmt::Display) -> Error {
        Error::Unavailable { message: format!("{}: {why}", self.addresses.here()) }
    }

    /// Connects to the first that can be reached.
    async fn connect(&self) -> Result<(TcpStream, &Address), Error> {
        let mut failed = Vec::new();
        for (index, address) in self.addresses.in_turn() {
            match timeout(self.connect_timeout, TcpStream::connect(address.socket())).await {
                Ok(Ok(tcp)) => {
                    self.addresses.answered(index);
                    stay_awake(&tcp);
                    return Ok((tcp, address));
                }
                Ok(Err(error)) => failed.push(format!("connecting to {address}: {error}")),
                Err(_) => failed.push(format!("{address} did not answer within {:?}", self.connect_timeout)),
            }
        }
        Err(Error::Unavailable { message: failed.join("; ") })
    }

    /// Sends a request; what is answered comes when it is read.
    async fn send(&self, method: &str, path: &str, kind: Option<&'static str>, body: Sent) -> Result<Response<Incoming>, Error> {
        self.deliver(|address| self.build(address, method, path, kind, body)).await
    }

    /// Sends what is made for the server that can be reached.
    async fn deliver(&self, make: impl FnOnce(&Address) -> Result<Request<Sent>, Error>) -> Result<Response<Incoming>, Error> {
        let cut = |why: String| Error::Unavailable { message: why };
        let (tcp, address) = self.connect().await?;
        let request = make(address)?;
        let asked = async {
            if address.is_secure() {
                let stream = tls(address.socket().0, tcp).await.map_err(|why| cut(format!("{address}: {why}")))?;
                self.ask(stream, request).await
            } else {
                self.ask(tcp, request).await
            }
        };
        timeout(ANSWER_WITHIN, asked).await.unwrap_or_else(|_| Err(cut(format!("{address} did not answer in time"))))
    }

    fn build(&self, address: &Address, method: &str, path: &str, kind: Option<&'static str>, body: Sent) -> Result<Request<Sent>, Error> {
        let method = Method::from_bytes(method.as_bytes()).map_err(|_| Error::invalid(format!("{method:?} is no method of HTTP.")))?;
        let mut request = Request::builder().method(method).uri(address.path(path)).header(HOST, address.authority());
        if let Some(value) = &self.authorization {
            request = request.header(AUTHORIZATION, value.clone());
        }
        if let Some(kind) = kind {
            request = request.header(CONTENT_TYPE, kind);
        }
        request.body(body).map_err(|error| Error::invalid(format!("{path:?} can't be asked for: {error}")))
    }

    async fn ask<S>(&self, stream: S, request: Request<Sent>) -> Result<Response<Incoming>, Error>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|error| self.cut(error))?;
        // It ends with the request, whose error says all there is to say.
        tokio::spawn(async move { connection.with_upgrades().await.ok() });
        sender.send_request(request).await.map_err(|error| match std::error::Error::source(&error) {
            // What was to be sent could not be read: that is not the server's fault.
            Some(why) if error.is_user() => Error::invalid(format!("what was to be sent could not be read: {why}")),
            _ => self.cut(error),
        })
    }

    /// What was answered, in JSON.
    async fn answer(&self, response: Response<Incoming>) -> Result<Answer, Error> {
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await.map_err(|error| self.cut(error))?.to_bytes();
        if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            let message = format!("{} answered {status}: {}", self.addresses.here(), message(&body));
            return Err(Error::Denied { message });
        }
        let body = if body.is_empty() {
            Value::Null
        } else {
            serde_json::from_slice(&body)
                .map_err(|_| self.cut(format!("it answered {status}, and not in JSON; is this a sandboxer server?")))?
        };
        Ok(Answer { status: status.as_u16(), body })
    }
}

/// A server whose machine has gone says nothing. Where it can't be set, it is only noticed later.
fn stay_awake(tcp: &TcpStream) {
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_AFTER).with_interval(KEEPALIVE_EVERY).with_retries(KEEPALIVE_TRIES);
    let _ = SockRef::from(tcp).set_tcp_keepalive(&keepalive);
}

/// The next piece of an answer; none: that was all.
async fn next_piece<B>(body: &mut B) -> Result<Option<Bytes>, String>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    loop {
        let frame = timeout(NEXT_PIECE_WITHIN, body.frame()).await;
        let frame = frame.map_err(|_| format!("nothing came for {} s", NEXT_PIECE_WITHIN.as_secs()))?;
        match frame.transpose().map_err(|error| error.to_string())?.map(Frame::into_data) {
            None => return Ok(None),
            Some(Ok(data)) => return Ok(Some(data)),
            // Trailers, of which nothing is wanted.
            Some(Err(_)) => {}
        }
    }
}

impl Answer {
    /// The object.
    ///
    /// # Errors
    /// What the server said instead.
    pub fn ok(self) -> Result<Value, String> {
        if (200..300).contains(&self.status) {
            return Ok(self.body);
        }
        let message = self.body["error"]["message"].as_str().unwrap_or("the server did not say why");
        Err(format!("{message} ({})", self.status))
    }
}

fn message(body: &[u8]) -> String {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    body["error"]["message"].as_str().unwrap_or("it did not say why").to_owned()
}

#[cfg(feature = "tls")]
async fn tls(host: &str, tcp: TcpStream) -> Result<impl AsyncRead + AsyncWrite + Unpin + Send + 'static, String> {
    let name = rustls::pki_types::ServerName::try_from(host.to_owned()).map_err(|error| error.to_string())?;
    let config = crate::connect::tls_config().map_err(|error| error.to_string())?;
    tokio_rustls::TlsConnector::from(config).connect(name, tcp).await.map_err(|error| error.to_string())
}

#[cfg(not(feature = "tls"))]
async fn tls(_host: &str, _tcp: TcpStream) -> Result<TcpStream, String> {
    Err("this client was built without TLS".to_owned())
}

#[cfg(test)]
mod tests {
    use futures_util::{StreamExt as _, stream};
    use http_body_util::StreamBody;
    use tokio::{net::TcpListener, time::Instant};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_stops_in_the_middle_is_given_up() {
        let pieces = stream::iter([Ok::<_, std::io::Error>(Frame::data(Bytes::from_static(b"half")))]).chain(stream::pending());
        let mut body = StreamBody::new(pieces);
        assert_eq!(next_piece(&mut body).await.unwrap().unwrap(), "half");
        let begun = Instant::now();
        assert!(next_piece(&mut body).await.unwrap_err().contains("nothing came"));
        assert!(begun.elapsed() >= NEXT_PIECE_WITHIN);
    }

    #[tokio::test]
    async fn a_server_whose_machine_is_gone_is_noticed_however_long_its_answer_may_take() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let api = Api::new(&address, &Connection::default()).unwrap();
        let (tcp, _) = api.connect().await.unwrap();
        let socket = SockRef::from(&tcp);
        assert!(socket.keepalive().unwrap());
        let within =
            socket.tcp_keepalive_time().unwrap() + socket.tcp_keepalive_interval().unwrap() * socket.tcp_keepalive_retries().unwrap();
        assert!(within <= Duration::from_secs(60), "{within:?}");
    }
}

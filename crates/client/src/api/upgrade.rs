//! A connection to the server that becomes one to a port inside a sandbox.

use http_body_util::{BodyExt as _, Empty};
use hyper::{
    StatusCode,
    header::{CONNECTION, HeaderValue, UPGRADE},
};
use hyper_util::rt::TokioIo;
use sandboxer_protocol::SandboxId;
use tokio::io::{AsyncRead, AsyncWrite};

use super::Api;
use crate::{Address, Error};

const RAW: &str = "sandboxer-tcp";

impl Api {
    /// Connects to a port of a sandbox's loopback address.
    ///
    /// ```no_run
    /// # async fn example(sandbox: sandboxer_client::Sandbox) -> Result<(), Box<dyn std::error::Error>> {
    /// use tokio::io::AsyncWriteExt as _;
    ///
    /// let mut connection = sandbox.api().connect_port(sandbox.id(), 5432).await?;
    /// connection.write_all(b"hello").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The server can't be reached, or does not lead there: what it says is the message.
    pub async fn connect_port(&self, id: SandboxId, port: u16) -> Result<impl AsyncRead + AsyncWrite + Unpin + Send + use<>, Error> {
        let nothing = Empty::new().map_err(|never| match never {}).boxed();
        let make = |address: &Address| {
            let mut request = self.build(address, "GET", &format!("/v1/sandboxes/{id}/ports/{port}"), None, nothing)?;
            request.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
            request.headers_mut().insert(UPGRADE, HeaderValue::from_static(RAW));
            Ok(request)
        };
        let response = self.deliver(make).await?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let upgraded = hyper::upgrade::on(response).await.map_err(|error| self.cut(error))?;
            return Ok(TokioIo::new(upgraded));
        }
        let message = self.answer(response).await?.ok().err().unwrap_or_else(|| "the server did not connect".to_owned());
        Err(self.cut(message))
    }
}

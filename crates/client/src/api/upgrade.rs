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
use crate::Error;

const RAW: &str = "sandboxer-tcp";

impl Api {
    /// Connects to a port of a sandbox's loopback address.
    ///
    /// # Errors
    /// The server can't be reached, or does not lead there: what it says is the message.
    pub async fn connect_port(&self, id: SandboxId, port: u16) -> Result<impl AsyncRead + AsyncWrite + Unpin + Send + use<>, Error> {
        let nothing = Empty::new().map_err(|never| match never {}).boxed();
        let mut request = self.build("GET", &format!("/v1/sandboxes/{id}/ports/{port}"), None, nothing)?;
        request.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
        request.headers_mut().insert(UPGRADE, HeaderValue::from_static(RAW));
        let response = self.deliver(request).await?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let upgraded = hyper::upgrade::on(response).await.map_err(|error| self.cut(error))?;
            return Ok(TokioIo::new(upgraded));
        }
        let message = self.answer(response).await?.ok().err().unwrap_or_else(|| "the server did not connect".to_owned());
        Err(self.cut(message))
    }
}

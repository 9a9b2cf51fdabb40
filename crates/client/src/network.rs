//! The network of a sandbox: what its programs have reached, and links to their own servers.

use std::time::Duration;

use serde::Deserialize;
use serde_json::json;

use crate::{Error, Sandbox};

/// A connection that a program in a sandbox wanted.
///
/// ```no_run
/// # async fn example(sandbox: sandboxer_client::Sandbox) -> Result<(), sandboxer_client::Error> {
/// for connection in sandbox.network_log().await? {
///     println!("{} {}:{} {}", connection.time, connection.host, connection.port, connection.verdict);
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct NetworkConnection {
    /// When, in RFC 3339.
    pub time: String,
    /// `connect`, `http` or `socks5`.
    pub via: String,
    /// As the program named it.
    pub host: String,
    /// Of that host.
    pub port: u16,
    /// What was connected to, if anything was.
    pub address: Option<String>,
    /// `allowed`, or why not.
    pub verdict: String,
    /// The rule that it rests on.
    pub why: String,
    /// Bytes from the sandbox.
    pub sent: u64,
    /// Bytes to it.
    pub received: u64,
    /// None: it goes on.
    pub duration_ms: Option<u64>,
}

/// A link to a port of a sandbox, for who has no key.
///
/// ```no_run
/// # async fn example(sandbox: sandboxer_client::Sandbox) -> Result<(), sandboxer_client::Error> {
/// sandbox.bash("python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 &").await?.wait().await?;
/// let link = sandbox.port(8000, std::time::Duration::from_secs(3600)).await?;
/// println!("open {} until {}", link.url, link.expires_at);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct PortLink {
    /// Where to go.
    pub url: String,
    /// Of the sandbox.
    pub port: u16,
    /// When it no longer opens anything, in RFC 3339.
    pub expires_at: String,
}

impl Sandbox {
    /// The newest connections of the sandbox's programs, oldest first, also those that were refused.
    ///
    /// # Errors
    /// The server can't be reached or does not have the sandbox.
    pub async fn network_log(&self) -> Result<Vec<NetworkConnection>, Error> {
        let answer = self.api().request("GET", &format!("/v1/sandboxes/{}/network", self.id()), None).await?;
        let mut log = answer.ok().map_err(|message| Error::Unavailable { message })?;
        serde_json::from_value(log["items"].take())
            .map_err(|error| Error::Unavailable { message: format!("the log makes no sense: {error}") })
    }

    /// A link that opens what listens at a port of the sandbox's loopback address, for so long.
    ///
    /// # Errors
    /// The server can't be reached or does not have the sandbox.
    pub async fn port(&self, port: u16, expires_in: Duration) -> Result<PortLink, Error> {
        let body = json!({ "port": port, "expires_in": expires_in.as_secs().max(1) });
        let answer = self.api().request("POST", &format!("/v1/sandboxes/{}/ports", self.id()), Some(&body)).await?;
        let link = answer.ok().map_err(|message| Error::Unavailable { message })?;
        serde_json::from_value(link).map_err(|error| Error::Unavailable { message: format!("the link makes no sense: {error}") })
    }
}

//! Where a server is.

use std::{fmt, str::FromStr};

use sandboxer_protocol::SandboxId;
use tokio_tungstenite::tungstenite::http::Uri;

use crate::Error;

/// The address of a server: `http://`, `https://`, `ws://` or `wss://`, a host, and optionally a port and a path before the
/// server's own paths. Without a scheme it means `http://`.
///
/// ```
/// use sandboxer_client::Address;
///
/// let address: Address = "https://sandboxes.example.org/eu".parse()?;
/// assert!(address.is_secure());
/// assert_eq!(address.to_string(), "https://sandboxes.example.org:443/eu");
/// assert!("ftp://example.org".parse::<Address>().is_err());
/// # Ok::<(), sandboxer_client::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    secure: bool,
    host: String,
    port: u16,
    prefix: String,
}

impl Address {
    /// Whether the connection is encrypted.
    #[must_use]
    pub fn is_secure(&self) -> bool {
        self.secure
    }

    /// What to look up and connect to.
    pub(crate) fn socket(&self) -> (&str, u16) {
        (self.host.trim_start_matches('[').trim_end_matches(']'), self.port)
    }

    /// What a request line asks for.
    pub(crate) fn path(&self, path: &str) -> String {
        format!("{}{path}", self.prefix)
    }

    /// What a `Host` header says.
    pub(crate) fn authority(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    pub(crate) fn create_url(&self) -> String {
        self.url("create")
    }

    pub(crate) fn attach_url(&self, id: SandboxId) -> String {
        self.url(&format!("attach/{id}"))
    }

    fn url(&self, path: &str) -> String {
        let scheme = if self.secure { "wss" } else { "ws" };
        format!("{scheme}://{}:{}{}/{path}", self.host, self.port, self.prefix)
    }
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = |why: &str| Error::invalid(format!("{text:?} is no address of a server: {why}. Example: http://127.0.0.1:8080"));
        let full = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
        let uri: Uri = full.parse().map_err(|error| bad(&format!("{error}")))?;
        let secure = match uri.scheme_str() {
            Some("http" | "ws") => false,
            Some("https" | "wss") => true,
            _ => return Err(bad("it begins with http://, https://, ws:// or wss://")),
        };
        let authority = uri.authority().ok_or_else(|| bad("it has no host"))?;
        if authority.as_str().contains('@') {
            return Err(bad("it can't carry a user or password; give the API key as an option"));
        }
        if uri.query().is_some() || text.contains('#') {
            return Err(bad("it has a query or a fragment"));
        }
        if authority.host().is_empty() {
            return Err(bad("it has no host"));
        }
        let port = match authority.port() {
            Some(port) => port.as_u16(),
            None if authority.as_str() != authority.host() => return Err(bad("its port is no port")),
            None => {
                if secure {
                    443
                } else {
                    80
                }
            }
        };
        Ok(Self { secure, host: authority.host().to_owned(), port, prefix: uri.path().trim_end_matches('/').to_owned() })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.secure { "https" } else { "http" };
        write!(f, "{scheme}://{}:{}{}", self.host, self.port, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_says_where_to_connect_and_what_to_ask_for() {
        let cases = [
            ("http://127.0.0.1:8080", ("127.0.0.1", 8080), "ws://127.0.0.1:8080/create"),
            ("127.0.0.1:8080", ("127.0.0.1", 8080), "ws://127.0.0.1:8080/create"),
            ("ws://localhost", ("localhost", 80), "ws://localhost:80/create"),
            ("https://example.org/", ("example.org", 443), "wss://example.org:443/create"),
            ("wss://example.org/a/b/", ("example.org", 443), "wss://example.org:443/a/b/create"),
            ("http://[::1]:9", ("::1", 9), "ws://[::1]:9/create"),
        ];
        for (text, socket, url) in cases {
            let address: Address = text.parse().unwrap();
            assert_eq!((address.socket(), address.create_url()), (socket, url.to_owned()), "{text}");
        }
    }

    #[test]
    fn what_is_no_address_is_refused_with_a_hint() {
        for text in ["", "ftp://a", "http://", "http://a:b@c", "http://a/?q", "http://a b", "http://a:99999", "http://a/#x"] {
            let error = text.parse::<Address>().unwrap_err();
            assert!(matches!(&error, Error::Invalid { message } if message.contains("Example")), "{text}: {error}");
        }
    }
}

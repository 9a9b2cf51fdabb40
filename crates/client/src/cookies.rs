//! The cookies by which a load balancer finds the instance again.

use tokio_tungstenite::tungstenite::http::{HeaderMap, HeaderValue, header::SET_COOKIE};

/// A server that sets more than this is not heard any further.
const MAX_COOKIES: usize = 32;
const MAX_COOKIE_BYTES: usize = 4096;

/// Cookies by name. All of them belong to the one server that this client talks to, so domain and path are not looked at.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cookies {
    /// Few, and their order is kept.
    pairs: Vec<(String, String)>,
}

impl Cookies {
    /// Takes what a handshake response sets: a newer value replaces the one of the same name, `Max-Age=0` removes it.
    pub(crate) fn take(&mut self, headers: &HeaderMap) {
        for header in headers.get_all(SET_COOKIE) {
            if let Ok(text) = header.to_str() {
                self.set(text);
            }
        }
    }

    fn set(&mut self, header: &str) {
        let mut parts = header.split(';');
        let Some((name, value)) = parts.next().and_then(|pair| pair.split_once('=')) else { return };
        let (name, value) = (name.trim(), value.trim());
        if name.is_empty() || name.len() + value.len() > MAX_COOKIE_BYTES {
            return;
        }
        self.pairs.retain(|(known, _)| known != name);
        let expired = parts.any(|attribute| {
            let Some((key, value)) = attribute.split_once('=') else { return false };
            key.trim().eq_ignore_ascii_case("max-age") && value.trim().parse::<i64>().is_ok_and(|age| age <= 0)
        });
        if !expired && self.pairs.len() < MAX_COOKIES {
            self.pairs.push((name.to_owned(), value.to_owned()));
        }
    }

    /// The `Cookie` header, if there is anything to send.
    pub(crate) fn header(&self) -> Option<HeaderValue> {
        if self.pairs.is_empty() {
            return None;
        }
        let text = self.pairs.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("; ");
        HeaderValue::from_str(&text).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jar(headers: &[&str]) -> Option<String> {
        let mut cookies = Cookies::default();
        headers.iter().for_each(|header| cookies.set(header));
        cookies.header().map(|value| value.to_str().unwrap().to_owned())
    }

    #[test]
    fn the_newest_value_of_a_name_is_sent() {
        assert_eq!(jar(&["route=a; Path=/; HttpOnly", "other=1", "route=b; Max-Age=3600"]).as_deref(), Some("other=1; route=b"));
    }

    #[test]
    fn a_cookie_can_be_taken_back() {
        assert_eq!(jar(&["route=a", "route=; Max-Age=0; Path=/"]), None);
        assert_eq!(jar(&["route=a", "route=x; max-age=-5"]), None);
    }

    #[test]
    fn what_is_no_cookie_is_not_kept() {
        assert_eq!(jar(&["", "=x", "novalue", &format!("big={}", "x".repeat(5000))]), None);
    }

    #[test]
    fn a_value_may_contain_an_equals_sign() {
        assert_eq!(jar(&["GAESA=Cp4B=="]).as_deref(), Some("GAESA=Cp4B=="));
    }

    #[test]
    fn a_flood_of_cookies_is_bounded() {
        let mut cookies = Cookies::default();
        (0..1000).for_each(|n| cookies.set(&format!("c{n}=1")));
        assert_eq!(cookies.pairs.len(), MAX_COOKIES);
    }
}

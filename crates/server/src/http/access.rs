//! Who may connect: keys, origins, hosts. Decided before the upgrade; nothing of a request is looked at before it.

use std::{collections::HashSet, net::IpAddr, sync::Arc};

use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header, uri::Authority},
    middleware::Next,
    response::Response,
};
use subtle::ConstantTimeEq as _;

use super::{connections::Connection, error};
use crate::manager::{Manager, hash};

/// The shortest key that is accepted: shorter ones can be guessed.
const MIN_KEY_BYTES: usize = 16;

/// The longest name of a key.
const MAX_NAME_BYTES: usize = 64;
/// Hexadecimal digits of a key's hash that stand for its name where it has none.
const DERIVED_DIGITS: usize = 16;

/// An API key, as a hash, under the name of its tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiKey {
    name: String,
    sha256: String,
    /// The line of a key that has no name of its own.
    unnamed: Option<usize>,
}

/// Why a list of keys can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidKeys {
    #[error("line {0}: a key has at least {MIN_KEY_BYTES} characters, without spaces")]
    Bad(usize),
    #[error("line {0}: a name has 1 to {MAX_NAME_BYTES} printable ASCII characters, without spaces")]
    BadName(usize),
    #[error("there is no key in it")]
    None,
    #[error("the key of {0:?} is given twice; each key has one tenant")]
    SameKey(String),
    #[error("the name {0:?} is given to two keys; each tenant has one key")]
    SameName(String),
}

impl ApiKey {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Reads keys, one a line, as `key` or `name:key`; empty lines and those that begin with `#` don't count.
    ///
    /// The tenant of a key without a name follows from the key alone: where it stands in the list says
    /// nothing, since lines come and go.
    ///
    /// # Errors
    /// A line is no key, or there is none.
    pub fn parse_list(text: &str) -> Result<Vec<Self>, InvalidKeys> {
        let mut keys = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let (number, line) = (number + 1, line.trim());
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (name, key) = line.split_once(':').map_or((None, line), |(name, key)| (Some(name), key));
            if key.len() < MIN_KEY_BYTES || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(InvalidKeys::Bad(number));
            }
            if name.is_some_and(|name| !(1..=MAX_NAME_BYTES).contains(&name.len()) || !name.bytes().all(|byte| byte.is_ascii_graphic())) {
                return Err(InvalidKeys::BadName(number));
            }
            let sha256 = hash(key);
            let derived = || format!("key-{}", sha256.get(..DERIVED_DIGITS).unwrap_or(&sha256));
            keys.push(Self { name: name.map_or_else(derived, str::to_owned), unnamed: name.is_none().then_some(number), sha256 });
        }
        if keys.is_empty() { Err(InvalidKeys::None) } else { Ok(keys) }
    }

    /// Checks all keys of a server together.
    ///
    /// # Errors
    /// Two are the same, or have one name.
    pub fn check_all(keys: &[Self]) -> Result<(), InvalidKeys> {
        let (mut names, mut hashes) = (HashSet::new(), HashSet::new());
        for key in keys {
            if !hashes.insert(&key.sha256) {
                return Err(InvalidKeys::SameKey(key.name.clone()));
            }
            if !names.insert(&key.name) {
                return Err(InvalidKeys::SameName(key.name.clone()));
            }
        }
        Ok(())
    }

    /// The advice for the operator about a key without a name.
    #[must_use]
    pub fn note(&self) -> Option<String> {
        let line = self.unnamed?;
        Some(format!(
            "the API key on line {line} has no name, so its tenant is {}; earlier servers called it key-{line}: to keep what it had there, \
             write key-{line}:KEY",
            self.name
        ))
    }
}

/// Who may connect.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// None: no key is needed.
    pub keys: Vec<ApiKey>,
    /// Hosts that a request may name, besides this machine itself; only looked at where no key is needed.
    pub hosts: Vec<String>,
    /// Any host may be named: the address is not a loopback one, and was asked for without keys.
    pub any_host: bool,
}

/// The name of the key that a request came with.
#[derive(Debug, Clone)]
pub(super) struct Owner(pub(super) Option<String>);

impl Access {
    pub(crate) fn needs_token(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Takes out what is one of the server's own keys. Without keys nothing is known of them: then all is
    /// taken out that has the form of one, for clients send a key that they have to any server.
    pub(super) fn remove_key(&self, headers: &mut HeaderMap) {
        for name in [header::AUTHORIZATION, HeaderName::from_static("x-api-key")] {
            // Of several, whichever it is: those that the server itself does not look at would be passed on all the same.
            let is_key = |value: &HeaderValue| {
                let alone = HeaderMap::from_iter([(name.clone(), value.clone())]);
                if self.keys.is_empty() { given_key(&alone).is_some() } else { self.owner(&alone).is_some() }
            };
            if headers.get_all(&name).iter().any(is_key) {
                headers.remove(name);
            }
        }
    }

    pub(super) fn owner(&self, headers: &HeaderMap) -> Option<&ApiKey> {
        let given = hash(given_key(headers)?.trim());
        // Every key is compared, so that the time tells nothing.
        self.keys.iter().fold(None, |found, key| {
            let same: bool = given.as_bytes().ct_eq(key.sha256.as_bytes()).into();
            if same { Some(key) } else { found }
        })
    }

    pub(super) fn host_allowed(&self, headers: &HeaderMap) -> bool {
        if self.any_host || !self.keys.is_empty() {
            return true;
        }
        let Some(host) = host_of(headers) else { return false };
        names_this_machine(&host) || self.hosts.iter().any(|allowed| allowed.eq_ignore_ascii_case(&host))
    }
}

/// The key in a request's headers.
fn given_key(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.to_str().ok()?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key)
    });
    bearer.or_else(|| headers.get("x-api-key").and_then(|value| value.to_str().ok()))
}

pub(super) async fn check(State(manager): State<Arc<Manager>>, mut request: Request, next: Next) -> Response {
    let access = &manager.settings().access;
    let headers = request.headers();
    if !access.host_allowed(headers) {
        return error(StatusCode::FORBIDDEN, "foreign_host", "The Host header does not name this machine.");
    }
    if !origin_allowed(headers) {
        return error(StatusCode::FORBIDDEN, "foreign_origin", "A page of another origin may not use this server.");
    }
    let mut owner = None;
    if !access.keys.is_empty() {
        match access.owner(headers) {
            Some(key) => owner = Some(key.name.clone()),
            None => {
                let message = "A valid API key is needed: send it as \"Authorization: Bearer <key>\" or \"X-API-Key: <key>\".";
                return error(StatusCode::UNAUTHORIZED, "unauthorized", message);
            }
        }
    }
    if !proven(&request, owner.as_deref()) {
        return error(StatusCode::SERVICE_UNAVAILABLE, "too_many_connections", super::TOO_MANY);
    }
    request.extensions_mut().insert(Owner(owner));
    next.run(request).await
}

/// Counts the connection of a request that has passed the check of keys. False: its key has too many.
pub(super) fn proven(request: &Request, owner: Option<&str>) -> bool {
    request.extensions().get::<Arc<Connection>>().is_none_or(|connection| connection.prove(owner))
}

fn host_of(headers: &HeaderMap) -> Option<String> {
    let authority: Authority = headers.get(header::HOST)?.to_str().ok()?.parse().ok()?;
    Some(authority.host().trim_matches(['[', ']']).to_ascii_lowercase())
}

fn names_this_machine(host: &str) -> bool {
    host == "localhost" || host.ends_with(".localhost") || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// A browser names the origin of the page. Only this server's own may use it.
pub(super) fn origin_allowed(headers: &HeaderMap) -> bool {
    let Some(origin) = headers.get(header::ORIGIN) else { return true };
    let (Ok(origin), Some(Ok(host))) = (origin.to_str(), headers.get(header::HOST).map(|host| host.to_str())) else { return false };
    origin.split_once("://").is_some_and(|(scheme, authority)| matches!(scheme, "http" | "https") && authority.eq_ignore_ascii_case(host))
}

/// As that of a page which was shut into an origin of its own.
pub(super) fn origin_is_opaque(headers: &HeaderMap) -> bool {
    headers.get(header::ORIGIN).is_some_and(|origin| origin == "null")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (axum::http::HeaderName::from_static(name), value.parse().unwrap())).collect()
    }

    #[test]
    fn without_keys_the_host_must_be_this_machine() {
        let access = Access::default();
        for good in ["localhost", "localhost:8080", "127.0.0.1:8080", "127.9.9.9", "[::1]:80", "LOCALHOST:1", "a.localhost"] {
            assert!(access.host_allowed(&headers(&[("host", good)])), "{good}");
        }
        for bad in ["evil.example", "127.0.0.1.evil.example", "10.0.0.1", "localhost.evil.example:8080", "", "0.0.0.0"] {
            assert!(!access.host_allowed(&headers(&[("host", bad)])), "{bad}");
        }
        assert!(!access.host_allowed(&HeaderMap::new()));
    }

    #[test]
    fn a_page_of_another_origin_is_refused() {
        let allowed = |origin: &str| origin_allowed(&headers(&[("host", "localhost:8080"), ("origin", origin)]));
        assert!(allowed("http://localhost:8080"));
        for bad in ["http://evil.example", "null", "http://localhost:9090", "file://localhost:8080", ""] {
            assert!(!allowed(bad), "{bad}");
        }
        assert!(origin_allowed(&headers(&[("host", "localhost:8080")])));
    }

    #[test]
    fn a_key_is_found_by_either_header_and_no_other_is() {
        let keys = ApiKey::parse_list("# ours\nalice:0123456789abcdef\n\nfedcba9876543210\n").unwrap();
        let access = Access { keys, ..Access::default() };
        let owner = |name, value: &str| access.owner(&headers(&[(name, value)])).map(|key| key.name.clone());
        assert_eq!(owner("authorization", "Bearer 0123456789abcdef").as_deref(), Some("alice"));
        let derived = owner("x-api-key", "fedcba9876543210").unwrap();
        assert!(derived.starts_with("key-") && derived.len() == 20, "{derived}");
        for bad in ["Bearer 0123456789abcde", "0123456789abcdef", "Bearer ", "Basic 0123456789abcdef"] {
            assert_eq!(owner("authorization", bad), None, "{bad}");
        }
        assert!(!format!("{access:?}").contains("0123456789abcdef"));
        // Whoever it is passed on to sees none of them, wherever they stand.
        let mut passed = headers(&[("x-api-key", "another"), ("cookie", "a=b")]);
        passed.append("x-api-key", "fedcba9876543210".parse().unwrap());
        passed.append("authorization", "Basic its-own".parse().unwrap());
        passed.append("authorization", "Bearer 0123456789abcdef".parse().unwrap());
        access.remove_key(&mut passed);
        assert_eq!(passed.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["cookie"]);
        let mut own = headers(&[("authorization", "Basic its-own")]);
        access.remove_key(&mut own);
        assert_eq!(own.len(), 1, "a program may have keys of its own");
        let mut unknown = headers(&[("x-api-key", "any"), ("authorization", "Bearer any")]);
        Access::default().remove_key(&mut unknown);
        Access::default().remove_key(&mut own);
        assert_eq!((unknown.len(), own.len()), (0, 1), "without keys all is taken out that may be one");
    }

    #[test]
    fn the_tenant_of_an_unnamed_key_follows_from_the_key_alone() {
        let names = |text: &str| ApiKey::parse_list(text).unwrap().into_iter().map(|key| key.name).collect::<Vec<_>>();
        let both = names("0123456789abcdef\nfedcba9876543210");
        assert_ne!(both[0], both[1]);
        assert_eq!(names("fedcba9876543210"), both[1..], "whatever was before it");
        let keys = ApiKey::parse_list("key-1:0123456789abcdef\n\nfedcba9876543210").unwrap();
        assert_eq!((keys[0].name(), keys[0].note()), ("key-1", None), "a name is kept as it is given");
        assert!(keys[1].note().is_some_and(|note| note.contains("key-3:KEY") && !note.contains("fedcba98")));
    }

    #[test]
    fn keys_and_names_are_given_once() {
        let check = |text: &str| ApiKey::check_all(&ApiKey::parse_list(text).unwrap());
        assert_eq!(check("a:0123456789abcdef\nb:fedcba9876543210"), Ok(()));
        assert_eq!(check("a:0123456789abcdef\nb:0123456789abcdef"), Err(InvalidKeys::SameKey("b".to_owned())));
        assert_eq!(check("a:0123456789abcdef\na:fedcba9876543210"), Err(InvalidKeys::SameName("a".to_owned())));
        assert!(matches!(check("0123456789abcdef\n0123456789abcdef"), Err(InvalidKeys::SameKey(_))));
        assert_eq!(ApiKey::parse_list(":0123456789abcdef"), Err(InvalidKeys::BadName(1)));
        assert_eq!(ApiKey::parse_list("a b:0123456789abcdef"), Err(InvalidKeys::BadName(1)));
    }

    #[test]
    fn a_short_key_or_none_is_a_fault() {
        assert_eq!(ApiKey::parse_list("\n# nothing\n"), Err(InvalidKeys::None));
        assert_eq!(ApiKey::parse_list("good-enough-for-a-key\nshort"), Err(InvalidKeys::Bad(2)));
    }
}

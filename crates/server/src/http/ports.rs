//! Servers that run in a sandbox, reached from outside: `/v1/sandboxes/{id}/ports/{port}/…`, and `{port}-{id}.{domain}` where that is set.
//!
//! Who may: as for all of `/v1`, and who has a link that has not expired. What is passed on is written anew: neither a key nor what opened the port gets to
//! the program inside. Its pages are not trusted. Below a path they would be of the server's own origin, which without keys is all that is asked for: there
//! they are shut into an origin of their own.

mod rewrite;

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{Path, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header, uri::Authority},
    middleware::Next,
    response::{IntoResponse as _, Response},
    routing::any,
};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use sandboxer_protocol::{SandboxId, agent::TunnelFault};
use subtle::ConstantTimeEq as _;
use tokio::{
    io::{AsyncRead, AsyncWrite, copy_bidirectional},
    time::timeout,
};
use tokio_util::task::AbortOnDropHandle;

use self::rewrite::Prefix;
use super::{access, error};
use crate::{
    manager::{Handle, Manager},
    network::{Answer, Link, is_own_pages, own_pages, strip},
    sandbox::{
        streams::NoWay,
        tunnel::{TunnelStream, Watch},
    },
    shares::Share,
};

/// The parameter that carries a link, and the name of the cookie that then does.
pub(super) const LINK: &str = "sandboxer_link";
const COOKIE: &str = "sandboxer_port";
/// What `sandboxer port -L` asks for: the bytes of a connection as they are.
pub(super) const RAW: &str = "sandboxer-tcp";
/// How long the program inside may take to accept a connection: the sandbox may be in the middle of a save.
const OPEN_WITHIN: Duration = Duration::from_secs(60);
/// A page below the server's own origin gets one of its own.
const OWN_ORIGIN: HeaderValue = HeaderValue::from_static("sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads");

/// How a port was named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Path,
    Host,
}

pub(super) fn router(manager: Arc<Manager>) -> Router<Arc<Manager>> {
    Router::new()
        .route("/v1/sandboxes/{id}/ports/{port}", any(below_path))
        .route("/v1/sandboxes/{id}/ports/{port}/", any(below_path))
        .route("/v1/sandboxes/{id}/ports/{port}/{*path}", any(below_path))
        .with_state(manager)
}

async fn below_path(State(manager): State<Arc<Manager>>, Path(named): Path<Vec<(String, String)>>, request: Request) -> Response {
    let named = |name: &str| named.iter().find(|(found, _)| found == name).map_or("", |(_, value)| value.as_str());
    let (Ok(id), Some(port)) = (named("id").parse(), parse_port(named("port"))) else { return no_such() };
    if !manager.settings().access.host_allowed(request.headers()) {
        return error(StatusCode::FORBIDDEN, "foreign_host", "The Host header does not name this machine.");
    }
    serve(&manager, id, port, By::Path, request).await
}

/// Takes a request out that names a port by its host; every other one goes on.
pub(super) async fn by_host(State(manager): State<Arc<Manager>>, request: Request, next: Next) -> Response {
    let named = manager.settings().network.port_domain.as_deref().and_then(|domain| named_by_host(request.headers(), domain));
    match named {
        None => next.run(request).await,
        Some(None) => no_such(),
        Some(Some((id, port))) => serve(&manager, id, port, By::Host, request).await,
    }
}

/// None: the host is not below the domain.
fn named_by_host(headers: &HeaderMap, domain: &str) -> Option<Option<(SandboxId, u16)>> {
    let authority: Authority = headers.get(header::HOST)?.to_str().ok()?.parse().ok()?;
    let host = authority.host().to_ascii_lowercase();
    let label = host.strip_suffix(domain)?.strip_suffix('.')?;
    let named = label.split_once('-').and_then(|(port, id)| Some((id.parse().ok()?, parse_port(port)?)));
    // Only what looks like a port is one: the server itself may be below the domain too.
    if named.is_none() && !label.starts_with(|c: char| c.is_ascii_digit()) { None } else { Some(named) }
}

fn parse_port(text: &str) -> Option<u16> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok().filter(|port| *port > 0) } else { None }
}

fn no_such() -> Response {
    error(StatusCode::NOT_FOUND, "not_found", "There is no such sandbox.")
}

/// What opened a port.
enum Opened {
    /// A key, or nothing where none is needed.
    Plainly,
    Link {
        given: String,
        expires: i64,
        /// It came with the address rather than in the cookie.
        in_address: bool,
    },
}

async fn serve(manager: &Arc<Manager>, id: SandboxId, port: u16, by: By, mut request: Request) -> Response {
    let (link, query) = rewrite::without_parameter(request.uri().query(), LINK);
    let (handle, opened) = match open(manager, id, port, link, request.headers()).await {
        Ok(opened) => opened,
        Err(refusal) => return *refusal,
    };
    if !access::proven(&request, handle.owner.as_deref()) {
        return error(StatusCode::SERVICE_UNAVAILABLE, "too_many_connections", super::TOO_MANY);
    }
    // Who brings a key or a link in the request itself means it; a page of another origin may only have what the browser adds by itself.
    let ambient = match &opened {
        Opened::Plainly => manager.settings().access.keys.is_empty(),
        Opened::Link { in_address, .. } => !in_address,
    };
    let named = match by {
        By::Path => format!("/v1/sandboxes/{id}/ports/{port}"),
        By::Host => String::new(),
    };
    let outside = Prefix::new(named.clone());
    // Pages below a path of a server without keys are shut into an origin that has no name: they are
    // told from other such pages by a part of the path that only they know.
    let confined = by == By::Path && manager.settings().access.keys.is_empty();
    let secret = if confined { own_pages(id, port, handle.token_sha256()) } else { String::new() };
    let (given, path) = match outside.strip(request.uri().path()) {
        path if confined => split_own_pages(path),
        path => (None, path),
    };
    let path = path.to_owned();
    let known: bool = given.is_some_and(|given| given.as_bytes().ct_eq(secret.as_bytes()).into());
    let prefix = if known { Prefix::new(format!("{named}/{secret}")) } else { Prefix::new(named) };
    let own_page = known && access::origin_is_opaque(request.headers());
    if ambient && !own_page && !access::origin_allowed(request.headers()) {
        return error(StatusCode::FORBIDDEN, "foreign_origin", "A page of another origin may not use this port.");
    }
    let below = match &query {
        Some(query) => format!("{path}?{query}"),
        None => path.clone(),
    };
    let upgrade = rewrite::upgrade_of(request.headers());
    if upgrade.is_none() && is_page(&request) {
        // The address that is seen, kept and passed on is one without the link; and one that relative addresses in the page go by.
        let in_address = matches!(opened, Opened::Link { in_address: true, .. });
        let unknown = confined && !known && is_navigation(&request);
        // One that begins with two slashes would lead to another host.
        if (in_address || path.is_empty() || unknown) && !path.starts_with("//") {
            let seen = if unknown { Prefix::new(format!("{}/{secret}", prefix.text())) } else { Prefix::new(prefix.text().to_owned()) };
            let to = if path.is_empty() { seen.add(&format!("/{below}")) } else { seen.add(&below) };
            return with_cookie(see_other(&to), manager, &prefix, &opened);
        }
    }
    let target = if path.is_empty() { format!("/{below}") } else { below };
    let Ok(target) = target.parse::<Uri>() else { return no_such() };
    let place = match &upgrade {
        None => None,
        Some(_) => match manager.port_sockets.1.take(handle.owner.as_deref(), 1) {
            Some(place) => Some(place),
            None => {
                return error(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "too_many",
                    "This key, or this server, has as many connections to ports as it can. Try again later.",
                );
            }
        },
    };
    let stream = match way(&handle, port).await {
        Ok(stream) => stream,
        Err(refusal) => return *refusal,
    };
    if upgrade.as_deref().is_some_and(|upgrade| upgrade.eq_ignore_ascii_case(RAW)) {
        return raw(manager, stream, &mut request, place);
    }
    clean(manager, &mut request, &prefix, upgrade.as_deref());
    *request.uri_mut() = target;
    let answered = pass_on(manager, stream, request, place).await;
    let mut response = answered.unwrap_or_else(|why| {
        error(StatusCode::BAD_GATEWAY, "bad_gateway", &format!("The program at port {port} did not answer as a web server does: {why}"))
    });
    rewrite::response(response.headers_mut(), &prefix);
    if confined {
        response.headers_mut().append(header::CONTENT_SECURITY_POLICY, OWN_ORIGIN);
    }
    with_cookie(response, manager, &prefix, &opened)
}

/// Who may, and for whom there is something.
async fn open(
    manager: &Arc<Manager>,
    id: SandboxId,
    port: u16,
    link: Option<String>,
    headers: &HeaderMap,
) -> Result<(Handle, Opened), Box<Response>> {
    let access = &manager.settings().access;
    let key = access.owner(headers).map(access::ApiKey::name);
    let handle = manager.find(id).await;
    if access.keys.is_empty() || key.is_some() {
        let visible = handle.filter(|handle| handle.owner.as_deref() == key);
        return match visible {
            Some(handle) => Ok((handle, Opened::Plainly)),
            None if matches!(manager.on_volume(id, key).await, Ok(Some(_))) => {
                let message = "Only a sandbox that is ready can do this, and this one does not run here.";
                Err(Box::new(error(StatusCode::CONFLICT, "not_ready", message)))
            }
            None => Err(Box::new(no_such())),
        };
    }
    let in_address = link.is_some();
    let given = link.or_else(|| rewrite::cookie(headers, COOKIE));
    let now = jiff::Timestamp::now().as_second();
    if let (Some(handle), Some(given)) = (handle, given)
        && let Some(expires) = Link::check(id, port, &given, handle.token_sha256(), now)
    {
        return Ok((handle, Opened::Link { given, expires, in_address }));
    }
    let message = "A valid API key is needed, or a link to this port that has not expired.";
    Err(Box::new(error(StatusCode::UNAUTHORIZED, "unauthorized", message)))
}

async fn way(handle: &Handle, port: u16) -> Result<TunnelStream, Box<Response>> {
    let refuse = |status, code, message: &str| Err(Box::new(error(status, code, message)));
    let stream = match handle.way(port).await {
        Some(Ok(stream)) => stream,
        Some(Err(NoWay::Busy)) => {
            let message = "Too many connections to this sandbox are open. Try again later.";
            return refuse(StatusCode::TOO_MANY_REQUESTS, "rate_limited", message);
        }
        Some(Err(NoWay::Unable)) => {
            let message = "This sandbox was made by an older version of this server, whose agent can't do it.";
            return refuse(StatusCode::NOT_IMPLEMENTED, "ports_not_supported", message);
        }
        None => {
            let message = "Only a sandbox that is ready can do this, and this one does not run here.";
            return refuse(StatusCode::CONFLICT, "not_ready", message);
        }
    };
    let opened = timeout(OPEN_WITHIN, stream.opened()).await;
    match opened {
        Ok(Ok(())) => Ok(stream),
        Ok(Err(TunnelFault::Busy)) => {
            refuse(StatusCode::TOO_MANY_REQUESTS, "rate_limited", "Too many connections to this sandbox are open. Try again later.")
        }
        Ok(Err(TunnelFault::Refused)) => {
            let message = format!("Nothing in the sandbox listens at port {port} of its loopback address.");
            refuse(StatusCode::BAD_GATEWAY, "nothing_listens", &message)
        }
        Ok(Err(TunnelFault::Reset)) | Err(_) => {
            refuse(StatusCode::SERVICE_UNAVAILABLE, "not_ready", "The sandbox was saved, went back or ended meanwhile. Try again.")
        }
    }
}

/// Somebody looks at it, rather than a program.
fn is_page(request: &Request) -> bool {
    let says = |name: &str, what: &str| {
        request.headers().get(name).and_then(|value| value.to_str().ok()).is_some_and(|value| value.contains(what))
    };
    matches!(*request.method(), Method::GET | Method::HEAD) && (says("accept", "text/html") || says("sec-fetch-mode", "navigate"))
}

/// A browser that opens a page, or a program that names no mode. A script of another page can't see where
/// a navigation leads.
fn is_navigation(request: &Request) -> bool {
    request.headers().get("sec-fetch-mode").is_none_or(|mode| mode == "navigate")
}

/// Takes the part off a path that names the port's own pages, whether it is the right one or not.
fn split_own_pages(path: &str) -> (Option<&str>, &str) {
    let Some(below) = path.strip_prefix('/') else { return (None, path) };
    let part = below.split('/').next().unwrap_or(below);
    if is_own_pages(part) { (Some(part), &below[part.len()..]) } else { (None, path) }
}

fn see_other(to: &str) -> Response {
    let Ok(to) = HeaderValue::from_str(to) else { return no_such() };
    (StatusCode::SEE_OTHER, [(header::LOCATION, to), (header::CACHE_CONTROL, HeaderValue::from_static("no-store"))]).into_response()
}

/// A link that came with the address is kept by the browser for what the page asks for next.
fn with_cookie(mut response: Response, manager: &Manager, prefix: &Prefix, opened: &Opened) -> Response {
    if let Opened::Link { given, expires, in_address: true } = opened {
        let left = expires.saturating_sub(jiff::Timestamp::now().as_second());
        let secure = if manager.settings().tls.is_some() { "; Secure" } else { "" };
        let cookie = format!("{COOKIE}={given}; Path={}; Max-Age={left}; HttpOnly; SameSite=Lax{secure}", prefix.add("/"));
        if let Ok(cookie) = HeaderValue::from_str(&cookie) {
            response.headers_mut().append(header::SET_COOKIE, cookie);
        }
    }
    response
}

/// Takes out what is not for the program inside, and says what it can't see.
fn clean(manager: &Manager, request: &mut Request, prefix: &Prefix, upgrade: Option<&str>) {
    let secure = manager.settings().tls.is_some();
    let headers = request.headers_mut();
    strip(headers);
    headers.remove(header::EXPECT);
    headers.remove("x-sandbox-token");
    // Programs may have keys of their own; those of the server are none of their business.
    manager.settings().access.remove_key(headers);
    rewrite::own_referer(headers, prefix, LINK);
    rewrite::remove_cookie(headers, COOKIE);
    if let Some(upgrade) = upgrade.and_then(|upgrade| HeaderValue::from_str(upgrade).ok()) {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, upgrade);
    }
    if let Some(host) = headers.get(header::HOST).cloned() {
        headers.insert(HeaderName::from_static("x-forwarded-host"), host);
    }
    headers.insert(HeaderName::from_static("x-forwarded-proto"), HeaderValue::from_static(if secure { "https" } else { "http" }));
    headers.remove("x-forwarded-for");
    headers.remove("forwarded");
    match HeaderValue::from_str(prefix.text()) {
        Ok(prefix) if !prefix.is_empty() => drop(headers.insert(HeaderName::from_static("x-forwarded-prefix"), prefix)),
        _ => drop(headers.remove("x-forwarded-prefix")),
    }
}

/// Asks the program inside, and carries what comes of it.
async fn pass_on(manager: &Arc<Manager>, stream: TunnelStream, mut request: Request, place: Option<Share>) -> Result<Response, String> {
    let failed = |error: hyper::Error| error.to_string();
    let upgraded: OnUpgrade = hyper::upgrade::on(&mut request);
    let (watch, carried) = (stream.watch(), stream.watch());
    *request.version_mut() = axum::http::Version::HTTP_11;
    let begun = hyper::client::conn::http1::Builder::new().handshake::<_, Body>(TokioIo::new(stream)).await;
    let (mut sender, connection) = begun.map_err(failed)?;
    let connection = AbortOnDropHandle::new(tokio::spawn(async move {
        // Whoever reads the answer hears of it.
        tokio::select! {
            _ = connection.with_upgrades() => {}
            () = watch.broken() => {}
        }
    }));
    let mut response = sender.send_request(request).await.map_err(failed)?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        let (mut parts, body) = response.into_parts();
        strip(&mut parts.headers);
        return Ok(Response::from_parts(parts, Body::new(Answer::new(body, connection, ()))));
    }
    // Who is told so without having asked, such as a proxy on the way, would take what follows for something else.
    let Some(place) = place else { return Err("it changes to another protocol that nobody asked for".to_owned()) };
    let inside = hyper::upgrade::on(&mut response);
    manager.port_sockets.0.spawn(async move {
        let _held = (connection, place);
        if let (Ok(outside), Ok(inside)) = (upgraded.await, inside.await) {
            carry(TokioIo::new(outside), TokioIo::new(inside), carried).await;
        }
    });
    Ok(response.map(|_| Body::empty()))
}

/// The connection as it is.
fn raw(manager: &Arc<Manager>, stream: TunnelStream, request: &mut Request, place: Option<Share>) -> Response {
    let upgraded = hyper::upgrade::on(request);
    let watch = stream.watch();
    manager.port_sockets.0.spawn(async move {
        let _place = place;
        if let Ok(outside) = upgraded.await {
            carry(TokioIo::new(outside), stream, watch).await;
        }
    });
    let headers = [(header::CONNECTION, HeaderValue::from_static("upgrade")), (header::UPGRADE, HeaderValue::from_static(RAW))];
    (StatusCode::SWITCHING_PROTOCOLS, headers).into_response()
}

async fn carry(mut outside: impl AsyncRead + AsyncWrite + Unpin, mut inside: impl AsyncRead + AsyncWrite + Unpin, watch: Watch) {
    // Either end may break off; both are closed then. That the inside does is seen also while only the outside is waited for.
    tokio::select! {
        _ = copy_bidirectional(&mut outside, &mut inside) => {}
        () = watch.broken() => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_below_the_domain_names_a_port() {
        let id = SandboxId::random();
        let named = |host: &str| {
            let headers = HeaderMap::from_iter([(header::HOST, host.parse().unwrap())]);
            named_by_host(&headers, "ports.example.com")
        };
        assert_eq!(named(&format!("8000-{id}.ports.example.com:8080")), Some(Some((id, 8000))));
        assert_eq!(named(&format!("8000-{id}.PORTS.example.com").to_uppercase().to_lowercase()), Some(Some((id, 8000))));
        for other in ["ports.example.com", "api.ports.example.com", "example.com", "127.0.0.1:8080", "evilports.example.com"] {
            assert_eq!(named(other), None, "{other}");
        }
        for bad in ["0-x.ports.example.com", "8000.ports.example.com", "70000-00000000-0000-4000-8000-000000000000.ports.example.com"] {
            assert_eq!(named(bad), Some(None), "{bad}");
        }
    }

    #[test]
    fn the_own_pages_of_a_port_stand_first_in_the_path() {
        let part = own_pages(SandboxId::random(), 80, "secret");
        assert_eq!(split_own_pages(&format!("/{part}/a/b")), (Some(part.as_str()), "/a/b"));
        assert_eq!(split_own_pages(&format!("/{part}")), (Some(part.as_str()), ""));
        for other in ["/a/b", "/", "", "/~", "/~name/x", &format!("/a/{part}")] {
            assert_eq!(split_own_pages(other), (None, other), "{other}");
        }
    }

    #[test]
    fn a_port_is_a_plain_number() {
        assert_eq!(parse_port("8000"), Some(8000));
        for bad in ["", "0", "+80", "65536", "-1", "80a", " 80"] {
            assert_eq!(parse_port(bad), None, "{bad}");
        }
    }
}

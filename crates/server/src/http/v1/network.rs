//! The network of a sandbox: what it may reach, what it has reached, and links to its ports.

use axum::{
    Json,
    http::{HeaderMap, header},
};
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    ApiError,
    extract::{Job, Of, Post},
    idempotency::Answer,
    refusals::{Reading, Working},
    request,
    sandboxes::sandbox_id,
    travel::only_gvisor,
};
use crate::{
    http::ports::LINK,
    network::{Connection, Link},
};

const DEFAULT_EXPIRES_IN: i64 = 3600;
const MAX_EXPIRES_IN: i64 = 30 * 86_400;

/// What a sandbox may reach, and its newest connections, oldest first, also those that were refused.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct NetworkLog {
    /// The rules that it was made with; none: it has no network.
    allow: Vec<String>,
    #[schema(value_type = Vec<NetworkConnection>)]
    items: Vec<Connection>,
    /// Always null: all that is kept is told at once.
    #[schema(required = true)]
    next_cursor: Option<String>,
}

/// A connection that a program in a sandbox wanted.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it is what a connection looks like to clients")]
struct NetworkConnection {
    #[schema(format = DateTime)]
    time: String,
    via: Via,
    /// As the program named it.
    host: String,
    port: u16,
    /// What was connected to.
    #[schema(required = true)]
    address: Option<String>,
    verdict: Verdict,
    /// What that rests on: the rule, or why there is none.
    why: String,
    /// Bytes from the sandbox.
    sent: u64,
    /// Bytes to it.
    received: u64,
    /// Null: it goes on.
    #[schema(required = true)]
    duration_ms: Option<u64>,
}

#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[expect(dead_code, reason = "it is what a connection looks like to clients")]
enum Via {
    Connect,
    Http,
    Socks5,
}

#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[expect(dead_code, reason = "it is what a connection looks like to clients")]
enum Verdict {
    Allowed,
    Malformed,
    NotAllowed,
    Denied,
    AddressRefused,
    UsedUp,
    TooMany,
    NotResolved,
    NotConnected,
    GivenUp,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LinkRequest {
    /// Of the sandbox's loopback address.
    #[schema(minimum = 1)]
    port: u16,
    /// Seconds that the link is good for; left out: an hour.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 2_592_000)]
    expires_in: Option<i64>,
}

/// A link to a port of a sandbox, for who has no key.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct PortLink {
    /// Where to go.
    url: String,
    /// The same below the address of whichever instance has the sandbox.
    path: String,
    #[schema(format = Uuid)]
    sandbox_id: String,
    port: u16,
    #[schema(value_type = String, format = DateTime)]
    expires_at: Timestamp,
}

/// What a sandbox may reach, and what its programs have reached or were refused.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/network", tag = "network", operation_id = "get_network",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox")),
    responses((status = 200, description = "What it may reach, and its connections", body = NetworkLog), Reading))]
pub(super) async fn get(of: Of) -> Result<Json<NetworkLog>, ApiError> {
    let id = sandbox_id(&of.id)?;
    only_gvisor(&of.api, id, of.who()).await?;
    let handle = of.api.native.running(id, of.who()).await?;
    let network = &handle.network;
    let allow = network.rules.iter().map(ToString::to_string).collect();
    Ok(Json(NetworkLog { allow, items: network.log.all(), next_cursor: None }))
}

/// Makes a link that opens a port of a sandbox for a while to who has no key.
///
/// What listens there is itself at `/v1/sandboxes/{id}/ports/{port}/…`, with any method and WebSockets.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/ports", tag = "network", operation_id = "link_port",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), request::Asking), request_body = LinkRequest,
    responses((status = 201, description = "The link", body = PortLink), Working))]
pub(super) async fn link(post: Post<LinkRequest>) -> Result<Answer, ApiError> {
    let host = named_host(&post.headers);
    let work = |job: Job<LinkRequest>| async move {
        let (of, id, LinkRequest { port, expires_in }) = (&job.of, sandbox_id(&job.of.id)?, job.asked);
        if port == 0 {
            return Err(ApiError::invalid("port: a number from 1 to 65535 is needed."));
        }
        let seconds = expires_in.unwrap_or(DEFAULT_EXPIRES_IN);
        if !(1..=MAX_EXPIRES_IN).contains(&seconds) {
            return Err(ApiError::invalid(format!("expires_in: a number of seconds from 1 to {MAX_EXPIRES_IN} is needed.")));
        }
        only_gvisor(&of.api, id, of.who()).await?;
        let handle = of.api.native.running(id, of.who()).await?;
        let expires_at = Timestamp::now() + SignedDuration::from_secs(seconds);
        let token = Link { id, port, expires: expires_at.as_second() }.sign(handle.token_sha256());
        let settings = of.api.native.settings();
        let scheme = if settings.tls.is_some() { "https" } else { "http" };
        let path = format!("/v1/sandboxes/{id}/ports/{port}/?{LINK}={token}");
        let url = match &settings.network.port_domain {
            Some(domain) => {
                let own_port = host.rsplit_once(':').map(|(_, port)| port).filter(|port| port.parse::<u16>().is_ok());
                let own_port = own_port.map_or_else(String::new, |port| format!(":{port}"));
                format!("{scheme}://{port}-{id}.{domain}{own_port}/?{LINK}={token}")
            }
            None => format!("{scheme}://{host}{path}"),
        };
        let link = PortLink { url, path, sandbox_id: id.to_string(), port, expires_at };
        Ok(Answer::created(link))
    };
    post.once(work).await
}

/// The server as whoever asks knows it.
fn named_host(headers: &HeaderMap) -> String {
    headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default().to_owned()
}

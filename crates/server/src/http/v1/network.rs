//! The network of a sandbox: what it may reach, what it has reached, and links to its ports.

use std::sync::Arc;

use axum::{
    Extension, Json,
    body::Bytes,
    extract::{Path, State, rejection::BytesRejection},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse as _, Response},
};
use serde_json::{Value, json};

use super::{Api, ApiError, request, sandboxes::sandbox_id};
use crate::{
    http::{access::Owner, ports::LINK},
    network::Link,
};

const DEFAULT_EXPIRES_IN: u64 = 3600;
const MAX_EXPIRES_IN: u64 = 30 * 86_400;

/// What it may reach, and its newest connections, oldest first.
pub(super) async fn get(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let handle = api.native.running(sandbox_id(&id)?, owner.as_deref()).await?;
    let network = &handle.network;
    Ok(Json(json!({ "allow": network.rules, "items": network.log.all(), "next_cursor": null })))
}

/// A link to a port, for who has no key.
pub(super) async fn link(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let id = sandbox_id(&id)?;
    let mut fields = request::fields(body)?;
    let port = fields.remove("port").and_then(|port| u16::try_from(port.as_u64()?).ok()).filter(|port| *port > 0);
    let port = port.ok_or_else(|| ApiError::invalid("port: a number from 1 to 65535 is needed."))?;
    let seconds = match fields.remove("expires_in") {
        None | Some(Value::Null) => DEFAULT_EXPIRES_IN,
        Some(value) => value
            .as_u64()
            .filter(|seconds| (1..=MAX_EXPIRES_IN).contains(seconds))
            .ok_or_else(|| ApiError::invalid(format!("expires_in: a number of seconds from 1 to {MAX_EXPIRES_IN} is needed.")))?,
    };
    let handle = api.native.running(id, owner.as_deref()).await?;
    let expires_at = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(i64::try_from(seconds).unwrap_or(i64::MAX));
    let token = Link { id, port, expires: expires_at.as_second() }.sign(handle.token_sha256());
    let settings = api.native.settings();
    let scheme = if settings.tls.is_some() { "https" } else { "http" };
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let path = format!("/v1/sandboxes/{id}/ports/{port}/?{LINK}={token}");
    let url = match &settings.network.port_domain {
        Some(domain) => {
            let own_port = host.rsplit_once(':').map(|(_, port)| port).filter(|port| port.parse::<u16>().is_ok());
            let own_port = own_port.map_or_else(String::new, |port| format!(":{port}"));
            format!("{scheme}://{port}-{id}.{domain}{own_port}/?{LINK}={token}")
        }
        None => format!("{scheme}://{host}{path}"),
    };
    let link = json!({ "url": url, "path": path, "sandbox_id": id, "port": port, "expires_at": expires_at });
    Ok((StatusCode::CREATED, Json(link)).into_response())
}

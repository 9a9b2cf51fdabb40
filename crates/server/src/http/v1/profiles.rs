//! `/v1/profiles` and `/v1/hosts`: what may be made, and where.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Path, State},
};
use sandboxer_extensions::{Place, ProfileName};
use serde_json::{Value, json};

use super::{Api, ApiError};

pub(super) async fn list(State(api): State<Arc<Api>>) -> Json<Value> {
    let items: Vec<Value> = api.workspaces.config().profiles.iter().map(|profile| json!(profile)).collect();
    Json(json!({ "items": items, "next_cursor": null }))
}

pub(super) async fn get(State(api): State<Arc<Api>>, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    let name: ProfileName = name.parse().map_err(|_| ApiError::not_found("profile"))?;
    let profile = api.workspaces.config().profiles.get(&name).ok_or_else(|| ApiError::not_found("profile"))?;
    Ok(Json(json!(profile)))
}

/// Names and kinds only: where a host is and how it is reached is not a client's to know.
pub(super) async fn hosts(State(api): State<Arc<Api>>) -> Json<Value> {
    let kind = |place: &Place| if *place == Place::Local { "local" } else { "ssh" };
    let items: Vec<Value> =
        api.workspaces.config().hosts.iter().map(|host| json!({ "name": host.name, "kind": kind(&host.place) })).collect();
    Json(json!({ "items": items, "next_cursor": null }))
}

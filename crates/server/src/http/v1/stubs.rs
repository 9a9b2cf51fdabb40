//! The endpoints of `ext.saas-stub`: each echoes its sandbox's inputs and metadata, and what it was asked.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::{Method, StatusCode},
    response::{IntoResponse, Response},
};
use sandboxer_extensions::{SandboxState, stub};
use serde_json::json;

use super::{Api, ApiError, sandboxes::sandbox_id};
use crate::http::access::Owner;

pub(super) async fn echo(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(id): Path<String>,
    method: Method,
) -> Result<Response, ApiError> {
    answer(&api, owner.as_deref(), &id, "", &method).await
}

pub(super) async fn echo_below(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path((id, path)): Path<(String, String)>,
    method: Method,
) -> Result<Response, ApiError> {
    answer(&api, owner.as_deref(), &id, &path, &method).await
}

async fn answer(api: &Api, owner: Option<&str>, id: &str, path: &str, method: &Method) -> Result<Response, ApiError> {
    let row = api.workspaces.sandbox(sandbox_id(id)?, owner).await?;
    if row.extension.as_str() != "ext.saas-stub" || row.status != SandboxState::Ready {
        return Err(ApiError::not_found("stub"));
    }
    let status = StatusCode::from_u16(stub::status(&row.inputs)).unwrap_or(StatusCode::OK);
    let body = json!({
        "sandbox_id": row.id,
        "inputs": row.inputs,
        "metadata": row.metadata,
        "restored_from": row.snapshot_id,
        "request": { "method": method.as_str(), "path": format!("/{path}") },
    });
    Ok((status, Json(body)).into_response())
}

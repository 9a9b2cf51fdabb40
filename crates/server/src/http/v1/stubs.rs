//! The endpoints of `ext.saas-stub`: each echoes its sandbox's inputs and metadata, and what it was asked.

use axum::{
    Json,
    extract::Path,
    http::{Method, StatusCode},
    response::{IntoResponse, Response},
};
use sandboxer_extensions::{SandboxState, stub};
use serde_json::json;

use super::{ApiError, extract::Of, sandboxes::sandbox_id};

pub(super) async fn echo(of: Of, method: Method) -> Result<Response, ApiError> {
    answer(&of, "", &method).await
}

pub(super) async fn echo_below(of: Of, Path((_, path)): Path<(String, String)>, method: Method) -> Result<Response, ApiError> {
    answer(&of, &path, &method).await
}

async fn answer(of: &Of, path: &str, method: &Method) -> Result<Response, ApiError> {
    let row = of.api.workspaces.sandbox(sandbox_id(&of.id)?, of.who()).await?;
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

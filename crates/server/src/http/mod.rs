//! Routes, and who may use them.

mod access;
mod opening;
mod ports;
mod socket;
mod v1;

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::State,
    http::{StatusCode, header},
    middleware,
    response::{IntoResponse, Response},
    routing::{any, get},
};
use serde_json::json;

pub use access::{Access, ApiKey, InvalidKeys};

use crate::{images::BaseImage, manager::Manager, workspaces::Workspaces};

pub(crate) fn router(manager: Arc<Manager>, workspaces: Arc<Workspaces>) -> Router {
    Router::new()
        .route("/create", any(opening::create))
        .route("/attach/{sandbox_id}", any(opening::attach))
        .route("/metrics", get(metrics))
        .merge(v1::router(v1::Api::new(Arc::clone(&manager), workspaces)))
        .layer(middleware::from_fn_with_state(Arc::clone(&manager), access::check))
        .merge(ports::router(Arc::clone(&manager)))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readiness))
        .fallback(async || error(StatusCode::NOT_FOUND, "not_found", "There is nothing at this address."))
        .layer(middleware::from_fn_with_state(Arc::clone(&manager), ports::by_host))
        .with_state(manager)
}

/// What is served where no key is asked for: numbers, and nothing to be done.
pub(crate) fn metrics_router(manager: Arc<Manager>) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .fallback(async || error(StatusCode::NOT_FOUND, "not_found", "There is nothing but /metrics at this address."))
        .with_state(manager)
}

async fn readiness(State(manager): State<Arc<Manager>>) -> Response {
    let unavailable = |why: String| (StatusCode::SERVICE_UNAVAILABLE, why + "\n").into_response();
    if manager.stopping().is_some() {
        return unavailable("stopping".to_owned());
    }
    match manager.images().base() {
        BaseImage::Ready(_) => "ready\n".into_response(),
        BaseImage::Preparing { percent, doing } => unavailable(format!("preparing the base image: {percent} %, {doing}")),
        BaseImage::Failed(why) => unavailable(format!("the base image could not be prepared: {why}")),
    }
}

async fn metrics(State(manager): State<Arc<Manager>>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], manager.metrics.text()).into_response()
}

fn error(status: StatusCode, code: &str, message: &str) -> Response {
    (status, Json(json!({ "error": { "code": code, "message": message } }))).into_response()
}

//! Routes, and who may use them.

mod access;
mod body;
pub(crate) mod connections;
mod opening;
mod ports;
mod socket;
mod v1;
mod websocket;

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::State,
    http::{HeaderValue, StatusCode, header},
    middleware,
    response::{IntoResponse, Response},
    routing::{any, get},
};
use serde_json::json;

/// Told to a client whose key, or whose server, has no room for another connection.
const TOO_MANY: &str = "This key or this server has as many connections as it can. Close some, or try again later.";

pub use access::{Access, ApiKey, InvalidKeys};

use crate::{images::BaseImage, manager::Manager, workspaces::Workspaces};

pub(crate) fn router(manager: Arc<Manager>, workspaces: Arc<Workspaces>) -> Router {
    Router::new()
        .route("/create", any(opening::create))
        .route("/attach/{sandbox_id}", any(opening::attach))
        .route("/metrics", get(own_metrics))
        .merge(v1::router(v1::Api::new(Arc::clone(&manager), workspaces)))
        .layer(middleware::from_fn(body::with_deadline))
        .layer(middleware::from_fn_with_state(Arc::clone(&manager), access::check))
        .layer(middleware::map_response(async |mut response: Response| {
            // A browser must not take a file for something else than it is said to be.
            response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
            response
        }))
        .merge(ports::router(Arc::clone(&manager)))
        .route("/healthz", get(alive))
        .route("/livez", get(alive))
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

/// The process runs and answers. A restart does not mend a volume that hangs.
async fn alive() -> &'static str {
    "ok\n"
}

async fn readiness(State(manager): State<Arc<Manager>>) -> Response {
    let unavailable = |why: String| (StatusCode::SERVICE_UNAVAILABLE, why + "\n").into_response();
    if manager.stopping().is_some() {
        return unavailable("stopping".to_owned());
    }
    if let Err(why) = manager.healthy().await {
        return unavailable(why);
    }
    match manager.images().base() {
        BaseImage::Ready(_) => "ready\n".into_response(),
        BaseImage::Preparing { percent, doing } => unavailable(format!("preparing the base image: {percent} %, {doing}")),
        BaseImage::Failed(why) => unavailable(format!("the base image could not be prepared: {why}")),
    }
}

/// The numbers tell of the whole server, so the server shows them to no one of several tenants.
async fn own_metrics(state: State<Arc<Manager>>) -> Response {
    if state.settings().access.keys.len() > 1 {
        let message = "Metrics tell of all API keys. Where there are several, they are served at --metrics-listen only.";
        return error(StatusCode::FORBIDDEN, "metrics_elsewhere", message);
    }
    metrics(state).await
}

async fn metrics(State(manager): State<Arc<Manager>>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], manager.metrics.text()).into_response()
}

fn error(status: StatusCode, code: &str, message: &str) -> Response {
    (status, Json(json!({ "error": { "code": code, "message": message } }))).into_response()
}

//! The resource API: sandboxes and snapshots of every kind over plain HTTP.
//!
//! Handlers read a request, ask [`Workspaces`] or [`Native`], and write objects. Every error is `{"error":{"code","message"}}`.

mod error;
mod executions;
mod files;
mod filesystems;
mod idempotency;
mod network;
mod objects;
mod page;
mod profiles;
mod request;
mod sandboxes;
mod snapshots;
mod stubs;
mod travel;
mod tree;

use std::sync::Arc;

use axum::{
    Router,
    extract::DefaultBodyLimit,
    routing::{any, get, post},
};

use self::{error::ApiError, idempotency::Remembered};
use crate::{
    manager::Manager,
    workspaces::{Native, Workspaces},
};

/// The largest request.
const MAX_BODY_BYTES: usize = 1024 * 1024;

/// What handlers work with.
pub(super) struct Api {
    workspaces: Arc<Workspaces>,
    native: Native,
    remembered: Remembered,
}

impl Api {
    pub(super) fn new(manager: Arc<Manager>, workspaces: Arc<Workspaces>) -> Arc<Self> {
        Arc::new(Self { workspaces, native: Native::new(manager), remembered: Remembered::default() })
    }
}

pub(super) fn router<S>(api: Arc<Api>) -> Router<S> {
    Router::new()
        .route("/v1/sandboxes", get(sandboxes::list).post(sandboxes::create))
        .route("/v1/sandboxes/{id}", get(sandboxes::get).delete(sandboxes::delete))
        .route("/v1/sandboxes/{id}/snapshot", post(snapshots::take))
        .route("/v1/sandboxes/{id}/checkpoint", post(travel::checkpoint))
        .route("/v1/sandboxes/{id}/checkpoints", get(travel::checkpoints))
        .route("/v1/sandboxes/{id}/tree", get(tree::get))
        .route("/v1/sandboxes/{id}/rollback", post(travel::roll_back))
        .route("/v1/sandboxes/{id}/fork", post(travel::fork))
        .route("/v1/sandboxes/{id}/filesystem-snapshot", post(filesystems::take))
        .route("/v1/sandboxes/{id}/executions", post(executions::run))
        .route("/v1/sandboxes/{id}/files", get(files::read).put(files::write).delete(files::remove))
        .route("/v1/sandboxes/{id}/files/stat", get(files::stat))
        .route("/v1/sandboxes/{id}/files/list", get(files::list))
        .route("/v1/sandboxes/{id}/files/rename", post(files::rename))
        .route("/v1/sandboxes/{id}/files/mkdir", post(files::make_directory))
        .route("/v1/sandboxes/{id}/files/archive", get(files::pack).put(files::unpack))
        .route("/v1/sandboxes/{id}/network", get(network::get))
        .route("/v1/sandboxes/{id}/ports", post(network::link))
        .route("/v1/filesystem-snapshots", get(filesystems::list))
        .route("/v1/filesystem-snapshots/{name}", get(filesystems::get).delete(filesystems::delete))
        .route("/v1/filesystem-snapshots/{name}/layer", get(filesystems::export).put(filesystems::import))
        .route("/v1/snapshots", get(snapshots::list))
        .route("/v1/snapshots/{id}", get(snapshots::get).delete(snapshots::delete))
        .route("/v1/snapshots/{id}/restore", post(snapshots::restore))
        .route("/v1/profiles", get(profiles::list))
        .route("/v1/profiles/{name}", get(profiles::get))
        .route("/v1/hosts", get(profiles::hosts))
        .route("/v1/stubs/{id}", any(stubs::echo))
        .route("/v1/stubs/{id}/{*path}", any(stubs::echo_below))
        .route("/v1", any(async || ApiError::not_offered()))
        .route("/v1/{*rest}", any(async || ApiError::not_offered()))
        .method_not_allowed_fallback(async || ApiError::method_not_allowed())
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(api)
}

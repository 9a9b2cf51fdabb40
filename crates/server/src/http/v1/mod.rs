//! The resource API: sandboxes and snapshots of every kind over plain HTTP.
//!
//! Handlers read a request, ask [`Workspaces`] or [`Native`], and write objects. Every error is `{"error":{"code","message"}}`.

mod error;
mod executions;
mod extract;
mod files;
mod filesystems;
mod idempotency;
mod kill;
mod known;
mod network;
mod objects;
mod openapi;
mod page;
mod pending;
mod profiles;
mod refusals;
mod request;
mod sandboxes;
mod snapshots;
mod stubs;
mod travel;
mod tree;
mod turns;

use std::sync::Arc;

use axum::{Router, extract::DefaultBodyLimit, middleware, routing::any};
use utoipa::OpenApi as _;
use utoipa_axum::{router::OpenApiRouter, routes};

pub(super) use self::files::FileDesk;
use self::{error::ApiError, idempotency::Remembered, pending::Pending};
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
    /// Snapshots that nobody waits for.
    pending: Pending,
}

impl Api {
    pub(super) fn new(manager: Arc<Manager>, workspaces: Arc<Workspaces>) -> Arc<Self> {
        Arc::new(Self { workspaces, native: Native::new(manager), remembered: Remembered::default(), pending: Pending::default() })
    }
}

/// Everything that the document tells of, and how it is done.
fn documented() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::with_openapi(openapi::Base::openapi())
        .routes(routes!(sandboxes::list, sandboxes::create))
        .routes(routes!(sandboxes::get, sandboxes::delete))
        .routes(routes!(snapshots::take))
        .routes(routes!(travel::checkpoint))
        .routes(routes!(travel::checkpoints))
        .routes(routes!(tree::get))
        .routes(routes!(travel::roll_back))
        .routes(routes!(travel::fork))
        .routes(routes!(filesystems::take))
        .routes(routes!(executions::run))
        .routes(routes!(kill::kill))
        .routes(routes!(files::read, files::write, files::remove))
        .routes(routes!(files::stat))
        .routes(routes!(files::list))
        .routes(routes!(files::rename))
        .routes(routes!(files::make_directory))
        .routes(routes!(files::pack, files::unpack))
        .routes(routes!(files::watch))
        .routes(routes!(network::get))
        .routes(routes!(network::link))
        .routes(routes!(filesystems::list))
        .routes(routes!(filesystems::get, filesystems::delete))
        .routes(routes!(filesystems::export, filesystems::import))
        .routes(routes!(snapshots::list))
        .routes(routes!(snapshots::get, snapshots::delete))
        .routes(routes!(snapshots::restore))
        .routes(routes!(profiles::list))
        .routes(routes!(profiles::get))
        .routes(routes!(profiles::hosts))
        .routes(routes!(profiles::instance))
        .routes(routes!(openapi::get))
}

pub(super) fn router<S>(api: Arc<Api>) -> Router<S> {
    Router::from(documented())
        .route("/v1/stubs/{id}", any(stubs::echo))
        .route("/v1/stubs/{id}/{*path}", any(stubs::echo_below))
        .route("/v1", any(async || ApiError::no_address()))
        .route("/v1/{*rest}", any(async || ApiError::no_address()))
        .method_not_allowed_fallback(async || ApiError::method_not_allowed())
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .layer(middleware::from_fn_with_state(Arc::clone(&api), turns::taken))
        .with_state(api)
}

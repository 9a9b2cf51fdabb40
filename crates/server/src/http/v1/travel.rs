//! Checkpoints of gVisor's own sandboxes, going back to them, and copies.

use std::sync::Arc;

use axum::{
    Extension, Json,
    body::Bytes,
    extract::{Path, Query, State, rejection::BytesRejection},
    http::{HeaderMap, StatusCode},
};
use sandboxer_protocol::{SandboxId, client::SnapshotTarget};
use serde_json::{Value, json};

use super::{
    Api, ApiError,
    idempotency::Answer,
    objects::{self, SandboxObject},
    page::PageQuery,
    request,
    sandboxes::sandbox_id,
};
use crate::{http::access::Owner, workspaces::NativeSandbox};

pub(super) async fn checkpoint(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Answer, ApiError> {
    let id = sandbox_id(&id)?;
    let mut fields = request::fields(body)?;
    let fingerprint = format!("checkpoint {id} {}", Value::Object(fields.clone()));
    let include_execution = request::take_bool(&mut fields, "include_execution")?;
    request::nothing_more(&fields)?;
    let (this, by) = (Arc::clone(&api), owner.clone());
    let work = async move {
        only_gvisor(&this, id, by.as_deref()).await?;
        let made = this.native.checkpoint(id, by.as_deref(), include_execution).await?;
        Ok(Answer::created(objects::checkpoint(&made)))
    };
    api.remembered.once(&headers, owner, &fingerprint, work).await
}

pub(super) async fn checkpoints(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(id): Path<String>,
    Query(page): Query<PageQuery>,
) -> Result<Json<Value>, ApiError> {
    let id = sandbox_id(&id)?;
    only_gvisor(&api, id, owner.as_deref()).await?;
    let found = api.native.checkpoints(id, owner.as_deref()).await?;
    let items = found.iter().map(|one| ((i128::from(one.name.ms()), one.name.to_string()), objects::checkpoint(one)));
    Ok(Json(page.of(items.collect())?))
}

pub(super) async fn roll_back(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Answer, ApiError> {
    let id = sandbox_id(&id)?;
    let mut fields = request::fields(body)?;
    let fingerprint = format!("rollback {id} {}", Value::Object(fields.clone()));
    let target = SnapshotTarget {
        snapshot_id: request::take_text(&mut fields, "snapshot_id")?,
        checkpoint: request::take_text(&mut fields, "checkpoint")?,
    };
    request::nothing_more(&fields)?;
    let (this, by) = (Arc::clone(&api), owner.clone());
    let work = async move {
        only_gvisor(&this, id, by.as_deref()).await?;
        let back = this.native.roll_back(id, by, target).await?;
        Ok(Answer::created(json!(SandboxObject::native(back, None))))
    };
    api.remembered.once(&headers, owner, &fingerprint, work).await
}

pub(super) async fn fork(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Answer, ApiError> {
    let id = sandbox_id(&id)?;
    let mut fields = request::fields(body)?;
    let fingerprint = format!("fork {id} {}", Value::Object(fields.clone()));
    let checkpoint = request::take_text(&mut fields, "checkpoint")?;
    let count = request::take_count(&mut fields)?;
    request::nothing_more(&fields)?;
    let (this, by) = (Arc::clone(&api), owner.clone());
    let work = async move {
        only_gvisor(&this, id, by.as_deref()).await?;
        let made = this.native.fork_sandbox(id, by, checkpoint, count.unwrap_or(1)).await?;
        Ok(copies(made, count.is_some()))
    };
    api.remembered.once(&headers, owner, &fingerprint, work).await
}

/// The new sandboxes: as a list where a count was given.
pub(super) fn copies(made: Vec<(NativeSandbox, String)>, many: bool) -> Answer {
    let mut items: Vec<SandboxObject> = made.into_iter().map(|(sandbox, token)| SandboxObject::native(sandbox, Some(token))).collect();
    match (items.pop(), many) {
        (Some(one), false) => Answer::created(json!(one)),
        (last, _) => {
            items.extend(last);
            Answer::created(json!({ "items": items }))
        }
    }
}

/// Sandboxes of extensions have snapshots, and nothing else of this.
pub(super) async fn only_gvisor(api: &Api, id: SandboxId, owner: Option<&str>) -> Result<(), ApiError> {
    if api.native.get(id, owner).await.is_none() && api.workspaces.sandbox(id, owner).await.is_ok() {
        let message = "Only gVisor sandboxes have checkpoints, go back and are forked. Take a snapshot and restore it into a new sandbox.";
        return Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, "checkpoints_not_supported", message));
    }
    Ok(())
}

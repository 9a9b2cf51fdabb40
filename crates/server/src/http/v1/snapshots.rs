//! `/v1/snapshots`, and how one is made.

use std::sync::Arc;

use axum::{
    Extension, Json,
    body::Bytes,
    extract::{Path, Query, State, rejection::BytesRejection},
    http::{HeaderMap, StatusCode},
};
use sandboxer_extensions::SnapshotId;
use serde_json::{Value, json};

use super::{
    Api, ApiError,
    idempotency::Answer,
    objects::{self, SandboxObject},
    page::PageQuery,
    request,
    sandboxes::{DeleteQuery, sandbox_id, warn_of_damage},
};
use crate::{http::access::Owner, workspaces::RestoreOrder};

pub(super) async fn take(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Answer, ApiError> {
    let id = sandbox_id(&id)?;
    request::nothing_more(&request::fields(body)?)?;
    let later = request::wants_async(&headers);
    let (this, by) = (Arc::clone(&api), owner.clone());
    let work = async move {
        if this.native.get(id, by.as_deref()).await.is_some() {
            let message = "This server does not snapshot gVisor sandboxes by this address.";
            return Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, "snapshots_not_supported", message));
        }
        let begun = this.workspaces.take(id, by.as_deref()).await?;
        if later {
            return Ok(Answer::accepted(objects::snapshot(begun.row)));
        }
        Ok(Answer::created(objects::snapshot(begun.finished().await?)))
    };
    api.remembered.once(&headers, owner, &format!("snapshot {id}"), work).await
}

pub(super) async fn list(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Query(page): Query<PageQuery>,
) -> Result<Json<Value>, ApiError> {
    let rows = api.workspaces.snapshots(owner.as_deref()).await?;
    let items = rows.into_iter().map(|row| ((row.created_at.as_nanosecond(), row.id.to_string()), objects::snapshot(row)));
    let mut list = page.of(items.collect())?;
    warn_of_damage(&api, &mut list).await;
    Ok(Json(list))
}

pub(super) async fn get(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(objects::snapshot(api.workspaces.snapshot(snapshot_id(&id)?, owner.as_deref()).await?)))
}

pub(super) async fn delete(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(id): Path<String>,
    Query(query): Query<DeleteQuery>,
) -> Result<StatusCode, ApiError> {
    api.workspaces.delete_snapshot(snapshot_id(&id)?, owner.as_deref(), query.force()).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn restore(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Answer, ApiError> {
    let id = snapshot_id(&id)?;
    let mut fields = request::fields(body)?;
    let fingerprint = format!("restore {id} {}", Value::Object(fields.clone()));
    let later = request::wants_async(&headers);
    let order = RestoreOrder {
        inputs: request::take_object(&mut fields, "inputs")?.into_iter().collect(),
        host: request::take_name(&mut fields, "host")?,
        keep_failed: later,
    };
    let count = match fields.remove("count") {
        None | Some(Value::Null) => None,
        Some(count) => Some(count.as_u64().ok_or_else(|| ApiError::invalid("count: a number is needed."))?),
    };
    request::nothing_more(&fields)?;
    let (this, by) = (Arc::clone(&api), owner.clone());
    let work = async move {
        if let Some(count) = count {
            let count = usize::try_from(count).unwrap_or(usize::MAX);
            let made = this.workspaces.restore_many(id, &order, by, count).await?;
            let items: Vec<SandboxObject> = made.into_iter().map(SandboxObject::from).collect();
            return Ok(Answer::created(json!({ "items": items })));
        }
        let begun = this.workspaces.restore(id, order, by).await?;
        if later {
            return Ok(Answer::accepted(json!(SandboxObject::from(begun.row))));
        }
        Ok(Answer::created(json!(SandboxObject::from(begun.finished().await?))))
    };
    api.remembered.once(&headers, owner, &fingerprint, work).await
}

fn snapshot_id(text: &str) -> Result<SnapshotId, ApiError> {
    text.parse().map_err(|_| ApiError::not_found("snapshot"))
}

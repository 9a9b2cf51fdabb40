//! `/v1/snapshots`, and how one is made.

use std::sync::Arc;

use axum::{
    Extension, Json,
    body::Bytes,
    extract::{Path, Query, State, rejection::BytesRejection},
    http::{HeaderMap, StatusCode},
};
use sandboxer_extensions::SnapshotId;
use sandboxer_store::ManifestAt;
use serde_json::{Value, json};

use super::{
    Api, ApiError,
    idempotency::Answer,
    objects::{self, SandboxObject},
    page::PageQuery,
    request,
    sandboxes::{DeleteQuery, sandbox_id, warn_of_damage},
    travel,
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
    let mut fields = request::fields(body)?;
    let fingerprint = format!("snapshot {id} {}", Value::Object(fields.clone()));
    let name = request::take_text(&mut fields, "name")?;
    request::nothing_more(&fields)?;
    let later = request::wants_async(&headers);
    let (this, by) = (Arc::clone(&api), owner.clone());
    let work = async move {
        if this.native.get(id, by.as_deref()).await.is_some() {
            let made = this.native.take_snapshot(id, by.as_deref(), name).await?;
            return Ok(Answer::created(objects::native_snapshot(&made)));
        }
        if name.is_some() {
            return Err(ApiError::invalid("name: only snapshots of gVisor sandboxes have one."));
        }
        let begun = this.workspaces.take(id, by.as_deref()).await?;
        if later {
            return Ok(Answer::accepted(objects::snapshot(begun.row)));
        }
        Ok(Answer::created(objects::snapshot(begun.finished().await?)))
    };
    api.remembered.once(&headers, owner, &fingerprint, work).await
}

pub(super) async fn list(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Query(page): Query<PageQuery>,
) -> Result<Json<Value>, ApiError> {
    let rows = api.workspaces.snapshots(owner.as_deref()).await?;
    let items = rows.into_iter().map(|row| ((row.created_at.as_nanosecond(), row.id.to_string()), objects::snapshot(row)));
    let native = api.native.snapshots(owner.as_deref()).await?;
    let native = native.iter().map(|one| ((one.about.created_at.as_nanosecond(), one.id.to_string()), objects::native_snapshot(one)));
    let mut list = page.of(items.chain(native).collect())?;
    warn_of_damage(&api, &mut list).await;
    Ok(Json(list))
}

pub(super) async fn get(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    if let Some(native) = native_id(&id)
        && let Some(snapshot) = api.native.snapshot(native, owner.as_deref()).await?
    {
        return Ok(Json(objects::native_snapshot(&snapshot)));
    }
    Ok(Json(objects::snapshot(api.workspaces.snapshot(snapshot_id(&id)?, owner.as_deref()).await?)))
}

pub(super) async fn delete(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(id): Path<String>,
    Query(query): Query<DeleteQuery>,
) -> Result<StatusCode, ApiError> {
    if let Some(native) = native_id(&id)
        && api.native.delete_snapshot(native, owner.as_deref()).await?
    {
        return Ok(StatusCode::NO_CONTENT);
    }
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
    let native = native_id(&id);
    let id = snapshot_id(&id)?;
    let mut fields = request::fields(body)?;
    let fingerprint = format!("restore {id} {}", Value::Object(fields.clone()));
    let later = request::wants_async(&headers);
    let order = RestoreOrder {
        inputs: request::take_object(&mut fields, "inputs")?.into_iter().collect(),
        host: request::take_name(&mut fields, "host")?,
        keep_failed: later,
    };
    let count = request::take_count(&mut fields)?;
    request::nothing_more(&fields)?;
    let (this, by) = (Arc::clone(&api), owner.clone());
    let work = async move {
        if let Some(native) = native
            && this.native.snapshot(native, by.as_deref()).await?.is_some()
        {
            as_it_was(&order)?;
            let made = this.native.fork(ManifestAt::Snapshot { snapshot_id: native }, count.unwrap_or(1), by).await?;
            return Ok(travel::copies(made, count.is_some()));
        }
        if let Some(count) = count {
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

/// A snapshot of a gVisor sandbox becomes what it was, on the server's own machine.
fn as_it_was(order: &RestoreOrder) -> Result<(), ApiError> {
    if !order.inputs.is_empty() {
        return Err(ApiError::invalid("inputs: a gVisor sandbox is restored as it was saved. Leave them out."));
    }
    match order.host.as_ref().filter(|host| host.as_str() != "local") {
        Some(host) => {
            Err(ApiError::invalid(format!("host: a gVisor sandbox runs on the server's own machine, not on {host}. Leave it out.")))
        }
        None => Ok(()),
    }
}

fn native_id(text: &str) -> Option<sandboxer_store::SnapshotId> {
    text.parse().ok()
}

fn snapshot_id(text: &str) -> Result<SnapshotId, ApiError> {
    text.parse().map_err(|_| ApiError::not_found("snapshot"))
}

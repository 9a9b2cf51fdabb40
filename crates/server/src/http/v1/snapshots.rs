//! `/v1/snapshots`, and how one is made.

use axum::{Json, http::StatusCode};
use sandboxer_extensions::{HostName, SnapshotId};
use sandboxer_store::ManifestAt;
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::{
    ApiError,
    extract::{Job, Of, Post, Words},
    idempotency::Answer,
    objects::{Copies, List, OneOrMany, SandboxObject, SnapshotObject},
    page::PageQuery,
    pending::Pending,
    refusals::{Reading, Working},
    request,
    sandboxes::{DeleteQuery, sandbox_id, warnings},
    travel,
};
use crate::workspaces::RestoreOrder;

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct SnapshotRequest {
    /// For people, of gVisor sandboxes only; need not be unique.
    name: Option<String>,
}

/// Takes a snapshot of a sandbox, which stays up.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/snapshot", tag = "time travel", operation_id = "take_snapshot",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), request::Asking), request_body = Option<SnapshotRequest>,
    responses((status = 201, description = "It is there", body = SnapshotObject),
        (status = 202, description = "It is being made", body = SnapshotObject), Working))]
pub(super) async fn take(post: Post<SnapshotRequest>) -> Result<Answer, ApiError> {
    post.once(make).await
}

async fn make(job: Job<SnapshotRequest>) -> Result<Answer, ApiError> {
    let Job { of, asked: SnapshotRequest { name }, later, .. } = job;
    let id = sandbox_id(&of.id)?;
    if let Some(sandbox) = of.api.native.get(id, of.who()).await {
        if later {
            return Ok(Answer::accepted(Pending::begin(of, &sandbox, name)?));
        }
        let made = of.api.native.take_snapshot(id, of.who(), name, None).await?;
        return Ok(Answer::created(SnapshotObject::from(&made)));
    }
    if name.is_some() {
        return Err(ApiError::invalid("name: only snapshots of gVisor sandboxes have one."));
    }
    let begun = of.api.workspaces.take(id, of.who()).await?;
    if later {
        return Ok(Answer::accepted(SnapshotObject::from(begun.row)));
    }
    Ok(Answer::created(SnapshotObject::from(begun.finished().await?)))
}

/// The snapshots of this key.
#[utoipa::path(get, path = "/v1/snapshots", tag = "time travel", operation_id = "list_snapshots", params(PageQuery),
    responses((status = 200, description = "A page of them, oldest first", body = List<SnapshotObject>), Reading))]
pub(super) async fn list(of: Of, Words(page): Words<PageQuery>) -> Result<Json<List<SnapshotObject>>, ApiError> {
    let mut all: Vec<SnapshotObject> = of.api.workspaces.snapshots(of.who()).await?.into_iter().map(SnapshotObject::from).collect();
    // First those that are being made: one that is completed meanwhile is in both, and never in neither.
    let pending = of.api.pending.list(of.who());
    let native = of.api.native.snapshots(of.who()).await?;
    all.extend(native.iter().map(SnapshotObject::from));
    for one in pending {
        if !all.iter().any(|known| known.id == one.id) {
            all.push(one);
        }
    }
    let mut list = page.of(all.into_iter().map(|one| ((one.created_at.as_nanosecond(), one.id.clone()), one)).collect())?;
    list.warnings = warnings(&of.api).await;
    Ok(Json(list))
}

/// One snapshot.
#[utoipa::path(get, path = "/v1/snapshots/{id}", tag = "time travel", operation_id = "get_snapshot",
    params(("id" = uuid::Uuid, Path, description = "Of a snapshot")),
    responses((status = 200, description = "The snapshot", body = SnapshotObject), Reading))]
pub(super) async fn get(of: Of) -> Result<Json<SnapshotObject>, ApiError> {
    if let Some(native) = native_id(&of.id) {
        let pending = of.api.pending.get(native, of.who());
        if let Some(snapshot) = of.api.native.snapshot(native, of.who()).await? {
            return Ok(Json(SnapshotObject::from(&snapshot)));
        }
        if let Some(pending) = pending {
            return Ok(Json(pending));
        }
    }
    Ok(Json(of.api.workspaces.snapshot(snapshot_id(&of.id)?, of.who()).await?.into()))
}

/// Deletes a snapshot. What was made from it stays.
#[utoipa::path(delete, path = "/v1/snapshots/{id}", tag = "time travel", operation_id = "delete_snapshot",
    params(("id" = uuid::Uuid, Path, description = "Of a snapshot"), DeleteQuery),
    responses((status = 204, description = "It is gone"), Working))]
pub(super) async fn delete(of: Of, Words(query): Words<DeleteQuery>) -> Result<StatusCode, ApiError> {
    if let Some(native) = native_id(&of.id)
        && (of.api.pending.forget(native, of.who())? || of.api.native.delete_snapshot(native, of.who()).await?)
    {
        return Ok(StatusCode::NO_CONTENT);
    }
    of.api.workspaces.delete_snapshot(snapshot_id(&of.id)?, of.who(), query.force()).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RestoreRequest {
    /// Other inputs than the sandbox had; not of gVisor sandboxes.
    #[schema(value_type = Option<Object>)]
    inputs: Option<Map<String, Value>>,
    #[schema(value_type = Option<String>, max_length = 48)]
    host: Option<HostName>,
    /// So many sandboxes, all or none.
    #[schema(minimum = 1, maximum = 100)]
    count: Option<u64>,
}

/// Makes a new sandbox from a snapshot, or several.
#[utoipa::path(post, path = "/v1/snapshots/{id}/restore", tag = "time travel", operation_id = "restore_snapshot",
    params(("id" = uuid::Uuid, Path, description = "Of a snapshot"), request::Asking), request_body = Option<RestoreRequest>,
    responses((status = 201, description = "It is there; with a count, all of them as `items`", body = OneOrMany),
        (status = 202, description = "It is being made", body = SandboxObject), Working))]
pub(super) async fn restore(post: Post<RestoreRequest>) -> Result<Answer, ApiError> {
    post.once(bring_back).await
}

async fn bring_back(job: Job<RestoreRequest>) -> Result<Answer, ApiError> {
    let Job { of, asked: RestoreRequest { inputs, host, count }, later, .. } = job;
    let (native, id) = (native_id(&of.id), snapshot_id(&of.id)?);
    let order = RestoreOrder { inputs: inputs.unwrap_or_default().into_iter().collect(), host, keep_failed: later };
    let count = count.map(travel::as_count);
    if let Some(native) = native
        && of.api.native.snapshot(native, of.who()).await?.is_some()
    {
        as_it_was(&order)?;
        let made = of.api.native.fork(ManifestAt::Snapshot { snapshot_id: native }, count.unwrap_or(1), of.owner).await?;
        return Ok(travel::copies(made, count.is_some()));
    }
    if let Some(count) = count {
        let made = of.api.workspaces.restore_many(id, &order, of.owner, count).await?;
        return Ok(Answer::created(OneOrMany::Many(Copies { items: made.into_iter().map(SandboxObject::from).collect() })));
    }
    let begun = of.api.workspaces.restore(id, order, of.owner).await?;
    if later {
        return Ok(Answer::accepted(SandboxObject::from(begun.row)));
    }
    Ok(Answer::created(SandboxObject::from(begun.finished().await?)))
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

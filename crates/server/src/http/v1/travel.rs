//! Checkpoints of gVisor's own sandboxes, going back to them, and copies.

use axum::{Json, http::StatusCode};
use sandboxer_protocol::{SandboxId, client::SnapshotTarget};
use serde::Deserialize;
use utoipa::ToSchema;

use super::{
    Api, ApiError,
    extract::{Job, Of, Post, Words},
    idempotency::Answer,
    objects::{CheckpointObject, Copies, List, OneOrMany, SandboxObject},
    page::PageQuery,
    refusals::{Reading, Working},
    request,
    sandboxes::sandbox_id,
};
use crate::workspaces::NativeSandbox;

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct CheckpointRequest {
    /// Save a running execution too; without it, one that runs is an error.
    include_execution: Option<bool>,
}

/// Saves a sandbox that nobody is attached to. It no longer runs here then, and goes on when somebody attaches.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/checkpoint", tag = "time travel", operation_id = "checkpoint_sandbox",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), request::Asking), request_body = Option<CheckpointRequest>,
    responses((status = 201, description = "It is saved", body = CheckpointObject), Working))]
pub(super) async fn checkpoint(post: Post<CheckpointRequest>) -> Result<Answer, ApiError> {
    let work = |job: Job<CheckpointRequest>| async move {
        let (of, id) = (&job.of, sandbox_id(&job.of.id)?);
        only_gvisor(&of.api, id, of.who()).await?;
        let made = of.api.native.checkpoint(id, of.who(), job.asked.include_execution.unwrap_or(false)).await?;
        Ok(Answer::created(CheckpointObject::from(&made)))
    };
    post.once(work).await
}

/// The checkpoints of a sandbox, whether it runs or not.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/checkpoints", tag = "time travel", operation_id = "list_checkpoints",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), PageQuery),
    responses((status = 200, description = "A page of them, oldest first", body = List<CheckpointObject>), Reading))]
pub(super) async fn checkpoints(of: Of, Words(page): Words<PageQuery>) -> Result<Json<List<CheckpointObject>>, ApiError> {
    let id = sandbox_id(&of.id)?;
    only_gvisor(&of.api, id, of.who()).await?;
    let found = of.api.native.checkpoints(id, of.who()).await?;
    let items = found.iter().map(|one| ((i128::from(one.name.ms()), one.name.to_string()), CheckpointObject::from(one)));
    Ok(Json(page.of(items.collect())?))
}

/// Where to go back to: one of the two.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RollbackRequest {
    snapshot_id: Option<String>,
    /// The name of a checkpoint.
    checkpoint: Option<String>,
}

/// Goes back to a checkpoint or a snapshot, in place, whether it runs or not. Nothing newer is deleted.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/rollback", tag = "time travel", operation_id = "roll_back_sandbox",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), request::Asking), request_body = Option<RollbackRequest>,
    responses((status = 201, description = "It is as it was then, in a new generation", body = SandboxObject), Working))]
pub(super) async fn roll_back(post: Post<RollbackRequest>) -> Result<Answer, ApiError> {
    let work = |job: Job<RollbackRequest>| async move {
        let (id, of) = (sandbox_id(&job.of.id)?, job.of);
        let target = SnapshotTarget { snapshot_id: job.asked.snapshot_id, checkpoint: job.asked.checkpoint };
        only_gvisor(&of.api, id, of.who()).await?;
        let back = of.api.native.roll_back(id, of.owner, target).await?;
        Ok(Answer::created(SandboxObject::native(back, None)))
    };
    post.once(work).await
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ForkRequest {
    /// The name of one of its checkpoints; left out: as it is now.
    checkpoint: Option<String>,
    /// So many copies, all or none.
    #[schema(minimum = 1, maximum = 100)]
    count: Option<u64>,
}

/// Copies of a sandbox with its memory, processes and files, each with an id of its own.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fork", tag = "time travel", operation_id = "fork_sandbox",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), request::Asking), request_body = Option<ForkRequest>,
    responses((status = 201, description = "The copy; with a count, all of them as `items`", body = OneOrMany), Working))]
pub(super) async fn fork(post: Post<ForkRequest>) -> Result<Answer, ApiError> {
    let work = |job: Job<ForkRequest>| async move {
        let (id, of) = (sandbox_id(&job.of.id)?, job.of);
        let ForkRequest { checkpoint, count } = job.asked;
        only_gvisor(&of.api, id, of.who()).await?;
        let made = of.api.native.fork_sandbox(id, of.owner, checkpoint, count.map_or(1, as_count)).await?;
        Ok(copies(made, count.is_some()))
    };
    post.once(work).await
}

/// What is too large for a count is too many.
pub(super) fn as_count(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

/// The new sandboxes: as a list where a count was given.
pub(super) fn copies(made: Vec<(NativeSandbox, String)>, many: bool) -> Answer {
    let mut items: Vec<SandboxObject> = made.into_iter().map(|(sandbox, token)| SandboxObject::native(sandbox, Some(token))).collect();
    match (items.pop(), many) {
        (Some(one), false) => Answer::created(OneOrMany::One(Box::new(one))),
        (last, _) => {
            items.extend(last);
            Answer::created(OneOrMany::Many(Copies { items }))
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

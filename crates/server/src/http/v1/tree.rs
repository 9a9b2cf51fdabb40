//! The history of a sandbox and of its family.

use axum::Json;
use jiff::Timestamp;
use sandboxer_protocol::SandboxId;
use serde::Serialize;
use utoipa::ToSchema;

use super::{ApiError, extract::Of, objects::SandboxStatus, refusals::Reading, sandboxes::sandbox_id, travel::only_gvisor};
use crate::checkpoints::{Branch, Origin, Relative};

/// A sandbox with all that it came from and that came from it.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Tree {
    #[schema(format = Uuid)]
    id: String,
    items: Vec<Member>,
}

/// A sandbox of the family, or what is left of one.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Member {
    #[schema(format = Uuid)]
    id: String,
    status: SandboxStatus,
    /// What it was made from; null: it is not known, or from nothing.
    #[schema(value_type = Option<MadeFrom>, required = true)]
    from: Option<Origin>,
    /// Oldest first.
    checkpoints: Vec<Point>,
    /// Oldest first.
    snapshots: Vec<Point>,
}

/// What something was made from that is not a checkpoint of the same sandbox.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it is what an origin looks like to clients")]
struct MadeFrom {
    sandbox_id: String,
    checkpoint: Option<String>,
    snapshot_id: Option<String>,
}

/// A checkpoint or a snapshot in it.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Point {
    name: String,
    #[schema(value_type = String, format = DateTime)]
    created_at: Timestamp,
    #[schema(required = true)]
    parent: Option<String>,
    #[schema(value_type = Option<MadeFrom>, required = true)]
    from: Option<Origin>,
    generation: u64,
    raw_bytes: u64,
    /// On the volume for this one alone.
    own_bytes: u64,
    shared_bytes: u64,
    /// Of a checkpoint: it is what an attach goes on from.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    latest: Option<bool>,
    /// Of a checkpoint: the server made it by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    automatic: Option<bool>,
    /// Of a snapshot: its name, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    called: Option<Option<String>>,
}

/// The history of a sandbox and of its family.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/tree", tag = "time travel", operation_id = "get_tree",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox")),
    responses((status = 200, description = "The family", body = Tree), Reading))]
pub(super) async fn get(of: Of) -> Result<Json<Tree>, ApiError> {
    let id = sandbox_id(&of.id)?;
    only_gvisor(&of.api, id, of.who()).await?;
    let family = of.api.native.family(id, of.who()).await?;
    Ok(Json(Tree { id: id.to_string(), items: family.iter().map(|(id, one)| member(*id, one)).collect() }))
}

fn member(id: SandboxId, one: &Relative) -> Member {
    let status = match (one.gone, one.held) {
        (true, _) => SandboxStatus::Gone,
        (false, true) => SandboxStatus::Ready,
        (false, false) => SandboxStatus::Saved,
    };
    let checkpoints = one.checkpoints.iter().map(|checkpoint| Point {
        latest: Some(Some(checkpoint.name) == one.latest),
        automatic: Some(checkpoint.about.automatic),
        ..point(checkpoint, checkpoint.name.to_string())
    });
    let snapshots = one
        .snapshots
        .iter()
        .map(|snapshot| Point { called: Some(snapshot.about.name.clone()), ..point(snapshot, snapshot.name.to_string()) });
    Member { id: id.to_string(), status, from: one.from.clone(), checkpoints: checkpoints.collect(), snapshots: snapshots.collect() }
}

fn point<N>(one: &Branch<N>, name: String) -> Point {
    Point {
        name,
        created_at: one.about.created_at,
        parent: one.about.parent.map(|parent| parent.to_string()),
        from: one.about.from.clone(),
        generation: one.about.state.generation,
        raw_bytes: one.about.raw_bytes,
        own_bytes: one.share.own,
        shared_bytes: one.share.shared,
        latest: None,
        automatic: None,
        called: None,
    }
}

//! The history of a sandbox and of its family.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::{Path, State},
};
use sandboxer_protocol::SandboxId;
use serde_json::{Value, json};

use super::{Api, ApiError, sandboxes::sandbox_id, travel::only_gvisor};
use crate::{
    checkpoints::{Branch, Relative},
    http::access::Owner,
};

pub(super) async fn get(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let id = sandbox_id(&id)?;
    only_gvisor(&api, id, owner.as_deref()).await?;
    let family = api.native.family(id, owner.as_deref()).await?;
    let items: Vec<Value> = family.iter().map(|(id, one)| object(*id, one)).collect();
    Ok(Json(json!({ "id": id.to_string(), "items": items })))
}

fn object(id: SandboxId, one: &Relative) -> Value {
    let status = match (one.gone, one.held) {
        (true, _) => "gone",
        (false, true) => "ready",
        (false, false) => "saved",
    };
    let checkpoints: Vec<Value> = one
        .checkpoints
        .iter()
        .map(|checkpoint| {
            let mut object = branch(checkpoint, checkpoint.name.to_string());
            object["latest"] = json!(Some(checkpoint.name) == one.latest);
            object["automatic"] = json!(checkpoint.about.automatic);
            object
        })
        .collect();
    let snapshots: Vec<Value> = one
        .snapshots
        .iter()
        .map(|snapshot| {
            let mut object = branch(snapshot, snapshot.name.to_string());
            object["called"] = json!(snapshot.about.name);
            object
        })
        .collect();
    json!({ "id": id.to_string(), "status": status, "from": one.from, "checkpoints": checkpoints, "snapshots": snapshots })
}

fn branch<N>(one: &Branch<N>, name: String) -> Value {
    json!({
        "name": name,
        "created_at": one.about.created_at,
        "parent": one.about.parent,
        "from": one.about.from,
        "generation": one.about.state.generation,
        "raw_bytes": one.about.raw_bytes,
        "own_bytes": one.share.own,
        "shared_bytes": one.share.shared,
    })
}

//! `/v1/sandboxes/{id}/executions/kill`: the end of what runs, for those who are not its client.

use std::sync::Arc;

use axum::{
    Extension, Json,
    body::Bytes,
    extract::{Path, State, rejection::BytesRejection},
};
use sandboxer_protocol::agent::signal_number;
use serde_json::{Value, json};

use super::{Api, ApiError, request, sandboxes::sandbox_id, travel::only_gvisor};
use crate::http::access::Owner;

pub(super) async fn kill(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(id): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, ApiError> {
    let id = sandbox_id(&id)?;
    let mut fields = request::fields(body)?;
    let signal = request::take_text(&mut fields, "signal")?;
    request::nothing_more(&fields)?;
    let number = |name: String| signal_number(&name).ok_or_else(|| ApiError::invalid("signal: there is no such signal."));
    let signal = signal.map(number).transpose()?;
    only_gvisor(&api, id, owner.as_deref()).await?;
    let execution = api.native.kill_execution(id, owner.as_deref(), signal).await?;
    Ok(Json(json!({ "execution_id": execution })))
}

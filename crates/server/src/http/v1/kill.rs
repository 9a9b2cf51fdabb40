//! `/v1/sandboxes/{id}/executions/kill`: the end of what runs, for those who are not its client.

use axum::http::StatusCode;
use sandboxer_protocol::agent::signal_number;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    ApiError,
    extract::{Job, Post},
    idempotency::Answer,
    refusals::Working,
    request,
    sandboxes::sandbox_id,
    travel::only_gvisor,
};

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct KillRequest {
    /// Only send this signal, such as `SIGINT`; left out: everything that the execution started is killed.
    signal: Option<String>,
}

/// What was asked to end.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct KilledExecution {
    execution_id: String,
}

/// Ends the running program of a sandbox, or sends it a signal, whether or not somebody is attached.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/executions/kill", tag = "executions", operation_id = "kill_execution",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), request::Asking), request_body = Option<KillRequest>,
    responses((status = 200, description = "It has ended, or was sent the signal", body = KilledExecution), Working))]
pub(super) async fn kill(post: Post<KillRequest>) -> Result<Answer, ApiError> {
    let work = |job: Job<KillRequest>| async move {
        let (of, id) = (&job.of, sandbox_id(&job.of.id)?);
        let number = |name: &str| signal_number(name).ok_or_else(|| ApiError::invalid("signal: there is no such signal."));
        let signal = job.asked.signal.as_deref().map(number).transpose()?;
        only_gvisor(&of.api, id, of.who()).await?;
        let execution = of.api.native.kill_execution(id, of.who(), signal).await?;
        Ok(Answer::new(StatusCode::OK, KilledExecution { execution_id: execution.to_string() }))
    };
    post.once(work).await
}

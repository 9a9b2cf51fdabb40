//! `/v1/sandboxes/{id}/executions`: one run of a program, collected, or told as it happens by server-sent events.

use axum::{
    body::{Body, Bytes},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse as _, Response},
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use futures_util::stream;
use sandboxer_protocol::{
    agent::Stream,
    client::{Encoding, ErrorCode, ExecuteRequest, Request, ServerEvent, Status, StatusUpdate, put_output},
};
use serde::Serialize;
use serde_json::{Map, Value};
use tokio::sync::watch;
use utoipa::ToSchema;

use super::{
    ApiError,
    extract::{Job, Of, Post},
    idempotency::Answer,
    known::{self, Message},
    refusals::Working,
    request,
    sandboxes::sandbox_id,
    travel::only_gvisor,
};
use crate::workspaces::{ExecutionWord, NativeError, Watched};

/// What is collected of each stream; the rest is dropped, which is told.
const MAX_COLLECTED_BYTES: usize = 8 * 1024 * 1024;

/// What became of a program.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ExecutionResult {
    execution_id: String,
    /// Null: a signal ended it.
    #[schema(required = true)]
    exit_code: Option<i32>,
    /// Such as `SIGKILL`.
    #[schema(required = true)]
    signal: Option<String>,
    timed_out: bool,
    #[schema(required = true)]
    duration_ms: Option<f64>,
    stdout: String,
    stderr: String,
    /// Output is missing: more was written than is collected, 8 MiB of each stream, or the beginning is no longer held.
    truncated: bool,
    /// The bytes of its standard output that are missing in front of `stdout`.
    stdout_offset: u64,
    /// The bytes of its standard error that are missing in front of `stderr`.
    stderr_offset: u64,
}

/// The collected output of one stream.
#[derive(Debug, Default)]
struct Collected {
    bytes: Vec<u8>,
    /// Where the first byte lies in the stream.
    start: u64,
    /// Where the next piece has to begin, if nothing is missing.
    next: u64,
    truncated: bool,
}

impl Collected {
    /// The output before `start` is no longer held.
    fn starts_at(&mut self, start: u64) {
        (self.start, self.next) = (start, start);
        self.truncated = start > 0;
    }

    fn take(&mut self, data: &[u8], offset: u64, end: u64) {
        if offset > self.next && self.bytes.is_empty() {
            self.start = offset;
        }
        let room = MAX_COLLECTED_BYTES - self.bytes.len();
        self.truncated |= offset != self.next || data.len() > room;
        self.bytes.extend_from_slice(&data[..data.len().min(room)]);
        self.next = end;
    }

    fn text(&self, encoding: Encoding) -> String {
        match encoding {
            Encoding::Base64 => BASE64_STANDARD.encode(&self.bytes),
            Encoding::Text => String::from_utf8_lossy(&self.bytes).into_owned(),
        }
    }
}

/// Runs a program in a sandbox that nobody is attached to, and collects what it says; with `Accept: text/event-stream`, tells it as it
/// happens, in the messages of the WebSocket.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/executions", tag = "executions", operation_id = "execute",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), request::Asking),
    request_body(content = ref("#/components/schemas/ExecutionRequest"), content_type = "application/json"),
    responses((status = 200, description = "It has ended, or its events", content(
        (ExecutionResult = "application/json"), (String = "text/event-stream"))), Working))]
pub(super) async fn run(post: Post<Map<String, Value>>) -> Result<Response, ApiError> {
    if wants_events(&post.headers) {
        let Job { of, asked, .. } = post.job;
        let (execute, input) = parse(asked)?;
        let watched = begin(&of, execute, input, None).await?;
        let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
        return Ok((headers, told(watched)).into_response());
    }
    let work = |job: Job<Map<String, Value>>| async move {
        let (execute, input) = parse(job.asked)?;
        let encoding = execute.encoding.unwrap_or_default();
        let watched = begin(&job.of, execute, input, Some(job.waiting.watched())).await?;
        Ok(Answer::new(StatusCode::OK, collected(watched, encoding).await?))
    };
    Ok(post.while_waited_for(work).await?.into_response())
}

/// `waiting` counts those who wait for it, where it goes on without them.
async fn begin(
    of: &Of,
    execute: ExecuteRequest,
    input: Option<String>,
    waiting: Option<watch::Receiver<usize>>,
) -> Result<Watched, ApiError> {
    let id = sandbox_id(&of.id)?;
    only_gvisor(&of.api, id, of.who()).await?;
    Ok(of.api.native.execute(id, of.who(), execute, input, waiting).await?)
}

/// The request, as on a WebSocket, and what the program gets to read.
fn parse(mut fields: Map<String, Value>) -> Result<(ExecuteRequest, Option<String>), ApiError> {
    let input = match fields.remove("input") {
        None | Some(Value::Null) => None,
        Some(Value::String(text)) => Some(text),
        Some(_) => return Err(ApiError::invalid("input: a text is needed.")),
    };
    known::only_known(&fields, Message::Execution, &["input"])?;
    if fields.contains_key("stdin") {
        return Err(ApiError::invalid("stdin: say what the program is to read as input."));
    }
    match Request::parse(&Value::Object(fields).to_string()) {
        Ok(Request::Execute(execute)) => Ok((*execute, input)),
        Ok(_) => Err(ApiError::invalid("language and code are needed.")),
        Err(bad) => Err(ApiError::invalid(bad.message)),
    }
}

fn wants_events(headers: &HeaderMap) -> bool {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    accepted.flat_map(|value| value.split(',')).any(|one| one.trim().split(';').next() == Some("text/event-stream"))
}

/// The messages of the WebSocket, each as an event of its name.
fn told(watched: Watched) -> Body {
    let events = stream::unfold(watched, |mut watched| async {
        let text = match watched.next().await? {
            ExecutionWord::Event(event) => framed(name(&event), event.to_json().as_bytes()),
            ExecutionWord::Output(piece) => {
                let mut json = String::new();
                put_output(&mut json, piece.stream, piece.encoding, &piece.data, piece.offset, piece.end, &piece.execution);
                framed(if piece.stream == Stream::Stdout { "stdout" } else { "stderr" }, json.as_bytes())
            }
        };
        Some((Ok::<_, std::convert::Infallible>(text), watched))
    });
    Body::from_stream(events)
}

fn framed(name: &str, json: &[u8]) -> Bytes {
    // JSON on one line: no line of it can be taken for the end of the event.
    [b"event: ", name.as_bytes(), b"\ndata: ", json, b"\n\n"].concat().into()
}

fn name(event: &ServerEvent) -> &'static str {
    match event {
        ServerEvent::StatusUpdate(_) => "status_update",
        ServerEvent::SandboxId(_) => "sandbox_id",
        ServerEvent::Stdout(_) => "stdout",
        ServerEvent::Stderr(_) => "stderr",
        ServerEvent::Error(_) => "error",
        ServerEvent::Resumed(_) => "resumed",
        ServerEvent::StdinAck(_) => "stdin_ack",
        ServerEvent::File(_) => "file",
    }
}

async fn collected(mut watched: Watched, encoding: Encoding) -> Result<ExecutionResult, ApiError> {
    let (mut stdout, mut stderr) = (Collected::default(), Collected::default());
    let mut refused: Option<(ErrorCode, String)> = None;
    let mut done: Option<StatusUpdate> = None;
    while let Some(word) = watched.next().await {
        match word {
            ExecutionWord::Output(piece) => {
                let stream = if piece.stream == Stream::Stdout { &mut stdout } else { &mut stderr };
                stream.take(&piece.data, piece.offset, piece.end);
            }
            ExecutionWord::Event(ServerEvent::Resumed(resumed)) => {
                stdout.starts_at(resumed.stdout_offset.unwrap_or(0));
                stderr.starts_at(resumed.stderr_offset.unwrap_or(0));
            }
            ExecutionWord::Event(ServerEvent::Error(error)) => refused = Some((error.code, error.message)),
            ExecutionWord::Event(ServerEvent::StatusUpdate(update)) if update.status == Status::ExecutionDone => done = Some(update),
            ExecutionWord::Event(_) => {}
        }
        // It was never started, so nothing follows.
        if let (Some((code, message)), false) = (&refused, watched.has_begun()) {
            return Err(NativeError::Because(*code, message.clone()).into());
        }
    }
    let Some(done) = done else {
        let message =
            "The sandbox was saved, went back, ended or got another client meanwhile. Attach to it to see what became of the execution.";
        return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "not_ready", message));
    };
    Ok(ExecutionResult {
        execution_id: watched.id.to_string(),
        exit_code: done.exit_code,
        signal: done.signal,
        timed_out: done.timed_out.unwrap_or(false),
        duration_ms: done.duration_ms,
        stdout: stdout.text(encoding),
        stderr: stderr.text(encoding),
        truncated: stdout.truncated || stderr.truncated,
        stdout_offset: stdout.start,
        stderr_offset: stderr.start,
    })
}

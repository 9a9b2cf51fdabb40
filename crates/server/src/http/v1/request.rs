//! What a request carries: its body, and how it wants to be answered.

use axum::{
    body::Bytes,
    extract::rejection::BytesRejection,
    http::{HeaderMap, StatusCode},
};
use sandboxer_extensions::Map as Texts;
use sandboxer_protocol::limits::MAX_METADATA_BYTES;
use serde_json::{Map, Value};

use super::{ApiError, known};

/// The fields of a body; none is the same as an empty object.
pub(super) fn fields(body: Result<Bytes, BytesRejection>) -> Result<Map<String, Value>, ApiError> {
    let body = body.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", "The request is too large."),
        _ => ApiError::bad(format!("The body of the request could not be read: {}.", rejection.body_text())),
    })?;
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(Map::new());
    }
    match serde_json::from_slice(&body) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(_) => Err(ApiError::bad("The body has to be a JSON object.")),
        Err(error) => Err(ApiError::bad(format!("The body is not JSON: {error}."))),
    }
}

/// `Prefer: respond-async`.
pub(super) fn wants_async(headers: &HeaderMap) -> bool {
    let preferences = headers.get_all("prefer").iter().filter_map(|value| value.to_str().ok());
    preferences.flat_map(|value| value.split(',')).any(|one| one.trim().eq_ignore_ascii_case("respond-async"))
}

/// Takes a field that is a name, or null.
pub(super) fn take_name<T: std::str::FromStr<Err: std::fmt::Display>>(
    fields: &mut Map<String, Value>,
    field: &str,
) -> Result<Option<T>, ApiError> {
    match fields.remove(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => text.parse().map(Some).map_err(|error| ApiError::invalid(format!("{field}: {error}."))),
        Some(_) => Err(ApiError::invalid(format!("{field}: a text is needed."))),
    }
}

/// Takes a field that is an object, or null.
pub(super) fn take_object(fields: &mut Map<String, Value>, field: &str) -> Result<Map<String, Value>, ApiError> {
    match fields.remove(field) {
        None | Some(Value::Null) => Ok(Map::new()),
        Some(Value::Object(object)) => Ok(object),
        Some(_) => Err(ApiError::invalid(format!("{field}: an object is needed."))),
    }
}

/// Takes `metadata`: texts by their names.
pub(super) fn take_metadata(fields: &mut Map<String, Value>) -> Result<Texts, ApiError> {
    let metadata: Texts = serde_json::from_value(Value::Object(take_object(fields, "metadata")?))
        .map_err(|_| ApiError::invalid("metadata: texts by their names are needed."))?;
    let bytes: usize = metadata.iter().map(|(name, value)| name.len() + value.len()).sum();
    if bytes > MAX_METADATA_BYTES {
        return Err(ApiError::invalid(format!("metadata: at most {MAX_METADATA_BYTES} bytes together.")));
    }
    Ok(metadata)
}

/// What is left is unknown, and a misspelt field that is ignored is a sandbox that is not what was wanted.
pub(super) fn nothing_more(fields: &Map<String, Value>, known: &[&str]) -> Result<(), ApiError> {
    match fields.keys().next() {
        None => Ok(()),
        Some(name) => Err(known::unknown("", name, known.iter().copied())),
    }
}

/// The headers of a request for work.
#[derive(utoipa::IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "it is what the document says of them")]
pub(super) struct Asking {
    /// The same request sent again under the same key gets the answer of the first one, for ten minutes.
    #[param(rename = "Idempotency-Key", required = false, min_length = 1, max_length = 255, pattern = "^[!-~]+$")]
    idempotency_key: Option<String>,
    /// `respond-async`: answer with 202 when the work has begun.
    #[param(rename = "Prefer", required = false, pattern = "^[!-~]+$")]
    prefer: Option<String>,
}

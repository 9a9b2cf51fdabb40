//! How every request begins: who asks, of what, with which words, and whether it was asked before.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Bytes,
    extract::{FromRequest, FromRequestParts, Query, RawPathParams, Request},
    http::{HeaderMap, StatusCode, header, request::Parts},
};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tokio::time::timeout;

use super::{
    Api, ApiError,
    idempotency::{Answer, Waiting},
    known, request,
};
use crate::{http::access::Owner, shares::Held};

/// A body up to this size takes no room from the budget of its key.
const FREE_BODY_BYTES: usize = 16 * 1024;
/// How long a larger one waits for room.
const ROOM_WITHIN: Duration = Duration::from_secs(30);

/// Who asks, and of what: the one part of the address that varies, or nothing.
pub(super) struct Of {
    pub(super) api: Arc<Api>,
    pub(super) owner: Option<String>,
    pub(super) id: String,
}

impl Of {
    /// The name of the key that the request came with.
    pub(super) fn who(&self) -> Option<&str> {
        self.owner.as_deref()
    }
}

impl FromRequestParts<Arc<Api>> for Of {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, api: &Arc<Api>) -> Result<Self, ApiError> {
        // Whoever comes here has passed the check that leaves this.
        let owner = parts.extensions.get::<Owner>().and_then(|owner| owner.0.clone());
        let params = RawPathParams::from_request_parts(parts, api).await;
        let params = params.map_err(|_| ApiError::not_found("address"))?;
        let id = params.iter().next().map(|(_, value)| value.to_owned()).unwrap_or_default();
        Ok(Self { api: Arc::clone(api), owner, id })
    }
}

/// What the address says behind its question mark.
pub(super) struct Words<Q>(pub(super) Q);

impl<Q: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Words<Q> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        match Query::<Q>::from_request_parts(parts, state).await {
            Ok(Query(words)) => Ok(Self(words)),
            Err(rejection) => Err(ApiError::bad(format!("{}.", rejection.body_text()))),
        }
    }
}

/// Work that is asked for.
pub(super) struct Job<B> {
    pub(super) of: Of,
    /// What the body says.
    pub(super) asked: B,
    /// Who asks does not want to wait for its end.
    pub(super) later: bool,
    /// Whether somebody waits for it.
    pub(super) waiting: Waiting,
}

/// A request for work, with what it takes to do it once only.
pub(super) struct Post<B> {
    pub(super) job: Job<B>,
    pub(super) headers: HeaderMap,
    fingerprint: String,
}

impl<B: DeserializeOwned> FromRequest<Arc<Api>> for Post<B> {
    type Rejection = ApiError;

    async fn from_request(request: Request, api: &Arc<Api>) -> Result<Self, ApiError> {
        let (mut parts, body) = request.into_parts();
        let of = Of::from_request_parts(&mut parts, api).await?;
        let (path, headers) = (parts.uri.path().to_owned(), parts.headers.clone());
        let _room = room_for(&parts, api, of.who()).await?;
        let fields = request::fields(Bytes::from_request(Request::from_parts(parts, body), api).await)?;
        let fingerprint = format!("{path} {}", Value::Object(fields.clone()));
        let later = request::wants_async(&headers);
        Ok(Self { job: Job { of, asked: typed(fields)?, later, waiting: Waiting::default() }, headers, fingerprint })
    }
}

/// Room for a body that is read whole, until it is parsed. A small one needs none.
async fn room_for(parts: &Parts, api: &Api, owner: Option<&str>) -> Result<Option<Held>, ApiError> {
    let announced = parts.headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    let bytes = announced.unwrap_or(super::MAX_BODY_BYTES).min(super::MAX_BODY_BYTES);
    if bytes <= FREE_BODY_BYTES {
        return Ok(None);
    }
    let room = api.native.message_budget().take(owner, u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX));
    let busy = |_| ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limited", "Too much is being sent to this server. Try again later.");
    timeout(ROOM_WITHIN, room).await.map(Some).map_err(busy)
}

impl<B> Post<B> {
    /// Does the work, unless that was done already for the same `Idempotency-Key`.
    pub(super) async fn once<F>(self, work: impl FnOnce(Job<B>) -> F) -> Result<Answer, ApiError>
    where
        F: Future<Output = Result<Answer, ApiError>> + Send + 'static,
    {
        let (api, owner, waiting) = (Arc::clone(&self.job.of.api), self.job.of.owner.clone(), self.job.waiting.clone());
        api.remembered.once(&self.headers, owner, &self.fingerprint, waiting, work(self.job)).await
    }

    /// The same, but without an `Idempotency-Key` only for as long as its client is there: nobody else could ever hear of it. The work may be dropped at any
    /// point of it.
    pub(super) async fn while_waited_for<F>(self, work: impl FnOnce(Job<B>) -> F) -> Result<Answer, ApiError>
    where
        F: Future<Output = Result<Answer, ApiError>> + Send + 'static,
    {
        if self.headers.contains_key("idempotency-key") {
            return self.once(work).await;
        }
        let _one = self.job.waiting.one();
        work(self.job).await
    }
}

fn typed<B: DeserializeOwned>(fields: Map<String, Value>) -> Result<B, ApiError> {
    serde_path_to_error::deserialize(Value::Object(fields)).map_err(|error| {
        // Both may quote what was sent, which may be long.
        let short = |mut text: String| {
            if let Some((end, _)) = text.char_indices().nth(500) {
                text.truncate(end);
            }
            text
        };
        let (path, problem) = (short(error.path().to_string()), short(error.inner().to_string()));
        // serde's message quotes the unknown field first and the known ones behind it.
        let quoted: Vec<&str> = problem.split('`').skip(1).step_by(2).collect();
        if let ("unknown field ", [wrong, names @ ..]) = (problem.split('`').next().unwrap_or_default(), &quoted[..]) {
            return known::unknown("", wrong, names.iter().copied());
        }
        if path == "." { ApiError::invalid(format!("{problem}.")) } else { ApiError::invalid(format!("{path}: {problem}.")) }
    })
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(deny_unknown_fields, default)]
    struct Wanted {
        name: Option<String>,
    }

    fn read(value: &Value) -> Result<Wanted, ApiError> {
        typed(value.as_object().unwrap().clone())
    }

    #[test]
    fn a_field_that_is_wrong_or_unknown_is_named() {
        assert_eq!(read(&json!({})).unwrap(), Wanted::default());
        assert_eq!(read(&json!({ "name": null })).unwrap(), Wanted::default());
        for wrong in [json!({ "name": 7 }), json!({ "nmae": "x" })] {
            let error = read(&wrong).unwrap_err();
            let name = wrong.as_object().unwrap().keys().next().unwrap();
            assert!(error.code == "invalid_field" && error.message.contains(name), "{error:?}");
        }
        assert!(read(&json!({ "nmae": "x" })).unwrap_err().message.contains("Did you mean \"name\"?"));
        assert!(read(&json!({ "x".repeat(9999): 1 })).unwrap_err().message.len() < 2000);
    }
}

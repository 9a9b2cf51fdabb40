//! `Idempotency-Key`: the same request sent again gets the answer of the first one, and does nothing.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use axum::{
    Json,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::{sync::watch, time::Instant};

use super::ApiError;
use crate::manager::hash;

/// How long an answer is remembered.
const REMEMBER: Duration = Duration::from_secs(600);
/// How many are.
const MAX_REMEMBERED: usize = 10_000;
const MAX_KEY_BYTES: usize = 255;

/// What a request was answered.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) body: Value,
}

impl Answer {
    pub(super) fn created(body: impl Serialize) -> Self {
        Self { status: StatusCode::CREATED, body: json!(body) }
    }

    pub(super) fn accepted(body: impl Serialize) -> Self {
        Self { status: StatusCode::ACCEPTED, body: json!(body) }
    }
}

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        (self.status, Json(self.body)).into_response()
    }
}

type Outcome = Result<Answer, ApiError>;

#[derive(Default)]
pub(super) struct Remembered(Mutex<HashMap<(Option<String>, String), Entry>>);

struct Entry {
    began: Instant,
    /// Of the request, so that another one under the same key is noticed.
    fingerprint: String,
    outcome: watch::Receiver<Option<Outcome>>,
}

/// What a request with a key is.
enum Turn {
    First(watch::Sender<Option<Outcome>>),
    Again(watch::Receiver<Option<Outcome>>),
}

impl Remembered {
    /// Does the work of a request, unless it was done for its key already. The work runs to its end even if nobody waits.
    pub(super) async fn once<F>(&self, headers: &HeaderMap, owner: Option<String>, request: &str, work: F) -> Outcome
    where
        F: Future<Output = Outcome> + Send + 'static,
    {
        let Some(key) = headers.get("idempotency-key") else { return detached(work).await };
        let key = key.to_str().ok().filter(|key| !key.is_empty() && key.len() <= MAX_KEY_BYTES);
        let key = key.ok_or_else(|| ApiError::bad(format!("Idempotency-Key: 1 to {MAX_KEY_BYTES} printable characters.")))?;
        match self.turn((owner, key.to_owned()), hash(request))? {
            Turn::First(tell) => {
                let working = async move {
                    let outcome = work.await;
                    tell.send_replace(Some(outcome.clone()));
                    outcome
                };
                detached(working).await
            }
            Turn::Again(mut outcome) => match outcome.wait_for(Option::is_some).await {
                Ok(outcome) => outcome.clone().unwrap_or_else(|| Err(ended())),
                Err(_) => Err(ended()),
            },
        }
    }

    fn turn(&self, key: (Option<String>, String), fingerprint: String) -> Result<Turn, ApiError> {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if let Some(entry) = entries.get(&key).filter(|entry| now.duration_since(entry.began) < REMEMBER) {
            if entry.fingerprint != fingerprint {
                let message = "This Idempotency-Key came with another request before. Use a new one.";
                return Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "idempotency_key_reused", message));
            }
            return Ok(Turn::Again(entry.outcome.clone()));
        }
        if entries.len() >= MAX_REMEMBERED {
            entries.retain(|_, entry| now.duration_since(entry.began) < REMEMBER);
        }
        if entries.len() >= MAX_REMEMBERED {
            let message = "Too many Idempotency-Keys are remembered. Try again later.";
            return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limited", message));
        }
        let (tell, outcome) = watch::channel(None);
        entries.insert(key, Entry { began: now, fingerprint, outcome });
        Ok(Turn::First(tell))
    }
}

fn ended() -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "internal", "The work ended unexpectedly. Try again with another key.")
}

/// A client that goes away does not stop what it began.
async fn detached<F: Future<Output = Outcome> + Send + 'static>(work: F) -> Outcome {
    tokio::spawn(work).await.unwrap_or_else(|_| Err(ended()))
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    async fn ask(remembered: &Remembered, key: Option<&str>, owner: &str, request: &str, done: &Arc<AtomicUsize>) -> Outcome {
        let headers = key.map(|key| (axum::http::HeaderName::from_static("idempotency-key"), key.parse().unwrap())).into_iter().collect();
        let done = Arc::clone(done);
        let work = async move { Ok(Answer::created(json!(done.fetch_add(1, Ordering::Relaxed)))) };
        remembered.once(&headers, Some(owner.to_owned()), request, work).await
    }

    #[tokio::test(start_paused = true)]
    async fn the_same_request_is_done_once_for_its_key_within_ten_minutes() {
        let (remembered, done) = (Remembered::default(), Arc::new(AtomicUsize::new(0)));
        let (one, two) = tokio::join!(ask(&remembered, Some("k"), "a", "r", &done), ask(&remembered, Some("k"), "a", "r", &done));
        assert_eq!((one.unwrap().body, two.unwrap().body), (json!(0), json!(0)));
        assert_eq!(ask(&remembered, Some("k"), "a", "other", &done).await.unwrap_err().code, "idempotency_key_reused");
        assert_eq!(ask(&remembered, Some("k"), "b", "r", &done).await.unwrap().body, json!(1), "another owner's key is another key");
        assert_eq!(ask(&remembered, None, "a", "r", &done).await.unwrap().body, json!(2));
        tokio::time::advance(REMEMBER).await;
        assert_eq!(ask(&remembered, Some("k"), "a", "r", &done).await.unwrap().body, json!(3));
        assert!(ask(&remembered, Some(&"k".repeat(256)), "a", "r", &done).await.is_err());
    }
}

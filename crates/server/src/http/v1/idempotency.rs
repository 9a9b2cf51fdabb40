//! `Idempotency-Key`: the same request sent again gets the answer of the first one, and does nothing.
//!
//! That something was done is remembered for ten minutes. Its answer is too, as far as the answers of one API key, and those of all, take no more room than
//! they may: beyond it the oldest answers go, and who asks again is told that it was done.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use serde::Serialize;
use serde_json::json;
use tokio::{sync::watch, time::Instant};

use super::ApiError;
use crate::manager::hash;

/// How long it is remembered that something was done, from its end on.
const REMEMBER: Duration = Duration::from_secs(600);
/// How much is remembered for one API key. Where there are none, everybody is one.
const MAX_REMEMBERED: usize = 10_000;
/// What the answers for one API key may take, and those of all.
const MAX_OWNER_BYTES: usize = 16 * 1024 * 1024;
const MAX_BYTES: usize = 64 * 1024 * 1024;
const MAX_KEY_BYTES: usize = 255;

/// What a request was answered, in JSON.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    status: StatusCode,
    body: Bytes,
}

impl Answer {
    pub(super) fn new(status: StatusCode, body: impl Serialize) -> Self {
        Self { status, body: json!(body).to_string().into() }
    }

    pub(super) fn created(body: impl Serialize) -> Self {
        Self::new(StatusCode::CREATED, body)
    }

    pub(super) fn accepted(body: impl Serialize) -> Self {
        Self::new(StatusCode::ACCEPTED, body)
    }
}

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        (self.status, [(header::CONTENT_TYPE, "application/json")], self.body).into_response()
    }
}

type Outcome = Result<Answer, ApiError>;

/// How many wait for the outcome of a work: those who began it, and those who asked again.
#[derive(Debug, Clone)]
pub(super) struct Waiting(Arc<watch::Sender<usize>>);

impl Default for Waiting {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(0)))
    }
}

impl Waiting {
    /// Counts one for as long as what is returned is kept.
    pub(super) fn one(&self) -> OneWaiting {
        self.0.send_modify(|waiting| *waiting += 1);
        OneWaiting(self.clone())
    }

    pub(super) fn watched(&self) -> watch::Receiver<usize> {
        self.0.subscribe()
    }
}

pub(super) struct OneWaiting(Waiting);

impl Drop for OneWaiting {
    fn drop(&mut self) {
        self.0.0.send_modify(|waiting| *waiting -= 1);
    }
}

/// What was done, and is being done.
#[derive(Clone, Default)]
pub(super) struct Remembered(Arc<Mutex<All>>);

#[derive(Default)]
struct All {
    owners: HashMap<Option<String>, Own>,
    /// Of all answers that are held.
    bytes: usize,
}

/// What one API key asked for.
#[derive(Default)]
struct Own {
    entries: HashMap<String, Entry>,
    /// What is done, by its key and since when, oldest first.
    done: VecDeque<(Instant, String)>,
    /// Whose answers are held, in the same order.
    held: VecDeque<String>,
    bytes: usize,
}

struct Entry {
    /// Of the request, so that another one under the same key is noticed.
    fingerprint: String,
    state: State,
}

enum State {
    UnderWay {
        outcome: watch::Receiver<Option<Outcome>>,
        waiting: Waiting,
    },
    Done(Outcome),
    /// Its answer took too much room.
    DoneUnheld,
}

/// What a request with a key is.
enum Turn {
    First(watch::Sender<Option<Outcome>>, watch::Receiver<Option<Outcome>>),
    UnderWay(watch::Receiver<Option<Outcome>>, OneWaiting),
    Done(Outcome),
}

impl Own {
    /// What is older than it is remembered.
    fn forget_old(&mut self, now: Instant) {
        while let Some((since, key)) = self.done.front() {
            if now.duration_since(*since) < REMEMBER {
                return;
            }
            if let Some(Entry { state: State::Done(outcome), .. }) = self.entries.remove(key) {
                self.bytes -= bytes_of(&outcome);
                self.held.pop_front();
            }
            self.done.pop_front();
        }
    }

    /// Lets go of the oldest answer. False: none is held.
    fn let_go(&mut self) -> bool {
        let Some(key) = self.held.pop_front() else { return false };
        if let Some(entry) = self.entries.get_mut(&key)
            && let State::Done(outcome) = std::mem::replace(&mut entry.state, State::DoneUnheld)
        {
            self.bytes -= bytes_of(&outcome);
        }
        true
    }
}

impl All {
    /// Everybody's that is older than it is remembered.
    fn forget_old(&mut self, now: Instant) {
        self.owners.retain(|_, own| {
            own.forget_old(now);
            !own.entries.is_empty()
        });
        self.count();
    }

    fn count(&mut self) {
        self.bytes = self.owners.values().map(|own| own.bytes).sum();
    }

    /// Who holds too much lets go of what it has held longest; if all hold too much, who holds most does.
    fn make_room(&mut self, owner: &Option<String>) {
        if let Some(own) = self.owners.get_mut(owner) {
            while own.bytes > MAX_OWNER_BYTES && own.let_go() {}
        }
        self.count();
        while self.bytes > MAX_BYTES {
            let Some(most) = self.owners.values_mut().max_by_key(|own| own.bytes) else { return };
            if !most.let_go() {
                return;
            }
            self.count();
        }
    }
}

impl Remembered {
    /// Does the work of a request, unless it was done for its key already. The work runs to its end even if nobody waits; `waiting` tells whether somebody
    /// does.
    pub(super) async fn once<F>(&self, headers: &HeaderMap, owner: Option<String>, request: &str, waiting: Waiting, work: F) -> Outcome
    where
        F: Future<Output = Outcome> + Send + 'static,
    {
        let one = waiting.one();
        let Some(key) = headers.get("idempotency-key") else { return detached(work).await };
        let key = key.to_str().ok().filter(|key| !key.is_empty() && key.len() <= MAX_KEY_BYTES);
        let key = key.ok_or_else(|| ApiError::bad(format!("Idempotency-Key: 1 to {MAX_KEY_BYTES} printable characters.")))?;
        let (mut outcome, _one) = match self.turn(owner.clone(), key, hash(request), waiting)? {
            Turn::Done(outcome) => return outcome,
            Turn::UnderWay(outcome, one) => (outcome, one),
            Turn::First(tell, outcome) => {
                let (remembered, key) = (self.clone(), key.to_owned());
                tokio::spawn(async move {
                    let outcome = detached(work).await;
                    remembered.done(&owner, key, &outcome);
                    tell.send_replace(Some(outcome));
                });
                (outcome, one)
            }
        };
        match outcome.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone().unwrap_or_else(|| Err(ended())),
            Err(_) => Err(ended()),
        }
    }

    fn turn(&self, owner: Option<String>, key: &str, fingerprint: String, waiting: Waiting) -> Result<Turn, ApiError> {
        let mut all = self.lock();
        all.forget_old(Instant::now());
        let own = all.owners.entry(owner).or_default();
        if let Some(entry) = own.entries.get(key) {
            if entry.fingerprint != fingerprint {
                let message = "This Idempotency-Key came with another request before. Use a new one.";
                return Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "idempotency_key_reused", message));
            }
            return match &entry.state {
                State::UnderWay { outcome, waiting } => Ok(Turn::UnderWay(outcome.clone(), waiting.one())),
                State::Done(outcome) => Ok(Turn::Done(outcome.clone())),
                State::DoneUnheld => {
                    let message = "This was done for this Idempotency-Key already. Its answer was too large to be held until now: look at what it did.";
                    Err(ApiError::new(StatusCode::CONFLICT, "answer_not_held", message))
                }
            };
        }
        if own.entries.len() >= MAX_REMEMBERED {
            let message = "Too many Idempotency-Keys are remembered. Try again later.";
            return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limited", message));
        }
        let (tell, outcome) = watch::channel(None);
        let state = State::UnderWay { outcome: outcome.clone(), waiting };
        own.entries.insert(key.to_owned(), Entry { fingerprint, state });
        Ok(Turn::First(tell, outcome))
    }

    /// From here on those who ask find the outcome here, and not where those hear it who wait already.
    fn done(&self, owner: &Option<String>, key: String, outcome: &Outcome) {
        let mut all = self.lock();
        let Some(own) = all.owners.get_mut(owner) else { return };
        let Some(entry) = own.entries.get_mut(&key) else { return };
        if bytes_of(outcome) <= MAX_OWNER_BYTES {
            entry.state = State::Done(outcome.clone());
            own.bytes += bytes_of(outcome);
            own.held.push_back(key.clone());
        } else {
            entry.state = State::DoneUnheld;
        }
        own.done.push_back((Instant::now(), key));
        all.make_room(owner);
    }

    fn lock(&self) -> MutexGuard<'_, All> {
        // Each change leaves it whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn bytes_of(outcome: &Outcome) -> usize {
    match outcome {
        Ok(answer) => answer.body.len(),
        Err(error) => error.message.len(),
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
mod tests;

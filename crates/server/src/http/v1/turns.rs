//! Requests that read much of a volume wait for a turn, of which each key has few: many of them at once
//! would keep the threads for files from all other keys.

use std::{collections::HashMap, sync::Arc, time::Duration};

use axum::{
    extract::{Query, Request, State},
    http::{Method, StatusCode, Uri},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use tokio::time::timeout;

use super::{Api, ApiError};
use crate::http::access::Owner;

/// How long a request waits for its turn.
const WAIT: Duration = Duration::from_secs(30);

pub(super) async fn taken(State(api): State<Arc<Api>>, request: Request, next: Next) -> Response {
    // axum has the handler of GET answer HEAD too.
    if !matches!(*request.method(), Method::GET | Method::HEAD) || !reads_much(request.uri()) {
        return next.run(request).await;
    }
    let owner = request.extensions().get::<Owner>().and_then(|owner| owner.0.clone());
    match timeout(WAIT, api.native.volume_turns().take(owner.as_deref(), 1)).await {
        Ok(_turn) => next.run(request).await,
        Err(_) => {
            let message = "This API key has too many lists under way. Try again when some of them are done.";
            ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limited", message).into_response()
        }
    }
}

/// Lists and histories read a file for each thing that they tell of.
fn reads_much(uri: &Uri) -> bool {
    let path = uri.path().trim_end_matches('/');
    match path {
        "/v1/snapshots" | "/v1/filesystem-snapshots" => true,
        // As the handler reads it: a name may be encoded.
        "/v1/sandboxes" => match Query::<HashMap<String, String>>::try_from_uri(uri) {
            Ok(Query(words)) => words.contains_key("saved"),
            Err(_) => true,
        },
        path => path.starts_with("/v1/sandboxes/") && (path.ends_with("/tree") || path.ends_with("/checkpoints")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_volume_take_turns_and_other_requests_do_not() {
        let takes = |uri: &str| reads_much(&uri.parse().unwrap());
        for much in [
            "/v1/snapshots?limit=1",
            "/v1/filesystem-snapshots/",
            "/v1/sandboxes?saved=true",
            "/v1/sandboxes?s%61ved=true",
            "/v1/sandboxes/x/tree",
        ] {
            assert!(takes(much), "{much}");
        }
        for little in ["/v1/sandboxes", "/v1/sandboxes/x", "/v1/sandboxes/x/files/list?path=a", "/v1/filesystem-snapshots/n/layer"] {
            assert!(!takes(little), "{little}");
        }
    }
}

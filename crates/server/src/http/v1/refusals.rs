//! The errors of the resource API, for its document: which kind of request may be answered with which status.

use std::collections::BTreeMap;

use serde::Serialize;
use utoipa::{
    IntoResponses, ToSchema,
    openapi::{ContentBuilder, Ref, RefOr, Response, ResponseBuilder},
};

/// What is said of every error.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Error)]
pub(super) struct ErrorBody {
    error: ErrorWords,
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ErrorWords {
    /// For programs: it never changes its meaning.
    code: String,
    /// What happened, and what to do.
    message: String,
}

impl ErrorBody {
    pub(super) fn new(code: &str, message: &str) -> Self {
        Self { error: ErrorWords { code: code.to_owned(), message: message.to_owned() } }
    }
}

macro_rules! refusals {
    ($($(#[$doc:meta])* $name:ident: $($status:literal)*;)*) => {$(
        $(#[$doc])*
        pub(super) struct $name;

        impl IntoResponses for $name {
            fn responses() -> BTreeMap<String, RefOr<Response>> {
                // Anybody without a right key or from another origin, and every address with a broken escape in it.
                [400, 401, 403, 404 $(, $status)*].into_iter().map(response).collect()
            }
        }
    )*};
}

refusals! {
    /// Of what only looks, and needs nothing but this server's memory.
    Looking: 422;
    /// Of what looks at the volume, or asks an extension.
    Reading: 409 410 422 501 503;
    /// Of what does something.
    Working: 409 410 413 422 429 501 503;
    /// Of single files.
    Files: 409 410 413 416 422 429 501 503;
}

fn response(status: u16) -> (String, RefOr<Response>) {
    let said = match status {
        400 => "It is no such request: a body that is no JSON object, a parameter that makes no sense.",
        401 => "A valid API key is needed.",
        403 => "A foreign host or origin, or a file that the sandbox itself does not let be touched.",
        404 => "There is no such thing, or it belongs to somebody else.",
        409 => "It does not fit what is there: a client is attached, the sandbox does not run here, a name is taken.",
        410 => "The sandbox has ended. The code and the message say why; it is remembered for a while, and told to the key that made it.",
        413 => "More than is taken, or than there is room for.",
        416 => "Nothing of the file is in the range.",
        422 => "A field has a value that it can't have.",
        429 => "Too much at once. Try again later.",
        501 => "This server, or this kind of sandbox, does not do this.",
        _ => "It could not be done now: the server stops, is full, or something it needs failed. Try again.",
    };
    let content = ContentBuilder::new().schema(Some(Ref::from_schema_name("Error"))).build();
    let response = ResponseBuilder::new().description(said).content("application/json", content).build();
    (status.to_string(), RefOr::T(response))
}

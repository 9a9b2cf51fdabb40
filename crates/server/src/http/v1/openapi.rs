//! `/v1/openapi.json`: what the resource API takes and answers, from the types and the routes themselves.

use std::sync::LazyLock;

use axum::{
    http::header,
    response::{IntoResponse, Response},
};
use serde_json::{Map, Value, json};
use utoipa::{OpenApi, openapi::OpenApi as Document};

use super::refusals::ErrorBody;

/// The words of the WebSocket that the resource API takes too. They are generated from the types and compared with them.
pub(super) const CONFIGURATION: &str = include_str!("../../../../../docs/schema/configuration.json");
pub(super) const EXECUTION: &str = include_str!("../../../../../docs/schema/execution.json");

#[derive(OpenApi)]
#[openapi(
    info(
        title = "sandboxer",
        description = "The resource API: sandboxes and snapshots of every kind over plain HTTP. Every error is `{\"error\":{\"code\",\"message\"}}`.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    components(schemas(ErrorBody)),
    tags(
        (name = "sandboxes", description = "Sandboxes of every kind"),
        (name = "executions", description = "Programs, for those without a WebSocket"),
        (name = "files", description = "Files of gVisor sandboxes that run"),
        (name = "network", description = "What gVisor sandboxes reach, and how they are reached"),
        (name = "time travel", description = "Snapshots, checkpoints, going back, copies"),
        (name = "filesystem snapshots", description = "The files of a sandbox, by a name"),
        (name = "server", description = "What may be made, and where")
    )
)]
pub(super) struct Base;

/// The whole document, from what the routes say.
pub(super) fn complete(routes: Document) -> Value {
    let mut document = serde_json::to_value(routes).unwrap_or_default();
    binary_bodies(&mut document["paths"]);
    let mut schemas = Map::new();
    adopt(&mut schemas, "Configuration", CONFIGURATION);
    adopt(&mut schemas, "Execution", EXECUTION);
    schemas.insert("CreateRequest".to_owned(), create_request());
    schemas.insert("ExecutionRequest".to_owned(), execution_request(&schemas));
    if let Some(known) = document["components"]["schemas"].as_object_mut() {
        known.append(&mut schemas);
    }
    document["components"]["securitySchemes"] = json!({
        "key": { "type": "http", "scheme": "bearer", "description": "An API key, where the server asks for one." },
        "header": { "type": "apiKey", "in": "header", "name": "X-API-Key" },
    });
    // A server on a loopback address needs none.
    document["security"] = json!([{ "key": [] }, { "header": [] }, {}]);
    document
}

/// Describes bodies that are not JSON as bytes. utoipa takes `[u8]` for an array of integers, and so
/// would every generated client.
fn binary_bodies(part: &mut Value) {
    match part {
        Value::Object(fields) => {
            for (name, value) in fields.iter_mut() {
                match value.as_object_mut().filter(|_| name == "content") {
                    Some(kinds) => kinds.iter_mut().for_each(|(kind, body)| binary_body(kind, body)),
                    None => binary_bodies(value),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(binary_bodies),
        _ => {}
    }
}

fn binary_body(kind: &str, body: &mut Value) {
    if kind != "application/json" && body["schema"]["type"] == "array" {
        body["schema"] = json!({ "type": "string", "format": "binary" });
    }
}

/// A schema with all that it refers to.
fn adopt(schemas: &mut Map<String, Value>, name: &str, text: &str) {
    let text = text.replace("#/$defs/", "#/components/schemas/");
    let Ok(Value::Object(mut schema)) = serde_json::from_str(&text) else { return };
    if let Some(Value::Object(mut parts)) = schema.remove("$defs") {
        schemas.append(&mut parts);
    }
    schema.remove("$schema");
    // Generators name a type by its title, and two schemas here come from one type.
    schema.remove("title");
    schemas.insert(name.to_owned(), Value::Object(schema));
}

fn create_request() -> Value {
    json!({
        "description": "What to make: with no profile, or `profile.gvisor`, a gVisor sandbox by any field of a configuration; else what the profile says.",
        "allOf": [
            { "$ref": "#/components/schemas/Configuration" },
            { "type": "object", "properties": {
                "profile": { "type": ["string", "null"], "maxLength": 56 },
                "inputs": { "type": ["object", "null"] },
                "host": { "type": ["string", "null"], "maxLength": 48 },
            } },
        ],
    })
}

/// An execution without `stdin`, and with all of its input.
fn execution_request(schemas: &Map<String, Value>) -> Value {
    let mut schema = schemas.get("Execution").cloned().unwrap_or_default();
    if let Some(properties) = schema["properties"].as_object_mut() {
        properties.remove("stdin");
        let input = json!({ "description": "All that the program gets to read; left out: nothing.", "type": ["string", "null"] });
        properties.insert("input".to_owned(), input);
    }
    schema
}

/// The document as text, made once.
pub(super) fn text() -> &'static str {
    static TEXT: LazyLock<String> =
        LazyLock::new(|| serde_json::to_string_pretty(&complete(super::documented().to_openapi())).unwrap_or_default() + "\n");
    &TEXT
}

/// This document.
#[utoipa::path(get, path = "/v1/openapi.json", tag = "server", operation_id = "get_openapi",
    responses((status = 200, description = "An OpenAPI 3.1 document", body = Object)))]
pub(super) async fn get() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], text()).into_response()
}

#[cfg(test)]
mod tests;

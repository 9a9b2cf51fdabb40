//! Between a client that speaks the XML API of Google's store and `fake-gcs-server`, which heeds conditions only where an object is sent by the
//! JSON API. What is tested by it is this shim's view of Google's store.

use std::net::SocketAddr;

use serde_json::{Value, json};

const BOUNDARY: &str = "a-boundary-that-no-object-has-7f3a";

/// A service account that needs no token, and says where the store is.
pub(super) fn account(endpoint: &str) -> String {
    json!({"private_key": "", "private_key_id": "", "client_email": "", "disable_oauth": true, "gcs_base_url": endpoint}).to_string()
}

/// The request as the server takes it: to its own name, and writes by the other API.
pub(super) fn request(head: &[u8], body: Vec<u8>, server: SocketAddr) -> (Vec<u8>, Vec<u8>) {
    let text = String::from_utf8_lossy(head);
    let named = |line: &str| if line.to_ascii_lowercase().starts_with("host:") { format!("Host: {server}") } else { line.to_owned() };
    let text = text.split("\r\n").map(named).collect::<Vec<_>>().join("\r\n");
    let mut lines = text.split("\r\n");
    let first = lines.next().unwrap_or_default();
    let Some(path) = first.strip_prefix("PUT /").and_then(|rest| rest.split(' ').next()) else { return (text.into_bytes(), body) };
    let Some((bucket, object)) = path.split_once('/') else { return (text.into_bytes(), body) };
    let condition = lines.filter_map(|line| line.split_once(':')).find(|(name, _)| name.eq_ignore_ascii_case("x-goog-if-generation-match"));
    let condition = condition.map(|(_, generation)| format!("&ifGenerationMatch={}", generation.trim())).unwrap_or_default();
    let mut parts = format!(
        "--{BOUNDARY}\r\nContent-Type: application/json\r\n\r\n{{}}\r\n--{BOUNDARY}\r\nContent-Type: application/octet-stream\r\n\r\n"
    )
    .into_bytes();
    parts.extend_from_slice(&body);
    parts.extend_from_slice(format!("\r\n--{BOUNDARY}--\r\n").as_bytes());
    let head = format!(
        "POST /upload/storage/v1/b/{bucket}/o?uploadType=multipart&name={object}{condition} HTTP/1.1\r\nHost: {server}\r\n\
         Content-Type: multipart/related; boundary={BOUNDARY}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        parts.len()
    );
    (head.into_bytes(), parts)
}

/// What came of a write, as the client wants it: by headers.
pub(super) fn answer(answer: Vec<u8>) -> Vec<u8> {
    let begins = super::way::body_of(&answer);
    if !answer.starts_with(b"HTTP/1.1 200") {
        return answer;
    }
    let about: Value = serde_json::from_slice(&answer[begins..]).unwrap_or_default();
    let (Some(generation), Some(tag)) = (about["generation"].as_str(), about["etag"].as_str()) else { return answer };
    format!("HTTP/1.1 200 OK\r\nETag: \"{tag}\"\r\nx-goog-generation: {generation}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        .into_bytes()
}

//! The resource API of a server, as whoever has a key.

use serde_json::Value;

use crate::{Server, http};

/// Who asks: a header, or nobody in particular.
pub type Key<'a> = Option<(&'a str, &'a str)>;

impl Server {
    /// The status and what was said.
    #[must_use]
    pub fn api(&self, key: Key<'_>, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let answer = http::json(self.address(), method, path, key.as_slice(), body).unwrap();
        (answer.status, if answer.body.is_empty() { Value::Null } else { answer.json() })
    }

    /// What was made.
    #[must_use]
    pub fn made(&self, key: Key<'_>, path: &str, body: &Value) -> Value {
        let (status, body) = self.api(key, "POST", path, body);
        assert_eq!(status, 201, "{path}: {body}");
        body
    }

    /// What is there.
    #[must_use]
    pub fn found(&self, key: Key<'_>, path: &str) -> Value {
        let (status, body) = self.api(key, "GET", path, &Value::Null);
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    /// It is refused with this; returns the message.
    pub fn refuses(&self, key: Key<'_>, method: &str, path: &str, body: &Value, status: u16, code: &str) -> String {
        let (found, body) = self.api(key, method, path, body);
        assert_eq!((found, body["error"]["code"].as_str()), (status, Some(code)), "{method} {path}: {body}");
        body["error"]["message"].as_str().unwrap().to_owned()
    }
}

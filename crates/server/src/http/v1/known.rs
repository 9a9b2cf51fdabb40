//! Fields that a request may have. A misspelt field that is ignored makes a sandbox that nobody asked
//! for, so the resource API refuses it and names the field that was probably meant.

use std::sync::LazyLock;

use serde_json::{Map, Value};

use super::{ApiError, openapi};

/// How alike two names are at least, from 0 to 1, for one to be taken for the other.
const ALIKE: f64 = 0.75;
/// How much of an unknown name is repeated.
const SHOWN_CHARS: usize = 64;

/// A message of the WebSocket whose fields the resource API takes too.
#[derive(Debug, Clone, Copy)]
pub(super) enum Message {
    Configuration,
    Execution,
}

impl Message {
    fn schema(self) -> &'static Value {
        static CONFIGURATION: LazyLock<Value> = LazyLock::new(|| parse(openapi::CONFIGURATION));
        static EXECUTION: LazyLock<Value> = LazyLock::new(|| parse(openapi::EXECUTION));
        match self {
            Self::Configuration => &CONFIGURATION,
            Self::Execution => &EXECUTION,
        }
    }
}

/// A schema that is part of this program: a test reads it.
fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_default()
}

/// Refuses a field that neither the message nor `more` has, at the top and in objects with fixed
/// fields, such as `limits`.
pub(super) fn only_known(fields: &Map<String, Value>, message: Message, more: &[&str]) -> Result<(), ApiError> {
    let schema = message.schema();
    check(fields, "", &schema["properties"], more)?;
    for (name, value) in fields {
        let inner = referred(schema, &schema["properties"][name]);
        if let (Some(inner), Some(value)) = (inner, value.as_object()) {
            check(value, &format!("{name}."), &inner["properties"], &[])?;
        }
    }
    Ok(())
}

fn check(fields: &Map<String, Value>, above: &str, known: &Value, more: &[&str]) -> Result<(), ApiError> {
    let Some(known) = known.as_object() else { return Ok(()) };
    let names = || known.keys().map(String::as_str).chain(more.iter().copied());
    match fields.keys().find(|field| !names().any(|name| name == field.as_str())) {
        None => Ok(()),
        Some(wrong) => Err(unknown(above, wrong, names())),
    }
}

/// The schema of an object with fixed fields, given directly or as one of two alternatives, the other
/// of which is null.
fn referred<'a>(schema: &'a Value, property: &Value) -> Option<&'a Value> {
    let choices = property["anyOf"].as_array().into_iter().flatten().chain([property]);
    let names = choices.filter_map(|choice| choice["$ref"].as_str()?.strip_prefix("#/$defs/"));
    names.map(|name| &schema["$defs"][name]).find(|found| found["properties"].is_object())
}

/// The error that names an unknown field, and the known one that is most like it.
pub(super) fn unknown<'a>(above: &str, wrong: &str, known: impl Iterator<Item = &'a str>) -> ApiError {
    let shown: String = wrong.chars().take(SHOWN_CHARS).collect();
    let hint = nearest(&shown, known).map_or_else(String::new, |name| format!(" Did you mean \"{above}{name}\"?"));
    ApiError::invalid(format!("{:?}: there is no such field here.{hint}", format!("{above}{shown}")))
}

/// The name that is most like a misspelt one, if any is.
pub(super) fn nearest<'a>(wrong: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let alike = known.map(|name| (strsim::jaro_winkler(wrong, name), name));
    let best = alike.max_by(|one, other| one.0.total_cmp(&other.0))?;
    (best.0 >= ALIKE).then_some(best.1)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(message: Message, fields: &Value) -> String {
        only_known(fields.as_object().unwrap(), message, &["profile", "input"]).unwrap_err().message
    }

    #[test]
    fn misspelt_field_is_refused_with_the_nearest_name() {
        let configuration = |fields| refused(Message::Configuration, &fields);
        assert!(configuration(json!({ "idel_timeout": 1 })).ends_with("Did you mean \"idle_timeout\"?"));
        assert!(configuration(json!({ "limits": { "memory": 1 } })).ends_with("Did you mean \"limits.memory_mb\"?"));
        assert!(configuration(json!({ "profil": "x" })).ends_with("Did you mean \"profile\"?"));
        assert!(configuration(json!({ "zzz": 1 })).ends_with("there is no such field here."));
        assert!(configuration(json!({ "x".repeat(9999): 1 })).len() < 300);
        assert!(refused(Message::Execution, &json!({ "languge": "bash" })).contains("\"language\""));
        assert!(refused(Message::Execution, &json!({ "tty": { "row": 1 } })).contains("\"tty.rows\""));
    }

    #[test]
    fn every_known_field_is_taken() {
        for message in [Message::Configuration, Message::Execution] {
            let names = message.schema()["properties"].as_object().unwrap().keys();
            let fields: Map<String, Value> = names.map(|name| (name.clone(), Value::Null)).collect();
            assert!(fields.len() > 5 && only_known(&fields, message, &[]).is_ok(), "{message:?}");
        }
        let free = json!({ "env": { "ANY": "1" }, "metadata": { "any": "1" }, "network": { "allow": [] } });
        assert!(only_known(free.as_object().unwrap(), Message::Configuration, &[]).is_ok());
    }
}

//! Inputs: what a user says about a sandbox, of the types that its profile gives them.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One input as text.
pub(crate) const MAX_INPUT_BYTES: usize = 4096;

/// Inputs by their names, checked against a profile.
pub type Inputs = BTreeMap<String, InputValue>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InputType {
    String,
    Integer,
    Number,
    Boolean,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum InputValue {
    Boolean(bool),
    Integer(i64),
    Number(f64),
    String(String),
}

impl fmt::Display for InputValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Boolean(value) => write!(f, "{value}"),
            Self::Integer(value) => write!(f, "{value}"),
            Self::Number(value) => write!(f, "{value}"),
            Self::String(value) => f.write_str(value),
        }
    }
}

impl InputValue {
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    pub(crate) fn is_a(&self, kind: InputType) -> bool {
        matches!(
            (self, kind),
            (Self::Boolean(_), InputType::Boolean)
                | (Self::Integer(_), InputType::Integer | InputType::Number)
                | (Self::Number(_), InputType::Number)
                | (Self::String(_), InputType::String)
        )
    }
}

impl InputType {
    /// Reads a value as this type. A command line has only text, so text that spells a number or a truth value is one.
    pub(crate) fn read(self, value: &Value) -> Result<InputValue, String> {
        let bad = || format!("expected {self}, got {}", shown(value));
        match (self, value) {
            (Self::String, Value::String(text)) if text.len() > MAX_INPUT_BYTES => Err(format!("longer than {MAX_INPUT_BYTES} bytes")),
            (Self::String, Value::String(text)) if text.chars().any(char::is_control) => {
                Err("control characters, such as line breaks, are not allowed".to_owned())
            }
            (Self::String, Value::String(text)) => Ok(InputValue::String(text.clone())),
            (Self::Boolean, Value::Bool(value)) => Ok(InputValue::Boolean(*value)),
            (Self::Boolean, Value::String(text)) => text.parse().map(InputValue::Boolean).map_err(|_| bad()),
            (Self::Integer, Value::Number(number)) => number.as_i64().map(InputValue::Integer).ok_or_else(bad),
            (Self::Integer, Value::String(text)) => text.parse().map(InputValue::Integer).map_err(|_| bad()),
            (Self::Number, Value::Number(number)) => number.as_f64().filter(|n| n.is_finite()).map(InputValue::Number).ok_or_else(bad),
            (Self::Number, Value::String(text)) => {
                text.parse().ok().filter(|n: &f64| n.is_finite()).map(InputValue::Number).ok_or_else(bad)
            }
            _ => Err(bad()),
        }
    }
}

impl fmt::Display for InputType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::String => "a string",
            Self::Integer => "an integer",
            Self::Number => "a number",
            Self::Boolean => "true or false",
        })
    }
}

fn shown(value: &Value) -> String {
    value.to_string().chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_value_is_of_its_type_or_refused() {
        assert_eq!(InputType::Integer.read(&json!("42")), Ok(InputValue::Integer(42)));
        assert_eq!(InputType::Boolean.read(&json!("true")), Ok(InputValue::Boolean(true)));
        assert_eq!(InputType::Number.read(&json!(1)), Ok(InputValue::Number(1.0)));
        for (kind, bad) in [
            (InputType::Integer, json!(1.5)),
            (InputType::Integer, json!("1x")),
            (InputType::Number, json!("nan")),
            (InputType::Number, json!("inf")),
            (InputType::Boolean, json!(1)),
            (InputType::String, json!(["a"])),
            (InputType::String, json!("a\nb")),
            (InputType::String, json!("a\u{0}b")),
            (InputType::String, json!("a".repeat(MAX_INPUT_BYTES + 1))),
        ] {
            assert!(kind.read(&bad).is_err(), "{kind:?} {bad}");
        }
    }
}

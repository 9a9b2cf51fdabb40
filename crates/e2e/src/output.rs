//! What came out of an execution.

use std::fmt::Write;

use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// An execution from its start, or from where it was resumed, to `SANDBOX_EXECUTION_DONE`.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    /// The message of `SANDBOX_EXECUTION_DONE`.
    pub done: Value,
    /// Messages other than output that came before it, in order.
    pub between: Vec<Value>,
    /// How many messages the output came in.
    pub pieces: usize,
}

impl Outcome {
    #[must_use]
    pub fn out(&self) -> &str {
        std::str::from_utf8(&self.stdout).unwrap()
    }

    #[must_use]
    pub fn err(&self) -> &str {
        std::str::from_utf8(&self.stderr).unwrap()
    }

    #[must_use]
    pub fn exit_code(&self) -> Option<i64> {
        self.done["exit_code"].as_i64()
    }

    #[must_use]
    pub fn signal(&self) -> Option<&str> {
        self.done["signal"].as_str()
    }

    /// The output of a program that is known to have ended well.
    #[must_use]
    pub fn ok(&self) -> &str {
        assert_eq!(self.exit_code(), Some(0), "{}\nstdout: {:?}\nstderr: {:?}", self.done, self.out(), self.err());
        self.out()
    }
}

/// The bytes of an output message. For text they are exact unless the program wrote what is not UTF-8.
#[must_use]
pub(crate) fn data_of(message: &Value) -> Vec<u8> {
    let data = message["data"].as_str().unwrap_or_else(|| panic!("output without data: {message}"));
    if message["encoding"] == "base64" { BASE64_STANDARD.decode(data).unwrap() } else { data.as_bytes().to_vec() }
}

/// One stream put together by `offset` alone, as a client does that may see pieces again.
#[derive(Debug, Clone, Default)]
pub struct Assembly {
    pub bytes: Vec<u8>,
    /// Bytes that came more than once.
    pub repeated: u64,
}

impl Assembly {
    /// Takes a `stdout` or `stderr` message. What it repeats must be the same; there must be no gap.
    pub fn take(&mut self, message: &Value) {
        let data = data_of(message);
        let offset = usize::try_from(message["offset"].as_u64().unwrap()).unwrap();
        let end = usize::try_from(message["end"].as_u64().unwrap()).unwrap();
        assert_eq!(data.len(), end - offset, "offset and end don't fit the data: {message}");
        let have = self.bytes.len();
        assert!(offset <= have, "bytes {have}..{offset} are missing");
        let known = (have - offset).min(data.len());
        assert!(self.bytes[offset..offset + known] == data[..known], "what was sent again at {offset} differs from what was sent first");
        self.repeated += known as u64;
        self.bytes.extend_from_slice(&data[known..]);
    }
}

#[must_use]
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

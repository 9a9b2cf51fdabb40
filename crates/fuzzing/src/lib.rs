//! What is fuzzed. Each function takes bytes as somebody hostile would write them, feeds them to the parser that meets them in the
//! server, and panics where a promise is broken: a panic below is a finding, and so is one of the parser's own.
//!
//! The targets in `fuzz/` call these functions with what libFuzzer makes up; the test `replay` calls them with the corpora that are kept
//! in `fuzz/corpus`.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a finding")]

mod agent;
mod archive;
mod client;
mod configuration;
mod layer;

pub use agent::agent_frames;
pub use archive::archive;
pub use client::client_message;
pub use configuration::configuration;
pub use layer::layer;

/// A function that is fuzzed.
pub type Target = fn(&[u8]);

/// Every target by the name of its corpus.
pub const TARGETS: [(&str, Target); 5] = [
    ("agent_frames", agent_frames),
    ("client_message", client_message),
    ("archive", archive),
    ("layer", layer),
    ("configuration", configuration),
];

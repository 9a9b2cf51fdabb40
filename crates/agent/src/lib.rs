//! The agent inside a sandbox: the parts that do no I/O, used by the agent itself (`main.rs`) and by the in-process fake runtime.
//!
//! [`window`] holds a program's output until a client has it, [`input`] holds what a program has not read yet, [`flow`] says
//! when to let output gather.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test"))]

pub mod flow;
pub mod input;
pub mod window;

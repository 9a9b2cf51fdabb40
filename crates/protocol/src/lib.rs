//! The two conversations of `sandboxer`, as types: the one between a client and the server (JSON over a WebSocket) and the one
//! between the server and the agent inside a sandbox (frames over two FIFOs). Nothing here does I/O; everything that comes from the
//! other side is parsed strictly and within named bounds.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test"))]

pub mod agent;
#[cfg(feature = "client")]
pub mod client;
mod id;
pub mod limits;

pub use id::{ExecutionId, InvalidId, SandboxId};

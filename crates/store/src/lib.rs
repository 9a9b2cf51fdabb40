//! What the persistent volume holds, and the order in which it is written. No HTTP, and nothing of the server.

#![cfg_attr(test, allow(clippy::unwrap_used))]

// The data: chunks, packs, manifests, images.
pub mod volume;

// The record of a sandbox and its lease.

//! The agent binary, embedded by `build.rs`.

use std::sync::OnceLock;

use crate::name::Digest;

/// The static agent that every image made by this build carries.
pub const AGENT: &[u8] = include_bytes!(env!("SANDBOXER_EMBEDDED_AGENT"));

/// The digest of [`AGENT`]: an image made with another one is out of date.
pub fn agent_digest() -> &'static Digest {
    static DIGEST: OnceLock<Digest> = OnceLock::new();
    DIGEST.get_or_init(|| Digest::of(AGENT))
}

//! The seeded simulator of the lease, the handoff and the publication of checkpoints, and of collection against writers ([`run_collection`]).
//!
//! What runs here is what production runs (`sandboxer_store::lease`): only the clock, the way to the records, the sandbox and the
//! executor are replaced. A seed decides everything else: which task goes on, how long a message takes and whether it arrives once,
//! twice or never, how fast each clock runs and when its wall clock jumps, when a node is cut off, stopped for a while, or dies, at
//! which await, with its sandbox or without.
//!
//! What is checked ([`truth`]), at every swap, every act of an owner and every restore:
//! - whoever acts on a sandbox has the newest epoch that anyone has acted in, and an epoch belongs to one node;
//! - what the record names is on the volume, whole;
//! - a checkpoint that is published comes after the one before, and knows of it;
//! - what was acknowledged to a client is in whatever is restored later;
//! - every client gets an answer, and when everything works again the sandbox runs again.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test"))]

mod clock;
mod collection;
mod host;
mod network;
mod node;
mod rng;
mod scale;
mod scenario;
mod truth;
mod world;
mod writer;

pub use collection::{CollectionCounts, CollectionOutcome, run_collection, run_collection_on};
pub use network::Kept;
pub use scale::Scale;
pub use scenario::{Outcome, run, run_on};
pub use truth::Counts;
pub use writer::{Cost, Writer};

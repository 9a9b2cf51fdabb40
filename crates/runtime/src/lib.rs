//! The seam between the server and what runs a sandbox.
//!
//! [`Runtime`] has two implementations, [`GvisorRuntime`] on the runsc binary and [`FakeRuntime`] in process, and one conformance
//! suite (feature `testing`) that both pass. A runtime starts sandboxes, hands out the two byte streams to the agent in each, tells
//! when one ended and why, saves and restores, and leaves nothing behind. It holds no policy: which sandboxes exist, who may speak to
//! them and how long they live is the server's.
//!
//! ```text
//!            start / restore                       checkpoint(Stop)
//!            create, restore_into
//!  (nothing) ───────────────► running ◄──► paused ───────────────► ended
//!                take_up ───►    │ dies by itself, or is killed      │
//!                                └───────────────────────────────────┤
//!  (nothing) ◄──────────────────── remove, from any state ───────────┘
//! ```
//!
//! The sandbox outlives the process that started it: dropping an [`Instance`] only lets go of the streams.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test"))]

mod cgroup;
#[cfg(feature = "testing")]
pub mod conformance;
mod ended;
mod fake;
mod fifo;
mod gvisor;
pub mod link;
mod process;
mod record;
mod runtime;
pub mod userns;

pub use cgroup::{Controller, HostLimits};
pub use ended::{End, Ended, EndedSender};
pub use fake::{FakeRuntime, Fault};
pub use gvisor::{GvisorOptions, GvisorRuntime};
pub use process::become_subreaper;
pub use sandboxer_runsc::{PAGES, Written};

pub use runtime::{AfterSave, BoxFuture, HostResources, Instance, Launch, NotWhole, Runtime, RuntimeError};

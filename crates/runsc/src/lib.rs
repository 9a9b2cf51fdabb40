//! The runsc binary as types: where it is and what it can do ([`Features`]), its commands as option structs that become argument
//! lists ([`Runsc`]), and the OCI spec of a sandbox ([`SandboxSpec`]). Nothing here decides anything: what to run, when to end it and
//! what to keep is the runtime's.
//!
//! Every call has a time limit, an empty environment and no shell. A call that fails carries how it ended and what it said.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test"))]

mod call;
mod command;
mod control;
mod find;
mod growth;
mod served;
mod spec;

pub use call::{CallError, Runsc};
pub use command::{Checkpoint, Files, Global, Restore, Run, State, Status};
pub use control::PAGES;
pub use find::{Features, FindError, OLDEST_VERSION, Version, find};
pub use growth::Written;
pub use served::{FileServer, NotBrought, give_up_privileges, serve_files};
pub use spec::{AGENT_PATH, SandboxSpec, SpecError};

//! One sandbox: its driver, its agent, its client.
//!
//! ```text
//!                 Execute                     Exited, output not all delivered
//!   Idle ───────────────────────► Executing ─────────────────────────────────► Finishing ──┐ all delivered, end told
//!    ▲                                │  Exited, nobody attached                           │
//!    └────────────────────────────────┴────────────────────────────────────────────────────┘
//!
//!   any ── kill_sandbox, idle, lifetime, SIGTERM, death ──► Ending ──► gone        any ── SIGUSR2 ──► left running
//! ```
//!
//! [`driver::Driver`] owns the state and is the only one to change it; [`admission`] decides what fits which moment; [`delivery`] moves
//! output; [`execution`] knows the running or last execution.

mod admission;
mod agent_side;
pub(crate) mod asks;
pub(crate) mod client;
mod delivery;
pub(crate) mod driver;
pub(crate) mod execution;
pub(crate) mod farewell;
pub(crate) mod files;
pub(crate) mod host;
pub(crate) mod last_use;
pub(crate) mod record;
mod requests;
pub(crate) mod rollback;
pub(crate) mod saving;
mod snapshots;
pub(crate) mod streams;
pub(crate) mod transfers;
pub(crate) mod tunnel;

pub(crate) use execution::Execution;

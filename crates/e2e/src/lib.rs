//! The harness of the end-to-end tests: a real server process, raw clients, faulty networks, and a look at what the host holds.
//!
//! It is written from the wire contract and knows nothing of the server's code. It never waits by sleeping for something that it can
//! wait for by a message; where only the host can tell (processes, mounts), it polls with a deadline.
//!
//! `SANDBOXER_SOAK=1` makes the same tests run with large counts.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a panic here is a failed test")]

mod api;
mod binary;
mod bucket;
mod cli;
mod counting;
mod cut;
mod delay;
mod files;
mod filesystem;
pub mod host;
pub mod http;
mod internet;
mod kept;
mod output;
mod placement;
mod points;
mod pool;
mod raw;
mod runsc;
mod server;
mod terminal;
mod tls;
mod user;
mod volume;
mod ws;

use std::time::{Duration, Instant};

pub use api::Key;
pub use binary::{command, sandboxer, stderr_of, stdout_of};
pub use bucket::{Bucket, Store, Trouble};
pub use cli::{Cli, Running, free_address};
pub use counting::{Counting, Point};
pub use cut::{CutProxy, Fault};
pub use delay::DelayProxy;
pub use files::{Files, encoded, skip};
pub use internet::Internet;
pub use kept::Talk;
pub use output::{Assembly, Outcome, sha256};
pub use placement::{Gate, Placement};
pub use points::FailPoints;
pub use raw::{Frame, Opcode, Raw};
pub use runsc::{Runsc, floor_runsc, runsc_exec};
pub use server::{Options, Server, shared, shared_as};
pub use terminal::Terminal;
pub use tls::{Certificate, TlsTunnel};
pub use user::User;
pub use volume::Volume;
pub use ws::{Incoming, Ws};

/// How long anything may take that is expected to come. Generous: the machine may be busy with other things.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Whether the large counts are wanted.
#[must_use]
pub fn soak() -> bool {
    std::env::var_os("SANDBOXER_SOAK").is_some_and(|value| !value.is_empty() && value != "0")
}

/// A program of the environment that `scripts/setup --dev` makes for the tests.
#[must_use]
pub fn tool(name: &str) -> std::path::PathBuf {
    bucket::venv().join("bin").join(name)
}

/// A count: small in `make test`, large in `make soak`.
#[must_use]
pub fn count(test: usize, large: usize) -> usize {
    if soak() { large } else { test }
}

/// The seed of what is random: fixed, unless `SANDBOXER_SEED` says otherwise, so that a failure can be repeated.
#[must_use]
pub fn seed() -> u64 {
    std::env::var("SANDBOXER_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(20_260_905)
}

/// Polls until `condition` holds; `what` says what was waited for.
pub async fn eventually(what: &str, deadline: Duration, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < deadline, "still not so after {deadline:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

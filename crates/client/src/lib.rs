//! The client library of `sandboxer`: run Python and bash in sandboxes that outlive their connection.
//!
//! ```no_run
//! # async fn example() -> Result<(), sandboxer_client::Error> {
//! use sandboxer_client::{Options, Sandbox};
//!
//! let sandbox = Sandbox::create("http://127.0.0.1:8080", Options::default()).await?;
//! let mut run = sandbox.python("for i in range(10): print(i)").await?;
//! while let Some(piece) = run.next().await {
//!     print!("{}", String::from_utf8_lossy(&piece.data));
//! }
//! let exit = run.wait().await?;
//! assert!(exit.success());
//! sandbox.kill_sandbox().await
//! # }
//! ```
//!
//! A cut connection, a restarted server, a sandbox that moves to another server: all of it is a short wait and nothing else. Output
//! and input are numbered; what was lost on the way is sent again, what came twice is dropped, and nothing is run twice. A task in
//! the background holds the connection ([`Sandbox`]); it knows the load balancer's cookies, so that it finds its way back,
//! and of several servers that share a volume (`"http://a:8080,http://b:8080"`) it goes to the next where one is gone. What can't
//! be mended is an [`Error`] whose kind says what to do. A server that had to go back to an earlier save is such a case:
//! [`Error::Rewound`].
//!
//! Memory is bounded: a slow consumer makes the program wait.
//!
//! Features: `tls` (on by default) for `https://` and `wss://` addresses; `blocking` for programs without an async runtime.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test"))]
#![deny(missing_docs)]

mod address;
mod api;
#[cfg(feature = "blocking")]
pub mod blocking;
mod connect;
mod cookies;
mod driver;
mod ends;
mod error;
mod execution;
mod files;
mod network;
mod options;
mod outage;
mod resources;
mod route;
mod run;
mod sandbox;
mod session;
mod travel;
mod watch;

pub use sandboxer_protocol::{ExecutionId, SandboxId, agent::Stream as OutputStream, client::ErrorCode};

pub use self::{
    address::Address,
    api::{Answer, Api},
    error::{Ended, Error},
    execution::{Execution, Exit},
    files::{Change, ChangeKind, Changes, FileInfo, FileKind, Files},
    network::{NetworkConnection, PortLink},
    options::{Connection, Options},
    resources::{CheckpointInfo, FilesystemInfo, SandboxInfo, SandboxStatus, SnapshotInfo, Target},
    run::{Controller, Output, Run, Stdin},
    sandbox::{ResumeFrom, Sandbox},
    session::Piece,
};

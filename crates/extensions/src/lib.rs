//! Sandboxes of other kinds than gVisor's own.
//!
//! An **extension** ([`SandboxExtension`]) makes them, a **profile** ([`Profile`]) says which extension with which inputs, a **host** ([`Host`]) where.
//! What exists is remembered in two files ([`WorkspaceStore`]), so that a restarted server knows it. Two extensions are built in:
//! [`compose`] (a repository's containers on a host that is reached by ssh) and [`stub`] (nothing but an HTTP endpoint, for tests of routing
//! and payments). Any program that speaks JSON on its standard input and output is one too: [`external`].
//!
//! ```text
//!              provision                    snapshot
//!   (nothing) ──────────► provisioning ──► ready ──────────► pending ──► completed ──restore──► another sandbox
//!                              │             │ teardown          └─────► failed
//!                              └─► failed    └─► (nothing)
//! ```
//!
//! Nothing here trusts a host, a repository, an extension's program or an archive: SECURITY.md says what each of them can do. There is no HTTP here.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test"))]

mod child;
pub mod compose;
pub mod conformance;
mod error;
mod extension;
pub mod external;
mod hosts;
mod inputs;
mod names;
mod profile;
mod registry;
mod store;
pub mod stub;

pub use error::{ExtensionError, Kind};
pub use extension::{Health, Map, Sandbox, SandboxExtension, check_map};
pub use hosts::{Host, HostFaults, Hosts, Place, Repos, SshTarget};
pub use inputs::{InputType, InputValue, Inputs};
pub use names::{ExtensionName, HostName, InvalidName, ProfileName, SnapshotId};
pub use profile::{InputSpec, Profile, ProfileFaults, Profiles};
pub use registry::{Config, ConfigFaults};
pub use store::{SandboxRow, SandboxState, SnapshotRow, SnapshotState, StoreError, WorkspaceStore};

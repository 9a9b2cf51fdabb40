//! The server: sandboxes and those who speak to them.
//!
//! [`Server::start`] takes up what an earlier process left, binds its address and serves until it is told to stop. One task drives each
//! sandbox ([`sandbox`]), one each connection ([`http`]); [`manager`] knows all sandboxes. What runs a sandbox is behind
//! [`sandboxer_runtime::Runtime`].

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a failed unwrap is a failed test"))]

mod checkpoints;
mod file_turns;
mod filesystems;
#[doc(hidden)]
pub mod fuzzing;
mod health;
mod http;
mod images;
mod leaving;
mod limits;
mod manager;
mod memory;
mod metrics;
mod network;
mod obituaries;
mod sandbox;
mod server;
mod settings;
mod shares;
mod spares;
mod templates;
mod tenants;
mod tls;
mod workspaces;

pub use checkpoints::{CheckpointSettings, Collection, Facts};
pub use filesystems::FilesystemSettings;
pub use http::{Access, ApiKey, InvalidKeys};
pub use images::{BaseImage, Images};
pub use limits::Limits;
pub use memory::available_memory;
pub use network::{AddressRule, Dialer, NetworkSettings, RecordingDialer, Rule, SystemDialer, check_hosts, rules_of};
pub use sandboxer_store::lease::Terms;
pub use server::{Server, StopHow};
pub use settings::{KeyLimits, PoolSettings, Settings};
pub use spares::{SPARE_INTERPRETERS, SPARE_PAIR_MIB, Spares, WARM_MODULES};
pub use templates::TemplateSettings;
pub use tls::{InvalidTls, Tls};
pub use workspaces::WorkspaceSettings;

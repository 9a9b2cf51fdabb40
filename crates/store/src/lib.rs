//! What the persistent volume holds, and the order in which it is written. No HTTP, and nothing of the server.
//!
//! A checkpoint is runsc's files, cut into chunks ([`chunker`]) that are named by their content within a tenant, gathered into packs ([`pack`]), and described
//! by a manifest ([`manifest`]) that carries the restore contract ([`contract`]). Filesystem snapshots ([`Filesystem`]) and base images are kept the same way.
//! [`save`] and [`load`] go between files and packs, [`publish`] says in which order things become visible, [`collect`] removes what nobody needs. Everything
//! read is hostile input: names are parsed ([`layout`]), lengths bounded, digests checked on every read.

#![cfg_attr(test, allow(clippy::unwrap_used))]

// The data: chunks, packs, manifests, images.
mod beneath;
mod bucket;
mod cache;
pub mod chunker;
pub mod collect;
#[cfg(feature = "testing")]
pub mod conformance;
pub mod contract;
mod error;
pub mod failpoint;
mod filesystem;
mod image;
mod index;
mod kept;
pub mod key;
pub mod layout;
mod load;
mod local;
pub mod manifest;
mod metadata;
mod owner;
mod pace;
pub mod pack;
mod place;
mod publish;
mod save;
#[cfg(feature = "testing")]
pub mod testing;
mod threads;
mod verify;
mod volume;

// The record of a sandbox and its lease.
pub mod lease;
pub mod record;

pub use bucket::BucketUrl;
pub use cache::{Cache, FileSet, Origin};
pub use contract::{Contract, Host, Mismatch};
pub use error::{Action, Error, Fault, Result};
pub use filesystem::{Filesystem, FilesystemName, LAYER_FILE, layer_file};
pub use index::ChunkIndex;
pub use key::VolumeKey;
pub use layout::{CheckpointName, FileName, ImageDigest, KeptName, ManifestAt, PackId, SnapshotId, Tenant};
pub use load::{LoadStats, Loader};
pub use local::LocalStore;
pub use manifest::Manifest;
pub use metadata::{Metadata, SandboxStatus};
pub use pace::Pace;
pub use place::Place;
pub use publish::Prepared;
pub use save::{Growth, SaveStats, Saved, Saver, Source};
pub use threads::{Interrupted, Threads};
pub use verify::{Depth, Report, verify};
pub use volume::Volume;

/// Threads that hash and compress for one save or load.
fn workers() -> usize {
    std::thread::available_parallelism().map_or(2, std::num::NonZero::get).min(8)
}

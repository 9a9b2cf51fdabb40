//! Base images: built from Debian packages or imported from a container image, one immutable EROFS file each, named by its digest.
//!
//! An image file holds, at its root:
//!
//! ```text
//! /sandboxer/agent                the agent, static: PID 1 of every sandbox
//! /sandboxer/spares.json          what the image wants of interpreters that wait, if it says anything
//! /sandboxer/{rw,root,cgroup}     empty: where the agent mounts its tmpfs, the guest's overlay and gVisor's cgroup
//! /proc /dev /sys /tmp            empty: mount points of the runtime
//! /rootfs/                        the system that user code sees, nothing of the agent in it
//! ```
//!
//! All instances on a machine share one image directory. Everything here blocks; call it from a thread that may.
//!
//! ```text
//! image-dir/<sha256>.erofs        complete images only: written elsewhere, synced, renamed
//! image-dir/index.json            names; replaced whole, under index.lock
//! image-dir/build.lock            held while one is built, so that a second builder waits and then finds it
//! image-dir/cache/tree-*.tar.zst  Debian trees by recipe: a new agent needs a new EROFS file only
//! image-dir/tmp-*                 work in progress, locked by its maker; what nobody holds is removed at the next open
//! ```
//!
//! What comes out of an archive is hostile: it is written below one directory, never through a symbolic link, within bounds.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod agent;
mod apt_sources;
mod authorities;
mod debian;
mod erofs;
mod error;
mod finish;
#[doc(hidden)]
pub mod fuzzing;
mod index;
mod layer;
mod name;
mod oci;
mod progress;
mod scratch;
mod store;
mod tar_reader;
mod tools;
mod tree;

pub use agent::{AGENT, agent_digest};
pub use authorities::ExtraAuthorities;
pub use debian::BaseOptions;
pub use error::{Error, Result};
pub use layer::Limits;
pub use name::{BASE_NAME, Digest, ImageName, ImageRef, ParseError};
pub use progress::{Progress, Silent, Update};
pub use sandboxer_layer::{EntryPath, PathFault, check_symlink_target};
pub use store::{Image, ImageStore, Source};
pub use tools::{BuildRights, MissingTools, Tool};

//! The agent inside a sandbox: the parts that others use and test besides the agent itself (`main.rs`).
//!
//! [`window`] holds a program's output until a client has it, [`input`] holds what a program has not read yet, [`flow`] says
//! when to let output gather; none of them does I/O. [`guest`] does what is asked of single files; [`pack`] reads a layer of a file system into an archive, [`unpack`] writes one.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test"))]

pub mod flow;
pub mod guest;
mod inotify;
pub mod input;
pub mod pack;
pub mod unpack;
pub mod window;
mod xattr;

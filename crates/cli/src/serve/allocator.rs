//! How much memory the allocator keeps back.
//!
//! A server saves and loads in large buffers on several threads. As glibc comes, each thread keeps a heap of its own, and buffers that
//! were freed stay in it: 74 MiB at most while a sandbox of 256 MiB was saved, 42 with these settings. They are read once, when a
//! process starts.

use std::{env, io, os::unix::process::CommandExt as _, process::Command};

/// The last one keeps what output passes through from going back to the system and being fetched again for every piece: a stream of
/// 256 MiB cost 1.7 s of CPU time without it, and 1.0 with it.
const SETTINGS: [(&str, &str); 3] =
    [("MALLOC_ARENA_MAX", "2"), ("MALLOC_MMAP_THRESHOLD_", "262144"), ("MALLOC_TRIM_THRESHOLD_", "2097152")];

/// Starts this process again with the settings, unless it has some. Returns only if there is nothing to do, or with why it failed.
pub(super) fn settle() -> io::Result<()> {
    let missing: Vec<_> = SETTINGS.iter().filter(|(name, _)| env::var_os(name).is_none()).copied().collect();
    if missing.is_empty() {
        return Ok(());
    }
    let mut arguments = env::args_os();
    let mut again = Command::new(env::current_exe()?);
    if let Some(name) = arguments.next() {
        again.arg0(name);
    }
    Err(again.args(arguments).envs(missing).exec())
}

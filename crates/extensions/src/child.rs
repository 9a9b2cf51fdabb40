//! Processes that this one starts and that may do anything: ended with all they started, and read without bound on time but with one on memory.

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::Child,
};

/// Kills the process group of a child, which was started as the first of its own, when it is dropped: also when a call is given up.
pub(crate) struct Group(Pid);

impl Group {
    pub(crate) fn of(child: &Child) -> Option<Self> {
        child.id().and_then(|pid| i32::try_from(pid).ok()).map(|pid| Self(Pid::from_raw(pid)))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Nobody left is what is wanted.
        let _ = killpg(self.0, Signal::SIGKILL);
    }
}

/// Reads to the end, so that the writer never waits, and keeps the first `most` bytes. Returns how many were dropped, too.
pub(crate) async fn read_all(mut stream: impl AsyncRead + Unpin, most: usize) -> (Vec<u8>, usize) {
    let mut kept = Vec::new();
    let mut dropped = 0;
    let mut buffer = vec![0; 8192];
    while let Ok(count @ 1..) = stream.read(&mut buffer).await {
        let room = most.saturating_sub(kept.len()).min(count);
        kept.extend_from_slice(&buffer[..room]);
        dropped += count - room;
    }
    (kept, dropped)
}

//! Files that were read, closed many at once: a call into gVisor costs as much as reading some KiB.

use std::os::fd::{AsRawFd as _, OwnedFd};

/// So many are open at most.
const AT_ONCE: usize = 64;

#[derive(Default)]
pub(super) struct Spent(Vec<OwnedFd>);

impl Spent {
    /// It is of no use any more.
    pub(super) fn push(&mut self, file: OwnedFd) {
        self.0.push(file);
        if self.0.len() >= AT_ONCE {
            self.close();
        }
    }

    fn close(&mut self) {
        let mut files = std::mem::take(&mut self.0);
        files.sort_unstable_by_key(|file| file.as_raw_fd());
        for run in files.chunk_by(|one, next| one.as_raw_fd() + 1 == next.as_raw_fd()).map(<[OwnedFd]>::len).collect::<Vec<_>>() {
            close_run(files.drain(..run).collect());
        }
    }
}

impl Drop for Spent {
    fn drop(&mut self) {
        self.close();
    }
}

/// Closes files whose numbers follow each other.
fn close_run(files: Vec<OwnedFd>) {
    let (Some(first), Some(last)) = (files.first(), files.last()) else { return };
    let (Ok(from), Ok(to)) = (u32::try_from(first.as_raw_fd()), u32::try_from(last.as_raw_fd())) else { return };
    // An older kernel does not know this call: then each is closed by being dropped.
    // SAFETY: all numbers in between are those of `files`, which is their only owner and gives them up below.
    if files.len() > 1 && unsafe { libc::syscall(libc::SYS_close_range, from, to, 0) } == 0 {
        files.into_iter().for_each(std::mem::forget);
    }
}

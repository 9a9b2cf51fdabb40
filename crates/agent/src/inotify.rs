//! The kernel's own way to tell of changes in directories.

use std::{
    ffi::CString,
    io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
};

/// As much as is read at once; one event has at most 16 bytes and a name of 256.
const BUFFER_BYTES: usize = 16 * 1024;
const HEADER_BYTES: usize = 16;

/// What happened in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Event {
    /// The watch that noticed it.
    pub(crate) watch: i32,
    pub(crate) mask: u32,
    /// Of what in the directory; none: of itself.
    pub(crate) name: Option<Vec<u8>>,
}

/// Watches, and what they noticed. Nothing waits.
pub(crate) struct Inotify(OwnedFd);

impl Inotify {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointers; the result is a new descriptor or an error.
        let fd = unsafe { libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it is ours and nobody else's.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Watches a directory, whatever its path is. The same one twice is the same watch.
    pub(crate) fn add(&self, dir: BorrowedFd<'_>, mask: u32) -> io::Result<i32> {
        let path = CString::new(format!("/proc/self/fd/{}", dir.as_raw_fd()))?;
        // SAFETY: the path is a C string that outlives the call.
        let watch = unsafe { libc::inotify_add_watch(self.0.as_raw_fd(), path.as_ptr(), mask | libc::IN_ONLYDIR) };
        if watch < 0 { Err(io::Error::last_os_error()) } else { Ok(watch) }
    }

    /// It may be gone already.
    pub(crate) fn remove(&self, watch: i32) {
        // SAFETY: no pointers.
        let _ = unsafe { libc::inotify_rm_watch(self.0.as_raw_fd(), watch) };
    }

    /// What is there, as far as it fits into one read; none: nothing now.
    pub(crate) fn read(&self) -> io::Result<Vec<Event>> {
        let mut buffer = [0; BUFFER_BYTES];
        match nix::unistd::read(self.0.as_fd(), &mut buffer) {
            Ok(count) => Ok(parse(&buffer[..count])),
            Err(nix::Error::EAGAIN | nix::Error::EINTR) => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Inotify {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn parse(mut bytes: &[u8]) -> Vec<Event> {
    let mut events = Vec::new();
    while let Some((header, rest)) = bytes.split_at_checked(HEADER_BYTES) {
        let number = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let Some((name, rest)) = rest.split_at_checked(number(12) as usize) else { break };
        // Filled up with zeros.
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        events.push(Event { watch: number(0).cast_signed(), mask: number(4), name: (!name.is_empty()).then(|| name.to_vec()) });
        bytes = rest;
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_as_the_kernel_writes_them() {
        let mut bytes = Vec::new();
        for (watch, mask, name) in [(1_i32, libc::IN_CREATE, &b"a\0\0\0\0\0\0\0"[..]), (2, libc::IN_DELETE_SELF, b"")] {
            bytes.extend(watch.to_ne_bytes());
            bytes.extend([mask.to_ne_bytes(), [0; 4], u32::try_from(name.len()).unwrap().to_ne_bytes()].concat());
            bytes.extend(name);
        }
        let events = parse(&bytes);
        assert_eq!(events[0], Event { watch: 1, mask: libc::IN_CREATE, name: Some(b"a".to_vec()) });
        assert_eq!(events[1], Event { watch: 2, mask: libc::IN_DELETE_SELF, name: None });
        assert_eq!(parse(&bytes[..bytes.len() - 1]).len(), 1, "half an event is none");
    }
}

//! The few system calls that have no safe wrapper, wrapped.

use std::{
    ffi::CString,
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use sandboxer_protocol::agent::TerminalSize;

/// What a pipe between the agent and a program holds: large, since each wake-up is dear in gVisor.
pub(crate) const MAX_PIPE_BYTES: i32 = 1024 * 1024;
pub(crate) const MIN_PIPE_BYTES: i32 = 64 * 1024;

/// Large, but in proportion to the window: what a program may be ahead of its reader is both together.
pub(crate) fn pipe_bytes(window: u64) -> i32 {
    i32::try_from(window / 4).unwrap_or(i32::MAX).clamp(MIN_PIPE_BYTES, MAX_PIPE_BYTES)
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Fixes the allocator's bounds, so that large buffers go back to the system as soon as they are freed.
pub(crate) fn return_large_buffers_at_once() {
    // SAFETY: takes two numbers; called before there is any other thread.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 * 1024);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 256 * 1024);
    }
}

/// Nobody may read this process's memory or follow its descriptors, whatever its user id.
pub(crate) fn set_not_dumpable() -> io::Result<()> {
    // SAFETY: takes numbers only.
    check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) }).map(drop)
}

/// Enough descriptors for the pipes of many background processes; what is started later inherits it.
pub(crate) fn raise_descriptor_limit(wanted: u64) {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < wanted
    {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, wanted.min(hard), hard);
    }
}

/// The name under which this process is listed.
pub(crate) fn set_name(name: &std::ffi::CStr) {
    // SAFETY: PR_SET_NAME reads a string that ends in a zero byte. It can't fail with one.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr(), 0, 0, 0) };
}

/// How many bytes wait in a pipe or terminal.
pub(crate) fn bytes_waiting(fd: BorrowedFd<'_>) -> io::Result<usize> {
    let mut count: libc::c_int = 0;
    // SAFETY: FIONREAD stores one int, and `count` is one.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIONREAD, &raw mut count) })?;
    Ok(usize::try_from(count).unwrap_or(0))
}

pub(crate) fn set_pipe_size(fd: BorrowedFd<'_>, bytes: i32) -> io::Result<()> {
    // SAFETY: takes numbers only.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETPIPE_SZ, bytes) }).map(drop)
}

pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    // SAFETY: takes numbers only.
    let flags = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) })?;
    let flags = if on { flags | libc::O_NONBLOCK } else { flags & !libc::O_NONBLOCK };
    // SAFETY: takes numbers only.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags) }).map(drop)
}

pub(crate) fn set_terminal_size(fd: BorrowedFd<'_>, size: TerminalSize) -> io::Result<()> {
    let size = libc::winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCSWINSZ reads one winsize, and `size` is one.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) }).map(drop)
}

/// The process group in the foreground of a terminal.
pub(crate) fn foreground_group(fd: BorrowedFd<'_>) -> io::Result<i32> {
    let mut group: libc::pid_t = 0;
    // SAFETY: TIOCGPGRP stores one pid, and `group` is one.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCGPGRP, &raw mut group) })?;
    Ok(group)
}

/// The keys by which a terminal sends a signal now, and forgets what was typed before them. None if it does neither.
pub(crate) fn signal_keys(terminal: BorrowedFd<'_>) -> Option<[u8; 3]> {
    // SAFETY: a termios is made of numbers only, and zeros are a value of each.
    let mut modes = unsafe { std::mem::zeroed::<libc::termios>() };
    // SAFETY: tcgetattr stores one termios, and `modes` is one.
    check(unsafe { libc::tcgetattr(terminal.as_raw_fd(), &raw mut modes) }).ok()?;
    let on = modes.c_lflag & libc::ISIG != 0 && modes.c_lflag & libc::NOFLSH == 0;
    on.then(|| [libc::VINTR, libc::VQUIT, libc::VSUSP].map(|key| modes.c_cc[key]))
}

/// What was typed into a terminal and not read is gone.
pub(crate) fn forget_typed(terminal: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: takes numbers only. Seen from this end, what the other one is to read is output.
    check(unsafe { libc::tcflush(terminal.as_raw_fd(), libc::TCOFLUSH) }).map(drop)
}

/// Makes the other end of a terminal usable and says its number.
pub(crate) fn unlock_terminal(master: BorrowedFd<'_>) -> io::Result<u32> {
    let unlock: libc::c_int = 0;
    // SAFETY: TIOCSPTLCK reads one int.
    check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlock) })?;
    let mut number: libc::c_uint = 0;
    // SAFETY: TIOCGPTN stores one unsigned int.
    check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTN, &raw mut number) })?;
    Ok(number)
}

/// An unnamed file in memory.
pub(crate) fn memory_file() -> io::Result<OwnedFd> {
    // SAFETY: the name is a constant string that ends in a zero byte.
    let fd = check(unsafe { libc::memfd_create(c"request".as_ptr(), libc::MFD_CLOEXEC) })?;
    // SAFETY: the descriptor is fresh and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(crate) fn kill(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: takes numbers only.
    check(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// Kills a child, and waits until it is gone.
pub(crate) fn end(pid: i32) {
    let mut status = 0;
    // SAFETY: takes numbers, and stores one int.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        while libc::waitpid(pid, &raw mut status, 0) < 0 && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted {}
    }
}

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Code(i32),
    Signal(i32),
}

/// What happened to some child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChildEvent {
    Ended(i32, Ended),
    Stopped(i32),
}

/// The next child that ended (or, if asked for, was stopped), without waiting for one.
pub(crate) fn next_child_event(stopped_too: bool) -> Option<ChildEvent> {
    let mut status = 0;
    let flags = libc::WNOHANG | if stopped_too { libc::WUNTRACED } else { 0 };
    // SAFETY: waitpid stores one int, and `status` is one.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, flags) };
    if pid <= 0 {
        return None;
    }
    Some(if libc::WIFSTOPPED(status) {
        ChildEvent::Stopped(pid)
    } else if libc::WIFSIGNALED(status) {
        ChildEvent::Ended(pid, Ended::Signal(libc::WTERMSIG(status)))
    } else {
        ChildEvent::Ended(pid, Ended::Code(libc::WEXITSTATUS(status)))
    })
}

/// The capabilities that root keeps in here: those a container's root commonly has, without making devices and raw packets.
const KEPT_CAPABILITIES: [u32; 12] = [
    0,  // CHOWN
    1,  // DAC_OVERRIDE
    3,  // FOWNER
    4,  // FSETID
    5,  // KILL
    6,  // SETGID
    7,  // SETUID
    8,  // SETPCAP
    10, // NET_BIND_SERVICE
    18, // SYS_CHROOT
    29, // AUDIT_WRITE
    31, // SETFCAP
];

/// Drops every capability but [`KEPT_CAPABILITIES`] from all sets of this process, for good and for all it starts.
pub(crate) fn drop_capabilities() -> io::Result<()> {
    for capability in 0..64 {
        if KEPT_CAPABILITIES.contains(&capability) {
            continue;
        }
        // SAFETY: takes numbers only. A number the kernel does not know is refused with EINVAL.
        if let Err(error) = check(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(capability), 0, 0, 0) })
            && error.raw_os_error() != Some(libc::EINVAL)
        {
            return Err(error);
        }
    }
    // SAFETY: takes numbers only. Not every kernel has ambient capabilities; without them there are none to clear.
    let _ = check(unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) });
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Sets {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }
    const VERSION_3: u32 = 0x2008_0522;
    let kept = KEPT_CAPABILITIES.iter().fold(0u32, |set, capability| set | 1 << capability);
    let mut header = Header { version: VERSION_3, pid: 0 };
    let sets = [Sets { effective: kept, permitted: kept, inheritable: 0 }, Sets { effective: 0, permitted: 0, inheritable: 0 }];
    // SAFETY: version 3 reads one header and two sets, laid out as the kernel's structures are.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw mut header, sets.as_ptr()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Mounts a file system. `data` is what its type understands.
pub(crate) fn mount(kind: &str, target: &str, flags: nix::mount::MsFlags, data: &str) -> io::Result<()> {
    nix::mount::mount(Some("none"), target, Some(kind), flags, Some(data)).map_err(io::Error::from)
}

/// Text from outside as an argument of a system call.
pub(crate) fn c_string(text: impl Into<Vec<u8>>, what: &str) -> Result<CString, String> {
    CString::new(text).map_err(|_| format!("{what} contains a zero byte"))
}

//! Keeps user code out of user namespaces.
//!
//! In a user namespace of its own a program has every capability, and gVisor lets it mount the cgroup file system there: it could lift
//! its own limit of processes and leave the group it is killed by. A filter is the only way to forbid it; what a container
//! runtime usually forbids is forbidden here too. gVisor remembers that a filter always allows a system call, so it costs little.

use std::io;

use libc::{BPF_ABS, BPF_ALU, BPF_AND, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, sock_filter};

/// Where the number and the low half of the first argument lie in what the filter sees.
const NUMBER: u32 = 0;
const FIRST_ARGUMENT: u32 = 16;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const NOT_PERMITTED: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
/// Programs then use `clone`, whose flags can be looked at.
const NOT_THERE: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;

fn load(at: u32) -> sock_filter {
    sock_filter { code: (BPF_LD | BPF_W | BPF_ABS) as u16, jt: 0, jf: 0, k: at }
}

/// Skips so many of the instructions that follow.
fn equals(value: u32, yes: u8, no: u8) -> sock_filter {
    sock_filter { code: (BPF_JMP | BPF_JEQ | BPF_K) as u16, jt: yes, jf: no, k: value }
}

fn and(mask: u32) -> sock_filter {
    sock_filter { code: (BPF_ALU | BPF_AND | BPF_K) as u16, jt: 0, jf: 0, k: mask }
}

fn answer(value: u32) -> sock_filter {
    sock_filter { code: (BPF_RET | BPF_K) as u16, jt: 0, jf: 0, k: value }
}

/// For this process and all it starts.
pub(super) fn forbid_user_namespaces() -> io::Result<()> {
    let mut program = [
        load(NUMBER),
        equals(libc::SYS_unshare as u32, 3, 0),
        equals(libc::SYS_clone as u32, 2, 0),
        equals(libc::SYS_clone3 as u32, 6, 0),
        answer(ALLOW),
        load(FIRST_ARGUMENT),
        and(libc::CLONE_NEWUSER as u32),
        equals(0, 0, 1),
        answer(ALLOW),
        answer(NOT_PERMITTED),
        answer(NOT_THERE),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: SECCOMP_MODE_FILTER reads the program, which `filter` describes and which lives until the call returns.
    let result = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter, 0, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

//! Starting a program without copying this process.
//!
//! In gVisor a fork costs twice what a vfork does. The child borrows the parent's memory while the parent stands still, until it
//! executes the program or gives up.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    io,
    os::fd::RawFd,
    ptr,
};

/// Which step of the start went wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Step {
    Clone = 0,
    Session = 1,
    Group = 2,
    Descriptors = 3,
    Terminal = 4,
    Directory = 5,
    Execute = 6,
}

#[derive(Debug)]
pub(crate) struct SpawnError {
    pub(crate) step: Step,
    pub(crate) error: io::Error,
}

/// What to start, and how.
pub(crate) struct Plan<'a> {
    /// Tried one after the other.
    pub(crate) programs: &'a [CString],
    pub(crate) arguments: &'a [CString],
    pub(crate) environment: &'a [CString],
    pub(crate) directory: Option<&'a CStr>,
    /// Becomes descriptors 0, 1, 2. None of them may be one of these already.
    pub(crate) standard: [RawFd; 3],
    /// In a session of its own; with a terminal, that becomes its controlling one.
    pub(crate) session: bool,
    pub(crate) terminal: bool,
    /// An open `cgroup.procs`: the program joins that group before it starts.
    pub(crate) group: Option<RawFd>,
    /// Namespaces of its own (`CLONE_NEW…`).
    pub(crate) namespaces: c_int,
    /// What the program gets besides, as descriptors 3 and following. None of them may be one of these already, unless in its place.
    pub(crate) extra: &'a [RawFd],
}

/// Everything the child needs, prepared: it must not allocate.
struct Order<'a> {
    plan: &'a Plan<'a>,
    programs: Vec<*const c_char>,
    arguments: Vec<*const c_char>,
    environment: Vec<*const c_char>,
    failed_step: c_int,
    errno: c_int,
}

const FIRST_EXTRA: RawFd = 3;
const STACK_BYTES: usize = 64 * 1024;

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
}

/// Starts a program and returns its process id.
pub(crate) fn spawn(plan: &Plan<'_>) -> Result<i32, SpawnError> {
    let mut order = Order {
        plan,
        programs: pointers(plan.programs),
        arguments: pointers(plan.arguments),
        environment: pointers(plan.environment),
        failed_step: -1,
        errno: 0,
    };
    let mut stack = vec![0u128; STACK_BYTES / size_of::<u128>()];
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD | plan.namespaces;
    // SAFETY: the stack is aligned, large enough for `child`, and like `order` it outlives the child's use of it, since CLONE_VFORK holds
    // this thread until the child has executed or ended. There is no other thread and no signal handler that could run meanwhile.
    let pid = unsafe { libc::clone(child, stack.as_mut_ptr_range().end.cast(), flags, (&raw mut order).cast::<c_void>()) };
    if pid < 0 {
        return Err(SpawnError { step: Step::Clone, error: io::Error::last_os_error() });
    }
    // SAFETY: the child is done with `order`; a volatile read because the compiler can't know that it wrote there.
    let (failed, errno) = unsafe { (ptr::read_volatile(&raw const order.failed_step), ptr::read_volatile(&raw const order.errno)) };
    if failed >= 0 {
        let mut status = 0;
        // SAFETY: stores one int; the child has ended or is about to.
        unsafe { libc::waitpid(pid, &raw mut status, 0) };
        let step = [Step::Clone, Step::Session, Step::Group, Step::Descriptors, Step::Terminal, Step::Directory, Step::Execute]
            [usize::try_from(failed).unwrap_or(0).min(6)];
        return Err(SpawnError { step, error: io::Error::from_raw_os_error(errno) });
    }
    Ok(pid)
}

extern "C" fn child(order: *mut c_void) -> c_int {
    // SAFETY: `spawn` passes its `Order`, which lives until this function is done, and does not touch it meanwhile.
    let order = unsafe { &mut *order.cast::<Order<'_>>() };
    let (step, errno) = prepare_and_execute(order);
    order.failed_step = step as c_int;
    order.errno = errno;
    // SAFETY: ends this child without running anything of the parent's.
    unsafe { libc::_exit(127) }
}

/// Returns only if something went wrong.
fn prepare_and_execute(order: &Order<'_>) -> (Step, c_int) {
    let plan = order.plan;
    // SAFETY: only system calls, on numbers and on strings and arrays prepared by `spawn`; nothing allocates, locks or unwinds.
    unsafe {
        if plan.session && libc::setsid() < 0 {
            return (Step::Session, errno());
        }
        if let Some(group) = plan.group
            && libc::write(group, c"0".as_ptr().cast(), 1) < 0
        {
            return (Step::Group, errno());
        }
        for (to, from) in plan.standard.into_iter().enumerate() {
            if libc::dup2(from, to as c_int) < 0 {
                return (Step::Descriptors, errno());
            }
        }
        for (to, from) in (FIRST_EXTRA..).zip(plan.extra) {
            // In its place already: then only the flag that would close it goes.
            let moved = if *from == to { libc::fcntl(to, libc::F_SETFD, 0) } else { libc::dup2(*from, to) };
            if moved < 0 {
                return (Step::Descriptors, errno());
            }
        }
        if plan.terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
            return (Step::Terminal, errno());
        }
        if let Some(directory) = plan.directory
            && libc::chdir(directory.as_ptr()) < 0
        {
            return (Step::Directory, errno());
        }
        // Which signals this process blocks is not the program's business.
        let mut none = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
        let mut error = libc::ENOENT;
        for program in &order.programs[..order.programs.len() - 1] {
            libc::execve(*program, order.arguments.as_ptr(), order.environment.as_ptr());
            // As a shell does it: "permission denied" tells more than "not found" of the last place looked at.
            if !matches!(errno(), libc::ENOENT | libc::ENOTDIR) {
                error = errno();
            }
        }
        (Step::Execute, error)
    }
}

fn errno() -> c_int {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Read, os::fd::AsRawFd};

    use super::*;
    use crate::sys::{ChildEvent, Ended, next_child_event};

    fn run(programs: &[&CStr], directory: &CStr) -> (Result<i32, SpawnError>, String) {
        let null = File::open("/dev/null").unwrap();
        let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
        let started = spawn(&Plan {
            programs: &programs.iter().map(|program| (*program).to_owned()).collect::<Vec<_>>(),
            arguments: &[
                c"sh".to_owned(),
                c"-c".to_owned(),
                c"echo $A; pwd; test -e /proc/self/fd/$OURS || echo closed; exit 3".to_owned(),
            ],
            environment: &[
                c"A=b".to_owned(),
                CString::new(format!("OURS={}", read.as_raw_fd())).unwrap(),
                c"PATH=/usr/bin:/bin".to_owned(),
            ],
            directory: Some(directory),
            standard: [null.as_raw_fd(), write.as_raw_fd(), write.as_raw_fd()],
            session: true,
            terminal: false,
            group: None,
            namespaces: 0,
            extra: &[],
        });
        drop(write);
        let mut output = String::new();
        File::from(read).read_to_string(&mut output).unwrap();
        (started, output)
    }

    // One test, since all of it waits for any child of this process.
    #[test]
    fn a_program_gets_what_the_plan_says_and_nothing_else_and_failures_name_their_step() {
        let (started, output) = run(&[c"/nowhere/sh", c"/bin/sh"], c"/usr");
        let pid = started.unwrap();
        assert_eq!(output, "b\n/usr\nclosed\n");
        let event = loop {
            if let Some(event) = next_child_event(false) {
                break event;
            }
        };
        assert_eq!(event, ChildEvent::Ended(pid, Ended::Code(3)));
        for (program, directory, step, errno) in [
            (c"/nowhere/sh", c"/", Step::Execute, libc::ENOENT),
            (c"/etc/passwd", c"/", Step::Execute, libc::EACCES),
            (c"/bin/sh", c"/nowhere", Step::Directory, libc::ENOENT),
        ] {
            let failed = run(&[program], directory).0.unwrap_err();
            assert_eq!((failed.step, failed.error.raw_os_error()), (step, Some(errno)));
        }
        assert_eq!(next_child_event(false), None, "a failed start leaves no child behind");
    }
}

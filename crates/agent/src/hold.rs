//! Holding the user's processes still, so that what is read meanwhile fits together.
//!
//! By ptrace: unlike a stopped process, a traced one is seen by nobody as anything but slow, and one that was stopped already stays so. gVisor's
//! cgroups can't freeze. Should the agent end, the kernel lets all of them go.

use std::{
    collections::BTreeMap,
    fs, io, ptr,
    time::{Duration, Instant},
};

/// How long all of them together may take to stand still.
const HOLD_WITHIN: Duration = Duration::from_secs(5);
/// One that waits for a child that stands still comes no further itself, and can't say so.
const SILENT_FOR: Duration = Duration::from_millis(100);
/// How long to wait for one that is to stop before looking again.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Processes that stand still. They go on when it is dropped.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// By thread: whether it has said that it stands still.
    threads: BTreeMap<i32, bool>,
}

impl Held {
    /// All processes but this one and those.
    pub(crate) fn all_but(others: &[i32]) -> io::Result<Self> {
        let mut held = Self::default();
        let until = Instant::now() + HOLD_WITHIN;
        loop {
            let mut new = false;
            for thread in threads(others) {
                if held.threads.contains_key(&thread) {
                    continue;
                }
                new |= held.seize(thread)?;
            }
            held.wait_for_all(until)?;
            // While one was not yet held it may have made others.
            if !new {
                return Ok(held);
            }
            if Instant::now() > until {
                return Err(io::Error::other("new processes come faster than they can be held still"));
            }
        }
    }

    /// Returns whether it is there.
    fn seize(&mut self, thread: i32) -> io::Result<bool> {
        let seized = ptrace(libc::PTRACE_SEIZE, thread).and_then(|()| ptrace(libc::PTRACE_INTERRUPT, thread));
        match seized {
            Ok(()) => {
                self.threads.insert(thread, false);
                Ok(true)
            }
            // Gone, or about to be.
            Err(_) if state(thread).is_none_or(|state| matches!(state, 'Z' | 'X')) => Ok(false),
            Err(_) => Err(io::Error::other(format!("process {thread} is being traced by another one, and can't be held still"))),
        }
    }

    fn wait_for_all(&mut self, until: Instant) -> io::Result<()> {
        let mut heard = Instant::now();
        loop {
            if self.hear() {
                heard = Instant::now();
            }
            let mut silent = self.threads.iter().filter(|(_, still)| !**still).map(|(thread, _)| *thread).peekable();
            if silent.peek().is_none() {
                return Ok(());
            }
            let waits = |thread: i32| state(thread).is_none_or(|state| !matches!(state, 'R' | 'S'));
            if heard.elapsed() > SILENT_FOR && silent.all(waits) {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(io::Error::other("some processes can't be held still"));
            }
            wait_for_child(LOOK_EVERY);
        }
    }

    /// Notes who stands still or has ended. Returns whether anybody did.
    fn hear(&mut self) -> bool {
        let before = self.threads.len();
        let mut heard = false;
        self.threads.retain(|thread, still| {
            if !*still {
                match wait(*thread) {
                    Waited::Stopped => *still = true,
                    Waited::Ended => return false,
                    Waited::Nothing => return true,
                }
                heard = true;
            }
            true
        });
        heard || self.threads.len() < before
    }

    /// Lets them go. False: some are left, who come to stand still only now; ask again.
    pub(crate) fn release(&mut self) -> bool {
        self.hear();
        self.threads.retain(|thread, still| {
            if !*still {
                return true;
            }
            if ptrace(libc::PTRACE_DETACH, *thread).is_err() {
                // It was killed: its parent hears of it when we have.
                wait(*thread);
            }
            false
        });
        self.threads.is_empty()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let until = Instant::now() + SILENT_FOR;
        while !self.release() && Instant::now() < until {
            wait_for_child(LOOK_EVERY);
        }
    }
}

fn ptrace(request: libc::c_uint, thread: i32) -> io::Result<()> {
    // SAFETY: none of the requests used here reads or writes memory of this process.
    let result = unsafe { libc::ptrace(request, thread, ptr::null_mut::<libc::c_void>(), ptr::null_mut::<libc::c_void>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

enum Waited {
    Stopped,
    Ended,
    Nothing,
}

fn wait(thread: i32) -> Waited {
    let mut status = 0;
    // SAFETY: stores one int, and `status` is one.
    match unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL | libc::WNOHANG) } {
        0 => Waited::Nothing,
        pid if pid > 0 && libc::WIFSTOPPED(status) => Waited::Stopped,
        _ => Waited::Ended,
    }
}

/// Until something happens to a child, or for so long.
fn wait_for_child(at_most: Duration) {
    let limit = libc::timespec { tv_sec: 0, tv_nsec: i64::from(at_most.subsec_nanos()) };
    // SAFETY: the set is initialised before it is read, and nothing else of the call outlives it. The signal is blocked in this process.
    unsafe {
        let mut children = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&raw mut children);
        libc::sigaddset(&raw mut children, libc::SIGCHLD);
        libc::sigtimedwait(&raw const children, ptr::null_mut(), &raw const limit);
    }
}

/// Whether there is no process but this one and those. One that has ended does nothing any more.
pub(crate) fn nobody_but(others: &[i32]) -> bool {
    threads(others).next().is_none()
}

/// The threads of all processes but this one and those.
fn threads(others: &[i32]) -> impl Iterator<Item = i32> {
    let numbers = |path: &str| -> Vec<i32> {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    };
    let own = i32::try_from(std::process::id()).unwrap_or(1);
    let processes = numbers("/proc").into_iter().filter(move |pid| *pid != own && !others.contains(pid));
    processes
        .flat_map(move |pid| numbers(&format!("/proc/{pid}/task")))
        .filter(|thread| !state(*thread).is_none_or(|state| matches!(state, 'Z' | 'X')))
}

fn state(thread: i32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{thread}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

//! Processes that are nobody's children here: told apart by pid and start time, watched, ended and reaped by pidfd.

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitIdStatus, pidfd_open, pidfd_send_signal, waitid};
use serde::{Deserialize, Serialize};
use tokio::io::{Interest, unix::AsyncFd};

/// The highest priority there is of those that wait for each other at all.
const FIRST_OF_ALL: i32 = -20;

/// What a process is: its number and when it started, so that a number used again is not mistaken for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) pid: i32,
    /// In clock ticks since the boot named by `boot_id`.
    pub(crate) started: u64,
    pub(crate) boot_id: String,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessEnd {
    Exited(i32),
    Signalled(i32),
    /// It was not our child, so only its parent knows.
    Unknown,
}

/// A process that can be waited for whoever its parent is.
#[derive(Debug)]
pub(crate) struct Process {
    identity: Identity,
    pidfd: AsyncFd<OwnedFd>,
}

impl Process {
    /// The process of that number, whatever it is.
    pub(crate) fn open(pid: i32) -> io::Result<Self> {
        let number = Pid::from_raw(pid).filter(|_| pid > 0).ok_or(io::ErrorKind::InvalidInput)?;
        let pidfd = pidfd_open(number, PidfdFlags::NONBLOCK)?;
        // Read after opening: if it is still the same process now, the descriptor is that one's.
        let identity = Identity { pid, started: start_time(pid)?, boot_id: boot_id()? };
        #[expect(deprecated, reason = "its successor is unsafe for types that lie about their descriptor, which an OwnedFd does not")]
        let pidfd = AsyncFd::with_interest(pidfd, Interest::READABLE)?;
        Ok(Self { identity, pidfd })
    }

    /// The process with that identity; none if it is certain that it is gone.
    ///
    /// # Errors
    /// It can't be told now.
    pub(crate) fn find(identity: &Identity) -> io::Result<Option<Self>> {
        // Read first: it shows that `/proc` can be read at all, so that what is not in there is not there.
        if boot_id()? != identity.boot_id {
            return Ok(None);
        }
        let found = match start_time(identity.pid) {
            // Also if the number is a thread's now, which has no descriptor of this kind.
            Ok(started) if started != identity.started => return Ok(None),
            Ok(_) => Self::open(identity.pid),
            Err(error) => Err(error),
        };
        match found {
            Ok(process) => Ok(Some(process).filter(|process| process.identity == *identity)),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    pub(crate) fn kill(&self) {
        // It fails only if the process is gone, which is what is wanted.
        pidfd_send_signal(self.pidfd.as_fd(), Signal::KILL).ok();
    }

    /// Waits for its end, which a zombie has reached. Cancel-safe.
    pub(crate) async fn ended(&self) {
        // The descriptor becomes readable at the end and stays so; an error means that there is nothing to wait for.
        self.pidfd.readable().await.map(|mut guard| guard.retain_ready()).ok();
    }

    /// Reaps it if it is a child that ended.
    pub(crate) fn reap(&self) -> ProcessEnd {
        match waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Ok(Some(status)) => end_of(&status),
            Ok(None) | Err(_) => ProcessEnd::Unknown,
        }
    }
}

/// Whether an error of [`Process::open`] says that there is no process of that number.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

fn end_of(status: &WaitIdStatus) -> ProcessEnd {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => ProcessEnd::Exited(code),
        (None, Some(signal)) => ProcessEnd::Signalled(signal),
        (None, None) => ProcessEnd::Unknown,
    }
}

/// Has a process that was just started, and all threads that it starts, come before others of its cgroup. Where that is not allowed it comes like them.
pub(crate) fn hurry(pid: u32) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        rustix::process::setpriority_process(Some(pid), FIRST_OF_ALL).ok();
    }
}

/// Makes this process the one that gets orphaned descendants, so that a sandbox whose `runsc run` ended is its child: ending one then
/// takes milliseconds, and its end has a status. Once, in `main`.
///
/// # Errors
/// The kernel is older than 3.4.
pub fn become_subreaper() -> io::Result<()> {
    Ok(rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?)
}

fn start_time(pid: i32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name is in parentheses and may hold anything, so count from behind the last one: the start time is field 22 of all.
    let fields = stat.rsplit_once(") ").map(|(_, rest)| rest).unwrap_or_default();
    fields.split(' ').nth(19).and_then(|field| field.parse().ok()).ok_or_else(|| io::Error::other("unreadable /proc/…/stat"))
}

fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Every process of runsc that serves this container, and whoever brings it its memory, found by their command lines: for those of a start that was cut
/// off before anything was written down, and for whom an earlier server started.
pub(crate) fn processes_of(container: &str, bundle: &Path) -> Vec<Process> {
    processes_called(|line| serves(line, container, bundle))
}

/// Whoever brings the sandbox with this directory its memory, or waits to.
pub(crate) fn file_servers_of(bundle: &Path) -> Vec<Process> {
    processes_called(|line| brings(line, bundle))
}

fn processes_called(wanted: impl Fn(&[u8]) -> bool) -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| wanted(&line)))
        .filter_map(|pid| Process::open(pid).ok())
        .collect()
}

fn words(command_line: &[u8]) -> impl Iterator<Item = &[u8]> {
    command_line.strip_suffix(b"\0").unwrap_or(command_line).split(|byte| *byte == 0)
}

fn brings(command_line: &[u8], bundle: &Path) -> bool {
    words(command_line).skip(1).eq([b"serve-files", bundle.as_os_str().as_encoded_bytes()])
}

fn serves(command_line: &[u8], container: &str, bundle: &Path) -> bool {
    if brings(command_line, bundle) {
        return true;
    }
    let mut arguments = words(command_line);
    let runsc = arguments.next().is_some_and(|name| name.starts_with(b"runsc-") || name.ends_with(b"/runsc"));
    let bundle = bundle.as_os_str().as_encoded_bytes();
    let mut named = false;
    let mut last: &[u8] = b"";
    for argument in arguments {
        named |= argument.strip_suffix(bundle).is_some_and(|flag| flag.ends_with(b"-bundle="));
        last = argument;
    }
    runsc && named && last == container.as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_end_of_a_process_is_noticed_and_its_number_is_not_mistaken() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::open(i32::try_from(child.id()).unwrap()).unwrap();
        assert!(Process::find(process.identity()).unwrap().is_some());
        let other = Identity { started: process.identity().started + 1, ..process.identity().clone() };
        assert!(Process::find(&other).unwrap().is_none());
        let earlier = Identity { boot_id: "another".to_owned(), ..process.identity().clone() };
        assert!(Process::find(&earlier).unwrap().is_none());
        process.kill();
        tokio::time::timeout(std::time::Duration::from_secs(5), process.ended()).await.unwrap();
        assert_eq!(process.reap(), ProcessEnd::Signalled(9));
        assert!(Process::find(process.identity()).unwrap().is_none());
        child.wait().ok();
    }

    #[test]
    fn only_runscs_own_processes_of_that_container_are_found() {
        let id = "abc";
        let bundle = Path::new("/d/abc");
        assert!(serves(b"runsc-sandbox\0--root=/r\0boot\0--bundle=/d/abc\0abc\0", id, bundle));
        assert!(serves(b"/x/runsc\0run\0-bundle=/d/abc\0abc\0", id, bundle));
        assert!(!serves(b"/x/runsc\0run\0-bundle=/d/abcd\0abcd\0", id, bundle));
        assert!(!serves(b"less\0-bundle=/d/abc\0abc\0", id, bundle));
        let helper: &[u8] = b"/proc/self/exe\0serve-files\0/d/abc\0";
        assert!(serves(helper, id, bundle) && brings(helper, bundle));
        assert!(!brings(helper, Path::new("/d/ab")) && !brings(b"/x/runsc\0run\0-bundle=/d/abc\0abc\0", bundle));
    }
}

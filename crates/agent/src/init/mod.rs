//! The init of the user's namespaces: the only process of ours that the guest can see.
//!
//! It is started afresh (`/sandboxer/agent init`), so nothing of the agent's memory is in it, makes the guest's root its own, gives up
//! what it does not need, then starts programs as the agent asks and tells how they ended. The guest can kill it; the agent
//! then starts another on the same files.

mod program;
mod root;
mod seccomp;
mod spare;
mod tree;

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use nix::{
    fcntl::OFlag,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, SigmaskHow, Signal, sigprocmask},
        signalfd::{SfdFlags, SignalFd},
        stat::Mode,
    },
};

pub(crate) use program::{environment, script};

use crate::{
    ipc::{self, INIT_SOCKET, Report, Request, Serial},
    sys::{self, ChildEvent, Ended},
};

/// A program, or an interpreter that waits for one: its end is told to the agent.
struct Child {
    pid: i32,
    /// Kept to find the foreground group of its terminal.
    terminal: Option<OwnedFd>,
}

struct Init {
    socket: BorrowedFd<'static>,
    children: BTreeMap<Serial, Child>,
}

/// Runs until the agent is gone.
pub(crate) fn run() -> io::Result<()> {
    // SAFETY: the agent starts init with its socket as this descriptor, and it stays open until the process ends.
    let socket = unsafe { BorrowedFd::borrow_raw(INIT_SOCKET) };
    nix::fcntl::fcntl(socket, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))?;
    // Before anything else runs in here.
    sys::set_not_dumpable()?;
    // A guest may send its init anything. Blocked, not ignored: what is ignored stays so in every program that is started.
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None)?;
    // Every program inherits this, too; the Rust runtime had it ignored. Blocked, it does no harm here.
    // SAFETY: restoring the default installs no handler.
    unsafe { nix::sys::signal::signal(Signal::SIGPIPE, nix::sys::signal::SigHandler::SigDfl) }?;
    nix::sys::stat::umask(Mode::from_bits_truncate(0o022));
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGCHLD);
    let children = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    sys::set_name(c"init");
    root::enter()?;
    let limit = std::env::args().nth(2).and_then(|memory| memory.parse().ok());
    let meminfo = limit.and_then(|limit| match root::meminfo(limit) {
        Ok(file) => Some(file),
        Err(error) => {
            // Programs then see the memory of the machine.
            eprintln!("sandboxer-agent init: /proc/meminfo: {error}");
            None
        }
    });
    // While it is still allowed to.
    seccomp::forbid_user_namespaces()?;
    sys::drop_capabilities()?;
    // Dropping capabilities may have changed it.
    sys::set_not_dumpable()?;
    let mut init = Init { socket, children: BTreeMap::new() };
    let root = nix::fcntl::open("/", OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
    let handed: Vec<i32> = std::iter::once(root.as_raw_fd()).chain(meminfo.iter().map(AsRawFd::as_raw_fd)).collect();
    init.report(&Report::Ready, &handed)?;
    drop((root, meminfo));
    loop {
        let mut waiting = [PollFd::new(socket, PollFlags::POLLIN), PollFd::new(children.as_fd(), PollFlags::POLLIN)];
        match poll(&mut waiting, PollTimeout::NONE) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [asked, ended] = waiting.map(|waiting| waiting.revents().is_some_and(|events| !events.is_empty()));
        if ended {
            init.reap()?;
            // One signal stands for all that have ended, and may have come for one that ended since.
            let _ = children.read_signal();
            init.reap()?;
        }
        if asked && !init.serve_one()? {
            return Ok(());
        }
    }
}

impl Init {
    fn report(&self, report: &Report, descriptors: &[i32]) -> io::Result<()> {
        ipc::send(self.socket, report, descriptors)
    }

    fn fail(&self, serial: Serial, message: &str) -> io::Result<()> {
        let message: String = message.chars().take(500).collect();
        self.report(&Report::Failed { serial, message }, &[])
    }

    fn serve_one(&mut self) -> io::Result<bool> {
        let Some((request, descriptors)) = ipc::receive::<Request>(self.socket)? else { return Ok(false) };
        match request {
            Request::Spawn { serial, head, group } => match program::start(serial, head, group, descriptors) {
                Ok(child) => {
                    let terminal: Vec<i32> = child.terminal.iter().map(AsRawFd::as_raw_fd).collect();
                    self.report(&Report::Started { serial }, &terminal)?;
                    self.children.insert(serial, child);
                    program::remove_all_but(|of| self.children.contains_key(&of));
                }
                Err(message) => {
                    self.fail(serial, &message)?;
                    // Its own, which may be there, and that of the one before, which the next is not to read either.
                    program::remove_all_but(|of| self.children.contains_key(&of));
                }
            },
            Request::Spare { serial, head, current } => match spare::start(serial, head, descriptors) {
                Ok((pid, script)) => {
                    self.report(&Report::Waits { serial }, &[script.as_raw_fd()])?;
                    self.children.insert(serial, Child { pid, terminal: None });
                    program::remove_all_but(|of| of == current || self.children.contains_key(&of));
                }
                Err(message) => self.fail(serial, &message)?,
            },
            Request::Drop { serial } => {
                if let Some(child) = self.children.get(&serial) {
                    let _ = sys::kill(child.pid, libc::SIGKILL);
                }
            }
            Request::Signal { serial, signal } => {
                if let Some(child) = self.children.get(&serial) {
                    let foreground = child.terminal.as_ref().and_then(|terminal| sys::foreground_group(terminal.as_fd()).ok());
                    let group = foreground.filter(|group| *group > 1).unwrap_or(child.pid);
                    if sys::kill(-group, signal).is_err() {
                        // It may have left its group, or the group is gone with all but the main process.
                        let _ = sys::kill(child.pid, signal);
                    }
                }
            }
            Request::Kill { serial } => {
                if let Some(child) = self.children.get(&serial) {
                    tree::kill(child.pid);
                }
            }
            Request::Generation { generation } => {
                if let Err(error) = root::write_generation(generation) {
                    eprintln!("sandboxer-agent init: the generation can't be told: {error}");
                }
            }
        }
        Ok(true)
    }

    fn reap(&mut self) -> io::Result<()> {
        while let Some(event) = sys::next_child_event(false) {
            let ChildEvent::Ended(pid, ended) = event else { continue };
            let Some(serial) = self.children.iter().find(|(_, child)| child.pid == pid).map(|(serial, _)| *serial) else { continue };
            self.children.remove(&serial);
            let (code, signal) = match ended {
                Ended::Code(code) => (Some(code), None),
                Ended::Signal(signal) => (None, Some(signal)),
            };
            self.report(&Report::Exited { serial, code, signal }, &[])?;
        }
        Ok(())
    }
}

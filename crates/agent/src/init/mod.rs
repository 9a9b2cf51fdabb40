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
    time::Instant,
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

use crate::{
    ipc::{self, INIT_SOCKET, Program, Report, Request, Serial},
    sys::{self, ChildEvent, Ended},
};
use program::Written;
use spare::{Handed, Spare};

/// Requests carried out before anything else gets its turn.
const REQUESTS_A_ROUND: usize = 16;

/// The program whose end the agent waits for.
struct Main {
    serial: Serial,
    pid: i32,
    /// Kept to find the foreground group of its terminal.
    terminal: Option<OwnedFd>,
    /// It was handed to an interpreter that may not have begun yet.
    handed: Option<Handed>,
    /// Somebody else than the guest had it signalled: if it ends of that, it has ended.
    signalled: bool,
    /// It ended, and that is not told yet.
    ended: Option<Ended>,
}

struct Init {
    socket: BorrowedFd<'static>,
    main: Option<Main>,
    spares: BTreeMap<Serial, Spare>,
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
    // While it is still allowed to.
    seccomp::forbid_user_namespaces()?;
    sys::drop_capabilities()?;
    // Dropping capabilities may have changed it.
    sys::set_not_dumpable()?;
    let mut init = Init { socket, main: None, spares: BTreeMap::new() };
    let root = nix::fcntl::open("/", OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
    init.report(&Report::Ready, &[root.as_raw_fd()])?;
    drop(root);
    loop {
        let mut waiting = [PollFd::new(socket, PollFlags::POLLIN), PollFd::new(children.as_fd(), PollFlags::POLLIN)];
        match poll(&mut waiting, init.timeout()) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        while let Ok(Some(_)) = children.read_signal() {}
        init.reap()?;
        // All of them, before it is decided what the end of a program meant.
        for _ in 0..REQUESTS_A_ROUND {
            if !init.is_asked()? {
                break;
            }
            if !init.serve_one()? {
                return Ok(());
            }
        }
        init.settle()?;
    }
}

impl Init {
    fn report(&self, report: &Report, descriptors: &[i32]) -> io::Result<()> {
        ipc::send(self.socket, report, descriptors)
    }

    fn is_asked(&self) -> io::Result<bool> {
        let mut waiting = [PollFd::new(self.socket, PollFlags::POLLIN)];
        match poll(&mut waiting, PollTimeout::ZERO) {
            Ok(_) => Ok(waiting[0].revents().is_some_and(|events| !events.is_empty())),
            Err(nix::errno::Errno::EINTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn timeout(&self) -> PollTimeout {
        let handed = self.main.as_ref().and_then(|main| main.handed.as_ref());
        handed.map_or(PollTimeout::NONE, |handed| {
            let left = handed.until.saturating_duration_since(Instant::now()).as_millis() + 1;
            PollTimeout::from(u16::try_from(left).unwrap_or(u16::MAX))
        })
    }

    fn begin(&mut self, serial: Serial, pid: i32, terminal: Option<OwnedFd>, handed: Option<Handed>) -> io::Result<()> {
        let given: Vec<i32> = terminal.iter().map(AsRawFd::as_raw_fd).collect();
        self.report(&Report::Started { serial, by_spare: handed.is_some() }, &given)?;
        self.main = Some(Main { serial, pid, terminal, handed, signalled: false, ended: None });
        program::remove_all_but(serial);
        Ok(())
    }

    fn fail(&self, serial: Serial, message: &str) -> io::Result<()> {
        let message: String = message.chars().take(500).collect();
        self.report(&Report::Failed { serial, message }, &[])
    }

    /// Gives the code to the interpreter that waits for it.
    fn hand_over(&mut self, serial: Serial, head: usize, input: bool, descriptors: Vec<OwnedFd>) -> Result<(i32, Option<Handed>), String> {
        let spare = self.spares.remove(&serial).ok_or("none waits with this number")?;
        let written = program::read::<Program>(descriptors.into_iter().next(), head).and_then(|(program, mut code)| {
            let script = program::write_code(serial, program.language, &mut code)?;
            Ok(Written { program, script })
        });
        match written {
            Ok(written) => spare.hand_over(written, input),
            Err(message) => {
                end_spare(&spare);
                Err(message)
            }
        }
    }

    /// Decides what became of a program that was handed over, and tells the end of one that has ended.
    fn settle(&mut self) -> io::Result<()> {
        let Some(main) = &mut self.main else { return Ok(()) };
        if main.ended.is_none() && main.handed.as_mut().is_none_or(|handed| Instant::now() < handed.until || handed.is_only_slow(main.pid))
        {
            return Ok(());
        }
        if let Some(handed) = main.handed.take()
            && handed.take_back()
            && !(main.signalled && main.ended.is_some())
        {
            // Nobody has run it. It is killed or stopped, by the guest itself, or it does not get on.
            if main.ended.is_none() {
                let _ = sys::kill(main.pid, libc::SIGKILL);
            }
            match handed.start_afresh() {
                Ok(pid) => {
                    main.pid = pid;
                    main.ended = None;
                    return Ok(());
                }
                Err(message) => {
                    eprintln!("sandboxer-agent init: {message}");
                    main.ended = Some(Ended::Signal(libc::SIGKILL));
                }
            }
        }
        let Some(ended) = main.ended else { return Ok(()) };
        let serial = main.serial;
        self.main = None;
        let (code, signal) = match ended {
            Ended::Code(code) => (Some(code), None),
            Ended::Signal(signal) => (None, Some(signal)),
        };
        self.report(&Report::Exited { serial, code, signal }, &[])
    }

    fn serve_one(&mut self) -> io::Result<bool> {
        let Some((request, descriptors)) = ipc::receive::<Request>(self.socket)? else { return Ok(false) };
        match request {
            Request::Spawn { serial, head, group } => match program::start(serial, head, group, descriptors) {
                Ok(started) => self.begin(serial, started.pid, started.terminal, None)?,
                Err(message) => self.fail(serial, &message)?,
            },
            Request::Spare { serial, head } => {
                let spare = Spare::start(serial, head, descriptors);
                if spare.as_ref().is_ok_and(|spare| spare.pid.is_none()) || spare.is_err() {
                    self.report(&Report::SpareGone { serial }, &[])?;
                }
                if let Ok(spare) = spare {
                    self.spares.insert(serial, spare);
                }
            }
            Request::HandOver { serial, head, input } => match self.hand_over(serial, head, input, descriptors) {
                Ok((pid, handed)) => self.begin(serial, pid, None, handed)?,
                Err(message) => self.fail(serial, &message)?,
            },
            Request::Drop { serial } => {
                if let Some(spare) = self.spares.remove(&serial) {
                    end_spare(&spare);
                }
            }
            Request::Signal { serial, signal } => {
                if let Some(main) = &mut self.main
                    && main.serial == serial
                {
                    main.signalled = true;
                    if main.ended.is_some() {
                        // Its number is nobody's any more.
                        return Ok(true);
                    }
                    let foreground = main.terminal.as_ref().and_then(|terminal| sys::foreground_group(terminal.as_fd()).ok());
                    let group = foreground.filter(|group| *group > 1).unwrap_or(main.pid);
                    if sys::kill(-group, signal).is_err() {
                        // It may have left its group, or the group is gone with all but the main process.
                        let _ = sys::kill(main.pid, signal);
                    }
                }
            }
            Request::Kill { serial, tree } => {
                if let Some(main) = &mut self.main
                    && main.serial == serial
                {
                    main.signalled = true;
                    if tree {
                        tree::kill(main.pid);
                    } else if main.ended.is_none() {
                        // Its group was killed by the agent; but it may have been started afresh since.
                        let _ = sys::kill(main.pid, libc::SIGKILL);
                    }
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
            if let Some(main) = self.main.as_mut().filter(|main| main.pid == pid) {
                main.ended = Some(ended);
            } else if let Some((serial, spare)) = self.spares.iter_mut().find(|(_, spare)| spare.pid == Some(pid)) {
                spare.pid = None;
                let serial = *serial;
                self.report(&Report::SpareGone { serial }, &[])?;
            }
        }
        Ok(())
    }
}

fn end_spare(spare: &Spare) {
    if let Some(pid) = spare.pid {
        let _ = sys::kill(pid, libc::SIGKILL);
    }
}

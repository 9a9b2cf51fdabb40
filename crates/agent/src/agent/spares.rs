//! Interpreters that wait for an execution.
//!
//! ```text
//!  quiet ──► started, waits ──► taken by an execution ──► its program, as any other
//!   ▲              │ ended, or dropped: memory is short, the sandbox was copied
//!   └──────────────┘
//! ```
//!
//! The agent makes the pipes, the number and the group of an execution ahead of it and has init start an interpreter with them, which waits
//! for its code ([`crate::init`]). One that is still starting is as good: it has a lead. So the next is started when an execution
//! has ended, and an execution that comes too early loses nothing. Each is used once.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::{Duration, Instant},
};

use sandboxer_protocol::agent::{ExecSpec, Language, PerStream, SpareConfig};

use super::{
    Agent,
    executions::{Pipes, in_memory, make_pipes, pipe_bytes},
};
use crate::{
    cgroup::Groups,
    ipc::{self, Request, Serial, Waiting},
    sys,
};

mod suit;

/// A new sandbox has been quiet for so long: whoever made it has no program for it yet.
const FIRST_QUIET: Duration = Duration::from_millis(100);
/// One after the other, since each takes a core for a while.
const BETWEEN: Duration = Duration::from_millis(50);
/// A copy may be one of many, which all begin at the same time.
const COPIED_QUIET: Duration = Duration::from_secs(1);
/// A program that runs for so long does not notice.
const RUNNING_FOR: Duration = Duration::from_secs(2);
/// Memory is short, or something went wrong: not before.
const NOT_BEFORE: Duration = Duration::from_secs(5);
/// So many of one language in a row that ended before they were used: there are no more of it, until one was.
const MAX_FAILURES: u32 = 4;

const LANGUAGES: [Language; 2] = [Language::Bash, Language::Python];

/// One that waits, and the agent's side of what was prepared for its execution.
pub(super) struct Spare {
    pub(super) serial: Serial,
    language: Language,
    pub(super) input: Option<OwnedFd>,
    pub(super) output: PerStream<OwnedFd>,
}

#[derive(Default)]
pub(super) struct Spares {
    waiting: Vec<Spare>,
    /// By language.
    failures: [u32; LANGUAGES.len()],
    /// When to start the next.
    due: Option<Instant>,
    /// Which is wanted first: that of the last execution.
    first: Option<Language>,
}

fn index(language: Language) -> usize {
    match language {
        Language::Bash => 0,
        Language::Python => 1,
    }
}

impl Spares {
    /// The namespace is there, and has nothing to do yet.
    pub(super) fn begin(&mut self, now: Instant) {
        self.due = Some(now + FIRST_QUIET);
    }

    /// An execution has ended.
    pub(super) fn refill(&mut self, now: Instant) {
        // What put it off may still hold.
        if self.due.is_none_or(|due| due < now + NOT_BEFORE - BETWEEN) {
            self.due = Some(now);
        }
    }

    /// The namespace is gone with all of them.
    pub(super) fn forget(&mut self) {
        self.waiting.clear();
        self.due = None;
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    pub(super) fn has(&self, serial: Serial) -> bool {
        self.waiting.iter().any(|spare| spare.serial == serial)
    }

    /// The processes that wait.
    pub(super) fn processes(&self, groups: Option<&Groups>) -> Vec<i32> {
        groups.filter(|_| !self.waiting.is_empty()).map(Groups::spares).unwrap_or_default()
    }

    /// One of this language, for the execution that comes now.
    pub(super) fn take(&mut self, language: Language) -> Option<Spare> {
        self.first = Some(language);
        let at = self.waiting.iter().position(|spare| spare.language == language)?;
        self.failures[index(language)] = 0;
        Some(self.waiting.remove(at))
    }

    /// Which is missing.
    fn missing(&self, each: u32) -> Option<Language> {
        let wanted = |language: &Language| {
            let waiting = self.waiting.iter().filter(|spare| spare.language == *language).count();
            waiting < each as usize && self.failures[index(*language)] < MAX_FAILURES
        };
        self.first.into_iter().chain(LANGUAGES).find(wanted)
    }
}

impl Agent {
    /// Whether an interpreter that waits can run it as one started for it would.
    pub(super) fn suits(&mut self, spec: &ExecSpec) -> bool {
        // What is in their pipes was neither written by an execution nor meant for one.
        let unused = |pipe: &OwnedFd| sys::bytes_waiting(pipe.as_fd()).is_ok_and(|bytes| bytes == 0);
        let spoilt = |spare: &Spare| {
            let Spare { input, output, .. } = spare;
            !input.iter().chain([&output.stdout, &output.stderr]).all(unused)
        };
        while let Some(at) = self.spares.waiting.iter().position(spoilt) {
            let spare = self.spares.waiting.remove(at);
            self.drop_spare(spare.serial);
        }
        self.config.spares.as_ref().is_some_and(|config| suit::suits(spec, &config.env))
    }

    /// Starts the next, if it is time to.
    pub(super) fn keep_spares(&mut self, now: Instant) {
        if self.spares.due.is_none_or(|due| now < due) {
            return;
        }
        self.spares.due = None;
        let Some(config) = &self.config.spares else { return };
        let Some(language) = self.spares.missing(config.each) else { return };
        if self.files.hold() {
            self.spares.due = Some(now + BETWEEN);
            return;
        }
        if let Some(execution) = self.execution.as_ref().filter(|execution| execution.is_running()) {
            let long_enough = execution.began + RUNNING_FOR;
            if now < long_enough {
                self.spares.due = Some(long_enough);
                return;
            }
        }
        if self.memory.as_mut().is_some_and(|memory| !memory.has_room()) {
            self.spares.due = Some(now + NOT_BEFORE);
            return;
        }
        self.last_serial += 1;
        match self.start_spare(self.last_serial, language, config) {
            Ok(Some(spare)) => {
                self.spares.waiting.push(spare);
                self.spares.due = Some(now + BETWEEN);
            }
            Ok(None) => {}
            Err(_) => self.spares.due = Some(now + NOT_BEFORE),
        }
    }

    /// None where it can't be done: without groups nobody could tell them from the user's processes.
    fn start_spare(&self, serial: Serial, language: Language, config: &SpareConfig) -> io::Result<Option<Spare>> {
        let (Some(init), Some(groups)) = (self.supervisor.ready(), &self.groups) else { return Ok(None) };
        let at_most = config.each as usize * LANGUAGES.len();
        let (waiting, execution) = (groups.join_spares(at_most)?, groups.create(serial)?);
        let Pipes { input, output, theirs } = make_pipes(true, pipe_bytes(self.config.output_window_bytes))?;
        let about = Waiting { language, env: config.env.clone(), warm_modules: config.warm_modules.clone() };
        let (file, head) = in_memory(&about, &[])?;
        let mut descriptors = vec![file.as_raw_fd(), waiting.as_raw_fd(), execution.as_raw_fd()];
        descriptors.extend(theirs.iter().map(AsRawFd::as_raw_fd));
        ipc::send(init.socket.as_fd(), &Request::Spare { serial, head }, &descriptors)?;
        Ok(Some(Spare { serial, language, input, output }))
    }

    /// One has ended. If an execution has taken it meanwhile, init knows what to do.
    pub(super) fn spare_gone(&mut self, serial: Serial) {
        let Some(at) = self.spares.waiting.iter().position(|spare| spare.serial == serial) else { return };
        let spare = self.spares.waiting.remove(at);
        let failures = &mut self.spares.failures[index(spare.language)];
        *failures = failures.saturating_add(1);
        self.drop_spare(serial);
        self.spares.due = Some(Instant::now() + NOT_BEFORE);
    }

    fn drop_spare(&self, serial: Serial) {
        if let Some(init) = self.supervisor.ready() {
            // One that is gone has no children any more.
            let _ = ipc::send(init.socket.as_fd(), &Request::Drop { serial }, &[]);
        }
    }

    /// Ends those of a language, or all. Others are started when there is room.
    pub(super) fn drop_spares(&mut self, language: Option<Language>, now: Instant) {
        let (gone, kept) = std::mem::take(&mut self.spares.waiting)
            .into_iter()
            .partition(|spare: &Spare| language.is_none_or(|language| language == spare.language));
        self.spares.waiting = kept;
        for spare in gone {
            self.drop_spare(spare.serial);
        }
        self.spares.due = Some(now + NOT_BEFORE);
    }

    /// The sandbox is a copy: what was drawn by chance before is the same in all of them. Python draws once, when it starts; bash is given
    /// its seed with its code.
    pub(super) fn drop_seeded_spares(&mut self) {
        let now = Instant::now();
        self.drop_spares(Some(Language::Python), now);
        self.spares.due = Some(now + COPIED_QUIET);
    }
}

//! Interpreters that wait for an execution.
//!
//! ```text
//!  quiet ──► started, waits ──► taken by an execution ──► its program, as any other
//!   ▲              │ ended, or dropped: memory is short, the sandbox is another one now
//!   └──────────────┘
//! ```
//!
//! The agent makes the pipes, the number and the group of an execution ahead of it and has init start an interpreter with them, which waits
//! for its code ([`crate::init`]). One that is still starting is as good: it has a lead. So the next is started when an execution
//! has ended, and an execution that comes too early loses nothing. Each is used once.

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::{Duration, Instant},
};

use sandboxer_protocol::agent::{ExecSpec, ImageSpares, Language, PerStream, SpareConfig};

use super::{
    Agent,
    executions::{Pipes, in_memory, make_pipes, pipe_bytes},
};
use crate::{
    cgroup::Groups,
    execution::Phase,
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
/// One of a language ended before it was used. The next is tried so much later, and each time twice as late, until one was used.
const AFTER_FAILURE: Duration = Duration::from_secs(1);
const MAX_DOUBLINGS: u32 = 9;
/// So much of the limit of memory for each that waits of both languages: they take an eighth of it at most, and none waits in a sandbox that is smaller.
const MEMORY_FOR_EACH: u64 = 256 * 1024 * 1024;

const LANGUAGES: [Language; 2] = [Language::Bash, Language::Python];

/// One that waits, and the agent's side of what was prepared for its execution.
pub(super) struct Spare {
    pub(super) serial: Serial,
    language: Language,
    pub(super) input: Option<OwnedFd>,
    pub(super) output: PerStream<OwnedFd>,
}

/// What became of the last ones of a language.
#[derive(Default, Clone, Copy)]
struct Luck {
    /// In a row that ended before they were used.
    failures: u32,
    not_before: Option<Instant>,
}

#[derive(Default)]
pub(super) struct Spares {
    waiting: Vec<Spare>,
    /// Those that init is to end, and could not be told yet.
    unwanted: Vec<Serial>,
    /// When to tell init again. None is started before it has heard.
    tell_again: Option<Instant>,
    /// By language.
    luck: [Luck; LANGUAGES.len()],
    /// When to start the next.
    due: Option<Instant>,
    /// Which is wanted first: that of the last execution.
    first: Option<Language>,
    /// Whose they are. None: this may yet become many sandboxes, and what was drawn by chance would be the same in all.
    identity: Option<(String, u64)>,
}

/// What the server wants, as the image wants it, as far as memory allows.
pub(super) fn wanted(config: Option<SpareConfig>, memory: Option<u64>) -> Option<SpareConfig> {
    let config = config?;
    let said = fs::read(ImageSpares::PATH).ok();
    let image = said.and_then(|said| serde_json::from_slice::<ImageSpares>(&said).ok()).filter(|image| image.check().is_ok());
    // What can't be understood was meant for another agent.
    within(image.unwrap_or_default().applied_to(config)?, memory)
}

fn within(config: SpareConfig, memory: Option<u64>) -> Option<SpareConfig> {
    let most = memory.map_or(u32::MAX, |bytes| u32::try_from(bytes / MEMORY_FOR_EACH).unwrap_or(u32::MAX));
    let each = config.each.min(most);
    (each > 0).then_some(SpareConfig { each, ..config })
}

fn index(language: Language) -> usize {
    match language {
        Language::Bash => 0,
        Language::Python => 1,
    }
}

impl Luck {
    fn failed(&mut self, now: Instant) -> Instant {
        let later = now + AFTER_FAILURE * 2u32.pow(self.failures.min(MAX_DOUBLINGS));
        self.failures = self.failures.saturating_add(1);
        self.not_before = Some(later);
        later
    }
}

impl Spares {
    /// The namespace is there, and has nothing to do yet.
    pub(super) fn begin(&mut self, now: Instant) {
        if self.identity.is_some() {
            self.due = Some(now + FIRST_QUIET);
        }
    }

    /// Notes whose they are. Returns whether they were another's.
    fn identify(&mut self, identity: (String, u64), now: Instant) -> bool {
        let before = self.identity.replace(identity);
        if before.is_none() {
            self.begin(now);
        }
        before.is_some_and(|before| self.identity.as_ref() != Some(&before))
    }

    /// An execution has ended.
    pub(super) fn refill(&mut self, now: Instant) {
        // What put it off may still hold.
        if self.identity.is_some() && self.due.is_none_or(|due| due < now + NOT_BEFORE - BETWEEN) {
            self.due = Some(now);
        }
    }

    /// The namespace is gone with all of them.
    pub(super) fn forget(&mut self) {
        self.waiting.clear();
        self.unwanted.clear();
        self.tell_again = None;
        self.due = None;
    }

    /// When there is something to do.
    pub(super) fn due(&self) -> Option<Instant> {
        self.tell_again.or(self.due)
    }

    pub(super) fn has(&self, serial: Serial) -> bool {
        self.waiting.iter().any(|spare| spare.serial == serial)
    }

    /// The processes that wait.
    pub(super) fn processes(&self, groups: Option<&Groups>) -> Vec<i32> {
        groups.filter(|_| !self.waiting.is_empty()).map(Groups::spares).unwrap_or_default()
    }

    /// One of this language, for the execution that comes now.
    pub(super) fn take(&mut self, language: Language, now: Instant) -> Option<Spare> {
        self.first = Some(language);
        let at = self.waiting.iter().position(|spare| spare.language == language)?;
        self.luck[index(language)] = Luck::default();
        Some(self.remove(at, now + RUNNING_FOR))
    }

    /// One leaves, for whatever reason. The next is thought of at this time at the latest: what becomes of the execution that has it, if there
    /// is one, may remind nobody.
    fn remove(&mut self, at: usize, again: Instant) -> Spare {
        self.due_by(again);
        self.waiting.remove(at)
    }

    fn due_by(&mut self, at: Instant) {
        self.due = Some(self.due.map_or(at, |due| due.min(at)));
    }

    /// Which is to be started now, or else when one is.
    fn missing(&self, each: u32, now: Instant) -> Result<Language, Option<Instant>> {
        let mut later = None;
        for language in self.first.into_iter().chain(LANGUAGES) {
            if self.waiting.iter().filter(|spare| spare.language == language).count() >= each as usize {
                continue;
            }
            match self.luck[index(language)].not_before.filter(|at| now < *at) {
                None => return Ok(language),
                Some(at) => later = Some(later.map_or(at, |later: Instant| later.min(at))),
            }
        }
        Err(later)
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
            self.spare_failed(at);
        }
        self.config.spares.as_ref().is_some_and(|config| suit::suits(spec, &config.env))
    }

    /// Starts the next, if it is time to.
    pub(super) fn keep_spares(&mut self, now: Instant) {
        self.tell_unwanted(now);
        if self.spares.due.is_none_or(|due| now < due) || !self.spares.unwanted.is_empty() {
            return;
        }
        self.spares.due = None;
        let Some(config) = &self.config.spares else { return };
        let language = match self.spares.missing(config.each, now) {
            Ok(language) => language,
            Err(later) => return self.spares.due = later,
        };
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
        self.spare_failed(at);
    }

    /// One was of no use to anybody.
    fn spare_failed(&mut self, at: usize) {
        let language = self.spares.waiting[at].language;
        let later = self.spares.luck[index(language)].failed(Instant::now());
        let spare = self.spares.remove(at, later);
        self.drop_spare(spare.serial);
    }

    /// Init is to end it, and to forget what was prepared for it.
    pub(super) fn drop_spare(&mut self, serial: Serial) {
        self.spares.unwanted.push(serial);
        self.tell_unwanted(Instant::now());
    }

    fn tell_unwanted(&mut self, now: Instant) {
        if self.spares.unwanted.is_empty() {
            return;
        }
        // One that is gone has no children any more, nor has one that is not ready yet.
        let init = self.supervisor.ready();
        let busy = |error: io::Error| error.kind() == io::ErrorKind::WouldBlock;
        self.spares
            .unwanted
            .retain(|&serial| init.is_some_and(|init| ipc::send(init.socket.as_fd(), &Request::Drop { serial }, &[]).is_err_and(busy)));
        self.spares.tell_again = (!self.spares.unwanted.is_empty()).then_some(now + BETWEEN);
    }

    /// Ends all of them. Others are started when there is room.
    fn drop_spares(&mut self, until: Instant) {
        self.spares.due = Some(until);
        for spare in std::mem::take(&mut self.spares.waiting) {
            self.drop_spare(spare.serial);
        }
    }

    /// The agent hears who it is. Those that waited in one that this is a copy of have drawn by chance what all its copies have, and know its name.
    pub(super) fn identify_spares(&mut self, hostname: String, generation: u64) {
        let now = Instant::now();
        if self.spares.identify((hostname, generation), now) {
            self.drop_spares(now + COPIED_QUIET);
        }
    }

    /// Memory is short. They end now, and not only when init gets to it. One that init is about to give its code to is left to init, which may just
    /// have done so.
    pub(super) fn give_up_spares(&mut self, now: Instant) {
        if !self.execution.as_ref().is_some_and(|execution| matches!(execution.phase, Phase::Starting { .. })) {
            for pid in self.spares.processes(self.groups.as_ref()) {
                let _ = sys::kill(pid, libc::SIGKILL);
            }
        }
        self.drop_spares(now + NOT_BEFORE);
    }
}

#[cfg(test)]
impl Spares {
    /// One that nobody has started.
    pub(super) fn add(&mut self, serial: Serial, language: Language) {
        let pipe = || nix::unistd::pipe().unwrap().0;
        self.waiting.push(Spare { serial, language, input: None, output: PerStream { stdout: pipe(), stderr: pipe() } });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn spares(waiting: &[Language]) -> Spares {
        let mut spares = Spares::default();
        for (serial, language) in waiting.iter().enumerate() {
            spares.add(serial as u64, *language);
        }
        spares
    }

    #[test]
    fn none_is_started_before_the_sandbox_knows_who_it_is_and_all_are_another_s_when_that_changes() {
        let now = Instant::now();
        let mut spares = Spares::default();
        spares.begin(now);
        spares.refill(now);
        assert_eq!(spares.due(), None);
        assert!(!spares.identify(("sandbox-1".to_owned(), 0), now));
        assert_eq!(spares.due(), Some(now + FIRST_QUIET));
        // After a restart of the server, or a restore of the same one.
        assert!(!spares.identify(("sandbox-1".to_owned(), 0), now));
        assert!(spares.identify(("sandbox-1".to_owned(), 1), now));
        assert!(spares.identify(("sandbox-2".to_owned(), 1), now));
    }

    #[test]
    fn that_of_the_last_execution_comes_first_and_none_twice() {
        let now = Instant::now();
        let mut spares = spares(&[Language::Bash]);
        assert_eq!(spares.missing(1, now), Ok(Language::Python));
        assert_eq!(spares.take(Language::Bash, now).map(|spare| spare.serial), Some(0));
        assert!(spares.take(Language::Bash, now).is_none());
        assert_eq!(spares.missing(1, now), Ok(Language::Bash));
        assert_eq!(super::tests::spares(&LANGUAGES).missing(1, now), Err(None));
    }

    #[test]
    fn the_next_is_thought_of_though_nobody_tells_what_became_of_one_that_was_taken() {
        let now = Instant::now();
        let mut spares = spares(&LANGUAGES);
        assert_eq!(spares.due(), None);
        spares.take(Language::Python, now).unwrap();
        assert_eq!(spares.due(), Some(now + RUNNING_FOR));
        // The execution has ended, or could not be started.
        spares.identify(("sandbox-1".to_owned(), 0), now);
        spares.refill(now);
        assert_eq!(spares.due(), Some(now));
    }

    #[test]
    fn a_small_sandbox_keeps_none_and_a_larger_one_not_more_than_it_has_room_for() {
        let config = |each| SpareConfig { each, env: Default::default(), warm_modules: Vec::new() };
        for (memory, asked, kept) in [
            (Some(64 << 20), 1, 0),
            (Some(255 << 20), 1, 0),
            (Some(256 << 20), 1, 1),
            (Some(256 << 20), 4, 1),
            (Some(1 << 30), 8, 4),
            (Some(u64::MAX), 8, 8),
            (None, 8, 8),
        ] {
            assert_eq!(within(config(asked), memory).map_or(0, |config| config.each), kept, "{memory:?}");
        }
    }

    #[test]
    fn a_language_that_fails_waits_longer_each_time_and_the_other_does_not() {
        let now = Instant::now();
        let mut spares = spares(&[]);
        assert_eq!(spares.luck[index(Language::Bash)].failed(now), now + SECOND);
        assert_eq!(spares.luck[index(Language::Bash)].failed(now), now + 2 * SECOND);
        assert_eq!(spares.missing(1, now), Ok(Language::Python));
        spares.luck[index(Language::Python)].failed(now);
        assert_eq!(spares.missing(1, now), Err(Some(now + SECOND)));
        assert_eq!(spares.missing(1, now + 2 * SECOND), Ok(Language::Bash));
        for _ in 0..100 {
            spares.luck[index(Language::Bash)].failed(now);
        }
        assert_eq!(spares.luck[index(Language::Bash)].not_before, Some(now + AFTER_FAILURE * 512));
    }
}

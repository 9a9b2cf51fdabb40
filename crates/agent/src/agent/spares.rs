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
//! has ended and none has followed at once. Each is used once.

use std::{
    collections::BTreeMap,
    fs, io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::{Duration, Instant},
};

use nix::sys::epoll::EpollFlags;
use sandboxer_protocol::agent::{ExecSpec, ImageSpares, Language, PerStream, SpareConfig, Stream};

use super::{
    Agent,
    executions::{Pipes, Waiting, in_memory, make_pipes},
    token, watch,
};
use crate::{
    cgroup::Groups,
    ipc::{self, Request, Serial},
    sys,
};

mod hand;
mod suit;

pub(super) use hand::Handed;
use hand::{Directory, Loaded, Script, Untouched};

/// A new sandbox has been quiet for so long: whoever made it has no program for it yet.
const FIRST_QUIET: Duration = Duration::from_millis(100);
/// One after the other, since each takes a core for a while.
const BETWEEN: Duration = Duration::from_millis(50);
/// A copy may be one of many, which all begin at the same time.
const COPIED_QUIET: Duration = Duration::from_secs(1);
/// Nothing has followed an execution for so long. Whoever runs one program after the other asks sooner, and has nothing of an interpreter that starts meanwhile: a start
/// takes what processors there are.
const QUIET: Duration = Duration::from_millis(5);
/// A program that runs for so long does not notice.
const RUNNING_FOR: Duration = Duration::from_secs(2);
/// Memory is short, or something went wrong: not before.
const NOT_BEFORE: Duration = Duration::from_secs(5);
/// One of a language ended before it was used. The next is tried so much later, and each time twice as late, until one was used.
const AFTER_FAILURE: Duration = Duration::from_secs(1);
const MAX_DOUBLINGS: u32 = 9;
/// With this one ends that can't wait (`spare/hook.sh`, `spare/sitecustomize.py`). With any other ends only what does not wait.
const CAN_NOT_WAIT: i32 = 3;
/// So much of the limit of memory for each that waits of both languages: they take an eighth of it at most, and none waits in a sandbox that is smaller.
const MEMORY_FOR_EACH: u64 = 256 * 1024 * 1024;

const LANGUAGES: [Language; 2] = [Language::Bash, Language::Python];
/// Where programs work that don't say where.
const HOME: &str = "/root";

/// One that waits, and all that was prepared for its execution.
pub(super) struct Spare {
    serial: Serial,
    language: Language,
    env: BTreeMap<String, String>,
    cwd: String,
    /// What was there when it was started.
    directory: Option<Directory>,
    input: Option<OwnedFd>,
    output: PerStream<OwnedFd>,
    /// The interpreter's ends of these, for a program that has to be started after all.
    theirs: [OwnedFd; 3],
    /// Nothing that a start of Python depends on had ever been changed when it was started.
    untouched: Option<Untouched>,
    /// Of a bash: what it was made of.
    loaded: Option<Loaded>,
    /// The file for its code and its process id, once init has started it.
    started: Option<(Script, i32)>,
}

/// What executions of a language are like, so that the next can be waited for.
#[derive(Clone)]
struct Like {
    env: BTreeMap<String, String>,
    cwd: String,
}

/// Whether one waits for an execution.
pub(super) enum Found {
    Ready(Box<Spare>),
    /// It is being started, and that has a lead.
    Starting,
    None,
}

/// What became of the last ones of a language.
#[derive(Default, Clone, Copy)]
struct Luck {
    /// In a row that ended before they were used.
    failures: u32,
    not_before: Option<Instant>,
    /// What is started as an interpreter of it does not wait: no more of them in this namespace.
    stopped: bool,
}

#[derive(Default)]
pub(super) struct Spares {
    waiting: Vec<Spare>,
    /// So many are allowed beside the processes of the user.
    allowed: u32,
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
    /// The last execution of each language that one could have waited for.
    like: [Option<Like>; LANGUAGES.len()],
    /// Where the places of executions are.
    places: Option<OwnedFd>,
    /// Whose code is in its place: the last execution's.
    ran: Option<(Serial, Language)>,
    /// The code of those before, which is to go.
    code_left: Vec<(Serial, Language)>,
    /// When what is left to do is done; none: at once.
    pub(super) tidy_at: Option<Instant>,
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

/// The environment of an execution that others may see: without what is its own alone, which is as it was before anybody asked for it.
fn shared<'a>(spec: &'a ExecSpec, config: &'a SpareConfig) -> impl Iterator<Item = (&'a String, &'a String)> {
    let own = |name: &String| spec.only_here.contains(name);
    spec.env.iter().filter_map(move |(name, value)| if own(name) { config.env.get_key_value(name) } else { Some((name, value)) })
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

    /// An execution is asked for. None is started beside it, unless it runs for long.
    pub(super) fn asked(&mut self, now: Instant) {
        self.due = self.due.map(|due| due.max(now + RUNNING_FOR));
    }

    /// An execution has ended.
    pub(super) fn refill(&mut self, now: Instant) {
        // What put it off may still hold.
        if self.identity.is_some() && self.due.is_none_or(|due| due < now + NOT_BEFORE - BETWEEN) {
            self.due = Some(now + QUIET);
        }
    }

    /// The namespace is gone with all of them.
    pub(super) fn forget(&mut self) {
        self.waiting.clear();
        self.places = None;
        self.unwanted.clear();
        self.tell_again = None;
        self.due = None;
        self.luck = Default::default();
        self.ran = None;
        self.code_left.clear();
        self.tidy_at = None;
    }

    fn count(&self) -> u32 {
        u32::try_from(self.waiting.len()).unwrap_or(u32::MAX)
    }

    /// When there is something to do.
    pub(super) fn due(&self) -> Option<Instant> {
        self.tell_again.or(self.due)
    }

    pub(super) fn has(&self, serial: Serial) -> bool {
        self.waiting.iter().any(|spare| spare.serial == serial)
    }

    /// The processes that wait: those that were started, and not what one of them may have been made to start.
    pub(super) fn processes(&self, groups: Option<&Groups>) -> Vec<i32> {
        let of = |spare: &Spare| match spare.started {
            Some((_, pid)) => Some(pid),
            None => groups.and_then(|groups| groups.members(spare.serial).into_iter().min()),
        };
        self.waiting.iter().filter_map(of).collect()
    }

    /// One for the execution that comes now.
    pub(super) fn take(&mut self, waiting: &Waiting, now: Instant) -> Found {
        let language = waiting.spec.language;
        self.first = Some(language);
        let suits = |spare: &&Spare| spare.language == language && suit::suits(&waiting.spec, &waiting.code, &spare.env);
        let at = self.waiting.iter().position(|spare| suits(&spare) && spare.started.is_some());
        let Some(at) = at else {
            return if self.waiting.iter().any(|spare| suits(&spare)) { Found::Starting } else { Found::None };
        };
        Found::Ready(Box::new(self.remove(at, now + RUNNING_FOR)))
    }

    /// It is as it was, and waits for another.
    fn put_back(&mut self, spare: Spare) {
        self.waiting.push(spare);
    }

    /// The code of an execution comes to its place, and that of the one before is to go. Init does that too when it starts a
    /// program, or can't.
    pub(super) fn code_comes(&mut self, serial: Serial, language: Language) {
        self.code_left.extend(self.ran.replace((serial, language)));
    }

    /// One was of use.
    fn was_good(&mut self, language: Language) {
        let luck = &mut self.luck[index(language)];
        *luck = Luck { stopped: luck.stopped, ..Luck::default() };
    }

    /// One was of no use to anybody. Returns when the next is tried.
    fn failed(&mut self, language: Language, now: Instant) -> Instant {
        self.luck[index(language)].failed(now)
    }

    fn stop(&mut self, language: Language) {
        self.luck[index(language)].stopped = true;
    }

    /// One ended before it was used, by itself with this code. Returns when the next is tried.
    fn ended_unused(&mut self, language: Language, code: Option<i32>, now: Instant) -> Instant {
        if code.is_some_and(|code| code != CAN_NOT_WAIT) {
            self.stop(language);
        }
        self.failed(language, now)
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
    pub(super) fn missing(&self, each: u32, now: Instant) -> Result<Language, Option<Instant>> {
        let mut later = None;
        for language in self.first.into_iter().chain(LANGUAGES) {
            if self.luck[index(language)].stopped || self.waiting.iter().filter(|spare| spare.language == language).count() >= each as usize
            {
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
    /// Whether an interpreter that waits may run it as one started for it would. The next ones are started as it wants them.
    pub(super) fn may_wait(&mut self, waiting: &Waiting) -> bool {
        let Some(config) = &self.config.spares else { return false };
        let spec = &waiting.spec;
        let may = suit::suits(spec, &waiting.code, &config.env);
        if may {
            let like = &mut self.spares.like[index(spec.language)];
            // Mostly it is like the one before.
            if like.as_ref().is_none_or(|like| !like.env.iter().eq(shared(spec, config)) || like.cwd != spec.cwd) {
                let env = shared(spec, config).map(|(name, value)| (name.clone(), value.clone())).collect();
                *like = Some(Like { env, cwd: spec.cwd.clone() });
            }
        }
        may
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
                if self.spares.places.is_none() {
                    self.spares.places = self.transfers.root.as_ref().and_then(|root| hand::places(root.as_fd()));
                }
                self.spares.waiting.push(spare);
                self.spares.allowed = self.spares.count();
                self.spares.due = Some(now + BETWEEN);
            }
            Ok(None) => {}
            Err(_) => {
                self.spares.due = Some(now + NOT_BEFORE);
                // It may have been allowed already.
                self.spares.allowed = u32::MAX;
            }
        }
    }

    /// None where it can't be done: without groups nobody could tell them from the user's processes.
    fn start_spare(&self, serial: Serial, language: Language, config: &SpareConfig) -> io::Result<Option<Spare>> {
        let (Some(init), Some(groups), Some(root)) = (self.supervisor.ready(), &self.groups, &self.transfers.root) else { return Ok(None) };
        let Like { env, cwd } =
            self.spares.like[index(language)].clone().unwrap_or_else(|| Like { env: config.env.clone(), cwd: HOME.to_owned() });
        // Before it is there: what takes its place afterwards is another one.
        let directory = hand::is_plain(&cwd).then(|| hand::directory(root.as_fd(), &cwd)).flatten();
        let cwd = directory.map_or_else(|| "/".to_owned(), |_| cwd);
        let untouched = Untouched::look();
        let loaded = (language == Language::Bash).then(|| Loaded::look(root.as_fd()));
        groups.allow(self.spares.count() + 1)?;
        let group = groups.create(serial)?;
        let Pipes { input, output, theirs } = make_pipes(true, sys::pipe_bytes(self.config.output_window_bytes))?;
        for (stream, source) in [(Stream::Stdout, &output.stdout), (Stream::Stderr, &output.stderr)] {
            watch(&self.epoll, source.as_fd(), token::of_output(serial, stream), EpollFlags::EPOLLIN)?;
        }
        let about = ipc::Waiting { language, env: env.clone(), cwd: cwd.clone(), warm_modules: config.warm_modules.clone() };
        let (file, head) = in_memory(&about, &[])?;
        let mut descriptors = vec![file.as_raw_fd(), group.as_raw_fd()];
        descriptors.extend(theirs.iter().map(AsRawFd::as_raw_fd));
        let current = self.execution.as_ref().map_or(0, |execution| execution.serial);
        ipc::send(init.socket.as_fd(), &Request::Spare { serial, head, current }, &descriptors)?;
        Ok(Some(Spare { serial, language, env, cwd, directory, input, output, theirs, untouched, loaded, started: None }))
    }

    /// What waits is allowed beside the processes of the user, and no more.
    fn allow_spares(&mut self) {
        let count = self.spares.count();
        if self.spares.allowed != count
            && let Some(groups) = &self.groups
        {
            self.spares.allowed = count;
            // Otherwise they may be a few more.
            let _ = groups.allow(count);
        }
    }

    /// Init has started one.
    pub(super) fn spare_waits(&mut self, serial: Serial, script: Option<OwnedFd>) {
        let Some(at) = self.spares.waiting.iter().position(|spare| spare.serial == serial) else { return };
        let pid = self.groups.as_ref().and_then(|groups| groups.members(serial).into_iter().min());
        match script.and_then(Script::new).zip(pid) {
            Some(started) => self.spares.waiting[at].started = Some(started),
            None => self.spare_failed(at, None),
        }
        // An execution may wait for it.
        self.ask_init();
    }

    /// One is of no use: it could not be started, or something was written in its name.
    pub(super) fn spare_spoilt(&mut self, serial: Serial) {
        self.spare_ended(serial, None);
    }

    /// One has ended, by itself with this code, or is to.
    pub(super) fn spare_ended(&mut self, serial: Serial, code: Option<i32>) {
        if let Some(at) = self.spares.waiting.iter().position(|spare| spare.serial == serial) {
            self.spare_failed(at, code);
            // An execution may wait for it.
            self.ask_init();
        }
    }

    /// One was of no use to anybody.
    fn spare_failed(&mut self, at: usize, code: Option<i32>) {
        let language = self.spares.waiting[at].language;
        let later = self.spares.ended_unused(language, code, Instant::now());
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
        // An execution may wait for one that was being started.
        self.ask_init();
    }

    /// The agent hears who it is. Those that waited in one that this is a copy of have drawn by chance what all its copies have, and know its name.
    pub(super) fn identify_spares(&mut self, hostname: String, generation: u64) {
        let now = Instant::now();
        if self.spares.identify((hostname, generation), now) {
            self.drop_spares(now + COPIED_QUIET);
        }
    }

    /// Memory is short. They end now, and not only when init gets to it.
    pub(super) fn give_up_spares(&mut self, now: Instant) {
        for pid in self.spares.processes(self.groups.as_ref()) {
            let _ = sys::kill(pid, libc::SIGKILL);
        }
        self.drop_spares(now + NOT_BEFORE);
    }
}

#[cfg(test)]
impl Spares {
    /// One that nobody has started, with a file for its code if it is said to wait.
    pub(super) fn add(&mut self, serial: Serial, language: Language, file: Option<OwnedFd>) {
        let Pipes { input, output, theirs } = make_pipes(true, sys::MIN_PIPE_BYTES).unwrap();
        let started = file.map(|file| (Script::new(file).unwrap(), i32::MAX));
        let (env, cwd) = (BTreeMap::new(), "/".to_owned());
        self.waiting.push(Spare {
            serial,
            language,
            env,
            cwd,
            directory: None,
            input,
            output,
            theirs,
            untouched: None,
            loaded: None,
            started,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    const SECOND: Duration = Duration::from_secs(1);

    fn spares(waiting: &[Language]) -> Spares {
        let mut spares = Spares::default();
        for (serial, language) in waiting.iter().enumerate() {
            spares.add(serial as u64, *language, Some(tempfile::tempfile().unwrap().into()));
        }
        spares
    }

    fn program(language: Language) -> Waiting {
        let spec = sample::program(language);
        Waiting { spec, code: Default::default(), theirs: None }
    }

    fn taken(spares: &mut Spares, language: Language, now: Instant) -> Option<Serial> {
        match spares.take(&program(language), now) {
            Found::Ready(spare) => Some(spare.serial),
            Found::Starting | Found::None => None,
        }
    }

    #[test]
    fn what_is_one_execution_s_alone_is_not_what_the_next_interpreter_starts_with() {
        let env = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        let mut spec = program(Language::Bash).spec;
        spec.env = env(&[("HOME", "/secret"), ("OF_THE_SANDBOX", "1"), ("TOKEN", "secret"), ("USER", "root")]);
        spec.only_here = ["HOME", "TOKEN"].map(str::to_owned).into();
        let config = SpareConfig { each: 1, env: env(&[("HOME", "/root"), ("USER", "root")]), warm_modules: Vec::new() };
        let shared: BTreeMap<String, String> = shared(&spec, &config).map(|(name, value)| (name.clone(), value.clone())).collect();
        assert_eq!(shared, env(&[("HOME", "/root"), ("OF_THE_SANDBOX", "1"), ("USER", "root")]));
    }

    #[test]
    fn one_that_is_being_started_is_waited_for_and_one_that_waits_comes_first() {
        let now = Instant::now();
        let mut spares = Spares::default();
        spares.add(0, Language::Bash, None);
        assert!(matches!(spares.take(&program(Language::Bash), now), Found::Starting));
        assert!(matches!(spares.take(&program(Language::Python), now), Found::None));
        spares.add(1, Language::Bash, Some(tempfile::tempfile().unwrap().into()));
        assert_eq!(taken(&mut spares, Language::Bash, now), Some(1));
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
        assert_eq!(taken(&mut spares, Language::Bash, now), Some(0));
        assert_eq!(taken(&mut spares, Language::Bash, now), None);
        assert_eq!(spares.missing(1, now), Ok(Language::Bash));
        assert_eq!(super::tests::spares(&LANGUAGES).missing(1, now), Err(None));
    }

    #[test]
    fn the_next_is_thought_of_though_nobody_tells_what_became_of_one_that_was_taken() {
        let now = Instant::now();
        let mut spares = spares(&LANGUAGES);
        assert_eq!(spares.due(), None);
        taken(&mut spares, Language::Python, now).unwrap();
        assert_eq!(spares.due(), Some(now + RUNNING_FOR));
        // The execution has ended, or could not be started.
        spares.identify(("sandbox-1".to_owned(), 0), now);
        spares.refill(now);
        assert_eq!(spares.due(), Some(now + QUIET));
    }

    #[test]
    fn none_is_started_for_whoever_runs_one_program_after_the_other_until_it_is_quiet() {
        let mut now = Instant::now();
        let mut spares = spares(&LANGUAGES);
        spares.identify(("sandbox-1".to_owned(), 0), now);
        for language in [Some(Language::Bash), None, Some(Language::Python), None] {
            spares.asked(now);
            // One that waits is used.
            if let Some(language) = language {
                taken(&mut spares, language, now).unwrap();
            }
            assert!(spares.due().is_none_or(|due| due >= now + RUNNING_FOR - QUIET), "nothing is started beside it");
            now += QUIET * 3;
            spares.refill(now);
            assert_eq!(spares.due(), Some(now + QUIET));
            now += QUIET / 2;
        }
    }

    #[test]
    fn the_code_of_every_execution_before_goes_whatever_became_of_it() {
        let mut spares = spares(&[]);
        for serial in 1..=3 {
            spares.code_comes(serial, Language::Bash);
        }
        assert_eq!(spares.code_left, [(1, Language::Bash), (2, Language::Bash)]);
        assert_eq!(spares.ran, Some((3, Language::Bash)));
    }

    #[test]
    fn a_language_whose_interpreters_do_not_wait_has_none_until_the_namespace_is_new() {
        let now = Instant::now();
        let mut spares = spares(&[Language::Python]);
        // It says so itself, or was killed.
        for code in [Some(CAN_NOT_WAIT), None] {
            spares.ended_unused(Language::Bash, code, now);
            assert_eq!(spares.missing(1, now + 10 * SECOND), Ok(Language::Bash));
        }
        spares.ended_unused(Language::Bash, Some(0), now);
        assert_eq!(spares.missing(1, now + 3600 * SECOND), Err(None));
        // One of them may have read what was its input for a word.
        spares.was_good(Language::Bash);
        assert_eq!(spares.missing(1, now), Err(None));
        spares.forget();
        assert_eq!(spares.missing(1, now), Ok(Language::Bash));
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

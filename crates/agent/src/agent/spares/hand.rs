//! Giving an interpreter that waits its code.
//!
//! Everything that takes long was done when it was started: what is left is to write the code into its file, and to say the word, on its
//! standard input. Nobody else wakes up for it.
//!
//! The word is the execution. Either the interpreter takes it, and then it runs the code; or it ends, or is ended, with the word untaken, and
//! then it never did and the program is started afresh, on the same pipes. So one that was killed or stopped costs its execution neither
//! more nor less than a start. One that does not wait for the word (the guest has put another in its place, which knows no hook) may run the code
//! without it: it has read the code then, or printed something, and the program is not started again.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fmt::Write as _,
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::Path,
    time::{Duration, Instant},
};

use nix::{
    fcntl::AtFlags,
    sys::stat::{FileStat, SFlag, fstat, fstatat, stat},
    unistd::{UnlinkatFlags, unlinkat},
};
use sandboxer_agent::guest;
use sandboxer_protocol::agent::{ExecSpec, GuestPath, Language, Raw};

use super::{super::executions::Waiting, Agent, Spare, Spares};
use crate::{
    execution::{Execution, Phase},
    init,
    ipc::{Program, Serial},
    setup::UPPER,
    sys,
};

/// What a word may be long, so that it always fits into its pipe.
const MAX_WORD_BYTES: usize = 8 * 1024;
/// Nothing differs from what it was started with.
const NOTHING_ELSE: &[u8] = b"\n";
/// Nothing differs, but a Python has to see for itself whether all that its start depends on is as it was.
const SEE_FOR_YOURSELF: &[u8] = b"0\n";
/// Where that is, in the layer of what was changed.
const START_DEPENDS_ON: [&str; 6] = ["usr", "etc", "bin", "sbin", "lib", "lib64"];
/// Where a program's bash is looked for, in this order, and what is loaded with it.
const BASH_DEPENDS_ON: [&str; 8] = [
    "usr/local/sbin/bash",
    "usr/local/bin/bash",
    "usr/sbin/bash",
    "usr/bin/bash",
    "sbin/bash",
    "bin/bash",
    "etc/ld.so.preload",
    "etc/ld.so.cache",
];
/// Signals that stop a process until it is told to go on.
const STOPPING: [i32; 4] = [libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];
/// Signals that neither end nor stop a process that does nothing about them.
const HARMLESS: [i32; 4] = [libc::SIGCONT, libc::SIGWINCH, libc::SIGCHLD, libc::SIGURG];
/// When what is not urgent is done about one that was given its program: a short one has ended by then, and its client has heard so.
const TIDIED_AFTER: Duration = Duration::from_millis(5);
/// One that has not begun with its code after this is looked at: it may be stopped.
const LOOK_AFTER: Duration = Duration::from_millis(250);
/// How long one may take to begin with its code: on a loaded machine longer than anybody would expect.
const CLAIM_WITHIN: Duration = Duration::from_secs(5);

/// What a file or a directory is, whatever it is called.
type Identity = (libc::dev_t, libc::ino_t);

fn identity(found: &FileStat) -> Identity {
    (found.st_dev, found.st_ino)
}

fn is(found: &FileStat, kind: SFlag) -> bool {
    SFlag::from_bits_truncate(found.st_mode & SFlag::S_IFMT.bits()) == kind
}

/// Whether a path is what the kernel calls the directory that it leads to, if no link is on the way.
pub(super) fn is_plain(path: &str) -> bool {
    path == "/" || path.strip_prefix('/').is_some_and(|path| path.split('/').all(|name| !matches!(name, "" | "." | "..")))
}

/// When a file or a directory was last changed. Programs set the one time as they like, unpacking does, and nobody the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Changed([(libc::time_t, i64); 2]);

impl Changed {
    fn of(found: &FileStat) -> Self {
        Self([(found.st_mtime, found.st_mtime_nsec), (found.st_ctime, found.st_ctime_nsec)])
    }
}

/// A directory, and when something in it was last made or removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Directory {
    identity: Identity,
    changed: Changed,
}

impl Directory {
    fn of(found: &FileStat) -> Self {
        Self { identity: identity(found), changed: Changed::of(found) }
    }
}

/// The directory above what a path of the guest's leads to, and its name there, or the root. None if it can't be had, or a link is on the way: links mean
/// something else out here.
fn above<'a>(root: BorrowedFd<'_>, path: &'a str) -> Option<(Option<OwnedFd>, Option<&'a str>)> {
    let mut names = path.strip_prefix('/')?.split('/').filter(|name| !name.is_empty() && *name != ".").peekable();
    let mut above: Option<OwnedFd> = None;
    while let Some(name) = names.next() {
        if name == ".." {
            return None;
        }
        if names.peek().is_none() {
            return Some((above, Some(name)));
        }
        above = Some(open_directory(above.as_ref().map_or(root, AsFd::as_fd), name)?);
    }
    Some((None, None))
}

fn open_directory(above: BorrowedFd<'_>, name: &str) -> Option<OwnedFd> {
    guest::open_directory(above, OsStr::new(name)).ok()
}

/// The directory that a path of the guest's leads to, without a link.
pub(super) fn directory(root: BorrowedFd<'_>, path: &str) -> Option<Directory> {
    let found = match above(root, path)? {
        (above, Some(name)) => fstatat(above.as_ref().map_or(root, AsFd::as_fd), name, AtFlags::AT_SYMLINK_NOFOLLOW).ok()?,
        (_, None) => fstat(root).ok()?,
    };
    is(&found, SFlag::S_IFDIR).then(|| Directory::of(&found))
}

/// Where the places of executions are, below the guest's root as it is now.
pub(super) fn places(root: BorrowedFd<'_>) -> Option<OwnedFd> {
    let any = init::script(0, Language::Bash);
    let place = any.parent()?;
    above(root, place.to_str()?)?.0
}

/// Removes the code of an execution, and its place if nothing else is there. What is left of it init removes at the next start.
fn remove_code(places: BorrowedFd<'_>, serial: Serial, language: Language) -> Option<()> {
    let script = init::script(serial, language);
    let name = script.parent()?.file_name()?.to_str()?;
    let place = open_directory(places, name)?;
    unlinkat(&place, script.file_name()?, UnlinkatFlags::NoRemoveDir).ok()?;
    unlinkat(places, name, UnlinkatFlags::RemoveDir).ok()
}

type Files = [Option<(Identity, Changed)>; BASH_DEPENDS_ON.len()];

/// The files that a bash which is started now would be made of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Loaded {
    files: Files,
    /// By way of links, which may lead anywhere.
    linked: bool,
}

impl Loaded {
    pub(super) fn look(root: BorrowedFd<'_>) -> Self {
        let mut linked = false;
        let files = files(|path| {
            linked |= leads_through_link(root, path);
            plain(root, path)
        });
        Self { files: if linked { files_behind_links(root) } else { files }, linked }
    }

    /// Whether one that is started now would be made of the same. `untouched`: nothing below [`START_DEPENDS_ON`] was ever changed.
    fn still(&self, root: BorrowedFd<'_>, untouched: impl FnOnce() -> bool) -> bool {
        if self.linked {
            return files_behind_links(root) == self.files;
        }
        untouched() || files(|path| plain(root, path)) == self.files
    }
}

/// Without those that nobody looks at behind the bash that is there.
fn files(mut find: impl FnMut(&str) -> Option<FileStat>) -> Files {
    let mut there = false;
    BASH_DEPENDS_ON.map(|path| {
        let bash = path.ends_with("/bash");
        let found = if bash && there { None } else { find(path) }?;
        there |= bash && is(&found, SFlag::S_IFREG) && found.st_mode & 0o111 != 0;
        Some((identity(&found), Changed::of(&found)))
    })
}

fn files_behind_links(root: BorrowedFd<'_>) -> Files {
    files(|path| guest::stat(root, &GuestPath::try_from(Raw::new(format!("/{path}"))).ok()?))
}

fn plain(root: BorrowedFd<'_>, path: &str) -> Option<FileStat> {
    fstatat(root, path, AtFlags::AT_SYMLINK_NOFOLLOW).ok()
}

fn leads_through_link(root: BorrowedFd<'_>, path: &str) -> bool {
    let ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]);
    ends.map_while(|end| plain(root, &path[..end])).any(|found| is(&found, SFlag::S_IFLNK))
}

/// The file that the code of one that waits goes into.
pub(super) struct Script {
    file: File,
    identity: Identity,
}

impl Script {
    /// None: it is something else, in which case writing to it might take for ever.
    pub(super) fn new(file: OwnedFd) -> Option<Self> {
        let found = fstat(&file).ok().filter(|found| is(found, SFlag::S_IFREG))?;
        Some(Self { file: file.into(), identity: identity(&found) })
    }

    /// Whether it is still where the interpreter will look for it, as init left it.
    fn is_there(&self, root: BorrowedFd<'_>, path: &Path) -> bool {
        let Ok(path) = path.strip_prefix("/") else { return false };
        fstatat(root, path, AtFlags::AT_SYMLINK_NOFOLLOW)
            .is_ok_and(|found| identity(&found) == self.identity && found.st_size == 1 && found.st_nlink == 1)
    }

    /// Whether it was read since the code was put there, or that can't be told. Whoever runs the code reads it.
    fn was_read(&self) -> bool {
        let unread = |found: FileStat| (found.st_atime, found.st_atime_nsec) <= (found.st_mtime, found.st_mtime_nsec);
        !fstat(&self.file).is_ok_and(unread)
    }
}

/// A program that was handed over, and may yet have to be started otherwise.
pub(in crate::agent) struct Handed {
    serial: Serial,
    pid: i32,
    /// Of the word.
    length: usize,
    waiting: Waiting,
    theirs: [OwnedFd; 3],
    /// Not closed before the program has had its time.
    script: Option<Script>,
    /// When it is looked at.
    pub(in crate::agent) look: Instant,
    given_up_at: Instant,
    /// Somebody else than the guest had it signalled: if it ends of that, it has ended.
    pub(in crate::agent) signalled: bool,
    /// They had it stopped, and may let it go on.
    paused: bool,
    /// It took too long and was stopped.
    halted: bool,
}

/// What became of a word.
enum Word {
    Taken,
    /// Nobody took it, and yet the code was read: by an interpreter that does not wait.
    Ignored,
    Untaken,
}

impl Handed {
    /// Somebody else than the guest sends it a signal.
    pub(in crate::agent) fn signal(&mut self, signal: i32) {
        self.signalled |= !HARMLESS.contains(&signal);
        self.paused = STOPPING.contains(&signal) || (self.paused && signal != libc::SIGCONT);
    }

    fn word(&self, fed: usize) -> Word {
        if !self.is_whole(fed) {
            Word::Taken
        } else if self.script.as_ref().is_none_or(Script::was_read) {
            Word::Ignored
        } else {
            Word::Untaken
        }
    }

    /// The signal for one that has not begun yet, if there is no more waiting for it.
    fn end_of_patience(&mut self, pace: &Pace, now: Instant) -> Option<i32> {
        match pace {
            // It stands still, so that it can't begin between this look and its end.
            _ if self.halted => Some(libc::SIGKILL),
            Pace::Held => {
                self.given_up_at = now + CLAIM_WITHIN;
                None
            }
            Pace::Slow | Pace::Stopped if self.paused => None,
            Pace::Slow if now < self.given_up_at => None,
            Pace::Slow => {
                self.halted = true;
                Some(libc::SIGSTOP)
            }
            Pace::Stopped => Some(libc::SIGKILL),
        }
    }

    /// Whether nobody has taken any of the word. Behind it there may be input already.
    fn is_whole(&self, fed: usize) -> bool {
        sys::bytes_waiting(self.theirs[0].as_fd()).is_ok_and(|bytes| bytes == self.length + fed)
    }

    /// Takes the word back from one that has ended. What is behind it is left for the program.
    fn take_back(&self) -> bool {
        let pipe = self.theirs[0].as_fd();
        let mut word = vec![0; self.length];
        // The guest may be reading there too.
        let taken = sys::set_nonblocking(pipe, true).and_then(|()| Ok(nix::unistd::read(pipe, &mut word)?));
        sys::set_nonblocking(pipe, false).is_ok() && taken.is_ok_and(|count| count == self.length)
    }
}

/// Why one that waits was not told of its program.
enum Unsaid {
    /// It is of no use any more.
    Spoilt,
    /// It is the program that has to be started: it asks for what can't be told. The next may not.
    NotThisOne,
}

impl Agent {
    /// Gives a program to one that waits, or gives it back: then it has to be started.
    pub(in crate::agent) fn hand_over(&mut self, spare: Spare, waiting: Waiting) -> Option<Waiting> {
        let told = self.tell(&spare, &waiting);
        let (pid, length, execution) = match (told, &mut self.execution) {
            (Ok((pid, length)), Some(execution)) => (pid, length, execution),
            (Err(Unsaid::NotThisOne), _) => {
                self.spares.put_back(spare);
                return Some(waiting);
            }
            (Err(Unsaid::Spoilt) | Ok(_), _) => {
                self.spares.failed(spare.language, Instant::now());
                self.drop_spare(spare.serial);
                return Some(waiting);
            }
        };
        let Spare { serial, language, input, output, theirs, started, .. } = spare;
        self.spares.code_comes(serial, language);
        let now = Instant::now();
        self.spares.tidy_at = Some(now + TIDIED_AFTER);
        execution.serial = serial;
        execution.began = now;
        execution.phase = Phase::Running;
        execution.sink = input.filter(|_| execution.has_input).map(File::from);
        // They are watched already: what is written makes an edge.
        execution.output.stdout.source = Some(output.stdout.into());
        execution.output.stderr.source = Some(output.stderr.into());
        self.handed = Some(Handed {
            serial,
            pid,
            length,
            waiting,
            theirs,
            script: started.map(|(script, _)| script),
            look: now + LOOK_AFTER,
            given_up_at: now + CLAIM_WITHIN,
            signalled: false,
            paused: false,
            halted: false,
        });
        self.announce(true);
        None
    }

    /// Returns its process id and how long the word was.
    fn tell(&self, spare: &Spare, Waiting { spec, code, .. }: &Waiting) -> Result<(i32, usize), Unsaid> {
        let root = self.transfers.root.as_ref().ok_or(Unsaid::Spoilt)?.as_fd();
        let (script, pid) = spare.started.as_ref().ok_or(Unsaid::Spoilt)?;
        if !script.is_there(root, &init::script(spare.serial, spare.language)) {
            return Err(Unsaid::Spoilt);
        }
        let found = directory(root, &spec.cwd).ok_or(Unsaid::NotThisOne)?;
        if spare.loaded.is_some_and(|loaded| !loaded.still(root, || spare.untouched.is_some_and(Untouched::still))) {
            return Err(Unsaid::Spoilt);
        }
        let there = spare.directory.is_some_and(|was| was.identity == found.identity) && spec.cwd == spare.cwd;
        let untouched = || spare.directory == Some(found) && spare.untouched.is_some_and(Untouched::still);
        let word = word(spec, &spare.env, there, untouched).ok_or(Unsaid::NotThisOne)?;
        // What init has put there is one byte.
        let written = if code.is_empty() { script.file.set_len(0) } else { script.file.write_all_at(code, 0) };
        written.map_err(|_| Unsaid::Spoilt)?;
        // All of it or nothing. Of a part nothing comes: whoever reads it waits for the rest.
        let said = spare.input.as_ref().and_then(|input| nix::unistd::write(input, &word).ok());
        said.filter(|said| *said == word.len()).map(|said| (*pid, said)).ok_or(Unsaid::Spoilt)
    }

    /// What is left to do when one that waited has been given its program, once that is in nobody's way.
    pub(in crate::agent) fn tidy(&mut self, now: Instant) {
        let announced = self.execution.as_ref().is_none_or(|execution| execution.announcement.is_none());
        if announced && self.spares.tidy_at.is_none_or(|at| now >= at) {
            self.spares.tidy_at = None;
            self.allow_spares();
            self.remove_code_left();
        }
    }

    /// No program is to read the code of the one before.
    fn remove_code_left(&mut self) {
        let starts = |execution: &Execution| matches!(execution.phase, Phase::Starting { .. });
        if self.spares.code_left.is_empty() || self.execution.as_ref().is_some_and(starts) {
            return;
        }
        for (serial, language) in std::mem::take(&mut self.spares.code_left) {
            if let Some(places) = &self.spares.places {
                let _ = remove_code(places.as_fd(), serial, language);
            }
        }
    }

    /// Looks after one that was handed its program a while ago.
    pub(in crate::agent) fn watch_handed(&mut self, now: Instant) {
        let Some(handed) = self.handed.as_mut().filter(|handed| now >= handed.look) else { return };
        let fed = self.execution.as_ref().map_or(0, |execution| execution.fed);
        let word = handed.word(fed);
        if !matches!(word, Word::Untaken) {
            if handed.halted {
                let _ = sys::kill(handed.pid, libc::SIGCONT);
            }
            // It runs its program, and whatever becomes of it becomes of that.
            self.spares.learn(handed.waiting.spec.language, &word);
            self.handed = None;
            return;
        }
        handed.look = now + LOOK_AFTER;
        if let Some(signal) = handed.end_of_patience(&pace(handed.pid), now) {
            // Its end is told by init.
            let _ = sys::kill(handed.pid, signal);
        }
    }

    /// The program of the current execution has ended, by itself with this code. If nobody has begun it, it is started now; returns
    /// whether that is so.
    pub(in crate::agent) fn start_unbegun(&mut self, serial: Serial, code: Option<i32>) -> bool {
        let Some(execution) = self.execution.as_mut().filter(|execution| execution.serial == serial) else { return false };
        // Unless it is started now it stays until the end has been told: to close what belongs to it takes longer than that.
        let Some(handed) = self.handed.as_ref().filter(|handed| handed.serial == serial) else { return false };
        let language = handed.waiting.spec.language;
        let word = handed.word(execution.fed);
        if !matches!(word, Word::Untaken) {
            self.spares.learn(language, &word);
            return false;
        }
        if handed.signalled {
            return false;
        }
        self.spares.ended_unused(language, code, Instant::now());
        if execution.has_printed() || !handed.take_back() {
            return false;
        }
        let Some(handed) = self.handed.take() else { return false };
        self.last_serial += 1;
        execution.serial = self.last_serial;
        // Whoever was killed for its use of memory was not this program.
        execution.out_of_memory = false;
        execution.phase = Phase::Waiting;
        self.waiting = Some(Waiting { theirs: Some(handed.theirs), ..handed.waiting });
        self.ask_init();
        true
    }
}

/// How a process that has not begun yet gets on.
enum Pace {
    Slow,
    /// The agent holds all of them still for a while, and nothing may be started meanwhile.
    Held,
    /// By the guest, or it is not known.
    Stopped,
}

fn pace(pid: i32) -> Pace {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let value = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next());
    match (value("State:"), value("TracerPid:")) {
        (Some("t"), Some(tracer)) if tracer.parse() == Ok(std::process::id()) => Pace::Held,
        (Some("R" | "S" | "D"), Some("0")) => Pace::Slow,
        _ => Pace::Stopped,
    }
}

/// When a name was last added to the layer of what was changed, and those were not among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Untouched(Changed);

impl Untouched {
    pub(super) fn look() -> Option<Self> {
        let now = Self::now()?;
        let absent =
            |name: &&str| fs::symlink_metadata(Path::new(UPPER).join(name)).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        START_DEPENDS_ON.iter().all(absent).then_some(now)
    }

    fn now() -> Option<Self> {
        stat(UPPER).ok().map(|upper| Self(Changed::of(&upper)))
    }

    fn still(self) -> bool {
        Self::now() == Some(self) || Self::look().is_some()
    }
}

impl Spares {
    /// What became of the word says what the interpreters of a language are good for.
    fn learn(&mut self, language: Language, word: &Word) {
        match word {
            Word::Taken => self.was_good(language),
            Word::Ignored => self.stop(language),
            Word::Untaken => {}
        }
    }
}

/// What one is told that was started with `env`; `there`: in the directory that is asked for. `untouched`: whether nothing of what a start
/// depends on was ever changed in this sandbox, nor the directory since. None: it would be too long.
fn word(spec: &ExecSpec, env: &BTreeMap<String, String>, there: bool, untouched: impl FnOnce() -> bool) -> Option<Vec<u8>> {
    if spec.stdin && there && spec.env == *env {
        let nothing_else = spec.language == Language::Bash || untouched();
        return Some(if nothing_else { NOTHING_ELSE } else { SEE_FOR_YOURSELF }.to_vec());
    }
    let changes = match spec.language {
        Language::Bash => bash_changes(spec, env, there),
        Language::Python => python_changes(spec)?,
    };
    let word = [format!("{}\n", changes.len()).as_bytes(), &changes].concat();
    (word.len() <= MAX_WORD_BYTES).then_some(word)
}

/// What its environment lacks and what it has too much, as commands: a shell that sets all of it anew would forget which of it is its own.
fn bash_changes(spec: &ExecSpec, env: &BTreeMap<String, String>, there: bool) -> Vec<u8> {
    let mut changes = String::new();
    if !there {
        changes += &format!("builtin cd -P -- {} || exit 126\nunset -v OLDPWD\nexport OLDPWD\n", quoted(&spec.cwd));
    }
    if !spec.stdin {
        changes += "exec </dev/null\n";
    }
    for name in env.keys().filter(|name| !spec.env.contains_key(*name)) {
        changes += &format!("unset -v {name}\n");
    }
    for (name, value) in spec.env.iter().filter(|(name, value)| env.get(*name) != Some(value)) {
        changes += &format!("export {name}={}\n", quoted(value));
    }
    changes.into_bytes()
}

/// For a shell, and in ASCII: it counts what it reads by characters.
fn quoted(text: &str) -> String {
    let mut out = String::from("$'");
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"/._-+:=, ".contains(&byte) {
            out.push(byte.into());
        } else {
            // Writing to memory can't fail.
            let _ = write!(out, "\\x{byte:02x}");
        }
    }
    out.push('\'');
    out
}

/// The directory, whether there is input, and the environment; each ends in a zero byte.
fn python_changes(spec: &ExecSpec) -> Option<Vec<u8>> {
    let program = Program { language: spec.language, env: spec.env.clone(), cwd: spec.cwd.clone(), tty: None };
    let (_, env) = init::environment(&program).ok()?;
    let mut parts = vec![spec.cwd.clone(), if spec.stdin { "1" } else { "0" }.to_owned()];
    parts.extend(env.iter().map(|(name, value)| format!("{name}={value}")));
    Some(parts.into_iter().flat_map(|part| part.into_bytes().into_iter().chain([0])).collect())
}

#[cfg(test)]
impl Handed {
    /// As the interpreter does.
    pub(in crate::agent) fn takes_word(&self) {
        assert_eq!(nix::unistd::read(&self.theirs[0], &mut [0]), Ok(1));
    }

    pub(in crate::agent) fn prints(&self) {
        assert_eq!(nix::unistd::write(&self.theirs[1], b"x"), Ok(1));
    }

    fn new(now: Instant) -> Self {
        let theirs = super::super::executions::make_pipes(true, sys::MIN_PIPE_BYTES).unwrap().theirs;
        let waiting = Waiting { spec: crate::sample::program(Language::Bash), code: Default::default(), theirs: None };
        let (look, given_up_at) = (now + LOOK_AFTER, now + CLAIM_WITHIN);
        let (script, signalled, paused, halted) = (None, false, false, false);
        Self { serial: 1, pid: i32::MAX, length: 1, waiting, theirs, script, look, given_up_at, signalled, paused, halted }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::sample::program;

    fn env(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn spec(language: Language, stdin: bool) -> ExecSpec {
        ExecSpec { env: env(&[("A", "1"), ("B", "x\n'é"), ("C", "3")]), cwd: "/tmp".to_owned(), stdin, ..program(language) }
    }

    #[test]
    fn one_that_is_as_it_is_wanted_is_told_to_go_and_nothing_else() {
        for language in [Language::Bash, Language::Python] {
            let spec = spec(language, true);
            let say = |spec: &ExecSpec, there, untouched| word(spec, &spec.env, there, || untouched).unwrap();
            assert_eq!(say(&spec, true, true), b"\n");
            let seen: &[u8] = if language == Language::Bash { b"\n" } else { b"0\n" };
            assert_eq!(say(&spec, true, false), seen);
            assert!(say(&spec, false, true).len() > 2 && say(&ExecSpec { stdin: false, ..spec.clone() }, true, true).len() > 2);
        }
    }

    #[test]
    fn a_shell_is_told_what_differs_and_nothing_else() {
        let had = env(&[("A", "1"), ("C", "2"), ("D", "4")]);
        let told = String::from_utf8(word(&spec(Language::Bash, false), &had, true, || true).unwrap()).unwrap();
        let (length, changes) = told.split_once('\n').unwrap();
        assert_eq!(length, changes.len().to_string());
        assert_eq!(changes, "exec </dev/null\nunset -v D\nexport B=$'x\\x0a\\x27\\xc3\\xa9'\nexport C=$'3'\n");
    }

    #[test]
    fn what_would_not_fit_is_not_said() {
        let mut spec = spec(Language::Python, true);
        assert!(word(&spec, &env(&[]), true, || true).is_some());
        spec.env.insert("BIG".to_owned(), "x".repeat(MAX_WORD_BYTES));
        assert!(word(&spec, &env(&[]), true, || true).is_none());
    }

    #[test]
    fn one_that_somebody_stopped_is_waited_for_only_if_its_user_did() {
        let now = Instant::now();
        for (signals, waited_for) in [
            (&[][..], false),
            (&[libc::SIGUSR1], false),
            (&[libc::SIGTERM], false),
            (&[libc::SIGSTOP], true),
            (&[libc::SIGTSTP, libc::SIGUSR1], true),
            (&[libc::SIGSTOP, libc::SIGCONT], false),
        ] {
            let mut handed = Handed::new(now);
            signals.iter().for_each(|signal| handed.signal(*signal));
            let kill = (!waited_for).then_some(libc::SIGKILL);
            assert_eq!(handed.end_of_patience(&Pace::Stopped, now), kill, "{signals:?}");
            // One that is merely slow is given its time, and one that is still to be stopped all of it.
            assert_eq!(handed.end_of_patience(&Pace::Slow, now), None, "{signals:?}");
            let stop = (!waited_for).then_some(libc::SIGSTOP);
            assert_eq!(handed.end_of_patience(&Pace::Slow, now + CLAIM_WITHIN), stop, "{signals:?}");
        }
    }

    /// A file that can be executed takes this place, as an update does it.
    fn replace(path: &Path) {
        let new = path.with_extension("new");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&new, "").unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(new, path).unwrap();
    }

    /// What a change of this path does to a bash that waits.
    fn noticed(dir: &Path, path: &str) -> bool {
        let root = File::open(dir).unwrap();
        let before = Loaded::look(root.as_fd());
        assert!(before.still(root.as_fd(), || false), "{path}");
        replace(&dir.join(path));
        !before.still(root.as_fd(), || false)
    }

    #[test]
    fn another_bash_or_what_is_loaded_with_it_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("usr")).unwrap();
        // Those that come first last.
        for path in BASH_DEPENDS_ON.iter().rev() {
            assert!(noticed(dir.path(), path), "{path}, new");
            assert!(noticed(dir.path(), path), "{path}, another one");
        }
        // Nobody executes these any more.
        assert!(!noticed(dir.path(), "usr/bin/bash") && !noticed(dir.path(), "bin/bash"));
        let root = File::open(dir.path()).unwrap();
        let before = Loaded::look(root.as_fd());
        replace(&dir.path().join("usr/local/sbin/bash"));
        assert!(before.still(root.as_fd(), || true), "nothing is looked at where nothing was ever touched");
    }

    #[test]
    fn another_bash_behind_a_link_is_noticed_wherever_it_leads() {
        for (link, target, bash) in [
            ("usr/bin/bash", "/opt/it/bash", "opt/it/bash"),
            ("usr/bin/bash", "../../opt/it/bash", "opt/it/bash"),
            ("usr/bin", "/opt/it", "opt/it/bash"),
            ("bin", "opt/it", "opt/it/bash"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let link = dir.path().join(link);
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            std::os::unix::fs::symlink(target, &link).unwrap();
            replace(&dir.path().join(bash));
            assert!(noticed(dir.path(), bash), "{link:?}");
            let root = File::open(dir.path()).unwrap();
            let before = Loaded::look(root.as_fd());
            replace(&dir.path().join(bash));
            assert!(!before.still(root.as_fd(), || true), "{link:?}: it lies elsewhere");
        }
        // As it is in most images: the link is not on the way.
        let dir = tempfile::tempdir().unwrap();
        replace(&dir.path().join("usr/bin/bash"));
        std::os::unix::fs::symlink("usr/bin", dir.path().join("bin")).unwrap();
        assert!(!Loaded::look(File::open(dir.path()).unwrap().as_fd()).linked);
    }

    #[test]
    fn a_directory_is_known_by_what_it_is_and_links_lead_nowhere() {
        let dir = tempfile::tempdir().unwrap();
        let root = File::open(dir.path()).unwrap();
        let find = |path: &str| directory(root.as_fd(), path);
        fs::create_dir_all(dir.path().join("a/b")).unwrap();
        fs::write(dir.path().join("a/file"), "").unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("link")).unwrap();
        std::os::unix::fs::symlink("b", dir.path().join("a/link")).unwrap();
        let find = |path: &str| find(path).map(|found| found.identity);
        let first = find("/a/b").unwrap();
        assert_eq!(find("/a//b/."), Some(first));
        assert!(find("/").is_some() && find("/") != find("/a"));
        for bad in ["", "a", "/a/file", "/a/none", "/link", "/link/a", "/a/link", "/a/.."] {
            assert_eq!(find(bad), None, "{bad}");
        }
        fs::rename(dir.path().join("a/b"), dir.path().join("a/old")).unwrap();
        fs::create_dir(dir.path().join("a/b")).unwrap();
        assert_ne!(find("/a/b"), Some(first));
    }
}

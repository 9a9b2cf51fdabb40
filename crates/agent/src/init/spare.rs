//! An interpreter that is started ahead of its code.
//!
//! It is the same call as ever, `bash /run/sandboxer/exec/N/main.sh` or `python3 …/main.py`, and all that a program can see is made by the
//! interpreter itself. Only the hook that both offer before they open their script (`BASH_ENV`, `sitecustomize`) is ours: it waits for one
//! byte, takes over environment, directory and input from a file in memory, removes what it left behind, and lets the interpreter go on.
//!
//! The byte is the execution. Either the interpreter takes it, and then it runs the code, or init takes it back, and then it never will: so
//! one that was killed or stopped costs its execution neither more nor less than a start.

use std::{
    collections::BTreeMap,
    ffi::CString,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd, RawFd},
        unix::fs::{FileExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use sandboxer_protocol::agent::Language;

use super::{
    program::{self, Written},
    root::RUN,
};
use crate::{
    ipc::{Program, Serial, Waiting},
    spawn::{Plan, spawn},
    sys::{self, c_string},
};

const BASH_HOOK: &str = include_str!("spare/hook.sh");
const PYTHON_HOOK: &str = include_str!("spare/sitecustomize.py");
/// One that has not begun with its code after this is looked at: it may be stopped.
const LOOK_AFTER: Duration = Duration::from_millis(250);
/// How long one may take to begin with its code: on a loaded machine longer than anybody would expect.
const CLAIM_WITHIN: Duration = Duration::from_secs(5);
/// Above all that a program is started with.
const HIGH: RawFd = 64;

/// One that waits, or has ended meanwhile, with all that its execution needs.
pub(super) struct Spare {
    language: Language,
    /// None: it is gone.
    pub(super) pid: Option<i32>,
    env: BTreeMap<String, String>,
    /// How it is told. None: it was never started.
    way: Option<Way>,
    group: OwnedFd,
    standard: [OwnedFd; 3],
}

struct Way {
    message: File,
    token: Token,
}

/// Where the byte goes, and where it comes out.
struct Token {
    give: OwnedFd,
    take: OwnedFd,
}

/// A program that was handed to one, and may yet have to be started otherwise.
pub(super) struct Handed {
    program: Prepared,
    token: Token,
    /// When it is looked at.
    pub(super) until: Instant,
    given_up_at: Instant,
}

/// All that it takes to start a program afresh.
struct Prepared {
    written: Written,
    group: OwnedFd,
    standard: [OwnedFd; 3],
    input: bool,
}

impl Token {
    /// High, so that neither is in the way of the other when a program gets it.
    fn new() -> io::Result<Self> {
        let (give, take) = socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::SOCK_CLOEXEC)?;
        Ok(Self { give, take: sys::high(take.as_fd(), HIGH)? })
    }

    fn give(&self) -> io::Result<()> {
        send(self.give.as_raw_fd(), b"\n", MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT)?;
        Ok(())
    }

    /// Returns whether nobody had taken it.
    fn take_back(&self) -> bool {
        recv(self.take.as_raw_fd(), &mut [0], MsgFlags::MSG_DONTWAIT) == Ok(1)
    }

    fn is_taken(&self) -> bool {
        recv(self.take.as_raw_fd(), &mut [0], MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK) != Ok(1)
    }
}

impl Spare {
    /// Starts one. What is told of it is kept even if it can't be started, for the execution that may count on it already.
    pub(super) fn start(serial: Serial, head: usize, descriptors: Vec<OwnedFd>) -> Result<Self, String> {
        let mut descriptors = descriptors.into_iter();
        let (about, _) = program::read::<Waiting>(descriptors.next(), head)?;
        let (Some(waiting), Some(group), Ok(standard)) =
            (descriptors.next(), descriptors.next(), <[OwnedFd; 3]>::try_from(descriptors.collect::<Vec<_>>()))
        else {
            return Err("the request came without its descriptors".to_owned());
        };
        let Waiting { language, env, warm_modules } = about;
        let way = Way::new().ok();
        let pid = way.as_ref().and_then(|way| {
            let standard = standard.each_ref().map(AsRawFd::as_raw_fd);
            let extra = [way.token.take.as_raw_fd(), way.message.as_raw_fd()];
            launch(serial, language, &env, &warm_modules, standard, waiting.as_raw_fd(), &extra).ok()
        });
        Ok(Self { language, pid, env, way, group, standard })
    }

    /// Gives it its code. The code is in its place already.
    pub(super) fn hand_over(self, written: Written, input: bool) -> Result<(i32, Option<Handed>), String> {
        let told = self.pid.zip(self.way.as_ref()).is_some_and(|(pid, way)| self.tell(pid, way, &written.program, input).is_ok());
        let Self { pid, way, group, standard, .. } = self;
        let program = Prepared { written, group, standard, input };
        let now = Instant::now();
        match (pid, way) {
            (Some(pid), Some(Way { token, .. })) if told => {
                Ok((pid, Some(Handed { program, token, until: now + LOOK_AFTER, given_up_at: now + CLAIM_WITHIN })))
            }
            (pid, _) => {
                if let Some(pid) = pid {
                    let _ = sys::kill(pid, libc::SIGKILL);
                }
                Ok((program.start()?, None))
            }
        }
    }

    fn tell(&self, pid: i32, Way { message: file, token }: &Way, program: &Program, input: bool) -> Result<(), String> {
        if program.language != self.language || !fs::metadata(&program.cwd).is_ok_and(|found| found.is_dir()) {
            return Err("it is another program".to_owned());
        }
        let message = match self.language {
            Language::Bash => bash_message(program, input, &self.env),
            Language::Python => python_message(program, input)?,
        };
        let failed = |error: io::Error| error.to_string();
        // The guest may have written there.
        file.set_len(0).and_then(|()| file.write_all_at(&message, 0)).map_err(failed)?;
        // By the number that it has in here, which is init's as well.
        nix::unistd::write(&self.group, pid.to_string().as_bytes()).map_err(|error| failed(error.into()))?;
        token.give().map_err(failed)
    }
}

impl Way {
    fn new() -> io::Result<Self> {
        Ok(Self { message: File::from(sys::high(sys::memory_file()?.as_fd(), HIGH)?), token: Token::new()? })
    }
}

impl Handed {
    /// Whether an interpreter that has not ended is to be given more time to begin.
    pub(super) fn is_only_slow(&mut self, pid: i32) -> bool {
        let now = Instant::now();
        let slow = !self.token.is_taken()
            && match pace(pid) {
                Pace::Slow => now < self.given_up_at,
                Pace::Held => true,
                Pace::Stopped => false,
            };
        if slow {
            self.until = now + LOOK_AFTER;
        }
        slow
    }

    /// Makes sure that the interpreter does not run it, if it does not yet. Returns whether it never will.
    pub(super) fn take_back(&self) -> bool {
        self.token.take_back()
    }

    /// As if none had waited for it.
    pub(super) fn start_afresh(&self) -> Result<i32, String> {
        self.program.start()
    }
}

impl Prepared {
    fn start(&self) -> Result<i32, String> {
        let [pipe, output, errors] = &self.standard;
        let nothing =
            if self.input { None } else { Some(File::open("/dev/null").map_err(|error| format!("cannot open /dev/null: {error}"))?) };
        let input = nothing.as_ref().map_or(pipe.as_raw_fd(), AsRawFd::as_raw_fd);
        program::run(&self.written, [input, output.as_raw_fd(), errors.as_raw_fd()], false, Some(self.group.as_raw_fd()))
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
        // Whoever traces it is not in here.
        (Some("t"), Some("0")) => Pace::Held,
        (Some("R" | "S" | "D"), Some("0")) => Pace::Slow,
        _ => Pace::Stopped,
    }
}

/// Each part ends in a zero byte.
fn message<'a>(parts: impl IntoIterator<Item = &'a str>) -> Vec<u8> {
    parts.into_iter().flat_map(|part| part.bytes().chain([0])).collect()
}

/// What its environment lacks, and what it has too much: a shell that sets all of it anew would forget which of it is its own.
fn bash_message(program: &Program, input: bool, env: &BTreeMap<String, String>) -> Vec<u8> {
    let seed = sys::random_number().to_string();
    let new = program.env.iter().filter(|(name, value)| env.get(*name) != Some(value)).map(|(name, value)| format!("+{name}={value}"));
    let gone = env.keys().filter(|name| !program.env.contains_key(*name)).map(|name| format!("-{name}"));
    let changes: Vec<String> = gone.chain(new).collect();
    message([program.cwd.as_str(), flag(input), &seed].into_iter().chain(changes.iter().map(String::as_str)))
}

fn python_message(program: &Program, input: bool) -> Result<Vec<u8>, String> {
    let (_, env) = program::environment(program)?;
    let entries: Vec<String> = env.iter().map(|(name, value)| format!("{name}={value}")).collect();
    Ok(message([program.cwd.as_str(), flag(input)].into_iter().chain(entries.iter().map(String::as_str))))
}

fn flag(input: bool) -> &'static str {
    if input { "1" } else { "0" }
}

fn launch(
    serial: Serial,
    language: Language,
    env: &BTreeMap<String, String>,
    warm_modules: &[String],
    standard: [RawFd; 3],
    group: RawFd,
    extra: &[RawFd],
) -> Result<i32, String> {
    let hooks = place(language, warm_modules).map_err(|error| error.to_string())?;
    let mut env = env.clone();
    let (interpreter, name, value) = match language {
        Language::Bash => ("bash", "BASH_ENV", hooks.join("hook.sh")),
        Language::Python => {
            env.insert("PYTHONUNBUFFERED".to_owned(), "1".to_owned());
            ("python3", "PYTHONPATH", hooks)
        }
    };
    env.insert(name.to_owned(), value.to_string_lossy().into_owned());
    let script = program::script(serial, language).to_string_lossy().into_owned();
    let arguments: [CString; 2] = [c_string(interpreter, "the interpreter")?, c_string(script, "the script")?];
    let plan = Plan {
        programs: &program::places(&env, interpreter)?,
        arguments: &arguments,
        environment: &program::entries(&env)?,
        // Not where the user works: a directory that is removed and made anew is another one.
        directory: Some(c"/"),
        standard,
        session: true,
        terminal: false,
        group: Some(group),
        namespaces: 0,
        extra,
    };
    spawn(&plan).map_err(|error| format!("{:?}: {}", error.step, error.error))
}

/// Writes the hook of a language, unless it is there, and says where.
fn place(language: Language, warm_modules: &[String]) -> io::Result<PathBuf> {
    let directory = Path::new(RUN).join("spare");
    let files = match language {
        Language::Bash => vec![("hook.sh", BASH_HOOK.to_owned())],
        Language::Python => vec![("sitecustomize.py", PYTHON_HOOK.to_owned()), ("warm", warm_modules.join("\n"))],
    };
    let attempt = || -> io::Result<()> {
        fs::create_dir_all(&directory)?;
        for (name, text) in &files {
            let path = directory.join(name);
            if fs::read(&path).is_ok_and(|found| found == text.as_bytes()) {
                continue;
            }
            let _ = fs::remove_file(&path);
            OpenOptions::new().write(true).create_new(true).mode(0o644).open(&path)?.write_all(text.as_bytes())?;
        }
        Ok(())
    };
    attempt().or_else(|_| {
        // The guest has put something else there.
        let _ = fs::remove_dir_all(&directory);
        let _ = fs::remove_file(&directory);
        attempt()
    })?;
    Ok(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_is_told_what_differs_and_nothing_else() {
        let env = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect::<BTreeMap<_, _>>()
        };
        let program =
            Program { language: Language::Bash, env: env(&[("A", "1"), ("B", "x\ny"), ("C", "3")]), cwd: "/tmp".to_owned(), tty: None };
        let told = bash_message(&program, false, &env(&[("A", "1"), ("C", "2"), ("D", "4")]));
        let parts: Vec<String> = told.split(|byte| *byte == 0).map(|part| String::from_utf8(part.to_vec()).unwrap()).collect();
        assert_eq!((&parts[0][..], &parts[1][..]), ("/tmp", "0"));
        assert!(parts[2].parse::<u32>().is_ok());
        assert_eq!(parts[3..], ["-D", "+B=x\ny", "+C=3", ""]);
    }

    #[test]
    fn a_byte_is_taken_once() {
        let token = Token::new().unwrap();
        assert!(!token.take_back());
        token.give().unwrap();
        assert!(!token.is_taken());
        assert!(token.take_back());
        assert!(token.is_taken() && !token.take_back());
    }
}

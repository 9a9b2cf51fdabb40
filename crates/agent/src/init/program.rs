//! Starting one program: its code into a file, its descriptors, its environment.
//!
//! Every path here is under the guest's control. Nothing is followed, overwritten or trusted; what does not work is told in plain words.

use std::{
    collections::BTreeMap,
    ffi::CString,
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd, RawFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Path, PathBuf},
};

use sandboxer_protocol::{agent::Language, limits::MAX_CONTROL_BYTES};
use serde::de::DeserializeOwned;

use super::{Child, root::RUN};
use crate::{
    ipc::{Program, Serial},
    spawn::{Plan, SpawnError, Step, spawn},
    sys::{self, c_string},
};

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

fn base() -> PathBuf {
    PathBuf::from(RUN).join("exec")
}

/// Starts what the request file holds.
pub(super) fn start(serial: Serial, head: usize, group: bool, descriptors: Vec<OwnedFd>) -> Result<Child, String> {
    let mut descriptors = descriptors.into_iter();
    let (program, mut request) = read::<Program>(descriptors.next(), head)?;
    let group = if group { descriptors.next() } else { None };
    let (standard, terminal) = match program.tty {
        Some(size) => {
            let (master, slave) = open_terminal().map_err(|error| format!("cannot open a terminal: {error}"))?;
            sys::set_terminal_size(master.as_fd(), size).map_err(|error| format!("cannot set the terminal's size: {error}"))?;
            (vec![slave], Some(master))
        }
        None => (descriptors.collect(), None),
    };
    let standard = match &standard[..] {
        [terminal] => [terminal.as_raw_fd(); 3],
        [input, output, errors] => [input.as_raw_fd(), output.as_raw_fd(), errors.as_raw_fd()],
        _ => return Err("the request came without its descriptors".to_owned()),
    };
    let script = write_code(serial, program.language, &mut request)?;
    let pid = run(&program, &script, standard, terminal.is_some(), group.as_ref().map(AsRawFd::as_raw_fd))?;
    Ok(Child { pid, terminal })
}

/// What a file says in its first `head` bytes, and the file behind them.
pub(super) fn read<T: DeserializeOwned>(file: Option<OwnedFd>, head: usize) -> Result<(T, File), String> {
    let mut file = File::from(file.ok_or("the request came without its file")?);
    if head > MAX_CONTROL_BYTES {
        return Err("the request is too long".to_owned());
    }
    let mut json = vec![0; head];
    file.read_exact(&mut json).map_err(|error| format!("cannot read the request: {error}"))?;
    let value = serde_json::from_slice(&json).map_err(|error| format!("cannot understand the request: {error}"))?;
    Ok((value, file))
}

/// The places where the interpreter is looked for.
pub(super) fn places(env: &BTreeMap<String, String>, interpreter: &str) -> Result<Vec<CString>, String> {
    let path = env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
    path.split(':').filter(|place| !place.is_empty()).map(|place| c_string(format!("{place}/{interpreter}"), "PATH")).collect()
}

/// Starts an interpreter with a code that is there, and returns its process id.
fn run(program: &Program, script: &str, standard: [RawFd; 3], terminal: bool, group: Option<RawFd>) -> Result<i32, String> {
    let (interpreter, environment) = environment(program)?;
    let environment = entries(&environment)?;
    let directory = c_string(program.cwd.as_str(), "the working directory")?;
    let plan = Plan {
        programs: &places(&program.env, interpreter)?,
        arguments: &[c_string(interpreter, "the interpreter")?, c_string(script, "the script")?],
        environment: &environment,
        directory: Some(&directory),
        standard,
        session: true,
        terminal,
        group,
        namespaces: 0,
        extra: &[],
    };
    spawn(&plan).map_err(|error| explain(&error, interpreter, &program.cwd))
}

fn explain(SpawnError { step, error }: &SpawnError, interpreter: &str, cwd: &str) -> String {
    match step {
        Step::Directory => format!("cannot enter the working directory {cwd:?}: {error}"),
        Step::Execute if error.raw_os_error() == Some(libc::E2BIG) => format!("cannot start {interpreter}: the environment is too large"),
        Step::Execute => format!("cannot start {interpreter}: {error}"),
        Step::Group | Step::Clone if error.raw_os_error() == Some(libc::EAGAIN) => {
            "cannot start a process: the sandbox's limit of processes is reached".to_owned()
        }
        Step::Terminal => format!("cannot make the terminal the controlling one: {error}"),
        Step::Clone | Step::Session | Step::Group | Step::Descriptors => format!("cannot start a process ({step:?}): {error}"),
    }
}

/// The interpreter and exactly the environment asked for, with what makes it behave as a user expects.
pub(crate) fn environment(program: &Program) -> Result<(&'static str, BTreeMap<String, String>), String> {
    let mut env = program.env.clone();
    if program.tty.is_some() {
        env.entry("TERM".to_owned()).or_insert_with(|| "xterm-256color".to_owned());
    }
    let interpreter = match program.language {
        Language::Bash => "bash",
        Language::Python => {
            // Modules beside the caller are found, as with `python3 file.py` there, though the file is elsewhere.
            let path = match env.get("PYTHONPATH").filter(|path| !path.is_empty()) {
                Some(path) => format!("{}:{path}", program.cwd),
                None => program.cwd.clone(),
            };
            env.insert("PYTHONPATH".to_owned(), path);
            // Into a pipe Python gathers 8 KiB before it writes; whoever watches wants each line when it is printed.
            env.entry("PYTHONUNBUFFERED".to_owned()).or_insert_with(|| "1".to_owned());
            "python3"
        }
    };
    if let Some(name) = env.keys().find(|name| name.is_empty() || name.contains('=')) {
        return Err(format!("{name:?} can't be the name of an environment variable"));
    }
    Ok((interpreter, env))
}

pub(super) fn entries(env: &BTreeMap<String, String>) -> Result<Vec<CString>, String> {
    env.iter().map(|(name, value)| c_string(format!("{name}={value}"), "the environment")).collect()
}

/// Where the code of an execution goes.
pub(crate) fn script(serial: Serial, language: Language) -> PathBuf {
    let name = match language {
        Language::Python => "main.py",
        Language::Bash => "main.sh",
    };
    base().join(serial.to_string()).join(name)
}

fn write_code(serial: Serial, language: Language, code: &mut File) -> Result<String, String> {
    let start = code.stream_position().map_err(|error| format!("cannot read the code: {error}"))?;
    let write = |file: &mut File| {
        code.seek(io::SeekFrom::Start(start))?;
        io::copy(code, file).map(drop)
    };
    make_script(serial, language, write)?;
    Ok(script(serial, language).to_string_lossy().into_owned())
}

/// Makes the file that the code of an execution goes into.
pub(super) fn make_script(serial: Serial, language: Language, mut fill: impl FnMut(&mut File) -> io::Result<()>) -> Result<File, String> {
    let path = script(serial, language);
    let directory = base().join(serial.to_string());
    let mut attempt = || -> io::Result<File> {
        if let Err(error) = fs::create_dir(&directory) {
            if error.kind() != io::ErrorKind::NotFound {
                return Err(error);
            }
            // The first time, or the guest removed it.
            fs::create_dir_all(base())?;
            fs::create_dir(&directory)?;
        }
        let mut file = OpenOptions::new().write(true).create_new(true).custom_flags(libc::O_NOFOLLOW).mode(0o644).open(&path)?;
        fill(&mut file)?;
        Ok(file)
    };
    attempt()
        .or_else(|_| {
            // The guest has filled or spoilt the place. Nothing in it is the guest's to keep, and without it it could not even clean up. An
            // interpreter that waits loses its file too; that is noticed before it gets its code.
            empty(Path::new(RUN));
            attempt()
        })
        .map_err(|error| format!("cannot write the code to {}: {error}", path.display()))
}

/// Removes the code of earlier executions.
pub(super) fn remove_all_but(kept: impl Fn(Serial) -> bool) {
    let Ok(entries) = fs::read_dir(base()) else { return };
    let is_kept = |entry: &fs::DirEntry| entry.file_name().to_str().and_then(|name| name.parse().ok()).is_some_and(&kept);
    entries.flatten().filter(|entry| !is_kept(entry)).for_each(|entry| remove(&entry));
}

fn empty(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    entries.flatten().for_each(|entry| remove(&entry));
}

/// Follows no symbolic link. The file system it is on is small, so this is bounded; failing does no harm.
fn remove(entry: &fs::DirEntry) {
    if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
        let _ = fs::remove_dir_all(entry.path());
    } else {
        let _ = fs::remove_file(entry.path());
    }
}

fn open_terminal() -> io::Result<(OwnedFd, OwnedFd)> {
    let open = |path: &str| OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY | libc::O_CLOEXEC).open(path);
    let master = open("/dev/pts/ptmx")?;
    let number = sys::unlock_terminal(master.as_fd())?;
    let slave = open(&format!("/dev/pts/{number}"))?;
    Ok((master.into(), slave.into()))
}

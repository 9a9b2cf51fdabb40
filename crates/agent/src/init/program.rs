//! Starting one program: its code into a file, its descriptors, its environment.
//!
//! Every path here is under the guest's control. Nothing is followed, overwritten or trusted; what does not work is told in plain words.

use std::{
    ffi::CString,
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Path, PathBuf},
};

use sandboxer_protocol::{agent::Language, limits::MAX_CONTROL_BYTES};

use super::root::RUN;
use crate::{
    ipc::{Program, Serial},
    spawn::{Plan, SpawnError, Step, spawn},
    sys::{self, c_string},
};

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

pub(super) struct Started {
    pub(super) pid: i32,
    /// The master of its terminal.
    pub(super) terminal: Option<OwnedFd>,
}

fn base() -> PathBuf {
    PathBuf::from(RUN).join("exec")
}

/// Starts what the request file holds.
pub(super) fn start(serial: Serial, head: usize, group: bool, descriptors: Vec<OwnedFd>) -> Result<Started, String> {
    let mut descriptors = descriptors.into_iter();
    let mut request = File::from(descriptors.next().ok_or("the request came without its file")?);
    if head > MAX_CONTROL_BYTES {
        return Err("the request is too long".to_owned());
    }
    let mut json = vec![0; head];
    request.read_exact(&mut json).map_err(|error| format!("cannot read the request: {error}"))?;
    let program: Program = serde_json::from_slice(&json).map_err(|error| format!("cannot understand the request: {error}"))?;
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
    let (interpreter, environment) = environment(&program)?;
    let directory = c_string(program.cwd.as_str(), "the working directory")?;
    let path = program.env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
    let programs: Vec<CString> = path
        .split(':')
        .filter(|place| !place.is_empty())
        .map(|place| c_string(format!("{place}/{interpreter}"), "PATH"))
        .collect::<Result<_, _>>()?;
    let plan = Plan {
        programs: &programs,
        arguments: &[c_string(interpreter, "the interpreter")?, c_string(script, "the script")?],
        environment: &environment,
        directory: Some(&directory),
        standard,
        session: true,
        terminal: terminal.is_some(),
        group: group.as_ref().map(AsRawFd::as_raw_fd),
        namespaces: 0,
        extra: None,
    };
    let pid = spawn(&plan).map_err(|error| explain(&error, interpreter, &program.cwd))?;
    Ok(Started { pid, terminal })
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
fn environment(program: &Program) -> Result<(&'static str, Vec<CString>), String> {
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
    let environment = env
        .iter()
        .map(|(name, value)| {
            if name.is_empty() || name.contains('=') {
                return Err(format!("{name:?} can't be the name of an environment variable"));
            }
            c_string(format!("{name}={value}"), "the environment")
        })
        .collect::<Result<_, _>>()?;
    Ok((interpreter, environment))
}

fn write_code(serial: Serial, language: Language, code: &mut File) -> Result<String, String> {
    let name = match language {
        Language::Python => "main.py",
        Language::Bash => "main.sh",
    };
    let directory = base().join(serial.to_string());
    let path = directory.join(name);
    let start = code.stream_position().map_err(|error| format!("cannot read the code: {error}"))?;
    let mut attempt = || -> io::Result<()> {
        code.seek(io::SeekFrom::Start(start))?;
        if let Err(error) = fs::create_dir(&directory) {
            if error.kind() != io::ErrorKind::NotFound {
                return Err(error);
            }
            // The first time, or the guest removed it.
            fs::create_dir_all(base())?;
            fs::create_dir(&directory)?;
        }
        let mut file = OpenOptions::new().write(true).create_new(true).custom_flags(libc::O_NOFOLLOW).mode(0o644).open(&path)?;
        io::copy(code, &mut file)?;
        Ok(())
    };
    attempt()
        .or_else(|_| {
            // The guest has filled or spoilt the place. Nothing in it is the guest's to keep, and without it it could not even clean up.
            empty(Path::new(RUN));
            attempt()
        })
        .map_err(|error| format!("cannot write the code to {}: {error}", path.display()))?;
    Ok(path.to_string_lossy().into_owned())
}

/// Removes the code of earlier executions.
pub(super) fn remove_all_but(serial: Serial) {
    let kept = serial.to_string();
    let Ok(entries) = fs::read_dir(base()) else { return };
    entries.flatten().filter(|entry| entry.file_name().to_str() != Some(&kept)).for_each(|entry| remove(&entry));
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

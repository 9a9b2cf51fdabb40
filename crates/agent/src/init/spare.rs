//! An interpreter that is started ahead of its code.
//!
//! It is the same call as ever, `bash /run/sandboxer/exec/N/main.sh` or `python3 …/main.py`, and all that a program can see is made by the
//! interpreter itself. Only the hook that both offer before they open their script (`BASH_ENV`, `sitecustomize`) is ours: it waits for the
//! agent's word, takes over what differs from what it was started with, removes what it left behind, and lets the interpreter go on.

use std::{
    collections::BTreeMap,
    ffi::CString,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Path, PathBuf},
};

use sandboxer_protocol::agent::Language;

use super::{program, root::RUN};
use crate::{
    ipc::{Serial, Waiting},
    spawn::{Plan, spawn},
    sys::c_string,
};

const BASH_HOOK: &str = include_str!("spare/hook.sh");
const PYTHON_HOOK: &str = include_str!("spare/sitecustomize.py");

/// Starts one. Returns its process id, and the file that its code goes into.
pub(super) fn start(serial: Serial, head: usize, descriptors: Vec<OwnedFd>) -> Result<(i32, File), String> {
    let mut descriptors = descriptors.into_iter();
    let (about, _) = program::read::<Waiting>(descriptors.next(), head)?;
    let (Some(group), Ok(standard)) = (descriptors.next(), <[OwnedFd; 3]>::try_from(descriptors.collect::<Vec<_>>())) else {
        return Err("the request came without its descriptors".to_owned());
    };
    // With something in it that is written over: it has its place in memory already.
    let script = program::make_script(serial, about.language, |file| file.write_all(b"\n"))?;
    let pid = launch(serial, &about, standard.each_ref().map(AsRawFd::as_raw_fd), group.as_raw_fd())?;
    Ok((pid, script))
}

fn launch(serial: Serial, about: &Waiting, standard: [RawFd; 3], group: RawFd) -> Result<i32, String> {
    let Waiting { language, env, cwd, warm_modules } = about;
    let hooks = place(*language, warm_modules).map_err(|error| error.to_string())?;
    let mut env: BTreeMap<String, String> = env.clone();
    let (interpreter, name, value) = match language {
        Language::Bash => ("bash", "BASH_ENV", hooks.join("hook.sh")),
        Language::Python => {
            env.insert("PYTHONUNBUFFERED".to_owned(), "1".to_owned());
            ("python3", "PYTHONPATH", hooks)
        }
    };
    env.insert(name.to_owned(), value.to_string_lossy().into_owned());
    let script = program::script(serial, *language).to_string_lossy().into_owned();
    let arguments: [CString; 2] = [c_string(interpreter, "the interpreter")?, c_string(script, "the script")?];
    let plan = Plan {
        programs: &program::places(&env, interpreter)?,
        arguments: &arguments,
        environment: &program::entries(&env)?,
        directory: Some(&c_string(cwd.as_str(), "the working directory")?),
        standard,
        session: true,
        terminal: false,
        group: Some(group),
        namespaces: 0,
        extra: &[],
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
    place_in(&directory, &files)?;
    Ok(directory)
}

fn place_in(directory: &Path, files: &[(&str, String)]) -> io::Result<()> {
    let attempt = || -> io::Result<()> {
        fs::create_dir_all(directory)?;
        for (name, text) in files {
            let path = directory.join(name);
            if says(&path, text) {
                continue;
            }
            let _ = fs::remove_file(&path);
            OpenOptions::new().write(true).create_new(true).mode(0o644).open(&path)?.write_all(text.as_bytes())?;
        }
        Ok(())
    };
    attempt().or_else(|_| {
        // The guest has put something else there.
        let _ = fs::remove_dir_all(directory);
        let _ = fs::remove_file(directory);
        attempt()
    })
}

/// Whether there is a file that says just this. In its place the guest may have put what nobody ever writes to, or what never ends.
fn says(path: &Path, text: &str) -> bool {
    let Ok(file) = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path) else { return false };
    let length = text.len() as u64;
    let mut found = Vec::new();
    file.metadata().is_ok_and(|about| about.is_file() && about.len() == length)
        && file.take(length).read_to_end(&mut found).is_ok()
        && found == text.as_bytes()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};

    use nix::{sys::stat::Mode, unistd::mkfifo};

    use super::*;

    #[test]
    fn whatever_the_guest_puts_in_place_of_a_hook_is_replaced_and_nobody_waits_for_it() {
        let spoil: [fn(&Path); 8] = [
            |hook| mkfifo(hook, Mode::from_bits_truncate(0o644)).unwrap(),
            |hook| symlink("/dev/zero", hook).unwrap(),
            |hook| symlink(hook, hook).unwrap(),
            |hook| drop(std::os::unix::net::UnixListener::bind(hook).unwrap()),
            |hook| fs::create_dir_all(hook.join("a/b")).unwrap(),
            |hook| fs::write(hook, "mine").unwrap(),
            |hook| File::create(hook).unwrap().set_len(1 << 40).unwrap(),
            |hook| {
                fs::remove_dir(hook.parent().unwrap()).unwrap();
                mkfifo(hook.parent().unwrap(), Mode::from_bits_truncate(0o644)).unwrap();
            },
        ];
        for (at, spoil) in spoil.iter().enumerate() {
            let dir = tempfile::tempdir().unwrap();
            let (directory, files) = (dir.path().join("spare"), [("hook", "hook".to_owned())]);
            let hook = directory.join("hook");
            fs::create_dir(&directory).unwrap();
            spoil(&hook);
            place_in(&directory, &files).unwrap();
            let about = fs::symlink_metadata(&hook).unwrap();
            assert!(about.is_file() && about.len() == 4, "{at}");
            assert_eq!(fs::read(&hook).unwrap(), b"hook", "{at}");
            // What is right stays.
            place_in(&directory, &files).unwrap();
            assert_eq!(fs::symlink_metadata(&hook).unwrap().ino(), about.ino(), "{at}");
        }
    }
}

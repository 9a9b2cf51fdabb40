//! What the server starts beside a sandbox that it restores: see [`sandboxer_runsc::FileServer`]. It is no verb: of no use to anybody else, and quicker than those.

use std::{
    env, io,
    os::{fd::AsFd as _, unix::net::UnixStream},
    path::PathBuf,
    process::ExitCode,
};

/// As no verb is called. Behind it is the directory of the sandbox, which is nothing but a name to know it by.
const NAME: &str = "serve-files";

/// How it is called. The binary is the one that runs, whatever lies in its place by now.
pub(crate) fn program() -> (PathBuf, &'static [&'static str]) {
    (PathBuf::from("/proc/self/exe"), &[NAME])
}

/// None: something else was asked for.
pub(crate) fn if_asked_for() -> Option<ExitCode> {
    if env::args_os().nth(1)? != NAME {
        return None;
    }
    Some(match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{NAME}: {error}");
            ExitCode::FAILURE
        }
    })
}

fn serve() -> io::Result<()> {
    sandboxer_runsc::give_up_privileges()?;
    let given = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let sandbox = UnixStream::from(io::stdout().as_fd().try_clone_to_owned()?);
    sandboxer_runsc::serve_files(&given, sandbox)
}

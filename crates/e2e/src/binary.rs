//! The binary under test.

use std::{
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::Once,
    thread,
    time::Duration,
};

use crate::soak;

/// The longest that the tests of one binary take together, outside of soak runs.
const LONGEST_RUN: Duration = Duration::from_secs(30 * 60);

/// Ends this process with a message if its tests take longer than any run does, so that no fault can
/// make a run wait for ever. Servers end with the process: their watchdogs see its end.
fn bound_this_run() {
    static BOUNDED: Once = Once::new();
    BOUNDED.call_once(|| {
        if !soak() {
            thread::spawn(|| {
                thread::sleep(LONGEST_RUN);
                eprintln!("the tests of this binary still run after {LONGEST_RUN:?}: one of them hangs");
                std::process::abort();
            });
        }
    });
}

/// `SANDBOXER_BIN`, or the one that cargo built beside this test.
#[must_use]
pub fn sandboxer() -> PathBuf {
    if let Some(path) = std::env::var_os("SANDBOXER_BIN") {
        return path.into();
    }
    let test = std::env::current_exe().unwrap();
    // target/debug/deps/<test> → target/debug/sandboxer
    let path = test.parent().and_then(|deps| deps.parent()).unwrap().join("sandboxer");
    assert!(path.exists(), "{} is not there: build the workspace first (`make test` does), or set SANDBOXER_BIN", path.display());
    path
}

/// The binary with an environment that holds nothing of ours but where the images and runsc are.
#[must_use]
pub fn command() -> Command {
    bound_this_run();
    let mut command = Command::new(sandboxer());
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("SANDBOXER_") && text != "SANDBOXER_IMAGE_DIR" && text != "SANDBOXER_RUNSC" {
            command.env_remove(&name);
        }
    }
    command.env_remove("PORT").stdin(Stdio::null());
    command
}

#[must_use]
pub fn stdout_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[must_use]
pub fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

//! The binary under test.

use std::{
    path::PathBuf,
    process::{Command, Output, Stdio},
};

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

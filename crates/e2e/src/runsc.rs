//! The real runsc behind a script that fails it on purpose, or lets it say that it is another version.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::PathBuf,
    process::Command,
};

use crate::{DEADLINE, Options, Server, stderr_of, stdout_of};

pub struct Runsc {
    dir: tempfile::TempDir,
}

impl Default for Runsc {
    fn default() -> Self {
        let dir = tempfile::Builder::new().prefix("sbx-runsc-").tempdir_in("/tmp").unwrap();
        symlink(real(), dir.path().join("real")).unwrap();
        let script = dir.path().join("runsc");
        fs::write(&script, include_str!("runsc.sh")).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        Self { dir }
    }
}

impl Runsc {
    #[must_use]
    pub fn on(&self, options: Options) -> Options {
        options.env("SANDBOXER_RUNSC", self.dir.path().join("runsc").to_str().unwrap())
    }

    /// It says that it is this version.
    #[must_use]
    pub fn saying(self, version: &str) -> Self {
        fs::write(self.dir.path().join("version"), format!("runsc version {version}\n")).unwrap();
        self
    }

    /// So many of the next calls of a command fail: `restore`, `pause`, with which a save begins, or `resume`.
    pub fn fail(&self, command: &str, times: usize) {
        for n in 0..times {
            fs::write(self.dir.path().join(format!("{command}.fail-{n}")), "").unwrap();
        }
    }

    /// How many of these failures are still to come.
    #[must_use]
    pub fn failures_left(&self) -> usize {
        let names = fs::read_dir(self.dir.path()).unwrap().flatten().map(|entry| entry.file_name());
        names.filter(|name| name.to_string_lossy().contains(".fail-")).count()
    }
}

/// The oldest one that is accepted, which `scripts/setup --dev` unpacks beside.
#[must_use]
pub fn floor_runsc() -> String {
    let var = |name| std::env::var_os(name).map(PathBuf::from);
    let data = var("XDG_DATA_HOME").or_else(|| var("HOME").map(|home| home.join(".local/share"))).unwrap();
    let path = data.join("sandboxer/floor/runsc");
    assert!(path.is_file(), "{} is missing: run scripts/setup --dev", path.display());
    path.to_str().unwrap().to_owned()
}

/// Runs a program in the agent's own root, as nothing but the host can, and returns its output.
#[must_use]
pub fn runsc_exec(server: &Server, sandbox_id: &str, argv: &[&str]) -> String {
    let output = Command::new("timeout")
        .arg(DEADLINE.as_secs().to_string())
        .arg(real())
        .arg("--root")
        .arg(server.data_dir().join("runsc"))
        .args(["exec", sandbox_id])
        .args(argv)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr_of(&output));
    stdout_of(&output)
}

/// The one that a server would take: the one that is named, else the one that setup installed for this user, else the one in `PATH`.
fn real() -> PathBuf {
    let var = |name| std::env::var_os(name).map(PathBuf::from);
    let data = var("XDG_DATA_HOME").or_else(|| var("HOME").map(|home| home.join(".local/share")));
    let in_path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&in_path).map(|dir| dir.join("runsc"));
    let candidates = var("SANDBOXER_RUNSC").into_iter().chain(data.map(|data| data.join("sandboxer/bin/runsc"))).chain(in_path);
    candidates.into_iter().find(|path| path.is_file()).expect("there is no runsc: run scripts/setup")
}

//! As whom a server runs: as whoever runs the tests, or as a user that owns nothing.

use std::{
    fs, io,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

use nix::unistd::{chown, geteuid};
use serde_json::Value;

use crate::binary::{self, stderr_of};

const NOBODY: u32 = 65_534;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum User {
    /// Whoever runs the tests.
    Current,
    /// One without any root. If no root runs the tests, it is the same one.
    Ordinary,
}

impl User {
    fn becomes_another(self) -> bool {
        self == Self::Ordinary && geteuid().is_root()
    }

    /// Makes this user the owner.
    pub(crate) fn own(self, path: &Path) {
        if self.becomes_another() {
            chown(path, Some(NOBODY.into()), Some(NOBODY.into())).unwrap();
        }
    }

    /// Gives the user what it needs, below its home: what root has may lie where others can't look.
    /// Without `with_image` the user's image directory stays empty.
    pub(crate) fn settle(self, home: &Path, with_image: bool) {
        if !self.becomes_another() {
            return;
        }
        fs::create_dir(home.join("bin")).unwrap();
        give(&binary::sandboxer(), &home.join("bin/sandboxer"));
        if let Some(runsc) = std::env::var_os("SANDBOXER_RUNSC") {
            give(Path::new(&runsc), &home.join("bin/runsc"));
        }
        let images = home.join("images");
        fs::create_dir(&images).unwrap();
        for file in if with_image { base_image() } else { &[] } {
            give(file, &images.join(file.file_name().unwrap()));
        }
        for path in [home, &images, &images.join("index.json")] {
            if path.exists() {
                chown(path, Some(NOBODY.into()), Some(NOBODY.into())).unwrap();
            }
        }
    }

    /// The binary under test, run as this user.
    pub(crate) fn command(self, home: &Path) -> Command {
        let mut command = binary::command();
        if self.becomes_another() {
            let mut other = Command::new(home.join("bin/sandboxer"));
            other.uid(NOBODY).gid(NOBODY).env_clear().current_dir(home).stdin(std::process::Stdio::null());
            other.env("PATH", std::env::var_os("PATH").unwrap_or_default()).env("HOME", home).env("TMPDIR", home);
            other.env("SANDBOXER_IMAGE_DIR", home.join("images"));
            if home.join("bin/runsc").exists() {
                other.env("SANDBOXER_RUNSC", home.join("bin/runsc"));
            }
            command = other;
        }
        command
    }
}

/// The base image and the index that names it; built first if it is not there.
fn base_image() -> &'static [PathBuf] {
    static FILES: LazyLock<Vec<PathBuf>> = LazyLock::new(|| {
        let built = binary::command().args(["image", "build"]).output().unwrap();
        assert!(built.status.success(), "{}", stderr_of(&built));
        let listed = binary::command().args(["image", "ls", "--json"]).output().unwrap();
        let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
        let images = listed["items"].as_array().or_else(|| listed.as_array()).unwrap();
        let base = images.iter().find(|image| image["name"] == "base").unwrap();
        let file = PathBuf::from(base["path"].as_str().unwrap());
        vec![file.with_file_name("index.json"), file]
    });
    &FILES
}

/// As a second name where that can be, since images are large; the index is changed by who has it, and never shared.
fn give(from: &Path, to: &Path) {
    let executable = fs::metadata(from).unwrap().permissions().mode() & 0o111 != 0;
    let shared = !from.ends_with("index.json") && readable_by_all(from) && fs::hard_link(from, to).is_ok();
    if !shared {
        fs::copy(from, to).map_err(|error| io::Error::other(format!("{}: {error}", from.display()))).unwrap();
        fs::set_permissions(to, fs::Permissions::from_mode(if executable { 0o755 } else { 0o644 })).unwrap();
    }
}

fn readable_by_all(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|meta| meta.permissions().mode() & 0o004 != 0)
}

/// Makes two tests of each of these functions, which take the [`User`] as whom the server is to run.
#[macro_export]
macro_rules! as_both_users {
    ($($promise:ident),* $(,)?) => {
        mod as_whoever_runs_the_tests {
            $(#[tokio::test] async fn $promise() { super::$promise($crate::User::Current).await; })*
        }
        mod as_an_ordinary_user {
            $(#[tokio::test] async fn $promise() { super::$promise($crate::User::Ordinary).await; })*
        }
    };
}

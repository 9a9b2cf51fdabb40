//! The same promises for an ordinary user without any root. Run by root, it becomes one first.
//!
//! Not by the usual harness, since a user namespace can be entered only by a process without threads.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::{
    env, fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::{Command, ExitCode},
};

use common::Gvisor;
use sandboxer_runtime::{conformance, userns};

const NOBODY: u32 = 65_534;
const BECAME: &str = "SANDBOXER_TEST_BECAME_NOBODY";

fn main() -> ExitCode {
    if nix::unistd::geteuid().is_root() && env::var_os(BECAME).is_none() {
        return as_nobody();
    }
    let privilege = userns::enter_if_needed().unwrap();
    assert_eq!(privilege, userns::Privilege::OwnNamespace);
    assert_eq!(userns::enter_if_needed().unwrap(), userns::Privilege::OwnNamespace, "entering again changes nothing");
    tokio::runtime::Runtime::new().unwrap().block_on(promises());
    ExitCode::SUCCESS
}

async fn promises() {
    let subject = Gvisor::new().await;
    macro_rules! kept {
        ($($promise:ident),*) => {$(
            conformance::$promise(&subject).await;
            println!("an ordinary user: {} ... ok", stringify!($promise));
        )*};
    }
    kept!(
        output_and_exit_code_are_exact,
        a_server_that_died_in_the_middle_of_a_frame_loses_nothing,
        a_sandbox_killed_from_outside_is_noticed_at_once,
        a_saved_sandbox_goes_on_and_so_does_its_copy,
        a_sandbox_saved_to_stop_goes_on_elsewhere,
        a_sandbox_saved_to_stop_can_be_thawed,
        a_half_started_sandbox_leaves_nothing,
        a_removed_sandbox_leaves_nothing
    );
}

/// Runs this program again as a user that owns nothing but a directory with what it needs.
fn as_nobody() -> ExitCode {
    let home = tempfile::tempdir().unwrap();
    let given = |from: &Path, name: &str, mode: u32| {
        let to = home.path().join(name);
        fs::copy(from, &to).unwrap();
        fs::set_permissions(&to, fs::Permissions::from_mode(mode)).unwrap();
        to
    };
    let image = given(&common::image(), "image.erofs", 0o444);
    let runsc = given(&common::runsc(), "runsc", 0o555);
    let program = given(&env::current_exe().unwrap(), "test", 0o555);
    nix::unistd::chown(home.path(), Some(NOBODY.into()), Some(NOBODY.into())).unwrap();
    let status = Command::new(program)
        .uid(NOBODY)
        .gid(NOBODY)
        .env_clear()
        .env(BECAME, "1")
        .env("PATH", "/usr/bin:/bin")
        .env("TMPDIR", home.path())
        .env("SANDBOXER_TEST_IMAGE", image)
        .env("SANDBOXER_RUNSC", runsc)
        .current_dir(home.path())
        .status()
        .unwrap();
    if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

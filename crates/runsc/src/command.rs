//! The commands as option structs that become argument lists.

use std::{ffi::OsString, path::PathBuf};

use serde::Deserialize;

use crate::Features;

/// Flags that every call shares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Global {
    /// Where runsc keeps the state of its containers.
    pub root: PathBuf,
    pub features: Features,
}

impl Global {
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let mut arguments = vec![
            joined("--root=", &self.root),
            // kvm hangs under nested virtualisation and ptrace is on its way out.
            "--platform=systrap".into(),
            "--network=none".into(),
            // The guest makes its own overlay; one by runsc could not be walked from inside.
            "--overlay2=none".into(),
            // Host cgroups are made by the caller, who puts runsc into them.
            "--ignore-cgroups".into(),
        ];
        if self.features.in_sandbox_cgroup_v2 {
            arguments.push("--in-sandbox-cgroup=v2".into());
        }
        if self.features.spec_validation {
            // The path of the image differs between machines and is an annotation; the server rebuilds the spec itself and compares
            // what matters.
            arguments.push("--restore-spec-validation=ignore".into());
        }
        arguments
    }
}

/// The files that one sandbox's start writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// Errors of the command itself, one JSON object a line.
    pub log: PathBuf,
    /// What runsc and the sandbox's kernel say while starting.
    pub boot_log: Option<PathBuf>,
    /// Where the sandbox's kernel writes its last words.
    pub panic_log: PathBuf,
}

impl Files {
    pub(crate) fn global_arguments(&self) -> Vec<OsString> {
        let mut arguments = vec![joined("--log=", &self.log), "--log-format=json".into(), joined("--panic-log=", &self.panic_log)];
        if let Some(boot_log) = &self.boot_log {
            arguments.push(joined("--debug-log=", boot_log));
        }
        arguments
    }
}

/// `runsc run -detach`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    pub id: String,
    /// The directory that holds `config.json`.
    pub bundle: PathBuf,
    pub pid_file: PathBuf,
    pub files: Files,
}

impl Run {
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let mut arguments = vec!["run".into()];
        arguments.extend(self.tail());
        arguments
    }

    /// `runsc create`: everything but the container's own processes is there when it ends.
    pub(crate) fn create_arguments(&self) -> Vec<OsString> {
        vec!["create".into(), joined("-pid-file=", &self.pid_file), joined("-bundle=", &self.bundle), self.id.clone().into()]
    }

    fn tail(&self) -> [OsString; 4] {
        ["-detach".into(), joined("-pid-file=", &self.pid_file), joined("-bundle=", &self.bundle), self.id.clone().into()]
    }
}

/// `runsc restore -detach`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restore {
    pub run: Run,
    /// The directory that a checkpoint was written into.
    pub image: PathBuf,
}

impl Restore {
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let mut arguments = vec!["restore".into(), joined("-image-path=", &self.image)];
        arguments.extend(self.run.tail());
        arguments
    }
}

/// `runsc checkpoint`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    pub id: String,
    /// A directory for this checkpoint alone.
    pub into: PathBuf,
    pub leave_running: bool,
}

impl Checkpoint {
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        // The default compression differs between versions, and the other one is several times slower.
        let mut arguments = vec!["checkpoint".into(), "--compression=none".into(), joined("-image-path=", &self.into)];
        if self.leave_running {
            arguments.push("-leave-running".into());
        }
        arguments.push(self.id.clone().into());
        arguments
    }
}

/// What `runsc state` tells.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct State {
    pub status: Status,
    /// The sandbox's process on the host; zero or less if there is none.
    #[serde(default)]
    pub pid: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Creating,
    Created,
    Running,
    Paused,
    Stopped,
}

fn joined(flag: &str, path: &std::path::Path) -> OsString {
    let mut argument = OsString::from(flag);
    argument.push(path);
    argument
}

#[cfg(test)]
mod tests {
    use super::*;

    fn global(new: bool) -> Global {
        let features = Features {
            version: crate::OLDEST_VERSION,
            version_text: "20240729".to_owned(),
            in_sandbox_cgroup_v2: new,
            control_socket: new,
            exclude_zero_pages: new,
            spec_validation: new,
        };
        Global { root: "/state".into(), features }
    }

    #[test]
    fn flags_that_the_binary_does_not_know_are_left_out() {
        assert_eq!(
            global(false).arguments(),
            ["--root=/state", "--platform=systrap", "--network=none", "--overlay2=none", "--ignore-cgroups"]
        );
        let new = global(true).arguments();
        assert!(new.contains(&"--in-sandbox-cgroup=v2".into()) && new.contains(&"--restore-spec-validation=ignore".into()));
    }

    #[test]
    fn options_become_arguments() {
        let files = Files { log: "/d/log".into(), boot_log: None, panic_log: "/d/panic".into() };
        let run = Run { id: "x".to_owned(), bundle: "/d".into(), pid_file: "/d/pid".into(), files };
        assert_eq!(run.arguments(), ["run", "-detach", "-pid-file=/d/pid", "-bundle=/d", "x"]);
        let restore = Restore { run, image: "/saved".into() };
        assert_eq!(restore.arguments()[..2], ["restore", "-image-path=/saved"]);
        let checkpoint = Checkpoint { id: "x".to_owned(), into: "/into".into(), leave_running: true };
        assert_eq!(checkpoint.arguments(), ["checkpoint", "--compression=none", "-image-path=/into", "-leave-running", "x"]);
    }

    #[test]
    fn a_state_is_read_with_whatever_else_it_says() {
        let state: State = serde_json::from_str(r#"{"ociVersion":"1.2.1","status":"paused","pid":7,"bundle":"/b"}"#).unwrap();
        assert_eq!(state, State { status: Status::Paused, pid: 7 });
    }
}

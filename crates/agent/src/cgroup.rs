//! Groups of user processes, by gVisor's own cgroup file system inside the sandbox.
//!
//! ```text
//! /            the agent and init: never limited, never killed
//! /user        pids.max, and as many more as interpreters wait
//! /user/exec-N one execution with all that descends from it, background processes included; or the interpreter that waits for it
//! ```
//!
//! A program is put into its group before it starts, by itself; it can't leave, since it has no way to this file system.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek},
    path::PathBuf,
};

use crate::{ipc::Serial, sys};
use nix::mount::MsFlags;

const MOUNT: &str = "/sandboxer/cgroup";

#[derive(Debug)]
pub(crate) struct Groups {
    /// Of the user; none: it is not limited.
    pids: Option<u32>,
}

fn user() -> PathBuf {
    PathBuf::from(MOUNT).join("user")
}

fn group(serial: Serial) -> PathBuf {
    user().join(format!("exec-{serial}"))
}

impl Groups {
    /// None where this gVisor offers no cgroups.
    pub(crate) fn mount(pids: Option<u32>) -> Option<Self> {
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        if sys::mount("cgroup2", MOUNT, flags, "").is_ok() {
            // Fails harmlessly where the controllers are on already.
            let _ = fs::write(PathBuf::from(MOUNT).join("cgroup.subtree_control"), "+pids");
        } else if sys::mount("cgroup", MOUNT, flags, "pids").is_err() {
            return None;
        }
        fs::create_dir(user()).ok()?;
        let groups = Self { pids };
        Some(Self { pids: pids.filter(|_| groups.allow(0).is_ok()) })
    }

    pub(crate) fn limits_pids(&self) -> bool {
        self.pids.is_some()
    }

    /// Lets there be so many processes beside those of the user.
    pub(crate) fn allow(&self, more: u32) -> io::Result<()> {
        self.pids.map_or(Ok(()), |pids| fs::write(user().join("pids.max"), pids.saturating_add(more).to_string()))
    }

    /// Makes the group of an execution; whoever writes `0` to the file joins it.
    pub(crate) fn create(&self, serial: Serial) -> io::Result<File> {
        let path = group(serial);
        // Never one that is there already: the processes in it would be another execution's.
        fs::create_dir(&path)?;
        OpenOptions::new().write(true).open(path.join("cgroup.procs"))
    }

    /// The processes of an execution, by the agent's numbers.
    pub(crate) fn members(&self, serial: Serial) -> Vec<i32> {
        read_pids(&group(serial).join("cgroup.procs"))
    }

    /// Kills every process of an execution. Returns whether any may be left.
    pub(crate) fn kill(&self, serial: Serial) -> bool {
        if fs::write(group(serial).join("cgroup.kill"), "1").is_ok() {
            return false;
        }
        let members = self.members(serial);
        for pid in &members {
            let _ = sys::kill(*pid, libc::SIGKILL);
        }
        !members.is_empty()
    }

    /// Removes the groups that no process is in any more, but those that are to be kept.
    pub(crate) fn tidy(&self, kept: impl Fn(Serial) -> bool) {
        for entry in fs::read_dir(user()).into_iter().flatten().flatten() {
            let serial = entry.file_name().to_str().and_then(|name| name.strip_prefix("exec-")?.parse().ok());
            if serial.is_some_and(|serial| !kept(serial)) {
                // Refused while a process is in it.
                let _ = fs::remove_dir(entry.path());
            }
        }
    }
}

fn read_pids(path: &std::path::Path) -> Vec<i32> {
    fs::read_to_string(path).unwrap_or_default().lines().filter_map(|line| line.trim().parse().ok()).filter(|pid| *pid > 1).collect()
}

/// Reads a small file of the kernel's again and again through one descriptor.
pub(crate) fn reread(file: &mut File, text: &mut String) -> io::Result<()> {
    text.clear();
    file.rewind()?;
    file.read_to_string(text)?;
    Ok(())
}

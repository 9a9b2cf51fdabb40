//! What a run that failed, or a package, leaves behind: processes and mounts. Everything of ours names one directory.

use std::{fs, path::Path};

use nix::{
    mount::{MntFlags, umount2},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::memory::processes_under;

/// Ends every process of this run. None, if it went well.
pub(crate) fn remove(home: &Path) {
    for pid in processes_under(home, 0).into_iter().filter_map(|pid| i32::try_from(pid).ok()) {
        // It may have ended meanwhile.
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
    unmount_below(home);
}

pub(crate) fn unmount_below(home: &Path) {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(Path::new);
    for point in points.filter(|point| point.starts_with(home)) {
        let _ = umount2(point, MntFlags::MNT_DETACH);
    }
}

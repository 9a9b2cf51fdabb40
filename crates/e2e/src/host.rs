//! What the host holds: processes, mounts, cgroups, memory.

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
};

#[derive(Debug, Clone)]
pub struct Process {
    pub pid: u32,
    pub command: String,
}

/// Every process whose command line names something under `dir`, stubs of the sandboxes included. Zombies have no command line.
#[must_use]
pub fn processes_naming(dir: &Path) -> Vec<Process> {
    let dir = dir.to_string_lossy();
    let mut processes = every_process();
    processes.retain(|process| process.command.contains(&*dir));
    processes
}

/// The processes that descend from `pid`.
#[must_use]
pub fn descendants(pid: u32) -> Vec<Process> {
    let all: Vec<(u32, Process)> = every_process().into_iter().filter_map(|process| Some((parent(process.pid)?, process))).collect();
    let mut found: Vec<Process> = Vec::new();
    let mut parents = vec![pid];
    while let Some(parent) = parents.pop() {
        for (_, process) in all.iter().filter(|(of, _)| *of == parent) {
            parents.push(process.pid);
            found.push(process.clone());
        }
    }
    found
}

fn every_process() -> Vec<Process> {
    let pids = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid: u32| {
        let command = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        Some(Process { pid, command: String::from_utf8_lossy(&command).replace('\0', " ") })
    })
    .collect()
}

fn parent(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

/// Whether the process is there and not a zombie.
#[must_use]
pub fn alive(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/status")).is_ok_and(|status| !status.contains("State:\tZ"))
}

/// Mount points below `dir`.
#[must_use]
pub fn mounts_under(dir: &Path) -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    points.filter(|point| point.starts_with(dir)).collect()
}

/// Cgroups, of any controller, that are named after this sandbox.
#[must_use]
pub fn cgroups_of(sandbox_id: &str) -> Vec<PathBuf> {
    cgroups(&|name| name.contains(sandbox_id))
}

/// Whether a sandbox has the time of one processor, which is what it has where nothing else was asked for. Where nobody limits that, it has.
#[must_use]
pub fn holds_one_cpu(sandbox_id: &str) -> bool {
    let limits = [("cpu.max", "20000 20000"), ("cpu.cfs_quota_us", "20000")];
    let held = |(dir, (file, limit)): (PathBuf, (&str, &str))| fs::read_to_string(dir.join(file)).map_or(true, |text| text.trim() == limit);
    cgroups_of(sandbox_id).into_iter().flat_map(|dir| limits.map(|limit| (dir.clone(), limit))).all(held)
}

/// Cgroups, of any controller, that are named after one of these sandboxes.
#[must_use]
pub fn cgroups_of_any(sandbox_ids: &HashSet<String>) -> Vec<PathBuf> {
    const ID_BYTES: usize = 36;
    cgroups(&|name| name.as_bytes().windows(ID_BYTES).any(|part| std::str::from_utf8(part).is_ok_and(|id| sandbox_ids.contains(id))))
}

fn cgroups(wanted: &dyn Fn(&str) -> bool) -> Vec<PathBuf> {
    fn walk(dir: &Path, depth: usize, wanted: &dyn Fn(&str) -> bool, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if wanted(&entry.file_name().to_string_lossy()) {
                    found.push(entry.path());
                } else if depth > 0 {
                    walk(&entry.path(), depth - 1, wanted, found);
                }
            }
        }
    }
    let mut found = Vec::new();
    walk(Path::new("/sys/fs/cgroup"), 5, wanted, &mut found);
    found
}

/// Files and directories anywhere below `dir` that are named after this sandbox.
#[must_use]
pub fn files_of(dir: &Path, sandbox_id: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut directories = vec![dir.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().contains(sandbox_id) {
                found.push(entry.path());
            } else if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                directories.push(entry.path());
            }
        }
    }
    found
}

/// Resident memory of a process, in bytes.
#[must_use]
pub fn rss(pid: u32) -> u64 {
    status_bytes(pid, "VmRSS:")
}

/// The most that a process ever had of it.
#[must_use]
pub fn peak_rss(pid: u32) -> u64 {
    status_bytes(pid, "VmHWM:")
}

fn status_bytes(pid: u32, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() * 1024
}

/// Open descriptors of a process.
#[must_use]
pub fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).map(Iterator::count).unwrap_or(0)
}

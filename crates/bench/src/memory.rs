//! What processes take of the host's memory: their proportional share, so that what all sandboxes map is counted once.

use std::{collections::HashSet, fs, path::Path};

const KIB_IN_MIB: f64 = 1024.0;

/// The processes whose command line names something under `dir`, and everything that descends from them; not `except`.
pub(crate) fn processes_under(dir: &Path, except: u32) -> Vec<u32> {
    let dir = dir.as_os_str().as_encoded_bytes();
    let all: Vec<u32> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| *pid != except)
        .collect();
    let names = |pid: &u32| {
        fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.windows(dir.len()).any(|part| part == dir))
            && *pid != std::process::id()
    };
    let mut found: HashSet<u32> = all.iter().copied().filter(names).collect();
    // Children of what was found; as often as it finds any.
    loop {
        let more: Vec<u32> =
            all.iter().copied().filter(|pid| !found.contains(pid) && parent(*pid).is_some_and(|of| found.contains(&of))).collect();
        if more.is_empty() {
            return found.into_iter().collect();
        }
        found.extend(more);
    }
}

fn parent(pid: u32) -> Option<u32> {
    field(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?, "PPid:")
}

/// In MiB; a process that has gone meanwhile counts nothing.
pub(crate) fn pss_mib(pids: &[u32]) -> f64 {
    pids.iter().filter_map(|pid| pss_kib(*pid)).map(f64::from).sum::<f64>() / KIB_IN_MIB
}

fn pss_kib(pid: u32) -> Option<u32> {
    field(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?, "Pss:")
}

fn field(text: &str, name: &str) -> Option<u32> {
    text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_by_its_arguments_and_its_memory_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let mut child = std::process::Command::new("cat").arg(&fifo).spawn().unwrap();
        // Until it has executed, its command line is ours.
        while processes_under(dir.path(), 0).is_empty() {}
        assert_eq!(processes_under(dir.path(), 0), [child.id()]);
        assert!(pss_mib(&[child.id()]) > 0.0);
        assert!(processes_under(dir.path(), child.id()).is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

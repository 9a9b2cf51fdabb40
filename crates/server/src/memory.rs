//! How much memory there is for things that only wait: what the machine has left, or the server's own cgroup if that is less.

use std::{
    fs,
    path::{Path, PathBuf},
};

const CGROUPS: &str = "/sys/fs/cgroup";

/// In bytes. None: nobody knows, and nothing is held back for it.
#[must_use]
pub fn available_memory(meminfo: &Path) -> Option<u64> {
    let machine = fs::read_to_string(meminfo).ok().and_then(|text| of_machine(&text));
    let own = fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| of_cgroup(Path::new(CGROUPS), &text));
    match (machine, own) {
        (Some(machine), Some(own)) => Some(machine.min(own)),
        (machine, own) => machine.or(own),
    }
}

fn of_machine(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The least that is left in this process's cgroup and those above it (v2). What files take there is given back when it is needed.
fn of_cgroup(mount: &Path, own: &str) -> Option<u64> {
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let mut dir = mount.join(path);
    let mut least = None;
    while dir.starts_with(mount) {
        if let Some(left) = left_in(&dir) {
            least = Some(least.map_or(left, |least: u64| least.min(left)));
        }
        dir = dir.parent().map(PathBuf::from)?;
    }
    least
}

fn left_in(dir: &Path) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(dir.join(name)).ok()?.trim().parse::<u64>().ok();
    let most = number("memory.max")?;
    let used = number("memory.current")?;
    let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let files = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.trim().parse::<u64>().ok()).unwrap_or(0);
    Some(most.saturating_sub(used.saturating_sub(files)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_says_what_is_available() {
        assert_eq!(of_machine("MemTotal:  8 kB\nMemAvailable:    2048 kB\nX: 1\n"), Some(2048 * 1024));
        assert_eq!(of_machine("MemTotal: 8 kB\n"), None);
        assert_eq!(of_machine("MemAvailable: lots\n"), None);
    }

    #[test]
    fn the_tightest_cgroup_counts_and_files_are_given_back() {
        let mount = tempfile::tempdir().unwrap();
        let (outer, inner) = (mount.path().join("a"), mount.path().join("a/b"));
        fs::create_dir_all(&inner).unwrap();
        let write = |dir: &Path, name: &str, text: &str| fs::write(dir.join(name), text).unwrap();
        write(&inner, "memory.max", "max\n");
        write(&outer, "memory.max", "1000\n");
        write(&outer, "memory.current", "900\n");
        write(&outer, "memory.stat", "anon 5\ninactive_file 300\n");
        assert_eq!(of_cgroup(mount.path(), "0::/a/b\n"), Some(400));
        assert_eq!(of_cgroup(mount.path(), "4:memory:/a\n"), None);
        assert_eq!(of_cgroup(mount.path(), "0::/nowhere\n"), None);
    }
}

//! The bound on a sandbox's memory where no cgroup holds one.
//!
//! The agent sees what the guest's programs use. It does not see what gVisor's kernel needs to serve them, such as what waits in sockets
//! and pipes, and a guest can make that as large as it likes. Nothing tells when a process has grown, so it is looked at.

use std::{fs, path::Path, time::Duration};

use sandboxer_protocol::agent::AgentConfig;
use serde::Deserialize;

use crate::cgroup::SandboxCgroup;

const EVERY: Duration = Duration::from_millis(250);
/// What gVisor's kernel may have beside its guest, as in a cgroup.
const KERNEL_BYTES: u64 = 256 << 20;

/// Ends when the sandbox has more than it may have; never where that is not for us to see to.
pub(super) async fn too_large(pid: i32, dir: &Path, cgroup: &SandboxCgroup) {
    let bound = if cgroup.counts_memory() { None } else { memory_bytes(dir) };
    let Some(bound) = bound else { return std::future::pending().await };
    let mut looks = tokio::time::interval(EVERY);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        if resident_bytes(pid).is_some_and(|bytes| bytes > bound.saturating_add(KERNEL_BYTES)) {
            return;
        }
    }
}

/// What the sandbox was told when it was started, by this server or an earlier one.
fn memory_bytes(dir: &Path) -> Option<u64> {
    #[derive(Deserialize)]
    struct Spec {
        process: Process,
    }
    #[derive(Deserialize)]
    struct Process {
        env: Vec<String>,
    }
    let spec: Spec = serde_json::from_slice(&fs::read(dir.join("config.json")).ok()?).ok()?;
    let told = spec.process.env.iter().find_map(|variable| variable.strip_prefix(AgentConfig::VARIABLE)?.strip_prefix('='))?;
    serde_json::from_str::<AgentConfig>(told).ok()?.memory_bytes
}

/// None once the process is gone.
fn resident_bytes(pid: i32) -> Option<u64> {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_found_in_what_the_sandbox_was_started_with() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(memory_bytes(dir.path()), None);
        let config = r#"{"marker":"","disk_bytes":1,"disk_inodes":1,"memory_bytes":67108864,"pids":null,"output_window_bytes":1,"stdin_window_bytes":1}"#;
        let spec = serde_json::json!({"process": {"env": ["PATH=/bin", format!("{}={config}", AgentConfig::VARIABLE)]}});
        fs::write(dir.path().join("config.json"), spec.to_string()).unwrap();
        assert_eq!(memory_bytes(dir.path()), Some(64 << 20));
    }

    #[test]
    fn the_memory_of_a_process_is_read_as_long_as_it_is_there() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(resident_bytes(own).is_some_and(|bytes| bytes > 1 << 20));
        assert_eq!(resident_bytes(i32::MAX), None);
    }
}

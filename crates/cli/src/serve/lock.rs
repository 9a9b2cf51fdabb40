//! One instance at a time holds a data directory.

use std::{
    fs::{self, File},
    io,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::fcntl::{Flock, FlockArg};
use tracing::warn;

/// How long the lock of a process that is gone may be held by what it was about to start: such a child has all its descriptors until it
/// becomes another program.
const HEIRS: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

pub(super) async fn data_directory(data_dir: &Path) -> anyhow::Result<Flock<File>> {
    let path = data_dir.join("lock");
    let mut file =
        File::options().create(true).truncate(false).write(true).open(&path).with_context(|| format!("open {}", path.display()))?;
    let begun = Instant::now();
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => {
                // Who holds it, for the next one and for people.
                if let Err(error) = fs::write(&path, format!("{}\n", std::process::id())) {
                    warn!(%error, "the process id could not be written to the lock file");
                }
                return Ok(lock);
            }
            Err((again, errno)) if io::Error::from(errno).kind() == io::ErrorKind::WouldBlock => {
                let holder = fs::read_to_string(&path).unwrap_or_default();
                if begun.elapsed() > HEIRS || lives(holder.trim()) {
                    let dir = data_dir.display();
                    anyhow::bail!(
                        "another instance (process {}) holds the data directory {dir}: stop it, or give this one another --data-dir",
                        holder.trim()
                    )
                }
                file = again;
                tokio::time::sleep(LOOK_AGAIN).await;
            }
            Err((_, errno)) => return Err(errno).with_context(|| format!("lock {}", path.display())),
        }
    }
}

/// A process that is there and has not ended.
fn lives(pid: &str) -> bool {
    let Ok(pid) = pid.parse::<u32>() else { return false };
    let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Behind the name, which may hold anything.
    state.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod tests {
    use super::*;

    fn held_by(dir: &Path, pid: u32) -> Flock<File> {
        fs::write(dir.join("lock"), format!("{pid}\n")).unwrap();
        let file = File::options().write(true).open(dir.join("lock")).unwrap();
        Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno).unwrap()
    }

    #[tokio::test]
    async fn a_directory_that_another_instance_holds_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let _held = held_by(dir.path(), std::process::id());
        let begun = Instant::now();
        let error = data_directory(dir.path()).await.unwrap_err().to_string();
        assert!(error.contains(&std::process::id().to_string()) && begun.elapsed() < HEIRS, "{error}");
    }

    #[tokio::test]
    async fn what_a_dead_instance_was_about_to_start_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let mut dead = std::process::Command::new("true").spawn().unwrap();
        dead.wait().unwrap();
        let held = held_by(dir.path(), dead.id());
        let (lock, ()) = tokio::join!(data_directory(dir.path()), async {
            tokio::time::sleep(5 * LOOK_AGAIN).await;
            drop(held);
        });
        lock.unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("lock")).unwrap().trim(), std::process::id().to_string());
    }
}

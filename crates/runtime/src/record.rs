//! What a server process writes down about a sandbox for the next one.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{cgroup::SandboxCgroup, process::Identity};

const FILE: &str = "runtime.json";
/// Raised when an older server could not understand what is written. Fields that are only added don't raise it.
const VERSION: u32 = 1;

/// `runtime.json`. It only grows: a server of the next version takes up the sandboxes of this one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    version: u32,
    pub(crate) phase: Phase,
    /// Of `runsc` while starting, then of the sandbox.
    pub(crate) process: Identity,
    #[serde(default)]
    pub(crate) cgroup: SandboxCgroup,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Phase {
    Starting,
    Running,
}

impl Record {
    pub(crate) fn new(phase: Phase, process: Identity, cgroup: SandboxCgroup) -> Self {
        Self { version: VERSION, phase, process, cgroup }
    }

    pub(crate) fn write(&self, dir: &Path) -> io::Result<()> {
        let temporary = dir.join("runtime.json.new");
        fs::write(&temporary, serde_json::to_vec(self)?)?;
        // Not synced: after a crash of the machine there is no sandbox to be taken up.
        fs::rename(temporary, path(dir))
    }

    /// None if there is none, or none that can be understood.
    ///
    /// # Errors
    /// There may be one, which can't be read now.
    pub(crate) fn read(dir: &Path) -> io::Result<Option<Self>> {
        let json = match fs::read(path(dir)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            json => json?,
        };
        Ok(serde_json::from_slice(&json).ok().filter(|record: &Self| record.version <= VERSION))
    }

    pub(crate) fn remove(dir: &Path) {
        fs::remove_file(path(dir)).ok();
    }
}

fn path(dir: &Path) -> PathBuf {
    dir.join(FILE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_format_is_still_read() {
        let dir = tempfile::tempdir().unwrap();
        let first = r#"{"version":1,"phase":"running","process":{"pid":7,"started":8,"boot_id":"b"},"cgroup":{"dirs":["/c/x"]},"later":1}"#;
        fs::write(path(dir.path()), first).unwrap();
        assert_eq!(Record::read(&dir.path().join("nowhere")).unwrap(), None);
        let record = Record::read(dir.path()).unwrap().unwrap();
        assert_eq!(record.process.pid, 7);
        record.write(dir.path()).unwrap();
        assert_eq!(Record::read(dir.path()).unwrap(), Some(record));
        fs::write(path(dir.path()), first.replace("\"version\":1", "\"version\":2")).unwrap();
        assert_eq!(Record::read(dir.path()).unwrap(), None);
        fs::remove_file(path(dir.path())).unwrap();
        fs::create_dir(path(dir.path())).unwrap();
        assert!(Record::read(dir.path()).is_err(), "it is there and can't be read");
    }
}

//! Why sandboxes ended, remembered for those who come later, also after a restart.
//!
//! One small file a sandbox, named by its id. Failing to write one costs a message, so it is logged and no more.

use std::{
    collections::{HashMap, VecDeque},
    fs, io,
    os::unix::fs::DirBuilderExt as _,
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use sandboxer_protocol::{SandboxId, client::EndReason};
use serde::{Deserialize, Serialize};
use tracing::warn;

/// Beyond this the oldest are forgotten before their time.
const MOST: usize = 10_000;

#[derive(Debug)]
pub(crate) struct Obituaries {
    dir: PathBuf,
    keep: Duration,
    known: Mutex<Known>,
}

/// Why a sandbox ended, and who may know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Obituary {
    pub(crate) message: String,
    pub(crate) token_sha256: String,
    /// The API key that made it, by its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) owner: Option<String>,
    /// None: its client, its owner or its idle time ended it, or the server that wrote this was older.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<EndReason>,
}

#[derive(Debug, Default)]
struct Known {
    texts: HashMap<SandboxId, Obituary>,
    order: VecDeque<(SystemTime, SandboxId)>,
}

impl Obituaries {
    /// Reads what an earlier server process left.
    pub(crate) fn open(dir: PathBuf, keep: Duration) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        let mut found = Vec::new();
        for entry in fs::read_dir(&dir)? {
            let entry = entry?;
            let id = entry.file_name().to_str().and_then(|name| name.parse::<SandboxId>().ok());
            if let (Some(id), Ok(meta)) = (id, entry.metadata()) {
                found.push((meta.modified()?, id));
            }
        }
        found.sort();
        let mut known = Known::default();
        for (at, id) in found {
            let read = fs::read(dir.join(id.to_string())).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
            if let Some(obituary) = read {
                known.texts.insert(id, obituary);
                known.order.push_back((at, id));
            }
        }
        let obituaries = Self { dir, keep, known: Mutex::new(known) };
        obituaries.forget_old();
        Ok(obituaries)
    }

    pub(crate) fn add(&self, id: SandboxId, obituary: Obituary) {
        let json = serde_json::to_vec(&obituary).unwrap_or_default();
        if let Err(error) = fs::write(self.dir.join(id.to_string()), json) {
            warn!(%error, sandbox = %id, "why the sandbox ended could not be written down");
        }
        {
            let mut known = self.lock();
            if known.texts.insert(id, obituary).is_none() {
                known.order.push_back((SystemTime::now(), id));
            }
        }
        self.forget_old();
    }

    pub(crate) fn get(&self, id: SandboxId) -> Option<Obituary> {
        self.forget_old();
        self.lock().texts.get(&id).cloned()
    }

    fn forget_old(&self) {
        let mut known = self.lock();
        let now = SystemTime::now();
        while let Some((at, id)) = known.order.front().copied() {
            let old = now.duration_since(at).is_ok_and(|age| age > self.keep);
            if !old && known.order.len() <= MOST {
                break;
            }
            known.order.pop_front();
            known.texts.remove(&id);
            // It is only in the way if it can't be removed, and the next start tries again.
            let _ = fs::remove_file(self.dir.join(id.to_string()));
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_remembered_across_a_restart_and_forgotten_in_time() {
        let dir = tempfile::tempdir().unwrap();
        let id = SandboxId::random();
        let obituary = Obituary {
            message: "killed".to_owned(),
            token_sha256: "00".to_owned(),
            owner: Some("alice".to_owned()),
            reason: Some(EndReason::OutOfMemory),
        };
        Obituaries::open(dir.path().into(), Duration::from_secs(3600)).unwrap().add(id, obituary.clone());
        let next = Obituaries::open(dir.path().into(), Duration::from_secs(3600)).unwrap();
        assert_eq!(next.get(id), Some(obituary));
        let later = Obituaries::open(dir.path().into(), Duration::ZERO).unwrap();
        assert_eq!(later.get(id), None);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn an_obituary_of_an_older_server_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let id = SandboxId::random();
        fs::write(dir.path().join(id.to_string()), r#"{"message":"killed","token_sha256":"00"}"#).unwrap();
        let read = Obituaries::open(dir.path().into(), Duration::from_secs(3600)).unwrap().get(id).unwrap();
        assert_eq!((read.message.as_str(), read.owner, read.reason), ("killed", None, None));
    }
}

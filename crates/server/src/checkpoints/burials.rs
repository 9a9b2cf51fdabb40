//! Sandboxes that are gone for good, until the volume knows it. What it can't be told now is told by the next process, and nothing of them goes on here meanwhile.
//!
//! One small file a sandbox, written before anybody hears that it is gone. Failing to write one is logged and no more: the volume is told all the same.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use sandboxer_protocol::SandboxId;
use sandboxer_store::{SandboxStatus, lease::LeaseError};
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;
use tracing::{info, warn};

use super::{Checkpoints, private_dir};
use crate::sandbox::record::Record;

/// What is to be told of one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Burial {
    pub(crate) record: Record,
    /// In which it was held when it ended.
    pub(crate) epoch: u64,
    pub(crate) reason: String,
}

#[derive(Debug)]
pub(super) struct Burials {
    dir: PathBuf,
    due: Mutex<HashMap<SandboxId, Burial>>,
}

impl Burials {
    /// Reads what an earlier server process left.
    pub(super) fn open(dir: PathBuf) -> io::Result<Self> {
        private_dir(&dir)?;
        let mut due = HashMap::new();
        for entry in fs::read_dir(&dir)? {
            let entry = entry?;
            if entry.file_name().to_str().and_then(|name| name.parse::<SandboxId>().ok()).is_none() {
                continue;
            }
            let path = entry.path();
            match read(&path) {
                Ok(burial) => drop(due.insert(burial.record.id, burial)),
                Err(error) => warn!(%error, path = %path.display(), "which sandbox is gone can't be read"),
            }
        }
        Ok(Self { dir, due: Mutex::new(due) })
    }

    fn begin(&self, burial: &Burial) {
        let id = burial.record.id;
        if let Err(error) = write(&self.path(id), burial) {
            warn!(%error, sandbox = %id, "that the sandbox is gone could not be written down");
        }
        self.lock().insert(id, burial.clone());
    }

    fn end(&self, id: SandboxId) {
        // Told once more, it is no news.
        let _ = fs::remove_file(self.path(id));
        self.lock().remove(&id);
    }

    fn path(&self, id: SandboxId) -> PathBuf {
        self.dir.join(id.to_string())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SandboxId, Burial>> {
        // A map is whole after each change.
        self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Checkpoints {
    /// Why a sandbox is gone for good of which the volume does not know it yet.
    pub(crate) fn unburied(&self, id: SandboxId) -> Option<String> {
        self.burials.lock().get(&id).map(|burial| burial.reason.clone())
    }

    /// Has the volume told by `telling` that a sandbox is gone for good, however long that takes.
    pub(crate) fn bury(
        self: &Arc<Self>,
        burial: Burial,
        telling: impl Future<Output = Result<(), LeaseError>> + Send + 'static,
    ) -> JoinHandle<Result<(), String>> {
        self.burials.begin(&burial);
        let checkpoints = Arc::clone(self);
        self.tasks.spawn(async move {
            let told = telling.await;
            // Else the server ends, and the next one goes on with it.
            if !matches!(told, Err(LeaseError::Closed)) {
                checkpoints.burials.end(burial.record.id);
            }
            told.map_err(|error| error.to_string())?;
            checkpoints.describe(&burial.record, SandboxStatus::Killed, None).await.map_err(|error| error.whole())
        })
    }

    /// Goes on with what an earlier process could not tell.
    pub(crate) fn bury_what_is_due(self: &Arc<Self>) {
        let due: Vec<Burial> = self.burials.lock().values().cloned().collect();
        for burial in due {
            info!(sandbox = %burial.record.id, "ended for good by an earlier process, of which the volume may not know");
            let held = self.leases.resume(burial.record.id, burial.epoch);
            let reason = burial.reason.clone();
            drop(self.bury(burial, async move { held.lease.bury(reason).await }));
        }
    }
}

fn read(path: &Path) -> io::Result<Burial> {
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

fn write(path: &Path, burial: &Burial) -> io::Result<()> {
    let temporary = path.with_extension("new");
    fs::write(&temporary, serde_json::to_vec(burial)?)?;
    fs::rename(temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_volume_was_not_told_is_known_to_the_next_process_until_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let record = Record::parse(include_bytes!("../sandbox/record_v1.json")).unwrap();
        let id = record.id;
        let burial = Burial { record, epoch: 7, reason: "killed".to_owned() };
        Burials::open(dir.path().into()).unwrap().begin(&burial);
        let next = Burials::open(dir.path().into()).unwrap();
        let found = next.lock().get(&id).map(|found| (found.epoch, found.reason.clone()));
        assert_eq!(found, Some((7, "killed".to_owned())));
        next.end(id);
        assert!(next.lock().is_empty() && Burials::open(dir.path().into()).unwrap().lock().is_empty());
    }
}

//! What exists, in two files: `snapshots.json` and `sandboxes.json`. The server owns them.
//!
//! A row is written before the work that it stands for and changed after it, so that what a killed server began is found by the next.

mod file;

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use sandboxer_protocol::SandboxId;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use self::file::{JsonFile, Rows};
use crate::{ExtensionName, HostName, Inputs, Map, ProfileName, SnapshotId};

/// Why a file could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("{} is of version {version}, which a newer server wrote: use that one", path.display())]
    Newer { path: PathBuf, version: u64 },
    #[error("{} has {most} entries, and that is all it may have: delete some", path.display())]
    Full { path: PathBuf, most: usize },
    #[error("the work was given up")]
    Cancelled,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotState {
    Pending,
    Completed,
    Failed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxState {
    Provisioning,
    Ready,
    Failed,
}

/// A snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SnapshotRow {
    pub id: SnapshotId,
    pub sandbox_id: SandboxId,
    pub profile: ProfileName,
    pub extension: ExtensionName,
    pub host: HostName,
    pub status: SnapshotState,
    pub created_at: jiff::Timestamp,
    #[serde(default)]
    pub size_bytes: Option<u64>,
    #[serde(default)]
    pub meta: Map,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Those of the sandbox, for the restored one.
    #[serde(default)]
    pub inputs: Inputs,
    #[serde(default)]
    pub metadata: Map,
    /// The name of the API key that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
}

/// A sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SandboxRow {
    pub id: SandboxId,
    pub profile: ProfileName,
    pub extension: ExtensionName,
    pub host: HostName,
    pub status: SandboxState,
    pub created_at: jiff::Timestamp,
    #[serde(default)]
    pub metadata: Map,
    #[serde(default)]
    pub inputs: Inputs,
    #[serde(default)]
    pub handle: Map,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The snapshot that it was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<SnapshotId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
}

/// Both files.
#[derive(Debug, Clone)]
pub struct WorkspaceStore {
    snapshots: Table<SnapshotRow>,
    sandboxes: Table<SandboxRow>,
}

/// One file. Its work is done on a thread for files, one at a time, so that those threads don't all wait for one lock.
#[derive(Debug)]
struct Table<R> {
    file: Arc<JsonFile<R>>,
    turn: Arc<Semaphore>,
}

impl<R> Clone for Table<R> {
    fn clone(&self) -> Self {
        Self { file: Arc::clone(&self.file), turn: Arc::clone(&self.turn) }
    }
}

impl<R> Table<R>
where
    R: Serialize + serde::de::DeserializeOwned + Send + 'static,
{
    fn new(path: PathBuf, name: &'static str) -> Self {
        Self { file: Arc::new(JsonFile::new(path, name)), turn: Arc::new(Semaphore::new(1)) }
    }

    async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&JsonFile<R>) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let turn = Arc::clone(&self.turn).acquire_owned().await.map_err(|_| StoreError::Cancelled)?;
        let file = Arc::clone(&self.file);
        let done = tokio::task::spawn_blocking(move || {
            let done = work(&file);
            drop(turn);
            done
        });
        done.await.map_err(|_| StoreError::Cancelled)?
    }

    async fn change<T: Send + 'static>(&self, change: impl FnOnce(&mut Rows<R>) -> T + Send + 'static) -> Result<T, StoreError> {
        self.with(move |file| file.change(change)).await
    }

    async fn read(&self) -> Result<Vec<R>, StoreError> {
        self.with(|file| file.read().map(|rows| rows.items)).await
    }
}

impl WorkspaceStore {
    /// Opens the files of a directory, which it makes private where it is not there. What is damaged is set aside.
    ///
    /// # Errors
    /// A file can't be read, or a newer server wrote it.
    pub async fn open(dir: &Path) -> Result<Self, StoreError> {
        let (dir, at) = (dir.to_owned(), dir.to_owned());
        let made = tokio::task::spawn_blocking(move || file::private_dir(&dir)).await.map_err(|_| StoreError::Cancelled)?;
        made.map_err(|error| StoreError::Io { path: at.clone(), error })?;
        let store = Self {
            snapshots: Table::new(at.join("snapshots.json"), "snapshots"),
            sandboxes: Table::new(at.join("sandboxes.json"), "sandboxes"),
        };
        store.snapshots.with(JsonFile::sweep).await?;
        store.sandboxes.with(JsonFile::sweep).await?;
        store.snapshots.read().await?;
        store.sandboxes.read().await?;
        Ok(store)
    }

    /// What could not be read and was set aside, for people to look at.
    pub async fn damaged(&self) -> Vec<String> {
        let mut found = self.snapshots.with(|file| Ok(file.set_aside())).await.unwrap_or_default();
        found.extend(self.sandboxes.with(|file| Ok(file.set_aside())).await.unwrap_or_default());
        found
    }

    /// Says of everything that an earlier process left in the middle that it failed, and returns those sandboxes.
    ///
    /// # Errors
    /// A file can't be read or written.
    pub async fn take_over(&self) -> Result<(Vec<SandboxRow>, Vec<SnapshotRow>), StoreError> {
        const WHY: &str = "The server was stopped in the middle of it.";
        let snapshots = self.snapshots.change(|rows| {
            let left = rows.items.iter_mut().filter(|row| row.status == SnapshotState::Pending);
            left.map(|row| {
                row.status = SnapshotState::Failed;
                row.error = Some(WHY.to_owned());
                row.clone()
            })
            .collect()
        });
        let sandboxes = self.sandboxes.change(|rows| {
            let left = rows.items.iter_mut().filter(|row| row.status == SandboxState::Provisioning);
            left.map(|row| {
                row.status = SandboxState::Failed;
                row.error = Some(WHY.to_owned());
                row.clone()
            })
            .collect()
        });
        Ok((sandboxes.await?, snapshots.await?))
    }

    /// # Errors
    /// The file can't be read.
    pub async fn snapshots(&self) -> Result<Vec<SnapshotRow>, StoreError> {
        self.snapshots.read().await
    }

    /// # Errors
    /// The file can't be read.
    pub async fn sandboxes(&self) -> Result<Vec<SandboxRow>, StoreError> {
        self.sandboxes.read().await
    }

    /// # Errors
    /// The file can't be read.
    pub async fn snapshot(&self, id: SnapshotId) -> Result<Option<SnapshotRow>, StoreError> {
        Ok(self.snapshots.read().await?.into_iter().find(|row| row.id == id))
    }

    /// # Errors
    /// The file can't be read.
    pub async fn sandbox(&self, id: SandboxId) -> Result<Option<SandboxRow>, StoreError> {
        Ok(self.sandboxes.read().await?.into_iter().find(|row| row.id == id))
    }

    /// Writes a row, in place of an earlier one of its id.
    ///
    /// # Errors
    /// The file can't be written, or is full.
    pub async fn put_snapshot(&self, row: SnapshotRow) -> Result<(), StoreError> {
        self.snapshots.change(move |rows| rows.put(row, |row| row.id)).await
    }

    /// Writes a row, in place of an earlier one of its id.
    ///
    /// # Errors
    /// The file can't be written, or is full.
    pub async fn put_sandbox(&self, row: SandboxRow) -> Result<(), StoreError> {
        self.sandboxes.change(move |rows| rows.put(row, |row| row.id)).await
    }

    /// # Errors
    /// The file can't be written.
    pub async fn remove_snapshot(&self, id: SnapshotId) -> Result<(), StoreError> {
        self.snapshots.change(move |rows| rows.items.retain(|row| row.id != id)).await
    }

    /// # Errors
    /// The file can't be written.
    pub async fn remove_sandbox(&self, id: SandboxId) -> Result<(), StoreError> {
        self.sandboxes.change(move |rows| rows.items.retain(|row| row.id != id)).await
    }
}

#[cfg(test)]
mod tests;

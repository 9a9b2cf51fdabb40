//! What filesystem snapshots there are, and what is known of each.

use futures_util::{StreamExt as _, stream};
use jiff::Timestamp;
use sandboxer_store::{Action, Error, Filesystem, FilesystemName, Manifest, ManifestAt};
use tracing::warn;

use super::{Filesystems, Layer, Template, damage};
use crate::{checkpoints::tenant, manager::CreateError};

/// Manifests that are read at once.
const LOOKS_AT_ONCE: usize = 8;

#[derive(Debug, Clone)]
pub(crate) struct SavedFilesystem {
    pub(crate) name: FilesystemName,
    pub(crate) about: Filesystem,
    /// Bytes on the volume, shared with others or not.
    pub(crate) stored_bytes: u64,
    /// Why the snapshot can't be used. Only its name and a time are known then.
    pub(crate) damage: Option<String>,
}

impl SavedFilesystem {
    pub(crate) fn of(manifest: &Manifest) -> Option<Self> {
        let ManifestAt::Filesystem { name, .. } = manifest.at() else { return None };
        Some(Self { name, about: manifest.filesystem()?.clone(), stored_bytes: manifest.stored_bytes(), damage: None })
    }

    /// A snapshot whose manifest is not what was written.
    fn damaged(name: FilesystemName, written_at: Timestamp, why: String) -> Self {
        let about = Filesystem {
            created_at: written_at,
            sandbox_id: None,
            image: None,
            entries: 0,
            content_bytes: 0,
            other: serde_json::Map::new(),
        };
        Self { name, about, stored_bytes: 0, damage: Some(why) }
    }
}

impl Filesystems {
    /// All snapshots of an owner, damaged ones included.
    pub(crate) async fn list(&self, owner: Option<&str>) -> Result<Vec<SavedFilesystem>, Error> {
        let names = self.volume.filesystems(tenant(owner)).await?;
        if names.is_empty() {
            self.present().await?;
        }
        let looks = stream::iter(names).map(async |name| self.about(owner, name).await);
        let looked: Vec<_> = looks.buffered(LOOKS_AT_ONCE).collect().await;
        let looked: Result<Vec<_>, Error> = looked.into_iter().collect();
        Ok(looked?.into_iter().flatten().collect())
    }

    /// Looks a snapshot up, damaged or not. None: there is none of that name.
    pub(crate) async fn about(&self, owner: Option<&str>, name: FilesystemName) -> Result<Option<SavedFilesystem>, Error> {
        match self.find(owner, name).await {
            Ok(manifest) => Ok(manifest.as_ref().and_then(SavedFilesystem::of)),
            Err(error) if error.action() == Action::Damaged => {
                warn!(%name, error = error.whole(), "a filesystem snapshot is damaged");
                let written_at = self.volume.filesystem_written_at(tenant(owner), name).await?;
                Ok(written_at.map(|written_at| SavedFilesystem::damaged(name, written_at, damage(&error))))
            }
            Err(error) => Err(error),
        }
    }

    /// True if it was there.
    pub(crate) async fn delete(&self, owner: Option<&str>, name: FilesystemName) -> Result<bool, Error> {
        self.volume.delete_filesystem(tenant(owner), name).await
    }

    /// The archive itself.
    pub(crate) async fn export(&self, manifest: Manifest) -> Result<Layer, CreateError> {
        self.bring(&Template { image: None, manifest: manifest.into() }).await
    }
}

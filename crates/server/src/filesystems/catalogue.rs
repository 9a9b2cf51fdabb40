//! What filesystem snapshots there are, and what is known of each.

use futures_util::{StreamExt as _, stream};
use sandboxer_store::{Error, Filesystem, FilesystemName, Manifest, ManifestAt};
use tracing::warn;

use super::{Filesystems, Layer, Template};
use crate::{checkpoints::tenant, manager::CreateError};

/// Manifests that are read at once.
const LOOKS_AT_ONCE: usize = 8;

#[derive(Debug, Clone)]
pub(crate) struct SavedFilesystem {
    pub(crate) name: FilesystemName,
    pub(crate) about: Filesystem,
    /// Bytes on the volume, shared with others or not.
    pub(crate) stored_bytes: u64,
}

impl SavedFilesystem {
    pub(crate) fn of(manifest: &Manifest) -> Option<Self> {
        let ManifestAt::Filesystem { name, .. } = manifest.at() else { return None };
        Some(Self { name, about: manifest.filesystem()?.clone(), stored_bytes: manifest.stored_bytes() })
    }
}

impl Filesystems {
    /// Those of an owner. What can't be read is left out.
    pub(crate) async fn list(&self, owner: Option<&str>) -> Result<Vec<SavedFilesystem>, Error> {
        let names = self.volume.filesystems(tenant(owner)).await?;
        let looks = stream::iter(names).map(async |name| (name, self.find(owner, name).await));
        let looked: Vec<_> = looks.buffered(LOOKS_AT_ONCE).collect().await;
        let mut found = Vec::new();
        for (name, look) in looked {
            match look {
                Ok(manifest) => found.extend(manifest.as_ref().and_then(SavedFilesystem::of)),
                Err(error) => warn!(%name, error = error.whole(), "a filesystem snapshot can't be read"),
            }
        }
        Ok(found)
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

//! Filesystem snapshots: the files that sandboxes changed, as archives that new ones start from. Each is a manifest under the name that its owner gave it, and
//! stands on its own; replacing one is replacing that file.

use std::fmt;
use std::str::FromStr;

use object_store::{ObjectStoreExt, PutMode};
use sandboxer_protocol::SandboxId;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::contract::About;
use crate::error::{Error, Result};
use crate::layout::{self, BadName, FileName, ImageDigest, ManifestAt, Tenant};
use crate::manifest::Manifest;
use crate::save::Saved;
use crate::volume::Volume;

/// The archive, in a manifest and in the cache.
pub const LAYER_FILE: &str = "layer.tar";

/// The name of a filesystem snapshot: 1 to 64 of `[A-Za-z0-9._-]`, not starting with a dot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FilesystemName {
    bytes: [u8; Self::MAX_BYTES],
    length: u8,
}

impl FilesystemName {
    pub const MAX_BYTES: usize = 64;

    #[must_use]
    pub fn as_str(&self) -> &str {
        // Only what `from_str` let through is in it, which is ASCII.
        std::str::from_utf8(&self.bytes[..usize::from(self.length)]).unwrap_or_default()
    }
}

impl FromStr for FilesystemName {
    type Err = BadName;

    fn from_str(text: &str) -> std::result::Result<Self, BadName> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        let fits = (1..=Self::MAX_BYTES).contains(&text.len()) && text.bytes().all(allowed) && !text.starts_with('.');
        let length = u8::try_from(text.len()).ok().filter(|_| fits);
        let length = length.ok_or_else(|| BadName::new("name of a filesystem snapshot", text))?;
        let mut bytes = [0; Self::MAX_BYTES];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        Ok(Self { bytes, length })
    }
}

impl fmt::Display for FilesystemName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

impl fmt::Debug for FilesystemName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(formatter)
    }
}

impl TryFrom<String> for FilesystemName {
    type Error = BadName;

    fn try_from(text: String) -> std::result::Result<Self, BadName> {
        text.parse()
    }
}

impl From<FilesystemName> for String {
    fn from(name: FilesystemName) -> Self {
        name.to_string()
    }
}

/// What a filesystem snapshot says of itself. Only grows; unknown fields are kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Filesystem {
    pub created_at: jiff::Timestamp,
    /// The sandbox whose files they were; none if it was imported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<SandboxId>,
    /// The image that they lie on; none: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageDigest>,
    pub entries: u64,
    /// Bytes of all files, holes included.
    pub content_bytes: u64,
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Manifest {
    /// What a filesystem snapshot says of itself; none for anything else.
    #[must_use]
    pub fn filesystem(&self) -> Option<&Filesystem> {
        match self.about() {
            About::Filesystem(filesystem) => Some(filesystem),
            About::Sandbox(_) | About::Image {} => None,
        }
    }
}

impl Volume {
    /// Gives data its name, which is its commit. Whoever reads meanwhile sees what was there before, or this.
    ///
    /// # Errors
    /// [`Error::Exists`] if there is one of that name and it is not to be replaced.
    pub async fn put_filesystem(&self, saved: &Saved, about: Filesystem, name: FilesystemName, replace: bool) -> Result<Manifest> {
        let at = ManifestAt::Filesystem { tenant: saved.tenant, name };
        let manifest = saved.manifest(at, About::Filesystem(Box::new(about)))?;
        let mode = if replace { PutMode::Overwrite } else { PutMode::Create };
        self.commit(saved, &manifest, mode).await?;
        Ok(manifest)
    }

    /// Whether there is one of that name.
    ///
    /// # Errors
    /// The volume can't be read.
    pub async fn has_filesystem(&self, tenant: Tenant, name: FilesystemName) -> Result<bool> {
        let path = ManifestAt::Filesystem { tenant, name }.path();
        match self.store().head(&path).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(Error::volume("look at", &path, error)),
        }
    }

    /// When the manifest of one was written, by the volume's own clock, whether or not it can be read. None: there is none.
    ///
    /// # Errors
    /// The volume can't be read.
    pub async fn filesystem_written_at(&self, tenant: Tenant, name: FilesystemName) -> Result<Option<jiff::Timestamp>> {
        let path = ManifestAt::Filesystem { tenant, name }.path();
        match self.store().head(&path).await {
            Ok(about) => {
                let ms = about.last_modified.timestamp_millis();
                Ok(Some(jiff::Timestamp::from_millisecond(ms).unwrap_or(jiff::Timestamp::UNIX_EPOCH)))
            }
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(Error::volume("look at", &path, error)),
        }
    }

    /// The names of a tenant's filesystem snapshots, in order.
    ///
    /// # Errors
    /// The volume can't be listed.
    pub async fn filesystems(&self, tenant: Tenant) -> Result<Vec<FilesystemName>> {
        self.names(&layout::filesystems(tenant), |name| name.strip_suffix(".img")?.parse().ok()).await
    }

    /// Every filesystem snapshot there is: what they refer to, by [`Manifest::packs`] and [`Filesystem::image`], is in use.
    ///
    /// # Errors
    /// The volume can't be listed.
    pub async fn all_filesystems(&self) -> Result<Vec<ManifestAt>> {
        Ok(self.filesystems_with_bytes().await?.into_iter().map(|(at, _)| at).collect())
    }

    pub(crate) async fn filesystems_with_bytes(&self) -> Result<Vec<(ManifestAt, u64)>> {
        let root = layout::all_filesystems();
        let listed = match self.store().list_with_delimiter(Some(&root)).await {
            Err(object_store::Error::NotFound { .. }) => return Ok(Vec::new()),
            other => other.map_err(|error| Error::volume("list", &root, error))?,
        };
        let mut all = Vec::new();
        for tenant in listed.common_prefixes.iter().filter_map(|dir| dir.filename()?.parse::<Tenant>().ok()) {
            let names = self.listed(&layout::filesystems(tenant), |name| name.strip_suffix(".img")?.parse().ok()).await?;
            all.extend(names.into_iter().map(|(name, bytes)| (ManifestAt::Filesystem { tenant, name }, bytes)));
        }
        Ok(all)
    }

    /// Removes the name; its data goes when packs are collected. False: it was not there.
    ///
    /// # Errors
    /// The volume can't be written.
    pub async fn delete_filesystem(&self, tenant: Tenant, name: FilesystemName) -> Result<bool> {
        let path = ManifestAt::Filesystem { tenant, name }.path();
        match self.store().delete(&path).await {
            Ok(()) => Ok(true),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(Error::volume("remove", &path, error)),
        }
    }
}

/// What the archive is called in a manifest.
///
/// # Errors
/// Never: it is a name.
pub fn layer_file() -> Result<FileName> {
    LAYER_FILE.parse().map_err(|error: BadName| Error::Invalid(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ChunkIndex, Saver, Source};

    #[test]
    fn a_name_that_could_leave_its_directory_is_none() {
        for good in ["a", "my-snapshot", "A.b_c-9", &"x".repeat(64)] {
            assert_eq!(good.parse::<FilesystemName>().unwrap().to_string(), good);
        }
        for bad in ["", ".", "..", ".a", "a/b", "a b", "ä", "a\0", "a\n", &"x".repeat(65)] {
            assert!(bad.parse::<FilesystemName>().is_err(), "{bad:?}");
        }
    }

    fn about() -> Filesystem {
        Filesystem {
            created_at: jiff::Timestamp::UNIX_EPOCH,
            sandbox_id: None,
            image: None,
            entries: 1,
            content_bytes: 2,
            other: Map::new(),
        }
    }

    #[tokio::test]
    async fn of_many_that_take_a_name_one_has_it_and_replacing_is_whole() {
        let (root, local) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let volume = Volume::open_directory(root.path()).unwrap();
        let saver = Saver::new(volume.clone(), ChunkIndex::default());
        let file = local.path().join("a");
        std::fs::write(&file, b"archive").unwrap();
        let source = Source { name: layer_file().unwrap(), path: file };
        let saved = saver.save(Tenant::open(), &[source], &[]).await.unwrap();
        let name: FilesystemName = "template".parse().unwrap();
        let puts = (0..8).map(|_| volume.put_filesystem(&saved, about(), name, false));
        let made = futures_util::future::join_all(puts).await;
        assert_eq!(made.iter().filter(|made| made.is_ok()).count(), 1);
        assert!(made.iter().filter_map(|made| made.as_ref().err()).all(|error| matches!(error, Error::Exists { .. })));
        let newer = Filesystem { entries: 7, ..about() };
        volume.put_filesystem(&saved, newer.clone(), name, true).await.unwrap();
        let at = ManifestAt::Filesystem { tenant: Tenant::open(), name };
        assert_eq!(volume.manifest(at).await.unwrap().filesystem(), Some(&newer));
        assert_eq!(volume.filesystems(Tenant::open()).await.unwrap(), [name]);
        assert_eq!(volume.filesystems(Tenant::of_key(b"another")).await.unwrap(), []);
        assert_eq!(volume.all_filesystems().await.unwrap(), [at]);
        assert!(volume.delete_filesystem(Tenant::open(), name).await.unwrap());
        assert!(!volume.delete_filesystem(Tenant::open(), name).await.unwrap());
        assert!(!volume.has_filesystem(Tenant::open(), name).await.unwrap());
    }
}

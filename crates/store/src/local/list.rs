//! Lists of the volume's directories. Links and other special files do not appear in them.

use std::{
    fs::{self, Metadata},
    io,
    os::unix::fs::MetadataExt as _,
    path::Path as OsPath,
};

use futures_util::{
    StreamExt as _, TryStreamExt as _,
    stream::{self, BoxStream},
};
use object_store::{Error as StoreError, ObjectMeta, Result as StoreResult, path::Path};

use super::{LocalStore, blocking, generic, is_staged};
use crate::beneath;

impl LocalStore {
    /// The files and the directories below one. One that is missing is empty.
    pub(super) fn list_one(&self, prefix: &Path) -> StoreResult<(Vec<ObjectMeta>, Vec<Path>)> {
        let (mut files, mut dirs) = (Vec::new(), Vec::new());
        let dir = match beneath::open_below(&self.root, OsPath::new(prefix.as_ref())) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((files, dirs)),
            dir => dir.map_err(generic)?,
        };
        let entries = match fs::read_dir(dir.path()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((files, dirs)),
            entries => entries.map_err(generic)?,
        };
        for entry in entries {
            let entry = entry.map_err(generic)?;
            let name = entry.file_name();
            let Some(name) = name.to_str().filter(|name| !is_staged(OsPath::new(name))) else { continue };
            let below = if prefix.as_ref().is_empty() { name.to_owned() } else { format!("{prefix}/{name}") };
            // A name that no path of the volume can have is nothing of ours.
            let Ok(location) = Path::parse(below) else { continue };
            let kind = entry.file_type().map_err(generic)?;
            if kind.is_dir() {
                dirs.push(location);
            } else if kind.is_file() {
                match entry.metadata() {
                    // The file went since it was listed.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    metadata => files.push(about(&metadata.map_err(generic)?, location)?),
                }
            }
        }
        Ok((files, dirs))
    }

    /// All files below a directory, a directory at a time.
    pub(super) fn list_all(&self, prefix: Option<&Path>) -> BoxStream<'static, StoreResult<ObjectMeta>> {
        let (store, first) = (self.clone(), prefix.cloned().unwrap_or_default());
        let dirs = stream::try_unfold(vec![first], move |mut left| {
            let store = store.clone();
            async move {
                let Some(next) = left.pop() else { return Ok::<_, StoreError>(None) };
                let (files, dirs) = blocking(move || store.list_one(&next)).await?;
                left.extend(dirs);
                Ok(Some((stream::iter(files.into_iter().map(Ok)), left)))
            }
        });
        dirs.try_flatten().boxed()
    }
}

/// What a listing and an answer say of a file.
pub(super) fn about(metadata: &Metadata, location: Path) -> StoreResult<ObjectMeta> {
    let modified = metadata.modified().map_err(generic)?;
    let tag = format!("\"{:x}-{:x}.{:x}-{:x}\"", metadata.ino(), metadata.mtime(), metadata.mtime_nsec(), metadata.len());
    Ok(ObjectMeta { location, last_modified: modified.into(), size: metadata.len(), e_tag: Some(tag), version: None })
}

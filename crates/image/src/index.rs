//! Which names there are. One small file, replaced whole.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Doing, Error, Result};
use crate::name::{Digest, ImageName};

const FILE: &str = "index.json";
const LOCK: &str = "index.lock";
const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Index {
    version: u32,
    pub(crate) images: BTreeMap<ImageName, Record>,
}

/// What is known of a named image.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) digest: Digest,
    pub(crate) created_at: jiff::Timestamp,
    pub(crate) source: Source,
    /// The agent in it.
    pub(crate) agent: Digest,
    /// The environment that an imported image asks for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) env: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) working_dir: Option<String>,
    /// The user, entry point and command of an imported image. They are shown and not applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) user: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) entrypoint: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) cmd: Vec<String>,
}

/// Where an image came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Source {
    /// From packages of this suite, by this recipe.
    Built { suite: String, recipe: Digest },
    /// From this container image.
    Imported { from: PathBuf },
}

impl Index {
    pub(crate) fn read(directory: &Path) -> Result<Self> {
        let path = directory.join(FILE);
        match fs::read(&path) {
            Ok(json) => Self::parse(&json, &path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self { version: VERSION, images: BTreeMap::new() }),
            Err(error) => Err(error).doing(|| format!("read {}", path.display())),
        }
    }

    /// The content of an index, which `path` names where it is bad.
    pub(crate) fn parse(json: &[u8], path: &Path) -> Result<Self> {
        let bad = |why: String| Error::BadIndex { path: path.to_path_buf(), why };
        let index: Self = serde_json::from_slice(json).map_err(|error| bad(error.to_string()))?;
        if index.version == VERSION {
            Ok(index)
        } else {
            Err(bad(format!("it is of version {}, this program knows {VERSION}", index.version)))
        }
    }

    /// Changes the index; other processes wait meanwhile. It is written only if `change` succeeds.
    pub(crate) fn update<T>(directory: &Path, change: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let _lock = lock(directory)?;
        let mut index = Self::read(directory)?;
        let result = change(&mut index)?;
        index.write(directory)?;
        Ok(result)
    }

    fn write(&self, directory: &Path) -> Result<()> {
        let writing = || format!("write {}", directory.join(FILE).display());
        let json = serde_json::to_vec_pretty(self).map_err(io::Error::from).doing(writing)?;
        let mut file = tempfile::Builder::new().prefix(".index-").tempfile_in(directory).doing(writing)?;
        file.write_all(&json).doing(writing)?;
        file.as_file().sync_all().doing(writing)?;
        file.persist(directory.join(FILE)).map_err(|error| error.error).doing(writing)?;
        sync_directory(directory).doing(writing)
    }
}

/// Held while the index, or the set of temporary directories, changes. Released when dropped, and by the kernel when its holder dies.
pub(crate) fn lock(directory: &Path) -> Result<File> {
    let locking = || format!("lock {}", directory.join(LOCK).display());
    let file = open_lock(&directory.join(LOCK)).doing(locking)?;
    file.lock().doing(locking)?;
    Ok(file)
}

pub(crate) fn open_lock(path: &Path) -> io::Result<File> {
    File::options().create(true).truncate(false).write(true).open(path)
}

pub(crate) fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

//! A file of rows that is replaced as a whole: written beside, synced, renamed, under a lock that all processes take.

use std::{
    fs::{self, File},
    io::{self, Read as _, Write as _},
    marker::PhantomData,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use nix::fcntl::{Flock, FlockArg};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tracing::{error, warn};

use super::StoreError;

const VERSION: u64 = 1;
/// More than this is not read into memory.
const MAX_BYTES: u64 = 64 * 1024 * 1024;
pub(super) const MAX_ROWS: usize = 10_000;

#[derive(Debug)]
pub(super) struct Rows<R> {
    pub(super) items: Vec<R>,
}

impl<R> Rows<R> {
    /// In place of the one with its id, or at the end.
    pub(super) fn put<I: PartialEq>(&mut self, row: R, id: impl Fn(&R) -> I) {
        match self.items.iter_mut().find(|other| id(other) == id(&row)) {
            Some(other) => *other = row,
            None => self.items.push(row),
        }
    }
}

#[derive(Debug)]
pub(super) struct JsonFile<R> {
    path: PathBuf,
    /// What the list is called in the file.
    name: &'static str,
    rows: PhantomData<fn() -> R>,
}

/// What a file holds.
enum Found<R> {
    Whole(Rows<R>),
    Damaged(String),
}

impl<R: Serialize + DeserializeOwned> JsonFile<R> {
    pub(super) fn new(path: PathBuf, name: &'static str) -> Self {
        Self { path, name, rows: PhantomData }
    }

    /// What is in the file. Whoever finds it damaged sets it aside.
    pub(super) fn read(&self) -> Result<Rows<R>, StoreError> {
        match self.look()? {
            Found::Whole(rows) => Ok(rows),
            Found::Damaged(_) => {
                let _lock = self.lock()?;
                self.mend()
            }
        }
    }

    /// Changes the file. When this returns it is on the disk.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut Rows<R>) -> T) -> Result<T, StoreError> {
        let _lock = self.lock()?;
        let mut rows = self.mend()?;
        let before = rows.items.len();
        let result = change(&mut rows);
        if rows.items.len() > before && rows.items.len() > MAX_ROWS {
            return Err(StoreError::Full { path: self.path.clone(), most: MAX_ROWS });
        }
        self.replace(&rows).map_err(|error| self.io(error))?;
        Ok(result)
    }

    /// Reads under the lock; what is damaged is renamed, told, and taken for empty.
    fn mend(&self) -> Result<Rows<R>, StoreError> {
        match self.look()? {
            Found::Whole(rows) => Ok(rows),
            Found::Damaged(why) => {
                let aside = self.sibling(&format!("damaged-{}", jiff::Timestamp::now().as_millisecond()));
                fs::rename(&self.path, &aside).map_err(|error| self.io(error))?;
                error!(file = %self.path.display(), aside = %aside.display(), why, "this file is damaged and was set aside; it goes on with an empty one");
                Ok(Rows { items: Vec::new() })
            }
        }
    }

    fn look(&self) -> Result<Found<R>, StoreError> {
        let mut bytes = Vec::new();
        match File::open(&self.path).and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Whole(Rows { items: Vec::new() })),
            Err(error) => return Err(self.io(error)),
            Ok(_) => {}
        }
        if bytes.len() as u64 > MAX_BYTES {
            return Err(self.io(io::Error::other(format!("larger than {MAX_BYTES} bytes"))));
        }
        let damaged = |why: String| Ok(Found::Damaged(why));
        let mut value: Value = match serde_json::from_slice(&bytes) {
            Ok(value) => value,
            Err(error) => return damaged(error.to_string()),
        };
        match value.get("version").and_then(Value::as_u64) {
            Some(VERSION) => {}
            Some(version) if version > VERSION => return Err(StoreError::Newer { path: self.path.clone(), version }),
            _ => return damaged("it has no version".to_owned()),
        }
        match value.get_mut(self.name).map(Value::take).map(serde_json::from_value) {
            Some(Ok(items)) => Ok(Found::Whole(Rows { items })),
            Some(Err(error)) => damaged(error.to_string()),
            None => damaged(format!("it has no {}", self.name)),
        }
    }

    fn replace(&self, rows: &Rows<R>) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(&json!({ "version": VERSION, self.name: rows.items }))?;
        let dir = self.path.parent().unwrap_or(Path::new("."));
        // The name is this process's own, so that what a killed one left is never taken for it.
        let mut file = tempfile::Builder::new().prefix(&format!(".{}-", self.name)).suffix(".part").tempfile_in(dir)?;
        file.write_all(&text)?;
        file.write_all(b"\n")?;
        file.as_file().sync_all()?;
        file.persist(&self.path)?;
        File::open(dir)?.sync_all()
    }

    fn lock(&self) -> Result<Flock<File>, StoreError> {
        let path = self.sibling("lock");
        let open = || File::options().create(true).truncate(false).write(true).mode(0o600).open(&path);
        let locked = open().and_then(|file| Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| errno.into()));
        locked.map_err(|error| StoreError::Io { path, error })
    }

    /// Removes what a process that was killed left half-written.
    pub(super) fn sweep(&self) -> Result<(), StoreError> {
        let _lock = self.lock()?;
        let dir = self.path.parent().unwrap_or(Path::new("."));
        for entry in fs::read_dir(dir).map_err(|error| self.io(error))?.flatten() {
            let name = entry.file_name();
            let half = name.to_str().is_some_and(|name| name.starts_with(&format!(".{}-", self.name)) && name.ends_with(".part"));
            if half && let Err(error) = fs::remove_file(entry.path()) {
                warn!(%error, ?name, "what is left of an earlier process could not be removed");
            }
        }
        Ok(())
    }

    /// Names of what was set aside.
    pub(super) fn set_aside(&self) -> Vec<String> {
        let prefix = format!("{}.damaged-", self.path.file_name().unwrap_or_default().to_string_lossy());
        let Some(Ok(entries)) = self.path.parent().map(fs::read_dir) else { return Vec::new() };
        let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut found: Vec<String> = names.filter(|name| name.starts_with(&prefix)).collect();
        found.sort();
        found
    }

    fn sibling(&self, suffix: &str) -> PathBuf {
        let mut name = self.path.file_name().unwrap_or_default().to_owned();
        name.push(".");
        name.push(suffix);
        self.path.with_file_name(name)
    }

    fn io(&self, error: io::Error) -> StoreError {
        StoreError::Io { path: self.path.clone(), error }
    }
}

/// Makes the directory, for this user only.
pub(super) fn private_dir(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

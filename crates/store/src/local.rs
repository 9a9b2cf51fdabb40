//! A directory as the volume's store: private files, every write durable when it returns.
//!
//! Reading and listing are `object_store`'s own. Writing is not, because its files take the process's umask: here each file is written under another name, given
//! its mode and owner, synced, named (by link where it must not exist yet, else by rename), and the directory synced. A reader never sees half a file.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path as OsPath, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error as StoreError, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result as StoreResult,
};

use sandboxer_protocol::SandboxId;

use crate::failpoint::{FailPoints, Kind, Stage};
use crate::layout::{is_fleeting, kind_of, locks};
use crate::owner::Owner;
use crate::record::is_network;

const NAME: &str = "volume";
const MAX_DURABLE_DIRS: usize = 4096;
const REMOVALS_AT_ONCE: usize = 8;
/// Over a network a name is seen at last after this: twice what clients keep a directory for by default.
const SEEN_LATE: Duration = Duration::from_secs(120);

/// One thing done to the directory, in order, for the tests that forget.
#[cfg(feature = "testing")]
#[derive(Debug, Clone)]
pub enum Step {
    MakeDir(PathBuf),
    Write { path: PathBuf, payload: PutPayload },
    SyncFile(PathBuf),
    Link { from: PathBuf, to: PathBuf },
    Rename { from: PathBuf, to: PathBuf },
    Unlink(PathBuf),
    SyncDir(PathBuf),
}

#[derive(Debug, Clone)]
pub struct LocalStore {
    root: Arc<PathBuf>,
    read: LocalFileSystem,
    owner: Owner,
    points: FailPoints,
    /// Directories whose own names this process has seen made durable.
    durable: Arc<Mutex<HashSet<PathBuf>>>,
    #[cfg(feature = "testing")]
    journal: Option<Arc<Mutex<Vec<Step>>>>,
}

impl LocalStore {
    /// # Errors
    /// `root` is no directory.
    pub fn open(root: &OsPath, points: FailPoints) -> io::Result<Self> {
        let root = root.canonicalize()?;
        let about = fs::metadata(&root)?;
        if !about.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        Ok(Self {
            read: LocalFileSystem::new_with_prefix(&root).map_err(io::Error::other)?,
            owner: Owner::of(&about),
            root: Arc::new(root),
            points,
            durable: Arc::default(),
            #[cfg(feature = "testing")]
            journal: None,
        })
    }

    /// Notes every step from here on.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn with_journal(mut self, journal: Arc<Mutex<Vec<Step>>>) -> Self {
        self.journal = Some(journal);
        self
    }

    #[cfg(feature = "testing")]
    fn note(&self, step: impl FnOnce() -> Step) {
        if let Some(journal) = &self.journal {
            journal.lock().unwrap_or_else(PoisonError::into_inner).push(step());
        }
    }

    fn put(&self, location: &Path, payload: &PutPayload, mode: &PutMode) -> io::Result<PutResult> {
        let reach = |stage| kind_of(location).map_or(Ok(()), |kind| self.points.hit(kind, stage));
        reach(Stage::Before)?;
        let target = self.read.path_to_filesystem(location).map_err(io::Error::other)?;
        let parent = target.parent().filter(|parent| parent.starts_with(&*self.root)).ok_or(io::ErrorKind::InvalidInput)?;
        self.make_dir(parent)?;
        if is_fleeting(location) {
            self.put_fleeting(&target, payload)?;
            return Ok(PutResult { e_tag: None, version: None, extensions: object_store::Extensions::default() });
        }
        let staged = staged(&target);
        let result = self.write(&staged, payload, &reach).and_then(|()| self.name(&staged, &target, parent, mode, &reach));
        if result.is_err() {
            // The write's own error is the one to tell.
            let _ = fs::remove_file(&staged);
        }
        result?;
        reach(Stage::After)?;
        Ok(PutResult { e_tag: None, version: None, extensions: object_store::Extensions::default() })
    }

    /// What is of use only while its writer lives: seen by all at once, and not synced. That it is there says all, so half of it does too.
    fn put_fleeting(&self, target: &OsPath, payload: &PutPayload) -> io::Result<()> {
        let mut file = self.owner.create(target)?;
        payload.iter().try_for_each(|piece| file.write_all(piece)).inspect_err(|_| {
            // The write's own error is the one to tell.
            let _ = fs::remove_file(target);
        })
    }

    /// Removes a file. That a manifest is gone is durable when this returns: what it names goes next. A sandbox's directories go with the last file in them.
    fn remove(&self, location: &Path) -> io::Result<()> {
        let target = self.read.path_to_filesystem(location).map_err(io::Error::other)?;
        let removed = fs::remove_file(&target);
        #[cfg(feature = "testing")]
        if removed.is_ok() {
            self.note(|| Step::Unlink(target.clone()));
        }
        let parent = target.parent().filter(|parent| parent.starts_with(&*self.root)).ok_or(io::ErrorKind::InvalidInput)?;
        if removed.is_ok() && kind_of(location) == Some(Kind::Manifest) {
            self.sync_dir(parent)?;
        }
        if location.parts().next().is_some_and(|first| first.as_ref().parse::<SandboxId>().is_ok()) {
            let emptied = parent.ancestors().take_while(|dir| *dir != *self.root);
            // The first that is not empty ends it.
            let _ = emptied.map(fs::remove_dir).find(Result::is_err);
        }
        removed
    }

    /// Files that have no name yet, or never got one, with their bytes.
    pub(crate) fn staged(&self) -> io::Result<BTreeMap<PathBuf, u64>> {
        let mut found = BTreeMap::new();
        let mut dirs = vec![self.root.to_path_buf()];
        while let Some(dir) = dirs.pop() {
            let entries = match fs::read_dir(&dir) {
                // It went since it was listed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                entries => entries?,
            };
            for entry in entries {
                let entry = entry?;
                let (kind, path) = (entry.file_type()?, entry.path());
                if kind.is_dir() && path != self.root.join(locks().as_ref()) {
                    dirs.push(path);
                } else if kind.is_file()
                    && is_staged(&path)
                    && let Ok(about) = entry.metadata()
                {
                    found.insert(path, about.len());
                }
            }
        }
        Ok(found)
    }

    /// How old a listing may be.
    pub(crate) fn seen_late(&self) -> Duration {
        if is_network(&self.root) { SEEN_LATE } else { Duration::ZERO }
    }

    fn write(&self, staged: &OsPath, payload: &PutPayload, reach: &impl Fn(Stage) -> io::Result<()>) -> io::Result<()> {
        let mut file = self.owner.create(staged)?;
        payload.iter().try_for_each(|piece| file.write_all(piece))?;
        #[cfg(feature = "testing")]
        self.note(|| Step::Write { path: staged.to_owned(), payload: payload.clone() });
        reach(Stage::Written)?;
        file.sync_all()?;
        #[cfg(feature = "testing")]
        self.note(|| Step::SyncFile(staged.to_owned()));
        reach(Stage::Synced)
    }

    fn name(
        &self,
        staged: &OsPath,
        target: &OsPath,
        parent: &OsPath,
        mode: &PutMode,
        reach: &impl Fn(Stage) -> io::Result<()>,
    ) -> io::Result<()> {
        let create = matches!(mode, PutMode::Create);
        if create {
            fs::hard_link(staged, target)?;
            #[cfg(feature = "testing")]
            self.note(|| Step::Link { from: staged.to_owned(), to: target.to_owned() });
        } else {
            fs::rename(staged, target)?;
            #[cfg(feature = "testing")]
            self.note(|| Step::Rename { from: staged.to_owned(), to: target.to_owned() });
        }
        reach(Stage::Named)?;
        if create && fs::remove_file(staged).is_ok() {
            #[cfg(feature = "testing")]
            self.note(|| Step::Unlink(staged.to_owned()));
        }
        self.sync_dir(parent)
    }

    fn sync_dir(&self, dir: &OsPath) -> io::Result<()> {
        File::open(dir)?.sync_all()?;
        #[cfg(feature = "testing")]
        self.note(|| Step::SyncDir(dir.to_owned()));
        Ok(())
    }

    /// Makes what is missing between the root and `dir`, durably. One that is there may have been made a moment ago by somebody who has not synced it yet.
    fn make_dir(&self, dir: &OsPath) -> io::Result<()> {
        if dir == *self.root || (self.durable.lock().unwrap_or_else(PoisonError::into_inner).contains(dir) && is_plain_dir(dir)) {
            return Ok(());
        }
        let parent = dir.parent().filter(|parent| parent.starts_with(&*self.root)).ok_or(io::ErrorKind::NotFound)?;
        self.make_dir(parent)?;
        match self.owner.make_dir(dir) {
            Ok(()) => {
                #[cfg(feature = "testing")]
                self.note(|| Step::MakeDir(dir.to_owned()));
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_plain_dir(dir) => {}
            Err(error) => return Err(error),
        }
        self.sync_dir(parent)?;
        let mut durable = self.durable.lock().unwrap_or_else(PoisonError::into_inner);
        if durable.len() >= MAX_DURABLE_DIRS {
            durable.clear();
        }
        durable.insert(dir.to_owned());
        Ok(())
    }

    /// A symbolic link, a FIFO or a device on the volume is nobody's data.
    fn check_plain(&self, location: &Path) -> StoreResult<()> {
        let target = self.read.path_to_filesystem(location)?;
        let inside = target.strip_prefix(&*self.root).map_err(|error| generic(io::Error::other(error)))?;
        let mut path = self.root.to_path_buf();
        for part in inside.components() {
            path.push(part);
            let about = match fs::symlink_metadata(&path) {
                Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                    return Err(StoreError::NotFound { path: location.to_string(), source: error.into() });
                }
                other => other.map_err(generic)?,
            };
            let plain = if path == target { about.is_file() } else { about.is_dir() };
            if !plain {
                return Err(generic(io::Error::other("it is neither a plain file nor in plain directories")));
            }
        }
        Ok(())
    }
}

/// A name beside the target that `object_store` neither lists nor reads.
fn staged(target: &OsPath) -> PathBuf {
    let mut name = target.as_os_str().to_owned();
    name.push(format!("#{}", uuid::Uuid::new_v4().as_u128()));
    name.into()
}

fn is_staged(path: &OsPath) -> bool {
    let suffix = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.rsplit_once('#'));
    suffix.is_some_and(|(name, digits)| !name.is_empty() && !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

fn is_plain_dir(dir: &OsPath) -> bool {
    fs::symlink_metadata(dir).is_ok_and(|about| about.is_dir())
}

fn generic(source: io::Error) -> StoreError {
    StoreError::Generic { store: NAME, source: source.into() }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> StoreResult<T> + Send + 'static) -> StoreResult<T> {
    tokio::task::spawn_blocking(work).await.map_err(|source| StoreError::JoinError { source })?
}

impl std::fmt::Display for LocalStore {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.root.display().fmt(formatter)
    }
}

#[async_trait]
impl ObjectStore for LocalStore {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> StoreResult<PutResult> {
        if matches!(options.mode, PutMode::Update(_)) {
            return Err(StoreError::NotImplemented { operation: "conditional update".into(), implementer: self.to_string() });
        }
        let (store, location) = (self.clone(), location.clone());
        blocking(move || {
            store.put(&location, &payload, &options.mode).map_err(|source| match source.kind() {
                io::ErrorKind::AlreadyExists => StoreError::AlreadyExists { path: location.to_string(), source: source.into() },
                _ => generic(source),
            })
        })
        .await
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> StoreResult<Box<dyn MultipartUpload>> {
        Err(StoreError::NotImplemented { operation: "multipart upload".into(), implementer: self.to_string() })
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> StoreResult<GetResult> {
        let (store, checked) = (self.clone(), location.clone());
        blocking(move || store.check_plain(&checked)).await?;
        self.read.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, StoreResult<Path>>) -> BoxStream<'static, StoreResult<Path>> {
        let store = self.clone();
        let removed = locations.map(move |location| {
            let store = store.clone();
            async move {
                let location = location?;
                let target = location.clone();
                let remove = move || {
                    store.remove(&target).map_err(|source| match source.kind() {
                        io::ErrorKind::NotFound => StoreError::NotFound { path: target.to_string(), source: source.into() },
                        _ => generic(source),
                    })
                };
                blocking(remove).await?;
                Ok(location)
            }
        });
        removed.buffered(REMOVALS_AT_ONCE).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, StoreResult<ObjectMeta>> {
        self.read.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> StoreResult<ListResult> {
        self.read.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> StoreResult<()> {
        Err(StoreError::NotImplemented { operation: "copy".into(), implementer: self.to_string() })
    }
}

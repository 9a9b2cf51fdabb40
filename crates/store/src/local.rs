//! A directory as the volume's store: private files, every write durable when it returns.
//!
//! Each file is written under another name, given its mode and owner, synced, named (by link where it must
//! not exist yet, else by rename), and the directory synced. A reader never sees half a file. Every
//! operation descends from the root without following a link ([`crate::beneath`]), which the
//! implementation of `object_store` does not.

mod list;

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io::{self, Write};
use std::path::{Path as OsPath, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    Attributes, CopyOptions, Error as StoreError, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result as StoreResult,
};

use sandboxer_protocol::SandboxId;

use crate::beneath::{self, Dir};
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
        let below = OsPath::new(location.as_ref());
        let (Some(parent), Some(name)) = (below.parent(), below.file_name().and_then(|name| name.to_str())) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        self.make_dir(&self.root.join(parent))?;
        let dir = beneath::open_below(&self.root, parent)?;
        if is_fleeting(location) {
            self.put_fleeting(&dir.at(name), payload)?;
            return Ok(PutResult { e_tag: None, version: None, extensions: object_store::Extensions::default() });
        }
        let writing = Writing { shown: self.root.join(parent), staged: staged(name), name: name.to_owned(), dir };
        let result = self.write(&writing, payload, &reach).and_then(|()| self.name(&writing, mode, &reach));
        if result.is_err() {
            // The write's own error is the one to tell.
            let _ = fs::remove_file(writing.dir.at(&writing.staged));
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
        let below = OsPath::new(location.as_ref());
        let (Some(parent), Some(name)) = (below.parent(), below.file_name()) else { return Err(io::ErrorKind::InvalidInput.into()) };
        let dir = beneath::open_below(&self.root, parent)?;
        let removed = fs::remove_file(dir.at(name));
        #[cfg(feature = "testing")]
        if removed.is_ok() {
            self.note(|| Step::Unlink(self.root.join(below)));
        }
        if removed.is_ok() && kind_of(location) == Some(Kind::Manifest) {
            self.sync_dir(&dir, &self.root.join(parent))?;
        }
        if location.parts().next().is_some_and(|first| first.as_ref().parse::<SandboxId>().is_ok()) {
            let emptied = parent.ancestors().take_while(|dir| !dir.as_os_str().is_empty());
            // The first that is not empty ends it.
            let _ = emptied.map(|dir| self.remove_dir(dir)).find(Result::is_err);
        }
        removed
    }

    fn remove_dir(&self, below: &OsPath) -> io::Result<()> {
        let (Some(parent), Some(name)) = (below.parent(), below.file_name()) else { return Err(io::ErrorKind::InvalidInput.into()) };
        fs::remove_dir(beneath::open_below(&self.root, parent)?.at(name))
    }

    /// Removes a file that never got its name.
    pub(crate) fn remove_staged(&self, path: &OsPath) -> io::Result<()> {
        let below = path.strip_prefix(&*self.root).map_err(io::Error::other)?;
        let (Some(parent), Some(name)) = (below.parent(), below.file_name()) else { return Err(io::ErrorKind::InvalidInput.into()) };
        fs::remove_file(beneath::open_below(&self.root, parent)?.at(name))
    }

    /// Files that have no name yet, or never got one, with their bytes.
    pub(crate) fn staged(&self) -> io::Result<BTreeMap<PathBuf, u64>> {
        let mut found = BTreeMap::new();
        let mut dirs = vec![PathBuf::new()];
        while let Some(below) = dirs.pop() {
            let dir = match beneath::open_below(&self.root, &below) {
                // It went since it was listed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                dir => dir?,
            };
            for entry in fs::read_dir(dir.path())? {
                let entry = entry?;
                let (kind, path) = (entry.file_type()?, below.join(entry.file_name()));
                if kind.is_dir() && path != OsPath::new(locks().as_ref()) {
                    dirs.push(path);
                } else if kind.is_file()
                    && is_staged(&path)
                    && let Ok(about) = entry.metadata()
                {
                    found.insert(self.root.join(path), about.len());
                }
            }
        }
        Ok(found)
    }

    /// That the directory is where it was.
    pub(crate) fn is_there(&self) -> io::Result<()> {
        beneath::open_root(&self.root).map(drop)
    }

    /// How old a listing may be.
    pub(crate) fn seen_late(&self) -> Duration {
        if is_network(&self.root) { SEEN_LATE } else { Duration::ZERO }
    }

    fn write(&self, writing: &Writing, payload: &PutPayload, reach: &impl Fn(Stage) -> io::Result<()>) -> io::Result<()> {
        let mut file = self.owner.create(&writing.dir.at(&writing.staged))?;
        payload.iter().try_for_each(|piece| file.write_all(piece))?;
        #[cfg(feature = "testing")]
        self.note(|| Step::Write { path: writing.shown.join(&writing.staged), payload: payload.clone() });
        reach(Stage::Written)?;
        file.sync_all()?;
        #[cfg(feature = "testing")]
        self.note(|| Step::SyncFile(writing.shown.join(&writing.staged)));
        reach(Stage::Synced)
    }

    fn name(&self, writing: &Writing, mode: &PutMode, reach: &impl Fn(Stage) -> io::Result<()>) -> io::Result<()> {
        let (staged, target) = (writing.dir.at(&writing.staged), writing.dir.at(&writing.name));
        #[cfg(feature = "testing")]
        let shown = |name: &str| writing.shown.join(name);
        let create = matches!(mode, PutMode::Create);
        if create {
            fs::hard_link(&staged, &target)?;
            #[cfg(feature = "testing")]
            self.note(|| Step::Link { from: shown(&writing.staged), to: shown(&writing.name) });
        } else {
            fs::rename(&staged, &target)?;
            #[cfg(feature = "testing")]
            self.note(|| Step::Rename { from: shown(&writing.staged), to: shown(&writing.name) });
        }
        reach(Stage::Named)?;
        if create && fs::remove_file(&staged).is_ok() {
            #[cfg(feature = "testing")]
            self.note(|| Step::Unlink(shown(&writing.staged)));
        }
        self.sync_dir(&writing.dir, &writing.shown)
    }

    /// `shown` is where the directory was found.
    fn sync_dir(&self, dir: &Dir, shown: &OsPath) -> io::Result<()> {
        dir.sync()?;
        #[cfg(feature = "testing")]
        self.note(|| Step::SyncDir(shown.to_owned()));
        #[cfg(not(feature = "testing"))]
        let _ = shown;
        Ok(())
    }

    /// Makes what is missing between the root and `dir`, durably. One that is there may have been made a moment ago by somebody who has not synced it yet.
    fn make_dir(&self, dir: &OsPath) -> io::Result<()> {
        if dir == *self.root || (self.durable.lock().unwrap_or_else(PoisonError::into_inner).contains(dir) && is_plain_dir(dir)) {
            return Ok(());
        }
        let parent = dir.parent().filter(|parent| parent.starts_with(&*self.root)).ok_or(io::ErrorKind::NotFound)?;
        let name = dir.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        self.make_dir(parent)?;
        let open = beneath::open_below(&self.root, parent.strip_prefix(&*self.root).map_err(io::Error::other)?)?;
        match self.owner.make_dir(&open.at(name)) {
            Ok(()) => {
                #[cfg(feature = "testing")]
                self.note(|| Step::MakeDir(dir.to_owned()));
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                // A write that finds a link here must not pass for one that finds its file there already.
                if !is_plain_dir(&open.at(name)) {
                    return Err(io::Error::other(format!("{} is no directory", dir.display())));
                }
            }
            Err(error) => return Err(error),
        }
        self.sync_dir(&open, parent)?;
        let mut durable = self.durable.lock().unwrap_or_else(PoisonError::into_inner);
        if durable.len() >= MAX_DURABLE_DIRS {
            durable.clear();
        }
        durable.insert(dir.to_owned());
        Ok(())
    }

    /// A symbolic link, a FIFO or a device on the volume is nobody's data.
    fn get(&self, location: &Path, options: &GetOptions) -> StoreResult<GetResult> {
        let missing = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                StoreError::NotFound { path: location.to_string(), source: error.into() }
            }
            _ => generic(error),
        };
        let below = OsPath::new(location.as_ref());
        let (Some(parent), Some(name)) = (below.parent(), below.file_name()) else { return Err(missing(io::ErrorKind::NotFound.into())) };
        // A link in place of a directory is an error here too, and none that says that nothing is there.
        let dir = beneath::open_below(&self.root, parent).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => missing(error),
            _ => generic(error),
        })?;
        let file = dir.open_file(name).map_err(missing)?;
        let meta = list::about(&file.metadata().map_err(generic)?, location.clone())?;
        options.check_preconditions(&meta)?;
        let range = match &options.range {
            Some(range) => range.as_range(meta.size).map_err(|error| generic(io::Error::other(error)))?,
            None => 0..meta.size,
        };
        let payload = GetResultPayload::File(file, self.root.join(below));
        Ok(GetResult { payload, meta, range, attributes: Attributes::default(), extensions: object_store::Extensions::default() })
    }
}

/// A file that is being written: its directory, where that was found, and the file's names there.
struct Writing {
    dir: Dir,
    shown: PathBuf,
    staged: String,
    name: String,
}

/// A name beside the target that is neither listed nor read.
fn staged(name: &str) -> String {
    format!("{name}#{}", uuid::Uuid::new_v4().as_u128())
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
        let (store, location) = (self.clone(), location.clone());
        blocking(move || store.get(&location, &options)).await
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
        self.list_all(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> StoreResult<ListResult> {
        let (store, prefix) = (self.clone(), prefix.cloned().unwrap_or_default());
        let (objects, common_prefixes) = blocking(move || store.list_one(&prefix)).await?;
        Ok(ListResult { objects, common_prefixes, extensions: object_store::Extensions::default() })
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> StoreResult<()> {
        Err(StoreError::NotImplemented { operation: "copy".into(), implementer: self.to_string() })
    }
}

#[cfg(test)]
mod tests;

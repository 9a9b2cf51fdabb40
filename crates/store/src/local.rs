//! A directory as the volume's store: private files, every write durable when it returns.
//!
//! Reading and listing are `object_store`'s own. Writing is not, because its files take the process's umask: here each file is written under another name, given
//! its mode and owner, synced, named (by link where it must not exist yet, else by rename), and the directory synced. A reader never sees half a file.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path as OsPath, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error as StoreError, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result as StoreResult,
};

use crate::failpoint::{FailPoints, Stage};
use crate::layout::kind_of;

const NAME: &str = "volume";
const MAX_DURABLE_DIRS: usize = 4096;

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

/// Who may read what is written: whoever may write into the volume's root, which is its owner, and its group if that can write there.
#[derive(Debug, Clone, Copy)]
struct Owner {
    file_mode: u32,
    dir_mode: u32,
    chown: Option<(u32, u32)>,
}

impl Owner {
    fn of(root: &fs::Metadata) -> Self {
        let shared = root.mode() & 0o020 != 0;
        // Root's own files must stay readable to the ordinary user whose volume it is.
        let foreign = nix::unistd::geteuid().is_root() && root.uid() != 0;
        Self {
            file_mode: if shared { 0o660 } else { 0o600 },
            dir_mode: if shared { 0o770 | (root.mode() & 0o2000) } else { 0o700 },
            chown: foreign.then_some((root.uid(), root.gid())),
        }
    }

    fn give(self, path: &OsPath, mode: u32) -> io::Result<()> {
        fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
        let Some((uid, gid)) = self.chown else { return Ok(()) };
        match std::os::unix::fs::chown(path, Some(uid), Some(gid)) {
            // "Root" of a user namespace that does not know the owner: it stays its own.
            Err(error) if matches!(error.raw_os_error(), Some(nix::libc::EPERM | nix::libc::EINVAL)) => Ok(()),
            other => other,
        }
    }
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
        let (file, staged) = self.stage(&target)?;
        let result = self.write(file, &staged, payload, &reach).and_then(|()| self.name(&staged, &target, parent, mode, &reach));
        if result.is_err() {
            // The write's own error is the one to tell.
            let _ = fs::remove_file(&staged);
        }
        result?;
        reach(Stage::After)?;
        Ok(PutResult { e_tag: None, version: None, extensions: object_store::Extensions::default() })
    }

    /// A file beside the target, of a name that `object_store` neither lists nor reads.
    fn stage(&self, target: &OsPath) -> io::Result<(File, PathBuf)> {
        let mut staged = target.as_os_str().to_owned();
        staged.push(format!("#{}", uuid::Uuid::new_v4().as_u128()));
        let staged = PathBuf::from(staged);
        let file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&staged)?;
        Ok((file, staged))
    }

    fn write(&self, mut file: File, staged: &OsPath, payload: &PutPayload, reach: &impl Fn(Stage) -> io::Result<()>) -> io::Result<()> {
        self.owner.give(staged, self.owner.file_mode)?;
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
        if dir == *self.root || (self.durable.lock().unwrap_or_else(PoisonError::into_inner).contains(dir) && dir.is_dir()) {
            return Ok(());
        }
        let parent = dir.parent().filter(|parent| parent.starts_with(&*self.root)).ok_or(io::ErrorKind::NotFound)?;
        self.make_dir(parent)?;
        match fs::DirBuilder::new().mode(0o700).create(dir) {
            Ok(()) => {
                self.owner.give(dir, self.owner.dir_mode)?;
                #[cfg(feature = "testing")]
                self.note(|| Step::MakeDir(dir.to_owned()));
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && fs::symlink_metadata(dir)?.is_dir() => {}
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
        self.read.delete_stream(locations)
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

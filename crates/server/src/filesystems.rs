//! Filesystem snapshots on their volume: the files of a sandbox, as an archive under a name, that new sandboxes start from.
//!
//! An archive is taken in whole onto this machine's disk first ([`spool`]): the sandbox stands still only while it is read. Then it goes into packs, and gets
//! its name at last. What comes from the volume and from sandboxes is hostile: archives are gone through entry by entry before they are kept.

mod catalogue;
mod collecting;
mod import;
mod presence;
mod spool;

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use sandboxer_layer::{Limits as ArchiveLimits, Summary};
use sandboxer_protocol::{SandboxId, client::ErrorCode};
use sandboxer_store::{
    Action, Cache, ChunkIndex, Error, FileSet, Filesystem, FilesystemName, ImageDigest, LAYER_FILE, Loader, Manifest, ManifestAt, Place,
    Saver, Source, Threads, Volume, VolumeKey, failpoint::FailPoints, layer_file,
};
use serde_json::Map;
use tracing::warn;

pub(crate) use self::{
    catalogue::SavedFilesystem,
    spool::{Form, Piece, Pieces, Spool, spool},
};
use self::{presence::Presence, spool::NotTaken};
use crate::{
    checkpoints::{StoredImages, other, private_dir, tenant},
    images::Images,
    limits::Limits,
    manager::CreateError,
    shares::{Share, Shares},
    templates::{TemplateSettings, Templates},
};

/// What an archive may have beyond the files' own bytes.
const HEADERS_FACTOR: u64 = 2;
const ROOM_BYTES: u64 = 1 << 30;
/// All files of an archive, holes included.
const MAX_CONTENT_BYTES: u64 = 64 << 30;
/// Archives of one API key that are taken in from outside at once, and twice as many in all.
const MAX_IMPORTS: u64 = 8;
/// Archives that are sent to one API key at once.
const MAX_EXPORTS: u64 = 8;
/// Smaller packs than those of checkpoints: two are in memory while one is saved.
const PACK_BYTES: usize = 6 << 20;

/// Threads that unpack, check and write archives, a bounded step at a time: half of the processors, so
/// that compressed archives leave some to sandboxes.
fn archive_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |processors| (processors.get() / 2).clamp(1, 4))
}

/// How filesystem snapshots are kept.
#[derive(Debug, Clone)]
pub struct FilesystemSettings {
    /// The volume that all instances share.
    pub place: Place,
    /// Authenticates what is read from it.
    pub key_file: Option<PathBuf>,
    /// What is kept on this machine's own disk.
    pub cache_bytes: u64,
    /// None: each sandbox that is made from one is unpacked.
    pub templates: Option<TemplateSettings>,
    /// How often this instance removes from the volume what nobody needs; none: never.
    pub collect_every: Option<Duration>,
}

/// Why something was not done. The sandbox goes on.
pub(crate) type Refusal = (ErrorCode, String);

pub(crate) struct Filesystems {
    volume: Volume,
    /// Notices that the volume's directory is another one, or none.
    presence: Option<Presence>,
    saver: Saver,
    place: Place,
    key: Option<VolumeKey>,
    collect_every: Option<Duration>,
    cache: Cache,
    images: StoredImages,
    /// Archives on their way to the volume.
    work: PathBuf,
    limits: ArchiveLimits,
    threads: Threads,
    /// Bytes of archives on this machine's disk that are not snapshots yet.
    disk: Shares,
    imports: Shares,
    exports: Shares,
    pub(crate) templates: Option<Templates>,
}

/// What is to become a filesystem snapshot.
pub(crate) struct Order {
    pub(crate) name: FilesystemName,
    /// One of that name is replaced.
    pub(crate) replace: bool,
    pub(crate) owner: Option<String>,
    pub(crate) sandbox_id: Option<SandboxId>,
    /// What the files lie on.
    pub(crate) image: Option<PathBuf>,
}

/// What a sandbox is made from.
#[derive(Clone)]
pub(crate) struct Template {
    manifest: Arc<Manifest>,
    pub(crate) image: Option<ImageDigest>,
}

impl From<Manifest> for Template {
    fn from(manifest: Manifest) -> Self {
        let image = manifest.filesystem().and_then(|about| about.image);
        Self { manifest: Arc::new(manifest), image }
    }
}

impl Template {
    /// Of this snapshot and no other: one that takes its place has another.
    pub(crate) fn digest(&self) -> &[u8; 32] {
        self.manifest.digest()
    }
}

impl Filesystems {
    pub(crate) fn open(settings: FilesystemSettings, data_dir: &Path, largest: &Limits, quota: Option<u64>) -> io::Result<Self> {
        let FilesystemSettings { place, key_file, cache_bytes, templates, collect_every } = settings;
        let mut volume = place.volume(FailPoints::from_env()?)?;
        let key = key_file.as_deref().map(VolumeKey::read).transpose().map_err(other)?;
        if let Some(key) = key.clone() {
            volume = volume.with_key(key);
        }
        let work = data_dir.join("packing");
        // What an earlier process did not finish is of no use.
        fs::remove_dir_all(&work).or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })?;
        private_dir(&work)?;
        let index = ChunkIndex::default();
        let loader = Loader::new(volume.clone(), index.clone());
        let limits = ArchiveLimits {
            bytes: largest.disk_bytes().saturating_mul(HEADERS_FACTOR).saturating_add(ROOM_BYTES),
            content: MAX_CONTENT_BYTES,
            entries: largest.disk_inodes().saturating_mul(2),
        };
        let saver = Saver::new(volume.clone(), index).with_pack_bytes(PACK_BYTES).with_quota(quota);
        Ok(Self {
            presence: place.directory().map(Presence::of).transpose()?,
            cache: Cache::open(&data_dir.join("filesystem-cache"), cache_bytes, loader.clone()).map_err(other)?,
            images: StoredImages::new(saver.clone(), loader, data_dir.join("filesystem-images")),
            volume,
            saver,
            place,
            key,
            collect_every,
            work,
            // Each key may have the largest archive under way, or several smaller ones.
            disk: Shares::new(limits.bytes),
            limits,
            threads: Threads::in_background("archives", archive_threads()),
            imports: Shares::new(MAX_IMPORTS),
            exports: Shares::new(MAX_EXPORTS),
            templates: templates.map(|settings| Templates::open(data_dir.join("templates"), settings)).transpose()?,
        })
    }

    /// Checks that the volume answers.
    pub(crate) async fn answers(&self) -> Result<(), String> {
        self.volume.answers().await.map_err(|error| error.whole())
    }

    /// That the name may be taken. Whether it is taken is decided when it is.
    pub(crate) async fn check_free(&self, order: &Order) -> Result<(), Refusal> {
        if order.replace {
            return Ok(());
        }
        match self.volume.has_filesystem(tenant(order.owner.as_deref()), order.name).await {
            Ok(false) => Ok(()),
            Ok(true) => Err(taken(order.name)),
            Err(error) => Err(not_made(&error)),
        }
    }

    /// Takes an archive in, checks it, and makes it a snapshot. `may_act` is asked before anybody can see it.
    pub(crate) async fn keep(&self, order: Order, spool: Spool, form: Form, may_act: impl Fn() -> bool) -> Result<Manifest, Refusal> {
        let room = |error: io::Error| failed(&format!("no room for the archive: {error}"));
        let dir = tempfile::Builder::new().prefix("layer-").tempdir_in(&self.work).map_err(room)?;
        let path = dir.path().join(LAYER_FILE);
        let disk = self.disk.take(order.owner.as_deref(), 0).ok_or_else(busy)?;
        let spooled = spool.write(path.clone(), form, self.limits, &self.threads, disk).await;
        let spooled = match spooled {
            Ok(spooled) => spooled,
            Err(why) => {
                // Removing what is large takes a while.
                let _ = self.threads.run(move || drop(dir)).await;
                return Err(match why {
                    NotTaken::Busy => busy(),
                    // A sandbox's archive comes from our own agent, unless the guest took the agent over.
                    NotTaken::Refused(why) if form == Form::Any => (ErrorCode::InvalidField, format!("The archive is refused: {why}.")),
                    NotTaken::Refused(why) | NotTaken::Failed(why) => failed(&why),
                });
            }
        };
        let manifest = self.save(&order, path, spooled.summary, may_act).await?;
        if let Err(error) = self.cache.adopt(&Arc::new(manifest.clone()), dir.path()).await {
            warn!(error = error.whole(), "the filesystem snapshot could not be kept in the cache");
        }
        Ok(manifest)
    }

    async fn save(&self, order: &Order, path: PathBuf, summary: Summary, may_act: impl Fn() -> bool) -> Result<Manifest, Refusal> {
        let whole = |error: Error| not_made(&error);
        let image = match &order.image {
            Some(image) => Some(self.images.put(image).await.map_err(whole)?),
            None => None,
        };
        let source = Source { name: layer_file().map_err(whole)?, path };
        let owner = tenant(order.owner.as_deref());
        // What is being replaced is mostly the same.
        let parent = self.volume.manifest(ManifestAt::Filesystem { tenant: owner, name: order.name }).await.ok();
        let saved = self.saver.save(owner, &[source], &parent.iter().collect::<Vec<_>>()).await.map_err(whole)?;
        let about = Filesystem {
            created_at: jiff::Timestamp::now(),
            sandbox_id: order.sandbox_id,
            image,
            entries: summary.entries,
            content_bytes: summary.content,
            other: Map::new(),
        };
        if !may_act() {
            return Err(failed("this instance may no longer act for the sandbox"));
        }
        let put = self.volume.put_filesystem(&saved, about, order.name, order.replace).await;
        saved.finish().await;
        put.map_err(|error| match error {
            Error::Exists { .. } => taken(order.name),
            error => whole(error),
        })
    }

    /// The snapshot of that name, for its owner.
    pub(crate) async fn find(&self, owner: Option<&str>, name: FilesystemName) -> Result<Option<Manifest>, Error> {
        match self.volume.manifest(ManifestAt::Filesystem { tenant: tenant(owner), name }).await {
            Ok(manifest) => Ok(Some(manifest)),
            Err(Error::NotFound { .. }) => self.present().await.map(|()| None),
            Err(error) => Err(error),
        }
    }

    /// A volume whose directory has gone has nothing, which says nothing of what it had.
    async fn present(&self) -> Result<(), Error> {
        match &self.presence {
            Some(presence) => presence.check().await,
            None => Ok(()),
        }
    }

    /// What a sandbox is to be made from.
    pub(crate) async fn template(&self, owner: Option<&str>, name: &str) -> Result<Template, CreateError> {
        let name = parse(name).map_err(|(code, message)| CreateError::new(code, message))?;
        match self.find(owner, name).await {
            Ok(Some(manifest)) => Ok(manifest.into()),
            Ok(None) => {
                let message = format!("There is no filesystem snapshot {name}.");
                Err(CreateError::new(ErrorCode::UnknownFilesystemSnapshot, message))
            }
            Err(error) => Err(not_used(&error)),
        }
    }

    /// The snapshot of that name is still this one.
    pub(crate) async fn is_current(&self, template: &Template) -> bool {
        self.volume.manifest(template.manifest.at()).await.is_ok_and(|now| now.digest() == template.digest())
    }

    /// The image that a snapshot lies on: of this machine, or else from the volume.
    pub(crate) async fn image(&self, digest: ImageDigest, images: &Images) -> Result<PathBuf, CreateError> {
        self.images.find(digest, images).await.map_err(|why| unusable(&format!("it needs the image {digest}: {why}")))
    }

    /// A turn to send an archive of so many bytes. The archive stays on this machine's disk for as long,
    /// beyond the bound of the cache, so it counts as the key's.
    pub(crate) fn export_turn(&self, owner: Option<&str>, bytes: u64) -> Result<[Share; 2], Refusal> {
        let turn = self.exports.take(owner, 1).ok_or_else(busy)?;
        let disk = self.disk.take(owner, bytes).ok_or_else(busy)?;
        Ok([turn, disk])
    }

    /// The archive, checked: from this machine's own disk, or else from the volume. If it was replaced while it was read, and its data collected, it is the newer
    /// one.
    pub(crate) async fn bring(&self, template: &Template) -> Result<Layer, CreateError> {
        let mut files = self.cache.files(&template.manifest, self.limits.bytes).await;
        if files.is_err()
            && let Ok(newer) = self.volume.manifest(template.manifest.at()).await
            && newer.digest() != template.manifest.digest()
            && newer.filesystem().is_some_and(|about| about.image == template.image)
        {
            files = self.cache.files(&Arc::new(newer), self.limits.bytes).await;
        }
        Ok(Layer::of(files.map_err(|error| not_used(&error))?))
    }

    /// The archive of this very snapshot, or none.
    pub(crate) async fn bring_this(&self, template: &Template) -> Result<Layer, CreateError> {
        let files = self.cache.files(&template.manifest, self.limits.bytes).await;
        Ok(Layer::of(files.map_err(|error| not_used(&error))?))
    }
}

/// An archive on this machine's disk, kept there while this lives.
pub(crate) struct Layer {
    pub(crate) path: PathBuf,
    _files: FileSet,
}

impl Layer {
    fn of(files: FileSet) -> Self {
        Self { path: files.dir().join(LAYER_FILE), _files: files }
    }
}

/// A name that somebody chose.
pub(crate) fn parse(name: &str) -> Result<FilesystemName, Refusal> {
    name.parse().map_err(|_| {
        let shown: String = name.chars().take(80).collect();
        let message = format!(
            "{shown:?} can't be the name of a filesystem snapshot: 1 to 64 of A-Z, a-z, 0-9, \".\", \"_\" and \"-\", not a dot first."
        );
        (ErrorCode::InvalidName, message)
    })
}

pub(crate) fn not_configured() -> Refusal {
    let message = "This server keeps no filesystem snapshots: it was started without FILESYSTEM_SNAPSHOT_MOUNT_PATH.";
    (ErrorCode::FilesystemSnapshotsNotConfigured, message.to_owned())
}

fn busy() -> Refusal {
    let message = "Too many archives are being taken in, or too large ones. Try again when some of them are done.";
    (ErrorCode::RateLimited, message.to_owned())
}

fn taken(name: FilesystemName) -> Refusal {
    (ErrorCode::NameTaken, format!("There is a filesystem snapshot {name} already. Choose another name, or say \"replace\": true."))
}

pub(crate) fn failed(why: &str) -> Refusal {
    (ErrorCode::FilesystemSnapshotFailed, format!("The filesystem snapshot could not be made: {why}."))
}

fn unusable(why: &str) -> CreateError {
    CreateError::new(ErrorCode::FilesystemSnapshotFailed, format!("The filesystem snapshot can't be used: {why}."))
}

/// Why a snapshot was not made.
fn not_made(error: &Error) -> Refusal {
    let (_, message) = failed(&damage(error));
    (code_of(error), message)
}

/// Why a snapshot can't be used.
fn not_used(error: &Error) -> CreateError {
    CreateError { code: code_of(error), ..unusable(&damage(error)) }
}

/// Why nothing can be said of a snapshot, or its archive not be sent.
pub(crate) fn unreadable(error: &Error) -> Refusal {
    let message = match error.action() {
        Action::Unavailable => format!("The volume of filesystem snapshots can't be used: {}.", error.whole()),
        _ => format!("The filesystem snapshot can't be read: {}.", damage(error)),
    };
    (code_of(error), message)
}

fn code_of(error: &Error) -> ErrorCode {
    // A volume answers that is full, or on which this key has no room left.
    let no_room = error.is_full() || matches!(error, Error::Quota { .. });
    if error.action() == Action::Unavailable && !no_room { ErrorCode::VolumeUnavailable } else { ErrorCode::FilesystemSnapshotFailed }
}

/// The fault of a snapshot in words, with what to do about it.
pub(crate) fn damage(error: &Error) -> String {
    match error {
        Error::Damaged { file, fault } => {
            format!("{file} is damaged: {fault}; delete the snapshot, replace it, or restore the file from a backup of the volume")
        }
        error => error.whole(),
    }
}

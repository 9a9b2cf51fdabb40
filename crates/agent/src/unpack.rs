//! An archive as the upper layer of an overlay, or into a directory that is in use.
//!
//! Whoever made the archive may be hostile. Everything is done relative to open directories, one component at a time, and no link is ever
//! followed, so nothing outside of the layer is reached, whatever the archive says.

mod place;

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt, fs::FileExt},
    },
    path::Path,
};

use nix::{
    fcntl::{AtFlags, OFlag, openat, renameat},
    sys::{
        stat::{Mode, SFlag, UtimensatFlags, fchmod, fstat, futimens, mkdirat, mknodat, utimensat},
        time::TimeSpec,
    },
    unistd::{LinkatFlags, UnlinkatFlags, fchown, fchownat, linkat, symlinkat, unlinkat},
};
use sandboxer_layer::{Decoder, Entry, EntryPath, Fault, Kind, Limits, Meta, Sink, Summary, Time, Xattr};

use self::place::{Found, Place};
use crate::{guest::create_beside, xattr};

/// Holes are whole pages.
const PAGE: usize = 4096;

/// Why an archive was not unpacked.
#[derive(Debug)]
pub enum Failure {
    /// There is something wrong with it.
    Refused(String),
    /// It could not be written.
    Io(String, io::Error),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused(why) => formatter.write_str(why),
            Self::Io(at, error) => write!(formatter, "{at}: {error}"),
        }
    }
}

impl Failure {
    #[must_use]
    pub fn is_no_room(&self) -> bool {
        matches!(self, Self::Io(_, error) if matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)))
    }
}

/// Unpacks one archive.
pub struct Unpacker {
    decoder: Decoder,
    layer: Layer,
}

impl Unpacker {
    /// Into the empty directory `upper`, which will lie on `lower`: a directory that the archive only implies is there as it is below.
    ///
    /// # Errors
    /// One of them can't be opened.
    pub fn new(upper: &Path, lower: Option<&Path>, limits: Limits) -> io::Result<Self> {
        let layer = Layer {
            place: Place::new(upper, lower)?,
            file: None,
            times: Vec::new(),
            in_use: false,
            disowned: false,
            umask: Umask::default(),
        };
        Ok(Self { decoder: Decoder::new(limits), layer })
    }

    /// Into a directory that others may use meanwhile: a file gets its name when it is whole, the directory itself stays what it is, and nothing is deleted
    /// but what something else takes the place of.
    #[must_use]
    pub fn into_tree(dir: OwnedFd, limits: Limits) -> Self {
        let layer = Layer { place: Place::of(dir), file: None, times: Vec::new(), in_use: true, disowned: false, umask: Umask::default() };
        Self { decoder: Decoder::new(limits), layer }
    }

    /// Everything belongs to whoever unpacks it, and has no attributes but the usual ones.
    #[must_use]
    pub fn with_own_owner(mut self) -> Self {
        self.layer.disowned = true;
        self
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// It can't go on; what was unpacked so far is of no use.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.decoder.push(bytes, &mut self.layer).map_err(failure)
    }

    /// Finishes it.
    ///
    /// # Errors
    /// The archive is not at its end, or the last of it can't be written.
    pub fn finish(mut self) -> Result<Summary, Failure> {
        let summary = self.decoder.finish().map_err(failure)?;
        self.layer.set_times()?;
        Ok(summary)
    }
}

fn failure(fault: Fault<Failure>) -> Failure {
    match fault {
        Fault::Sink(failure) => failure,
        other => Failure::Refused(other.to_string()),
    }
}

/// A file that is being written.
struct Writing {
    file: File,
    path: EntryPath,
    meta: Meta,
    size: u64,
    /// How much of it is really there.
    written: u64,
    /// The name that it has until it is whole.
    temporary: Option<OsString>,
    /// It was made with the mode that it is to have.
    has_mode: bool,
}

/// What becomes of the mode that a new file is to have: by looking at the first ones, so that most need no call of their own for it.
#[derive(Default)]
struct Umask {
    /// Bits that are known to be left alone.
    kept: u32,
    /// Bits that are known to be taken away.
    taken: u32,
}

impl Umask {
    /// Whether a new file may be made with this mode at once.
    fn may_keep(&self, mode: u32) -> bool {
        mode & 0o7000 == 0 && mode & self.taken == 0
    }

    /// Whether a file that was made with this mode has it.
    fn has_kept(&mut self, file: &File, mode: u32) -> nix::Result<bool> {
        if mode & !self.kept != 0 {
            let found = fstat(file)?.st_mode & 0o777;
            self.kept |= found & mode;
            self.taken |= mode & !found;
        }
        Ok(mode & !self.kept == 0)
    }
}

struct Layer {
    place: Place,
    file: Option<Writing>,
    /// Of directories: set when nothing more is put into them.
    times: Vec<(EntryPath, Time)>,
    /// It is no layer, but a directory that others use.
    in_use: bool,
    /// Whose things are is not taken over.
    disowned: bool,
    umask: Umask,
}

impl Drop for Layer {
    fn drop(&mut self) {
        if let Some(Writing { path, temporary: Some(temporary), .. }) = self.file.take()
            && let Ok(parent) = self.place.parent(&path)
        {
            let _ = unlinkat(parent, &*temporary, UnlinkatFlags::NoRemoveDir);
        }
    }
}

impl Sink for Layer {
    type Error = Failure;

    fn entry(&mut self, entry: Entry) -> Result<(), Failure> {
        let Entry { path, kind, mut meta } = entry;
        if self.disowned {
            meta = Meta { uid: 0, gid: 0, mode: meta.mode & 0o777, xattrs: Vec::new(), ..meta };
        }
        if self.in_use {
            if matches!(kind, Kind::Opaque | Kind::Whiteout) {
                return Err(Failure::Refused(format!("{path}: a deletion, which only the layer of an image has")));
            }
            if path.is_root() {
                return Ok(());
            }
            if let Kind::File { size } = kind {
                if self.place.look(&path)? == Found::Directory {
                    return Err(Failure::Refused(format!("{path}: something else in the place of a directory")));
                }
                let (file, temporary) = create_beside(self.place.parent(&path)?).map_err(at_errno(&path))?;
                self.file = Some(Writing { file, path, meta, size, written: 0, temporary: Some(temporary), has_mode: false });
                return Ok(());
            }
        }
        if kind == Kind::Opaque {
            let dir = self.place.directory(&path)?;
            return xattr::set(dir, xattr::OPAQUE.to_bytes(), b"y").map_err(at(&path));
        }
        let Some((_, name)) = path.split() else {
            // Only a directory can be the root.
            return self.finish_directory(&path, meta);
        };
        let name = name.to_owned();
        if let Kind::File { size } = kind
            && let Some((file, has_mode)) = self.create(&path, &name, &meta)?
        {
            // Nothing was there, as nearly always.
            self.file = Some(Writing { file, path, meta, size, written: 0, temporary: None, has_mode });
            return Ok(());
        }
        let found = self.place.look(&path)?;
        match (&kind, found) {
            // It is both deleted below and made anew here.
            (Kind::Whiteout, Found::Directory) => {
                let dir = self.place.directory(&path)?;
                return xattr::set(dir, xattr::OPAQUE.to_bytes(), b"y").map_err(at(&path));
            }
            (Kind::Whiteout, Found::Other | Found::Whiteout) => return Ok(()),
            (_, Found::Nothing) | (Kind::Directory, Found::Directory) => {}
            (_, Found::Directory) => return Err(Failure::Refused(format!("{path}: something else in the place of a directory"))),
            (Kind::HardLink { target }, _) if *target == path => return Ok(()),
            (_, Found::Other | Found::Whiteout) => {
                unlinkat(self.place.parent(&path)?, &*name, UnlinkatFlags::NoRemoveDir).map_err(at_errno(&path))?;
            }
        }
        if let Kind::HardLink { target } = &kind {
            return self.hard_link(&path, target);
        }
        let parent = self.place.parent(&path)?;
        match kind {
            Kind::File { size } => {
                let (file, has_mode) = self.create(&path, &name, &meta)?.ok_or_else(|| at_errno(&path)(nix::Error::EEXIST))?;
                self.file = Some(Writing { file, path, meta, size, written: 0, temporary: None, has_mode });
                return Ok(());
            }
            Kind::Directory => {
                if found != Found::Directory {
                    mkdirat(parent, &*name, Mode::S_IRWXU).map_err(at_errno(&path))?;
                }
                let dir = self.place.directory(&path)?;
                if found == Found::Whiteout {
                    xattr::set(dir, xattr::OPAQUE.to_bytes(), b"y").map_err(at(&path))?;
                }
                return self.finish_directory(&path, meta);
            }
            Kind::Symlink { target } => symlinkat(OsStr::from_bytes(&target), parent, &*name).map_err(at_errno(&path))?,
            Kind::Fifo => {
                mknodat(parent, &*name, SFlag::S_IFIFO, Mode::S_IRUSR | Mode::S_IWUSR, 0).map_err(at_errno(&path))?;
                let fifo = open_fifo(parent, &name).map_err(at_errno(&path))?;
                fchmod(&fifo, Mode::from_bits_truncate(meta.mode)).map_err(at_errno(&path))?;
            }
            Kind::Whiteout => return mknodat(parent, &*name, SFlag::S_IFCHR, Mode::empty(), 0).map_err(at_errno(&path)),
            Kind::HardLink { .. } | Kind::Opaque => return Ok(()),
        }
        if (meta.uid, meta.gid) != (0, 0) {
            fchownat(parent, &*name, Some(meta.uid.into()), Some(meta.gid.into()), AtFlags::AT_SYMLINK_NOFOLLOW)
                .map_err(at_errno(&path))?;
        }
        let time = spec(meta.mtime);
        utimensat(parent, &*name, &time, &time, UtimensatFlags::NoFollowSymlink).map_err(at_errno(&path))
    }

    fn data(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Failure> {
        let Some(writing) = &mut self.file else { return Ok(()) };
        for run in runs(bytes) {
            let (start, end) = (offset + run.start as u64, offset + run.end as u64);
            writing.file.write_all_at(&bytes[run], start).map_err(at(&writing.path))?;
            writing.written = end;
        }
        Ok(())
    }

    fn end(&mut self) -> Result<(), Failure> {
        let Some(Writing { file, path, meta, size, written, temporary, has_mode }) = &self.file else { return Ok(()) };
        if written < size {
            file.set_len(*size).map_err(at(path))?;
        }
        if (meta.uid, meta.gid) != (0, 0) {
            // What root has just made is root's.
            own(file.as_fd(), path, meta)?;
        }
        if !has_mode {
            set_mode(file.as_fd(), path, meta)?;
        }
        set_xattrs(file.as_fd(), path, meta)?;
        let time = spec(meta.mtime);
        futimens(file, &time, &time).map_err(at_errno(path))?;
        if let (Some(temporary), Some((_, name))) = (temporary, path.split()) {
            let parent = self.place.parent(path)?;
            renameat(parent, &**temporary, parent, name).map_err(at_errno(path))?;
        }
        self.file = None;
        Ok(())
    }
}

impl Layer {
    /// A new file, and whether it has its mode already; none if there is something of that name.
    fn create(&mut self, path: &EntryPath, name: &OsStr, meta: &Meta) -> Result<Option<(File, bool)>, Failure> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        // Nobody may see more of another's file than its owner allows, and it is that only when it is finished.
        let at_once = (meta.uid, meta.gid) == (0, 0) && self.umask.may_keep(meta.mode);
        let mode = if at_once { Mode::from_bits_truncate(meta.mode) } else { Mode::S_IRUSR | Mode::S_IWUSR };
        match openat(self.place.parent(path)?, name, flags, mode) {
            Ok(file) => {
                let file = File::from(file);
                let has_mode = at_once && self.umask.has_kept(&file, meta.mode).map_err(at_errno(path))?;
                Ok(Some((file, has_mode)))
            }
            Err(nix::Error::EEXIST) => Ok(None),
            Err(error) => Err(at_errno(path)(error)),
        }
    }

    fn finish_directory(&mut self, path: &EntryPath, meta: Meta) -> Result<(), Failure> {
        let disowned = self.disowned;
        let dir = self.place.directory(path)?;
        if !disowned {
            own(dir, path, &meta)?;
        }
        set_mode(dir, path, &meta)?;
        set_xattrs(dir, path, &meta)?;
        self.times.push((path.clone(), meta.mtime));
        Ok(())
    }

    fn hard_link(&mut self, path: &EntryPath, target: &EntryPath) -> Result<(), Failure> {
        let refused = |why: &str| Failure::Refused(format!("{path}: {why}"));
        if self.place.look(target)? != Found::Other {
            return Err(refused("a hard link to what the archive did not bring before"));
        }
        let Some((_, name)) = path.split() else { return Err(refused("a hard link in the place of the root")) };
        let Some((_, target_name)) = target.split() else { return Err(refused("a hard link to the root")) };
        let from = self.place.parent(target)?.try_clone_to_owned().map_err(at(path))?;
        let parent = self.place.parent(path)?;
        linkat(&from, target_name, parent, name, LinkatFlags::empty()).map_err(at_errno(path))
    }

    /// From the deepest up: setting one changes no other.
    fn set_times(&mut self) -> Result<(), Failure> {
        for (path, time) in std::mem::take(&mut self.times).into_iter().rev() {
            let time = spec(time);
            futimens(self.place.directory(&path)?, &time, &time).map_err(at_errno(&path))?;
        }
        Ok(())
    }
}

/// Before all else: changing the owner takes other things away.
/// Opens the FIFO that was just made, and nothing that a guest has put in its place: a mode must not
/// be set through a link, which would lead out of the guest.
fn open_fifo(parent: BorrowedFd<'_>, name: &OsStr) -> Result<OwnedFd, nix::Error> {
    let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let fifo = openat(parent, name, flags, Mode::empty())?;
    let found = SFlag::from_bits_truncate(fstat(&fifo)?.st_mode & SFlag::S_IFMT.bits());
    if found == SFlag::S_IFIFO { Ok(fifo) } else { Err(nix::Error::ELOOP) }
}

fn own(file: BorrowedFd<'_>, path: &EntryPath, meta: &Meta) -> Result<(), Failure> {
    fchown(file, Some(meta.uid.into()), Some(meta.gid.into())).map_err(at_errno(path))
}

fn set_mode(file: BorrowedFd<'_>, path: &EntryPath, meta: &Meta) -> Result<(), Failure> {
    fchmod(file, Mode::from_bits_truncate(meta.mode)).map_err(at_errno(path))
}

fn set_xattrs(file: BorrowedFd<'_>, path: &EntryPath, meta: &Meta) -> Result<(), Failure> {
    for Xattr { name, value } in meta.xattrs.iter().filter(|xattr| xattr::is_kept(&xattr.name)) {
        match xattr::set(file, name, value) {
            Err(error) if xattr::is_needed(name) => {
                return Err(Failure::Io(format!("{path}: the attribute {}", String::from_utf8_lossy(name)), error));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The parts of it that are not pages of zeros.
pub(crate) fn runs(bytes: &[u8]) -> impl Iterator<Item = std::ops::Range<usize>> {
    let zero = |page: &[u8]| page.len() == PAGE && page.chunks(256).all(|part| part.iter().fold(0, |all, byte| all | byte) == 0);
    let mut at = 0;
    std::iter::from_fn(move || {
        while at < bytes.len() && zero(&bytes[at..bytes.len().min(at + PAGE)]) {
            at += PAGE;
        }
        let start = at;
        while at < bytes.len() && !zero(&bytes[at..bytes.len().min(at + PAGE)]) {
            at = bytes.len().min(at + PAGE);
        }
        (start < at).then_some(start..at)
    })
}

fn spec(time: Time) -> TimeSpec {
    TimeSpec::new(time.seconds, i64::from(time.nanos))
}

fn at(path: &EntryPath) -> impl Fn(io::Error) -> Failure {
    let path = path.to_string();
    move |error| Failure::Io(path.clone(), error)
}

fn at_errno(path: &EntryPath) -> impl Fn(nix::Error) -> Failure {
    let at = at(path);
    move |error| at(error.into())
}

/// Kept by whoever holds it open.
type Directory = OwnedFd;

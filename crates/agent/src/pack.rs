//! The upper layer of an overlay as an archive, piece by piece; or any other directory.
//!
//! Deletions are character devices 0:0, and directories that hide what is below carry an attribute: that is how overlays keep them. Nothing may
//! change while it is read; a file that does all the same is an error. Entries come in the order of their names, so equal trees give equal
//! archives. What is mounted in the directory is not gone into.

mod spent;

use std::{
    collections::HashMap,
    ffi::{CString, OsStr},
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use nix::{
    dir::{Dir, Type},
    fcntl::{AtFlags, OFlag, openat, readlinkat},
    sys::stat::{FileStat, Mode, SFlag, fstat, fstatat},
};
use sandboxer_layer::{
    Entry, EntryPath, Extent, Kind, Meta, Scan, Time,
    write::{put_end, put_head, put_padding},
};

use self::spent::Spent;
use crate::{guest::open_directory, xattr};

/// Files from this size on are looked at for holes; gVisor does not tell where they are.
const HOLES_FROM_BYTES: u64 = 256 * 1024;
/// Less is not worth a map.
const HOLES_WORTH_BYTES: u64 = 64 * 1024;
/// What is read at once.
const READ_BYTES: usize = 256 * 1024;
/// All files together, holes included: a hole takes time to look at.
const MAX_CONTENT_BYTES: u64 = 64 << 30;

pub struct Packer {
    levels: Vec<Level>,
    /// The first names of files that have several.
    links: HashMap<(u64, u64), EntryPath>,
    doing: Doing,
    out: Vec<u8>,
    content: u64,
    /// Where the directory itself is; others are mounted there.
    device: Option<u64>,
    /// That a file is written to while it is read is no fault.
    live: bool,
    /// It is no part of a sandbox: see [`Packer::from_outside`].
    outside: bool,
    read: Spent,
}

/// A directory that is being gone through.
struct Level {
    dir: OwnedFd,
    path: Vec<u8>,
    /// The next one last.
    names: Vec<Name>,
}

/// By its name first: that is their order.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Name {
    name: CString,
    /// Its directory says that it is a file, so it can be opened without a look at it.
    is_file: bool,
}

enum Doing {
    Root(OwnedFd),
    Walking,
    /// Looking where its holes are.
    Scanning {
        file: File,
        entry: Box<Entry>,
        scan: Scan,
        seen: Seen,
    },
    /// Its content, part by part, the next one last.
    Reading {
        file: File,
        path: EntryPath,
        left: u64,
        parts: Vec<Extent>,
        stored: u64,
        seen: Seen,
    },
    Done,
}

/// By what it is known that a file is still as it was: size and time.
type Seen = (i64, i64, i64);

fn seen(about: &FileStat) -> Seen {
    (about.st_size, about.st_mtime, about.st_mtime_nsec)
}

impl Packer {
    /// Of the directory at this path.
    ///
    /// # Errors
    /// It can't be opened.
    pub fn new(upper: &Path) -> io::Result<Self> {
        Ok(Self::of(nix::fcntl::open(upper, DIRECTORY, Mode::empty())?, false))
    }

    /// Of a directory. `live`: its files may be written to meanwhile; of each comes as much as there was when it was its turn.
    #[must_use]
    pub fn of(root: OwnedFd, live: bool) -> Self {
        Self {
            levels: Vec::new(),
            links: HashMap::new(),
            doing: Doing::Root(root),
            out: Vec::new(),
            content: 0,
            device: None,
            live,
            outside: false,
            read: Spent::default(),
        }
    }

    /// Of a directory outside of any sandbox, for one: everything belongs to root, what is mounted there is part of it, and what is read is only read.
    #[must_use]
    pub fn from_outside(mut self) -> Self {
        self.outside = true;
        self
    }

    /// Goes on until at least so many bytes are there, or all, or for so many steps.
    ///
    /// # Errors
    /// Something can't be read, or put into an archive.
    pub fn go_on(&mut self, steps: usize, wanted: usize) -> io::Result<()> {
        for _ in 0..steps {
            if self.out.len() >= wanted || self.is_done() {
                break;
            }
            self.step()?;
        }
        Ok(())
    }

    /// What is there so far.
    pub fn out(&mut self) -> &mut Vec<u8> {
        &mut self.out
    }

    /// Goes on until at least so many bytes are there, or all. Returns them.
    ///
    /// # Errors
    /// Something can't be read, or put into an archive.
    pub fn fill(&mut self, wanted: usize) -> io::Result<&mut Vec<u8>> {
        while self.out.len() < wanted && !self.is_done() {
            self.step()?;
        }
        Ok(&mut self.out)
    }

    /// Everything was read; what [`Self::fill`] last returned is all that is left.
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self.doing, Doing::Done)
    }

    fn step(&mut self) -> io::Result<()> {
        match std::mem::replace(&mut self.doing, Doing::Walking) {
            Doing::Root(root) => {
                let about = fstat(&root)?;
                self.device = Some(about.st_dev);
                self.directory(root, Vec::new(), &about)
            }
            Doing::Walking => self.walk(),
            Doing::Scanning { mut file, entry, mut scan, seen } => {
                let Kind::File { size } = entry.kind else { return Ok(()) };
                let mut buffer = vec![0; READ_BYTES];
                let wanted = usize::try_from(size - scan.position()).unwrap_or(usize::MAX).min(READ_BYTES);
                file.read_exact(&mut buffer[..wanted]).map_err(|error| changed(&entry.path, error))?;
                scan.push(&buffer[..wanted]);
                if scan.position() < size {
                    self.doing = Doing::Scanning { file, entry, scan, seen };
                    return Ok(());
                }
                file.rewind()?;
                self.begin(file, &entry, scan.finish(HOLES_WORTH_BYTES), seen);
                Ok(())
            }
            Doing::Reading { mut file, path, left, parts, stored, seen } => {
                let wanted = usize::try_from(left).unwrap_or(usize::MAX).min(READ_BYTES);
                let start = self.out.len();
                self.out.resize(start + wanted, 0);
                file.read_exact(&mut self.out[start..]).map_err(|error| changed(&path, error))?;
                self.read_on(file, path, left - wanted as u64, parts, stored, seen)
            }
            Doing::Done => {
                self.doing = Doing::Done;
                Ok(())
            }
        }
    }

    fn walk(&mut self) -> io::Result<()> {
        let Some(level) = self.levels.last_mut() else {
            put_end(&mut self.out);
            self.doing = Doing::Done;
            return Ok(());
        };
        let Some(Name { name, is_file }) = level.names.pop() else {
            self.levels.pop();
            return Ok(());
        };
        let mut path = Vec::with_capacity(level.path.len() + 1 + name.to_bytes().len());
        if !level.path.is_empty() {
            path.extend_from_slice(&level.path);
            path.push(b'/');
        }
        path.extend_from_slice(name.to_bytes());
        // Only who owns a file may read it without leaving a trace.
        let without = if self.outside { OFlag::O_NOATIME } else { OFlag::empty() };
        let open = |more: OFlag| openat(&level.dir, &*name, FILE.difference(without) | more, Mode::empty());
        if is_file {
            // Should it have become something else meanwhile: nobody waits for the other end of a FIFO, and what is no file is looked at below.
            match open(OFlag::O_NONBLOCK) {
                Err(nix::Error::ENOENT) => return Ok(()),
                Err(nix::Error::ELOOP | nix::Error::ENXIO) => {}
                file => {
                    let file = file?;
                    let about = fstat(&file)?;
                    if SFlag::from_bits_truncate(about.st_mode & SFlag::S_IFMT.bits()) == SFlag::S_IFREG {
                        return self.file(file.into(), &path, &about);
                    }
                }
            }
        }
        let about = match fstatat(&level.dir, &*name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            // Removed since its directory was read.
            Err(nix::Error::ENOENT) => return Ok(()),
            about => about?,
        };
        let kind = match SFlag::from_bits_truncate(about.st_mode & SFlag::S_IFMT.bits()) {
            SFlag::S_IFDIR => {
                return match open_directory(level.dir.as_fd(), OsStr::from_bytes(name.to_bytes())) {
                    Err(nix::Error::ENOENT) => Ok(()),
                    dir => self.directory(dir?, path, &about),
                };
            }
            SFlag::S_IFREG => {
                return match open(OFlag::empty()) {
                    Err(nix::Error::ENOENT) => Ok(()),
                    file => self.file(file?.into(), &path, &about),
                };
            }
            SFlag::S_IFLNK => Kind::Symlink { target: readlinkat(&level.dir, &*name)?.as_bytes().to_vec() },
            SFlag::S_IFIFO => Kind::Fifo,
            SFlag::S_IFCHR if about.st_rdev == 0 => Kind::Whiteout,
            // A socket is nothing without who listens on it, and no archive can hold one. Devices can't be made in here.
            _ => return Ok(()),
        };
        let path = parse(&path)?;
        if kind == Kind::Whiteout {
            put_head(&mut self.out, &Entry { path, kind, meta: Meta::default() }, None);
            return Ok(());
        }
        if !self.link(&path, &about) {
            put_head(&mut self.out, &Entry { path, kind, meta: meta(&about, self.outside) }, None);
        }
        Ok(())
    }

    fn directory(&mut self, dir: OwnedFd, path: Vec<u8>, about: &FileStat) -> io::Result<()> {
        let (xattrs, opaque) = xattr::read(dir.as_fd())?;
        let parsed = if path.is_empty() { EntryPath::root() } else { parse(&path)? };
        put_head(
            &mut self.out,
            &Entry { path: parsed.clone(), kind: Kind::Directory, meta: Meta { xattrs, ..meta(about, self.outside) } },
            None,
        );
        if opaque {
            put_head(&mut self.out, &Entry { path: parsed, kind: Kind::Opaque, meta: Meta::default() }, None);
        }
        let mut names: Vec<Name> = Vec::new();
        if !self.outside && self.device.is_some_and(|device| device != about.st_dev) {
            // Something else is mounted here.
            return Ok(());
        }
        for entry in Dir::from_fd(dir.try_clone()?)?.iter() {
            let entry = entry?;
            let name = entry.file_name().to_owned();
            if !matches!(name.to_bytes(), b"." | b"..") {
                names.push(Name { name, is_file: entry.file_type() == Some(Type::File) });
            }
        }
        names.sort_unstable_by(|one, other| other.cmp(one));
        self.levels.push(Level { dir, path, names });
        Ok(())
    }

    fn file(&mut self, file: File, path: &[u8], about: &FileStat) -> io::Result<()> {
        let path = parse(path)?;
        if self.link(&path, about) {
            return Ok(());
        }
        let size = u64::try_from(about.st_size).unwrap_or(0);
        self.content = self.content.saturating_add(size);
        if self.content > MAX_CONTENT_BYTES {
            return Err(io::Error::other(format!("{path}: the files together are larger than {} GiB", MAX_CONTENT_BYTES >> 30)));
        }
        let (xattrs, _) = xattr::read(file.as_fd())?;
        let entry = Entry { path, kind: Kind::File { size }, meta: Meta { xattrs, ..meta(about, self.outside) } };
        if size >= HOLES_FROM_BYTES {
            self.doing = Doing::Scanning { file, entry: Box::new(entry), scan: Scan::default(), seen: seen(about) };
            return Ok(());
        }
        put_head(&mut self.out, &entry, None);
        self.small(file, &entry.path, size)
    }

    /// All of a file that is read at once. Most are, and each call into gVisor costs as much as some KiB.
    fn small(&mut self, mut file: File, path: &EntryPath, size: u64) -> io::Result<()> {
        let Some(wanted) = usize::try_from(size).ok().filter(|size| *size > 0) else { return Ok(()) };
        let start = self.out.len();
        // One byte more shows whether it has grown.
        self.out.resize(start + wanted + 1, 0);
        let mut filled = 0;
        while filled < wanted {
            match file.read(&mut self.out[start + filled..]) {
                Ok(0) => return Err(changed(path, io::ErrorKind::UnexpectedEof.into())),
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(changed(path, error)),
            }
        }
        if filled > wanted && !self.live {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("{path}: it was changed while it was read")));
        }
        self.out.truncate(start + wanted);
        put_padding(&mut self.out, size);
        self.read.push(file.into());
        Ok(())
    }

    /// Writes its head; its content comes next.
    fn begin(&mut self, file: File, entry: &Entry, extents: Option<Vec<Extent>>, seen: Seen) {
        let Kind::File { size } = entry.kind else { return };
        put_head(&mut self.out, entry, extents.as_deref());
        let mut parts = extents.unwrap_or_else(|| vec![Extent { offset: 0, length: size }]);
        let stored = parts.iter().map(|part| part.length).sum();
        parts.reverse();
        // It is at its start, so there is nothing to seek that could fail; a first part that lies further on is gone to next.
        self.doing = Doing::Reading { file, path: entry.path.clone(), left: 0, parts, stored, seen };
    }

    fn read_on(&mut self, mut file: File, path: EntryPath, left: u64, mut parts: Vec<Extent>, stored: u64, was: Seen) -> io::Result<()> {
        if left > 0 {
            self.doing = Doing::Reading { file, path, left, parts, stored, seen: was };
            return Ok(());
        }
        match parts.pop().filter(|part| part.length > 0) {
            Some(part) => {
                if part.offset > 0 {
                    file.seek(SeekFrom::Start(part.offset))?;
                }
                self.doing = Doing::Reading { file, path, left: part.length, parts, stored, seen: was };
            }
            None => {
                if !self.live && stored > 0 && seen(&fstat(&file)?) != was {
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("{path}: it was changed while it was read")));
                }
                put_padding(&mut self.out, stored);
            }
        }
        Ok(())
    }

    /// True if it is another name of something that was packed already, which is noted then.
    fn link(&mut self, path: &EntryPath, about: &FileStat) -> bool {
        if about.st_nlink < 2 {
            return false;
        }
        match self.links.get(&(about.st_dev, about.st_ino)) {
            Some(first) => {
                let kind = Kind::HardLink { target: first.clone() };
                put_head(&mut self.out, &Entry { path: path.clone(), kind, meta: meta(about, self.outside) }, None);
                true
            }
            None => {
                self.links.insert((about.st_dev, about.st_ino), path.clone());
                false
            }
        }
    }
}

const FILE: OFlag = OFlag::O_RDONLY.union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC).union(OFlag::O_NOATIME);
const DIRECTORY: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC).union(OFlag::O_NOATIME);

fn parse(path: &[u8]) -> io::Result<EntryPath> {
    EntryPath::parse(path).map_err(|fault| {
        let shown: String = OsStr::from_bytes(path).to_string_lossy().chars().take(300).collect();
        io::Error::other(format!("{shown}: {fault}"))
    })
}

fn changed(path: &EntryPath, error: io::Error) -> io::Error {
    let why =
        if error.kind() == io::ErrorKind::UnexpectedEof { "it became shorter while it was read".to_owned() } else { error.to_string() };
    io::Error::new(error.kind(), format!("{path}: {why}"))
}

/// gVisor counts backwards before 1970, and tells the negative nanoseconds as a positive number of 32 bits.
pub(crate) fn time(seconds: i64, nanos: i64) -> Time {
    const SECOND: i64 = 1_000_000_000;
    let nanos = if nanos >= SECOND { nanos - (1 << 32) } else { nanos };
    let forwards = u32::try_from(nanos.rem_euclid(SECOND)).unwrap_or(0);
    Time { seconds: seconds.saturating_add(nanos.div_euclid(SECOND)), nanos: forwards }
}

/// `outside`: whose it is there means nothing in a sandbox.
fn meta(about: &FileStat, outside: bool) -> Meta {
    let (uid, gid) = if outside { (0, 0) } else { (about.st_uid, about.st_gid) };
    Meta { mode: about.st_mode & 0o7777, uid, gid, mtime: time(about.st_mtime, about.st_mtime_nsec), atime: None, xattrs: Vec::new() }
}

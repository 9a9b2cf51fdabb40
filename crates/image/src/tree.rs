//! A directory tree that is written from an archive. Every path is walked from the root, one component at a time, and no symbolic link is ever followed,
//! so nothing can be written outside of it whatever the archive says.

use std::collections::{BTreeMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open, openat};
use nix::sys::stat::{Mode, SFlag, UtimensatFlags, fchmod, fstatat, futimens, mkdirat, utimensat};
use nix::sys::time::TimeSpec;
use nix::unistd::{UnlinkatFlags, linkat, symlinkat, unlinkat};

use crate::error::{Doing, Error, Result};
use sandboxer_layer::EntryPath;

/// Later times are brought down to this one (2100); it is also the creation time that every image file carries, so that equal trees give equal files.
pub(crate) const LATEST_MTIME: u64 = 4_102_444_800;

const OPEN_DIR: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);
const CREATE_FILE: OFlag = OFlag::O_WRONLY.union(OFlag::O_CREAT).union(OFlag::O_EXCL).union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Meta {
    pub(crate) mode: u32,
    pub(crate) mtime: u64,
}

impl Meta {
    pub(crate) const fn with_mode(mode: u32) -> Self {
        Self { mode, mtime: 0 }
    }
}

pub(crate) struct Tree {
    root: Rc<OwnedFd>,
    /// Directories get their modes last: one that its owner may not write to could not be filled by an ordinary user.
    directories: BTreeMap<PathBuf, Meta>,
    /// Archives list a directory's entries one after the other.
    last_parent: Option<(PathBuf, Rc<OwnedFd>)>,
    /// Directories that were made on the way to something and have not been counted.
    implied: u64,
}

impl Tree {
    /// Works below an existing directory.
    pub(crate) fn open(root: &Path) -> Result<Self> {
        let root = open(root, OPEN_DIR, Mode::empty()).doing(|| format!("open {}", root.display()))?;
        Ok(Self { root: Rc::new(root), directories: BTreeMap::new(), last_parent: None, implied: 0 })
    }

    /// How many directories were made since the last call without an entry of their own.
    pub(crate) fn take_implied(&mut self) -> u64 {
        std::mem::take(&mut self.implied)
    }

    pub(crate) fn exists(&mut self, path: &EntryPath) -> Result<bool> {
        let Some((parent, name)) = path.split() else { return Ok(true) };
        match self.directory(parent, false) {
            Ok(parent) => Ok(kind(&parent, name).doing(|| format!("look at {path}"))?.is_some()),
            Err(Walk::Missing) => Ok(false),
            Err(fault) => Err(fault.into_error(path)),
        }
    }

    /// The names in a directory; none if it is not there.
    pub(crate) fn names(&mut self, path: &EntryPath) -> Result<Vec<OsString>> {
        match self.directory(path.as_path(), false) {
            Ok(directory) => names_in(&directory).doing(|| format!("list {path}")),
            Err(Walk::Missing) => Ok(Vec::new()),
            Err(fault) => Err(fault.into_error(path)),
        }
    }

    pub(crate) fn make_dir(&mut self, path: &EntryPath, meta: Meta) -> Result<()> {
        // The root is ours, not the archive's.
        let Some((parent, name)) = path.split() else { return Ok(()) };
        let parent = self.parent_of(path, parent)?;
        let doing = || format!("make the directory {path}");
        match kind(&parent, name).doing(doing)? {
            Some(SFlag::S_IFDIR) => {}
            found => {
                if found.is_some() {
                    self.forget(path.as_path());
                    unlinkat(&parent, name, UnlinkatFlags::NoRemoveDir).doing(doing)?;
                }
                mkdirat(&parent, name, Mode::S_IRWXU).doing(doing)?;
            }
        }
        self.directories.insert(path.as_path().to_path_buf(), meta);
        Ok(())
    }

    /// The content of a file. None: there is no regular file of that name, or it is larger than this.
    pub(crate) fn read_file(&mut self, path: &EntryPath, most: u64) -> Result<Option<Vec<u8>>> {
        let doing = || format!("read {path}");
        let Some((parent, name)) = path.split() else { return Ok(None) };
        let parent = match self.directory(parent, false) {
            Ok(parent) => parent,
            Err(_) => return Ok(None),
        };
        if kind(&parent, name).doing(doing)? != Some(SFlag::S_IFREG) {
            return Ok(None);
        }
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = File::from(openat(&parent, name, flags, Mode::empty()).doing(doing)?);
        let mut content = Vec::new();
        file.take(most + 1).read_to_end(&mut content).doing(doing)?;
        Ok((content.len() as u64 <= most).then_some(content))
    }

    /// Writes a file, in the place of whatever was there, and returns its size.
    pub(crate) fn write_file(&mut self, path: &EntryPath, meta: Meta, content: &mut dyn Read) -> Result<u64> {
        let doing = || format!("write {path}");
        let (parent, name) = self.make_way(path)?;
        let file = openat(&parent, name.as_os_str(), CREATE_FILE, Mode::S_IRUSR | Mode::S_IWUSR).doing(doing)?;
        let mut file = File::from(file);
        let size = copy(content, &mut file).doing(doing)?;
        // Readable by its owner always: mkfs.erofs has to read it, as an ordinary user too. In the sandbox root reads it anyway.
        fchmod(&file, mode_bits(meta.mode | 0o400)).doing(doing)?;
        let time = timespec(meta.mtime);
        futimens(&file, &time, &time).doing(doing)?;
        Ok(size)
    }

    pub(crate) fn make_symlink(&mut self, path: &EntryPath, target: &[u8], mtime: u64) -> Result<()> {
        let doing = || format!("make the symbolic link {path}");
        let (parent, name) = self.make_way(path)?;
        symlinkat(OsStr::from_bytes(target), &parent, name.as_os_str()).doing(doing)?;
        let time = timespec(mtime);
        utimensat(&parent, name.as_os_str(), &time, &time, UtimensatFlags::NoFollowSymlink).doing(doing)
    }

    /// Makes `path` another name of `target`, which must be a file of this tree.
    pub(crate) fn make_hard_link(&mut self, path: &EntryPath, target: &EntryPath) -> Result<()> {
        let refused = |why: &str| Error::refused(format!("hard link {path} to {target}"), why);
        let Some((target_parent, target_name)) = target.split() else { return Err(refused("its target is a directory")) };
        let target_parent = match self.directory(target_parent, false) {
            Ok(directory) => directory,
            Err(Walk::Missing) => return Err(refused("its target is not in the image")),
            Err(fault) => return Err(fault.into_error(target)),
        };
        match kind(&target_parent, target_name).doing(|| format!("look at {target}"))? {
            Some(SFlag::S_IFREG | SFlag::S_IFLNK) => {}
            Some(_) => return Err(refused("its target is a directory")),
            None => return Err(refused("its target is not in the image")),
        }
        // A link to itself would remove the file it is to name.
        if path == target {
            return Ok(());
        }
        let (parent, name) = self.make_way(path)?;
        linkat(&target_parent, target_name, &parent, name.as_os_str(), AtFlags::empty()).doing(|| format!("link {path} to {target}"))
    }

    /// Removes what is at `path`, except what `keep` names.
    pub(crate) fn remove(&mut self, path: &EntryPath, keep: &HashSet<PathBuf>) -> Result<()> {
        let Some((parent, name)) = path.split() else { return self.remove_children(path, keep) };
        let parent = match self.directory(parent, false) {
            Ok(directory) => directory,
            Err(Walk::Missing) => return Ok(()),
            Err(fault) => return Err(fault.into_error(path)),
        };
        self.forget(path.as_path());
        remove_below(&parent, name, path.as_path(), keep).doing(|| format!("remove {path}"))
    }

    /// Removes what is in the directory `path`, except what `keep` names.
    pub(crate) fn remove_children(&mut self, path: &EntryPath, keep: &HashSet<PathBuf>) -> Result<()> {
        for name in self.names(path)? {
            let child = EntryPath::parse(path.as_path().join(&name).as_os_str().as_bytes())
                .map_err(|fault| Error::refused(path.to_string(), fault.to_string()))?;
            self.remove(&child, keep)?;
        }
        Ok(())
    }

    /// Gives the directories their modes and times, the deepest first.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.last_parent = None;
        for (path, meta) in std::mem::take(&mut self.directories).into_iter().rev() {
            let doing = || format!("set the mode of /{}", path.display());
            let directory = match self.walk(&path, false) {
                Ok(directory) => directory,
                // Removed, or replaced by something else, since.
                Err(Walk::Missing | Walk::NotADirectory(_)) => continue,
                Err(Walk::Failed(errno)) => return Err(errno).doing(doing),
            };
            let time = timespec(meta.mtime);
            futimens(&directory, &time, &time).doing(doing)?;
            fchmod(&directory, mode_bits(meta.mode | 0o500)).doing(doing)?;
        }
        let time = timespec(0);
        futimens(&self.root, &time, &time).doing(|| "set the time of the root")?;
        fchmod(&self.root, mode_bits(0o755)).doing(|| "set the mode of the root")
    }

    /// The parent directory and the name for a new entry, with whatever was there removed.
    fn make_way(&mut self, path: &EntryPath) -> Result<(Rc<OwnedFd>, OsString)> {
        let Some((parent, name)) = path.split() else { return Err(Error::refused("/", "the root of an image is a directory")) };
        let parent = self.parent_of(path, parent)?;
        self.forget(path.as_path());
        remove_below(&parent, name, path.as_path(), &HashSet::new()).doing(|| format!("replace {path}"))?;
        Ok((parent, name.to_owned()))
    }

    fn parent_of(&mut self, path: &EntryPath, parent: &Path) -> Result<Rc<OwnedFd>> {
        self.directory(parent, true).map_err(|fault| fault.into_error(path))
    }

    fn directory(&mut self, path: &Path, create: bool) -> Result<Rc<OwnedFd>, Walk> {
        if let Some((last, directory)) = &self.last_parent
            && last == path
        {
            return Ok(Rc::clone(directory));
        }
        let directory = self.walk(path, create)?;
        self.last_parent = Some((path.to_path_buf(), Rc::clone(&directory)));
        Ok(directory)
    }

    fn walk(&mut self, path: &Path, create: bool) -> Result<Rc<OwnedFd>, Walk> {
        let mut directory = Rc::clone(&self.root);
        let mut walked = PathBuf::new();
        for component in path.components() {
            let name = component.as_os_str();
            walked.push(name);
            let next = match openat(&directory, name, OPEN_DIR, Mode::empty()) {
                Err(Errno::ENOENT) if create => {
                    mkdirat(&directory, name, Mode::S_IRWXU).map_err(Walk::Failed)?;
                    self.implied += 1;
                    self.directories.insert(walked.clone(), Meta::with_mode(0o755));
                    openat(&directory, name, OPEN_DIR, Mode::empty())
                }
                other => other,
            };
            directory = match next {
                Ok(next) => Rc::new(next),
                Err(Errno::ENOENT) => return Err(Walk::Missing),
                Err(Errno::ENOTDIR | Errno::ELOOP) => return Err(Walk::NotADirectory(walked)),
                Err(errno) => return Err(Walk::Failed(errno)),
            };
        }
        Ok(directory)
    }

    /// What was known of directories at or below `path` no longer holds.
    fn forget(&mut self, path: &Path) {
        if self.last_parent.as_ref().is_some_and(|(last, _)| last.starts_with(path)) {
            self.last_parent = None;
        }
    }
}

/// Why a directory could not be reached.
enum Walk {
    Missing,
    /// The path goes through something that is no directory: a file, or a symbolic link.
    NotADirectory(PathBuf),
    Failed(Errno),
}

impl Walk {
    fn into_error(self, path: &EntryPath) -> Error {
        match self {
            Self::Missing => Error::refused(path.to_string(), "it is not in the image"),
            Self::NotADirectory(at) => {
                Error::refused(path.to_string(), format!("it lies below /{}, which is a link or a file, not a directory", at.display()))
            }
            Self::Failed(errno) => Error::Io { doing: format!("reach {path}"), source: errno.into() },
        }
    }
}

/// What `name` is, nothing if it is not there. Does not follow links.
fn kind(directory: &OwnedFd, name: &OsStr) -> nix::Result<Option<SFlag>> {
    match fstatat(directory, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT)),
        Err(Errno::ENOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

fn names_in(directory: &OwnedFd) -> nix::Result<Vec<OsString>> {
    let mut directory = Dir::openat(directory, c".", OPEN_DIR, Mode::empty())?;
    let mut names = Vec::new();
    for entry in directory.iter() {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(OsStr::from_bytes(&name).to_owned());
        }
    }
    Ok(names)
}

fn remove_below(parent: &OwnedFd, name: &OsStr, path: &Path, keep: &HashSet<PathBuf>) -> nix::Result<()> {
    match kind(parent, name)? {
        None => Ok(()),
        Some(SFlag::S_IFDIR) => {
            let directory = openat(parent, name, OPEN_DIR, Mode::empty())?;
            for child in names_in(&directory)? {
                remove_below(&directory, &child, &path.join(&child), keep)?;
            }
            if keep.contains(path) { Ok(()) } else { unlinkat(parent, name, UnlinkatFlags::RemoveDir) }
        }
        Some(_) if keep.contains(path) => Ok(()),
        Some(_) => unlinkat(parent, name, UnlinkatFlags::NoRemoveDir),
    }
}

/// `io::copy` with a large buffer: archives are read through decompressors.
fn copy(from: &mut dyn Read, to: &mut File) -> io::Result<u64> {
    let mut buffer = vec![0; 256 * 1024];
    let mut size = 0;
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(size),
            n => {
                to.write_all(&buffer[..n])?;
                size += n as u64;
            }
        }
    }
}

fn mode_bits(mode: u32) -> Mode {
    Mode::from_bits_truncate(mode & 0o7777)
}

fn timespec(mtime: u64) -> TimeSpec {
    TimeSpec::new(i64::try_from(mtime.min(LATEST_MTIME)).unwrap_or(0), 0)
}

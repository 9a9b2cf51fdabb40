//! Directories of a volume, reached from its root without following a link.
//!
//! Programs of other users may write to a volume. A link in place of one of its directories would lead
//! the writes of a server that runs as root, or the removals of a collection, to somewhere else. So
//! each operation descends from the root by open directories, one component at a time, and works
//! relative to the last: nothing that is renamed or linked meanwhile leads it elsewhere.

use std::{
    fs::{self, File, Metadata, OpenOptions},
    io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::OpenOptionsExt as _,
    },
    path::{Component, Path, PathBuf},
};

use nix::{
    fcntl::{OFlag, openat},
    libc,
    sys::stat::Mode,
};

/// A directory that was reached without a link and is held open.
#[derive(Debug)]
pub(crate) struct Dir {
    /// The kernel's own name of the open directory. It is good for as long as this is.
    path: PathBuf,
    _open: OwnedFd,
}

/// Opens the root by its path, which is the operator's: only its last component must be no link.
///
/// Each operation opens the root anew, so that nothing is written to a volume that was unmounted.
pub(crate) fn open_root(root: &Path) -> io::Result<Dir> {
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW;
    let open = OpenOptions::new().read(true).custom_flags(flags).open(root)?;
    Ok(Dir::of(open.into()))
}

/// Descends from the root to a directory below it.
pub(crate) fn open_below(root: &Path, below: &Path) -> io::Result<Dir> {
    let mut dir = open_root(root)?;
    for component in below.components() {
        let Component::Normal(name) = component else { return Err(io::ErrorKind::InvalidInput.into()) };
        // With O_DIRECTORY a link is an error, not an open link.
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        dir = Dir::of(openat(&dir._open, name, flags, Mode::empty())?);
    }
    Ok(dir)
}

impl Dir {
    fn of(open: OwnedFd) -> Self {
        Self { path: format!("/proc/self/fd/{}", open.as_raw_fd()).into(), _open: open }
    }

    /// A path that leads to this very directory, whatever its name is now.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// A path to something in it. Its user must not follow a link there.
    pub(crate) fn at(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path.join(name)
    }

    pub(crate) fn metadata(&self) -> io::Result<Metadata> {
        fs::metadata(&self.path)
    }

    pub(crate) fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }

    /// A plain file in it, for reading. A link, a FIFO or a device is an error, and nothing blocks.
    pub(crate) fn open_file(&self, name: impl AsRef<Path>) -> io::Result<File> {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(self.at(name))?;
        if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::new(io::ErrorKind::InvalidData, "it is no plain file")) }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn no_component_below_the_root_is_a_link() {
        let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir_all(root.path().join("a/b")).unwrap();
        fs::create_dir_all(outside.path().join("b")).unwrap();
        fs::write(root.path().join("a/b/file"), "inside").unwrap();
        symlink(outside.path(), root.path().join("link")).unwrap();
        symlink("a", root.path().join("near")).unwrap();
        symlink("file", root.path().join("a/b/other")).unwrap();
        let open = |below: &str| open_below(root.path(), Path::new(below));
        assert!(open("a/b").unwrap().open_file("file").is_ok());
        for below in ["link", "link/b", "near", "near/b", "a/../a", "/a", "missing"] {
            assert!(open(below).is_err(), "{below}");
        }
        let dir = open("a/b").unwrap();
        assert!(dir.open_file("other").is_err() && dir.open_file("..").is_err());
        // A link that takes the directory's name meanwhile changes nothing.
        fs::rename(root.path().join("a"), root.path().join("moved")).unwrap();
        symlink(outside.path(), root.path().join("a")).unwrap();
        fs::write(dir.at("new"), "x").unwrap();
        assert!(root.path().join("moved/b/new").exists() && !outside.path().join("b/new").exists());
        assert!(open_root(&root.path().join("a")).is_err());
    }
}

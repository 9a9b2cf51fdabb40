//! A directory for work in progress, inside the image directory so that a finished file can be renamed into place.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::error::{Doing, Result};

const PREFIX: &str = "tmp-";

/// Removed when dropped. While it is in use its maker holds a lock on it, so that others can tell it from what a killed process left.
pub(crate) struct Scratch {
    path: PathBuf,
    _lock: File,
}

impl Scratch {
    /// The caller holds the index lock, else [`remove_stale`] could take the new directory for an old one before it is locked.
    pub(crate) fn new(directory: &Path) -> Result<Self> {
        let making = || format!("make a temporary directory in {}", directory.display());
        let path = tempfile::Builder::new().prefix(PREFIX).tempdir_in(directory).doing(making)?.keep();
        let lock = File::open(&path).and_then(|lock| lock.lock().map(|()| lock));
        match lock {
            Ok(lock) => Ok(Self { path, _lock: lock }),
            Err(error) => {
                let _ = fs::remove_dir(&path);
                Err(error).doing(making)
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What can't be removed now is removed at the next open.
        let _ = remove_tree(&self.path);
    }
}

/// Removes what processes that were killed left behind. The caller holds the index lock.
pub(crate) fn remove_stale(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(PREFIX) && entry.file_type()?.is_dir() {
            let held = File::open(entry.path())?;
            if held.try_lock().is_ok() {
                remove_tree(&entry.path())?;
            }
        }
    }
    Ok(())
}

/// Removes a tree in which there may be directories that their owner may not write to. Follows no links.
fn remove_tree(path: &Path) -> io::Result<()> {
    if fs::remove_dir_all(path).is_ok() {
        return Ok(());
    }
    make_writable(path)?;
    fs::remove_dir_all(path)
}

fn make_writable(directory: &Path) -> io::Result<()> {
    fs::set_permissions(directory, Permissions::from_mode(0o700))?;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            make_writable(&entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_process_left_is_removed_and_what_is_in_use_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let stale = directory.path().join("tmp-old");
        fs::create_dir_all(stale.join("a/b")).unwrap();
        fs::set_permissions(stale.join("a"), Permissions::from_mode(0o500)).unwrap();
        let used = Scratch::new(directory.path()).unwrap();
        remove_stale(directory.path()).unwrap();
        assert!(!stale.exists());
        assert!(used.path().exists());
        let path = used.path().to_path_buf();
        drop(used);
        assert!(!path.exists());
    }
}

//! Who may read what is written on a volume: whoever may write into its root, and nobody else.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;

use nix::libc;

/// The volume's owner, and its group if that can write there. What root writes on another user's volume is that user's, so that both can share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner {
    file_mode: u32,
    dir_mode: u32,
    chown: Option<(u32, u32)>,
}

impl Owner {
    /// `root`: of the volume's own directory.
    pub(crate) fn of(root: &fs::Metadata) -> Self {
        let shared = root.mode() & 0o020 != 0;
        let foreign = nix::unistd::geteuid().is_root() && root.uid() != 0;
        Self {
            file_mode: if shared { 0o660 } else { 0o600 },
            dir_mode: if shared { 0o770 | (root.mode() & 0o2000) } else { 0o700 },
            chown: foreign.then_some((root.uid(), root.gid())),
        }
    }

    /// A new file, for writing.
    pub(crate) fn create(self, path: &Path) -> io::Result<File> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(path)?;
        self.give(&file, self.file_mode)?;
        Ok(file)
    }

    /// A new directory.
    pub(crate) fn make_dir(self, path: &Path) -> io::Result<()> {
        DirBuilder::new().mode(0o700).create(path)?;
        let dir = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_DIRECTORY).open(path)?;
        self.give(&dir, self.dir_mode)
    }

    /// By the open file, never by its name: whoever may write there could put a link to something else in its place, and have root give that away.
    fn give(self, file: &File, mode: u32) -> io::Result<()> {
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        let Some((uid, gid)) = self.chown else { return Ok(()) };
        match fchown(file, Some(uid), Some(gid)) {
            // "Root" of a user namespace that does not know the owner: it stays its own.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::EINVAL)) => Ok(()),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written_in(mode: u32) -> (u32, u32) {
        let root = tempfile::tempdir().unwrap();
        fs::set_permissions(root.path(), fs::Permissions::from_mode(mode)).unwrap();
        let owner = Owner::of(&fs::metadata(root.path()).unwrap());
        let (file, dir) = (root.path().join("file"), root.path().join("dir"));
        owner.create(&file).unwrap();
        owner.make_dir(&dir).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
        (mode(&file), mode(&dir))
    }

    #[test]
    fn what_is_written_is_open_to_those_who_may_write_there_and_to_nobody_else() {
        assert_eq!(written_in(0o700), (0o600, 0o700));
        assert_eq!(written_in(0o755), (0o600, 0o700), "who may only look may not look into sandboxes");
        assert_eq!(written_in(0o770), (0o660, 0o770));
        assert_eq!(written_in(0o2770), (0o660, 0o2770));
    }

    #[test]
    fn a_link_in_the_way_is_not_followed() {
        let root = tempfile::tempdir().unwrap();
        let owner = Owner::of(&fs::metadata(root.path()).unwrap());
        std::os::unix::fs::symlink("elsewhere", root.path().join("link")).unwrap();
        assert!(owner.create(&root.path().join("link")).is_err() && owner.make_dir(&root.path().join("link")).is_err());
        assert!(!root.path().join("elsewhere").exists());
    }
}

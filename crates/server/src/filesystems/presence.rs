//! Whether the directory of a volume is still the one that the server began with.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use sandboxer_store::Error;
use tokio::time::timeout;

/// How long the directory may take to say what it is.
const LOOK_WITHIN: Duration = Duration::from_secs(2);

/// A directory, by what it was when the server began. An unmount leaves another directory in its place.
#[derive(Debug)]
pub(super) struct Presence {
    dir: PathBuf,
    device: u64,
    inode: u64,
}

impl Presence {
    pub(super) fn of(dir: &Path) -> io::Result<Self> {
        let about = fs::metadata(dir)?;
        Ok(Self { dir: dir.to_owned(), device: about.dev(), inode: about.ino() })
    }

    pub(super) async fn check(&self) -> Result<(), Error> {
        let looked = timeout(LOOK_WITHIN, tokio::fs::metadata(&self.dir)).await;
        let why = match looked {
            Ok(Ok(about)) if (about.dev(), about.ino()) == (self.device, self.inode) => return Ok(()),
            Ok(Ok(_)) => io::Error::other("another directory is in its place: the volume is not mounted"),
            Ok(Err(error)) => error,
            Err(_) => io::ErrorKind::TimedOut.into(),
        };
        Err(Error::Local { verb: "find", path: self.dir.display().to_string(), source: why })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn another_directory_in_its_place_is_noticed() {
        let ground = tempfile::tempdir().unwrap();
        let (dir, away) = (ground.path().join("volume"), ground.path().join("away"));
        fs::create_dir(&dir).unwrap();
        let presence = Presence::of(&dir).unwrap();
        presence.check().await.unwrap();
        fs::rename(&dir, &away).unwrap();
        presence.check().await.unwrap_err();
        fs::create_dir(&dir).unwrap();
        presence.check().await.unwrap_err();
        fs::remove_dir(&dir).unwrap();
        fs::rename(&away, &dir).unwrap();
        presence.check().await.unwrap();
    }
}

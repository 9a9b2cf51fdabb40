//! Images on the volume: what a checkpoint stands on goes where the checkpoint goes.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use sandboxer_store::{Error, ImageDigest, Loader, Saver};

use crate::images::Images;

pub(crate) struct StoredImages {
    saver: Saver,
    loader: Loader,
    /// Those that came from the volume and are not in this machine's image directory.
    fetched: PathBuf,
    /// What is known to be on the volume.
    there: Mutex<HashSet<ImageDigest>>,
    /// One at a time: the second finds what the first brought.
    turn: tokio::sync::Mutex<()>,
}

impl StoredImages {
    pub(crate) fn new(saver: Saver, loader: Loader, fetched: PathBuf) -> Self {
        Self { saver, loader, fetched, there: Mutex::default(), turn: tokio::sync::Mutex::default() }
    }

    /// Puts an image on the volume unless it is there, and returns its digest, which is its name.
    pub(crate) async fn put(&self, image: &Path) -> Result<ImageDigest, Error> {
        let stem = image.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        let digest: ImageDigest = stem.parse().map_err(|_| Error::Invalid(format!("{} is not named by its digest", image.display())))?;
        if self.there().contains(&digest) {
            return Ok(digest);
        }
        let _turn = self.turn.lock().await;
        if !self.there().contains(&digest) {
            self.saver.put_image(digest, image).await?;
            self.there().insert(digest);
        }
        Ok(digest)
    }

    /// The file of an image: of this machine, or else from the volume.
    pub(crate) async fn find(&self, digest: ImageDigest, images: &Images) -> Result<PathBuf, String> {
        if let Ok(path) = images.find(Some(&digest.to_string())).await
            && path.is_file()
        {
            return Ok(path);
        }
        let path = self.fetched.join(format!("{digest}.erofs"));
        let _turn = self.turn.lock().await;
        if !path.is_file() {
            super::private_dir(&self.fetched).map_err(|error| error.to_string())?;
            let arriving = path.with_extension("arriving");
            // One that an earlier process did not finish.
            let _ = std::fs::remove_file(&arriving);
            self.loader.fetch_image(digest, &arriving).await.map_err(|error| error.whole())?;
            std::fs::rename(&arriving, &path).map_err(|error| error.to_string())?;
        }
        Ok(path)
    }

    fn there(&self) -> std::sync::MutexGuard<'_, HashSet<ImageDigest>> {
        self.there.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! Base images on the volume, so that an instance that lacks one can fetch it: chunked as checkpoints are, so that images that differ in their agent alone
//! cost little.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use object_store::PutMode;
use sha2::{Digest as _, Sha256};

use crate::contract::About;
use crate::error::{Error, Fault, Result};
use crate::layout::{FileName, ImageDigest, ManifestAt, Tenant};
use crate::load::Loader;
use crate::manifest::Manifest;
use crate::save::{Saver, Source};

const FILE: &str = "image.erofs";
/// Images whose chunks a new one may share.
const MAX_RELATIVES: usize = 4;
/// No base image is larger.
const MAX_IMAGE_BYTES: u64 = 64 << 30;

impl Saver {
    /// Puts the image file at `path` on the volume unless it is there. True if it had to be written.
    ///
    /// # Errors
    /// The file is not what `digest` names, or the volume can't be written.
    pub async fn put_image(&self, digest: ImageDigest, path: &Path) -> Result<bool> {
        let (volume, at) = (self.volume(), ManifestAt::Image { digest });
        let mode = match self.whole_image(digest).await {
            Ok(()) => return Ok(false),
            Err(Error::NotFound { .. }) => PutMode::Create,
            // Nothing else would ever mend it.
            Err(Error::Damaged { .. }) => PutMode::Overwrite,
            Err(error) => return Err(error),
        };
        let found = digest_of(path).await?;
        if found != digest {
            return Err(Error::Invalid(format!("{} is not the image {digest}: its digest is {found}", path.display())));
        }
        let mut relatives = Vec::new();
        for other in volume.images().await?.into_iter().filter(|other| *other != digest).take(MAX_RELATIVES) {
            // One that is damaged is no help, and no hindrance.
            relatives.extend(volume.manifest(ManifestAt::Image { digest: other }).await.ok());
        }
        let source = Source { name: file_name()?, path: path.to_owned() };
        let saved = self.save(Tenant::images(), &[source], &relatives.iter().collect::<Vec<_>>()).await?;
        let manifest = saved.manifest(at, About::Image {})?;
        let put = volume.commit(&saved, &manifest, mode).await;
        saved.finish().await;
        match put {
            Ok(()) => Ok(true),
            Err(Error::Exists { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// That the image's manifest is there, and all its packs.
    async fn whole_image(&self, digest: ImageDigest) -> Result<()> {
        let manifest = self.volume().manifest(ManifestAt::Image { digest }).await?;
        self.volume().check_packs(&manifest).await
    }
}

impl Loader {
    /// Writes the image to the new file `into`, checked by its digest and synced.
    ///
    /// # Errors
    /// [`Error::NotFound`] if it is not on the volume; [`Error::Damaged`] if it is not what its name says.
    pub async fn fetch_image(&self, digest: ImageDigest, into: &Path) -> Result<()> {
        let at = ManifestAt::Image { digest };
        let manifest = self.volume().manifest(at).await?;
        let fetched = self.fetch_image_as(&manifest, digest, into.to_owned()).await;
        if fetched.is_err() {
            // The fault is what matters; there may be no file.
            let _ = fs::remove_file(into);
        }
        fetched
    }

    async fn fetch_image_as(&self, manifest: &Manifest, digest: ImageDigest, into: PathBuf) -> Result<()> {
        if manifest.files().len() != 1 {
            return Err(Error::damaged(&manifest.path(), Fault::Malformed("an image is one file")));
        }
        manifest.expect_tenant(Tenant::images())?;
        self.load_as(manifest, vec![into.clone()], MAX_IMAGE_BYTES).await?;
        let found = digest_of(&into).await?;
        if found != digest {
            return Err(Error::damaged(&manifest.path(), Fault::Image { found: found.to_string() }));
        }
        let sync = move || File::open(&into).and_then(|file| file.sync_all()).map_err(|source| Error::local("sync", &into, source));
        tokio::task::spawn_blocking(sync).await.map_err(|_| Error::Interrupted)?
    }
}

fn file_name() -> Result<FileName> {
    FILE.parse().map_err(|error| Error::Invalid(format!("{error}")))
}

async fn digest_of(path: &Path) -> Result<ImageDigest> {
    let path = path.to_owned();
    let hash = move || {
        let read = || -> io::Result<ImageDigest> {
            let mut file = File::open(&path)?;
            let (mut hasher, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
            loop {
                match file.read(&mut buffer)? {
                    0 => return Ok(ImageDigest::from_bytes(hasher.finalize().into())),
                    read => hasher.update(&buffer[..read]),
                }
            }
        };
        read().map_err(|source| Error::local("read", &path, source))
    };
    tokio::task::spawn_blocking(hash).await.map_err(|_| Error::Interrupted)?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ChunkIndex, Volume, layout};

    fn at(root: &Path) -> (Saver, Loader) {
        let volume = Volume::open_directory(root).unwrap();
        (Saver::new(volume.clone(), ChunkIndex::default()), Loader::new(volume, ChunkIndex::default()))
    }

    #[tokio::test]
    async fn an_image_comes_back_as_it_was_and_a_near_one_costs_little() {
        let (root, local) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (saver, loader) = at(root.path());
        let file = local.path().join("a");
        let mut data: Vec<u8> = (0..4_000_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        fs::write(&file, &data).unwrap();
        let digest = digest_of(&file).await.unwrap();
        assert!(saver.put_image(digest, &file).await.unwrap());
        assert!(!saver.put_image(digest, &file).await.unwrap());
        let into = local.path().join("b");
        loader.fetch_image(digest, &into).await.unwrap();
        assert_eq!(fs::read(&into).unwrap(), data);

        data[5_000_000] ^= 1;
        let near = local.path().join("c");
        fs::write(&near, &data).unwrap();
        // Another process: it knows nothing but what the volume has.
        let (saver, _) = at(root.path());
        let packs = async || saver.volume().packs(Tenant::images()).await.unwrap().len();
        let before = packs().await;
        assert!(saver.put_image(digest_of(&near).await.unwrap(), &near).await.unwrap());
        assert_eq!(packs().await, before + 1);
        let newest = fs::read_dir(root.path().join(layout::packs(Tenant::images()).to_string())).unwrap();
        assert!(newest.flatten().any(|pack| pack.metadata().unwrap().len() < 1 << 20));
    }

    #[tokio::test]
    async fn what_is_not_the_image_is_neither_put_nor_fetched() {
        let (root, local) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (saver, loader) = at(root.path());
        let file = local.path().join("a");
        fs::write(&file, b"an image").unwrap();
        let digest = digest_of(&file).await.unwrap();
        let other = ImageDigest::from_bytes([1; 32]);
        assert!(matches!(saver.put_image(other, &file).await, Err(Error::Invalid(_))));
        assert!(matches!(loader.fetch_image(digest, &local.path().join("b")).await, Err(Error::NotFound { .. })));
        assert!(saver.put_image(digest, &file).await.unwrap());

        let pack = saver.volume().packs(Tenant::images()).await.unwrap()[0];
        fs::remove_file(root.path().join(layout::pack(Tenant::images(), pack).to_string())).unwrap();
        let into = local.path().join("b");
        let missing = loader.fetch_image(digest, &into).await;
        assert!(matches!(missing, Err(Error::Damaged { fault: Fault::MissingPack { .. }, .. })), "{missing:?}");
        assert!(!into.exists());
        // Whoever has the image mends it.
        assert!(saver.put_image(digest, &file).await.unwrap());
        loader.fetch_image(digest, &into).await.unwrap();
    }
}

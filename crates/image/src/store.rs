//! The image directory: builds, imports, finds and removes images.

use std::collections::HashSet;
use std::fs::{self, File, Permissions};
use std::io::BufReader;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::agent::agent_digest;
use crate::authorities::ExtraAuthorities;
use crate::debian::{BaseOptions, Recipe};
use crate::error::{Doing, Error, Result};
pub use crate::index::Source;
use crate::index::{Index, Record, lock, open_lock, sync_directory};
use crate::layer::{Limits, apply_layer};
use crate::name::{BASE_NAME, Digest, ImageName, ImageRef};
use crate::progress::Progress;
use crate::scratch::{Scratch, remove_stale};
use crate::tree::Tree;
use crate::{erofs, finish, oci};

const BUILD_LOCK: &str = "build.lock";
const CACHE: &str = "cache";
const EXTENSION: &str = "erofs";

/// A directory of images, shared by all processes of this machine that use it.
#[derive(Debug, Clone)]
pub struct ImageStore {
    directory: PathBuf,
    authorities: Option<ExtraAuthorities>,
}

/// An image that is there.
#[derive(Debug, Clone, Serialize)]
pub struct Image {
    /// None once another image has taken its name; checkpoints may still refer to it.
    pub name: Option<ImageName>,
    pub digest: Digest,
    pub path: PathBuf,
    pub size_bytes: u64,
    pub created_at: Option<jiff::Timestamp>,
    pub source: Option<Source>,
    /// The digest of the agent in it, where it is known.
    pub agent: Option<Digest>,
    /// The environment that an imported image asks for.
    pub env: Vec<String>,
    /// The directory that an imported image asks to start in.
    pub working_dir: Option<String>,
    /// The user that an imported image asks for. Programs run as root all the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The program of an imported image. A sandbox starts none by itself.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
}

impl ImageStore {
    /// Opens a directory of images, makes it if it is not there, and removes what killed processes left in it.
    pub fn open(directory: impl Into<PathBuf>) -> Result<Self> {
        let given = directory.into();
        let opening = || format!("open the image directory {}", given.display());
        fs::create_dir_all(given.join(CACHE)).doing(opening)?;
        // runsc and the checkpoints name images by their absolute path.
        let directory = given.canonicalize().doing(opening)?;
        let _lock = lock(&directory)?;
        remove_stale(&directory).doing(opening)?;
        Ok(Self { directory, authorities: None })
    }

    /// Has sandboxes of images that are made from now on trust these certificate authorities too. A
    /// base image without them is built anew.
    #[must_use]
    pub fn with_authorities(mut self, authorities: Option<ExtraAuthorities>) -> Self {
        self.authorities = authorities;
        self
    }

    /// Where images are kept unless another place is given: `$XDG_DATA_HOME/sandboxer/images`.
    pub fn default_directory() -> Option<PathBuf> {
        let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let data = absolute("XDG_DATA_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/share")))?;
        Some(data.join("sandboxer/images"))
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The base image of this build's agent; built if it is not there, which takes a minute.
    pub fn ensure_base(&self, progress: &dyn Progress) -> Result<Image> {
        self.build_base(&BaseOptions::default(), progress)
    }

    /// Like [`Self::ensure_base`], from what `options` say.
    pub fn build_base(&self, options: &BaseOptions, progress: &dyn Progress) -> Result<Image> {
        let recipe = Recipe::new(options)?;
        let name = ImageName::base();
        if !options.fresh
            && let Some(image) = self.current_base(&recipe)?
        {
            return Ok(image);
        }
        let _build = self.build_lock(progress)?;
        // Another process may have built it while this one waited.
        if !options.fresh
            && let Some(image) = self.current_base(&recipe)?
        {
            return Ok(image);
        }
        let tree = self.debian_tree(&recipe, options.fresh, &progress.part(0.0, 0.8))?;
        let scratch = self.scratch()?;
        let file = self.pack(&scratch, None, &progress.part(0.8, 1.0), |system, progress| {
            progress.tell(0.0, "unpacking the tree");
            let archive = File::open(&tree).doing(|| format!("open {}", tree.display()))?;
            let mut archive =
                zstd::Decoder::with_buffer(BufReader::with_capacity(1 << 20, archive)).doing(|| format!("read {}", tree.display()))?;
            apply_layer(system, &mut archive, &mut Limits::default())?;
            self.trust(system)?;
            finish::debian_tree(system)
        })?;
        let source = Source::Built { suite: recipe.suite.clone(), recipe: self.digest_of(&recipe) };
        self.publish(&file, &name, |digest| Record {
            digest,
            created_at: jiff::Timestamp::now(),
            source,
            agent: agent_digest().clone(),
            env: Vec::new(),
            working_dir: None,
            user: None,
            entrypoint: Vec::new(),
            cmd: Vec::new(),
        })
    }

    /// Makes an image from an OCI layout directory, or from the archive that `docker save` writes; returns it with the number of device nodes and the like
    /// that were left out.
    pub fn import(&self, source: &Path, name: &ImageName, limits: Limits, progress: &dyn Progress) -> Result<(Image, u64)> {
        self.import_with(source, name, limits, None, progress)
    }

    /// As [`ImageStore::import`], with a text for the agent beside it: `spares.json`.
    pub fn import_with(
        &self,
        source: &Path,
        name: &ImageName,
        limits: Limits,
        spares: Option<&str>,
        progress: &dyn Progress,
    ) -> Result<(Image, u64)> {
        if name.as_str() == BASE_NAME {
            return Err(Error::BaseIsReserved);
        }
        let source = source.canonicalize().doing(|| format!("open {}", source.display()))?;
        let scratch = self.scratch()?;
        let mut imported = oci::Imported::default();
        let file = self.pack(&scratch, spares, progress, |system, progress| {
            imported = oci::unpack(&source, scratch.path(), system, limits, progress)?;
            self.trust(system)?;
            finish::imported_tree(system)
        })?;
        let oci::Imported { process, left_out } = imported;
        let image = self.publish(&file, name, |digest| Record {
            digest,
            created_at: jiff::Timestamp::now(),
            source: Source::Imported { from: source },
            agent: agent_digest().clone(),
            env: process.env.unwrap_or_default(),
            working_dir: process.working_dir.filter(|directory| !directory.is_empty()),
            user: process.user.filter(|user| !user.is_empty()),
            entrypoint: process.entrypoint.unwrap_or_default(),
            cmd: process.cmd.unwrap_or_default(),
        })?;
        Ok((image, left_out))
    }

    /// Finds an image by its name or digest.
    pub fn resolve(&self, wanted: &ImageRef) -> Result<Image> {
        let index = Index::read(&self.directory)?;
        let found = match wanted {
            ImageRef::Name(name) => index.images.get_key_value(name),
            ImageRef::Digest(digest) => index.images.iter().find(|(_, record)| record.digest == *digest),
        };
        let image = match (found, wanted) {
            (Some((name, record)), _) => self.image(Some(name), &record.digest, Some(record)),
            (None, ImageRef::Digest(digest)) => self.image(None, digest, None),
            (None, ImageRef::Name(_)) => None,
        };
        image.ok_or_else(|| Error::NotFound(wanted.clone()))
    }

    /// All images: those with names first, then those that have lost theirs.
    pub fn list(&self) -> Result<Vec<Image>> {
        let index = Index::read(&self.directory)?;
        let mut images: Vec<Image> =
            index.images.iter().filter_map(|(name, record)| self.image(Some(name), &record.digest, Some(record))).collect();
        let named: HashSet<Digest> = images.iter().map(|image| image.digest.clone()).collect();
        let listing = || format!("list {}", self.directory.display());
        let mut others = Vec::new();
        for entry in fs::read_dir(&self.directory).doing(listing)? {
            let path = entry.doing(listing)?.path();
            let digest = path.file_stem().and_then(|stem| stem.to_str()).and_then(|stem| stem.parse::<Digest>().ok());
            if let Some(digest) = digest
                && path.extension().is_some_and(|extension| extension == EXTENSION)
                && !named.contains(&digest)
            {
                others.extend(self.image(None, &digest, None));
            }
        }
        others.sort_by(|a, b| a.digest.cmp(&b.digest));
        images.extend(others);
        Ok(images)
    }

    /// Removes a name, and the image with its last name; or, by its digest, an image with all its names. Sandboxes that run on it are not disturbed,
    /// checkpoints that were made on it can't be restored here any more.
    pub fn remove(&self, wanted: &ImageRef) -> Result<()> {
        let image = self.resolve(wanted)?;
        Index::update(&self.directory, |index| {
            index.images.retain(|name, record| match wanted {
                ImageRef::Name(wanted) => name != wanted,
                ImageRef::Digest(wanted) => record.digest != *wanted,
            });
            if index.images.values().any(|record| record.digest == image.digest) {
                return Ok(());
            }
            fs::remove_file(&image.path).doing(|| format!("remove {}", image.path.display()))
        })
    }

    /// Reads an image's file and checks that its content is what its name says.
    pub fn verify(&self, wanted: &ImageRef) -> Result<Image> {
        let image = self.resolve(wanted)?;
        let reading = || format!("read {}", image.path.display());
        let found = Digest::of_file(&File::open(&image.path).doing(reading)?).doing(reading)?;
        if found == image.digest { Ok(image) } else { Err(Error::Damaged { digest: image.digest, found }) }
    }

    fn image(&self, name: Option<&ImageName>, digest: &Digest, record: Option<&Record>) -> Option<Image> {
        let path = self.path_of(digest);
        let size_bytes = fs::metadata(&path).ok()?.len();
        Some(Image {
            name: name.cloned(),
            digest: digest.clone(),
            path,
            size_bytes,
            created_at: record.map(|record| record.created_at),
            source: record.map(|record| record.source.clone()),
            agent: record.map(|record| record.agent.clone()),
            env: record.map(|record| record.env.clone()).unwrap_or_default(),
            working_dir: record.and_then(|record| record.working_dir.clone()),
            user: record.and_then(|record| record.user.clone()),
            entrypoint: record.map(|record| record.entrypoint.clone()).unwrap_or_default(),
            cmd: record.map(|record| record.cmd.clone()).unwrap_or_default(),
        })
    }

    fn path_of(&self, digest: &Digest) -> PathBuf {
        self.directory.join(format!("{digest}.{EXTENSION}"))
    }

    /// The base image, if it is of this recipe and this agent.
    fn current_base(&self, recipe: &Recipe) -> Result<Option<Image>> {
        let image = match self.resolve(&ImageName::base().into()) {
            Ok(image) => image,
            Err(Error::NotFound(_)) => return Ok(None),
            Err(error) => return Err(error),
        };
        let same_recipe = matches!(&image.source, Some(Source::Built { recipe: built, .. }) if *built == self.digest_of(recipe));
        Ok((same_recipe && image.agent.as_ref() == Some(agent_digest())).then_some(image))
    }

    /// The ingredients of a base image: the recipe of its tree, and the authorities that are added.
    fn digest_of(&self, recipe: &Recipe) -> Digest {
        match &self.authorities {
            None => recipe.digest(),
            Some(extra) => Digest::of(&[recipe.digest().as_hex().as_bytes(), extra.as_bytes()].concat()),
        }
    }

    fn trust(&self, system: &mut Tree) -> Result<()> {
        self.authorities.as_ref().map_or(Ok(()), |extra| extra.add_to(system))
    }

    fn build_lock(&self, progress: &dyn Progress) -> Result<File> {
        let locking = || format!("lock {}", self.directory.join(BUILD_LOCK).display());
        let file = open_lock(&self.directory.join(BUILD_LOCK)).doing(locking)?;
        if file.try_lock().is_err() {
            progress.tell(0.0, "waiting for another process that is building it");
            file.lock().doing(locking)?;
        }
        Ok(file)
    }

    fn scratch(&self) -> Result<Scratch> {
        let _lock = lock(&self.directory)?;
        Scratch::new(&self.directory)
    }

    /// The tree of packages, from the cache if it has been built before. The caller holds the build lock.
    fn debian_tree(&self, recipe: &Recipe, fresh: bool, progress: &dyn Progress) -> Result<PathBuf> {
        let cached = self.directory.join(CACHE).join(format!("tree-{}.tar.zst", recipe.digest()));
        if fresh || !cached.exists() {
            let scratch = self.scratch()?;
            let built = scratch.path().join("tree.tar.zst");
            recipe.build(&built, progress)?;
            fs::rename(&built, &cached).doing(|| format!("write {}", cached.display()))?;
        }
        Ok(cached)
    }

    /// Lets `fill` write the system tree, adds the agent around it and makes the image file.
    fn pack(
        &self,
        scratch: &Scratch,
        spares: Option<&str>,
        progress: &dyn Progress,
        fill: impl FnOnce(&mut Tree, &dyn Progress) -> Result<()>,
    ) -> Result<PathBuf> {
        let root = scratch.path().join("root");
        fs::create_dir(&root).doing(|| format!("make {}", root.display()))?;
        let outer = finish::image_root(&root, spares)?;
        let mut system = Tree::open(&root.join("rootfs"))?;
        fill(&mut system, &progress.part(0.0, 0.6))?;
        system.finish()?;
        outer.finish()?;
        progress.tell(0.6, "writing the image file");
        let file = scratch.path().join("image.erofs");
        erofs::make(&root, &file)?;
        progress.tell(0.9, "checking the image file");
        Ok(file)
    }

    /// Gives a finished file its name: content first, synced, then the name that makes it visible.
    fn publish(&self, file: &Path, name: &ImageName, record: impl FnOnce(Digest) -> Record) -> Result<Image> {
        let publishing = || format!("write an image into {}", self.directory.display());
        let content = File::open(file).doing(publishing)?;
        let digest = Digest::of_file(&content).doing(publishing)?;
        content.set_permissions(Permissions::from_mode(0o444)).doing(publishing)?;
        content.sync_all().doing(publishing)?;
        let record = record(digest.clone());
        // Under the index lock, so that a removal of the same content can't come between the file and its name.
        Index::update(&self.directory, |index| {
            fs::rename(file, self.path_of(&digest)).doing(publishing)?;
            sync_directory(&self.directory).doing(publishing)?;
            index.images.insert(name.clone(), record.clone());
            Ok(())
        })?;
        self.resolve(&name.clone().into())
    }
}

#[cfg(test)]
#[path = "store/tests.rs"]
mod tests;

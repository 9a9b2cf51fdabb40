//! The image that sandboxes start from, and whether it is ready.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use sandboxer_image::{Digest, Image, ImageRef, ImageStore, Update};
use sandboxer_protocol::{client::ErrorCode, limits::MAX_PATH_BYTES};
use tokio::sync::watch;
use tracing::{error, info};

use crate::manager::CreateError;

/// The wait before the first retry of a failed build, and the longest one.
const FIRST_RETRY: Duration = Duration::from_secs(2);
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// Where the base image stands.
#[derive(Debug, Clone, PartialEq)]
pub enum BaseImage {
    Preparing { percent: u8, doing: String },
    Ready(PathBuf),
    Failed(String),
}

/// Settings that executions get from their image unless the creator of the sandbox gave others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ImageDefaults {
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) cwd: Option<String>,
}

impl ImageDefaults {
    /// Leaves out environment entries that no program could be given, and a relative directory: the
    /// maker of the image is not trusted.
    fn of(image: &Image) -> Self {
        let pair = |entry: &String| entry.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
        let is_good = |(name, value): &(String, String)| !name.is_empty() && !name.contains('\0') && !value.contains('\0');
        let is_path = |dir: &String| dir.starts_with('/') && dir.len() <= MAX_PATH_BYTES && !dir.contains('\0');
        Self { env: image.env.iter().filter_map(pair).filter(is_good).collect(), cwd: image.working_dir.clone().filter(is_path) }
    }
}

/// Finds images. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Images {
    store: Option<ImageStore>,
    base: Arc<watch::Sender<BaseImage>>,
}

impl Images {
    /// One image and no others, for a runtime that needs none.
    #[must_use]
    pub fn fixed(path: PathBuf) -> Self {
        Self { store: None, base: Arc::new(watch::Sender::new(BaseImage::Ready(path))) }
    }

    /// The images of a directory. The base image has to be prepared before anything can start.
    #[must_use]
    pub fn in_store(store: ImageStore) -> Self {
        let base = BaseImage::Preparing { percent: 0, doing: "not begun".to_owned() };
        Self { store: Some(store), base: Arc::new(watch::Sender::new(base)) }
    }

    #[must_use]
    pub fn base(&self) -> BaseImage {
        self.base.borrow().clone()
    }

    /// Tells when the base image stands elsewhere.
    pub(crate) fn watch(&self) -> watch::Receiver<BaseImage> {
        self.base.subscribe()
    }

    /// Builds the base image unless it exists, and tries again after a failure, such as a missing
    /// tool, until it succeeds. Each retry waits twice as long as the one before, up to a minute.
    pub async fn keep_preparing(self) {
        let mut wait = FIRST_RETRY;
        loop {
            let images = self.clone();
            // A panic in a build counts as a failed try.
            let prepared = tokio::task::spawn_blocking(move || images.prepare()).await.unwrap_or(false);
            if prepared {
                return;
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(LONGEST_RETRY);
        }
    }

    /// Builds the base image unless it exists, which takes a minute, and returns whether it is ready.
    fn prepare(&self) -> bool {
        let Some(store) = &self.store else { return true };
        let progress = |update: Update<'_>| {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and 100")]
            let percent = (update.fraction * 100.0).clamp(0.0, 100.0) as u8;
            let now = BaseImage::Preparing { percent, doing: update.message.to_owned() };
            let changed = self.base.send_if_modified(|base| {
                let changed = *base != now;
                *base = now;
                changed
            });
            if changed {
                info!(percent, doing = update.message, "preparing the base image");
            }
        };
        let outcome = match store.ensure_base(&progress) {
            Ok(image) => {
                info!(digest = %image.digest, "the base image is ready");
                BaseImage::Ready(image.path)
            }
            Err(fault) => BaseImage::Failed(fault.to_string()),
        };
        let ready = matches!(outcome, BaseImage::Ready(_));
        if let BaseImage::Failed(why) = &outcome {
            error!(error = %why, "the base image could not be prepared; trying again");
        }
        self.base.send_replace(outcome);
        ready
    }

    /// The environment and the working directory that an imported image asks for.
    pub(crate) async fn defaults(&self, image: &Path) -> ImageDefaults {
        let is_base = matches!(self.base(), BaseImage::Ready(base) if base == image);
        let digest = image.file_stem().and_then(|stem| stem.to_str()).and_then(|stem| stem.parse::<Digest>().ok());
        let (Some(store), Some(digest), false) = (self.store.clone(), digest, is_base) else { return ImageDefaults::default() };
        let found = tokio::task::spawn_blocking(move || store.resolve(&digest.into())).await;
        found.ok().and_then(Result::ok).map(|image| ImageDefaults::of(&image)).unwrap_or_default()
    }

    /// The file of an image; none given: of the base image.
    pub(crate) async fn find(&self, wanted: Option<&str>) -> Result<PathBuf, CreateError> {
        let Some(wanted) = wanted else {
            return match self.base() {
                BaseImage::Ready(path) => Ok(path),
                BaseImage::Preparing { percent, doing } => {
                    let message = format!("The base image is being prepared ({percent} %: {doing}). Try again when /readyz answers 200.");
                    Err(CreateError::new(ErrorCode::NotReady, message))
                }
                BaseImage::Failed(why) => {
                    Err(CreateError::new(ErrorCode::NotReady, format!("The base image could not be prepared: {why}")))
                }
            };
        };
        let unknown = || CreateError::new(ErrorCode::UnknownImage, format!("There is no image {wanted:?} on this server."));
        let reference: ImageRef = wanted.parse().map_err(|fault| CreateError::new(ErrorCode::InvalidName, format!("image: {fault}")))?;
        let store = self.store.clone().ok_or_else(unknown)?;
        // The index is a small file, but reading it blocks all the same.
        let found = tokio::task::spawn_blocking(move || store.resolve(&reference)).await;
        found.map_err(|_| unknown())?.map(|image| image.path).map_err(|_| unknown())
    }
}

//! The image that sandboxes start from, and whether it is ready.

use std::{path::PathBuf, sync::Arc, time::Duration};

use sandboxer_image::{ImageRef, ImageStore, Update};
use sandboxer_protocol::client::ErrorCode;
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

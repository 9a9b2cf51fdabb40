//! What can go wrong with an image, and what to do about it.

use std::io;
use std::path::PathBuf;

use crate::name::{Digest, ImageRef};
use crate::tools::MissingTools;

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("there is no image {0}; `sandboxer image ls` lists those that are there, `sandboxer image build` makes the base image")]
    NotFound(ImageRef),

    #[error("the name base is the built image's own; choose another one with --name")]
    BaseIsReserved,

    #[error(
        "the image {digest} is damaged: its content has the digest {found}; remove it with `sandboxer image rm {digest}` and build or import it again"
    )]
    Damaged { digest: Digest, found: Digest },

    #[error("refused: {what}: {why}")]
    Refused { what: String, why: String },

    #[error("{path} is no image that can be imported: {why}; give an OCI layout directory, or the file that `docker save` wrote")]
    NotAnImage { path: PathBuf, why: String },

    #[error(transparent)]
    ToolsMissing(#[from] MissingTools),

    #[error("{program} is not installed; run scripts/setup, or as root: apt-get install {package}")]
    ToolMissing { program: &'static str, package: &'static str },

    #[error("{program} failed ({status}):\n{output}")]
    ToolFailed { program: &'static str, status: String, output: String },

    #[error("the index {path} can't be read ({why}); move it away to start with a new one, the images themselves are not touched")]
    BadIndex { path: PathBuf, why: String },

    #[error("can't {doing}")]
    Io { doing: String, source: io::Error },
}

impl Error {
    pub(crate) fn refused(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Refused { what: what.into(), why: why.into() }
    }
}

/// Says what was being done: `file.sync_all().doing(|| "write the index")?`.
pub(crate) trait Doing<T> {
    fn doing<S: Into<String>>(self, what: impl FnOnce() -> S) -> Result<T>;
}

impl<T, E: Into<io::Error>> Doing<T> for Result<T, E> {
    fn doing<S: Into<String>>(self, what: impl FnOnce() -> S) -> Result<T> {
        self.map_err(|error| Error::Io { doing: what().into(), source: error.into() })
    }
}

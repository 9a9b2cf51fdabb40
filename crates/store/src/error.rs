//! What can be wrong with the volume, said so that the reader knows which file, which check, and what to do.

use std::io;
use std::time::Duration;

use object_store::path::Path;

use crate::layout::Tenant;

pub type Result<T> = std::result::Result<T, Error>;

/// What the caller can do about an [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// There is no such thing.
    NotFound,
    /// Somebody else wrote that name first.
    Conflict,
    /// What is on the volume is not what was written, or is not for here: an older checkpoint may be.
    Damaged,
    /// The volume or the local disk does not answer, or is full: trying again may help.
    Unavailable,
    /// The call itself was wrong.
    Invalid,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path} is not on the volume")]
    NotFound { path: Path },
    #[error("{path} is on the volume already")]
    Exists { path: Path },
    #[error("{file}: {fault}; {}", fault.remedy())]
    Damaged { file: Path, fault: Fault },
    #[error("cannot {verb} {path} on the volume")]
    Volume {
        verb: &'static str,
        path: Path,
        #[source]
        source: object_store::Error,
    },
    #[error("cannot {verb} {path}")]
    Local {
        verb: &'static str,
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("{what} is larger than {limit} bytes")]
    TooLarge { what: String, limit: u64 },
    #[error("it took longer than the {} s that a save may take (--longest-save)", longest.as_secs_f64())]
    TookTooLong { longest: Duration },
    #[error(
        "the data of this API key on the volume takes all of the {} MiB that it may take (--key-volume-mb); delete snapshots or sandboxes, whose room is free after \
         the next collection", limit >> 20
    )]
    Quota { limit: u64 },
    #[error("{0}")]
    Invalid(String),
    #[error("a worker ended before its work")]
    Interrupted,
}

/// Which check of a file failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("it is torn: {found} bytes where {expected} belong")]
    Torn { expected: u64, found: u64 },
    #[error("it is no checkpoint: the first bytes are not those of one")]
    Magic,
    #[error("it has format {found}, and this program knows up to {known}")]
    NewerFormat { found: u32, known: u32 },
    #[error("its digest does not match its bytes")]
    Digest,
    #[error("it carries no authentication, and this server requires it")]
    NotAuthenticated,
    #[error("it was not authenticated with this server's volume key")]
    Authentication,
    #[error("{0}")]
    Malformed(&'static str),
    #[error("what it says of itself can't be read: {0}")]
    Unreadable(String),
    #[error("it says of itself that it is {says}")]
    Misplaced { says: String },
    #[error("it belongs to tenant {found}, not to {expected}")]
    ForeignTenant { expected: Tenant, found: Tenant },
    #[error("it holds {found} bytes, and {limit} are allowed here")]
    TooLarge { found: u64, limit: u64 },
    #[error("the pack is missing, and {needed_by} needs it")]
    MissingPack { needed_by: String },
    #[error("the pack is torn: {found} bytes where {expected} belong, and {needed_by} needs it")]
    TornPack { expected: u64, found: u64, needed_by: String },
    #[error("the pack's first bytes are not its own, and {needed_by} needs it")]
    ForeignPack { needed_by: String },
    #[error("the {length} bytes at {offset} do not match their digest, and {needed_by} needs them")]
    Chunk { offset: u64, length: u64, needed_by: String },
    #[error("the image that it holds has the digest {found}")]
    Image { found: String },
    #[error("it names {names}, which is not there")]
    NamesNothing { names: String },
}

impl Fault {
    /// What a person can do about it.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::NewerFormat { .. } => "use a server at least as new as the one that wrote it",
            Self::NotAuthenticated | Self::Authentication => {
                "start the server with the --volume-key-file it was written with, or do not trust it"
            }
            Self::Misplaced { .. } => "put the file back where it came from",
            Self::ForeignTenant { .. } => "use the API key it was written with",
            Self::TooLarge { .. } => "restore it where larger sandboxes are allowed",
            Self::Image { .. } => "put the image on the volume again from an instance that has it",
            _ => "restore the file from a backup of the volume, or go back to an older checkpoint",
        }
    }
}

impl Error {
    #[must_use]
    pub fn action(&self) -> Action {
        match self {
            Self::NotFound { .. } => Action::NotFound,
            Self::Exists { .. } => Action::Conflict,
            Self::Damaged { .. } => Action::Damaged,
            Self::Volume { .. } | Self::Local { .. } | Self::TookTooLong { .. } | Self::Quota { .. } | Self::Interrupted => {
                Action::Unavailable
            }
            Self::TooLarge { .. } | Self::Invalid(_) => Action::Invalid,
        }
    }

    /// The volume has no room left.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            if error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::StorageFull) {
                return true;
            }
            cause = error.source();
        }
        false
    }

    /// The message with all its causes, for people.
    #[must_use]
    pub fn whole(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text.push_str(": ");
            text.push_str(&error.to_string());
            cause = error.source();
        }
        text
    }

    pub(crate) fn damaged(file: &Path, fault: Fault) -> Self {
        Self::Damaged { file: file.clone(), fault }
    }

    pub(crate) fn volume(verb: &'static str, path: &Path, source: object_store::Error) -> Self {
        match source {
            object_store::Error::NotFound { .. } => Self::NotFound { path: path.clone() },
            object_store::Error::AlreadyExists { .. } => Self::Exists { path: path.clone() },
            source => Self::Volume { verb, path: path.clone(), source },
        }
    }

    pub(crate) fn local(verb: &'static str, path: &std::path::Path, source: io::Error) -> Self {
        Self::Local { verb, path: path.display().to_string(), source }
    }
}

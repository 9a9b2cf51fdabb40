//! Why an extension could not do what was asked. The kind says what the caller can do about it.

/// What the caller can do about an [`ExtensionError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The request is wrong: change it.
    Invalid,
    /// It does not fit the state that the sandbox is in.
    Conflict,
    /// What it names is not there.
    NotFound,
    /// This extension can't do it.
    Unsupported,
    /// There are as many as there may be.
    TooMany,
    /// The host or the extension does not answer: try again later.
    Unavailable,
    /// It was tried and failed; the message says why.
    Failed,
}

/// `code` is for programs, `message` says what happened and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ExtensionError {
    pub kind: Kind,
    pub code: &'static str,
    pub message: String,
}

impl ExtensionError {
    pub fn new(kind: Kind, code: &'static str, message: impl Into<String>) -> Self {
        Self { kind, code, message: message.into() }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Kind::Invalid, "invalid_input", message)
    }

    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(Kind::Failed, "extension_failed", message)
    }

    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(Kind::Unsupported, "snapshots_not_supported", message)
    }

    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(Kind::Unavailable, "host_unavailable", message)
    }
}

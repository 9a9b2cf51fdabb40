//! What can go wrong, by what the caller can do about it.

use std::fmt;

use sandboxer_protocol::{
    ExecutionId,
    client::{EndReason, ErrorCode},
};

/// Why a call failed. The kind says what to do.
///
/// ```no_run
/// # async fn example(sandbox: sandboxer_client::Sandbox) -> Result<(), sandboxer_client::Error> {
/// use sandboxer_client::Error;
///
/// match sandbox.python("print('hello')").await {
///     Ok(run) => println!("{}", run.id()),
///     Err(error) if error.is_temporary() => println!("later: {error}"),
///     Err(Error::Rewound { .. }) => println!("it went back: look at it again"),
///     Err(error) => return Err(error),
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the kind is for programs, its message for people")]
pub enum Error {
    /// The call itself is wrong; nothing was sent. Change it.
    #[error("{message}")]
    Invalid { message: String },
    /// There is no such sandbox (any more). Create another; the message says why it is gone, if that is remembered.
    #[error("{message}")]
    NotFound { message: String },
    /// Another client is attached and answers. Wait for it to leave.
    #[error("{message}")]
    InUse { message: String },
    /// The API key or the sandbox's token is missing or wrong.
    #[error("{message}")]
    Denied { message: String },
    /// The server understood and won't do it; `code` says why. The sandbox is unharmed.
    #[error("{message}")]
    Refused { code: ErrorCode, message: String },
    /// Something is wrong with a file; `code` says what, such as `file_not_found` or `no_space`. Nothing was changed by the call.
    #[error("{message}")]
    File { code: String, message: String },
    /// The server could not be reached for as long as [`Connection::give_up_after`](crate::Connection::give_up_after) allows. The
    /// sandbox may be alive: attach to it later.
    #[error("{message}")]
    Unavailable { message: String },
    /// The sandbox, or this client's part in it, came to its end.
    #[error("{message}")]
    SandboxEnded { reason: Ended, message: String },
    /// The sandbox was set back to an earlier state: what was seen of it since then did not happen in its own history. What runs in
    /// it now can be had by [`Sandbox::resume`](crate::Sandbox::resume).
    #[error("The sandbox was set back to an earlier state (generation {generation}).")]
    Rewound { generation: u64 },
    /// The sandbox was set back to a time before this execution began, or has run another one since: how it ended is not known.
    /// `now` is the execution that the sandbox has instead. Run the program again if that is safe.
    #[error("The execution {id} was lost with the time that the sandbox had not saved.")]
    ExecutionLost { id: ExecutionId, now: Option<ExecutionId> },
    /// The program's input is closed: it has ended, or end of input was sent.
    #[error("The program takes no more input.")]
    InputClosed,
    /// This handle was closed.
    #[error("The connection to the sandbox was closed by this program.")]
    Closed,
}

impl Error {
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Error::Invalid { message: message.into() }
    }

    pub(crate) fn refused(code: ErrorCode, message: impl Into<String>) -> Self {
        Error::Refused { code, message: message.into() }
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Error::Unavailable { message: message.into() }
    }

    /// Whether the same call may succeed later without anything being changed.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        match self {
            Error::InUse { .. } | Error::Unavailable { .. } => true,
            Error::Refused { code, .. } => {
                matches!(
                    code,
                    ErrorCode::ExecutionInProgress
                        | ErrorCode::NoCapacity
                        | ErrorCode::RateLimited
                        | ErrorCode::NotNow
                        | ErrorCode::VolumeUnavailable
                )
            }
            _ => false,
        }
    }
}

/// How a sandbox, or a client's part in it, came to its end.
///
/// ```no_run
/// # async fn example(mut run: sandboxer_client::Run) -> Result<(), sandboxer_client::Error> {
/// use sandboxer_client::{Ended, Error};
///
/// match run.wait().await {
///     Err(Error::SandboxEnded { reason: Ended::OutOfMemory, .. }) => println!("give it more memory"),
///     Err(Error::SandboxEnded { reason: Ended::Checkpointed | Ended::HandedOff, .. }) => println!("it goes on elsewhere"),
///     other => println!("{other:?}"),
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Ended {
    /// It was killed, by this client or by another way in.
    Killed,
    /// It used more memory than it may.
    OutOfMemory,
    /// Its runtime failed.
    RuntimeFailed,
    /// It reached the longest life that the server allows.
    Lifetime,
    /// It was saved and no longer runs; attaching restores it.
    Checkpointed,
    /// It was given to another client, which asked for it.
    HandedOff,
    /// The server did not say.
    Unknown,
}

impl From<Option<EndReason>> for Ended {
    fn from(reason: Option<EndReason>) -> Self {
        match reason {
            Some(EndReason::OutOfMemory) => Ended::OutOfMemory,
            Some(EndReason::Killed) => Ended::Killed,
            Some(EndReason::RuntimeFailed) => Ended::RuntimeFailed,
            Some(EndReason::Lifetime) => Ended::Lifetime,
            None => Ended::Unknown,
        }
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Ended::Killed => "The sandbox was killed.",
            Ended::OutOfMemory => "The sandbox ran out of memory.",
            Ended::RuntimeFailed => "The sandbox failed.",
            Ended::Lifetime => "The sandbox reached its longest life.",
            Ended::Checkpointed => "The sandbox was saved; attach to go on.",
            Ended::HandedOff => "The sandbox was given to another client.",
            Ended::Unknown => "The sandbox ended.",
        })
    }
}

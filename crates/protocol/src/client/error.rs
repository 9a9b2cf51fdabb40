//! Codes: for programs, and their meaning never changes.

use serde::{Deserialize, Serialize};

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// `code` of an `error`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[cfg_attr(test, derive(schemars::JsonSchema))]
        pub enum ErrorCode {
            $($(#[$doc])* #[serde(rename = $text)] $name,)*
            /// A code of a newer server.
            #[serde(other)]
            Unknown,
        }

        impl ErrorCode {
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(ErrorCode::$name => $text,)* ErrorCode::Unknown => "unknown" }
            }
        }
    };
}

codes! {
    /// The message is not JSON.
    MalformedJson = "malformed_json",
    /// The message is JSON, but not an object.
    NotAnObject = "not_an_object",
    /// A binary frame; messages are text.
    BinaryFrame = "binary_frame",
    UnknownAction = "unknown_action",
    UnknownEvent = "unknown_event",
    /// A field is missing, of the wrong type or out of its range; the message names it.
    InvalidField = "invalid_field",
    /// A configuration that came after the sandbox was made.
    LateConfiguration = "late_configuration",
    /// The request does not fit the moment; the message says which moment.
    NotNow = "not_now",
    ExecutionInProgress = "execution_in_progress",
    UnsupportedLanguage = "unsupported_language",
    /// The program could not be started.
    StartFailed = "start_failed",
    TimedOut = "timed_out",
    /// Nothing runs that could take the input.
    NothingRunning = "nothing_running",
    StdinFull = "stdin_full",
    StdinClosed = "stdin_closed",
    /// Input before this piece is missing.
    StdinGap = "stdin_gap",
    /// Output from the wanted offset on is no longer held.
    OutputGone = "output_gone",
    UnknownExecution = "unknown_execution",
    CheckpointNotConfigured = "checkpoint_not_configured",
    CheckpointNotEnabled = "checkpoint_not_enabled",
    /// The sandbox could not be saved; it goes on.
    CheckpointFailed = "checkpoint_failed",
    /// The sandbox could not be brought back from the volume, where nothing was changed.
    RestoreFailed = "restore_failed",
    /// The volume where sandboxes are kept does not answer, and nothing there was changed: try again, here or at another server.
    VolumeUnavailable = "volume_unavailable",
    /// The sandbox goes on at another instance: attach again.
    SandboxMoved = "sandbox_moved",
    SnapshotsNotConfigured = "snapshots_not_configured",
    /// The snapshot could not be made; the sandbox goes on.
    SnapshotFailed = "snapshot_failed",
    UnknownSnapshot = "unknown_snapshot",
    FilesystemSnapshotsNotConfigured = "filesystem_snapshots_not_configured",
    UnknownFilesystemSnapshot = "unknown_filesystem_snapshot",
    /// The filesystem snapshot could not be made, or not be used; the sandbox, if there is one, goes on.
    FilesystemSnapshotFailed = "filesystem_snapshot_failed",
    /// There is one of that name already.
    NameTaken = "name_taken",
    InvalidName = "invalid_name",
    UnknownImage = "unknown_image",
    LimitTooHigh = "limit_too_high",
    LimitNotEnforceable = "limit_not_enforceable",
    NetworkNotAvailable = "network_not_available",
    NoCapacity = "no_capacity",
    RateLimited = "rate_limited",
    /// The server is not ready yet: its image is being prepared.
    NotReady = "not_ready",
    RuntimeFailed = "runtime_failed",
    OutOfMemory = "out_of_memory",
    SandboxKilled = "sandbox_killed",
    /// Every process of the sandbox was killed from inside; its files are kept.
    ProcessesLost = "processes_lost",
    LifetimeOver = "lifetime_over",
    PermissionDenied = "permission_denied",
    ServerStopping = "server_stopping",
    ServerRestarting = "server_restarting",
    /// Something this server does not offer.
    NotImplemented = "not_implemented",
    Internal = "internal",
}

/// How a connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseCode {
    Normal,
    GoingAway,
    TooLarge,
    /// Not found, in use, handoff in progress.
    Refused,
    Application,
}

impl CloseCode {
    #[must_use]
    pub fn number(self) -> u16 {
        match self {
            CloseCode::Normal => 1000,
            CloseCode::GoingAway => 1001,
            CloseCode::TooLarge => 1009,
            CloseCode::Refused => 1011,
            CloseCode::Application => 4000,
        }
    }
}

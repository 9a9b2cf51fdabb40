//! The states that a client is told of.

use serde::{Deserialize, Serialize};

macro_rules! statuses {
    ($($name:ident = $text:literal,)*) => {
        /// `status` of a `status_update`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[cfg_attr(test, derive(schemars::JsonSchema))]
        pub enum Status {
            $(#[serde(rename = $text)] $name,)*
        }

        impl Status {
            pub const ALL: &[Status] = &[$(Status::$name,)*];

            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Status::$name => $text,)* }
            }
        }
    };
}

statuses! {
    Creating = "SANDBOX_CREATING",
    Running = "SANDBOX_RUNNING",
    CreationError = "SANDBOX_CREATION_ERROR",
    NotFound = "SANDBOX_NOT_FOUND",
    InUse = "SANDBOX_IN_USE",
    HandoffInProgress = "SANDBOX_HANDOFF_IN_PROGRESS",
    Restoring = "SANDBOX_RESTORING",
    RestoreError = "SANDBOX_RESTORE_ERROR",
    ExecutionRunning = "SANDBOX_EXECUTION_RUNNING",
    ExecutionDone = "SANDBOX_EXECUTION_DONE",
    ExecutionError = "SANDBOX_EXECUTION_ERROR",
    ExecutionUnsupportedLanguageError = "SANDBOX_EXECUTION_UNSUPPORTED_LANGUAGE_ERROR",
    ExecutionInProgressError = "SANDBOX_EXECUTION_IN_PROGRESS_ERROR",
    ExecutionForceKilled = "SANDBOX_EXECUTION_FORCE_KILLED",
    StdinError = "SANDBOX_STDIN_ERROR",
    Checkpointing = "SANDBOX_CHECKPOINTING",
    Checkpointed = "SANDBOX_CHECKPOINTED",
    CheckpointError = "SANDBOX_CHECKPOINT_ERROR",
    SnapshotCreating = "SANDBOX_SNAPSHOT_CREATING",
    SnapshotCreated = "SANDBOX_SNAPSHOT_CREATED",
    SnapshotError = "SANDBOX_SNAPSHOT_ERROR",
    FilesystemSnapshotCreating = "SANDBOX_FILESYSTEM_SNAPSHOT_CREATING",
    FilesystemSnapshotCreated = "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED",
    FilesystemSnapshotError = "SANDBOX_FILESYSTEM_SNAPSHOT_ERROR",
    Waiting = "SANDBOX_WAITING",
    LockReleaseRequested = "SANDBOX_LOCK_RELEASE_REQUESTED",
    Killing = "SANDBOX_KILLING",
    Killed = "SANDBOX_KILLED",
    PermissionDenialError = "SANDBOX_PERMISSION_DENIAL_ERROR",
    Error = "SANDBOX_ERROR",
}

/// Why a sandbox died: `reason` of `SANDBOX_ERROR`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    OutOfMemory,
    Killed,
    RuntimeFailed,
    Lifetime,
}

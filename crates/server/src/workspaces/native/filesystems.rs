//! The files of gVisor's own sandboxes.

use std::sync::Arc;

use sandboxer_protocol::{SandboxId, client::ErrorCode};

use super::{Native, NativeError};
use crate::{
    filesystems::{Filesystems, SavedFilesystem},
    sandbox::asks::{Ask, Told},
};

impl Native {
    pub(crate) fn filesystems(&self) -> Option<Arc<Filesystems>> {
        self.manager.filesystems.clone()
    }

    /// A filesystem snapshot of one that runs, and goes on.
    pub(crate) async fn snapshot_filesystem(
        &self,
        id: SandboxId,
        who: Option<&str>,
        name: String,
        replace: bool,
    ) -> Result<SavedFilesystem, NativeError> {
        let handle = self.running(id, who).await?;
        let made = match handle.ask(Ask::SnapshotFilesystem { name, replace }).await {
            Some(Ok(Told::Filesystem(manifest))) => SavedFilesystem::of(&manifest),
            Some(Ok(_)) => None,
            Some(Err(refused)) => return Err(refused.into()),
            None => return Err(NativeError::NotReady("does not run here")),
        };
        made.ok_or_else(|| NativeError::Because(ErrorCode::Internal, "Something else was done.".to_owned()))
    }
}

//! Saving a sandbox so that a failure does not cost it.
//!
//! `runsc checkpoint` without `-leave-running` ends the sandbox even if it could not save it (seen: a full disk). So one that is to
//! stop is frozen first, saved with `-leave-running`, which leaves it frozen, and removed by the caller only when everything is safe;
//! after a failure it is thawed. What is restored from such an image runs.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use sandboxer_protocol::SandboxId;
use sandboxer_runsc::{Checkpoint, Runsc};

use super::{CALL_LIMIT, refused};
use crate::RuntimeError;

const SAVE_LIMIT: Duration = Duration::from_secs(600);
const WHAT: &str = "save the sandbox";
/// The file without which an image is none; the pages lie beside it or in it.
const MAIN_FILE: &str = "checkpoint.img";
/// With less than this left, runsc may have succeeded without having written everything.
const LEAST_FREE_BYTES: u64 = 1024 * 1024;

/// Saves a sandbox and leaves it as it is: running, or frozen.
pub(super) async fn save(runsc: &Runsc, id: SandboxId, into: &Path) -> Result<(), RuntimeError> {
    let checkpoint = Checkpoint { id: id.to_string(), into: into.to_owned(), leave_running: true };
    runsc.checkpoint(&checkpoint, SAVE_LIMIT).await.map_err(|error| refused(WHAT, &error))?;
    verify(into).map_err(|error| RuntimeError::Failed { what: WHAT, why: format!("{}: {error}", into.display()) })
}

/// Freezes and saves a sandbox. It is frozen after a success and runs after a failure.
pub(super) async fn save_frozen(runsc: &Runsc, id: SandboxId, dir: &Path, into: &Path) -> Result<(), RuntimeError> {
    let name = id.to_string();
    note_interrupted(dir)?;
    let frozen = runsc.pause(&name, CALL_LIMIT).await.map_err(|error| refused("freeze the sandbox", &error));
    let saved = match frozen {
        Ok(()) => save(runsc, id, into).await,
        Err(error) => Err(error),
    };
    if saved.is_err() {
        runsc.resume(&name, CALL_LIMIT).await.ok();
        forget_interrupted(dir);
    }
    saved
}

/// It is about to be frozen: for a server that takes it up after this one died.
pub(super) fn note_interrupted(dir: &Path) -> Result<(), RuntimeError> {
    let note = note(dir);
    fs::write(&note, "").map_err(|error| RuntimeError::Failed { what: "freeze the sandbox", why: format!("{}: {error}", note.display()) })
}

/// Thaws a sandbox that a server froze and did not live to thaw.
pub(super) async fn finish_interrupted(runsc: &Runsc, id: SandboxId, dir: &Path) {
    let note = note(dir);
    if note.exists() {
        // It fails if it was never frozen.
        runsc.resume(&id.to_string(), CALL_LIMIT).await.ok();
        fs::remove_file(note).ok();
    }
}

/// It runs again.
pub(super) fn forget_interrupted(dir: &Path) {
    fs::remove_file(note(dir)).ok();
}

fn note(dir: &Path) -> PathBuf {
    dir.join("saving")
}

fn verify(into: &Path) -> io::Result<()> {
    if fs::metadata(into.join(MAIN_FILE))?.len() == 0 {
        return Err(io::Error::other("the image is empty"));
    }
    let free = nix::sys::statvfs::statvfs(into)?;
    if free.blocks_available().saturating_mul(free.fragment_size()) < LEAST_FREE_BYTES {
        return Err(io::Error::other("the disk is full"));
    }
    Ok(())
}

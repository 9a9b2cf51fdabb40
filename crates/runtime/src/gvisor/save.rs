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
use sandboxer_runsc::{CallError, Checkpoint, Runsc, Status, Written};

use super::{CALL_LIMIT, refused};
use crate::RuntimeError;

const SAVE_LIMIT: Duration = Duration::from_secs(600);
/// How long runsc may take to freeze or thaw. It is a matter of milliseconds, but of one that is cut off nobody knows whether the sandbox was told.
const FREEZE_LIMIT: Duration = Duration::from_secs(120);
const WHAT: &str = "save the sandbox";
/// The file without which an image is none; the pages lie beside it or in it.
const MAIN_FILE: &str = "checkpoint.img";
/// With less than this left, runsc may have succeeded without having written everything.
const LEAST_FREE_BYTES: u64 = 1024 * 1024;

/// Saves a sandbox and leaves it as it is: running, or frozen.
pub(super) async fn save(runsc: &Runsc, id: SandboxId, into: &Path, written: Option<Written<'_>>) -> Result<(), RuntimeError> {
    let checkpoint = Checkpoint { id: id.to_string(), into: into.to_owned(), leave_running: true };
    runsc.checkpoint(&checkpoint, written, SAVE_LIMIT).await.map_err(|error| refused(WHAT, &error))?;
    verify(into).map_err(|error| RuntimeError::Failed { what: WHAT, why: format!("{}: {error}", into.display()) })
}

/// Freezes and saves a sandbox. It is frozen after a success and runs after a failure.
pub(super) async fn save_frozen(
    runsc: &Runsc,
    id: SandboxId,
    dir: &Path,
    into: &Path,
    written: Option<Written<'_>>,
) -> Result<(), RuntimeError> {
    let saved = match freeze(runsc, id, dir).await {
        Ok(()) => save(runsc, id, into, written).await,
        Err(error) => Err(error),
    };
    if saved.is_err() {
        // If this fails too, the note stays, and the caller resumes it.
        thaw(runsc, id, dir).await.ok();
    }
    saved
}

pub(super) async fn freeze(runsc: &Runsc, id: SandboxId, dir: &Path) -> Result<(), RuntimeError> {
    // Should this process die, the next one has to know that no agent will answer.
    note_interrupted(dir)?;
    runsc.pause(&id.to_string(), FREEZE_LIMIT).await.map_err(|error| refused("freeze the sandbox", &error))
}

/// With a success the sandbox is not frozen, also if it never was. After an error it may be, and this is to be tried again.
pub(super) async fn thaw(runsc: &Runsc, id: SandboxId, dir: &Path) -> Result<(), RuntimeError> {
    let name = id.to_string();
    if let Err(error) = runsc.resume(&name, FREEZE_LIMIT).await
        && !was_thawed(&error)
    {
        // It also fails if it was never frozen.
        let frozen = match runsc.state(&name, CALL_LIMIT).await {
            Ok(state) => state.status == Status::Paused,
            Err(unknown) if unknown.is_not_found() => return Err(RuntimeError::NotFound),
            Err(_) => true,
        };
        if frozen {
            return Err(refused("thaw the sandbox", &error));
        }
    }
    fs::remove_file(note(dir)).ok();
    Ok(())
}

/// The sandbox was thawed, and runsc could not write that down. gVisor dies of being thawed once more than it was frozen, so that must not be tried again.
fn was_thawed(error: &CallError) -> bool {
    matches!(error, CallError::Failed { stderr, .. } if stderr.contains("saving container metadata"))
}

/// It is about to be frozen: for a server that takes it up after this one died.
fn note_interrupted(dir: &Path) -> Result<(), RuntimeError> {
    let note = note(dir);
    fs::write(&note, "").map_err(|error| RuntimeError::Failed { what: "freeze the sandbox", why: format!("{}: {error}", note.display()) })
}

/// Thaws a sandbox that a server froze and did not live to thaw.
pub(super) async fn finish_interrupted(runsc: &Runsc, id: SandboxId, dir: &Path) -> Result<(), RuntimeError> {
    if !note(dir).exists() {
        return Ok(());
    }
    match thaw(runsc, id, dir).await {
        // Its process was just found: whether it is there is for its agent to show.
        Err(RuntimeError::NotFound) => Ok(()),
        thawed => thawed,
    }
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

//! The trait and what passes through it.

use std::{
    path::{Path, PathBuf},
    pin::Pin,
    time::Duration,
};

use sandboxer_protocol::{SandboxId, agent::AgentConfig};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::{Ended, Written};

pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Everything needed to start one sandbox.
#[derive(Debug, Clone)]
pub struct Launch {
    pub id: SandboxId,
    /// Exists, is private to the server, and belongs to the runtime for this sandbox: FIFOs, bundle, boot log.
    pub dir: PathBuf,
    /// The EROFS file that is the sandbox's root.
    pub image: PathBuf,
    pub config: AgentConfig,
    pub resources: HostResources,
}

/// Limits by the host's cgroup; none: not limited there.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct HostResources {
    /// Counts the guest and the gVisor kernel together.
    pub memory_bytes: Option<u64>,
    pub cpus: Option<f64>,
    /// Far above what the guest may have inside: reaching it can make runsc itself fail.
    pub pids_ceiling: Option<u64>,
}

/// What becomes of a sandbox once it is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterSave {
    /// It is left frozen: `remove` it when what was saved is safe, or `resume` it.
    Freeze,
    GoOn,
}

/// A running sandbox: the two streams to its agent, and its end.
///
/// Dropping it lets go of the streams; the sandbox goes on.
pub struct Instance {
    pub from_agent: Box<dyn AsyncRead + Send + Unpin>,
    pub to_agent: Box<dyn AsyncWrite + Send + Unpin>,
    pub ended: Ended,
}

impl std::fmt::Debug for Instance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Instance").field("ended", &self.ended).finish_non_exhaustive()
    }
}

/// Why the runtime did not do what it was asked to.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RuntimeError {
    /// What was asked for can't be: ask for something else.
    #[error("{0}")]
    Invalid(String),
    /// No such sandbox, or it is gone: forget it.
    #[error("no such sandbox runs here")]
    NotFound,
    /// Something that the runtime needs is not there now: repair it, or try later.
    #[error("{0}")]
    Unavailable(String),
    /// Not at this moment, since an execution runs.
    #[error("an execution is in progress")]
    Busy,
    /// It was tried and went wrong; the sandbox, if it ran, still does unless `ended` says otherwise.
    #[error("could not {what}: {why}")]
    Failed { what: &'static str, why: String },
}

/// Why not all of a sandbox is there that was restored.
#[derive(Debug, Clone, thiserror::Error)]
pub enum NotWhole {
    /// What it was restored from can't be read, whatever the sandbox does.
    #[error("{0}")]
    Unreadable(String),
    /// Why is told by its `ended`.
    #[error("it ended before all of its memory was there")]
    Ended,
    /// It may come yet.
    #[error("not all of its memory was there within {} s", .0.as_secs())]
    TooLate(Duration),
}

/// Starts, saves, restores and ends sandboxes.
///
/// Futures are not cancel-safe unless they say so: after dropping one of `start` or `restore`, call `remove`.
pub trait Runtime: Send + Sync + 'static {
    /// Starts a sandbox. Returns as soon as that is under way; the agent answers over the link when it is up, and a failure to start
    /// shows in `ended`.
    fn start<'a>(&'a self, launch: &'a Launch) -> BoxFuture<'a, Result<Instance, RuntimeError>>;

    /// Takes up a sandbox that an earlier server process started and left running. [`RuntimeError::NotFound`] is proof that it is gone; with
    /// any other error it may still be there.
    fn take_up<'a>(&'a self, id: SandboxId, dir: &'a Path) -> BoxFuture<'a, Result<Instance, RuntimeError>>;

    /// Saves the sandbox into the empty directory `into`. The sandbox goes on after a failure. `written` is told how much of [`PAGES`](crate::PAGES) is there meanwhile and will not change any
    /// more, where that is known; who reads it takes processor time from whoever writes it.
    fn checkpoint<'a>(
        &'a self,
        id: SandboxId,
        dir: &'a Path,
        into: &'a Path,
        after: AfterSave,
        written: Option<Written<'a>>,
    ) -> BoxFuture<'a, Result<(), RuntimeError>>;

    /// Starts a sandbox from what `checkpoint` saved. The image must be the one it was saved with.
    fn restore<'a>(&'a self, launch: &'a Launch, from: &'a Path) -> BoxFuture<'a, Result<Instance, RuntimeError>>;

    /// Begins a restore before what was saved is there: a container that waits for it. Its agent does not answer before `restore_into`, and
    /// to the next server process it is no sandbox. `remove` gives it up.
    fn create<'a>(&'a self, launch: &'a Launch) -> BoxFuture<'a, Result<Instance, RuntimeError>>;

    /// Waits until a container that `create` began is there.
    fn created(&self, id: SandboxId) -> BoxFuture<'_, Result<(), RuntimeError>>;

    /// Goes on with a restore that `create` began. It runs when this returns, and its memory may still be on its way: see `whole`.
    fn restore_into<'a>(&'a self, launch: &'a Launch, from: &'a Path) -> BoxFuture<'a, Result<(), RuntimeError>>;

    /// Waits until all of a sandbox is there that was restored in this directory. For whoever is about to give up what it was restored in place of. Cancel-safe.
    fn whole<'a>(&'a self, id: SandboxId, dir: &'a Path) -> BoxFuture<'a, Result<(), NotWhole>>;

    /// Freezes the sandbox.
    fn pause<'a>(&'a self, id: SandboxId, dir: &'a Path) -> BoxFuture<'a, Result<(), RuntimeError>>;

    /// Thaws it. A success also if it was not frozen; after an error other than [`RuntimeError::NotFound`] it may still be: try again.
    fn resume<'a>(&'a self, id: SandboxId, dir: &'a Path) -> BoxFuture<'a, Result<(), RuntimeError>>;

    /// Ends the sandbox if it runs and leaves nothing behind: no process, mount, cgroup, state directory, FIFO. The caller removes
    /// `dir` itself. May be repeated, also for one that was only half started.
    fn remove<'a>(&'a self, id: SandboxId, dir: &'a Path) -> BoxFuture<'a, Result<(), RuntimeError>>;
}

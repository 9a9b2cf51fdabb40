//! Time travel of gVisor's own sandboxes: snapshots, checkpoints, going back, copies.

use sandboxer_protocol::{
    SandboxId,
    client::{ErrorCode, SnapshotTarget},
};
use sandboxer_store::{ManifestAt, SnapshotId};

use super::{Native, NativeSandbox};
use crate::{
    checkpoints::{About, Checkpoints, Family, SavedCheckpoint, SavedSnapshot},
    manager::{ArriveError, CreateError, Handle},
    obituaries::Obituary,
    sandbox::{
        asks::{Ask, Refused, Told},
        rollback::place_of,
    },
    workspaces::{MAX_COUNT, may_see},
};

/// Why something was not done.
#[derive(Debug)]
pub(crate) enum NativeError {
    NotFound(&'static str),
    /// A sandbox that ended. The reason is told to the key that made it.
    Gone(Obituary),
    InUse,
    NotReady(&'static str),
    Because(ErrorCode, String),
}

impl From<CreateError> for NativeError {
    fn from(error: CreateError) -> Self {
        Self::Because(error.code, error.message)
    }
}

impl From<Refused> for NativeError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::InUse => Self::InUse,
            Refused::Because(code, message) => Self::Because(code, message),
        }
    }
}

impl From<ArriveError> for NativeError {
    fn from(error: ArriveError) -> Self {
        match error {
            ArriveError::NotFound(_) => Self::NotFound("sandbox"),
            ArriveError::InUse => Self::InUse,
            ArriveError::HandoffInProgress => Self::NotReady("is being handed to another instance"),
            ArriveError::OwnerSilent => Self::NotReady("is at an instance that does not answer and has not saved it yet"),
            ArriveError::NotYet => Self::NotReady("is not yet reached by this server, which was restarted"),
            ArriveError::Later(code, why) => Self::Because(code, why),
            ArriveError::Failed(why) => Self::Because(ErrorCode::RestoreFailed, why),
        }
    }
}

const NOT_KEPT: &str = "This server keeps neither checkpoints nor snapshots: it was started without a checkpoint path.";
pub(super) const RESTS: &str = "does not run here";

impl Native {
    /// A snapshot of one that runs, and goes on; under this id, if one is given.
    pub(crate) async fn take_snapshot(
        &self,
        id: SandboxId,
        who: Option<&str>,
        name: Option<String>,
        as_id: Option<SnapshotId>,
    ) -> Result<SavedSnapshot, NativeError> {
        let handle = self.running(id, who).await?;
        match handle.ask(Ask::Snapshot { id: as_id.unwrap_or_else(SnapshotId::random), name }).await {
            Some(Ok(Told::Snapshot(manifest))) => {
                let about = About::of(&manifest).map_err(internal)?;
                let ManifestAt::Snapshot { snapshot_id } = manifest.at() else { return Err(internal("it is no snapshot".to_owned())) };
                Ok(SavedSnapshot { id: snapshot_id, about: about.into() })
            }
            Some(Ok(_)) => Err(internal("something else was done".to_owned())),
            Some(Err(refused)) => Err(refused.into()),
            None => Err(NativeError::NotReady(RESTS)),
        }
    }

    /// Saves one that nobody is attached to. It no longer runs here then.
    pub(crate) async fn checkpoint(
        &self,
        id: SandboxId,
        who: Option<&str>,
        include_execution: bool,
    ) -> Result<SavedCheckpoint, NativeError> {
        let handle = self.running(id, who).await?;
        match handle.ask(Ask::Checkpoint { include_execution }).await {
            Some(Ok(Told::Checkpointed)) => {
                handle.gone().await;
                let newest = self.checkpoints(id, who).await?.pop();
                newest.ok_or_else(|| unreadable("the checkpoint is gone again".to_owned()))
            }
            Some(Ok(_)) => Err(internal("something else was done".to_owned())),
            Some(Err(refused)) => Err(refused.into()),
            None => Err(NativeError::NotReady(RESTS)),
        }
    }

    /// The checkpoints of one, oldest first, whether it runs or not.
    pub(crate) async fn checkpoints(&self, id: SandboxId, who: Option<&str>) -> Result<Vec<SavedCheckpoint>, NativeError> {
        self.any(id, who).await?;
        let unset = |_| NativeError::Because(ErrorCode::CheckpointNotConfigured, NOT_KEPT.to_owned());
        let checkpoints = self.kept().map_err(unset)?;
        let stored = checkpoints.look(id).await.map_err(|error| unreadable(error.to_string()))?;
        let latest = stored.and_then(|stored| stored.record.latest);
        checkpoints.checkpoints(id, latest).await.map_err(unreadable)
    }

    /// Its history, with that of what it came from and of what came from it.
    pub(crate) async fn family(&self, id: SandboxId, who: Option<&str>) -> Result<Family, NativeError> {
        self.any(id, who).await?;
        let mut family = self.kept()?.family(id, |owner| may_see(owner, who)).await.map_err(unreadable)?;
        // The volume has no record of a sandbox that is not kept there.
        for (id, one) in &mut family {
            if one.gone && self.visible(*id, who).await.is_some() {
                (one.gone, one.held) = (false, true);
            }
        }
        Ok(family)
    }

    pub(crate) async fn snapshots(&self, who: Option<&str>) -> Result<Vec<SavedSnapshot>, NativeError> {
        let Ok(checkpoints) = self.kept() else { return Ok(Vec::new()) };
        let mut found = checkpoints.snapshots().await.map_err(unreadable)?;
        found.retain(|snapshot| may_see(snapshot.about.state.owner.as_deref(), who));
        Ok(found)
    }

    pub(crate) async fn snapshot(&self, id: SnapshotId, who: Option<&str>) -> Result<Option<SavedSnapshot>, NativeError> {
        let Ok(checkpoints) = self.kept() else { return Ok(None) };
        let found = checkpoints.snapshot(id).await.map_err(unreadable)?;
        Ok(found.filter(|snapshot| may_see(snapshot.about.state.owner.as_deref(), who)))
    }

    /// Whether there was such a snapshot, which there is no longer.
    pub(crate) async fn delete_snapshot(&self, id: SnapshotId, who: Option<&str>) -> Result<bool, NativeError> {
        if self.snapshot(id, who).await?.is_none() {
            return Ok(false);
        }
        self.kept()?.delete_snapshot(id).await.map_err(unreadable)?;
        Ok(true)
    }

    /// Goes back in place, or on the volume where it does not run.
    pub(crate) async fn roll_back(&self, id: SandboxId, who: Option<String>, target: SnapshotTarget) -> Result<NativeSandbox, NativeError> {
        self.any(id, who.as_deref()).await?;
        let checkpoints = self.kept()?;
        let to = place_of(id, &target).map_err(|why| NativeError::Because(ErrorCode::InvalidField, format!("{why}.")))?;
        let seen = checkpoints.sees(to, |owner| may_see(owner, who.as_deref())).await.map_err(unreadable)?;
        if !seen {
            return Err(NativeError::NotFound("snapshot or checkpoint"));
        }
        if let Some(handle) = self.manager.find(id).await {
            match handle.ask(Ask::RollBack(target)).await {
                Some(Ok(_)) => return Ok(NativeSandbox::from(&handle)),
                Some(Err(refused)) => return Err(refused.into()),
                // It has just been given up, and is on the volume.
                None => handle.gone().await,
            }
        }
        self.manager.go_back(id, to, who.clone()).await?;
        match self.get(id, who.as_deref()).await {
            Some(sandbox) => Ok(sandbox),
            None => Err(self.missing(id, who.as_deref()).await),
        }
    }

    /// Makes new sandboxes from something saved: all of them, or none. Each comes with the only copy of its token.
    pub(crate) async fn fork(
        &self,
        from: ManifestAt,
        count: usize,
        who: Option<String>,
    ) -> Result<Vec<(NativeSandbox, String)>, NativeError> {
        if !(1..=MAX_COUNT).contains(&count) {
            return Err(NativeError::Because(ErrorCode::InvalidField, format!("count: 1 to {MAX_COUNT}.")));
        }
        let snapshot_id = match from {
            ManifestAt::Snapshot { snapshot_id } => Some(snapshot_id),
            _ => None,
        };
        let made = self.manager.fork(from, count, who).await?;
        let shown = |handle: &Handle| NativeSandbox { snapshot_id, ..NativeSandbox::from(handle) };
        Ok(made.into_iter().map(|created| (shown(&created.handle), created.token)).collect())
    }

    /// Copies of a sandbox as it is now, or as it was at one of its checkpoints.
    pub(crate) async fn fork_sandbox(
        &self,
        id: SandboxId,
        who: Option<String>,
        checkpoint: Option<String>,
        count: usize,
    ) -> Result<Vec<(NativeSandbox, String)>, NativeError> {
        self.any(id, who.as_deref()).await?;
        if let Some(name) = checkpoint {
            let target = SnapshotTarget { checkpoint: Some(name), ..SnapshotTarget::default() };
            let from = place_of(id, &target).map_err(|why| NativeError::Because(ErrorCode::InvalidField, format!("{why}.")))?;
            return self.fork_known(from, count, who).await;
        }
        if self.manager.find(id).await.is_none() {
            let there = self.manager.on_volume(id, who.as_deref()).await.map_err(unreadable)?;
            let there = there.filter(|there| !there.held).ok_or(NativeError::NotReady("runs at another instance"))?;
            let name = there.latest.ok_or(NativeError::NotFound("checkpoint"))?;
            return self.fork_known(ManifestAt::Checkpoint { sandbox_id: id, name }, count, who).await;
        }
        let taken = self.take_snapshot(id, who.as_deref(), None, None).await?;
        let made = self.fork(ManifestAt::Snapshot { snapshot_id: taken.id }, count, who).await;
        // Nobody knows of it.
        if let Err(why) = self.kept()?.delete_snapshot(taken.id).await {
            tracing::warn!(why, id = %taken.id, "the snapshot that copies were made from could not be deleted");
        }
        let mut made = made?;
        made.iter_mut().for_each(|(sandbox, _)| sandbox.snapshot_id = None);
        Ok(made)
    }

    async fn fork_known(&self, from: ManifestAt, count: usize, who: Option<String>) -> Result<Vec<(NativeSandbox, String)>, NativeError> {
        match self.fork(from, count, who).await {
            Err(NativeError::Because(ErrorCode::UnknownSnapshot, _)) => Err(NativeError::NotFound("checkpoint")),
            other => other,
        }
    }

    /// One that is in memory.
    pub(crate) async fn running(&self, id: SandboxId, who: Option<&str>) -> Result<Handle, NativeError> {
        if let Some(handle) = self.visible(id, who).await {
            return Ok(handle);
        }
        match self.get(id, who).await {
            Some(_) => Err(NativeError::NotReady(RESTS)),
            None => Err(self.missing(id, who).await),
        }
    }

    /// Why there is no such sandbox.
    pub(crate) async fn missing(&self, id: SandboxId, who: Option<&str>) -> NativeError {
        let obituary = match self.manager.obituary_of_key(id, who) {
            None => self.manager.tombstone_of_key(id, who).await,
            here => here,
        };
        obituary.map_or(NativeError::NotFound("sandbox"), NativeError::Gone)
    }

    async fn any(&self, id: SandboxId, who: Option<&str>) -> Result<NativeSandbox, NativeError> {
        match self.get(id, who).await {
            Some(sandbox) => Ok(sandbox),
            None => Err(self.missing(id, who).await),
        }
    }

    fn kept(&self) -> Result<&Checkpoints, NativeError> {
        let unset = || NativeError::Because(ErrorCode::SnapshotsNotConfigured, NOT_KEPT.to_owned());
        self.manager.checkpoints.as_deref().ok_or_else(unset)
    }
}

fn unreadable(why: String) -> NativeError {
    NativeError::Because(ErrorCode::RestoreFailed, format!("The volume can't be read: {why}"))
}

fn internal(why: String) -> NativeError {
    NativeError::Because(ErrorCode::Internal, format!("Something is wrong with this server: {why}"))
}

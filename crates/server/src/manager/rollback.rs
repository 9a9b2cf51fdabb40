//! Going back in place: what was saved takes the place of what runs.
//!
//! ```text
//!   load ── the sandbox stands still ── the saved one is started beside it ── the record names it ── it takes over, the other one ends
//!                                          └────────── any failure: it is removed, and the sandbox goes on ──────────┘
//! ```
//!
//! What was started beside is a *standby* to the next server until it has taken over: should this one die in between, the sandbox
//! goes on as it was.

use std::{path::PathBuf, sync::Arc};

use sandboxer_protocol::SandboxId;
use sandboxer_store::{ManifestAt, lease::handoff::Keeper};
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tracing::{Instrument as _, warn};

use super::{
    Manager,
    converse::{Opened, Running, converse},
    launch::prepare,
};
use crate::{
    checkpoints::{Checkpoints, Found},
    sandbox::{Execution, driver::Command, host::SandboxHost, record::Record, transfers::SingleFiles},
};

/// Starts what was saved in the place of what runs.
#[derive(Clone)]
pub(crate) struct Roller {
    manager: Arc<Manager>,
    checkpoints: Arc<Checkpoints>,
}

/// What takes the sandbox's place.
pub(crate) struct RolledBack {
    pub(crate) record: Record,
    pub(crate) dir: PathBuf,
    pub(crate) reader: sandboxer_runtime::link::LinkReader,
    pub(crate) writer: sandboxer_runtime::link::LinkWriter,
    pub(crate) ended: sandboxer_runtime::Ended,
    pub(crate) execution: Option<Execution>,
    pub(crate) next_number: u64,
    /// Its agent can send its files.
    pub(crate) packs_files: bool,
    pub(crate) single_files: SingleFiles,
    pub(crate) tunnel: bool,
    /// Held until it has taken over.
    pub(crate) turn: OwnedSemaphorePermit,
}

/// The sandbox that is to go back.
pub(crate) struct Going {
    pub(crate) record: Record,
    pub(crate) host: Arc<SandboxHost>,
    pub(crate) keeper: Option<Keeper>,
}

impl Manager {
    pub(super) fn roller(self: &Arc<Self>) -> Option<Roller> {
        Some(Roller { manager: Arc::clone(self), checkpoints: self.checkpoints.clone()? })
    }
}

impl Roller {
    /// Starts what was saved beside what runs, which stands still from then on if that succeeds, and goes on if not. The answer may be
    /// dropped: then nothing has changed.
    pub(crate) fn roll_back(&self, going: Going, to: ManifestAt) -> oneshot::Receiver<Result<Box<RolledBack>, String>> {
        let (reply, answer) = oneshot::channel();
        let roller = self.clone();
        let work = async move {
            let rolled = roller.start_beside(&going, to).await;
            if let Err(Ok(unwanted)) = reply.send(rolled) {
                let container = going.record.container();
                going.host.moved_to(container, roller.manager.dir(container));
                roller.manager.remove(unwanted.record.container(), &unwanted.dir).await;
                going.host.thaw_for_rollback().await;
            }
        };
        self.manager.drivers.spawn(work.in_current_span());
        answer
    }

    async fn start_beside(&self, going: &Going, to: ManifestAt) -> Result<Box<RolledBack>, String> {
        let manager = &self.manager;
        let now = &going.record;
        // One of another key is not there either.
        let found = self.checkpoints.find_for(to, &manager.images, |owner| owner == now.owner.as_deref()).await?;
        let found = found.ok_or("there is no such snapshot or checkpoint")?;
        let files = self.checkpoints.bring(&found).await?;
        let Found { state, image, manifest } = found;
        let turn = going.host.turn().await?;
        let _busy = manager.pool.busy();
        let resources = state.config.limits.again(&manager.settings.max_limits, &manager.host).map_err(|error| error.message)?;
        let waited = manager.container_from_pool(&image);
        let record = Record {
            marker: state.marker,
            image,
            // Its limits are what it was saved with; everything else is the sandbox's own.
            config: crate::sandbox::record::SandboxConfig { limits: state.config.limits, ..now.config.clone() },
            generation: now.generation.saturating_add(1),
            container: Some(waited.as_ref().map_or_else(SandboxId::random, |container| container.id)),
            standby: true,
            ..now.clone()
        };
        let launch = manager.launch(&record, resources);
        let taken_over = async {
            going.host.freeze_for_rollback().await?;
            prepare(&launch, &record).map_err(|error| format!("{}: {error}", launch.dir.display()))?;
            let restored = match waited {
                Some(waited) => manager.runtime.restore_into(&launch, files.dir()).await.map(|()| waited.instance),
                None => manager.runtime.restore(&launch, files.dir()).await,
            };
            let instance = restored.map_err(|error| error.to_string())?;
            let opened = converse(instance, &record.marker, manager.settings.start_timeout).await?;
            // What it goes back from is given up now.
            manager.all_there(&launch).await?;
            if let Some(keeper) = &going.keeper {
                let name = self.checkpoints.again(&manifest, &files, &record, keeper.lease().latest()).await;
                let name = name.map_err(|error| error.whole())?;
                keeper.lease().publish(name).await.map_err(|error| error.to_string())?;
                going.host.stands_on(Some(name));
            }
            Ok(opened)
        };
        let Opened { running, .. } = match taken_over.await {
            Ok(opened) => opened,
            Err(why) => {
                manager.discard(&launch).await;
                going.host.thaw_for_rollback().await;
                return Err(why);
            }
        };
        let record = Record { standby: false, ..record };
        if let Err(error) = record.write(&launch.dir) {
            warn!(%error, "the record of the sandbox could not be written");
        }
        going.host.moved_to(record.container(), launch.dir.clone());
        let running = running.identified(&record);
        let Running { reader, writer, ended, execution, next_number, files: packs_files, single_files, tunnel, .. } = running;
        let dir = launch.dir;
        Ok(Box::new(RolledBack { record, dir, reader, writer, ended, execution, next_number, packs_files, single_files, tunnel, turn }))
    }

    /// Ends the container that was left behind, in the background.
    pub(crate) fn leave_behind(&self, container: SandboxId, dir: PathBuf) {
        let roller = self.clone();
        self.manager.drivers.spawn(async move { roller.manager.remove(container, &dir).await }.in_current_span());
    }
}

impl SandboxHost {
    async fn freeze_for_rollback(&self) -> Result<(), String> {
        self.tell(Command::Still).await;
        self.pause().await
    }

    async fn thaw_for_rollback(&self) {
        self.resume().await;
        self.tell(Command::Captured).await;
    }
}

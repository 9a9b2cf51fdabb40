//! What a sandbox's lease can have done with it: held still, saved, restored, ended.
//!
//! [`handoff`](sandboxer_store::lease::handoff) decides; this carries it out, with the sandbox's driver, the runtime and the volume.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use sandboxer_protocol::SandboxId;
use sandboxer_runtime::{AfterSave, Runtime};
use sandboxer_store::{
    CheckpointName, SandboxStatus,
    lease::handoff::{Consent, Ending, Host},
    record::InstanceId,
};
use tokio::sync::{mpsc, oneshot};
use tracing::{info, warn};

use super::{driver::Command, record::Record};
use crate::{
    checkpoints::{Capture, Checkpoints},
    manager::Restorer,
};

/// How long the driver may take to bring the conversation with the agent to a known point.
const QUIET_WITHIN: Duration = Duration::from_secs(20);

pub(crate) struct SandboxHost {
    id: SandboxId,
    dir: PathBuf,
    runtime: Arc<dyn Runtime>,
    checkpoints: Arc<Checkpoints>,
    commands: mpsc::Sender<Command>,
    /// How it is started from a checkpoint, for one that was not made here.
    restorer: Option<Restorer>,
    /// What it was when it was last captured.
    record: Mutex<Option<Record>>,
    latest: Mutex<Option<CheckpointName>>,
    /// The save under way is the last one here.
    giving_up: AtomicBool,
    /// Nobody asked for the save under way.
    automatic: AtomicBool,
}

impl SandboxHost {
    pub(crate) fn new(
        id: SandboxId,
        dir: PathBuf,
        runtime: Arc<dyn Runtime>,
        checkpoints: Arc<Checkpoints>,
        commands: mpsc::Sender<Command>,
        restorer: Option<Restorer>,
    ) -> Arc<Self> {
        Arc::new(Self {
            id,
            dir,
            runtime,
            checkpoints,
            commands,
            restorer,
            record: Mutex::default(),
            latest: Mutex::default(),
            giving_up: AtomicBool::new(false),
            automatic: AtomicBool::new(true),
        })
    }

    /// Says what the next save is for. Saves come one at a time; one of the lease's own making gives the sandbox up.
    pub(crate) fn about_to_save(&self, giving_up: bool, automatic: bool) {
        self.giving_up.store(giving_up, Ordering::Release);
        self.automatic.store(automatic, Ordering::Release);
    }

    /// The checkpoint that it stands on.
    pub(crate) fn stands_on(&self, latest: Option<CheckpointName>) {
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = latest;
    }

    /// None: the driver is gone, and so is the sandbox.
    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.ok()?;
        answer.await.ok()
    }
}

#[async_trait]
impl Host for SandboxHost {
    type Capture = Capture;

    async fn asked_for(&self, by: &InstanceId) -> Consent {
        info!(%by, "another instance asks for the sandbox");
        let consent = self.ask(|reply| Command::AskedFor { reply }).await.unwrap_or(Consent::HandOver);
        if consent == Consent::HandOver {
            self.about_to_save(true, true);
        }
        consent
    }

    async fn freeze(&self) {
        warn!("the lease could run out: the sandbox is frozen until it is renewed");
        let _ = self.commands.send(Command::Still).await;
        if let Err(error) = self.runtime.pause(self.id, &self.dir).await {
            warn!(%error, "the sandbox could not be frozen");
        }
    }

    async fn thaw(&self) {
        // It fails if it was never frozen.
        let _ = self.runtime.resume(self.id, &self.dir).await;
        let _ = self.commands.send(Command::GoOn).await;
    }

    async fn capture(&self) -> Result<Capture, String> {
        let quiet = tokio::time::timeout(QUIET_WITHIN, self.ask(|reply| Command::Quiet { reply }));
        let record = match quiet.await {
            Ok(Some(Ok(record))) => *record,
            Ok(Some(Err(why))) => return Err(why),
            Ok(None) => return Err("the sandbox is gone".to_owned()),
            Err(_) => return Err("the sandbox could not be brought to rest in time".to_owned()),
        };
        let into = self.checkpoints.work_dir().map_err(|error| format!("no room to save into: {error}"))?;
        self.runtime.checkpoint(self.id, &self.dir, into.path(), AfterSave::Freeze).await.map_err(|error| error.to_string())?;
        let parent = *self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let capture = self.checkpoints.capture(into, &record, self.automatic.load(Ordering::Acquire), parent);
        *self.record.lock().unwrap_or_else(PoisonError::into_inner) = Some(record);
        Ok(capture)
    }

    async fn persist(&self, capture: Capture, epoch: u64, wanted: CheckpointName) -> Result<CheckpointName, String> {
        self.checkpoints.persist(self.id, capture, epoch, wanted).await.map_err(|error| error.whole())
    }

    async fn published(&self, name: CheckpointName) {
        self.stands_on(Some(name));
        let status = if self.giving_up.load(Ordering::Acquire) { SandboxStatus::Checkpointed } else { SandboxStatus::Running };
        let record = self.record.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(record) = record
            && let Err(error) = self.checkpoints.describe(&record, status, Some(name)).await
        {
            warn!(error = error.whole(), "the checkpoint counts, but its copies on the volume are out of date");
        }
    }

    async fn restore(&self, name: CheckpointName, epoch: u64) -> Result<(), String> {
        self.stands_on(Some(name));
        match &self.restorer {
            Some(restorer) => restorer.restore(name, epoch).await,
            None => Err("it was made here".to_owned()),
        }
    }

    async fn stop(&self, why: Ending) {
        if let Some(restorer) = &self.restorer
            && restorer.take_back().await
        {
            warn!(?why, "the sandbox was restored, and ended before anybody had it");
            return;
        }
        let _ = self.commands.send(Command::End { why }).await;
        // It closes when the driver has ended.
        self.commands.closed().await;
    }
}

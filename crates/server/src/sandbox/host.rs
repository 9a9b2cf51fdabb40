//! What a sandbox's lease can have done with it: held still, saved, restored, ended.
//!
//! [`handoff`](sandboxer_store::lease::handoff) decides; this carries it out, with the sandbox's driver, the runtime and the volume.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use sandboxer_protocol::SandboxId;
use sandboxer_runtime::{AfterSave, Runtime, RuntimeError};
use sandboxer_store::{
    CheckpointName, Manifest, SandboxStatus, SnapshotId,
    lease::handoff::{Consent, Ending, Host, Stance},
    record::InstanceId,
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    task::JoinHandle,
};
use tracing::{info, warn};

use super::{driver::Command, record::Record};
use crate::{
    checkpoints::{Capture, Checkpoints},
    manager::Restorer,
    metrics::Metrics,
};

/// How long the driver may take to bring the conversation with the agent to a known point.
const QUIET_WITHIN: Duration = Duration::from_secs(20);
/// How long another capture may take.
const TURN_WITHIN: Duration = Duration::from_secs(120);
/// Between one attempt to thaw a sandbox and the next.
const THAW_AGAIN: Duration = Duration::from_secs(1);

pub(crate) struct SandboxHost {
    id: SandboxId,
    /// What it is to the runtime, and where. A rollback gives it another.
    place: Mutex<(SandboxId, PathBuf)>,
    runtime: Arc<dyn Runtime>,
    checkpoints: Arc<Checkpoints>,
    commands: mpsc::Sender<Command>,
    metrics: Arc<Metrics>,
    /// How it is started from a checkpoint, for one that was not made here.
    restorer: Option<Restorer>,
    /// What it was when it was last captured.
    record: Mutex<Option<Record>>,
    latest: Mutex<Option<CheckpointName>>,
    /// The save under way is the last one here.
    giving_up: AtomicBool,
    /// Nobody asked for the save under way.
    automatic: AtomicBool,
    /// One capture at a time: the conversation with the agent is at rest for its sake alone.
    turn: Arc<Semaphore>,
    /// The turn of a save by the lease, which ends with the standing still.
    taken: Mutex<Option<OwnedSemaphorePermit>>,
    /// What a save leaves to be done on the volume.
    finishing: Mutex<Option<JoinHandle<()>>>,
}

impl SandboxHost {
    pub(crate) fn new(
        id: SandboxId,
        place: (SandboxId, PathBuf),
        runtime: Arc<dyn Runtime>,
        checkpoints: Arc<Checkpoints>,
        commands: mpsc::Sender<Command>,
        metrics: Arc<Metrics>,
        restorer: Option<Restorer>,
    ) -> Arc<Self> {
        Arc::new(Self {
            id,
            place: Mutex::new(place),
            runtime,
            checkpoints,
            commands,
            metrics,
            restorer,
            record: Mutex::default(),
            latest: Mutex::default(),
            giving_up: AtomicBool::new(false),
            automatic: AtomicBool::new(true),
            turn: Arc::new(Semaphore::new(1)),
            taken: Mutex::default(),
            finishing: Mutex::default(),
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

    /// The whole sandbox as it is, kept on the volume; it goes on meanwhile, but for the moment that runsc takes. `may_act` is asked before
    /// anybody can see the snapshot.
    pub(crate) async fn snapshot(
        &self,
        epoch: u64,
        called: (SnapshotId, Option<String>),
        may_act: impl Fn() -> bool + Send,
    ) -> Result<Manifest, String> {
        let (capture, _) = self.capture_going_on(false).await?;
        if !may_act() {
            return Err("this instance may no longer act for the sandbox".to_owned());
        }
        self.checkpoints.put_snapshot(self.id, capture, epoch, called).await.map_err(|error| error.whole())
    }

    pub(crate) async fn tell(&self, command: Command) {
        // A driver that has ended needs to be told nothing.
        let _ = self.commands.send(command).await;
    }

    pub(crate) async fn pause(&self) -> Result<(), String> {
        let (container, dir) = self.place();
        self.runtime.pause(container, &dir).await.map_err(|error| error.to_string())
    }

    /// Until it is not frozen, or nobody drives it any longer: one that was left frozen would hang for ever, and its client with it.
    pub(crate) async fn resume(&self) {
        let (container, dir) = self.place();
        while let Err(error) = self.runtime.resume(container, &dir).await {
            if matches!(error, RuntimeError::NotFound) {
                return;
            }
            warn!(%error, "the sandbox could not be thawed, which is tried again");
            tokio::select! {
                () = tokio::time::sleep(THAW_AGAIN) => {}
                () = self.commands.closed() => return,
            }
        }
    }

    fn place(&self) -> (SandboxId, PathBuf) {
        self.place.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// It is another container now.
    pub(crate) fn moved_to(&self, container: SandboxId, dir: PathBuf) {
        *self.place.lock().unwrap_or_else(PoisonError::into_inner) = (container, dir);
    }

    /// Nobody else captures for as long as this is held.
    pub(crate) async fn turn(&self) -> Result<OwnedSemaphorePermit, String> {
        match tokio::time::timeout(TURN_WITHIN, Arc::clone(&self.turn).acquire_owned()).await {
            Ok(Ok(turn)) => Ok(turn),
            _ => Err("another save takes too long".to_owned()),
        }
    }

    /// Brings the conversation with the agent to rest. With a success, it rests until the driver is told to go on.
    async fn rest(&self) -> Result<Record, String> {
        let quiet = tokio::time::timeout(QUIET_WITHIN, self.ask(|reply| Command::Quiet { reply }));
        match quiet.await {
            Ok(Some(Ok(record))) => Ok(*record),
            Ok(Some(Err(why))) => Err(why),
            Ok(None) => Err("the sandbox is gone".to_owned()),
            Err(_) => Err("the sandbox could not be brought to rest in time".to_owned()),
        }
    }

    /// It stands still for as long as gVisor takes, and goes on whatever comes out.
    async fn capture_going_on(&self, automatic: bool) -> Result<(Capture, Record), String> {
        let _turn = self.turn().await?;
        let record = self.rest().await?;
        let captured = self.capture_into(&record, AfterSave::GoOn, automatic).await;
        self.tell(Command::Captured).await;
        Ok((captured?, record))
    }

    async fn capture_into(&self, record: &Record, after: AfterSave, automatic: bool) -> Result<Capture, String> {
        let (container, dir) = self.place();
        let into = self.checkpoints.work_dir().map_err(|error| format!("no room to save into: {error}"))?;
        let parent = *self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if after == AfterSave::Freeze {
            // Nobody waits for it to go on, so what is there can be stored while gVisor still writes.
            let capturing = self.checkpoints.begin(into, record, automatic, parent).map_err(|error| error.whole())?;
            let written = |bytes| capturing.written(bytes);
            self.runtime.checkpoint(container, &dir, capturing.dir(), after, Some(&written)).await.map_err(|error| error.to_string())?;
            return self.checkpoints.captured(capturing, record, automatic, after, parent).map_err(|error| error.whole());
        }
        let begun = Instant::now();
        self.runtime.checkpoint(container, &dir, into.path(), after, None).await.map_err(|error| error.to_string())?;
        self.metrics.save_pause_seconds.observe(begun.elapsed().as_secs_f64());
        Ok(self.checkpoints.capture(into, record, automatic, after, parent))
    }

    /// Others may capture again.
    fn end_turn(&self) {
        drop(self.taken.lock().unwrap_or_else(PoisonError::into_inner).take());
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
        self.tell(Command::Still).await;
        if let Err(error) = self.pause().await {
            warn!(error, "the sandbox could not be frozen");
        }
    }

    async fn thaw(&self) {
        self.resume().await;
        self.tell(Command::GoOn).await;
        self.end_turn();
    }

    async fn capture(&self, stance: Stance) -> Result<Capture, String> {
        let automatic = self.automatic.load(Ordering::Acquire);
        let (capture, record) = match stance {
            Stance::GoesOn => self.capture_going_on(automatic).await?,
            Stance::Still => {
                let turn = self.turn().await?;
                *self.taken.lock().unwrap_or_else(PoisonError::into_inner) = Some(turn);
                let record = self.rest().await?;
                (self.capture_into(&record, AfterSave::Freeze, automatic).await?, record)
            }
        };
        *self.record.lock().unwrap_or_else(PoisonError::into_inner) = Some(record);
        Ok(capture)
    }

    async fn persist(&self, capture: Capture, epoch: u64, wanted: CheckpointName) -> Result<CheckpointName, String> {
        let (name, finishing) = self.checkpoints.persist(self.id, capture, epoch, wanted).await.map_err(|error| error.whole())?;
        *self.finishing.lock().unwrap_or_else(PoisonError::into_inner) = Some(finishing);
        Ok(name)
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
        // A server that leaves would cut it off, and collections would wait for it.
        let finishing = self.finishing.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(finishing) = finishing {
            let _ = finishing.await;
        }
    }

    fn expect(&self, latest: CheckpointName) {
        if let Some(restorer) = &self.restorer {
            restorer.expect(latest);
        }
    }

    async fn restore(&self, name: CheckpointName, epoch: u64) -> Result<(), String> {
        self.stands_on(Some(name));
        match &self.restorer {
            Some(restorer) => {
                let (container, dir) = restorer.restore(name, epoch).await?;
                self.moved_to(container, dir);
                Ok(())
            }
            None => Err("it was made here".to_owned()),
        }
    }

    async fn stop(&self, why: Ending) {
        self.end_turn();
        if let Some(restorer) = &self.restorer
            && restorer.take_back().await
        {
            warn!(?why, "the sandbox was restored, and ended before anybody had it");
            return;
        }
        self.tell(Command::End { why }).await;
        // It closes when the driver has ended.
        self.commands.closed().await;
    }
}

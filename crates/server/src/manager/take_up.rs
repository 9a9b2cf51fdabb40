//! Taking up the sandboxes that an earlier server process left running.

use std::{collections::HashMap, fs, path::Path, sync::Arc, time::Duration};

use sandboxer_protocol::SandboxId;
use sandboxer_runtime::RuntimeError;
use sandboxer_store::lease::{Held, LeaseError, Release};
use tracing::{Instrument as _, info, info_span, warn};

use super::{
    CERTAIN_WITHIN, Manager,
    converse::{Opened, Running, converse},
    handle::Wire,
    left::{Left, step_back},
};
use crate::{
    obituaries::Obituary,
    sandbox::{
        driver::Command,
        record::{Record, RecordError},
    },
};

/// How long the agent of a sandbox that is taken up may take to answer.
const TAKE_UP: Duration = Duration::from_secs(60);
/// How long the server waits for that before it serves.
const TAKE_UP_FIRST: Duration = Duration::from_secs(10);
/// Between one attempt to take up a sandbox and the next: at first, and at most.
const TAKE_UP_AGAIN: Duration = Duration::from_secs(1);
const TAKE_UP_AGAIN_AT_MOST: Duration = Duration::from_secs(30);

/// How far the taking up of a sandbox is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TakingUp {
    /// Whoever wants it waits.
    First,
    /// It could not be taken up. It is tried again, and whoever wants it is told so, unless it is not known who may: then it is left for the next start.
    NotYet { token_sha256: Option<String> },
}

/// Why a sandbox was not taken up.
enum NotTakenUp {
    /// It is gone, for sure.
    Lost { why: String, token_sha256: String },
    /// It may well live.
    Unknown(String),
    /// It goes on elsewhere, or was ended.
    Moved(String),
}

impl Manager {
    /// Takes up every sandbox that an earlier server process left in the data directory. What can't be taken up is removed, and the
    /// reason is remembered.
    pub(crate) async fn take_up_all(self: &Arc<Self>) {
        if let Some(checkpoints) = &self.checkpoints {
            checkpoints.bury_what_is_due();
        }
        let found = match fs::read_dir(self.settings.data_dir.join("sandboxes")) {
            Ok(entries) => entries.flatten().filter_map(|entry| Left::read(&entry)).collect(),
            Err(error) => {
                warn!(%error, "the data directory can't be read");
                Vec::new()
            }
        };
        let mut found: Vec<Left> = found;
        step_back(&mut found);
        // One that stands by for another has no name of its own.
        let named = |left: &&Left| !left.record.as_ref().is_ok_and(|record| record.standby);
        self.taking_up.send_modify(|ids| ids.extend(found.iter().filter(named).map(|left| (left.id, TakingUp::First))));
        let mut stand_by = Vec::new();
        for left in found {
            let (id, stands_by) = (left.id, !named(&&left));
            let manager = Arc::clone(self);
            let take_up = async move {
                let settled = Arc::clone(&manager).take_up(left).await;
                if settled && !stands_by {
                    manager.taking_up.send_modify(|ids| {
                        ids.remove(&id);
                    });
                }
            };
            let task = self.drivers.spawn(take_up.instrument(info_span!(parent: None, "sandbox", %id)));
            stand_by.extend(stands_by.then_some(task));
        }
        let all = async {
            for task in stand_by {
                // A task that panicked has said so; its sandbox stays for the next start.
                let _ = task.await;
            }
            let tried = |ids: &HashMap<_, TakingUp>| ids.values().all(|taking_up| *taking_up != TakingUp::First);
            let _ = self.taking_up.subscribe().wait_for(tried).await;
        };
        // Who attaches to one that takes longer waits for it.
        if tokio::time::timeout(TAKE_UP_FIRST, all).await.is_err() {
            warn!("some sandboxes take long to be taken up; serving the others");
        }
    }

    /// False: it is left for the next start.
    async fn take_up(self: Arc<Self>, left: Left) -> bool {
        let (id, container) = (left.id, left.container);
        let dir = self.dir(container);
        if let Some(record) = left.record.as_ref().ok().filter(|record| record.standby) {
            info!(%container, "it was to take the place of another one, which goes on, or was a copy that nobody had heard of");
            self.remove(container, &dir).await;
            if record.is_unheard_of() {
                self.bury_copy(record).await;
            }
            return true;
        }
        if let Some(why) = self.checkpoints.as_ref().and_then(|checkpoints| checkpoints.unburied(id)) {
            info!(why, "was ended for good, and is removed");
            self.remove(container, &dir).await;
            return true;
        }
        let owner = left.record.as_ref().ok().and_then(|record| record.owner.clone());
        let (why, token_sha256) = match self.try_take_up(left, &dir).await {
            Ok(()) => {
                self.metrics.taken_up.inc();
                info!("taken up");
                return true;
            }
            Err(NotTakenUp::Unknown(why)) => {
                // What can't be judged is not destroyed.
                warn!(why, "can't be taken up now, and is left for the next start");
                return false;
            }
            Err(NotTakenUp::Moved(why)) => {
                warn!(why, "is no longer this instance's, and is ended here without anything being written");
                self.remove(container, &dir).await;
                return true;
            }
            Err(NotTakenUp::Lost { why, token_sha256 }) => (why, token_sha256),
        };
        warn!(why, "can't be taken up");
        let message = format!("The sandbox was lost when its server was restarted: {why}.");
        self.obituaries.add(id, Obituary { message, token_sha256, owner, reason: None });
        self.remove(container, &dir).await;
        true
    }

    /// Nobody waits for it any longer, and nothing is made of it.
    fn not_taken_up_yet(&self, id: SandboxId, token_sha256: Option<String>) {
        self.taking_up.send_modify(|ids| drop(ids.insert(id, TakingUp::NotYet { token_sha256 })));
    }

    async fn try_take_up(self: &Arc<Self>, left: Left, dir: &Path) -> Result<(), NotTakenUp> {
        let Left { id, container, record } = left;
        let record = match record {
            Ok(record) => record,
            Err(error @ RecordError::Version(_)) => {
                self.not_taken_up_yet(id, None);
                return Err(NotTakenUp::Unknown(error.to_string()));
            }
            Err(error) => return Err(NotTakenUp::Lost { why: error.to_string(), token_sha256: String::new() }),
        };
        // Before anything of it moves again: whether it is still this instance's.
        let held = self.resume_lease(&record).await?;
        // More than are allowed now may have been left: they are taken up all the same, and no new ones are made until they are fewer.
        let slot = Arc::clone(&self.slots).try_acquire_owned().ok();
        let place = self.tenants.readmit(record.owner.as_deref());
        let mut wait = TAKE_UP_AGAIN;
        let running = loop {
            match self.reach(&record, dir, held.as_ref()).await {
                Err(NotTakenUp::Unknown(why)) => {
                    warn!(why, "can't be taken up now, which is tried again");
                    self.not_taken_up_yet(id, Some(record.token_sha256.clone()));
                }
                reached => break reached?,
            }
            let mut stop = self.stop.subscribe();
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = async { drop(stop.wait_for(Option::is_some).await) } => return Err(NotTakenUp::Unknown("the server stops".to_owned())),
            }
            wait = (wait * 2).min(TAKE_UP_AGAIN_AT_MOST);
            if let Some(held) = &held {
                still_ours(held).await?;
            }
        };
        let age = jiff::Timestamp::now().duration_since(record.created_at);
        let age = Duration::try_from(age).unwrap_or_default();
        let wire = Wire::default();
        let held = match (&self.checkpoints, held) {
            (Some(checkpoints), Some(held)) => {
                if !held.lease.may_act() {
                    // Unknown is frozen, until its lease is certain.
                    let _ = self.runtime.pause(container, dir).await;
                    let _ = wire.sender.send(Command::Still).await;
                }
                Some((Arc::clone(checkpoints), held))
            }
            _ => None,
        };
        let keeping = self.keep(&record, &wire, held);
        self.drive(record, (slot, place), running, age, wire, keeping);
        Ok(())
    }

    /// The agent of a sandbox that an earlier process left.
    async fn reach(&self, record: &Record, dir: &Path, held: Option<&Held>) -> Result<Running, NotTakenUp> {
        let lost = |why: String| NotTakenUp::Lost { why, token_sha256: record.token_sha256.clone() };
        let instance = match self.runtime.take_up(record.container(), dir).await {
            Ok(instance) => instance,
            Err(RuntimeError::NotFound) => {
                if let Some(Held { lease, .. }) = held
                    && lease.latest().is_some()
                {
                    // What was saved of it can go on anywhere, and nobody should have to wait for the lease to run out.
                    let _ = tokio::time::timeout(CERTAIN_WITHIN, lease.release(Release::Anyone)).await;
                }
                return Err(lost("it no longer runs".to_owned()));
            }
            Err(error) => return Err(NotTakenUp::Unknown(error.to_string())),
        };
        let ended = instance.ended.clone();
        match (converse(instance, &record.marker, TAKE_UP).await, ended.now()) {
            (Ok(Opened { running, .. }), _) => Ok(running),
            (Err(why), Some(_)) => Err(lost(why)),
            (Err(why), None) => Err(NotTakenUp::Unknown(why)),
        }
    }

    /// The lease of a sandbox that an earlier process held. One that is lost is an error; one that is unknown, since the volume does not
    /// answer, is not.
    async fn resume_lease(&self, record: &Record) -> Result<Option<Held>, NotTakenUp> {
        let (Some(checkpoints), Some(epoch)) = (&self.checkpoints, record.epoch) else { return Ok(None) };
        let held = checkpoints.leases.resume(record.id, epoch);
        still_ours(&held).await?;
        Ok(Some(held))
    }
}

/// Whether a lease is not lost, as far as can be told.
async fn still_ours(held: &Held) -> Result<(), NotTakenUp> {
    match tokio::time::timeout(CERTAIN_WITHIN, held.lease.certain()).await {
        Ok(Err(LeaseError::Lost(reason))) => Err(NotTakenUp::Moved(reason.to_string())),
        _ => Ok(()),
    }
}

//! What the driver does about saves: it brings the conversation with the agent to rest, lets the sandbox stand still, and goes on.
//!
//! ```text
//!   going ── Quiet: a ping behind all that was written ──► quieting ── its pong ──► still ── GoOn ──► going
//! ```
//!
//! Unread input in the FIFO would be saved with the sandbox and read again by each of its copies: so nothing is written to the agent from
//! the ping on. Output needs no such care, since it is numbered.

use std::{sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use sandboxer_protocol::{
    agent::ToAgent,
    client::{CloseCode, ErrorCode, Status},
};
use sandboxer_store::{
    CheckpointName, Manifest, SandboxStatus,
    lease::{
        Lease, Release,
        handoff::{Consent, Ending, Keeper, SaveError},
    },
};
use tokio::{
    sync::{OwnedSemaphorePermit, oneshot},
    time::{Instant, timeout},
};
use tracing::{info, warn};

use super::{
    asks::{Refused, What},
    driver::{Driver, Outcome},
    farewell,
    host::SandboxHost,
    record::Record,
};
use crate::checkpoints::{Burial, Checkpoints};

/// How long the agent may take to have read all that was written to it.
const QUIET_WITHIN: Duration = Duration::from_secs(10);
/// How soon after a disconnect the sandbox is saved, and how often at most.
const SAVE_AFTER: Duration = Duration::from_millis(300);
const SAVE_EVERY: Duration = Duration::from_secs(10);
/// How long the record may take to be told of an end.
const TELL_RECORD: Duration = Duration::from_secs(5);

pub(super) const NO_CHECKPOINT_PATH: &str =
    "This server keeps neither checkpoints nor snapshots: it was started without a checkpoint path. The sandbox goes on.";

/// The lease on a sandbox that is kept on the volume.
pub(crate) struct Kept {
    pub(crate) keeper: Keeper,
    pub(crate) checkpoints: Arc<Checkpoints>,
}

pub(crate) type Rest = Result<Box<Record>, String>;

/// Whether anything is written to the agent.
#[derive(Default)]
pub(super) enum Stillness {
    #[default]
    Going,
    Quieting {
        value: u64,
        /// How many frames there were with the ping.
        frames: u64,
        until: Instant,
        reply: oneshot::Sender<Rest>,
    },
    Still,
}

/// What is known of whether a sandbox has changed since it was saved. Where no process is but the agent, nothing happens until a frame is sent to it.
#[derive(Debug, Default)]
struct AtRest {
    /// When the agent was first quiet since the save under way began: how many frames it had by then, if it was alone.
    quiet: Option<Option<u64>>,
    /// The same of the last save that was made.
    saved: Option<u64>,
}

impl AtRest {
    fn save_begins(&mut self) {
        *self = Self::default();
    }

    fn is_quiet(&mut self, frames: u64, alone: bool) {
        self.quiet.get_or_insert(alone.then_some(frames));
    }

    fn is_saved(&mut self) {
        self.saved = self.quiet.take().flatten();
    }

    fn is_unchanged(&self, frames: u64) -> bool {
        self.saved == Some(frames)
    }
}

/// Why a save is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    /// The client asked for it.
    Asked,
    Idle,
    /// The client went away.
    Disconnected,
    /// It is time.
    Autosave,
    Draining,
}

impl Why {
    /// The sandbox is given up when it is saved.
    fn ends_here(self) -> bool {
        !matches!(self, Self::Disconnected | Self::Autosave)
    }
}

/// A save under way.
pub(super) struct Saving {
    pub(super) why: Why,
    pub(super) done: BoxFuture<'static, Result<CheckpointName, SaveError>>,
}

/// All that the driver knows of saves.
#[derive(Default)]
pub(super) struct Saves {
    /// How it is captured, where the server has a volume.
    pub(super) host: Option<Arc<SandboxHost>>,
    pub(super) kept: Option<Kept>,
    /// A snapshot under way.
    pub(super) snapshot: Option<BoxFuture<'static, Result<Manifest, String>>>,
    pub(super) stillness: Stillness,
    pub(super) saving: Option<Saving>,
    pub(super) due: Option<Instant>,
    /// How often it is saved by itself.
    autosave: Option<Duration>,
    pub(super) autosave_due: Option<Instant>,
    last: Option<Instant>,
    pings: u64,
    /// Whether anything can have happened in the sandbox since its last save.
    rest: AtRest,
    /// The server is being stopped.
    pub(super) draining: bool,
    /// Its turn to be saved when the server stops.
    turn: Option<OwnedSemaphorePermit>,
    /// Another instance was promised the sandbox.
    promised: bool,
}

impl Saves {
    pub(super) fn of(host: Option<Arc<SandboxHost>>, kept: Option<Kept>, autosave: Option<Duration>) -> Self {
        let autosave = autosave.filter(|_| kept.is_some());
        Self { host, kept, autosave, autosave_due: autosave.map(|period| Instant::now() + period), ..Self::default() }
    }

    /// Whether frames may be written to the agent.
    pub(super) fn may_write(&self) -> bool {
        !matches!(self.stillness, Stillness::Still)
    }

    /// Whether the client is served.
    pub(super) fn may_serve(&self) -> bool {
        matches!(self.stillness, Stillness::Going) && !self.ends_here() && !self.draining
    }

    pub(super) fn lease(&self) -> Option<Lease> {
        self.kept.as_ref().map(|kept| kept.keeper.lease().clone())
    }

    /// Whether anything may be done that others can see: always, unless the lease could be someone else's.
    pub(super) fn may_act(&self) -> bool {
        self.kept.as_ref().is_none_or(|kept| kept.keeper.lease().may_act())
    }

    /// Whether who comes now has to wait until it is clear where the sandbox goes on.
    pub(super) fn goes_away(&self) -> bool {
        self.ends_here() || self.draining || self.promised
    }

    /// Whether the save under way is to be the end of the sandbox here.
    pub(super) fn ends_here(&self) -> bool {
        self.saving.as_ref().is_some_and(|saving| saving.why.ends_here())
    }

    /// When the next save begins by itself. One under way is waited for.
    pub(super) fn next_due(&self) -> Option<Instant> {
        if self.saving.is_some() {
            return None;
        }
        [self.due, self.autosave_due].into_iter().flatten().min()
    }

    /// Nothing holds the conversation with the agent.
    pub(super) fn go_on(&mut self) {
        self.stillness = Stillness::Going;
    }

    /// The conversation is another one: that of a sandbox which went back.
    pub(super) fn begin_again(&mut self) {
        self.rest = AtRest::default();
        self.go_on();
    }
}

impl Driver {
    /// Begins a save, unless one is under way or the sandbox is not kept.
    pub(super) fn save(&mut self, why: Why) {
        let (Some(kept), Some(host)) = (&self.saves.kept, self.saves.host.clone()) else { return };
        self.saves.rest.save_begins();
        let keeper = kept.keeper.clone();
        info!(?why, "saving");
        self.saves.due = None;
        self.saves.last = Some(Instant::now());
        let autosaves = Arc::clone(&kept.checkpoints.autosaves);
        let done: BoxFuture<'static, _> = Box::pin(async move {
            // One at a time on this machine, or its disk would choke on them.
            let _turn = if why == Why::Autosave { autosaves.acquire_owned().await.ok() } else { None };
            host.about_to_save(why.ends_here(), why != Why::Asked);
            if why.ends_here() { keeper.checkpoint().await } else { keeper.save().await }
        });
        self.saves.saving = Some(Saving { why, done });
    }

    /// It is time to save by itself what may have changed.
    pub(super) fn autosave(&mut self) {
        if self.saves.rest.is_unchanged(self.writer.frames()) {
            self.metrics.autosaves_skipped.inc();
            self.saves.autosave_due = self.saves.autosave.map(|period| Instant::now() + period);
            return;
        }
        self.save(Why::Autosave);
    }

    /// The client asked for a checkpoint.
    pub(super) fn checkpoint(&mut self) {
        self.tell(Status::Checkpointing);
        if self.saves.kept.is_some() {
            self.save(Why::Asked);
            return;
        }
        let (code, message) = self.not_kept();
        self.fail(Status::CheckpointError, code, &message);
        self.close_client(CloseCode::Application);
    }

    /// The client is gone: should this instance die, the next one has something to restore.
    pub(super) fn save_soon(&mut self) {
        if self.saves.kept.is_none() || self.saves.saving.is_some() {
            return;
        }
        let now = Instant::now();
        let earliest = self.saves.last.map_or(now, |last| last + SAVE_EVERY);
        self.saves.due.get_or_insert(earliest.max(now + SAVE_AFTER));
    }

    pub(super) fn on_saved(&mut self, saved: Result<CheckpointName, SaveError>) -> Option<Outcome> {
        let saving = self.saves.saving.take()?;
        self.saves.autosave_due = self.saves.autosave.map(|period| Instant::now() + period);
        let error = match saved {
            Ok(name) => {
                info!(%name, "saved");
                self.saves.rest.is_saved();
                self.metrics.saves.inc();
                if saving.why.ends_here() {
                    // It is ended by its lease, which says so.
                    self.saves.saving = Some(Saving { why: saving.why, done: Box::pin(std::future::pending()) });
                }
                return None;
            }
            Err(error) => error,
        };
        warn!(%error, why = ?saving.why, "could not be saved; it goes on");
        self.metrics.save_failures.inc();
        match saving.why {
            Why::Asked => {
                let message = format!("The sandbox could not be saved: {error}. It goes on, and can be attached again.");
                self.fail(Status::CheckpointError, ErrorCode::CheckpointFailed, &message);
                self.close_client(CloseCode::Application);
                if let Some(reply) = self.asks.take(What::Checkpoint) {
                    let _ = reply.send(Err(Refused::Because(ErrorCode::CheckpointFailed, message)));
                }
            }
            Why::Idle => self.count_idleness_anew(),
            Why::Disconnected | Why::Autosave => {}
            Why::Draining => return Some(Outcome::LeftRunning),
        }
        if self.saves.draining {
            return Some(Outcome::LeftRunning);
        }
        if !self.saves.goes_away() {
            self.admit_late();
        }
        None
    }

    /// It goes on here after all, for those who came meanwhile too.
    fn admit_late(&mut self) {
        for knocking in std::mem::take(&mut self.late) {
            self.on_attach(knocking);
        }
    }

    /// The server stops for good. Returns how the sandbox ends, unless it is to be saved when its turn comes.
    pub(super) fn on_drain(&mut self) -> Option<Outcome> {
        if self.saves.kept.is_none() {
            return Some(Outcome::Drained);
        }
        if !self.saves.draining && !self.saves.ends_here() {
            self.tell(Status::Checkpointing);
        }
        self.saves.draining = true;
        None
    }

    pub(super) fn on_turn_to_leave(&mut self, turn: OwnedSemaphorePermit) -> Option<Outcome> {
        let outcome = self.on_drain();
        if outcome.is_none() && !self.saves.ends_here() {
            self.save(Why::Draining);
        }
        self.saves.turn = Some(turn);
        outcome
    }

    /// Another instance wants the sandbox. A client keeps it that is really there; whether it is, it is asked.
    pub(super) fn on_asked_for(&mut self, reply: oneshot::Sender<Consent>) {
        self.asking.push(reply);
        let attached = self.client.as_ref().is_some_and(|client| !client.leaving && !client.port.outgoing.is_closed());
        if attached && !self.record.config.handoff && !self.saves.draining {
            self.knock();
            return;
        }
        if attached && !self.saves.draining {
            self.tell(Status::LockReleaseRequested);
            self.tell(Status::Checkpointing);
        }
        self.promise();
    }

    /// The attached client is gone: those who asked get the sandbox, unless the next one is attached already.
    pub(super) fn give_way(&mut self) {
        if self.client.is_none() {
            self.promise();
        }
    }

    fn promise(&mut self) {
        for asking in self.asking.drain(..) {
            self.saves.promised |= asking.send(Consent::HandOver).is_ok();
        }
    }

    pub(super) fn on_go_on(&mut self) {
        self.saves.stillness = Stillness::Going;
        self.saves.promised = false;
        if !self.saves.goes_away() {
            self.admit_late();
        }
    }

    pub(super) fn on_quiet(&mut self, reply: oneshot::Sender<Rest>) {
        self.saves.pings += 1;
        let value = self.saves.pings;
        self.writer.queue(&ToAgent::Ping { value });
        let (frames, until) = (self.writer.frames(), Instant::now() + QUIET_WITHIN);
        self.saves.stillness = Stillness::Quieting { value, frames, until, reply };
    }

    /// The agent has read everything up to a ping.
    pub(super) fn on_agent_pong(&mut self, answered: u64, alone: bool) {
        match std::mem::take(&mut self.saves.stillness) {
            Stillness::Quieting { value, frames, reply, .. } if value == answered => {
                self.saves.stillness = Stillness::Still;
                self.saves.rest.is_quiet(frames, alone);
                let _ = reply.send(Ok(Box::new(self.record.clone())));
            }
            other => self.saves.stillness = other,
        }
    }

    pub(super) fn give_up_quieting(&mut self, now: Instant) {
        match std::mem::take(&mut self.saves.stillness) {
            Stillness::Quieting { until, reply, .. } if until <= now => {
                let _ = reply.send(Err("the agent did not answer in time".to_owned()));
            }
            other => self.saves.stillness = other,
        }
    }

    pub(super) fn on_end_by_lease(&mut self, why: Ending) -> Option<Outcome> {
        match why {
            Ending::Checkpointed => Some(Outcome::Checkpointed { draining: self.saves.draining }),
            Ending::HandedOver => Some(Outcome::HandedOver),
            Ending::Lost(reason) => Some(Outcome::Lost(reason.to_string())),
            // It is being killed by this very driver.
            Ending::Killed => None,
        }
    }
}

/// The sandbox has ended here: the volume is told what that means for it.
pub(super) async fn tell_volume(kept: Kept, record: &Record, outcome: &Outcome) {
    let Kept { keeper, checkpoints, .. } = kept;
    let for_good = match outcome {
        Outcome::KilledByClient | Outcome::Idle(_) | Outcome::ClientGone(_) | Outcome::Drained => true,
        // What was saved of it can go on.
        Outcome::Died(_) | Outcome::Lifetime(_) => keeper.lease().latest().is_none(),
        Outcome::Checkpointed { .. } | Outcome::HandedOver | Outcome::Lost(_) | Outcome::LeftRunning => return,
    };
    let told: BoxFuture<'_, Result<(), String>> = if for_good {
        let (epoch, reason) = (keeper.lease().epoch(), farewell::obituary(outcome));
        let burial = Burial { record: record.clone(), epoch, reason: reason.clone() };
        // It goes on when nobody waits for it any longer.
        let burying = checkpoints.bury(burial, async move { keeper.kill(reason).await });
        Box::pin(async move { burying.await.unwrap_or_else(|error| Err(error.to_string())) })
    } else {
        Box::pin(async move {
            let epoch = keeper.lease().epoch();
            drop(keeper);
            let held = checkpoints.leases.resume(record.id, epoch);
            held.lease.release(Release::Anyone).await.map_err(|error| error.to_string())?;
            checkpoints.describe(record, SandboxStatus::Checkpointed, None).await.map_err(|error| error.whole())
        })
    };
    match timeout(TELL_RECORD, told).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => warn!(error, "the volume could not be told that the sandbox ended"),
        Err(_) => warn!("the volume was not told in time that the sandbox ended"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved(frames: u64, alone: bool) -> AtRest {
        let mut rest = AtRest::default();
        rest.save_begins();
        rest.is_quiet(frames, alone);
        rest.is_saved();
        rest
    }

    #[test]
    fn only_what_was_saved_alone_and_heard_nothing_since_is_unchanged() {
        assert!(saved(7, true).is_unchanged(7));
        assert!(!saved(7, true).is_unchanged(8));
        assert!(!saved(7, false).is_unchanged(7));
        assert!(!AtRest::default().is_unchanged(0));
    }

    #[test]
    fn a_save_that_fails_or_is_under_way_leaves_nothing_unchanged() {
        let mut rest = saved(7, true);
        rest.save_begins();
        assert!(!rest.is_unchanged(7));
        rest.is_quiet(7, true);
        assert!(!rest.is_unchanged(7));
    }

    #[test]
    fn what_a_snapshot_saw_later_does_not_count_for_the_save() {
        let mut rest = AtRest::default();
        rest.save_begins();
        rest.is_quiet(7, true);
        rest.is_quiet(12, true);
        rest.is_saved();
        assert!(rest.is_unchanged(7) && !rest.is_unchanged(12));
    }
}

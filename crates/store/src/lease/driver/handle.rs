//! What the server has of a lease: a handle to ask things of it, and its events.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use std::time::Duration;

use sandboxer_protocol::SandboxId;
use tokio::sync::{mpsc, oneshot, watch};

use super::attempt::ends;
use crate::{
    layout::CheckpointName,
    lease::{Clock, Moment},
    record::{InstanceId, Nonce, OwnerChange, Record, Verdict, Waiter},
};

/// Why a sandbox is not held any more. It is ended then, and nothing of it is written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LostReason {
    #[error("{}", match by { Some(by) => format!("instance {by} has taken it over"), None => "it was taken over and released".to_owned() })]
    TakenOver { by: Option<InstanceId> },
    #[error("it was ended: {0}")]
    Buried(String),
    #[error("its record is gone")]
    Removed,
    #[error("it was released")]
    Released,
    #[error("it could not be found out whether it is still held")]
    Unknown,
}

/// Why something was not done. Unless it says otherwise the lease is still held.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LeaseError {
    /// It is someone else's; end the sandbox. Whether this was written before is not known.
    #[error("the sandbox is no longer held here: {0}")]
    Lost(LostReason),
    /// The waiter has gone, or was answered; nothing was written.
    #[error("nobody waits for it any more")]
    WaiterGone,
    /// A checkpoint at least as new is published already; nothing was written.
    #[error("{latest} is published, which is not older")]
    NotNewer { latest: CheckpointName },
    /// The task of the lease is not running.
    #[error("the lease is not kept any more")]
    Closed,
}

/// For whom a release is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    Anyone,
    /// Only if this waiter is still there.
    Waiter(Nonce),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaseEvent {
    /// Someone wants the sandbox. Hand it over, or answer.
    WaiterAppeared { instance: InstanceId, registration: Nonce },
    /// It has given up.
    WaiterGone,
    /// The lease could run out: freeze the sandbox now. Nothing is lost yet.
    MustFreeze,
    /// The lease is held for certain again: the sandbox may go on.
    Renewed,
    /// The last event.
    Lost(LostReason),
    /// The last event: it was released or buried, as asked for.
    Released,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Standing {
    Held,
    Frozen,
    Released,
    Lost(LostReason),
}

#[derive(Debug, Clone)]
pub(super) struct View {
    pub(super) standing: Standing,
    pub(super) waiter: Option<Waiter>,
    pub(super) latest: Option<CheckpointName>,
    pub(super) renewals: u64,
}

pub(super) struct Shared {
    id: SandboxId,
    epoch: u64,
    exact: bool,
    clock: Arc<dyn Clock>,
    /// In nanoseconds of the clock.
    freeze_at: AtomicU64,
}

impl Shared {
    pub(super) fn new(id: SandboxId, epoch: u64, exact: bool, clock: Arc<dyn Clock>, freeze_at: Moment) -> Self {
        let shared = Self { id, epoch, exact, clock, freeze_at: AtomicU64::new(0) };
        shared.set_freeze_at(freeze_at);
        shared
    }

    fn may_act(&self) -> bool {
        let freeze_at = Duration::from_nanos(self.freeze_at.load(Ordering::Acquire));
        self.clock.now() < Moment(freeze_at)
    }

    pub(super) fn set_freeze_at(&self, moment: Moment) {
        self.freeze_at.store(u64::try_from(moment.0.as_nanos()).unwrap_or(u64::MAX), Ordering::Release);
    }
}

/// A lease that is held, and what happens to it.
pub struct Held {
    pub lease: Lease,
    pub events: LeaseEvents,
}

impl Held {
    pub(super) fn new(lease: Lease, view: watch::Receiver<View>) -> Self {
        let told = view.borrow().standing.clone();
        Self { lease, events: LeaseEvents { view, told, waiter: None, open: true } }
    }
}

/// Asks things of the task that keeps the lease. When the last handle is dropped the lease is let go: nothing is written, and it runs
/// out for others in its time.
#[derive(Clone)]
pub struct Lease {
    shared: Arc<Shared>,
    commands: mpsc::Sender<Command>,
    view: watch::Receiver<View>,
}

/// A look at a lease that does not keep it.
#[derive(Clone)]
pub struct LeaseView {
    shared: Arc<Shared>,
}

impl LeaseView {
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.shared.epoch
    }

    /// See [`Lease::may_act`].
    #[must_use]
    pub fn may_act(&self) -> bool {
        self.shared.may_act()
    }
}

impl std::fmt::Debug for LeaseView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LeaseView").field("epoch", &self.epoch()).field("may_act", &self.may_act()).finish()
    }
}

impl Lease {
    pub(super) fn new(shared: Arc<Shared>, commands: mpsc::Sender<Command>, view: watch::Receiver<View>) -> Self {
        Self { shared, commands, view }
    }

    #[must_use]
    pub fn id(&self) -> SandboxId {
        self.shared.id
    }

    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.shared.epoch
    }

    /// Whether nothing ran between the latest checkpoint and the beginning of this lease: a restore goes on exactly.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.shared.exact
    }

    /// The newest checkpoint, as far as is known here.
    #[must_use]
    pub fn latest(&self) -> Option<CheckpointName> {
        self.view.borrow().latest
    }

    /// Whether the lease is held for certain at this moment. Cheap; to be asked right before anything that others can see, since a
    /// process that was stopped finds out by this before it does by an event.
    #[must_use]
    pub fn may_act(&self) -> bool {
        self.shared.may_act()
    }

    /// What others may know of the lease, without holding it.
    #[must_use]
    pub fn view(&self) -> LeaseView {
        LeaseView { shared: Arc::clone(&self.shared) }
    }

    /// Waits until it is certain that the lease is held, as it may not be after something that took long, or that it is lost.
    ///
    /// # Errors
    /// It is lost, or nobody keeps it any more.
    pub async fn certain(&self) -> Result<(), LeaseError> {
        let mut view = self.view.clone();
        loop {
            // Renewals are told too, so that none is missed between these two.
            view.mark_unchanged();
            if self.may_act() {
                return Ok(());
            }
            if matches!(view.borrow().standing, Standing::Lost(_) | Standing::Released) || view.changed().await.is_err() {
                return Err(self.ended());
            }
        }
    }

    /// Makes a checkpoint count, all of which is durable. Returns when that is settled.
    ///
    /// Cancel-safe in that nothing is half done; it may still happen.
    ///
    /// # Errors
    /// [`LeaseError`]. Only after [`LeaseError::NotNewer`] is it certain that the record will never name it.
    pub async fn publish(&self, name: CheckpointName) -> Result<(), LeaseError> {
        self.ask(vec![OwnerChange::Publish(name)], None).await
    }

    /// Makes a checkpoint count and gives the sandbox up, in one swap. The sandbox must stand still, and never go on after this succeeded.
    ///
    /// # Errors
    /// [`LeaseError`]; with [`LeaseError::WaiterGone`] neither has happened.
    pub async fn publish_and_release(&self, name: CheckpointName, to: Release) -> Result<(), LeaseError> {
        self.ask(vec![OwnerChange::Publish(name), OwnerChange::Release { untouched: false }], to.waiter()).await
    }

    /// Gives the sandbox up as it was last published.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub async fn release(&self, to: Release) -> Result<(), LeaseError> {
        self.ask(vec![OwnerChange::Release { untouched: false }], to.waiter()).await
    }

    /// Gives up a sandbox that did not run here.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub async fn release_untouched(&self) -> Result<(), LeaseError> {
        self.ask(vec![OwnerChange::Release { untouched: true }], None).await
    }

    /// Sends a waiter away.
    ///
    /// # Errors
    /// [`LeaseError`]. That the waiter is gone is none.
    pub async fn answer(&self, to: Nonce, verdict: Verdict) -> Result<(), LeaseError> {
        self.ask(vec![OwnerChange::Answer { to, verdict }], None).await
    }

    /// Leaves a tombstone.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub async fn bury(&self, reason: String) -> Result<(), LeaseError> {
        self.ask(vec![OwnerChange::Bury { reason }], None).await
    }

    async fn ask(&self, changes: Vec<OwnerChange>, only_for: Option<Nonce>) -> Result<(), LeaseError> {
        let (reply, answer) = oneshot::channel();
        if self.commands.send(Command { changes, only_for, reply: Some(reply) }).await.is_err() {
            return Err(self.ended());
        }
        answer.await.unwrap_or_else(|_| Err(self.ended()))
    }

    /// Why there is no answer.
    pub(in crate::lease) fn ended(&self) -> LeaseError {
        match &self.view.borrow().standing {
            Standing::Lost(reason) => LeaseError::Lost(reason.clone()),
            Standing::Released => LeaseError::Lost(LostReason::Released),
            Standing::Held | Standing::Frozen => LeaseError::Closed,
        }
    }
}

impl Release {
    fn waiter(self) -> Option<Nonce> {
        match self {
            Self::Anyone => None,
            Self::Waiter(registration) => Some(registration),
        }
    }
}

/// What happens to a lease. Only the newest state is told: what came and went unheard is left out.
pub struct LeaseEvents {
    view: watch::Receiver<View>,
    told: Standing,
    waiter: Option<Nonce>,
    open: bool,
}

impl LeaseEvents {
    /// The next event; none after the last. Cancel-safe.
    pub async fn next(&mut self) -> Option<LeaseEvent> {
        while self.open {
            let view = self.view.borrow_and_update().clone();
            if let Some(event) = self.difference(&view) {
                return Some(event);
            }
            self.open = self.view.changed().await.is_ok();
        }
        None
    }

    fn difference(&mut self, view: &View) -> Option<LeaseEvent> {
        if view.standing != self.told {
            self.told = view.standing.clone();
            return Some(match &view.standing {
                Standing::Held => LeaseEvent::Renewed,
                Standing::Frozen => LeaseEvent::MustFreeze,
                Standing::Released => self.last(LeaseEvent::Released),
                Standing::Lost(reason) => self.last(LeaseEvent::Lost(reason.clone())),
            });
        }
        let waiter = view.waiter.as_ref().map(|waiter| waiter.nonce);
        if waiter == self.waiter {
            return None;
        }
        self.waiter = waiter;
        Some(match &view.waiter {
            Some(waiter) => LeaseEvent::WaiterAppeared { instance: waiter.instance.clone(), registration: waiter.nonce },
            None => LeaseEvent::WaiterGone,
        })
    }

    fn last(&mut self, event: LeaseEvent) -> LeaseEvent {
        self.open = false;
        event
    }
}

/// Something to be done with the next swap.
pub(super) struct Command {
    pub(super) changes: Vec<OwnerChange>,
    pub(super) only_for: Option<Nonce>,
    reply: Option<oneshot::Sender<Result<(), LeaseError>>>,
}

impl Command {
    pub(super) fn done(mut self, outcome: Result<(), LeaseError>) {
        self.reply_with(outcome);
    }

    pub(super) fn ends(&self) -> bool {
        ends(&self.changes)
    }

    /// Whether a record that is still held shows that this was done, by an attempt whose reply was lost. If so it is answered.
    pub(super) fn settled_by(&mut self, record: &Record) -> bool {
        let done = !self.ends()
            && self.changes.iter().all(|change| match change {
                OwnerChange::Publish(name) => record.latest == Some(*name),
                OwnerChange::Answer { to, .. } => !record.waited_on_by(*to),
                OwnerChange::Release { .. } | OwnerChange::Bury { .. } => false,
            });
        if done {
            self.reply_with(Ok(()));
        }
        done
    }

    /// Whether a record that is no longer held shows that this was done: what it published is there, and the rest is as wanted.
    pub(super) fn gave_up(&self, record: &Record, epoch: u64) -> bool {
        let published = self.changes.iter().all(|change| match change {
            OwnerChange::Publish(name) => record.latest == Some(*name),
            _ => true,
        });
        let buried = self.changes.iter().any(|change| matches!(change, OwnerChange::Bury { .. }));
        self.ends() && published && (!buried || record.tombstone.is_some()) && (record.epoch > epoch || record.owner.is_none())
    }

    fn reply_with(&mut self, outcome: Result<(), LeaseError>) {
        // Whoever asked may have stopped waiting.
        if let Some(reply) = self.reply.take() {
            let _ = reply.send(outcome);
        }
    }
}

//! The task that keeps one lease, and the handle to it.
//!
//! Everything an owner wants to change goes through one task, one swap at a time, so that a lost reply can always be settled: the next
//! version that is seen either bears the nonce of the attempt, or shows by its content what became of it.

mod attempt;
mod handle;

use std::{collections::VecDeque, sync::Arc, time::Duration};

use sandboxer_protocol::SandboxId;
use tokio::sync::{
    mpsc::{self, error::TryRecvError},
    watch,
};

pub use self::handle::{Held, Lease, LeaseError, LeaseEvent, LeaseEvents, LeaseView, LostReason, Release};
use self::{
    attempt::{Attempt, Composed},
    handle::{Command, Shared, Standing, View},
};
use super::{Leases, Moment, census::Counted, tenure::Tenure};
use crate::record::{Changes, Holder, Stored, SwapError};

/// Requests that wait for the one in flight.
const MAX_COMMANDS: usize = 16;

pub(super) struct Driver {
    leases: Leases,
    id: SandboxId,
    holder: Holder,
    /// The newest version that was seen, which is held; none before the first look of one that was taken up again.
    current: Option<Stored>,
    tenure: Tenure,
    attempt: Option<Attempt>,
    /// Since when no record is seen.
    missing_since: Option<Moment>,
    pending: VecDeque<Command>,
    commands: mpsc::Receiver<Command>,
    changes: Changes,
    view: watch::Sender<View>,
    shared: Arc<Shared>,
    counted: Counted,
}

/// What a step leaves to do.
enum Flow {
    Go,
    Wait(Duration),
    Ended,
}

impl Leases {
    pub(super) fn hold(&self, id: SandboxId, stored: Stored, counted_from: Option<Moment>) -> Held {
        let holder = Holder { instance: self.me.clone(), epoch: stored.record.epoch };
        self.start(id, holder, Some(stored), counted_from)
    }

    pub(super) fn hold_again(&self, id: SandboxId, epoch: u64) -> Held {
        self.start(id, Holder { instance: self.me.clone(), epoch }, None, None)
    }

    fn start(&self, id: SandboxId, holder: Holder, current: Option<Stored>, counted_from: Option<Moment>) -> Held {
        let tenure = Tenure::counted_from(counted_from);
        let standing = if counted_from.is_some() { Standing::Held } else { Standing::Frozen };
        let latest = current.as_ref().and_then(|stored| stored.record.latest);
        let exact = current.as_ref().is_some_and(|stored| stored.record.resting);
        let (view, seen) = watch::channel(View { standing, waiter: None, latest, renewals: 0 });
        let (sender, commands) = mpsc::channel(MAX_COMMANDS);
        let shared = Arc::new(Shared::new(id, holder.epoch, exact, Arc::clone(&self.clock), tenure.freeze_at(&self.terms)));
        let held = Held::new(Lease::new(Arc::clone(&shared), sender, seen.clone()), seen);
        let changes = self.records.changes(id);
        let driver = Driver {
            leases: self.clone(),
            id,
            holder,
            current,
            tenure,
            attempt: None,
            missing_since: None,
            pending: VecDeque::new(),
            commands,
            changes,
            view,
            shared,
            counted: self.census.add(counted_from.is_none()),
        };
        (self.spawn)(Box::pin(driver.run()));
        held
    }
}

impl Driver {
    /// Until the lease is released, lost, or nobody wants it any more. In the last case nothing is written.
    async fn run(mut self) {
        if let Some(stored) = self.current.clone() {
            self.show(&stored);
        }
        let mut look_at = self.next_look();
        loop {
            self.note_time();
            if self.take_commands() {
                return;
            }
            if self.has_work() {
                match self.advance().await {
                    Flow::Go => {}
                    Flow::Wait(length) => self.idle(length).await,
                    Flow::Ended => return,
                }
                // A swap that succeeds has looked too.
                look_at = self.next_look();
                continue;
            }
            if self.now() >= look_at {
                look_at = self.next_look();
                if let Flow::Ended = self.look().await {
                    return;
                }
                continue;
            }
            let wake = self.next_wake(look_at);
            tokio::select! {
                biased;
                command = self.commands.recv() => match command {
                    Some(command) => self.pending.push_back(command),
                    None => return,
                },
                () = self.changes.next() => look_at = self.now(),
                () = self.leases.clock.sleep_until(wake) => {}
            }
        }
    }

    /// True if nobody wants the lease any more, and nobody waits for an answer.
    fn take_commands(&mut self) -> bool {
        while self.pending.len() < MAX_COMMANDS {
            match self.commands.try_recv() {
                Ok(command) => self.pending.push_back(command),
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => return self.pending.is_empty(),
            }
        }
        false
    }

    fn has_work(&self) -> bool {
        self.attempt.is_some()
            || !self.pending.is_empty()
            || self.current.is_none()
            || self.now() >= self.tenure.renew_at(&self.leases.terms)
    }

    /// Who is told of waiters wherever they are finds those that it was not told of when it renews, before this.
    fn next_look(&self) -> Moment {
        let terms = &self.leases.terms;
        self.now() + if self.changes.are_from_afar() { terms.renewal * 2 } else { terms.owner_poll }
    }

    fn next_wake(&self, look_at: Moment) -> Moment {
        let renew_at = self.tenure.renew_at(&self.leases.terms);
        renew_at.min(look_at).min(self.freeze_at().unwrap_or(renew_at))
    }

    /// One swap, or what is needed before it.
    async fn advance(&mut self) -> Flow {
        let attempt = match self.attempt.take() {
            Some(attempt) => attempt,
            None => {
                let Some(base) = self.current.clone() else { return self.look().await };
                match self.compose(base) {
                    Composed::Attempt(attempt) => *attempt,
                    Composed::Nothing => return Flow::Go,
                    Composed::Lost(stored) => return self.not_held(&stored),
                }
            }
        };
        let (records, id, base, next) = (Arc::clone(&self.leases.records), self.id, attempt.base.clone(), attempt.next.clone());
        let swapped = self.request(async move { records.swap(id, &base, &next).await }).await;
        match swapped {
            Some(Ok(stored)) => self.succeeded(&attempt, stored),
            Some(Err(SwapError::Conflict(Some(there)))) if there.is(&attempt.base) => {
                // Nobody has changed it: what refused was something else, or knows this version by another name.
                self.missing_since = None;
                self.attempt = Some(Attempt { base: *there, ..attempt });
                Flow::Wait(self.leases.terms.retry)
            }
            Some(Err(SwapError::Conflict(Some(there)))) => self.settle(attempt, *there),
            Some(Err(SwapError::Conflict(None))) => self.missing(Some(attempt)),
            Some(Err(SwapError::Unavailable(_) | SwapError::Bad(_))) => Flow::Wait(self.leases.terms.retry),
            Some(Err(SwapError::Unknown(_))) | None => self.ask_about(attempt).await,
        }
    }

    /// The reply was lost: what is there now tells.
    async fn ask_about(&mut self, attempt: Attempt) -> Flow {
        let (records, id) = (Arc::clone(&self.leases.records), self.id);
        match self.request(async move { records.read(id).await }).await {
            Some(Ok(Some(there))) if there.is(&attempt.base) => {
                self.missing_since = None;
                // It may still come. Repeated as it is, it can take effect only once.
                self.attempt = Some(attempt);
                Flow::Wait(self.leases.terms.retry)
            }
            Some(Ok(Some(there))) if there.record.sequence < attempt.base.record.sequence => {
                self.attempt = Some(attempt);
                Flow::Wait(self.leases.terms.retry)
            }
            Some(Ok(Some(there))) => self.settle(attempt, there),
            Some(Ok(None)) => self.missing(Some(attempt)),
            Some(Err(_)) | None => {
                self.attempt = Some(attempt);
                Flow::Wait(self.leases.terms.retry)
            }
        }
    }

    /// Nobody removes the record of a sandbox that somebody holds. Whoever sees none may be shown something else than the volume, so that this is believed
    /// only of what stays so for as long as a lease lasts. Meanwhile its holder stops in time, like every other that could not renew.
    fn missing(&mut self, attempt: Option<Attempt>) -> Flow {
        let now = self.now();
        let since = *self.missing_since.get_or_insert(now);
        if now >= since + self.leases.terms.lease {
            return self.lost(LostReason::Removed);
        }
        self.attempt = attempt;
        Flow::Wait(self.leases.terms.retry)
    }

    fn settle(&mut self, attempt: Attempt, there: Stored) -> Flow {
        if there.record.nonce == attempt.next.nonce {
            return self.succeeded(&attempt, there);
        }
        self.adopt(there)
    }

    fn succeeded(&mut self, attempt: &Attempt, stored: Stored) -> Flow {
        let asked = if self.leases.faults.counts_from_reply() { self.now() } else { attempt.asked };
        self.tenure.renewed(asked);
        let held = stored.record.held_by(&self.holder);
        // Before anybody hears that it was given up, nobody may act any more.
        self.shared.set_freeze_at(if held { self.tenure.freeze_at(&self.leases.terms) } else { Moment::START });
        for command in self.pending.drain(..attempt.commands) {
            command.done(Ok(()));
        }
        if !held {
            return self.released();
        }
        self.missing_since = None;
        self.current = Some(stored.clone());
        self.show(&stored);
        self.note_time();
        self.view.send_modify(|view| view.renewals += 1);
        Flow::Go
    }

    /// Looks at what is there, for a waiter or another owner.
    async fn look(&mut self) -> Flow {
        let (records, id) = (Arc::clone(&self.leases.records), self.id);
        match self.request(async move { records.read(id).await }).await {
            Some(Ok(Some(there))) => {
                let known = self.current.as_ref().map_or(0, |current| current.record.sequence);
                if there.record.sequence < known { Flow::Go } else { self.adopt(there) }
            }
            Some(Ok(None)) => self.missing(None),
            Some(Err(_)) | None => Flow::Wait(self.leases.terms.retry),
        }
    }

    /// A version that someone else, or an attempt of ours that was given up, has written.
    fn adopt(&mut self, there: Stored) -> Flow {
        let blind = self.leases.faults.releases_blindly() && self.is_releasing();
        if !blind && !there.record.held_by(&self.holder) {
            return self.not_held(&there);
        }
        self.pending.retain_mut(|command| !command.settled_by(&there.record));
        self.missing_since = None;
        self.show(&there);
        self.current = Some(there);
        Flow::Go
    }

    /// The record is not ours any more: as we wanted, or because of someone else.
    fn not_held(&mut self, there: &Stored) -> Flow {
        let wanted = self.pending.front().is_some_and(|command| command.gave_up(&there.record, self.holder.epoch));
        self.shared.set_freeze_at(Moment::START);
        if wanted {
            if let Some(command) = self.pending.pop_front() {
                command.done(Ok(()));
            }
            return self.released();
        }
        let reason = match &there.record.tombstone {
            Some(tombstone) => LostReason::Buried(tombstone.reason.clone()),
            None => LostReason::TakenOver { by: there.record.owner.clone() },
        };
        self.lost(reason)
    }

    fn released(&mut self) -> Flow {
        self.end(Standing::Released, &LostReason::Released)
    }

    fn lost(&mut self, reason: LostReason) -> Flow {
        self.end(Standing::Lost(reason.clone()), &reason)
    }

    fn end(&mut self, standing: Standing, reason: &LostReason) -> Flow {
        self.shared.set_freeze_at(Moment::START);
        self.commands.close();
        while let Ok(command) = self.commands.try_recv() {
            self.pending.push_back(command);
        }
        for command in self.pending.drain(..) {
            command.done(Err(LeaseError::Lost(reason.clone())));
        }
        self.view.send_modify(|view| view.standing = standing);
        Flow::Ended
    }

    fn show(&self, stored: &Stored) {
        self.view.send_if_modified(|view| {
            let changed = view.waiter.as_ref().map(|waiter| waiter.nonce) != stored.record.waiter.as_ref().map(|waiter| waiter.nonce)
                || view.latest != stored.record.latest;
            view.waiter.clone_from(&stored.record.waiter);
            view.latest = stored.record.latest;
            changed
        });
    }

    /// Freezes when it is time, and thaws when it no longer is.
    fn note_time(&mut self) {
        let may_act = self.now() < self.tenure.freeze_at(&self.leases.terms);
        self.counted.set(!may_act);
        self.view.send_if_modified(|view| {
            let standing = if may_act { Standing::Held } else { Standing::Frozen };
            let changed = view.standing != standing;
            view.standing = standing;
            changed
        });
    }

    /// Awaits a request for as long as one may take, and freezes meanwhile if it is time.
    async fn request<T>(&mut self, request: impl Future<Output = T> + Send) -> Option<T> {
        let deadline = self.now() + self.leases.terms.request;
        tokio::pin!(request);
        loop {
            let wake = self.freeze_at().map_or(deadline, |at| at.min(deadline));
            tokio::select! {
                biased;
                outcome = &mut request => return Some(outcome),
                () = self.leases.clock.sleep_until(wake) => {}
            }
            self.note_time();
            if self.now() >= deadline {
                return None;
            }
        }
    }

    async fn idle(&mut self, length: Duration) {
        let until = self.now() + length;
        while self.now() < until {
            let wake = self.freeze_at().map_or(until, |at| at.min(until));
            self.leases.clock.sleep_until(wake).await;
            self.note_time();
        }
    }

    /// When the sandbox is to be frozen, unless it is already.
    fn freeze_at(&self) -> Option<Moment> {
        (self.view.borrow().standing == Standing::Held).then(|| self.tenure.freeze_at(&self.leases.terms))
    }

    fn now(&self) -> Moment {
        self.leases.clock.now()
    }
}

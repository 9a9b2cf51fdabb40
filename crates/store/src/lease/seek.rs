//! Getting hold of a sandbox that is not here: at once if nobody has it, from its owner, or after its owner was silent for too long.

mod decide;

use sandboxer_protocol::SandboxId;
use tokio_util::sync::CancellationToken;

use self::decide::{Decision, Position};
use super::{Held, Leases, Moment, watch::Watch};
use crate::layout::CheckpointName;
use crate::record::{Holder, InstanceId, Nonce, OwnerChange, ReadError, Record, Stored, SwapError, Tombstone};

/// What became of the search.
pub enum Sought {
    /// It is held here now. Restore what the lease names as its latest.
    Held(Held),
    /// There is no such sandbox.
    NotFound,
    /// Nothing of it was ever saved. `owner`: the instance that has it, which gives no sign of life; the sandbox may live there. None:
    /// no instance has it, and it is lost.
    NeverSaved { owner: Option<InstanceId> },
    /// It was ended.
    Gone(Tombstone),
    /// Its owner has a client that keeps it.
    InUse,
    /// Someone else is getting it.
    HandoffInProgress,
    /// Its owner could not save it, and keeps it.
    CannotSave(String),
    /// Its owner lives and did neither hand over nor answer in time.
    Unanswered,
    /// Whoever wanted it does no more.
    GivenUp,
    /// The records could not be read or written in time.
    Unavailable(String),
}

/// Hears what will probably be restored.
pub(super) type Expect<'a> = &'a (dyn Fn(CheckpointName) + Sync);

impl Leases {
    /// Gets hold of a sandbox, however long that takes within [`super::Terms::patience`]. At most one search for an id at a time, and
    /// none for what this process holds.
    ///
    /// When `give_up` is cancelled, what was registered is withdrawn.
    pub async fn seek(&self, id: SandboxId, give_up: &CancellationToken) -> Sought {
        self.search(id, give_up, false, &|_| {}).await
    }

    /// The same; `expect` hears once of each checkpoint that will probably have to be restored, since its owner seems to be dead, while that is not
    /// certain yet. It must not wait for anything.
    pub(super) async fn seek_expecting(&self, id: SandboxId, give_up: &CancellationToken, expect: Expect<'_>) -> Sought {
        self.search(id, give_up, false, expect).await
    }

    /// Gets hold of a sandbox in order to end it ([`super::Lease::bury`]), also of one that was never saved.
    pub async fn seize(&self, id: SandboxId, give_up: &CancellationToken) -> Sought {
        self.search(id, give_up, true, &|_| {}).await
    }

    async fn search(&self, id: SandboxId, give_up: &CancellationToken, unsaved: bool, expect: Expect<'_>) -> Sought {
        let mut search = Search {
            leases: self,
            id,
            watch: Watch::default(),
            position: Position::new(self.me.clone(), self.clock.nonce(), unsaved),
            last: None,
            acquiring: None,
            expect,
            expected: None,
        };
        let found = tokio::select! {
            biased;
            () = give_up.cancelled() => Sought::GivenUp,
            found = search.run() => found,
        };
        if !matches!(found, Sought::Held(_)) {
            search.tidy().await;
        }
        found
    }
}

struct Search<'a> {
    leases: &'a Leases,
    id: SandboxId,
    watch: Watch,
    position: Position,
    /// The newest version that was seen.
    last: Option<Stored>,
    /// The nonce of an acquisition that may have been written, and when it was first asked for.
    acquiring: Option<(Nonce, Moment)>,
    expect: Expect<'a>,
    /// What it was last told.
    expected: Option<CheckpointName>,
}

impl Search<'_> {
    async fn run(&mut self) -> Sought {
        let terms = &self.leases.terms;
        let give_up_at = self.now() + terms.patience;
        let mut changes = self.leases.records.changes(self.id);
        let mut trouble = None;
        loop {
            if self.now() >= give_up_at {
                return trouble.map_or(Sought::Unanswered, Sought::Unavailable);
            }
            let there = match self.leases.within(self.leases.records.read(self.id)).await {
                Some(Ok(Some(there))) => there,
                Some(Ok(None)) => return Sought::NotFound,
                Some(Err(ReadError::Bad(bad))) => return Sought::Unavailable(bad.to_string()),
                failed => {
                    trouble = Some(failed.map_or_else(
                        || "no reply in time".to_owned(),
                        |read| read.err().map_or_else(String::new, |error| error.to_string()),
                    ));
                    self.leases.pause(terms.retry).await;
                    continue;
                }
            };
            trouble = None;
            if self.last.as_ref().is_some_and(|last| there.record.sequence < last.record.sequence) {
                self.leases.pause(terms.waiter_poll).await;
                continue;
            }
            match self.consider(there).await {
                Ok(Some(found)) => return found,
                Ok(None) => {}
                Err(failed) => {
                    trouble = Some(failed);
                    self.leases.pause(terms.retry).await;
                    continue;
                }
            }
            if !changes.are_told() {
                changes = self.leases.records.changes(self.id);
            }
            tokio::select! {
                biased;
                () = changes.next() => {}
                () = self.leases.pause(terms.waiter_poll) => {}
            }
        }
    }

    /// One look at the record, and the one swap that follows from it.
    async fn consider(&mut self, there: Stored) -> Result<Option<Sought>, String> {
        let now = self.now();
        self.watch.saw(&there.record, now);
        self.last = Some(there.clone());
        if let Some((nonce, asked)) = self.acquiring
            && there.record.nonce == nonce
        {
            return Ok(Some(self.acquired(there, asked)));
        }
        let unix = self.leases.clock.unix_time().as_secs();
        match self.position.decide(&there.record, &self.watch, now, unix, &self.leases.terms, self.leases.faults) {
            Decision::Found(found) => Ok(Some(found)),
            Decision::Wait => {
                self.look_ahead(&there.record, now);
                Ok(None)
            }
            Decision::Register => {
                let next = there.record.awaited(&self.leases.me, self.position.registration, self.leases.stamp());
                let swapped = self.swap(&there, &next).await?;
                if let Some(stored) = swapped {
                    self.position.registered(self.now());
                    self.watch.saw(&stored.record, self.now());
                    self.last = Some(stored);
                }
                Ok(None)
            }
            Decision::Acquire => {
                let asked = now;
                let next = there.record.acquired(self.leases.me.clone(), self.leases.stamp());
                self.acquiring = Some((next.nonce, asked));
                let swapped = self.swap(&there, &next).await?;
                Ok(swapped.map(|stored| self.acquired(stored, asked)))
            }
        }
    }

    /// Whoever is to restore it may begin before its owner's lease has run out.
    fn look_ahead(&mut self, record: &Record, now: Moment) {
        if let Some(latest) = record.latest
            && self.expected != Some(latest)
            && self.watch.owner_seems_gone(now, &self.leases.terms)
        {
            self.expected = Some(latest);
            (self.expect)(latest);
        }
    }

    /// None if someone else was first.
    async fn swap(&mut self, expected: &Stored, next: &Record) -> Result<Option<Stored>, String> {
        match self.leases.within(self.leases.records.swap(self.id, expected, next)).await {
            Some(Ok(stored)) => Ok(Some(stored)),
            Some(Err(SwapError::Conflict(Some(there)))) if there.record.nonce == next.nonce => Ok(Some(*there)),
            Some(Err(SwapError::Conflict(_))) => Ok(None),
            Some(Err(error)) => Err(error.to_string()),
            None => Err("no reply in time".to_owned()),
        }
    }

    fn acquired(&self, stored: Stored, asked: Moment) -> Sought {
        Sought::Held(self.leases.hold(self.id, stored, Some(asked)))
    }

    /// Takes back what may have been written for someone who does not want it any more. What can't be taken back now runs out.
    async fn tidy(&self) {
        if self.acquiring.is_none() && !self.position.has_asked() {
            return;
        }
        for _ in 0..3 {
            let Some(Ok(Some(there))) = self.leases.within(self.leases.records.read(self.id)).await else { return };
            let holder = Holder { instance: self.leases.me.clone(), epoch: there.record.epoch };
            let ours = self.acquiring.is_some_and(|(nonce, _)| there.record.nonce == nonce);
            let next = if ours {
                there.record.by_owner(&holder, &[OwnerChange::Release { untouched: true }], self.leases.stamp()).ok()
            } else {
                there.record.withdrawn(self.position.registration, self.leases.stamp())
            };
            let Some(next) = next else { return };
            if let Some(Ok(_)) = self.leases.within(self.leases.records.swap(self.id, &there, &next)).await {
                return;
            }
        }
    }

    fn now(&self) -> Moment {
        self.leases.clock.now()
    }
}

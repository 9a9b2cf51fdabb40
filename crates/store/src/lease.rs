//! Holding a sandbox: who may run it now, and how it changes hands.
//!
//! ```text
//!            create, seek (nobody has it, or its owner's lease ran out)
//!  (others) ─────────────────────────────► Held ◄── a renewal succeeds ──► Frozen
//!      ▲                                    │  the lease could run out soon  │
//!      │ release, bury                      │                                │ the record shows another owner, or none
//!      └────────────────────────────────────┴───────────► Lost ◄─────────────┘
//! ```
//!
//! Two clocks are never compared. An owner counts its lease from before the request of its last renewal; others count from when they
//! have seen that renewal. So the owner's count runs out first, by at least [`Terms::margin`], as long as clocks run at nearly the same
//! speed. What decides is the swap of the record in any case: a late owner can't publish, renew or release, it can only have been
//! frozen too late.
//!
//! [`tenure`] and [`watch`] are the pure parts; [`driver`] and [`seek`] carry them out, over a [`RecordStore`] and a [`Clock`], on any
//! executor; [`handoff`] is what an owner does about a waiter. The simulator runs all of it as it is.

mod census;
mod clock;
mod driver;
mod faults;
pub mod handoff;
mod seek;
mod tenure;
mod watch;

use std::{collections::BTreeMap, future::Future, pin::Pin, sync::Arc, time::Duration};

use sandboxer_protocol::SandboxId;
use serde_json::Value;

pub(crate) use self::census::Census;
#[cfg(feature = "planted-faults")]
pub use self::faults::Fault;
pub use self::{
    clock::{BootClock, Clock, Moment},
    driver::{Held, Lease, LeaseError, LeaseEvent, LeaseEvents, LeaseView, LostReason, Release},
    faults::Faults,
    seek::Sought,
};
use crate::record::{InstanceId, ReadError, Record, RecordStore, Stamp, Stored, SwapError};

/// Between requests that failed for somebody who waits, at most.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
const NO_REPLY: &str = "no reply in time";

/// How long everything takes. All by one's own clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Terms {
    /// An owner that has not been seen to live for this long has lost its sandbox to whoever wants it.
    pub lease: Duration,
    /// How often an owner shows that it lives.
    pub renewal: Duration,
    /// An owner freezes its sandbox this long before its lease is over: for clocks of different speed, and for the freezing itself.
    pub margin: Duration,
    /// How often an owner looks for a waiter, hints or not.
    pub owner_poll: Duration,
    /// How often a waiter looks.
    pub waiter_poll: Duration,
    /// How often a waiter shows that it lives.
    pub waiter_renewal: Duration,
    /// A waiter that has not been seen to live for this long is not there.
    pub waiter_lease: Duration,
    /// One request that takes longer is given up, and settled by reading.
    pub request: Duration,
    /// Between a request that failed and the next.
    pub retry: Duration,
    /// Whoever waits for a sandbox gives up after this: its owner lives and does not hand over, or the records do not answer.
    pub patience: Duration,
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(15),
            renewal: Duration::from_secs(5),
            margin: Duration::from_secs(3),
            owner_poll: Duration::from_secs(1),
            waiter_poll: Duration::from_millis(250),
            waiter_renewal: Duration::from_secs(2),
            waiter_lease: Duration::from_secs(8),
            request: Duration::from_secs(4),
            retry: Duration::from_millis(250),
            patience: Duration::from_secs(120),
        }
    }
}

impl Terms {
    /// The default ones, made shorter or longer so that the lease takes this long. All instances of a volume need the same.
    #[must_use]
    pub fn of_lease(lease: Duration) -> Self {
        let usual = Self::default();
        let scaled = |length: Duration| length.mul_f64(lease.as_secs_f64() / usual.lease.as_secs_f64());
        Self {
            lease,
            renewal: scaled(usual.renewal),
            margin: scaled(usual.margin),
            owner_poll: scaled(usual.owner_poll).min(usual.owner_poll),
            waiter_renewal: scaled(usual.waiter_renewal),
            waiter_lease: scaled(usual.waiter_lease),
            request: scaled(usual.request).min(usual.request),
            ..usual
        }
    }
}

/// A future that a [`Spawn`] runs.
pub type Task = Pin<Box<dyn Future<Output = ()> + Send>>;
/// Runs a task of a lease; whoever provides it owns the task.
pub type Spawn = Arc<dyn Fn(Task) + Send + Sync>;

/// Everything that one instance needs to hold sandboxes.
#[derive(Clone)]
pub struct Leases {
    pub(crate) records: Arc<dyn RecordStore>,
    /// The same records for reads that no lease depends on.
    looks: Arc<dyn RecordStore>,
    pub(crate) census: Census,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) me: InstanceId,
    pub(crate) terms: Terms,
    pub(crate) spawn: Spawn,
    pub(crate) faults: Faults,
}

impl Leases {
    /// `spawn` runs the task of each lease that is held; the tasks end when the lease is released, lost, or let go.
    #[must_use]
    pub fn new(records: Arc<dyn RecordStore>, clock: Arc<dyn Clock>, me: InstanceId, terms: Terms, spawn: Spawn) -> Self {
        let looks = Arc::clone(&records);
        Self { records, looks, census: Census::default(), clock, me, terms, spawn, faults: Faults::default() }
    }

    /// Reads that no lease depends on go to `looks`, which are the same records by other means: their
    /// number does not delay a renewal.
    #[must_use]
    pub fn with_looks(mut self, looks: Arc<dyn RecordStore>) -> Self {
        self.looks = looks;
        self
    }

    /// Checks that records can be read by the means that leases depend on.
    ///
    /// # Errors
    /// The records can't be read.
    pub async fn answers(&self) -> Result<(), ReadError> {
        // No sandbox has this id, which is all that is needed.
        self.records.read(SandboxId::random()).await.map(drop)
    }

    /// How many leases this instance has, and how many of them are frozen: those could not be renewed
    /// in time.
    #[must_use]
    pub fn census(&self) -> (usize, usize) {
        self.census.count()
    }

    /// With faults that a test has planted; none without the feature `planted-faults`.
    #[must_use]
    pub fn with_faults(mut self, faults: Faults) -> Self {
        self.faults = faults;
        self
    }

    #[must_use]
    pub fn instance(&self) -> &InstanceId {
        &self.me
    }

    /// The records, for reads and for collection.
    #[must_use]
    #[expect(clippy::misnamed_getters, reason = "both are the records; these are those that no lease depends on")]
    pub fn records(&self) -> &Arc<dyn RecordStore> {
        &self.looks
    }

    /// Holds a sandbox that is being created. What gets no answer is asked again as it is, within [`Terms::patience`]: it can take effect only once.
    ///
    /// # Errors
    /// The record is not there for certain. One whose reply was lost may be: it names an id that nobody was told.
    pub async fn create(&self, id: SandboxId, attributes: BTreeMap<String, Value>) -> Result<Held, SwapError> {
        let first = Record::first(self.me.clone(), self.stamp(), attributes);
        // Since when it may have been there: a request whose reply was lost may have been the one.
        let begun = self.clock.now();
        let mut waiting = self.waiting();
        loop {
            let asked = self.clock.now();
            let why = match self.within(self.records.create(id, &first)).await {
                Some(Ok(stored)) => return Ok(self.hold(id, stored, Some(asked))),
                Some(Err(SwapError::Conflict(Some(there)))) if there.record.nonce == first.nonce => {
                    return Ok(self.hold(id, *there, Some(begun)));
                }
                Some(Err(SwapError::Conflict(None))) => "it is not there, and could not be written".to_owned(),
                Some(Err(SwapError::Unknown(why))) => why,
                Some(Err(error)) => return Err(error),
                None => NO_REPLY.to_owned(),
            };
            if !waiting.goes_on(self).await {
                return Err(SwapError::Unknown(why));
            }
        }
    }

    /// What the record of a sandbox says, for somebody who waits for it: what can't be read is read again, within [`Terms::patience`].
    ///
    /// # Errors
    /// It could not be read in all that time, or is no record.
    pub async fn look(&self, id: SandboxId) -> Result<Option<Stored>, ReadError> {
        let mut waiting = self.waiting();
        loop {
            let why = match self.within(self.looks.read(id)).await {
                Some(Err(ReadError::Unavailable(why))) => why,
                Some(read) => return read,
                None => NO_REPLY.to_owned(),
            };
            if !waiting.goes_on(self).await {
                return Err(ReadError::Unavailable(why));
            }
        }
    }

    fn waiting(&self) -> Waiting {
        Waiting { until: self.clock.now() + self.terms.patience, pause: self.terms.retry }
    }

    /// Takes up a sandbox that an earlier process of this instance held in `epoch` and left running, frozen or not.
    ///
    /// It counts as not renewed: the first event says whether it may go on ([`LeaseEvent::Renewed`]) or is lost.
    #[must_use]
    pub fn resume(&self, id: SandboxId, epoch: u64) -> Held {
        self.hold_again(id, epoch)
    }

    pub(crate) fn stamp(&self) -> Stamp {
        Stamp { unix: self.clock.unix_time().as_secs(), nonce: self.clock.nonce() }
    }

    /// The outcome of a request, or none if there was no reply in time.
    pub(crate) async fn within<T>(&self, request: impl Future<Output = T>) -> Option<T> {
        self.for_at_most(self.terms.request, request).await
    }

    /// The outcome of something for which a client waits, or none if it takes longer than one has to wait.
    pub(crate) async fn patiently<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        self.for_at_most(self.terms.patience, work).await
    }

    async fn for_at_most<T>(&self, length: Duration, work: impl Future<Output = T>) -> Option<T> {
        let deadline = self.clock.now() + length;
        tokio::select! {
            biased;
            outcome = work => Some(outcome),
            () = self.clock.sleep_until(deadline) => None,
        }
    }

    pub(crate) async fn pause(&self, length: Duration) {
        self.clock.sleep_until(self.clock.now() + length).await;
    }
}

/// Somebody waits, and is told no sooner than has to be that it is in vain.
struct Waiting {
    until: Moment,
    pause: Duration,
}

impl Waiting {
    /// Pauses before the next attempt. False: it took too long.
    async fn goes_on(&mut self, leases: &Leases) -> bool {
        if leases.clock.now() + self.pause >= self.until {
            return false;
        }
        leases.pause(self.pause).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        true
    }
}

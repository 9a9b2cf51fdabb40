//! The task of one sandbox that is held: it hears its lease and its server, and does one thing at a time.

use std::{collections::VecDeque, future::Future, pin::Pin, sync::Arc};

use tokio::sync::{mpsc, oneshot};

use super::{
    Ending, Host, SaveError,
    save::{Purpose, Saver},
};
use crate::{
    layout::CheckpointName,
    lease::{Held, Lease, LeaseError, LeaseEvent, LeaseEvents, Leases, LostReason, Release},
    record::{InstanceId, Nonce},
};

/// Saves that wait for the one under way.
const MAX_REQUESTS: usize = 8;

enum Request {
    Save { purpose: Purpose, reply: oneshot::Sender<Result<CheckpointName, SaveError>> },
    Kill { reason: String, reply: oneshot::Sender<Result<(), LeaseError>> },
}

/// Asks things of the task that keeps a sandbox. When the last one is dropped the task ends, and neither the sandbox nor the record is
/// touched.
#[derive(Clone)]
pub struct Keeper {
    lease: Lease,
    requests: mpsc::Sender<Request>,
}

impl Keeper {
    /// For [`Lease::may_act`] and what the record says. Nothing is to be written by it.
    #[must_use]
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Saves the sandbox, which goes on.
    ///
    /// # Errors
    /// [`SaveError`].
    pub async fn save(&self) -> Result<CheckpointName, SaveError> {
        self.ask_to_save(Purpose::Keep).await
    }

    /// Saves the sandbox and gives it up. It is ended here when this counts.
    ///
    /// # Errors
    /// [`SaveError`]: the sandbox goes on.
    pub async fn checkpoint(&self) -> Result<CheckpointName, SaveError> {
        self.ask_to_save(Purpose::GiveUp(Release::Anyone)).await
    }

    /// Ends the sandbox for good.
    ///
    /// # Errors
    /// The sandbox is ended, and the record could not be told so.
    pub async fn kill(&self, reason: String) -> Result<(), LeaseError> {
        let (reply, answer) = oneshot::channel();
        self.requests.send(Request::Kill { reason, reply }).await.map_err(|_| self.lease.ended())?;
        answer.await.unwrap_or_else(|_| Err(self.lease.ended()))
    }

    async fn ask_to_save(&self, purpose: Purpose) -> Result<CheckpointName, SaveError> {
        let (reply, answer) = oneshot::channel();
        self.requests.send(Request::Save { purpose, reply }).await.map_err(|_| self.lease.ended())?;
        answer.await.unwrap_or_else(|_| Err(self.lease.ended().into()))
    }
}

/// What is being done.
type Job = Pin<Box<dyn Future<Output = Done> + Send>>;

enum Done {
    /// The sandbox goes on.
    GoesOn,
    GaveUp(Ending),
}

struct Task<H: Host> {
    saver: Arc<Saver<H>>,
    events: LeaseEvents,
    requests: mpsc::Receiver<Request>,
    waiting: VecDeque<(Purpose, oneshot::Sender<Result<CheckpointName, SaveError>>)>,
    waiter: Option<(InstanceId, Nonce)>,
    job: Option<Job>,
}

pub(super) fn start<H: Host>(leases: &Leases, held: Held, host: Arc<H>) -> Keeper {
    let (sender, requests) = mpsc::channel(MAX_REQUESTS);
    let saver = Arc::new(Saver::new(leases.clone(), held.lease.clone(), host));
    let task = Task { saver, events: held.events, requests, waiting: VecDeque::new(), waiter: None, job: None };
    (leases.spawn)(Box::pin(task.run()));
    Keeper { lease: held.lease, requests: sender }
}

impl<H: Host> Task<H> {
    async fn run(mut self) {
        loop {
            if self.job.is_none() {
                self.job = self.next_job();
            }
            let ending = tokio::select! {
                biased;
                event = self.events.next() => match event {
                    Some(event) => self.heard(event).await,
                    // Nobody keeps the lease any more: the server is going away, and the sandbox stays as it is.
                    None => return,
                },
                request = self.requests.recv() => match request {
                    Some(Request::Save { purpose, reply }) => {
                        self.enqueue(purpose, reply);
                        None
                    }
                    Some(Request::Kill { reason, reply }) => return self.kill(reason, reply).await,
                    None => return,
                },
                done = under_way(&mut self.job) => {
                    self.job = None;
                    match done {
                        Done::GoesOn => None,
                        Done::GaveUp(ending) => Some(ending),
                    }
                }
            };
            if let Some(ending) = ending {
                self.saver.host.stop(ending).await;
                return;
            }
        }
    }

    async fn heard(&mut self, event: LeaseEvent) -> Option<Ending> {
        match event {
            LeaseEvent::WaiterAppeared { instance, registration } => self.waiter = Some((instance, registration)),
            LeaseEvent::WaiterGone => self.waiter = None,
            LeaseEvent::MustFreeze => self.saver.host.freeze().await,
            LeaseEvent::Renewed => self.saver.thaw_unless_saving().await,
            LeaseEvent::Lost(reason) => return Some(Ending::Lost(reason)),
            LeaseEvent::Released => {
                // By the job under way, which tells as what.
                let done = match self.job.take() {
                    Some(job) => job.await.ending(),
                    None => None,
                };
                return Some(done.unwrap_or(Ending::Lost(LostReason::Released)));
            }
        }
        None
    }

    fn enqueue(&mut self, purpose: Purpose, reply: oneshot::Sender<Result<CheckpointName, SaveError>>) {
        if self.waiting.len() < MAX_REQUESTS {
            self.waiting.push_back((purpose, reply));
        } else {
            let _ = reply.send(Err(SaveError::Failed("too many saves are waiting".to_owned())));
        }
    }

    fn next_job(&mut self) -> Option<Job> {
        let saver = Arc::clone(&self.saver);
        if let Some((instance, registration)) = self.waiter.take() {
            return Some(Box::pin(async move {
                if saver.hand_over(instance, registration).await { Done::GaveUp(Ending::HandedOver) } else { Done::GoesOn }
            }));
        }
        let (purpose, reply) = self.waiting.pop_front()?;
        Some(Box::pin(async move {
            let saved = saver.save(purpose).await;
            let done = if saved.is_ok() && purpose != Purpose::Keep { Done::GaveUp(Ending::Checkpointed) } else { Done::GoesOn };
            let _ = reply.send(saved);
            done
        }))
    }

    async fn kill(mut self, reason: String, reply: oneshot::Sender<Result<(), LeaseError>>) {
        self.job = None;
        self.saver.host.stop(Ending::Killed).await;
        let _ = reply.send(self.saver.lease.bury(reason).await);
    }
}

impl Done {
    fn ending(self) -> Option<Ending> {
        match self {
            Self::GoesOn => None,
            Self::GaveUp(ending) => Some(ending),
        }
    }
}

async fn under_way(job: &mut Option<Job>) -> Done {
    match job {
        Some(job) => job.await,
        None => std::future::pending().await,
    }
}

//! What the resource API asks of a sandbox, whether or not a client is attached: a snapshot, a checkpoint, going back, the end of what runs in it.
//!
//! One after the other, and none while the sandbox is being saved for another reason: who asks waits for that.

use std::{collections::VecDeque, sync::Arc};

use sandboxer_protocol::{
    ExecutionId,
    agent::{ExitCause, ToAgent},
    client::{ErrorCode, SnapshotTarget},
};
use sandboxer_store::{Manifest, SnapshotId};
use tokio::sync::oneshot;

use super::{
    Execution,
    driver::Driver,
    saving::{NO_CHECKPOINT_PATH, Why},
};

/// More that wait are refused.
const MAX_WAITING: usize = 8;

#[derive(Debug)]
pub(crate) enum Ask {
    Snapshot {
        id: SnapshotId,
        name: Option<String>,
    },
    /// It is saved and no longer runs here.
    Checkpoint {
        include_execution: bool,
    },
    RollBack(SnapshotTarget),
    SnapshotFilesystem {
        name: String,
        replace: bool,
    },
    /// Ends the running execution with all that it started, or only sends it a signal. Begun at once.
    Kill {
        signal: Option<i32>,
    },
}

/// What was done.
#[derive(Debug)]
pub(crate) enum Told {
    Snapshot(Box<Manifest>),
    /// Its record says which.
    Checkpointed,
    RolledBack,
    Filesystem(Box<Manifest>),
    /// This execution has ended, or was sent the signal.
    Killed(Arc<ExecutionId>),
}

/// Why not. The sandbox goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refused {
    /// A client is attached, and keeps it.
    InUse,
    Because(ErrorCode, String),
}

pub(crate) type Reply = oneshot::Sender<Result<Told, Refused>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    Snapshot,
    Checkpoint,
    RollBack,
    SnapshotFilesystem,
}

#[derive(Default)]
pub(super) struct Asks {
    waiting: VecDeque<(Ask, Reply)>,
    /// What an attached client would keep from being done, while that is asked for a sign of life.
    knocking: Option<(Ask, Reply)>,
    under_way: Option<(What, Reply)>,
    /// Who waits for the end of an execution, by its number.
    killing: Vec<(u64, Reply)>,
}

impl Asks {
    /// Who asked for what has just come to its end.
    pub(super) fn take(&mut self, what: What) -> Option<Reply> {
        self.under_way.take_if(|(under_way, _)| *under_way == what).map(|(_, reply)| reply)
    }

    /// The attached client lives.
    pub(super) fn turn_away(&mut self) {
        if let Some((_, reply)) = self.knocking.take() {
            let _ = reply.send(Err(Refused::InUse));
        }
    }

    /// This execution has ended.
    pub(super) fn ended(&mut self, number: u64, id: &Arc<ExecutionId>) {
        for (_, reply) in self.killing.extract_if(.., |(killed, _)| *killed == number) {
            let _ = reply.send(Ok(Told::Killed(Arc::clone(id))));
        }
    }

    /// Nobody is attached any longer.
    pub(super) fn let_in(&mut self) {
        self.waiting.extend(self.knocking.take());
    }
}

impl Driver {
    pub(super) fn on_ask(&mut self, ask: Ask, reply: Reply) {
        if let Ask::Kill { signal } = ask {
            self.kill_from_outside(signal, reply);
            return;
        }
        if self.asks.waiting.len() >= MAX_WAITING {
            let message = "Too many requests wait for this sandbox. Try again later.";
            // Nobody waits for an answer any longer if this fails.
            let _ = reply.send(Err(Refused::Because(ErrorCode::RateLimited, message.to_owned())));
            return;
        }
        self.asks.waiting.push_back((ask, reply));
    }

    /// Begins what was asked for, if this is the moment.
    pub(super) fn take_ask(&mut self) {
        let busy = self.saves.saving.is_some() || self.saves.snapshot.is_some() || self.rollback.is_some() || self.packing.is_some();
        if busy || !self.saves.may_serve() || !self.saves.may_act() {
            return;
        }
        while let Some((ask, reply)) = self.asks.waiting.pop_front() {
            if reply.is_closed() {
                continue;
            }
            let keeps = matches!(ask, Ask::Checkpoint { .. }) && self.saves.kept.is_some() && self.client.is_some();
            if keeps && self.asks.knocking.is_none() {
                self.asks.knocking = Some((ask, reply));
                self.knock();
                continue;
            }
            match self.begin_ask(ask) {
                Ok(what) => {
                    self.asks.under_way = Some((what, reply));
                    return;
                }
                Err(refused) => drop(reply.send(Err(refused))),
            }
        }
    }

    fn begin_ask(&mut self, ask: Ask) -> Result<What, Refused> {
        let because = |(code, message)| Refused::Because(code, message);
        match ask {
            Ask::Snapshot { id, name } => self.begin_snapshot(id, name).map(|()| What::Snapshot).map_err(because),
            Ask::Checkpoint { include_execution } => {
                if self.saves.kept.is_none() {
                    return Err(because(self.not_kept()));
                }
                if self.client.is_some() {
                    return Err(Refused::InUse);
                }
                if !include_execution && self.execution.as_ref().is_some_and(Execution::is_live) {
                    let message = "Cannot checkpoint while an execution is in progress. Say include_execution to save it too.";
                    return Err(Refused::Because(ErrorCode::ExecutionInProgress, message.to_owned()));
                }
                self.save(Why::Asked);
                Ok(What::Checkpoint)
            }
            Ask::SnapshotFilesystem { name, replace } => {
                self.begin_packing(&name, replace).map(|()| What::SnapshotFilesystem).map_err(because)
            }
            // It was done at once.
            Ask::Kill { .. } => Err(because((ErrorCode::Internal, "A kill does not wait.".to_owned()))),
            Ask::RollBack(target) => self.begin_rollback(&target).map(|()| What::RollBack).map_err(because),
        }
    }

    /// An attached client sees it end, as if it had asked for it.
    /// It is answered when the execution has ended, unless it was only sent a signal. Nobody waits for an answer any longer if that fails.
    fn kill_from_outside(&mut self, signal: Option<i32>, reply: Reply) {
        let Some(execution) = self.execution.as_ref().filter(|execution| execution.is_live()) else {
            let nothing = Refused::Because(ErrorCode::NothingRunning, "Nothing runs in this sandbox.".to_owned());
            let _ = reply.send(Err(nothing));
            return;
        };
        let (id, number) = (execution.id.clone(), execution.number);
        match signal {
            Some(signal) => {
                self.writer.queue(&ToAgent::Signal { number, signal });
                let _ = reply.send(Ok(Told::Killed(id)));
            }
            None if self.asks.killing.len() >= MAX_WAITING => {
                let _ = reply.send(Err(Refused::Because(ErrorCode::RateLimited, "It is being killed. Wait for its end.".to_owned())));
            }
            None => {
                self.kill_execution(ExitCause::ForceKilled);
                self.asks.killing.push((number, reply));
            }
        }
    }

    /// Why it can't be checkpointed.
    pub(super) fn not_kept(&self) -> (ErrorCode, String) {
        if self.saves.host.is_some() {
            (ErrorCode::CheckpointNotEnabled, "This sandbox was created without enable_checkpoint. It goes on.".to_owned())
        } else {
            (ErrorCode::CheckpointNotConfigured, NO_CHECKPOINT_PATH.to_owned())
        }
    }
}

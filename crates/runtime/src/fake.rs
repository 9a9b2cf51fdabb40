//! A runtime in this process, without runsc: for tests that want speed, and for the simulator, which wants its own clock.
//!
//! A sandbox is a task that speaks the agent's side of the conversation and runs programs of a small part of bash (see
//! [`program`](self::program)). All time is tokio's, so a test may pause and advance it. A checkpoint is one file, `checkpoint.img`,
//! and a restore needs it. Sandboxes belong to the `FakeRuntime` and all its clones, so that a server can be "restarted" on a clone.

mod agent;
mod program;
mod saved;

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use sandboxer_protocol::{SandboxId, agent::Marker};
use tokio::{
    io::{DuplexStream, duplex, split},
    sync::{mpsc, oneshot},
    task::AbortHandle,
};

use self::agent::{Agent, Order};
use crate::{AfterSave, BoxFuture, End, Ended, Instance, Launch, NotWhole, Runtime, RuntimeError, Written};

/// As large as the real FIFOs.
const PIPE_BYTES: usize = 1024 * 1024;
const ORDERS: usize = 16;

/// Something that a test wants to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The sandbox never comes up; told by its `ended`.
    Start,
    Checkpoint,
    Remove,
    TakeUp,
    /// What a sandbox was restored from can't be read: it fails with that.
    Unreadable,
    /// It fails before all of its memory is there.
    NotWhole,
    /// Its memory never comes, and nobody is told.
    NeverWhole,
}

/// How often it fails.
enum Failing {
    Once(String),
    UntilMended(String),
}

/// Sandboxes in this process. Clones share them.
#[derive(Clone, Default)]
pub struct FakeRuntime(Arc<Shared>);

#[derive(Default)]
struct Shared {
    sandboxes: Mutex<HashMap<SandboxId, Sandbox>>,
    /// Those whose agent is yet to come.
    waiting: Mutex<HashMap<SandboxId, oneshot::Sender<Agent>>>,
    faults: Mutex<HashMap<Fault, Failing>>,
    refuses_executions: bool,
}

#[derive(Clone)]
struct Sandbox {
    orders: mpsc::Sender<Order>,
    ended: Ended,
    task: AbortHandle,
}

impl Drop for Shared {
    fn drop(&mut self) {
        let sandboxes = self.sandboxes.get_mut().unwrap_or_else(PoisonError::into_inner);
        sandboxes.values().for_each(|sandbox| sandbox.task.abort());
    }
}

impl FakeRuntime {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// One that answers [`RuntimeError::Busy`] to a checkpoint while an execution runs.
    #[must_use]
    pub fn refusing_to_save_executions() -> Self {
        let mut shared = Shared::default();
        shared.refuses_executions = true;
        Self(Arc::new(shared))
    }

    /// Makes the next such operation fail with this text.
    pub fn fail_next(&self, fault: Fault, why: &str) {
        self.faults().insert(fault, Failing::Once(why.to_owned()));
    }

    /// Makes all such operations fail with this text.
    pub fn fail_until_mended(&self, fault: Fault, why: &str) {
        self.faults().insert(fault, Failing::UntilMended(why.to_owned()));
    }

    pub fn mend(&self, fault: Fault) {
        self.faults().remove(&fault);
    }

    /// Ends a sandbox as something outside would. Nothing happens if it is not there.
    pub async fn end_from_outside(&self, id: SandboxId, end: End) {
        let sandbox = self.sandboxes().get(&id).cloned();
        if let Some(sandbox) = sandbox {
            sandbox.orders.send(Order::End(end)).await.ok();
        }
    }

    /// The sandboxes that were started and not removed.
    #[must_use]
    pub fn ids(&self) -> Vec<SandboxId> {
        self.sandboxes().keys().copied().collect()
    }

    fn sandboxes(&self) -> MutexGuard<'_, HashMap<SandboxId, Sandbox>> {
        self.0.sandboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn faults(&self) -> MutexGuard<'_, HashMap<Fault, Failing>> {
        self.0.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fault(&self, fault: Fault) -> Option<String> {
        let mut faults = self.faults();
        match faults.remove(&fault)? {
            Failing::Once(why) => Some(why),
            Failing::UntilMended(why) => {
                faults.insert(fault, Failing::UntilMended(why.clone()));
                Some(why)
            }
        }
    }

    fn find(&self, id: SandboxId) -> Result<Sandbox, RuntimeError> {
        self.sandboxes().get(&id).filter(|sandbox| sandbox.ended.now().is_none()).cloned().ok_or(RuntimeError::NotFound)
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<SandboxId, oneshot::Sender<Agent>>> {
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A sandbox whose agent is yet to come.
    fn wait_for_agent(&self, id: SandboxId) -> Result<Instance, RuntimeError> {
        let (server, guest) = duplex(PIPE_BYTES);
        let (orders, mut receiver) = mpsc::channel(ORDERS);
        let (sender, ended) = Ended::channel();
        let (filled, agent) = oneshot::channel::<Agent>();
        let mut sandboxes = self.sandboxes();
        if sandboxes.contains_key(&id) {
            return Err(RuntimeError::Invalid(format!("there is a sandbox {id} already")));
        }
        let task = tokio::spawn(async move {
            let agent = tokio::select! {
                agent = agent => agent.ok(),
                // Nothing but its end can be ordered of it.
                _ = receiver.recv() => None,
            };
            sender.tell(match agent {
                Some(agent) => agent.run(guest, receiver).await,
                None => End::Killed,
            });
        });
        sandboxes.insert(id, Sandbox { orders, ended: ended.clone(), task: task.abort_handle() });
        self.waiting().insert(id, filled);
        Ok(instance(server, ended))
    }

    fn run(&self, id: SandboxId, agent: impl FnOnce() -> Result<Agent, RuntimeError>) -> Result<Instance, RuntimeError> {
        let (server, guest) = duplex(PIPE_BYTES);
        let (orders, receiver) = mpsc::channel(ORDERS);
        let (sender, ended) = Ended::channel();
        let fault = self.fault(Fault::Start);
        let mut sandboxes = self.sandboxes();
        if sandboxes.contains_key(&id) {
            return Err(RuntimeError::Invalid(format!("there is a sandbox {id} already")));
        }
        let agent = agent()?;
        let task = tokio::spawn(async move {
            let end = match fault {
                Some(why) => End::StartFailed(why),
                None => agent.run(guest, receiver).await,
            };
            sender.tell(end);
        });
        sandboxes.insert(id, Sandbox { orders, ended: ended.clone(), task: task.abort_handle() });
        Ok(instance(server, ended))
    }

    async fn order<T>(&self, id: SandboxId, order: impl FnOnce(oneshot::Sender<T>) -> Order) -> Result<T, RuntimeError> {
        let sandbox = self.find(id)?;
        let (reply, answer) = oneshot::channel();
        sandbox.orders.send(order(reply)).await.map_err(|_| RuntimeError::NotFound)?;
        answer.await.map_err(|_| RuntimeError::NotFound)
    }
}

fn instance(server: DuplexStream, ended: Ended) -> Instance {
    let (from_agent, to_agent) = split(server);
    Instance { from_agent: Box::new(from_agent), to_agent: Box::new(to_agent), ended }
}

impl Runtime for FakeRuntime {
    fn start<'a>(&'a self, launch: &'a Launch) -> BoxFuture<'a, Result<Instance, RuntimeError>> {
        Box::pin(async move {
            let marker =
                Marker::from_hex(&launch.config.marker).ok_or_else(|| RuntimeError::Invalid("the marker is no marker".to_owned()))?;
            self.run(launch.id, || Ok(Agent::new(marker, &launch.config)))
        })
    }

    fn take_up<'a>(&'a self, id: SandboxId, _dir: &'a Path) -> BoxFuture<'a, Result<Instance, RuntimeError>> {
        Box::pin(async move {
            if let Some(why) = self.fault(Fault::TakeUp) {
                return Err(RuntimeError::Unavailable(why));
            }
            if self.waiting().contains_key(&id) {
                return Err(RuntimeError::NotFound);
            }
            let sandbox = self.find(id)?;
            let (server, guest) = duplex(PIPE_BYTES);
            sandbox.orders.send(Order::Connect(guest)).await.map_err(|_| RuntimeError::NotFound)?;
            Ok(instance(server, sandbox.ended))
        })
    }

    fn checkpoint<'a>(
        &'a self,
        id: SandboxId,
        _dir: &'a Path,
        into: &'a Path,
        after: AfterSave,
        _written: Option<Written<'a>>,
    ) -> BoxFuture<'a, Result<(), RuntimeError>> {
        Box::pin(async move {
            if let Some(why) = self.fault(Fault::Checkpoint) {
                return Err(RuntimeError::Failed { what: "save the sandbox", why });
            }
            let refuse_execution = self.0.refuses_executions;
            self.order(id, |reply| Order::Save { into: into.to_owned(), refuse_execution, reply }).await??;
            match after {
                AfterSave::GoOn => Ok(()),
                AfterSave::Freeze => self.order(id, |reply| Order::Freeze { frozen: true, reply }).await,
            }
        })
    }

    fn restore<'a>(&'a self, launch: &'a Launch, from: &'a Path) -> BoxFuture<'a, Result<Instance, RuntimeError>> {
        Box::pin(async move { self.run(launch.id, || Agent::load(from, &launch.config)) })
    }

    fn create<'a>(&'a self, launch: &'a Launch) -> BoxFuture<'a, Result<Instance, RuntimeError>> {
        Box::pin(async move { self.wait_for_agent(launch.id) })
    }

    fn created(&self, id: SandboxId) -> BoxFuture<'_, Result<(), RuntimeError>> {
        Box::pin(async move { if self.waiting().contains_key(&id) { Ok(()) } else { Err(RuntimeError::NotFound) } })
    }

    fn restore_into<'a>(&'a self, launch: &'a Launch, from: &'a Path) -> BoxFuture<'a, Result<(), RuntimeError>> {
        Box::pin(async move {
            let agent = Agent::load(from, &launch.config)?;
            let waiting = self.waiting().remove(&launch.id).ok_or(RuntimeError::NotFound)?;
            waiting.send(agent).map_err(|_| RuntimeError::NotFound)
        })
    }

    fn whole<'a>(&'a self, id: SandboxId, _dir: &'a Path) -> BoxFuture<'a, Result<(), NotWhole>> {
        Box::pin(async move {
            if let Some(why) = self.fault(Fault::Unreadable) {
                self.end_from_outside(id, End::Failed(why.clone())).await;
                return Err(NotWhole::Unreadable(why));
            }
            if let Some(why) = self.fault(Fault::NotWhole) {
                self.end_from_outside(id, End::Failed(why)).await;
                return Err(NotWhole::Ended);
            }
            if self.fault(Fault::NeverWhole).is_some() {
                std::future::pending::<()>().await;
            }
            if self.find(id).is_ok() { Ok(()) } else { Err(NotWhole::Ended) }
        })
    }

    fn pause<'a>(&'a self, id: SandboxId, _dir: &'a Path) -> BoxFuture<'a, Result<(), RuntimeError>> {
        Box::pin(self.order(id, |reply| Order::Freeze { frozen: true, reply }))
    }

    fn resume<'a>(&'a self, id: SandboxId, _dir: &'a Path) -> BoxFuture<'a, Result<(), RuntimeError>> {
        Box::pin(self.order(id, |reply| Order::Freeze { frozen: false, reply }))
    }

    fn remove<'a>(&'a self, id: SandboxId, _dir: &'a Path) -> BoxFuture<'a, Result<(), RuntimeError>> {
        Box::pin(async move {
            if let Some(why) = self.fault(Fault::Remove) {
                return Err(RuntimeError::Failed { what: "remove the sandbox", why });
            }
            let sandbox = self.sandboxes().get(&id).cloned();
            if let Some(sandbox) = sandbox {
                self.waiting().remove(&id);
                sandbox.orders.send(Order::End(End::Killed)).await.ok();
                sandbox.ended.wait().await;
                self.sandboxes().remove(&id);
            }
            Ok(())
        })
    }
}

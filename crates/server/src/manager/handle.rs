//! A sandbox as those see it who want something of it, and the way to its driver.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use sandboxer_protocol::{
    SandboxId,
    client::{ServerEvent, Status, StatusUpdate},
};
use sandboxer_store::lease::LeaseView;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::{
    Served,
    secrets::{hash, same_secret},
};
use crate::{
    network::{Log, Rule},
    sandbox::{
        asks::{Ask, Refused, Told},
        client::ClientPort,
        driver::{Attachment, Command},
        execution::ExecutionView,
        last_use::LastUse,
        record::{Record, SandboxConfig},
        streams::NoWay,
        transfers,
        tunnel::TunnelStream,
    },
};

/// Commands that may wait for a driver.
const COMMANDS: usize = 16;

/// A sandbox, as those see it who want something of it.
#[derive(Debug, Clone)]
pub(crate) struct Handle {
    pub(crate) id: SandboxId,
    pub(super) token_sha256: Arc<str>,
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) gone: CancellationToken,
    /// Rises when it goes back.
    pub(super) generation: Arc<AtomicU64>,
    /// Which API key it belongs to.
    pub(crate) owner: Option<Arc<str>>,
    pub(crate) created_at: jiff::Timestamp,
    /// How many bytes of a stream its agent holds, as far as is known.
    pub(crate) output_window_bytes: Option<u64>,
    pub(crate) config: Arc<SandboxConfig>,
    pub(crate) image: Arc<Path>,
    pub(super) last_use: LastUse,
    /// The lease on it, if it is kept on the volume.
    pub(super) lease: Option<LeaseView>,
    pub(crate) network: Arc<NetworkView>,
}

/// What is known of a sandbox's network.
#[derive(Debug)]
pub(crate) struct NetworkView {
    pub(crate) rules: Vec<Rule>,
    pub(crate) log: Arc<Log>,
}

impl NetworkView {
    pub(super) fn of(record: &Record, dir: &Path) -> Self {
        let rules = record.config.network.clone();
        let log = if rules.is_empty() { Log::of_none(dir) } else { Log::open(dir) };
        Self { rules, log }
    }
}

impl Handle {
    /// What a client that attaches is told first. One that missed the telling of a rewinding knows it by the generation.
    pub(crate) fn running(&self) -> ServerEvent {
        let mut update = StatusUpdate::new(Status::Running);
        update.generation = Some(self.generation()).filter(|generation| *generation > 0);
        ServerEvent::StatusUpdate(update)
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Waits until nothing of the sandbox is left here.
    pub(crate) async fn gone(&self) {
        self.gone.cancelled().await;
    }

    /// Whether this is the sandbox's token, without telling how much of it is right.
    pub(crate) fn opens(&self, token: &str) -> bool {
        same_secret(token, &self.token_sha256)
    }

    /// What only the servers of this sandbox know.
    pub(crate) fn token_sha256(&self) -> &str {
        &self.token_sha256
    }

    /// Has something done by the sandbox's driver. None: the sandbox is gone from here.
    pub(crate) async fn ask(&self, ask: Ask) -> Option<Result<Told, Refused>> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Ask { ask, reply }).await.ok()?;
        answer.await.ok()
    }

    /// The execution that runs, or the last one. None: there was none, or the sandbox is gone from
    /// here.
    pub(crate) async fn execution(&self) -> Option<ExecutionView> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Look { reply }).await.ok()?;
        answer.await.ok()?
    }

    /// One that a test plays the driver of.
    #[cfg(test)]
    pub(crate) fn played() -> (Self, mpsc::Receiver<Command>) {
        let (commands, played) = mpsc::channel(COMMANDS);
        let handle = Self {
            id: SandboxId::random(),
            token_sha256: Arc::from(""),
            commands,
            gone: CancellationToken::new(),
            generation: Arc::default(),
            owner: None,
            created_at: jiff::Timestamp::UNIX_EPOCH,
            output_window_bytes: None,
            config: Arc::default(),
            image: Arc::from(Path::new("")),
            last_use: LastUse::at(jiff::Timestamp::UNIX_EPOCH),
            lease: None,
            network: Arc::new(NetworkView { rules: Vec::new(), log: Log::of_none(Path::new("")) }),
        };
        (handle, played)
    }

    /// Has something done with a single file. False: the sandbox is gone from here.
    pub(crate) async fn file(&self, order: transfers::Order) -> bool {
        self.commands.send(Command::File(order)).await.is_ok()
    }

    /// A way to a port of the sandbox's loopback. None: the sandbox is gone from here.
    pub(crate) async fn way(&self, port: u16) -> Option<Result<TunnelStream, NoWay>> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Way { port, reply }).await.ok()?;
        answer.await.ok()
    }

    /// Ends a sandbox that nobody has heard of.
    pub(crate) async fn abandon(&self) {
        // A driver that has ended already has nothing to be told.
        let _ = self.commands.send(Command::Abandon).await;
    }

    pub(super) fn view(&self) -> Served {
        let (epoch, serving) = match &self.lease {
            Some(lease) => (Some(lease.epoch()), lease.may_act()),
            None => (None, true),
        };
        Served { id_sha256: hash(&self.id.to_string()), epoch, serving }
    }

    /// Makes a connection the client of the sandbox. None: the sandbox is gone.
    pub(crate) async fn attach(&self, port: ClientPort, greeting: Vec<ServerEvent>) -> Option<Attachment> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Attach { port, greeting, reply }).await.ok()?;
        answer.await.ok()
    }
}

/// Both ends of the way to a driver.
pub(super) struct Wire {
    pub(super) sender: mpsc::Sender<Command>,
    pub(super) receiver: mpsc::Receiver<Command>,
}

impl Default for Wire {
    fn default() -> Self {
        let (sender, receiver) = mpsc::channel(COMMANDS);
        Self { sender, receiver }
    }
}

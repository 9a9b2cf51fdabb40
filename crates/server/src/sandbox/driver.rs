//! The task that owns a sandbox. Nothing else changes its state.
//!
//! It waits for many things at once and never for one of them alone: frames from the agent, room in the FIFO to it, requests from the
//! client, room in the way to it, commands of the server, deadlines, and the end of the sandbox.

mod attached;
mod deadlines;
mod finish;
mod waits;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use sandboxer_protocol::{
    SandboxId,
    agent::FromAgentFrame,
    client::{Request, ServerEvent},
    limits::MAX_FRAME_TO_AGENT_BYTES,
};
use sandboxer_runtime::{
    End, Ended, Runtime,
    link::{LinkError, LinkReader, LinkWriter},
};
use sandboxer_store::{
    CheckpointName, Manifest,
    lease::handoff::{self, Consent, SaveError},
};
use tokio::{
    sync::{OwnedSemaphorePermit, mpsc, oneshot, watch},
    time::{Instant, sleep_until},
};
use tracing::debug;

pub(super) use self::attached::{Client, Grace, Knocking};
pub(crate) use self::deadlines::TELL_WAITING_AFTER;
use self::{
    attached::MAX_KNOCKING,
    deadlines::Waiting,
    waits::{certain, changed, packing, receive, reserve, stopped, under_way},
};
use super::{
    admission::Moment,
    asks::{self, Ask, Asks},
    client::{ClientPort, FromClient},
    execution::{Execution, ExecutionView},
    files::{self, Packing, Progress},
    host::SandboxHost,
    last_use::LastUse,
    record::Record,
    saving::{Kept, Rest, Saves, Stillness},
    streams::{self, Streams, WayReply},
    transfers::{self, Push, SingleFiles, Transfers},
};
use crate::{
    leaving::Leaving,
    manager::{RolledBack, Roller},
    metrics::Metrics,
    network::Egress,
};

/// How long a client may take to say where it goes on, counted from its pong.
pub(crate) const GRACE: Duration = Duration::from_millis(250);
/// How long its pong may take.
pub(crate) const GRACE_AT_MOST: Duration = Duration::from_secs(5);
/// How long after the agent closed its end the runtime may take to say why.
pub(crate) const END_EXPLAINED: Duration = Duration::from_secs(5);
/// How long the agent may take to report the end of what it was told to kill.
pub(super) const KILL_ANSWERED: Duration = Duration::from_secs(15);
/// Beyond this no request is taken that could add to what waits for the agent.
const MAX_AGENT_BACKLOG: usize = MAX_FRAME_TO_AGENT_BYTES;
/// Frames of the agent that are taken together.
const FRAMES_A_TURN: usize = 64;

/// What the server may tell a driver.
pub(crate) enum Command {
    Attach {
        port: ClientPort,
        greeting: Vec<ServerEvent>,
        reply: oneshot::Sender<Attachment>,
    },
    /// Nobody has heard of this sandbox: end it.
    Abandon,
    /// The resource API wants something done.
    Ask {
        ask: Ask,
        reply: asks::Reply,
    },
    /// It wants something done with a single file.
    File(transfers::Order),
    /// Somebody wants to reach a port of the sandbox.
    Way {
        port: u16,
        reply: WayReply,
    },
    /// A caller wants to know which execution there is.
    Look {
        reply: oneshot::Sender<Option<ExecutionView>>,
    },
    /// Another instance wants the sandbox.
    AskedFor {
        reply: oneshot::Sender<Consent>,
    },
    /// The server stops, and it is this sandbox's turn to be saved. The turn ends with the driver.
    Leave {
        turn: OwnedSemaphorePermit,
    },
    /// Bring the conversation with the agent to rest, to be saved.
    Quiet {
        reply: oneshot::Sender<Rest>,
    },
    /// The sandbox stands still as it is.
    Still,
    GoOn,
    /// A capture of a sandbox that goes on is over; whatever else was promised of it stands.
    Captured,
    /// It ends, as its lease says.
    End {
        why: handoff::Ending,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The server goes for good: the sandbox is saved, or ends.
    Drain,
    /// The server comes back, or has no more time for what it wanted to save: the sandbox is left running.
    Restart,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Attachment {
    Attached,
    InUse,
}

/// Why a driver ended.
#[derive(Debug, Clone)]
pub(crate) enum Outcome {
    KilledByClient,
    Idle(Duration),
    /// The sandbox was without a client for as long as its configuration allows.
    ClientGone(Duration),
    Lifetime(Duration),
    Died(End),
    Drained,
    LeftRunning,
    /// It is saved on the volume and runs no longer.
    Checkpointed {
        draining: bool,
    },
    /// It goes on at another instance.
    HandedOver,
    /// It is someone else's.
    Lost(String),
}

impl Outcome {
    /// The sandbox can be had from the volume.
    pub(crate) fn is_kept_elsewhere(&self) -> bool {
        matches!(self, Self::Checkpointed { .. } | Self::HandedOver | Self::Lost(_))
    }
}

pub(crate) struct Driver {
    pub(super) id: SandboxId,
    pub(super) dir: PathBuf,
    pub(super) runtime: Arc<dyn Runtime>,
    pub(super) record: Record,
    pub(super) metrics: Arc<Metrics>,
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) reader: LinkReader,
    pub(super) writer: LinkWriter,
    pub(super) ended: Ended,
    pub(super) execution: Option<Execution>,
    pub(super) client: Option<Client>,
    /// A request that waits for the end of the last execution to be told.
    pub(super) waiting: Option<Request>,
    pub(super) kill_deadline: Option<Instant>,
    pub(super) next_number: u64,
    /// Questions to the agent from where output goes on, so far.
    pub(super) resumes: u64,
    knocking: Vec<Knocking>,
    /// Other instances that want the sandbox, while the attached client is asked for a sign of life.
    pub(super) asking: Vec<oneshot::Sender<Consent>>,
    knock_deadline: Option<Instant>,
    idle_since: Option<Instant>,
    /// Since when no client is attached. A server that takes the sandbox up counts anew.
    clientless_since: Option<Instant>,
    client_waiting: Option<Waiting>,
    born: Instant,
    max_lifetime: Option<Duration>,
    /// The agent closed its end, and the runtime has until then to say why.
    pub(super) link_closed: Option<Instant>,
    leaving: Leaving,
    on_end: OnEnd,
    stop: watch::Receiver<Option<Stop>>,
    pub(super) saves: Saves,
    /// How it goes back to what was saved, if the server has a volume.
    pub(super) roller: Option<Roller>,
    /// A rollback under way.
    pub(super) rollback: Option<BoxFuture<'static, Result<Box<RolledBack>, String>>>,
    /// What those are told who attach.
    pub(super) generation: Arc<AtomicU64>,
    last_use: LastUse,
    /// Whoever wanted to attach while the sandbox is being saved to end here.
    pub(super) late: Vec<Knocking>,
    pub(super) asks: Asks,
    /// How files are kept, if the server does.
    pub(super) filesystems: Option<files::Keeps>,
    /// The agent can send them.
    pub(super) packs_files: bool,
    /// A filesystem snapshot under way.
    pub(super) packing: Option<Packing>,
    /// The agent can do what is asked of single files.
    pub(super) single_files: SingleFiles,
    pub(super) transfers: Transfers,
    /// How much was done with files so far: each has its number.
    pub(super) file_numbers: u64,
    pub(super) streams: Streams,
}

/// What a driver starts from.
pub(crate) struct Start {
    pub(crate) id: SandboxId,
    pub(crate) dir: PathBuf,
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) record: Record,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) commands: mpsc::Receiver<Command>,
    pub(crate) reader: LinkReader,
    pub(crate) writer: LinkWriter,
    pub(crate) ended: Ended,
    pub(crate) execution: Option<Execution>,
    pub(crate) age: Duration,
    pub(crate) max_lifetime: Option<Duration>,
    pub(crate) leaving: Leaving,
    /// Called when the sandbox is gone, before its client hears of it.
    pub(crate) on_end: OnEnd,
    pub(crate) stop: watch::Receiver<Option<Stop>>,
    /// The number of the next execution.
    pub(crate) next_number: u64,
    /// How it is captured, if the server has a volume.
    pub(crate) host: Option<Arc<SandboxHost>>,
    /// Its lease, if it is kept there.
    pub(crate) kept: Option<Kept>,
    pub(crate) roller: Option<Roller>,
    pub(crate) generation: Arc<AtomicU64>,
    pub(crate) last_use: LastUse,
    pub(crate) filesystems: Option<files::Keeps>,
    pub(crate) packs_files: bool,
    pub(crate) single_files: SingleFiles,
    /// The agent carries streams of the network.
    pub(crate) tunnel: bool,
    /// Where those go that programs open; none: it has no network.
    pub(crate) egress: Option<Egress>,
}

/// Told with the sandbox's directory if nothing is left of the sandbox, so that that may go too.
pub(crate) type OnEnd = Box<dyn FnOnce(&Outcome, Option<&Path>) + Send + Sync>;

enum Event {
    Frame(Result<FromAgentFrame, LinkError>),
    Flushed(std::io::Result<()>),
    Command(Option<Command>),
    Stop(Stop),
    Request(Option<FromClient>),
    Pong(Bytes),
    Handed,
    Deaf,
    Deadline,
    Ended(End),
    Saved(Result<CheckpointName, SaveError>),
    Snapshotted(Result<Manifest, String>),
    RolledBack(Result<Box<RolledBack>, String>),
    Packing(Progress),
    /// Of a single file: what comes of it; none: nobody wants it any longer.
    File(u64, Option<Push>),
    /// Streams of the network have something to say to the agent.
    Streams,
    /// The lease is certain again.
    MayAct,
}

impl Driver {
    pub(crate) fn new(start: Start) -> Self {
        let Start {
            id,
            dir,
            runtime,
            record,
            metrics,
            commands,
            reader,
            writer,
            ended,
            execution,
            age,
            max_lifetime,
            leaving,
            on_end,
            stop,
            next_number,
            host,
            kept,
            roller,
            generation,
            last_use,
            filesystems,
            packs_files,
            single_files,
            tunnel,
            egress,
        } = start;
        let now = Instant::now();
        let autosave = record.config.autosave;
        Self {
            id,
            dir,
            runtime,
            record,
            metrics,
            commands,
            reader,
            writer,
            ended,
            execution,
            client: None,
            waiting: None,
            kill_deadline: None,
            next_number,
            resumes: 0,
            knocking: Vec::new(),
            asking: Vec::new(),
            knock_deadline: None,
            idle_since: None,
            clientless_since: None,
            client_waiting: None,
            born: now.checked_sub(age).unwrap_or(now),
            max_lifetime,
            link_closed: None,
            leaving,
            on_end,
            stop,
            saves: Saves::of(host, kept, autosave),
            roller,
            rollback: None,
            generation,
            last_use,
            late: Vec::new(),
            asks: Asks::default(),
            filesystems,
            packs_files,
            packing: None,
            single_files,
            transfers: Transfers::default(),
            file_numbers: 0,
            streams: Streams { able: tunnel, egress, ..Streams::default() },
        }
    }

    /// Runs until the sandbox is gone or left. When this returns, its processes are too, unless they were left running.
    pub(crate) async fn run(mut self) -> Outcome {
        self.begin_streams();
        loop {
            self.note_idleness();
            self.note_waiting();
            let event = self.next_event().await;
            let outcome = match event {
                Event::Frame(frame) => self.on_frames(frame),
                Event::Flushed(result) => {
                    if let Err(error) = result {
                        debug!(%error, "the agent's FIFO can't be written; waiting for the end of the sandbox");
                        self.link_closed.get_or_insert_with(|| Instant::now() + END_EXPLAINED);
                    }
                    None
                }
                Event::Command(Some(command)) => self.on_command(command),
                Event::Stop(Stop::Drain) => self.on_drain(),
                // Nobody can reach it any longer, which happens only when the server ends without a word.
                Event::Command(None) | Event::Stop(Stop::Restart) => Some(Outcome::LeftRunning),
                Event::Request(Some(from_client)) => {
                    self.last_use.note();
                    self.on_client(from_client)
                }
                Event::Request(None) => {
                    self.on_client_gone();
                    None
                }
                Event::Pong(payload) => {
                    self.on_pong(&payload);
                    None
                }
                Event::Handed | Event::MayAct => None,
                Event::Deaf => {
                    self.on_deaf();
                    None
                }
                Event::Deadline => self.on_deadline(),
                Event::Ended(end) => Some(Outcome::Died(end)),
                Event::Saved(saved) => self.on_saved(saved),
                Event::Snapshotted(made) => {
                    self.on_snapshotted(made);
                    None
                }
                Event::Packing(progress) => {
                    self.on_packing(progress);
                    None
                }
                Event::File(sequence, push) => {
                    self.on_push(sequence, push);
                    None
                }
                Event::Streams => {
                    self.on_streams_stirred();
                    None
                }
                Event::RolledBack(rolled) => {
                    self.on_rolled_back(rolled);
                    None
                }
            };
            let outcome = outcome.or_else(|| self.take_waiting());
            self.take_ask();
            self.begin_transfers();
            if let Some(outcome) = outcome {
                return self.finish(outcome).await;
            }
        }
    }

    fn on_command(&mut self, command: Command) -> Option<Outcome> {
        match command {
            Command::Attach { port, greeting, reply } => {
                let knocking = Knocking { port, greeting, reply };
                if !self.saves.goes_away() {
                    self.on_attach(knocking);
                } else if self.late.len() < MAX_KNOCKING {
                    self.late.push(knocking);
                }
            }
            Command::Ask { ask, reply } => self.on_ask(ask, reply),
            Command::File(order) => {
                self.last_use.note();
                self.on_order(order);
            }
            Command::Way { port, reply } => {
                self.last_use.note();
                self.on_way(port, reply);
            }
            Command::Abandon => return Some(Outcome::Drained),
            // A caller that no longer waits needs no answer.
            Command::Look { reply } => drop(reply.send(self.execution.as_ref().map(ExecutionView::of))),
            Command::AskedFor { reply } => self.on_asked_for(reply),
            Command::Leave { turn } => return self.on_turn_to_leave(turn),
            Command::Quiet { reply } => self.on_quiet(reply),
            Command::Still => self.saves.stillness = Stillness::Still,
            Command::GoOn => self.on_go_on(),
            Command::Captured => self.saves.go_on(),
            Command::End { why } => return self.on_end_by_lease(why),
        }
        None
    }

    /// Takes a frame and those that were read with it, so that small ones don't cost a turn of the loop each.
    fn on_frames(&mut self, first: Result<FromAgentFrame, LinkError>) -> Option<Outcome> {
        let mut outcome = self.on_frame(first);
        let mut more = FRAMES_A_TURN;
        while outcome.is_none() && more > 0 && self.link_closed.is_none() {
            let next = self.reader.ready()?;
            outcome = self.on_frame(next);
            more -= 1;
        }
        outcome
    }

    async fn next_event(&mut self) -> Event {
        let deadline = self.next_deadline();
        let link_open = self.link_closed.is_none();
        let crowded = self.client.as_ref().is_some_and(|client| client.outbox.is_full());
        let backlog = self.writer.backlog();
        let agent_crowded = backlog >= MAX_AGENT_BACKLOG;
        let may_write = self.saves.may_write();
        // A process that was stopped finds out here that its time is over, before it does by an event.
        let may_act = self.saves.may_act();
        let may_serve = self.saves.may_serve() && self.rollback.is_none() && may_act;
        let may_take = self.waiting.is_none() && !agent_crowded && may_serve;
        let draining = self.saves.draining;
        let lease = if may_act { None } else { self.saves.lease() };
        let ping = self.ping_due();
        let client = &mut self.client;
        let (mut incoming, mut pongs, mut outgoing) = (None, None, None);
        if let Some(Client { port, outbox, leaving, deaf, .. }) = client.as_mut() {
            if *leaving || may_take && (*deaf || !crowded) {
                incoming = Some(&mut port.incoming);
            }
            pongs = Some(&mut port.pongs);
            if may_act && !*deaf && !matches!(self.saves.stillness, Stillness::Quieting { .. }) && (!outbox.is_empty() || ping.is_some()) {
                outgoing = Some(&port.outgoing);
            }
        }
        let Saves { saving, snapshot, .. } = &mut self.saves;
        let permit = tokio::select! {
            frame = self.reader.recv(), if link_open => return Event::Frame(frame),
            result = self.writer.flush_some(), if link_open && may_write && self.writer.backlog() > 0 => return Event::Flushed(result),
            command = self.commands.recv() => return Event::Command(command),
            stop = stopped(&mut self.stop, draining) => return Event::Stop(stop),
            () = certain(lease), if !may_act => return Event::MayAct,
            saved = under_way(saving.as_mut().map(|saving| &mut saving.done)) => return Event::Saved(saved),
            made = under_way(snapshot.as_mut()) => return Event::Snapshotted(made),
            rolled = under_way(self.rollback.as_mut()) => return Event::RolledBack(rolled),
            progress = packing(self.packing.as_mut()) => return Event::Packing(progress),
            (sequence, push) = self.transfers.next(backlog), if may_serve => return Event::File(sequence, push),
            () = self.streams.tunnel.stirred(), if may_serve && backlog < streams::MAX_BACKLOG_BYTES => return Event::Streams,
            request = receive(incoming) => return Event::Request(request),
            pong = changed(pongs) => return Event::Pong(pong),
            permit = reserve(outgoing) => permit,
            () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => return Event::Deadline,
            end = self.ended.wait() => return Event::Ended(end),
        };
        let Some(permit) = permit else { return Event::Deaf };
        if !self.saves.may_act() {
            return Event::Handed;
        }
        self.hand_out(permit, ping);
        Event::Handed
    }

    pub(super) fn moment(&self) -> Moment {
        match &self.execution {
            None => Moment::Idle,
            Some(execution) if execution.is_live() => Moment::Executing,
            Some(_) => {
                let unfinished = self.client.as_ref().and_then(|client| client.delivery.as_ref()).is_some_and(|delivery| delivery.end_due);
                if unfinished { Moment::Finishing } else { Moment::Idle }
            }
        }
    }
}

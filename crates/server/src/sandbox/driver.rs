//! The task that owns a sandbox. Nothing else changes its state.
//!
//! It waits for many things at once and never for one of them alone: frames from the agent, room in the FIFO to it, requests from the
//! client, room in the way to it, commands of the server, deadlines, and the end of the sandbox.

use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use sandboxer_protocol::{
    SandboxId,
    agent::{ExitCause, FromAgentFrame, PerStream, ToAgent},
    client::{CloseCode, ErrorCode, Request, ServerEvent},
    limits::MAX_FRAME_TO_AGENT_BYTES,
};
use sandboxer_runtime::{
    End, Ended, Runtime,
    link::{LinkError, LinkReader, LinkWriter},
};
use sandboxer_store::{
    CheckpointName, Manifest,
    lease::{
        Lease,
        handoff::{self, Consent, SaveError},
    },
};
use tokio::{
    sync::{OwnedSemaphorePermit, mpsc, oneshot, watch},
    time::{Instant, sleep_until, timeout},
};
use tracing::{debug, info, warn};

use super::{
    admission::Moment,
    asks::{self, Ask, Asks},
    client::{ClientPort, FromClient, Incoming, Outbox, Outgoing},
    delivery::Delivery,
    execution::Execution,
    farewell,
    files::{self, Packing, Progress},
    host::SandboxHost,
    last_use::LastUse,
    record::Record,
    saving::{Kept, Rest, Saves, Stillness, Why, tell_volume},
    streams::{self, Streams, WayReply},
    transfers::{self, Push, SingleFiles, Transfers},
};
use crate::{
    manager::{RolledBack, Roller},
    metrics::Metrics,
    network::Egress,
};

/// How long an attached client has to answer when another one knocks.
const KNOCK: Duration = Duration::from_secs(2);
/// How long a client may take to say where it goes on, counted from its pong.
pub(crate) const GRACE: Duration = Duration::from_millis(250);
/// How long its pong may take.
pub(crate) const GRACE_AT_MOST: Duration = Duration::from_secs(5);
/// How long the last messages may take on their way to a client.
const FAREWELL: Duration = Duration::from_secs(2);
/// How long after the agent closed its end the runtime may take to say why.
pub(crate) const END_EXPLAINED: Duration = Duration::from_secs(5);
/// How long the agent may take to report the end of what it was told to kill.
pub(super) const KILL_ANSWERED: Duration = Duration::from_secs(15);
/// After how long a silent client is asked for a sign of life, and after how long it is given up. The second is long, since a client that
/// does not read is not dead: its program waits for it.
const SILENT_FOR: Duration = Duration::from_secs(60);
const SILENT_AT_MOST: Duration = Duration::from_secs(300);
/// Others that may knock while the attached client is asked for a sign of life.
const MAX_KNOCKING: usize = 8;
/// Beyond this no request is taken that could add to what waits for the agent.
const MAX_AGENT_BACKLOG: usize = MAX_FRAME_TO_AGENT_BYTES;
/// Frames of the agent that are taken together.
const FRAMES_A_TURN: usize = 64;
/// Under load, output between two pings.
const PING_EVERY_BYTES: u64 = 512 * 1024;

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

/// How a driver ended.
#[derive(Debug)]
pub(crate) struct Ending {
    pub(crate) outcome: Outcome,
    /// Nothing is left of the sandbox, so its directory may go too.
    pub(crate) removed: bool,
    pub(crate) dir: PathBuf,
}

/// A client that is attached.
pub(super) struct Client {
    pub(super) port: ClientPort,
    pub(super) outbox: Outbox,
    pub(super) delivery: Option<Delivery>,
    pub(super) grace: Grace,
    /// It asked where its output goes on, and waits for the answer.
    pub(super) announce_resume: bool,
    /// It only looks: what it gets is there for the next one too.
    pub(super) peeks: bool,
    /// From where it wanted its output.
    pub(super) wanted: Option<PerStream<u64>>,
    /// What the newest ping that is on its way will acknowledge.
    ping: Option<Pinged>,
    last_ping: Pinged,
    /// A ping is wanted whatever there is to acknowledge.
    ping_wanted: bool,
    /// A pong to this ping, or a later one, is a sign of life to those who knock.
    alive_from: u64,
    /// It was told to go: nothing more is taken from it.
    pub(super) leaving: bool,
    /// When it last gave a sign of life.
    heard_at: Instant,
    /// Having been silent for long, it was asked whether it is there.
    asked_after_silence: bool,
    /// Its connection takes nothing any longer; what it sent before may still be here.
    deaf: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Pinged {
    /// Pings are numbered, so that the newest pong stands for all before it.
    sequence: u64,
    number: u64,
    upto: PerStream<u64>,
    end: bool,
}

/// Whether a client that has just attached may still say where its output goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Grace {
    Over,
    UntilPong(Instant),
    Until(Instant),
}

pub(super) struct Knocking {
    port: ClientPort,
    greeting: Vec<ServerEvent>,
    reply: oneshot::Sender<Attachment>,
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
    born: Instant,
    max_lifetime: Option<Duration>,
    /// The agent closed its end, and the runtime has until then to say why.
    pub(super) link_closed: Option<Instant>,
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

pub(crate) type OnEnd = Box<dyn Fn(&Outcome) + Send + Sync>;

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
            born: now.checked_sub(age).unwrap_or(now),
            max_lifetime,
            link_closed: None,
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
    pub(crate) async fn run(mut self) -> Ending {
        self.begin_streams();
        loop {
            self.note_idleness();
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

    fn next_deadline(&self) -> Option<Instant> {
        let idle = self.idle_since.and_then(|since| Some(since + self.record.config.idle_timeout?));
        let lifetime = self.max_lifetime.map(|lifetime| self.born + lifetime);
        let execution = self.execution.as_ref().filter(|execution| execution.is_live()).and_then(|execution| execution.deadline);
        let grace = self.client.as_ref().and_then(|client| match client.grace {
            Grace::Over => None,
            Grace::UntilPong(at) | Grace::Until(at) => Some(at),
        });
        let silence =
            self.client.as_ref().map(|client| client.heard_at + if client.asked_after_silence { SILENT_AT_MOST } else { SILENT_FOR });
        let quieting = match &self.saves.stillness {
            Stillness::Quieting { until, .. } => Some(*until),
            Stillness::Going | Stillness::Still => None,
        };
        if !self.saves.may_serve() {
            // It stands still, and so does its time. Another instance that asks is answered all the same.
            let asked = self.knock_deadline.filter(|_| !self.asking.is_empty());
            return [quieting, self.link_closed, asked].into_iter().flatten().min();
        }
        let save = self.saves.next_due();
        let stalled = self.transfers.deadline();
        [idle, lifetime, execution, grace, silence, save, stalled, self.knock_deadline, self.kill_deadline, self.link_closed]
            .into_iter()
            .flatten()
            .min()
    }

    fn on_deadline(&mut self) -> Option<Outcome> {
        let now = Instant::now();
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if !self.saves.may_serve() && !due(self.link_closed) {
            self.give_up_quieting(now);
            if due(self.knock_deadline) && !self.asking.is_empty() {
                self.on_client_gone();
            }
            return None;
        }
        self.give_up_transfers(now);
        if self.saves.saving.is_none() && self.rollback.is_none() {
            if due(self.saves.due) {
                self.save(Why::Disconnected);
            } else if due(self.saves.autosave_due) {
                self.autosave();
            }
        }
        if let Some(lifetime) = self.max_lifetime
            && due(Some(self.born + lifetime))
        {
            return Some(Outcome::Lifetime(lifetime));
        }
        if let (Some(since), Some(idle)) = (self.idle_since, self.record.config.idle_timeout)
            && due(Some(since + idle))
        {
            if self.saves.kept.is_none() || !self.record.config.idle_checkpoint {
                return Some(Outcome::Idle(idle));
            }
            if self.saves.saving.is_none() {
                self.save(Why::Idle);
            }
            return None;
        }
        if due(self.link_closed) {
            return Some(Outcome::Died(End::Failed("the agent closed its end of the conversation".to_owned())));
        }
        if due(self.kill_deadline) {
            return Some(Outcome::Died(End::Failed("the agent did not end the processes it was told to kill".to_owned())));
        }
        if due(self.knock_deadline) {
            info!("the attached client gave no sign of life; the next one takes its place");
            self.on_client_gone();
        }
        if let Some(client) = &mut self.client {
            if due(Some(client.heard_at + SILENT_AT_MOST)) {
                info!("the client has been silent for too long");
                self.on_client_gone();
            } else if due(Some(client.heard_at + SILENT_FOR)) && !client.asked_after_silence {
                client.ping_wanted = true;
                client.asked_after_silence = true;
            }
        }
        if let Some(execution) = self.execution.as_mut()
            && execution.is_live()
            && due(execution.deadline)
        {
            execution.deadline = None;
            self.kill_execution(ExitCause::TimedOut);
        }
        if let Some(Client { grace: Grace::UntilPong(at) | Grace::Until(at), .. }) = &self.client
            && due(Some(*at))
        {
            self.resume(None);
        }
        None
    }

    /// With a client attached or a program running a sandbox is never idle. Since when it is, is written down: a server that is restarted
    /// does not begin to count anew.
    fn note_idleness(&mut self) {
        let busy = self.client.is_some()
            || self.packing.is_some()
            || self.transfers.keep_busy()
            || self.streams.tunnel.serves()
            || self.execution.as_ref().is_some_and(Execution::is_live);
        match (busy, self.idle_since) {
            (true, None) | (false, Some(_)) => return,
            (true, Some(_)) => {
                self.idle_since = None;
                self.record.idle_since = None;
            }
            (false, None) => {
                let now = jiff::Timestamp::now();
                let since = self.record.idle_since.get_or_insert(now);
                let gone_by = Duration::try_from(now.duration_since(*since)).unwrap_or_default();
                self.idle_since = Instant::now().checked_sub(gone_by).or_else(|| Some(Instant::now()));
            }
        }
        if let Err(error) = self.record.write(&self.dir) {
            warn!(%error, "the record of the sandbox could not be written");
        }
    }

    /// It could not be saved when it was idle: that is tried again after as long.
    pub(super) fn count_idleness_anew(&mut self) {
        self.idle_since = Some(Instant::now());
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

    /// Asks the attached client for a sign of life.
    pub(super) fn knock(&mut self) {
        if let Some(client) = &mut self.client {
            client.ping_wanted = true;
            client.alive_from = client.last_ping.sequence + 1;
            self.knock_deadline.get_or_insert_with(|| Instant::now() + KNOCK);
        }
    }

    pub(super) fn on_attach(&mut self, newcomer: Knocking) {
        match &self.client {
            Some(client) if !client.port.outgoing.is_closed() => {
                if self.knocking.len() >= MAX_KNOCKING {
                    // Nobody waits for an answer any longer if this fails.
                    let _ = newcomer.reply.send(Attachment::InUse);
                    return;
                }
                self.knocking.push(newcomer);
                self.knock();
            }
            Some(_) => {
                self.knocking.push(newcomer);
                self.on_client_gone();
            }
            None => self.attach(newcomer),
        }
    }

    fn attach(&mut self, newcomer: Knocking) {
        let Knocking { port, greeting, reply } = newcomer;
        if reply.send(Attachment::Attached).is_err() {
            return;
        }
        let mut outbox = Outbox::default();
        for event in greeting {
            outbox.event(event);
        }
        let news = self.execution.as_ref().is_some_and(Execution::has_news);
        let grace = if news { Grace::UntilPong(Instant::now() + GRACE_AT_MOST) } else { Grace::Over };
        self.client = Some(Client {
            port,
            outbox,
            delivery: None,
            grace,
            announce_resume: false,
            peeks: false,
            wanted: None,
            ping: None,
            last_ping: Pinged::default(),
            ping_wanted: news,
            alive_from: 0,
            leaving: false,
            heard_at: Instant::now(),
            asked_after_silence: false,
            deaf: false,
        });
        self.last_use.note();
        debug!("a client is attached");
    }

    fn on_client_gone(&mut self) {
        self.knock_deadline = None;
        self.waiting = None;
        if let Some(mut client) = self.client.take() {
            self.last_use.note();
            debug!("the client is gone");
            if let Some(Pinged { number, upto, end, .. }) = client.last_answer() {
                self.acknowledge(number, upto, end);
            }
            if client.delivery.is_some()
                && let Some(execution) = &self.execution
            {
                self.writer.queue(&ToAgent::Pause { number: execution.number });
            }
        }
        while self.client.is_none() && !self.knocking.is_empty() {
            let next = self.knocking.remove(0);
            self.attach(next);
        }
        if self.client.is_none() {
            self.asks.let_in();
        }
        self.give_way();
        self.turn_away();
        self.save_soon();
    }

    /// The connection takes nothing any longer. What the client sent before it went is still carried out, except what waits for it to
    /// read.
    fn on_deaf(&mut self) {
        if self.waiting.is_some() {
            self.on_client_gone();
        } else if let Some(client) = &mut self.client {
            client.deaf = true;
        }
    }

    /// The attached client lives: whoever knocked is told so.
    fn turn_away(&mut self) {
        self.knock_deadline = None;
        self.asks.turn_away();
        for asking in self.asking.drain(..) {
            let _ = asking.send(Consent::InUse);
        }
        for knocking in self.knocking.drain(..) {
            let _ = knocking.reply.send(Attachment::InUse);
        }
    }

    fn on_pong(&mut self, payload: &[u8]) {
        let Some(client) = &mut self.client else { return };
        client.heard();
        let sequence = Pinged::sequence_of(payload).filter(|sequence| *sequence <= client.last_ping.sequence);
        if !client.leaving && sequence >= Some(client.alive_from) {
            self.turn_away();
        }
        let Some(client) = &mut self.client else { return };
        if let Grace::UntilPong(_) = client.grace {
            client.grace = Grace::Until(Instant::now() + GRACE);
        }
        let Some(pinged) = client.ping.filter(|pinged| sequence >= Some(pinged.sequence)) else { return };
        client.ping = None;
        self.acknowledge(pinged.number, pinged.upto, pinged.end);
    }

    /// A client has this much of an execution for sure.
    pub(super) fn acknowledge(&mut self, number: u64, upto: PerStream<u64>, end: bool) {
        if self.client.as_ref().is_some_and(|client| client.peeks) {
            return;
        }
        let Some(execution) = self.execution.as_mut().filter(|execution| execution.number == number) else { return };
        let news = end && !execution.end_acknowledged;
        execution.end_acknowledged |= end;
        if execution.acknowledge(upto) || news {
            let (upto, end) = (execution.acknowledged, execution.end_acknowledged);
            self.writer.queue(&ToAgent::Ack { number, upto, end });
        }
    }

    /// A ping that should go out now: right behind output, one at a time.
    fn ping_due(&self) -> Option<Pinged> {
        let client = self.client.as_ref().filter(|client| !client.leaving)?;
        let last = client.last_ping;
        let sequence = last.sequence + 1;
        let now = match &client.delivery {
            Some(delivery) if delivery.is_answered() => {
                Pinged { sequence, number: delivery.number, upto: delivery.handed(), end: delivery.end_handed }
            }
            _ => Pinged { sequence, ..last },
        };
        if client.ping_wanted {
            return Some(now);
        }
        if client.ping.is_some() {
            return None;
        }
        let fresh = |now: u64, last: u64| if last > now { now } else { now - last };
        let bytes = fresh(now.upto.stdout, last.upto.stdout).saturating_add(fresh(now.upto.stderr, last.upto.stderr));
        let news = (now.number, now.upto, now.end) != (last.number, last.upto, last.end);
        (news && (client.outbox.is_empty() || bytes >= PING_EVERY_BYTES)).then_some(now)
    }

    fn hand_out(&mut self, permit: mpsc::OwnedPermit<Outgoing>, ping: Option<Pinged>) {
        let Some(client) = &mut self.client else { return };
        if let Some(ping) = ping {
            client.ping = Some(ping);
            client.last_ping = ping;
            client.ping_wanted = false;
            permit.send(Outgoing::Ping(ping.payload()));
            return;
        }
        let Some(message) = client.outbox.pop() else { return };
        if let Some(delivery) = &mut client.delivery {
            match &message {
                Outgoing::Output(piece) => {
                    let more = delivery.hand(piece);
                    if more {
                        self.writer.queue(&ToAgent::Credit { number: delivery.number, upto: delivery.granted() });
                    }
                }
                Outgoing::End(_) => delivery.end_handed = true,
                _ => {}
            }
        }
        permit.send(message);
    }

    /// Says the last words to the client and ends the sandbox, or leaves it.
    async fn finish(mut self, outcome: Outcome) -> Ending {
        info!(?outcome, "ending");
        for knocking in self.knocking.drain(..) {
            let _ = knocking.reply.send(Attachment::InUse);
        }
        self.late.clear();
        let mut client = self.client.take();
        if let Outcome::Checkpointed { .. } | Outcome::HandedOver = outcome {
            // It counts, and nothing of it here does.
            if let Some(reply) = self.asks.take(asks::What::Checkpoint) {
                let _ = reply.send(Ok(asks::Told::Checkpointed));
            }
            tell(client.as_mut(), farewell::after(&outcome)).await;
            client = None;
        }
        if let Outcome::LeftRunning = outcome {
            self.leave(client, farewell::after(&outcome)).await;
            return Ending { outcome, removed: false, dir: self.dir };
        }
        let told = tell(client.as_mut(), farewell::before(&outcome));
        let ((), removed) = tokio::join!(told, self.runtime.remove(self.record.container(), &self.dir));
        if let Err(error) = &removed {
            warn!(%error, "the sandbox could not be removed whole; the next start of the server tries again");
        }
        if let Some(kept) = self.saves.kept.take() {
            // Its lease may want to be heard meanwhile, and must not wait for that.
            self.commands.close();
            tell_volume(kept, &self.record, &outcome).await;
        }
        (self.on_end)(&outcome);
        tell(client.as_mut(), farewell::after(&outcome)).await;
        Ending { outcome, removed: removed.is_ok(), dir: self.dir }
    }

    /// The sandbox goes on without us. What the client read to its end need not be repeated by the next server.
    async fn leave(&mut self, client: Option<Client>, last_words: Vec<Outgoing>) {
        if let Some(mut client) = client {
            let delivery = client.delivery.take();
            for message in last_words {
                client.outbox.push(message);
            }
            let mut handed = delivery.as_ref().filter(|_| !client.peeks).map(Delivery::handed);
            let mut end_handed = delivery.as_ref().is_some_and(|delivery| delivery.end_handed);
            let until = Instant::now() + FAREWELL;
            while let Some(message) = client.outbox.pop() {
                match (&message, &mut handed) {
                    (Outgoing::Output(piece), Some(handed)) => *handed.get_mut(piece.stream) = piece.end,
                    (Outgoing::End(_), _) => end_handed = true,
                    _ => {}
                }
                if !matches!(tokio::time::timeout_at(until, client.port.outgoing.send(message)).await, Ok(Ok(()))) {
                    break;
                }
            }
            let read = tokio::time::timeout_at(until, async {
                while let Some(incoming) = client.port.incoming.recv().await {
                    if matches!(incoming.message, FromClient::ReadToTheEnd) {
                        return true;
                    }
                }
                false
            });
            let read = read.await;
            if let Some(Pinged { number, upto, end, .. }) = client.last_answer() {
                self.acknowledge(number, upto, end);
            }
            if let (Ok(true), Some(delivery), Some(handed)) = (read, delivery, handed) {
                self.acknowledge(delivery.number, handed, end_handed);
            }
            if let Some(execution) = &self.execution {
                self.writer.queue(&ToAgent::Pause { number: execution.number });
            }
        }
        let flushed = timeout(FAREWELL, self.writer.flush());
        // What was not written is asked for again by the next server: nothing is lost by it.
        let _ = flushed.await;
    }

    pub(super) fn close_client(&mut self, code: CloseCode) {
        if let Some(client) = &mut self.client {
            client.outbox.push(Outgoing::Close(code));
            client.leaving = true;
        }
    }

    /// Tells what has happened in the sandbox by itself.
    pub(super) fn tell_notice(&mut self, code: ErrorCode, message: impl Into<String>) {
        if let Some(client) = &mut self.client {
            client.outbox.notice(code, message);
        }
    }

    pub(super) fn tell_error(&mut self, code: ErrorCode, message: impl Into<String>) {
        if let Some(client) = &mut self.client {
            client.outbox.error(code, message);
        }
    }
}

impl Client {
    /// It gave a sign of life.
    pub(super) fn heard(&mut self) {
        self.heard_at = Instant::now();
        self.asked_after_silence = false;
    }

    /// What it was told and asked before is of no use any more: the sandbox is another one.
    pub(super) fn begin_again(&mut self, grace: Grace) {
        self.outbox.take_back_output();
        self.delivery = None;
        self.announce_resume = false;
        self.wanted = None;
        // An answer to an earlier ping says nothing of what comes now.
        self.ping = None;
        self.last_ping = Pinged { sequence: self.last_ping.sequence, ..Pinged::default() };
        self.ping_wanted = true;
        self.grace = grace;
    }

    /// What its newest pong acknowledges, if nobody has looked at it yet: that it went right behind it takes nothing from its answer.
    fn last_answer(&mut self) -> Option<Pinged> {
        let pong = self.port.pongs.borrow_and_update();
        let sequence = Pinged::sequence_of(&pong).filter(|sequence| pong.has_changed() && *sequence <= self.last_ping.sequence);
        drop(pong);
        self.ping.take_if(|pinged| sequence >= Some(pinged.sequence)).filter(|_| !self.peeks)
    }
}

impl Pinged {
    /// At most 125 bytes, as a ping may carry.
    fn payload(&self) -> Bytes {
        let Self { sequence, number, upto: PerStream { stdout, stderr }, end } = self;
        Bytes::from(format!("{sequence} {number} {stdout} {stderr} {}", u8::from(*end)))
    }

    fn sequence_of(payload: &[u8]) -> Option<u64> {
        std::str::from_utf8(payload).ok()?.split(' ').next()?.parse().ok()
    }
}

/// Puts the last messages on their way, as far as the client reads.
async fn tell(client: Option<&mut Client>, last: Vec<Outgoing>) {
    let Some(client) = client else { return };
    for message in last {
        client.outbox.push(message);
    }
    let until = Instant::now() + FAREWELL;
    while let Some(message) = client.outbox.pop() {
        if !matches!(tokio::time::timeout_at(until, client.port.outgoing.send(message)).await, Ok(Ok(()))) {
            break;
        }
    }
}

/// What the server wants of all its sandboxes; of one that it stops already, that it be left.
async fn stopped(stop: &mut watch::Receiver<Option<Stop>>, draining: bool) -> Stop {
    let news = |stop: &Option<Stop>| if draining { *stop == Some(Stop::Restart) } else { stop.is_some() };
    match stop.wait_for(news).await.map(|stop| *stop) {
        Ok(Some(stop)) => stop,
        // The server is gone; the closed commands tell of it.
        _ => std::future::pending().await,
    }
}

/// The outcome of something under way, never if there is none. Cancel-safe.
async fn under_way<T>(work: Option<&mut BoxFuture<'static, T>>) -> T {
    match work {
        Some(work) => work.await,
        None => std::future::pending().await,
    }
}

/// How a filesystem snapshot comes along, never if there is none. Cancel-safe.
async fn packing(packing: Option<&mut Packing>) -> Progress {
    match packing {
        Some(packing) => packing.next().await,
        None => std::future::pending().await,
    }
}

/// Until the lease is held for certain; for ever if it never is again, which its keeper hears of.
async fn certain(lease: Option<Lease>) {
    let certain = match &lease {
        Some(lease) => lease.certain().await.is_ok(),
        None => false,
    };
    if !certain {
        std::future::pending::<()>().await;
    }
}

async fn receive(from: Option<&mut mpsc::Receiver<Incoming>>) -> Option<FromClient> {
    match from {
        Some(from) => from.recv().await.map(|incoming| incoming.message),
        None => std::future::pending().await,
    }
}

async fn changed(pongs: Option<&mut watch::Receiver<Bytes>>) -> Bytes {
    if let Some(pongs) = pongs
        && pongs.changed().await.is_ok()
    {
        return pongs.borrow_and_update().clone();
    }
    // No connection, or one that has ended: that is heard of elsewhere.
    std::future::pending().await
}

async fn reserve(outgoing: Option<&mpsc::Sender<Outgoing>>) -> Option<mpsc::OwnedPermit<Outgoing>> {
    match outgoing {
        Some(outgoing) => outgoing.clone().reserve_owned().await.ok(),
        None => std::future::pending().await,
    }
}

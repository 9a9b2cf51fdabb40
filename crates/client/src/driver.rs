//! The task that owns the connection. Everything else asks it.
//!
//! It reads only while there is room for what it reads, so a slow consumer stops the socket and in the end the program, and it never
//! waits for anything without hearing its users, so a kill or a close gets through at any time.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::{FutureExt as _, SinkExt as _, StreamExt as _};
use sandboxer_protocol::{ExecutionId, agent::PerStream, client::ErrorCode};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_tungstenite::tungstenite::{Bytes, Message, protocol::CloseFrame};

use crate::{
    Connection, Ended, Error,
    connect::{Attempt, Failure, Socket},
    ends::{DriverEnd, UserEnd, Written, ends},
    outage::{Outage, Setback},
    route::Route,
    session::{Effect, Found, Identity, Session},
    watch::{Silence, Watch},
};

/// How long the last words may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// What users ask of the driver.
#[derive(Debug)]
pub(crate) enum Command {
    Run {
        id: ExecutionId,
        message: String,
        reply: oneshot::Sender<Result<UserEnd, Error>>,
    },
    /// The execution that was there already, if there is one.
    Resume(Resume),
    /// Answered by whether the execution still runs.
    Control {
        id: ExecutionId,
        control: Control,
        reply: oneshot::Sender<bool>,
    },
    /// This client has had the sandbox go back: answered when that was heard here too.
    WentBack {
        generation: u64,
        reply: oneshot::Sender<()>,
    },
    KillSandbox {
        reply: oneshot::Sender<()>,
    },
    Close {
        reply: oneshot::Sender<()>,
    },
}

/// How an execution that was there already is asked for.
#[derive(Debug)]
pub(crate) struct Resume {
    /// No other execution than this one is handed out. None: any.
    pub(crate) only: Option<ExecutionId>,
    pub(crate) reply: oneshot::Sender<Result<Option<UserEnd>, Error>>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Control {
    Signal(i32),
    Resize { rows: u16, cols: u16 },
    Kill,
}

/// What the driver tells without being asked.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Why the driver ended.
    pub(crate) over: OnceLock<Error>,
    pub(crate) generation: AtomicU64,
}

pub(crate) struct Driver {
    session: Session,
    settings: Connection,
    route: Route,
    outage: Outage,
    commands: mpsc::Receiver<Command>,
    shared: Arc<Shared>,
    opened: Option<oneshot::Sender<Result<Identity, Error>>>,
    live: Option<DriverEnd>,
    /// An execution that was there already, until somebody asks for it.
    found: Option<(UserEnd, bool)>,
    resume: Option<Resume>,
    killed: Option<oneshot::Sender<()>>,
    went_back: Option<(u64, oneshot::Sender<()>)>,
    closing: bool,
    closed: Option<oneshot::Sender<()>>,
}

/// Why a connection was left.
enum Leave {
    Again(Setback),
    Over(Error),
}

enum User {
    Command(Option<Command>),
    Input(Option<Written>),
    Consumed,
}

impl Driver {
    pub(crate) fn new(
        session: Session,
        settings: Connection,
        route: Route,
        commands: mpsc::Receiver<Command>,
        shared: Arc<Shared>,
        opened: oneshot::Sender<Result<Identity, Error>>,
    ) -> Self {
        let outage = Outage::new(&settings, Instant::now());
        Self {
            session,
            settings,
            route,
            outage,
            commands,
            shared,
            opened: Some(opened),
            live: None,
            found: None,
            resume: None,
            killed: None,
            went_back: None,
            closing: false,
            closed: None,
        }
    }

    /// Runs until the sandbox has ended, the server is given up, or all users are gone.
    pub(crate) async fn drive(mut self) {
        let mut delay = Duration::ZERO;
        let error = loop {
            let (leave, was_ready) = match self.connect(delay).await {
                Ok(socket) => {
                    self.session.opened();
                    let leave = self.converse(socket).await;
                    if self.session.is_restoring() {
                        self.outage.lost_while_restoring(Instant::now());
                    }
                    let was_ready = self.session.is_ready();
                    self.session.cut();
                    (leave, was_ready)
                }
                Err(leave) => (leave, false),
            };
            let setback = match leave {
                Leave::Again(setback) => setback,
                // Another server may have it, and be out of reach just now.
                Leave::Over(Error::NotFound { message }) if !self.route.knows_nothing() => Setback::Cut(message),
                // Another server may have room for one more.
                Leave::Over(Error::Refused { code: ErrorCode::NoCapacity, message }) if !self.route.has_no_room() => Setback::Cut(message),
                Leave::Over(error) => break error,
            };
            tracing::debug!(?setback, "the sandbox is out of reach");
            // Where it was it is most likely still; who did not have it, or does not answer, is not asked twice in a row.
            if !was_ready && !matches!(setback, Setback::InUse(_)) {
                self.route.turn_to_next();
            }
            match self.outage.setback(&setback, Instant::now(), rand::random()) {
                Ok(wait) => delay = wait,
                Err(error) => break error,
            }
        };
        self.finish(error);
    }

    fn finish(mut self, error: Error) {
        tracing::debug!(%error, "the connection is over");
        // First, so that whoever is woken below finds it.
        let _ = self.shared.over.set(error.clone());
        if let Some(opened) = self.opened.take() {
            let _ = opened.send(Err(error.clone()));
        }
        if matches!(error, Error::SandboxEnded { reason: Ended::Killed, .. })
            && let Some(killed) = self.killed.take()
        {
            let _ = killed.send(());
        }
        if let Some(live) = &mut self.live {
            live.end(Err(error));
        }
        if let Some(closed) = self.closed.take() {
            let _ = closed.send(());
        }
        // Replies that are dropped here are answered by `over`.
    }

    async fn connect(&mut self, delay: Duration) -> Result<Socket, Leave> {
        let connector = self.route.connector().clone();
        let (target, cookies) = (self.session.target(), self.route.cookies().header());
        let attempt = async move {
            sleep(delay).await;
            connector.connect(target, cookies).await
        };
        let mut attempt = std::pin::pin!(attempt);
        let Attempt { headers, result } = loop {
            tokio::select! {
                attempt = &mut attempt => break attempt,
                user = self.user() => self.heard_user(user),
            }
            if self.closing {
                return Err(Leave::Over(Error::Closed));
            }
        };
        self.route.cookies().take(&headers);
        result.map_err(|failure| match failure {
            Failure::Again(setback) => Leave::Again(setback),
            Failure::Final(error) => Leave::Over(error),
        })
    }

    /// Cancel-safe: what was not returned was not taken.
    async fn user(&mut self) -> User {
        let wants_input = self.session.wants_input();
        let (input, consumed) = match &mut self.live {
            Some(live) => (live.input.as_mut().filter(|_| wants_input), Some(&live.consumed)),
            None => (None, None),
        };
        let input = async {
            match input {
                Some(input) => input.recv().await,
                None => std::future::pending().await,
            }
        };
        let consumed = async {
            match consumed {
                Some(consumed) => consumed.changed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            command = self.commands.recv() => User::Command(command),
            written = input => User::Input(written),
            () = consumed => User::Consumed,
        }
    }

    fn heard_user(&mut self, user: User) {
        match user {
            User::Consumed => {}
            User::Input(Some(Written::Data(data))) => self.session.write(&data),
            User::Input(Some(Written::End)) => self.session.end_input(),
            User::Input(None) => {
                if let Some(live) = &mut self.live {
                    live.input = None;
                }
            }
            User::Command(None) => self.closing = true,
            User::Command(Some(Command::Close { reply })) => {
                self.closing = true;
                self.closed = Some(reply);
            }
            User::Command(Some(Command::KillSandbox { reply })) => {
                self.session.kill_sandbox();
                self.killed = Some(reply);
                if let Some(live) = &mut self.live {
                    live.discard();
                }
            }
            User::Command(Some(Command::Control { id, control, reply })) => {
                let runs = match control {
                    Control::Signal(signal) => self.session.signal(&id, signal),
                    Control::Resize { rows, cols } => self.session.resize(&id, rows, cols),
                    Control::Kill => self.session.kill(&id),
                };
                let _ = reply.send(runs);
            }
            User::Command(Some(Command::Resume(resume))) => {
                self.resume = Some(resume);
                self.hand_over_found();
            }
            User::Command(Some(Command::WentBack { generation, reply })) => {
                self.went_back = Some((generation, reply));
                self.settle();
            }
            User::Command(Some(Command::Run { id, message, reply })) => self.run(id, message, reply),
        }
    }

    fn run(&mut self, id: ExecutionId, message: String, reply: oneshot::Sender<Result<UserEnd, Error>>) {
        if self.found.as_ref().is_some_and(|(_, running)| !running) {
            // Nobody asked for what was left of it.
            self.found = None;
        }
        let busy = self.session.is_busy() && self.live.as_ref().is_some_and(|live| !live.is_ended() && !live.is_abandoned());
        let started = if busy { Err(in_progress(self.found.is_some())) } else { self.session.start(id.clone(), message) };
        match started {
            Err(error) => {
                let _ = reply.send(Err(error));
            }
            Ok(()) => {
                let (mut driver, user) = ends(id, PerStream::default(), 0);
                driver.when_started(user, reply);
                self.live = Some(driver);
            }
        }
    }

    /// Who has had it go back need not be told that it did.
    fn settle(&mut self) {
        let reached = self.session.is_ready().then(|| self.session.generation());
        if let Some((_, reply)) = self.went_back.take_if(|(generation, _)| reached.is_some_and(|reached| reached >= *generation)) {
            self.session.rewinding_is_known();
            let _ = reply.send(());
        }
    }

    fn hand_over_found(&mut self) {
        if !self.session.is_ready() {
            return;
        }
        let Some(Resume { only, reply }) = self.resume.take() else { return };
        let now = self.found.as_ref().map(|(user, _)| user.id.clone());
        if let Some(id) = only.filter(|id| now.as_ref() != Some(id)) {
            // The execution that is there stays for a caller that asks for any. A failed send means that the caller has gone.
            let _ = reply.send(Err(Error::ExecutionLost { id, now }));
        } else if let Err(Ok(Some(user))) = reply.send(Ok(self.found.take().map(|(user, _)| user))) {
            // The caller has gone: the execution is still there for the next one.
            self.found = Some((user, true));
        }
    }

    async fn converse(&mut self, socket: Socket) -> Leave {
        let (mut sink, mut stream) = socket.split();
        // Since when it is waited for the next step towards being ready.
        let (mut waiting_since, mut restoring) = (Instant::now(), false);
        let mut watch = Watch::new(waiting_since, &self.settings);
        let (mut outgoing, mut unflushed) = (None, false);
        loop {
            let now = Instant::now();
            self.note_consumed(now);
            if outgoing.is_none() {
                // Whoever leaves says at once what would have had time otherwise.
                let at = if self.closing { now + CLOSE_TIMEOUT } else { now };
                outgoing = self.session.next_message(at).map(Message::text);
            }
            let reading = self.may_read();
            let silence = watch.look(now, reading);
            match silence {
                Silence::Bearable => {}
                Silence::Ping if outgoing.is_none() => {
                    outgoing = Some(Message::Ping(Bytes::new()));
                    watch.pinged(now);
                }
                Silence::Ping => watch.pinged(now),
                Silence::Dead => return Leave::Again(Setback::Cut("the server stopped answering".into())),
            }
            if self.closing && outgoing.is_none() {
                self.say_goodbye(sink, stream).await;
                return Leave::Over(Error::Closed);
            }
            if std::mem::replace(&mut restoring, self.session.is_restoring()) != self.session.is_restoring() {
                waiting_since = now;
            }
            let patience = if restoring { self.settings.restore_timeout } else { self.settings.give_up_after };
            let patience = (!self.session.is_ready()).then(|| waiting_since + patience);
            if patience.is_some_and(|patience| now >= patience) {
                return Leave::Again(Setback::Cut("the sandbox did not become ready".into()));
            }
            let wake = [Some(watch.deadline()), self.session.deadline(), patience].into_iter().flatten().min();
            let has_outgoing = outgoing.is_some();
            tokio::select! {
                message = stream.next(), if reading => {
                    let now = Instant::now();
                    watch.heard(now);
                    match message {
                        Some(Ok(Message::Close(frame))) => {
                            // Completes the closing handshake, so that the server knows that everything before it was read.
                            let _ = timeout(CLOSE_TIMEOUT, stream.next()).await;
                            return self.left(frame);
                        }
                        Some(Ok(Message::Text(text))) => {
                            if let Some(leave) = self.session.received(&text, now).and_then(|effect| self.apply(effect, now)) {
                                return leave;
                            }
                        }
                        Some(Ok(_)) => {}
                        Some(Err(error)) => return self.broken(&error.to_string()),
                        None => return self.broken("the connection was cut"),
                    }
                }
                ready = std::future::poll_fn(|context| {
                    if has_outgoing { sink.poll_ready_unpin(context) } else { sink.poll_flush_unpin(context) }
                }), if has_outgoing || unflushed => {
                    unflushed = has_outgoing;
                    let sent = ready.and_then(|()| outgoing.take().map_or(Ok(()), |message| sink.start_send_unpin(message)));
                    if let Err(error) = sent {
                        return self.unsent(&mut stream, &error.to_string());
                    }
                }
                user = self.user() => self.heard_user(user),
                () = sleep_until(wake.unwrap_or(now)) => {}
            }
        }
    }

    /// Sending failed. What the server said before it went away is still to be read, as far as it is here.
    fn unsent(&mut self, stream: &mut futures_util::stream::SplitStream<Socket>, error: &str) -> Leave {
        while self.may_read() {
            let now = Instant::now();
            match stream.next().now_or_never() {
                Some(Some(Ok(Message::Close(frame)))) => return self.left(frame),
                Some(Some(Ok(Message::Text(text)))) => {
                    if let Some(leave) = self.session.received(&text, now).and_then(|effect| self.apply(effect, now)) {
                        return leave;
                    }
                }
                Some(Some(Ok(_))) => {}
                Some(Some(Err(_)) | None) | None => break,
            }
        }
        self.broken(error)
    }

    fn left(&mut self, frame: Option<CloseFrame>) -> Leave {
        let (code, reason) = frame.map_or((None, String::new()), |frame| (Some(u16::from(frame.code)), frame.reason.to_string()));
        let effect = self.session.closed(code, &reason);
        self.apply(effect, Instant::now()).unwrap_or_else(|| Leave::Again(Setback::Cut("the server closed the connection".into())))
    }

    fn broken(&mut self, error: &str) -> Leave {
        match self.left(None) {
            Leave::Again(_) => Leave::Again(Setback::Cut(error.to_owned())),
            over @ Leave::Over(_) => over,
        }
    }

    async fn say_goodbye(
        &mut self,
        mut sink: futures_util::stream::SplitSink<Socket, Message>,
        mut stream: futures_util::stream::SplitStream<Socket>,
    ) {
        let goodbye = async {
            // Where the connection is broken there is nobody to say it to.
            if sink.send(Message::Close(None)).await.is_ok() && !self.session.is_busy() {
                while let Some(Ok(_)) = stream.next().await {}
            }
        };
        let _ = timeout(CLOSE_TIMEOUT, goodbye).await;
    }

    fn note_consumed(&mut self, now: Instant) {
        match &self.live {
            Some(live) if !live.is_abandoned() => self.session.consumed(live.consumed.upto(), now),
            _ => self.session.discard(now),
        }
    }

    /// Whether there is room for whatever comes next.
    fn may_read(&self) -> bool {
        self.live.as_ref().is_none_or(|live| {
            let bytes = self.session.outstanding() < self.settings.output_buffer as u64;
            live.is_ended() || live.is_abandoned() || (bytes && live.has_room())
        })
    }

    fn apply(&mut self, effect: Effect, now: Instant) -> Option<Leave> {
        match effect {
            Effect::Ready(found) => {
                self.outage.ready(now);
                self.route.reached();
                self.shared.generation.store(self.session.generation(), Ordering::Relaxed);
                self.take_up(found);
                self.settle();
                self.acknowledge_input();
                if let (Some(opened), Some(identity)) = (self.opened.take(), self.session.identity()) {
                    let _ = opened.send(Ok(identity.clone()));
                }
                self.hand_over_found();
            }
            Effect::Started => {
                self.outage.progress();
                if let Some(live) = &mut self.live {
                    live.started();
                }
            }
            Effect::Piece(piece) => {
                self.outage.progress();
                if let Some(live) = &mut self.live {
                    live.deliver(piece);
                }
            }
            Effect::Done(exit) => {
                self.outage.progress();
                if let Some(live) = &mut self.live {
                    live.end(Ok(exit));
                }
            }
            Effect::Failed(error) => {
                if let Some(live) = &mut self.live {
                    live.end(Err(error));
                }
                self.hand_over_found();
            }
            Effect::Progress => {
                self.outage.progress();
                self.acknowledge_input();
            }
            Effect::Rewound(generation) => {
                self.shared.generation.store(generation, Ordering::Relaxed);
                self.found = None;
                if let Some(live) = &mut self.live {
                    live.end(Err(Error::Rewound { generation }));
                }
            }
            Effect::Again(setback) => return Some(Leave::Again(setback)),
            Effect::Over(error) => return Some(Leave::Over(error)),
        }
        None
    }

    fn take_up(&mut self, found: Option<Found>) {
        if let Some(found) = found {
            if let Some(live) = &mut self.live {
                // Asked for before it was known that another one runs.
                live.end(Err(in_progress(true)));
            }
            let (driver, mut user) = ends(found.id, found.from, found.stdin_offset);
            (user.held_to, user.tty) = (found.end, found.tty);
            self.live = Some(driver);
            self.found = Some((user, found.running));
        }
    }

    fn acknowledge_input(&mut self) {
        if let Some(live) = &mut self.live
            && !live.is_ended()
        {
            live.acknowledge(self.session.input_acknowledged());
        }
    }
}

fn in_progress(to_be_had: bool) -> Error {
    let hint = if to_be_had { " Take it by `resume`." } else { "" };
    Error::refused(ErrorCode::ExecutionInProgress, format!("An execution is in progress in this sandbox.{hint}"))
}

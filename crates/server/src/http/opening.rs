//! How a connection begins: the first messages of `/create` and `/attach`, until the sandbox's driver takes over.

use std::{collections::VecDeque, future::Future, sync::Arc, time::Duration};

use axum::{
    Extension,
    extract::{Path, Query, State},
    http::{HeaderMap, StatusCode},
    response::Response,
};
use bytes::Bytes;
use sandboxer_protocol::{
    SandboxId,
    client::{About, CloseCode, CreateConfig, ErrorCode, ErrorEvent, Request, SandboxIdEvent, ServerEvent, Status, StatusUpdate},
};
use serde::Deserialize;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::{
    access::Owner,
    socket,
    v1::FileDesk,
    websocket::{Message, Room, Upgrade, WebSocket},
};
use crate::{
    manager::{ArriveError, Arrived, CreateError, Created, Handle, Manager, Saved},
    sandbox::{
        client::{FromClient, Incoming, MessageRoom},
        driver::{Attachment, GRACE, GRACE_AT_MOST, Stop, TELL_WAITING_AFTER},
    },
    shares::Held,
};

/// Messages that may come while the sandbox is being made or brought, and their bytes: beyond either they wait in the kernel. The last of them may be as
/// large as a message may be.
const MAX_EARLY: usize = 16;
const MAX_EARLY_BYTES: usize = 1 << 20;
/// How often a client that has said as much as that is asked whether it is still there: its going can't be read any more.
const STILL_THERE: Duration = Duration::from_secs(2);
/// What asking may take. One that does not read is there.
const ASKED_WITHIN: Duration = Duration::from_secs(1);

const IN_USE: &str = "Another client is attached to this sandbox. Attach again when it has gone.";
const HANDOFF_IN_PROGRESS: &str = "The sandbox is being handed to another instance. Attach again in a moment.";
const NOT_YET: &str = "The server was restarted, and the sandbox does not answer it yet. It is tried again. Attach again in a moment.";
const OWNER_SILENT: &str = "The instance that has the sandbox does not answer, and it has not saved the sandbox yet. The sandbox may go on there: attach \
                            again in a moment. If that instance is gone for good, the sandbox is lost.";
const STILL_LOOKING: &str = "The volume does not answer, or the sandbox is being saved. This is waited for, and the answer comes here.";
const STILL_ATTACHING: &str = "The client that is attached is asked for a sign of life, the sandbox is being saved, or its \
                               volume does not answer. This is waited for.";
const STILL_MAKING: &str =
    "Making the sandbox takes longer than usual: its files are unpacked, it waits for its turn, or the volume does not answer.";

#[derive(Debug, Deserialize)]
pub(super) struct AttachQuery {
    sandbox_token: Option<String>,
}

pub(super) async fn create(State(manager): State<Arc<Manager>>, Extension(Owner(owner)): Extension<Owner>, upgrade: Upgrade) -> Response {
    let Some(turn) = manager.socket_turns.take(owner.as_deref(), 1) else { return too_many() };
    let room = room(&manager, owner.clone());
    upgrade.on_upgrade(room, move |socket| async move {
        let _open = (manager.sockets.token(), manager.metrics.client(), turn);
        if let Err(error) = opened_create(&manager, owner, socket).await {
            debug!(%error, "a client went away before it had its sandbox");
        }
    })
}

pub(super) async fn attach(
    State(manager): State<Arc<Manager>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(id): Path<String>,
    Query(query): Query<AttachQuery>,
    headers: HeaderMap,
    upgrade: Upgrade,
) -> Response {
    let token = headers.get("x-sandbox-token").and_then(|value| value.to_str().ok()).map(str::to_owned).or(query.sandbox_token);
    let Some(turn) = manager.socket_turns.take(owner.as_deref(), 1) else { return too_many() };
    let room = room(&manager, owner.clone());
    upgrade.on_upgrade(room, move |socket| async move {
        let _open = (manager.sockets.token(), manager.metrics.client(), turn);
        if let Err(error) = opened_attach(&manager, &id, (owner.as_deref(), token.as_deref()), socket).await {
            debug!(%error, "a client went away before it was attached");
        }
    })
}

fn too_many() -> Response {
    super::error(StatusCode::SERVICE_UNAVAILABLE, "too_many_connections", super::TOO_MANY)
}

fn room(manager: &Manager, owner: Option<String>) -> Room {
    Room { max_message_bytes: manager.settings().max_message_bytes, budget: manager.message_budget.clone(), owner }
}

/// A client that is about to have its sandbox.
struct Opening<'a> {
    token: Option<&'a str>,
    socket: WebSocket,
    early: Early,
    /// Its sandbox was brought here for it.
    came: bool,
}

/// What a client has said already, before anybody could hear it.
#[derive(Default)]
struct Early {
    messages: VecDeque<Incoming>,
    bytes: usize,
}

impl Early {
    fn has_room(&self) -> bool {
        self.messages.len() < MAX_EARLY && self.bytes < MAX_EARLY_BYTES
    }

    fn take(&mut self, message: &Message, budget: Vec<Held>) {
        if let Some(read) = socket::read(message) {
            self.add(read, message, budget);
        }
    }

    fn add(&mut self, read: FromClient, message: &Message, budget: Vec<Held>) {
        self.bytes += message.len();
        let room = (!budget.is_empty()).then_some(MessageRoom { _queue: None, _budget: budget });
        self.messages.push_back(Incoming { message: read, _room: room });
    }
}

/// What came of waiting for something with a client.
enum Waited<T> {
    For(T),
    /// The client is gone, or has said what nobody may.
    Left {
        too_large: bool,
    },
}

/// Waits as [`listening`] does, and tells a client once that it waits for long.
async fn listening_and_telling<T>(socket: &mut WebSocket, early: &mut Early, what: &str, work: impl Future<Output = T>) -> Waited<T> {
    let mut work = std::pin::pin!(work);
    match listening(socket, early, timeout(TELL_WAITING_AFTER, &mut work)).await {
        Waited::For(Ok(done)) => return Waited::For(done),
        Waited::For(Err(_)) => {}
        Waited::Left { too_large } => return Waited::Left { too_large },
    }
    let update = StatusUpdate::new(Status::Waiting).message(what);
    if let Ok(Err(_)) = timeout(ASKED_WITHIN, send(socket, &ServerEvent::StatusUpdate(update))).await {
        return Waited::Left { too_large: false };
    }
    listening(socket, early, work).await
}

/// Waits for something, and listens to the client meanwhile: its pings are answered, and it is noticed when it goes.
async fn listening<T>(socket: &mut WebSocket, early: &mut Early, work: impl Future<Output = T>) -> Waited<T> {
    tokio::pin!(work);
    loop {
        let has_room = early.has_room();
        tokio::select! {
            done = &mut work => return Waited::For(done),
            message = socket.recv(), if has_room => match message {
                Some(Ok(Message::Close(_))) => {
                    // Reading on sends the answer.
                    let _ = timeout(GRACE, socket.recv()).await;
                    return Waited::Left { too_large: false };
                }
                Some(Ok(message)) => early.take(&message, socket.ledger().take()),
                Some(Err(error)) => return Waited::Left { too_large: socket::is_too_large(&error) },
                None => return Waited::Left { too_large: false },
            },
            () = sleep(STILL_THERE), if !has_room => {
                if let Ok(Err(_)) = timeout(ASKED_WITHIN, socket.send(Message::Ping(Bytes::new()))).await {
                    return Waited::Left { too_large: false };
                }
            }
        }
    }
}

async fn leave(socket: WebSocket, too_large: bool) -> Result<(), axum::Error> {
    if too_large { socket::close(socket, CloseCode::TooLarge).await } else { Ok(()) }
}

/// What the client said first.
enum First {
    Config(Box<CreateConfig>, Early),
    Refused(CreateError),
    Gone,
    TooLarge,
}

async fn opened_create(manager: &Arc<Manager>, owner: Option<String>, mut socket: WebSocket) -> Result<(), axum::Error> {
    send(&mut socket, &Status::Creating.into()).await?;
    socket.send(Message::Ping(Bytes::from_static(b"created"))).await?;
    let (config, mut early) = match first_message(&mut socket).await? {
        First::Config(config, early) => (*config, early),
        First::Refused(error) => return refuse(socket, &error).await,
        First::Gone => return Ok(()),
        First::TooLarge => return socket::close(socket, CloseCode::TooLarge).await,
    };
    let making = manager.create(config, owner);
    tokio::pin!(making);
    let made = match listening_and_telling(&mut socket, &mut early, STILL_MAKING, &mut making).await {
        Waited::For(made) => made,
        Waited::Left { too_large } => {
            // Nobody knows the id of this sandbox, and nobody ever will.
            if let Ok(created) = making.await {
                created.handle.abandon().await;
            }
            return leave(socket, too_large).await;
        }
    };
    match made {
        Ok(Created { handle, token }) => {
            let id = SandboxIdEvent { sandbox_id: handle.id, sandbox_token: token };
            let greeting = vec![ServerEvent::SandboxId(id), handle.running()];
            hand_over(manager, Opening { token: None, socket, early, came: false }, &handle, greeting).await
        }
        Err(error) => refuse(socket, &error).await,
    }
}

/// Waits for the configuration, not longer than a client needs that means to send one.
async fn first_message(socket: &mut WebSocket) -> Result<First, axum::Error> {
    let mut until = Instant::now() + GRACE_AT_MOST;
    loop {
        let message = match timeout_at(until, socket.recv()).await {
            Err(_) => return Ok(First::Config(Box::default(), Early::default())),
            Ok(None) => return Ok(First::Gone),
            Ok(Some(Err(error))) => return Ok(if socket::is_too_large(&error) { First::TooLarge } else { First::Gone }),
            Ok(Some(Ok(message))) => message,
        };
        match message {
            Message::Pong(_) => until = until.min(Instant::now() + GRACE),
            Message::Close(_) => {
                // Reading on sends the answer.
                let _ = timeout_at(Instant::now() + GRACE, socket.recv()).await;
                return Ok(First::Gone);
            }
            message => match socket::read(&message) {
                Some(FromClient::Request(Request::Configure(config))) => {
                    // The configuration is read: its room must not wait for the client's next message.
                    drop(socket.ledger().take());
                    return Ok(First::Config(config, Early::default()));
                }
                Some(FromClient::Bad(bad)) if bad.about == About::Configuration => {
                    return Ok(First::Refused(CreateError::new(bad.code, bad.message)));
                }
                // It says nothing about the sandbox; what may come is still waited for.
                Some(FromClient::Bad(bad)) if bad.about == About::Other => {
                    drop(socket.ledger().take());
                    send(socket, &ServerEvent::Error(ErrorEvent::new(bad.code, bad.message))).await?;
                }
                Some(other) => {
                    let mut early = Early::default();
                    early.add(other, &message, socket.ledger().take());
                    return Ok(First::Config(Box::default(), early));
                }
                None => {}
            },
        }
    }
}

async fn refuse(mut socket: WebSocket, error: &CreateError) -> Result<(), axum::Error> {
    send(&mut socket, &ServerEvent::StatusUpdate(StatusUpdate::new(Status::CreationError).message(error.message.clone()))).await?;
    send(&mut socket, &ServerEvent::Error(ErrorEvent::new(error.code, error.message.clone()))).await?;
    socket::close(socket, CloseCode::Application).await
}

async fn opened_attach(
    manager: &Arc<Manager>,
    id: &str,
    (owner, token): (Option<&str>, Option<&str>),
    mut socket: WebSocket,
) -> Result<(), axum::Error> {
    let id = id.parse::<SandboxId>().ok();
    let looking = async {
        let handle = match id {
            Some(id) => manager.find(id).await,
            None => None,
        };
        let saved = match (&handle, id) {
            (None, Some(id)) => manager.saved(id).await,
            _ => None,
        };
        // The key that made a sandbox may have it without its token.
        let owned = match (&handle, id) {
            (Some(handle), _) => owner.is_some() && handle.owner.as_deref() == owner,
            (None, Some(id)) => saved.is_some() && token.is_none() && manager.made_by(id, owner).await,
            (None, None) => false,
        };
        (handle, saved, owned)
    };
    let mut early = Early::default();
    let (handle, saved, owned) = match listening_and_telling(&mut socket, &mut early, STILL_LOOKING, looking).await {
        Waited::For(found) => found,
        Waited::Left { too_large } => return leave(socket, too_large).await,
    };
    let needs_token = manager.settings().access.needs_token();
    let allowed = match (&handle, &saved, token) {
        (Some(handle), _, Some(token)) => handle.opens(token),
        (Some(_), _, None) => owned || !needs_token,
        (None, Some(Saved::There(there)), Some(token)) => there.opens(token),
        (None, Some(Saved::There(_)), None) => owned || !needs_token,
        // Who has to show a token is not told which sandboxes there are, unless it is the right one of one that was.
        (None, _, token) => !needs_token || id.is_some_and(|id| manager.obituary(id, token).is_some()),
    };
    if let Some(how) = manager.stopping() {
        return going_away(socket, how).await;
    }
    if !allowed {
        if handle.is_none()
            && let Some(gone) = id.and_then(|id| manager.obituary_of_key(id, owner))
        {
            return refuse_with(socket, Status::NotFound, &gone.message).await;
        }
        let message = "The token is missing or wrong. Send the sandbox_token that came with the sandbox_id.";
        send(&mut socket, &ServerEvent::StatusUpdate(StatusUpdate::new(Status::PermissionDenialError).message(message))).await?;
        send(&mut socket, &ServerEvent::Error(ErrorEvent::new(ErrorCode::PermissionDenied, message))).await?;
        return socket::close(socket, CloseCode::Application).await;
    }
    match (handle, id) {
        (Some(handle), _) => {
            let client = Opening { token, socket, early, came: false };
            hand_over(manager, client, &handle, vec![handle.running()]).await
        }
        (None, Some(id)) if manager.keeps_checkpoints() || saved.is_some() => {
            restore(manager, id, Opening { token, socket, early, came: false }, saved).await
        }
        (None, _) => {
            if manager.keeps_checkpoints() {
                send(&mut socket, &Status::Restoring.into()).await?;
            }
            not_found(manager, id, token, socket).await
        }
    }
}

/// Brings a sandbox here that is not in memory, and makes the socket its client.
async fn restore(manager: &Arc<Manager>, id: SandboxId, client: Opening<'_>, saved: Option<Saved>) -> Result<(), axum::Error> {
    let Opening { token, mut socket, mut early, .. } = client;
    send(&mut socket, &Status::Restoring.into()).await?;
    match saved {
        Some(Saved::There(_)) => {}
        Some(Saved::Unreadable(why)) => return not_restored(socket, why.into()).await,
        None => return not_found(manager, Some(id), token, socket).await,
    }
    let give_up = CancellationToken::new();
    let arriving = manager.arrive(id, give_up.clone());
    let _given_up_with_the_client = give_up.drop_guard();
    let arrived = match listening(&mut socket, &mut early, arriving).await {
        Waited::For(arrived) => arrived,
        Waited::Left { too_large } => return leave(socket, too_large).await,
    };
    match (arrived, manager.stopping()) {
        (Ok(Arrived { handle, greeting }), _) => {
            hand_over(manager, Opening { token, socket, early, came: true }, &handle, vec![greeting]).await
        }
        (Err(_), Some(how)) => going_away(socket, how).await,
        (Err(why), None) => not_restored(socket, why).await,
    }
}

async fn not_restored(mut socket: WebSocket, why: ArriveError) -> Result<(), axum::Error> {
    let (code, why) = match why {
        ArriveError::NotFound(why) => return refuse_with(socket, Status::NotFound, &why).await,
        ArriveError::InUse => return refuse_with(socket, Status::InUse, IN_USE).await,
        ArriveError::HandoffInProgress => return refuse_with(socket, Status::HandoffInProgress, HANDOFF_IN_PROGRESS).await,
        ArriveError::NotYet => return refuse_with(socket, Status::HandoffInProgress, NOT_YET).await,
        ArriveError::OwnerSilent => return refuse_with(socket, Status::HandoffInProgress, OWNER_SILENT).await,
        ArriveError::Later(code, why) => (code, why),
        ArriveError::Failed(why) => (ErrorCode::RestoreFailed, why),
    };
    let message = format!("The sandbox could not be restored, and nothing that is saved of it was changed: {why}");
    send(&mut socket, &ServerEvent::StatusUpdate(StatusUpdate::new(Status::RestoreError).message(message.clone()))).await?;
    send(&mut socket, &ServerEvent::Error(ErrorEvent::new(code, message))).await?;
    socket::close(socket, CloseCode::Application).await
}

/// The server is on its way out, and says so rather than that a sandbox is not there.
async fn going_away(mut socket: WebSocket, how: Stop) -> Result<(), axum::Error> {
    let (code, message) = match how {
        Stop::Drain => (ErrorCode::ServerStopping, "The server is stopping. Try another one."),
        Stop::Restart => (ErrorCode::ServerRestarting, "The server is restarting. Attach again in a moment."),
    };
    send(&mut socket, &ServerEvent::Error(ErrorEvent::new(code, message))).await?;
    socket::close(socket, CloseCode::GoingAway).await
}

async fn not_found(manager: &Manager, id: Option<SandboxId>, token: Option<&str>, socket: WebSocket) -> Result<(), axum::Error> {
    let message = id.and_then(|id| manager.obituary(id, token)).unwrap_or_else(|| "There is no such sandbox.".to_owned());
    refuse_with(socket, Status::NotFound, &message).await
}

/// The sandbox can't be had here, or not now.
async fn refuse_with(mut socket: WebSocket, status: Status, message: &str) -> Result<(), axum::Error> {
    send(&mut socket, &ServerEvent::StatusUpdate(StatusUpdate::new(status).message(message))).await?;
    socket::close(socket, CloseCode::Refused).await
}

/// Makes the socket the client of a sandbox. One that is just being given up here is brought back; one that has just come is not, so that
/// nobody goes round in circles.
async fn hand_over(manager: &Arc<Manager>, client: Opening<'_>, handle: &Handle, greeting: Vec<ServerEvent>) -> Result<(), axum::Error> {
    let Opening { token, mut socket, mut early, came } = client;
    let (port, ends) = socket::channels();
    let attached = match listening_and_telling(&mut socket, &mut early, STILL_ATTACHING, handle.attach(port, greeting)).await {
        Waited::For(attached) => attached,
        Waited::Left { too_large } => return leave(socket, too_large).await,
    };
    match (attached, manager.stopping()) {
        (Some(Attachment::Attached), _) => {
            socket::pump(socket, ends, early.messages, FileDesk::open(handle.clone(), manager.file_turns.clone())).await;
            Ok(())
        }
        (Some(Attachment::InUse), _) => refuse_with(socket, Status::InUse, IN_USE).await,
        (None, Some(how)) => going_away(socket, how).await,
        (None, None) => {
            let looking = async {
                handle.gone().await;
                manager.saved(handle.id).await
            };
            let saved = match listening_and_telling(&mut socket, &mut early, STILL_LOOKING, looking).await {
                Waited::For(saved) => saved,
                Waited::Left { too_large } => return leave(socket, too_large).await,
            };
            match saved {
                Some(saved) if !came => Box::pin(restore(manager, handle.id, Opening { token, socket, early, came }, Some(saved))).await,
                Some(_) => refuse_with(socket, Status::HandoffInProgress, HANDOFF_IN_PROGRESS).await,
                None => not_found(manager, Some(handle.id), token, socket).await,
            }
        }
    }
}

async fn send(socket: &mut WebSocket, event: &ServerEvent) -> Result<(), axum::Error> {
    socket.send(Message::Text(event.to_json().into())).await
}

//! How a connection begins: the first messages of `/create` and `/attach`, until the sandbox's driver takes over.

use std::{collections::VecDeque, sync::Arc};

use axum::{
    Extension,
    extract::{
        Path, Query, State,
        ws::{Message, WebSocket, WebSocketUpgrade},
    },
    http::{HeaderMap, StatusCode},
    response::Response,
};
use bytes::Bytes;
use sandboxer_protocol::{
    SandboxId,
    client::{About, CloseCode, CreateConfig, ErrorCode, ErrorEvent, Request, SandboxIdEvent, ServerEvent, Status, StatusUpdate},
};
use serde::Deserialize;
use tokio::time::{Instant, timeout_at};
use tracing::debug;

use super::{access::Owner, socket};
use crate::{
    manager::{CreateError, Created, Handle, Manager},
    sandbox::{
        client::FromClient,
        driver::{Attachment, GRACE, GRACE_AT_MOST, Stop},
    },
};

/// Messages that may come while the sandbox is being made. Beyond it they wait in the kernel.
const MAX_EARLY: usize = 16;

/// WebSockets at once.
const MAX_SOCKETS: usize = 5_000;

#[derive(Debug, Deserialize)]
pub(super) struct AttachQuery {
    sandbox_token: Option<String>,
}

pub(super) async fn create(
    State(manager): State<Arc<Manager>>,
    Extension(Owner(owner)): Extension<Owner>,
    upgrade: WebSocketUpgrade,
) -> Response {
    if manager.sockets.len() >= MAX_SOCKETS {
        return super::error(
            StatusCode::SERVICE_UNAVAILABLE,
            "too_many_connections",
            "This server has as many connections as it can. Try again later.",
        );
    }
    upgrade_with(&manager, upgrade).on_upgrade(move |socket| async move {
        let _open = (manager.sockets.token(), manager.metrics.client());
        if let Err(error) = opened_create(&manager, owner, socket).await {
            debug!(%error, "a client went away before it had its sandbox");
        }
    })
}

pub(super) async fn attach(
    State(manager): State<Arc<Manager>>,
    Path(id): Path<String>,
    Query(query): Query<AttachQuery>,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> Response {
    let token = headers.get("x-sandbox-token").and_then(|value| value.to_str().ok()).map(str::to_owned).or(query.sandbox_token);
    if manager.sockets.len() >= MAX_SOCKETS {
        return super::error(
            StatusCode::SERVICE_UNAVAILABLE,
            "too_many_connections",
            "This server has as many connections as it can. Try again later.",
        );
    }
    upgrade_with(&manager, upgrade).on_upgrade(move |socket| async move {
        let _open = (manager.sockets.token(), manager.metrics.client());
        if let Err(error) = opened_attach(&manager, &id, token.as_deref(), socket).await {
            debug!(%error, "a client went away before it was attached");
        }
    })
}

fn upgrade_with(manager: &Manager, upgrade: WebSocketUpgrade) -> WebSocketUpgrade {
    let limit = manager.settings().max_message_bytes;
    // Messages are handed over one at a time, each at once: there is nothing to gather.
    upgrade.max_message_size(limit).max_frame_size(limit).write_buffer_size(0)
}

/// What the client said first.
enum First {
    Config(Box<CreateConfig>, VecDeque<FromClient>),
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
    let made = loop {
        tokio::select! {
            made = &mut making => break made,
            message = socket.recv(), if early.len() < MAX_EARLY => match message {
                Some(Ok(message)) => early.extend(read(message)),
                other => {
                    // Nobody knows the id of this sandbox, and nobody ever will.
                    if let Ok(created) = making.await {
                        created.handle.abandon().await;
                    }
                    let too_large = matches!(&other, Some(Err(error)) if socket::is_too_large(error));
                    return if too_large { socket::close(socket, CloseCode::TooLarge).await } else { Ok(()) };
                }
            },
        }
    };
    match made {
        Ok(Created { handle, token }) => {
            let id = SandboxIdEvent { sandbox_id: handle.id, sandbox_token: token };
            let greeting = vec![ServerEvent::SandboxId(id), Status::Running.into()];
            hand_over(manager, &handle, None, socket, greeting, early).await
        }
        Err(error) => refuse(socket, &error).await,
    }
}

/// Waits for the configuration, not longer than a client needs that means to send one.
async fn first_message(socket: &mut WebSocket) -> Result<First, axum::Error> {
    let mut until = Instant::now() + GRACE_AT_MOST;
    loop {
        let message = match timeout_at(until, socket.recv()).await {
            Err(_) => return Ok(First::Config(Box::default(), VecDeque::new())),
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
            message => match read(message) {
                Some(FromClient::Request(Request::Configure(config))) => return Ok(First::Config(config, VecDeque::new())),
                Some(FromClient::Bad(bad)) if bad.about == About::Configuration => {
                    return Ok(First::Refused(CreateError::new(bad.code, bad.message)));
                }
                // It says nothing about the sandbox; what may come is still waited for.
                Some(FromClient::Bad(bad)) if bad.about == About::Other => {
                    send(socket, &ServerEvent::Error(ErrorEvent::new(bad.code, bad.message))).await?;
                }
                Some(other) => return Ok(First::Config(Box::default(), VecDeque::from([other]))),
                None => {}
            },
        }
    }
}

fn read(message: Message) -> Option<FromClient> {
    socket::read(&message)
}

async fn refuse(mut socket: WebSocket, error: &CreateError) -> Result<(), axum::Error> {
    send(&mut socket, &ServerEvent::StatusUpdate(StatusUpdate::new(Status::CreationError).message(error.message.clone()))).await?;
    send(&mut socket, &ServerEvent::Error(ErrorEvent::new(error.code, error.message.clone()))).await?;
    socket::close(socket, CloseCode::Application).await
}

async fn opened_attach(manager: &Arc<Manager>, id: &str, token: Option<&str>, mut socket: WebSocket) -> Result<(), axum::Error> {
    let id = id.parse::<SandboxId>().ok();
    let handle = match id {
        Some(id) => manager.find(id).await,
        None => None,
    };
    let allowed = match (&handle, token) {
        (Some(handle), Some(token)) => handle.opens(token),
        (Some(_), None) => !manager.settings().access.needs_token(),
        // Who has to show a token is not told which sandboxes there are, unless it is the right one of one that was.
        (None, token) => !manager.settings().access.needs_token() || id.is_some_and(|id| manager.obituary(id, token).is_some()),
    };
    if let Some(how) = manager.stopping() {
        return going_away(socket, how).await;
    }
    if !allowed {
        let message = "The token is missing or wrong. Send the sandbox_token that came with the sandbox_id.";
        send(&mut socket, &ServerEvent::StatusUpdate(StatusUpdate::new(Status::PermissionDenialError).message(message))).await?;
        send(&mut socket, &ServerEvent::Error(ErrorEvent::new(ErrorCode::PermissionDenied, message))).await?;
        return socket::close(socket, CloseCode::Application).await;
    }
    match handle {
        Some(handle) => hand_over(manager, &handle, token, socket, vec![Status::Running.into()], VecDeque::new()).await,
        None => not_found(manager, id, token, socket).await,
    }
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

async fn not_found(manager: &Manager, id: Option<SandboxId>, token: Option<&str>, mut socket: WebSocket) -> Result<(), axum::Error> {
    let message = id.and_then(|id| manager.obituary(id, token)).unwrap_or_else(|| "There is no such sandbox.".to_owned());
    send(&mut socket, &ServerEvent::StatusUpdate(StatusUpdate::new(Status::NotFound).message(message))).await?;
    socket::close(socket, CloseCode::Refused).await
}

/// Makes the socket the client of a sandbox, and serves it until it closes.
async fn hand_over(
    manager: &Manager,
    handle: &Handle,
    token: Option<&str>,
    mut socket: WebSocket,
    greeting: Vec<ServerEvent>,
    early: VecDeque<FromClient>,
) -> Result<(), axum::Error> {
    let (port, ends) = socket::channels();
    match handle.attach(port, greeting).await {
        Some(Attachment::Attached) => {
            socket::pump(socket, ends, early).await;
            Ok(())
        }
        Some(Attachment::InUse) => {
            let message = "Another client is attached to this sandbox. Attach again when it has gone.";
            send(&mut socket, &ServerEvent::StatusUpdate(StatusUpdate::new(Status::InUse).message(message))).await?;
            socket::close(socket, CloseCode::Refused).await
        }
        None => match manager.stopping() {
            Some(how) => going_away(socket, how).await,
            None => not_found(manager, Some(handle.id), token, socket).await,
        },
    }
}

async fn send(socket: &mut WebSocket, event: &ServerEvent) -> Result<(), axum::Error> {
    socket.send(Message::Text(event.to_json().into())).await
}

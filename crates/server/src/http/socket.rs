//! A WebSocket once its sandbox is found: messages in, messages out, until one side closes.

use std::{collections::VecDeque, future::poll_fn, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{
    SinkExt as _, StreamExt as _,
    stream::{SplitSink, SplitStream},
};
use sandboxer_protocol::client::{About, BadRequest, CloseCode, ErrorCode, Request, ServerEvent, put_output};
use tokio::{
    sync::{Semaphore, mpsc, watch},
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::{
    v1::FileDesk,
    websocket::{CloseFrame, Ledger, Message, Utf8Bytes, WebSocket},
};
use crate::sandbox::client::{
    Acknowledgement, ClientPort, FromClient, INCOMING_KIB, INCOMING_REQUESTS, Incoming, MessageRoom, OUTGOING_MESSAGES, Outgoing,
};

/// How long a client may take to answer a close, and to read what was sent before it.
const CLOSE_ANSWERED: Duration = Duration::from_secs(2);
/// How long what was handed over may take once the sandbox has let go of the connection.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// The connection's ends of the channels to the driver.
pub(super) struct Ends {
    incoming: mpsc::Sender<Incoming>,
    room: Arc<Semaphore>,
    pongs: watch::Sender<Bytes>,
    outgoing: mpsc::Receiver<Outgoing>,
    closing: CancellationToken,
}

pub(super) fn channels() -> (ClientPort, Ends) {
    let (to_driver, incoming) = mpsc::channel(INCOMING_REQUESTS);
    let (to_socket, outgoing) = mpsc::channel(OUTGOING_MESSAGES);
    let (pong, pongs) = watch::channel(Bytes::new());
    let closing = CancellationToken::new();
    let acknowledgement = Acknowledgement::ByPong;
    let port = ClientPort { incoming, pongs, outgoing: to_socket, acknowledgement, _closing: closing.clone().drop_guard() };
    (port, Ends { incoming: to_driver, room: Arc::new(Semaphore::new(INCOMING_KIB)), pongs: pong, outgoing, closing })
}

/// Serves a connection until it closes, from either side.
pub(super) async fn pump(
    socket: WebSocket,
    ends: Ends,
    early: VecDeque<Incoming>,
    (files, mut answers): (FileDesk, mpsc::Receiver<ServerEvent>),
) {
    let Ends { incoming, room, pongs, mut outgoing, closing } = ends;
    let ledger = socket.ledger().clone();
    let (mut sink, mut stream) = socket.split();
    let files = &files;
    let reading = async {
        for message in early {
            if !forward(message, &incoming, files).await {
                return Read::Closed;
            }
        }
        read_all(&mut stream, &ledger, &incoming, &room, &pongs, files).await
    };
    let (mut too_large, mut closed) = (false, false);
    let let_go = async {
        closing.cancelled().await;
        tokio::time::sleep(LAST_WORDS).await;
    };
    tokio::pin!(reading);
    tokio::select! {
        read = &mut reading => match read {
            Read::TooLarge => too_large = true,
            Read::Closed => closed = true,
            Read::Broken => {}
        },
        wrote = write_all(&mut sink, &mut outgoing, &mut answers) => match wrote {
            // Having closed, it waits for the answer: that says that everything was read.
            Wrote::Close => if let Ok(Read::Closed) = timeout(CLOSE_ANSWERED, reading).await {
                let _ = incoming.try_send(Incoming { message: FromClient::ReadToTheEnd, _room: None });
            },
            // The client has gone. What it said before is here, and counts.
            Wrote::Broken => {
                outgoing.close();
                let _ = timeout(CLOSE_ANSWERED, reading).await;
            }
            Wrote::Ended => {}
        },
        () = let_go => debug!("the client did not take its last messages"),
    }
    if closed {
        // The answer to the client's close is queued; this sends it.
        let _ = timeout(CLOSE_ANSWERED, sink.flush()).await;
    }
    if too_large {
        // It may be too busy sending to hear this.
        let _ = timeout(CLOSE_ANSWERED, sink_close(&mut sink, CloseCode::TooLarge)).await;
    }
}

enum Read {
    /// The client closed, or answered a close.
    Closed,
    TooLarge,
    Broken,
}

async fn read_all(
    stream: &mut SplitStream<WebSocket>,
    ledger: &Ledger,
    incoming: &mpsc::Sender<Incoming>,
    room: &Arc<Semaphore>,
    pongs: &watch::Sender<Bytes>,
    files: &FileDesk,
) -> Read {
    loop {
        match stream.next().await {
            None => return Read::Broken,
            Some(Err(error)) => return if is_too_large(&error) { Read::TooLarge } else { Read::Broken },
            Some(Ok(Message::Pong(payload))) => {
                pongs.send_replace(payload);
            }
            Some(Ok(Message::Close(_))) => return Read::Closed,
            Some(Ok(message)) => {
                if let Some(read) = read(&message) {
                    let kib = u32::try_from(message.into_data().len() / 1024 + 1).unwrap_or(u32::MAX).min(INCOMING_KIB as u32);
                    let budget = ledger.take();
                    let queue = Arc::clone(room).acquire_many_owned(kib).await.ok();
                    let room = Some(MessageRoom { _queue: queue, _budget: budget });
                    // If the driver has let go of this client, only its close is waited for.
                    forward(Incoming { message: read, _room: room }, incoming, files).await;
                }
            }
        }
    }
}

/// Hands a message to whoever deals with it. False: the driver has let go of this client.
async fn forward(message: Incoming, incoming: &mpsc::Sender<Incoming>, files: &FileDesk) -> bool {
    match message {
        Incoming { message: FromClient::Request(Request::File(request)), _room } => {
            files.take(*request, _room).await;
            true
        }
        other => incoming.send(other).await.is_ok(),
    }
}

enum Wrote {
    Close,
    Ended,
    Broken,
}

async fn write_all(
    sink: &mut SplitSink<WebSocket, Message>,
    outgoing: &mut mpsc::Receiver<Outgoing>,
    answers: &mut mpsc::Receiver<ServerEvent>,
) -> Wrote {
    // Used again for each piece of output: memory from the system is as dear as what is done with it. Given back between executions.
    let mut buffer = String::new();
    loop {
        let message = tokio::select! {
            message = outgoing.recv() => message,
            Some(answer) = answers.recv() => Some(Outgoing::Event(answer)),
        };
        let Some(message) = message else { return Wrote::Ended };
        let mut next = Some(message);
        // What is there goes out together; then the client gets it at once.
        while let Some(message) = next {
            let fed = match message {
                Outgoing::Event(event) => sink.feed(Message::Text(event.to_json().into())).await,
                Outgoing::Output(piece) => {
                    put_output(&mut buffer, piece.stream, piece.encoding, &piece.data, piece.offset, piece.end, &piece.execution);
                    // What it came from is free again before the next wait.
                    drop(piece);
                    feed_text(sink, &mut buffer).await
                }
                Outgoing::End(events) => {
                    buffer = String::new();
                    feed_all(sink, events).await
                }
                Outgoing::Ping(payload) => sink.feed(Message::Ping(payload)).await,
                Outgoing::Close(code) => return if sink_close(sink, code).await.is_ok() { Wrote::Close } else { Wrote::Broken },
            };
            if fed.is_err() {
                return Wrote::Broken;
            }
            next = outgoing.try_recv().ok();
        }
        if sink.flush().await.is_err() {
            return Wrote::Broken;
        }
    }
}

/// Sends what is in the buffer and leaves it empty, to be used again.
async fn feed_text(sink: &mut SplitSink<WebSocket, Message>, buffer: &mut String) -> Result<(), axum::Error> {
    let text = Utf8Bytes::from(std::mem::take(buffer));
    sink.feed(Message::Text(text.clone())).await?;
    // Until this is ready for the next one, it holds the message itself.
    poll_fn(|context| sink.poll_ready_unpin(context)).await?;
    // It was copied to where frames are put together: this is the only one who has it, and gets its memory.
    let mut emptied = Vec::from(Bytes::from(text));
    emptied.clear();
    *buffer = String::from_utf8(emptied).unwrap_or_default();
    Ok(())
}

async fn feed_all(sink: &mut SplitSink<WebSocket, Message>, events: Vec<ServerEvent>) -> Result<(), axum::Error> {
    for event in events {
        sink.feed(Message::Text(event.to_json().into())).await?;
    }
    Ok(())
}

async fn sink_close(sink: &mut SplitSink<WebSocket, Message>, code: CloseCode) -> Result<(), axum::Error> {
    sink.send(close_message(code)).await
}

fn close_message(code: CloseCode) -> Message {
    Message::Close(Some(CloseFrame { code: code.number().into(), reason: Utf8Bytes::default() }))
}

/// Closes a socket that has no sandbox, and waits for the answer so that what was sent before is read.
pub(super) async fn close(mut socket: WebSocket, code: CloseCode) -> Result<(), axum::Error> {
    socket.send(close_message(code)).await?;
    let answered = async { while let Some(Ok(_)) = socket.recv().await {} };
    // A client that does not answer has been told everything all the same.
    let _ = timeout(CLOSE_ANSWERED, answered).await;
    Ok(())
}

/// What a message means to a sandbox; none: nothing.
pub(super) fn read(message: &Message) -> Option<FromClient> {
    match message {
        Message::Text(text) => Some(match Request::parse(text) {
            Ok(request) => FromClient::Request(request),
            Err(bad) => FromClient::Bad(bad),
        }),
        Message::Binary(_) => Some(FromClient::Bad(BadRequest {
            about: About::Other,
            code: ErrorCode::BinaryFrame,
            message: "Messages are JSON text, not binary.".to_owned(),
        })),
        Message::Ping(_) | Message::Pong(_) | Message::Close(_) | Message::Frame(_) => None,
    }
}

/// Whether a message was over the size limit.
pub(super) fn is_too_large(error: &axum::Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if matches!(error.downcast_ref(), Some(tungstenite::Error::Capacity(_))) {
            return true;
        }
        cause = error.source();
    }
    false
}

//! WebSockets whose messages are counted as they arrive.
//!
//! A message beyond [`FREE_BYTES`] takes room from the budget of its key before more of it is read,
//! and holds that room until it has been dealt with. One that stops coming ends the connection.

use std::{
    collections::VecDeque,
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
};

use axum::{
    body::Body,
    extract::{FromRequestParts, WebSocketUpgrade},
    http::{HeaderValue, StatusCode, header, request::Parts},
    response::{IntoResponse as _, Response},
};
use futures_util::{FutureExt as _, Sink, SinkExt, Stream, StreamExt as _, future::BoxFuture};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_tungstenite::WebSocketStream;
pub(super) use tungstenite::{Message, Utf8Bytes, protocol::CloseFrame};
use tungstenite::{
    handshake::derive_accept_key,
    protocol::{Role, WebSocketConfig},
};

use super::{body::Portions, connections::Connection};
use crate::shares::{Budget, Held};

/// A message up to this size takes no room from the budget: the number of sockets bounds these.
const FREE_BYTES: u64 = 16 * 1024;
/// The size of one read.
const READ_BYTES: usize = 16 * 1024;
/// The most that waits to be sent on one socket: more than the largest message of the server.
const MAX_UNSENT_BYTES: usize = 4 << 20;
/// Control frames that are read while the client takes nothing: each may have to be answered.
const MAX_UNANSWERED: u32 = 64;
/// The largest payload of a control frame, by the protocol.
const MAX_CONTROL_BYTES: u64 = 125;
/// Messages smaller than this wait for each other until they are flushed.
const SMALL_MESSAGES_BYTES: usize = 4096;

/// A request that wants to become a WebSocket.
pub(super) struct Upgrade {
    on_upgrade: OnUpgrade,
    accept: String,
    connection: Option<Arc<Connection>>,
}

/// The bounds of one WebSocket.
pub(super) struct Room {
    pub(super) max_message_bytes: usize,
    pub(super) budget: Budget,
    pub(super) owner: Option<String>,
}

impl<S: Send + Sync> FromRequestParts<S> for Upgrade {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Response> {
        let on_upgrade = parts.extensions.get::<OnUpgrade>().cloned();
        let connection = parts.extensions.get::<Arc<Connection>>().cloned();
        // axum checks the request, and words its refusal.
        drop(WebSocketUpgrade::from_request_parts(parts, state).await.map_err(axum::response::IntoResponse::into_response)?);
        let key = parts.headers.get(header::SEC_WEBSOCKET_KEY);
        let (Some(on_upgrade), Some(key)) = (on_upgrade, key) else { return Err(StatusCode::BAD_REQUEST.into_response()) };
        Ok(Self { on_upgrade, accept: derive_accept_key(key.as_bytes()), connection })
    }
}

impl Upgrade {
    /// Answers the request, and runs `work` with the socket.
    pub(super) fn on_upgrade<F>(self, room: Room, work: impl FnOnce(WebSocket) -> F + Send + 'static) -> Response
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let Self { on_upgrade, accept, connection } = self;
        tokio::spawn(async move {
            let _counts_while_it_is_open = connection;
            let Ok(upgraded) = on_upgrade.await else { return };
            let config = WebSocketConfig::default()
                .read_buffer_size(READ_BYTES)
                .write_buffer_size(SMALL_MESSAGES_BYTES)
                .max_write_buffer_size(MAX_UNSENT_BYTES)
                .max_message_size(Some(room.max_message_bytes))
                .max_frame_size(Some(room.max_message_bytes));
            let ledger = Ledger::default();
            let io = Metered { io: TokioIo::new(upgraded), meter: Meter::new(room, ledger.clone()) };
            let inner = WebSocketStream::from_raw_socket(io, Role::Server, Some(config)).await;
            work(WebSocket { inner, ledger }).await;
        });
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = response.headers_mut();
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        if let Ok(accept) = HeaderValue::from_str(&accept) {
            headers.insert(header::SEC_WEBSOCKET_ACCEPT, accept);
        }
        response
    }
}

pub(super) struct WebSocket {
    inner: WebSocketStream<Metered<TokioIo<Upgraded>>>,
    ledger: Ledger,
}

impl WebSocket {
    pub(super) async fn recv(&mut self) -> Option<Result<Message, axum::Error>> {
        self.next().await
    }

    pub(super) async fn send(&mut self, message: Message) -> Result<(), axum::Error> {
        SinkExt::send(self, message).await
    }

    /// The ledger in which the room of the last message is found.
    pub(super) fn ledger(&self) -> &Ledger {
        &self.ledger
    }
}

impl Stream for WebSocket {
    type Item = Result<Message, axum::Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let message = ready!(self.inner.poll_next_unpin(context));
        if let Some(Ok(message @ (Message::Text(_) | Message::Binary(_)))) = &message {
            self.ledger.arrived(message.len() as u64);
        }
        Poll::Ready(message.map(|message| message.map_err(axum::Error::new)))
    }
}

impl Sink<Message> for WebSocket {
    type Error = axum::Error;

    fn poll_ready(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<(), axum::Error>> {
        self.inner.poll_ready_unpin(context).map_err(axum::Error::new)
    }

    fn start_send(mut self: Pin<&mut Self>, message: Message) -> Result<(), axum::Error> {
        self.inner.start_send_unpin(message).map_err(axum::Error::new)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<(), axum::Error>> {
        self.inner.poll_flush_unpin(context).map_err(axum::Error::new)
    }

    fn poll_close(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<(), axum::Error>> {
        self.inner.poll_close_unpin(context).map_err(axum::Error::new)
    }
}

/// The room that large messages of a socket hold, from the meter to their receiver.
#[derive(Clone, Default)]
pub(super) struct Ledger(Arc<Mutex<Rooms>>);

#[derive(Default)]
struct Rooms {
    /// Of messages that are whole, in their order.
    whole: VecDeque<Vec<Held>>,
    /// Of the message that was received last.
    last: Vec<Held>,
}

impl Ledger {
    /// The room of the message that was received last. Without this call it is free again with the next.
    pub(super) fn take(&self) -> Vec<Held> {
        std::mem::take(&mut self.lock().last)
    }

    fn arrived(&self, bytes: u64) {
        let mut rooms = self.lock();
        rooms.last = if bytes > FREE_BYTES { rooms.whole.pop_front().unwrap_or_default() } else { Vec::new() };
    }

    fn lock(&self) -> MutexGuard<'_, Rooms> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection whose incoming frames are counted on their way to the parser.
struct Metered<S> {
    io: S,
    meter: Meter,
}

struct Meter {
    room: Room,
    ledger: Ledger,
    /// The header of the next frame, as far as it was read.
    head: [u8; 14],
    filled: usize,
    /// Of the frame that is being read: a control frame may come between those of a message.
    frame: Option<Frame>,
    /// Bytes of the message that is being read.
    message: u64,
    held: Vec<Held>,
    wanted_kib: u32,
    held_kib: u32,
    /// The room that is waited for, in KiB.
    waiting: Option<(u32, BoxFuture<'static, Held>)>,
    portions: Portions,
    /// Control frames since the client last took anything.
    unanswered: u32,
    /// The client takes nothing at the moment.
    blocked: bool,
    /// The client broke the protocol in a way that the parser would find out too late.
    broken: bool,
}

#[derive(Clone, Copy)]
struct Frame {
    left: u64,
    /// The frame is the last of its message.
    last: bool,
}

impl Meter {
    fn new(room: Room, ledger: Ledger) -> Self {
        Self {
            room,
            ledger,
            head: [0; 14],
            filled: 0,
            frame: None,
            message: 0,
            held: Vec::new(),
            wanted_kib: 0,
            held_kib: 0,
            waiting: None,
            portions: Portions::default(),
            unanswered: 0,
            blocked: false,
            broken: false,
        }
    }

    /// Follows the frames in what was read.
    fn read(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            if let Some(frame) = &mut self.frame {
                let here = frame.left.min(data.len() as u64);
                frame.left -= here;
                data = &data[usize::try_from(here).unwrap_or(data.len())..];
                self.end_frame();
                continue;
            }
            self.head[self.filled] = data[0];
            self.filled += 1;
            data = &data[1..];
            let Some(length) = payload(&self.head[..self.filled]) else { continue };
            self.filled = 0;
            let (opcode, last) = (self.head[0] & 0x0f, self.head[0] & 0x80 != 0);
            let is_data = opcode < 8;
            if is_data {
                self.message = self.message.saturating_add(length);
                self.want();
            } else {
                // The parser holds all of a frame before it refuses one that is too large.
                self.broken |= length > MAX_CONTROL_BYTES || !last;
                self.unanswered = self.unanswered.saturating_add(1);
            }
            self.frame = Some(Frame { left: length, last: is_data && last });
            self.end_frame();
        }
    }

    fn end_frame(&mut self) {
        let Some(Frame { left: 0, last }) = self.frame else { return };
        self.frame = None;
        if !last {
            return;
        }
        if self.message > FREE_BYTES {
            let held = std::mem::take(&mut self.held);
            self.ledger.lock().whole.push_back(held);
        }
        self.waiting = None;
        (self.message, self.wanted_kib, self.held_kib) = (0, 0, 0);
    }

    /// The room that the message needs as far as it was announced.
    fn want(&mut self) {
        if self.message > FREE_BYTES {
            // A larger one is refused by the parser.
            let bytes = self.message.min(self.room.max_message_bytes as u64);
            self.wanted_kib = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX).min(self.room.budget.each());
        }
    }

    fn poll_room(&mut self, context: &mut Context<'_>) -> Poll<()> {
        while self.held_kib < self.wanted_kib {
            let (budget, owner, more) = (&self.room.budget, &self.room.owner, self.wanted_kib - self.held_kib);
            let waiting = self.waiting.get_or_insert_with(|| {
                let (budget, owner) = (budget.clone(), owner.clone());
                (more, async move { budget.take(owner.as_deref(), more).await }.boxed())
            });
            let held = ready!(waiting.1.poll_unpin(context));
            self.held_kib += waiting.0;
            self.waiting = None;
            self.held.push(held);
        }
        Poll::Ready(())
    }
}

/// The length of a frame's payload, once its header is whole.
fn payload(head: &[u8]) -> Option<u64> {
    let second = *head.get(1)?;
    let mask = if second & 0x80 == 0 { 0 } else { 4 };
    let number = |bytes: &[u8]| bytes.iter().fold(0, |sum, byte| (sum << 8) | u64::from(*byte));
    let (length, size) = match second & 0x7f {
        126 => (number(head.get(2..4)?), 4),
        127 => (number(head.get(2..10)?), 10),
        short => (u64::from(short), 2),
    };
    (head.len() >= size + mask).then_some(length)
}

impl<S: AsyncRead + Unpin> AsyncRead for Metered<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Self { io, meter } = &mut *self;
        ready!(meter.poll_room(context));
        if meter.blocked && meter.unanswered >= MAX_UNANSWERED {
            // Whatever lets the next write succeed wakes this task.
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        match Pin::new(io).poll_read(context, buffer) {
            Poll::Ready(read) => {
                read?;
                let data = &buffer.filled()[before..];
                meter.portions.took(data.len());
                if meter.message <= FREE_BYTES {
                    meter.portions.reset();
                }
                meter.read(data);
                if meter.broken {
                    return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, "a control frame is too large or not whole")));
                }
                Poll::Ready(Ok(()))
            }
            // A message that holds room has to come to its end.
            Poll::Pending if meter.held_kib > 0 => meter
                .portions
                .poll_late(context)
                .map(|()| Err(io::Error::new(io::ErrorKind::TimedOut, "the rest of a message did not come in time"))),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Metered<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(context, data);
        self.meter.blocked = written.is_pending();
        if written.is_ready() {
            self.meter.unanswered = 0;
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    fn meter(budget: &Budget) -> (Meter, Ledger) {
        let ledger = Ledger::default();
        let room = Room { max_message_bytes: 1 << 20, budget: budget.clone(), owner: Some("a".to_owned()) };
        (Meter::new(room, ledger.clone()), ledger)
    }

    fn frame(first: u8, length: u64) -> Vec<u8> {
        let mut frame = vec![first];
        match length {
            0..126 => frame.push(0x80 | u8::try_from(length).unwrap()),
            126..65536 => {
                frame.push(0x80 | 126);
                frame.extend(u16::try_from(length).unwrap().to_be_bytes());
            }
            _ => {
                frame.push(0x80 | 127);
                frame.extend(length.to_be_bytes());
            }
        }
        frame.extend([7; 4]);
        frame
    }

    fn has_room(meter: &mut Meter) -> bool {
        meter.poll_room(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    fn is_free(budget: &Budget, kib: u32) -> bool {
        budget.take(Some("a"), kib).now_or_never().is_some()
    }

    #[test]
    fn a_large_message_holds_room_until_it_was_dealt_with() {
        let budget = Budget::new(100);
        let (mut meter, ledger) = meter(&budget);
        meter.read(&[frame(0x81, 1000), vec![0; 1000]].concat());
        assert!(has_room(&mut meter) && is_free(&budget, 100), "a small one holds none");
        ledger.arrived(1000);
        // Byte by byte, with a ping between two frames of one message.
        for byte in [frame(0x01, 40_000), vec![0; 40_000], frame(0x89, 3), vec![0; 3], frame(0x80, 20_000)].concat() {
            assert!(has_room(&mut meter));
            meter.read(&[byte]);
        }
        assert!(has_room(&mut meter) && !is_free(&budget, 42) && is_free(&budget, 41), "59 KiB of 100");
        meter.read(&vec![0; 20_000]);
        ledger.arrived(60_000);
        let held = ledger.take();
        assert!(!held.is_empty() && !is_free(&budget, 100));
        drop(held);
        assert!(is_free(&budget, 100));
    }

    #[test]
    fn oversized_or_fragmented_control_frame_breaks_the_socket() {
        for (first, length) in [(0x89, 126), (0x89, 8 << 20), (0x09, 3)] {
            let (mut meter, _ledger) = meter(&Budget::new(100));
            meter.read(&frame(first, length));
            assert!(meter.broken, "{first:x} {length}");
        }
        let (mut meter, _ledger) = meter(&Budget::new(100));
        meter.read(&[frame(0x89, 125), vec![0; 125], frame(0x8a, 0)].concat());
        assert!(!meter.broken && meter.unanswered == 2);
    }

    #[tokio::test]
    async fn pings_of_a_client_that_takes_nothing_are_left_unread() {
        let (ours, mut theirs) = tokio::io::duplex(256);
        let (meter, _ledger) = meter(&Budget::new(100));
        let mut metered = Metered { io: ours, meter };
        let mut answered = 0;
        let ping = [frame(0x89, 1), vec![0]].concat();
        let mut buffer = [0; 7];
        // Each ping is read and answered until nothing more is taken and the bound is reached.
        loop {
            use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
            theirs.write_all(&ping).await.unwrap();
            if metered.read(&mut buffer).now_or_never().is_none() {
                break;
            }
            let _ = metered.write(&[0; 3]).now_or_never();
            answered += 1;
            assert!(answered < 1000, "no end of it");
        }
        assert!(answered >= MAX_UNANSWERED, "{answered}");
    }

    #[test]
    fn no_more_is_read_of_a_message_that_finds_no_room() {
        let budget = Budget::new(100);
        let (mut first, _ledger) = meter(&budget);
        let (mut second, _other) = meter(&budget);
        first.read(&frame(0x81, 90 * 1024));
        second.read(&frame(0x81, 20 * 1024));
        assert!(has_room(&mut first) && !has_room(&mut second));
        drop(first);
        assert!(has_room(&mut second));
        // A message that is larger than a key's share takes all of the share.
        drop(second);
        let (mut large, _ledger) = meter(&budget);
        large.read(&frame(0x81, u64::MAX));
        assert!(has_room(&mut large) && !is_free(&budget, 1));
    }
}

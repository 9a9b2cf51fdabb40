//! The end of a stream that a task of this server has.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::{Buf, BytesMut};
use sandboxer_protocol::agent::{TunnelFault, TunnelStream as Number};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{Closing, OUTBOX_BYTES, Phase, Shared, Stream};

/// A stream, as a socket.
#[derive(Debug)]
pub(crate) struct TunnelStream {
    pub(super) shared: Arc<Shared>,
    pub(super) number: Number,
}

/// Sees a stream break while nobody reads or writes it: whoever copies may wait for the other side only.
#[derive(Debug)]
pub(crate) struct Watch {
    shared: Arc<Shared>,
    number: Number,
}

impl Watch {
    /// Until it breaks. One that comes to an ordinary end, or is dropped here, never does.
    pub(crate) async fn broken(&self) {
        std::future::poll_fn(|context| match self.shared.lock().streams.get_mut(&self.number) {
            Some(Stream { phase: Phase::Broken(_), .. }) => Poll::Ready(()),
            Some(stream) => {
                stream.watcher = Some(context.waker().clone());
                Poll::Pending
            }
            None => Poll::Pending,
        })
        .await;
    }
}

impl TunnelStream {
    /// One at a time.
    pub(crate) fn watch(&self) -> Watch {
        Watch { shared: Arc::clone(&self.shared), number: self.number }
    }

    /// The next byte that will be read, which stays; none: there is no more.
    pub(crate) async fn peek(&self) -> io::Result<Option<u8>> {
        std::future::poll_fn(|context| {
            self.with(|stream| match stream {
                None => Poll::Ready(Err(broken())),
                Some(Stream { phase: Phase::Broken(_), .. }) => Poll::Ready(Err(broken())),
                Some(stream) if stream.inbox.is_empty() && !stream.ended => {
                    stream.reader = Some(context.waker().clone());
                    Poll::Pending
                }
                Some(stream) => Poll::Ready(Ok(stream.inbox.first().copied())),
            })
        })
        .await
    }

    /// Waits until the other end is there.
    pub(crate) async fn opened(&self) -> Result<(), TunnelFault> {
        std::future::poll_fn(|context| {
            self.with(|stream| match stream.map(|stream| (stream.phase, stream)) {
                None => Poll::Ready(Err(TunnelFault::Reset)),
                Some((Phase::Open, _)) => Poll::Ready(Ok(())),
                Some((Phase::Broken(fault), _)) => Poll::Ready(Err(fault)),
                Some((Phase::Wanted(_) | Phase::Asked, stream)) => {
                    stream.writer = Some(context.waker().clone());
                    Poll::Pending
                }
            })
        })
        .await
    }

    /// Takes of these parts what there is room for.
    fn put(&self, context: &mut Context<'_>, parts: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        self.with(|stream| {
            let Some(stream) = stream else { return Poll::Ready(Err(broken())) };
            if matches!(stream.phase, Phase::Broken(_)) {
                return Poll::Ready(Err(broken()));
            }
            if stream.closing != Closing::Open {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            let before = stream.outbox.len();
            for part in parts {
                let length = part.len().min(OUTBOX_BYTES - stream.outbox.len());
                stream.outbox.extend_from_slice(&part[..length]);
            }
            let taken = stream.outbox.len() - before;
            if taken == 0 && parts.iter().any(|part| !part.is_empty()) {
                stream.writer = Some(context.waker().clone());
                return Poll::Pending;
            }
            Poll::Ready(Ok(taken))
        })
    }

    fn with<T>(&self, change: impl FnOnce(Option<&mut Stream>) -> T) -> T {
        let mut state = self.shared.lock();
        let changed = change(state.streams.get_mut(&self.number));
        if !state.over {
            self.shared.stir(&mut state, self.number);
        }
        changed
    }
}

fn broken() -> io::Error {
    io::ErrorKind::ConnectionReset.into()
}

impl AsyncRead for TunnelStream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.with(|stream| {
            let Some(stream) = stream else { return Poll::Ready(Err(broken())) };
            if let Phase::Broken(_) = stream.phase {
                return Poll::Ready(Err(broken()));
            }
            let length = stream.inbox.len().min(buffer.remaining());
            if length > 0 {
                buffer.put_slice(&stream.inbox[..length]);
                stream.inbox.advance(length);
                if stream.inbox.is_empty() {
                    stream.inbox = BytesMut::new();
                }
                return Poll::Ready(Ok(()));
            }
            if stream.ended || buffer.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            stream.reader = Some(context.waker().clone());
            Poll::Pending
        })
    }
}

impl AsyncWrite for TunnelStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        self.put(context, &[IoSlice::new(data)])
    }

    fn poll_write_vectored(self: Pin<&mut Self>, context: &mut Context<'_>, parts: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        self.put(context, parts)
    }

    /// So that nobody copies parts together before they are copied here.
    fn is_write_vectored(&self) -> bool {
        true
    }

    /// What was written is on its way; there is nothing more to be done about it.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Until the agent has been told, so that who drops the stream then cuts nothing off.
    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.with(|stream| {
            let Some(stream) = stream else { return Poll::Ready(Ok(())) };
            if matches!(stream.phase, Phase::Broken(_)) || stream.closing == Closing::Told {
                return Poll::Ready(Ok(()));
            }
            stream.closing = Closing::Wanted;
            stream.writer = Some(context.waker().clone());
            Poll::Pending
        })
    }
}

impl Drop for TunnelStream {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if let Some(stream) = state.streams.get_mut(&self.number) {
            stream.abandoned = true;
            stream.inbox = BytesMut::new();
            stream.outbox = BytesMut::new();
        }
        let over = state.over;
        state.tidy(self.number);
        if !over {
            self.shared.stir(&mut state, self.number);
        }
        if state.deserted {
            self.shared.stirred.notify_one();
        }
    }
}

//! A program's connection to the proxy that is closed without losing its last answer.
//!
//! An answer such as the 403 to a refused CONNECT ends the connection where the program asked for
//! HTTP/1.0 or `Connection: close`. If the stream were dropped at once, the agent would reset the
//! connection, and the program might see the reset in place of the answer. A stream whose end was
//! announced therefore stays until the program has closed its side too, within a bound.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf},
    time::timeout,
};

use crate::sandbox::tunnel::TunnelStream;

/// How long a program may take to close its side.
const CLOSES_WITHIN: Duration = Duration::from_secs(5);
/// The size of one read of the program's remaining data, which is dropped.
const DISCARD_BYTES: usize = 16 * 1024;

/// A stream that waits for its program's end when it is dropped after its own.
pub(super) struct Lingering {
    stream: Option<TunnelStream>,
    /// The program was told that nothing more comes.
    ended: bool,
}

impl Lingering {
    pub(super) fn new(stream: TunnelStream) -> Self {
        Self { stream: Some(stream), ended: false }
    }

    fn with<T>(&mut self, on: impl FnOnce(Pin<&mut TunnelStream>) -> Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match &mut self.stream {
            Some(stream) => on(Pin::new(stream)),
            // The stream is taken by `drop` alone.
            None => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }
}

impl Drop for Lingering {
    fn drop(&mut self) {
        let Some(mut stream) = self.stream.take().filter(|_| self.ended) else { return };
        // Without a runtime the process ends, and every connection with it.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            let mut discarded = vec![0; DISCARD_BYTES];
            let rest = async { while matches!(stream.read(&mut discarded).await, Ok(1..)) {} };
            // A program that keeps its side open is cut off.
            let _ = timeout(CLOSES_WITHIN, rest).await;
        });
    }
}

impl AsyncRead for Lingering {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.with(|stream| stream.poll_read(context, buffer))
    }
}

impl AsyncWrite for Lingering {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        self.with(|stream| stream.poll_write(context, data))
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, context: &mut Context<'_>, parts: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        self.with(|stream| stream.poll_write_vectored(context, parts))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.with(|stream| stream.poll_flush(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let told = self.with(|stream| stream.poll_shutdown(context));
        self.ended |= matches!(told, Poll::Ready(Ok(())));
        told
    }
}

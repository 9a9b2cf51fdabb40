//! What a sandbox may use of the network, counted where its bytes pass.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Instant, Sleep},
};

/// What may pass at once before the rate is felt.
const BURST: Duration = Duration::from_millis(100);

/// What a sandbox may use, and what it has used.
#[derive(Debug)]
pub(super) struct Budget {
    /// Bytes a second in both directions together.
    rate: Option<u64>,
    bytes: Option<u64>,
    used: AtomicU64,
    /// When the last byte that passed would have passed at that rate.
    paid_until: Mutex<Option<Instant>>,
}

impl Budget {
    pub(super) fn new(rate: Option<u64>, bytes: Option<u64>) -> Self {
        Self { rate, bytes, used: AtomicU64::new(0), paid_until: Mutex::default() }
    }

    pub(super) fn is_used_up(&self) -> bool {
        self.bytes.is_some_and(|bytes| self.used.load(Ordering::Relaxed) >= bytes)
    }

    /// So many bytes have passed. Returns until when the next ones wait.
    fn spend(&self, bytes: usize) -> Option<Instant> {
        self.used.fetch_add(bytes as u64, Ordering::Relaxed);
        let rate = self.rate?;
        let now = Instant::now();
        let mut paid = self.paid_until.lock().unwrap_or_else(PoisonError::into_inner);
        let from = paid.unwrap_or(now).max(now);
        let until = from + Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
        *paid = Some(until);
        Some(until).filter(|until| *until > now + BURST)
    }
}

/// Bytes of one connection.
#[derive(Debug, Default)]
pub(super) struct Counted {
    /// From the sandbox.
    pub(super) sent: AtomicU64,
    pub(super) received: AtomicU64,
}

impl Counted {
    pub(super) fn both(&self) -> (u64, u64) {
        (self.sent.load(Ordering::Relaxed), self.received.load(Ordering::Relaxed))
    }
}

/// A connection whose bytes are counted and whose rate is bounded.
pub(super) struct Metered<S> {
    inner: S,
    budget: Arc<Budget>,
    counted: Arc<Counted>,
    reading: Option<Pin<Box<Sleep>>>,
    writing: Option<Pin<Box<Sleep>>>,
}

impl<S> Metered<S> {
    pub(super) fn new(inner: S, budget: Arc<Budget>, counted: Arc<Counted>) -> Self {
        Self { inner, budget, counted, reading: None, writing: None }
    }
}

impl Metered<TcpStream> {
    /// Whether the other end sees a reset when this is dropped, rather than an ordinary end.
    pub(super) fn cut_off_when_dropped(&self, cut_off: bool) {
        let set = if cut_off { self.inner.set_zero_linger() } else { SockRef::from(&self.inner).set_linger(None) };
        // Without it the end is an ordinary one.
        drop(set);
    }
}

/// Waits for what was spent before.
fn wait(pause: &mut Option<Pin<Box<Sleep>>>, budget: &Budget, context: &mut Context<'_>) -> Poll<io::Result<()>> {
    if budget.is_used_up() {
        return Poll::Ready(Err(io::Error::other("the sandbox has used up what it may send and receive")));
    }
    if let Some(sleep) = pause {
        ready!(sleep.as_mut().poll(context));
        *pause = None;
    }
    Poll::Ready(Ok(()))
}

impl<S: AsyncRead + Unpin> AsyncRead for Metered<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(wait(&mut this.reading, &this.budget, context))?;
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.inner).poll_read(context, buffer))?;
        let count = buffer.filled().len() - before;
        this.counted.received.fetch_add(count as u64, Ordering::Relaxed);
        this.reading = this.budget.spend(count).map(|until| Box::pin(tokio::time::sleep_until(until)));
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Metered<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(wait(&mut this.writing, &this.budget, context))?;
        let count = ready!(Pin::new(&mut this.inner).poll_write(context, data))?;
        this.counted.sent.fetch_add(count as u64, Ordering::Relaxed);
        this.writing = this.budget.spend(count).map(|until| Box::pin(tokio::time::sleep_until(until)));
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_rate_is_that_of_all_connections_together() {
        let budget = Arc::new(Budget::new(Some(1000), None));
        let began = Instant::now();
        let mut both = tokio::task::JoinSet::new();
        for _ in 0..2 {
            let budget = Arc::clone(&budget);
            both.spawn(async move {
                let (near, mut far) = tokio::io::duplex(10_000);
                let mut metered = Metered::new(near, budget, Arc::default());
                for _ in 0..10 {
                    metered.write_all(&[0; 250]).await.unwrap();
                    far.read_exact(&mut [0; 250]).await.unwrap();
                }
            });
        }
        both.join_all().await;
        // The last pieces may wait for nobody.
        let took = began.elapsed().as_secs_f64();
        assert!((4.0..=5.5).contains(&took), "{took}");
    }

    #[tokio::test]
    async fn what_is_used_up_is_used_up_for_all() {
        let budget = Arc::new(Budget::new(None, Some(10)));
        let (near, mut far) = tokio::io::duplex(100);
        let counted = Arc::new(Counted::default());
        let mut metered = Metered::new(near, Arc::clone(&budget), Arc::clone(&counted));
        far.write_all(&[0; 12]).await.unwrap();
        metered.read_exact(&mut [0; 12]).await.unwrap();
        assert!(metered.read(&mut [0; 1]).await.is_err() && metered.write(&[0]).await.is_err());
        assert!(budget.is_used_up());
        assert_eq!(counted.both(), (0, 12));
    }
}

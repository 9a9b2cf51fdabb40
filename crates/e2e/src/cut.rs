//! A network that fails: at a random byte it cuts, goes half-open, or falls silent for a while.

use std::{
    net::SocketAddr,
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    task::{JoinHandle, JoinSet},
};

/// What happens to a connection once its bytes are used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Both ends see it closed, in the middle of a frame.
    Cut,
    /// Neither end sees anything, ever: the sockets stay open and nothing passes.
    HalfOpen,
    /// Nothing passes for this long, then everything does.
    Silent(Duration),
}

/// Gives every connection a random number of bytes, both directions together, and then one of its faults. Small numbers are as likely
/// as large ones (their logarithm is even), so that cuts come early and late and something still passes.
#[derive(Debug)]
pub struct CutProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    random: Mutex<StdRng>,
    bytes: Range<i64>,
    faults: Vec<Fault>,
    happened: AtomicUsize,
    healed: AtomicBool,
}

impl CutProxy {
    pub async fn start(target: SocketAddr, seed: u64, bytes: Range<i64>, faults: &[Fault]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            random: Mutex::new(StdRng::seed_from_u64(seed)),
            bytes,
            faults: faults.to_vec(),
            happened: AtomicUsize::new(0),
            healed: AtomicBool::new(false),
        });
        let task = tokio::spawn({
            let shared = shared.clone();
            async move {
                let mut lines = JoinSet::new();
                while let Ok((client, _)) = listener.accept().await {
                    let Ok(server) = TcpStream::connect(target).await else { continue };
                    let _ = (client.set_nodelay(true), server.set_nodelay(true));
                    let line = Arc::new(Line::new(shared.clone()));
                    let (client_in, client_out) = client.into_split();
                    let (server_in, server_out) = server.into_split();
                    lines.spawn(line.clone().carry(client_in, server_out));
                    lines.spawn(line.carry(server_in, client_out));
                }
            }
        });
        Self { address, shared, task }
    }

    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many faults there have been.
    #[must_use]
    pub fn happened(&self) -> usize {
        self.shared.happened.load(Ordering::SeqCst)
    }

    /// From now on nothing fails any more.
    pub fn heal(&self) {
        self.shared.healed.store(true, Ordering::SeqCst);
    }
}

impl Drop for CutProxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// One connection through the proxy.
#[derive(Debug)]
struct Line {
    shared: Arc<Shared>,
    left: AtomicI64,
    fault: Fault,
    broken: watch::Sender<bool>,
}

impl Line {
    fn new(shared: Arc<Shared>) -> Self {
        let mut random = shared.random.lock().unwrap();
        let left = AtomicI64::new(log_uniform(&mut random, &shared.bytes));
        let fault = shared.faults[random.random_range(0..shared.faults.len())];
        drop(random);
        Self { shared, left, fault, broken: watch::channel(false).0 }
    }

    async fn carry(self: Arc<Self>, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
        let mut buffer = vec![0; 16 * 1024];
        let mut broken = self.broken.subscribe();
        loop {
            let read = tokio::select! {
                read = from.read(&mut buffer) => Some(read),
                _ = async { broken.wait_for(|broken| *broken).await.is_ok() } => None,
            };
            let count = match (read, self.fault) {
                (Some(Ok(count @ 1..)), _) => count,
                (Some(_), _) => break,
                (None, Fault::Cut) => return,
                (None, Fault::HalfOpen) => std::future::pending().await,
                (None, Fault::Silent(_)) => {
                    let _ = broken.wait_for(|broken| !broken).await.is_ok();
                    continue;
                }
            };
            let passing = self.admit(count);
            if to.write_all(&buffer[..passing]).await.is_err() {
                return;
            }
            if passing < count {
                self.shared.happened.fetch_add(1, Ordering::SeqCst);
                self.broken.send_replace(true);
                if let Fault::Silent(time) = self.fault {
                    tokio::time::sleep(time).await;
                    self.broken.send_replace(false);
                    if to.write_all(&buffer[passing..count]).await.is_err() {
                        return;
                    }
                }
            }
        }
        let _ = to.shutdown().await;
    }

    /// How many of these bytes still pass. A fault happens to a connection once.
    fn admit(&self, count: usize) -> usize {
        if self.shared.healed.load(Ordering::SeqCst) {
            return count;
        }
        let before = self.left.fetch_sub(i64::try_from(count).unwrap(), Ordering::SeqCst);
        if before < 0 {
            return if matches!(self.fault, Fault::Silent(_)) { count } else { 0 };
        }
        usize::try_from(before).unwrap().min(count)
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "a random number of bytes")]
fn log_uniform(random: &mut StdRng, range: &Range<i64>) -> i64 {
    let (low, high) = ((range.start as f64).ln(), (range.end as f64).ln());
    (random.random_range(low..high).exp() as i64).clamp(range.start, range.end - 1)
}

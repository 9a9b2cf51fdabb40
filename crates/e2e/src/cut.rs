//! A network that fails: at a random byte it cuts, goes half-open, or falls silent for a while.

use std::{
    net::SocketAddr,
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
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
/// as large ones (their logarithm is even), so that cuts come early and late and something still passes. A connection that outlives
/// its fault is given another number and another fault: as long as anything passes, there are more faults to come.
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
    fate: watch::Sender<Fate>,
}

#[derive(Debug, Clone, Copy)]
struct Fate {
    /// The bytes that still pass, of both directions together.
    left: usize,
    fault: Fault,
    broken: bool,
}

impl Shared {
    fn fate(&self) -> Fate {
        let mut random = self.random.lock().unwrap();
        let left = usize::try_from(log_uniform(&mut random, &self.bytes)).unwrap();
        Fate { left, fault: self.faults[random.random_range(0..self.faults.len())], broken: false }
    }
}

impl Line {
    fn new(shared: Arc<Shared>) -> Self {
        let fate = watch::channel(shared.fate()).0;
        Self { shared, fate }
    }

    async fn carry(self: Arc<Self>, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
        let mut buffer = vec![0; 16 * 1024];
        let mut fate = self.fate.subscribe();
        loop {
            let read = tokio::select! {
                biased;
                _ = async { fate.wait_for(|fate| fate.broken).await.is_ok() } => None,
                read = from.read(&mut buffer) => Some(read),
            };
            let count = match read {
                None => 0,
                Some(Ok(count @ 1..)) => count,
                Some(_) => break,
            };
            let mut passed = 0;
            loop {
                let passing = self.admit(count - passed);
                if to.write_all(&buffer[passed..passed + passing]).await.is_err() {
                    return;
                }
                passed += passing;
                let Fate { fault, broken, .. } = *fate.borrow_and_update();
                match (broken, fault) {
                    (false, _) if passed == count => break,
                    // The other direction broke it and mended it again.
                    (false, _) => {}
                    (true, Fault::Cut) => return,
                    (true, Fault::HalfOpen) => std::future::pending().await,
                    (true, Fault::Silent(_)) => drop(fate.wait_for(|fate| !fate.broken).await),
                }
            }
        }
        let _ = to.shutdown().await;
    }

    /// How many of these bytes pass now. Whoever is given less has found the fault.
    fn admit(self: &Arc<Self>, count: usize) -> usize {
        let mut passing = 0;
        let broke = self.fate.send_if_modified(|fate| {
            if fate.broken {
                return false;
            }
            passing = if self.shared.healed.load(Ordering::SeqCst) { count } else { count.min(fate.left) };
            fate.left = fate.left.saturating_sub(passing);
            fate.broken = passing < count;
            fate.broken
        });
        if broke {
            self.shared.happened.fetch_add(1, Ordering::SeqCst);
            if let Fault::Silent(time) = self.fate.borrow().fault {
                let line = self.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(time).await;
                    line.fate.send_replace(line.shared.fate());
                });
            }
        }
        passing
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "a random number of bytes")]
fn log_uniform(random: &mut StdRng, range: &Range<i64>) -> i64 {
    let (low, high) = ((range.start as f64).ln(), (range.end as f64).ln());
    (random.random_range(low..high).exp() as i64).clamp(range.start, range.end - 1)
}

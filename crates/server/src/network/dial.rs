//! How names become addresses, and addresses connections. Nothing here decides anything.

use std::{
    collections::HashMap,
    fmt, fs, io,
    net::{IpAddr, SocketAddr, ToSocketAddrs as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use futures_util::future::BoxFuture;
use tokio::{
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    time::timeout,
};

/// The largest file of hosts.
const MAX_HOSTS_BYTES: u64 = 1024 * 1024;
/// How long a name may take to be resolved, and an address to answer.
const RESOLVE_WITHIN: Duration = Duration::from_secs(10);
const CONNECT_WITHIN: Duration = Duration::from_secs(15);
/// Names that are resolved at once for all sandboxes: each takes a thread, and a name server that does not answer keeps it.
const MAX_RESOLVING: usize = 64;

/// The way to the network.
pub trait Dialer: fmt::Debug + Send + Sync {
    /// All addresses of a name, asked for once. The turn is held for as long as that takes, whoever still waits for it.
    fn resolve<'a>(&'a self, name: &'a str, turn: OwnedSemaphorePermit) -> BoxFuture<'a, io::Result<Vec<IpAddr>>>;

    /// To exactly this address.
    fn connect(&self, to: SocketAddr) -> BoxFuture<'_, io::Result<TcpStream>>;
}

/// This machine's own resolver and network, with a file of hosts of its own before it.
#[derive(Debug)]
pub struct SystemDialer {
    hosts: Option<PathBuf>,
    resolving: Arc<Semaphore>,
}

impl Default for SystemDialer {
    fn default() -> Self {
        Self::new(None)
    }
}

impl SystemDialer {
    #[must_use]
    pub fn new(hosts: Option<PathBuf>) -> Self {
        Self { hosts, resolving: Arc::new(Semaphore::new(MAX_RESOLVING)) }
    }
}

impl Dialer for SystemDialer {
    fn resolve<'a>(&'a self, name: &'a str, turn: OwnedSemaphorePermit) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async move {
            if let Some(hosts) = self.hosts.clone() {
                let found = tokio::task::spawn_blocking(move || read_hosts(&hosts)).await.map_err(io::Error::other)??;
                if let Some(addresses) = found.get(name) {
                    return Ok(addresses.clone());
                }
            }
            // With a dot at its end, so that no search domain is tried.
            let absolute = format!("{name}.");
            let found = async {
                let thread = Arc::clone(&self.resolving).acquire_owned().await.map_err(io::Error::other)?;
                let resolve = move || {
                    // Kept for as long as the thread is, also where nobody waits for it any longer.
                    let _turns = (turn, thread);
                    Ok((absolute.as_str(), 0).to_socket_addrs()?.map(|address| address.ip()).collect())
                };
                on_a_thread(resolve).await?
            };
            timeout(RESOLVE_WITHIN, found).await?
        })
    }

    fn connect(&self, to: SocketAddr) -> BoxFuture<'_, io::Result<TcpStream>> {
        Box::pin(async move {
            let stream = timeout(CONNECT_WITHIN, TcpStream::connect(to)).await??;
            stream.set_nodelay(true)?;
            Ok(stream)
        })
    }
}

/// Has it done by a thread of its own. Those that the server shares for its files are few, and whoever waits for a name server that does not answer must not
/// have them all.
async fn on_a_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    let (done, result) = oneshot::channel();
    // Nobody waits for it any longer if it can't be told.
    thread::Builder::new().name("resolve".to_owned()).spawn(move || drop(done.send(work())))?;
    result.await.map_err(io::Error::other)
}

/// Checks a file of hosts before the server starts.
///
/// # Errors
/// It can't be read, or a line of it is none.
pub fn check_hosts(file: &Path) -> io::Result<()> {
    read_hosts(file).map(drop)
}

/// As `/etc/hosts`: an address and its names in each line. Read anew each time, since it may be changed.
fn read_hosts(file: &Path) -> io::Result<HashMap<String, Vec<IpAddr>>> {
    let about = fs::metadata(file)?;
    if about.len() > MAX_HOSTS_BYTES {
        return Err(io::Error::other("the file of hosts is larger than 1 MiB"));
    }
    let mut hosts: HashMap<String, Vec<IpAddr>> = HashMap::new();
    for (number, line) in fs::read_to_string(file)?.lines().enumerate() {
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let Some(address) = words.next() else { continue };
        let address = address.parse().map_err(|_| io::Error::other(format!("line {}: {address:?} is no address", number + 1)))?;
        for name in words {
            hosts.entry(name.trim_end_matches('.').to_ascii_lowercase()).or_default().push(address);
        }
    }
    Ok(hosts)
}

/// Resolves as another one does, and connects to nothing: every connection is remembered and fails.
#[derive(Debug)]
pub struct RecordingDialer {
    inner: Box<dyn Dialer>,
    dialled: Mutex<Vec<SocketAddr>>,
}

/// What is remembered.
const MAX_DIALLED: usize = 1000;

impl RecordingDialer {
    #[must_use]
    pub fn new(inner: impl Dialer + 'static) -> Self {
        Self { inner: Box::new(inner), dialled: Mutex::default() }
    }

    /// What would have been connected to.
    #[must_use]
    pub fn dialled(&self) -> Vec<SocketAddr> {
        self.dialled.lock().map(|dialled| dialled.clone()).unwrap_or_default()
    }
}

impl Dialer for RecordingDialer {
    fn resolve<'a>(&'a self, name: &'a str, turn: OwnedSemaphorePermit) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        self.inner.resolve(name, turn)
    }

    fn connect(&self, to: SocketAddr) -> BoxFuture<'_, io::Result<TcpStream>> {
        Box::pin(async move {
            if let Ok(mut dialled) = self.dialled.lock()
                && dialled.len() < MAX_DIALLED
            {
                dialled.push(to);
            }
            Err(io::Error::other("this server was started with --network-dry-run and connects to nothing"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_names_keeps_nobody_from_the_shared_threads() {
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
        runtime.block_on(async {
            let (answer, silence) = std::sync::mpsc::channel::<()>();
            let silence = Arc::new(Mutex::new(silence));
            let waiting: Vec<_> = (0..MAX_RESOLVING)
                .map(|_| {
                    let silence = Arc::clone(&silence);
                    tokio::spawn(on_a_thread(move || silence.lock().unwrap().recv().is_ok()))
                })
                .collect();
            assert_eq!(tokio::task::spawn_blocking(|| 1).await.unwrap(), 1);
            drop(answer);
            for one in waiting {
                assert!(!one.await.unwrap().unwrap());
            }
            let failed: io::Result<()> = on_a_thread(|| panic!("on purpose")).await;
            assert!(failed.is_err());
        });
    }

    #[tokio::test]
    async fn a_file_of_hosts_comes_first_and_is_read_anew() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("hosts");
        fs::write(&file, "# ours\n127.0.0.1 a.test b.test. # both\n::1 A.test\n").unwrap();
        let dialer = SystemDialer::new(Some(file.clone()));
        let turns = Arc::new(Semaphore::new(1));
        let resolve = async |name| dialer.resolve(name, Arc::clone(&turns).acquire_owned().await.unwrap()).await;
        let addresses = |text: &[&str]| text.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpAddr>>();
        assert_eq!(resolve("a.test").await.unwrap(), addresses(&["127.0.0.1", "::1"]));
        assert_eq!(resolve("b.test").await.unwrap(), addresses(&["127.0.0.1"]));
        fs::write(&file, "10.0.0.1 a.test").unwrap();
        assert_eq!(resolve("a.test").await.unwrap(), addresses(&["10.0.0.1"]));
        fs::write(&file, "nonsense a.test").unwrap();
        assert!(resolve("a.test").await.is_err() && check_hosts(&file).is_err());
    }
}

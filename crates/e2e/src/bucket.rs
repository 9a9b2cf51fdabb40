//! A bucket of the test's own, on a real S3 server with conditional writes, and a way to it that fails as networks and stores do.

use std::{
    net::SocketAddr,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
};

use crate::{DEADLINE, Options, Server, http};

/// `moto_server` with one thread: between several of them its conditional writes are not atomic, since it looks first and writes later.
const SERVER: &str = "\
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
run_simple('127.0.0.1', int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=False)
";
const PREFIX: &str = "some/where";

/// What the way to the bucket does to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    None,
    /// 503 for each.
    Unavailable,
    /// Every tenth gets lost on the way there, every other tenth on the way back.
    Lossy,
    /// Each takes so much longer.
    Slow(Duration),
    /// Of every fifth answer with a body only half arrives.
    Torn,
    /// The conditions of writes are ignored.
    Unconditional,
}

/// `moto`'s S3, which ends with this.
pub struct Bucket {
    _child: Ending,
    server: SocketAddr,
    proxy: SocketAddr,
    trouble: Arc<Mutex<Trouble>>,
    requests: Arc<AtomicUsize>,
}

impl Bucket {
    pub const NAME: &'static str = "sandboxes";

    /// # Panics
    /// `scripts/setup --dev` has not been run.
    pub async fn start() -> Self {
        let program = python();
        assert!(program.exists(), "{} is missing; scripts/setup --dev installs it", program.display());
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let server = SocketAddr::from(([127, 0, 0, 1], port));
        // It ends with us however we end.
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL"])
            .arg(program)
            .args(["-c", SERVER, &port.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let child = Ending(command.spawn().unwrap());
        let begun = Instant::now();
        while !http::try_get(server, "/", &[]).is_ok_and(|answer| answer.status == 200) {
            assert!(begun.elapsed() < DEADLINE, "the S3 server does not answer");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let mut made = TcpStream::connect(server).await.unwrap();
        let request = format!("PUT /{} HTTP/1.1\r\nHost: {server}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", Self::NAME);
        made.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        made.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.0 200"), "{answer}");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = listener.local_addr().unwrap();
        let (trouble, requests) = (Arc::new(Mutex::new(Trouble::None)), Arc::default());
        let bucket = Self { _child: child, server, proxy, trouble, requests };
        bucket.pass_on(listener);
        bucket
    }

    #[must_use]
    pub fn url(&self) -> String {
        format!("s3://{}/{PREFIX}", Self::NAME)
    }

    /// What a program has to know to find it.
    #[must_use]
    pub fn environment(&self) -> [(&'static str, String); 5] {
        [
            ("AWS_ENDPOINT_URL", format!("http://{}", self.proxy)),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
            ("AWS_ACCESS_KEY_ID", "test".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "test".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
        ]
    }

    /// Where it is without the way there.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.server)
    }

    /// A server that keeps checkpoints and filesystem snapshots here.
    #[must_use]
    pub fn options(&self) -> Options {
        let options = Options::default()
            .env("CHECKPOINT_AND_RESTORE_PATH", self.url())
            .env("FILESYSTEM_SNAPSHOT_MOUNT_PATH", format!("{}/filesystems", self.url()));
        self.environment().into_iter().fold(options, |options, (name, value)| options.env(name, value))
    }

    #[must_use]
    pub fn serve(&self) -> Server {
        self.options().start()
    }

    /// `sandboxer store`, with whatever it prints.
    #[must_use]
    pub fn store(&self, arguments: &[&str]) -> std::process::Output {
        let mut command = crate::command();
        command.arg("store").args(arguments).args(["--checkpoint-path", &self.url()]).envs(self.environment());
        command.output().unwrap()
    }

    /// From now on.
    pub fn trouble(&self, trouble: Trouble) {
        *self.trouble.lock().unwrap() = trouble;
    }

    /// Requests that came so far.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }

    fn pass_on(&self, listener: TcpListener) {
        let (server, trouble, requests) = (self.server, Arc::clone(&self.trouble), Arc::clone(&self.requests));
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (trouble, number) = (*trouble.lock().unwrap(), requests.fetch_add(1, Ordering::Relaxed));
                // A client that goes away in the middle is its own business.
                tokio::spawn(async move { drop(one(client, server, trouble, number).await) });
            }
        });
    }
}

struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The one that has moto.
fn python() -> PathBuf {
    let data = std::env::var_os("XDG_DATA_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let data = data.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/share")));
    data.unwrap().join("sandboxer/buckets-venv/bin/python")
}

/// One request a connection.
async fn one(mut client: TcpStream, server: SocketAddr, trouble: Trouble, number: usize) -> std::io::Result<()> {
    let (reading, mut writing) = client.split();
    let mut reading = BufReader::new(reading);
    let (mut head, mut length) = (Vec::new(), 0_u64);
    loop {
        let mut line = String::new();
        if reading.read_line(&mut line).await? == 0 {
            return Ok(());
        }
        let lower = line.to_ascii_lowercase();
        if let Some(value) = lower.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap_or(0);
        }
        if line == "\r\n" {
            head.extend_from_slice(b"Connection: close\r\n\r\n");
            break;
        }
        let condition = lower.starts_with("if-match:") || lower.starts_with("if-none-match:");
        if !(lower.starts_with("connection:") || lower.starts_with("expect:") || condition && trouble == Trouble::Unconditional) {
            head.extend_from_slice(line.as_bytes());
        }
    }
    let mut body = Vec::new();
    (&mut reading).take(length).read_to_end(&mut body).await?;
    match trouble {
        Trouble::Unavailable => {
            return writing.write_all(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").await;
        }
        Trouble::Lossy if number % 10 == 3 => return Ok(()),
        Trouble::Slow(by) => tokio::time::sleep(by).await,
        _ => {}
    }
    let mut there = TcpStream::connect(server).await?;
    there.write_all(&head).await?;
    there.write_all(&body).await?;
    let mut answer = Vec::new();
    there.read_to_end(&mut answer).await?;
    let begins = answer.windows(4).position(|four| four == b"\r\n\r\n").map_or(answer.len(), |at| at + 4);
    let torn = begins + (answer.len() - begins) / 2;
    match trouble {
        Trouble::Lossy if number % 10 == 8 => Ok(()),
        Trouble::Torn if number.is_multiple_of(5) && torn < answer.len() => writing.write_all(&answer[..torn]).await,
        _ => writing.write_all(&answer).await,
    }
}

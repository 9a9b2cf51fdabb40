//! The way to a bucket: one request a connection, counted, and dealt with as the test says.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
};

use super::{Store, google};

const READ: usize = 64 << 10;
const NOT_FOUND: &[u8] = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

/// What the way to the bucket does to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Trouble {
    #[default]
    None,
    /// 503 for each.
    Unavailable,
    /// 404 for each, as a gateway answers behind which nothing is.
    Missing,
    /// 404 for half of them, as if one of two gateways had nothing behind it.
    HalfMissing,
    /// No answer, ever.
    Silent,
    /// Every tenth gets lost on the way there, every other tenth on the way back.
    Lossy,
    /// Each takes so much longer.
    Slow(Duration),
    /// Of every fifth answer with a body only half arrives.
    Torn,
    /// The conditions of writes are ignored.
    Unconditional,
}

#[derive(Default)]
pub(super) struct Wayside {
    trouble: Mutex<Trouble>,
    number: AtomicUsize,
    bytes: AtomicU64,
    requests: Mutex<BTreeMap<String, u64>>,
}

impl Wayside {
    pub(super) fn set(&self, trouble: Trouble) {
        *self.trouble.lock().unwrap() = trouble;
    }

    pub(super) fn requests(&self) -> BTreeMap<String, u64> {
        self.requests.lock().unwrap().clone()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// By method and what it is about: `GET locks`, `PUT packs`.
    fn note(&self, head: &[u8]) {
        const KINDS: [&str; 9] =
            ["locks/", "bells/", "packs/", "checkpoints/", "collect/", "snapshots/", "images/", "filesystems/", "probes/"];
        let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
        let line = String::from_utf8_lossy(line).replace("%2F", "/").replace("%2f", "/").replace("%2D", "-");
        let mut words = line.split(' ');
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let is_list = path.contains("list-type=2");
        let kind = KINDS.iter().find(|kind| path.contains(*kind)).map_or("other", |kind| kind.trim_end_matches('/'));
        let name = format!("{} {kind}", if is_list { "LIST" } else { method });
        *self.requests.lock().unwrap().entry(name).or_default() += 1;
    }
}

#[derive(Clone)]
pub(super) struct Way {
    pub(super) server: SocketAddr,
    pub(super) store: Store,
    pub(super) side: Arc<Wayside>,
}

impl Way {
    pub(super) fn pass_on(self, listener: TcpListener) {
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let way = self.clone();
                // A client that goes away in the middle is its own business.
                tokio::spawn(async move { drop(way.one(client).await) });
            }
        });
    }

    async fn one(&self, mut client: TcpStream) -> std::io::Result<()> {
        let (reading, mut writing) = client.split();
        let mut reading = BufReader::new(reading);
        let (mut head, mut length) = (Vec::new(), 0_u64);
        let mut trouble = None;
        loop {
            let mut line = String::new();
            if reading.read_line(&mut line).await? == 0 {
                return Ok(());
            }
            let trouble = *trouble.get_or_insert_with(|| *self.side.trouble.lock().unwrap());
            let lower = line.to_ascii_lowercase();
            if let Some(value) = lower.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap_or(0);
            }
            if line == "\r\n" {
                head.extend_from_slice(b"Connection: close\r\n\r\n");
                break;
            }
            let condition = lower.starts_with("if-match:") || lower.starts_with("if-none-match:") || lower.starts_with("x-goog-if-");
            if !(lower.starts_with("connection:") || lower.starts_with("expect:") || condition && trouble == Trouble::Unconditional) {
                head.extend_from_slice(line.as_bytes());
            }
        }
        let (trouble, number) = (trouble.unwrap_or_default(), self.side.number.fetch_add(1, Ordering::Relaxed));
        self.side.note(&head);
        let mut body = Vec::new();
        (&mut reading).take(length).read_to_end(&mut body).await?;
        match trouble {
            Trouble::Unavailable => {
                return writing.write_all(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").await;
            }
            Trouble::Missing => return writing.write_all(NOT_FOUND).await,
            Trouble::HalfMissing if is_heads(number) => return writing.write_all(NOT_FOUND).await,
            Trouble::Silent => {
                // Until the client has had enough.
                let mut rest = Vec::new();
                return reading.read_to_end(&mut rest).await.map(drop);
            }
            Trouble::Lossy if number % 10 == 3 => return Ok(()),
            Trouble::Slow(by) => tokio::time::sleep(by).await,
            _ => {}
        }
        let writes = head.starts_with(b"PUT ");
        self.side.bytes.fetch_add(body.len() as u64, Ordering::Relaxed);
        let (head, body) = if self.store == Store::Google { google::request(&head, body, self.server) } else { (head, body) };
        let mut there = TcpStream::connect(self.server).await?;
        there.write_all(&head).await?;
        there.write_all(&body).await?;
        let mut answer = whole_answer(&mut there, head.starts_with(b"HEAD ")).await?;
        // Some servers wait a while for a client that has its answer and stays.
        drop(there);
        if self.store == Store::Google && writes {
            answer = google::answer(answer);
        }
        let begins = body_of(&answer);
        self.side.bytes.fetch_add((answer.len() - begins) as u64, Ordering::Relaxed);
        let torn = begins + (answer.len() - begins) / 2;
        match trouble {
            Trouble::Lossy if number % 10 == 8 => Ok(()),
            Trouble::Torn if number.is_multiple_of(5) && torn < answer.len() => writing.write_all(&answer[..torn]).await,
            _ => writing.write_all(&answer).await,
        }
    }
}

/// To the end that its head names, as every client takes it; where that names none, until the server closes.
async fn whole_answer(there: &mut TcpStream, to_head: bool) -> std::io::Result<Vec<u8>> {
    let (mut answer, mut end) = (Vec::with_capacity(READ), None);
    loop {
        if end.is_none() {
            end = end_of(&answer, to_head);
        }
        if end.is_some_and(|end| answer.len() >= end) || there.read_buf(&mut answer).await? == 0 {
            return Ok(answer);
        }
    }
}

/// Where it ends, once its head is there.
fn end_of(answer: &[u8], to_head: bool) -> Option<usize> {
    let begins = body_of(answer);
    let head = std::str::from_utf8(answer[..begins].strip_suffix(b"\r\n\r\n")?).ok()?;
    let (status, headers) = head.split_once("\r\n").unwrap_or((head, ""));
    if to_head || matches!(status.split(' ').nth(1), Some("204" | "304")) {
        return Some(begins);
    }
    let mut headers = headers.split("\r\n").filter_map(|header| header.split_once(':'));
    let length = headers.find(|(name, _)| name.eq_ignore_ascii_case("content-length")).and_then(|(_, length)| length.trim().parse().ok());
    Some(length.map_or(usize::MAX, |length: usize| begins.saturating_add(length)))
}

/// Half of all numbers, with no order in it.
fn is_heads(number: usize) -> bool {
    number.wrapping_mul(0x9E37_79B9).count_ones().is_multiple_of(2)
}

/// Where the body of an answer begins.
pub(super) fn body_of(answer: &[u8]) -> usize {
    answer.windows(4).position(|four| four == b"\r\n\r\n").map_or(answer.len(), |at| at + 4)
}

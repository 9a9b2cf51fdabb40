use std::{fs, io, time::Duration};

use sandboxer_protocol::{SandboxId, limits::TUNNEL_CREDIT_BYTES};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::timeout,
};

use super::*;
use crate::network::{AllPlaces, Egress, Log, NetworkSettings, SystemDialer};

/// What has to happen, however slow the machine is.
const PATIENCE: Duration = Duration::from_secs(60);

fn opened(tunnel: &mut Tunnel, number: Number, credit: u64) -> TunnelStream {
    let stream = tunnel.opened_by_agent(number, credit).unwrap().unwrap();
    assert_eq!(said(tunnel), [format!("{number}: credit {TUNNEL_CREDIT_BYTES}")]);
    stream
}

/// All that is to be said now.
fn said(tunnel: &mut Tunnel) -> Vec<String> {
    let mut all = Vec::new();
    while let Some(say) = tunnel.next() {
        all.push(match say {
            Say::Data(stream, data) => format!("{stream}: {} bytes", data.len()),
            Say::Control(ToAgent::TunnelCredit { stream, upto }) => format!("{stream}: credit {upto}"),
            Say::Control(ToAgent::TunnelEnd { stream }) => format!("{stream}: end"),
            Say::Control(ToAgent::TunnelReset { stream }) => format!("{stream}: reset"),
            Say::Control(ToAgent::TunnelConnect { stream, port, .. }) => format!("{stream}: connect {port}"),
            Say::Control(other) => format!("{other:?}"),
        });
    }
    all
}

#[test]
fn an_agent_that_invents_numbers_or_sends_beyond_its_credit_is_found_out() {
    let mut tunnel = Tunnel::default();
    let _stream = opened(&mut tunnel, 1, 0);
    for number in [0, 1, 2] {
        assert!(tunnel.opened_by_agent(number, 0).is_err(), "{number}");
    }
    assert!(tunnel.data(1, &vec![0; TUNNEL_CREDIT_BYTES as usize]).is_ok());
    assert!(tunnel.data(1, &[0]).is_err());
    // Of one that is not there: it was given up here, and the agent could not know.
    assert!(tunnel.data(99, &[0; 100]).is_ok());
    let _port = tunnel.connect(80).unwrap();
    assert!(tunnel.data(2, &[0]).is_err(), "it was not opened yet");
    let mut streams = Vec::new();
    let most = (1..).find(|step| match tunnel.opened_by_agent(2 * step + 1, 0) {
        Ok(stream) => {
            streams.push(stream);
            false
        }
        Err(_) => true,
    });
    assert_eq!(most, Some(MAX_PROXY_STREAMS as u64));
}

#[tokio::test]
async fn nothing_is_said_beyond_the_agents_credit_and_each_stream_has_its_turn() {
    let mut tunnel = Tunnel::default();
    let (mut one, mut two) = (opened(&mut tunnel, 1, 100_000), opened(&mut tunnel, 3, 10));
    assert_eq!(one.write(&[1; 500_000]).await.unwrap(), OUTBOX_BYTES);
    two.write_all(&[2; 20]).await.unwrap();
    assert_eq!(said(&mut tunnel), ["1: 65536 bytes", "3: 10 bytes", "1: 34464 bytes"]);
    tunnel.credit(3, 30);
    two.write_all(&[2; 5]).await.unwrap();
    assert_eq!(said(&mut tunnel), ["3: 15 bytes"]);
}

#[tokio::test]
async fn what_is_read_gives_new_credit_in_steps() {
    let mut tunnel = Tunnel::default();
    let mut stream = opened(&mut tunnel, 1, 0);
    tunnel.data(1, &vec![7; TUNNEL_CREDIT_BYTES as usize]).unwrap();
    stream.read_exact(&mut [0; 1000]).await.unwrap();
    assert!(said(&mut tunnel).is_empty());
    stream.read_exact(&mut vec![0; TUNNEL_CREDIT_BYTES as usize - 1000]).await.unwrap();
    assert_eq!(said(&mut tunnel), [format!("1: credit {}", 2 * TUNNEL_CREDIT_BYTES)]);
}

#[tokio::test]
async fn each_direction_has_its_end_and_who_drops_a_stream_cuts_it_off() {
    let mut tunnel = Tunnel::default();
    let mut stream = opened(&mut tunnel, 1, 100);
    tunnel.data(1, b"last words").unwrap();
    tunnel.ended(1);
    let mut heard = Vec::new();
    stream.read_to_end(&mut heard).await.unwrap();
    assert_eq!(heard, b"last words");
    stream.write_all(b"answer").await.unwrap();
    let (shut, said_now) = tokio::join!(stream.shutdown(), async { said(&mut tunnel) });
    shut.unwrap();
    assert_eq!(said_now, ["1: 6 bytes", "1: end"]);
    drop(stream);
    assert!(said(&mut tunnel).is_empty() && tunnel.shared.lock().streams.is_empty());
    drop(opened(&mut tunnel, 3, 100));
    assert_eq!(said(&mut tunnel), ["3: reset"]);
    assert!(tunnel.shared.lock().streams.is_empty());
}

#[tokio::test]
async fn a_port_is_asked_for_and_opened_or_refused() {
    let mut tunnel = Tunnel::default();
    let (mut good, bad) = (tunnel.connect(80).unwrap(), tunnel.connect(81).unwrap());
    good.write_all(b"early").await.unwrap();
    assert_eq!(said(&mut tunnel), ["2: connect 80", "4: connect 81"]);
    tunnel.opened(2, 100);
    tunnel.reset(4, TunnelFault::Refused);
    assert_eq!((good.opened().await, bad.opened().await), (Ok(()), Err(TunnelFault::Refused)));
    assert_eq!(said(&mut tunnel), ["2: 5 bytes"]);
    assert!(tunnel.serves());
    drop((good, bad));
    assert_eq!(said(&mut tunnel), ["2: reset"]);
    assert!(!tunnel.serves());
}

#[tokio::test]
async fn the_end_of_the_conversation_is_seen_by_whoever_waits() {
    let mut tunnel = Tunnel::default();
    let mut stream = opened(&mut tunnel, 1, 0);
    let reading = tokio::spawn(async move { stream.read(&mut [0; 1]).await.map_err(|error| error.kind()) });
    tokio::task::yield_now().await;
    tunnel.begin_again();
    assert_eq!(reading.await.unwrap(), Err(io::ErrorKind::ConnectionReset));
    assert!(said(&mut tunnel).is_empty());
}

#[test]
fn an_agent_that_opens_and_cuts_off_and_reads_nothing_fills_no_memory() {
    let mut tunnel = Tunnel::default();
    for step in 0..10_000 {
        let number = 2 * step + 1;
        drop(tunnel.opened_by_agent(number, 0).unwrap());
        tunnel.reset(number, TunnelFault::Reset);
    }
    let state = tunnel.shared.lock();
    assert_eq!((state.streams.len(), state.queue.len()), (0, 0));
}

#[tokio::test]
async fn the_driver_hears_when_the_last_port_is_left() {
    let mut tunnel = Tunnel::default();
    let mut stream = tunnel.connect(80).unwrap();
    assert_eq!(said(&mut tunnel), ["2: connect 80"]);
    tunnel.opened(2, 100);
    tunnel.ended(2);
    let (shut, said_now) = tokio::join!(stream.shutdown(), async { said(&mut tunnel) });
    shut.unwrap();
    assert_eq!(said_now, ["2: end"]);
    assert!(tunnel.serves());
    // Nothing is left to be said of it, and it is told all the same.
    let left = async {
        tunnel.stirred().await;
        tunnel.serves()
    };
    let (serves, ()) = tokio::join!(left, async { drop(stream) });
    assert!(!serves && tunnel.next().is_none());
}

#[tokio::test]
async fn a_break_is_seen_by_who_only_watches() {
    let mut tunnel = Tunnel::default();
    let (stream, other) = (opened(&mut tunnel, 1, 100), opened(&mut tunnel, 3, 100));
    let watching = |stream: &TunnelStream| {
        let watch = stream.watch();
        tokio::spawn(async move { watch.broken().await })
    };
    let (one, two) = (watching(&stream), watching(&other));
    tokio::task::yield_now().await;
    tunnel.data(1, b"more").unwrap();
    tokio::task::yield_now().await;
    assert!(!one.is_finished(), "what comes is no break");
    tunnel.reset(1, TunnelFault::Reset);
    timeout(PATIENCE, one).await.unwrap().unwrap();
    tunnel.begin_again();
    timeout(PATIENCE, two).await.unwrap().unwrap();
}

/// A program's connection through the proxy to a server of the test, as the agent sees it.
struct Proxied {
    tunnel: Tunnel,
    outside: TcpStream,
    log: Arc<Log>,
    _egress: Egress,
    _dir: tempfile::TempDir,
}

impl Proxied {
    async fn open(head: impl FnOnce(u16) -> String) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let hosts = dir.path().join("hosts");
        fs::write(&hosts, "127.0.0.1 a.test\n").unwrap();
        let settings = NetworkSettings {
            allow: vec!["*:*".parse().unwrap()],
            addresses: vec!["127.0.0.1".parse().unwrap()],
            dialer: Arc::new(SystemDialer::new(Some(hosts))),
            ..NetworkSettings::default()
        };
        let log = Log::open(dir.path());
        let mut egress = Egress::new(&Arc::new(settings), &AllPlaces::new(64), &["*:*".parse().unwrap()], Arc::clone(&log)).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut tunnel = Tunnel::default();
        egress.serve(SandboxId::random(), opened(&mut tunnel, 1, TUNNEL_CREDIT_BYTES));
        tunnel.data(1, head(listener.local_addr().unwrap().port()).as_bytes()).unwrap();
        let (outside, _) = timeout(PATIENCE, listener.accept()).await.unwrap().unwrap();
        Self { tunnel, outside, log, _egress: egress, _dir: dir }
    }

    /// The proxy has said that it is connected.
    async fn connected(&mut self) {
        let mut all = Vec::new();
        while !all.iter().any(|one: &String| one.ends_with("bytes")) {
            timeout(PATIENCE, self.tunnel.stirred()).await.expect("it is connected");
            all.extend(said(&mut self.tunnel));
        }
    }

    /// Sends until nothing more is taken, because the server outside reads nothing.
    async fn fill(&mut self) {
        loop {
            let room = {
                let state = self.tunnel.shared.lock();
                state.streams[&1].granted - state.streams[&1].received
            };
            let piece = usize::try_from(room).unwrap().min(MAX_TUNNEL_PIECE_BYTES);
            if piece > 0 {
                self.tunnel.data(1, &vec![7; piece]).unwrap();
            } else if timeout(Duration::from_secs(1), self.tunnel.stirred()).await.is_err() {
                // Where it was only slow, it is read from as it breaks, and the test shows less.
                return;
            }
            drop(said(&mut self.tunnel));
        }
    }

    /// What the server outside sees in the end.
    async fn seen_outside(&mut self) -> io::Result<usize> {
        let mut piece = vec![0; 1 << 16];
        loop {
            match timeout(PATIENCE, self.outside.read(&mut piece)).await.expect("it hangs") {
                Ok(1..) => {}
                end => return end,
            }
        }
    }

    async fn is_over(&self) {
        let over = async {
            while self.log.all().iter().any(|one| one.duration_ms.is_none()) {
                tokio::task::yield_now().await;
            }
        };
        timeout(PATIENCE, over).await.expect("it is written down as going on");
        assert_eq!(self.log.all().len(), 1);
    }
}

#[tokio::test]
async fn a_connection_that_is_cut_off_while_the_server_outside_reads_nothing_ends_at_once_and_with_a_reset() {
    let mut proxied = Proxied::open(|port| format!("CONNECT a.test:{port} HTTP/1.1\r\n\r\n")).await;
    proxied.connected().await;
    proxied.fill().await;
    proxied.tunnel.reset(1, TunnelFault::Reset);
    proxied.is_over().await;
    assert_eq!(proxied.seen_outside().await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn so_does_a_plain_request_whose_body_is_not_read() {
    let head = |port| format!("POST http://a.test:{port}/ HTTP/1.1\r\nContent-Length: 1000000000000\r\n\r\n");
    let mut proxied = Proxied::open(head).await;
    proxied.fill().await;
    proxied.tunnel.reset(1, TunnelFault::Reset);
    proxied.is_over().await;
    // How much was to come was said, so that its end may be an ordinary one.
    drop(proxied.seen_outside().await);
}

#[tokio::test]
async fn what_comes_to_its_end_in_both_directions_ends_without_a_reset() {
    let mut proxied = Proxied::open(|port| format!("CONNECT a.test:{port} HTTP/1.1\r\n\r\n")).await;
    proxied.connected().await;
    proxied.tunnel.data(1, b"all of it").unwrap();
    proxied.tunnel.ended(1);
    let mut heard = Vec::new();
    timeout(PATIENCE, proxied.outside.read_to_end(&mut heard)).await.unwrap().unwrap();
    assert_eq!(heard, b"all of it");
    proxied.outside.write_all(b"answer").await.unwrap();
    proxied.outside.shutdown().await.unwrap();
    let mut all = Vec::new();
    while !all.contains(&"1: end".to_owned()) {
        timeout(PATIENCE, proxied.tunnel.stirred()).await.unwrap();
        all.extend(said(&mut proxied.tunnel));
    }
    proxied.is_over().await;
    assert_eq!(proxied.seen_outside().await.unwrap(), 0);
}

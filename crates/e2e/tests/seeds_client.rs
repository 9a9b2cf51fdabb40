//! A client that knows only the seeds' messages: it answers pings, as every WebSocket does, and loses nothing without knowing.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::Duration;

use sandboxer_e2e::{Assembly, CutProxy, DEADLINE, Fault, Opcode, Options, Raw, Ws, count, seed, shared};
use serde_json::{Value, json};

/// What a seeds' client may be sent again: what came after the ping before the last one it got, since one ping is in flight at a time
/// and the next one proves that the answer to it was heard.
#[derive(Default)]
struct Heard {
    at_last_ping: [usize; 2],
    surely: [usize; 2],
}

#[derive(Default)]
struct Client {
    streams: [Assembly; 2],
    heard: Heard,
    pings: usize,
}

/// Why the client stopped reading.
#[derive(Debug, PartialEq)]
enum Left {
    Enough,
    Done(Value),
    /// The connection ended, or nothing came for too long.
    Gone,
}

impl Client {
    /// Reads until `messages` have come, or to the end, or until nothing comes for `patience`. The ping behind the 101 of an attach
    /// carries no offsets.
    async fn read(&mut self, raw: &mut Raw, attached: bool, messages: usize, patience: Duration) -> Left {
        let mut first = [true; 2];
        let mut greeted = !attached;
        // Nothing proves that the last pong of the connection before was heard.
        self.heard.at_last_ping = self.heard.surely;
        // What a ping vouches for is what came before it on this connection.
        let mut came = self.heard.surely;
        let mut seen = 0;
        while seen < messages {
            let Some(frame) = raw.frame_within(patience).await else { return Left::Gone };
            match frame.opcode {
                Opcode::Close => return Left::Gone,
                Opcode::Ping => {
                    assert!(frame.payload.len() <= 125);
                    raw.send(true, Opcode::Pong, &frame.payload).await;
                    if !std::mem::replace(&mut greeted, true) {
                        continue;
                    }
                    self.heard.surely = self.heard.at_last_ping;
                    self.heard.at_last_ping = came;
                    self.pings += 1;
                }
                _ => {
                    seen += 1;
                    let message = frame.json();
                    let stream = match message["event"].as_str().unwrap() {
                        "stdout" => 0,
                        "stderr" => 1,
                        _ if message["status"] == "SANDBOX_EXECUTION_DONE" => return Left::Done(message),
                        _ => continue,
                    };
                    if std::mem::take(&mut first[stream]) {
                        let offset = usize::try_from(message["offset"].as_u64().unwrap()).unwrap();
                        assert!(offset >= self.heard.surely[stream], "sent again from {offset} though {:?} was heard", self.heard.surely);
                    }
                    came[stream] = usize::try_from(message["end"].as_u64().unwrap()).unwrap();
                    self.streams[stream].take(&message);
                }
            }
        }
        Left::Enough
    }

    fn expect_exact(&self, left: &Left) {
        let Left::Done(done) = left else { panic!("it did not end: {left:?}") };
        assert_eq!(done["exit_code"], 0, "{done}");
        let lines = self.streams[0].bytes.iter().filter(|byte| **byte == b'\n').count();
        for (stream, name) in ["out", "err"].into_iter().enumerate() {
            let expected: String = (0..lines).map(|i| format!("{name} {i}\n")).collect();
            assert!(self.streams[stream].bytes == expected.as_bytes(), "{name} is not exact");
        }
        assert!(self.pings > 10, "hardly any ping");
    }
}

/// Prints numbered lines on both streams until it is told to stop.
const PROGRAM: &str = "
import select, sys
i = 0
while not select.select([sys.stdin], [], [], 0.002)[0]:
    print('out', i, flush=True)
    print('err', i, file=sys.stderr, flush=True)
    i += 1
";

#[tokio::test]
async fn a_client_of_the_seeds_loses_nothing_and_sees_again_only_what_followed_its_last_pong() {
    let (mut raw, id) = Raw::create(shared().address(), None).await;
    raw.send_text(&json!({"language": "python", "code": PROGRAM}).to_string()).await;
    let mut client = Client::default();
    for number in 0..count(40, 500) {
        assert_eq!(client.read(&mut raw, number > 0, 4 + number % 17, DEADLINE).await, Left::Enough);
        // Cut, with whatever is still on its way.
        drop(raw);
        raw = Raw::connect(shared().address(), &format!("/attach/{id}"), None).await;
    }
    raw.send_text(r#"{"event":"stdin","data":"\n"}"#).await;
    let left = client.read(&mut raw, true, usize::MAX, DEADLINE).await;
    client.expect_exact(&left);
}

/// Cut at any byte, half-open and silent: it only reads, answers pings, and attaches again when nothing comes any more.
#[tokio::test]
async fn a_client_of_the_seeds_is_exact_by_offset_alone_over_a_failing_network() {
    const SILENCE: Duration = Duration::from_millis(900);
    let (mut raw, id) = Raw::create(shared().address(), None).await;
    raw.send_text(&json!({"language": "python", "code": PROGRAM}).to_string()).await;
    assert_eq!(raw.message().await["status"], "SANDBOX_EXECUTION_RUNNING");
    drop(raw);
    let mut faults = [Fault::Cut; 12];
    faults[..2].copy_from_slice(&[Fault::HalfOpen, Fault::Silent(Duration::from_secs(5))]);
    // Some connections carry more than the largest message, so that something passes however much has gathered.
    let proxy = CutProxy::start(shared().address(), seed(), 300..150_000, &faults).await;
    let path = format!("/attach/{id}");
    let (faults, mut client) = (count(40, 500), Client::default());
    while proxy.happened() < faults {
        if let Some(mut raw) = Raw::try_connect(proxy.address(), &path, None, SILENCE).await {
            assert_eq!(client.read(&mut raw, true, usize::MAX, SILENCE).await, Left::Gone);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    println!("{} faults, {} and {} bytes sent again", proxy.happened(), client.streams[0].repeated, client.streams[1].repeated);
    proxy.heal();
    let mut left = Left::Gone;
    // In use, until the dead connection before this one is found out.
    while left == Left::Gone {
        let mut raw = Raw::connect(proxy.address(), &path, None).await;
        raw.send_text(r#"{"event":"stdin","data":"\n"}"#).await;
        left = client.read(&mut raw, true, usize::MAX, DEADLINE).await;
    }
    client.expect_exact(&left);
}

/// It has answered the last ping and then closes, which the server may see both at once: the answer counts.
#[tokio::test]
async fn a_pong_right_before_the_client_closes_is_heard() {
    let (mut raw, id) = Raw::create(shared().address(), None).await;
    raw.answers = usize::MAX;
    let code = "while read -r line; do echo $line; done";
    raw.send_text(&json!({"language": "bash", "code": code}).to_string()).await;
    assert_eq!(raw.message().await["status"], "SANDBOX_EXECUTION_RUNNING");
    let mut end = 0;
    for round in 0..count(20, 200) {
        let line = format!("line {round}\n");
        raw.send_text(&json!({"event": "stdin", "data": line}).to_string()).await;
        let mut came = false;
        while !came {
            let frame = raw.frame().await.unwrap();
            match frame.opcode {
                Opcode::Ping => raw.send(true, Opcode::Pong, &frame.payload).await,
                _ if frame.json()["event"] == "stdout" => {
                    let message = frame.json();
                    assert_eq!((&message["offset"], &message["data"]), (&json!(end), &json!(line)), "round {round}");
                    end = message["end"].as_u64().unwrap();
                    came = true;
                }
                _ => {}
            }
        }
        let ping = raw.frame().await.unwrap();
        assert_eq!(ping.opcode, Opcode::Ping);
        raw.send(true, Opcode::Pong, &ping.payload).await;
        raw.send(true, Opcode::Close, &1000_u16.to_be_bytes()).await;
        while raw.frame().await.is_some() {}
        raw = Raw::connect(shared().address(), &format!("/attach/{id}"), None).await;
    }
}

#[tokio::test]
async fn one_ping_is_in_flight_at_a_time() {
    let (mut raw, _) = Raw::create(shared().address(), None).await;
    raw.send_text(&json!({"language": "bash", "code": "for i in {1..50}; do echo $i; sleep 0.01; done"}).to_string()).await;
    let (mut pings, mut done) = (0, false);
    while !done {
        let frame = raw.frame().await.unwrap();
        match frame.opcode {
            Opcode::Ping => pings += 1,
            _ => done = frame.json()["status"] == "SANDBOX_EXECUTION_DONE",
        }
    }
    assert!(pings <= 1, "{pings} pings without an answer");
}

/// The server closes and the client answers: it has read all that was sent before.
#[tokio::test]
async fn the_close_handshake_of_a_client_that_reads_to_its_end_acknowledges_all() {
    let mut server = Options::default().start();
    let (mut raw, id) = Raw::create(server.address(), None).await;
    raw.send_text(&json!({"language": "bash", "code": "echo output"}).to_string()).await;
    while raw.message().await["status"] != "SANDBOX_EXECUTION_DONE" {}
    server.usr2();
    assert_eq!(raw.message().await["code"], "server_restarting");
    loop {
        let frame = raw.frame().await.unwrap();
        if frame.opcode == Opcode::Close {
            assert_eq!(frame.close_code(), 1001);
            raw.send(true, Opcode::Close, &frame.payload).await;
            break;
        }
    }
    assert!(server.exited().await.success());
    server.restart();
    let mut ws = Ws::attach(&server, &id).await;
    // Beyond the grace for `reconnect`, neither output nor the end comes again: the agent has kept that both were read.
    assert_eq!(ws.incoming_within(Duration::from_millis(900)).await, None);
    ws.expect_alive().await;
}

#[tokio::test]
async fn what_no_pong_acknowledged_is_sent_again_and_what_an_ack_did_is_not() {
    let (mut raw, id) = Raw::create(shared().address(), None).await;
    raw.send_text(&json!({"language": "bash", "code": "echo 12345; sleep 0.2; echo 67890", "execution_id": "e"}).to_string()).await;
    while raw.message().await["status"] != "SANDBOX_EXECUTION_DONE" {}
    drop(raw);
    let mut raw = Raw::attach(shared().address(), &id).await;
    let mut assembly = Assembly::default();
    loop {
        let message = raw.message().await;
        if message["event"] != "stdout" {
            assert_eq!(message["status"], "SANDBOX_EXECUTION_DONE", "{message}");
            break;
        }
        assembly.take(&message);
    }
    assert_eq!(assembly.bytes, b"12345\n67890\n");
    raw.send_text(&json!({"action": "ack", "execution_id": "e", "stdout_offset": 6, "stderr_offset": 0}).to_string()).await;
    raw.send_text(r#"{"action":"resize"}"#).await;
    assert_eq!(raw.message().await["code"], "invalid_field");
    drop(raw);
    let mut raw = Raw::attach(shared().address(), &id).await;
    let message = raw.message().await;
    assert_eq!((&message["offset"], &message["data"]), (&json!(6), &json!("67890\n")), "{message}");
}

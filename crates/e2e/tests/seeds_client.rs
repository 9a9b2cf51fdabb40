//! A client that knows only the seeds' messages: it answers pings, as every WebSocket does, and loses nothing without knowing.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use sandboxer_e2e::{Assembly, Incoming, Opcode, Options, Raw, Ws, count, shared};
use serde_json::{Value, json};

/// What a seeds' client may be sent again: what came after the ping before the last one it got, since one ping is in flight at a time
/// and the next one proves that the answer to it was heard.
#[derive(Default)]
struct Heard {
    at_last_ping: [usize; 2],
    surely: [usize; 2],
}

struct Client {
    streams: [Assembly; 2],
    heard: Heard,
    pings: usize,
}

impl Client {
    /// Reads until `messages` have come, or to the end. The ping behind the 101 of an attach carries no offsets.
    async fn read(&mut self, raw: &mut Raw, attached: bool, messages: usize) -> Option<Value> {
        let mut first = [true; 2];
        let mut greeted = !attached;
        // Nothing proves that the last pong of the connection before was heard.
        self.heard.at_last_ping = self.heard.surely;
        // What a ping vouches for is what came before it on this connection.
        let mut came = self.heard.surely;
        let mut seen = 0;
        while seen < messages {
            let frame = raw.frame().await.expect("the server does not end the connection");
            match frame.opcode {
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
                        _ if message["status"] == "SANDBOX_EXECUTION_DONE" => return Some(message),
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
        None
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
    let mut client = Client { streams: Default::default(), heard: Heard::default(), pings: 0 };
    for number in 0..count(40, 500) {
        assert_eq!(client.read(&mut raw, number > 0, 4 + number % 17).await, None);
        // Cut, with whatever is still on its way.
        drop(raw);
        raw = Raw::connect(shared().address(), &format!("/attach/{id}"), None).await;
    }
    raw.send_text(r#"{"event":"stdin","data":"\n"}"#).await;
    let done = client.read(&mut raw, true, usize::MAX).await.unwrap();
    assert_eq!(done["exit_code"], 0, "{done}");
    let lines = client.streams[0].bytes.iter().filter(|byte| **byte == b'\n').count();
    for (stream, name) in ["out", "err"].into_iter().enumerate() {
        let expected: String = (0..lines).map(|i| format!("{name} {i}\n")).collect();
        assert!(client.streams[stream].bytes == expected.as_bytes(), "{name} is not exact");
    }
    assert!(client.pings > 40, "hardly any ping");
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
    // Beyond the grace for `reconnect`, no output comes again. A server that was started since can't know that the end was heard, too.
    match ws.incoming_within(std::time::Duration::from_millis(900)).await {
        None => {}
        Some(Incoming::Message(message)) => assert_eq!(message["status"], "SANDBOX_EXECUTION_DONE", "{message}"),
        Some(other) => panic!("{other:?}"),
    }
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

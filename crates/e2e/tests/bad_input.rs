//! Bad input: an error that names what was wrong, an open connection, and nothing else changed.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use sandboxer_e2e::{Incoming, Opcode, Options, Raw, Ws, host, shared};
use serde_json::{Value, json};

const MIB: usize = 1024 * 1024;

/// Messages, the code that each is answered with, and what the answer has to name.
fn bad_messages() -> Vec<(String, &'static str, &'static str)> {
    let json = |value: Value| value.to_string();
    vec![
        (String::new(), "malformed_json", ""),
        ("{".to_owned(), "malformed_json", ""),
        ("hello".to_owned(), "malformed_json", ""),
        ("{} {}".to_owned(), "malformed_json", ""),
        ("{\"a\":\"\u{1}\"}".to_owned(), "malformed_json", ""),
        ("[".repeat(100_000), "malformed_json", ""),
        ("{\"a\":".repeat(100_000), "malformed_json", ""),
        (json(json!([])), "not_an_object", ""),
        (json(json!([{"language": "bash", "code": "touch /tmp/ran"}])), "not_an_object", ""),
        (json(json!("text")), "not_an_object", ""),
        (json(json!(5)), "not_an_object", ""),
        (json(json!(null)), "not_an_object", ""),
        (json(json!(true)), "not_an_object", ""),
        (json(json!({"action": "dance"})), "unknown_action", "dance"),
        (json(json!({"action": ""})), "unknown_action", ""),
        (json(json!({"action": 5})), "invalid_field", "action"),
        (json(json!({"action": null})), "invalid_field", "action"),
        (json(json!({"event": "stdout", "data": "x"})), "unknown_event", "stdout"),
        (json(json!({"event": 5})), "invalid_field", "event"),
        (json(json!({"event": "stdin"})), "invalid_field", "data"),
        (json(json!({"event": "stdin", "data": 5})), "invalid_field", "data"),
        (json(json!({"event": "stdin", "data": "x", "offset": "y"})), "invalid_field", "offset"),
        (json(json!({"event": "stdin", "data": "x", "offset": -1})), "invalid_field", "offset"),
        (json(json!({"action": "resize", "rows": 24})), "invalid_field", "cols"),
        (json(json!({"action": "signal", "signal": []})), "invalid_field", "signal"),
        (json(json!({"action": "checkpoint", "include_execution": "yes"})), "invalid_field", "include_execution"),
        (json(json!({"action": "snapshot", "name": 5})), "invalid_field", "name"),
        (json(json!({"action": "snapshot_filesystem"})), "invalid_field", "name"),
        (json(json!({"action": "rollback", "snapshot_id": 5})), "invalid_field", "snapshot_id"),
        (json(json!({"action": "ack", "stdout_offset": "x"})), "invalid_field", "stdout_offset"),
        (json(json!({"action": "reconnect", "stdout_offset": -5})), "invalid_field", "stdout_offset"),
        (json(json!({"action": "reconnect", "execution_id": {}})), "invalid_field", "execution_id"),
    ]
}

async fn send_all_bad(ws: &mut Ws) {
    for (text, code, names) in bad_messages() {
        ws.send_text(text.clone()).await;
        let error = ws.expect_error(code).await;
        assert!(error["message"].as_str().unwrap().contains(names), "{text}: {error}");
    }
    ws.send_binary(b"{\"language\":\"bash\",\"code\":\"touch /tmp/ran\"}".to_vec()).await;
    ws.expect_error("binary_frame").await;
    ws.send_binary(Vec::new()).await;
    ws.expect_error("binary_frame").await;
}

#[tokio::test]
async fn bad_messages_are_each_answered_by_an_error_and_the_connection_stays_open() {
    let mut ws = Ws::create(shared()).await;
    send_all_bad(&mut ws).await;
    assert_eq!(ws.bash("ls /tmp/ran 2>/dev/null; echo end").await.out(), "end\n");
}

#[tokio::test]
async fn bad_messages_do_not_disturb_a_running_execution() {
    let mut ws = Ws::create(shared()).await;
    ws.start(json!({"language": "bash", "code": "read -r line; echo got $line"})).await;
    send_all_bad(&mut ws).await;
    ws.send(json!({"event": "stdin", "data": "it\n"})).await;
    assert_eq!(ws.until_done().await.ok(), "got it\n");
}

#[tokio::test]
async fn a_message_of_the_size_limit_is_read_and_one_above_it_closes_with_1009() {
    let server = shared();
    let mut ws = Ws::create(server).await;
    let id = ws.sandbox_id.clone();
    ws.bash("echo kept >/tmp/file").await;
    ws.send_text("x".repeat(8 * MIB)).await;
    ws.expect_error("malformed_json").await;
    // The server may close before it has read all of it.
    let _ = ws.try_send(tokio_tungstenite::tungstenite::Message::text("x".repeat(8 * MIB + 1))).await;
    ws.expect_close(1009).await;
    let mut ws = Ws::attach(server, &id).await;
    assert_eq!(ws.bash("cat /tmp/file").await.ok(), "kept\n");
}

async fn expect_1009(raw: &mut Raw) {
    loop {
        let frame = raw.frame().await.expect("a close frame before the end");
        if frame.opcode == Opcode::Close {
            assert_eq!(frame.close_code(), 1009);
            return;
        }
        assert_eq!(frame.opcode, Opcode::Ping, "{frame:?}");
    }
}

#[tokio::test]
async fn the_size_limit_holds_for_fragments_and_for_what_is_only_announced() {
    let server = Options::default().start();
    let (mut raw, _) = Raw::create(server.address(), None).await;
    let before = host::rss(server.pid());
    raw.send(false, Opcode::Text, &vec![b'x'; MIB]).await;
    for _ in 0..8 {
        raw.send(false, Opcode::Continuation, &vec![b'x'; MIB]).await;
    }
    expect_1009(&mut raw).await;
    for length in [8 * MIB as u64 + 1, 1 << 40, (1 << 63) - 1] {
        let (mut raw, _) = Raw::create(server.address(), None).await;
        raw.announce(Opcode::Text, length).await;
        expect_1009(&mut raw).await;
    }
    assert!(host::rss(server.pid()).saturating_sub(before) < 32 * MIB as u64);
    Ws::create(&server).await.expect_alive().await;
}

#[tokio::test]
async fn what_is_no_websocket_ends_that_connection_and_no_other() {
    let server = shared();
    let mut neighbour = Ws::create(server).await;
    for garbage in [
        b"\xff\xff\xff\xff\xff\xff\xff\xff".as_slice(),
        // Not masked, a reserved opcode, a long ping, a continuation of nothing, text that is not UTF-8.
        b"\x81\x02{}",
        b"\x83\x80\x00\x00\x00\x00",
        &[b"\x89\xfe\x01\x00\x00\x00\x00\x00".as_slice(), &[0; 256]].concat(),
        b"\x80\x80\x00\x00\x00\x00",
        b"\x81\x82\x00\x00\x00\x00\xff\xfe",
    ] {
        let (mut raw, id) = Raw::create(server.address(), None).await;
        raw.send_bytes(garbage).await;
        raw.send_text("{}").await;
        // Closed with a code for it, or answered with an error: never silence.
        while let Some(frame) = raw.frame().await {
            if frame.opcode == Opcode::Close || (frame.opcode == Opcode::Text && frame.json()["event"] == "error") {
                break;
            }
        }
        drop(raw);
        Ws::attach(server, &id).await.expect_alive().await;
    }
    neighbour.expect_alive().await;
}

#[tokio::test]
async fn a_bad_execution_request_while_one_runs_is_refused_and_the_first_goes_on() {
    let mut ws = Ws::create(shared()).await;
    ws.start(json!({"language": "bash", "code": "read -r line; echo got $line"})).await;
    ws.send(json!({"language": "bash"})).await;
    ws.expect_status("SANDBOX_EXECUTION_ERROR").await;
    let error = ws.next().await;
    assert_eq!(error["event"], "error", "{error}");
    ws.send(json!({"event": "stdin", "data": "it\n"})).await;
    assert_eq!(ws.until_done().await.ok(), "got it\n");
}

#[tokio::test]
async fn a_flood_of_bad_messages_is_answered_one_by_one() {
    let mut ws = Ws::create(shared()).await;
    for _ in 0..2000 {
        ws.send_text("nonsense").await;
    }
    for _ in 0..2000 {
        let incoming = ws.incoming().await;
        assert!(matches!(&incoming, Incoming::Message(message) if message["code"] == "malformed_json"), "{incoming:?}");
    }
    ws.expect_alive().await;
}

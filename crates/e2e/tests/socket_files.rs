//! Files on the WebSocket, for clients that have nothing else.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use base64::{Engine as _, prelude::BASE64_STANDARD};
use sandboxer_e2e::{Ws, shared};
use serde_json::{Value, json};

async fn ask(ws: &mut Ws, request: Value) -> Value {
    ws.send(request.clone()).await;
    let answer = ws.next().await;
    assert_eq!((&answer["event"], &answer["op"]), (&json!("file"), &request["op"]), "{answer}");
    assert_eq!(answer.get("id"), request.get("id"), "{answer}");
    answer
}

#[tokio::test]
async fn files_are_written_read_listed_renamed_and_removed_on_the_socket() {
    let mut ws = Ws::create(shared()).await;
    let text = ask(
        &mut ws,
        json!({"action": "file", "op": "write", "path": "/root/a/b.txt", "data": "héllo", "parents": true, "mode": "600", "id": "w"}),
    )
    .await;
    assert_eq!((&text["file"]["size"], &text["file"]["mode"]), (&json!(6), &json!("0600")), "{text}");
    // In pieces; it has its name with the last.
    let noise: Vec<u8> = (0..3_000_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for (number, piece) in noise.chunks(1_000_000).enumerate() {
        let request = json!({"action": "file", "op": "write", "path": "/root/noise", "id": "n", "encoding": "base64", "data": BASE64_STANDARD.encode(piece), "more": true});
        assert_eq!(ask(&mut ws, request).await["offset"], json!((number + 1) * 1_000_000));
        let stat = ask(&mut ws, json!({"action": "file", "op": "stat", "path": "/root/noise"})).await;
        assert_eq!(stat["error"]["code"], "file_not_found", "{stat}");
        let other = ask(&mut ws, json!({"action": "file", "op": "write", "path": "/root/other", "data": "x"})).await;
        assert_eq!(other["error"]["code"], "not_now", "{other}");
    }
    let whole = ask(&mut ws, json!({"action": "file", "op": "write", "path": "/root/noise", "id": "n"})).await;
    assert_eq!(whole["file"]["size"], 3_000_000, "{whole}");
    let (mut read, mut end) = (Vec::new(), false);
    while !end {
        let piece = ask(&mut ws, json!({"action": "file", "op": "read", "path": "/root/noise", "offset": read.len()})).await;
        assert_eq!((&piece["offset"], &piece["size"]), (&json!(read.len()), &json!(3_000_000)), "{}", piece["error"]);
        read.extend(BASE64_STANDARD.decode(piece["data"].as_str().unwrap()).unwrap());
        end = piece["end"].as_bool().unwrap();
    }
    assert!(read == noise);
    let behind = ask(&mut ws, json!({"action": "file", "op": "read", "path": "/root/noise", "offset": 3_000_000})).await;
    assert_eq!((&behind["data"], &behind["end"]), (&json!(""), &json!(true)), "{behind}");
    assert_eq!(ask(&mut ws, json!({"action": "file", "op": "mkdir", "path": "/root/a/d"})).await["file"]["kind"], "directory");
    assert_eq!(
        ask(&mut ws, json!({"action": "file", "op": "rename", "path": "/root/noise", "to": "/root/a/d/n"})).await["file"]["path"],
        "/root/a/d/n"
    );
    let page = ask(&mut ws, json!({"action": "file", "op": "list", "path": "/root/a", "limit": 1})).await;
    assert_eq!((&page["items"][0]["name"], page["items"].as_array().unwrap().len()), (&json!("b.txt"), 1), "{page}");
    let next = ask(&mut ws, json!({"action": "file", "op": "list", "path": "/root/a", "limit": 1, "cursor": page["next_cursor"]})).await;
    assert_eq!(next["items"][0]["name"], "d", "{next}");
    assert_eq!(ask(&mut ws, json!({"action": "file", "op": "remove", "path": "/root/a/d"})).await["error"]["code"], "not_empty");
    assert_eq!(ask(&mut ws, json!({"action": "file", "op": "remove", "path": "/root/a/d", "recursive": true})).await.get("error"), None);
    assert_eq!(ws.bash("cat a/b.txt; stat -c %a a/b.txt; ls a").await.ok(), "héllo600\nb.txt\n");
}

#[tokio::test]
async fn a_bad_request_for_a_file_is_told_and_a_connection_that_ends_leaves_no_half_file() {
    let mut ws = Ws::create(shared()).await;
    for request in
        [json!({"action": "file"}), json!({"action": "file", "op": "fly", "path": "/"}), json!({"action": "file", "op": "read", "path": 7})]
    {
        ws.send(request).await;
        ws.expect_error("invalid_field").await;
    }
    for (request, code) in [
        (json!({"action": "file", "op": "read", "path": "relative"}), "invalid_field"),
        (json!({"action": "file", "op": "read", "path": "/root"}), "is_a_directory"),
        (json!({"action": "file", "op": "write", "path": "/root/x", "data": "?", "encoding": "base64"}), "invalid_field"),
        (json!({"action": "file", "op": "write", "path": "/root/x", "data": "", "mode": "9"}), "invalid_field"),
        (json!({"action": "file", "op": "rename", "path": "/root"}), "invalid_field"),
        (json!({"action": "file", "op": "list", "path": "/root", "limit": 0}), "invalid_field"),
        (json!({"action": "file", "op": "list", "path": "/root", "cursor": "x"}), "bad_request"),
    ] {
        let answer = ask(&mut ws, request).await;
        assert_eq!(answer["error"]["code"], code, "{answer}");
    }
    ws.start(json!({"language": "bash", "code": "echo ready; read -r line; ls -A"})).await;
    ws.until_output("stdout", "ready\n").await;
    // While a program runs, and cut off in the middle.
    ws.send(json!({"action": "file", "op": "write", "path": "/root/half", "data": "x", "more": true})).await;
    while ws.next().await["event"] != "file" {}
    let id = ws.sandbox_id.clone();
    ws.close().await;
    let mut ws = Ws::attach(shared(), &id).await;
    ws.send(json!({"event": "stdin", "data": "\n"})).await;
    let rest = ws.until_done().await;
    assert!(!rest.ok().contains("half") && !rest.ok().contains(".sandboxer-"), "{:?}", rest.out());
}

//! Files on the WebSocket, for clients that have nothing else.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use base64::{Engine as _, prelude::BASE64_STANDARD};
use sandboxer_e2e::{DEADLINE, Files, Options, Ws, eventually, host, shared};
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

/// All of an archive, piece by piece.
async fn packed(ws: &mut Ws, path: &str) -> Vec<u8> {
    let (mut archive, mut end) = (Vec::new(), false);
    while !end {
        let piece = ask(ws, json!({"action": "file", "op": "pack", "path": path, "id": "p", "offset": archive.len()})).await;
        assert_eq!(piece["offset"], json!(archive.len()), "{}", piece["error"]);
        archive.extend(BASE64_STANDARD.decode(piece["data"].as_str().unwrap()).unwrap());
        end = piece["end"].as_bool().unwrap();
    }
    archive
}

/// Hands in an archive, piece by piece. The last answer, or the first that is an error.
async fn unpacked(ws: &mut Ws, path: &str, archive: &[u8]) -> Value {
    let pieces: Vec<_> = archive.chunks(1_000_000).collect();
    for (number, piece) in pieces.iter().enumerate() {
        let request = json!({"action": "file", "op": "unpack", "path": path, "id": "u", "parents": true, "offset": number * 1_000_000,
            "encoding": "base64", "data": BASE64_STANDARD.encode(piece), "more": number + 1 < pieces.len()});
        let answer = ask(ws, request).await;
        if answer.get("error").is_some() || number + 1 == pieces.len() {
            return answer;
        }
    }
    panic!("an archive has a piece");
}

fn entry(archive: &mut tar::Builder<Vec<u8>>, kind: tar::EntryType, name: &str, link: &str, content: &[u8]) {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(0o644);
    header.set_size(content.len() as u64);
    // As it is: the library would not write what climbs.
    header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
    header.as_gnu_mut().unwrap().linkname[..link.len()].copy_from_slice(link.as_bytes());
    header.set_cksum();
    archive.append(&header, content).unwrap();
}

#[tokio::test]
async fn a_directory_goes_out_and_in_as_an_archive_on_the_socket_and_nothing_else_is_touched() {
    let mut ws = Ws::create(shared()).await;
    let made =
        "mkdir -p t/sub && head -c 3000000 /dev/urandom > t/noise && echo one > t/sub/one && ln -s sub/one t/link && ln t/noise t/twin";
    let _ = ws.bash(made).await.ok();
    let archive = packed(&mut ws, "/root/t").await;
    assert!(archive.len() > 3_000_000 && archive.len() < 3_500_000, "{}", archive.len());
    let answer = unpacked(&mut ws, "/root/new/copy", &archive).await;
    assert_eq!(answer["file"]["path"], "/root/new/copy", "{answer}");
    let same = ws.bash("diff -r t new/copy && readlink new/copy/link && stat -c %h new/copy/noise").await;
    assert_eq!(same.ok(), "sub/one\n2\n");
    // What means harm, and what is none.
    let evil = |entries: &[(tar::EntryType, &str, &str)]| {
        let mut archive = tar::Builder::new(Vec::new());
        for (kind, name, link) in entries {
            entry(&mut archive, *kind, name, link, if *kind == tar::EntryType::Regular { b"x" } else { b"" });
        }
        archive.into_inner().unwrap()
    };
    let (file, symlink, hard) = (tar::EntryType::Regular, tar::EntryType::Symlink, tar::EntryType::Link);
    for bad in [
        evil(&[(file, "../../planted", "")]),
        evil(&[(file, "/root/planted", "")]),
        evil(&[(symlink, "back", "/root"), (file, "back/planted", "")]),
        evil(&[(file, "f", ""), (hard, "g", "../../root/t/sub/one")]),
        vec![7; 5000],
        archive[..3000].to_vec(),
    ] {
        let answer = unpacked(&mut ws, "/root/victim", &bad).await;
        assert_eq!(answer["error"]["code"], "bad_archive", "{answer}");
    }
    assert_eq!(ws.bash("ls -A / /root /root/victim | grep -c -e planted -e .sandboxer-").await.out(), "0\n");
    for (request, code) in [
        (json!({"action": "file", "op": "pack", "path": "relative"}), "invalid_field"),
        (json!({"action": "file", "op": "pack", "path": "/root/t/sub/one"}), "not_a_directory"),
        (json!({"action": "file", "op": "pack", "path": "/root/../../nothing"}), "file_not_found"),
        (json!({"action": "file", "op": "pack", "path": "/root", "offset": 512}), "not_now"),
        (json!({"action": "file", "op": "unpack", "path": "/root/none", "data": "x"}), "file_not_found"),
        (json!({"action": "file", "op": "unpack", "path": "/root/t", "data": "?", "encoding": "base64"}), "invalid_field"),
    ] {
        let answer = ask(&mut ws, request).await;
        assert_eq!(answer["error"]["code"], code, "{answer}");
    }
    ws.expect_alive().await;
}

#[tokio::test]
async fn an_archive_that_is_cancelled_in_the_middle_of_a_file_leaves_nothing_of_it() {
    let mut ws = Ws::create(shared()).await;
    let mut archive = tar::Builder::new(Vec::new());
    entry(&mut archive, tar::EntryType::Regular, "small", "", b"whole");
    entry(&mut archive, tar::EntryType::Regular, "large", "", &vec![7; 4_000_000]);
    let archive = archive.into_inner().unwrap();
    let _ = ask(&mut ws, json!({"action": "file", "op": "mkdir", "path": "/root/d"})).await;
    for number in 0..2 {
        let data = BASE64_STANDARD.encode(&archive[number * 1_000_000..][..1_000_000]);
        let request =
            json!({"action": "file", "op": "unpack", "path": "/root/d", "id": "u", "encoding": "base64", "data": data, "more": true});
        assert_eq!(ask(&mut ws, request).await["offset"], json!((number + 1) * 1_000_000));
    }
    let _ = ws.bash("until ls d/.sandboxer-* >/dev/null 2>&1; do sleep 0.02; done").await.ok();
    assert_eq!(ask(&mut ws, json!({"action": "file", "op": "cancel", "path": "/root/d", "id": "u"})).await.get("error"), None);
    assert_eq!(ws.bash("while ls d/.sandboxer-* >/dev/null 2>&1; do sleep 0.02; done; ls -A d; cat d/small").await.ok(), "small\nwhole");
    // What is asked for next is something new.
    let gone = json!({"action": "file", "op": "unpack", "path": "/root/d", "id": "u", "data": "", "offset": 2_000_000});
    assert_eq!(ask(&mut ws, gone).await["error"]["code"], "not_now");
    let one = ask(&mut ws, json!({"action": "file", "op": "pack", "path": "/usr", "id": "p", "length": 1000})).await;
    assert_eq!(one["end"], false, "{}", one["error"]);
    assert_eq!(ask(&mut ws, json!({"action": "file", "op": "cancel", "path": "/usr", "id": "p"})).await.get("error"), None);
    assert!(packed(&mut ws, "/root/d").await.len() > 512);
    ws.expect_alive().await;
}

/// What a watch tells until this comes, in the order in which it does.
async fn told_until(ws: &mut Ws, kind: &str, path: Option<&str>) -> Vec<Value> {
    let mut all = Vec::new();
    loop {
        let event = ws.next().await;
        assert_eq!((&event["event"], &event["op"], &event["id"]), (&json!("file"), &json!("watch"), &json!("w")), "{event}");
        all.extend(event["changes"].as_array().unwrap_or_else(|| panic!("{event}")).clone());
        if all.iter().any(|change| change["kind"] == kind && path.is_none_or(|path| change["path"] == path)) {
            return all;
        }
    }
}

/// The answer to a request, with what a watch tells before it.
async fn ask_beside(ws: &mut Ws, request: Value) -> (Value, Vec<Value>) {
    ws.send(request.clone()).await;
    let mut told = Vec::new();
    loop {
        let event = ws.next().await;
        if event["op"] == request["op"] {
            return (event, told);
        }
        told.extend(event["changes"].as_array().unwrap_or_else(|| panic!("{event}")).clone());
    }
}

#[tokio::test]
async fn a_directory_is_watched_on_the_socket_until_it_vanishes_or_that_is_cancelled() {
    let mut ws = Ws::create(shared()).await;
    let _ = ws.bash("mkdir -p d/sub; touch f").await.ok();
    let watch = |path: &str| json!({"action": "file", "op": "watch", "path": path, "id": "w", "recursive": true});
    for (path, code) in [("relative", "invalid_field"), ("/root/none", "file_not_found"), ("/root/f", "not_a_directory")] {
        let answer = ask(&mut ws, watch(path)).await;
        assert_eq!(answer["error"]["code"], code, "{answer}");
    }
    assert_eq!(ask(&mut ws, watch("/root/d")).await.get("error"), None);
    assert_eq!(told_until(&mut ws, "watching", None).await[0], json!({"kind": "watching"}));
    let write = json!({"action": "file", "op": "write", "path": "/root/d/sub/new", "data": "x"});
    let (written, mut told) = ask_beside(&mut ws, write).await;
    assert_eq!(written["file"]["size"], 1, "{written}");
    if !told.iter().any(|change| change["path"] == "/root/d/sub/new") {
        told.extend(told_until(&mut ws, "created", Some("/root/d/sub/new")).await);
    }
    assert!(told.contains(&json!({"kind": "created", "path": "/root/d/sub/new", "directory": false})), "{told:?}");
    // It vanishes.
    let (removed, mut told) = ask_beside(&mut ws, json!({"action": "file", "op": "remove", "path": "/root/d", "recursive": true})).await;
    assert_eq!(removed.get("error"), None);
    if !told.iter().any(|change| change["kind"] == "ended") {
        told.extend(told_until(&mut ws, "ended", None).await);
    }
    assert_eq!(told.last().unwrap(), &json!({"kind": "ended", "message": "The directory is gone."}), "{told:?}");
    // Its id is free again; and what is cancelled says nothing more.
    let _ = ws.bash("mkdir d").await.ok();
    assert_eq!(ask(&mut ws, watch("/root/d")).await.get("error"), None);
    let (other, _) = ask_beside(&mut ws, json!({"action": "file", "op": "mkdir", "path": "/root/d/one"})).await;
    assert_eq!(other.get("error"), None);
    let (cancelled, _) = ask_beside(&mut ws, json!({"action": "file", "op": "cancel", "path": "/root/d", "id": "w"})).await;
    assert_eq!(cancelled, json!({"event": "file", "op": "cancel", "id": "w"}));
    assert_eq!(ws.bash("touch d/two; sync; ls d").await.ok(), "one\ntwo\n");
    // All of a sandbox together have so many.
    let mut refused = Vec::new();
    for number in 0..20 {
        let watch = json!({"action": "file", "op": "watch", "path": "/root/d", "id": number.to_string()});
        ws.send(watch).await;
        let answer = loop {
            let event = ws.next().await;
            if event.get("changes").is_none() {
                break event;
            }
        };
        refused.extend(answer.get("error").map(|error| error["code"].clone()));
        if refused.len() > 2 {
            break;
        }
    }
    assert!(!refused.is_empty() && refused.iter().all(|code| code == "rate_limited"), "{refused:?}");
}

/// Makes more changes than fit into any buffer on the way to a client that takes none of them.
const MANY: &str = "
name = 'x' * 200
for n in range(12000):
    with open(f'/root/d/{name}{n}', 'w') as f: f.write('x')
open('/root/made', 'w').close()";

#[tokio::test]
async fn a_client_that_does_not_read_what_changes_takes_no_memory_and_may_cancel_its_watch() {
    let server = Options::default().start();
    let mut ws = Ws::create(&server).await;
    let _ = ws.bash("mkdir d").await.ok();
    assert_eq!(ask(&mut ws, json!({"action": "file", "op": "watch", "path": "/root/d", "id": "w"})).await.get("error"), None);
    let _ = told_until(&mut ws, "watching", None).await;
    let before = host::rss(server.pid());
    ws.send(json!({"language": "python", "code": MANY})).await;
    let files = Files::of(&server, &ws.sandbox_id);
    eventually("all are made", 4 * DEADLINE, || files.call("GET", "/stat", "/root/made", "", b"").status == 200).await;
    let more = host::rss(server.pid()).saturating_sub(before) >> 20;
    println!("a client that does not read of 12000 new files: {more} MiB more");
    assert!(more < 32, "{more} MiB");
    ws.send(json!({"action": "file", "op": "cancel", "path": "/root/d", "id": "w"})).await;
    let (mut cancelled, mut done) = (false, false);
    while !(cancelled && done) {
        let event = ws.next().await;
        cancelled |= event["op"] == "cancel";
        done |= event["status"] == "SANDBOX_EXECUTION_DONE";
        assert!(!cancelled || event["op"] != "watch", "{event}");
    }
    ws.expect_alive().await;
}

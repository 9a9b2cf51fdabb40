//! The desk with a driver, and a client, that are played.

use serde_json::from_value;
use tokio::time::{Instant, sleep};

use super::*;
use crate::sandbox::{
    driver::Command,
    transfers::{Push, STALLED, Word},
};

struct Played {
    desk: FileDesk,
    answers: mpsc::Receiver<ServerEvent>,
    commands: mpsc::Receiver<Command>,
    turns: FileTurns,
}

/// What the driver has of something that was begun.
struct Asked {
    ask: FileAsk,
    words: mpsc::Sender<Word>,
    pushes: mpsc::Receiver<Push>,
}

impl Played {
    fn new() -> Self {
        let (handle, commands) = Handle::played();
        let turns = FileTurns::new();
        let (desk, answers) = FileDesk::open(handle, turns.clone());
        Self { desk, answers, commands, turns }
    }

    async fn send(&self, request: Value) {
        self.desk.take(from_value(request).unwrap(), None).await;
    }

    async fn answer(&mut self) -> Value {
        let Some(ServerEvent::File(event)) = self.answers.recv().await else { panic!("no answer") };
        json!(event)
    }

    async fn ask(&mut self, request: Value) -> Value {
        self.send(request).await;
        self.answer().await
    }

    /// What the driver is asked for, and opens.
    async fn opens(&mut self) -> Asked {
        let Some(Command::File(order)) = self.commands.recv().await else { panic!("nothing was asked for") };
        let (ask, words, pushes) = order.played();
        words.send(Word::Opened { about: None, start: 0, length: None }).await.unwrap();
        Asked { ask, words, pushes }
    }
}

fn decoded(answer: &Value) -> Vec<u8> {
    BASE64_STANDARD.decode(answer["data"].as_str().unwrap()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_archive_comes_as_it_is_asked_for_and_no_faster() {
    let mut played = Played::new();
    let pack = |offset: u64| json!({"op": "pack", "path": "/d", "id": "p", "offset": offset, "length": 400_000});
    played.send(pack(0)).await;
    let mut asked = played.opens().await;
    assert!(matches!(&asked.ask, FileAsk::Pack { live: false, .. }));
    let content: Vec<u8> = (0..1_000_000_u32).map(|n| (n % 251) as u8).collect();
    let words = asked.words.clone();
    let sending = content.clone();
    let sent = tokio::spawn(async move {
        for piece in sending.chunks(MAX_PIECE) {
            words.send(Word::Data(Bytes::copy_from_slice(piece))).await.unwrap();
        }
        words.send(Word::Done(None)).await.unwrap();
    });
    let first = played.answer().await;
    assert_eq!((&first["offset"], &first["end"], &first["op"]), (&json!(0), &json!(false), &json!("pack")));
    sent.await.unwrap();
    sleep(std::time::Duration::from_secs(60)).await;
    // The sandbox hears of no more than the two pieces that one request takes: its credit rises by no more.
    let mut taken = 0;
    while let Ok(Push::Taken(bytes)) = asked.pushes.try_recv() {
        taken = bytes;
    }
    assert!(taken <= 2 * MAX_PIECE as u64, "{taken}");
    let wrong = played.ask(pack(5)).await;
    assert_eq!(wrong["error"]["code"], "not_now", "{wrong}");
    let other = played.ask(json!({"op": "pack", "path": "/other"})).await;
    assert_eq!(other["error"]["code"], "not_now", "{other}");
    let mut whole = decoded(&first);
    loop {
        let next = played.ask(pack(whole.len() as u64)).await;
        whole.extend(decoded(&next));
        if next["end"] == true {
            break;
        }
    }
    assert!(whole == content);
    let behind = played.ask(pack(whole.len() as u64)).await;
    assert_eq!(behind["error"]["code"], "not_now", "{behind}");
}

const MAX_PIECE: usize = sandboxer_protocol::limits::MAX_FILES_PIECE_BYTES;

#[tokio::test(start_paused = true)]
async fn what_is_not_asked_for_or_sent_any_longer_is_given_up_and_is_not_begun_anew_in_the_middle() {
    let mut played = Played::new();
    played.send(json!({"op": "pack", "path": "/d", "length": 1})).await;
    let packing = played.opens().await;
    packing.words.send(Word::Data(Bytes::from_static(b"ab"))).await.unwrap();
    assert_eq!(decoded(&played.answer().await), b"a");
    let unpack = json!({"op": "unpack", "path": "/d", "data": "x", "more": true});
    played.send(unpack.clone()).await;
    let unpacking = played.opens().await;
    assert_eq!(played.answer().await["offset"], 1);
    let begun = Instant::now();
    // Other requests don't keep either.
    for _ in 0..4 {
        sleep(STALLED / 4).await;
        let _ = played.ask(json!({"op": "stat", "path": "relative"})).await;
    }
    packing.words.closed().await;
    unpacking.words.closed().await;
    assert!(begun.elapsed() < STALLED + STALLED / 4, "{:?}", begun.elapsed());
    assert_eq!(played.ask(unpack).await["error"]["code"], "not_now");
    assert_eq!(played.ask(json!({"op": "pack", "path": "/d", "offset": 1})).await["error"]["code"], "not_now");
    assert_eq!(played.ask(json!({"op": "write", "path": "/f", "data": "x", "offset": 7})).await["error"]["code"], "not_now");
    assert!(played.commands.try_recv().is_err(), "nothing was begun");
}

#[tokio::test(start_paused = true)]
async fn what_is_cancelled_is_given_up() {
    let mut played = Played::new();
    for op in ["pack", "unpack", "write"] {
        played.send(json!({"op": op, "path": "/d", "id": "x", "data": "x", "more": true, "length": 1})).await;
        let asked = played.opens().await;
        if op == "pack" {
            asked.words.send(Word::Data(Bytes::from_static(b"ab"))).await.unwrap();
        }
        assert_eq!(played.answer().await.get("error"), None, "{op}");
        let other = played.ask(json!({"op": "cancel", "path": "/other", "id": "x"})).await;
        assert!(other.get("error").is_none() && !asked.words.is_closed(), "{op}");
        let cancelled = played.ask(json!({"op": "cancel", "path": "/d", "id": "x"})).await;
        assert_eq!(cancelled, json!({"op": "cancel", "id": "x"}));
        asked.words.closed().await;
    }
}

fn line(name: &str) -> Word {
    Word::Data(Bytes::from(format!("{{\"kind\":\"created\",\"path\":\"/d/{name}\"}}\n")))
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_holds_a_watch_up_and_nothing_gathers_here() {
    let mut played = Played::new();
    let watch = json!({"op": "watch", "path": "/d", "id": "w", "recursive": true});
    played.send(watch.clone()).await;
    let mut asked = played.opens().await;
    assert!(matches!(&asked.ask, FileAsk::Watch { recursive: true, .. }));
    assert_eq!(played.answer().await, json!({"op": "watch", "id": "w"}));
    let begun = asked.words.capacity();
    for number in 0..16 {
        asked.words.send(line(&number.to_string())).await.unwrap();
    }
    sleep(std::time::Duration::from_secs(600)).await;
    // One waits to be sent, one for that, and the sandbox sends the next when it hears that one was taken.
    assert!(begun - asked.words.capacity() >= 14, "{}", asked.words.capacity());
    for number in 0..16 {
        let told = played.answer().await;
        let change = json!([{"kind": "created", "path": format!("/d/{number}"), "directory": false}]);
        assert_eq!((&told["op"], &told["id"], &told["changes"]), (&json!("watch"), &json!("w"), &change));
    }
    let mut taken = 0;
    while let Ok(Push::Taken(bytes)) = asked.pushes.try_recv() {
        taken = bytes;
    }
    assert!(taken > 0, "the credit rises");
    assert_eq!(played.ask(watch).await["error"]["code"], "not_now", "the id is taken");
    asked.words.send(Word::Done(None)).await.unwrap();
    let ended = played.answer().await;
    assert_eq!(ended["changes"], json!([{"kind": "ended", "message": "The directory is gone."}]), "{ended}");
}

#[tokio::test(start_paused = true)]
async fn nothing_of_a_watch_comes_after_it_was_cancelled_and_its_id_is_free() {
    let mut played = Played::new();
    let watch = json!({"op": "watch", "path": "/d", "id": "w"});
    for _ in 0..3 {
        played.send(watch.clone()).await;
        let asked = played.opens().await;
        assert_eq!(played.answer().await, json!({"op": "watch", "id": "w"}));
        for name in ["a", "b", "c"] {
            asked.words.send(line(name)).await.unwrap();
        }
        played.send(json!({"op": "cancel", "path": "/d", "id": "w"})).await;
        asked.words.closed().await;
        while played.answer().await["op"] != "cancel" {}
        assert!(played.answers.try_recv().is_err());
    }
    let nameless = played.ask(json!({"op": "watch", "path": "/d"})).await;
    assert_eq!(nameless["error"]["code"], "invalid_field", "{nameless}");
}

#[tokio::test(start_paused = true)]
async fn what_is_done_on_a_socket_takes_a_turn_of_its_key() {
    let mut played = Played::new();
    let path: GuestPath = Raw::new("/d").try_into().unwrap();
    let ask = FileAsk::Watch { path, recursive: false };
    let mut turns: Vec<_> = std::iter::from_fn(|| played.turns.take(&ask, None)).collect();
    let watch = json!({"op": "watch", "path": "/d", "id": "w"});
    assert_eq!(played.ask(watch.clone()).await["error"]["code"], "rate_limited");
    turns.pop();
    played.send(watch.clone()).await;
    let asked = played.opens().await;
    assert_eq!(played.answer().await.get("error"), None);
    assert!(played.turns.take(&ask, None).is_none(), "it has the last one");
    drop(asked);
    assert_eq!(played.answer().await["changes"][0]["kind"], "ended");
    assert_eq!(played.ask(json!({"op": "cancel", "path": "/d", "id": "w"})).await.get("error"), None);
    assert!(played.turns.take(&ask, None).is_some(), "and has given it back");
}

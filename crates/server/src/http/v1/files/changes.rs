//! What changes in a sandbox, as server-sent events or for a WebSocket.

use std::{collections::VecDeque, convert::Infallible, time::Duration};

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use futures_util::stream;
use sandboxer_protocol::{
    agent::{ChangeKind, FileChange},
    limits::MAX_PATH_BYTES,
};
use serde_json::{Map, Value, json};
use tokio::time::timeout;

use super::{Broken, Going, error_of};

/// After so long without a change something is sent all the same: a client that has gone is noticed then.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);
const ENDED: &str = "ended";
/// The longest line that an agent sends: a path with each of its bytes escaped, and room for the rest.
const MAX_LINE_BYTES: usize = 2 * 3 * MAX_PATH_BYTES;

pub(super) struct Watch {
    /// None: it has ended.
    going: Option<Going>,
    lines: Lines,
}

/// What comes next of it.
pub(super) enum Told {
    Changes(Vec<FileChange>),
    /// Nothing, for a while.
    Quiet,
    /// Why it ended: the last.
    Ended(String),
}

/// Lines that come in pieces.
#[derive(Default)]
struct Lines {
    rest: BytesMut,
    whole: VecDeque<FileChange>,
}

impl Lines {
    /// An error: what came is none of the lines that an agent sends.
    fn push(&mut self, piece: &[u8]) -> Result<(), ()> {
        self.rest.extend_from_slice(piece);
        while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
            let line = self.rest.split_to(end + 1);
            self.whole.push_back(serde_json::from_slice(&line).map_err(|_| ())?);
        }
        if self.rest.len() > MAX_LINE_BYTES { Err(()) } else { Ok(()) }
    }
}

pub(super) fn told(going: Going) -> Body {
    Body::from_stream(stream::unfold(Watch::new(going), |mut watch| async {
        let mut events = Vec::new();
        while events.is_empty() {
            match watch.next().await? {
                Told::Changes(changes) => changes.iter().for_each(|change| put(&mut events, change)),
                Told::Quiet => events.extend_from_slice(b": still watching\n\n"),
                Told::Ended(why) => frame(&mut events, ENDED, &json!({ "message": why })),
            }
        }
        Some((Ok::<_, Infallible>(Bytes::from(events)), watch))
    }))
}

impl Watch {
    pub(super) fn new(going: Going) -> Self {
        Self { going: Some(going), lines: Lines::default() }
    }

    /// None: it has ended, and that was told.
    pub(super) async fn next(&mut self) -> Option<Told> {
        loop {
            if !self.lines.whole.is_empty() {
                return Some(Told::Changes(self.lines.whole.drain(..).collect()));
            }
            let going = self.going.as_mut()?;
            let why = match timeout(SIGN_OF_LIFE, going.next()).await {
                Err(_) => return Some(Told::Quiet),
                Ok(Ok(Some(piece))) => match self.lines.push(&piece) {
                    Ok(()) => continue,
                    Err(()) => super::nonsense().message,
                },
                Ok(Ok(None)) => "The directory is gone.".to_owned(),
                Ok(Err(Broken::Cut)) => "The sandbox was saved, went back or ended.".to_owned(),
                Ok(Err(broken)) => error_of(broken).message,
            };
            self.going = None;
            return Some(Told::Ended(why));
        }
    }
}

fn put(events: &mut Vec<u8>, change: &FileChange) {
    if let Some((name, fields)) = shown(change) {
        frame(events, name, &Value::Object(fields));
    }
}

/// As an object of a message.
pub(super) fn as_object(change: &FileChange) -> Option<Map<String, Value>> {
    let (name, mut fields) = shown(change)?;
    fields.insert("kind".to_owned(), json!(name));
    Some(fields)
}

/// The last object.
pub(super) fn ended(why: &str) -> Map<String, Value> {
    Map::from_iter([("kind".to_owned(), json!(ENDED)), ("message".to_owned(), json!(why))])
}

/// What it is called, and what else there is to tell.
fn shown(change: &FileChange) -> Option<(&'static str, Map<String, Value>)> {
    let name = match change.kind {
        ChangeKind::Watching => "watching",
        ChangeKind::Created => "created",
        ChangeKind::Changed => "changed",
        ChangeKind::Written => "written",
        ChangeKind::Attributes => "attributes",
        ChangeKind::Removed => "removed",
        ChangeKind::Dropped => "dropped",
        ChangeKind::Incomplete => "incomplete",
        // Of a newer agent.
        ChangeKind::Other => return None,
    };
    let mut fields = Map::new();
    if let Some(path) = &change.path {
        fields.insert("path".to_owned(), json!(String::from_utf8_lossy(path.as_bytes())));
        if std::str::from_utf8(path.as_bytes()).is_err() {
            fields.insert("encoded_path".to_owned(), json!(path.encoded()));
        }
        fields.insert("directory".to_owned(), json!(change.directory));
    }
    Some((name, fields))
}

/// JSON on one line: no line of it can be taken for the end of the event.
fn frame(events: &mut Vec<u8>, name: &str, data: &Value) {
    events.extend_from_slice(format!("event: {name}\ndata: {data}\n\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_together_from_pieces_and_nonsense_is_noticed() {
        let mut lines = Lines::default();
        for piece in [&b"{\"kind\":\"crea"[..], b"ted\",\"path\":\"/a%0A%FF\"}\n{\"kind\":\"of_tomorrow\"}\n{"] {
            lines.push(piece).unwrap();
        }
        let mut events = Vec::new();
        lines.whole.iter().for_each(|change| put(&mut events, change));
        let text = String::from_utf8(events).unwrap();
        assert_eq!(text, "event: created\ndata: {\"directory\":false,\"encoded_path\":\"/a%0A%FF\",\"path\":\"/a\\n\u{fffd}\"}\n\n");
        assert!(lines.push(b"nonsense}\n").is_err());
        assert!(Lines::default().push(&vec![b'x'; MAX_LINE_BYTES + 1]).is_err());
    }
}

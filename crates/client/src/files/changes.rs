//! What changes in a sandbox, as it happens.

use std::collections::VecDeque;

use bytes::Bytes;
use serde::Deserialize;
use tokio::{sync::mpsc, task::JoinHandle};
use tokio_util::task::AbortOnDropHandle;

use super::done;
use crate::{Answer, Api, Error};

/// Pieces that wait to be read; the server waits behind them, and tells of what it had to drop.
const PIECES: usize = 16;
/// More than any event has.
const MAX_EVENT_BYTES: usize = 64 * 1024;

/// What happened to a file or a directory.
///
/// ```no_run
/// # async fn example(mut changes: sandboxer_client::Changes) -> Result<(), sandboxer_client::Error> {
/// use sandboxer_client::ChangeKind;
///
/// while let Some(change) = changes.next().await? {
///     match change.kind {
///         ChangeKind::Written => println!("{} is written", change.path),
///         ChangeKind::Dropped | ChangeKind::Incomplete => println!("something was missed: look at all of it"),
///         _ => {}
///     }
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ChangeKind {
    /// It is new, or has got this name.
    Created,
    /// Its content changed.
    Changed,
    /// Whoever wrote to it is done.
    Written,
    /// Its mode, its owner or its times changed.
    Attributes,
    /// It is gone, or has another name now.
    Removed,
    /// There were more changes than were taken in time: look again.
    Dropped,
    /// There are more directories than can be watched: in this one, and in those found after it, changes are not noticed.
    Incomplete,
}

/// Something that changed.
///
/// ```no_run
/// # async fn example(mut changes: sandboxer_client::Changes) -> Result<(), sandboxer_client::Error> {
/// if let Some(change) = changes.next().await? {
///     println!("{:?} {}{}", change.kind, change.path, if change.directory { "/" } else { "" });
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Change {
    /// What happened.
    pub kind: ChangeKind,
    /// To what; with U+FFFD for what is no UTF-8. Empty with [`ChangeKind::Dropped`].
    pub path: String,
    /// The path, percent-encoded, where it is no UTF-8.
    pub encoded_path: Option<String>,
    /// Whether it is a directory.
    pub directory: bool,
}

/// Changes below a directory, from [`Files::watch`](super::Files::watch) on.
///
/// ```no_run
/// # async fn example(sandbox: sandboxer_client::Sandbox) -> Result<(), sandboxer_client::Error> {
/// let mut changes = sandbox.files().watch("/root", true).await?;
/// let run = sandbox.bash("make").await?;
/// while let Some(change) = changes.next().await? {
///     println!("{:?} {}", change.kind, change.path);
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Changes {
    pieces: mpsc::Receiver<Bytes>,
    reading: Option<AbortOnDropHandle<Result<Answer, Error>>>,
    events: Events,
}

impl Changes {
    /// Returns when nothing is missed any more.
    pub(super) async fn open(api: Api, address: String) -> Result<Self, Error> {
        let (sender, pieces) = mpsc::channel(PIECES);
        let reading: JoinHandle<_> = tokio::spawn(async move { api.download_pieces(&address, sender).await });
        let mut changes = Self { pieces, reading: Some(AbortOnDropHandle::new(reading)), events: Events::default() };
        while !changes.events.watching {
            if !changes.read().await? {
                return Err(Error::unavailable("The server ended before it watched."));
            }
        }
        Ok(changes)
    }

    /// The next change; none: the directory is gone, or the sandbox was saved, went back or ended.
    ///
    /// Cancel-safe.
    ///
    /// # Errors
    /// The connection broke: watch again, and look again.
    pub async fn next(&mut self) -> Result<Option<Change>, Error> {
        loop {
            if let Some(change) = self.events.waiting.pop_front() {
                return Ok(Some(change));
            }
            if self.events.ended || !self.read().await? {
                return Ok(None);
            }
        }
    }

    /// Whether something came.
    async fn read(&mut self) -> Result<bool, Error> {
        if let Some(piece) = self.pieces.recv().await {
            self.events.push(&piece)?;
            return Ok(true);
        }
        match self.reading.take() {
            Some(reading) => {
                let answer = reading.await.map_err(|_| Error::Closed)??;
                done(answer).map(|_| false)
            }
            None => Ok(false),
        }
    }
}

/// Server-sent events, from pieces.
#[derive(Debug, Default)]
struct Events {
    rest: Vec<u8>,
    waiting: VecDeque<Change>,
    watching: bool,
    ended: bool,
}

impl Events {
    fn push(&mut self, piece: &[u8]) -> Result<(), Error> {
        self.rest.extend_from_slice(piece);
        while let Some(end) = self.rest.windows(2).position(|two| two == b"\n\n") {
            let event: Vec<u8> = self.rest.drain(..end + 2).collect();
            self.event(&String::from_utf8_lossy(&event));
        }
        if self.rest.len() > MAX_EVENT_BYTES {
            return Err(Error::unavailable("The server sends something else than events."));
        }
        Ok(())
    }

    /// What is unknown is of a newer server, and ignored.
    fn event(&mut self, text: &str) {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Fields {
            path: String,
            encoded_path: Option<String>,
            directory: bool,
        }
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        let kind = match field("event") {
            Some("created") => ChangeKind::Created,
            Some("changed") => ChangeKind::Changed,
            Some("written") => ChangeKind::Written,
            Some("attributes") => ChangeKind::Attributes,
            Some("removed") => ChangeKind::Removed,
            Some("dropped") => ChangeKind::Dropped,
            Some("incomplete") => ChangeKind::Incomplete,
            Some("watching") => return self.watching = true,
            Some("ended") => return self.ended = true,
            _ => return,
        };
        let Fields { path, encoded_path, directory } = field("data").and_then(|data| serde_json::from_str(data).ok()).unwrap_or_default();
        self.waiting.push_back(Change { kind, path, encoded_path, directory });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_together_from_pieces() {
        let mut events = Events::default();
        let text = b": still watching\n\nevent: watching\ndata: {}\n\nevent: created\ndata: {\"path\":\"/a\\n\",\"directory\":true}\n\nevent: new\n\nevent: ended\n\n";
        for byte in text {
            events.push(std::slice::from_ref(byte)).unwrap();
        }
        assert!(events.watching && events.ended);
        let change = Change { kind: ChangeKind::Created, path: "/a\n".to_owned(), encoded_path: None, directory: true };
        assert_eq!(events.waiting, [change]);
        assert!(Events::default().push(&[b'x'; MAX_EVENT_BYTES + 1]).is_err());
    }
}

//! What every connection of a sandbox came to, for whoever answers for it. Bounded: the newest are kept, in memory and in the sandbox's directory.

use std::{
    collections::VecDeque,
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use serde::{Deserialize, Serialize};
use tracing::warn;

/// Connections that are remembered.
const KEPT: usize = 1000;
const FILE: &str = "network.jsonl";
/// The most that is read of what an earlier process left.
const MAX_FILE_BYTES: u64 = 4 * 1024 * 1024;

/// A connection that a program wanted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Connection {
    pub(crate) time: jiff::Timestamp,
    /// `connect`, `http` or `socks5`.
    pub(crate) via: String,
    /// As the program named it.
    pub(crate) host: String,
    pub(crate) port: u16,
    /// What was connected to.
    pub(crate) address: Option<String>,
    pub(crate) verdict: String,
    /// What it rests on: the rule, or why there is none.
    pub(crate) why: String,
    /// Bytes from the sandbox and to it.
    pub(crate) sent: u64,
    pub(crate) received: u64,
    /// None: it goes on.
    pub(crate) duration_ms: Option<u64>,
}

#[derive(Debug)]
pub(crate) struct Log {
    kept: Mutex<Kept>,
}

#[derive(Debug)]
struct Kept {
    connections: VecDeque<(u64, Connection)>,
    next: u64,
    path: PathBuf,
    file: Option<File>,
    lines: usize,
}

impl Log {
    /// The log of a sandbox that has no network: nothing is read, and nothing written.
    pub(crate) fn of_none(dir: &Path) -> Arc<Self> {
        Arc::new(Self { kept: Mutex::new(Kept::new(dir)) })
    }

    /// The log in this directory, with what an earlier process wrote there.
    pub(crate) fn open(dir: &Path) -> Arc<Self> {
        let mut kept = Kept::new(dir);
        let small = fs::metadata(&kept.path).is_ok_and(|about| about.len() <= MAX_FILE_BYTES);
        for line in fs::read_to_string(&kept.path).ok().filter(|_| small).unwrap_or_default().lines() {
            // A line that was cut off when the server was killed is no connection.
            if let Ok(connection) = serde_json::from_str(line) {
                kept.push(connection);
            }
        }
        Arc::new(Self { kept: Mutex::new(kept) })
    }

    /// From now on it is kept in another directory: the sandbox went back.
    pub(crate) fn move_to(&self, dir: &Path) {
        let mut kept = self.lock();
        kept.path = dir.join(FILE);
        kept.rewrite();
    }

    /// Remembers a connection; by what this returns it is told its end.
    pub(super) fn begin(&self, connection: Connection) -> u64 {
        self.lock().push(connection)
    }

    /// It is over, and is remembered from now on if it was not before. Whoever was forgotten meanwhile is written down all the same.
    pub(super) fn end(&self, number: Option<u64>, connection: Connection) {
        let mut kept = self.lock();
        kept.write(&connection);
        let Some(number) = number else {
            kept.push(connection);
            return;
        };
        if let Some((_, known)) = kept.connections.iter_mut().find(|(known, _)| *known == number) {
            *known = connection;
        }
    }

    /// The newest that are remembered, oldest first.
    pub(crate) fn all(&self) -> Vec<Connection> {
        self.lock().connections.iter().map(|(_, connection)| connection.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    /// Its first line makes the file anew.
    fn new(dir: &Path) -> Self {
        Self { connections: VecDeque::new(), next: 0, path: dir.join(FILE), file: None, lines: usize::MAX }
    }

    fn push(&mut self, connection: Connection) -> u64 {
        self.next += 1;
        if self.connections.len() >= KEPT {
            // What goes on is not forgotten for what is over.
            let over = self.connections.iter().position(|(_, connection)| connection.duration_ms.is_some());
            self.connections.remove(over.unwrap_or(0));
        }
        self.connections.push_back((self.next, connection));
        self.next
    }

    fn write(&mut self, connection: &Connection) {
        if self.lines >= 2 * KEPT {
            self.rewrite();
        }
        let Some(file) = &mut self.file else { return };
        let Ok(mut line) = serde_json::to_vec(connection) else { return };
        line.push(b'\n');
        match file.write_all(&line) {
            Ok(()) => self.lines += 1,
            Err(error) => {
                warn!(%error, "the log of the network can't be written");
                self.file = None;
            }
        }
    }

    /// Begins the file anew with what is over and remembered.
    fn rewrite(&mut self) {
        let over = || self.connections.iter().filter(|(_, connection)| connection.duration_ms.is_some());
        let written = (|| -> io::Result<File> {
            let mut text = Vec::new();
            for (_, connection) in over() {
                serde_json::to_writer(&mut text, connection)?;
                text.push(b'\n');
            }
            let new = self.path.with_extension("new");
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
            file.write_all(&text)?;
            fs::rename(new, &self.path)?;
            Ok(file)
        })();
        self.lines = over().count();
        self.file = written.map_err(|error| warn!(%error, "the log of the network can't be written")).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(port: u16, over: bool) -> Connection {
        Connection {
            time: jiff::Timestamp::UNIX_EPOCH,
            via: "connect".to_owned(),
            host: "a.test".to_owned(),
            port,
            address: None,
            verdict: "refused".to_owned(),
            why: "because".to_owned(),
            sent: 0,
            received: 0,
            duration_ms: over.then_some(1),
        }
    }

    #[test]
    fn what_goes_on_is_seen_however_many_come_after_it() {
        let dir = tempfile::tempdir().unwrap();
        let log = Log::open(dir.path());
        let number = log.begin(connection(1, false));
        (0..5000).for_each(|_| log.end(None, connection(2, true)));
        assert_eq!((log.all().len(), log.all()[0].port), (KEPT, 1));
        log.end(Some(number), connection(1, true));
        assert_eq!(log.all()[0].duration_ms, Some(1));
    }

    #[test]
    fn the_newest_are_kept_across_a_restart_and_the_file_stays_small() {
        let dir = tempfile::tempdir().unwrap();
        let log = Log::open(dir.path());
        for port in 0..5000 {
            let number = log.begin(connection(port, false));
            assert_eq!(log.all().last().unwrap().duration_ms, None);
            log.end(Some(number), connection(port, true));
        }
        let all = log.all();
        assert_eq!((all.len(), all[0].port, all.last().unwrap().port), (KEPT, 4000, 4999));
        let lines = fs::read_to_string(dir.path().join(FILE)).unwrap().lines().count();
        assert!(lines <= 2 * KEPT, "{lines}");
        assert_eq!(Log::open(dir.path()).all(), all);
        let other = tempfile::tempdir().unwrap();
        log.move_to(other.path());
        assert_eq!(Log::open(other.path()).all(), all);
    }
}

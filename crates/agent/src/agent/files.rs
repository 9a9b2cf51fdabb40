//! The user's files as an archive: sent while the user's processes stand still, or taken before there are any.

use std::{
    io,
    path::Path,
    time::{Duration, Instant},
};

use bytes::Bytes;
use sandboxer_agent::{
    pack::Packer,
    unpack::{Failure, Unpacker},
};
use sandboxer_layer::Limits;
use sandboxer_protocol::{
    agent::{FilesFault, FromAgent},
    limits::MAX_FILES_PIECE_BYTES,
};

use super::Agent;
use crate::{hold::Held, memory::MemoryWatch, setup};

/// A server that takes nothing for so long has no use for it, and the user's processes wait.
const STALLED: Duration = Duration::from_secs(20);
/// What an archive may hold beyond what fits into the layer: its own headers, and holes.
const ARCHIVE_FACTOR: u64 = 16;
const ARCHIVE_ROOM_BYTES: u64 = 64 << 30;

/// What is being done with files.
#[derive(Default)]
pub(super) enum Files {
    #[default]
    Nothing,
    Packing(Box<Packing>),
    Unpacking {
        sequence: u64,
        unpacker: Box<Unpacker>,
        offset: u64,
    },
}

impl Files {
    /// Whether nothing may be started now.
    pub(super) fn hold(&self) -> bool {
        matches!(self, Self::Packing(packing) if packing.held_us.is_none())
    }
}

pub(super) struct Packing {
    sequence: u64,
    packer: Packer,
    held: Held,
    since: Instant,
    /// How long they stood still, once they go on.
    held_us: Option<u64>,
    sent: u64,
    credit: u64,
    /// When something was last sent.
    moved: Instant,
    /// How long it took to hold them.
    hold: Duration,
    /// How long reading took, without waiting for whoever takes it.
    reading: Duration,
}

impl Agent {
    pub(super) fn pack_files(&mut self, sequence: u64, credit: u64) {
        self.files = Files::Nothing;
        let since = Instant::now();
        let init: Vec<i32> = self.supervisor.process().map(|init| init.pid).into_iter().collect();
        let begun = Held::all_but(&init).and_then(|held| Ok((held, Packer::new(Path::new(setup::UPPER))?)));
        // Children may have ended meanwhile without a word to anybody else.
        self.reap();
        match begun {
            Ok((held, packer)) => {
                let now = Instant::now();
                let (hold, reading) = (now.saturating_duration_since(since), Duration::ZERO);
                let packing = Packing { sequence, packer, held, since, held_us: None, sent: 0, credit, moved: now, hold, reading };
                self.files = Files::Packing(Box::new(packing));
            }
            Err(error) => self.files_failed(sequence, FilesFault::Failed, &error.to_string()),
        }
    }

    pub(super) fn credit_files(&mut self, number: u64, upto: u64) {
        if let Files::Packing(packing) = &mut self.files
            && packing.sequence == number
        {
            packing.credit = packing.credit.max(upto);
        }
    }

    pub(super) fn cancel_files(&mut self, number: u64) {
        if matches!(&self.files, Files::Packing(packing) if packing.sequence == number) {
            self.drop_files();
        }
    }

    /// Sends what goes now. Returns whether anything did.
    pub(super) fn send_files(&mut self, now: Instant) -> bool {
        let Files::Packing(packing) = &mut self.files else { return false };
        if !self.link.takes_files() || packing.sent >= packing.credit {
            if now.saturating_duration_since(packing.moved) > STALLED {
                let sequence = packing.sequence;
                self.drop_files();
                self.files_failed(sequence, FilesFault::Failed, "nobody took the files");
            }
            return false;
        }
        let wanted = usize::try_from(packing.credit - packing.sent).unwrap_or(usize::MAX).min(MAX_FILES_PIECE_BYTES);
        let sequence = packing.sequence;
        let begun = Instant::now();
        let filled = packing.packer.fill(wanted);
        packing.reading += begun.elapsed();
        let out = match filled {
            Ok(out) => out,
            Err(error) => {
                self.drop_files();
                self.files_failed(sequence, FilesFault::Failed, &error.to_string());
                return true;
            }
        };
        let length = out.len().min(wanted);
        self.link.send_files(sequence, packing.sent, &out[..length]);
        out.drain(..length);
        let left = !out.is_empty();
        packing.sent += length as u64;
        packing.moved = now;
        if !packing.packer.is_done() {
            return true;
        }
        // All was read: what is left to be sent nobody can change.
        packing.held.release();
        let held_us = *packing.held_us.get_or_insert_with(|| micros(packing.since.elapsed()));
        if !left {
            let (bytes, hold_us, read_us) = (packing.sent, micros(packing.hold), micros(packing.reading));
            self.drop_files();
            self.link.say(&FromAgent::FilesPacked { sequence, bytes, held_us, hold_us, read_us });
        }
        self.ask_init();
        true
    }

    /// When nobody took anything for so long.
    pub(super) fn files_deadline(&self) -> Option<Instant> {
        match &self.files {
            Files::Packing(packing) => Some(packing.moved + STALLED),
            _ => None,
        }
    }

    /// Whoever was being served is gone, or wants nothing more: the user's processes go on.
    pub(super) fn drop_files(&mut self) {
        if !matches!(self.files, Files::Nothing) {
            self.files = Files::Nothing;
            self.reap();
            self.ask_init();
        }
    }

    fn files_failed(&mut self, sequence: u64, reason: FilesFault, message: &str) {
        let message = message.chars().take(1000).collect();
        self.link.say(&FromAgent::FilesFailed { sequence, reason, message });
    }

    /// The layer is to be what comes now.
    pub(super) fn unpack_files(&mut self, sequence: u64) {
        self.drop_files();
        // Files are in memory.
        self.memory.iter_mut().for_each(MemoryWatch::unsure);
        match self.begin_unpacking() {
            Ok(unpacker) => self.files = Files::Unpacking { sequence, unpacker: Box::new(unpacker), offset: 0 },
            Err(error) => self.files_failed(sequence, FilesFault::Failed, &error.to_string()),
        }
    }

    fn begin_unpacking(&mut self) -> io::Result<Unpacker> {
        if self.last_number.is_some() {
            return Err(io::Error::other("something was run already"));
        }
        self.spares.forget();
        self.supervisor.hold();
        self.drop_transfers();
        self.transfers.root = None;
        setup::clear_layer()?;
        Unpacker::new(Path::new(setup::UPPER), Some(Path::new(setup::BASE)), self.archive_limits())
    }

    pub(super) fn archive_limits(&self) -> Limits {
        Limits {
            bytes: self.config.disk_bytes.saturating_mul(ARCHIVE_FACTOR).saturating_add(ARCHIVE_ROOM_BYTES),
            content: self.config.disk_bytes.saturating_mul(ARCHIVE_FACTOR).saturating_add(ARCHIVE_ROOM_BYTES),
            entries: self.config.disk_inodes.saturating_mul(2),
        }
    }

    pub(super) fn take_files(&mut self, number: u64, from: u64, data: &Bytes) {
        let Files::Unpacking { sequence, unpacker, offset } = &mut self.files else { return };
        if *sequence != number || *offset != from {
            return;
        }
        *offset += data.len() as u64;
        if let Err(failure) = unpacker.push(data) {
            self.unpacking_failed(number, &failure);
        }
    }

    pub(super) fn end_files(&mut self, number: u64) {
        let Files::Unpacking { sequence, .. } = self.files else { return };
        if sequence != number {
            return;
        }
        let Files::Unpacking { unpacker, .. } = std::mem::take(&mut self.files) else { return };
        match unpacker.finish() {
            Err(failure) => return self.unpacking_failed(number, &failure),
            Ok(_) => {
                if let Err(error) = setup::mount_root() {
                    return self.files_failed(number, FilesFault::Failed, &error.to_string());
                }
            }
        }
        self.supervisor.go_on(Instant::now());
        self.link.say(&FromAgent::FilesUnpacked { sequence: number });
    }

    fn unpacking_failed(&mut self, sequence: u64, failure: &Failure) {
        self.files = Files::Nothing;
        let reason = match failure {
            Failure::Refused(_) => FilesFault::Refused,
            failure if failure.is_no_room() => FilesFault::NoRoom,
            Failure::Io(..) => FilesFault::Failed,
        };
        self.files_failed(sequence, reason, &failure.to_string());
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

//! Taking an archive in: piece by piece onto this machine's disk, gone through on its way.

use std::{
    convert::Infallible,
    fs::{File, OpenOptions},
    io::{self, Read, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use bytes::{Buf as _, Bytes};
use flate2::read::MultiGzDecoder;
use sandboxer_layer::{Decoder, Entry, Fault, Limits, Sink, Summary};
use tokio::sync::{mpsc, watch};

/// Pieces that may wait; their bytes are bounded by who sends them.
const PIECES: usize = 256;
/// What is gone through at once.
const BUFFER_BYTES: usize = 256 * 1024;
/// The largest window of a zstd stream, as a power of two: it is kept in memory.
const ZSTD_WINDOW_LOG: u32 = 23;
const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// What comes of an archive.
pub(crate) enum Piece {
    Data(Bytes),
    /// It is whole. Without this it is not.
    End,
    /// There will be no more, and why.
    Failed(String),
}

/// Where pieces are put.
pub(crate) struct Pieces {
    pub(crate) sender: mpsc::Sender<Piece>,
    /// How many bytes were taken.
    pub(crate) taken: watch::Receiver<u64>,
}

/// Where they end up.
pub(crate) struct Spool {
    receiver: mpsc::Receiver<Piece>,
    taken: watch::Sender<u64>,
    piece: Bytes,
    bytes: u64,
    ended: bool,
}

/// How an archive comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Plain,
    /// Plain, or compressed by gzip or zstd.
    Any,
}

/// Why an archive was not taken in.
#[derive(Debug)]
pub(crate) enum NotTaken {
    /// It is not one that can be kept.
    Refused(String),
    /// It did not come to its end, or can't be written here.
    Failed(String),
}

pub(crate) fn spool() -> (Pieces, Spool) {
    let (sender, receiver) = mpsc::channel(PIECES);
    let (written, taken) = watch::channel(0);
    (Pieces { sender, taken }, Spool { receiver, taken: written, piece: Bytes::new(), bytes: 0, ended: false })
}

impl Spool {
    /// Writes all pieces to a new file. Blocks. What the archive says is checked: it could be unpacked by who trusts nobody.
    pub(super) fn write(mut self, path: &Path, form: Form, limits: Limits) -> Result<Summary, NotTaken> {
        let disk = |error: io::Error| NotTaken::Failed(format!("the archive can't be written here: {error}"));
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(disk)?;
        if form == Form::Plain {
            return copy(&mut self, &file, limits);
        }
        let mut start = [0; ZSTD.len()];
        let filled = fill(&mut self, &mut start).map_err(|error| NotTaken::Failed(error.to_string()))?;
        let start = &start[..filled];
        let mut whole = Read::chain(start, self);
        if start.starts_with(&GZIP) {
            return copy(&mut MultiGzDecoder::new(whole), &file, limits);
        }
        if start != ZSTD {
            return copy(&mut whole, &file, limits);
        }
        let decoder = zstd::Decoder::new(whole).and_then(|mut decoder| {
            decoder.window_log_max(ZSTD_WINDOW_LOG)?;
            Ok(decoder)
        });
        copy(&mut decoder.map_err(disk)?, &file, limits)
    }
}

fn copy(from: &mut impl Read, mut file: &File, limits: Limits) -> Result<Summary, NotTaken> {
    let refused = |fault: Fault<Infallible>| NotTaken::Refused(fault.to_string());
    let mut decoder = Decoder::new(limits);
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let read = match from.read(&mut buffer) {
            Ok(0) => return decoder.finish().map_err(refused),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(NotTaken::Failed(error.to_string())),
        };
        decoder.push(&buffer[..read], &mut Checked).map_err(refused)?;
        let written = file.write_all(&buffer[..read]);
        written.map_err(|error| NotTaken::Failed(format!("the archive can't be written here: {error}")))?;
    }
}

fn fill(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match from.read(&mut buffer[filled..])? {
            0 => break,
            read => filled += read,
        }
    }
    Ok(filled)
}

impl Read for Spool {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() && !self.ended {
            match self.receiver.blocking_recv() {
                Some(Piece::Data(data)) => self.piece = data,
                Some(Piece::End) => self.ended = true,
                Some(Piece::Failed(why)) => return Err(io::Error::other(why)),
                None => return Err(io::Error::other("it was cut off")),
            }
        }
        let read = self.piece.len().min(buffer.len());
        self.piece.copy_to_slice(&mut buffer[..read]);
        self.bytes += read as u64;
        if self.piece.is_empty() {
            self.taken.send_replace(self.bytes);
        }
        Ok(read)
    }
}

/// Nothing is done with it: that it can be read is all that counts.
struct Checked;

impl Sink for Checked {
    type Error = Infallible;

    fn entry(&mut self, _: Entry) -> Result<(), Infallible> {
        Ok(())
    }

    fn data(&mut self, _: u64, _: &[u8]) -> Result<(), Infallible> {
        Ok(())
    }

    fn end(&mut self) -> Result<(), Infallible> {
        Ok(())
    }
}

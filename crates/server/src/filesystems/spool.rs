//! Taking an archive in: piece by piece onto this machine's disk, checked on the way.
//!
//! A sender may be slow or fall silent, so no thread waits for pieces. They are gathered by a task,
//! and a thread is used only for one bounded step of unpacking, checking and writing at a time.

use std::{
    convert::Infallible,
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use sandboxer_layer::{Decoder, Entry, Fault, Limits, Sink, Summary};
use sandboxer_store::Threads;
use tokio::sync::{mpsc, watch};

use crate::shares::Share;

/// Pieces that may wait; their bytes are bounded by who sends them.
const PIECES: usize = 256;
/// Bytes that are gathered for one step.
const STEP_BYTES: usize = 256 * 1024;
/// A step that has written this much leaves its thread to others. One write of a decoder goes beyond it
/// by less than 1 MiB.
const STEP_WRITES: u64 = 8 << 20;
/// The largest window of a zstd stream, as a power of two: it is kept in memory.
const ZSTD_WINDOW_LOG: u32 = 23;
const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// A compressed archive may unpack to this many bytes, or to [`MAX_RATIO`] times its own, whichever is
/// more.
const RATIO_FREE_BYTES: u64 = 256 << 20;
const MAX_RATIO: u64 = 200;
/// Disk is reserved in portions of this size.
const DISK_STEP_BYTES: u64 = 16 << 20;

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
    /// This key, or the server, has too much under way.
    Busy,
}

/// An archive on disk, whose bytes count as under way until this is dropped.
pub(super) struct Spooled {
    pub(super) summary: Summary,
    _disk: Share,
}

pub(crate) fn spool() -> (Pieces, Spool) {
    let (sender, receiver) = mpsc::channel(PIECES);
    let (written, taken) = watch::channel(0);
    (Pieces { sender, taken }, Spool { receiver, taken: written, bytes: 0, ended: false })
}

impl Spool {
    /// Writes all pieces to a new file, in steps on `threads`. `disk` grows with what is written. The
    /// archive is checked entry by entry: programs that trust their input may unpack it.
    ///
    /// Not cancel-safe: a dropped call leaves a part of the file.
    pub(super) async fn write(
        mut self,
        path: PathBuf,
        form: Form,
        limits: Limits,
        threads: &Threads,
        disk: Share,
    ) -> Result<Spooled, NotTaken> {
        let output = step(threads, move || Output::create(&path, limits, disk)).await?;
        let mut input = Vec::new();
        while input.len() < ZSTD.len() && !self.ended {
            self.gather(&mut input).await?;
        }
        let mut decoding = Decoding::of(&input, form, output)?;
        loop {
            let mut at = 0;
            while at < input.len() {
                (decoding, input, at) = step(threads, move || decoding.push(input, at)).await?;
            }
            self.taken.send_replace(self.bytes);
            if self.ended {
                return step(threads, move || decoding.finish()).await;
            }
            input.clear();
            self.gather(&mut input).await?;
        }
    }

    /// Waits for a piece, and takes those that are there with it, until a step has enough to do.
    async fn gather(&mut self, into: &mut Vec<u8>) -> Result<(), NotTaken> {
        let cut_off = || NotTaken::Failed("it was cut off".to_owned());
        let mut next = Some(self.receiver.recv().await.ok_or_else(cut_off)?);
        while let Some(piece) = next {
            match piece {
                Piece::Data(data) => {
                    self.bytes += data.len() as u64;
                    into.extend_from_slice(&data);
                }
                Piece::End => {
                    self.ended = true;
                    return Ok(());
                }
                Piece::Failed(why) => return Err(NotTaken::Failed(why)),
            }
            next = if into.len() < STEP_BYTES { self.receiver.try_recv().ok() } else { None };
        }
        Ok(())
    }
}

/// Runs bounded work on a thread.
async fn step<T: Send + 'static>(threads: &Threads, work: impl FnOnce() -> Result<T, NotTaken> + Send + 'static) -> Result<T, NotTaken> {
    threads.run(work).await.unwrap_or_else(|interrupted| Err(NotTaken::Failed(interrupted.to_string())))
}

/// How the bytes that come become those of the archive.
enum Decoding {
    Plain(Box<Output>),
    Gzip(Box<MultiGzDecoder<Output>>),
    Zstd(Box<zstd::stream::write::Decoder<'static, Output>>),
}

impl Decoding {
    fn of(start: &[u8], form: Form, mut output: Output) -> Result<Self, NotTaken> {
        let compressed = form == Form::Any;
        if compressed && start.starts_with(&GZIP) {
            output.compressed = true;
            return Ok(Self::Gzip(Box::new(MultiGzDecoder::new(output))));
        }
        if compressed && start.starts_with(&ZSTD) {
            output.compressed = true;
            let mut decoder = zstd::stream::write::Decoder::new(output).map_err(|error| unwritten(&error))?;
            decoder.window_log_max(ZSTD_WINDOW_LOG).map_err(|error| unwritten(&error))?;
            return Ok(Self::Zstd(Box::new(decoder)));
        }
        Ok(Self::Plain(Box::new(output)))
    }

    /// Takes the input from `at` on, until it is at its end or enough was written. Returns how far it is.
    fn push(mut self, input: Vec<u8>, mut at: usize) -> Result<(Self, Vec<u8>, usize), NotTaken> {
        let enough = self.output().written.saturating_add(STEP_WRITES);
        while at < input.len() && self.output().written < enough {
            let rest = &input[at..];
            let taken = match &mut self {
                Self::Plain(output) => output.write(rest),
                Self::Gzip(decoder) => decoder.write(rest),
                Self::Zstd(decoder) => decoder.write(rest),
            };
            match taken {
                Ok(0) => return Err(NotTaken::Failed("the compressed data is damaged".to_owned())),
                Ok(taken) => {
                    at += taken;
                    self.output_mut().read += taken as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.output_mut().why(&error)),
            }
        }
        Ok((self, input, at))
    }

    fn finish(mut self) -> Result<Spooled, NotTaken> {
        let flushed = match &mut self {
            Self::Plain(_) => Ok(()),
            Self::Gzip(decoder) => decoder.try_finish(),
            Self::Zstd(decoder) => decoder.flush(),
        };
        if let Err(error) = flushed {
            return Err(self.output_mut().why(&error));
        }
        let output = match self {
            Self::Plain(output) => *output,
            Self::Gzip(decoder) => decoder.finish().map_err(|error| unwritten(&error))?,
            Self::Zstd(decoder) => decoder.into_inner(),
        };
        Ok(Spooled { summary: output.decoder.finish().map_err(refused)?, _disk: output.disk })
    }

    fn output(&self) -> &Output {
        match self {
            Self::Plain(output) => output,
            Self::Gzip(decoder) => decoder.get_ref(),
            Self::Zstd(decoder) => decoder.get_ref(),
        }
    }

    fn output_mut(&mut self) -> &mut Output {
        match self {
            Self::Plain(output) => output,
            Self::Gzip(decoder) => decoder.get_mut(),
            Self::Zstd(decoder) => decoder.get_mut(),
        }
    }
}

/// The archive, checked and written as it comes.
struct Output {
    file: File,
    decoder: Decoder,
    compressed: bool,
    /// Bytes that came, compressed or not.
    read: u64,
    written: u64,
    disk: Share,
    reserved: u64,
    /// Why the last write failed: decoders pass on no more than an I/O error.
    fault: Option<NotTaken>,
}

impl Output {
    fn create(path: &Path, limits: Limits, disk: Share) -> Result<Self, NotTaken> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(|error| unwritten(&error))?;
        Ok(Self { file, decoder: Decoder::new(limits), compressed: false, read: 0, written: 0, disk, reserved: 0, fault: None })
    }

    fn take(&mut self, data: &[u8]) -> Result<(), NotTaken> {
        self.decoder.push(data, &mut Checked).map_err(refused)?;
        self.written += data.len() as u64;
        if self.compressed && self.written > RATIO_FREE_BYTES.max(self.read.saturating_mul(MAX_RATIO)) {
            let why = format!("it unpacks to more than {MAX_RATIO} times its own size; send it uncompressed");
            return Err(NotTaken::Refused(why));
        }
        while self.reserved < self.written {
            if !self.disk.grow(DISK_STEP_BYTES) {
                return Err(NotTaken::Busy);
            }
            self.reserved += DISK_STEP_BYTES;
        }
        self.file.write_all(data).map_err(|error| unwritten(&error))
    }

    fn why(&mut self, error: &io::Error) -> NotTaken {
        self.fault.take().unwrap_or_else(|| NotTaken::Failed(error.to_string()))
    }
}

impl Write for Output {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.take(data).map_err(|why| {
            self.fault = Some(why);
            io::Error::other("the archive is not taken")
        })?;
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn unwritten(error: &io::Error) -> NotTaken {
    NotTaken::Failed(format!("the archive can't be written here: {error}"))
}

#[allow(clippy::needless_pass_by_value, reason = "it stands in map_err")]
fn refused(fault: Fault<Infallible>) -> NotTaken {
    NotTaken::Refused(fault.to_string())
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

#[cfg(test)]
mod tests;

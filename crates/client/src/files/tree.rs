//! Directories as archives that are made and taken apart as they pass.

use std::{
    fs, io,
    path::Path,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use nix::fcntl::{OFlag, open};
use sandboxer_agent::{
    pack::Packer,
    unpack::{Failure, Unpacker},
};
use sandboxer_layer::Limits;
use tokio::{
    io::{AsyncRead, ReadBuf},
    sync::mpsc,
};

use super::done;
use crate::{Api, Error};

/// What is read or written at once.
const PIECE_BYTES: usize = 256 * 1024;
/// Pieces that may wait.
const PIECES: usize = 8;
/// How much a sandbox may send: more than any disk of one holds.
const ROOM: Limits = Limits { bytes: 1 << 42, content: 1 << 44, entries: 100_000_000 };

pub(super) async fn upload(api: &Api, address: &str, from: &Path) -> Result<(), Error> {
    let shown = from.display().to_string();
    let unreadable = |error: io::Error| Error::invalid(format!("{shown} can't be read: {error}"));
    let dir = open(from, OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, nix::sys::stat::Mode::empty());
    let packer = Packer::of(dir.map_err(|error| unreadable(error.into()))?, false).from_outside();
    let (sender, receiver) = mpsc::channel(PIECES);
    // Ends with its channel.
    let packing = tokio::task::spawn_blocking(move || pack(packer, &sender));
    // The end of an archive is in it, so one that breaks off is refused.
    let sent = api.upload(address, Pieces { receiver, piece: Bytes::new() }).await;
    match packing.await {
        Ok(Err(error)) => Err(unreadable(error)),
        _ => sent.and_then(done).map(drop),
    }
}

/// What was packed, to be read.
struct Pieces {
    receiver: mpsc::Receiver<Bytes>,
    piece: Bytes,
}

impl AsyncRead for Pieces {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.piece.is_empty() {
            match ready!(self.receiver.poll_recv(context)) {
                Some(piece) => self.piece = piece,
                None => return Poll::Ready(Ok(())),
            }
        }
        let length = self.piece.len().min(buffer.remaining());
        buffer.put_slice(&self.piece.split_to(length));
        Poll::Ready(Ok(()))
    }
}

/// Returns at once when nobody takes it any longer.
fn pack(mut packer: Packer, into: &mpsc::Sender<Bytes>) -> io::Result<()> {
    while !packer.is_done() {
        let piece = std::mem::take(packer.fill(PIECE_BYTES)?);
        if piece.is_empty() {
            continue;
        }
        if into.blocking_send(piece.into()).is_err() {
            return Ok(());
        }
    }
    Ok(())
}

pub(super) async fn download(api: &Api, address: &str, into: &Path) -> Result<(), Error> {
    let shown = into.display().to_string();
    let unwritable = |why: String| Error::invalid(format!("{shown} can't be written: {why}"));
    fs::create_dir_all(into).map_err(|error| unwritable(error.to_string()))?;
    let dir = open(into, OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, nix::sys::stat::Mode::empty());
    let mut unpacker = Unpacker::into_tree(dir.map_err(|error| unwritable(error.to_string()))?, ROOM).with_own_owner();
    let (sender, mut receiver) = mpsc::channel::<Bytes>(PIECES);
    let unpacking = tokio::task::spawn_blocking(move || -> Result<(), Failure> {
        while let Some(piece) = receiver.blocking_recv() {
            unpacker.push(&piece)?;
        }
        unpacker.finish().map(drop)
    });
    let received = api.download_pieces(address, sender).await;
    let unpacked = unpacking.await;
    // What broke off is told as such, and not as an archive that has no end.
    done(received?)?;
    match unpacked {
        Ok(Ok(())) => Ok(()),
        Ok(Err(failure)) => Err(unwritable(failure.to_string())),
        Err(error) => Err(unwritable(error.to_string())),
    }
}

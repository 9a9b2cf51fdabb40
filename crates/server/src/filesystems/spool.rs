//! Taking an archive in: piece by piece onto this machine's disk, gone through on its way.

use std::{
    convert::Infallible,
    fs::OpenOptions,
    io::{BufWriter, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use bytes::Bytes;
use sandboxer_layer::{Decoder, Entry, Fault, Limits, Sink, Summary};
use tokio::sync::{mpsc, watch};

/// Pieces that may wait; their bytes are bounded by who sends them.
const PIECES: usize = 256;

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
    /// How many bytes are on the disk.
    pub(crate) taken: watch::Receiver<u64>,
}

/// Where they end up.
pub(crate) struct Spool {
    receiver: mpsc::Receiver<Piece>,
    taken: watch::Sender<u64>,
}

pub(crate) fn spool() -> (Pieces, Spool) {
    let (sender, receiver) = mpsc::channel(PIECES);
    let (written, taken) = watch::channel(0);
    (Pieces { sender, taken }, Spool { receiver, taken: written })
}

impl Spool {
    /// Writes all pieces to a new file. Blocks. What the archive says is checked: it could be unpacked by who trusts nobody.
    pub(super) fn write(mut self, path: &Path, limits: Limits) -> Result<Summary, String> {
        let disk = |error: std::io::Error| format!("the archive can't be written here: {error}");
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(disk)?;
        let mut file = BufWriter::new(file);
        let mut decoder = Decoder::new(limits);
        let mut written = 0;
        loop {
            match self.receiver.blocking_recv() {
                Some(Piece::Data(data)) => {
                    decoder.push(&data, &mut Checked).map_err(|fault| fault.to_string())?;
                    file.write_all(&data).map_err(disk)?;
                    written += data.len() as u64;
                    self.taken.send_replace(written);
                }
                Some(Piece::End) => break,
                Some(Piece::Failed(why)) => return Err(why),
                None => return Err("it was cut off".to_owned()),
            }
        }
        file.flush().map_err(disk)?;
        decoder.finish().map_err(|fault: Fault<Infallible>| fault.to_string())
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

//! Filesystem snapshots of a running sandbox: its agent sends its files as an archive, under a credit, and goes on.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use sandboxer_protocol::{
    agent::ToAgent,
    client::{ErrorCode, Status},
    limits::FILES_CREDIT_BYTES,
};
use sandboxer_store::Manifest;
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{info, warn};

use super::{
    asks::{Refused, Told, What},
    driver::Driver,
    record::Record,
};
use crate::filesystems::{self, Filesystems, Form, Order, Piece, Pieces, Refusal, spool};

/// How much must have been taken before the agent is told.
const CREDIT_STEP_BYTES: u64 = FILES_CREDIT_BYTES / 4;

/// A filesystem snapshot under way.
pub(super) struct Packing {
    sequence: u64,
    /// The agent may be asked now; none: it was.
    ready: Option<oneshot::Receiver<()>>,
    /// None: the agent has sent all that it sends.
    pieces: Option<mpsc::Sender<Piece>>,
    taken: watch::Receiver<u64>,
    received: u64,
    granted: u64,
    done: BoxFuture<'static, Result<Manifest, Refusal>>,
}

/// What the agent says of an archive that it has sent.
pub(super) struct Packed {
    pub(super) bytes: u64,
    pub(super) held_us: u64,
    pub(super) hold_us: u64,
    pub(super) read_us: u64,
}

pub(super) enum Progress {
    Ready,
    Taken(u64),
    Done(Box<Result<Manifest, Refusal>>),
}

impl Packing {
    /// What happens next. Cancel-safe.
    pub(super) async fn next(&mut self) -> Progress {
        let Self { ready, taken, done, pieces, .. } = self;
        let ready = async {
            let is_ready = match ready.as_mut() {
                Some(ready) => ready.await.is_ok(),
                None => false,
            };
            if !is_ready {
                // It has been asked, or it has ended, as the other future tells.
                std::future::pending::<()>().await;
            }
        };
        let taken = async {
            if pieces.is_none() || taken.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            *taken.borrow_and_update()
        };
        tokio::select! {
            done = done => Progress::Done(Box::new(done)),
            () = ready => Progress::Ready,
            taken = taken => Progress::Taken(taken),
        }
    }
}

impl Driver {
    /// The client asked for it.
    pub(super) fn snapshot_filesystem(&mut self, name: &str, replace: bool) {
        self.tell(Status::FilesystemSnapshotCreating);
        if let Err((code, message)) = self.begin_packing(name, replace) {
            self.fail(Status::FilesystemSnapshotError, code, &message);
        }
    }

    pub(super) fn begin_packing(&mut self, name: &str, replace: bool) -> Result<(), Refusal> {
        let Some(Keeps { filesystems, .. }) = &self.filesystems else { return Err(filesystems::not_configured()) };
        let filesystems = Arc::clone(filesystems);
        let name = filesystems::parse(name)?;
        if self.packing.is_some() {
            let message = "A filesystem snapshot is being made. Wait for SANDBOX_FILESYSTEM_SNAPSHOT_CREATED.";
            return Err((ErrorCode::NotNow, message.to_owned()));
        }
        if self.transfers.write() {
            let message = "Files of this sandbox are being written from outside. Wait until that is done.";
            return Err((ErrorCode::NotNow, message.to_owned()));
        }
        if !self.packs_files {
            return Err(filesystems::failed("this sandbox was made by an older version of this server, whose agent can't do it"));
        }
        let image = Some(self.record.image.clone());
        let order = Order { name, replace, owner: self.record.owner.clone(), sandbox_id: Some(self.id), image };
        let (pieces, spool) = spool();
        let (say_ready, ready) = oneshot::channel();
        let keeper = self.saves.kept.as_ref().map(|kept| kept.keeper.clone());
        let done = async move {
            let may_act = || keeper.as_ref().is_none_or(|keeper| keeper.lease().may_act());
            filesystems.check_free(&order).await?;
            // A driver that has gone needs nothing more.
            let _ = say_ready.send(());
            filesystems.keep(order, spool, Form::Plain, may_act).await
        };
        self.file_numbers += 1;
        let Pieces { sender, taken } = pieces;
        self.packing = Some(Packing {
            sequence: self.file_numbers,
            ready: Some(ready),
            pieces: Some(sender),
            taken,
            received: 0,
            granted: FILES_CREDIT_BYTES,
            done: Box::pin(done),
        });
        Ok(())
    }

    pub(super) fn on_packing(&mut self, progress: Progress) {
        let Some(packing) = &mut self.packing else { return };
        let sequence = packing.sequence;
        match progress {
            Progress::Ready => {
                packing.ready = None;
                self.writer.queue(&ToAgent::PackFiles { sequence, credit: FILES_CREDIT_BYTES });
            }
            Progress::Taken(taken) => {
                let upto = taken.saturating_add(FILES_CREDIT_BYTES);
                if upto >= packing.granted.saturating_add(CREDIT_STEP_BYTES) {
                    packing.granted = upto;
                    self.writer.queue(&ToAgent::FilesCredit { sequence, upto });
                }
            }
            Progress::Done(done) => {
                if packing.ready.is_none() && packing.pieces.is_some() {
                    // It went wrong here: the sandbox need not stand still any longer.
                    self.writer.queue(&ToAgent::FilesCancel { sequence });
                }
                self.packing = None;
                self.on_packed(*done);
            }
        }
    }

    fn on_packed(&mut self, made: Result<Manifest, Refusal>) {
        let asked = self.asks.take(What::SnapshotFilesystem);
        match made {
            Ok(manifest) => {
                info!(at = %manifest.at(), bytes = manifest.stored_bytes(), "filesystem snapshot made");
                self.metrics.filesystem_snapshots.inc();
                if let Some(Keeps { on_made, .. }) = &self.filesystems {
                    on_made(&manifest, &self.record);
                }
                match asked {
                    Some(reply) => drop(reply.send(Ok(Told::Filesystem(Box::new(manifest))))),
                    None => self.tell(Status::FilesystemSnapshotCreated),
                }
            }
            Err((code, message)) => {
                warn!(message, "no filesystem snapshot could be made; the sandbox goes on");
                match asked {
                    Some(reply) => drop(reply.send(Err(Refused::Because(code, message)))),
                    None => self.fail(Status::FilesystemSnapshotError, code, &message),
                }
            }
        }
    }

    /// A piece of the archive. An error is a break of the agent's protocol.
    pub(super) fn on_files(&mut self, sequence: u64, offset: u64, data: Bytes) -> Result<(), &'static str> {
        let Some(packing) = self.packing.as_mut().filter(|packing| packing.sequence == sequence) else {
            return self.on_file_data(sequence, offset, data);
        };
        let end = packing.received.saturating_add(data.len() as u64);
        if packing.ready.is_some() || packing.pieces.is_none() || offset != packing.received || end > packing.granted {
            return Err("files that were not asked for");
        }
        packing.received = end;
        match packing.pieces.as_ref().map(|pieces| pieces.try_send(Piece::Data(data))) {
            Some(Err(mpsc::error::TrySendError::Full(_))) => Err("files in crumbs"),
            // Nobody takes them any longer, which is about to be told.
            _ => Ok(()),
        }
    }

    /// The agent has sent all, or says why it could not.
    pub(super) fn on_files_end(&mut self, sequence: u64, ended: Result<Packed, String>) {
        let Some(packing) = self.packing.as_mut().filter(|packing| packing.sequence == sequence) else { return };
        let Some(pieces) = packing.pieces.take() else { return };
        let last = match ended {
            Ok(Packed { bytes, held_us, hold_us, read_us }) if bytes == packing.received => {
                info!(bytes, held_ms = held_us / 1000, hold_ms = hold_us / 1000, read_ms = read_us / 1000, "the files were read");
                Piece::End
            }
            Ok(_) => Piece::Failed("the agent miscounted".to_owned()),
            Err(why) => Piece::Failed(why.chars().take(1000).collect()),
        };
        // Full: then it is cut off, which is an error as well.
        let _ = pieces.try_send(last);
    }
}

/// How a driver makes them, if the server does.
pub(crate) struct Keeps {
    pub(crate) filesystems: Arc<Filesystems>,
    /// Called with each that was made of a sandbox.
    pub(crate) on_made: OnMade,
}

pub(crate) type OnMade = Box<dyn Fn(&Manifest, &Record) + Send + Sync>;

//! What goes over a WebSocket in pieces, one request each: a file or an archive on its way in, an archive on its way out.
//!
//! It is given up when its next piece is not sent, or not asked for, in time.

use bytes::{Bytes, BytesMut};
use sandboxer_protocol::{
    agent::FileAbout,
    client::{FileOp, FileRequest},
    limits::MAX_FILES_PIECE_BYTES,
};
use tokio::time::Instant;

use super::{Broken, Going};
use crate::sandbox::transfers::STALLED;

/// What makes requests those for pieces of the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Key {
    op: FileOp,
    id: Option<String>,
    pub(super) path: String,
}

impl Key {
    pub(super) fn of(request: &FileRequest) -> Self {
        Self { op: request.op, id: request.id.clone(), path: request.path.clone() }
    }

    /// Whatever it is that is done.
    pub(super) fn is_meant_by(&self, request: &FileRequest) -> bool {
        (&self.id, &self.path) == (&request.id, &request.path)
    }
}

/// On its way in.
pub(super) struct Upload {
    pub(super) key: Key,
    pub(super) taken: u64,
    going: Going,
    moved: Instant,
}

impl Upload {
    pub(super) async fn begin(key: Key, mut going: Going) -> Result<Self, Broken> {
        going.opened().await?;
        Ok(Self { key, taken: 0, going, moved: Instant::now() })
    }

    pub(super) fn deadline(&self) -> Instant {
        self.moved + STALLED
    }

    pub(super) async fn push(&mut self, mut data: Bytes) -> Result<(), Broken> {
        self.taken += data.len() as u64;
        while !data.is_empty() {
            self.going.push(data.split_to(data.len().min(MAX_FILES_PIECE_BYTES))).await?;
        }
        self.moved = Instant::now();
        Ok(())
    }

    pub(super) async fn finish(self) -> Result<Option<FileAbout>, Broken> {
        self.going.finish().await
    }
}

/// On its way out.
pub(super) struct Download {
    pub(super) key: Key,
    pub(super) sent: u64,
    /// None: all of it is here.
    going: Option<Going>,
    /// What came beyond what was asked for: less than the sandbox sends at once.
    rest: BytesMut,
    moved: Instant,
}

impl Download {
    pub(super) async fn begin(key: Key, mut going: Going) -> Result<Self, Broken> {
        going.opened().await?;
        Ok(Self { key, sent: 0, going: Some(going), rest: BytesMut::new(), moved: Instant::now() })
    }

    pub(super) fn deadline(&self) -> Instant {
        self.moved + STALLED
    }

    /// So many bytes, or all that are left, and whether that is the end.
    pub(super) async fn next(&mut self, length: usize) -> Result<(Bytes, bool), Broken> {
        while self.rest.len() < length
            && let Some(going) = &mut self.going
        {
            match going.next().await? {
                Some(piece) => self.rest.extend_from_slice(&piece),
                None => self.going = None,
            }
        }
        let data = self.rest.split_to(self.rest.len().min(length)).freeze();
        self.sent += data.len() as u64;
        self.moved = Instant::now();
        Ok((data, self.going.is_none() && self.rest.is_empty()))
    }
}

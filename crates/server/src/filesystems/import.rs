//! Archives from elsewhere: a layer of a container image, say.

use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use sandboxer_store::Manifest;
use tokio::time::timeout;

use super::{Filesystems, Form, Order, Piece, Pieces, Refusal, spool};

/// What may be on its way from the client to the disk.
const WINDOW_BYTES: u64 = 512 * 1024;
/// How long the rest of what is refused is read.
const DRAIN_WITHIN: Duration = Duration::from_secs(10);

impl Filesystems {
    /// Takes an archive in as it comes, plain or compressed.
    pub(crate) async fn import<E: std::fmt::Display>(
        &self,
        order: Order,
        mut body: impl Stream<Item = Result<Bytes, E>> + Unpin,
    ) -> Result<Manifest, Refusal> {
        let _turn = self.imports.take(order.owner.as_deref(), 1).ok_or_else(super::busy)?;
        self.check_free(&order).await?;
        let (Pieces { sender, mut taken }, spool) = spool();
        let feeding = async move {
            let mut sent = 0;
            while let Some(piece) = body.next().await {
                let data = match piece {
                    Ok(data) => data,
                    // Who takes them says what it means.
                    Err(error) => return drop(sender.send(Piece::Failed(format!("it was cut off: {error}"))).await),
                };
                sent += data.len() as u64;
                let gone = sender.send(Piece::Data(data)).await.is_err();
                if gone || taken.wait_for(|taken| sent.saturating_sub(*taken) <= WINDOW_BYTES).await.is_err() {
                    // Who is still sending does not listen yet, and is to hear why.
                    let drained = async { while body.next().await.is_some_and(|piece| piece.is_ok()) {} };
                    return drop(timeout(DRAIN_WITHIN, drained).await);
                }
            }
            drop(sender.send(Piece::End).await);
        };
        let ((), kept) = tokio::join!(feeding, self.keep(order, spool, Form::Any, || true));
        kept
    }
}

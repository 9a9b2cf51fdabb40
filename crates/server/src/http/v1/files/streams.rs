//! Bodies, both ways.

use std::{io, time::Duration};

use axum::body::{Body, BodyDataStream};
use bytes::{Bytes, BytesMut};
use futures_util::{FutureExt as _, StreamExt as _, stream};
use sandboxer_protocol::{agent::FileAbout, limits::MAX_FILES_PIECE_BYTES};
use tokio::time::timeout;
use tracing::debug;

use super::{ApiError, Broken, Going};

/// How long who is refused may go on sending before the connection is closed, and for how long it may pause: closed at once, it would not hear why.
const DRAIN: Duration = Duration::from_secs(15);
const PAUSE: Duration = Duration::from_secs(2);

/// What a sandbox sends. A body that ends before its length, or breaks off, is one that is not whole.
pub(super) fn sent(going: Going) -> Body {
    let pieces = stream::unfold(Some(going), |going| async {
        let mut going = going?;
        match going.next().await {
            Ok(Some(data)) => Some((Ok(data), Some(going))),
            Ok(None) => None,
            Err(broken) => {
                debug!(?broken, "a file was not sent to its end");
                Some((Err(io::Error::other("the file could not be read to its end")), None))
            }
        }
    });
    Body::from_stream(pieces)
}

/// Hands a body to a sandbox. The outer error is the client's, who has gone or sends what is no body.
pub(super) async fn taken(mut going: Going, body: &mut BodyDataStream) -> Result<Result<Option<FileAbout>, Broken>, ApiError> {
    let mut gathered = BytesMut::new();
    let mut ended = false;
    while !ended {
        // Small pieces are gathered, as far as they are there.
        loop {
            let next = if gathered.is_empty() { Some(body.next().await) } else { body.next().now_or_never() };
            match next {
                None => break,
                Some(None) => {
                    ended = true;
                    break;
                }
                // Nothing is kept of what was sent so far.
                Some(Some(Err(_))) => return Err(ApiError::bad("The body of the request could not be read to its end.")),
                Some(Some(Ok(piece))) => gathered.extend_from_slice(&piece),
            }
            if gathered.len() >= MAX_FILES_PIECE_BYTES {
                break;
            }
        }
        while !gathered.is_empty() {
            let piece: Bytes = gathered.split_to(gathered.len().min(MAX_FILES_PIECE_BYTES)).freeze();
            if let Err(broken) = going.push(piece).await {
                return Ok(Err(broken));
            }
        }
    }
    Ok(going.finish().await)
}

pub(super) async fn drain(mut body: BodyDataStream) {
    let _ = timeout(DRAIN, async { while let Ok(Some(Ok(_))) = timeout(PAUSE, body.next()).await {} }).await;
}

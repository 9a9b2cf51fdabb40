//! Bodies, both ways.

use std::{io, time::Duration};

use axum::body::{Body, BodyDataStream};
use bytes::{Bytes, BytesMut};
use futures_util::{FutureExt as _, StreamExt as _, stream};
use sandboxer_protocol::{agent::FileAbout, limits::MAX_FILES_PIECE_BYTES};
use tokio::{sync::mpsc, time::timeout};
use tokio_util::task::AbortOnDropHandle;
use tracing::debug;

use super::{ApiError, Broken, Going};
use crate::sandbox::transfers::STALLED;

/// How long who is refused may go on sending before the connection is closed, and for how long it may pause: closed at once, it would not hear why.
const DRAIN: Duration = Duration::from_secs(15);
const PAUSE: Duration = Duration::from_secs(2);

/// What a sandbox sends. A body that ends before its length, or breaks off, is one that is not whole. A client that takes nothing for long gets no more of it: what
/// it holds here is given back also if its connection stays open.
pub(super) fn sent(going: Going) -> Body {
    let (pieces, taken) = mpsc::channel(1);
    let task = AbortOnDropHandle::new(tokio::spawn(pass_on(going, pieces)));
    let pieces = stream::unfold((taken, Some(task)), |(mut taken, task)| async {
        let task = task?;
        match taken.recv().await {
            Some(Some(piece)) => Some((Ok(piece), (taken, Some(task)))),
            Some(None) => None,
            None => Some((Err(io::Error::other("the file could not be read to its end")), (taken, None))),
        }
    });
    Body::from_stream(pieces)
}

/// Passes on what comes, and that it has ended: none.
async fn pass_on(mut going: Going, pieces: mpsc::Sender<Option<Bytes>>) {
    loop {
        let piece = match going.next().await {
            Ok(piece) => piece,
            Err(broken) => {
                debug!(?broken, "a file was not sent to its end");
                return;
            }
        };
        let last = piece.is_none();
        match timeout(STALLED, pieces.send(piece)).await {
            Ok(Ok(())) if !last => {}
            Ok(_) => return,
            Err(_) => {
                debug!("a file was not sent to its end: nobody takes it");
                return;
            }
        }
    }
}

/// Hands a body to a sandbox. The outer error is the client's, who has gone or sends what is no body. A client that sends nothing is waited for until the sandbox
/// gives it up.
pub(super) async fn taken(mut going: Going, body: &mut BodyDataStream) -> Result<Result<Option<FileAbout>, Broken>, ApiError> {
    let mut gathered = BytesMut::new();
    let mut ended = false;
    while !ended {
        // Small pieces are gathered, as far as they are there.
        loop {
            let next = if gathered.is_empty() {
                tokio::select! {
                    biased;
                    broken = going.broken() => return Ok(Err(broken)),
                    next = body.next() => Some(next),
                }
            } else {
                body.next().now_or_never()
            };
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

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::sandbox::transfers::{Ends, Push, Word};

    /// The ends of who asks and of who plays the sandbox.
    fn going() -> (Going, mpsc::Sender<Word>, mpsc::Receiver<Push>) {
        let ((to_asker, words), (pushes, from_asker)) = (mpsc::channel(64), mpsc::channel(4));
        (Going::played(Ends { words, pushes }), to_asker, from_asker)
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_nothing_holds_nothing_after_a_while() {
        let (going, words, pushes) = going();
        let body = sent(going);
        for _ in 0..8 {
            words.send(Word::Data(Bytes::from_static(b"piece"))).await.unwrap();
        }
        let begun = Instant::now();
        words.closed().await;
        assert!(begun.elapsed() >= STALLED && begun.elapsed() < STALLED + Duration::from_secs(1), "{:?}", begun.elapsed());
        drop(pushes);
        // Should it go on after all, it hears that this is not all.
        let mut body = body.into_data_stream();
        assert_eq!(body.next().await.unwrap().unwrap(), "piece");
        assert!(body.next().await.unwrap().is_err());
        assert!(body.next().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_sent_is_whole_or_breaks_off() {
        for whole in [true, false] {
            let (going, words, _pushes) = going();
            words.send(Word::Data(Bytes::from_static(b"a"))).await.unwrap();
            words.send(Word::Data(Bytes::from_static(b"b"))).await.unwrap();
            if whole {
                words.send(Word::Done(None)).await.unwrap();
            }
            drop(words);
            let pieces: Vec<_> = sent(going).into_data_stream().collect().await;
            assert_eq!((pieces.len(), pieces.last().unwrap().is_ok()), if whole { (2, true) } else { (3, false) });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_is_not_taken_any_longer_ends_its_transfer() {
        let (going, words, _pushes) = going();
        let body = sent(going);
        drop(body);
        words.closed().await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_sends_nothing_is_given_up_with_its_transfer() {
        let (going, words, _pushes) = going();
        let mut body = Body::from_stream(stream::pending::<Result<Bytes, io::Error>>()).into_data_stream();
        let giving_up = async {
            tokio::time::sleep(STALLED).await;
            drop(words);
        };
        let (taken, ()) = tokio::join!(taken(going, &mut body), giving_up);
        assert!(matches!(taken, Ok(Err(Broken::Cut))));
    }
}

//! Deadlines on what a client has to send: a body that stops coming holds nothing for ever.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{body::Body, extract::Request, middleware::Next, response::Response};
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep};

/// Within this time a client that is waited for has to send the next portion of a body.
const PORTION_WITHIN: Duration = Duration::from_secs(30);
const PORTION_BYTES: usize = 64 * 1024;
/// No body takes longer than this, however steadily it comes.
const BODY_WITHIN: Duration = Duration::from_secs(3600);
/// A deadline that is noticed this much later passed while the server did not wait for the client.
const LATE: Duration = Duration::from_secs(1);

/// Puts a deadline on the body of a request.
pub(super) async fn with_deadline(request: Request, next: Next) -> Response {
    next.run(request.map(|body| Body::new(PacedBody::new(body)))).await
}

/// The deadline of a client that has to send something, portion by portion.
#[derive(Default)]
pub(super) struct Portions {
    /// Until when the next portion has to be there; none while no client is waited for.
    deadline: Option<Pin<Box<Sleep>>>,
    portion: usize,
    ends: Option<Instant>,
}

impl Portions {
    pub(super) fn took(&mut self, bytes: usize) {
        self.portion += bytes;
        if self.portion >= PORTION_BYTES {
            (self.deadline, self.portion) = (None, 0);
        }
    }

    /// Ends the deadline: the client has nothing to send.
    pub(super) fn reset(&mut self) {
        if self.ends.is_some() {
            *self = Self::default();
        }
    }

    /// Ready when the client took too long. Callers ask while nothing comes.
    pub(super) fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let now = Instant::now();
        let ends = *self.ends.get_or_insert(now + BODY_WITHIN);
        if now >= ends {
            return Poll::Ready(());
        }
        if self.deadline.as_ref().is_some_and(|deadline| now > deadline.deadline() + LATE) {
            self.deadline = None;
        }
        let deadline = self.deadline.get_or_insert_with(|| Box::pin(sleep(PORTION_WITHIN.min(ends - now))));
        deadline.as_mut().poll(context)
    }
}

struct PacedBody {
    body: Body,
    portions: Portions,
}

impl PacedBody {
    fn new(body: Body) -> Self {
        Self { body, portions: Portions::default() }
    }
}

impl HttpBody for PacedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Ready(frame) => {
                if let Some(Ok(data)) = frame.as_ref().map(|frame| frame.as_ref().map(|frame| frame.data_ref())) {
                    self.portions.took(data.map_or(0, Bytes::len));
                }
                Poll::Ready(frame)
            }
            Poll::Pending => self.portions.poll_late(context).map(|()| {
                let late = io::Error::new(io::ErrorKind::TimedOut, "the rest of the request did not come in time");
                Some(Err(axum::Error::new(late)))
            }),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt as _;
    use tokio::sync::mpsc;

    use super::*;

    fn stream_of(receiver: mpsc::Receiver<Bytes>) -> Body {
        Body::from_stream(futures_util::stream::unfold(receiver, |mut receiver| async {
            receiver.recv().await.map(|piece| (Ok::<_, io::Error>(piece), receiver))
        }))
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_stalls_or_drips_is_cut_off() {
        for pause in [3600, 8] {
            let (sender, receiver) = mpsc::channel(1);
            let dripping = tokio::spawn(async move {
                while sender.send(Bytes::from_static(b"x")).await.is_ok() {
                    tokio::time::sleep(Duration::from_secs(pause)).await;
                }
            });
            let mut body = Body::new(PacedBody::new(stream_of(receiver))).into_data_stream();
            let begun = Instant::now();
            while body.next().await.unwrap().is_ok() {}
            assert!(begun.elapsed() <= PORTION_WITHIN + LATE, "{:?}", begun.elapsed());
            drop(body);
            dripping.await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_comes_steadily_may_take_its_time() {
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move {
            for _ in 0..20 {
                sender.send(Bytes::from(vec![0; PORTION_BYTES])).await.unwrap();
                tokio::time::sleep(PORTION_WITHIN - LATE).await;
            }
        });
        let mut body = Body::new(PacedBody::new(stream_of(receiver))).into_data_stream();
        let mut bytes = 0;
        while let Some(piece) = body.next().await {
            bytes += piece.unwrap().len();
        }
        assert_eq!(bytes, 20 * PORTION_BYTES);
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_which_nobody_reads_does_not_count() {
        let (sender, receiver) = mpsc::channel(1);
        let mut body = Body::new(PacedBody::new(stream_of(receiver))).into_data_stream();
        for _ in 0..3 {
            assert!(futures_util::FutureExt::now_or_never(body.next()).is_none());
            tokio::time::sleep(PORTION_WITHIN * 3).await;
        }
        sender.send(Bytes::from_static(b"x")).await.unwrap();
        assert!(body.next().await.unwrap().is_ok());
    }
}

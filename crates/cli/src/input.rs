//! This command's standard input, read by one thread for as long as the command lives.
//!
//! A read can't be called off: were there one for each program that the input goes to, the read that the first one began would swallow what is typed
//! for the second.

use std::{
    future::poll_fn,
    io,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::mpsc;

const PIECE_BYTES: usize = 64 * 1024;

/// What was read and not yet passed on. Whoever asks gets the next piece; several share it by cloning.
#[derive(Debug, Clone)]
pub(crate) struct Input(Arc<Mutex<mpsc::Receiver<io::Result<Vec<u8>>>>>);

impl Input {
    /// Begins to read. At most two pieces are read ahead of those who ask.
    pub(crate) fn begin() -> Self {
        Self::of(io::stdin())
    }

    fn of(mut from: impl io::Read + Send + 'static) -> Self {
        let (pieces, input) = mpsc::channel(1);
        std::thread::spawn(move || {
            let mut buffer = vec![0; PIECE_BYTES];
            loop {
                let piece = match from.read(&mut buffer) {
                    Ok(0) => return,
                    Ok(count) => Ok(buffer[..count].to_vec()),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => Err(error),
                };
                let failed = piece.is_err();
                if pieces.blocking_send(piece).is_err() || failed {
                    return;
                }
            }
        });
        Self(Arc::new(Mutex::new(input)))
    }

    /// The next piece, as it was typed or written. None: it has ended.
    ///
    /// Cancel-safe: what was not returned is there for the next who asks.
    pub(crate) async fn next(&self) -> io::Result<Option<Vec<u8>>> {
        poll_fn(|context| self.0.lock().unwrap_or_else(PoisonError::into_inner).poll_recv(context)).await.transpose()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[tokio::test]
    async fn what_comes_after_one_stopped_asking_is_there_for_the_next_up_to_the_end() {
        let (from, mut to) = io::pipe().unwrap();
        let input = Input::of(from);
        let first = tokio::spawn({
            let input = input.clone();
            async move { input.next().await }
        });
        // It waits by now, or never gets to: either way it has nothing.
        tokio::task::yield_now().await;
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        to.write_all(b"typed").unwrap();
        assert_eq!(input.next().await.unwrap().as_deref(), Some(&b"typed"[..]));
        drop(to);
        assert_eq!(input.next().await.unwrap(), None);
        assert_eq!(input.next().await.unwrap(), None);
    }
}

//! What others would use instead, measured beside us for as long as it works: none of them is needed.

use anyhow::Result;

pub(crate) struct Peer<T> {
    name: &'static str,
    running: Option<T>,
    /// It has failed, and is to be ended with everything else.
    failed: Option<T>,
    error: Option<String>,
}

impl<T> Peer<T> {
    pub(crate) fn started(name: &'static str, started: Result<T>) -> Self {
        let mut peer = Self { name, running: None, failed: None, error: None };
        peer.running = peer.or_without(started);
        peer
    }

    /// None: it is not there. One that fails is left out from then on.
    pub(crate) async fn ask<R>(&mut self, work: impl AsyncFnOnce(&mut T) -> Result<R>) -> Option<R> {
        let done = work(self.running.as_mut()?).await;
        self.or_without(done)
    }

    fn or_without<R>(&mut self, result: Result<R>) -> Option<R> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                eprintln!("sandboxer-bench: without {} from here on: {error:#}", self.name);
                self.error = Some(format!("{error:#}"));
                self.failed = self.running.take();
                None
            }
        }
    }

    /// Why it is not in the table, or not in all rounds.
    pub(crate) fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// To end it.
    pub(crate) fn into_inner(self) -> Option<T> {
        self.running.or(self.failed)
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[tokio::test]
    async fn one_that_fails_is_left_out_and_still_ended() {
        let mut peer = Peer::started("it", Ok(7));
        assert_eq!(peer.ask(async |it| Ok(*it + 1)).await, Some(8));
        let failed: Option<()> = peer.ask(async |_| bail!("it fell")).await;
        assert_eq!((failed, peer.error()), (None, Some("it fell")));
        assert_eq!(peer.ask(async |it| Ok(*it)).await, None, "it is not asked again");
        assert_eq!(peer.into_inner(), Some(7));
    }
}

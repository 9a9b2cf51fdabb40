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

    pub(crate) fn get(&mut self) -> Option<&mut T> {
        self.running.as_mut()
    }

    /// One that fails is left out from then on.
    pub(crate) fn or_without<R>(&mut self, result: Result<R>) -> Option<R> {
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

    #[test]
    fn one_that_fails_is_left_out_and_still_ended() {
        let mut peer = Peer::started("it", Ok(7));
        assert_eq!(peer.or_without(Ok("value")), Some("value"));
        assert_eq!(peer.get().copied(), Some(7));
        let failed: Result<()> = (|| bail!("it fell"))();
        assert_eq!(peer.or_without(failed), None);
        assert_eq!((peer.get().copied(), peer.error()), (None, Some("it fell")));
        assert_eq!(peer.into_inner(), Some(7));
    }
}

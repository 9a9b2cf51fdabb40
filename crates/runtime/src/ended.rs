//! How the end of a sandbox is told.

use std::fmt;

use tokio::sync::watch;

/// Why a sandbox is gone. The texts say what happened, with the end of the boot log where there is one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// It went over its memory limit, gVisor's own kernel included, and was killed by the host's cgroup or, where there is none, by the runtime.
    OutOfMemory,
    /// By a signal from outside.
    Killed,
    /// The agent, and with it the sandbox, ended by itself.
    Exited,
    /// It never came up.
    StartFailed(String),
    /// The runtime under it failed.
    Failed(String),
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfMemory => f.write_str("the sandbox went over its memory limit and was killed by the host"),
            Self::Killed => f.write_str("the sandbox was killed from outside"),
            Self::Exited => f.write_str("the agent in the sandbox ended"),
            Self::StartFailed(why) => write!(f, "the sandbox could not be started: {why}"),
            Self::Failed(why) => write!(f, "the sandbox failed: {why}"),
        }
    }
}

/// Tells when and why a sandbox ended. Clones tell the same.
#[derive(Debug, Clone)]
pub struct Ended(watch::Receiver<Option<End>>);

impl Ended {
    /// An `Ended` and the way to fulfil it.
    #[must_use]
    pub fn channel() -> (EndedSender, Self) {
        let (sender, receiver) = watch::channel(None);
        (EndedSender(sender), Self(receiver))
    }

    /// Waits for the end; answers at once if it came already. Cancel-safe.
    pub async fn wait(&self) -> End {
        let mut receiver = self.0.clone();
        match receiver.wait_for(Option::is_some).await {
            Ok(end) => end.clone(),
            // Whoever watched the sandbox is gone without a word, which is a fault of ours and not an end of the sandbox.
            Err(_) => None,
        }
        .unwrap_or_else(|| End::Failed("nobody watches this sandbox any longer".to_owned()))
    }

    /// The end, if it came.
    #[must_use]
    pub fn now(&self) -> Option<End> {
        self.0.borrow().clone()
    }
}

/// Fulfils an [`Ended`]; the first telling counts.
#[derive(Debug, Clone)]
pub struct EndedSender(watch::Sender<Option<End>>);

impl EndedSender {
    pub fn tell(&self, end: End) {
        self.0.send_if_modified(|told| {
            let first = told.is_none();
            if first {
                *told = Some(end);
            }
            first
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_end_is_told_to_every_clone_and_the_first_counts() {
        let (sender, ended) = Ended::channel();
        let clone = ended.clone();
        let waiting = tokio::spawn(async move { clone.wait().await });
        sender.tell(End::Killed);
        sender.tell(End::Exited);
        assert_eq!(waiting.await.unwrap(), End::Killed);
        drop(sender);
        assert_eq!(ended.wait().await, End::Killed);
    }
}

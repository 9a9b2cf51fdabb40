//! Reaping what runsc leaves to us. This process is the one that gets orphans: a sandbox that nobody reaps holds up its deletion for
//! almost two seconds.

use std::time::Duration;

use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};

const AGAIN: Duration = Duration::from_millis(2);

/// Does `work` and reaps meanwhile whatever ends. Not for work that itself waits for a child of this process.
pub(crate) async fn reaping<T>(work: impl Future<Output = T>) -> T {
    let reap = async {
        loop {
            reap_all();
            tokio::time::sleep(AGAIN).await;
        }
    };
    tokio::select! {
        done = work => done,
        () = reap => unreachable!("it never ends"),
    }
}

fn reap_all() {
    while let Ok(status) = waitid(Id::All, WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG) {
        if status == WaitStatus::StillAlive {
            return;
        }
    }
}

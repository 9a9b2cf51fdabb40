//! What a driver waits for: each of them for ever, where there is nothing to wait for.

use bytes::Bytes;
use futures_util::future::BoxFuture;
use sandboxer_store::lease::Lease;
use tokio::sync::{mpsc, watch};

use super::Stop;
use crate::sandbox::{
    client::{FromClient, Incoming, Outgoing},
    files::{Packing, Progress},
};

/// What the server wants of all its sandboxes; of one that it stops already, that it be left.
pub(super) async fn stopped(stop: &mut watch::Receiver<Option<Stop>>, draining: bool) -> Stop {
    let news = |stop: &Option<Stop>| if draining { *stop == Some(Stop::Restart) } else { stop.is_some() };
    match stop.wait_for(news).await.map(|stop| *stop) {
        Ok(Some(stop)) => stop,
        // The server is gone; the closed commands tell of it.
        _ => std::future::pending().await,
    }
}

/// The outcome of something under way, never if there is none. Cancel-safe.
pub(super) async fn under_way<T>(work: Option<&mut BoxFuture<'static, T>>) -> T {
    match work {
        Some(work) => work.await,
        None => std::future::pending().await,
    }
}

/// How a filesystem snapshot comes along, never if there is none. Cancel-safe.
pub(super) async fn packing(packing: Option<&mut Packing>) -> Progress {
    match packing {
        Some(packing) => packing.next().await,
        None => std::future::pending().await,
    }
}

/// Until the lease is held for certain; for ever if it never is again, which its keeper hears of.
pub(super) async fn certain(lease: Option<Lease>) {
    let certain = match &lease {
        Some(lease) => lease.certain().await.is_ok(),
        None => false,
    };
    if !certain {
        std::future::pending::<()>().await;
    }
}

pub(super) async fn receive(from: Option<&mut mpsc::Receiver<Incoming>>) -> Option<FromClient> {
    match from {
        Some(from) => from.recv().await.map(|incoming| incoming.message),
        None => std::future::pending().await,
    }
}

pub(super) async fn changed(pongs: Option<&mut watch::Receiver<Bytes>>) -> Bytes {
    if let Some(pongs) = pongs
        && pongs.changed().await.is_ok()
    {
        return pongs.borrow_and_update().clone();
    }
    // No connection, or one that has ended: that is heard of elsewhere.
    std::future::pending().await
}

pub(super) async fn reserve(outgoing: Option<&mpsc::Sender<Outgoing>>) -> Option<mpsc::OwnedPermit<Outgoing>> {
    match outgoing {
        Some(outgoing) => outgoing.clone().reserve_owned().await.ok(),
        None => std::future::pending().await,
    }
}

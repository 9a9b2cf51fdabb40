//! The open connections by API key. One key never has more than its share, and clients that have shown
//! no key never keep others out.
//!
//! A connection is *unproven* until a request on it passes the check of keys. When there are as many
//! unproven connections as there may be, a new one takes the place of the oldest. Without keys all
//! clients are one tenant, and a request that needs no key where keys are configured, such as
//! `/healthz`, proves nothing.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio_util::sync::CancellationToken;

use crate::shares::{Share, Shares};

/// Connections on which no valid key was seen yet.
const MAX_UNPROVEN: usize = 1000;
/// Connections of one API key, and twice as many for all keys together.
const MAX_OF_A_KEY: u64 = 4500;
/// Connections of a server without keys.
const MAX_WITHOUT_KEYS: u64 = 9000;

#[derive(Clone)]
pub(crate) struct Connections(Arc<Table>);

struct Table {
    unproven: Mutex<Unproven>,
    proven: Shares,
}

#[derive(Default)]
struct Unproven {
    next: u64,
    /// By age, with what ends each.
    open: BTreeMap<u64, CancellationToken>,
}

/// A connection that counts until this value is dropped.
pub(crate) struct Connection {
    table: Arc<Table>,
    number: u64,
    ended: CancellationToken,
    proven: Mutex<Option<(Option<String>, Share)>>,
}

impl Connections {
    pub(crate) fn new(with_keys: bool) -> Self {
        let proven = if with_keys { Shares::new(MAX_OF_A_KEY) } else { Shares::new(MAX_WITHOUT_KEYS) };
        Self(Arc::new(Table { unproven: Mutex::default(), proven }))
    }

    /// A new connection. The oldest unproven one ends if there are too many.
    pub(crate) fn open(&self) -> Arc<Connection> {
        let mut unproven = self.0.lock();
        if unproven.open.len() >= MAX_UNPROVEN
            && let Some((_, oldest)) = unproven.open.pop_first()
        {
            oldest.cancel();
        }
        unproven.next += 1;
        let (number, ended) = (unproven.next, CancellationToken::new());
        unproven.open.insert(number, ended.clone());
        Arc::new(Connection { table: Arc::clone(&self.0), number, ended, proven: Mutex::default() })
    }
}

impl Connection {
    /// Returns when the connection has to make room for another.
    pub(crate) async fn ended(&self) {
        self.ended.cancelled().await;
    }

    /// A request on it came with this key, or passed where no key is needed. False: the key has as many
    /// connections as it may have.
    pub(crate) fn prove(&self, owner: Option<&str>) -> bool {
        let mut proven = self.proven.lock().unwrap_or_else(PoisonError::into_inner);
        if proven.as_ref().is_some_and(|(known, _)| known.as_deref() == owner) {
            return true;
        }
        let Some(share) = self.table.proven.take(owner, 1) else { return false };
        *proven = Some((owner.map(str::to_owned), share));
        self.table.lock().open.remove(&self.number);
        true
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.table.lock().open.remove(&self.number);
    }
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, Unproven> {
        self.unproven.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn the_oldest_unproven_connection_makes_room() {
        let connections = Connections::new(true);
        let proven = connections.open();
        assert!(proven.prove(Some("a")));
        let open: Vec<_> = (0..MAX_UNPROVEN).map(|_| connections.open()).collect();
        let _one_more = connections.open();
        assert!(open[0].ended().now_or_never().is_some());
        assert!(open[1].ended().now_or_never().is_none() && proven.ended().now_or_never().is_none());
        drop(open);
        assert_eq!(connections.0.lock().open.len(), 1);
    }

    #[test]
    fn a_key_has_no_more_than_its_share_of_connections() {
        let connections = Connections::new(true);
        let of_a: Vec<_> = (0..MAX_OF_A_KEY).map(|_| connections.open()).collect();
        assert!(of_a.iter().all(|connection| connection.prove(Some("a")) && connection.prove(Some("a"))));
        let more = connections.open();
        assert!(!more.prove(Some("a")) && more.prove(Some("b")));
        drop(of_a);
        assert!(connections.open().prove(Some("a")));
    }
}

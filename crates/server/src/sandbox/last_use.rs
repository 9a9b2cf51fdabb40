//! When a client last had to do with a sandbox: what is saved first when there is little time.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};

/// In milliseconds since 1970: only the order counts, and it has to outlive the process.
#[derive(Debug, Clone)]
pub(crate) struct LastUse(Arc<AtomicI64>);

impl LastUse {
    pub(crate) fn at(time: jiff::Timestamp) -> Self {
        Self(Arc::new(AtomicI64::new(time.as_millisecond())))
    }

    pub(crate) fn note(&self) {
        self.0.store(jiff::Timestamp::now().as_millisecond(), Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

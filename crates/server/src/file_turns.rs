//! Turns for what is done with files: so many at once, and for one API key never more than half of them, so that nobody keeps all others out.

use sandboxer_protocol::agent::FileAsk;

use crate::shares::{Share, Shares};

/// What is done with files at once in all sandboxes of an API key, and twice as much in all. Content that passes through may hold some MiB here; what is only
/// asked for, or watched, next to nothing.
const MAX_TRANSFERS: u64 = 128;
const MAX_FILE_ASKS: u64 = 128;
const MAX_WATCHES: u64 = 512;

/// By what is done: what takes long keeps nobody from what is done at once.
#[derive(Clone)]
pub(crate) struct FileTurns {
    transfers: Shares,
    asks: Shares,
    watches: Shares,
}

impl FileTurns {
    pub(crate) fn new() -> Self {
        Self { transfers: Shares::new(MAX_TRANSFERS), asks: Shares::new(MAX_FILE_ASKS), watches: Shares::new(MAX_WATCHES) }
    }

    /// None: there is no more, for this one or for anybody.
    pub(crate) fn take(&self, ask: &FileAsk, owner: Option<&str>) -> Option<Share> {
        let turns = match ask {
            FileAsk::Watch { .. } => &self.watches,
            FileAsk::Read { .. } | FileAsk::Write { .. } | FileAsk::Pack { .. } | FileAsk::Unpack { .. } => &self.transfers,
            _ => &self.asks,
        };
        turns.take(owner, 1)
    }
}

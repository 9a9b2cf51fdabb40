//! The conformance suite of records, on a directory and in memory.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::Arc;

use sandboxer_store::{
    failpoint::FailPoints,
    record::{Codec, DirectoryRecords, MemoryRecords, RecordStore, conformance::Subject},
};
use tempfile::TempDir;

/// Every view is a store of its own on the same directory, as another process would have it.
struct Directory {
    root: TempDir,
    codec: Codec,
}

impl Directory {
    fn new(codec: Codec) -> Self {
        Self { root: tempfile::tempdir().unwrap(), codec }
    }
}

impl Subject for Directory {
    fn view(&self) -> Arc<dyn RecordStore> {
        Arc::new(DirectoryRecords::open(self.root.path(), self.codec.clone(), FailPoints::default()).unwrap())
    }
}

struct Memory(Arc<MemoryRecords>);

impl Subject for Memory {
    fn view(&self) -> Arc<dyn RecordStore> {
        self.0.clone()
    }
}

fn key() -> Codec {
    Codec::sealed(Arc::new(|bytes| *blake3::keyed_hash(&[7; 32], bytes).as_bytes()))
}

mod directory {
    use super::*;
    sandboxer_store::record_conformance_tests!(Directory::new(Codec::default()));
}

mod sealed_directory {
    use super::*;
    sandboxer_store::record_conformance_tests!(Directory::new(key()));
}

mod memory {
    use super::*;
    sandboxer_store::record_conformance_tests!(Memory(Arc::new(MemoryRecords::default())));
}

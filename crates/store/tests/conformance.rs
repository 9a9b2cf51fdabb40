//! What a volume promises, in a directory and in memory that is spoken to like a bucket.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{path::Path, sync::Arc};

use object_store::{ObjectStore, memory::InMemory};
use sandboxer_store::{
    Volume,
    conformance::Subject,
    failpoint::FailPoints,
    record::{BucketRecords, Codec, DirectoryRecords, RecordStore},
};
use tempfile::TempDir;

mod directory {
    use super::*;

    struct Directory {
        root: TempDir,
        scratch: TempDir,
    }

    impl Subject for Directory {
        fn volume(&self) -> Volume {
            Volume::open_directory(self.root.path()).unwrap()
        }

        fn records(&self) -> Arc<dyn RecordStore> {
            Arc::new(DirectoryRecords::open(self.root.path(), Codec::default(), FailPoints::default()).unwrap())
        }

        fn scratch(&self) -> &Path {
            self.scratch.path()
        }
    }

    sandboxer_store::volume_conformance_tests!(Directory { root: tempfile::tempdir().unwrap(), scratch: tempfile::tempdir().unwrap() });
}

mod memory {
    use super::*;

    struct Memory {
        store: Arc<dyn ObjectStore>,
        scratch: TempDir,
    }

    impl Subject for Memory {
        fn volume(&self) -> Volume {
            Volume::on(Arc::clone(&self.store)).asking_again()
        }

        fn records(&self) -> Arc<dyn RecordStore> {
            Arc::new(BucketRecords::new(Arc::clone(&self.store), Arc::clone(&self.store), Codec::default(), None))
        }

        fn scratch(&self) -> &Path {
            self.scratch.path()
        }
    }

    sandboxer_store::volume_conformance_tests!(Memory { store: Arc::new(InMemory::new()), scratch: tempfile::tempdir().unwrap() });
}

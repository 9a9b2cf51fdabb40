//! Processes that race for one record in a directory, and die at any step.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use sandboxer_protocol::SandboxId;
use sandboxer_store::{
    failpoint::FailPoints,
    record::{Codec, DirectoryRecords, Nonce, Record, RecordStore, Stamp, Step, Stored},
};
use tempfile::TempDir;

struct Volume {
    root: TempDir,
    id: SandboxId,
    records: DirectoryRecords,
}

impl Volume {
    async fn with_record() -> Self {
        let root = tempfile::tempdir().unwrap();
        let records = DirectoryRecords::open(root.path(), Codec::default(), FailPoints::default()).unwrap();
        let id = SandboxId::random();
        records.create(id, &Record::first("parent".parse().unwrap(), stamp(), BTreeMap::new())).await.unwrap();
        Self { root, id, records }
    }

    fn writer(&self, journal: &Path, seed: u64, more: &[&str]) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sandboxer-sim"));
        command.arg("writer").arg("--volume").arg(self.root.path()).args(["--id", &self.id.to_string(), "--seed", &seed.to_string()]);
        command.arg("--journal").arg(journal).args(more).stderr(Stdio::null()).spawn().unwrap()
    }

    async fn read(&self) -> Stored {
        self.records.read(self.id).await.unwrap().unwrap()
    }

    /// The next version, by somebody who is alive.
    async fn swap(&self) -> Stored {
        let there = self.read().await;
        let next = there.record.by_owner(&there.record.holder().unwrap(), &[], stamp()).unwrap();
        self.records.swap(self.id, &there, &next).await.unwrap()
    }

    fn copy(&self) -> serde_json::Value {
        serde_json::from_slice(&fs::read(self.root.path().join(format!("locks/{}.lock", self.id))).unwrap()).unwrap()
    }

    fn names(&self) -> Vec<String> {
        let versions: PathBuf = self.root.path().join(format!("locks/{}.versions", self.id));
        fs::read_dir(versions).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

fn stamp() -> Stamp {
    Stamp { unix: 0, nonce: Nonce::random() }
}

#[tokio::test]
async fn a_writer_that_dies_at_any_step_blocks_nobody() {
    for step in Step::ALL {
        let volume = Volume::with_record().await;
        // So many that the writer has something to clean up.
        for _ in 0..12 {
            volume.swap().await;
        }
        let before = volume.read().await;
        let journal = volume.root.path().join("journal");
        let mut writer = volume.writer(&journal, 1, &["--wins", "1", "--dies-at", &format!("{step:?}")]);
        assert!(!writer.wait().unwrap().success(), "it was to die at {step:?}");
        let after = volume.read().await;
        let written = matches!(step, Step::Linked | Step::Settled | Step::Copied | Step::Cleaned);
        assert_eq!(after.record.sequence, before.record.sequence + u64::from(written), "{step:?}");
        let next = volume.swap().await;
        assert_eq!(next.record.sequence, after.record.sequence + 1);
        assert_eq!(volume.copy()["nonce"], next.record.nonce.to_string(), "{step:?}");
        for _ in 0..12 {
            volume.swap().await;
        }
        let names = volume.names();
        assert!(names.len() <= 9 && !names.iter().any(|name| name.contains('.')), "{step:?} left {names:?}");
    }
}

#[tokio::test]
async fn processes_that_race_and_die_never_win_the_same_version() {
    const WRITERS: u64 = 5;
    const WINS: usize = 60;
    let volume = Volume::with_record().await;
    let journal = |writer: u64| volume.root.path().join(format!("journal-{writer}"));
    let wins = |writer: u64| fs::read_to_string(journal(writer)).map_or(0, |text| text.lines().count());
    let mut running: Vec<Option<Child>> = (0..WRITERS).map(|_| None).collect();
    let (mut seed, mut died) = (0, 0);
    loop {
        for (writer, child) in (0..).zip(&mut running) {
            let left = WINS.saturating_sub(wins(writer));
            match child {
                Some(alive) => {
                    if let Some(status) = alive.try_wait().unwrap() {
                        died += u64::from(!status.success());
                        *child = None;
                    }
                }
                None if left > 0 => {
                    seed += 1;
                    *child = Some(volume.writer(&journal(writer), seed, &["--wins", &left.to_string(), "--dies", "5"]));
                }
                None => {}
            }
        }
        if (0..WRITERS).all(|writer| wins(writer) >= WINS) && running.iter().all(Option::is_none) {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    let mut versions = BTreeMap::new();
    for writer in 0..WRITERS {
        for line in fs::read_to_string(journal(writer)).unwrap().lines() {
            let [sequence, nonce, from] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line:?}") };
            let version = (nonce.to_owned(), from.to_owned());
            assert!(versions.insert(sequence.parse::<u64>().unwrap(), version).is_none(), "version {sequence} was won twice");
        }
    }
    for (sequence, (_, from)) in &versions {
        let before = versions.get(&(sequence - 1));
        assert!(before.is_none_or(|(nonce, _)| nonce == from), "version {sequence} was not made from the one before");
    }
    assert!(died >= 10, "only {died} processes died");
    let last = volume.swap().await;
    assert!(last.record.sequence as usize > WRITERS as usize * WINS);
    assert_eq!(volume.copy()["nonce"], last.record.nonce.to_string());
}

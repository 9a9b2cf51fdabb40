//! `sandboxer store gc`.

use std::{
    io::{self, Write as _},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::Result;
use indicatif::HumanBytes;
use sandboxer_store::{
    collect::{Collected, Collector, Retention, Terms},
    lease::BootClock,
    record::InstanceId,
};
use serde_json::{Value, json};

use super::Store;

/// After this, whoever waits is told why.
const EXPLAIN_AFTER: Duration = Duration::from_secs(2);

pub(super) fn collector(store: &Store, keep_checkpoints: usize) -> Collector {
    let retention = Retention { checkpoints: keep_checkpoints, ..Retention::default() };
    let terms = Terms { retention, ..Terms::default() };
    Collector::new(store.volume.clone(), store.records.clone(), Arc::new(BootClock), InstanceId::random(), terms)
}

pub(super) async fn run(store: &Store, keep_checkpoints: usize, dry_run: bool, as_json: bool) -> Result<ExitCode> {
    let collector = collector(store, keep_checkpoints);
    let done = if dry_run {
        collector.plan().await
    } else {
        let collecting = collector.collect();
        tokio::pin!(collecting);
        match tokio::time::timeout(EXPLAIN_AFTER, &mut collecting).await {
            Ok(done) => done,
            Err(_) => {
                eprintln!("waiting for those who are saving now, until they are done or were silent for twice their --longest-save");
                collecting.await
            }
        }
    };
    let done = done.map_err(|error| anyhow::anyhow!(error.whole()))?;
    let mut out = io::stdout().lock();
    if as_json {
        writeln!(out, "{}", object(&done, dry_run))?;
    } else {
        writeln!(out, "{}", sentence(&done, dry_run))?;
    }
    for file in &done.unreadable {
        eprintln!("no pack can go while this can't be read, since nobody knows what it needs: {file}");
    }
    for record in &done.bad_records {
        eprintln!("its sandbox is kept as it is, since its record can't be read: {record}");
    }
    Ok(if done.unreadable.is_empty() && done.bad_records.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

pub(super) fn object(done: &Collected, dry_run: bool) -> Value {
    json!({
        "dry_run": dry_run,
        "bytes": done.bytes(),
        "packs": done.packs,
        "pack_bytes": done.pack_bytes,
        "checkpoints": done.checkpoints,
        "sandboxes": done.sandboxes,
        "staged": done.staged,
        "dead_writers": done.dead_writers,
        "spared_packs": done.spared,
        "unreadable": done.unreadable,
        "bad_records": done.bad_records,
    })
}

fn sentence(done: &Collected, dry_run: bool) -> String {
    let verb = if dry_run { "would free" } else { "freed" };
    let mut parts = Vec::new();
    for (count, one, many) in [
        (done.packs, "pack", "packs"),
        (done.checkpoints, "checkpoint", "checkpoints"),
        (done.sandboxes, "killed sandbox", "killed sandboxes"),
        (done.staged, "unfinished file", "unfinished files"),
        (done.dead_writers, "dead writer", "dead writers"),
    ] {
        if count > 0 {
            parts.push(format!("{count} {}", if count == 1 { one } else { many }));
        }
    }
    if parts.is_empty() { "nothing to free".to_owned() } else { format!("{verb} {}: {}", HumanBytes(done.bytes()), parts.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_freed_is_one_sentence() {
        assert_eq!(sentence(&Collected::default(), false), "nothing to free");
        let done = Collected { packs: 1, pack_bytes: 2 << 20, checkpoints: 3, ..Collected::default() };
        assert_eq!(sentence(&done, true), "would free 2.00 MiB: 1 pack, 3 checkpoints");
    }
}

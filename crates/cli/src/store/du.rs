//! `sandboxer store du`.

use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    process::ExitCode,
};

use anyhow::Result;
use indicatif::HumanBytes;
use sandboxer_protocol::SandboxId;
use sandboxer_store::{Manifest, ManifestAt, collect::Share};
use serde_json::json;

use super::{Store, gc, status};

/// The volume has snapshots of the sandbox and no record: it was made without checkpoints, or its record was collected. Its server
/// alone knows whether it runs.
const NO_RECORD: &str = "no record";

pub(super) async fn run(store: &Store, keep_checkpoints: usize, as_json: bool) -> Result<ExitCode> {
    let whole = |error: sandboxer_store::Error| anyhow::anyhow!(error.whole());
    // Base images are nobody's.
    let who = |manifest: &Manifest| Some(manifest.contract().map(|contract| contract.sandbox_id));
    let usage = store.volume.usage(who).await.map_err(whole)?;
    let free = gc::collector(store, keep_checkpoints).plan().await.map_err(whole)?;
    let mut snapshots: BTreeMap<SandboxId, usize> = BTreeMap::new();
    for snapshot_id in store.volume.snapshots().await? {
        if let Ok(manifest) = store.volume.manifest(ManifestAt::Snapshot { snapshot_id }).await
            && let Some(contract) = manifest.contract()
        {
            *snapshots.entry(contract.sandbox_id).or_default() += 1;
        }
    }
    let statuses: BTreeMap<_, _> =
        store.records().await?.into_iter().map(|(id, record)| (id, record.as_ref().map_or("unreadable", status))).collect();
    let mut rows = Vec::new();
    for (id, share) in &usage.shares {
        let Some(id) = id else { continue };
        let row = Row {
            id: *id,
            status: statuses.get(id).copied().unwrap_or(NO_RECORD),
            checkpoints: store.volume.checkpoints(*id).await?.len(),
            snapshots: snapshots.get(id).copied().unwrap_or(0),
            share: *share,
        };
        rows.push(row);
    }
    rows.sort_by_key(|row| std::cmp::Reverse(row.share.own));
    let images = usage.shares.get(&None).copied().unwrap_or_default();
    // Chunks that nobody needs, in packs that somebody does.
    let held = usage.packs.saturating_sub(usage.needed()).saturating_sub(free.pack_bytes);
    let mut out = io::stdout().lock();
    if as_json {
        let items: Vec<_> = rows.iter().map(Row::object).collect();
        let object = json!({
            "items": items,
            "images_bytes": images.own + images.shared,
            "shared_bytes": usage.shared,
            "packs_bytes": usage.packs,
            "freeable_bytes": free.bytes(),
            "held_bytes": held,
            "unreadable": usage.unreadable,
        });
        writeln!(out, "{object}")?;
        return Ok(ExitCode::SUCCESS);
    }
    writeln!(out, "{:<36}  {:<10}  {:>11}  {:>9}  {:>11}  {:>11}", "SANDBOX", "STATUS", "CHECKPOINTS", "SNAPSHOTS", "OWN", "SHARED")?;
    for Row { id, status, checkpoints, snapshots, share } in &rows {
        let (own, shared) = (HumanBytes(share.own).to_string(), HumanBytes(share.shared).to_string());
        writeln!(out, "{id:<36}  {status:<10}  {checkpoints:>11}  {snapshots:>9}  {own:>11}  {shared:>11}")?;
    }
    writeln!(
        out,
        "{} in all: {} shared by several, {} of base images, {} free-able by `store gc`, {} that nobody needs in packs that somebody does",
        HumanBytes(usage.packs),
        HumanBytes(usage.shared),
        HumanBytes(images.own + images.shared),
        HumanBytes(free.bytes()),
        HumanBytes(held)
    )?;
    for file in &usage.unreadable {
        eprintln!("not counted, since it can't be read: {file}");
    }
    Ok(ExitCode::SUCCESS)
}

struct Row {
    id: SandboxId,
    status: &'static str,
    checkpoints: usize,
    snapshots: usize,
    share: Share,
}

impl Row {
    fn object(&self) -> serde_json::Value {
        json!({
            "id": self.id.to_string(),
            "status": self.status,
            "checkpoints": self.checkpoints,
            "snapshots": self.snapshots,
            "own_bytes": self.share.own,
            "shared_bytes": self.share.shared,
        })
    }
}

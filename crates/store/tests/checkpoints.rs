//! Crash safety: whatever a power cut or a kill leaves behind, the newest complete checkpoint loads and nothing on the volume is broken.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs;
use std::path::Path;
use std::sync::Arc;

use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions};
use sandboxer_protocol::SandboxId;
use sandboxer_store::failpoint::{FailPoints, Kind, Stage};
use sandboxer_store::testing::{Fate, ForgetfulStore};
use sandboxer_store::{
    CheckpointName, ChunkIndex, Contract, Depth, ImageDigest, Loader, Metadata, SandboxStatus, Saver, Source, Tenant, Volume, verify,
};

/// Several packs' worth, none of it compressible.
const BYTES: usize = 3 << 20;
const PACK_BYTES: usize = 1 << 20;

fn data(round: u64) -> Vec<u8> {
    let mut data = vec![0; BYTES];
    blake3::Hasher::new().finalize_xof().fill(&mut data);
    let mut changed = vec![0; 1 << 17];
    blake3::Hasher::new().update(&round.to_le_bytes()).finalize_xof().fill(&mut changed);
    data[2 << 20..(2 << 20) + (1 << 17)].copy_from_slice(&changed);
    data
}

fn contract(sandbox_id: SandboxId) -> Contract {
    Contract {
        sandbox_id,
        // The clock stands still.
        created_at: "2026-11-16T00:00:00Z".parse().unwrap(),
        parent: None,
        epoch: 1,
        automatic: false,
        name: None,
        runsc_version: "release-20260905.0".into(),
        platform: "systrap".into(),
        cpu_features: Vec::new(),
        image: ImageDigest::from_bytes([1; 32]),
        agent_version: "0.1.0".into(),
        spec: serde_json::Value::Null,
        state: serde_json::Value::Null,
        other: serde_json::Map::new(),
    }
}

fn metadata() -> Metadata {
    Metadata {
        status: SandboxStatus::Checkpointed,
        created_at: "2026-11-16T00:00:00Z".parse().unwrap(),
        last_checkpointed_at: None,
        idle_timeout: None,
        image: None,
        other: serde_json::Map::new(),
    }
}

fn record(sandbox_id: SandboxId) -> object_store::path::Path {
    object_store::path::Path::from(format!("locks/{sandbox_id}.lock"))
}

/// The flow of a server, with the simplest of records: a file that holds the name.
async fn checkpoint(volume: &Volume, sandbox_id: SandboxId, local: &Path, round: u64) -> sandboxer_store::Result<CheckpointName> {
    let path = local.join("pages.img");
    fs::write(&path, data(round)).unwrap();
    let named = named(volume, sandbox_id).await;
    let parent = match named {
        Some(name) => Some(volume.checkpoint(sandbox_id, name).await?),
        None => None,
    };
    let parents: Vec<_> = parent.iter().collect();
    let source = Source { name: "pages.img".parse().unwrap(), path };
    let saved =
        Saver::new(volume.clone(), ChunkIndex::default()).with_pack_bytes(PACK_BYTES).save(Tenant::open(), &[source], &parents).await?;
    let prepared = volume.prepare(&saved, contract(sandbox_id), named).await?;
    let commit = volume.store().put_opts(&record(sandbox_id), prepared.name.to_string().into(), PutOptions::from(PutMode::Overwrite)).await;
    commit.map_err(|error| sandboxer_store::Error::Invalid(error.to_string()))?;
    volume.follow(&prepared, &metadata()).await?;
    Ok(prepared.name)
}

async fn named(volume: &Volume, sandbox_id: SandboxId) -> Option<CheckpointName> {
    let bytes = volume.store().get(&record(sandbox_id)).await.ok()?.bytes().await.unwrap();
    Some(std::str::from_utf8(&bytes).unwrap().parse().unwrap())
}

/// Everything that is there is right; the content of the checkpoint that counts.
async fn whole(root: &Path, sandbox_id: SandboxId) -> Option<Vec<u8>> {
    let volume = Volume::open_directory(root).unwrap();
    let loader = Loader::new(volume.clone(), ChunkIndex::default());
    let name = named(&volume, sandbox_id).await;
    let records: Vec<_> = name.iter().map(|name| (sandbox_id, *name)).collect();
    let report = verify(&loader, &records, Depth::Everything).await.unwrap();
    assert!(report.is_clean(), "{:?}", report.faults);
    let manifest = volume.checkpoint(sandbox_id, name?).await.unwrap();
    let into = tempfile::tempdir().unwrap();
    loader.load(&manifest, into.path(), u64::MAX).await.unwrap();
    Some(fs::read(into.path().join("pages.img")).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_power_cut_behind_any_step_of_a_save_loses_nothing_acknowledged() {
    let (root, local) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let forgetful = ForgetfulStore::new(root.path(), FailPoints::default()).unwrap();
    let sandbox_id = SandboxId::random();
    let mut acknowledged = vec![0];
    for round in 1..=2 {
        checkpoint(&forgetful.volume(), sandbox_id, local.path(), round).await.unwrap();
        acknowledged.push(forgetful.steps());
    }
    assert!(forgetful.steps() > 30, "{}", forgetful.steps());
    for steps in 0..=forgetful.steps() {
        for fate in Fate::ALL {
            let after = tempfile::tempdir().unwrap();
            forgetful.replay(steps, fate, after.path()).unwrap();
            let content = whole(after.path(), sandbox_id).await;
            let least = acknowledged.iter().rposition(|end| *end <= steps).unwrap() as u64;
            let found = (1..=2).find(|round| content.as_ref() == Some(&data(*round))).unwrap_or(0);
            assert!(content.is_some() == (found > 0) && found >= least, "{steps} steps, {fate:?}: found {found}, acknowledged {least}");
        }
    }
}

/// Runs itself again with a fail point; the environment says what the child is to do.
#[test]
fn a_kill_at_any_point_of_a_save_leaves_the_newest_complete_checkpoint() {
    const ROOT: &str = "SANDBOXER_TEST_ROOT";
    const SANDBOX: &str = "SANDBOXER_TEST_SANDBOX";
    let runtime = tokio::runtime::Runtime::new().unwrap();
    if let (Ok(root), Ok(sandbox)) = (std::env::var(ROOT), std::env::var(SANDBOX)) {
        let local = tempfile::tempdir().unwrap();
        let volume = Volume::open_directory(Path::new(&root)).unwrap();
        runtime.block_on(checkpoint(&volume, sandbox.parse().unwrap(), local.path(), 2)).unwrap();
        return;
    }
    for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Record) {
        for stage in Stage::ALL {
            let (root, local) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let sandbox_id = SandboxId::random();
            let volume = Volume::open_directory(root.path()).unwrap();
            runtime.block_on(checkpoint(&volume, sandbox_id, local.path(), 1)).unwrap();
            let point = format!("{}:{}=kill", kind.as_str(), stage.as_str());
            let killed = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "a_kill_at_any_point_of_a_save_leaves_the_newest_complete_checkpoint"])
                .env(ROOT, root.path())
                .env(SANDBOX, sandbox_id.to_string())
                .env("SANDBOXER_FAILPOINTS", &point)
                .output()
                .unwrap();
            assert_eq!(std::os::unix::process::ExitStatusExt::signal(&killed.status), Some(9), "{point}: {killed:?}");
            let content = runtime.block_on(whole(root.path(), sandbox_id)).unwrap();
            // The rename of the record is what makes it count.
            let committed = match kind {
                Kind::Pack | Kind::Manifest => false,
                Kind::Publish => matches!(stage, Stage::Named | Stage::After),
                Kind::Record | Kind::Latest | Kind::Metadata => true,
            };
            assert!(content == data(if committed { 2 } else { 1 }), "{point}");
            // And the next save goes through.
            runtime.block_on(checkpoint(&volume, sandbox_id, local.path(), 3)).unwrap();
            assert!(runtime.block_on(whole(root.path(), sandbox_id)).unwrap() == data(3), "{point}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_does_not_sync_would_be_caught() {
    // The double itself: without its syncs the same history loses an acknowledged file.
    let root = tempfile::tempdir().unwrap();
    let forgetful = ForgetfulStore::new(root.path(), FailPoints::default()).unwrap();
    let volume = forgetful.volume();
    let path = object_store::path::Path::from("locks/a");
    volume.store().put(&path, "content".into()).await.unwrap();
    let mut seen = Vec::new();
    for steps in 0..=forgetful.steps() {
        let after = tempfile::tempdir().unwrap();
        forgetful.replay(steps, Fate::Lost, after.path()).unwrap();
        seen.push(fs::read_to_string(after.path().join("locks/a")).ok());
    }
    // Made, synced, written, synced, renamed: still nothing; only the directory's sync brings it.
    let (last, before) = seen.split_last().unwrap();
    assert_eq!(last.as_deref(), Some("content"));
    assert!(before.iter().all(Option::is_none), "{seen:?}");
}

#[tokio::test]
async fn memory_serves_as_a_volume_too() {
    let volume = Volume::on(Arc::new(object_store::memory::InMemory::new()));
    let local = tempfile::tempdir().unwrap();
    let sandbox_id = SandboxId::random();
    let name = checkpoint(&volume, sandbox_id, local.path(), 1).await.unwrap();
    let second = checkpoint(&volume, sandbox_id, local.path(), 2).await.unwrap();
    assert!(second > name);
    assert_eq!(volume.latest(sandbox_id).await.unwrap(), Some(second));
    assert_eq!(volume.checkpoints(sandbox_id).await.unwrap(), [name, second]);
    assert_eq!(volume.sandboxes().await.unwrap(), [sandbox_id]);
    assert_eq!(volume.metadata(sandbox_id).await.unwrap(), metadata());
    let report = verify(&Loader::new(volume, ChunkIndex::default()), &[(sandbox_id, second)], Depth::Everything).await.unwrap();
    assert!(report.is_clean() && report.checkpoints == 2, "{report:?}");
}

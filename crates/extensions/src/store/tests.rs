use std::fs;

use super::*;

fn row(id: SnapshotId) -> SnapshotRow {
    SnapshotRow {
        id,
        sandbox_id: SandboxId::random(),
        profile: "profile.saas-stub".parse().unwrap(),
        extension: "ext.saas-stub".parse().unwrap(),
        host: "local".parse().unwrap(),
        status: SnapshotState::Pending,
        created_at: jiff::Timestamp::UNIX_EPOCH,
        size_bytes: Some(7),
        meta: Map::from([("a".to_owned(), "b".to_owned())]),
        error: None,
        inputs: Inputs::new(),
        metadata: Map::new(),
        owner: None,
    }
}

#[tokio::test]
async fn a_row_comes_back_and_is_changed_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let store = WorkspaceStore::open(&dir.path().join("new")).await.unwrap();
    let mut snapshot = row(SnapshotId::random());
    store.put_snapshot(snapshot.clone()).await.unwrap();
    snapshot.status = SnapshotState::Completed;
    store.put_snapshot(snapshot.clone()).await.unwrap();
    assert_eq!(store.snapshots().await.unwrap(), [snapshot.clone()]);
    assert_eq!(store.snapshot(snapshot.id).await.unwrap(), Some(snapshot.clone()));
    store.remove_snapshot(snapshot.id).await.unwrap();
    assert_eq!(store.snapshots().await.unwrap(), []);
}

/// Each has locks of its own, as processes have.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_who_write_at_once_lose_nothing_of_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let mut tasks = Vec::new();
    for _ in 0..4 {
        let store = WorkspaceStore::open(dir.path()).await.unwrap();
        tasks.push(tokio::spawn(async move {
            let mut ids = Vec::new();
            for _ in 0..10 {
                let id = SnapshotId::random();
                store.put_snapshot(row(id)).await.unwrap();
                ids.push(id);
            }
            store.remove_snapshot(ids.remove(0)).await.unwrap();
            ids
        }));
    }
    let mut expected = Vec::new();
    for task in tasks {
        expected.extend(task.await.unwrap());
    }
    let store = WorkspaceStore::open(dir.path()).await.unwrap();
    let mut found: Vec<SnapshotId> = store.snapshots().await.unwrap().iter().map(|row| row.id).collect();
    expected.sort();
    found.sort();
    assert_eq!(found, expected);
}

#[tokio::test]
async fn a_damaged_file_is_set_aside_and_reported_and_never_overwritten() {
    let good = serde_json::json!({ "version": 1, "snapshots": [row(SnapshotId::random())] }).to_string();
    let cut = &good[..good.len() - 20];
    for damage in ["", "{", "[]", "{\"version\":1}", "{\"version\":1,\"snapshots\":[{}]}", cut, "{\"snapshots\":[]}"] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("snapshots.json"), damage).unwrap();
        let store = WorkspaceStore::open(dir.path()).await.unwrap();
        let aside = store.damaged().await;
        assert_eq!(aside.len(), 1, "{damage}");
        assert_eq!(fs::read_to_string(dir.path().join(&aside[0])).unwrap(), damage);
        store.put_snapshot(row(SnapshotId::random())).await.unwrap();
        assert_eq!(store.snapshots().await.unwrap().len(), 1);
        assert_eq!(fs::read_to_string(dir.path().join(&aside[0])).unwrap(), damage);
    }
}

#[tokio::test]
async fn a_file_of_a_newer_server_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("snapshots.json"), "{\"version\":2,\"new\":true}").unwrap();
    assert!(matches!(WorkspaceStore::open(dir.path()).await, Err(StoreError::Newer { version: 2, .. })));
    assert_eq!(fs::read_to_string(dir.path().join("snapshots.json")).unwrap(), "{\"version\":2,\"new\":true}");
}

#[tokio::test]
async fn what_an_earlier_process_left_in_the_middle_has_failed() {
    let dir = tempfile::tempdir().unwrap();
    let store = WorkspaceStore::open(dir.path()).await.unwrap();
    let (pending, mut whole) = (row(SnapshotId::random()), row(SnapshotId::random()));
    whole.status = SnapshotState::Completed;
    store.put_snapshot(pending.clone()).await.unwrap();
    store.put_snapshot(whole.clone()).await.unwrap();
    let (sandboxes, snapshots) = store.take_over().await.unwrap();
    assert!(sandboxes.is_empty() && snapshots.len() == 1 && snapshots[0].id == pending.id);
    assert_eq!(store.snapshot(pending.id).await.unwrap().unwrap().status, SnapshotState::Failed);
    assert_eq!(store.snapshot(whole.id).await.unwrap(), Some(whole));
}

#[tokio::test]
async fn the_files_are_private() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let store = WorkspaceStore::open(&dir.path().join("new")).await.unwrap();
    store.put_snapshot(row(SnapshotId::random())).await.unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&dir.path().join("new")), mode(&dir.path().join("new/snapshots.json"))), (0o700, 0o600));
}

#[tokio::test]
async fn what_a_killed_process_left_half_written_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(".snapshots-x.part"), "{").unwrap();
    fs::write(dir.path().join("other"), "").unwrap();
    WorkspaceStore::open(dir.path()).await.unwrap();
    assert!(!dir.path().join(".snapshots-x.part").exists() && dir.path().join("other").exists());
}

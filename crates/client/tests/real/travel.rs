//! Saved, copied, gone back: by the methods of the library.

use sandboxer_client::{Api, Connection, Error, ErrorCode, Options, Sandbox, SandboxStatus, Target};
use sandboxer_e2e::{Volume, shared};

use crate::url;

async fn said(sandbox: &Sandbox, code: &str) -> String {
    String::from_utf8(sandbox.bash(code).await.unwrap().output().await.unwrap().stdout).unwrap()
}

#[tokio::test]
async fn a_sandbox_is_snapshotted_rolled_back_forked_saved_listed_and_deleted_by_methods() {
    let volume = Volume::default();
    let server = volume.options().env("FILESYSTEM_SNAPSHOT_MOUNT_PATH", volume.path().to_str().unwrap()).start();
    // Both kinds of address are the same server.
    let (http, ws) = (url(&server), format!("ws://{}", server.address()));
    let sandbox = Sandbox::create(&ws, Options::default().checkpoint(true).metadata("who", "me")).await.unwrap();
    said(&sandbox, "echo old >file").await;
    let before = sandbox.snapshot(Some("before")).await.unwrap();
    assert_eq!(before.meta["name"], "before");
    said(&sandbox, "echo new >file").await;
    sandbox.rollback(&before).await.unwrap();
    // Nobody is told of what it asked for itself.
    assert_eq!(said(&sandbox, "cat file").await, "old\n");
    assert!(sandbox.generation() > 0);
    assert!(matches!(sandbox.rollback(Target::checkpoint("checkpoint_1.img")).await, Err(Error::NotFound { .. })));

    let copies = sandbox.fork(2).await.unwrap();
    for (number, copy) in copies.iter().enumerate() {
        assert_eq!(said(copy, &format!("cat file; echo {number} >file; cat file")).await, format!("old\n{number}\n"));
    }
    assert_eq!(said(&sandbox, "cat file").await, "old\n");

    let api = Api::new(&http, &Connection::default()).unwrap();
    assert_eq!(api.sandboxes().await.unwrap().len(), 3);
    let restored = api.restore(&before.id).await.unwrap();
    assert_eq!(api.files(restored.id).read("/root/file").await.unwrap(), b"old\n");
    api.delete_sandbox(restored.id).await.unwrap();
    assert!(matches!(api.sandbox(restored.id).await, Err(Error::NotFound { .. })));
    assert!(matches!(api.delete_sandbox(sandbox.id()).await, Err(Error::InUse { .. })), "a client is attached");
    assert_eq!(api.snapshots().await.unwrap(), [api.get_snapshot(&before.id).await.unwrap()]);
    api.delete_snapshot(&before.id).await.unwrap();

    sandbox.snapshot_filesystem("mine", false).await.unwrap();
    let taken = sandbox.snapshot_filesystem("mine", false).await;
    assert!(matches!(taken, Err(Error::Refused { code: ErrorCode::NameTaken, .. })), "{taken:?}");
    assert_eq!(api.filesystem_snapshots().await.unwrap()[0].name, "mine");
    let from = Sandbox::create(&http, Options::default().filesystem_snapshot("mine")).await.unwrap();
    assert_eq!(said(&from, "cat file").await, "old\n");

    let (id, token) = (sandbox.id(), sandbox.token().map(str::to_owned));
    let saved = sandbox.checkpoint(false).await.unwrap();
    let info = api.sandbox(id).await.unwrap();
    assert_eq!((info.status, info.metadata["who"].as_str()), (SandboxStatus::Saved, "me"));
    let all = api.checkpoints(id).await.unwrap();
    assert!(all.last().is_some_and(|last| last.name == saved.name && last.latest), "{all:?}");
    let sandbox = Sandbox::attach(&http, id, token.as_deref()).await.unwrap();
    assert_eq!(said(&sandbox, "cat file").await, "old\n");
    for sandbox in copies.into_iter().chain([from, sandbox]) {
        sandbox.kill_sandbox().await.unwrap();
    }
}

#[tokio::test]
async fn what_a_server_does_not_keep_is_an_error_that_says_so() {
    let sandbox = Sandbox::create(&url(shared()), Options::default()).await.unwrap();
    for refused in [sandbox.snapshot(None).await.map(drop), sandbox.fork(1).await.map(drop)] {
        assert!(matches!(refused, Err(Error::Refused { code: ErrorCode::SnapshotsNotConfigured, .. })), "{refused:?}");
    }
    let refused = sandbox.checkpoint(false).await;
    assert!(matches!(refused, Err(Error::Refused { code: ErrorCode::CheckpointNotConfigured, .. })), "{refused:?}");
}

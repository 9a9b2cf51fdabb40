//! Changes of files, as they happen.

use sandboxer_client::{Change, ChangeKind, Changes, Error, Options, Sandbox};
use sandboxer_e2e::shared;
use tokio::time::timeout;

use crate::{DEADLINE, url};

/// Reads until this has come; returns what came before it.
async fn until(changes: &mut Changes, kind: ChangeKind, path: &str) -> Vec<Change> {
    let mut before = Vec::new();
    loop {
        let change = timeout(DEADLINE, changes.next()).await.expect("nothing more comes").unwrap().expect("it ended");
        if (change.kind, change.path.as_str()) == (kind, path) {
            return before;
        }
        before.push(change);
    }
}

#[tokio::test]
async fn what_programs_and_uploads_change_is_told_in_order_until_the_directory_is_gone() {
    let sandbox = Sandbox::create(&url(shared()), Options::default()).await.unwrap();
    let files = sandbox.files();
    files.mkdir("/root/watched/old").await.unwrap();
    let mut changes = files.watch("/root/watched", true).await.unwrap();
    let run = sandbox
        .bash("cd watched; printf x >old/$'a\\nb'; mkdir -p new/deep; echo 1 >new/deep/c; mv new moved; rm moved/deep/c")
        .await
        .unwrap();
    assert!(run.output().await.unwrap().exit.success());
    until(&mut changes, ChangeKind::Created, "/root/watched/old/a\nb").await;
    until(&mut changes, ChangeKind::Written, "/root/watched/old/a\nb").await;
    until(&mut changes, ChangeKind::Created, "/root/watched/new").await;
    until(&mut changes, ChangeKind::Removed, "/root/watched/new").await;
    until(&mut changes, ChangeKind::Created, "/root/watched/moved").await;
    // An upload has its name when it is whole, and no other.
    files.write("/root/watched/uploaded", vec![7; 100_000]).await.unwrap();
    let before = until(&mut changes, ChangeKind::Created, "/root/watched/uploaded").await;
    assert!(before.iter().all(|change| !change.path.contains(".sandboxer-")), "{before:?}");
    files.remove_all("/root/watched").await.unwrap();
    until(&mut changes, ChangeKind::Removed, "/root/watched").await;
    assert_eq!(timeout(DEADLINE, changes.next()).await.unwrap().unwrap(), None);
    assert!(matches!(files.watch("/root/watched", false).await, Err(Error::File { code, .. }) if code == "file_not_found"));
    sandbox.kill_sandbox().await.unwrap();
}

#[tokio::test]
async fn more_changes_than_are_taken_are_dropped_which_is_told_and_the_sandbox_is_not_held_up() {
    let sandbox = Sandbox::create(&url(shared()), Options::default()).await.unwrap();
    let mut changes = sandbox.files().watch("/root", false).await.unwrap();
    // Nobody reads while this makes more of them than all buffers on the way can hold.
    let code =
        "import os\nfor i in range(60000):\n    os.close(os.open('long-name-' * 24 + str(i % 100), os.O_CREAT | os.O_WRONLY | os.O_TRUNC))";
    assert!(sandbox.python(code).await.unwrap().output().await.unwrap().exit.success());
    until(&mut changes, ChangeKind::Dropped, "").await;
    // There may be no room for another yet, which is told again.
    loop {
        sandbox.bash("rm -f last; echo >last").await.unwrap().wait().await.unwrap();
        let told = loop {
            let change = timeout(DEADLINE, changes.next()).await.expect("nothing more comes").unwrap().expect("it ended");
            if change.kind == ChangeKind::Dropped || (change.kind, change.path.as_str()) == (ChangeKind::Created, "/root/last") {
                break change.kind;
            }
        };
        if told == ChangeKind::Created {
            break;
        }
    }
    sandbox.kill_sandbox().await.unwrap();
    // What else happened to it may still be on its way; then there is nothing more.
    while let Some(change) = timeout(DEADLINE, changes.next()).await.expect("it ends").unwrap() {
        assert!(change.path == "/root/last" || change.kind == ChangeKind::Dropped, "{change:?}");
    }
}

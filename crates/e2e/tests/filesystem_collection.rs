//! A volume that has filesystem snapshots and nothing else is kept clean by the servers that use it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use sandboxer_e2e::{DEADLINE, Volume, Ws, eventually};
use serde_json::Value;

#[tokio::test]
async fn what_no_filesystem_snapshot_needs_goes_in_the_background_and_the_rest_stays() {
    let volume = Volume::default();
    let server = volume.filesystems().arg("--collect-every").arg("0.5").start();
    let mut ws = Ws::create(&server).await;
    let _ = ws.bash("head -c 20000000 /dev/urandom > large").await.ok();
    ws.snapshot_filesystem("large").await;
    let _ = ws.bash("rm large; echo small > f").await.ok();
    ws.snapshot_filesystem("small").await;
    let packs = volume.path().join("packs");
    let bytes = || volume.sizes().iter().filter(|(path, _)| path.starts_with(&packs)).map(|(_, bytes)| bytes).sum::<u64>();
    let before = bytes();
    assert!(before > 20_000_000, "{before}");
    let (status, _) = server.api(None, "DELETE", "/v1/filesystem-snapshots/large", &Value::Null);
    assert!((200..300).contains(&status), "{status}");
    eventually("its data is gone", DEADLINE, || before.saturating_sub(bytes()) > 19_000_000).await;
    // Another server has nothing of it on its own disk.
    let other = volume.filesystems().start();
    for server in [&server, &other] {
        assert_eq!(Ws::create_from(server, "small").await.bash("cat f").await.ok(), "small\n");
    }
}

//! A server that has no room sends nobody away for whom another has some.

use sandboxer_client::{Error, ErrorCode, Options, Sandbox};
use sandboxer_e2e::{Volume, Ws};

use super::url;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_is_made_and_restored_where_there_is_room() {
    let volume = Volume::default();
    let (full, free) = (volume.options().arg("--max-sandboxes").arg("1").start(), volume.serve());
    let saved = volume.saved_sandbox(&free, "kept").await;
    let mut there = Ws::attach(&free, &saved).await;
    there.expect_alive().await;
    let saved = there.checkpoint().await;
    let _only = Ws::create(&full).await;

    let both = format!("{},{}", url(&full), url(&free));
    let made = Sandbox::create(&both, Options::default()).await.unwrap();
    assert_eq!(made.bash("echo made").await.unwrap().output().await.unwrap().stdout, b"made\n");
    let restored = Sandbox::attach(&both, saved.parse().unwrap(), None).await.unwrap();
    assert_eq!(restored.bash("cat f").await.unwrap().output().await.unwrap().stdout, b"kept\n");
    restored.close().await;

    // Who has nowhere else to go is told at once.
    let refused = Sandbox::create(&url(&full), Options::default()).await.unwrap_err();
    assert!(matches!(&refused, Error::Refused { code: ErrorCode::NoCapacity, .. }) && refused.is_temporary(), "{refused:?}");
}

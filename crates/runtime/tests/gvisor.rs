//! The conformance suite on the real runsc, and what only that can show. Needs runsc and the base image (`make test` brings both).

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::{fs, time::Duration};

use common::Gvisor;
use sandboxer_runtime::{
    End, RuntimeError,
    conformance::{Session, Subject},
    conformance_tests,
};

conformance_tests!(Gvisor::new());

#[tokio::test]
async fn a_sandbox_that_can_not_start_says_why_and_keeps_its_boot_log() {
    let subject = Gvisor::new().await;
    // For its launch, and to show that the same directory can be used again.
    let session = Session::start(&subject).await;
    let mut launch = session.launch.clone();
    subject.runtime().remove(launch.id, &launch.dir).await.unwrap();
    let not_an_image = launch.dir.join("not-an-image");
    fs::write(&not_an_image, vec![7; 8192]).unwrap();
    launch.image = not_an_image;
    let instance = subject.runtime().start(&launch).await.unwrap();
    let end = tokio::time::timeout(Duration::from_secs(30), instance.ended.wait()).await.unwrap();
    assert!(matches!(&end, End::StartFailed(why) if why.contains("magic")), "{end}");
    assert!(fs::metadata(launch.dir.join("boot.log")).unwrap().len() > 100);
    subject.runtime().remove(launch.id, &launch.dir).await.unwrap();
    assert_eq!(subject.leftovers(launch.id, &launch.dir), Vec::<String>::new());
    launch.image = launch.dir.join("nowhere");
    assert!(matches!(subject.runtime().start(&launch).await, Err(RuntimeError::Unavailable(_))));
}

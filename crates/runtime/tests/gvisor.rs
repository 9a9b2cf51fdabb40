//! The conformance suite on the real runsc, and what only that can show. Needs runsc and the base image (`make test` brings both).

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::{fs, time::Duration};

use common::Gvisor;
use sandboxer_runtime::{
    AfterSave, Controller, End, HostLimits, HostResources, Launch, RuntimeError,
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

#[tokio::test]
async fn a_sandbox_over_the_hosts_memory_limit_is_told_so() {
    let subject = Gvisor::new().await;
    let resources = HostResources { memory_bytes: Some(256 << 20), cpus: Some(1.5), pids_ceiling: Some(4096) };
    let limits = HostLimits::probe();
    if Controller::ALL.iter().any(|controller| limits.enforces(*controller).is_err()) {
        // Where it can't be enforced, asking for it is an error that says why.
        let launch = Launch { resources, ..Session::start(&subject).await.launch };
        let error = subject.runtime().start(&launch).await.unwrap_err();
        assert!(matches!(&error, RuntimeError::Invalid(why) if why.contains("can't be enforced")), "{error}");
        return;
    }
    let mut session = Session::start_limited(&subject, resources).await;
    assert_eq!(session.run("echo it fits").await.0, "it fits\n");
    // `tail` keeps all of it, since there is no line in it.
    session.exec("head -c 2000000000 /dev/zero | tail").await;
    let end = tokio::time::timeout(Duration::from_secs(60), session.link.ended.wait()).await.unwrap();
    assert_eq!(end, End::OutOfMemory);
    let (id, dir) = (session.launch.id, session.launch.dir.clone());
    subject.runtime().remove(id, &dir).await.unwrap();
    assert_eq!(subject.leftovers(id, &dir), Vec::<String>::new());
}

/// The names of control sockets are short; state directories need not be.
#[tokio::test]
async fn a_long_state_directory_does() {
    let subject = Gvisor::below(&"a-rather-long-name-of-a-directory/".repeat(4)).await;
    let mut session = Session::start(&subject).await;
    let (id, dir) = (session.launch.id, session.launch.dir.clone());
    assert_eq!(session.run("echo there").await.0, "there\n");
    subject.runtime().checkpoint(id, &dir, &session.save_dir(), AfterSave::GoOn).await.unwrap();
    subject.runtime().remove(id, &dir).await.unwrap();
    assert_eq!(subject.leftovers(id, &dir), Vec::<String>::new());
}

//! The conformance suite on the real runsc, and what only that can show. Needs runsc and the base image (`make test` brings both).

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::{
    fs,
    os::unix::fs::{FileExt as _, PermissionsExt},
    time::Duration,
};

use common::Gvisor;
use sandboxer_protocol::agent::{ExitCause, FromAgent, ToAgent};
use sandboxer_runtime::{
    AfterSave, Controller, End, HostLimits, HostResources, Launch, PAGES, RuntimeError,
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

/// Processes of an earlier execution are neither killed with a later one nor by its number, should that begin anew.
#[tokio::test]
async fn what_an_execution_left_in_the_background_outlives_the_kills_of_others() {
    let subject = Gvisor::new().await;
    let mut session = Session::start(&subject).await;
    session.run("sleep 600 & echo $! > /root/background").await;
    for wait in 0..20 {
        let number = session.exec("sleep 600").await;
        tokio::time::sleep(Duration::from_millis(wait / 2)).await;
        session.send(ToAgent::Kill { number, cause: None }).await;
        assert_eq!(session.until_exit().await.signal, Some(9));
    }
    // A start that fails leaves an agent that holds no execution, so a server that did not listen would begin at 1 again.
    let failed = session.exec_as("true", |spec| spec.cwd = "/nowhere".to_owned()).await;
    while !matches!(session.control().await, FromAgent::StartFailed { .. }) {}
    let runtime = subject.restarted().await;
    session = session.handed_to(&*runtime, &[]).await;
    assert!(matches!(session.link.hello, FromAgent::HelloReply { execution: None, last_number: Some(last), .. } if last == failed));
    let number = session.exec_as("sleep 600", |spec| spec.number = 1).await;
    session.send(ToAgent::Kill { number, cause: Some(ExitCause::TimedOut) }).await;
    assert_eq!(session.until_exit().await.cause, Some(ExitCause::TimedOut));
    assert_eq!(session.run("kill -0 $(cat /root/background) && echo alive").await.0, "alive\n");
    session.remove(&subject).await;
}

#[tokio::test]
async fn the_largest_environment_arrives() {
    let subject = Gvisor::new().await;
    let mut session = Session::start(&subject).await;
    // Two environments of 256 KiB, of bytes that take six each on their way.
    let value = "\u{1}".repeat(8 * 1024);
    session
        .exec_as("echo $(compgen -e V | wc -l) ${#V0} ${#V63}", |spec| spec.env.extend((0..64).map(|i| (format!("V{i}"), value.clone()))))
        .await;
    session.allow(1000).await;
    assert_eq!(session.until_exit().await.code, Some(0));
    assert_eq!(String::from_utf8_lossy(&session.received.stdout), "64 8192 8192\n");
    session.remove(&subject).await;
}

/// Only what is certainly gone may be forgotten.
#[tokio::test]
async fn a_sandbox_that_can_not_be_judged_is_not_called_gone() {
    let subject = Gvisor::new().await;
    let session = Session::start(&subject).await;
    // The record is written by the task that waits for runsc, which may still be at it when the agent has answered.
    let dir = session.launch.dir.clone();
    let record = dir.join("runtime.json");
    while !fs::read_to_string(&record).unwrap().contains("running") {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let aside = dir.join("aside");
    fs::rename(&record, &aside).unwrap();
    fs::create_dir(&record).unwrap();
    let runtime = subject.restarted().await;
    let error = runtime.take_up(session.launch.id, &dir).await.unwrap_err();
    assert!(matches!(error, RuntimeError::Unavailable(_)), "{error}");
    assert!(runtime.remove(session.launch.id, &dir).await.is_err());
    fs::remove_dir(&record).unwrap();
    fs::rename(&aside, &record).unwrap();
    runtime.take_up(session.launch.id, &dir).await.unwrap();
    session.remove(&subject).await;
}

#[tokio::test]
async fn nobody_else_may_look_into_the_state_directory() {
    let subject = Gvisor::new().await;
    assert_eq!(fs::metadata(subject.state_dir()).unwrap().permissions().mode() & 0o777, 0o700);
}

/// The names of control sockets are short; state directories need not be.
#[tokio::test]
async fn a_long_state_directory_does() {
    let subject = Gvisor::below(&"a-rather-long-name-of-a-directory/".repeat(4)).await;
    let mut session = Session::start(&subject).await;
    let (id, dir) = (session.launch.id, session.launch.dir.clone());
    assert_eq!(session.run("echo there").await.0, "there\n");
    subject.runtime().checkpoint(id, &dir, &session.save_dir(), AfterSave::GoOn, None).await.unwrap();
    subject.runtime().remove(id, &dir).await.unwrap();
    assert_eq!(subject.leftovers(id, &dir), Vec::<String>::new());
}

/// What is read of a checkpoint while gVisor writes it is what it is in the end.
#[tokio::test]
async fn what_is_said_to_be_written_does_not_change_any_more() {
    let subject = Gvisor::new().await;
    let mut session = Session::start(&subject).await;
    let held = "python3 -c 'import os, time; held = os.urandom(96 << 20); print(1, flush=True); time.sleep(600)'";
    session.exec(held).await;
    session.allow(1024).await;
    session.until_stdout(2).await;
    session.settle().await;
    let (id, dir) = (session.launch.id, session.launch.dir.clone());
    // This machine may have had no time for who looks on.
    let mut told_of = Vec::new();
    for attempt in 0..10 {
        let into = session.save_dir().join(attempt.to_string());
        fs::create_dir(&into).unwrap();
        let pages = into.join(PAGES);
        let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
        let written = move |bytes: u64| tell.send(bytes).unwrap();
        // Beside whoever writes, as whoever stores it does.
        let path = pages.clone();
        let reading = std::thread::spawn(move || {
            let (mut read, mut times) = (Vec::new(), 0);
            while let Some(bytes) = told.blocking_recv() {
                let mut more = vec![0; usize::try_from(bytes).unwrap() - read.len()];
                fs::File::open(&path).unwrap().read_exact_at(&mut more, read.len() as u64).unwrap();
                read.append(&mut more);
                times += 1;
            }
            (read, times)
        });
        subject.runtime().checkpoint(id, &dir, &into, AfterSave::Freeze, Some(&written)).await.unwrap();
        drop(written);
        let (read, times) = reading.join().unwrap();
        let whole = fs::read(&pages).unwrap();
        assert!(whole.starts_with(&read), "something has changed");
        subject.runtime().resume(id, &dir).await.unwrap();
        told_of.push((times, read.len(), whole.len()));
        if times >= 2 && read.len() > whole.len() / 2 {
            println!("told: {told_of:?}");
            session.remove(&subject).await;
            return;
        }
    }
    panic!("hardly anything was told of: {told_of:?}");
}

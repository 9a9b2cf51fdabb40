//! The conformance suite on the fake, and what only the fake can show.

#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::path::Path;

use sandboxer_protocol::SandboxId;
use sandboxer_runtime::{
    AfterSave, BoxFuture, End, FakeRuntime, Fault, Runtime, RuntimeError,
    conformance::{Session, Subject},
    conformance_tests,
};

struct Fake(FakeRuntime);

impl Subject for Fake {
    fn runtime(&self) -> &dyn Runtime {
        &self.0
    }

    fn image(&self) -> &Path {
        Path::new("/there/is/none")
    }

    fn restarted(&self) -> BoxFuture<'_, Box<dyn Runtime>> {
        Box::pin(async { Box::new(self.0.clone()) as Box<dyn Runtime> })
    }

    fn kill_from_outside<'a>(&'a self, id: SandboxId, _dir: &'a Path) -> BoxFuture<'a, ()> {
        Box::pin(self.0.end_from_outside(id, End::Killed))
    }

    fn leftovers(&self, id: SandboxId, _dir: &Path) -> Vec<String> {
        self.0.ids().into_iter().filter(|known| *known == id).map(|id| id.to_string()).collect()
    }
}

async fn subject() -> Fake {
    Fake(FakeRuntime::new())
}

conformance_tests!(subject());

#[tokio::test]
async fn a_save_during_an_execution_can_be_refused() {
    let fake = Fake(FakeRuntime::refusing_to_save_executions());
    let mut session = Session::start(&fake).await;
    session.exec("sleep 600").await;
    session.settle().await;
    let (id, dir) = (session.launch.id, session.launch.dir.clone());
    let error = fake.0.checkpoint(id, &dir, &session.save_dir(), AfterSave::GoOn, None).await.unwrap_err();
    assert!(matches!(error, RuntimeError::Busy), "{error}");
}

#[tokio::test]
async fn a_restore_needs_its_file() {
    let fake = subject().await;
    let session = Session::start(&fake).await;
    let error = fake.0.restore(&session.launch, &session.save_dir()).await.unwrap_err();
    assert!(matches!(error, RuntimeError::Invalid(_)), "the id is taken: {error}");
    fake.0.remove(session.launch.id, &session.launch.dir).await.unwrap();
    let error = fake.0.restore(&session.launch, &session.save_dir()).await.unwrap_err();
    assert!(matches!(error, RuntimeError::Failed { .. }), "{error}");
}

#[tokio::test]
async fn faults_come_when_asked_for() {
    let fake = subject().await;
    let session = Session::start(&fake).await;
    let (id, dir) = (session.launch.id, session.launch.dir.clone());
    fake.0.fail_next(Fault::Checkpoint, "the disk is full");
    assert!(fake.0.checkpoint(id, &dir, &session.save_dir(), AfterSave::Freeze, None).await.is_err());
    fake.0.checkpoint(id, &dir, &session.save_dir(), AfterSave::Freeze, None).await.unwrap();
    fake.0.remove(id, &dir).await.unwrap();
    fake.0.fail_next(Fault::Start, "no memory");
    let instance = fake.0.start(&session.launch).await.unwrap();
    assert_eq!(instance.ended.wait().await, End::StartFailed("no memory".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn time_is_tokios() {
    let fake = subject().await;
    let mut session = Session::start(&fake).await;
    let begun = std::time::Instant::now();
    let (stdout, _, exit) = session.run("sleep 50; echo late").await;
    assert_eq!(stdout, "late\n");
    assert!(exit.duration_us >= 50_000_000 && begun.elapsed().as_secs() < 5);
}

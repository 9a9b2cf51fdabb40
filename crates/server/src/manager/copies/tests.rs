use std::{fs, path::Path};

use sandboxer_runtime::{FakeRuntime, Fault, HostLimits, HostResources, Runtime as _};

use super::*;
use crate::{Facts, Images, Settings, sandbox::driver::Stop, templates::TemplateSettings};

const PATIENCE: Duration = Duration::from_secs(10);

/// A copy that runs, and the template that it was restored from.
struct Copy {
    runtime: FakeRuntime,
    manager: Arc<Manager>,
    templates: Templates,
    key: Key,
    launch: Launch,
    ended: Ended,
}

impl Copy {
    async fn start(dir: &Path) -> Self {
        let runtime = FakeRuntime::new();
        let settings = Settings::new("127.0.0.1:0".parse().unwrap(), dir.join("data"));
        let images = Images::fixed(dir.join("image"));
        let manager = Manager::open(settings, Arc::new(runtime.clone()), images, HostLimits::none("a test")).unwrap();
        let facts = TemplateSettings { max_bytes: 1 << 20, facts: Facts::default() };
        let templates = Templates::open(dir.join("templates"), facts).unwrap();
        let marker = Marker::new([9; 32]);
        let config = serde_json::json!({"marker": marker.to_hex(), "disk_bytes": 1, "disk_inodes": 2, "output_window_bytes": 5, "stdin_window_bytes": 6});
        let config = serde_json::from_value(config).unwrap();
        let (id, place) = (SandboxId::random(), dir.join("sandbox"));
        let launch = Launch { id, dir: place, image: dir.join("image"), config, resources: HostResources::default() };
        let key = templates.key(&[1; 32], &launch).unwrap();
        let work = templates.begin(&key).unwrap();
        fs::write(work.dir().join("checkpoint.img"), b"state").unwrap();
        assert!(work.finish(marker, true).unwrap());
        let ended = runtime.start(&launch).await.unwrap().ended;
        Self { runtime, manager, templates, key, launch, ended }
    }

    fn doubt(&self) {
        let held = self.templates.find(&self.key).unwrap();
        self.manager.doubt(self.templates.clone(), held, &self.launch, self.ended.clone());
    }

    /// Whether the next one is restored from it too.
    async fn is_kept(&self) -> bool {
        self.manager.drivers.close();
        timeout(PATIENCE, self.manager.drivers.wait()).await.unwrap();
        self.templates.find(&self.key).is_some()
    }
}

#[tokio::test]
async fn a_template_that_can_not_be_restored_whole_is_removed() {
    for fault in [Fault::Unreadable, Fault::NotWhole] {
        let dir = tempfile::tempdir().unwrap();
        let copy = Copy::start(dir.path()).await;
        copy.runtime.fail_next(fault, "the disk is broken");
        copy.doubt();
        assert!(!copy.is_kept().await, "{fault:?}");
    }
}

#[tokio::test]
async fn a_template_is_kept_whose_copy_is_whole_or_was_ended_by_its_client_or_for_want_of_memory() {
    let dir = tempfile::tempdir().unwrap();
    let copy = Copy::start(dir.path()).await;
    copy.doubt();
    assert!(copy.is_kept().await);
    for end in [End::Killed, End::OutOfMemory, End::Exited] {
        let dir = tempfile::tempdir().unwrap();
        let copy = Copy::start(dir.path()).await;
        copy.runtime.end_from_outside(copy.launch.id, end.clone()).await;
        copy.ended.wait().await;
        copy.doubt();
        assert!(copy.is_kept().await, "{end}");
    }
}

#[tokio::test]
async fn a_server_that_stops_does_not_wait_for_the_memory_of_a_copy() {
    let dir = tempfile::tempdir().unwrap();
    let copy = Copy::start(dir.path()).await;
    copy.runtime.fail_until_mended(Fault::NeverWhole, "");
    copy.doubt();
    let waits = timeout(Duration::from_millis(100), async { copy.is_kept().await }).await;
    assert!(waits.is_err(), "it waits");
    timeout(PATIENCE, copy.manager.stop(Stop::Restart)).await.unwrap();
    assert!(copy.is_kept().await);
}

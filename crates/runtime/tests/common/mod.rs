//! The real runsc as a subject of the conformance suite.

use std::{
    env, fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use sandboxer_protocol::SandboxId;
use sandboxer_runtime::{BoxFuture, GvisorOptions, GvisorRuntime, HostLimits, Runtime, conformance::Subject};

pub(crate) struct Gvisor {
    runtime: GvisorRuntime,
    options: GvisorOptions,
    image: PathBuf,
    _state: tempfile::TempDir,
}

impl Gvisor {
    pub(crate) async fn new() -> Self {
        Self::below("").await
    }

    /// With its state that far below a temporary directory.
    pub(crate) async fn below(path: &str) -> Self {
        sandboxer_runtime::become_subreaper().unwrap();
        let state = tempfile::tempdir().unwrap();
        let options =
            GvisorOptions { runsc: runsc(), state_dir: state.path().join(path).join("runsc"), limits: limits(), file_server: None };
        let runtime = GvisorRuntime::open(options.clone()).await.unwrap();
        Self { runtime, options, image: image(), _state: state }
    }
}

#[allow(dead_code, reason = "not every test that shares this file looks")]
impl Gvisor {
    pub(crate) fn state_dir(&self) -> &Path {
        &self.options.state_dir
    }
}

/// A test that failed must not leave its sandboxes running.
impl Drop for Gvisor {
    fn drop(&mut self) {
        let root = format!("--root={}", self.options.state_dir.display());
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            if let (true, Ok(pid)) =
                (line.split(|byte| *byte == 0).any(|word| word == root.as_bytes()), entry.file_name().to_string_lossy().parse())
            {
                nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGKILL).ok();
            }
        }
    }
}

/// Setup puts runsc where it is found without being named.
pub(crate) fn runsc() -> PathBuf {
    let named = env::var_os("SANDBOXER_RUNSC").map(PathBuf::from);
    sandboxer_runsc::find(named.as_deref()).unwrap()
}

/// The base image, built if it is not there.
pub(crate) fn image() -> PathBuf {
    static IMAGE: OnceLock<PathBuf> = OnceLock::new();
    let find = || match env::var_os("SANDBOXER_TEST_IMAGE") {
        Some(file) => file.into(),
        None => {
            let dir = env::var_os("SANDBOXER_IMAGE_DIR").map(PathBuf::from).or_else(sandboxer_image::ImageStore::default_directory);
            let store = sandboxer_image::ImageStore::open(dir.unwrap()).unwrap();
            store.ensure_base(&sandboxer_image::Silent).unwrap().path
        }
    };
    IMAGE.get_or_init(find).clone()
}

fn limits() -> HostLimits {
    static LIMITS: OnceLock<HostLimits> = OnceLock::new();
    LIMITS.get_or_init(HostLimits::probe).clone()
}

impl Subject for Gvisor {
    fn runtime(&self) -> &dyn Runtime {
        &self.runtime
    }

    fn image(&self) -> &Path {
        &self.image
    }

    fn restarted(&self) -> BoxFuture<'_, Box<dyn Runtime>> {
        Box::pin(async { Box::new(GvisorRuntime::open(self.options.clone()).await.unwrap()) as Box<dyn Runtime> })
    }

    fn kill_from_outside<'a>(&'a self, _id: SandboxId, dir: &'a Path) -> BoxFuture<'a, ()> {
        let pid: i32 = fs::read_to_string(dir.join("pid")).unwrap().trim().parse().unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGKILL).unwrap();
        Box::pin(async {})
    }

    fn leftovers(&self, id: SandboxId, dir: &Path) -> Vec<String> {
        let name = id.to_string();
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            if String::from_utf8_lossy(&line).contains(&name) {
                found.push(format!("process {}", entry.file_name().display()));
            }
        }
        found.extend(fs::read_to_string("/proc/self/mountinfo").unwrap().lines().filter(|mount| mount.contains(&name)).map(str::to_owned));
        for entry in fs::read_dir(&self.options.state_dir).unwrap().flatten() {
            found.push(format!("state {}", entry.file_name().display()));
        }
        for fifo in ["in", "out", "boot"].iter().map(|fifo| dir.join(fifo)).filter(|fifo| fifo.exists()) {
            found.push(fifo.display().to_string());
        }
        for controller in sandboxer_runtime::Controller::ALL {
            found.extend(
                self.options
                    .limits
                    .enforces(controller)
                    .map(|parent| parent.join(&name))
                    .ok()
                    .filter(|d| d.exists())
                    .map(|d| d.display().to_string()),
            );
        }
        found
    }
}

//! A sandbox on this host: where it lies, what it is started with, and removing what is left of it.

use std::{
    fs, io,
    num::NonZero,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    thread,
};

use sandboxer_protocol::{SandboxId, agent::AgentConfig};
use sandboxer_runtime::{HostResources, Launch};
use tracing::warn;

use super::{
    Manager,
    converse::{Opened, converse},
};
use crate::sandbox::record::Record;

/// Why something is not gone on with.
pub(super) const STOPPING: &str = "the server is stopping";

impl Manager {
    pub(super) fn dir(&self, container: SandboxId) -> PathBuf {
        self.settings.data_dir.join("sandboxes").join(container.to_string())
    }

    /// What a sandbox is started or restored with: the server's own template, whatever a volume says.
    pub(super) fn launch(&self, record: &Record, resources: HostResources) -> Launch {
        let limits = &record.config.limits;
        Launch {
            id: record.container(),
            dir: self.dir(record.container()),
            image: record.image.clone(),
            config: AgentConfig {
                marker: record.marker.to_hex(),
                disk_bytes: limits.disk_bytes(),
                disk_inodes: limits.disk_inodes(),
                memory_bytes: Some(limits.memory_bytes()),
                pids: Some(limits.pids),
                output_window_bytes: self.settings.output_window_bytes,
                stdin_window_bytes: self.settings.stdin_window_bytes,
                spares: self.settings.spares.for_agents(),
            },
            resources,
        }
    }

    pub(super) async fn start(&self, launch: &Launch, record: &Record) -> Result<Opened, String> {
        let _turn = self.starts.acquire().await.map_err(|error| error.to_string())?;
        // Whoever waited for a turn may have waited until now.
        if self.stopping().is_some() {
            return Err(STOPPING.to_owned());
        }
        prepare(launch, record).map_err(|error| format!("{}: {error}", launch.dir.display()))?;
        let instance = self.runtime.start(launch).await.map_err(|error| error.to_string())?;
        converse(instance, &record.marker, self.settings.start_timeout).await
    }

    pub(super) async fn discard(&self, launch: &Launch) {
        self.remove(launch.id, &launch.dir).await;
    }

    pub(super) async fn remove(&self, container: SandboxId, dir: &Path) {
        match self.runtime.remove(container, dir).await {
            Ok(()) => remove_dir(dir),
            Err(error) => warn!(%error, "what is left of it could not be removed; the next start of the server tries again"),
        }
    }
}

/// A start takes two processors while it lasts. Many at once take turns on them, and each is as late as the last.
pub(super) fn starts_at_once() -> usize {
    2 * thread::available_parallelism().map_or(1, NonZero::get)
}

pub(super) fn prepare(launch: &Launch, record: &Record) -> io::Result<()> {
    private_dir(&launch.dir)?;
    record.write(&launch.dir)
}

pub(super) fn private_dir(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

pub(super) fn remove_dir(dir: &Path) {
    if let Err(error) = fs::remove_dir_all(dir) {
        warn!(%error, dir = %dir.display(), "could not be removed; the next start of the server tries again");
    }
}

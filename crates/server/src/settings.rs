//! What the server is told when it starts. Checked before anything is done, all faults together.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use sandboxer_protocol::limits::{MAX_CLIENT_MESSAGE_BYTES, OUTPUT_WINDOW_BYTES, STDIN_WINDOW_BYTES};

use crate::{
    checkpoints::CheckpointSettings, filesystems::FilesystemSettings, http::Access, limits::Limits, network::NetworkSettings,
    spares::Spares, tls::Tls, workspaces::WorkspaceSettings,
};

#[derive(Debug, Clone)]
pub struct Settings {
    pub listen: SocketAddr,
    /// Where `/metrics` is served without a key, besides `listen`, where it needs one.
    pub metrics_listen: Option<SocketAddr>,
    pub data_dir: PathBuf,
    pub max_sandboxes: usize,
    pub idle_timeout: Option<Duration>,
    pub max_lifetime: Option<Duration>,
    pub default_limits: Limits,
    pub max_limits: Limits,
    pub max_message_bytes: usize,
    pub output_window_bytes: u64,
    pub stdin_window_bytes: u64,
    pub spares: Spares,
    /// How long the agent of a new sandbox may take to answer.
    pub start_timeout: Duration,
    /// How long everything may take when the server stops.
    pub stop_grace: Duration,
    /// How long the reason is remembered for which a sandbox ended.
    pub remember: Duration,
    pub access: Access,
    pub key_limits: KeyLimits,
    pub pool: PoolSettings,
    /// None: plain HTTP.
    pub tls: Option<Tls>,
    /// None: no checkpoints are kept.
    pub checkpoints: Option<CheckpointSettings>,
    /// None: no filesystem snapshots are kept.
    pub filesystems: Option<FilesystemSettings>,
    /// None: kept in the data directory, with the built-in profiles and no hosts but this machine.
    pub workspaces: Option<WorkspaceSettings>,
    pub network: NetworkSettings,
}

/// What each API key may use.
#[derive(Debug, Clone, Copy, Default)]
pub struct KeyLimits {
    /// Sandboxes at once; none: as many as the server has.
    pub sandboxes: Option<usize>,
    /// Sandboxes made in any minute; none: no bound.
    pub creates_per_minute: Option<usize>,
    /// Bytes on each volume; none: no bound.
    pub volume_bytes: Option<u64>,
}

/// What is kept ready before anybody asks.
#[derive(Debug, Clone)]
pub struct PoolSettings {
    /// Started sandboxes that wait for their creators; 0: none.
    pub sandboxes: usize,
    /// Containers that wait for what is restored into them; 0: none. Without a checkpoint path there are none.
    pub containers: usize,
    /// With less memory than this available, nothing waits.
    pub min_free_bytes: u64,
    /// Where it says how much memory the machine has.
    pub meminfo: PathBuf,
}

impl Default for PoolSettings {
    fn default() -> Self {
        Self { sandboxes: 0, containers: 0, min_free_bytes: 512 * 1024 * 1024, meminfo: "/proc/meminfo".into() }
    }
}

impl Settings {
    #[must_use]
    pub fn new(listen: SocketAddr, data_dir: PathBuf) -> Self {
        Self {
            listen,
            metrics_listen: None,
            data_dir,
            max_sandboxes: 100,
            idle_timeout: Some(Duration::from_secs(300)),
            max_lifetime: None,
            default_limits: Limits::default(),
            max_limits: Limits { memory_mb: 8192, cpus: 64.0, pids: 4096, disk_mb: 8192 },
            max_message_bytes: MAX_CLIENT_MESSAGE_BYTES,
            output_window_bytes: OUTPUT_WINDOW_BYTES,
            stdin_window_bytes: STDIN_WINDOW_BYTES,
            spares: Spares::default(),
            start_timeout: Duration::from_secs(60),
            stop_grace: Duration::from_secs(10),
            remember: Duration::from_secs(3600),
            access: Access::default(),
            key_limits: KeyLimits::default(),
            pool: PoolSettings::default(),
            tls: None,
            checkpoints: None,
            filesystems: None,
            workspaces: None,
            network: NetworkSettings::default(),
        }
    }
}

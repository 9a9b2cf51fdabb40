//! What the server keeps on disk of a sandbox, so that the next server process can take it up.
//!
//! The format is versioned: a newer server reads the records of an older one.

use std::{
    collections::BTreeMap,
    fs, io,
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use sandboxer_protocol::{
    SandboxId,
    agent::{DetachedOutput, Marker},
};
use serde::{Deserialize, Serialize};

use crate::{images::ImageDefaults, limits::Limits, network::Rule};

pub(crate) const RECORD_VERSION: u32 = 1;
const FILE: &str = "record.json";

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) version: u32,
    pub(crate) id: SandboxId,
    pub(crate) created_at: jiff::Timestamp,
    /// SHA-256 of the token, in hex. The token itself is nowhere but with the client.
    pub(crate) token_sha256: String,
    /// Opens a conversation with the agent.
    pub(crate) marker: Marker,
    pub(crate) image: PathBuf,
    /// Which API key made it, by its name.
    #[serde(default)]
    pub(crate) owner: Option<String>,
    /// Since when nobody is attached and nothing runs.
    #[serde(default)]
    pub(crate) idle_since: Option<jiff::Timestamp>,
    pub(crate) config: SandboxConfig,
    /// In which epoch it is held, if it is kept on the volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) epoch: Option<u64>,
    /// Rises with every rewinding, and is another one in every copy.
    #[serde(default)]
    pub(crate) generation: u64,
    /// What it is to the runtime, and the name of its directory, where that is not its own id: it was rolled back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) container: Option<SandboxId>,
    /// It was started to take the place of another one, and has not; or it is a copy that nobody has heard of yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) standby: bool,
}

/// The configuration of a sandbox with all defaults filled in.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct SandboxConfig {
    /// None: never.
    pub(crate) idle_timeout: Option<Duration>,
    /// How long it goes on without a client, whatever runs in it. None: for as long as something runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) client_gone_timeout: Option<Duration>,
    /// How many bytes of a stream its agent holds. None: an older server made the sandbox, which did not note that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) output_window_bytes: Option<u64>,
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
    #[serde(default)]
    pub(crate) cwd: Option<String>,
    pub(crate) limits: Limits,
    #[serde(default)]
    pub(crate) detached_output: DetachedOutput,
    #[serde(default)]
    pub(crate) metadata: BTreeMap<String, String>,
    /// It is kept on the volume.
    #[serde(default)]
    pub(crate) checkpoint: bool,
    /// An attached client gives way to another instance.
    #[serde(default)]
    pub(crate) handoff: bool,
    /// It is saved when it is idle, not deleted.
    #[serde(default)]
    pub(crate) idle_checkpoint: bool,
    /// How often it is saved while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) autosave: Option<Duration>,
    /// What its programs may reach, of what the server allows; none: it has no network.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) network: Vec<Rule>,
}

impl SandboxConfig {
    /// Takes from its image what its creator left open.
    pub(crate) fn over(mut self, image: ImageDefaults) -> Self {
        let mut env = image.env;
        env.append(&mut self.env);
        self.env = env;
        self.cwd = self.cwd.or(image.cwd);
        self
    }
}

/// Why a sandbox that an earlier server left can't be taken up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    #[error("its record can't be read: {0}")]
    Io(#[from] io::Error),
    #[error("its record makes no sense: {0}")]
    Json(#[from] serde_json::Error),
    #[error("its record is of version {0}, which this server does not know")]
    Version(u32),
    #[error("its record is that of another sandbox")]
    Foreign,
}

impl Record {
    /// Writes it whole or not at all. It is private: the marker is in it.
    pub(crate) fn write(&self, dir: &Path) -> io::Result<()> {
        let temporary = dir.join("record.json.new");
        let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        fs::rename(temporary, dir.join(FILE))
    }

    /// The record in the directory of a container.
    pub(crate) fn read(dir: &Path, container: SandboxId) -> Result<Self, RecordError> {
        let record = Self::parse(&fs::read(dir.join(FILE))?)?;
        if record.container() == container { Ok(record) } else { Err(RecordError::Foreign) }
    }

    /// What it is to the runtime.
    pub(crate) fn container(&self) -> SandboxId {
        self.container.unwrap_or(self.id)
    }

    /// It is a copy that was not finished.
    pub(crate) fn is_unheard_of(&self) -> bool {
        self.standby && self.container.is_none()
    }

    /// Programs see it.
    pub(crate) fn hostname(&self) -> String {
        let id = self.id.to_string();
        format!("sandbox-{}", id.split('-').next().unwrap_or_default())
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, RecordError> {
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let Version { version } = serde_json::from_slice(bytes)?;
        if version != RECORD_VERSION {
            return Err(RecordError::Version(version));
        }
        Ok(serde_json::from_slice(bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_comes_back_as_it_was_written_and_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let record = Record {
            version: RECORD_VERSION,
            id: SandboxId::random(),
            created_at: jiff::Timestamp::UNIX_EPOCH,
            token_sha256: "00".to_owned(),
            marker: Marker::new([7; 32]),
            image: "/image.erofs".into(),
            owner: None,
            idle_since: None,
            config: SandboxConfig { idle_timeout: Some(Duration::from_secs(5)), ..SandboxConfig::default() },
            epoch: None,
            generation: 0,
            container: None,
            standby: false,
        };
        record.write(dir.path()).unwrap();
        let read = Record::read(dir.path(), record.id).unwrap();
        assert_eq!(format!("{read:?}"), format!("{record:?}"));
        assert_eq!(read.marker, record.marker);
        let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(dir.path().join(FILE)).unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600);
        assert!(matches!(Record::read(dir.path(), SandboxId::random()), Err(RecordError::Foreign)));
    }

    #[test]
    fn a_record_of_the_first_format_is_still_read() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), include_str!("record_v1.json")).unwrap();
        let id = "5f0c8a52-3b1e-4c53-9d0e-0a7c1e1f2b3d".parse().unwrap();
        let record = Record::read(dir.path(), id).unwrap();
        assert_eq!(record.config.idle_timeout, Some(Duration::from_millis(300_500)));
        assert_eq!(record.config.limits.pids, 256);
        assert_eq!(record.config.env["A"], "b");
    }

    #[test]
    fn a_record_of_a_newer_format_is_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), r#"{"version":2,"new":true}"#).unwrap();
        assert!(matches!(Record::read(dir.path(), SandboxId::random()), Err(RecordError::Version(2))));
    }
}

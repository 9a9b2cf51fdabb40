//! `ext.compose-ssh`: the containers of a repository, on a host that is reached by ssh (or on the server's own machine).
//!
//! ```text
//! {base_dir}/sandboxes/{sandbox_id}/           the repository's files; its containers are the project sbx-{sandbox_id}
//! {base_dir}/sandboxes/.{sandbox_id}.part/     the same while they are fetched or unpacked
//! {base_dir}/snapshots/{snapshot_id}.tar.gz    a snapshot, whole
//! {base_dir}/snapshots/.{snapshot_id}….part    the same while it is written
//! ```
//!
//! Every name follows from an id, so that what a killed server began is found and removed. A name without `.part` is whole: it is made
//! by a rename, in a step of its own that is only taken once the step before has been answered.
//!
//! What a repository may ask for is decided by [`policy`], on the configuration that compose itself has resolved; and it is that very
//! text which is then run, not the files once more.

mod policy;
mod repo;
mod scripts;
mod shell;
mod ssh;

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use async_trait::async_trait;
use sandboxer_protocol::SandboxId;
use serde::Deserialize;

use self::{
    repo::Repo,
    shell::{Input, Said, Shell, Task},
};
use crate::{
    ExtensionError, ExtensionName, Health, Host, InputValue, Inputs, Kind, Map, Profile, Repos, Sandbox, SandboxExtension, SnapshotId,
};

/// Fetching a repository, writing or unpacking an archive.
const LONG: Duration = Duration::from_secs(3600);
/// What does next to nothing.
const SHORT: Duration = Duration::from_secs(60);
/// Ending containers.
const ENDING: Duration = Duration::from_secs(300);
const MAX_HEALTHY_WITHIN: i64 = 3600;
/// Ports that are told.
const MAX_PORTS: usize = 32;

pub struct ComposeSsh {
    name: ExtensionName,
    repos: Repos,
    shell: Shell,
}

/// Where a sandbox lies on its host.
struct Site {
    base: PathBuf,
    id: SandboxId,
}

impl Site {
    fn of(id: SandboxId, host: &Host) -> Result<Self, ExtensionError> {
        Ok(Self { base: base_dir(host)?, id })
    }

    fn base(&self) -> String {
        self.base.to_string_lossy().into_owned()
    }

    fn dir(&self) -> PathBuf {
        self.base.join("sandboxes").join(self.id.to_string())
    }

    fn dir_text(&self) -> String {
        self.dir().to_string_lossy().into_owned()
    }

    fn project(&self) -> String {
        format!("sbx-{}", self.id)
    }
}

fn base_dir(host: &Host) -> Result<PathBuf, ExtensionError> {
    let none = || ExtensionError::invalid(format!("host: the hosts file gives {} no base_dir, so nothing can be put there.", host.name));
    host.base_dir.clone().ok_or_else(none)
}

impl ComposeSsh {
    /// `run_dir` is a private directory of this instance, where its connections to hosts have their sockets.
    ///
    /// # Errors
    /// The directory can't be made.
    ///
    /// # Panics
    /// Never: its name is a name.
    pub fn open(repos: Repos, run_dir: &Path) -> io::Result<Self> {
        Ok(Self { name: "ext.compose-ssh".parse().expect("a name"), repos, shell: Shell::open(run_dir)? })
    }

    async fn run(&self, host: &Host, what: &str, task: Task) -> Result<Said, ExtensionError> {
        let said = self.shell.run(host, task).await?;
        if said.status == 0 { Ok(said) } else { Err(failure(host, what, &said)) }
    }

    /// Starts the containers of a directory that is in place, once what they ask for has been looked at.
    async fn up(&self, site: &Site, sandbox: &Sandbox) -> Result<Map, ExtensionError> {
        let host = &sandbox.host;
        let (dir, project) = (site.dir_text(), site.project());
        let task = Task::new(scripts::RESOLVE, SHORT).arg(&dir).arg(&project);
        let resolved = self.run(host, "Its compose file can't be used", task).await?;
        if !host.trust_repos {
            let binds = policy::check(&resolved.stdout, &site.dir(), &project)?;
            self.no_links(host, &binds).await?;
        }
        let seconds = match sandbox.inputs.get("healthy_within") {
            Some(InputValue::Integer(seconds)) => (*seconds).clamp(1, MAX_HEALTHY_WITHIN),
            _ => 120,
        };
        let within = ENDING + Duration::from_secs(seconds.unsigned_abs());
        let task = Task::new(scripts::UP, within).arg(&dir).arg(&project).arg(&seconds.to_string()).input(Input::Bytes(resolved.stdout));
        self.run(host, "Its containers did not start and become healthy", task).await?;
        let ports = ports(&self.containers(host, &project).await?);
        Ok(Map::from([("project".to_owned(), project), ("remote_dir".to_owned(), dir), ("ports".to_owned(), ports)]))
    }

    async fn containers(&self, host: &Host, project: &str) -> Result<Vec<Container>, ExtensionError> {
        let said = self.run(host, "Its containers can't be listed", Task::new(scripts::STATUS, SHORT).arg(project)).await?;
        let unreadable = |error| ExtensionError::failed(format!("What compose on host {} says can't be read: {error}", host.name));
        containers(&said.stdout).map_err(unreadable)
    }

    /// What containers are given of the directory must be what its name says: a link could lead anywhere.
    async fn no_links(&self, host: &Host, paths: &[String]) -> Result<(), ExtensionError> {
        if paths.is_empty() {
            return Ok(());
        }
        let mut task = Task::new(scripts::REALPATHS, SHORT);
        for path in paths {
            task = task.arg(path);
        }
        let said = self.run(host, "Its directories can't be looked at", task).await?;
        let found = String::from_utf8_lossy(&said.stdout).into_owned();
        let mut real = found.split_terminator('\0');
        match paths.iter().find(|path| real.next() != Some(path.as_str())) {
            None => Ok(()),
            Some(path) => Err(policy::refuse(&format!("{path} leads elsewhere by a symbolic link"))),
        }
    }

    async fn fetch(&self, site: &Site, sandbox: &Sandbox) -> Result<(), ExtensionError> {
        let host = &sandbox.host;
        let (base, id) = (site.base(), site.id.to_string());
        self.run(host, "Its directory can't be made", Task::new(scripts::PREPARE, SHORT).arg(&base).arg(&id)).await?;
        match repo::parse(&sandbox.inputs, &self.repos)? {
            Repo::Git { url, reference } => {
                let task = Task::new(scripts::CLONE, LONG).arg(&base).arg(&id).arg(&self.repos.schemes.join(":")).arg(&url);
                let task = task.arg(reference.as_deref().unwrap_or(""));
                self.run(host, "The repository can't be fetched", task).await?;
            }
            Repo::Local(dir) => {
                let task = Task::new(scripts::UPLOAD, LONG).arg(&base).arg(&id).input(Input::Directory(dir));
                self.run(host, "The directory can't be copied", task).await?;
            }
        }
        self.run(host, "Its directory can't be put in place", Task::new(scripts::PUBLISH, SHORT).arg(&base).arg(&id)).await.map(drop)
    }
}

/// What went wrong on a host, in its own words.
fn failure(host: &Host, what: &str, said: &Said) -> ExtensionError {
    let words = said.last_words();
    if words.contains("No space left on device") {
        let message = format!("{what}: the disk of host {} is full. Delete snapshots or sandboxes there. ({words})", host.name);
        return ExtensionError::new(Kind::Failed, "host_disk_full", message);
    }
    match said.status {
        scripts::MISSING => {
            ExtensionError::new(Kind::Failed, "artifact_missing", format!("{what}: it is no longer on host {}.", host.name))
        }
        scripts::CHANGED => {
            let message = format!("{what}: the archive on host {} is not the one that was written; its digest differs.", host.name);
            ExtensionError::new(Kind::Failed, "artifact_changed", message)
        }
        scripts::OUTSIDE => {
            let message = format!("{what}: the archive on host {} names files outside of its directory.", host.name);
            ExtensionError::new(Kind::Failed, "artifact_unsafe", message)
        }
        status => ExtensionError::new(Kind::Failed, "host_failed", format!("{what} on host {} (status {status}): {words}", host.name)),
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Container {
    #[serde(default)]
    name: String,
    #[serde(default)]
    state: String,
    #[serde(default)]
    health: String,
    #[serde(default)]
    exit_code: i64,
    #[serde(default)]
    service: String,
    #[serde(default)]
    publishers: Option<Vec<Publisher>>,
}

#[derive(Deserialize)]
struct Publisher {
    #[serde(rename = "URL", default)]
    address: String,
    #[serde(rename = "TargetPort", default)]
    target: u16,
    #[serde(rename = "PublishedPort", default)]
    published: u16,
}

/// Where the services can be reached on their host: `web:8080=127.0.0.1:32768`, separated by spaces.
fn ports(containers: &[Container]) -> String {
    let of = |container: &Container| {
        let published = container.publishers.iter().flatten().filter(|publisher| publisher.published != 0);
        published.map(|at| format!("{}:{}={}:{}", container.service, at.target, at.address, at.published)).collect::<Vec<_>>()
    };
    let mut ports: Vec<String> = containers.iter().flat_map(of).collect();
    ports.sort();
    ports.truncate(MAX_PORTS);
    ports.join(" ")
}

/// One object a line, or one list, as the version of compose has it.
fn containers(bytes: &[u8]) -> Result<Vec<Container>, serde_json::Error> {
    if bytes.trim_ascii_start().starts_with(b"[") {
        return serde_json::from_slice(bytes);
    }
    bytes.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty()).map(serde_json::from_slice).collect()
}

fn health(containers: &[Container]) -> Health {
    let starting = |container: &&Container| matches!(container.state.as_str(), "created" | "restarting") || container.health == "starting";
    let good = |container: &Container| match container.state.as_str() {
        "running" => matches!(container.health.as_str(), "" | "healthy"),
        // One that does its work and ends.
        "exited" => container.exit_code == 0,
        _ => false,
    };
    if containers.is_empty() {
        return Health::Gone;
    }
    match containers.iter().find(|container| !good(container)) {
        None => Health::Ready,
        Some(container) if starting(&container) => Health::Provisioning,
        Some(container) => {
            Health::Failed(format!("container {} is {} {}", container.name, container.state, container.health).trim().to_owned())
        }
    }
}

#[async_trait]
impl SandboxExtension for ComposeSsh {
    fn name(&self) -> ExtensionName {
        self.name.clone()
    }

    async fn validate(&self, _profile: &Profile, inputs: &Inputs, host: &Host) -> Result<(), ExtensionError> {
        base_dir(host)?;
        repo::parse(inputs, &self.repos)?;
        match inputs.get("healthy_within") {
            Some(InputValue::Integer(1..=MAX_HEALTHY_WITHIN)) | None => Ok(()),
            Some(_) => Err(ExtensionError::invalid(format!("inputs.healthy_within: 1 to {MAX_HEALTHY_WITHIN} seconds."))),
        }
    }

    async fn provision(&self, sandbox: &Sandbox) -> Result<Map, ExtensionError> {
        let site = Site::of(sandbox.id, &sandbox.host)?;
        self.fetch(&site, sandbox).await?;
        self.up(&site, sandbox).await
    }

    async fn status(&self, sandbox: &Sandbox) -> Result<Health, ExtensionError> {
        let site = Site::of(sandbox.id, &sandbox.host)?;
        Ok(health(&self.containers(&sandbox.host, &site.project()).await?))
    }

    async fn teardown(&self, sandbox: &Sandbox) -> Result<(), ExtensionError> {
        let site = Site::of(sandbox.id, &sandbox.host)?;
        let task = Task::new(scripts::TEARDOWN, ENDING).arg(&site.base()).arg(&site.id.to_string()).arg(&site.project());
        self.run(&sandbox.host, "It can't be removed", task).await.map(drop)
    }

    async fn supports_snapshots(&self) -> Result<bool, ExtensionError> {
        Ok(true)
    }

    async fn snapshot(&self, id: SnapshotId, sandbox: &Sandbox) -> Result<Map, ExtensionError> {
        let site = Site::of(sandbox.id, &sandbox.host)?;
        let (host, base, id) = (&sandbox.host, site.base(), id.to_string());
        let task = Task::new(scripts::SNAPSHOT, LONG).arg(&base).arg(&site.id.to_string()).arg(&id);
        let said = self.run(host, "The snapshot can't be written", task).await?;
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        let words: Vec<&str> = text.split_whitespace().collect();
        let [sha256, size, changed] = words[..] else {
            return Err(ExtensionError::failed(format!("What host {} says of the snapshot can't be understood.", host.name)));
        };
        if !is_digest(sha256) || size.parse::<u64>().is_err() {
            return Err(ExtensionError::failed(format!("Host {} names no digest and size of the snapshot.", host.name)));
        }
        let task = Task::new(scripts::PUBLISH_SNAPSHOT, SHORT).arg(&base).arg(&id);
        self.run(host, "The snapshot can't be put in place", task).await?;
        Ok(Map::from([
            ("artifact".to_owned(), format!("{base}/snapshots/{id}.tar.gz")),
            ("sha256".to_owned(), sha256.to_owned()),
            ("size_bytes".to_owned(), size.to_owned()),
            ("changed_while_read".to_owned(), (changed == "1").to_string()),
        ]))
    }

    async fn restore_from_snapshot(&self, sandbox: &Sandbox, snapshot: SnapshotId, meta: &Map) -> Result<Map, ExtensionError> {
        let site = Site::of(sandbox.id, &sandbox.host)?;
        let sha256 = meta.get("sha256").filter(|digest| is_digest(digest));
        let sha256 = sha256.ok_or_else(|| ExtensionError::failed("The digest of the snapshot is not known, so it is not restored."))?;
        let task = Task::new(scripts::RESTORE, LONG).arg(&site.base()).arg(&site.id.to_string());
        let task = task.arg(&snapshot.to_string()).arg(sha256);
        self.run(&sandbox.host, "The snapshot can't be restored", task).await?;
        self.up(&site, sandbox).await
    }

    async fn delete_snapshot(&self, id: SnapshotId, host: &Host, _meta: &Map) -> Result<(), ExtensionError> {
        let base = base_dir(host)?;
        let task = Task::new(scripts::DELETE_SNAPSHOT, SHORT).arg(&base.to_string_lossy()).arg(&id.to_string());
        self.run(host, "The snapshot can't be deleted", task).await.map(drop)
    }
}

fn is_digest(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_health_of_containers_is_that_of_the_worst() {
        let health = |text: &str| health(&containers(text.as_bytes()).unwrap());
        assert_eq!(health(""), Health::Gone);
        assert_eq!(health("[]"), Health::Gone);
        assert_eq!(health(r#"{"Name":"a","State":"running","Health":""}"#), Health::Ready);
        assert_eq!(
            health("{\"Name\":\"a\",\"State\":\"running\",\"Health\":\"healthy\"}\n{\"Name\":\"b\",\"State\":\"exited\",\"ExitCode\":0}\n"),
            Health::Ready
        );
        assert_eq!(health(r#"[{"Name":"a","State":"running","Health":"starting"}]"#), Health::Provisioning);
        assert!(matches!(health(r#"[{"Name":"a","State":"exited","ExitCode":1}]"#), Health::Failed(_)));
        assert!(matches!(health(r#"[{"Name":"a","State":"running","Health":"unhealthy"}]"#), Health::Failed(_)));
        assert!(containers(b"nonsense").is_err());
    }
}

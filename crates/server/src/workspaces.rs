//! Sandboxes of other kinds, as the resource API sees them: made, looked at, snapshotted, restored and removed through their extensions.
//!
//! Work that was begun runs to its end whether or not its client waits. A row is written before it and changed after it; two requests
//! that would disturb each other are told so ([`busy`]). Native sandboxes are [`native`]'s.

mod busy;
mod native;
mod restore;
mod snapshot;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use sandboxer_extensions::{
    Config, ExtensionError, ExtensionName, Health, Host, HostName, Kind, Map, Profile, ProfileName, Sandbox, SandboxExtension, SandboxRow,
    SandboxState, SnapshotId, SnapshotRow, StoreError, WorkspaceStore, check_map, compose::ComposeSsh, external::External, stub::SaasStub,
};
use sandboxer_protocol::SandboxId;
use serde_json::Value;
use tokio::{sync::Semaphore, task::JoinHandle, time::timeout};
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use self::busy::{Busy, Key};
pub(crate) use self::{
    native::{Broken, ExecutionWord, Going, Native, NativeError, NativeSandbox, NotDeleted, Watched, configuration},
    restore::{MAX_COUNT, RestoreOrder},
};

/// Calls of extensions at once; more wait for their turn.
const TURNS: usize = 16;
/// Requests that may be under way or waiting. Beyond it they are refused.
const MAX_UNDER_WAY: usize = 1000;
/// How long a sandbox that is only looked at may take to say how it is.
const LOOK_WITHIN: Duration = Duration::from_secs(10);

/// Where the workspaces of a server are kept, and what it may make.
#[derive(Debug, Clone)]
pub struct WorkspaceSettings {
    /// Directory of `snapshots.json` and `sandboxes.json`.
    pub dir: PathBuf,
    /// A private directory of this instance, for connections to hosts.
    pub run_dir: PathBuf,
    pub config: Config,
}

impl WorkspaceSettings {
    /// Those of a server that nobody has configured anything for.
    pub(crate) fn unconfigured(data_dir: &Path) -> std::io::Result<Self> {
        let config = Config::load(None, &data_dir.join("extensions")).map_err(std::io::Error::other)?;
        Ok(Self { dir: data_dir.to_owned(), run_dir: data_dir.to_owned(), config })
    }
}

/// What a client wants to be made.
#[derive(Debug, Clone)]
pub(crate) struct Order {
    pub(crate) profile: ProfileName,
    pub(crate) inputs: BTreeMap<String, Value>,
    pub(crate) host: Option<HostName>,
    pub(crate) metadata: Map,
    /// What could not be made is kept as failed, for a client that does not wait to look at.
    pub(crate) keep_failed: bool,
}

/// Work under way: what it was begun as, and what becomes of it.
pub(crate) struct Begun<T> {
    pub(crate) row: T,
    pub(crate) done: JoinHandle<Result<T, ExtensionError>>,
}

impl<T> Begun<T> {
    pub(crate) async fn finished(self) -> Result<T, ExtensionError> {
        self.done.await.unwrap_or_else(|_| Err(ExtensionError::failed("The work ended unexpectedly. Try again.")))
    }
}

pub(crate) struct Workspaces {
    config: Config,
    store: WorkspaceStore,
    extensions: BTreeMap<ExtensionName, Arc<dyn SandboxExtension>>,
    busy: Busy,
    turns: Semaphore,
    under_way: Arc<Semaphore>,
    /// Most sandboxes of a key.
    key_most: Option<usize>,
    tasks: TaskTracker,
}

impl Workspaces {
    /// Opens the files, and says of what an earlier process left in the middle that it failed.
    pub(crate) async fn open(settings: WorkspaceSettings, key_most: Option<usize>) -> std::io::Result<Arc<Self>> {
        let store = WorkspaceStore::open(&settings.dir).await.map_err(std::io::Error::other)?;
        let mut extensions: BTreeMap<ExtensionName, Arc<dyn SandboxExtension>> = BTreeMap::new();
        let stub = SaasStub::default();
        let compose = ComposeSsh::open(settings.config.hosts.repos.clone(), &settings.run_dir)?;
        extensions.insert(stub.name(), Arc::new(stub));
        extensions.insert(compose.name(), Arc::new(compose));
        for (name, program) in &settings.config.programs {
            extensions.insert(name.clone(), Arc::new(External::new(name.clone(), program.clone())));
        }
        let workspaces = Arc::new(Self {
            config: settings.config,
            store,
            extensions,
            busy: Busy::default(),
            turns: Semaphore::new(TURNS),
            under_way: Arc::new(Semaphore::new(MAX_UNDER_WAY)),
            key_most,
            tasks: TaskTracker::new(),
        });
        let (sandboxes, snapshots) = workspaces.store.take_over().await.map_err(std::io::Error::other)?;
        for name in workspaces.damaged().await {
            warn!(name, "a damaged file lies beside the new one: look whether anything of it is wanted");
        }
        let cleaning = Arc::clone(&workspaces);
        workspaces.tasks.spawn(async move { cleaning.clean_up(sandboxes, snapshots).await });
        Ok(workspaces)
    }

    /// Waits for what is under way, as long as that may take. What is left then has failed at the next start.
    pub(crate) async fn stop(&self, grace: Duration) {
        self.tasks.close();
        if timeout(grace, self.tasks.wait()).await.is_err() {
            warn!(works = self.tasks.len(), "some work on workspaces did not end in time");
        }
    }

    /// Removes what an earlier process left half-made on the hosts. What can't be removed now stays with its row.
    async fn clean_up(&self, sandboxes: Vec<SandboxRow>, snapshots: Vec<SnapshotRow>) {
        for row in sandboxes {
            let Ok(_held) = self.busy.try_alone(Key::Sandbox(row.id)) else { continue };
            if let Err(error) = self.tear_down(&row).await {
                warn!(id = %row.id, %error, "what is left of a half-made sandbox could not be removed; deleting it tries again");
            }
        }
        for row in snapshots {
            let Ok(_held) = self.busy.try_alone(Key::Snapshot(row.id)) else { continue };
            if let Err(error) = self.remove_artifact(&row).await {
                warn!(id = %row.id, %error, "what is left of a half-made snapshot could not be removed; deleting it tries again");
            }
        }
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) async fn damaged(&self) -> Vec<String> {
        self.store.damaged().await
    }

    pub(crate) async fn sandboxes(&self, owner: Option<&str>) -> Result<Vec<SandboxRow>, ExtensionError> {
        let mut rows = self.store.sandboxes().await.map_err(store_error)?;
        rows.retain(|row| may_see(row.owner.as_deref(), owner));
        Ok(rows)
    }

    pub(crate) async fn sandbox(&self, id: SandboxId, owner: Option<&str>) -> Result<SandboxRow, ExtensionError> {
        let row = self.store.sandbox(id).await.map_err(store_error)?;
        row.filter(|row| may_see(row.owner.as_deref(), owner)).ok_or_else(|| not_found("sandbox"))
    }

    /// How it is now, not how it was when it was made.
    pub(crate) async fn look(&self, row: &SandboxRow) -> Result<Health, ExtensionError> {
        match row.status {
            SandboxState::Provisioning => return Ok(Health::Provisioning),
            SandboxState::Failed => return Ok(Health::Failed(row.error.clone().unwrap_or_default())),
            SandboxState::Ready => {}
        }
        let (extension, sandbox) = self.known(row)?;
        let looked = timeout(LOOK_WITHIN, extension.status(&sandbox)).await;
        looked.unwrap_or_else(|_| Err(ExtensionError::unavailable(format!("{} does not say how the sandbox is.", row.host))))
    }

    /// Begins to make a sandbox.
    pub(crate) async fn create(self: &Arc<Self>, order: Order, owner: Option<String>) -> Result<Begun<SandboxRow>, ExtensionError> {
        let place = self.admit(owner.as_deref(), 1).await?;
        let profile = self.profile(&order.profile)?.clone();
        let inputs = profile.resolve(&order.inputs)?;
        let host = self.host(order.host.as_ref().or(profile.host.as_ref()), &profile)?.clone();
        let extension = self.extension(&profile.extension)?;
        extension.validate(&profile, &inputs, &host).await?;
        let row = SandboxRow {
            id: SandboxId::random(),
            profile: profile.name.clone(),
            extension: profile.extension.clone(),
            host: host.name.clone(),
            status: SandboxState::Provisioning,
            created_at: jiff::Timestamp::now(),
            metadata: order.metadata,
            inputs,
            handle: Map::new(),
            error: None,
            snapshot_id: None,
            owner,
        };
        let (_, sandbox) = self.known(&row)?;
        self.make(row, place, order.keep_failed, async move { extension.provision(&sandbox).await }).await
    }

    /// Writes the row, begins the work that makes the sandbox, and writes down what came of it.
    async fn make(
        self: &Arc<Self>,
        row: SandboxRow,
        place: tokio::sync::OwnedSemaphorePermit,
        keep_failed: bool,
        making: impl Future<Output = Result<Map, ExtensionError>> + Send + 'static,
    ) -> Result<Begun<SandboxRow>, ExtensionError> {
        let held = self.busy.alone(Key::Sandbox(row.id)).await?;
        self.store.put_sandbox(row.clone()).await.map_err(store_error)?;
        let (this, mut made) = (Arc::clone(self), row.clone());
        let done = self.tasks.spawn(async move {
            let _held = (held, place);
            let turn = this.turns.acquire().await;
            let result = making.await.and_then(|handle| check_map("handle", &handle).map(|()| handle));
            drop(turn);
            let error = match result {
                Ok(handle) => {
                    (made.status, made.handle) = (SandboxState::Ready, handle);
                    match this.store.put_sandbox(made.clone()).await {
                        Ok(()) => {
                            info!(id = %made.id, profile = %made.profile, host = %made.host, "provisioned");
                            return Ok(made);
                        }
                        Err(error) => store_error(error),
                    }
                }
                Err(error) => error,
            };
            warn!(id = %made.id, profile = %made.profile, host = %made.host, %error, "could not be provisioned");
            let removed = this.tear_down(&made).await;
            if let Err(error) = &removed {
                warn!(id = %made.id, %error, "and what is left of it could not be removed");
            }
            let written = if removed.is_ok() && !keep_failed {
                this.store.remove_sandbox(made.id).await
            } else {
                (made.status, made.error) = (SandboxState::Failed, Some(error.message.clone()));
                this.store.put_sandbox(made).await
            };
            if let Err(error) = written {
                warn!(%error, "and that could not be written down");
            }
            Err(error)
        });
        Ok(Begun { row, done })
    }

    /// Removes a sandbox. With `force` its row goes even if its host can't be asked any longer.
    pub(crate) async fn delete(self: &Arc<Self>, id: SandboxId, owner: Option<&str>, force: bool) -> Result<(), ExtensionError> {
        let held = self.busy.alone(Key::Sandbox(id)).await?;
        let row = self.sandbox(id, owner).await?;
        let this = Arc::clone(self);
        let done = self.tasks.spawn(async move {
            let _held = held;
            let turn = this.turns.acquire().await;
            match this.tear_down(&row).await {
                Ok(()) => {}
                Err(error) if force => warn!(%id, %error, "its row is removed all the same, as was asked for"),
                Err(error) => return Err(error),
            }
            drop(turn);
            this.store.remove_sandbox(id).await.map_err(store_error)
        });
        done.await.unwrap_or_else(|_| Err(ExtensionError::failed("Removing it ended unexpectedly. Try again.")))
    }

    async fn tear_down(&self, row: &SandboxRow) -> Result<(), ExtensionError> {
        let (extension, sandbox) = self.known(row)?;
        extension.teardown(&sandbox).await
    }

    /// A row's extension, and what it is to be told.
    fn known(&self, row: &SandboxRow) -> Result<(Arc<dyn SandboxExtension>, Sandbox), ExtensionError> {
        let profile = self.profile(&row.profile)?.clone();
        let host = self.host(Some(&row.host), &profile)?.clone();
        let sandbox =
            Sandbox { id: row.id, profile, inputs: row.inputs.clone(), host, metadata: row.metadata.clone(), handle: row.handle.clone() };
        Ok((self.extension(&row.extension)?, sandbox))
    }

    fn profile(&self, name: &ProfileName) -> Result<&Profile, ExtensionError> {
        let known = || self.config.profiles.iter().map(|profile| profile.name.as_str()).collect::<Vec<_>>().join(", ");
        let unknown = || ExtensionError::new(Kind::Invalid, "unknown_profile", format!("There is no {name} here. There are {}.", known()));
        self.config.profiles.get(name).ok_or_else(unknown)
    }

    fn host(&self, name: Option<&HostName>, profile: &Profile) -> Result<&Host, ExtensionError> {
        let Some(name) = name else {
            let message = format!("host: {} names none, so say on which one. {}", profile.name, self.known_hosts());
            return Err(ExtensionError::invalid(message));
        };
        let unknown =
            || ExtensionError::new(Kind::Invalid, "unknown_host", format!("There is no host {name} here. {}", self.known_hosts()));
        self.config.hosts.get(name).ok_or_else(unknown)
    }

    fn known_hosts(&self) -> String {
        let names: Vec<&str> = self.config.hosts.iter().map(|host| host.name.as_str()).collect();
        format!("The hosts file names {}.", names.join(", "))
    }

    fn extension(&self, name: &ExtensionName) -> Result<Arc<dyn SandboxExtension>, ExtensionError> {
        let unknown = || ExtensionError::new(Kind::Invalid, "unknown_extension", format!("There is no extension {name} here."));
        self.extensions.get(name).cloned().ok_or_else(unknown)
    }

    /// Room for so many more sandboxes, if a key may have them.
    async fn admit(&self, owner: Option<&str>, more: usize) -> Result<tokio::sync::OwnedSemaphorePermit, ExtensionError> {
        if let (Some(most), Some(owner)) = (self.key_most, owner) {
            let has = self.sandboxes(Some(owner)).await?.len();
            if has + more > most {
                let message = format!("This API key has {has} such sandboxes, and may have {most}. Delete some first.");
                return Err(ExtensionError::new(Kind::TooMany, "rate_limited", message));
            }
        }
        self.place()
    }

    fn place(&self) -> Result<tokio::sync::OwnedSemaphorePermit, ExtensionError> {
        let full = |_| ExtensionError::new(Kind::TooMany, "rate_limited", "Too many requests are under way. Try again later.");
        Arc::clone(&self.under_way).try_acquire_owned().map_err(full)
    }
}

/// The names of hosts, for those who ask before there is a profile.
pub(crate) fn is_native(profile: &ProfileName) -> bool {
    profile.as_str() == "profile.gvisor"
}

/// Where no key is needed there is one owner of everything.
pub(crate) fn may_see(owner: Option<&str>, who: Option<&str>) -> bool {
    who.is_none() || owner == who
}

fn not_found(what: &str) -> ExtensionError {
    ExtensionError::new(Kind::NotFound, "not_found", format!("There is no such {what}."))
}

fn store_error(error: StoreError) -> ExtensionError {
    match error {
        StoreError::Full { .. } => ExtensionError::new(Kind::TooMany, "too_many", error.to_string()),
        error => ExtensionError::new(Kind::Unavailable, "store_failed", error.to_string()),
    }
}

/// Snapshots stay where they were made.
fn same_host(wanted: Option<&HostName>, has: &HostName, id: SnapshotId) -> Result<(), ExtensionError> {
    match wanted {
        Some(wanted) if wanted != has => {
            let message = format!(
                "Snapshot {id} is on host {has} and can't be restored on {wanted}: artifacts do not move between hosts. Restore it on {has}."
            );
            Err(ExtensionError::new(Kind::Invalid, "other_host", message))
        }
        _ => Ok(()),
    }
}

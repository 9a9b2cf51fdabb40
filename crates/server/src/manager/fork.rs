//! New sandboxes from something that was saved: the same memory, processes and files under new names. All that were asked for, or none.
//!
//! ```text
//!   found ── places for all ── data here ─┬─ each restored, and known to the volume ─┬─ all of them saved as they are ── all of them run
//!                 └─ containers, meanwhile ┘                  └── any failure: nothing is left of any of them ──┘
//! ```
//!
//! Until all of them run, each is a *standby* to the next server: should this one die, nobody has heard of them, and they are removed.

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt as _, future::join_all, stream};
use sandboxer_protocol::{SandboxId, client::ErrorCode};
use sandboxer_runtime::{HostResources, Instance, Launch};
use sandboxer_store::{CheckpointName, FileSet, ManifestAt, SandboxStatus, lease::Held};
use tokio::time::{Instant, timeout};
use tracing::{Instrument as _, info, info_span, warn};

use super::{
    CERTAIN_WITHIN, CreateError, Created, Manager,
    converse::{Opened, Running, converse},
    handle::Wire,
    launch::{STOPPING, prepare},
    secrets::{hash, new_token},
};
use crate::{
    checkpoints::{Checkpoints, Found, Origin},
    sandbox::record::{RECORD_VERSION, Record},
    workspaces::may_see,
};

/// Restores at once; more would only wait for each other.
const AT_ONCE: usize = 8;
/// Copies are apart by about this much, so that each sees a generation of its own.
const GENERATIONS: u64 = 1 << 40;
const UNHEARD_OF: &str = "It was being copied from something saved, and nobody had heard of it.";

/// A copy before there is anything of it.
struct Planned {
    token: String,
    record: Record,
    launch: Launch,
    /// One that waits for its content.
    container: Option<Instance>,
}

/// A copy that runs and that nobody knows.
struct Begun {
    token: String,
    record: Record,
    launch: Launch,
    running: Running,
    held: Option<(Arc<Checkpoints>, Held)>,
    /// What it stands on.
    saved: Option<CheckpointName>,
}

impl Manager {
    /// Makes sandboxes from a snapshot or a checkpoint that `who` may see. Runs to its end even if nobody waits for it any longer.
    pub(crate) async fn fork(self: &Arc<Self>, from: ManifestAt, count: usize, who: Option<String>) -> Result<Vec<Created>, CreateError> {
        let manager = Arc::clone(self);
        let span = info_span!(parent: None, "fork", %from, count);
        let forking = self.drivers.spawn(async move { manager.fork_all(from, count, who.as_deref()).await }.instrument(span));
        forking.await.unwrap_or_else(|_| Err(CreateError::new(ErrorCode::Internal, "Making the sandboxes failed. Try again.")))
    }

    async fn fork_all(self: &Arc<Self>, from: ManifestAt, count: usize, who: Option<&str>) -> Result<Vec<Created>, CreateError> {
        if self.stopping().is_some() {
            return Err(CreateError::new(ErrorCode::ServerStopping, "The server is stopping. Make the sandboxes at another one."));
        }
        let Some(checkpoints) = self.checkpoints.clone() else {
            let message = "This server keeps no snapshots: it was started without a checkpoint path.";
            return Err(CreateError::new(ErrorCode::SnapshotsNotConfigured, message));
        };
        let begun = Instant::now();
        let found = checkpoints.find_for(from, &self.images, |owner| may_see(owner, who)).await.map_err(failed)?;
        let found = found.ok_or_else(|| CreateError::new(ErrorCode::UnknownSnapshot, "There is no such snapshot."))?;
        let resources = found.state.config.limits.again(&self.settings.max_limits, &self.host)?;
        let owner = found.state.owner.as_deref();
        self.tenants.may_make(owner, count)?;
        let places = self.leaving.room_of(owner, self.stopped(), || self.tenants.admit_many(owner, count)).await?;
        let slots = if count <= self.settings.max_sandboxes {
            self.leaving.room(self.stopped(), || self.slots(count)).await?
        } else {
            self.slots(count)?
        };
        let _busy = self.pool.busy();
        let planned = (0..count).map(|_| self.plan(&found, resources)).collect();
        self.give_way();
        let (files, planned) = self.bring_for(&checkpoints, &found, planned).await?;

        let begin = |planned| async {
            let id = Planned::id(&planned);
            self.begin(planned, &files).instrument(info_span!(parent: None, "sandbox", %id)).await
        };
        let copies = all_or_why(stream::iter(planned.into_iter().map(begin)).buffer_unordered(AT_ONCE).collect().await);
        let copies = match copies {
            Ok(copies) => self.save_all(copies, &found, &files).await,
            Err(undone) => Err(undone),
        };
        let copies = match copies {
            Ok(copies) => copies,
            Err((copies, why)) => {
                warn!(why, "no sandbox could be made of it");
                join_all(copies.into_iter().map(|copy| self.undo(copy))).await;
                return Err(failed(why));
            }
        };
        info!(ms = begun.elapsed().as_millis(), "forked");
        self.metrics.forks.inc_by(copies.len() as u64);
        let origin = Origin::of(&found.manifest);
        let made = copies.into_iter().zip(slots).zip(places);
        Ok(made.map(|((copy, slot), place)| self.release(copy, (Some(slot), place), origin.clone())).collect())
    }

    /// Room for so many more.
    fn slots(&self, count: usize) -> Result<Vec<tokio::sync::OwnedSemaphorePermit>, CreateError> {
        let all = u32::try_from(count).ok().and_then(|count| Arc::clone(&self.slots).try_acquire_many_owned(count).ok());
        let mut all = all.ok_or_else(|| self.no_capacity())?;
        Ok((0..count).filter_map(|_| all.split(1)).collect())
    }

    /// One that finds a container that waits has its id.
    fn plan(self: &Arc<Self>, Found { state, image, .. }: &Found, resources: HostResources) -> Planned {
        let token = new_token();
        let waited = self.container_from_pool(image);
        let record = Record {
            version: RECORD_VERSION,
            id: waited.as_ref().map_or_else(SandboxId::random, |container| container.id),
            created_at: jiff::Timestamp::now(),
            token_sha256: hash(&token),
            marker: state.marker,
            image: image.clone(),
            owner: state.owner.clone(),
            idle_since: None,
            config: state.config.clone(),
            epoch: None,
            generation: state.generation.saturating_add(1 + rand::random_range(0..GENERATIONS)),
            container: None,
            standby: true,
        };
        let launch = self.launch(&record, resources);
        Planned { token, record, launch, container: waited.map(|container| container.instance) }
    }

    /// The data of all of them, which is one set of files. While it is on its way, containers are made that wait for it.
    async fn bring_for(
        &self,
        checkpoints: &Checkpoints,
        found: &Found,
        mut planned: Vec<Planned>,
    ) -> Result<(FileSet, Vec<Planned>), CreateError> {
        let files = if checkpoints.has(found).await {
            checkpoints.bring(found).await
        } else {
            let make = |mut planned: Planned| async {
                if planned.container.is_none() {
                    planned.container = self.make_container(&planned.launch, &planned.record).await;
                }
                planned
            };
            let making = stream::iter(planned.into_iter().map(make)).buffer_unordered(AT_ONCE).collect();
            let (files, made) = tokio::join!(checkpoints.bring(found), making);
            planned = made;
            files
        };
        match files {
            Ok(files) => Ok((files, planned)),
            Err(why) => {
                join_all(planned.iter().filter(|planned| planned.container.is_some()).map(|planned| self.discard(&planned.launch))).await;
                Err(failed(why))
            }
        }
    }

    /// Starts one of them, and makes the volume know it if it is to be kept there. A restore that gVisor fails is tried once more.
    async fn begin(&self, planned: Planned, files: &FileSet) -> Result<Begun, String> {
        let Planned { token, record, launch, mut container } = planned;
        let start = async {
            let first = self.start_from(&launch, &record, files, container.take()).await;
            let Err(why) = first else { return first };
            warn!(why, "could not be restored");
            if self.stopping().is_some() {
                return Err(why);
            }
            self.discard(&launch).await;
            self.start_from(&launch, &record, files, None).await
        };
        let mut known = record.clone();
        let (started, registered) = tokio::join!(start, self.register(&mut known));
        let (running, held) = match (started, registered) {
            (Ok(Opened { running, .. }), Ok(held)) => (running, held),
            (started, registered) => {
                self.discard(&launch).await;
                let why = started.err().or_else(|| registered.as_ref().err().map(|error| error.message.clone()));
                if let Ok(Some((_, held))) = registered {
                    bury(&held).await;
                }
                return Err(why.unwrap_or_default());
            }
        };
        let record = known;
        // From here on the next server knows what to bury.
        if let Err(error) = record.write(&launch.dir) {
            self.undo(Begun { token, record, launch, running, held, saved: None }).await;
            return Err(format!("its record could not be written: {error}"));
        }
        Ok(Begun { token, record, launch, running, held, saved: None })
    }

    async fn start_from(&self, launch: &Launch, record: &Record, files: &FileSet, container: Option<Instance>) -> Result<Opened, String> {
        prepare(launch, record).map_err(|error| format!("{}: {error}", launch.dir.display()))?;
        let restored = match container {
            Some(instance) => self.runtime.restore_into(launch, files.dir()).await.map(|()| instance),
            None => self.runtime.restore(launch, files.dir()).await,
        };
        let instance = restored.map_err(|error| error.to_string())?;
        let opened = converse(instance, &record.marker, self.settings.start_timeout).await?;
        // All of them or none: there is no going back on one that was handed out.
        self.all_there(launch).await?;
        Ok(opened)
    }

    /// Waits until all memory of a sandbox is there that was restored. A server that stops does not: nothing was given up for it yet.
    pub(super) async fn all_there(&self, launch: &Launch) -> Result<(), String> {
        tokio::select! {
            biased;
            whole = self.runtime.whole(launch.id, &launch.dir) => whole.map_err(|error| error.to_string()),
            () = self.stopped() => Err(STOPPING.to_owned()),
        }
    }

    /// Each that is kept on the volume is safe there from its first moment, for the price of a manifest; then it is one that the next
    /// server takes up.
    async fn save_all(&self, copies: Vec<Begun>, found: &Found, files: &FileSet) -> Result<Vec<Begun>, (Vec<Begun>, String)> {
        let save = |mut copy: Begun| async {
            let saved = async {
                if let Some((checkpoints, held)) = &copy.held {
                    let name = checkpoints.again(&found.manifest, files, &copy.record, None).await.map_err(|error| error.whole())?;
                    held.lease.publish(name).await.map_err(|error| error.to_string())?;
                    copy.saved = Some(name);
                }
                copy.record.standby = false;
                copy.record.write(&copy.launch.dir).map_err(|error| format!("its record could not be written: {error}"))
            };
            let saved = saved.await;
            (copy, saved)
        };
        let done = join_all(copies.into_iter().map(save)).await;
        let (copies, saved): (Vec<_>, Vec<Result<(), String>>) = done.into_iter().unzip();
        match saved.into_iter().find_map(Result::err) {
            None => Ok(copies),
            Some(why) => Err((copies, why)),
        }
    }

    /// Nothing is left of it.
    async fn undo(&self, copy: Begun) {
        let Begun { launch, running, held, .. } = copy;
        drop(running);
        self.discard(&launch).await;
        if let Some((_, held)) = held {
            bury(&held).await;
        }
    }

    /// A copy that an earlier server did not finish.
    pub(super) async fn bury_copy(&self, record: &Record) {
        if let (Some(checkpoints), Some(epoch)) = (&self.checkpoints, record.epoch) {
            bury(&checkpoints.leases.resume(record.id, epoch)).await;
        }
    }

    /// Gives it its driver.
    fn release(
        self: &Arc<Self>,
        copy: Begun,
        place: (Option<tokio::sync::OwnedSemaphorePermit>, crate::tenants::Place),
        origin: Option<Origin>,
    ) -> Created {
        let Begun { token, record, running, held, saved, .. } = copy;
        if let (Some((checkpoints, _)), Some(_)) = (&held, saved) {
            let (checkpoints, record) = (Arc::clone(checkpoints), record.clone());
            self.drivers.spawn(async move {
                let described = async {
                    checkpoints.note_origin(record.id, origin).await?;
                    checkpoints.describe(&record, SandboxStatus::Running, saved).await
                };
                if let Err(error) = described.await {
                    warn!(error = error.whole(), id = %record.id, "the volume could not be told that the sandbox runs");
                }
            });
        }
        let wire = Wire::default();
        let keeping = self.keep(&record, &wire, held);
        if let (Some(host), Some(_)) = (&keeping.host, saved) {
            host.stands_on(saved);
        }
        let handle = self.drive(record, place, running, Duration::ZERO, wire, keeping);
        Created { handle, token }
    }
}

impl Planned {
    fn id(&self) -> SandboxId {
        self.record.id
    }
}

/// All of them, or those there are and what was wrong with the others.
fn all_or_why(begun: Vec<Result<Begun, String>>) -> Result<Vec<Begun>, (Vec<Begun>, String)> {
    let (mut copies, mut failure) = (Vec::with_capacity(begun.len()), None);
    for one in begun {
        match one {
            Ok(copy) => copies.push(copy),
            Err(why) => failure = Some(why),
        }
    }
    match failure {
        None => Ok(copies),
        Some(why) => Err((copies, why)),
    }
}

/// One that can't be written runs out by itself.
async fn bury(held: &Held) {
    if !matches!(timeout(CERTAIN_WITHIN, held.lease.bury(UNHEARD_OF.to_owned())).await, Ok(Ok(()))) {
        warn!("the volume could not be told that a copy is gone");
    }
}

fn failed(why: String) -> CreateError {
    CreateError::new(ErrorCode::RestoreFailed, format!("No sandbox could be made of it, and nothing that is saved was changed: {why}"))
}

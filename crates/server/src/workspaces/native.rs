//! gVisor's own sandboxes, as the resource API sees them: those that are in this server's memory, and those that rest on the volume if they
//! are asked for by their id.

mod executions;
mod filesystems;
mod transfers;
mod travel;

use std::{collections::HashSet, sync::Arc, time::Duration};

use bytes::Bytes;
use sandboxer_protocol::{
    SandboxId,
    client::{CreateConfig, ErrorCode, Request, ServerEvent, Status},
};
use sandboxer_store::{KeptName, SnapshotId};
use serde_json::{Map, Value};
use tokio::{
    sync::{mpsc, watch},
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tracing::warn;

pub(crate) use self::{
    executions::{ExecutionWord, Watched},
    transfers::{Broken, Going},
    travel::NativeError,
};
use crate::{
    checkpoints::{Rest, Resters},
    manager::{ArriveError, Buried, CreateError, Handle, InstanceView, Manager},
    sandbox::{
        client::{Acknowledgement, ClientPort, FromClient, INCOMING_REQUESTS, Incoming, OUTGOING_MESSAGES, Outgoing},
        driver::Attachment,
        execution::ExecutionView,
        record::SandboxConfig,
    },
    settings::Settings,
    shares::Budget,
};

/// How long the end of a sandbox may take.
const END_WITHIN: Duration = Duration::from_secs(60);

/// How long a sandbox may take to tell which program it runs.
const TELLS_WITHIN: Duration = Duration::from_secs(1);
/// How long the volume may take to say what it has.
const LOOK_WITHIN: Duration = Duration::from_secs(30);

/// What is known of one.
#[derive(Debug, Clone)]
pub(crate) struct NativeSandbox {
    pub(crate) id: SandboxId,
    pub(crate) created_at: jiff::Timestamp,
    pub(crate) metadata: std::collections::BTreeMap<String, String>,
    /// It runs here, or elsewhere; else it rests on the volume.
    pub(crate) runs: bool,
    pub(crate) generation: u64,
    /// What it was made from.
    pub(crate) snapshot_id: Option<SnapshotId>,
    /// Its configuration, where it is in memory here or was read from the volume.
    pub(crate) config: Option<Arc<SandboxConfig>>,
    /// The digest of its image.
    pub(crate) image: Option<String>,
    /// The execution that runs or ran last, where its driver was asked.
    pub(crate) execution: Option<ExecutionView>,
}

impl From<&Handle> for NativeSandbox {
    fn from(handle: &Handle) -> Self {
        Self {
            id: handle.id,
            created_at: handle.created_at,
            metadata: handle.config.metadata.clone(),
            runs: true,
            generation: handle.generation(),
            snapshot_id: None,
            config: Some(Arc::clone(&handle.config)),
            image: handle.image.file_stem().map(|digest| digest.to_string_lossy().into_owned()),
            execution: None,
        }
    }
}

impl From<Rest> for NativeSandbox {
    fn from(rest: Rest) -> Self {
        Self {
            id: rest.id,
            created_at: rest.noted.created_at,
            metadata: rest.noted.metadata.clone(),
            runs: rest.held,
            generation: rest.noted.generation,
            snapshot_id: None,
            config: None,
            image: None,
            execution: None,
        }
    }
}

/// Why one was not deleted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NotDeleted {
    NotFound,
    InUse,
    /// It is on its way to another instance.
    HandedOver,
    NotNow(String),
}

impl From<ArriveError> for NotDeleted {
    fn from(error: ArriveError) -> Self {
        match error {
            ArriveError::NotFound(_) => Self::NotFound,
            ArriveError::InUse => Self::InUse,
            ArriveError::HandoffInProgress => Self::HandedOver,
            ArriveError::OwnerSilent => Self::NotNow("The instance that has the sandbox does not answer. Try again later.".to_owned()),
            ArriveError::NotYet => {
                Self::NotNow("The server was restarted, and does not reach the sandbox yet. Try again in a moment.".to_owned())
            }
            ArriveError::Later(_, why) | ArriveError::Failed(why) => Self::NotNow(why),
        }
    }
}

#[derive(Clone)]
pub(crate) struct Native {
    manager: Arc<Manager>,
}

impl Native {
    pub(crate) fn new(manager: Arc<Manager>) -> Self {
        Self { manager }
    }

    /// Turns of requests that read much of a volume.
    pub(crate) fn volume_turns(&self) -> &Budget {
        &self.manager.volume_turns
    }

    /// For requests that are held in memory.
    pub(crate) fn message_budget(&self) -> &Budget {
        &self.manager.message_budget
    }

    pub(crate) fn settings(&self) -> &Settings {
        self.manager.settings()
    }

    /// Makes one; returns the only copy of its token.
    pub(crate) async fn create(&self, config: CreateConfig, owner: Option<String>) -> Result<(NativeSandbox, String), CreateError> {
        let created = self.manager.create(config, owner).await?;
        Ok((NativeSandbox::from(&created.handle), created.token))
    }

    pub(crate) async fn get(&self, id: SandboxId, owner: Option<&str>) -> Option<NativeSandbox> {
        if let Some(handle) = self.manager.find(id).await {
            if !super::may_see(handle.owner.as_deref(), owner) {
                return None;
            }
            // A driver that is saved or restored right now has more urgent things to do.
            let execution = timeout(TELLS_WITHIN, handle.execution()).await.ok().flatten();
            return Some(NativeSandbox { execution, ..NativeSandbox::from(&handle) });
        }
        let there = match self.manager.on_volume(id, owner).await {
            Ok(there) => there?,
            Err(why) => {
                warn!(why, %id, "what the volume has of a sandbox can't be read");
                return None;
            }
        };
        let state = &there.about.state;
        Some(NativeSandbox {
            id,
            created_at: state.created_at,
            metadata: state.config.metadata.clone(),
            runs: there.held,
            generation: state.generation,
            snapshot_id: None,
            config: Some(Arc::new(state.config.clone())),
            image: None,
            execution: None,
        })
    }

    /// One that is in memory, for somebody who may know of it.
    async fn visible(&self, id: SandboxId, owner: Option<&str>) -> Option<Handle> {
        self.manager.find(id).await.filter(|handle| super::may_see(handle.owner.as_deref(), owner))
    }

    /// What this instance has, for those of one API key.
    pub(crate) fn view(&self, owner: Option<&str>) -> InstanceView {
        self.manager.view(owner)
    }

    pub(crate) fn list(&self, owner: Option<&str>) -> Vec<NativeSandbox> {
        let mut all = self.manager.all();
        all.retain(|handle| super::may_see(handle.owner.as_deref(), owner));
        all.iter().map(NativeSandbox::from).collect()
    }

    /// Those that are on the volume and not among those that are `here`, behind `after`, how far that goes, and which are
    /// damaged. At least `enough` of them, if there are so many.
    pub(crate) async fn resting(
        &self,
        owner: Option<&str>,
        after: Option<KeptName>,
        enough: usize,
        here: &HashSet<SandboxId>,
    ) -> Result<(Vec<NativeSandbox>, Option<KeptName>, Vec<SandboxId>), NativeError> {
        let Some(checkpoints) = &self.manager.checkpoints else { return Ok((Vec::new(), None, Vec::new())) };
        let looking = checkpoints.resters(owner, after, enough, |id| here.contains(&id));
        let unavailable = |why: String| {
            let message = format!("The volume can't be asked which sandboxes are saved: {why}. Try again later, or leave out saved.");
            NativeError::Because(ErrorCode::VolumeUnavailable, message)
        };
        let Resters { found, until, damaged } = match timeout(LOOK_WITHIN, looking).await {
            Ok(looked) => looked.map_err(unavailable)?,
            Err(_) => return Err(unavailable("it takes too long".to_owned())),
        };
        Ok((found.into_iter().map(NativeSandbox::from).collect(), until, damaged))
    }

    /// Ends one that nobody is attached to, wherever it is: as a client of it would in memory, and else on the volume. Nobody can have it afterwards.
    pub(crate) async fn delete(&self, id: SandboxId, owner: Option<&str>) -> Result<(), NotDeleted> {
        let give_up = CancellationToken::new();
        let _no_longer = give_up.clone().drop_guard();
        let late = |_| Err(NotDeleted::NotNow("The sandbox does not end. Try again later.".to_owned()));
        timeout(END_WITHIN, self.end(id, owner, give_up)).await.unwrap_or_else(late)
    }

    async fn end(&self, id: SandboxId, owner: Option<&str>, give_up: CancellationToken) -> Result<(), NotDeleted> {
        let mut was_here = false;
        loop {
            while let Some(handle) = self.visible(id, owner).await {
                was_here = true;
                if kill(&handle).await? {
                    return Ok(());
                }
            }
            match self.manager.bury(id, owner.map(str::to_owned), give_up.clone()).await {
                Ok(Buried::Gone) => return Ok(()),
                Ok(Buried::IsHere) => {
                    if self.visible(id, owner).await.is_none() {
                        return Err(NotDeleted::NotFound);
                    }
                }
                Err(ArriveError::NotFound(_)) if was_here && self.manager.has_ended(id) => return Ok(()),
                Err(ArriveError::NotFound(_)) if was_here => {
                    return Err(NotDeleted::NotNow("The server is restarting, and the sandbox goes on. Try again in a moment.".to_owned()));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Ends one in memory, as a client of it would. False: it went its own way before that was heard.
async fn kill(handle: &Handle) -> Result<bool, NotDeleted> {
    let (to_driver, incoming) = mpsc::channel(INCOMING_REQUESTS);
    let (to_client, mut outgoing) = mpsc::channel(OUTGOING_MESSAGES);
    let (_pong, pongs) = watch::channel(Bytes::new());
    let closing = CancellationToken::new();
    let acknowledgement = Acknowledgement::Explicit;
    let port = ClientPort { incoming, pongs, outgoing: to_client, acknowledgement, _closing: closing.drop_guard() };
    match handle.attach(port, vec![handle.running()]).await {
        None => {
            // It is being saved, handed over, or left to the next process.
            handle.gone().await;
            return Ok(false);
        }
        Some(Attachment::InUse) => return Err(NotDeleted::InUse),
        Some(Attachment::Attached) => {}
    }
    let kill = Incoming { message: FromClient::Request(Request::KillSandbox), _room: None };
    // A driver that has ended says so by what comes.
    let _ = to_driver.send(kill).await;
    let mut killed = false;
    while let Some(message) = outgoing.recv().await {
        killed |= matches!(&message, Outgoing::Event(ServerEvent::StatusUpdate(update)) if update.status == Status::Killed);
    }
    if killed {
        handle.gone().await;
    }
    Ok(killed)
}

/// The configuration of a sandbox from the fields of a request, and from the inputs of `profile.gvisor`.
pub(crate) fn configuration(mut fields: Map<String, Value>, inputs: Map<String, Value>) -> Result<CreateConfig, String> {
    for (name, value) in inputs {
        match name.as_str() {
            "memory_mb" | "disk_mb" | "cpus" | "pids" => {
                let limits = fields.entry("limits").or_insert_with(|| Value::Object(Map::new()));
                limits.as_object_mut().ok_or("limits: an object is needed")?.insert(name, value);
            }
            _ => drop(fields.insert(name, value)),
        }
    }
    match Request::parse(&Value::Object(fields).to_string()) {
        Ok(Request::Configure(config)) => Ok(*config),
        Ok(_) => Err("language, code, action and event are no part of a configuration.".to_owned()),
        Err(bad) => Err(bad.message),
    }
}

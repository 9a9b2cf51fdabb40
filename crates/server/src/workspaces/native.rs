//! gVisor's own sandboxes, as the resource API sees them: those that are in this server's memory, and those that rest on the volume if they
//! are asked for by their id.

mod executions;
mod filesystems;
mod transfers;
mod travel;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use sandboxer_protocol::{
    SandboxId,
    client::{CreateConfig, Request},
};
use sandboxer_store::SnapshotId;
use serde_json::{Map, Value};
use tokio::{
    sync::{Semaphore, mpsc, watch},
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
    manager::{CreateError, Handle, InstanceView, Manager},
    sandbox::{
        client::{ClientPort, FromClient, INCOMING_REQUESTS, Incoming, OUTGOING_MESSAGES},
        driver::Attachment,
    },
    settings::Settings,
};

/// What is done with single files at once in all sandboxes: each may hold some MiB here.
const MAX_TRANSFERS: usize = 128;
/// How long the end of a sandbox may take.
const END_WITHIN: Duration = Duration::from_secs(60);

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
}

impl From<&Handle> for NativeSandbox {
    fn from(handle: &Handle) -> Self {
        Self {
            id: handle.id,
            created_at: handle.created_at,
            metadata: (*handle.metadata).clone(),
            runs: true,
            generation: handle.generation(),
            snapshot_id: None,
        }
    }
}

/// Why one was not deleted.
pub(crate) enum NotDeleted {
    NotFound,
    InUse,
    TooLong,
}

#[derive(Clone)]
pub(crate) struct Native {
    manager: Arc<Manager>,
    /// Turns for single files.
    transfers: Arc<Semaphore>,
}

impl Native {
    pub(crate) fn new(manager: Arc<Manager>) -> Self {
        Self { manager, transfers: Arc::new(Semaphore::new(MAX_TRANSFERS)) }
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
            return super::may_see(handle.owner.as_deref(), owner).then(|| NativeSandbox::from(&handle));
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

    /// Ends one that nobody is attached to, as a client of it would.
    pub(crate) async fn delete(&self, id: SandboxId, owner: Option<&str>) -> Result<(), NotDeleted> {
        let handle = self.visible(id, owner).await.ok_or(NotDeleted::NotFound)?;
        let (to_driver, incoming) = mpsc::channel(INCOMING_REQUESTS);
        let (to_client, mut outgoing) = mpsc::channel(OUTGOING_MESSAGES);
        let (_pong, pongs) = watch::channel(Bytes::new());
        let closing = CancellationToken::new();
        let port = ClientPort { incoming, pongs, outgoing: to_client, _closing: closing.drop_guard() };
        match handle.attach(port, vec![handle.running()]).await {
            None => return Ok(()),
            Some(Attachment::InUse) => return Err(NotDeleted::InUse),
            Some(Attachment::Attached) => {}
        }
        let kill = Incoming { message: FromClient::Request(Request::KillSandbox), _room: None };
        let ending = async {
            // One that ends by itself is what is wanted.
            let _ = to_driver.send(kill).await;
            while outgoing.recv().await.is_some() {}
            handle.gone().await;
        };
        timeout(END_WITHIN, ending).await.map_err(|_| NotDeleted::TooLong)
    }
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

//! gVisor's own sandboxes, as the resource API sees them: those that are in this server's memory.

use std::{fs, sync::Arc, time::Duration};

use bytes::Bytes;
use sandboxer_protocol::{
    SandboxId,
    client::{CreateConfig, Request},
};
use serde_json::{Map, Value};
use tokio::{
    sync::{mpsc, watch},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use crate::{
    manager::{CreateError, Manager},
    sandbox::{
        client::{ClientPort, FromClient, INCOMING_REQUESTS, Incoming, OUTGOING_MESSAGES},
        driver::Attachment,
        record::Record,
    },
};

/// How long the end of a sandbox may take.
const END_WITHIN: Duration = Duration::from_secs(60);

/// What is known of one.
#[derive(Debug, Clone)]
pub(crate) struct NativeSandbox {
    pub(crate) id: SandboxId,
    pub(crate) created_at: jiff::Timestamp,
    pub(crate) metadata: std::collections::BTreeMap<String, String>,
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
}

impl Native {
    pub(crate) fn new(manager: Arc<Manager>) -> Self {
        Self { manager }
    }

    /// Makes one; returns the only copy of its token.
    pub(crate) async fn create(&self, config: CreateConfig, owner: Option<String>) -> Result<(NativeSandbox, String), CreateError> {
        let metadata = config.metadata.clone().unwrap_or_default();
        let created = self.manager.create(config, owner).await?;
        let id = created.handle.id;
        let created_at = self.record(id).map_or_else(jiff::Timestamp::now, |record| record.created_at);
        Ok((NativeSandbox { id, created_at, metadata }, created.token))
    }

    pub(crate) async fn get(&self, id: SandboxId, owner: Option<&str>) -> Option<NativeSandbox> {
        let record = self.record(id).filter(|record| super::may_see(record.owner.as_deref(), owner))?;
        self.manager.find(id).await?;
        Some(NativeSandbox { id, created_at: record.created_at, metadata: record.config.metadata })
    }

    pub(crate) async fn list(&self, owner: Option<&str>) -> Vec<NativeSandbox> {
        let Ok(entries) = fs::read_dir(self.manager.settings().data_dir.join("sandboxes")) else { return Vec::new() };
        let ids: Vec<SandboxId> = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        let mut found = Vec::new();
        for id in ids {
            found.extend(self.get(id, owner).await);
        }
        found
    }

    /// Ends one that nobody is attached to, as a client of it would.
    pub(crate) async fn delete(&self, id: SandboxId, owner: Option<&str>) -> Result<(), NotDeleted> {
        self.get(id, owner).await.ok_or(NotDeleted::NotFound)?;
        let handle = self.manager.find(id).await.ok_or(NotDeleted::NotFound)?;
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

    fn record(&self, id: SandboxId) -> Option<Record> {
        let dir = self.manager.settings().data_dir.join("sandboxes").join(id.to_string());
        Record::read(&dir, id).ok()
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

//! Going back without running: a sandbox that rests on the volume is given a new checkpoint with old content, from which the next attach
//! goes on. Nothing newer is deleted, and nothing is changed unless what it goes back to is whole.

use std::{path::PathBuf, sync::Arc, time::Duration};

use sandboxer_protocol::SandboxId;
use sandboxer_store::{
    CheckpointName, FileSet, ManifestAt, SandboxStatus,
    lease::{Held, Release, Sought},
};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, info, info_span, warn};

use super::{
    ArriveError, CERTAIN_WITHIN, Manager,
    arrive::{not_found, not_held},
};
use crate::{
    checkpoints::{About, Checkpoints, Found},
    obituaries::Obituary,
    sandbox::record::{RECORD_VERSION, Record, SandboxConfig},
    workspaces::may_see,
};

/// How long a new checkpoint may take to count, while who wants it waits.
const PUBLISH_WITHIN: Duration = Duration::from_secs(120);

/// A sandbox that is on the volume.
pub(crate) struct OnVolume {
    pub(crate) latest: Option<CheckpointName>,
    /// An instance has it now.
    pub(crate) held: bool,
    pub(crate) about: Arc<About>,
    token_sha256: String,
}

impl Manager {
    /// What the volume knows of a sandbox that was saved, for somebody who may know of it.
    pub(crate) async fn on_volume(&self, id: SandboxId, who: Option<&str>) -> Result<Option<OnVolume>, String> {
        let Some(checkpoints) = self.checkpoints.as_ref().filter(|checkpoints| checkpoints.unburied(id).is_none()) else { return Ok(None) };
        let stored = checkpoints.look(id).await.map_err(|error| error.to_string())?;
        let Some(stored) = stored.filter(|stored| stored.record.tombstone.is_none()) else { return Ok(None) };
        let (latest, held) = (stored.record.latest, stored.record.owner.is_some());
        let Some(about) = checkpoints.newest_readable(id, latest).await? else { return Ok(None) };
        let token_sha256 = Checkpoints::token_sha256(&stored).to_owned();
        Ok(may_see(about.state.owner.as_deref(), who).then_some(OnVolume { latest, held, about, token_sha256 }))
    }

    /// Why a sandbox that was kept on the volume ended, for an API key: with keys, for the one that made it.
    pub(crate) async fn tombstone_of_key(&self, id: SandboxId, who: Option<&str>) -> Option<Obituary> {
        let checkpoints = self.checkpoints.as_ref()?;
        let stored = checkpoints.look(id).await.ok()??;
        let tombstone = stored.record.tombstone.clone()?;
        let owner = if self.settings.access.needs_token() {
            // The record does not name the key, and its checkpoints do for as long as they are there.
            let owner = checkpoints.newest_readable(id, stored.record.latest).await.ok()??.state.owner.clone();
            who.filter(|who| owner.as_deref() == Some(*who))?;
            owner
        } else {
            None
        };
        let token_sha256 = Checkpoints::token_sha256(&stored).to_owned();
        Some(Obituary { message: tombstone.reason, token_sha256, owner, reason: None })
    }

    /// Lets a sandbox that is not in memory go on from something else that was saved. Runs to its end even if nobody waits for it.
    pub(crate) async fn go_back(self: &Arc<Self>, id: SandboxId, to: ManifestAt, who: Option<String>) -> Result<(), ArriveError> {
        let manager = Arc::clone(self);
        let going = async move { manager.go_back_to(id, to, who.as_deref()).await };
        let going = self.drivers.spawn(going.instrument(info_span!(parent: None, "sandbox", %id)));
        going.await.unwrap_or_else(|_| Err(ArriveError::Failed("Going back failed. Try again.".to_owned())))
    }

    async fn go_back_to(&self, id: SandboxId, to: ManifestAt, who: Option<&str>) -> Result<(), ArriveError> {
        let Some(checkpoints) = self.checkpoints.clone() else { return Err(not_found()) };
        let turn = self.turn(id);
        let _turn = turn.acquire().await;
        if self.find_certainly(id).await?.is_some() {
            return Err(ArriveError::InUse);
        }
        let there = self.on_volume(id, who).await.map_err(ArriveError::Failed)?.ok_or_else(not_found)?;
        let owner = there.about.state.owner.as_deref();
        let found = checkpoints.find_for(to, &self.images, |of| of == owner).await.map_err(ArriveError::Failed)?;
        let found = found.ok_or_else(|| ArriveError::Failed("There is no such snapshot or checkpoint.".to_owned()))?;
        // What is broken is found out now, and not when somebody attaches.
        let files = checkpoints.bring(&found).await.map_err(ArriveError::Failed)?;
        let held = match checkpoints.leases.seek(id, &CancellationToken::new()).await {
            Sought::Held(held) => held,
            other => return Err(not_held(&other)),
        };
        let went = match publish(&checkpoints, id, &held, &there, (found, files)).await {
            Ok(name) => {
                info!(%name, %to, "went back while it rests");
                self.metrics.rollbacks.inc();
                Ok(())
            }
            Err(NotPublished::AsItWas(why)) => {
                let _ = timeout(CERTAIN_WITHIN, held.lease.release_untouched()).await;
                return Err(ArriveError::Failed(why));
            }
            Err(NotPublished::Unknown) => {
                Err(ArriveError::Failed("The volume does not answer. Whether the sandbox went back shows when it does.".to_owned()))
            }
        };
        // Its next client is told that it was rewound: what it had seen may not be so.
        if !matches!(timeout(CERTAIN_WITHIN, held.lease.release(Release::Anyone)).await, Ok(Ok(()))) {
            warn!("it could not be given up in time: it can be had when that is done, or when its lease runs out");
        }
        went
    }
}

/// Why a new checkpoint does not count.
enum NotPublished {
    AsItWas(String),
    /// It may yet.
    Unknown,
}

/// The new checkpoint counts when this succeeds.
async fn publish(
    checkpoints: &Arc<Checkpoints>,
    id: SandboxId,
    held: &Held,
    there: &OnVolume,
    (found, files): (Found, FileSet),
) -> Result<CheckpointName, NotPublished> {
    let Found { state, manifest, .. } = found;
    // Whoever had it may have saved it once more.
    let latest = held.lease.latest();
    let now = checkpoints.newest_readable(id, latest).await.map_err(NotPublished::AsItWas)?;
    let now = &now.as_ref().unwrap_or(&there.about).state;
    let record = Record {
        version: RECORD_VERSION,
        id,
        created_at: now.created_at,
        token_sha256: there.token_sha256.clone(),
        marker: state.marker,
        image: PathBuf::from(manifest.contract().map(|contract| contract.image.to_string()).unwrap_or_default()),
        owner: now.owner.clone(),
        idle_since: None,
        config: SandboxConfig { limits: state.config.limits, ..now.config.clone() },
        epoch: Some(held.lease.epoch()),
        // Who brings it back adds the epoch, so that no two histories have the same.
        generation: now.generation.max(state.generation),
        container: None,
        standby: false,
    };
    let name = checkpoints.again(&manifest, &files, &record, latest).await.map_err(|error| NotPublished::AsItWas(error.whole()))?;
    let published = timeout(PUBLISH_WITHIN, held.lease.publish(name)).await.map_err(|_| NotPublished::Unknown)?;
    published.map_err(|error| NotPublished::AsItWas(error.to_string()))?;
    if let Err(error) = checkpoints.describe(&record, SandboxStatus::Checkpointed, Some(name)).await {
        warn!(error = error.whole(), "the checkpoint counts, but its copies on the volume are out of date");
    }
    Ok(name)
}

//! Copies of a sandbox that was just unpacked: a sandbox from a filesystem snapshot is a restore.
//!
//! ```text
//!   a snapshot is taken here, or a sandbox from one was unpacked ── in the background: another one, unpacked ── saved ── removed ── a template
//!   the next ones ── a template? ── restored under their own names, into a container that waits if there is one
//!                        └── none, or it can't be restored: unpacked
//! ```
//!
//! What is saved is never anybody's sandbox, and nothing has run in it. A copy is told its name as any new sandbox is, and is nobody's copy to its client.

use std::{sync::Arc, time::Duration};

use sandboxer_protocol::{
    SandboxId,
    agent::{FromAgent, FromAgentFrame, Marker, ToAgent},
};
use sandboxer_runtime::{AfterSave, End, Ended, Launch, NotWhole};
use sandboxer_store::Manifest;
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep, timeout},
};
use tracing::{Instrument as _, info, info_span, warn};

use super::{
    Manager,
    converse::{Opened, Running, converse},
    launch::prepare,
    pool::Container,
    secrets::{hash, new_token},
    template::{Template, unpack},
};
use crate::{
    sandbox::{
        driver::END_EXPLAINED,
        record::{Record, SandboxConfig},
    },
    templates::{Held, Key, Templates, Wanted, Work},
};

/// How long one that was unpacked may take to come to rest.
const REST_WITHIN: Duration = Duration::from_secs(10);
/// How long to wait before it is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(20);

impl Template {
    /// What a copy for this launch depends on; none: there are no copies.
    pub(super) fn key(&self, launch: &Launch) -> Option<Key> {
        self.filesystems.templates.as_ref()?.key(self.found.digest(), launch)
    }
}

impl Manager {
    /// Restores a copy, if there is something to copy. Whatever goes wrong, the sandbox can still be unpacked.
    pub(super) async fn start_copy(
        self: &Arc<Self>,
        template: &Template,
        key: &Key,
        launch: &mut Launch,
        record: &mut Record,
    ) -> Option<Opened> {
        let templates = template.filesystems.templates.clone()?;
        let (looking, wanted) = (templates.clone(), key.clone());
        let held = spawn_blocking(move || looking.find(&wanted)).await.ok()??;
        let begun = Instant::now();
        let (own_record, own_launch) = (record.clone(), launch.clone());
        record.marker = held.marker;
        let waited = self.container_from_pool(&record.image);
        let into_waiting = waited.is_some();
        let mut restored = self.restore_copy(&held, launch, record, waited).await;
        if let (Err(why), true) = (&restored, into_waiting) {
            // The container may be to blame, and not the template.
            warn!(why, "the template can't be restored into the container that waited; once more without");
            self.discard(launch).await;
            restored = self.restore_copy(&held, launch, record, None).await;
        }
        match restored {
            Ok(opened) => {
                info!(ms = begun.elapsed().as_millis(), into_waiting, "restored as it is when it is unpacked");
                self.metrics.template_restores.inc();
                self.doubt(templates, held, launch, opened.running.ended.clone());
                Some(opened)
            }
            Err(why) => {
                warn!(why, "the template can't be restored, and is removed; the sandbox is unpacked");
                self.discard(launch).await;
                (*record, *launch) = (own_record, own_launch);
                let _ = spawn_blocking(move || templates.discard(held)).await;
                None
            }
        }
    }

    /// A copy runs before all of its memory is there. If that never comes, the template is to blame, and the next sandbox is unpacked.
    fn doubt(self: &Arc<Self>, templates: Templates, held: Held, launch: &Launch, ended: Ended) {
        let (manager, id, dir) = (Arc::clone(self), launch.id, launch.dir.clone());
        let look = async move {
            let to_blame = async {
                match manager.runtime.whole(id, &dir).await {
                    Ok(()) | Err(NotWhole::TooLate(_)) => None,
                    Err(error @ NotWhole::Unreadable(_)) => Some(error.to_string()),
                    Err(NotWhole::Ended) => match timeout(END_EXPLAINED, ended.wait()).await {
                        // Neither its client ended it, nor did we, nor had it too little memory. A template that was saved badly looks like this, and making
                        // a good one anew costs little.
                        Ok(End::Failed(why)) => Some(why),
                        _ => None,
                    },
                }
            };
            let to_blame = tokio::select! {
                biased;
                why = to_blame => why,
                // Whoever uses it next finds out.
                () = manager.stopped() => None,
            };
            if let Some(why) = to_blame {
                warn!(why, "the template can't be restored whole, and is removed");
                let _ = spawn_blocking(move || templates.discard(held)).await;
            }
        };
        self.drivers.spawn(look.in_current_span());
    }

    async fn restore_copy(&self, held: &Held, launch: &mut Launch, record: &mut Record, into: Option<Container>) -> Result<Opened, String> {
        record.container = into.as_ref().map(|container| container.id);
        *launch = self.launch(record, launch.resources);
        prepare(launch, record).map_err(|error| format!("{}: {error}", launch.dir.display()))?;
        let restored = match into {
            Some(container) => self.runtime.restore_into(launch, &held.dir()).await.map(|()| container.instance),
            None => self.runtime.restore(launch, &held.dir()).await,
        };
        converse(restored.map_err(|error| error.to_string())?, &held.marker, self.settings.start_timeout).await
    }

    /// A filesystem snapshot was just taken of a sandbox: the first one from it, with the limits that this one has, is to be a restore already. Nobody has asked for
    /// it yet, so it is left out where a few wait already, where memory is short, and where the snapshot has been replaced by the time.
    pub(super) fn template_ahead(self: &Arc<Self>, made: &Manifest, of: &Record) {
        let Some(filesystems) = self.filesystems.clone() else { return };
        let Some(place) = filesystems.templates.as_ref().and_then(Templates::ahead) else { return };
        let Ok(resources) = of.config.limits.again(&self.settings.max_limits, &self.host) else { return };
        if !self.pool.may_grow() {
            return;
        }
        let template = Template { filesystems, found: made.clone().into() };
        let (manager, of) = (Arc::clone(self), of.clone());
        self.drivers.spawn(async move {
            // Whoever names the snapshot and no image gets this one.
            let Ok(image) = manager.image_for(Some(&template), None).await else { return };
            let record = Record { image, ..of };
            let launch = manager.launch(&record, resources);
            if let Some(key) = template.key(&launch) {
                manager.keep_template(&template, &key, &launch, &record, Wanted::ByNobodyYet(place));
            }
        });
    }

    /// Makes a template in the background, unless there is one.
    pub(super) fn keep_template(self: &Arc<Self>, template: &Template, key: &Key, like: &Launch, of: &Record, wanted: Wanted) {
        let Some(templates) = template.filesystems.templates.clone() else { return };
        let Some(work) = templates.begin(key) else { return };
        let (manager, template) = (Arc::clone(self), template.clone());
        let record = Record {
            id: SandboxId::random(),
            token_sha256: hash(&new_token()),
            marker: Marker::new(rand::random()),
            owner: None,
            config: SandboxConfig { limits: of.config.limits, ..SandboxConfig::default() },
            epoch: None,
            generation: 0,
            container: None,
            // Nobody ever hears of it: the next server removes it.
            standby: true,
            ..of.clone()
        };
        let launch = self.launch(&record, like.resources);
        let span = info_span!(parent: None, "template", id = %record.id);
        let mut stop = self.stop.subscribe();
        let make = async move {
            let making = async {
                let _turn = templates.turn.acquire().await;
                if matches!(wanted, Wanted::Now) || template.filesystems.is_current(&template.found).await {
                    manager.make_template(&template, &launch, &record, work, &wanted).await;
                }
            };
            tokio::select! {
                () = making => {}
                () = async { drop(stop.wait_for(Option::is_some).await) } => {}
            }
            if launch.dir.exists() {
                manager.discard(&launch).await;
            }
        };
        self.drivers.spawn(make.instrument(span));
    }

    async fn make_template(&self, template: &Template, launch: &Launch, record: &Record, work: Work, wanted: &Wanted) {
        if self.slots.available_permits() == 0 {
            // Whoever wants a sandbox comes first; this one takes the place of nobody.
            return;
        }
        let begun = Instant::now();
        if let Err(why) = self.save_unpacked(template, launch, record, &work).await {
            warn!(why, "no template could be made; sandboxes from this snapshot are unpacked");
            return work.give_up();
        }
        let (marker, used) = (record.marker, matches!(wanted, Wanted::Now));
        match spawn_blocking(move || work.finish(marker, used)).await {
            Ok(Ok(true)) => {
                info!(ms = begun.elapsed().as_millis(), "the next sandbox from this snapshot is a restore");
                self.metrics.templates.inc();
            }
            Ok(Ok(false)) => info!("the template is larger than the cache may be; sandboxes from this snapshot are unpacked"),
            Ok(Err(error)) => warn!(%error, "the template could not be kept"),
            Err(_) => {}
        }
    }

    /// A sandbox of its own is unpacked, and saved as it is then.
    async fn save_unpacked(&self, template: &Template, launch: &Launch, record: &Record, work: &Work) -> Result<(), String> {
        let Template { filesystems, found } = template;
        let layer = filesystems.bring_this(found).await.map_err(|error| error.message)?;
        let mut opened = self.start(launch, record).await?;
        unpack(&mut opened.running, &layer.path).await.map_err(|error| error.message)?;
        match timeout(REST_WITHIN, rest(&mut opened.running)).await {
            Ok(rested) => rested?,
            Err(_) => return Err("it does not come to rest".to_owned()),
        }
        self.runtime.checkpoint(launch.id, &launch.dir, work.dir(), AfterSave::GoOn, None).await.map_err(|error| error.to_string())
    }
}

/// Until the agent has read all that was written to it, and what programs need is there. Unread input would be saved, and read by each copy.
async fn rest(running: &mut Running) -> Result<(), String> {
    for value in 1.. {
        running.writer.send(&ToAgent::Ping { value }).await.map_err(|error| error.to_string())?;
        let alone = loop {
            match running.reader.recv().await.map_err(|error| error.to_string())? {
                FromAgentFrame::Control(FromAgent::Pong { value: said, alone }) if said == value => break alone,
                _ => {}
            }
        };
        if alone {
            break;
        }
        // It does not say when the guest's init is ready.
        sleep(ASK_AGAIN).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests;

//! Giving a running sandbox its driver, and what is left to do when that ends.

use std::{
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use sandboxer_protocol::SandboxId;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, info_span};

use super::{Handle, Manager, NetworkView, converse::Running, handle::Wire, keep::Keeping, launch::remove_dir};
use crate::{
    network::Egress,
    obituaries::Obituary,
    sandbox::{
        driver::{Driver, Outcome, Start},
        farewell::{obituary, reason},
        files::{Keeps, OnMade},
        last_use::LastUse,
        record::Record,
    },
    tenants::Place,
};

impl Manager {
    /// Gives a running sandbox its driver.
    pub(super) fn drive(
        self: &Arc<Self>,
        record: Record,
        slot: (Option<OwnedSemaphorePermit>, Place),
        running: Running,
        age: Duration,
        wire: Wire,
        Keeping { host, kept }: Keeping,
    ) -> Handle {
        let (id, dir) = (record.id, self.dir(record.container()));
        let Wire { sender, receiver: commands } = wire;
        let gone = CancellationToken::new();
        let handle = Handle {
            id,
            token_sha256: record.token_sha256.as_str().into(),
            commands: sender,
            gone: gone.clone(),
            generation: Arc::new(AtomicU64::new(record.generation)),
            owner: record.owner.as_deref().map(Arc::from),
            created_at: record.created_at,
            config: Arc::new(record.config.clone()),
            image: Arc::from(record.image.as_path()),
            output_window_bytes: record.config.output_window_bytes,
            last_use: LastUse::at(record.idle_since.unwrap_or_else(jiff::Timestamp::now)),
            lease: kept.as_ref().map(|kept| kept.keeper.lease().view()),
            network: Arc::new(NetworkView::of(&record, &dir)),
        };
        let egress = Egress::new(&self.network, &self.connections, &record.config.network, Arc::clone(&handle.network.log));
        let running = running.identified(&record);
        let Running { reader, writer, ended, execution, next_number, files: packs_files, single_files, tunnel, .. } = running;
        let roller = self.roller();
        let manager = Arc::clone(self);
        let (token_sha256, owner) = (record.token_sha256.clone(), record.owner.clone());
        let driver = Driver::new(Start {
            id,
            dir,
            runtime: Arc::clone(&self.runtime),
            record,
            metrics: Arc::clone(&self.metrics),
            commands,
            reader,
            writer,
            ended,
            execution,
            age,
            max_lifetime: self.settings.max_lifetime,
            leaving: self.leaving.clone(),
            on_end: Box::new(move |outcome, dir| {
                // It may come back, to the same directory, as soon as there is room.
                if let Some(dir) = dir {
                    remove_dir(dir);
                }
                // Before its client is told that it is killed, who may then make another.
                drop(slot);
                manager.pool.look();
                if outcome.is_kept_elsewhere() {
                    return;
                }
                let (message, reason) = (obituary(outcome), reason(outcome));
                manager.forget(id, Some(Obituary { message, token_sha256: token_sha256.clone(), owner: owner.clone(), reason }));
            }),
            stop: self.stop.subscribe(),
            next_number,
            host,
            kept,
            roller,
            generation: Arc::clone(&handle.generation),
            last_use: handle.last_use.clone(),
            filesystems: self.filesystems.clone().map(|filesystems| {
                let manager = Arc::clone(self);
                let on_made: OnMade = Box::new(move |made, of| manager.template_ahead(made, of));
                Keeps { filesystems, on_made }
            }),
            packs_files,
            single_files,
            tunnel,
            egress,
        });
        self.lock().insert(id, handle.clone());
        self.leave_too(&handle);
        self.metrics.live.inc();
        let manager = Arc::clone(self);
        let drive = async move {
            let outcome = driver.run().await;
            manager.metrics.live.dec();
            if !matches!(outcome, Outcome::LeftRunning) {
                manager.metrics.ended.inc();
            }
            // Those who come now look on the volume.
            if matches!(outcome, Outcome::LeftRunning) || outcome.is_kept_elsewhere() {
                manager.forget(id, None);
            }
            gone.cancel();
        };
        self.drivers.spawn(drive.instrument(info_span!(parent: None, "sandbox", %id)));
        handle
    }

    fn forget(&self, id: SandboxId, why: Option<Obituary>) {
        if let Some(why) = why {
            self.obituaries.add(id, why);
        }
        self.lock().remove(&id);
    }
}

//! A node: it saves, forks, goes back, kills, deletes and collects, one thing of each kind at a time.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use object_store::ObjectStoreExt as _;
use sandboxer_protocol::SandboxId;
use sandboxer_store::{
    ChunkIndex, Contract, ImageDigest, Manifest, ManifestAt, PackId, Saved, Saver, SnapshotId, Tenant, Volume,
    collect::{CollectFaults, Collector, Terms, Writer},
    lease::Clock as _,
    record::{OwnerChange, Record, RecordStore as _, Stamp},
};
use serde_json::{Map, Value};

use super::{
    LONGEST, REMEMBER, RETENTION,
    store::{Link, Shared},
};
use crate::{
    clock::NodeClock,
    network::name_of,
    world::{World, lock},
};

pub(super) struct Node {
    pub(super) index: usize,
    world: Arc<World>,
    shared: Arc<Shared>,
    link: Arc<Link>,
    volume: Volume,
    saver: Saver,
    pub(super) clock: Arc<NodeClock>,
    faults: CollectFaults,
    stopped: AtomicBool,
    /// What it has seen on the volume, as an index of chunks has.
    hints: Mutex<Vec<PackId>>,
}

impl Node {
    pub(super) fn new(index: usize, shared: &Arc<Shared>, faults: CollectFaults) -> Arc<Self> {
        let clock = Arc::new(NodeClock::new(&shared.world));
        let link = Arc::new(Link(Arc::clone(shared)));
        let volume = Volume::on(link.clone()).listed_late(shared.listed_late() * 2);
        let writer = Writer::new(name_of(index), clock.clone(), LONGEST).with_faults(faults);
        Arc::new(Self {
            index,
            world: Arc::clone(&shared.world),
            shared: Arc::clone(shared),
            saver: Saver::new(volume.clone(), ChunkIndex::default()).with_writer(writer),
            link,
            volume,
            clock,
            faults,
            stopped: AtomicBool::new(false),
            hints: Mutex::default(),
        })
    }

    pub(super) fn start(self: &Arc<Self>) {
        let workers = self.world.random(|rng| rng.within(1..4));
        for _ in 0..workers {
            let node = Arc::clone(self);
            self.world.spawn(Some(self.index), Box::pin(async move { node.work().await }));
        }
        let node = Arc::clone(self);
        self.world.spawn(Some(self.index), Box::pin(async move { node.collect_again_and_again().await }));
    }

    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    fn goes_on(&self) -> bool {
        !self.stopped.load(Ordering::Relaxed)
    }

    fn collector(&self) -> Collector {
        let terms = Terms { retention: RETENTION, longest_save: LONGEST, remember: Some(REMEMBER) };
        Collector::new(self.volume.clone(), self.link.clone(), self.clock.clone(), name_of(self.index), terms).with_faults(self.faults)
    }

    async fn collect_again_and_again(&self) {
        let collector = self.collector();
        while self.goes_on() {
            self.pause(500..20_000).await;
            let polite = self.world.random(|rng| rng.chance(50));
            let done = if polite { collector.collect_unless_another_does().await } else { collector.collect().await };
            if let Ok(done) = done {
                self.world.note(|| format!("{}: collected {done:?}", self.index));
                self.shared.count(|counts| {
                    counts.collections += u64::from(!done.left_to_another);
                    counts.spared += done.spared;
                    counts.dead_writers += done.dead_writers;
                });
            }
        }
    }

    /// Somebody who has seen nothing before.
    pub(super) fn newcomer(&self) -> Collector {
        let terms = Terms { retention: RETENTION, longest_save: LONGEST, remember: Some(Duration::ZERO) };
        Collector::new(self.volume.clone(), self.link.clone(), self.clock.clone(), name_of(self.index), terms)
    }

    async fn work(self: &Arc<Self>) {
        let mut own: Vec<SandboxId> = Vec::new();
        while self.goes_on() {
            self.pause(50..4000).await;
            let what = self.world.random(|rng| rng.within(0..100));
            // What fails is tried another time.
            let _ = match what {
                0..15 => self.create().await.map(|id| own.push(id)),
                15..50 => self.save(self.any(&own)).await,
                50..62 => self.fork().await.map(|id| own.push(id)),
                62..70 => self.go_back(self.any(&own)).await,
                70..80 => self.snapshot().await,
                80..88 => self.delete_snapshot().await,
                _ => {
                    let id = self.any(&own);
                    own.retain(|own| Some(*own) != id);
                    self.kill(id).await
                }
            };
        }
    }

    fn any<T: Copy>(&self, of: &[T]) -> Option<T> {
        (!of.is_empty()).then(|| of[self.world.random(|rng| rng.index(of.len()))])
    }

    async fn pause(&self, millis: std::ops::Range<u64>) {
        self.world.sleep(self.world.random(|rng| rng.millis(millis))).await;
    }

    fn stamp(&self) -> Stamp {
        Stamp { unix: self.clock.unix_time().as_secs(), nonce: self.clock.nonce() }
    }

    fn bytes(&self) -> [u8; 16] {
        let (high, low) = self.world.random(|rng| (rng.bits(), rng.bits()));
        (u128::from(high) << 64 | u128::from(low)).to_be_bytes()
    }

    /// Random by the seed.
    fn uuid(&self) -> String {
        let mut bytes = self.bytes();
        (bytes[6], bytes[8]) = (bytes[6] & 0x0f | 0x40, bytes[8] & 0x3f | 0x80);
        let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        [&text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..]].join("-")
    }

    async fn create(&self) -> Option<SandboxId> {
        let id = self.uuid().parse().ok()?;
        self.link.create(id, &Record::first(name_of(self.index), self.stamp(), BTreeMap::new())).await.ok()?;
        Some(id)
    }

    /// Packs that it writes, packs that it relies on, and some time.
    async fn save_some(&self) -> Option<Saved> {
        let hints = lock(&self.hints).clone();
        let reuse: Vec<PackId> = (0..4).filter_map(|_| self.any(&hints)).collect();
        let new: Vec<PackId> = (0..self.world.random(|rng| rng.within(0..3))).map(|_| PackId::from_bytes(self.bytes())).collect();
        let saved = self.saver.save_packs(Tenant::open(), &reuse, &new, self.pause(10..9000)).await.ok()?;
        // Before its manifest is there, as an index learns it.
        self.learn(new);
        self.shared.count(|counts| counts.saves += 1);
        Some(saved)
    }

    fn learn(&self, packs: impl IntoIterator<Item = PackId>) {
        let mut hints = lock(&self.hints);
        hints.extend(packs);
        let surplus = hints.len().saturating_sub(24);
        hints.drain(..surplus);
    }

    async fn save(&self, id: Option<SandboxId>) -> Option<()> {
        let id = id?;
        let saved = self.save_some().await?;
        self.publish(id, saved).await
    }

    async fn publish(&self, id: SandboxId, saved: Saved) -> Option<()> {
        let there = self.link.read(id).await.ok()??;
        let contract = self.contract(id);
        let prepared = self.volume.prepare(&saved, contract, there.record.latest).await;
        saved.finish().await;
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                self.shared.count(|counts| counts.late_saves += u64::from(matches!(error, sandboxer_store::Error::TookTooLong { .. })));
                return None;
            }
        };
        self.learn(prepared.manifest.packs().iter().map(|pack| pack.id));
        self.pause(1..2000).await;
        let there = self.link.read(id).await.ok()??;
        let next = there.record.by_owner(&there.record.holder()?, &[OwnerChange::Publish(prepared.name)], self.stamp()).ok()?;
        self.link.swap(id, &there, &next).await.ok()?;
        Some(())
    }

    /// Something that is saved somewhere.
    async fn something(&self) -> Option<Manifest> {
        let snapshots = self.volume.snapshots().await.ok()?;
        if let Some(snapshot_id) = self.any(&snapshots).filter(|_| self.world.random(|rng| rng.chance(50))) {
            return self.volume.manifest(ManifestAt::Snapshot { snapshot_id }).await.ok();
        }
        let sandboxes = self.volume.sandboxes().await.ok()?;
        self.checkpoint_of(self.any(&sandboxes)?).await
    }

    async fn checkpoint_of(&self, sandbox_id: SandboxId) -> Option<Manifest> {
        let names = self.volume.checkpoints(sandbox_id).await.ok()?;
        self.volume.checkpoint(sandbox_id, self.any(&names)?).await.ok()
    }

    async fn again(&self, of: &Manifest) -> Option<Saved> {
        self.pause(1..3000).await;
        if let Some(saved) = self.saver.rely_on(of).await.ok()? {
            self.pause(1..3000).await;
            return Some(saved);
        }
        self.shared.count(|counts| counts.written_anew += 1);
        let packs: Vec<_> = of.packs().iter().map(|pack| pack.id).collect();
        let new = [PackId::from_bytes(self.bytes())];
        self.saver.save_packs(Tenant::open(), &packs, &new, self.pause(10..3000)).await.ok()
    }

    async fn fork(&self) -> Option<SandboxId> {
        let of = self.something().await?;
        let id = self.create().await?;
        let saved = self.again(&of).await?;
        self.publish(id, saved).await?;
        self.shared.count(|counts| counts.forks += 1);
        Some(id)
    }

    async fn go_back(&self, id: Option<SandboxId>) -> Option<()> {
        let of = self.checkpoint_of(id?).await?;
        let saved = self.again(&of).await?;
        self.publish(id?, saved).await
    }

    async fn snapshot(&self) -> Option<()> {
        let saved = self.save_some().await?;
        let (id, snapshot_id): (SandboxId, SnapshotId) = (self.uuid().parse().ok()?, self.uuid().parse().ok()?);
        let made = self.volume.put_snapshot(&saved, self.contract(id), snapshot_id).await;
        saved.finish().await;
        self.learn(made.ok()?.packs().iter().map(|pack| pack.id));
        Some(())
    }

    async fn delete_snapshot(&self) -> Option<()> {
        let snapshots = self.volume.snapshots().await.ok()?;
        let path = ManifestAt::Snapshot { snapshot_id: self.any(&snapshots)? }.path();
        self.volume.store().delete(&path).await.ok()?;
        self.shared.count(|counts| counts.deleted += 1);
        Some(())
    }

    async fn kill(&self, id: Option<SandboxId>) -> Option<()> {
        let there = self.link.read(id?).await.ok()??;
        let bury = OwnerChange::Bury { reason: "killed".to_owned() };
        let next = there.record.by_owner(&there.record.holder()?, &[bury], self.stamp()).ok()?;
        self.link.swap(id?, &there, &next).await.ok()?;
        self.shared.count(|counts| counts.kills += 1);
        Some(())
    }

    fn contract(&self, sandbox_id: SandboxId) -> Contract {
        let now = i64::try_from(self.clock.unix_time().as_millis()).unwrap_or_default();
        Contract {
            sandbox_id,
            created_at: jiff::Timestamp::from_millisecond(now).unwrap_or(jiff::Timestamp::UNIX_EPOCH),
            parent: None,
            epoch: 1,
            automatic: self.world.random(|rng| rng.chance(30)),
            name: None,
            runsc_version: String::new(),
            platform: String::new(),
            cpu_features: Vec::new(),
            image: ImageDigest::from_bytes([0; 32]),
            agent_version: String::new(),
            spec: Value::Null,
            state: Value::Null,
            other: Map::new(),
        }
    }
}

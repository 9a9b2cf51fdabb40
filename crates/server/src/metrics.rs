//! What the server counts.

use std::sync::atomic::AtomicI64;

use prometheus_client::{
    encoding::text::encode,
    metrics::{
        counter::Counter,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};

pub(crate) struct Metrics {
    registry: Registry,
    pub(crate) creates: Counter,
    pub(crate) create_failures: Counter,
    pub(crate) create_seconds: Histogram,
    pub(crate) executions: Counter,
    pub(crate) executions_by_spare: Counter,
    pub(crate) execution_seconds: Histogram,
    pub(crate) live: Gauge<i64, AtomicI64>,
    pub(crate) clients: Gauge<i64, AtomicI64>,
    pub(crate) taken_up: Counter,
    pub(crate) saves: Counter,
    pub(crate) autosaves_skipped: Counter,
    pub(crate) save_pause_seconds: Histogram,
    pub(crate) snapshots: Counter,
    pub(crate) filesystem_snapshots: Counter,
    pub(crate) templates: Counter,
    pub(crate) template_restores: Counter,
    pub(crate) rollbacks: Counter,
    pub(crate) forks: Counter,
    pub(crate) save_failures: Counter,
    pub(crate) restores: Counter,
    pub(crate) ended: Counter,
    pub(crate) collections: Counter,
    pub(crate) collected_bytes: Counter,
    pub(crate) pooled_sandboxes: Gauge<i64, AtomicI64>,
    pub(crate) pooled_containers: Gauge<i64, AtomicI64>,
    pub(crate) pool_hits: Counter,
    pub(crate) pool_misses: Counter,
    pub(crate) restore_pool_hits: Counter,
    pub(crate) restore_pool_misses: Counter,
    pub(crate) pool_given_up: Counter,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let buckets = || exponential_buckets(0.001, 2.0, 18);
        let metrics = Self {
            registry: Registry::with_prefix("sandboxer"),
            creates: Counter::default(),
            create_failures: Counter::default(),
            create_seconds: Histogram::new(buckets()),
            executions: Counter::default(),
            executions_by_spare: Counter::default(),
            execution_seconds: Histogram::new(buckets()),
            live: Gauge::default(),
            clients: Gauge::default(),
            taken_up: Counter::default(),
            saves: Counter::default(),
            autosaves_skipped: Counter::default(),
            save_pause_seconds: Histogram::new(buckets()),
            snapshots: Counter::default(),
            filesystem_snapshots: Counter::default(),
            templates: Counter::default(),
            template_restores: Counter::default(),
            rollbacks: Counter::default(),
            forks: Counter::default(),
            save_failures: Counter::default(),
            restores: Counter::default(),
            ended: Counter::default(),
            collections: Counter::default(),
            collected_bytes: Counter::default(),
            pooled_sandboxes: Gauge::default(),
            pooled_containers: Gauge::default(),
            pool_hits: Counter::default(),
            pool_misses: Counter::default(),
            restore_pool_hits: Counter::default(),
            restore_pool_misses: Counter::default(),
            pool_given_up: Counter::default(),
        };
        metrics.registered()
    }

    fn registered(mut self) -> Self {
        let registry = &mut self.registry;
        registry.register("creates", "Sandboxes asked for", self.creates.clone());
        registry.register("create_failures", "Sandboxes that could not be made", self.create_failures.clone());
        registry.register("create_seconds", "From the request to the running sandbox", self.create_seconds.clone());
        registry.register("executions", "Executions asked for", self.executions.clone());
        registry.register("executions_by_spare", "Executions that an interpreter waited for", self.executions_by_spare.clone());
        registry.register("execution_seconds", "From the request to the end of the program", self.execution_seconds.clone());
        registry.register("live_sandboxes", "Sandboxes that run here now", self.live.clone());
        registry.register("clients", "WebSocket connections now", self.clients.clone());
        registry.register("saves", "Checkpoints made", self.saves.clone());
        registry.register("autosaves_skipped", "Autosaves left out because nothing had changed", self.autosaves_skipped.clone());
        registry.register(
            "save_pause_seconds",
            "How long a sandbox stood still that goes on after being saved",
            self.save_pause_seconds.clone(),
        );
        registry.register("snapshots", "Snapshots made of running sandboxes", self.snapshots.clone());
        registry.register("filesystem_snapshots", "Filesystem snapshots made of running sandboxes", self.filesystem_snapshots.clone());
        registry.register("templates", "Sandboxes saved as they were unpacked, for the next ones", self.templates.clone());
        registry.register("template_restores", "Sandboxes restored from these instead of being unpacked", self.template_restores.clone());
        registry.register("rollbacks", "Sandboxes that went back to something saved", self.rollbacks.clone());
        registry.register("forks", "Sandboxes made from something saved", self.forks.clone());
        registry.register("save_failures", "Checkpoints that could not be made; the sandbox went on", self.save_failures.clone());
        registry.register("restores", "Sandboxes restored from a checkpoint", self.restores.clone());
        registry.register("taken_up", "Sandboxes taken up from an earlier server process", self.taken_up.clone());
        registry.register("ended", "Sandboxes that ended here", self.ended.clone());
        registry.register("collections", "Collections of the volume by this instance", self.collections.clone());
        registry.register("collected_bytes", "Bytes that these removed", self.collected_bytes.clone());
        registry.register("pooled_sandboxes", "Started sandboxes that wait for a creator now", self.pooled_sandboxes.clone());
        registry.register("pooled_containers", "Created containers that wait for a restore now", self.pooled_containers.clone());
        registry.register("pool_hits", "Sandboxes that were handed out of the pool", self.pool_hits.clone());
        registry.register("pool_misses", "Sandboxes that had to be started because none waited", self.pool_misses.clone());
        registry.register("restore_pool_hits", "Restores into a container that waited", self.restore_pool_hits.clone());
        registry.register("restore_pool_misses", "Restores for which no container waited", self.restore_pool_misses.clone());
        registry.register(
            "pool_given_up",
            "What waited and was removed unused: dead, too many, or memory short",
            self.pool_given_up.clone(),
        );
        self
    }

    /// Counts a client for as long as what this returns is kept.
    pub(crate) fn client(&self) -> Counted {
        self.clients.inc();
        Counted(self.clients.clone())
    }

    /// In the text format of Prometheus.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing into a string can't fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

/// One more, until it is dropped.
pub(crate) struct Counted(Gauge<i64, AtomicI64>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

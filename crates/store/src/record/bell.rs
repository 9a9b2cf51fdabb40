//! A bell for each instance: by it whoever waits for a sandbox tells its owner, who would otherwise have to look at every record again and again.
//!
//! ```text
//! waiter   registers in the record ── writes the sandbox's id into bells/{owner}
//! owner    asks every half second whether bells/{itself} has changed: one small request, however many sandboxes it has
//! ```
//!
//! A bell is a hint and nothing more. One that is lost costs a few seconds: the owner's next renewal finds the waiter in the record. One that rings
//! for nothing costs a look at a record, [`MAX_RINGS`] of them at a time at most.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use object_store::{Error as StoreError, GetOptions, ObjectStore, PutMode, PutOptions, UpdateVersion};
use sandboxer_protocol::SandboxId;
use tokio::{runtime::Handle, sync::watch, task::AbortHandle};

use super::{InstanceId, Nonce};
use crate::layout;

/// How often an instance that has sandboxes looks at its bell. A waiter is noticed within a second, on average in half of this and two requests.
const LOOK: Duration = Duration::from_millis(500);
/// After a look that failed, growing: a bucket that is throttling is not helped by more of it.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Rings that a bell remembers: those of one look, unless very many come at once, and then all records are looked at.
const MAX_RINGS: usize = 32;
const MAX_BELL_BYTES: usize = 8 << 10;
/// How often a ring is tried that others come before.
const TRIES: usize = 4;
/// Below this many counters nobody looks for those that nobody needs any more.
const MIN_PRUNED: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ring {
    id: SandboxId,
    nonce: Nonce,
}

/// The newest first.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Rings(VecDeque<Ring>);

impl Rings {
    /// Nothing, for what is no bell.
    fn parse(bytes: &[u8]) -> Self {
        let ring = |line: &str| {
            let (id, nonce) = line.split_once(' ')?;
            Some(Ring { id: id.parse().ok()?, nonce: nonce.parse().ok()? })
        };
        let text = std::str::from_utf8(bytes).unwrap_or_default();
        Self(text.lines().take(MAX_RINGS).map_while(ring).collect())
    }

    fn bytes(&self) -> Bytes {
        self.0.iter().map(|ring| format!("{} {}\n", ring.id, ring.nonce)).collect::<String>().into()
    }

    fn add(&mut self, id: SandboxId) {
        self.0.retain(|ring| ring.id != id);
        self.0.truncate(MAX_RINGS - 1);
        self.0.push_front(Ring { id, nonce: Nonce::random() });
    }

    /// Whose bell was rung since `last`; none if that can't be told, and it may have been everybody's.
    fn since(&self, last: Option<&Self>) -> Option<Vec<SandboxId>> {
        let new: Vec<_> = self.0.iter().filter(|ring| last.is_none_or(|last| !last.0.contains(ring))).map(|ring| ring.id).collect();
        (new.len() < MAX_RINGS).then_some(new)
    }
}

/// What an instance hears, and the way to the bells of others.
pub(super) struct Bells {
    reading: Arc<dyn ObjectStore>,
    writing: Arc<dyn ObjectStore>,
    listening: Option<Listening>,
}

/// Begins with the first subscription.
struct Listening {
    me: InstanceId,
    running: Mutex<Option<Running>>,
}

struct Running {
    counters: Arc<Mutex<Counters>>,
    listener: AbortHandle,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

#[derive(Default)]
struct Counters {
    of: HashMap<SandboxId, watch::Sender<u64>>,
    prune_at: usize,
}

impl Bells {
    /// Without `me`, nothing is heard.
    pub(super) fn new(reading: Arc<dyn ObjectStore>, writing: Arc<dyn ObjectStore>, me: Option<InstanceId>) -> Self {
        Self { reading, writing, listening: me.map(|me| Listening { me, running: Mutex::default() }) }
    }

    /// Tells `owner` that somebody waits for a sandbox of its. What can't be told is found by it a few seconds later.
    pub(super) async fn ring(&self, owner: &InstanceId, id: SandboxId) {
        let path = layout::bell(owner);
        for _ in 0..TRIES {
            let (mode, mut rings) = match read(&*self.reading, owner, None).await {
                Ok(Some((rings, version))) => (PutMode::Update(version), rings),
                Ok(None) => (PutMode::Create, Rings::default()),
                Err(_) => return,
            };
            rings.add(id);
            match self.writing.put_opts(&path, rings.bytes().into(), PutOptions::from(mode)).await {
                Err(StoreError::AlreadyExists { .. } | StoreError::Precondition { .. } | StoreError::NotFound { .. }) => {}
                _ => return,
            }
        }
    }

    /// A counter that goes up when the bell rings for this sandbox.
    pub(super) fn subscribe(&self, id: SandboxId) -> Option<watch::Receiver<u64>> {
        let listening = self.listening.as_ref()?;
        let mut running = lock(&listening.running);
        if running.is_none() {
            let (counters, store, me) = (Arc::default(), Arc::clone(&self.reading), listening.me.clone());
            let listener = Handle::try_current().ok()?.spawn(listen(store, me, Arc::clone(&counters))).abort_handle();
            *running = Some(Running { counters, listener });
        }
        let mut counters = lock(&running.as_ref()?.counters);
        let counter = counters.of.entry(id).or_default().subscribe();
        if counters.of.len() > counters.prune_at.max(MIN_PRUNED) {
            counters.prune();
        }
        Some(counter)
    }
}

impl Counters {
    /// Whether anybody is left.
    fn prune(&mut self) -> bool {
        self.of.retain(|_, counter| counter.receiver_count() > 0);
        self.prune_at = self.of.len() * 2;
        !self.of.is_empty()
    }

    fn rung(&self, ids: Option<Vec<SandboxId>>) {
        let up = |counter: &watch::Sender<u64>| counter.send_modify(|count| *count += 1);
        match ids {
            Some(ids) => ids.iter().filter_map(|id| self.of.get(id)).for_each(up),
            None => self.of.values().for_each(up),
        }
    }
}

/// Until it is aborted. Nothing is asked while nobody has a sandbox.
async fn listen(store: Arc<dyn ObjectStore>, me: InstanceId, counters: Arc<Mutex<Counters>>) {
    let (mut known, mut last): (Option<UpdateVersion>, Option<Rings>) = (None, None);
    let mut pause = LOOK;
    loop {
        tokio::time::sleep(pause).await;
        if !lock(&counters).prune() {
            continue;
        }
        match read(&*store, &me, known.as_ref().and_then(|known| known.e_tag.clone())).await {
            Ok(Some((rings, version))) => {
                // Some stores answer with what they were told is known.
                if known.as_ref() != Some(&version) {
                    lock(&counters).rung(rings.since(last.as_ref()));
                    (known, last) = (Some(version), Some(rings));
                }
                pause = LOOK;
            }
            Ok(None) => pause = LOOK,
            Err(StoreError::NotModified { .. }) => pause = LOOK,
            Err(_) => pause = (pause * 2).min(LONGEST_PAUSE),
        }
    }
}

/// None if it was never rung.
async fn read(store: &dyn ObjectStore, of: &InstanceId, known: Option<String>) -> Result<Option<(Rings, UpdateVersion)>, StoreError> {
    let options = GetOptions { if_none_match: known, ..GetOptions::default() };
    let got = match store.get_opts(&layout::bell(of), options).await {
        Err(StoreError::NotFound { .. }) => return Ok(None),
        got => got?,
    };
    let version = UpdateVersion { e_tag: got.meta.e_tag.clone(), version: got.meta.version.clone() };
    let rings = if got.meta.size > MAX_BELL_BYTES as u64 { Rings::default() } else { Rings::parse(&got.bytes().await?) };
    Ok(Some((rings, version)))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;

    fn bells(store: &Arc<InMemory>, me: Option<&str>) -> Bells {
        let store: Arc<dyn ObjectStore> = Arc::<InMemory>::clone(store);
        Bells::new(Arc::clone(&store), store, me.map(|me| me.parse().unwrap()))
    }

    #[tokio::test]
    async fn whoever_waits_is_heard_by_the_owner_and_by_nobody_else() {
        let store = Arc::default();
        let (owner, waiter) = (bells(&store, Some("owner")), bells(&store, Some("waiter")));
        let (id, other) = (SandboxId::random(), SandboxId::random());
        let (mut heard, mut silent, mut elsewhere) =
            (owner.subscribe(id).unwrap(), owner.subscribe(other).unwrap(), waiter.subscribe(id).unwrap());
        for _ in 0..2 {
            waiter.ring(&"owner".parse().unwrap(), id).await;
            heard.changed().await.unwrap();
            heard.borrow_and_update();
        }
        assert!(!silent.has_changed().unwrap() && !elsewhere.has_changed().unwrap());
        silent.borrow_and_update();
        elsewhere.borrow_and_update();
    }

    #[tokio::test]
    async fn rings_that_come_at_once_are_all_heard() {
        let store = Arc::default();
        let (owner, waiter) = (bells(&store, Some("owner")), bells(&store, None));
        let ids: Vec<_> = (0..5).map(|_| SandboxId::random()).collect();
        let heard: Vec<_> = ids.iter().map(|id| owner.subscribe(*id).unwrap()).collect();
        for id in &ids {
            waiter.ring(&"owner".parse().unwrap(), *id).await;
        }
        for mut heard in heard {
            heard.changed().await.unwrap();
        }
        assert!(waiter.subscribe(ids[0]).is_none(), "it has no bell");
    }

    #[test]
    fn too_many_rings_mean_everybody_and_nonsense_means_nobody() {
        let mut rings = Rings::default();
        assert_eq!(Rings::parse(&rings.bytes()), rings);
        let before = rings.clone();
        for _ in 0..MAX_RINGS - 1 {
            rings.add(SandboxId::random());
        }
        assert_eq!(rings.since(Some(&before)).unwrap().len(), MAX_RINGS - 1);
        for _ in 0..3 {
            rings.add(SandboxId::random());
        }
        assert_eq!(rings.since(Some(&before)), None);
        assert_eq!(rings.since(Some(&rings)).unwrap(), []);
        let bytes = rings.bytes();
        assert!(bytes.len() <= MAX_BELL_BYTES);
        assert_eq!(Rings::parse(&bytes), rings);
        for nonsense in [&b"\xff\xfe"[..], b"no ring\n", b"../../x 0\n"] {
            assert_eq!(Rings::parse(nonsense), Rings::default());
        }
    }
}

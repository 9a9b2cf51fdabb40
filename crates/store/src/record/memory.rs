//! Records in memory: for the simulator, and for tests that want a store to fail in a certain way.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Bound,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use sandboxer_protocol::SandboxId;
use tokio::sync::{Notify, watch};

use super::{BadRecord, Changes, ReadError, Record, RecordStore, Stored, SwapError, Tag};

/// What happens to the next request.
#[derive(Debug, Clone)]
pub enum RecordFault {
    /// It never reaches the store, and the caller can't know.
    LostRequest,
    /// It takes effect, and the caller is not told.
    LostReply,
    /// It takes effect, is delivered a second time, and the second reply is the one that arrives.
    Repeated,
    /// The store says that it can't.
    Unavailable,
    /// It waits at the door until it is let in.
    Delayed(Arc<Notify>),
}

#[derive(Debug, Default)]
struct Entry {
    stored: Option<Stored>,
    changed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    entries: BTreeMap<SandboxId, Entry>,
    /// Not to be seen.
    hidden: BTreeSet<SandboxId>,
    faults: VecDeque<RecordFault>,
}

/// Every operation takes effect at once and whole, in the order of the calls.
#[derive(Debug, Default)]
pub struct MemoryRecords(Mutex<State>);

impl MemoryRecords {
    /// The next requests fare like this, one after the other.
    pub fn inject(&self, faults: impl IntoIterator<Item = RecordFault>) {
        self.state().faults.extend(faults);
    }

    pub fn read_now(&self, id: SandboxId) -> Option<Stored> {
        self.state().entries.get(&id).and_then(|entry| entry.stored.clone())
    }

    /// Until this is dropped, requests find no such record, as those do that something else than the volume answers.
    pub fn hide(self: &Arc<Self>, id: SandboxId) -> Hidden {
        self.state().hidden.insert(id);
        Hidden { records: Arc::clone(self), id }
    }

    fn is_hidden(&self, id: SandboxId) -> bool {
        self.state().hidden.contains(&id)
    }

    /// # Errors
    /// [`SwapError::Conflict`] if something else than `expected` is there.
    pub fn swap_now(&self, id: SandboxId, expected: Option<&Stored>, next: &Record) -> Result<Stored, SwapError> {
        let mut state = self.state();
        let entry = state.entries.entry(id).or_default();
        let matches = match (&entry.stored, expected) {
            (None, None) => true,
            (Some(there), Some(expected)) => there.is(expected),
            _ => false,
        };
        if !matches {
            return Err(SwapError::Conflict(entry.stored.clone().map(Box::new)));
        }
        if next.sequence != expected.map_or(0, |expected| expected.record.sequence) + 1 {
            return Err(BadRecord::Malformed("a version must follow the one it replaces".to_owned()).into());
        }
        let stored = Stored { record: next.clone(), tag: Tag::default() };
        entry.stored = Some(stored.clone());
        entry.changed.send_modify(|count| *count += 1);
        Ok(stored)
    }

    fn remove_now(&self, id: SandboxId, expected: &Stored) -> Result<(), SwapError> {
        let mut state = self.state();
        let there = state.entries.get(&id).and_then(|entry| entry.stored.clone());
        match there {
            Some(there) if there.is(expected) && there.record.tombstone.is_some() => {
                state.entries.remove(&id);
                Ok(())
            }
            there => Err(SwapError::Conflict(there.map(Box::new))),
        }
    }

    async fn write<T>(&self, apply: impl Fn() -> Result<T, SwapError> + Send) -> Result<T, SwapError> {
        match self.next_fault().await {
            None | Some(RecordFault::Delayed(_)) => apply(),
            Some(RecordFault::LostRequest) => Err(SwapError::Unknown("no reply".to_owned())),
            Some(RecordFault::Unavailable) => Err(SwapError::Unavailable("injected".to_owned())),
            Some(RecordFault::LostReply) => {
                let _ = apply();
                Err(SwapError::Unknown("no reply".to_owned()))
            }
            Some(RecordFault::Repeated) => {
                let _ = apply();
                apply()
            }
        }
    }

    async fn next_fault(&self) -> Option<RecordFault> {
        let fault = self.state().faults.pop_front();
        if let Some(RecordFault::Delayed(door)) = &fault {
            door.notified().await;
        }
        fault
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A record that is not to be seen.
#[derive(Debug)]
pub struct Hidden {
    records: Arc<MemoryRecords>,
    id: SandboxId,
}

impl Drop for Hidden {
    fn drop(&mut self) {
        self.records.state().hidden.remove(&self.id);
    }
}

#[async_trait]
impl RecordStore for MemoryRecords {
    async fn read(&self, id: SandboxId) -> Result<Option<Stored>, ReadError> {
        match self.next_fault().await {
            Some(RecordFault::LostRequest | RecordFault::LostReply | RecordFault::Unavailable) => {
                Err(ReadError::Unavailable("injected".to_owned()))
            }
            _ if self.is_hidden(id) => Ok(None),
            _ => Ok(self.read_now(id)),
        }
    }

    async fn create(&self, id: SandboxId, first: &Record) -> Result<Stored, SwapError> {
        self.write(|| self.swap_now(id, None, first)).await
    }

    async fn swap(&self, id: SandboxId, expected: &Stored, next: &Record) -> Result<Stored, SwapError> {
        if self.is_hidden(id) {
            return Err(SwapError::Conflict(None));
        }
        self.write(|| self.swap_now(id, Some(expected), next)).await
    }

    async fn remove(&self, id: SandboxId, expected: &Stored) -> Result<(), SwapError> {
        self.write(|| self.remove_now(id, expected)).await
    }

    async fn list(&self, after: Option<SandboxId>, limit: usize) -> Result<Vec<SandboxId>, ReadError> {
        let state = self.state();
        let behind = after.map_or(Bound::Unbounded, Bound::Excluded);
        let there = state.entries.range((behind, Bound::Unbounded)).filter(|(_, entry)| entry.stored.is_some());
        Ok(there.map(|(id, _)| *id).take(limit).collect())
    }

    fn changes(&self, id: SandboxId) -> Changes {
        Changes::from_counter(self.state().entries.entry(id).or_default().changed.subscribe())
    }
}

//! What an earlier server process left behind, and which of it goes on.

use std::{collections::HashMap, fs};

use sandboxer_protocol::SandboxId;

use crate::sandbox::record::{Record, RecordError};

/// What an earlier server left in its data directory.
pub(super) struct Left {
    /// Whose it is, as far as can be told.
    pub(super) id: SandboxId,
    pub(super) container: SandboxId,
    pub(super) record: Result<Record, RecordError>,
}

impl Left {
    pub(super) fn read(entry: &fs::DirEntry) -> Option<Self> {
        let container = entry.file_name().to_str()?.parse().ok()?;
        let record = Record::read(&entry.path(), container);
        Some(Self { id: record.as_ref().map_or(container, |record| record.id), container, record })
    }
}

/// Of two with one id the one that went back last goes on: the other one was about to be removed.
pub(super) fn step_back(found: &mut [Left]) {
    let mut newest: HashMap<SandboxId, u64> = HashMap::new();
    for record in found.iter().filter_map(|left| left.record.as_ref().ok()).filter(|record| !record.standby) {
        let newest = newest.entry(record.id).or_default();
        *newest = record.generation.max(*newest);
    }
    for record in found.iter_mut().filter_map(|left| left.record.as_mut().ok()) {
        if newest.get(&record.id).is_some_and(|newest| record.generation < *newest) {
            record.standby = true;
            // Its container goes, and the sandbox does not: it is no copy that nobody has heard of.
            record.container = Some(record.container());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_container_that_was_gone_back_from_goes_and_the_sandbox_is_not_taken_for_a_copy() {
        let old = Record::parse(include_bytes!("../sandbox/record_v1.json")).unwrap();
        let new = Record { container: Some(SandboxId::random()), generation: old.generation + 1, ..old.clone() };
        let mut left = [old, new].map(|record| Left { id: record.id, container: record.container(), record: Ok(record) });
        step_back(&mut left);
        let [old, new] = left.map(|left| left.record.unwrap());
        assert!(old.standby && !old.is_unheard_of(), "its container is removed, and nothing is buried");
        assert!(!new.standby);
    }
}

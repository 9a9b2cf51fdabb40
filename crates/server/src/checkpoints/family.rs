//! Where sandboxes came from: the history of one, and of all that it was made from or that were made from it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, PoisonError},
};

use sandboxer_protocol::SandboxId;
use sandboxer_store::{CheckpointName, Manifest, ManifestAt, SnapshotId, collect::Share};

use super::{About, Checkpoints, Origin};

/// Something that was saved, and how much of it is its own.
#[derive(Debug)]
pub(crate) struct Branch<N> {
    pub(crate) name: N,
    pub(crate) about: About,
    pub(crate) share: Share,
}

/// A sandbox, or what is left of one.
#[derive(Debug, Default)]
pub(crate) struct Relative {
    /// What it was made from, if that is known.
    pub(crate) from: Option<Origin>,
    /// An instance has it now.
    pub(crate) held: bool,
    /// Nobody can attach to it any more.
    pub(crate) gone: bool,
    pub(crate) latest: Option<CheckpointName>,
    /// Oldest first.
    pub(crate) checkpoints: Vec<Branch<CheckpointName>>,
    /// Oldest first.
    pub(crate) snapshots: Vec<Branch<SnapshotId>>,
}

pub(crate) type Family = BTreeMap<SandboxId, Relative>;

impl Checkpoints {
    /// The sandbox with all that it came from and that came from it, of those that `passes` lets see.
    pub(crate) async fn family(&self, id: SandboxId, passes: impl Fn(Option<&str>) -> bool + Send + Sync) -> Result<Family, String> {
        let mut all = self.everybody(passes).await?;
        all.entry(id).or_default();
        let ids: Vec<SandboxId> = all.keys().copied().collect();
        for id in ids {
            let stored = self.look(id).await.map_err(|error| error.to_string())?;
            let metadata = self.volume.metadata(id).await.ok();
            let Some(one) = all.get_mut(&id) else { continue };
            if let Some(noted) = metadata.and_then(|metadata| Origin::read(&metadata.other)) {
                one.from = Some(noted);
            }
            let record = stored.map(|stored| stored.record);
            one.gone = record.as_ref().is_none_or(|record| record.tombstone.is_some());
            one.held = record.as_ref().is_some_and(|record| record.owner.is_some());
            one.latest = record.and_then(|record| record.latest);
            // A later one does not count yet.
            let latest = one.latest;
            one.checkpoints.retain(|one| Some(one.name) <= latest);
        }
        let related = related(id, &all);
        all.retain(|id, _| related.contains(id));
        Ok(all)
    }

    async fn everybody(&self, passes: impl Fn(Option<&str>) -> bool + Send + Sync) -> Result<Family, String> {
        let known: Mutex<BTreeMap<ManifestAt, About>> = Mutex::default();
        let who = |manifest: &Manifest| {
            let about = About::of(manifest).ok().filter(|about| passes(about.state.owner.as_deref()))?;
            known.lock().unwrap_or_else(PoisonError::into_inner).insert(manifest.at(), about);
            Some(manifest.at())
        };
        let usage = self.volume.usage(who).await.map_err(|error| error.whole())?;
        let mut all = Family::new();
        for (at, about) in known.into_inner().unwrap_or_else(PoisonError::into_inner) {
            let share = usage.shares.get(&at).copied().unwrap_or_default();
            let one = all.entry(about.sandbox_id).or_default();
            if one.from.is_none() {
                one.from = about.from.clone().filter(|from| from.sandbox_id != about.sandbox_id);
            }
            match at {
                ManifestAt::Checkpoint { name, .. } => one.checkpoints.push(Branch { name, about, share }),
                ManifestAt::Snapshot { snapshot_id } => one.snapshots.push(Branch { name: snapshot_id, about, share }),
                ManifestAt::Image { .. } | ManifestAt::Filesystem { .. } => {}
            }
        }
        for one in all.values_mut() {
            one.snapshots.sort_by_key(|snapshot| snapshot.about.created_at);
        }
        Ok(all)
    }
}

/// Those that a sandbox came from, and all that came from any of these.
fn related(id: SandboxId, all: &Family) -> BTreeSet<SandboxId> {
    let mut first = id;
    let mut seen = BTreeSet::from([id]);
    // The volume may say anything, also that two came from each other.
    while let Some(from) = all.get(&first).and_then(|one| one.from.as_ref()).map(|from| from.sandbox_id)
        && all.contains_key(&from)
        && seen.insert(from)
    {
        first = from;
    }
    let mut related = BTreeSet::new();
    let mut next = vec![first];
    while let Some(id) = next.pop() {
        if related.insert(id) {
            let children = all.iter().filter(|(_, one)| one.from.as_ref().is_some_and(|from| from.sandbox_id == id));
            next.extend(children.map(|(id, _)| *id));
        }
    }
    related
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(sandbox_id: SandboxId) -> Relative {
        Relative { from: Some(Origin { sandbox_id, checkpoint: None, snapshot_id: None }), ..Relative::default() }
    }

    #[test]
    fn the_whole_family_is_found_and_nobody_else() {
        let [root, child, grandchild, sibling, stranger, lost]: [SandboxId; 6] = std::array::from_fn(|_| SandboxId::random());
        let all = Family::from([
            (root, from(lost)),
            (child, from(root)),
            (grandchild, from(child)),
            (sibling, from(root)),
            (stranger, Relative::default()),
        ]);
        let family = BTreeSet::from([root, child, grandchild, sibling]);
        for id in [root, child, grandchild, sibling] {
            assert_eq!(related(id, &all), family);
        }
        assert_eq!(related(stranger, &all), BTreeSet::from([stranger]));
        let circle = Family::from([(root, from(child)), (child, from(root))]);
        assert_eq!(related(root, &circle), BTreeSet::from([root, child]));
    }
}

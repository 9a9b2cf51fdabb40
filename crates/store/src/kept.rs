//! Which sandboxes a tenant has on the volume, by age: what a list of them begins with. It decides nothing; each is looked at in its record.
//!
//! A name is put there when a sandbox was saved, so after its record: a name without a record is that of a sandbox that is gone.

use std::collections::BTreeSet;

use futures_util::StreamExt as _;
use object_store::{ObjectStoreExt as _, PutMode, path::Path};

use crate::error::{Error, Result};
use crate::layout::{self, KeptName, Tenant};
use crate::volume::{FIRST_PAUSE, LONGEST_PAUSE, Volume};

/// What is in one, with room to grow.
const CONTENT: &[u8] = b"{\"version\":1}\n";

impl Volume {
    /// # Errors
    /// The volume can't be written.
    pub async fn put_kept(&self, tenant: Tenant, name: KeptName) -> Result<()> {
        self.put(&layout::kept_name(tenant, name), CONTENT.into(), PutMode::Overwrite).await
    }

    /// It is no error if it is not there.
    ///
    /// # Errors
    /// The volume can't be written.
    pub async fn remove_kept(&self, tenant: Tenant, name: KeptName) -> Result<()> {
        let path = layout::kept_name(tenant, name);
        match self.store().delete(&path).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(Error::volume("remove", &path, error)),
        }
    }

    /// The first so many of a tenant behind `after`, oldest first: by one list of its names, a request for a thousand of them.
    ///
    /// # Errors
    /// The volume can't be listed.
    pub async fn kept(&self, tenant: Tenant, after: Option<KeptName>, at_most: usize) -> Result<Vec<KeptName>> {
        let mut first = BTreeSet::new();
        let offset = after.map(|after| layout::kept_name(tenant, after));
        self.each_below(&layout::kept(tenant), offset.as_ref(), |path| {
            if let Some(name) = name_of(path).filter(|name| Some(*name) > after) {
                first.insert(name);
            }
            // Whatever the order is in which they come.
            if first.len() > at_most {
                first.pop_last();
            }
        })
        .await?;
        Ok(first.into_iter().collect())
    }

    /// Those of all tenants.
    pub(crate) async fn all_kept(&self) -> Result<BTreeSet<(Tenant, KeptName)>> {
        let mut all = BTreeSet::new();
        self.each_below(&layout::all_kept(), None, |path| {
            let tenant = path.parts().nth(1).and_then(|tenant| tenant.as_ref().parse().ok());
            all.extend(tenant.zip(name_of(path)));
        })
        .await?;
        Ok(all)
    }

    /// May tell of one more than once.
    async fn each_below(&self, dir: &Path, offset: Option<&Path>, mut tell: impl FnMut(&Path)) -> Result<()> {
        let mut pause = FIRST_PAUSE;
        loop {
            let mut objects = match offset {
                Some(offset) => self.store().list_with_offset(Some(dir), offset),
                None => self.store().list(Some(dir)),
            };
            let listed = loop {
                match objects.next().await {
                    Some(Ok(object)) => tell(&object.location),
                    Some(Err(error)) => break Err(error),
                    None => break Ok(()),
                }
            };
            match listed {
                // As with other lists, one whose answer ends too early is asked for again.
                Err(object_store::Error::Generic { .. }) if self.is_far() && pause < LONGEST_PAUSE => {
                    tokio::time::sleep(pause.mul_f64(rand::random_range(0.5..1.5))).await;
                    pause *= 2;
                }
                Ok(()) | Err(object_store::Error::NotFound { .. }) => return Ok(()),
                Err(error) => return Err(Error::volume("list", dir, error)),
            }
        }
    }
}

fn name_of(path: &Path) -> Option<KeptName> {
    path.filename()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::memory::InMemory;
    use sandboxer_protocol::SandboxId;

    use super::*;

    async fn pages_of(volume: Volume) {
        let (mine, other) = (Tenant::of_key(b"mine"), Tenant::of_key(b"other"));
        assert_eq!(volume.kept(mine, None, 10).await.unwrap(), []);
        let mut names: Vec<KeptName> = (0..7_u64).map(|n| KeptName::new(n / 2, SandboxId::random())).collect();
        for name in &names {
            volume.put_kept(mine, *name).await.unwrap();
        }
        volume.put_kept(mine, names[0]).await.unwrap();
        let foreign = KeptName::new(1, SandboxId::random());
        volume.put_kept(other, foreign).await.unwrap();
        names.sort_unstable();
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let page = volume.kept(mine, after, 3).await.unwrap();
            after = page.last().copied();
            found.extend(page);
            if after.is_none() {
                break;
            }
        }
        assert_eq!(found, names);
        assert_eq!(volume.all_kept().await.unwrap().len(), 8);
        volume.remove_kept(mine, names[0]).await.unwrap();
        volume.remove_kept(mine, names[0]).await.unwrap();
        assert_eq!(volume.kept(mine, None, 10).await.unwrap(), names[1..]);
        assert_eq!(volume.kept(other, None, 10).await.unwrap(), [foreign]);
    }

    #[tokio::test]
    async fn pages_together_are_all_of_a_tenant_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        pages_of(Volume::open_directory(dir.path()).unwrap()).await;
        pages_of(Volume::on(Arc::new(InMemory::new()))).await;
    }
}

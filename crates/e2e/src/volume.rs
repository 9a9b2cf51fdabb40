//! A volume that several servers share.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{Options, Server, sha256};

/// Removed with everything on it when it is dropped.
pub struct Volume {
    dir: tempfile::TempDir,
}

impl Default for Volume {
    fn default() -> Self {
        Self { dir: tempfile::Builder::new().prefix("sbx-volume-").tempdir_in("/tmp").unwrap() }
    }
}

impl Volume {
    #[must_use]
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A server that keeps its checkpoints here.
    #[must_use]
    pub fn serve(&self) -> Server {
        self.options().start()
    }

    #[must_use]
    pub fn options(&self) -> Options {
        Options::default().env("CHECKPOINT_AND_RESTORE_PATH", self.path().to_str().unwrap())
    }

    /// The record that decides.
    #[must_use]
    pub fn record(&self, sandbox_id: &str) -> Value {
        serde_json::from_slice(&fs::read(self.path().join("locks").join(format!("{sandbox_id}.lock"))).unwrap()).unwrap()
    }

    #[must_use]
    pub fn metadata(&self, sandbox_id: &str) -> Value {
        serde_json::from_slice(&fs::read(self.path().join(sandbox_id).join("metadata.json")).unwrap()).unwrap()
    }

    /// The file of the newest checkpoint.
    #[must_use]
    pub fn latest(&self, sandbox_id: &str) -> PathBuf {
        let name = self.record(sandbox_id)["latest"].as_str().unwrap().to_owned();
        self.path().join(sandbox_id).join("checkpoints").join(name)
    }

    /// Every pack of sandboxes' data, the largest first. Those of the images are left out.
    #[must_use]
    pub fn packs(&self) -> Vec<PathBuf> {
        let mut packs: Vec<(u64, PathBuf)> =
            files(&self.path().join("packs")).into_iter().map(|file| (fs::metadata(&file).unwrap().len(), file)).collect();
        packs.sort();
        packs.into_iter().rev().map(|(_, file)| file).collect()
    }

    /// What is there, by its digest, without the records and what is being written.
    #[must_use]
    pub fn contents(&self) -> BTreeMap<PathBuf, String> {
        let locks = self.path().join("locks");
        let kept = files(self.path()).into_iter().filter(|file| !file.starts_with(&locks));
        kept.map(|file| (file.clone(), sha256(&fs::read(&file).unwrap()))).collect()
    }
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found
}

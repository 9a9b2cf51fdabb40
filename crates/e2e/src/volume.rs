//! A volume that several servers share.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Output,
    time::Duration,
};

use serde_json::{Value, json};

use crate::{DEADLINE, Options, Server, User, Ws, eventually, sha256, stderr_of, stdout_of};

/// Removed with everything on it when it is dropped.
pub struct Volume {
    dir: tempfile::TempDir,
    /// A filesystem of its own is mounted there.
    mounted: bool,
}

impl Default for Volume {
    fn default() -> Self {
        Self { dir: tempfile::Builder::new().prefix("sbx-volume-").tempdir_in("/tmp").unwrap(), mounted: false }
    }
}

impl Volume {
    /// One that belongs to this user.
    #[must_use]
    pub fn of(user: User) -> Self {
        let volume = Self::default();
        user.own(volume.path());
        volume
    }

    /// One that has only this much room, on a filesystem of its own. None: only root can mount one.
    #[must_use]
    pub fn small(bytes: u64) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            return None;
        }
        let mut volume = Self::default();
        let size = format!("size={bytes},mode=700");
        nix::mount::mount(Some("sandboxer-e2e"), volume.path(), Some("tmpfs"), nix::mount::MsFlags::empty(), Some(size.as_str())).unwrap();
        volume.mounted = true;
        Some(volume)
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A server that keeps its checkpoints here.
    #[must_use]
    pub fn serve(&self) -> Server {
        self.options().start()
    }

    /// The same as this user.
    #[must_use]
    pub fn serve_as(&self, user: User) -> Server {
        self.options().user(user).start()
    }

    #[must_use]
    pub fn options(&self) -> Options {
        Options::default().env("CHECKPOINT_AND_RESTORE_PATH", self.path().to_str().unwrap())
    }

    /// `sandboxer store`, with whatever it prints.
    #[must_use]
    pub fn store(&self, arguments: &[&str]) -> Output {
        crate::command().arg("store").args(arguments).arg("--checkpoint-path").arg(self.path()).output().unwrap()
    }

    /// Nothing on it is broken, down to the last byte.
    pub fn verify(&self) {
        let verified = self.store(&["verify"]);
        assert!(verified.status.success(), "{}{}", stdout_of(&verified), stderr_of(&verified));
    }

    /// The same as far as names and sizes tell.
    pub fn verify_quickly(&self) {
        let verified = self.store(&["verify", "--quick"]);
        assert!(verified.status.success(), "{}{}", stdout_of(&verified), stderr_of(&verified));
    }

    /// What `sandboxer store ls` says of a sandbox.
    #[must_use]
    pub fn ls(&self, sandbox_id: &str) -> Value {
        let listed: Value = serde_json::from_slice(&self.store(&["ls", "--json"]).stdout).unwrap();
        listed["items"].as_array().unwrap().iter().find(|item| item["id"] == sandbox_id).unwrap().clone()
    }

    /// Everything on it belongs to its owner, and nobody else can so much as look.
    pub fn expect_private(&self) {
        let owner = fs::metadata(self.path()).unwrap().uid();
        let mut directories = vec![self.path().to_owned()];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let entry = entry.unwrap();
                // What is being written may have its final name by now.
                let Ok(about) = entry.metadata() else { continue };
                let mode = about.mode() & 0o7777;
                assert_eq!((about.uid(), mode & 0o077), (owner, 0), "{} is {mode:o}", entry.path().display());
                if about.is_dir() {
                    directories.push(entry.path());
                }
            }
        }
    }

    /// A server whose lease is shorter than usual, for tests that wait for its end.
    #[must_use]
    pub fn serve_with_lease(&self, lease: Duration) -> Server {
        self.options().arg("--lease").arg(lease.as_secs_f64().to_string()).start()
    }

    /// A sandbox at this server with `file` in it, saved and with nobody attached.
    pub async fn saved_sandbox(&self, server: &Server, file: &str) -> String {
        let mut ws = Ws::create_with(server, json!({"enable_checkpoint": true})).await;
        let id = ws.sandbox_id.clone();
        let _ = ws.bash(&format!("echo {file} > f")).await.ok();
        ws.close().await;
        // And nothing of it is still being written.
        let at_work = || fs::read_dir(self.path().join("collect/intents")).is_ok_and(|mut dir| dir.next().is_some());
        let saved = || self.record(&id)["latest"].is_string() && self.metadata(&id)["lastCheckpointedAt"].is_string() && !at_work();
        eventually("the disconnect is saved", DEADLINE, saved).await;
        id
    }

    /// Until this instance is registered as the one that waits for the sandbox.
    pub async fn awaited_by(&self, sandbox_id: &str, server: &Server) {
        let instance = server.instance();
        eventually("it waits", DEADLINE, || self.record(sandbox_id)["waiter"]["instance"] == instance.as_str()).await;
    }

    /// Takes the volume away from everybody, as an unmount does.
    pub fn hide(&self) {
        fs::rename(self.path(), self.elsewhere()).unwrap();
    }

    /// It is back.
    pub fn show(&self) {
        fs::rename(self.elsewhere(), self.path()).unwrap();
    }

    fn elsewhere(&self) -> PathBuf {
        self.path().with_extension("away")
    }

    /// The record that decides.
    #[must_use]
    pub fn record(&self, sandbox_id: &str) -> Value {
        serde_json::from_slice(&fs::read(self.path().join("locks").join(format!("{sandbox_id}.lock"))).unwrap()).unwrap()
    }

    /// The same where the copy for people may be behind: its writer was killed.
    #[must_use]
    pub fn record_now(&self, sandbox_id: &str) -> Value {
        let mut versions = files(&self.path().join("locks").join(format!("{sandbox_id}.versions")));
        versions.retain(|version| version.extension().is_none());
        serde_json::from_slice(&fs::read(versions.iter().max().unwrap()).unwrap()).unwrap()
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

    /// What is there, and how large it is.
    #[must_use]
    pub fn sizes(&self) -> BTreeMap<PathBuf, u64> {
        files(self.path()).into_iter().filter_map(|file| Some((file.clone(), fs::metadata(&file).ok()?.len()))).collect()
    }

    /// What is there, by its digest, without what is being written.
    #[must_use]
    pub fn contents(&self) -> BTreeMap<PathBuf, String> {
        // What is written now may have another name by the time it is read.
        let read = |file: PathBuf| Some((file.clone(), sha256(&fs::read(&file).ok()?)));
        files(self.path()).into_iter().filter_map(read).collect()
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        if self.elsewhere().exists() {
            self.show();
        }
        if self.mounted {
            let _ = nix::mount::umount2(self.path(), nix::mount::MntFlags::MNT_DETACH);
        }
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

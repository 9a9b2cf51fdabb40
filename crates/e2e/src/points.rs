//! Fail points of the volume's writes, armed in a server that runs.

use std::fs;

use crate::Options;

/// For servers of a build with debug assertions, which the tests use; others have no such points.
pub struct FailPoints {
    dir: tempfile::TempDir,
}

impl Default for FailPoints {
    fn default() -> Self {
        Self { dir: tempfile::Builder::new().prefix("sbx-points-").tempdir_in("/tmp").unwrap() }
    }
}

impl FailPoints {
    /// What is written, in the order of a save: data, the manifest, the record that makes it count, copies for people.
    pub const KINDS: [&str; 5] = ["pack", "manifest", "publish", "latest", "metadata"];
    /// How far such a write has come.
    pub const STAGES: [&str; 5] = ["before", "written", "synced", "named", "after"];

    /// Every point of a save, in order.
    pub fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
        Self::KINDS.into_iter().flat_map(|kind| Self::STAGES.map(|stage| (kind, stage)))
    }

    /// Whether a save that is cut off there counts: from the moment at which the record has its name.
    #[must_use]
    pub fn counts(kind: &str, stage: &str) -> bool {
        match kind {
            "pack" | "manifest" => false,
            "publish" => matches!(stage, "named" | "after"),
            _ => true,
        }
    }

    #[must_use]
    pub fn on(&self, options: Options) -> Options {
        options.env("SANDBOXER_FAILPOINTS", format!("@{}", self.dir.path().join("armed").display()))
    }

    /// Arms these points, such as `manifest:synced=kill`, and no others.
    pub fn arm(&self, points: &str) {
        let new = self.dir.path().join("new");
        fs::write(&new, points).unwrap();
        // At once: the server may be reading.
        fs::rename(new, self.dir.path().join("armed")).unwrap();
    }

    /// Every write stands still from here on, until [`FailPoints::go_on`]: a server looks up its points before each, and this is a FIFO
    /// that nothing is written into.
    pub fn stall(&self) {
        let new = self.dir.path().join("new");
        nix::unistd::mkfifo(&new, nix::sys::stat::Mode::S_IRWXU).unwrap();
        fs::rename(new, self.dir.path().join("armed")).unwrap();
    }

    /// The writes that stand still go on.
    pub fn go_on(&self) {
        let path = self.dir.path().join("armed");
        // Opened in both directions it opens at once, and whoever waits in an open of it goes on to its end.
        let fifo = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        fs::remove_file(path).unwrap();
        drop(fifo);
    }

    pub fn disarm(&self) {
        fs::remove_file(self.dir.path().join("armed")).unwrap();
    }
}

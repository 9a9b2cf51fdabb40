//! Filesystem snapshots, as a client sees them.

use serde_json::{Value, json};

use crate::{Options, Server, Volume, Ws};

impl Volume {
    /// A server that keeps its filesystem snapshots here.
    #[must_use]
    pub fn filesystems(&self) -> Options {
        Options::default().env("FILESYSTEM_SNAPSHOT_MOUNT_PATH", self.path().to_str().unwrap())
    }
}

impl Ws {
    /// Makes a filesystem snapshot.
    pub async fn snapshot_filesystem(&mut self, name: &str) {
        self.send(json!({"action": "snapshot_filesystem", "name": name})).await;
        self.expect_status("SANDBOX_FILESYSTEM_SNAPSHOT_CREATING").await;
        self.expect_status("SANDBOX_FILESYSTEM_SNAPSHOT_CREATED").await;
    }

    /// It fails, and says so as the contract wants it; the sandbox goes on. Returns the message.
    pub async fn expect_no_filesystem_snapshot(&mut self, request: Value, code: &str) -> String {
        self.send(request).await;
        self.expect_status("SANDBOX_FILESYSTEM_SNAPSHOT_CREATING").await;
        self.expect_status("SANDBOX_FILESYSTEM_SNAPSHOT_ERROR").await;
        let error = self.expect_error(code).await;
        error["message"].as_str().unwrap().to_owned()
    }

    /// A sandbox with the files of a snapshot.
    pub async fn create_from(server: &Server, name: &str) -> Self {
        Self::create_with(server, json!({"filesystem_snapshot_name": name})).await
    }

    /// No sandbox is made, and why is said as the contract wants it. Returns the message.
    pub async fn expect_not_created(server: &Server, configuration: Value, code: &str) -> String {
        let mut ws = Self::open(server, "/create").await;
        ws.send(configuration).await;
        ws.expect_status("SANDBOX_CREATING").await;
        ws.expect_status("SANDBOX_CREATION_ERROR").await;
        let error = ws.expect_error(code).await;
        ws.expect_close(4000).await;
        error["message"].as_str().unwrap().to_owned()
    }
}

//! What a server keeps ready for those who have not asked yet: it is none of its sandboxes.

use std::{collections::BTreeSet, fs};

use serde_json::Value;

use crate::{DEADLINE, Server, eventually, host};

impl Server {
    /// Containers that wait in the pool, by their ids. Nobody has a token for them.
    #[must_use]
    pub fn waiting(&self) -> BTreeSet<String> {
        let entries = fs::read_dir(self.data_dir().join("sandboxes")).into_iter().flatten().flatten();
        let waits = |name: &String| {
            let record = fs::read(self.data_dir().join("sandboxes").join(name).join("record.json")).unwrap_or_default();
            let record: Value = serde_json::from_slice(&record).unwrap_or_default();
            record["standby"] == true && record["token_sha256"] == ""
        };
        entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(waits).collect()
    }

    /// Waits until so many sandboxes, and containers for restores, are ready.
    pub async fn filled(&self, sandboxes: usize, containers: usize) {
        let wanted = format!("sandboxer_pooled_sandboxes {sandboxes}\n");
        let also = format!("sandboxer_pooled_containers {containers}\n");
        eventually("the pool is as full as it is to be", DEADLINE, || {
            let text = self.get("/metrics").body;
            text.contains(&wanted) && text.contains(&also)
        })
        .await;
    }

    /// Processes that belong to this server's sandboxes, the server itself not among them. While it runs, what waits in its pool does not count;
    /// once it has ended, nothing may be left of that either.
    #[must_use]
    pub fn sandbox_processes(&self) -> Vec<host::Process> {
        let before = self.waiting();
        let mut processes = self.every_process();
        if host::alive(self.pid()) {
            // What was handed out meanwhile counts the next time; what has come into the pool does not.
            let waiting = &before | &self.waiting();
            processes.retain(|process| !waiting.iter().any(|id| process.command.contains(id)));
        }
        processes
    }

    /// Likewise, with those of the pool.
    #[must_use]
    pub fn every_process(&self) -> Vec<host::Process> {
        let mut processes = host::processes_naming(self.data_dir());
        // Whoever it is just starting has its own command line still.
        let own = processes.iter().find(|process| process.pid == self.pid()).map(|process| process.command.clone());
        processes.retain(|process| process.pid != self.pid() && Some(&process.command) != own.as_ref());
        processes
    }

    /// The directories of its sandboxes, those in the pool not among them.
    #[must_use]
    pub fn sandbox_directories(&self) -> BTreeSet<String> {
        let entries = fs::read_dir(self.data_dir().join("sandboxes")).into_iter().flatten().flatten();
        let all: BTreeSet<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        &all - &self.waiting()
    }

    /// What the container of a sandbox is called: its id, unless it was restored into one that waited, or went back.
    #[must_use]
    pub fn container_of(&self, sandbox_id: &str) -> Option<String> {
        self.sandbox_directories().into_iter().find(|name| {
            let record = fs::read(self.data_dir().join("sandboxes").join(name).join("record.json")).unwrap_or_default();
            let record: Value = serde_json::from_slice(&record).unwrap_or_default();
            record["id"] == sandbox_id && record["standby"] != true
        })
    }
}

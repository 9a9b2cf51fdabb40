//! Sandboxes and snapshots of a server, by its resource API: whether or not anybody is attached to them.

use std::collections::BTreeMap;

use sandboxer_protocol::{SandboxId, agent::Raw, client::ErrorCode};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::{Answer, Api, Error, Files, Options};

/// How a sandbox is.
///
/// ```no_run
/// # async fn example(api: sandboxer_client::Api, id: sandboxer_client::SandboxId) -> Result<(), sandboxer_client::Error> {
/// use sandboxer_client::SandboxStatus;
///
/// if api.sandbox(id).await?.status == SandboxStatus::Ready {
///     api.delete_sandbox(id).await?;
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SandboxStatus {
    /// It is being made.
    Provisioning,
    /// It runs.
    Ready,
    /// It rests on the volume; attaching restores it.
    Saved,
    /// It could not be made, or died.
    Failed,
    /// It is no more.
    Gone,
    /// Something that this library does not know.
    #[serde(other)]
    Unknown,
}

/// What a server tells of a sandbox.
///
/// ```no_run
/// # async fn example(api: sandboxer_client::Api) -> Result<(), sandboxer_client::Error> {
/// for sandbox in api.sandboxes().await? {
///     println!("{} {:?} since {}", sandbox.id, sandbox.status, sandbox.created_at);
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct SandboxInfo {
    /// Its identity.
    pub id: SandboxId,
    /// What it is, such as `gvisor`.
    pub kind: String,
    /// How it is.
    pub status: SandboxStatus,
    /// When it was made, in the form of RFC 3339.
    pub created_at: String,
    /// Notes of its creator.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// How often it was set back, of gVisor sandboxes.
    #[serde(default)]
    pub generation: Option<u64>,
    /// The secret that an attach may have to show; only in the answer that tells of its making.
    #[serde(default)]
    pub token: Option<String>,
    /// Why it failed.
    #[serde(default)]
    pub error: Option<String>,
}

/// What a server tells of a snapshot of a whole sandbox.
///
/// ```no_run
/// # async fn example(api: sandboxer_client::Api, id: sandboxer_client::SandboxId) -> Result<(), sandboxer_client::Error> {
/// for snapshot in api.snapshots().await? {
///     println!("{} of {}, {:?} bytes", snapshot.id, snapshot.sandbox_id, snapshot.size_bytes);
/// }
/// let snapshot = api.snapshot(id, None).await?;
/// assert_eq!(api.get_snapshot(&snapshot.id).await?, snapshot);
/// let copies = api.restore_many(&snapshot.id, 3).await?;
/// api.delete_snapshot(&snapshot.id).await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct SnapshotInfo {
    /// Its identity.
    pub id: String,
    /// The sandbox that it was taken of.
    pub sandbox_id: SandboxId,
    /// `pending`, `completed` or `failed`.
    pub status: String,
    /// When it was taken, in the form of RFC 3339.
    pub created_at: String,
    /// How much it takes, shared with others or not; none: not known.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// More of it, such as its `name`.
    #[serde(default)]
    pub meta: BTreeMap<String, String>,
    /// Why it failed.
    #[serde(default)]
    pub error: Option<String>,
}

/// What a server tells of a checkpoint.
///
/// ```no_run
/// # async fn example(api: sandboxer_client::Api, id: sandboxer_client::SandboxId) -> Result<(), sandboxer_client::Error> {
/// api.checkpoint(id, true).await?;
/// for checkpoint in api.checkpoints(id).await? {
///     println!("{} at {}{}", checkpoint.name, checkpoint.created_at, if checkpoint.latest { ", the latest" } else { "" });
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct CheckpointInfo {
    /// `checkpoint_….img`
    pub name: String,
    /// When it was made, in the form of RFC 3339.
    pub created_at: String,
    /// The server made it by itself.
    pub automatic: bool,
    /// It is what an attach goes on from.
    pub latest: bool,
    /// How much it takes, shared with others or not.
    pub size_bytes: u64,
}

/// What a server tells of a filesystem snapshot.
///
/// ```no_run
/// # async fn example(api: sandboxer_client::Api) -> Result<(), sandboxer_client::Error> {
/// for snapshot in api.filesystem_snapshots().await? {
///     println!("{}: {} files and directories", snapshot.name, snapshot.entries);
///     if snapshot.entries == 0 {
///         api.delete_filesystem_snapshot(&snapshot.name).await?;
///     }
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct FilesystemInfo {
    /// By which a sandbox is made from it.
    pub name: String,
    /// When it was made, in the form of RFC 3339.
    pub created_at: String,
    /// Files, directories and whatever else has a name.
    pub entries: u64,
    /// Bytes of all files, holes included.
    pub content_bytes: u64,
    /// How much it takes, shared with others or not.
    pub size_bytes: u64,
    /// Why the snapshot can't be used: it is damaged. Such a snapshot can be deleted and replaced; only its name is known.
    #[serde(default)]
    pub error: Option<String>,
}

/// Where a sandbox goes back to.
///
/// ```no_run
/// # async fn example(api: sandboxer_client::Api, id: sandboxer_client::SandboxId) -> Result<(), sandboxer_client::Error> {
/// use sandboxer_client::Target;
///
/// api.rollback(id, Target::snapshot("0f5ae5a5-3a4c-4b2c-8c6e-1d2f3a4b5c6d")).await?;
/// api.rollback(id, Target::checkpoint("checkpoint_1700000000000.img")).await?;
/// if let Some(first) = api.checkpoints(id).await?.first() {
///     api.rollback(id, first).await?;
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    field: &'static str,
    name: String,
}

impl Target {
    /// To a snapshot, of this sandbox or of another.
    #[must_use]
    pub fn snapshot(id: impl Into<String>) -> Self {
        Self { field: "snapshot_id", name: id.into() }
    }

    /// To one of its own checkpoints.
    #[must_use]
    pub fn checkpoint(name: impl Into<String>) -> Self {
        Self { field: "checkpoint", name: name.into() }
    }
}

impl From<&SnapshotInfo> for Target {
    fn from(snapshot: &SnapshotInfo) -> Self {
        Self::snapshot(&snapshot.id)
    }
}

impl From<&CheckpointInfo> for Target {
    fn from(checkpoint: &CheckpointInfo) -> Self {
        Self::checkpoint(&checkpoint.name)
    }
}

/// Sandboxes and snapshots, as objects. What is refused is [`Error::NotFound`], [`Error::InUse`], [`Error::Invalid`] or
/// [`Error::Refused`] with its code.
impl Api {
    /// Makes a gVisor sandbox without attaching to it.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), sandboxer_client::Error> {
    /// use sandboxer_client::{Api, Connection, Options, Sandbox};
    ///
    /// let server = "http://127.0.0.1:8080";
    /// let api = Api::new(server, &Connection::default())?;
    /// let made = api.create_sandbox(&Options::default()).await?;
    /// let sandbox = Sandbox::attach(server, made.id, made.token.as_deref()).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// It could not be made.
    pub async fn create_sandbox(&self, options: &Options) -> Result<SandboxInfo, Error> {
        self.made("/v1/sandboxes", &json!(options.config)).await
    }

    /// All sandboxes of this key that this server has in its memory.
    ///
    /// # Errors
    /// The server can't be asked.
    pub async fn sandboxes(&self) -> Result<Vec<SandboxInfo>, Error> {
        self.pages("/v1/sandboxes").await
    }

    /// The same, with those that are on the volume and not in this server's memory: saved, or at another instance.
    ///
    /// ```no_run
    /// # async fn example(api: sandboxer_client::Api) -> Result<(), sandboxer_client::Error> {
    /// for sandbox in api.saved_sandboxes().await? {
    ///     println!("{} can be attached to", sandbox.id);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The server, or its volume, can't be asked.
    pub async fn saved_sandboxes(&self) -> Result<Vec<SandboxInfo>, Error> {
        self.pages("/v1/sandboxes?saved=true").await
    }

    /// One sandbox, in memory or saved.
    ///
    /// # Errors
    /// [`Error::NotFound`]
    pub async fn sandbox(&self, id: SandboxId) -> Result<SandboxInfo, Error> {
        parsed(self.call("GET", &format!("/v1/sandboxes/{id}"), None).await?)
    }

    /// Ends a sandbox that nobody is attached to, with everything in it and its checkpoints. Its snapshots stay.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::InUse`]
    pub async fn delete_sandbox(&self, id: SandboxId) -> Result<(), Error> {
        self.call("DELETE", &format!("/v1/sandboxes/{id}"), None).await.map(drop)
    }

    /// Its files.
    #[must_use]
    pub fn files(&self, id: SandboxId) -> Files {
        Files::of(self.clone(), id)
    }

    /// A snapshot of the whole sandbox, which goes on.
    ///
    /// ```no_run
    /// # async fn example(api: sandboxer_client::Api, id: sandboxer_client::SandboxId) -> Result<(), sandboxer_client::Error> {
    /// let snapshot = api.snapshot(id, Some("before the upgrade")).await?;
    /// let copy = api.restore(&snapshot.id).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// It could not be taken; the sandbox is unharmed.
    pub async fn snapshot(&self, id: SandboxId, name: Option<&str>) -> Result<SnapshotInfo, Error> {
        self.made(&format!("/v1/sandboxes/{id}/snapshot"), &json!({ "name": name })).await
    }

    /// All snapshots of this key.
    ///
    /// # Errors
    /// The server can't be asked.
    pub async fn snapshots(&self) -> Result<Vec<SnapshotInfo>, Error> {
        self.pages("/v1/snapshots").await
    }

    /// One snapshot.
    ///
    /// # Errors
    /// [`Error::NotFound`]
    pub async fn get_snapshot(&self, id: &str) -> Result<SnapshotInfo, Error> {
        parsed(self.call("GET", &format!("/v1/snapshots/{}", encoded(id)), None).await?)
    }

    /// Deletes a snapshot. What was made from it stays.
    ///
    /// # Errors
    /// [`Error::NotFound`]
    pub async fn delete_snapshot(&self, id: &str) -> Result<(), Error> {
        self.call("DELETE", &format!("/v1/snapshots/{}", encoded(id)), None).await.map(drop)
    }

    /// A new sandbox from a snapshot.
    ///
    /// # Errors
    /// There is no such snapshot, or no room.
    pub async fn restore(&self, snapshot_id: &str) -> Result<SandboxInfo, Error> {
        self.made(&format!("/v1/snapshots/{}/restore", encoded(snapshot_id)), &json!({})).await
    }

    /// So many new sandboxes from a snapshot: all of them, or none.
    ///
    /// # Errors
    /// As [`restore`](Self::restore).
    pub async fn restore_many(&self, snapshot_id: &str, count: usize) -> Result<Vec<SandboxInfo>, Error> {
        let made: Many = self.made(&format!("/v1/snapshots/{}/restore", encoded(snapshot_id)), &json!({ "count": count })).await?;
        Ok(made.items)
    }

    /// Copies of a sandbox as it is now, with its memory, processes and files: all of them, or none.
    ///
    /// # Errors
    /// There is no such sandbox, or no room.
    pub async fn fork(&self, id: SandboxId, count: usize) -> Result<Vec<SandboxInfo>, Error> {
        let made: Many = self.made(&format!("/v1/sandboxes/{id}/fork"), &json!({ "count": count })).await?;
        Ok(made.items)
    }

    /// Saves a sandbox that nobody is attached to, with what runs in it if that is wanted. It rests then, until somebody attaches.
    ///
    /// # Errors
    /// [`Error::InUse`], or it can't be saved; it goes on then.
    pub async fn checkpoint(&self, id: SandboxId, include_execution: bool) -> Result<CheckpointInfo, Error> {
        self.made(&format!("/v1/sandboxes/{id}/checkpoint"), &json!({ "include_execution": include_execution })).await
    }

    /// The checkpoints of a sandbox, oldest first, whether it runs or not.
    ///
    /// # Errors
    /// [`Error::NotFound`]
    pub async fn checkpoints(&self, id: SandboxId) -> Result<Vec<CheckpointInfo>, Error> {
        self.pages(&format!("/v1/sandboxes/{id}/checkpoints")).await
    }

    /// Has a sandbox go back, in place, whether it runs or not. Nothing newer is deleted.
    ///
    /// # Errors
    /// [`Error::NotFound`], or it can't be restored; the sandbox is unharmed then.
    pub async fn rollback(&self, id: SandboxId, to: impl Into<Target>) -> Result<SandboxInfo, Error> {
        let Target { field, name } = to.into();
        self.made(&format!("/v1/sandboxes/{id}/rollback"), &json!({ field: name })).await
    }

    /// Keeps the files of a sandbox under a name; it goes on.
    ///
    /// # Errors
    /// [`Error::Refused`] with `name_taken` unless it may be replaced.
    pub async fn snapshot_filesystem(&self, id: SandboxId, name: &str, replace: bool) -> Result<FilesystemInfo, Error> {
        self.made(&format!("/v1/sandboxes/{id}/filesystem-snapshot"), &json!({ "name": name, "replace": replace })).await
    }

    /// All filesystem snapshots of this key.
    ///
    /// # Errors
    /// The server can't be asked.
    pub async fn filesystem_snapshots(&self) -> Result<Vec<FilesystemInfo>, Error> {
        self.pages("/v1/filesystem-snapshots").await
    }

    /// Deletes a filesystem snapshot. What was made from it stays.
    ///
    /// # Errors
    /// [`Error::NotFound`]
    pub async fn delete_filesystem_snapshot(&self, name: &str) -> Result<(), Error> {
        self.call("DELETE", &format!("/v1/filesystem-snapshots/{}", encoded(name)), None).await.map(drop)
    }

    async fn made<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T, Error> {
        parsed(self.call("POST", path, Some(body)).await?)
    }

    async fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value, Error> {
        accepted(self.request(method, path, body).await?)
    }

    async fn pages<T: DeserializeOwned>(&self, path: &str) -> Result<Vec<T>, Error> {
        let (mut all, mut cursor) = (Vec::new(), String::new());
        let join = if path.contains('?') { '&' } else { '?' };
        loop {
            let page: Page<T> = parsed(self.call("GET", &format!("{path}{join}limit=1000{cursor}"), None).await?)?;
            all.extend(page.items);
            match page.next_cursor {
                Some(next) => cursor = format!("&cursor={}", encoded(&next)),
                None => return Ok(all),
            }
        }
    }
}

#[derive(Deserialize)]
struct Many {
    items: Vec<SandboxInfo>,
}

#[derive(Deserialize)]
struct Page<T> {
    items: Vec<T>,
    next_cursor: Option<String>,
}

fn encoded(text: &str) -> String {
    Raw::new(text).encoded()
}

/// What the server refused is an error that says what to do.
fn accepted(answer: Answer) -> Result<Value, Error> {
    if (200..300).contains(&answer.status) {
        return Ok(answer.body);
    }
    let error = &answer.body["error"];
    let code: ErrorCode = serde_json::from_value(error["code"].clone()).unwrap_or(ErrorCode::Unknown);
    let message = error["message"].as_str().unwrap_or("The server did not say why.").to_owned();
    Err(match answer.status {
        404 | 410 => Error::NotFound { message },
        409 if error["code"] == "in_use" => Error::InUse { message },
        400 | 413 | 422 if !matches!(code, ErrorCode::LimitTooHigh | ErrorCode::CheckpointNotEnabled) => Error::Invalid { message },
        _ => Error::Refused { code, message },
    })
}

fn parsed<T: DeserializeOwned>(object: Value) -> Result<T, Error> {
    serde_json::from_value(object).map_err(|error| Error::unavailable(format!("The server tells of it in other words: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_refused_says_what_to_do() {
        let refused =
            |status, code: &str| accepted(Answer { status, body: json!({ "error": { "code": code, "message": "why" } }) }).unwrap_err();
        assert!(matches!(refused(404, "not_found"), Error::NotFound { .. }));
        assert!(matches!(refused(409, "in_use"), Error::InUse { .. }));
        assert!(matches!(refused(422, "invalid_field"), Error::Invalid { .. }));
        assert!(matches!(refused(503, "no_capacity"), Error::Refused { code: ErrorCode::NoCapacity, .. }));
        assert!(matches!(refused(418, "of_tomorrow"), Error::Refused { code: ErrorCode::Unknown, .. }));
        assert!(accepted(Answer { status: 204, body: Value::Null }).is_ok());
    }

    #[test]
    fn an_object_of_a_newer_server_is_understood() {
        let object = json!({
            "id": "0f5ae5a5-3a4c-4b2c-8c6e-1d2f3a4b5c6d", "kind": "gvisor", "status": "asleep", "created_at": "2026-11-17T00:00:00Z", "new": 1,
        });
        assert_eq!(parsed::<SandboxInfo>(object).unwrap().status, SandboxStatus::Unknown);
        assert!(matches!(parsed::<SandboxInfo>(json!({})), Err(Error::Unavailable { .. })));
    }
}

//! Files over the WebSocket, for clients that have nothing else. A file or an archive of any size goes in pieces, one message each.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::request::Encoding;

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum FileOp {
    Read,
    Write,
    List,
    Stat,
    Remove,
    Rename,
    Mkdir,
    /// All that is in a directory, as a tar archive, piece by piece.
    Pack,
    /// What is in a tar archive goes into a directory, piece by piece.
    Unpack,
    /// What changes in a directory is told from here on.
    Watch,
    /// Ends what is under way with the same `id` and `path`, if anything is. Nothing of it comes after the answer.
    Cancel,
}

/// `{"action":"file","op":…,"path":…}`. What an `op` has no use for is ignored.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct FileRequest {
    pub op: FileOp,
    /// Absolute.
    pub path: String,
    /// Comes back with the answer. The pieces of one file or archive have the same. `watch`: needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `read`: from this byte on. `pack`: the bytes that came so far; 0, or left out, begins. `write`, `unpack`: the bytes sent so far; if given it has to be
    /// right, so that no piece is taken for the first of another file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// `read`, `pack`: so many bytes; at most, and by default, 1 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<u64>,
    /// `write`, `unpack`: the content, or its next piece.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// `write`, `unpack`: how `data` is written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoding: Option<Encoding>,
    /// `write`, `unpack`: another piece follows; a file gets its name with the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub more: Option<bool>,
    /// `write`, `mkdir`: in octal, such as `644`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// `write`, `mkdir`, `unpack`: make the directories that are missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parents: Option<bool>,
    /// `list`: at most so many; 100 by default, 1000 at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// `list`: the `next_cursor` of the answer before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
    /// `stat`: of what a link leads to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follow: Option<bool>,
    /// `remove`: with all that is in it. `watch`: also in all directories below it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recursive: Option<bool>,
    /// `rename`: the new path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// `rename`: what is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replace: Option<bool>,
    /// `pack`: send what is being written to as far as it was there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live: Option<bool>,
}

/// What became of it. Answers come in the order of the requests; what a watch tells comes between them, and has `changes`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct FileEvent {
    pub op: FileOp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `read`, `pack`: the bytes, in base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// `read`, `pack`: where they begin. `write`, `unpack` with `more`: how many bytes were taken so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// `read`: how large the file is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// `read`, `pack`: nothing follows these bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<bool>,
    /// The object of the file, as the resource API shows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<Map<String, Value>>,
    /// `list`: what is in the directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub items: Option<Vec<Map<String, Value>>>,
    /// `list`: there is more, behind this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
    /// `watch`: what changed since, in the order in which it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changes: Option<Vec<Map<String, Value>>>,
    /// It was not done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<FileError>,
}

/// Why not; `code` as in the resource API, such as `file_not_found`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct FileError {
    pub code: String,
    pub message: String,
}

impl FileEvent {
    /// With nothing to tell but that it was done.
    #[must_use]
    pub fn new(op: FileOp, id: Option<String>) -> Self {
        Self {
            op,
            id,
            data: None,
            offset: None,
            size: None,
            end: None,
            file: None,
            items: None,
            next_cursor: None,
            changes: None,
            error: None,
        }
    }
}

//! Files of a sandbox, over HTTP: beside the connection that its programs use, and not held up by them.

use std::path::Path;

use bytes::Bytes;
use sandboxer_protocol::{SandboxId, agent::Raw};
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncWrite};

mod changes;
mod tree;

pub use self::changes::{Change, ChangeKind, Changes};

use crate::{Answer, Api, Error};

/// Names that are asked for at once.
const PAGE: usize = 1000;

/// The files of one sandbox, by absolute paths. They mean what they mean to a program in it.
///
/// ```no_run
/// # async fn example(sandbox: sandboxer_client::Sandbox) -> Result<(), sandboxer_client::Error> {
/// use std::path::Path;
///
/// let files = sandbox.files();
/// files.write("/root/data/in.csv", "a,b\n1,2\n").await?;
/// sandbox.bash("sort data/in.csv > data/out.csv").await?.wait().await?;
/// let sorted = files.read("/root/data/out.csv").await?;
/// for file in files.list("/root/data").await? {
///     println!("{} {}", file.name, file.size);
/// }
/// // What is large passes through.
/// files.write_from("/root/tool", Some(0o755), tokio::io::empty()).await?;
/// files.read_into("/root/tool", &mut tokio::io::sink()).await?;
/// files.upload(Path::new("project"), "/root/project").await?;
/// files.download("/root/project", Path::new("back")).await?;
/// files.mkdir("/root/old").await?;
/// files.rename("/root/tool", "/root/old/tool").await?;
/// files.remove("/root/old/tool").await?;
/// files.remove_all("/root/project").await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Files {
    api: Api,
    id: SandboxId,
}

/// What something is.
///
/// ```no_run
/// # async fn example(files: sandboxer_client::Files) -> Result<(), sandboxer_client::Error> {
/// use sandboxer_client::FileKind;
///
/// assert_eq!(files.stat("/root").await?.kind, FileKind::Directory);
/// assert_eq!(files.link_stat("/bin").await?.kind, FileKind::Symlink);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FileKind {
    /// A file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A FIFO, a socket, a device.
    #[serde(other)]
    Other,
}

/// What is known of a file.
///
/// ```no_run
/// # async fn example(api: sandboxer_client::Api, id: sandboxer_client::SandboxId) -> Result<(), sandboxer_client::Error> {
/// use sandboxer_client::Files;
///
/// let info = Files::of(api, id).stat("/etc/hostname").await?;
/// println!("{} {}:{} {:>8} {}", info.mode, info.uid, info.gid, info.size, info.path);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct FileInfo {
    /// Its path; with U+FFFD for what is no UTF-8.
    pub path: String,
    /// The last part of it.
    pub name: String,
    /// What it is.
    pub kind: FileKind,
    /// In bytes.
    pub size: u64,
    /// In octal, such as `0644`.
    pub mode: String,
    /// Whose it is.
    pub uid: u32,
    /// And which group's.
    pub gid: u32,
    /// When it was last changed, in the form of RFC 3339.
    pub modified_at: Option<String>,
    /// Of a link: where it leads to.
    pub target: Option<String>,
    /// Its path, percent-encoded, where it is no UTF-8.
    pub encoded_path: Option<String>,
}

impl Files {
    /// Of any sandbox that runs at a server, attached or not.
    #[must_use]
    pub fn of(api: Api, id: SandboxId) -> Self {
        Self { api, id }
    }

    fn address(&self, below: &str, path: impl AsRef<[u8]>, more: &str) -> String {
        format!("/v1/sandboxes/{}/files{below}?path={}{more}", self.id, Raw::new(path.as_ref()).encoded())
    }

    async fn ask(&self, method: &str, below: &str, path: impl AsRef<[u8]>, more: &str) -> Result<Answer, Error> {
        done(self.api.request(method, &self.address(below, path, more), None).await?)
    }

    /// All of a file.
    ///
    /// # Errors
    /// [`Error::File`] with what is wrong, [`Error::Unavailable`] if it could not be read to its end: it may have changed meanwhile.
    pub async fn read(&self, path: impl AsRef<[u8]>) -> Result<Vec<u8>, Error> {
        let mut all = Vec::new();
        self.read_into(path, &mut all).await?;
        Ok(all)
    }

    /// Writes a file's content as it comes.
    ///
    /// # Errors
    /// As [`read`](Self::read). What was written before is not the whole file.
    pub async fn read_into(&self, path: impl AsRef<[u8]>, into: &mut (impl AsyncWrite + Unpin)) -> Result<(), Error> {
        done(self.api.download(&self.address("", path, ""), into).await?).map(drop)
    }

    /// Writes a file, whole or not at all, and makes the directories that are missing.
    ///
    /// # Errors
    /// [`Error::File`] with what is wrong, or the server can't be reached.
    pub async fn write(&self, path: impl AsRef<[u8]>, content: impl Into<Bytes>) -> Result<FileInfo, Error> {
        let content: Bytes = content.into();
        self.write_from(path, None, std::io::Cursor::new(content)).await
    }

    /// Writes all that can be read; with a mode, such as `0o755`, unless the file is to have the usual one.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub async fn write_from(
        &self,
        path: impl AsRef<[u8]>,
        mode: Option<u32>,
        from: impl AsyncRead + Send + Sync + Unpin + 'static,
    ) -> Result<FileInfo, Error> {
        let mode = mode.map(|mode| format!("&mode={mode:o}")).unwrap_or_default();
        let address = self.address("", path, &format!("&parents=true{mode}"));
        info(done(self.api.upload(&address, from).await?)?)
    }

    /// What is in a directory, by name.
    ///
    /// # Errors
    /// As [`stat`](Self::stat).
    pub async fn list(&self, path: impl AsRef<[u8]>) -> Result<Vec<FileInfo>, Error> {
        let (mut all, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = self.ask("GET", "/list", &path, &format!("&limit={PAGE}{cursor}")).await?.body;
            for item in page["items"].as_array().into_iter().flatten() {
                all.push(parse(item.clone())?);
            }
            match page["next_cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={}", Raw::new(next).encoded()),
                None => return Ok(all),
            }
        }
    }

    /// What a path leads to, links followed.
    ///
    /// # Errors
    /// [`Error::File`] with what is wrong, or the server can't be reached.
    pub async fn stat(&self, path: impl AsRef<[u8]>) -> Result<FileInfo, Error> {
        info(self.ask("GET", "/stat", path, "&follow=true").await?)
    }

    /// What is at a path, be it a link.
    ///
    /// # Errors
    /// As [`stat`](Self::stat).
    pub async fn link_stat(&self, path: impl AsRef<[u8]>) -> Result<FileInfo, Error> {
        info(self.ask("GET", "/stat", path, "").await?)
    }

    /// Removes a file, a link or an empty directory.
    ///
    /// # Errors
    /// As [`stat`](Self::stat).
    pub async fn remove(&self, path: impl AsRef<[u8]>) -> Result<(), Error> {
        self.ask("DELETE", "", path, "").await.map(drop)
    }

    /// Removes something with all that is in it.
    ///
    /// # Errors
    /// As [`stat`](Self::stat).
    pub async fn remove_all(&self, path: impl AsRef<[u8]>) -> Result<(), Error> {
        self.ask("DELETE", "", path, "&recursive=true").await.map(drop)
    }

    /// Renames something; what has that name already is not replaced.
    ///
    /// # Errors
    /// As [`stat`](Self::stat).
    pub async fn rename(&self, path: impl AsRef<[u8]>, to: impl AsRef<[u8]>) -> Result<FileInfo, Error> {
        let to = format!("&to={}", Raw::new(to.as_ref()).encoded());
        info(self.ask("POST", "/rename", path, &to).await?)
    }

    /// Makes a directory, with those above it. It is no error if it is there.
    ///
    /// # Errors
    /// As [`stat`](Self::stat).
    pub async fn mkdir(&self, path: impl AsRef<[u8]>) -> Result<FileInfo, Error> {
        info(self.ask("POST", "/mkdir", path, "&parents=true").await?)
    }

    /// Watches a directory, and with `recursive` all that are below it; returns when nothing is missed any more.
    ///
    /// # Errors
    /// [`Error::File`] with what is wrong, or the server can't be reached.
    pub async fn watch(&self, path: impl AsRef<[u8]>, recursive: bool) -> Result<Changes, Error> {
        let recursive = if recursive { "&recursive=true" } else { "" };
        Changes::open(self.api.clone(), self.address("/watch", path, recursive)).await
    }

    /// Puts all that is in a local directory into one of the sandbox, which is made if it is missing. Files belong to root there; links stay links.
    ///
    /// # Errors
    /// Something can't be read, or changes meanwhile ([`Error::Invalid`] names it); else as [`write`](Self::write).
    pub async fn upload(&self, from: &Path, path: impl AsRef<[u8]>) -> Result<(), Error> {
        tree::upload(&self.api, &self.address("/archive", path, "&parents=true"), from).await
    }

    /// Puts all that is in a directory of the sandbox into a local one, which is made if it is missing. Nothing outside of it is touched, whatever the sandbox
    /// sends.
    ///
    /// # Errors
    /// Something can't be written ([`Error::Invalid`] names it); else as [`read`](Self::read).
    pub async fn download(&self, path: impl AsRef<[u8]>, into: &Path) -> Result<(), Error> {
        tree::download(&self.api, &self.address("/archive", path, ""), into).await
    }
}

/// What the server refused is an error.
fn done(answer: Answer) -> Result<Answer, Error> {
    if (200..300).contains(&answer.status) {
        return Ok(answer);
    }
    let said = |field: &str| answer.body["error"][field].as_str().unwrap_or("unknown").to_owned();
    Err(Error::File { code: said("code"), message: said("message") })
}

fn info(answer: Answer) -> Result<FileInfo, Error> {
    parse(answer.body)
}

fn parse(object: serde_json::Value) -> Result<FileInfo, Error> {
    serde_json::from_value(object).map_err(|error| Error::unavailable(format!("The server tells of a file in other words: {error}")))
}

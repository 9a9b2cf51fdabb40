//! Files over a WebSocket: asked for one after the other, beside what the driver of the sandbox does for the same client.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use sandboxer_protocol::{
    agent::{ByteRange, FileAbout, FileAsk, FileFault, FileList, GuestPath, Raw},
    client::{Encoding, FileError, FileEvent, FileOp, FileRequest, ServerEvent},
    limits::{MAX_CONTROL_BYTES, MAX_FILE_LIST, MAX_FILES_PIECE_BYTES},
};
use serde_json::{Map, Value, json};
use tokio::{
    sync::{OwnedSemaphorePermit, mpsc},
    time::{Duration, timeout},
};
use tokio_util::task::AbortOnDropHandle;

use super::{ApiError, Broken, DEFAULT_LIMIT, Going, error_of, nonsense, object::object, query};
use crate::manager::Handle;

/// Requests that may wait; more are refused.
const WAITING: usize = 64;
/// What is read by one request.
const MAX_READ_BYTES: u64 = 1024 * 1024;
/// How long the next piece of a file may be waited for, before what was written of it is dropped.
const NEXT_PIECE: Duration = Duration::from_secs(300);

type Order = (FileRequest, Option<OwnedSemaphorePermit>);

/// Where a connection hands in what it asks of files.
pub(in crate::http) struct FileDesk {
    orders: mpsc::Sender<Order>,
    answers: mpsc::Sender<ServerEvent>,
    _task: AbortOnDropHandle<()>,
}

impl FileDesk {
    /// Answers come in the order of the requests.
    pub(in crate::http) fn open(handle: Handle) -> (Self, mpsc::Receiver<ServerEvent>) {
        let (orders, waiting) = mpsc::channel(WAITING);
        // Each may hold a MiB.
        let (answers, answered) = mpsc::channel(1);
        let clerk = Clerk { handle, writing: None };
        let task = AbortOnDropHandle::new(tokio::spawn(clerk.serve(waiting, answers.clone())));
        (Self { orders, answers, _task: task }, answered)
    }

    pub(in crate::http) async fn take(&self, request: FileRequest, room: Option<OwnedSemaphorePermit>) {
        if let Err(mpsc::error::TrySendError::Full((request, _))) = self.orders.try_send((request, room)) {
            let message = format!("More than {WAITING} requests wait. Wait for answers.");
            let error = FileError { code: "rate_limited".to_owned(), message };
            let refusal = FileEvent { error: Some(error), ..FileEvent::new(request.op, request.id) };
            // The client does not read any longer if this fails.
            let _ = self.answers.send(ServerEvent::File(Box::new(refusal))).await;
        }
    }
}

struct Clerk {
    handle: Handle,
    writing: Option<Upload>,
}

/// A file whose pieces come one after the other.
struct Upload {
    id: Option<String>,
    path: String,
    going: Going,
    taken: u64,
}

impl Clerk {
    async fn serve(mut self, mut orders: mpsc::Receiver<Order>, answers: mpsc::Sender<ServerEvent>) {
        loop {
            let order = match &self.writing {
                None => orders.recv().await,
                Some(_) => match timeout(NEXT_PIECE, orders.recv()).await {
                    Ok(order) => order,
                    Err(_) => {
                        self.writing = None;
                        continue;
                    }
                },
            };
            let Some((request, _room)) = order else { return };
            let empty = FileEvent::new(request.op, request.id.clone());
            let event = match self.done(request, empty.clone()).await {
                Ok(event) => event,
                Err(error) => FileEvent { error: Some(FileError { code: error.code.to_owned(), message: error.message }), ..empty },
            };
            if answers.send(ServerEvent::File(Box::new(event))).await.is_err() {
                return;
            }
        }
    }

    async fn done(&mut self, request: FileRequest, answer: FileEvent) -> Result<FileEvent, ApiError> {
        let yes = |flag: Option<bool>| flag.unwrap_or(false);
        let path = path_of("path", &request.path)?;
        let raw = path.raw().clone();
        match request.op {
            FileOp::Read => self.read(path, request.offset.unwrap_or(0), request.length, answer).await,
            FileOp::Write => self.write(request, path, answer).await,
            FileOp::List => self.list(path, request, answer).await,
            FileOp::Stat => self.simple(&raw, FileAsk::Stat { path, follow: yes(request.follow) }, answer).await,
            FileOp::Remove => {
                self.ask(FileAsk::Remove { path, recursive: yes(request.recursive) }).await?.done().await.map_err(error_of)?;
                Ok(answer)
            }
            FileOp::Rename => {
                let to = path_of("to", &request.to.ok_or_else(|| ApiError::invalid("to: it is needed."))?)?;
                self.simple(&to.raw().clone(), FileAsk::Rename { path, to, replace: yes(request.replace) }, answer).await
            }
            FileOp::Mkdir => {
                let mode = query::mode_of(request.mode.as_deref())?;
                self.simple(&raw, FileAsk::MakeDirectory { path, mode, parents: yes(request.parents) }, answer).await
            }
        }
    }

    async fn ask(&self, ask: FileAsk) -> Result<Going, ApiError> {
        Going::begin(&self.handle, ask, None).await.map_err(error_of)
    }

    async fn simple(&self, shown: &Raw, ask: FileAsk, answer: FileEvent) -> Result<FileEvent, ApiError> {
        let about = self.ask(ask).await?.done().await.map_err(error_of)?;
        Ok(FileEvent { file: Some(fields(shown, about.as_ref())), ..answer })
    }

    async fn read(&self, path: GuestPath, offset: u64, length: Option<u64>, answer: FileEvent) -> Result<FileEvent, ApiError> {
        let length = length.unwrap_or(MAX_READ_BYTES).clamp(1, MAX_READ_BYTES);
        let range = Some(ByteRange::From(offset, Some(offset.saturating_add(length - 1))));
        // Whoever reads in pieces sees by the size whether it has changed meanwhile.
        let mut going = self.ask(FileAsk::Read { path, range, live: true }).await?;
        let about = match going.opened().await {
            Ok(opened) => opened.about.ok_or_else(nonsense)?,
            Err(Broken::NotDone(why)) if why.fault == FileFault::Range => {
                let nothing = Some(String::new());
                return Ok(FileEvent { data: nothing, offset: Some(offset), size: why.size, end: Some(true), ..answer });
            }
            Err(broken) => return Err(error_of(broken)),
        };
        let mut data = Vec::new();
        while let Some(piece) = going.next().await.map_err(error_of)? {
            data.extend_from_slice(&piece);
            if data.len() as u64 > length {
                return Err(nonsense());
            }
        }
        let end = offset.saturating_add(data.len() as u64) >= about.size;
        let data = Some(BASE64_STANDARD.encode(data));
        Ok(FileEvent { data, offset: Some(offset), size: Some(about.size), end: Some(end), ..answer })
    }

    async fn write(&mut self, request: FileRequest, path: GuestPath, answer: FileEvent) -> Result<FileEvent, ApiError> {
        let data = match (request.data.unwrap_or_default(), request.encoding.unwrap_or_default()) {
            (data, Encoding::Base64) => BASE64_STANDARD.decode(data).map_err(|error| ApiError::invalid(format!("data: {error}.")))?,
            (data, Encoding::Text) => data.into_bytes(),
        };
        let mut upload = match self.writing.take() {
            Some(upload) if (&upload.id, &upload.path) == (&request.id, &request.path) => upload,
            Some(other) => {
                let message = format!("{} is being written. Send its last piece first.", other.path);
                self.writing = Some(other);
                return Err(ApiError::new(axum::http::StatusCode::CONFLICT, "not_now", message));
            }
            None => {
                let (mode, parents) = (query::mode_of(request.mode.as_deref())?, request.parents.unwrap_or(false));
                let mut going = self.ask(FileAsk::Write { path: path.clone(), mode, parents }).await?;
                going.opened().await.map_err(error_of)?;
                Upload { id: request.id, path: request.path, going, taken: 0 }
            }
        };
        upload.taken += data.len() as u64;
        let mut left = Bytes::from(data);
        while !left.is_empty() {
            let piece = left.split_to(left.len().min(MAX_FILES_PIECE_BYTES));
            upload.going.push(piece).await.map_err(error_of)?;
        }
        if request.more.unwrap_or(false) {
            let offset = Some(upload.taken);
            self.writing = Some(upload);
            return Ok(FileEvent { offset, ..answer });
        }
        let about = upload.going.finish().await.map_err(error_of)?;
        Ok(FileEvent { file: Some(fields(path.raw(), about.as_ref())), ..answer })
    }

    async fn list(&self, path: GuestPath, request: FileRequest, answer: FileEvent) -> Result<FileEvent, ApiError> {
        let limit = request.limit.unwrap_or(DEFAULT_LIMIT);
        if !(1..=MAX_FILE_LIST).contains(&limit) {
            return Err(ApiError::invalid(format!("limit: 1 to {MAX_FILE_LIST}.")));
        }
        let after = request.cursor.as_deref().map(query::decode_cursor).transpose()?;
        let going = self.ask(FileAsk::List { path: path.clone(), after, limit }).await?;
        let list: FileList = serde_json::from_slice(&going.whole(MAX_CONTROL_BYTES).await.map_err(error_of)?).map_err(|_| nonsense())?;
        let (items, next_cursor) = super::listed(&path, &list, limit)?;
        let items = items.into_iter().map(|item| as_fields(json!(item))).collect();
        Ok(FileEvent { items: Some(items), next_cursor, ..answer })
    }
}

fn path_of(name: &str, path: &str) -> Result<GuestPath, ApiError> {
    Raw::new(path).try_into().map_err(|why| ApiError::invalid(format!("{name}: {why}.")))
}

fn fields(path: &Raw, about: Option<&FileAbout>) -> Map<String, Value> {
    as_fields(json!(object(path, about)))
}

fn as_fields(value: Value) -> Map<String, Value> {
    if let Value::Object(fields) = value { fields } else { Map::new() }
}

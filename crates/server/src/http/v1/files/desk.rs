//! Files over a WebSocket: asked for one after the other, beside what the driver of the sandbox does for the same client.

mod moving;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use axum::http::StatusCode;
use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use sandboxer_protocol::{
    agent::{ByteRange, FileAbout, FileAsk, FileFault, FileList, GuestPath, Raw},
    client::{Encoding, FileError, FileEvent, FileOp, FileRequest, ServerEvent},
    limits::{MAX_CONTROL_BYTES, MAX_FILE_LIST, MAX_FILE_TRANSFERS},
};
use serde_json::{Map, Value, json};
use tokio::{sync::mpsc, time::timeout_at};
use tokio_util::task::AbortOnDropHandle;

use self::moving::{Download, Key, Upload};
use super::{
    ApiError, Broken, DEFAULT_LIMIT, Going,
    changes::{self, Told, Watch},
    error_of, nonsense,
    object::object,
    query,
};
use crate::{file_turns::FileTurns, manager::Handle, sandbox::client::MessageRoom};

/// Requests that may wait; more are refused.
const WAITING: usize = 64;
/// What is read by one request.
const MAX_READ_BYTES: u64 = 1024 * 1024;
/// Changes that are told in one message.
const CHANGES_AT_ONCE: usize = 256;

type Order = (FileRequest, Option<MessageRoom>);

/// Where a connection hands in what it asks of files.
pub(in crate::http) struct FileDesk {
    orders: mpsc::Sender<Order>,
    answers: mpsc::Sender<ServerEvent>,
    _task: AbortOnDropHandle<()>,
}

impl FileDesk {
    /// Answers come in the order of the requests; what watches tell comes between them.
    pub(in crate::http) fn open(handle: Handle, turns: FileTurns) -> (Self, mpsc::Receiver<ServerEvent>) {
        let (orders, waiting) = mpsc::channel(WAITING);
        // Each may hold a MiB.
        let (answers, answered) = mpsc::channel(1);
        let clerk =
            Clerk { handle, turns, answers: answers.clone(), writing: None, packing: None, given_up: None, watches: HashMap::new() };
        let task = AbortOnDropHandle::new(tokio::spawn(clerk.serve(waiting)));
        (Self { orders, answers, _task: task }, answered)
    }

    pub(in crate::http) async fn take(&self, request: FileRequest, room: Option<MessageRoom>) {
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
    turns: FileTurns,
    answers: mpsc::Sender<ServerEvent>,
    writing: Option<Upload>,
    packing: Option<Download>,
    /// What was being written when it was given up: its next piece is not taken for the first.
    given_up: Option<Key>,
    /// By their ids, with the paths. One that has ended by itself may still be here.
    watches: HashMap<String, (String, AbortOnDropHandle<()>)>,
}

/// A watch of which nothing was told yet.
struct Begun {
    id: String,
    path: String,
    watch: Watch,
}

impl Clerk {
    async fn serve(mut self, mut orders: mpsc::Receiver<Order>) {
        loop {
            let deadline =
                self.writing.as_ref().map(Upload::deadline).into_iter().chain(self.packing.as_ref().map(Download::deadline)).min();
            let order = match deadline {
                None => orders.recv().await,
                Some(deadline) => match timeout_at(deadline, orders.recv()).await {
                    Ok(order) => order,
                    Err(_) => {
                        let late = self.writing.take_if(|upload| upload.deadline() <= deadline);
                        self.given_up = late.map(|upload| upload.key).or(self.given_up);
                        self.packing.take_if(|download| download.deadline() <= deadline);
                        continue;
                    }
                },
            };
            let Some((request, _room)) = order else { return };
            let empty = FileEvent::new(request.op, request.id.clone());
            let (event, begun) = match self.done(request, empty.clone()).await {
                Ok(done) => done,
                Err(error) => (failed(error, empty), None),
            };
            if self.answers.send(ServerEvent::File(Box::new(event))).await.is_err() {
                return;
            }
            // What it tells comes behind the answer.
            if let Some(Begun { id, path, watch }) = begun {
                let telling = tell(watch, id.clone(), self.answers.clone());
                self.watches.insert(id, (path, AbortOnDropHandle::new(tokio::spawn(telling))));
            }
        }
    }

    /// The answer, and a watch that has begun.
    async fn done(&mut self, request: FileRequest, answer: FileEvent) -> Result<(FileEvent, Option<Begun>), ApiError> {
        if request.op == FileOp::Watch {
            return Ok((answer, Some(self.watch(request).await?)));
        }
        Ok((self.answered(request, answer).await?, None))
    }

    async fn answered(&mut self, request: FileRequest, answer: FileEvent) -> Result<FileEvent, ApiError> {
        let yes = |flag: Option<bool>| flag.unwrap_or(false);
        let path = path_of("path", &request.path)?;
        let raw = path.raw().clone();
        match request.op {
            FileOp::Read => self.read(path, request.offset.unwrap_or(0), request.length, answer).await,
            FileOp::Write | FileOp::Unpack => self.take_in(request, path, answer).await,
            FileOp::Pack => self.pack(request, path, answer).await,
            FileOp::Cancel => {
                self.cancel(&request).await;
                Ok(answer)
            }
            // It is begun elsewhere.
            FileOp::Watch => Ok(answer),
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
        let turn = self.turns.take(&ask, self.handle.owner.as_deref()).ok_or_else(|| error_of(Broken::Busy))?;
        Going::begin(&self.handle, ask, turn).await.map_err(error_of)
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

    /// A file, or an archive, in pieces.
    async fn take_in(&mut self, request: FileRequest, path: GuestPath, answer: FileEvent) -> Result<FileEvent, ApiError> {
        let data = match (request.data.as_deref().unwrap_or_default(), request.encoding.unwrap_or_default()) {
            (data, Encoding::Base64) => BASE64_STANDARD.decode(data).map_err(|error| ApiError::invalid(format!("data: {error}.")))?,
            (data, Encoding::Text) => data.as_bytes().to_vec(),
        };
        let key = Key::of(&request);
        let taken = self.writing.as_ref().filter(|upload| upload.key == key).map_or(0, |upload| upload.taken);
        if let Some(other) = self.writing.as_ref().filter(|upload| upload.key != key) {
            return Err(not_now(format!("{} is being written. Send its last piece first, or cancel it.", other.key.path)));
        }
        if self.given_up.take_if(|given_up| *given_up == key).is_some() {
            return Err(not_now("Its last piece is too long ago, so it was given up. Begin again."));
        }
        if let Some(offset) = request.offset.filter(|offset| *offset != taken) {
            return Err(not_now(format!("offset: {taken} bytes were taken of it so far, not {offset}. Begin again.")));
        }
        let mut upload = match self.writing.take() {
            Some(upload) => upload,
            None => {
                let parents = request.parents.unwrap_or(false);
                let ask = if request.op == FileOp::Unpack {
                    FileAsk::Unpack { path: path.clone(), parents }
                } else {
                    FileAsk::Write { path: path.clone(), mode: query::mode_of(request.mode.as_deref())?, parents }
                };
                Upload::begin(key, self.ask(ask).await?).await.map_err(error_of)?
            }
        };
        upload.push(Bytes::from(data)).await.map_err(error_of)?;
        if request.more.unwrap_or(false) {
            let offset = Some(upload.taken);
            self.writing = Some(upload);
            return Ok(FileEvent { offset, ..answer });
        }
        let about = upload.finish().await.map_err(error_of)?;
        Ok(FileEvent { file: Some(fields(path.raw(), about.as_ref())), ..answer })
    }

    /// The next piece of an archive. What a client does not ask for is not fetched, but for what the credit of the sandbox allows.
    async fn pack(&mut self, request: FileRequest, path: GuestPath, answer: FileEvent) -> Result<FileEvent, ApiError> {
        let (key, offset) = (Key::of(&request), request.offset.unwrap_or(0));
        if let Some(other) = self.packing.as_ref().filter(|download| download.key != key) {
            return Err(not_now(format!("{} is being sent as an archive. Ask for all of it first, or cancel it.", other.key.path)));
        }
        let mut download = match self.packing.take() {
            Some(download) if offset > 0 => {
                let sent = download.sent;
                if sent != offset {
                    self.packing = Some(download);
                    return Err(not_now(format!("offset: {sent} bytes were sent of it so far, not {offset}. Begin again, with 0.")));
                }
                download
            }
            None if offset > 0 => return Err(not_now("No such archive is being sent any more. Begin again, with offset 0.")),
            // One that was begun before is left.
            _ => {
                let going = self.ask(FileAsk::Pack { path, live: request.live.unwrap_or(false) }).await?;
                Download::begin(key, going).await.map_err(error_of)?
            }
        };
        let length = request.length.unwrap_or(MAX_READ_BYTES).clamp(1, MAX_READ_BYTES);
        let (data, end) = download.next(usize::try_from(length).unwrap_or(usize::MAX)).await.map_err(error_of)?;
        if !end {
            self.packing = Some(download);
        }
        Ok(FileEvent { data: Some(BASE64_STANDARD.encode(data)), offset: Some(offset), end: Some(end), ..answer })
    }

    async fn watch(&mut self, request: FileRequest) -> Result<Begun, ApiError> {
        let path = path_of("path", &request.path)?;
        let id = request.id.ok_or_else(|| ApiError::invalid("id: it is needed, so that you know what is told of which watch."))?;
        self.watches.retain(|_, (_, telling)| !telling.is_finished());
        if self.watches.contains_key(&id) {
            return Err(not_now("id: a watch with the same one is under way. Cancel it first, or take another."));
        }
        // A sandbox allows no more, and one that has ended may be waiting to say so.
        if self.watches.len() >= MAX_FILE_TRANSFERS {
            return Err(error_of(Broken::Busy));
        }
        let mut going = self.ask(FileAsk::Watch { path, recursive: request.recursive.unwrap_or(false) }).await?;
        going.opened().await.map_err(error_of)?;
        Ok(Begun { id, path: request.path, watch: Watch::new(going) })
    }

    async fn cancel(&mut self, request: &FileRequest) {
        self.writing.take_if(|upload| upload.key.is_meant_by(request));
        self.packing.take_if(|download| download.key.is_meant_by(request));
        let Some(id) = &request.id else { return };
        if self.watches.get(id).is_some_and(|(path, _)| *path == request.path)
            && let Some((_, telling)) = self.watches.remove(id)
        {
            telling.abort();
            // Nothing of it is to come behind the answer.
            let _ = telling.await;
        }
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

/// Tells a client what changes, until it has ended. One that does not read holds it up, and the sandbox drops what is too much.
async fn tell(mut watch: Watch, id: String, answers: mpsc::Sender<ServerEvent>) {
    while let Some(told) = watch.next().await {
        let objects: Vec<_> = match told {
            Told::Quiet => continue,
            Told::Changes(changes) => changes.iter().filter_map(changes::as_object).collect(),
            Told::Ended(why) => vec![changes::ended(&why)],
        };
        for part in objects.chunks(CHANGES_AT_ONCE) {
            let event = FileEvent { changes: Some(part.to_vec()), ..FileEvent::new(FileOp::Watch, Some(id.clone())) };
            if answers.send(ServerEvent::File(Box::new(event))).await.is_err() {
                return;
            }
        }
    }
}

fn failed(error: ApiError, event: FileEvent) -> FileEvent {
    FileEvent { error: Some(FileError { code: error.code.to_owned(), message: error.message }), ..event }
}

fn not_now(message: impl Into<String>) -> ApiError {
    ApiError::new(StatusCode::CONFLICT, "not_now", message)
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

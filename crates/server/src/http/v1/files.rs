//! `/v1/sandboxes/{id}/files`: single files and directories of a gVisor sandbox that runs.
//!
//! Bodies of any size pass through: what is held of one is bounded by the credit that the sandbox was given, and by the way to it.

mod changes;
mod desk;
mod object;
mod query;
mod streams;

use axum::{
    Json,
    body::Body,
    extract::RawQuery,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse as _, Response},
};
use sandboxer_protocol::{
    SandboxId,
    agent::{FileAbout, FileAsk, FileFault, FileList, GuestPath, Raw},
    limits::{MAX_CONTROL_BYTES, MAX_FILE_LIST},
};

pub(in crate::http) use self::desk::FileDesk;
use self::{
    object::{FileObject, object},
    query::Asked,
};
use super::{Api, ApiError, extract::Of, objects::List, page::PageQuery, refusals::Files, sandboxes::sandbox_id};
use crate::workspaces::{Broken, Going};

const TAR: &str = "application/x-tar";
const BYTES: &str = "application/octet-stream";
const DEFAULT_LIMIT: u32 = 100;

/// Whose file it is.
struct At<'a> {
    api: &'a Api,
    id: SandboxId,
    owner: Option<&'a str>,
}

impl<'a> At<'a> {
    fn new(of: &'a Of) -> Result<Self, ApiError> {
        Ok(Self { api: &of.api, id: sandbox_id(&of.id)?, owner: of.who() })
    }

    async fn begin(&self, ask: FileAsk) -> Result<Going, ApiError> {
        match self.api.native.begin_file(self.id, self.owner, ask).await {
            Ok(going) => Ok(going),
            Err(broken) => Err(self.explain(broken).await),
        }
    }

    async fn done(&self, path: &Raw, ask: FileAsk) -> Result<Json<FileObject>, ApiError> {
        match self.api.native.file(self.id, self.owner, ask).await {
            Ok(about) => Ok(Json(object(path, about.as_ref()))),
            Err(broken) => Err(self.explain(broken).await),
        }
    }

    async fn explain(&self, broken: Broken) -> ApiError {
        if let Broken::Native(_) = &broken
            && self.api.workspaces.sandbox(self.id, self.owner).await.is_ok()
        {
            let message = "Only files of gVisor sandboxes can be reached through this server.";
            return ApiError::new(StatusCode::NOT_IMPLEMENTED, "files_not_supported", message);
        }
        error_of(broken)
    }
}
/// The content of a file, or a part of it.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files", tag = "files", operation_id = "read_file",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), query::At, query::Live,
        ("Range" = Option<String>, Header, description = "One range of bytes", pattern = "^[!-~]+$")),
    responses((status = 200, description = "All of it", body = [u8], content_type = "application/octet-stream"),
        (status = 206, description = "The part", body = [u8], content_type = "application/octet-stream"), Files))]
pub(super) async fn read(of: Of, RawQuery(query): RawQuery, headers: HeaderMap) -> Result<Response, ApiError> {
    let at = At::new(&of)?;
    let mut asked = Asked::parse(query.as_deref())?;
    let (path, live) = (asked.path()?, asked.flag("live")?);
    asked.nothing_more()?;
    let range = query::range(&headers);
    let mut going = at.begin(FileAsk::Read { path: path.clone(), range, live }).await?;
    let opened = match going.opened().await {
        Ok(opened) => opened,
        Err(Broken::NotDone(why)) if why.fault == FileFault::Range => {
            let mut response = error_of(Broken::NotDone(why.clone())).into_response();
            if let Some(size) = why.size.and_then(|size| format!("bytes */{size}").parse().ok()) {
                response.headers_mut().insert(header::CONTENT_RANGE, size);
            }
            return Ok(response);
        }
        Err(broken) => return Err(at.explain(broken).await),
    };
    let (Some(about), Some(length)) = (opened.about, opened.length) else { return Err(nonsense()) };
    let end = opened.start.checked_add(length).filter(|end| *end <= about.size).ok_or_else(nonsense)?;
    let mut response = Response::new(streams::sent(going));
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, BYTES.to_owned()),
        (header::CONTENT_LENGTH, length.to_string()),
        (header::ACCEPT_RANGES, "bytes".to_owned()),
        (header::ETAG, object::tag(&about)),
    ] {
        headers.insert(name, value.parse().map_err(|_| nonsense())?);
    }
    if let Some(modified) = object::http_date(&about).and_then(|date| date.parse().ok()) {
        headers.insert(header::LAST_MODIFIED, modified);
    }
    if range.is_some() {
        let range = format!("bytes {}-{}/{}", opened.start, end.saturating_sub(1), about.size);
        headers.insert(header::CONTENT_RANGE, range.parse().map_err(|_| nonsense())?);
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    Ok(response)
}
/// The body becomes the file, whole or not at all.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/files", tag = "files", operation_id = "write_file",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), query::At, query::Mode, query::Parents),
    request_body(content = [u8], content_type = "application/octet-stream"),
    responses((status = 200, description = "The file", body = FileObject), Files))]
pub(super) async fn write(of: Of, RawQuery(query): RawQuery, body: Body) -> Result<Response, ApiError> {
    let at = At::new(&of)?;
    let mut asked = Asked::parse(query.as_deref())?;
    let (path, mode, parents) = (asked.path()?, asked.mode()?, asked.flag("parents")?);
    asked.nothing_more()?;
    take(&at, path.clone(), FileAsk::Write { path, mode, parents }, body).await
}

/// Takes a body in. What goes wrong is told when the client has had the time to hear it.
async fn take(at: &At<'_>, path: GuestPath, ask: FileAsk, body: Body) -> Result<Response, ApiError> {
    let mut body = body.into_data_stream();
    let taken = async {
        let mut going = at.begin(ask).await?;
        let opened = going.opened().await;
        let taken = match opened {
            Ok(_) => streams::taken(going, &mut body).await?,
            Err(broken) => Err(broken),
        };
        match taken {
            Ok(about) => Ok(Json(object(path.raw(), about.as_ref())).into_response()),
            Err(broken) => Err(at.explain(broken).await),
        }
    };
    let taken = taken.await;
    if taken.is_err() {
        streams::drain(body).await;
    }
    taken
}
/// Removes a file, a link, an empty directory, or a whole tree.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/files", tag = "files", operation_id = "remove_file",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), query::At,
        ("recursive" = Option<bool>, Query, description = "With all that is in it", nullable = false)),
    responses((status = 204, description = "It is gone"), Files))]
pub(super) async fn remove(of: Of, RawQuery(query): RawQuery) -> Result<StatusCode, ApiError> {
    let at = At::new(&of)?;
    let mut asked = Asked::parse(query.as_deref())?;
    let (path, recursive) = (asked.path()?, asked.flag("recursive")?);
    asked.nothing_more()?;
    at.done(&path.raw().clone(), FileAsk::Remove { path, recursive }).await.map(|_| StatusCode::NO_CONTENT)
}
/// What is at a path.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/stat", tag = "files", operation_id = "stat_file",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), query::At,
        ("follow" = Option<bool>, Query, description = "What a link leads to", nullable = false)),
    responses((status = 200, description = "The file", body = FileObject), Files))]
pub(super) async fn stat(of: Of, RawQuery(query): RawQuery) -> Result<Json<FileObject>, ApiError> {
    let at = At::new(&of)?;
    let mut asked = Asked::parse(query.as_deref())?;
    let (path, follow) = (asked.path()?, asked.flag("follow")?);
    asked.nothing_more()?;
    at.done(&path.raw().clone(), FileAsk::Stat { path, follow }).await
}
/// What is in a directory.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/list", tag = "files", operation_id = "list_files",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), query::At, PageQuery),
    responses((status = 200, description = "A page of it, by name", body = List<FileObject>), Files))]
pub(super) async fn list(of: Of, RawQuery(query): RawQuery) -> Result<Json<List<FileObject>>, ApiError> {
    let at = At::new(&of)?;
    let mut asked = Asked::parse(query.as_deref())?;
    let (path, after, limit) = (asked.path()?, asked.cursor()?, asked.limit(DEFAULT_LIMIT, MAX_FILE_LIST)?);
    asked.nothing_more()?;
    let going = at.begin(FileAsk::List { path: path.clone(), after, limit }).await?;
    let list = match going.whole(MAX_CONTROL_BYTES).await {
        Ok(list) => list,
        Err(broken) => return Err(at.explain(broken).await),
    };
    let list: FileList = serde_json::from_slice(&list).map_err(|_| nonsense())?;
    let (items, last) = listed(&path, &list, limit)?;
    Ok(Json(List { items, next_cursor: last, warnings: Vec::new() }))
}
/// Renames something.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/files/rename", tag = "files", operation_id = "rename_file",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), query::At,
        ("to" = String, Query, description = "Its new path, absolute"),
        ("replace" = Option<bool>, Query, description = "What is there", nullable = false)),
    responses((status = 200, description = "The file", body = FileObject), Files))]
pub(super) async fn rename(of: Of, RawQuery(query): RawQuery) -> Result<Json<FileObject>, ApiError> {
    let at = At::new(&of)?;
    let mut asked = Asked::parse(query.as_deref())?;
    let (path, to, replace) = (asked.path()?, asked.path_of("to")?, asked.flag("replace")?);
    asked.nothing_more()?;
    at.done(&to.raw().clone(), FileAsk::Rename { path, to, replace }).await
}
/// Makes a directory.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/files/mkdir", tag = "files", operation_id = "make_directory",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), query::At, query::Mode, query::Parents),
    responses((status = 201, description = "The directory", body = FileObject), Files))]
pub(super) async fn make_directory(of: Of, RawQuery(query): RawQuery) -> Result<Response, ApiError> {
    let at = At::new(&of)?;
    let mut asked = Asked::parse(query.as_deref())?;
    let (path, mode, parents) = (asked.path()?, asked.mode()?, asked.flag("parents")?);
    asked.nothing_more()?;
    let made = at.done(&path.raw().clone(), FileAsk::MakeDirectory { path, mode, parents }).await?;
    Ok((StatusCode::CREATED, made).into_response())
}

/// All that is in a directory, as a tar archive. How long it will be nobody knows before.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/archive", tag = "files", operation_id = "pack_files",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), query::At, query::Live),
    responses((status = 200, description = "A tar archive", body = [u8], content_type = "application/x-tar"), Files))]
pub(super) async fn pack(of: Of, RawQuery(query): RawQuery) -> Result<Response, ApiError> {
    let at = At::new(&of)?;
    let mut asked = Asked::parse(query.as_deref())?;
    let (path, live) = (asked.path()?, asked.flag("live")?);
    asked.nothing_more()?;
    let mut going = at.begin(FileAsk::Pack { path, live }).await?;
    if let Err(broken) = going.opened().await {
        return Err(at.explain(broken).await);
    }
    Ok(([(header::CONTENT_TYPE, TAR)], streams::sent(going)).into_response())
}
/// Puts what is in a tar archive into a directory.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/files/archive", tag = "files", operation_id = "unpack_files",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), query::At, query::Parents),
    request_body(content = [u8], content_type = "application/x-tar"),
    responses((status = 200, description = "The directory", body = FileObject), Files))]
pub(super) async fn unpack(of: Of, RawQuery(query): RawQuery, body: Body) -> Result<Response, ApiError> {
    let at = At::new(&of)?;
    let mut asked = Asked::parse(query.as_deref())?;
    let (path, parents) = (asked.path()?, asked.flag("parents")?);
    asked.nothing_more()?;
    take(&at, path.clone(), FileAsk::Unpack { path, parents }, body).await
}

/// What changes in a directory, as server-sent events: `watching` when nothing is missed any more, then `created`, `changed`, `written`
/// (who wrote is done), `attributes` and `removed`, each with `path` and `directory`; `dropped` where there were more than were taken,
/// `incomplete` where there are more directories than can be watched, and `ended` with why.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/watch", tag = "files", operation_id = "watch_files",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), query::At,
        ("recursive" = Option<bool>, Query, description = "Also in all directories below it", nullable = false)),
    responses((status = 200, description = "Events, until the directory or the sandbox is gone", body = String, content_type = "text/event-stream"),
        Files))]
pub(super) async fn watch(of: Of, RawQuery(query): RawQuery) -> Result<Response, ApiError> {
    let at = At::new(&of)?;
    let mut asked = Asked::parse(query.as_deref())?;
    let (path, recursive) = (asked.path()?, asked.flag("recursive")?);
    asked.nothing_more()?;
    let mut going = at.begin(FileAsk::Watch { path, recursive }).await?;
    if let Err(broken) = going.opened().await {
        return Err(at.explain(broken).await);
    }
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    Ok((headers, changes::told(going)).into_response())
}

/// A part of a directory, and where the next one begins. What an agent says is looked at.
fn listed(path: &GuestPath, list: &FileList, limit: u32) -> Result<(Vec<FileObject>, Option<String>), ApiError> {
    if list.items.len() > limit as usize || list.items.iter().any(|item| item.name.is_none()) {
        return Err(nonsense());
    }
    let last = list.items.last().and_then(|item| item.name.as_ref()).filter(|_| list.more).map(query::encode_cursor);
    let named = |item: &FileAbout| path.join(item.name.as_ref().map_or(&[][..], Raw::as_bytes));
    Ok((list.items.iter().map(|item| object(&named(item), Some(item))).collect(), last))
}

fn nonsense() -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "files_failed", "The agent of the sandbox does not make sense.")
}

fn error_of(broken: Broken) -> ApiError {
    let why = match broken {
        Broken::Native(error) => return error.into(),
        Broken::Busy => {
            let message = "Too many files are being transferred by this server. Try again later.";
            return ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limited", message);
        }
        Broken::Cut => {
            let message = "The sandbox was saved, went back or ended meanwhile. What was being written was not: try again.";
            return ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "not_ready", message);
        }
        Broken::NotDone(why) => why,
    };
    let (status, code) = match why.fault {
        FileFault::NotFound => (StatusCode::NOT_FOUND, "file_not_found"),
        FileFault::IsADirectory => (StatusCode::CONFLICT, "is_a_directory"),
        FileFault::NotADirectory => (StatusCode::CONFLICT, "not_a_directory"),
        FileFault::NotAFile => (StatusCode::CONFLICT, "not_a_file"),
        FileFault::Loop => (StatusCode::CONFLICT, "too_many_links"),
        FileFault::Denied => (StatusCode::FORBIDDEN, "permission_denied"),
        FileFault::NoRoom => (StatusCode::PAYLOAD_TOO_LARGE, "no_space"),
        FileFault::Exists => (StatusCode::CONFLICT, "file_exists"),
        FileFault::NotEmpty => (StatusCode::CONFLICT, "not_empty"),
        FileFault::TooLong => (StatusCode::UNPROCESSABLE_ENTITY, "path_too_long"),
        FileFault::Changed => (StatusCode::CONFLICT, "file_changed"),
        FileFault::Range => (StatusCode::RANGE_NOT_SATISFIABLE, "no_such_range"),
        FileFault::Refused => (StatusCode::UNPROCESSABLE_ENTITY, "bad_archive"),
        FileFault::Busy => (StatusCode::TOO_MANY_REQUESTS, "rate_limited"),
        FileFault::Failed => (StatusCode::SERVICE_UNAVAILABLE, "files_failed"),
    };
    ApiError::new(status, code, why.message)
}

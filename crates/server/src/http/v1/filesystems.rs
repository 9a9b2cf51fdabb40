//! `/v1/filesystem-snapshots`, and how one is made.

use std::sync::Arc;

use axum::{
    Extension, Json,
    body::{Body, Bytes},
    extract::{Path, Query, State, rejection::BytesRejection},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse as _, Response},
};
use sandboxer_store::FilesystemName;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio_util::io::ReaderStream;

use super::{Api, ApiError, idempotency::Answer, page::PageQuery, request, sandboxes::sandbox_id};
use crate::{
    filesystems::{self, Filesystems, Order, SavedFilesystem},
    http::access::Owner,
    workspaces::NativeError,
};

/// What the layers of images are called that are not compressed.
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// What is read of an archive at once.
const PIECE_BYTES: usize = 256 * 1024;

pub(super) async fn take(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Answer, ApiError> {
    let id = sandbox_id(&id)?;
    let mut fields = request::fields(body)?;
    let fingerprint = format!("filesystem-snapshot {id} {}", Value::Object(fields.clone()));
    let name = request::take_text(&mut fields, "name")?.ok_or_else(|| ApiError::invalid("name: it is needed."))?;
    let replace = request::take_bool(&mut fields, "replace")?;
    request::nothing_more(&fields)?;
    let (this, by) = (Arc::clone(&api), owner.clone());
    let work = async move {
        let made = this.native.snapshot_filesystem(id, by.as_deref(), name, replace).await?;
        Ok(Answer::created(object(&made)))
    };
    api.remembered.once(&headers, owner, &fingerprint, work).await
}

pub(super) async fn list(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Query(page): Query<PageQuery>,
) -> Result<Json<Value>, ApiError> {
    let found = kept(&api)?.list(owner.as_deref()).await.map_err(unreadable)?;
    let items = found.iter().map(|one| ((one.about.created_at.as_nanosecond(), one.name.to_string()), object(one)));
    Ok(Json(page.of(items.collect())?))
}

pub(super) async fn get(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let found = kept(&api)?.find(owner.as_deref(), parse(&name)?).await.map_err(unreadable)?;
    let found = found.as_ref().and_then(SavedFilesystem::of).ok_or_else(unknown)?;
    Ok(Json(object(&found)))
}

pub(super) async fn delete(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    let there = kept(&api)?.delete(owner.as_deref(), parse(&name)?).await.map_err(unreadable)?;
    if there { Ok(StatusCode::NO_CONTENT) } else { Err(unknown()) }
}

/// The archive, as it is: a layer that any program of containers reads.
pub(super) async fn export(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(name): Path<String>,
) -> Result<Response, ApiError> {
    let filesystems = kept(&api)?;
    let manifest = filesystems.find(owner.as_deref(), parse(&name)?).await.map_err(unreadable)?.ok_or_else(unknown)?;
    let (layer, bytes) = (filesystems.export(manifest.clone()).await?, manifest.raw_bytes());
    let file = tokio::fs::File::open(&layer.path).await.map_err(|error| internal(&error.to_string()))?;
    let stream = ReaderStream::with_capacity(file, PIECE_BYTES);
    // The archive stays where it is until all of it was sent.
    let stream = futures_util::stream::unfold((stream, layer), |(mut stream, layer)| async move {
        let piece = futures_util::StreamExt::next(&mut stream).await?;
        Some((piece, (stream, layer)))
    });
    let headers = [(header::CONTENT_TYPE, LAYER.to_owned()), (header::CONTENT_LENGTH, bytes.to_string())];
    Ok((headers, Body::from_stream(stream)).into_response())
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct ImportQuery {
    replace: Option<String>,
}

/// A layer becomes a filesystem snapshot.
pub(super) async fn import(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(name): Path<String>,
    Query(query): Query<ImportQuery>,
    body: Body,
) -> Result<Response, ApiError> {
    let filesystems = kept(&api)?;
    let (name, replace) = (parse(&name)?, query.replace.as_deref() == Some("true"));
    let order = Order { name, replace, owner, sandbox_id: None, image: None };
    let made = filesystems.import(order, body.into_data_stream()).await.map_err(refusal)?;
    let made = SavedFilesystem::of(&made).ok_or_else(|| internal("it is no filesystem snapshot"))?;
    Ok((StatusCode::CREATED, Json(object(&made))).into_response())
}

fn object(saved: &SavedFilesystem) -> Value {
    let about = &saved.about;
    json!({
        "name": saved.name,
        "created_at": about.created_at,
        "sandbox_id": about.sandbox_id,
        "image": about.image,
        "entries": about.entries,
        "content_bytes": about.content_bytes,
        "size_bytes": saved.stored_bytes,
    })
}

fn kept(api: &Api) -> Result<Arc<Filesystems>, ApiError> {
    api.native.filesystems().ok_or_else(|| refusal(filesystems::not_configured()))
}

fn parse(name: &str) -> Result<FilesystemName, ApiError> {
    filesystems::parse(name).map_err(refusal)
}

fn refusal((code, message): filesystems::Refusal) -> ApiError {
    NativeError::Because(code, message).into()
}

fn unreadable(error: sandboxer_store::Error) -> ApiError {
    refusal(filesystems::failed(&format!("the volume can't be used: {}", error.whole())))
}

fn unknown() -> ApiError {
    ApiError::not_found("filesystem snapshot")
}

fn internal(why: &str) -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", format!("Something is wrong with this server: {why}."))
}

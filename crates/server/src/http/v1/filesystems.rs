//! `/v1/filesystem-snapshots`, and how one is made.

use std::sync::Arc;

use axum::{
    Json,
    body::Body,
    http::{StatusCode, header},
    response::{IntoResponse as _, Response},
};
use sandboxer_store::FilesystemName;
use serde::Deserialize;
use tokio_util::io::ReaderStream;
use utoipa::{IntoParams, ToSchema};

use super::{
    Api, ApiError,
    extract::{Job, Of, Post, Words},
    idempotency::Answer,
    objects::{FilesystemObject, List},
    page::PageQuery,
    refusals::{Reading, Working},
    request,
    sandboxes::sandbox_id,
};
use crate::{
    filesystems::{self, Filesystems, Order, SavedFilesystem},
    workspaces::NativeError,
};

/// What the layers of images are called that are not compressed.
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// What is read of an archive at once.
const PIECE_BYTES: usize = 256 * 1024;

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct FilesystemRequest {
    /// 1 to 64 of `A-Za-z0-9._-`, not beginning with a dot.
    #[schema(min_length = 1, max_length = 64)]
    name: String,
    /// Take the place of one that has this name.
    #[serde(default)]
    replace: Option<bool>,
}

/// Keeps the files of a sandbox that runs under a name. It goes on.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/filesystem-snapshot", tag = "filesystem snapshots",
    operation_id = "take_filesystem_snapshot", params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), request::Asking),
    request_body = FilesystemRequest,
    responses((status = 201, description = "It is there", body = FilesystemObject), Working))]
pub(super) async fn take(post: Post<FilesystemRequest>) -> Result<Answer, ApiError> {
    let work = |job: Job<FilesystemRequest>| async move {
        let (of, id, FilesystemRequest { name, replace }) = (&job.of, sandbox_id(&job.of.id)?, job.asked);
        let made = of.api.native.snapshot_filesystem(id, of.who(), name, replace.unwrap_or(false)).await?;
        Ok(Answer::created(FilesystemObject::from(&made)))
    };
    post.once(work).await
}

/// The filesystem snapshots of this key.
#[utoipa::path(get, path = "/v1/filesystem-snapshots", tag = "filesystem snapshots", operation_id = "list_filesystem_snapshots",
    params(PageQuery), responses((status = 200, description = "A page of them, oldest first", body = List<FilesystemObject>), Reading))]
pub(super) async fn list(of: Of, Words(page): Words<PageQuery>) -> Result<Json<List<FilesystemObject>>, ApiError> {
    let found = kept(&of.api)?.list(of.who()).await.map_err(unreadable)?;
    let items = found.iter().map(|one| ((one.about.created_at.as_nanosecond(), one.name.to_string()), FilesystemObject::from(one)));
    Ok(Json(page.of(items.collect())?))
}

/// One filesystem snapshot.
#[utoipa::path(get, path = "/v1/filesystem-snapshots/{name}", tag = "filesystem snapshots", operation_id = "get_filesystem_snapshot",
    params(("name" = String, Path)), responses((status = 200, description = "What is known of it", body = FilesystemObject), Reading))]
pub(super) async fn get(of: Of) -> Result<Json<FilesystemObject>, ApiError> {
    let found = kept(&of.api)?.about(of.who(), parse(&of.id)?).await.map_err(unreadable)?.ok_or_else(unknown)?;
    Ok(Json(FilesystemObject::from(&found)))
}

/// Deletes a filesystem snapshot. What was made from it stays.
#[utoipa::path(delete, path = "/v1/filesystem-snapshots/{name}", tag = "filesystem snapshots",
    operation_id = "delete_filesystem_snapshot", params(("name" = String, Path)),
    responses((status = 204, description = "It is gone"), Working))]
pub(super) async fn delete(of: Of) -> Result<StatusCode, ApiError> {
    let there = kept(&of.api)?.delete(of.who(), parse(&of.id)?).await.map_err(unreadable)?;
    if there { Ok(StatusCode::NO_CONTENT) } else { Err(unknown()) }
}

/// The archive, as it is: a layer that any program of containers reads.
#[utoipa::path(get, path = "/v1/filesystem-snapshots/{name}/layer", tag = "filesystem snapshots",
    operation_id = "export_filesystem_snapshot", params(("name" = String, Path)),
    responses((status = 200, description = "A tar archive", body = [u8], content_type = "application/vnd.oci.image.layer.v1.tar"), Reading))]
pub(super) async fn export(of: Of) -> Result<Response, ApiError> {
    let filesystems = kept(&of.api)?;
    let manifest = filesystems.find(of.who(), parse(&of.id)?).await.map_err(unreadable)?.ok_or_else(unknown)?;
    let bytes = manifest.raw_bytes();
    let turn = filesystems.export_turn(of.who(), bytes).map_err(refusal)?;
    let layer = filesystems.export(manifest).await?;
    let file = tokio::fs::File::open(&layer.path).await.map_err(|error| internal(&error.to_string()))?;
    let stream = ReaderStream::with_capacity(file, PIECE_BYTES);
    // The archive stays where it is until all of it was sent.
    let held = (layer, turn);
    let stream = futures_util::stream::unfold((stream, held), |(mut stream, held)| async move {
        let piece = futures_util::StreamExt::next(&mut stream).await?;
        Some((piece, (stream, held)))
    });
    let headers = [(header::CONTENT_TYPE, LAYER.to_owned()), (header::CONTENT_LENGTH, bytes.to_string())];
    Ok((headers, Body::from_stream(stream)).into_response())
}

#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ImportQuery {
    /// Take the place of one that has this name.
    #[param(value_type = Option<bool>, nullable = false)]
    replace: Option<String>,
}

/// A layer becomes a filesystem snapshot.
#[utoipa::path(put, path = "/v1/filesystem-snapshots/{name}/layer", tag = "filesystem snapshots",
    operation_id = "import_filesystem_snapshot", params(("name" = String, Path), ImportQuery),
    request_body(content = [u8], description = "A tar archive, compressed with gzip or zstd or not", content_type = "application/octet-stream"),
    responses((status = 201, description = "It is there", body = FilesystemObject), Working))]
pub(super) async fn import(of: Of, Words(query): Words<ImportQuery>, body: Body) -> Result<Response, ApiError> {
    let filesystems = kept(&of.api)?;
    let (name, replace) = (parse(&of.id)?, query.replace.as_deref() == Some("true"));
    let order = Order { name, replace, owner: of.owner, sandbox_id: None, image: None };
    let made = filesystems.import(order, body.into_data_stream()).await.map_err(refusal)?;
    let made = SavedFilesystem::of(&made).ok_or_else(|| internal("it is no filesystem snapshot"))?;
    Ok((StatusCode::CREATED, Json(FilesystemObject::from(&made))).into_response())
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
    refusal(filesystems::unreadable(&error))
}

fn unknown() -> ApiError {
    ApiError::not_found("filesystem snapshot")
}

fn internal(why: &str) -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", format!("Something is wrong with this server: {why}."))
}

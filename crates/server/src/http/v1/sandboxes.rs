//! `/v1/sandboxes`: of every kind.

use std::sync::Arc;

use axum::{
    Extension, Json,
    body::Bytes,
    extract::{Path, Query, State, rejection::BytesRejection},
    http::{HeaderMap, StatusCode},
};
use sandboxer_extensions::{ExtensionError, Health, ProfileName};
use sandboxer_protocol::SandboxId;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    Api, ApiError,
    idempotency::Answer,
    objects::SandboxObject,
    page::{PageQuery, Position},
    request,
};
use crate::{
    http::access::Owner,
    workspaces::{self, NotDeleted, Order, is_native},
};

pub(super) async fn create(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Answer, ApiError> {
    let fields = request::fields(body)?;
    let fingerprint = format!("create {}", Value::Object(fields.clone()));
    let later = request::wants_async(&headers);
    let (this, by) = (Arc::clone(&api), owner.clone());
    api.remembered.once(&headers, owner, &fingerprint, async move { make(&this, fields, by, later).await }).await
}

async fn make(api: &Api, mut fields: Map<String, Value>, owner: Option<String>, later: bool) -> Result<Answer, ApiError> {
    let profile = request::take_name::<ProfileName>(&mut fields, "profile")?;
    let inputs = request::take_object(&mut fields, "inputs")?;
    let host = request::take_name(&mut fields, "host")?;
    let Some(profile) = profile.filter(|profile| !is_native(profile)) else {
        if let Some(host) = host.filter(|host: &sandboxer_extensions::HostName| host.as_str() != "local") {
            return Err(ApiError::invalid(format!(
                "host: a gVisor sandbox runs on the server's own machine, not on {host}. Leave it out."
            )));
        }
        let given = inputs.into_iter().collect();
        let gvisor = api.workspaces.config().profiles.iter().find(|profile| is_native(&profile.name));
        let inputs = gvisor.map(|profile| profile.resolve(&given)).transpose()?.unwrap_or_default();
        let inputs = inputs.into_iter().map(|(name, value)| (name, json!(value))).collect();
        let config = workspaces::configuration(fields, inputs).map_err(ApiError::invalid)?;
        let (sandbox, token) = api.native.create(config, owner).await?;
        return Ok(Answer::created(json!(SandboxObject::native(sandbox, Some(token)))));
    };
    let metadata = request::take_metadata(&mut fields)?;
    request::nothing_more(&fields)?;
    let order = Order { profile, inputs: inputs.into_iter().collect(), host, metadata, keep_failed: later };
    let begun = api.workspaces.create(order, owner).await?;
    if later {
        return Ok(Answer::accepted(json!(SandboxObject::from(begun.row))));
    }
    Ok(Answer::created(json!(SandboxObject::from(begun.finished().await?))))
}

pub(super) async fn list(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Query(page): Query<PageQuery>,
) -> Result<Json<Value>, ApiError> {
    let native = api.native.list(owner.as_deref()).into_iter().map(|sandbox| SandboxObject::native(sandbox, None));
    let others = api.workspaces.sandboxes(owner.as_deref()).await?.into_iter().map(SandboxObject::from);
    let position = |object: &SandboxObject| -> Position { (object.created_at.as_nanosecond(), object.id.clone()) };
    let mut list = page.of(native.chain(others).map(|object| (position(&object), json!(object))).collect())?;
    warn_of_damage(&api, &mut list).await;
    Ok(Json(list))
}

/// Whoever lists is told that the list may lack something.
pub(super) async fn warn_of_damage(api: &Api, list: &mut Value) {
    let damaged = api.workspaces.damaged().await;
    if !damaged.is_empty() {
        let warning = |name| format!("A file of the server was damaged and set aside as {name}: what it held is not listed.");
        list["warnings"] = damaged.into_iter().map(warning).collect();
    }
}

pub(super) async fn get(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let id = sandbox_id(&id)?;
    if let Some(sandbox) = api.native.get(id, owner.as_deref()).await {
        return Ok(Json(json!(SandboxObject::native(sandbox, None))));
    }
    let row = api.workspaces.sandbox(id, owner.as_deref()).await?;
    let looked: Result<Health, ExtensionError> = api.workspaces.look(&row).await;
    let object = SandboxObject::from(row);
    let object = match looked {
        Ok(health) => object.with(health),
        Err(error) => object.unknown(error.message),
    };
    Ok(Json(json!(object)))
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct DeleteQuery {
    force: Option<String>,
}

impl DeleteQuery {
    /// Its row is to go even if its host can't be asked.
    pub(super) fn force(&self) -> bool {
        self.force.as_deref() == Some("true")
    }
}

pub(super) async fn delete(
    State(api): State<Arc<Api>>,
    Extension(Owner(owner)): Extension<Owner>,
    Path(id): Path<String>,
    Query(query): Query<DeleteQuery>,
) -> Result<StatusCode, ApiError> {
    let id = sandbox_id(&id)?;
    match api.native.delete(id, owner.as_deref()).await {
        Ok(()) => return Ok(StatusCode::NO_CONTENT),
        Err(NotDeleted::NotFound) => {}
        Err(NotDeleted::InUse) => return Err(ApiError::in_use()),
        Err(NotDeleted::TooLong) => {
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "not_now", "The sandbox does not end. Try again later."));
        }
    }
    api.workspaces.delete(id, owner.as_deref(), query.force()).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// What is no id is not there.
pub(super) fn sandbox_id(text: &str) -> Result<SandboxId, ApiError> {
    text.parse().map_err(|_| ApiError::not_found("sandbox"))
}

//! `/v1/sandboxes`: of every kind.

use std::collections::HashSet;

use axum::{Json, http::StatusCode};
use sandboxer_extensions::{ExtensionError, Health, ProfileName};
use sandboxer_protocol::SandboxId;
use sandboxer_store::KeptName;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::IntoParams;

use super::{
    Api, ApiError,
    extract::{Job, Of, Post, Words},
    idempotency::Answer,
    known::{self, Message},
    objects::{List, SandboxObject},
    page::{PageQuery, Position},
    refusals::{Looking, Reading, Working},
    request,
};
use crate::workspaces::{self, NativeError, NativeSandbox, NotDeleted, Order, is_native};

/// Makes a sandbox. `Prefer: respond-async` is answered with 202 where that takes long; a gVisor sandbox is made at once.
#[utoipa::path(post, path = "/v1/sandboxes", tag = "sandboxes", operation_id = "create_sandbox", params(request::Asking),
    request_body(content = ref("#/components/schemas/CreateRequest"), content_type = "application/json"),
    responses((status = 201, description = "It is there, with the only copy of its token", body = SandboxObject),
        (status = 202, description = "It is being made", body = SandboxObject), Working))]
pub(super) async fn create(post: Post<Map<String, Value>>) -> Result<Answer, ApiError> {
    post.once(make).await
}

async fn make(job: Job<Map<String, Value>>) -> Result<Answer, ApiError> {
    let Job { of: Of { api, owner, .. }, asked: mut fields, later, .. } = job;
    let profile = request::take_name::<ProfileName>(&mut fields, "profile")?;
    let inputs = request::take_object(&mut fields, "inputs")?;
    let host = request::take_name(&mut fields, "host")?;
    let Some(profile) = profile.filter(|profile| !is_native(profile)) else {
        if let Some(host) = host.filter(|host: &sandboxer_extensions::HostName| host.as_str() != "local") {
            return Err(ApiError::invalid(format!(
                "host: a gVisor sandbox runs on the server's own machine, not on {host}. Leave it out."
            )));
        }
        known::only_known(&fields, Message::Configuration, &["profile", "inputs", "host"])?;
        let given = inputs.into_iter().collect();
        let gvisor = api.workspaces.config().profiles.iter().find(|profile| is_native(&profile.name));
        let inputs = gvisor.map(|profile| profile.resolve(&given)).transpose()?.unwrap_or_default();
        let inputs = inputs.into_iter().map(|(name, value)| (name, json!(value))).collect();
        let config = workspaces::configuration(fields, inputs).map_err(ApiError::invalid)?;
        let (sandbox, token) = api.native.create(config, owner).await?;
        return Ok(Answer::created(SandboxObject::native(sandbox, Some(token))));
    };
    let metadata = request::take_metadata(&mut fields)?;
    request::nothing_more(&fields, &["profile", "inputs", "host", "metadata"])?;
    let order = Order { profile, inputs: inputs.into_iter().collect(), host, metadata, keep_failed: later };
    let begun = api.workspaces.create(order, owner).await?;
    if later {
        return Ok(Answer::accepted(SandboxObject::from(begun.row)));
    }
    Ok(Answer::created(SandboxObject::from(begun.finished().await?)))
}

#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct SavedQuery {
    /// Also those that are on the volume and not in this server's memory.
    #[param(value_type = Option<bool>, nullable = false)]
    saved: Option<String>,
}

impl SavedQuery {
    fn saved(&self) -> Result<bool, ApiError> {
        match self.saved.as_deref() {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(_) => Err(ApiError::bad("saved: true or false is needed.")),
        }
    }
}

/// The sandboxes of this key: gVisor's own as far as they are in this server's memory, and those of extensions. With `saved` also those of gVisor that are on the
/// volume, where they were saved since this is kept track of: `saved`, or `ready` where another instance has them.
#[utoipa::path(get, path = "/v1/sandboxes", tag = "sandboxes", operation_id = "list_sandboxes", params(PageQuery, SavedQuery),
    responses((status = 200, description = "A page of them, oldest first", body = List<SandboxObject>), Looking))]
pub(super) async fn list(
    of: Of,
    Words(page): Words<PageQuery>,
    Words(query): Words<SavedQuery>,
) -> Result<Json<List<SandboxObject>>, ApiError> {
    let here = of.api.native.list(of.who());
    // After those that are here: one that comes or goes meanwhile is told of once.
    let (resting, until, damaged) = if query.saved()? { resting(&of, &page, &here).await? } else { Default::default() };
    let native = here.into_iter().chain(resting).map(|sandbox| SandboxObject::native(sandbox, None));
    let others = of.api.workspaces.sandboxes(of.who()).await?.into_iter().map(SandboxObject::from);
    let position = |object: &SandboxObject| -> Position { (object.created_at.as_nanosecond(), object.id.clone()) };
    let mut list = page.of_those_until(native.chain(others).map(|object| (position(&object), object)).collect(), until)?;
    list.warnings = warnings(&of.api).await;
    list.warnings.extend(damaged.iter().map(|id| format!("What the volume has of sandbox {id} is damaged, so it is not listed.")));
    Ok(Json(list))
}

type Resting = (Vec<NativeSandbox>, Option<Position>, Vec<SandboxId>);

/// Those on the volume that a page may have, how far they were looked for, and which are damaged.
async fn resting(of: &Of, page: &PageQuery, here: &[NativeSandbox]) -> Result<Resting, ApiError> {
    let after = match page.after()? {
        Some((time, id)) => {
            let id = id.parse().map_err(|_| PageQuery::bad_cursor())?;
            // What stands before all of them is as good as nothing.
            Some(KeptName::new(u64::try_from(time.max(0)).map_err(|_| PageQuery::bad_cursor())?, id))
        }
        None => None,
    };
    let here: HashSet<SandboxId> = here.iter().map(|sandbox| sandbox.id).collect();
    let (resting, until, damaged) = of.api.native.resting(of.who(), after, page.limit()?, &here).await?;
    Ok((resting, until.map(|until| (i128::from(until.made_ns()), until.id().to_string())), damaged))
}

/// Whoever lists is told that the list may lack something.
pub(super) async fn warnings(api: &Api) -> Vec<String> {
    let warning = |name| format!("A file of the server was damaged and set aside as {name}: what it held is not listed.");
    api.workspaces.damaged().await.into_iter().map(warning).collect()
}

/// One sandbox, as it is now.
#[utoipa::path(get, path = "/v1/sandboxes/{id}", tag = "sandboxes", operation_id = "get_sandbox",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox")),
    responses((status = 200, description = "The sandbox", body = SandboxObject), Reading))]
pub(super) async fn get(of: Of) -> Result<Json<SandboxObject>, ApiError> {
    let id = sandbox_id(&of.id)?;
    if let Some(sandbox) = of.api.native.get(id, of.who()).await {
        return Ok(Json(SandboxObject::native(sandbox, None)));
    }
    let row = match of.api.workspaces.sandbox(id, of.who()).await {
        Ok(row) => row,
        Err(error) => {
            return Err(match of.api.native.missing(id, of.who()).await {
                gone @ NativeError::Gone(_) => gone.into(),
                _ => error.into(),
            });
        }
    };
    let looked: Result<Health, ExtensionError> = of.api.workspaces.look(&row).await;
    let object = SandboxObject::from(row);
    Ok(Json(match looked {
        Ok(health) => object.with(health),
        Err(error) => object.unknown(error.message),
    }))
}

#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct DeleteQuery {
    /// Forget it even if its host can't be asked.
    #[param(value_type = Option<bool>, nullable = false)]
    force: Option<String>,
}

impl DeleteQuery {
    /// Its row is to go even if its host can't be asked.
    pub(super) fn force(&self) -> bool {
        self.force.as_deref() == Some("true")
    }
}

/// Ends a sandbox that nobody is attached to, with everything in it and its checkpoints, whether it runs or rests on the volume. Its snapshots stay.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}", tag = "sandboxes", operation_id = "delete_sandbox",
    params(("id" = uuid::Uuid, Path, description = "Of a sandbox"), DeleteQuery),
    responses((status = 204, description = "It is gone"), Working))]
pub(super) async fn delete(of: Of, Words(query): Words<DeleteQuery>) -> Result<StatusCode, ApiError> {
    let id = sandbox_id(&of.id)?;
    // One of an extension does not need the volume to answer.
    if of.api.workspaces.sandbox(id, of.who()).await.is_ok() {
        of.api.workspaces.delete(id, of.who(), query.force()).await?;
        return Ok(StatusCode::NO_CONTENT);
    }
    match of.api.native.delete(id, of.who()).await {
        Ok(()) => Ok(StatusCode::NO_CONTENT),
        Err(NotDeleted::NotFound) => {
            of.api.workspaces.delete(id, of.who(), query.force()).await?;
            Ok(StatusCode::NO_CONTENT)
        }
        Err(NotDeleted::InUse) => Err(ApiError::in_use()),
        Err(NotDeleted::HandedOver) => Err(NativeError::NotReady("is being handed to another instance").into()),
        Err(NotDeleted::NotNow(why)) => Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "not_now", why)),
    }
}

/// What is no id is not there.
pub(super) fn sandbox_id(text: &str) -> Result<SandboxId, ApiError> {
    text.parse().map_err(|_| ApiError::not_found("sandbox"))
}

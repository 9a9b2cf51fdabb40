//! `/v1/profiles` and `/v1/hosts`: what may be made, and where. `/v1/instance`: what this server has.

use axum::Json;
use sandboxer_extensions::{Place, ProfileName};

use super::{
    ApiError,
    extract::Of,
    objects::{HostObject, List, ProfileObject},
    refusals::Looking,
};
use crate::manager::InstanceView;

/// What may be made.
#[utoipa::path(get, path = "/v1/profiles", tag = "server", operation_id = "list_profiles",
    responses((status = 200, description = "All of them", body = List<ProfileObject>), Looking))]
pub(super) async fn list(of: Of) -> Json<List<ProfileObject>> {
    Json(all(of.api.workspaces.config().profiles.iter().map(ProfileObject::from)))
}

/// One profile.
#[utoipa::path(get, path = "/v1/profiles/{name}", tag = "server", operation_id = "get_profile", params(("name" = String, Path)),
    responses((status = 200, description = "The profile", body = ProfileObject), Looking))]
pub(super) async fn get(of: Of) -> Result<Json<ProfileObject>, ApiError> {
    let name: ProfileName = of.id.parse().map_err(|_| ApiError::not_found("profile"))?;
    let profile = of.api.workspaces.config().profiles.get(&name).ok_or_else(|| ApiError::not_found("profile"))?;
    Ok(Json(profile.into()))
}

/// Where sandboxes may be made.
#[utoipa::path(get, path = "/v1/hosts", tag = "server", operation_id = "list_hosts",
    responses((status = 200, description = "All of them", body = List<HostObject>), Looking))]
pub(super) async fn hosts(of: Of) -> Json<List<HostObject>> {
    let kind = |place: &Place| if *place == Place::Local { "local" } else { "ssh" };
    let hosts = of.api.workspaces.config().hosts.iter();
    Json(all(hosts.map(|host| HostObject { name: host.name.to_string(), kind: kind(&host.place).to_owned() })))
}

/// What this instance has.
#[utoipa::path(get, path = "/v1/instance", tag = "server", operation_id = "get_instance",
    responses((status = 200, description = "The instance, and what it serves", body = InstanceView), Looking))]
pub(super) async fn instance(of: Of) -> Json<InstanceView> {
    Json(of.api.native.view(of.who()))
}

fn all<T>(items: impl Iterator<Item = T>) -> List<T> {
    List { items: items.collect(), next_cursor: None, warnings: Vec::new() }
}

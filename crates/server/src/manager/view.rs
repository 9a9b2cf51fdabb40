//! What an instance tells of itself.

use serde::Serialize;
use utoipa::ToSchema;

/// What this instance serves, so that somebody outside can see that no other does.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Instance)]
pub(crate) struct InstanceView {
    /// Its name in the records of the volume; null: there is no volume.
    #[schema(required = true)]
    pub(super) instance: Option<String>,
    pub(super) stopping: bool,
    pub(super) sandboxes: Vec<Served>,
}

/// One sandbox, by the hash of its id, since the id alone may open it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Served {
    pub(super) id_sha256: String,
    #[schema(required = true)]
    pub(super) epoch: Option<u64>,
    pub(super) serving: bool,
}

//! Errors as HTTP means them.

use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use sandboxer_extensions::{ExtensionError, Kind};
use sandboxer_protocol::client::{EndReason, ErrorCode};

use super::refusals::ErrorBody;
use crate::{manager::CreateError, obituaries::Obituary, workspaces::NativeError};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    pub(super) code: &'static str,
    pub(super) message: String,
}

impl ApiError {
    pub(super) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into() }
    }

    pub(super) fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request", message)
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_field", message)
    }

    pub(super) fn not_found(what: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", format!("There is no such {what}."))
    }

    pub(super) fn in_use() -> Self {
        Self::new(StatusCode::CONFLICT, "in_use", "A client is attached to this sandbox. Let it do this, or wait until it has gone.")
    }

    /// A sandbox that ended, with the reason.
    fn gone(obituary: Obituary) -> Self {
        let code = match obituary.reason {
            Some(EndReason::OutOfMemory) => ErrorCode::OutOfMemory.as_str(),
            Some(EndReason::Killed) => ErrorCode::SandboxKilled.as_str(),
            Some(EndReason::RuntimeFailed) => ErrorCode::RuntimeFailed.as_str(),
            Some(EndReason::Lifetime) => ErrorCode::LifetimeOver.as_str(),
            None => "gone",
        };
        Self::new(StatusCode::GONE, code, obituary.message)
    }

    pub(super) fn no_address() -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", "There is nothing at this address. GET /v1/openapi.json lists the addresses.")
    }

    pub(super) fn method_not_allowed() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "This address does not take this method.")
    }
}

impl From<ExtensionError> for ApiError {
    fn from(error: ExtensionError) -> Self {
        let status = match error.kind {
            Kind::Invalid => StatusCode::UNPROCESSABLE_ENTITY,
            Kind::Conflict => StatusCode::CONFLICT,
            Kind::NotFound => StatusCode::NOT_FOUND,
            Kind::Unsupported => StatusCode::NOT_IMPLEMENTED,
            Kind::TooMany => StatusCode::TOO_MANY_REQUESTS,
            Kind::Unavailable | Kind::Failed => StatusCode::SERVICE_UNAVAILABLE,
        };
        Self::new(status, error.code, error.message)
    }
}

impl From<CreateError> for ApiError {
    fn from(error: CreateError) -> Self {
        let coded = Self::coded(error.code, error.message);
        if error.of_the_request { Self { status: StatusCode::UNPROCESSABLE_ENTITY, ..coded } } else { coded }
    }
}

impl From<NativeError> for ApiError {
    fn from(error: NativeError) -> Self {
        match error {
            NativeError::NotFound(what) => Self::not_found(what),
            NativeError::Gone(obituary) => Self::gone(obituary),
            NativeError::InUse => Self::in_use(),
            NativeError::NotReady(how) => {
                Self::new(StatusCode::CONFLICT, "not_ready", format!("Only a sandbox that is ready can do this, and this one {how}."))
            }
            NativeError::Because(code, message) => Self::coded(code, message),
        }
    }
}

impl ApiError {
    /// What goes wrong with gVisor's own sandboxes has the codes of the WebSocket endpoints.
    fn coded(code: ErrorCode, message: String) -> Self {
        let status = match code {
            ErrorCode::RateLimited => StatusCode::TOO_MANY_REQUESTS,
            ErrorCode::UnknownSnapshot | ErrorCode::UnknownFilesystemSnapshot => StatusCode::NOT_FOUND,
            ErrorCode::NotNow | ErrorCode::ExecutionInProgress | ErrorCode::NothingRunning | ErrorCode::NameTaken => StatusCode::CONFLICT,
            ErrorCode::NoCapacity
            | ErrorCode::NotReady
            | ErrorCode::ServerStopping
            | ErrorCode::ServerRestarting
            | ErrorCode::RuntimeFailed
            | ErrorCode::CheckpointFailed
            | ErrorCode::SnapshotFailed
            | ErrorCode::FilesystemSnapshotFailed
            | ErrorCode::RestoreFailed
            | ErrorCode::VolumeUnavailable
            | ErrorCode::Internal => StatusCode::SERVICE_UNAVAILABLE,
            ErrorCode::CheckpointNotConfigured
            | ErrorCode::SnapshotsNotConfigured
            | ErrorCode::FilesystemSnapshotsNotConfigured
            | ErrorCode::NetworkNotAvailable
            | ErrorCode::LimitNotEnforceable => StatusCode::NOT_IMPLEMENTED,
            _ => StatusCode::UNPROCESSABLE_ENTITY,
        };
        Self::new(status, code.as_str(), message)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(ErrorBody::new(self.code, &self.message))).into_response()
    }
}

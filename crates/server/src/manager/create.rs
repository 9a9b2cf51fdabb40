//! Making a sandbox that somebody asked for: what was asked is checked, one is started or waits already, and it gets its driver.

use std::{sync::Arc, time::Duration};

use sandboxer_protocol::{
    SandboxId,
    agent::{Enforced, Marker},
    client::{CreateConfig, ErrorCode, LimitsRequest, Network},
};
use tokio::{sync::OwnedSemaphorePermit, time::Instant};
use tracing::{Instrument as _, info, info_span, warn};

use super::{
    CERTAIN_WITHIN, Handle, Manager,
    converse::{Opened, Running},
    handle::Wire,
    pool::Class,
    secrets::{hash, new_token},
};
use crate::{
    limits::Limits,
    network::NotAdmitted,
    sandbox::record::{RECORD_VERSION, Record, SandboxConfig},
};

/// Saving more often than this would be all that a sandbox does.
const LEAST_AUTOSAVE: Duration = Duration::from_millis(500);

pub(super) const CREATE_ELSEWHERE: &str = "The server is stopping. Create the sandbox at another one.";

/// Why a sandbox was not made. The message says what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct CreateError {
    pub(crate) code: ErrorCode,
    pub(crate) message: String,
    /// The request asks for what this server can't give: it is of no use to send the same request again.
    pub(crate) of_the_request: bool,
}

impl CreateError {
    pub(crate) fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), of_the_request: false }
    }

    pub(crate) fn of_the_request(self) -> Self {
        Self { of_the_request: true, ..self }
    }
}

/// A sandbox that was just made, with the only copy of its token.
pub(crate) struct Created {
    pub(crate) handle: Handle,
    pub(crate) token: String,
}

impl Manager {
    /// Makes a sandbox. Runs to its end even if nobody waits for it any longer.
    pub(crate) async fn create(self: &Arc<Self>, config: CreateConfig, owner: Option<String>) -> Result<Created, CreateError> {
        let manager = Arc::clone(self);
        let began = Instant::now();
        self.metrics.creates.inc();
        let made = self.drivers.spawn(async move { manager.make(config, owner).await });
        let made = made.await.unwrap_or_else(|_| Err(CreateError::new(ErrorCode::Internal, "Making the sandbox failed. Try again.")));
        match &made {
            Ok(_) => self.metrics.create_seconds.observe(began.elapsed().as_secs_f64()),
            Err(_) => {
                self.metrics.create_failures.inc();
            }
        }
        made
    }

    async fn make(self: Arc<Self>, config: CreateConfig, owner: Option<String>) -> Result<Created, CreateError> {
        let going_on = || match self.stopping() {
            None => Ok(()),
            Some(_) => Err(CreateError::new(ErrorCode::ServerStopping, CREATE_ELSEWHERE)),
        };
        going_on()?;
        let asked = config.limits.unwrap_or_default();
        let image = config.image.clone();
        let template_name = config.filesystem_snapshot_name.clone();
        let config = self.check(config)?;
        let resources = config.limits.on_the_host(&asked, &self.host)?;
        self.tenants.may_make(owner.as_deref(), 1)?;
        let place = self.leaving.room_of(owner.as_deref(), self.stopped(), || self.tenants.admit(owner.as_deref())).await?;
        let slot = self.leaving.room(self.stopped(), || self.slot()).await?;
        going_on()?;
        let _busy = self.pool.busy();
        let template = self.template(template_name.as_deref(), owner.as_deref()).await?;
        let image = self.image_for(template.as_ref(), image.as_deref()).await?;
        let defaults = self.images.defaults(&image).await;
        let config = config.over(defaults);
        let class = Class { image: image.clone(), limits: config.limits };
        let waited = if template.is_none() { self.from_pool(&class).await } else { None };
        self.give_way();
        let (id, marker) =
            waited.as_ref().map_or_else(|| (SandboxId::random(), Marker::new(rand::random())), |waited| (waited.id, waited.marker));
        let token = new_token();
        let mut record = Record {
            version: RECORD_VERSION,
            id,
            created_at: jiff::Timestamp::now(),
            token_sha256: hash(&token),
            marker,
            image,
            owner,
            idle_since: None,
            config,
            epoch: None,
            generation: 0,
            container: None,
            standby: false,
        };
        let finish = async {
            let held = match (self.register(&mut record).await, &waited) {
                (Ok(held), _) => held,
                (Err(error), None) => return Err(error),
                (Err(error), Some(_)) => {
                    waited.into_iter().for_each(|waited| self.back_into_pool(&class, waited));
                    return Err(error);
                }
            };
            let mut launch = self.launch(&record, resources);
            let begun = Instant::now();
            let from_pool = waited.is_some();
            let started = match waited {
                Some(waited) => waited.hand_out(&record, &launch.dir),
                None => self.start_with_files(&mut launch, &mut record, template.as_ref()).await,
            };
            match started.and_then(|opened| as_asked(opened, &asked, &record.config)) {
                Ok(running) => {
                    info!(ms = begun.elapsed().as_millis(), from_pool, "started");
                    let wire = Wire::default();
                    let keeping = self.keep(&record, &wire, held);
                    let handle = self.drive(record, (Some(slot), place), running, Duration::ZERO, wire, keeping);
                    Ok(Created { handle, token })
                }
                Err(error) => {
                    warn!(why = error.message, "could not be started");
                    self.discard(&launch).await;
                    if let Some((_, held)) = held {
                        // Nobody has heard of it, and its creator is not to wait for a volume that is away.
                        let _ = tokio::time::timeout(CERTAIN_WITHIN, held.lease.bury(error.message.clone())).await;
                    }
                    Err(error)
                }
            }
        };
        finish.instrument(info_span!(parent: None, "sandbox", %id)).await
    }

    pub(super) fn slot(&self) -> Result<OwnedSemaphorePermit, CreateError> {
        Arc::clone(&self.slots).try_acquire_owned().map_err(|_| self.no_capacity())
    }

    pub(super) fn no_capacity(&self) -> CreateError {
        let most = self.settings.max_sandboxes;
        CreateError::new(ErrorCode::NoCapacity, format!("This server has {most} sandboxes, and that is all it may have. Try again later."))
    }

    /// Everything that can be wrong with a configuration, before anything is made.
    fn check(&self, config: CreateConfig) -> Result<SandboxConfig, CreateError> {
        let refuse = |code, message: &str| Err(CreateError::new(code, message));
        let checkpoint = config.enable_checkpoint == Some(true);
        if checkpoint && self.checkpoints.is_none() {
            return refuse(
                ErrorCode::CheckpointNotConfigured,
                "enable_checkpoint: this server keeps no checkpoints. Leave it out, or ask another server.",
            );
        }
        let autosave = config.autosave_seconds.and_then(|seconds| seconds.nonzero()).map(|period| period.max(LEAST_AUTOSAVE));
        if autosave.is_some() && !checkpoint {
            return refuse(ErrorCode::CheckpointNotEnabled, "autosave_seconds needs enable_checkpoint.");
        }
        if config.enable_sandbox_handoff == Some(true) && !checkpoint {
            return refuse(ErrorCode::CheckpointNotEnabled, "enable_sandbox_handoff needs enable_checkpoint.");
        }
        let client_gone_timeout = config.client_gone_timeout.and_then(|seconds| seconds.nonzero());
        if client_gone_timeout.is_some() && checkpoint {
            return refuse(
                ErrorCode::InvalidField,
                "client_gone_timeout: a sandbox with enable_checkpoint outlives its clients. Leave one of the two out.",
            );
        }
        let network = match &config.network {
            Some(Network::Allow { allow }) => {
                let hint = "Leave it out, or ask another server.";
                self.settings.network.admit(allow).map_err(|refused| match refused {
                    NotAdmitted::Malformed(why) => CreateError::new(ErrorCode::InvalidField, format!("{why}.")),
                    NotAdmitted::NoNetwork(why) => CreateError::new(ErrorCode::NetworkNotAvailable, format!("{why}. {hint}")),
                    NotAdmitted::TooMuch(why) => {
                        CreateError::new(ErrorCode::NetworkNotAvailable, format!("{why}. {hint}")).of_the_request()
                    }
                })?
            }
            Some(Network::None(_)) | None => Vec::new(),
        };
        let limits = Limits::resolve(&config.limits.unwrap_or_default(), &self.settings.default_limits, &self.settings.max_limits)?;
        Ok(SandboxConfig {
            idle_timeout: config.idle_timeout.map_or(self.settings.idle_timeout, |seconds| seconds.nonzero()),
            client_gone_timeout,
            output_window_bytes: Some(self.settings.output_window_bytes),
            env: config.env.unwrap_or_default(),
            cwd: config.cwd,
            limits,
            detached_output: config.detached_output.unwrap_or_default(),
            metadata: config.metadata.unwrap_or_default(),
            checkpoint,
            handoff: config.enable_sandbox_handoff == Some(true),
            autosave,
            network,
            idle_checkpoint: checkpoint && config.enable_idle_timeout_auto_checkpoint != Some(false),
        })
    }
}

/// A sandbox that has started, if it can do all that was asked for.
fn as_asked(Opened { enforced, running }: Opened, asked: &LimitsRequest, config: &SandboxConfig) -> Result<Running, CreateError> {
    if let Some(name) = not_enforced(asked, enforced) {
        let message = format!("limits.{name} can't be enforced with the gVisor of this server. Leave it out, or ask another server.");
        return Err(CreateError::new(ErrorCode::LimitNotEnforceable, message));
    }
    if !config.network.is_empty() && !running.tunnel {
        let message = "network: the agent of this image is older than this server and can't do it. Leave it out, or make the image anew.";
        return Err(CreateError::new(ErrorCode::NetworkNotAvailable, message));
    }
    Ok(running)
}

/// A limit that was asked for and that this sandbox can't enforce.
fn not_enforced(asked: &LimitsRequest, enforced: Enforced) -> Option<&'static str> {
    [
        (asked.pids.is_some() && !enforced.pids, "pids"),
        (asked.memory_mb.is_some() && !enforced.memory, "memory_mb"),
        (asked.disk_mb.is_some() && !enforced.disk, "disk_mb"),
    ]
    .into_iter()
    .find_map(|(missing, name)| missing.then_some(name))
}

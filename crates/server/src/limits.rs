//! What a sandbox may use.

use sandboxer_protocol::client::{ErrorCode, LimitsRequest};
use sandboxer_runtime::{Controller, HostLimits, HostResources};
use serde::{Deserialize, Serialize};

use crate::manager::CreateError;

const MIB: u64 = 1024 * 1024;
/// What the gVisor kernel may need beside its guest: the host counts both, and must not strike before the agent does.
const KERNEL_MIB: u64 = 256;

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    pub memory_mb: u64,
    pub cpus: f64,
    pub pids: u32,
    pub disk_mb: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { memory_mb: 2048, cpus: 1.0, pids: 256, disk_mb: 1536 }
    }
}

impl Limits {
    /// What was asked for, and the defaults for the rest, within what this server allows.
    pub(crate) fn resolve(request: &LimitsRequest, defaults: &Limits, maximum: &Limits) -> Result<Self, CreateError> {
        let limits = Self {
            memory_mb: request.memory_mb.unwrap_or(defaults.memory_mb.min(maximum.memory_mb)),
            cpus: request.cpus.unwrap_or(defaults.cpus.min(maximum.cpus)),
            pids: request.pids.unwrap_or(defaults.pids.min(maximum.pids)),
            disk_mb: request.disk_mb.unwrap_or(defaults.disk_mb.min(maximum.disk_mb)),
        };
        // The disk is kept in memory: full, it must leave room to work, or every program would be killed for lack of it.
        let room = limits.memory_mb.saturating_mul(4) / 5;
        let limits = Self { disk_mb: if request.disk_mb.is_none() { limits.disk_mb.min(room) } else { limits.disk_mb }, ..limits };
        let too_high = |name, asked: String, most: String| {
            Err(CreateError::new(
                ErrorCode::LimitTooHigh,
                format!("limits.{name}: {asked} is more than the {most} that this server allows."),
            ))
        };
        let too_low = |name, least: &str| Err(CreateError::new(ErrorCode::InvalidField, format!("limits.{name}: at least {least}.")));
        match limits {
            l if l.memory_mb > maximum.memory_mb => too_high("memory_mb", l.memory_mb.to_string(), maximum.memory_mb.to_string()),
            l if l.cpus > maximum.cpus => too_high("cpus", l.cpus.to_string(), maximum.cpus.to_string()),
            l if l.pids > maximum.pids => too_high("pids", l.pids.to_string(), maximum.pids.to_string()),
            l if l.disk_mb > maximum.disk_mb => too_high("disk_mb", l.disk_mb.to_string(), maximum.disk_mb.to_string()),
            l if l.memory_mb < 64 => too_low("memory_mb", "64"),
            l if !l.cpus.is_finite() || l.cpus < 0.05 => too_low("cpus", "0.05"),
            l if l.pids < 4 => too_low("pids", "4"),
            l if l.disk_mb < 1 => too_low("disk_mb", "1"),
            l if l.disk_mb > room => {
                let message = format!(
                    "limits.disk_mb: the disk is kept in memory, so {} of it need a memory_mb of {} or more.",
                    l.disk_mb,
                    l.disk_mb.div_ceil(4) * 5
                );
                Err(CreateError::new(ErrorCode::InvalidField, message))
            }
            _ => Ok(limits),
        }
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory_mb.saturating_mul(MIB)
    }

    pub(crate) fn disk_bytes(&self) -> u64 {
        self.disk_mb.saturating_mul(MIB)
    }

    /// A file for every 4 KiB of disk, as a file system would have.
    pub(crate) fn disk_inodes(&self) -> u64 {
        (self.disk_bytes() / 4096).max(4096)
    }

    /// What the host is to enforce for a sandbox that comes from a volume, if it may have here what it had there.
    pub(crate) fn again(&self, maximum: &Limits, host: &HostLimits) -> Result<HostResources, CreateError> {
        let asked =
            LimitsRequest { memory_mb: Some(self.memory_mb), cpus: Some(self.cpus), pids: Some(self.pids), disk_mb: Some(self.disk_mb) };
        Self::resolve(&asked, self, maximum)?.on_the_host(&LimitsRequest::default(), host)
    }

    /// What the host is to enforce. What it can't is left out if nobody asked for it, and refused if somebody did.
    pub(crate) fn on_the_host(&self, request: &LimitsRequest, host: &HostLimits) -> Result<HostResources, CreateError> {
        let can = |controller| host.enforces(controller);
        let cpus = match (can(Controller::Cpu), request.cpus) {
            (Ok(_), _) => Some(self.cpus),
            (Err(_), None) => None,
            (Err(why), Some(_)) => {
                let message = format!("limits.cpus can't be enforced on this server: {why}. Leave it out, or ask a server that can.");
                return Err(CreateError::new(ErrorCode::LimitNotEnforceable, message));
            }
        };
        let memory_bytes = can(Controller::Memory).is_ok().then(|| self.memory_bytes().saturating_add(KERNEL_MIB * MIB));
        Ok(HostResources { memory_bytes, cpus, pids_ceiling: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(request: LimitsRequest) -> Result<Limits, ErrorCode> {
        Limits::resolve(&request, &Limits::default(), &Limits { memory_mb: 4096, cpus: 2.0, pids: 512, disk_mb: 2048 })
            .map_err(|error| error.code)
    }

    #[test]
    fn what_is_left_out_is_the_default_and_what_is_too_much_is_refused() {
        let asked = resolve(LimitsRequest { pids: Some(300), ..LimitsRequest::default() }).unwrap();
        assert_eq!(asked, Limits { pids: 300, ..Limits::default() });
        for request in [
            LimitsRequest { memory_mb: Some(4097), ..LimitsRequest::default() },
            LimitsRequest { cpus: Some(2.5), ..LimitsRequest::default() },
            LimitsRequest { pids: Some(513), ..LimitsRequest::default() },
            LimitsRequest { disk_mb: Some(u64::MAX), ..LimitsRequest::default() },
        ] {
            assert_eq!(resolve(request), Err(ErrorCode::LimitTooHigh), "{request:?}");
        }
        for request in [
            LimitsRequest { cpus: Some(f64::NAN), ..LimitsRequest::default() },
            LimitsRequest { cpus: Some(-1.0), ..LimitsRequest::default() },
            LimitsRequest { memory_mb: Some(0), ..LimitsRequest::default() },
            LimitsRequest { pids: Some(0), ..LimitsRequest::default() },
        ] {
            assert_eq!(resolve(request), Err(ErrorCode::InvalidField), "{request:?}");
        }
    }

    #[test]
    fn the_defaults_stay_within_what_the_server_allows_and_the_disk_within_memory() {
        let small = Limits { memory_mb: 512, cpus: 0.5, pids: 64, disk_mb: 8192 };
        let limits = Limits::resolve(&LimitsRequest::default(), &Limits::default(), &small).unwrap();
        assert_eq!(limits, Limits { disk_mb: 409, ..small });
        assert_eq!(resolve(LimitsRequest { disk_mb: Some(1700), ..LimitsRequest::default() }), Err(ErrorCode::InvalidField));
        assert!(resolve(LimitsRequest { disk_mb: Some(1700), memory_mb: Some(2200), ..LimitsRequest::default() }).is_ok());
    }

    #[test]
    fn a_limit_that_cannot_be_enforced_is_refused_only_where_it_was_asked_for() {
        let nothing = HostLimits::none("no cgroup here");
        let limits = Limits::default();
        assert_eq!(limits.on_the_host(&LimitsRequest::default(), &nothing).unwrap(), HostResources::default());
        let asked = LimitsRequest { cpus: Some(1.0), ..LimitsRequest::default() };
        assert_eq!(limits.on_the_host(&asked, &nothing).unwrap_err().code, ErrorCode::LimitNotEnforceable);
    }
}

//! The OCI spec of a sandbox, built from one template so that a restore gets the same one that the save had.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use oci_spec::{
    OciSpecError,
    runtime::{
        Capability, LinuxBuilder, LinuxCapabilitiesBuilder, LinuxNamespaceBuilder, LinuxNamespaceType, MountBuilder, ProcessBuilder,
        RootBuilder, Spec, SpecBuilder, UserBuilder,
    },
};

/// Where the agent is in every image.
pub const AGENT_PATH: &str = "/sandboxer/agent";

const PATH_VARIABLE: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Everything in which the specs of two sandboxes differ.
#[derive(Debug, Clone, PartialEq)]
pub struct SandboxSpec {
    /// The EROFS file.
    pub image: PathBuf,
    /// Variables for the agent, each `NAME=value`.
    pub env: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    #[error("the path {0:?} is not UTF-8, which an OCI spec needs")]
    Path(PathBuf),
    #[error("could not build the OCI spec: {0}")]
    Build(#[from] OciSpecError),
    #[error("could not write the OCI spec: {0}")]
    Json(#[from] serde_json::Error),
}

impl SandboxSpec {
    /// The spec as JSON, byte for byte the same for the same input.
    ///
    /// # Errors
    /// A path that is not UTF-8.
    pub fn to_json(&self) -> Result<Vec<u8>, SpecError> {
        let mut json = serde_json::to_value(self.build()?)?;
        // Sets have no order of their own.
        for set in ["bounding", "effective", "permitted"] {
            if let Some(list) = json.pointer_mut(&format!("/process/capabilities/{set}")).and_then(|value| value.as_array_mut()) {
                list.sort_by(|a, b| a.as_str().cmp(&b.as_str()));
            }
        }
        json.sort_all_objects();
        Ok(serde_json::to_vec(&json)?)
    }

    fn build(&self) -> Result<Spec, SpecError> {
        let image = text(&self.image)?;
        let mut env = vec![PATH_VARIABLE.to_owned()];
        env.extend(self.env.iter().cloned());
        // The agent mounts, pivots and makes namespaces; it takes these from user code itself. They are the sandbox's, not the host's.
        let all: std::collections::HashSet<_> = CAPABILITIES.into_iter().collect();
        let capabilities = LinuxCapabilitiesBuilder::default()
            .bounding(all.clone())
            .effective(all.clone())
            .permitted(all)
            .inheritable(std::collections::HashSet::new())
            .ambient(std::collections::HashSet::new())
            .build()?;
        let process = ProcessBuilder::default()
            .terminal(false)
            .user(UserBuilder::default().uid(0u32).gid(0u32).build()?)
            .args(vec![AGENT_PATH.to_owned()])
            .env(env)
            .cwd("/")
            .capabilities(capabilities)
            .rlimits(vec![])
            .no_new_privileges(false)
            .build()?;
        Ok(SpecBuilder::default()
            .version("1.0.2")
            .root(RootBuilder::default().path("rootfs").readonly(true).build()?)
            .hostname("sandbox")
            .process(process)
            .mounts(mounts()?)
            .annotations(HashMap::from([
                ("dev.gvisor.spec.rootfs.source".to_owned(), image),
                ("dev.gvisor.spec.rootfs.type".to_owned(), "erofs".to_owned()),
            ]))
            // No limits of the host here: runsc takes 30 to 60 ms to set them, where making the cgroup beforehand takes one.
            .linux(LinuxBuilder::default().namespaces(namespaces()?).build()?)
            .build()?)
    }
}

/// No bind mount among them: one would bring a gofer process for the sandbox's whole life.
fn mounts() -> Result<Vec<oci_spec::runtime::Mount>, OciSpecError> {
    [("/proc", "proc"), ("/dev", "tmpfs"), ("/sys", "sysfs"), ("/tmp", "tmpfs")]
        .into_iter()
        .map(|(destination, typ)| MountBuilder::default().destination(destination).typ(typ).source(typ).options(vec![]).build())
        .collect()
}

fn namespaces() -> Result<Vec<oci_spec::runtime::LinuxNamespace>, OciSpecError> {
    use LinuxNamespaceType::{Ipc, Mount, Network, Pid, Uts};
    [Pid, Ipc, Uts, Mount, Network].into_iter().map(|typ| LinuxNamespaceBuilder::default().typ(typ).build()).collect()
}

fn text(path: &Path) -> Result<String, SpecError> {
    path.to_str().map(str::to_owned).ok_or_else(|| SpecError::Path(path.to_owned()))
}

const CAPABILITIES: [Capability; 38] = [
    Capability::AuditControl,
    Capability::AuditRead,
    Capability::AuditWrite,
    Capability::BlockSuspend,
    Capability::Chown,
    Capability::DacOverride,
    Capability::DacReadSearch,
    Capability::Fowner,
    Capability::Fsetid,
    Capability::IpcLock,
    Capability::IpcOwner,
    Capability::Kill,
    Capability::Lease,
    Capability::LinuxImmutable,
    Capability::MacAdmin,
    Capability::MacOverride,
    Capability::Mknod,
    Capability::NetAdmin,
    Capability::NetBindService,
    Capability::NetBroadcast,
    Capability::NetRaw,
    Capability::Setfcap,
    Capability::Setgid,
    Capability::Setpcap,
    Capability::Setuid,
    Capability::SysAdmin,
    Capability::SysBoot,
    Capability::SysChroot,
    Capability::SysModule,
    Capability::SysNice,
    Capability::SysPacct,
    Capability::SysPtrace,
    Capability::SysRawio,
    Capability::SysResource,
    Capability::SysTime,
    Capability::SysTtyConfig,
    Capability::Syslog,
    Capability::WakeAlarm,
];

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> SandboxSpec {
        SandboxSpec { image: "/images/x.erofs".into(), env: vec!["A=b".to_owned()] }
    }

    #[test]
    fn the_same_sandbox_has_the_same_spec_byte_for_byte() {
        let first = spec().to_json().unwrap();
        for _ in 0..20 {
            assert_eq!(spec().to_json().unwrap(), first);
        }
    }

    #[test]
    fn the_root_is_the_image_and_nothing_of_the_host_is_mounted() {
        let json: serde_json::Value = serde_json::from_slice(&spec().to_json().unwrap()).unwrap();
        assert_eq!(json["annotations"]["dev.gvisor.spec.rootfs.source"], "/images/x.erofs");
        assert_eq!(json["process"]["args"], serde_json::json!([AGENT_PATH]));
        assert!(json["mounts"].as_array().unwrap().iter().all(|mount| mount["type"] != "bind"));
    }
}

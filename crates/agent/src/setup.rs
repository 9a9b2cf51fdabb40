//! What the agent mounts for the guest before anything of it runs, and how it starts the guest's init.

use std::{
    fs, io,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::{
    mount::{MntFlags, MsFlags, umount2},
    sys::socket::{AddressFamily, SockFlag, SockType, socketpair},
};
use sandboxer_protocol::agent::{AgentConfig, Enforced};

use crate::{
    cgroup::Groups,
    spawn::{Plan, spawn},
    sys,
};

/// The guest's root, as the agent sees it.
pub(crate) const ROOT: &str = "/sandboxer/root";
const LAYER: &str = "/sandboxer/rw";
/// All that the guest changed.
pub(crate) const UPPER: &str = "/sandboxer/rw/upper";
const WORK: &str = "/sandboxer/rw/work";
/// The image, which it can't change.
pub(crate) const BASE: &str = "/rootfs";
const AGENT: &std::ffi::CStr = c"/sandboxer/agent";

/// Mounts the writable layer and the guest's root, and finds out what can be limited.
pub(crate) fn prepare(config: &AgentConfig) -> io::Result<(Enforced, Option<Groups>)> {
    let context = |what: &'static str| move |error: io::Error| io::Error::new(error.kind(), format!("{what}: {error}"));
    let inodes =
        mount_tmpfs(LAYER, config.disk_bytes, Some(config.disk_inodes), "mode=0700").map_err(context("mounting the writable layer"))?;
    fs::create_dir(UPPER)?;
    fs::create_dir(WORK)?;
    mount_root()?;
    let groups = Groups::mount(config.pids);
    let enforced = Enforced {
        pids: config.pids.is_some() && groups.as_ref().is_some_and(Groups::limits_pids),
        memory: config.memory_bytes.is_some(),
        disk: true,
        inodes,
    };
    Ok((enforced, groups))
}

/// Lays what the guest changes on the image.
pub(crate) fn mount_root() -> io::Result<()> {
    let layers = format!("lowerdir={BASE},upperdir={UPPER},workdir={WORK}");
    sys::mount("overlay", ROOT, MsFlags::empty(), &layers)
        .map_err(|error| io::Error::new(error.kind(), format!("mounting the guest's root: {error}")))
}

/// Takes the guest's root apart and its layer back to nothing, for another one. No process of the guest may be there.
pub(crate) fn clear_layer() -> io::Result<()> {
    umount2(ROOT, MntFlags::MNT_DETACH)?;
    for dir in [UPPER, WORK] {
        fs::remove_dir_all(dir)?;
        fs::create_dir(dir)?;
    }
    Ok(())
}

/// A tmpfs of this size; says whether the number of files is limited too, which an older gVisor can't.
pub(crate) fn mount_tmpfs(target: &str, bytes: u64, inodes: Option<u64>, more: &str) -> io::Result<bool> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    if let Some(inodes) = inodes
        && sys::mount("tmpfs", target, flags, &format!("size={bytes},nr_inodes={inodes},{more}")).is_ok()
    {
        return Ok(true);
    }
    sys::mount("tmpfs", target, flags, &format!("size={bytes},{more}"))?;
    Ok(false)
}

/// The agent's side of a running init.
pub(crate) struct InitProcess {
    pub(crate) pid: i32,
    pub(crate) socket: OwnedFd,
}

/// Starts the init of fresh namespaces on the guest's root. It says when it is ready.
/// `memory`: the limit of the sandbox in bytes, which programs are shown as the machine's memory.
pub(crate) fn start_init(memory: Option<u64>) -> io::Result<InitProcess> {
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
    sys::set_nonblocking(std::os::fd::AsFd::as_fd(&ours), true)?;
    let null = fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    let mut arguments = vec![c"sandboxer-init".to_owned(), c"init".to_owned()];
    if let Some(memory) = memory {
        arguments.push(sys::c_string(memory.to_string(), "a number").map_err(io::Error::other)?);
    }
    let plan = Plan {
        programs: &[AGENT.to_owned()],
        arguments: &arguments,
        environment: &[],
        directory: None,
        standard: [null.as_raw_fd(), null.as_raw_fd(), 2],
        session: true,
        terminal: false,
        group: None,
        // The name of the host is the agent's to give; programs can't change it.
        namespaces: libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWIPC,
        extra: &[theirs.as_raw_fd()],
    };
    let pid = spawn(&plan)
        .map_err(|failed| io::Error::new(failed.error.kind(), format!("starting init ({:?}): {}", failed.step, failed.error)))?;
    Ok(InitProcess { pid, socket: ours })
}

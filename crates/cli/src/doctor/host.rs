//! What the machine offers: rights, limits, space, tools.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::statvfs::statvfs;

use sandboxer_image::BuildRights;
use sandboxer_server::{SPARE_PAIR_MIB, available_memory};
use sandboxer_store::{Pace, Place};

use super::{Finding, Machine};

/// A sandbox takes about a dozen descriptors of the server, and runsc some hundred of its own.
const FEW_OPEN_FILES: u64 = 4096;
const LITTLE_SPACE: u64 = 2 << 30;
/// What the base image, its cache and its making take.
const IMAGE_SPACE: u64 = 1 << 30;
const CGROUPS: &str = "/sys/fs/cgroup";
const CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];

pub(super) fn user(machine: &Machine) -> Finding {
    const NAME: &str = "user";
    if machine.is_root {
        Finding::ok(NAME, "root")
    } else {
        Finding::ok(NAME, "an ordinary user: sandboxes run in a user namespace of this user")
    }
}

pub(super) fn user_namespaces(machine: &Machine) -> Finding {
    const NAME: &str = "user namespaces";
    let tried = Command::new("unshare").args(["--user", "--map-root-user", "true"]).stdin(Stdio::null()).output();
    let why = match tried {
        Ok(output) if output.status.success() => return finish(Finding::ok(NAME, "can be made"), machine),
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => format!("unshare: {error}"),
    };
    if machine.is_root {
        return Finding::ok(NAME, format!("can't be made ({why}), and root does not need them"));
    }
    let setting = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let (detail, remedy) = if setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1" {
        (
            "AppArmor keeps ordinary users from making them (Ubuntu's default)",
            "as root: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or run sandboxer as root",
        )
    } else if setting("/proc/sys/kernel/unprivileged_userns_clone") == "0" {
        (
            "the kernel keeps ordinary users from making them",
            "as root: sysctl -w kernel.unprivileged_userns_clone=1, or run sandboxer as root",
        )
    } else if setting("/proc/sys/user/max_user_namespaces") == "0" {
        ("none are allowed", "as root: sysctl -w user.max_user_namespaces=10000, or run sandboxer as root")
    } else {
        (
            "refused; inside a container its seccomp profile does that",
            "run sandboxer as root, or the container with a profile that allows unshare",
        )
    };
    Finding::missing(NAME, format!("{detail} ({why})"), remedy).required()
}

fn finish(finding: Finding, machine: &Machine) -> Finding {
    if machine.is_root { finding } else { finding.required() }
}

/// Whether there is memory for what waits until somebody asks.
pub(super) fn pool(machine: &Machine) -> Finding {
    const NAME: &str = "pool";
    let (sandboxes, containers, least) = machine.pool;
    // Without a volume nothing is restored.
    let containers = if machine.checkpoint_path.is_some() { containers } else { 0 };
    if sandboxes == 0 && containers == 0 {
        return Finding::ok(NAME, "off: creating a sandbox takes as long as starting one");
    }
    let waits =
        format!("{sandboxes} started sandboxes and {containers} containers for restores wait while {least} MiB of memory are available");
    match available_memory(Path::new("/proc/meminfo")).map(|bytes| bytes >> 20) {
        Some(available) if available < least => Finding::limited(
            NAME,
            format!("{waits}; {available} MiB are, so nothing waits and creating a sandbox takes longer"),
            "free some memory, or give a smaller --pool-min-free-mb",
        ),
        Some(available) => Finding::ok(NAME, format!("{waits}; {available} MiB are")),
        None => Finding::ok(NAME, format!("{waits}; how much is can't be told here")),
    }
}

/// What waits inside every sandbox, and what that costs.
pub(super) fn spares(machine: &Machine) -> Finding {
    const NAME: &str = "interpreters that wait";
    match machine.spare_interpreters {
        0 => Finding::ok(NAME, "off: each execution starts its own"),
        each => Finding::ok(
            NAME,
            format!(
                "{each} bash and {each} Python in every sandbox of 256 MiB or more, resident with about {} MiB, pages of the image among them",
                each.saturating_mul(SPARE_PAIR_MIB)
            ),
        ),
    }
}

/// Whether the host can hold a sandbox to its limits. Tried, not guessed: in a container all files may be there and refuse.
pub(super) fn host_limits(machine: &Machine) -> Finding {
    const NAME: &str = "limits by the host (cgroups)";
    let (version, missing) = if Path::new(CGROUPS).join("cgroup.controllers").exists() {
        (2, missing_in_v2(machine.is_root))
    } else {
        let missing = CONTROLLERS.into_iter().filter(|controller| !can_make_group(&Path::new(CGROUPS).join(controller))).collect();
        (1, missing)
    };
    if missing.is_empty() {
        return Finding::ok(NAME, format!("cgroup v{version}: memory, cpu and pids can be enforced"));
    }
    let remedy = match (machine.is_root, version) {
        (true, _) => {
            "start it where /sys/fs/cgroup is writable; until then the sandbox itself enforces memory, processes and disk, but not cpu"
        }
        (false, 2) => {
            "run it in a delegated group: systemd-run --user --scope -p Delegate=yes sandboxer serve; until then the sandbox itself enforces memory, processes and disk, but not cpu"
        }
        (false, _) => "run sandboxer as root; until then the sandbox itself enforces memory, processes and disk, but not cpu",
    };
    Finding::limited(NAME, format!("cgroup v{version}: can't be enforced: {}", missing.join(", ")), remedy)
}

fn missing_in_v2(is_root: bool) -> Vec<&'static str> {
    let group = if is_root { PathBuf::from(CGROUPS) } else { own_group_v2() };
    if !can_make_group(&group) {
        return CONTROLLERS.to_vec();
    }
    let available = fs::read_to_string(group.join("cgroup.controllers")).unwrap_or_default();
    CONTROLLERS.into_iter().filter(|controller| !available.split_whitespace().any(|name| name == *controller)).collect()
}

fn own_group_v2() -> PathBuf {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default().to_owned();
    Path::new(CGROUPS).join(own)
}

fn can_make_group(parent: &Path) -> bool {
    let group = parent.join(format!("sandboxer-doctor-{}", std::process::id()));
    fs::create_dir(&group).is_ok() && fs::remove_dir(&group).is_ok()
}

pub(super) fn open_files(_: &Machine) -> Finding {
    const NAME: &str = "open files";
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return Finding::limited(NAME, "the limit can't be read", "see ulimit -n");
    };
    // Only this process's own limit, which ends with it.
    let raisable = setrlimit(Resource::RLIMIT_NOFILE, hard, hard.saturating_mul(2)).is_ok();
    let detail = format!(
        "{soft}, up to {hard} without rights, {}",
        if raisable { "and root here may go beyond" } else { "which can't be raised from here" }
    );
    if hard < FEW_OPEN_FILES && !raisable {
        return Finding::limited(
            NAME,
            format!("{detail}: enough for a few dozen sandboxes"),
            format!("raise it where sandboxer is started: ulimit -Hn {FEW_OPEN_FILES}, or LimitNOFILE= of its service"),
        );
    }
    Finding::ok(NAME, detail)
}

pub(super) fn disk_space(machine: &Machine) -> Finding {
    const NAME: &str = "disk space";
    let mut details = Vec::new();
    let mut least = u64::MAX;
    for (what, directory) in [("images", Some(&machine.image_dir)), ("data", machine.data_dir.as_ref())] {
        let Some(directory) = directory else { continue };
        match free_bytes(directory) {
            Some(free) => {
                least = least.min(free);
                details.push(format!("{} free for {what} ({})", indicatif::HumanBytes(free), directory.display()));
            }
            None => details.push(format!("unknown for {what} ({})", directory.display())),
        }
    }
    let detail = details.join(", ");
    let remedy = "free some, or choose other places with --image-dir and --data-dir";
    if least < IMAGE_SPACE && machine.image.is_none() {
        Finding::missing(NAME, format!("{detail}: too little to build the base image"), remedy).required()
    } else if least < LITTLE_SPACE {
        Finding::limited(NAME, detail, remedy)
    } else {
        Finding::ok(NAME, detail)
    }
}

/// What can be saved between the signal to stop and the end, with the same trial that the server makes when it starts.
pub(super) fn saving_at_the_end(machine: &Machine) -> Finding {
    const NAME: &str = "saving when the server stops";
    let Some(volume) = &machine.checkpoint_path else {
        return Finding::ok(NAME, "no volume is set (CHECKPOINT_AND_RESTORE_PATH): sandboxes end with the server");
    };
    let volume = match Place::at(volume) {
        Ok(Place::Directory(path)) => path,
        Ok(Place::Bucket(url)) => return Finding::ok(NAME, format!("to {url}, as fast as the way there is: not tried here")),
        Err(fault) => {
            return Finding::missing(
                NAME,
                format!("the volume can't be written: {fault}"),
                "mount the volume, or set CHECKPOINT_AND_RESTORE_PATH to another one",
            );
        }
    };
    match Pace::measure(&volume) {
        Ok(pace) => Finding::ok(NAME, pace.within(machine.stop_grace).to_string()),
        Err(error) => Finding::missing(
            NAME,
            format!("{} can't be written: {error}", volume.display()),
            "mount the volume, or set CHECKPOINT_AND_RESTORE_PATH to another one",
        ),
    }
}

/// Of the nearest directory that exists: the rest would be made in it.
fn free_bytes(directory: &Path) -> Option<u64> {
    let absolute = std::path::absolute(directory).ok()?;
    let existing = absolute.ancestors().find(|ancestor| ancestor.is_dir())?;
    let space = statvfs(existing).ok()?;
    Some(space.blocks_available() * space.fragment_size())
}

/// The programs that build the base image. A user's server builds it as root of a namespace, which
/// takes one program more than the user's own `sandboxer image build`.
pub(super) fn image_tools(machine: &Machine) -> Finding {
    const NAME: &str = "image tools";
    let rights = match BuildRights::detect() {
        BuildRights::User => BuildRights::NamespaceRoot,
        other => other,
    };
    let finding = match rights.check() {
        Ok(()) => {
            let programs: Vec<&str> = rights.tools().iter().map(|tool| tool.program).collect();
            Finding::ok(NAME, format!("{} (build the base image)", programs.join(", ")))
        }
        Err(missing) => Finding::missing(NAME, format!("not installed: {} (build the base image)", missing.programs()), missing.remedy()),
    };
    // With an image at hand nothing has to be built.
    if machine.image.is_some() { finding } else { finding.required() }
}

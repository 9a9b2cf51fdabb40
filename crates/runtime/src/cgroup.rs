//! Limits by the host's cgroups: what can be enforced here, and the cgroup of one sandbox.
//!
//! The cgroup is made here and runsc is put into it before it starts anything (see `gvisor`): that takes a millisecond, where runsc's
//! own handling takes 30 to 60, and it works in a delegated subtree where only some directories may be written to.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use sandboxer_protocol::SandboxId;
use serde::{Deserialize, Serialize};

use crate::{HostResources, RuntimeError};

/// The cgroup that all sandboxes' cgroups are in.
const PARENT: &str = "sandboxer";
/// Where this process goes in a delegated v2 subtree: a cgroup that has children with limits may hold no process itself.
const OWN_LEAF: &str = "sandboxer-server";
/// Shorter than the kernel's default of 100 ms: a program that used up its share on two cores waits 10 ms, not 50. What it left unused
/// it may use once, so that a short program after a pause is not stopped at all.
const CPU_PERIOD_US: u64 = 20_000;
const REMOVE_TRIES: u32 = 500;
const REMOVE_PAUSE: Duration = Duration::from_millis(20);

/// One thing that a host cgroup can limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Controller {
    Memory,
    Cpu,
    Pids,
}

impl Controller {
    pub const ALL: [Self; 3] = [Self::Memory, Self::Cpu, Self::Pids];

    fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpu",
            Self::Pids => "pids",
        }
    }
}

impl fmt::Display for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// Where sandboxes' cgroups of one controller go.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    version: Version,
    parent: PathBuf,
}

/// Which limits the host's cgroups can enforce for this process, and why not the others.
#[derive(Debug, Clone)]
pub struct HostLimits {
    memory: Result<Place, String>,
    cpu: Result<Place, String>,
    pids: Result<Place, String>,
    /// What the cgroups of this instance's sandboxes are told apart by, from those of others on this machine.
    instance: String,
}

impl HostLimits {
    /// Finds out, by making the directories that are needed. In a delegated v2 subtree this moves the process into a cgroup below its
    /// own, so call it once, at start.
    #[must_use]
    pub fn probe() -> Self {
        match fs::read_to_string("/proc/self/mountinfo") {
            Ok(mounts) => {
                let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
                Self::probe_in(&mounts, &own)
            }
            Err(error) => Self::none(&format!("/proc/self/mountinfo can't be read: {error}")),
        }
    }

    /// Nothing can be enforced.
    #[must_use]
    pub fn none(why: &str) -> Self {
        Self { memory: Err(why.to_owned()), cpu: Err(why.to_owned()), pids: Err(why.to_owned()), instance: String::new() }
    }

    fn probe_in(mounts: &str, own: &str) -> Self {
        let v2 = unified(mounts).map(|mount| v2_parent(&mount, own));
        let find = |controller: Controller| match v1_mount(mounts, controller.name()) {
            Some(mount) => v1_parent(&mount).map(|parent| Place { version: Version::V1, parent }),
            None => match &v2 {
                None => Err("no cgroup file system is mounted".to_owned()),
                Some(Err(why)) => Err(why.clone()),
                Some(Ok(parent)) if lists(&parent.join("cgroup.controllers"), controller.name()) => {
                    Ok(Place { version: Version::V2, parent: parent.clone() })
                }
                Some(Ok(parent)) => Err(format!("the {controller} controller is not delegated to {}", parent.display())),
            },
        };
        Self { memory: find(Controller::Memory), cpu: find(Controller::Cpu), pids: find(Controller::Pids), instance: String::new() }
    }

    /// For the sandboxes of the instance that keeps its state here. A sandbox that goes from one instance of a machine to another is for a
    /// moment at both, and must not be in one cgroup with itself.
    pub(crate) fn of_instance(mut self, state_dir: &Path) -> Self {
        // FNV-1a: the same for the same directory in every version.
        let digest = state_dir
            .as_os_str()
            .as_encoded_bytes()
            .iter()
            .fold(0xcbf2_9ce4_8422_2325_u64, |digest, byte| (digest ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
        self.instance = format!("-{:08x}", digest & 0xffff_ffff);
        self
    }

    fn name_of(&self, id: SandboxId) -> String {
        format!("{id}{}", self.instance)
    }

    fn place(&self, controller: Controller) -> &Result<Place, String> {
        match controller {
            Controller::Memory => &self.memory,
            Controller::Cpu => &self.cpu,
            Controller::Pids => &self.pids,
        }
    }

    /// Where the limit is enforced, or why it can't be.
    ///
    /// # Errors
    /// The reason, for people.
    pub fn enforces(&self, controller: Controller) -> Result<&Path, &str> {
        self.place(controller).as_ref().map(|place| place.parent.as_path()).map_err(String::as_str)
    }

    /// Refuses limits that can't be enforced.
    pub(crate) fn check(&self, resources: &HostResources) -> Result<(), RuntimeError> {
        for controller in wanted(resources) {
            if let Err(why) = self.place(controller) {
                return Err(RuntimeError::Invalid(format!("a {controller} limit can't be enforced by the host here: {why}")));
            }
        }
        if resources.cpus.is_some_and(|cpus| !(cpus > 0.0 && cpus < 10_000.0)) {
            return Err(RuntimeError::Invalid("the number of CPUs must be above 0 and below 10,000".to_owned()));
        }
        Ok(())
    }

    /// Makes the sandbox's cgroup with its limits.
    pub(crate) fn create(&self, id: SandboxId, resources: &HostResources) -> io::Result<SandboxCgroup> {
        let mut cgroup = SandboxCgroup::default();
        let made = wanted(resources).try_for_each(|controller| {
            let Ok(place) = self.place(controller) else { return Ok(()) };
            let dir = place.parent.join(self.name_of(id));
            if !cgroup.dirs.contains(&dir) {
                fs::create_dir_all(&dir)?;
                cgroup.dirs.push(dir.clone());
            }
            match controller {
                Controller::Memory => limit_memory(&dir, place.version, resources.memory_bytes),
                Controller::Pids => write(&dir.join("pids.max"), &resources.pids_ceiling.unwrap_or(u64::MAX).to_string()),
                Controller::Cpu => {
                    cgroup.once_up = cpu_limit(&dir, place.version, resources);
                    Ok(())
                }
            }
        });
        if made.is_err() {
            cgroup.dirs.iter().for_each(|dir| drop(fs::remove_dir(dir)));
        }
        made.map(|()| cgroup)
    }

    /// Where the sandbox's cgroup is if it has one, for a sandbox of which nothing was written down.
    pub(crate) fn cgroup_of(&self, id: SandboxId) -> SandboxCgroup {
        let mut dirs: Vec<_> =
            Controller::ALL.into_iter().filter_map(|c| self.enforces(c).ok()).map(|dir| dir.join(self.name_of(id))).collect();
        dirs.dedup();
        SandboxCgroup { dirs, once_up: Vec::new() }
    }
}

/// The cgroup of one sandbox: a directory in each hierarchy where it is limited.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SandboxCgroup {
    dirs: Vec<PathBuf>,
    /// The CPU limit: it is for the guest, not for the start of gVisor, which nobody else's code has a part in.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    once_up: Vec<Setting>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Setting {
    file: PathBuf,
    value: String,
    /// What it is until all of the sandbox's memory is there; none: not set until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    at_first: Option<String>,
    /// A kernel that does not have it does without.
    #[serde(default)]
    optional: bool,
}

impl SandboxCgroup {
    /// Moves a process in, with all its threads; what it starts from then on is in it too.
    pub(crate) fn join(&self, pid: u32) -> io::Result<()> {
        self.dirs.iter().try_for_each(|dir| write(&dir.join("cgroup.procs"), &pid.to_string()))
    }

    /// Whether it counts the memory of those in it.
    pub(crate) fn counts_memory(&self) -> bool {
        self.dirs.iter().any(|dir| ["memory.max", "memory.limit_in_bytes"].iter().any(|file| dir.join(file).exists()))
    }

    /// Whether it limits the processor time of those in it, once the sandbox is up.
    pub(crate) fn limits_cpu(&self) -> bool {
        !self.once_up.is_empty()
    }

    /// Sets the limits that hold from when the sandbox is up until all of its memory is there: whoever brings that shares them, so it is a processor at least.
    pub(crate) fn hold_at_first(&self) -> io::Result<()> {
        self.once_up.iter().try_for_each(|setting| match &setting.at_first {
            Some(value) => set(&setting.file, value),
            None => Ok(()),
        })
    }

    /// Sets the limits that hold from when the sandbox is up.
    pub(crate) fn hold(&self) -> io::Result<()> {
        self.once_up.iter().try_for_each(|setting| match set(&setting.file, &setting.value) {
            Err(_) if setting.optional => Ok(()),
            set => set,
        })
    }

    /// Whether the host killed something in it for want of memory.
    pub(crate) fn ran_out_of_memory(&self) -> bool {
        self.dirs.iter().any(|dir| ["memory.events", "memory.oom_control"].iter().any(|file| counts_kills(&dir.join(file))))
    }

    /// Removes it. A process that was just killed may hold it for a moment.
    pub(crate) async fn remove(&self) -> io::Result<()> {
        for dir in &self.dirs {
            let mut tries = 0;
            loop {
                match fs::remove_dir(dir) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                    Err(error) if tries == REMOVE_TRIES => return Err(error),
                    Err(_) => {
                        tries += 1;
                        tokio::time::sleep(REMOVE_PAUSE).await;
                    }
                    Ok(()) => break,
                }
            }
        }
        Ok(())
    }
}

fn wanted(resources: &HostResources) -> impl Iterator<Item = Controller> {
    let HostResources { memory_bytes, cpus, pids_ceiling } = *resources;
    Controller::ALL.into_iter().filter(move |controller| match controller {
        Controller::Memory => memory_bytes.is_some(),
        Controller::Cpu => cpus.is_some(),
        Controller::Pids => pids_ceiling.is_some(),
    })
}

fn limit_memory(dir: &Path, version: Version, bytes: Option<u64>) -> io::Result<()> {
    let bytes = bytes.unwrap_or(u64::MAX).to_string();
    let (file, swap, swap_value) = match version {
        Version::V1 => ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", bytes.as_str()),
        Version::V2 => ("memory.max", "memory.swap.max", "0"),
    };
    // Memory and swap together may never be less than memory alone: raised from the limit of a container that waited they go first, lowered they go last. Where
    // swap is not counted there is none, or it can't be limited.
    write(&dir.join(swap), swap_value).ok();
    write(&dir.join(file), &bytes)?;
    write(&dir.join(swap), swap_value).ok();
    if version == Version::V2 {
        // A sandbox without one of its processes is no use to anybody.
        write(&dir.join("memory.oom.group"), "1").ok();
    }
    Ok(())
}

fn cpu_limit(dir: &Path, version: Version, resources: &HostResources) -> Vec<Setting> {
    let setting = |file: &str, value: String, at_first: Option<String>| {
        // A kernel may be older than the burst.
        let optional = at_first.is_none();
        Setting { file: dir.join(file), value, at_first, optional }
    };
    let quota = quota_us(resources);
    let at_first = quota.max(CPU_PERIOD_US);
    // The burst comes last: a quota below it is refused.
    match version {
        Version::V1 => vec![
            setting("cpu.cfs_period_us", CPU_PERIOD_US.to_string(), Some(CPU_PERIOD_US.to_string())),
            setting("cpu.cfs_quota_us", quota.to_string(), Some(at_first.to_string())),
            setting("cpu.cfs_burst_us", quota.to_string(), None),
        ],
        Version::V2 => vec![
            setting("cpu.max", format!("{quota} {CPU_PERIOD_US}"), Some(format!("{at_first} {CPU_PERIOD_US}"))),
            setting("cpu.max.burst", quota.to_string(), None),
        ],
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "checked to be small and positive"
)]
fn quota_us(resources: &HostResources) -> u64 {
    // The kernel takes no less than a millisecond.
    (resources.cpus.unwrap_or(1.0) * CPU_PERIOD_US as f64).round().max(1000.0) as u64
}

fn counts_kills(file: &Path) -> bool {
    let Ok(text) = fs::read_to_string(file) else { return false };
    text.lines().filter_map(|line| line.strip_prefix("oom_kill ")).any(|count| count.trim() != "0")
}

/// What can't be written need not be, if it is what is there: a server that may do less than the one before takes up its sandboxes all the same.
fn set(file: &Path, value: &str) -> io::Result<()> {
    write(file, value).or_else(|error| match fs::read_to_string(file) {
        Ok(held) if held.trim() == value => Ok(()),
        _ => Err(error),
    })
}

/// Without creating the file: in a cgroup that would be an error that says nothing.
fn write(file: &Path, text: &str) -> io::Result<()> {
    use io::Write;
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", file.display()));
    fs::OpenOptions::new().write(true).open(file).and_then(|mut open| open.write_all(text.as_bytes())).map_err(named)
}

fn lists(file: &Path, word: &str) -> bool {
    fs::read_to_string(file).is_ok_and(|text| text.split_whitespace().any(|listed| listed == word))
}

/// The mount points of cgroup v1 with that controller.
fn v1_mount(mounts: &str, controller: &str) -> Option<PathBuf> {
    mounts
        .lines()
        .filter_map(parse_mount)
        .find(|mount| mount.kind == "cgroup" && mount.options.split(',').any(|o| o == controller))
        .map(|m| m.point)
}

fn unified(mounts: &str) -> Option<PathBuf> {
    mounts.lines().filter_map(parse_mount).find(|mount| mount.kind == "cgroup2").map(|mount| mount.point)
}

struct Mount<'a> {
    point: PathBuf,
    kind: &'a str,
    options: &'a str,
}

fn parse_mount(line: &str) -> Option<Mount<'_>> {
    let (front, back) = line.split_once(" - ")?;
    let point = front.split(' ').nth(4)?;
    let mut back = back.split(' ');
    let kind = back.next()?;
    Some(Mount { point: PathBuf::from(point), kind, options: back.nth(1).unwrap_or_default() })
}

fn v1_parent(mount: &Path) -> Result<PathBuf, String> {
    let parent = mount.join(PARENT);
    try_out(&parent).map(|()| parent)
}

/// In the root of what we see, else in our own cgroup, where that is delegated to us.
fn v2_parent(mount: &Path, own: &str) -> Result<PathBuf, String> {
    let at_root = v2_parent_below(mount, None);
    let own = own.lines().find_map(|line| line.strip_prefix("0::/")).map(|path| mount.join(path));
    match (at_root, own) {
        (Ok(parent), _) => Ok(parent),
        (Err(_), Some(own)) if own != mount => v2_parent_below(&own, Some(&own.join(OWN_LEAF))),
        (Err(why), _) => Err(why),
    }
}

fn v2_parent_below(base: &Path, leaf: Option<&Path>) -> Result<PathBuf, String> {
    let parent = base.join(PARENT);
    try_out(&parent)?;
    if let Some(leaf) = leaf {
        fs::create_dir_all(leaf).and_then(|()| write(&leaf.join("cgroup.procs"), "0")).map_err(|error| error.to_string())?;
    }
    for dir in [base, &parent] {
        for controller in Controller::ALL {
            // Each by itself: one that is not there must not keep the others from being switched on. What came of it is read later.
            write(&dir.join("cgroup.subtree_control"), &format!("+{controller}")).ok();
        }
    }
    Ok(parent)
}

fn try_out(parent: &Path) -> Result<(), String> {
    let trial = parent.join(format!("probe-{}", std::process::id()));
    let tried = fs::create_dir_all(&trial).and_then(|()| fs::remove_dir(&trial));
    tried.map_err(|error| format!("{} can't be written to ({error}); run as root, or have a cgroup v2 subtree delegated", parent.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "31 24 0:27 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
                      32 24 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      33 24 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

    #[test]
    fn mounts_are_found_by_controller() {
        assert_eq!(v1_mount(V1, "cpu"), Some("/sys/fs/cgroup/cpu,cpuacct".into()));
        assert_eq!(v1_mount(V1, "pids"), None);
        assert_eq!(unified(V1), Some("/sys/fs/cgroup/unified".into()));
    }

    /// A directory that looks like a cgroup v2 mount, as far as files can.
    fn pretend(controllers: &str) -> (tempfile::TempDir, HostLimits) {
        let dir = tempfile::tempdir().unwrap();
        let parent = dir.path().join(PARENT);
        fs::create_dir(&parent).unwrap();
        fs::write(parent.join("cgroup.controllers"), controllers).unwrap();
        let mounts = format!("33 24 0:29 / {} rw - cgroup2 cgroup2 rw\n", dir.path().display());
        let limits = HostLimits::probe_in(&mounts, "0::/\n");
        (dir, limits)
    }

    #[test]
    fn what_is_not_delegated_is_refused_with_its_reason() {
        let (_dir, limits) = pretend("cpu pids\n");
        assert!(limits.enforces(Controller::Cpu).is_ok());
        let resources = HostResources { memory_bytes: Some(1), ..HostResources::default() };
        let error = limits.check(&resources).unwrap_err();
        assert!(matches!(&error, RuntimeError::Invalid(why) if why.contains("memory controller is not delegated")), "{error}");
        assert!(limits.check(&HostResources { cpus: Some(0.0), ..HostResources::default() }).is_err());
    }

    #[test]
    fn the_cpu_limit_is_for_the_guest_not_for_the_start() {
        let (dir, limits) = pretend("cpu\n");
        let id = SandboxId::random();
        let cgroup = limits.create(id, &HostResources { cpus: Some(0.5), ..HostResources::default() }).unwrap();
        let max = dir.path().join(PARENT).join(id.to_string()).join("cpu.max");
        fs::write(&max, "max 100000").unwrap();
        assert_eq!(serde_json::from_str::<SandboxCgroup>(&serde_json::to_string(&cgroup).unwrap()).unwrap(), cgroup);
        // No burst here, as with an older kernel.
        cgroup.hold().unwrap();
        assert_eq!(fs::read_to_string(&max).unwrap(), "10000 20000");
    }

    #[test]
    fn a_sandbox_whose_memory_is_on_its_way_has_one_processor_or_what_was_asked_for_if_that_is_more() {
        for (cpus, at_first, then) in
            [(0.1, "20000 20000", "2000 20000"), (1.0, "20000 20000", "20000 20000"), (3.0, "60000 20000", "60000 20000")]
        {
            let (dir, limits) = pretend("cpu\n");
            let id = SandboxId::random();
            let cgroup = limits.create(id, &HostResources { cpus: Some(cpus), ..HostResources::default() }).unwrap();
            assert!(cgroup.limits_cpu());
            let [max, burst] = ["cpu.max", "cpu.max.burst"].map(|file| dir.path().join(PARENT).join(id.to_string()).join(file));
            fs::write(&max, "max 100000").unwrap();
            fs::write(&burst, "0").unwrap();
            cgroup.hold_at_first().unwrap();
            // With a burst beside it, the kernel would take no lower limit.
            assert_eq!((fs::read_to_string(&max).unwrap().as_str(), fs::read_to_string(&burst).unwrap().as_str()), (at_first, "0"));
            fs::write(&max, "").unwrap();
            cgroup.hold().unwrap();
            assert_eq!(fs::read_to_string(&max).unwrap(), then);
            assert_eq!(then.split(' ').next(), Some(fs::read_to_string(&burst).unwrap().as_str()));
        }
        assert!(!SandboxCgroup::default().limits_cpu());
    }

    #[test]
    fn a_limit_that_is_held_need_not_be_written_and_another_one_is_an_error() {
        // Nobody may write this one, root neither.
        let setting =
            |value: &str| Setting { file: "/proc/sys/kernel/ostype".into(), value: value.to_owned(), at_first: None, optional: false };
        let cgroup = |value| SandboxCgroup { once_up: vec![setting(value)], ..SandboxCgroup::default() };
        cgroup("Linux").hold().unwrap();
        assert!(cgroup("Minix").hold().is_err());
    }

    #[test]
    fn the_limit_that_an_older_server_wrote_down_is_held() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("cpu.max");
        fs::write(&file, "max").unwrap();
        let older = format!(r#"{{"dirs":[],"once_up":[{{"file":"{}","value":"10000 20000"}}]}}"#, file.display());
        serde_json::from_str::<SandboxCgroup>(&older).unwrap().hold().unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "10000 20000");
    }

    #[test]
    fn two_instances_of_a_machine_have_two_cgroups_for_one_sandbox() {
        let (_dir, limits) = pretend("cpu\n");
        let id = SandboxId::random();
        let resources = HostResources { cpus: Some(1.0), ..HostResources::default() };
        let [here, there] = ["/a/runsc", "/b/runsc"].map(|dir| limits.clone().of_instance(Path::new(dir)));
        let made = here.create(id, &resources).unwrap();
        assert_eq!(made.dirs, here.cgroup_of(id).dirs);
        assert_ne!(made.dirs, there.create(id, &resources).unwrap().dirs);
    }

    #[tokio::test]
    async fn a_kill_for_want_of_memory_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let cgroup = SandboxCgroup { dirs: vec![dir.path().to_owned()], ..SandboxCgroup::default() };
        assert!(!cgroup.ran_out_of_memory());
        fs::write(dir.path().join("memory.events"), "max 9\noom 1\noom_kill 0\n").unwrap();
        assert!(!cgroup.ran_out_of_memory());
        fs::write(dir.path().join("memory.oom_control"), "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n").unwrap();
        assert!(cgroup.ran_out_of_memory());
        let gone = SandboxCgroup { dirs: vec![dir.path().join("never")], ..SandboxCgroup::default() };
        gone.remove().await.unwrap();
    }
}

//! The programs that building the base image takes, and with which rights they run.

use std::{env, fmt, fs, process::Command};

use nix::unistd::Uid;

/// The ordinary user as which a build runs inside a user namespace whose only user is root.
const BUILD_UID: &str = "1000";

/// A program, and the Debian package that has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tool {
    pub program: &'static str,
    pub package: &'static str,
}

const MMDEBSTRAP: Tool = Tool { program: "mmdebstrap", package: "mmdebstrap" };
const MKFS_EROFS: Tool = Tool { program: "mkfs.erofs", package: "erofs-utils" };
const FAKECHROOT: Tool = Tool { program: "fakechroot", package: "fakechroot" };
const FAKEROOT: Tool = Tool { program: "fakeroot", package: "fakeroot" };
const SETPRIV: Tool = Tool { program: "setpriv", package: "util-linux" };
const UNSHARE: Tool = Tool { program: "unshare", package: "util-linux" };

/// Tools that are missing, for a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingTools(pub Vec<Tool>);

impl MissingTools {
    fn joined(&self, name: impl Fn(&Tool) -> &'static str, between: &str) -> String {
        let mut names: Vec<_> = self.0.iter().map(name).collect();
        names.dedup();
        names.join(between)
    }

    /// The names of the programs, separated by commas.
    #[must_use]
    pub fn programs(&self) -> String {
        self.joined(|tool| tool.program, ", ")
    }

    /// The command by which the administrator installs them.
    #[must_use]
    pub fn remedy(&self) -> String {
        format!("scripts/setup, or as root: apt-get install {}", self.joined(|tool| tool.package, " "))
    }
}

impl std::error::Error for MissingTools {}

impl fmt::Display for MissingTools {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "not installed: {}; run {}", self.programs(), self.remedy())
    }
}

/// The rights with which this process builds an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BuildRights {
    /// Root of the machine or of a container: packages are unpacked as they are.
    Root,
    /// An ordinary user: the ownership of files is simulated by fakechroot and fakeroot.
    User,
    /// Root of a namespace with no other user, such as the server of an ordinary user. Ownership
    /// can't be set, but programs believe that it can: the build becomes an ordinary user first.
    NamespaceRoot,
}

impl BuildRights {
    /// The rights of this process.
    #[must_use]
    pub fn detect() -> Self {
        let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        Self::of(Uid::effective().is_root(), &map)
    }

    fn of(is_root: bool, uid_map: &str) -> Self {
        let users: u64 = uid_map.lines().filter_map(|line| line.split_whitespace().nth(2)?.parse::<u64>().ok()).sum();
        match (is_root, users > 1) {
            (false, _) => Self::User,
            (true, true) => Self::Root,
            (true, false) => Self::NamespaceRoot,
        }
    }

    /// All programs that a build takes.
    #[must_use]
    pub fn tools(self) -> Vec<Tool> {
        let mut tools = vec![MKFS_EROFS, MMDEBSTRAP, SETPRIV];
        if self != Self::Root {
            tools.extend([FAKECHROOT, FAKEROOT]);
        }
        if self == Self::NamespaceRoot {
            tools.push(UNSHARE);
        }
        tools
    }

    /// The programs that are not in `PATH`.
    ///
    /// # Errors
    /// At least one is missing.
    pub fn check(self) -> Result<(), MissingTools> {
        let missing: Vec<_> = self.tools().into_iter().filter(|tool| !in_path(tool.program)).collect();
        if missing.is_empty() { Ok(()) } else { Err(MissingTools(missing)) }
    }

    /// A command that runs mmdebstrap with these rights, without its own arguments.
    pub(crate) fn mmdebstrap(self) -> Command {
        // setpriv ends mmdebstrap, which then removes its files, if this process is killed.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "TERM"]);
        if self == Self::NamespaceRoot {
            command.args(["unshare", "--user", "--map-user", BUILD_UID, "--map-group", BUILD_UID]);
            // The kernel refuses an owner without a mapping with EINVAL, which fakeroot would
            // report: fakeroot must not try it.
            command.env("FAKEROOTDONTTRYCHOWN", "1");
        }
        command.arg("mmdebstrap");
        if self != Self::Root {
            command.arg("--mode=fakechroot");
        }
        command
    }
}

fn in_path(program: &str) -> bool {
    env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(|directory| directory.join(program).is_file()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_follow_user_and_namespace() {
        let machine = "         0          0 4294967295\n";
        assert_eq!(BuildRights::of(true, machine), BuildRights::Root);
        assert_eq!(BuildRights::of(false, machine), BuildRights::User);
        assert_eq!(BuildRights::of(true, "         0       1001          1\n"), BuildRights::NamespaceRoot);
        // Rootless podman maps root and a range of others.
        assert_eq!(BuildRights::of(true, "0 1001 1\n1 100000 65536\n"), BuildRights::Root);
    }

    #[test]
    fn missing_tools_name_each_package_once() {
        let missing = MissingTools(vec![MKFS_EROFS, SETPRIV, UNSHARE]);
        let text = "not installed: mkfs.erofs, setpriv, unshare; run scripts/setup, or as root: apt-get install erofs-utils util-linux";
        assert_eq!(missing.to_string(), text);
    }

    #[test]
    fn only_namespace_root_becomes_a_user_first() {
        for (rights, unshared) in [(BuildRights::Root, false), (BuildRights::User, false), (BuildRights::NamespaceRoot, true)] {
            let command = rights.mmdebstrap();
            assert_eq!(command.get_args().any(|argument| argument == "unshare"), unshared, "{rights:?}");
            assert_eq!(command.get_args().any(|argument| argument == "--mode=fakechroot"), rights != BuildRights::Root, "{rights:?}");
        }
    }
}

//! Builds the system tree of the base image from Debian or Ubuntu packages with mmdebstrap.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use crate::apt_sources;
use crate::erofs::tool_error;
use crate::error::{Doing, Error, Result};
use crate::name::Digest;
use crate::progress::Progress;
use crate::tools::BuildRights;

/// Raise it to have trees built anew that this recipe's text alone would not change.
const RECIPE_VERSION: u32 = 1;
const DEFAULT_SUITE: &str = "bookworm";

/// Python with its whole standard library (gdbm and venv are packages of their own), and the tools
/// that people and agents expect at a shell.
const PACKAGES: [&str; 20] = [
    "bash",
    "ca-certificates",
    "coreutils",
    "curl",
    "findutils",
    "git",
    "grep",
    "jq",
    "less",
    "make",
    "nano",
    "procps",
    "python-is-python3",
    "python3",
    "python3-gdbm",
    "python3-pip",
    "python3-venv",
    "unzip",
    "util-linux",
    "xz-utils",
];

/// Nobody reads these in a sandbox. Licences stay.
const PATH_RULES: [&str; 8] = [
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/lintian/*",
    "path-exclude=/usr/share/linda/*",
];

/// What mmdebstrap says when it begins a step, and how much of its time has passed by then.
const STEPS: [(&str, f32, &str); 7] = [
    ("running apt-get update", 0.01, "reading package lists"),
    ("downloading packages", 0.06, "downloading packages"),
    ("extracting archives", 0.18, "unpacking the essential packages"),
    ("installing essential", 0.25, "installing the essential packages"),
    ("installing remaining", 0.45, "installing Python, git and the rest"),
    ("cleaning package lists", 0.90, "cleaning up"),
    ("creating tarball", 0.92, "packing the tree"),
];

const OUTPUT_LINES_KEPT: usize = 40;

/// What the base image is built from.
#[derive(Debug, Clone, Default)]
pub struct BaseOptions {
    /// The release's code name. Default: bookworm, and on Ubuntu this machine's own.
    pub suite: Option<String>,
    /// A mirror's address, or a whole `deb …` line. Default: the mirror that this machine's apt uses.
    pub mirrors: Vec<String>,
    /// Take the newest packages, even if a tree of this recipe is in the cache.
    pub fresh: bool,
}

/// All that decides what the tree will hold.
#[derive(Debug)]
pub(crate) struct Recipe {
    pub(crate) suite: String,
    mirrors: Vec<String>,
    explicit_mirrors: bool,
}

impl Recipe {
    pub(crate) fn new(options: &BaseOptions) -> Result<Self> {
        let host = Host::detect();
        let suite = match &options.suite {
            Some(suite) => suite.clone(),
            None if host.id == "ubuntu" => host.codename.clone(),
            None => DEFAULT_SUITE.to_owned(),
        };
        let is_name = !suite.is_empty()
            && suite.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.'))
            && !suite.starts_with('-');
        if !is_name {
            return Err(Error::refused(format!("suite {suite:?}"), "give a release's code name, such as bookworm"));
        }
        // They become arguments of mmdebstrap.
        if let Some(mirror) = options.mirrors.iter().find(|mirror| mirror.starts_with('-') || mirror.is_empty()) {
            return Err(Error::refused(format!("mirror {mirror:?}"), "give an address or a `deb …` line"));
        }
        let explicit_mirrors = !options.mirrors.is_empty();
        let mirrors = if explicit_mirrors { options.mirrors.clone() } else { host.mirror_lines(&suite) };
        Ok(Self { suite, mirrors, explicit_mirrors })
    }

    /// Equal recipes make equivalent trees. Which mirror this machine happens to use does not matter, one that was asked for does.
    pub(crate) fn digest(&self) -> Digest {
        let mirrors = if self.explicit_mirrors { self.mirrors.as_slice() } else { &[] };
        let text = format!("{RECIPE_VERSION}\n{}\n{}\n{PACKAGES:?}\n{PATH_RULES:?}\n{mirrors:?}", std::env::consts::ARCH, self.suite);
        Digest::of(text.as_bytes())
    }

    /// Runs mmdebstrap and writes the tree to `target`, a tar archive compressed by zstd.
    pub(crate) fn build(&self, target: &Path, progress: &dyn Progress) -> Result<()> {
        BuildRights::detect().check()?;
        let mut command = self.command();
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| tool_error("mmdebstrap", "mmdebstrap", error))?;
        let (Some(archive), Some(messages)) = (child.stdout.take(), child.stderr.take()) else {
            return Err(io::Error::other("its output is not there")).doing(|| "read from mmdebstrap");
        };
        let (written, output) = thread::scope(|scope| {
            let output = scope.spawn(|| follow(messages, progress));
            let written = compress(archive, target);
            (written, output.join().unwrap_or_default())
        });
        let status = child.wait().doing(|| "wait for mmdebstrap")?;
        if !status.success() {
            return Err(Error::ToolFailed { program: "mmdebstrap", status: status.to_string(), output });
        }
        written.doing(|| format!("write {}", target.display()))
    }

    fn command(&self) -> Command {
        let mut command = BuildRights::detect().mmdebstrap();
        command.args(["--variant=minbase", "--format=tar"]);
        command.arg(format!("--include={}", PACKAGES.join(",")));
        command.args(PATH_RULES.iter().map(|rule| format!("--dpkgopt={rule}")));
        command.args(host_apt_settings().into_iter().map(|setting| format!("--aptopt={setting}")));
        command.args([self.suite.as_str(), "-"]).args(&self.mirrors);
        command.env("LC_ALL", "C.UTF-8").env_remove("LANGUAGE");
        command
    }
}

fn compress(mut archive: impl Read, target: &Path) -> io::Result<()> {
    let mut encoder = zstd::Encoder::new(File::create_new(target)?, 1)?;
    io::copy(&mut archive, &mut encoder)?;
    encoder.finish()?.sync_all()
}

/// Tells the progress from what mmdebstrap prints, and returns the end of it.
fn follow(messages: impl Read, progress: &dyn Progress) -> String {
    let mut kept = VecDeque::new();
    for line in BufReader::new(messages).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line).into_owned();
        if let Some((_, fraction, message)) = STEPS.iter().find(|(text, ..)| line.starts_with("I: ") && line.contains(text)) {
            progress.tell(*fraction, message);
        }
        if kept.len() == OUTPUT_LINES_KEPT {
            kept.pop_front();
        }
        kept.push_back(line);
    }
    Vec::from(kept).join("\n")
}

/// How this machine's apt reaches its mirrors (proxies, retries), which mmdebstrap does not read by itself.
fn host_apt_settings() -> Vec<String> {
    let Ok(output) = Command::new("apt-config").args(["dump", "--format", "%f \"%v\";%n"]).stdin(Stdio::null()).output() else {
        return Vec::new();
    };
    let wanted = ["Acquire::http::", "Acquire::https::", "Acquire::Retries", "Acquire::Check-Valid-Until", "Acquire::ForceIPv4"];
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter(|line| wanted.iter().any(|name| line.starts_with(name)) && !line.ends_with(" \"\";"))
        .map(|line| line.trim_end_matches(';').to_owned())
        .collect()
}

/// What os-release says of this machine.
struct Host {
    id: String,
    codename: String,
}

impl Host {
    fn detect() -> Self {
        let text = fs::read_to_string("/etc/os-release").unwrap_or_default();
        let field = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            value.unwrap_or_default().trim_matches('"').to_owned()
        };
        Self { id: field("ID"), codename: field("VERSION_CODENAME") }
    }

    /// None, and so mmdebstrap's own default, where the suite is of another distribution than this machine.
    fn mirror_lines(&self, suite: &str) -> Vec<String> {
        let components: &[&str] = match self.id.as_str() {
            "debian" => &["main"],
            "ubuntu" if suite == self.codename => &["main", "universe"],
            _ => return Vec::new(),
        };
        apt_sources::lines_for(&apt_sources::read(Path::new("/etc/apt")), &self.codename, suite, components)
    }
}

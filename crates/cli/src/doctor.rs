//! `sandboxer doctor`: what works on this machine and what does not, with the remedy. A list of checks, each one function.

mod host;
mod trial;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use sandboxer_image::{ImageName, ImageStore, agent_digest};
use sandboxer_runsc::{FindError, Version};
use sandboxer_server::SPARE_INTERPRETERS;
use serde::Serialize;

use crate::image::ImageDir;

/// The release that scripts/setup installs.
const PINNED_VERSION: &str = "20260905";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The runsc to use [default: the one that scripts/setup installed for this user, else the one in PATH]
    #[arg(long, env = "SANDBOXER_RUNSC", value_name = "FILE")]
    runsc: Option<PathBuf>,

    #[command(flatten)]
    images: ImageDir,

    /// Where the server keeps everything else, to check its disk space
    #[arg(long, env = "SANDBOXER_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,

    /// The volume that the server keeps checkpoints on, to try how fast it is
    #[arg(long, env = "CHECKPOINT_AND_RESTORE_PATH", value_name = "DIR|URL")]
    checkpoint_path: Option<PathBuf>,

    /// Seconds that the server has to save everything when it is stopped
    #[arg(long, env = "SANDBOXER_STOP_GRACE", default_value_t = 10.0, value_name = "SECONDS")]
    stop_grace: f64,

    /// Sandboxes that the server keeps waiting
    #[arg(long, env = "SANDBOXER_POOL", default_value_t = 2, value_name = "N")]
    pool: usize,

    /// Containers that it keeps waiting for restores
    #[arg(long, env = "SANDBOXER_RESTORE_POOL", default_value_t = 1, value_name = "N")]
    restore_pool: usize,

    /// The memory that has to be free for it
    #[arg(long, env = "SANDBOXER_POOL_MIN_FREE_MB", default_value_t = 512, value_name = "MIB")]
    pool_min_free_mb: u64,

    /// Interpreters of each language that wait in every sandbox
    #[arg(long, env = "SANDBOXER_SPARE_INTERPRETERS", default_value_t = SPARE_INTERPRETERS, value_name = "N")]
    spare_interpreters: u32,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Status {
    Ok,
    /// Sandboxes run, but something is slower, weaker or not enforced.
    Limited,
    Missing,
}

/// What one check found.
#[derive(Debug, Serialize)]
struct Finding {
    name: &'static str,
    status: Status,
    /// Sandboxes can't run without it.
    required: bool,
    detail: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

impl Finding {
    fn ok(name: &'static str, detail: impl Into<String>) -> Self {
        Self { name, status: Status::Ok, required: false, detail: detail.into(), remedy: None }
    }

    fn limited(name: &'static str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, status: Status::Limited, required: false, detail: detail.into(), remedy: Some(remedy.into()) }
    }

    fn missing(name: &'static str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, status: Status::Missing, required: false, detail: detail.into(), remedy: Some(remedy.into()) }
    }

    /// Without this no sandbox runs.
    fn required(mut self) -> Self {
        self.required = true;
        self
    }
}

/// What the checks share.
struct Machine {
    is_root: bool,
    runsc: Result<PathBuf, FindError>,
    /// Where images are, and the base image if it is there.
    image_dir: PathBuf,
    image: Option<PathBuf>,
    image_is_current: bool,
    data_dir: Option<PathBuf>,
    checkpoint_path: Option<PathBuf>,
    stop_grace: Duration,
    /// Sandboxes and containers that wait, and the memory in MiB that has to be free for it.
    pool: (usize, usize, u64),
    spare_interpreters: u32,
}

impl Machine {
    fn look(args: &Args) -> Result<Self> {
        let image_dir = args.images.path()?;
        // Looking must not make the directory.
        let image = match image_dir.is_dir() {
            true => ImageStore::open(&image_dir).and_then(|store| store.resolve(&ImageName::base().into())).ok(),
            false => None,
        };
        Ok(Self {
            is_root: nix::unistd::Uid::effective().is_root(),
            runsc: sandboxer_runsc::find(args.runsc.as_deref()),
            image_is_current: image.as_ref().is_some_and(|image| image.agent.as_ref() == Some(agent_digest())),
            image: image.map(|image| image.path),
            image_dir,
            data_dir: args.data_dir.clone(),
            checkpoint_path: args.checkpoint_path.clone().filter(|path| !path.as_os_str().is_empty()),
            stop_grace: Duration::try_from_secs_f64(args.stop_grace).context("--stop-grace")?,
            pool: (args.pool, args.restore_pool, args.pool_min_free_mb),
            spare_interpreters: args.spare_interpreters,
        })
    }
}

const CHECKS: [fn(&Machine) -> Finding; 12] = [
    runsc,
    host::user,
    host::user_namespaces,
    host::host_limits,
    host::open_files,
    host::disk_space,
    host::pool,
    host::spares,
    host::saving_at_the_end,
    host::image_tools,
    base_image,
    trial::sandbox,
];

#[derive(Serialize)]
struct Report {
    /// Sandboxes can run here.
    usable: bool,
    checks: Vec<Finding>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let machine = Machine::look(args)?;
    let checks: Vec<Finding> = CHECKS.iter().map(|check| check(&machine)).collect();
    let usable = checks.iter().all(|finding| !(finding.required && finding.status == Status::Missing));
    let report = Report { usable, checks };
    print(&report, args.json).context("can't write to standard output")?;
    Ok(if usable { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print(report: &Report, json: bool) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if json {
        return writeln!(out, "{}", serde_json::to_string_pretty(report)?);
    }
    for finding in &report.checks {
        let status = match finding.status {
            Status::Ok => "OK",
            Status::Limited => "limited",
            Status::Missing => "missing",
        };
        writeln!(out, "{status:<8} {}: {}", finding.name, finding.detail)?;
        if let Some(remedy) = &finding.remedy {
            writeln!(out, "         -> {remedy}")?;
        }
    }
    let verdict = if report.usable { "Sandboxes can run here." } else { "Sandboxes can't run here yet: see what is missing above." };
    writeln!(out, "\n{verdict}")
}

fn runsc(machine: &Machine) -> Finding {
    const NAME: &str = "runsc (gVisor)";
    let features = match &machine.runsc {
        Ok(path) => probe(path),
        Err(error) => return Finding::missing(NAME, error.to_string(), "run scripts/setup").required(),
    };
    match features {
        Ok((path, version, text)) if PINNED_VERSION.parse::<Version>().is_ok_and(|pinned| version >= pinned) => {
            Finding::ok(NAME, format!("{} is {text}", path.display())).required()
        }
        Ok((path, _, text)) => Finding::limited(
            NAME,
            format!(
                "{} is {text}, older than {PINNED_VERSION}: it works, but creating, saving and ending sandboxes is slower",
                path.display()
            ),
            "scripts/setup --upgrade looks for a newer one",
        )
        .required(),
        Err(error) => Finding::missing(NAME, error, "run scripts/setup").required(),
    }
}

fn probe(path: &Path) -> Result<(PathBuf, Version, String), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|error| error.to_string())?;
    let features = runtime.block_on(sandboxer_runsc::Features::probe(path)).map_err(|error| error.to_string())?;
    Ok((path.to_owned(), features.version, features.version_text))
}

fn base_image(machine: &Machine) -> Finding {
    const NAME: &str = "base image";
    match &machine.image {
        Some(path) if machine.image_is_current => Finding::ok(NAME, path.display().to_string()),
        Some(path) => Finding::limited(
            NAME,
            format!("{} is of another version of sandboxer", path.display()),
            "serve builds a new one, or: sandboxer image build",
        ),
        None => Finding::limited(
            NAME,
            format!("not in {} yet", machine.image_dir.display()),
            "serve builds it at its first start (a minute), or: sandboxer image build",
        ),
    }
}

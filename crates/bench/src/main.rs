//! `make bench`: this server, raw runsc and the PyPI package `gvisor` side by side, interleaved round by round in one run.
//!
//! What is compared:
//! - **raw runsc**: `runsc run` of the same image until its first process, the agent, answers over its FIFO, with no server and no
//!   limits of the host; `runsc exec` of the programs.
//! - **agent, bare**: the agent in a sandbox as the server starts it, spoken to by a reader that discards everything.
//! - **PyPI gvisor**: gVisor's own Python sandboxes, whose root is the host's own system.
//! - **docker**: `docker run --runtime=runsc` and `docker exec`, an engine of its own with the system of our base image.
//! - **this server**, as a client sees it who connects anew for each create.
//!
//! It measures; it decides nothing but whether the bars of `report` were met.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test"))]

mod autosaves;
mod bare;
mod chart;
mod client;
mod docker;
mod forks;
mod growth;
mod leftovers;
mod machine;
mod memory;
mod orphans;
mod package;
mod peer;
mod programs;
mod raw;
mod report;
mod rounds;
mod samples;
mod saves;
mod server;
mod timing;

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, Result};
use clap::Parser;
use sandboxer_runtime::{become_subreaper, userns};

use crate::{
    bare::Bare, client::Client, docker::Docker, machine::Machine, package::Package, peer::Peer, raw::Raw, rounds::Bench, samples::Samples,
    samples::Summary, saves::Saves, server::Server,
};

/// Measures sandboxer against raw runsc and gVisor's own Python package.
#[derive(Debug, Parser)]
#[command(name = "sandboxer-bench")]
struct Args {
    /// Rounds; each measures everything once
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Exit with 1 if a bar is missed
    #[arg(long)]
    check: bool,
    /// Where to write everything as JSON, beside target/bench/latest.json
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Sandboxes of each kind whose memory is measured; 0: none
    #[arg(long, default_value_t = 10, value_name = "N")]
    idle_sandboxes: usize,
    /// What the throughput programs print, in MiB
    #[arg(long, default_value_t = 256, value_name = "MIB")]
    stdout_mib: usize,
    /// Measure these parts alone
    #[arg(long, value_name = "PART", value_delimiter = ',', default_value = "latency,stdout,saves,memory")]
    only: Vec<Part>,
    /// Where to write the table and a chart of it
    #[arg(long, value_name = "DIR")]
    publish: Option<PathBuf>,
    /// Measure how cost grows too, which takes long: with live sandboxes, sizes of checkpoints, forks and clients at once
    #[arg(long)]
    growth: bool,
    /// The server's binary; without it, the one beside this one
    #[arg(long, env = "SANDBOXER_BIN", value_name = "FILE")]
    server: Option<PathBuf>,
    /// The runsc binary; without it, the one that sandboxer finds
    #[arg(long, env = "SANDBOXER_RUNSC", value_name = "FILE")]
    runsc: Option<PathBuf>,
    /// Where the server finds its images
    #[arg(long, env = "SANDBOXER_IMAGE_DIR", value_name = "DIR")]
    image_dir: Option<PathBuf>,
    /// The Python that has the package gvisor; without it, the one that scripts/setup --bench made
    #[arg(long, env = "SANDBOXER_BENCH_PYTHON", value_name = "FILE")]
    python: Option<PathBuf>,
}

/// What can be measured by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Creating, and short programs.
    Latency,
    /// The throughput of stdout.
    Stdout,
    /// Checkpoint, restore, handoff.
    Saves,
    /// The memory of idle sandboxes.
    Memory,
}

impl Part {
    #[cfg(test)]
    const ALL: [Self; 4] = [Self::Latency, Self::Stdout, Self::Saves, Self::Memory];
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    // Before any thread exists: only then can a process enter a user namespace.
    userns::enter_if_needed()?;
    become_subreaper()?;
    // Short: there are socket paths below it.
    let home = tempfile::Builder::new().prefix("sbx-bench-").tempdir_in("/tmp")?;
    // Whoever measures takes as little of the machine as it can: threads that wake each other up take more.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let done = runtime.block_on(async {
        tokio::select! {
            done = run(&args, home.path()) => done,
            _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
            _ = terminated() => Err(anyhow::anyhow!("terminated")),
        }
    });
    leftovers::remove(home.path());
    let met = done?;
    Ok(if args.check && !met { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Without a handler for the signal it ends this process, and everything that it started is left.
async fn terminated() -> std::io::Result<()> {
    tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?.recv().await;
    Ok(())
}

/// Returns whether all bars were met.
async fn run(args: &Args, home: &Path) -> Result<bool> {
    let beside = std::env::current_exe()?.parent().map(Path::to_owned).unwrap_or_default();
    let runsc = sandboxer_runsc::find(args.runsc.as_deref())?;
    let load_before = machine::load();
    eprintln!("sandboxer-bench: starting the server (its first start on a machine builds the base image)");
    let mut bench = start(args, &beside, &runsc, home).await?;
    for round in 0..args.rounds {
        eprintln!("sandboxer-bench: round {} of {}", round + 1, args.rounds);
        bench.round(round).await.with_context(|| format!("round {}", round + 1))?;
    }
    if args.idle_sandboxes > 0 && args.only.contains(&Part::Memory) {
        eprintln!("sandboxer-bench: memory of {} idle sandboxes of each kind", args.idle_sandboxes);
        bench.memory(args.idle_sandboxes).await?;
    }
    let growth = if args.growth { Some(grow(args, &beside, &runsc, home).await.context("growth")?) } else { None };
    let machine = Machine {
        cpus: machine::cpus(),
        kernel: machine::kernel(),
        runsc: bench.raw.version().to_owned(),
        load_before,
        load_after: machine::load(),
        spin_ms: Summary::of(&bench.spins),
    };
    let samples = std::mem::take(&mut bench.samples);
    let missing = [bench.package.error(), bench.docker.error()].map(|error| error.map(str::to_owned));
    if let Err(error) = bench.end().await {
        eprintln!("sandboxer-bench: while ending: {error:#}");
    }
    let bars = report::bars(&samples, &args.only);
    let table = report::table(&samples, &bars, &machine, args.rounds, programs::FOUR_IMPORTS);
    print!("{table}");
    let grown = growth.as_deref().map(growth::table);
    if let Some(grown) = &grown {
        print!("\n{grown}");
    }
    if let Some(directory) = &args.publish {
        let about = format!("{} rounds on {} CPUs, Linux {}, runsc {}", args.rounds, machine.cpus, machine.kernel, machine.runsc);
        for (name, text) in [("latest.svg", chart::svg(&samples, &about)), ("latest.md", chart::page(&table, grown.as_deref()))] {
            let path = directory.join(name);
            fs::write(&path, text).with_context(|| path.display().to_string())?;
        }
    }
    let mut json = report::json(&samples, &bars, &machine, args.rounds, programs::FOUR_IMPORTS, &missing);
    json["growth"] = serde_json::to_value(&growth)?;
    let json = serde_json::to_vec_pretty(&json)?;
    let latest = beside.parent().unwrap_or(&beside).join("bench/latest.json");
    for path in [Some(&latest), args.json.as_ref()].into_iter().flatten() {
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        }
        fs::write(path, &json).with_context(|| path.display().to_string())?;
    }
    eprintln!("sandboxer-bench: all values are in {}", latest.display());
    Ok(bars.iter().all(|bar| bar.met))
}

/// How cost grows, on servers that do nothing else.
async fn grow(args: &Args, beside: &Path, runsc: &Path, home: &Path) -> Result<Vec<growth::Step>> {
    let [plain, kept, volume] = ["plain", "kept", "kept-volume"].map(|name| home.join(name));
    for directory in [&plain, &kept, &volume] {
        fs::create_dir(directory)?;
    }
    let binary = args.server.clone().unwrap_or_else(|| beside.join("sandboxer"));
    let plain = Server::start(&binary, runsc, args.image_dir.as_deref(), &plain, None, None, None).await?;
    let kept = Server::start(&binary, runsc, args.image_dir.as_deref(), &kept, Some(&volume), None, None).await?;
    let steps = growth::measure(&plain, &kept, growth::largest_mib(home)).await;
    plain.end().await?;
    kept.end().await?;
    steps
}

async fn start(args: &Args, beside: &Path, runsc: &Path, home: &Path) -> Result<Bench> {
    let [server_home, fresh_home, ready_home, raw_home, bare_home, package_home, docker_home] =
        ["server", "fresh", "ready", "raw", "bare", "package", "docker"].map(|name| home.join(name));
    for directory in [&server_home, &fresh_home, &ready_home, &raw_home, &bare_home, &package_home, &docker_home] {
        fs::create_dir(directory)?;
    }
    let binary = args.server.clone().unwrap_or_else(|| beside.join("sandboxer"));
    let server = Server::start(&binary, runsc, args.image_dir.as_deref(), &server_home, None, Some(0), Some(1)).await?;
    let fresh = Server::start(&binary, runsc, args.image_dir.as_deref(), &fresh_home, None, Some(0), Some(0)).await?;
    let ready = Server::start(&binary, runsc, args.image_dir.as_deref(), &ready_home, None, None, Some(1)).await?;
    let (client, _) = Client::create(server.address).await.context("the first sandbox of the server")?;
    let (fresh_client, _) = Client::create(fresh.address).await.context("the first sandbox of the server without spares")?;
    let image = server.image_of(&client.sandbox_id)?;
    let mut raw = Raw::open(runsc.to_owned(), &raw_home, image.clone()).await?;
    let (raw_sandbox, _) = raw.create().await.context("the first raw sandbox")?;
    let bare = Bare::start(runsc.to_owned(), &bare_home, image.clone()).await.context("the sandbox for the bare reader")?;
    let python = args.python.clone().or_else(package::default_python).context("no place to look for Python: HOME is not set")?;
    let package = Peer::started("the PyPI package gvisor", Package::start(&python, runsc, &package_home).await);
    let docker = Peer::started("docker", Docker::start(runsc, &image, &docker_home).await);
    let saves = if args.only.contains(&Part::Saves) { Some(start_saves(args, &binary, runsc, home).await?) } else { None };
    Ok(Bench {
        saves,
        raw,
        raw_sandbox,
        bare,
        server,
        ready,
        client,
        fresh,
        fresh_client,
        package,
        package_home,
        docker,
        docker_home,
        samples: Samples::default(),
        spins: Vec::new(),
        stdout_mib: args.stdout_mib,
        parts: args.only.clone(),
    })
}

/// Two servers that share a volume.
async fn start_saves(args: &Args, binary: &Path, runsc: &Path, home: &Path) -> Result<Saves> {
    let [one, other, volume, work] = ["one", "other", "volume", "work"].map(|name| home.join(name));
    for directory in [&one, &other, &volume, &work] {
        fs::create_dir(directory)?;
    }
    Ok(Saves {
        one: Server::start(binary, runsc, args.image_dir.as_deref(), &one, Some(&volume), None, None).await?,
        other: Server::start(binary, runsc, args.image_dir.as_deref(), &other, Some(&volume), None, None).await?,
        volume,
        work,
    })
}

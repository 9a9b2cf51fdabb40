//! `sandboxer serve`: from the command line to a running server.

mod allocator;
mod lock;
mod network;
mod settings;

use std::{
    io::{self, IsTerminal as _},
    path::Path,
    process::ExitCode,
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::Context as _;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use sandboxer_image::ImageStore;
use sandboxer_runtime::{GvisorOptions, GvisorRuntime, HostLimits, become_subreaper, userns};
use sandboxer_server::{Facts, Images, Server, StopHow};
use sandboxer_store::Pace;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{info, warn};

use self::settings::Checked;
pub(crate) use self::settings::{Args, LogFormat};
use crate::EXIT_USAGE;

/// Threads beside the async ones, for files.
const BLOCKING_THREADS: usize = 16;

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let checked = match args.check() {
        Ok(checked) => checked,
        Err(faults) => {
            for fault in faults {
                eprintln!("sandboxer: {fault}");
            }
            return Ok(ExitCode::from(EXIT_USAGE));
        }
    };
    log(args);
    if let Err(error) = allocator::settle() {
        warn!(%error, "the server may need more memory than it has to");
    }
    // Before any thread exists: only then can a process enter a user namespace.
    let privilege = userns::enter_if_needed()?;
    raise_descriptor_limit();
    become_subreaper().context("become the reaper of sandbox processes")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .worker_threads(async_threads())
        .max_blocking_threads(BLOCKING_THREADS)
        .build()?;
    info!(?privilege, version = env!("CARGO_PKG_VERSION"), "starting");
    runtime.block_on(serve(checked))?;
    // Blocking work that is still under way, such as an image build, does not hold up the end.
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}

/// Half of the processors; the others are the sandboxes'. Each byte of output goes from task to task, and where these are on threads that wake
/// each other up, that alone is a third of what the server does.
fn async_threads() -> usize {
    thread::available_parallelism().map_or(1, |processors| (processors.get() / 2).max(1))
}

async fn serve(checked: Checked) -> anyhow::Result<()> {
    let Checked { mut settings, image_dir, authorities, runsc, notes } = checked;
    notes.iter().for_each(|note| info!("{note}"));
    let _lock = lock::data_directory(&settings.data_dir).await?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut restart = signal(SignalKind::user_defined2())?;

    let host = HostLimits::probe();
    let state_dir = settings.data_dir.join("runsc");
    let options = GvisorOptions { runsc, state_dir, limits: host.clone(), file_server: Some(crate::serve_files::program()) };
    let gvisor = GvisorRuntime::open(options).await?;
    if let Some(checkpoints) = &mut settings.checkpoints {
        checkpoints.facts = Facts::here(&gvisor.features().version_text);
        checkpoints.place.check().await.map_err(anyhow::Error::msg).context("the volume of checkpoints")?;
        info!(place = %checkpoints.place, "checkpoints are kept");
        if let Some(volume) = checkpoints.place.directory().map(Path::to_owned) {
            let grace = settings.stop_grace;
            tokio::task::spawn_blocking(move || say_pace(&volume, grace));
        }
    }
    if let Some(filesystems) = &mut settings.filesystems {
        if let Some(templates) = &mut filesystems.templates {
            templates.facts = Facts::here(&gvisor.features().version_text);
        }
        // An older gVisor loses the limit of processes when it restores, which a new sandbox has to have.
        filesystems.templates.take_if(|_| !gvisor.features().in_sandbox_cgroup_v2);
        filesystems.place.check().await.map_err(anyhow::Error::msg).context("the volume of filesystem snapshots")?;
    }
    let images = Images::in_store(ImageStore::open(image_dir)?.with_authorities(authorities));

    let scheme = if settings.tls.is_some() { "https" } else { "http" };
    let server = Server::start(settings, Arc::new(gvisor), images.clone(), host).await?;
    tokio::spawn(images.keep_preparing());
    println!("sandboxer listening on {scheme}://{}", server.address()?);
    if let Some(address) = server.metrics_address()? {
        println!("sandboxer serving metrics on http://{address}/metrics");
    }

    let stop = async {
        tokio::select! {
            _ = terminate.recv() => StopHow::Drain,
            _ = interrupt.recv() => StopHow::Drain,
            _ = restart.recv() => StopHow::Restart,
        }
    };
    server.serve(stop).await;
    info!("stopped");
    Ok(())
}

/// What can be saved when the server is told to stop.
fn say_pace(volume: &Path, grace: Duration) {
    match Pace::measure(volume) {
        Ok(pace) => info!("when it is told to stop, this server can save {}", pace.within(grace)),
        Err(error) => warn!(%error, "how fast the volume is could not be tried"),
    }
}

/// Each sandbox and each client takes some descriptors, and the usual soft limit is for programs that don't serve.
fn raise_descriptor_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        warn!(%error, "the limit of open files could not be raised");
    }
}

fn log(args: &Args) {
    let filter = tracing_subscriber::EnvFilter::try_new(&args.log).unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_ansi(io::stderr().is_terminal());
    match args.log_format {
        LogFormat::Text => subscriber.with_target(false).init(),
        LogFormat::Json => subscriber.json().init(),
    }
}

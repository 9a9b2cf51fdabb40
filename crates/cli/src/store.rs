//! `sandboxer store`: what is on the volume where sandboxes are kept, and removing what nobody needs of it.

mod du;
mod gc;

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use anyhow::{Context as _, Result};
use clap::Subcommand;
use sandboxer_protocol::SandboxId;
use sandboxer_store::{
    CheckpointName, ChunkIndex, Depth, Loader, Place, Volume, VolumeKey,
    failpoint::FailPoints,
    key::Purpose,
    record::{Codec, Record, RecordStore},
    verify,
};
use serde_json::{Value, json};

/// Records that are read at a time.
const PAGE: usize = 1000;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The volume: a directory, or the URL of a bucket
    #[arg(long, global = true, env = "CHECKPOINT_AND_RESTORE_PATH", value_name = "DIR|URL")]
    checkpoint_path: Option<PathBuf>,
    /// File of the secret that authenticates what is on it
    #[arg(long, global = true, env = "SANDBOXER_VOLUME_KEY_FILE", value_name = "FILE")]
    volume_key_file: Option<PathBuf>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the sandboxes that are kept there
    Ls,
    /// Check everything that is there, and tell each fault with its file; exits with 1 if there is any
    Verify {
        /// Look at sizes only, not at every byte
        #[arg(long)]
        quick: bool,
    },
    /// Remove what nobody needs: checkpoints beyond what is kept, killed sandboxes, data that nothing refers to. Servers may go on meanwhile
    Gc {
        /// Only say what would be removed
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        keep: Keep,
    },
    /// Say how much each sandbox needs, how much they share, and how much can be freed
    Du {
        #[command(flatten)]
        keep: Keep,
    },
}

/// What is kept: as the servers are told.
#[derive(Debug, Clone, Copy, clap::Args)]
struct Keep {
    /// Checkpoints that are kept of a sandbox, beside the newest one and the newest two that nobody asked for
    #[arg(long, env = "SANDBOXER_KEEP_CHECKPOINTS", default_value_t = 5, value_name = "N")]
    keep_checkpoints: usize,
}

/// The volume and its records.
struct Store {
    volume: Volume,
    records: Arc<dyn RecordStore>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let path = args.checkpoint_path.as_deref().context("say where the volume is, with --checkpoint-path or CHECKPOINT_AND_RESTORE_PATH")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let store = Store::open(path, args.volume_key_file.as_deref())?;
        match args.command {
            Command::Ls => store.ls(args.json).await,
            Command::Gc { dry_run, keep } => gc::run(&store, keep.keep_checkpoints, dry_run, args.json).await,
            Command::Du { keep } => du::run(&store, keep.keep_checkpoints, args.json).await,
            Command::Verify { quick } => store.verify(if quick { Depth::Sizes } else { Depth::Everything }, args.json).await,
        }
    })
}

impl Store {
    fn open(path: &Path, key_file: Option<&Path>) -> Result<Self> {
        let place = Place::at(path).map_err(anyhow::Error::msg)?;
        let mut volume = place.volume(FailPoints::from_env()?).with_context(|| place.to_string())?;
        let mut codec = Codec::default();
        if let Some(file) = key_file {
            let key = VolumeKey::read(file)?;
            let sealing = key.clone();
            codec = Codec::sealed(Arc::new(move |bytes| sealing.mac(Purpose::Record, bytes)));
            volume = volume.with_key(key);
        }
        let records = place.records(codec, FailPoints::default(), None).with_context(|| place.to_string())?;
        Ok(Self { volume, records })
    }

    /// Every record, and what is wrong with those that are none.
    async fn records(&self) -> Result<Vec<(SandboxId, Result<Record, String>)>> {
        let mut found = Vec::new();
        let mut after = None;
        loop {
            let page = self.records.list(after, PAGE).await?;
            for id in &page {
                match self.records.read(*id).await {
                    Ok(Some(stored)) => found.push((*id, Ok(stored.record))),
                    Ok(None) => {}
                    Err(error) => found.push((*id, Err(error.to_string()))),
                }
            }
            match page.last() {
                Some(last) if page.len() == PAGE => after = Some(*last),
                _ => return Ok(found),
            }
        }
    }

    async fn ls(&self, as_json: bool) -> Result<ExitCode> {
        let mut rows = Vec::new();
        for (id, record) in self.records().await? {
            let checkpoints = self.volume.checkpoints(id).await?.len();
            rows.push(match record {
                Ok(record) => row(id, &record, checkpoints),
                Err(why) => json!({"id": id.to_string(), "status": "unreadable", "checkpoints": checkpoints, "message": why}),
            });
        }
        let mut out = io::stdout().lock();
        if as_json {
            writeln!(out, "{}", json!({"items": rows}))?;
            return Ok(ExitCode::SUCCESS);
        }
        writeln!(out, "{:<36}  {:<10}  {:>11}  {:<32}  OWNER", "SANDBOX", "STATUS", "CHECKPOINTS", "LATEST")?;
        for row in &rows {
            let text = |field: &str| row[field].as_str().unwrap_or("-").to_owned();
            let (latest, owner) = (text("latest"), text("owner"));
            writeln!(out, "{:<36}  {:<10}  {:>11}  {latest:<32}  {owner}", text("id"), text("status"), row["checkpoints"])?;
        }
        Ok(ExitCode::SUCCESS)
    }

    async fn verify(&self, depth: Depth, as_json: bool) -> Result<ExitCode> {
        let records = self.records().await?;
        let named: Vec<(SandboxId, CheckpointName)> = records
            .iter()
            .filter_map(|(id, record)| Some((*id, record.as_ref().ok().filter(|record| record.tombstone.is_none())?.latest?)))
            .collect();
        let loader = Loader::new(self.volume.clone(), ChunkIndex::default());
        let report = verify(&loader, &named, depth).await?;
        let mut faults: Vec<String> = report.faults.iter().map(sandboxer_store::Error::whole).collect();
        faults.extend(records.iter().filter_map(|(id, record)| Some(format!("locks/{id}.lock: {}", record.as_ref().err()?))));
        let mut out = io::stdout().lock();
        if as_json {
            let counts = json!({"sandboxes": report.sandboxes, "checkpoints": report.checkpoints, "snapshots": report.snapshots,
                "images": report.images, "packs": report.packs, "read_bytes": report.read_bytes, "faults": faults});
            writeln!(out, "{counts}")?;
        } else {
            for fault in &faults {
                writeln!(out, "{fault}")?;
            }
            writeln!(
                out,
                "{} sandboxes, {} checkpoints, {} images, {} packs: {}",
                report.sandboxes,
                report.checkpoints,
                report.images,
                report.packs,
                if faults.is_empty() { "no fault".to_owned() } else { format!("{} faults", faults.len()) }
            )?;
        }
        Ok(if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

fn status(record: &Record) -> &'static str {
    match (&record.tombstone, &record.owner, &record.latest) {
        (Some(_), ..) => "killed",
        (None, Some(_), _) => "running",
        (None, None, Some(_)) => "saved",
        (None, None, None) => "lost",
    }
}

fn row(id: SandboxId, record: &Record, checkpoints: usize) -> Value {
    json!({
        "id": id.to_string(),
        "status": status(record),
        "checkpoints": checkpoints,
        "latest": record.latest.map(|name| name.to_string()),
        "owner": record.owner.as_ref().map(ToString::to_string),
        "epoch": record.epoch,
    })
}

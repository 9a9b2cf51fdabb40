//! `checkpoint`, `checkpoints`, `snapshot`, `rollback` and `fork`: a sandbox saved, gone back, copied.

use std::{io::IsTerminal as _, process::ExitCode, time::Duration};

use anyhow::Result;
use indicatif::{HumanBytes, HumanDuration, ProgressBar, ProgressStyle};
use serde_json::{Map, Value, json};

use crate::{
    ask::{Ask, table, text},
    tokens,
};

#[derive(Debug, clap::Args)]
pub(crate) struct CheckpointArgs {
    #[command(flatten)]
    ask: Ask,
    /// Save a running execution too: it goes on when somebody attaches
    #[arg(long)]
    include_execution: bool,
    /// The sandbox; it was made with `enable_checkpoint`, and nobody is attached to it
    #[arg(value_name = "SANDBOX_ID")]
    id: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CheckpointsArgs {
    #[command(flatten)]
    ask: Ask,
    /// The sandbox, running or not
    #[arg(value_name = "SANDBOX_ID")]
    id: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct SnapshotArgs {
    #[command(flatten)]
    ask: Ask,
    /// What to call it; for gVisor sandboxes only
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// The sandbox
    #[arg(value_name = "SANDBOX_ID")]
    id: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RollbackArgs {
    #[command(flatten)]
    ask: Ask,
    /// The sandbox, running or not
    #[arg(value_name = "SANDBOX_ID")]
    id: String,
    /// A snapshot's id, or the name of a checkpoint of this sandbox (`checkpoint_….img`)
    #[arg(value_name = "SNAPSHOT_ID|CHECKPOINT")]
    to: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ForkArgs {
    #[command(flatten)]
    ask: Ask,
    /// How many sandboxes to make: all of them, or none
    #[arg(long, value_name = "N", default_value_t = 1)]
    count: u64,
    /// Copy the sandbox as it was at this checkpoint of it, rather than as it is now
    #[arg(long, value_name = "CHECKPOINT")]
    checkpoint: Option<String>,
    /// The snapshot or the sandbox to copy
    #[arg(value_name = "SNAPSHOT_ID|SANDBOX_ID")]
    from: String,
}

pub(crate) fn checkpoint(args: &CheckpointArgs) -> Result<ExitCode> {
    let body = json!({ "include_execution": args.include_execution });
    let path = format!("/v1/sandboxes/{}/checkpoint", args.ask.sandbox_id(&args.id)?);
    let made = working("saving the sandbox", || args.ask.ask("POST", &path, Some(&body)))?;
    tell_saving(&made, &made);
    args.ask.print(&made, |made| format!("{}\n", text(made, "name")))
}

pub(crate) fn checkpoints(args: &CheckpointsArgs) -> Result<ExitCode> {
    let list = args.ask.list(&format!("/v1/sandboxes/{}/checkpoints", args.ask.sandbox_id(&args.id)?))?;
    let heads = ["NAME", "CREATED", "LATEST", "AUTOMATIC", "BYTES", "WRITTEN", "REUSED"];
    let fields = ["name", "created_at", "latest", "automatic", "size_bytes", "written_bytes", "reused_bytes"];
    args.ask.print(&list, |list| table(&heads, list, &fields))
}

pub(crate) fn snapshot(args: &SnapshotArgs) -> Result<ExitCode> {
    let mut body = Map::new();
    if let Some(name) = &args.name {
        body.insert("name".to_owned(), json!(name));
    }
    let path = format!("/v1/sandboxes/{}/snapshot", args.ask.sandbox_id(&args.id)?);
    let made = working("saving the sandbox, which goes on", || args.ask.ask("POST", &path, Some(&Value::Object(body))))?;
    tell_saving(&made, &made["meta"]);
    args.ask.print(&made, |made| format!("{}\n", text(made, "id")))
}

pub(crate) fn rollback(args: &RollbackArgs) -> Result<ExitCode> {
    let field = if args.to.starts_with("checkpoint_") { "checkpoint" } else { "snapshot_id" };
    let path = format!("/v1/sandboxes/{}/rollback", args.ask.sandbox_id(&args.id)?);
    let to = if field == "snapshot_id" { args.ask.snapshot_id(&args.to)? } else { args.to.clone() };
    let back = working("going back", || args.ask.ask("POST", &path, Some(&json!({ field: to }))))?;
    args.ask.print(&back, |back| format!("{} {} generation {}\n", text(back, "id"), text(back, "status"), back["generation"]))
}

pub(crate) fn fork(args: &ForkArgs) -> Result<ExitCode> {
    let mut body = Map::from_iter([("count".to_owned(), json!(args.count))]);
    if let Some(checkpoint) = &args.checkpoint {
        body.insert("checkpoint".to_owned(), json!(checkpoint));
    }
    let snapshot = match &args.checkpoint {
        None => args.ask.find_snapshot(&args.from)?,
        Some(_) => None,
    };
    let path = match snapshot {
        Some(snapshot) if args.ask.is_there(&format!("/v1/snapshots/{snapshot}"))? => format!("/v1/snapshots/{snapshot}/restore"),
        _ => format!("/v1/sandboxes/{}/fork", args.ask.sandbox_id(&args.from)?),
    };
    let what = format!("making {} {}", args.count, if args.count == 1 { "sandbox" } else { "sandboxes" });
    let made = working(&what, || args.ask.ask("POST", &path, Some(&Value::Object(body))))?;
    tokens::keep(&made);
    let ids = |made: &Value| made["items"].as_array().into_iter().flatten().map(|item| format!("{}\n", text(item, "id"))).collect();
    args.ask.print(&made, ids)
}

/// Shows on a terminal that something is being done, and for how long.
pub(crate) fn working<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let bar = ProgressBar::new_spinner();
    // The template is ours; should it be wrong, the default one does.
    if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed:>4} {msg}") {
        bar.set_style(style);
    }
    bar.set_message(what.to_owned());
    bar.enable_steady_tick(Duration::from_millis(100));
    let done = work();
    bar.finish_and_clear();
    if done.is_ok() && std::io::stderr().is_terminal() {
        eprintln!("{what}: {:#}", HumanDuration(bar.elapsed()));
    }
    done
}

/// How much it took: what was written, and what was there already. Sandboxes of other kinds don't say.
fn tell_saving(made: &Value, saving: &Value) {
    let bytes = |value: &Value| value.as_u64().or_else(|| value.as_str()?.parse().ok());
    let told = (bytes(&saving["raw_bytes"]), bytes(&saving["written_bytes"]), bytes(&saving["reused_bytes"]), bytes(&made["size_bytes"]));
    if let (Some(raw), Some(written), Some(reused), Some(size)) = told {
        let (raw, written, reused, size) = (HumanBytes(raw), HumanBytes(written), HumanBytes(reused), HumanBytes(size));
        eprintln!("{raw} of the sandbox in {size}: {written} written, {reused} were there already");
    }
}

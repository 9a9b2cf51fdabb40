//! `ls`, `get`, `rm`, `restore`, `snapshots` and `profiles list|get`: the resource API, as commands.

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::Subcommand;
use sandboxer_extensions::Profile;
use serde_json::{Map, Value, json};

pub(crate) use crate::ask::{Ask, details, id, pair, plain, table, text};
use crate::{EXIT_USAGE, create::texts, tokens, travel::working};

#[derive(Debug, clap::Args)]
pub(crate) struct OneArgs {
    #[command(flatten)]
    ask: Ask,
    /// The sandbox
    #[arg(value_name = "SANDBOX_ID")]
    id: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RemoveArgs {
    #[command(flatten)]
    ask: Ask,
    /// Forget it even if its host can't be asked to remove it
    #[arg(long)]
    force: bool,
    /// The sandbox, or several
    #[arg(value_name = "SANDBOX_ID", required = true)]
    ids: Vec<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    ask: Ask,
    /// Also those that are on the volume and not in the memory of the server that is asked
    #[arg(long)]
    saved: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RestoreArgs {
    #[command(flatten)]
    ask: Ask,
    /// An input in place of the one that the snapshotted sandbox had; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    input: Vec<(String, String)>,
    /// The placement host; it has to be the one that the snapshot is on
    #[arg(long, value_name = "HOST")]
    host: Option<String>,
    /// How many sandboxes to make
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// The snapshot
    #[arg(value_name = "SNAPSHOT_ID")]
    id: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct SnapshotsArgs {
    #[command(flatten)]
    ask: Ask,
    #[command(subcommand)]
    command: SnapshotsCommand,
}

#[derive(Debug, Subcommand)]
enum SnapshotsCommand {
    /// List all snapshots
    List,
    /// Show one
    Get {
        #[arg(value_name = "SNAPSHOT_ID")]
        id: String,
    },
    /// Delete one, with what it left on its host
    Delete {
        /// Forget it even if its host can't be asked to remove it
        #[arg(long)]
        force: bool,
        #[arg(value_name = "SNAPSHOT_ID")]
        id: String,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct ProfilesArgs {
    #[command(flatten)]
    ask: Ask,
    #[command(subcommand)]
    command: ProfilesCommand,
}

#[derive(Debug, Subcommand)]
enum ProfilesCommand {
    /// List the profiles of the server
    List,
    /// Show one with its inputs
    Get {
        #[arg(value_name = "PROFILE")]
        name: String,
    },
    /// Check a profile in a file, without a server
    Check {
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

pub(crate) fn ls(args: &ListArgs) -> Result<ExitCode> {
    let list = args.ask.list(if args.saved { "/v1/sandboxes?saved=true" } else { "/v1/sandboxes" })?;
    args.ask.print(&list, |list| {
        table(&["ID", "STATUS", "PROFILE", "HOST", "CREATED"], list, &["id", "status", "profile", "host", "created_at"])
    })
}

pub(crate) fn get(args: &OneArgs) -> Result<ExitCode> {
    let found = args.ask.ask("GET", &format!("/v1/sandboxes/{}", args.ask.sandbox_id(&args.id)?), None)?;
    args.ask.print(&found, details)
}

pub(crate) fn rm(args: &RemoveArgs) -> Result<ExitCode> {
    let mut removed = Vec::new();
    for given in &args.ids {
        let id = args.ask.sandbox_id(given)?;
        let path = format!("/v1/sandboxes/{id}?force={}", args.force);
        args.ask.ask("DELETE", &path, None).with_context(|| format!("remove {given}"))?;
        tokens::forget(&id);
        removed.push(json!({ "id": id }));
    }
    args.ask.done(&json!({ "items": removed }))
}

pub(crate) fn restore(args: &RestoreArgs) -> Result<ExitCode> {
    let mut body = Map::from_iter([("inputs".to_owned(), texts(&args.input))]);
    if let Some(host) = &args.host {
        body.insert("host".to_owned(), json!(host));
    }
    if let Some(count) = args.count {
        body.insert("count".to_owned(), json!(count));
    }
    let path = format!("/v1/snapshots/{}/restore", args.ask.snapshot_id(&args.id)?);
    let made = working("making the sandbox", || args.ask.ask("POST", &path, Some(&Value::Object(body))))?;
    tokens::keep(&made);
    args.ask.print(&made, |made| match made["items"].as_array() {
        Some(items) => items.iter().map(|item| format!("{}\n", text(item, "id"))).collect(),
        None => format!("{}\n", text(made, "id")),
    })
}

pub(crate) fn snapshots(args: &SnapshotsArgs) -> Result<ExitCode> {
    match &args.command {
        SnapshotsCommand::List => {
            let list = args.ask.list("/v1/snapshots")?;
            let fields = ["id", "name", "sandbox_id", "status", "size_bytes", "host", "created_at"];
            args.ask.print(&list, |list| {
                let mut shown = list.clone();
                for item in shown["items"].as_array_mut().into_iter().flatten() {
                    item["name"] = item["meta"]["name"].clone();
                }
                table(&["ID", "NAME", "SANDBOX", "STATUS", "BYTES", "HOST", "CREATED"], &shown, &fields)
            })
        }
        SnapshotsCommand::Get { id: one } => {
            let found = args.ask.ask("GET", &format!("/v1/snapshots/{}", args.ask.snapshot_id(one)?), None)?;
            args.ask.print(&found, details)
        }
        SnapshotsCommand::Delete { force, id: one } => {
            let id = args.ask.snapshot_id(one)?;
            args.ask.ask("DELETE", &format!("/v1/snapshots/{id}?force={force}"), None)?;
            args.ask.done(&json!({ "id": id }))
        }
    }
}

pub(crate) fn profiles(args: &ProfilesArgs) -> Result<ExitCode> {
    match &args.command {
        ProfilesCommand::List => {
            let list = args.ask.ask("GET", "/v1/profiles", None)?;
            args.ask.print(&list, |list| table(&["PROFILE", "EXTENSION", "DESCRIPTION"], list, &["name", "extension", "description"]))
        }
        ProfilesCommand::Get { name } => {
            let found = args.ask.ask("GET", &format!("/v1/profiles/{}", id(name)?), None)?;
            args.ask.print(&found, |profile| {
                let mut text = details(profile);
                for (name, spec) in profile["inputs"].as_object().into_iter().flatten() {
                    let need = if spec["required"] == true { "needed".to_owned() } else { format!("default {}", spec["default"]) };
                    text += &format!("  --input {name}=…  {} ({}, {need})\n", plain(&spec["description"]), plain(&spec["type"]));
                }
                text
            })
        }
        ProfilesCommand::Check { file } => {
            let read = std::fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
            match Profile::parse(&read) {
                Ok(profile) => args.ask.print(&json!(profile), |_| format!("{} is a profile: {}\n", file.display(), profile.name)),
                Err(faults) => {
                    for fault in faults.0 {
                        eprintln!("sandboxer: {}: {fault}", file.display());
                    }
                    Ok(ExitCode::from(EXIT_USAGE))
                }
            }
        }
    }
}

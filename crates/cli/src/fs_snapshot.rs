//! `fs-snapshot`: the files of sandboxes as templates for new ones, and as layers of container images.

use std::{
    fs::{self, File},
    io::{self, IsTerminal as _},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, Result, anyhow};
use clap::Subcommand;
use serde_json::{Value, json};
use tokio::io::AsyncWrite;

use crate::{
    travel::working,
    workspaces::{Ask, details, id, table, text},
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    ask: Ask,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Keep the files of a sandbox, which goes on, under a name
    Create {
        /// Replace one of that name
        #[arg(long)]
        replace: bool,
        #[arg(value_name = "SANDBOX_ID")]
        id: String,
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// List all
    Ls,
    /// Show one
    Get {
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Remove one; sandboxes that were made from it keep their files
    Rm {
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Write one as a layer of a container image: a tar archive, not compressed
    Export {
        #[arg(value_name = "NAME")]
        name: String,
        /// Where to; "-": the standard output
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Make one from a layer of a container image: a tar archive, plain or compressed by gzip or zstd
    Import {
        /// Replace one of that name
        #[arg(long)]
        replace: bool,
        #[arg(value_name = "NAME")]
        name: String,
        /// Where from; "-": the standard input
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let ask = &args.ask;
    let place = |name: &str| Ok::<_, anyhow::Error>(format!("/v1/filesystem-snapshots/{}", id(name)?));
    match &args.command {
        Command::Create { replace, id: sandbox, name } => {
            let path = format!("/v1/sandboxes/{}/filesystem-snapshot", ask.sandbox_id(sandbox)?);
            let body = json!({ "name": name, "replace": replace });
            let made = working("keeping the files", || ask.ask("POST", &path, Some(&body)))?;
            ask.print(&made, named)
        }
        Command::Ls => {
            let list = ask.list("/v1/filesystem-snapshots")?;
            let fields = ["name", "entries", "content_bytes", "size_bytes", "created_at", "error"];
            ask.print(&list, |list| table(&["NAME", "ENTRIES", "CONTENT", "BYTES", "CREATED", "DAMAGE"], list, &fields))
        }
        Command::Get { name } => ask.print(&ask.ask("GET", &place(name)?, None)?, details),
        Command::Rm { name } => {
            ask.ask("DELETE", &place(name)?, None)?;
            ask.done(&json!({ "name": name }))
        }
        Command::Export { name, file } => export(ask, &place(name)?, file),
        Command::Import { replace, name, file } => {
            let path = format!("{}/layer?replace={replace}", place(name)?);
            let made = working("taking the archive in", || import(ask, &path, file))?;
            ask.print(&made, named)
        }
    }
}

fn named(made: &Value) -> String {
    format!("{}\n", text(made, "name"))
}

fn import(ask: &Ask, path: &str, file: &Path) -> Result<Value> {
    let answer = if is_stream(file) {
        ask.transfer(async |api| api.upload(path, tokio::io::stdin()).await)?
    } else {
        let opened = File::open(file).with_context(|| format!("open {}", file.display()))?;
        ask.transfer(async |api| api.upload(path, tokio::fs::File::from_std(opened)).await)?
    };
    answer.ok().map_err(|message| anyhow!("{message}"))
}

fn export(ask: &Ask, place: &str, file: &Path) -> Result<ExitCode> {
    let path = format!("{place}/layer");
    if is_stream(file) {
        if io::stdout().is_terminal() {
            return Err(anyhow!("an archive is not for a terminal: name a file, or let another program read it"));
        }
        return write(ask, &path, tokio::io::stdout());
    }
    // Under its name only when it is whole.
    let mut part = file.as_os_str().to_owned();
    part.push(".part");
    let part = PathBuf::from(part);
    let opened = File::create(&part).with_context(|| format!("write {}", part.display()))?;
    let written = working("writing the archive", || write(ask, &path, tokio::fs::File::from_std(opened)));
    if written.is_err() {
        let _ = fs::remove_file(&part);
    } else {
        fs::rename(&part, file).with_context(|| format!("write {}", file.display()))?;
    }
    written
}

fn write(ask: &Ask, path: &str, mut into: impl AsyncWrite + Unpin) -> Result<ExitCode> {
    let answer = ask.transfer(async |api| api.download(path, &mut into).await)?;
    answer.ok().map_err(|message| anyhow!("{message}"))?;
    Ok(ExitCode::SUCCESS)
}

fn is_stream(file: &Path) -> bool {
    file.as_os_str() == "-"
}

//! `create`, `ls`, `get`, `rm`, `restore`, `snapshots` and `profiles list|get`: the resource API, as commands.

use std::{
    io::{self, IsTerminal as _, Write as _},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context as _, Result, anyhow};
use clap::Subcommand;
use sandboxer_client::{Answer, Api, Connection, Error};
use sandboxer_extensions::Profile;
use serde_json::{Map, Value, json};

use crate::EXIT_USAGE;

/// A sandbox's id has so many characters.
const FULL_ID: usize = 36;

/// Which server, and how its answer is printed. For every verb that asks one.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Ask {
    /// Address of the server
    #[arg(long, global = true, value_name = "URL", env = "SANDBOXER_SERVER", default_value = "http://127.0.0.1:8080")]
    server: String,
    /// Key that the server asks for
    #[arg(long, global = true, value_name = "KEY", env = "SANDBOXER_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Print JSON: the objects of the API
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CreateArgs {
    #[command(flatten)]
    ask: Ask,
    /// What kind of sandbox; see `sandboxer profiles list`
    #[arg(long, value_name = "PROFILE", default_value = "profile.gvisor")]
    profile: String,
    /// An input of the profile; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    input: Vec<(String, String)>,
    /// The placement host
    #[arg(long, value_name = "HOST")]
    host: Option<String>,
    /// A note that is kept with the sandbox; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    metadata: Vec<(String, String)>,
}

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
    /// The sandbox
    #[arg(value_name = "SANDBOX_ID")]
    id: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    ask: Ask,
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

pub(crate) fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("NAME=VALUE".into()),
    }
}

fn texts(pairs: &[(String, String)]) -> Map<String, Value> {
    pairs.iter().map(|(name, value)| (name.clone(), json!(value))).collect()
}

/// Ids go into a path, so only what can be one gets there.
pub(crate) fn id(text: &str) -> Result<&str> {
    let good = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
    if good { Ok(text) } else { Err(anyhow!("{text:?} is no id")) }
}

impl Ask {
    pub(crate) fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        self.answer(method, path, body)?.ok().map_err(|message| anyhow!("{message}"))
    }

    /// Whether the server has this.
    pub(crate) fn is_there(&self, path: &str) -> Result<bool> {
        let answer = self.answer("GET", path, None)?;
        if answer.status == 404 {
            return Ok(false);
        }
        answer.ok().map(|_| true).map_err(|message| anyhow!("{message}"))
    }

    fn answer(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Answer> {
        self.transfer(async |api| api.request(method, path, body).await)
    }

    /// Asks in whatever way.
    pub(crate) fn transfer<T>(&self, ask: impl AsyncFnOnce(&Api) -> Result<T, Error>) -> Result<T> {
        let api = self.api()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let answer = runtime.block_on(ask(&api)).map_err(|error| self.explain(error));
        // A read of the standard input can't be called off.
        runtime.shutdown_background();
        answer
    }

    pub(crate) fn api(&self) -> Result<Api> {
        let mut connection = Connection::default();
        if let Some(key) = &self.api_key {
            connection = connection.api_key(key);
        }
        Ok(Api::new(&self.server, &connection)?)
    }

    /// The whole id of the sandbox that begins like this; of one that is meant by its whole id nobody is asked.
    pub(crate) fn sandbox_id(&self, beginning: &str) -> Result<String> {
        if beginning.len() == FULL_ID {
            return Ok(beginning.to_owned());
        }
        let list = self.list("/v1/sandboxes")?;
        let ids = list["items"].as_array().into_iter().flatten().map(|item| text(item, "id"));
        let found: Vec<&str> = ids.filter(|id| id.starts_with(beginning)).collect();
        match found[..] {
            [one] => Ok(one.to_owned()),
            [] => Err(anyhow!("no sandbox has an id that begins with {beginning}; `sandboxer ls` lists them")),
            _ => Err(anyhow!("{} sandboxes have an id that begins with {beginning}: give more of it", found.len())),
        }
    }

    fn explain(&self, error: Error) -> anyhow::Error {
        let hint = match &error {
            Error::Unavailable { .. } => {
                format!("\nIs a server running at {}? Start one with `sandboxer serve`, or name one by --server.", self.server)
            }
            Error::Denied { .. } if self.api_key.is_none() => "\nGive the server's key by --api-key or SANDBOXER_API_KEY.".to_owned(),
            _ => String::new(),
        };
        anyhow!("{error}{hint}")
    }

    /// All pages as one list.
    pub(crate) fn list(&self, path: &str) -> Result<Value> {
        let mut items = Vec::new();
        let mut cursor = String::new();
        loop {
            let page = self.ask("GET", &format!("{path}?limit=1000{cursor}"), None)?;
            for warning in page["warnings"].as_array().into_iter().flatten() {
                eprintln!("sandboxer: {}", warning.as_str().unwrap_or_default());
            }
            items.extend(page["items"].as_array().cloned().unwrap_or_default());
            match page["next_cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={}", id(next)?),
                None => return Ok(json!({ "items": items, "next_cursor": null })),
            }
        }
    }

    pub(crate) fn print(&self, value: &Value, human: impl FnOnce(&Value) -> String) -> Result<ExitCode> {
        let text = if self.json { format!("{value}\n") } else { human(value) };
        match io::stdout().write_all(text.as_bytes()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error).context("write to the standard output"),
            _ => Ok(ExitCode::SUCCESS),
        }
    }
}

pub(crate) fn create(args: &CreateArgs) -> Result<ExitCode> {
    let mut body = Map::from_iter([("profile".to_owned(), json!(args.profile)), ("inputs".to_owned(), Value::Object(texts(&args.input)))]);
    if let Some(host) = &args.host {
        body.insert("host".to_owned(), json!(host));
    }
    if !args.metadata.is_empty() {
        body.insert("metadata".to_owned(), Value::Object(texts(&args.metadata)));
    }
    let made = args.ask.ask("POST", "/v1/sandboxes", Some(&Value::Object(body)))?;
    args.ask.print(&made, |made| format!("{}\n", text(made, "id")))
}

pub(crate) fn ls(args: &ListArgs) -> Result<ExitCode> {
    let list = args.ask.list("/v1/sandboxes")?;
    args.ask.print(&list, |list| {
        table(&["ID", "STATUS", "PROFILE", "HOST", "CREATED"], list, &["id", "status", "profile", "host", "created_at"])
    })
}

pub(crate) fn get(args: &OneArgs) -> Result<ExitCode> {
    let found = args.ask.ask("GET", &format!("/v1/sandboxes/{}", id(&args.id)?), None)?;
    args.ask.print(&found, details)
}

pub(crate) fn rm(args: &RemoveArgs) -> Result<ExitCode> {
    args.ask.ask("DELETE", &format!("/v1/sandboxes/{}?force={}", id(&args.id)?, args.force), None)?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn restore(args: &RestoreArgs) -> Result<ExitCode> {
    let mut body = Map::from_iter([("inputs".to_owned(), Value::Object(texts(&args.input)))]);
    if let Some(host) = &args.host {
        body.insert("host".to_owned(), json!(host));
    }
    if let Some(count) = args.count {
        body.insert("count".to_owned(), json!(count));
    }
    let made = args.ask.ask("POST", &format!("/v1/snapshots/{}/restore", id(&args.id)?), Some(&Value::Object(body)))?;
    args.ask.print(&made, |made| match made["items"].as_array() {
        Some(items) => items.iter().map(|item| format!("{}\n", text(item, "id"))).collect(),
        None => format!("{}\n", text(made, "id")),
    })
}

pub(crate) fn snapshots(args: &SnapshotsArgs) -> Result<ExitCode> {
    match &args.command {
        SnapshotsCommand::List => {
            let list = args.ask.list("/v1/snapshots")?;
            let fields = ["id", "sandbox_id", "status", "size_bytes", "host", "created_at"];
            args.ask.print(&list, |list| table(&["ID", "SANDBOX", "STATUS", "BYTES", "HOST", "CREATED"], list, &fields))
        }
        SnapshotsCommand::Get { id: one } => {
            let found = args.ask.ask("GET", &format!("/v1/snapshots/{}", id(one)?), None)?;
            args.ask.print(&found, details)
        }
        SnapshotsCommand::Delete { force, id: one } => {
            args.ask.ask("DELETE", &format!("/v1/snapshots/{}?force={force}", id(one)?), None)?;
            Ok(ExitCode::SUCCESS)
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

pub(crate) fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object[field].as_str().unwrap_or_default()
}

/// What a server says is printed to a terminal: nothing in it may steer that.
fn plain(value: &Value) -> String {
    let text = match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

pub(crate) fn details(object: &Value) -> String {
    object.as_object().into_iter().flatten().map(|(name, value)| format!("{name}: {}\n", plain(value))).collect()
}

pub(crate) fn table(heads: &[&str], list: &Value, fields: &[&str]) -> String {
    let mut rows: Vec<Vec<String>> =
        list["items"].as_array().into_iter().flatten().map(|item| fields.iter().map(|field| plain(&item[*field])).collect()).collect();
    if io::stdout().is_terminal() || !rows.is_empty() {
        rows.insert(0, heads.iter().map(ToString::to_string).collect());
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        cells.join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

//! Which server is asked, by what key, and how its answer is printed: for every verb that asks one.

use std::{
    io::{self, IsTerminal as _, Write as _},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context as _, Result, anyhow, bail};
use sandboxer_client::{Answer, Api, Connection, Error, ErrorCode, ResumeFrom, Sandbox, SandboxId};
use serde_json::{Value, json};

use crate::tokens;

/// An id has so many characters.
const FULL_ID: usize = 36;
/// What a key in a file may have, with whatever is around it.
const MAX_KEY_FILE_BYTES: u64 = 64 * 1024;
/// Of an id that could be several, so many are named.
const MAX_NAMED: usize = 8;

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Ask {
    /// Address of the server: http(s):// or ws(s)://. Several, by commas or by saying it again, are of servers that share a volume: where
    /// one can't be reached, the next is asked
    #[arg(
        long,
        global = true,
        value_name = "URL",
        env = "SANDBOXER_SERVER",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:8080"
    )]
    server: Vec<String>,
    /// Key that the server asks for
    #[arg(long, global = true, value_name = "KEY", env = "SANDBOXER_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// File with the key that the server asks for; it counts before --api-key
    #[arg(long, global = true, value_name = "FILE", env = "SANDBOXER_API_KEY_FILE")]
    api_key_file: Option<PathBuf>,
    /// Print JSON: the objects of the API
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// A sandbox that this command becomes the client of.
#[derive(Debug, clap::Args)]
pub(crate) struct Token {
    /// The sandbox's own secret, where the server asks for keys; of sandboxes that were made by this command for this user it is known
    #[arg(long, value_name = "TOKEN", env = "SANDBOXER_SANDBOX_TOKEN", hide_env_values = true)]
    pub(crate) token: Option<String>,
}

pub(crate) fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("NAME=VALUE".into()),
    }
}

/// Ids go into a path, so only what can be one gets there.
pub(crate) fn id(text: &str) -> Result<&str> {
    let good = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
    if good { Ok(text) } else { Err(anyhow!("{text:?} is no id")) }
}

impl Ask {
    pub(crate) fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        let answer = self.answer(method, path, body)?;
        let hint = hint(&answer);
        answer.ok().map_err(|message| anyhow!("{message}{hint}"))
    }

    /// Whether the server has this.
    pub(crate) fn is_there(&self, path: &str) -> Result<bool> {
        let answer = self.answer("GET", path, None)?;
        if matches!(answer.status, 404 | 410) {
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
        Ok(Api::new(&self.servers(), &self.connection()?)?)
    }

    /// All addresses, as the client library takes them.
    pub(crate) fn servers(&self) -> String {
        self.server.join(",")
    }

    /// How to connect.
    pub(crate) fn connection(&self) -> Result<Connection> {
        let connection = Connection::default();
        Ok(match self.key()? {
            Some(key) => connection.api_key(key),
            None => connection,
        })
    }

    fn key(&self) -> Result<Option<String>> {
        let Some(file) = &self.api_key_file else { return Ok(self.api_key.clone()) };
        let context = || format!("read the API key from {}", file.display());
        let mut text = String::new();
        let opened = std::fs::File::open(file).with_context(context)?;
        io::Read::read_to_string(&mut io::Read::take(opened, MAX_KEY_FILE_BYTES), &mut text).with_context(context)?;
        // As the server has it: `KEY` or `NAME:KEY`, and only the first line of it.
        let line = text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#'));
        let line = line.with_context(|| format!("there is no API key in {}", file.display()))?;
        Ok(Some(line.split_once(':').map_or(line, |(_, key)| key).to_owned()))
    }

    /// Becomes the client of a sandbox, wherever it is.
    pub(crate) async fn attach(&self, id: SandboxId, token: &Token, from: ResumeFrom) -> Result<Sandbox> {
        let known = token.token.clone().or_else(|| tokens::of(&id.to_string()));
        let attached = Sandbox::attach_with(&self.servers(), id, known.as_deref(), self.connection()?, from).await;
        attached.map_err(|error| match error {
            Error::Denied { message } if known.is_none() => anyhow!(
                "{message}\nNo token of this sandbox is known here. Give the one that its making told by --token or SANDBOXER_SANDBOX_TOKEN."
            ),
            error => self.explain(error),
        })
    }

    /// The whole id of the sandbox that begins like this; of one that is meant by its whole id nobody is asked.
    pub(crate) fn sandbox_id(&self, beginning: &str) -> Result<String> {
        if id(beginning)?.len() == FULL_ID {
            return Ok(beginning.to_owned());
        }
        let list = self.list("/v1/sandboxes")?;
        let found = beginning_with(&list, beginning);
        if !found.is_empty() {
            return only("sandbox", beginning, found);
        }
        // One that was saved is not listed, but whoever made it here has its token.
        let known: Vec<String> = tokens::ids().into_iter().filter(|id| id.starts_with(beginning)).collect();
        if known.is_empty() {
            bail!(
                "no sandbox has an id that begins with {beginning}; `sandboxer ls --saved` lists them; those that don't run have to be given by their whole id"
            );
        }
        only("sandbox", beginning, known)
    }

    /// The same, parsed.
    pub(crate) fn sandbox(&self, beginning: &str) -> Result<SandboxId> {
        self.sandbox_id(beginning)?.parse().map_err(|_| anyhow!("{beginning:?} is no id of a sandbox; `sandboxer ls` lists them"))
    }

    /// The whole id of the snapshot that begins like this.
    pub(crate) fn snapshot_id(&self, beginning: &str) -> Result<String> {
        match self.find_snapshot(beginning)? {
            Some(found) => Ok(found),
            None => bail!("no snapshot has the name {beginning:?} or an id that begins with it; `sandboxer snapshots list` lists them"),
        }
    }

    /// The id of the snapshot with this name, or with an id that begins like this. None: there is none.
    /// The server is not asked about a whole id.
    pub(crate) fn find_snapshot(&self, given: &str) -> Result<Option<String>> {
        if given.len() == FULL_ID && given.parse::<SandboxId>().is_ok() {
            return Ok(Some(given.to_owned()));
        }
        let list = self.list("/v1/snapshots")?;
        let named = named(&list, given);
        if !named.is_empty() {
            return only("snapshot", given, named).map(Some);
        }
        let found = if id(given).is_ok() { beginning_with(&list, given) } else { Vec::new() };
        if found.is_empty() { Ok(None) } else { only("snapshot", given, found).map(Some) }
    }

    /// Says what to do about it.
    pub(crate) fn explain(&self, error: Error) -> anyhow::Error {
        let hint = match &error {
            Error::Unavailable { .. } => {
                let where_ = self.server.join(" or ");
                format!("\nIs a server running at {where_}? Start one with `sandboxer serve`, or name one by --server or SANDBOXER_SERVER.")
            }
            Error::Denied { .. } if self.api_key.is_none() && self.api_key_file.is_none() => {
                "\nGive the server's key by --api-key-file, --api-key or SANDBOXER_API_KEY.".to_owned()
            }
            Error::NotFound { .. } => "\n`sandboxer ls` lists the sandboxes that run.".to_owned(),
            Error::InUse { .. } => {
                "\nAnother command or program is its client. `sandboxer kill` ends what that runs; files can be copied meanwhile."
                    .to_owned()
            }
            Error::Refused { code: ErrorCode::ExecutionInProgress, .. } => {
                "\n`sandboxer attach` shows what runs, `sandboxer kill` ends it.".to_owned()
            }
            Error::SandboxEnded { reason: sandboxer_client::Ended::Checkpointed, .. } => "\n`sandboxer attach` has it go on.".to_owned(),
            _ => String::new(),
        };
        anyhow!("{}{hint}", error.to_string().replace(" Take it by `resume`.", ""))
    }

    /// The same of an error that may be the client library's.
    pub(crate) fn explain_any(&self, error: anyhow::Error) -> anyhow::Error {
        error.downcast().map_or_else(|error| error, |error| self.explain(error))
    }

    /// All pages as one list.
    pub(crate) fn list(&self, path: &str) -> Result<Value> {
        let mut items = Vec::new();
        let mut cursor = String::new();
        let join = if path.contains('?') { '&' } else { '?' };
        loop {
            let page = self.ask("GET", &format!("{path}{join}limit=1000{cursor}"), None)?;
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

    /// Says of something that has no answer what was done: nothing to people, an object to programs.
    pub(crate) fn done(&self, object: &Value) -> Result<ExitCode> {
        self.print(object, |_| String::new())
    }
}

/// What a user can do about a refusal that the server itself can't know of.
fn hint(answer: &Answer) -> &'static str {
    let message = answer.body["error"]["message"].as_str().unwrap_or_default();
    match answer.body["error"]["code"].as_str().unwrap_or_default() {
        "gone" => "\n`sandboxer ls` lists the sandboxes that run.",
        "not_found" if message.contains("sandbox") => "\n`sandboxer ls` lists the sandboxes that run.",
        "not_found" if message.contains("filesystem") => "\n`sandboxer fs-snapshot ls` lists them.",
        "not_found" if message.contains("snapshot") => "\n`sandboxer snapshots list` lists them.",
        "execution_in_progress" => "\n`sandboxer attach` shows what runs, `sandboxer kill` ends it.",
        _ => "",
    }
}

fn beginning_with(list: &Value, beginning: &str) -> Vec<String> {
    let ids = list["items"].as_array().into_iter().flatten().map(|item| text(item, "id"));
    ids.filter(|id| id.starts_with(beginning)).map(str::to_owned).collect()
}

fn named(list: &Value, name: &str) -> Vec<String> {
    let items = list["items"].as_array().into_iter().flatten();
    items.filter(|item| item["meta"]["name"] == name).map(|item| text(item, "id").to_owned()).collect()
}

fn only(what: &str, beginning: &str, mut found: Vec<String>) -> Result<String> {
    match found.pop() {
        Some(one) if found.is_empty() => Ok(one),
        last => {
            found.extend(last);
            let (count, more) = (found.len(), if found.len() > MAX_NAMED { ", …" } else { "" });
            found.truncate(MAX_NAMED);
            let plural = if what.ends_with('x') { "es" } else { "s" };
            bail!(
                "{count} {what}{plural} have this name, or an id that begins with {beginning}: {}{more}. Give a whole id",
                found.join(", ")
            )
        }
    }
}

pub(crate) fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object[field].as_str().unwrap_or_default()
}

/// What a server says is printed to a terminal: nothing in it may steer that.
pub(crate) fn plain(value: &Value) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_that_could_be_several_is_refused_with_their_names() {
        let list = json!({ "items": [{ "id": "aab1" }, { "id": "aab2" }, { "id": "b" }] });
        let pick = |beginning| only("sandbox", beginning, beginning_with(&list, beginning));
        assert_eq!((pick("aab1").unwrap(), pick("b").unwrap()), ("aab1".to_owned(), "b".to_owned()));
        let list = json!({ "items": [{ "id": "aab1", "meta": { "name": "before" } }, { "id": "aab2", "meta": {} }] });
        assert_eq!(named(&list, "before"), ["aab1"]);
        assert!(named(&list, "aab1").is_empty() && named(&list, "").is_empty());
        let error = pick("aa").unwrap_err().to_string();
        assert!(error.contains("2 sandboxes") && error.contains("aab1, aab2"), "{error}");
        assert!(id("../x").is_err() && id("").is_err());
    }
}

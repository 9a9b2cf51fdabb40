//! `sandboxer create`: a sandbox of any kind.

use std::process::ExitCode;

use anyhow::Result;
use sandboxer_client::Options;
use serde_json::{Map, Value, json};

use crate::{
    ask::{Ask, pair, text},
    tokens,
    travel::working,
};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Without --profile the command makes a gVisor sandbox on the server's own machine. The options under the heading \"gVisor \
                        sandboxes\" describe that sandbox, and the server's defaults apply to what is left out. The sandbox stays until its \
                        idle time is over or `sandboxer rm` removes it."
)]
pub(crate) struct Args {
    #[command(flatten)]
    ask: Ask,
    #[command(flatten, next_help_heading = "gVisor sandboxes")]
    native: Native,
    /// What kind of sandbox; see `sandboxer profiles list`
    #[arg(long, value_name = "PROFILE", help_heading = "Other kinds")]
    profile: Option<String>,
    /// An input of the profile; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair, help_heading = "Other kinds")]
    input: Vec<(String, String)>,
    /// The placement host
    #[arg(long, value_name = "HOST", help_heading = "Other kinds")]
    host: Option<String>,
    /// A note that is kept with the sandbox; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    metadata: Vec<(String, String)>,
}

/// The options of `create` and `run` that say what is in a gVisor sandbox and what it may use.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Inside {
    /// Name or digest of the image to start from; see `sandboxer image ls`
    #[arg(long, value_name = "IMAGE")]
    image: Option<String>,
    /// The filesystem snapshot to start from; see `sandboxer fs-snapshot ls`
    #[arg(long, value_name = "NAME")]
    fs_snapshot: Option<String>,
    /// Where programs start
    #[arg(long, value_name = "DIR")]
    cwd: Option<String>,
    /// Most memory, in MiB
    #[arg(long, value_name = "MIB")]
    memory: Option<u64>,
    /// Processors' worth of time
    #[arg(long, value_name = "NUMBER")]
    cpus: Option<f64>,
    /// Most processes and threads
    #[arg(long, value_name = "NUMBER")]
    pids: Option<u32>,
    /// Most that is written to files, in MiB
    #[arg(long, value_name = "MIB")]
    disk: Option<u64>,
    /// A host that it may reach, such as example.com, *.example.org:443 or @pypi; may be given several times. Without any it has no network
    #[arg(long, value_name = "HOST")]
    allow: Vec<String>,
}

impl Inside {
    /// The same options, for a sandbox that the client library makes.
    pub(crate) fn on(&self, mut options: Options) -> Options {
        let Self { image, fs_snapshot, cwd, memory, cpus, pids, disk, allow } = self;
        if let Some(image) = image {
            options = options.image(image);
        }
        if let Some(name) = fs_snapshot {
            options = options.filesystem_snapshot(name);
        }
        if let Some(cwd) = cwd {
            options = options.cwd(cwd);
        }
        if let Some(memory) = memory {
            options = options.memory_mb(*memory);
        }
        if let Some(cpus) = cpus {
            options = options.cpus(*cpus);
        }
        if let Some(pids) = pids {
            options = options.pids(*pids);
        }
        if let Some(disk) = disk {
            options = options.disk_mb(*disk);
        }
        allow.iter().fold(options, |options, host| options.allow_host(host))
    }
}

#[derive(Debug, clap::Args)]
struct Native {
    #[command(flatten)]
    inside: Inside,
    /// Keep it on the server's volume: it is saved when it is idle or the server stops, and goes on at any server of the volume
    #[arg(long)]
    checkpoint: bool,
    /// Save it this often while it runs
    #[arg(long, value_name = "SECONDS", requires = "checkpoint")]
    autosave: Option<f64>,
    /// Another client may have it handed over while one is attached
    #[arg(long, requires = "checkpoint")]
    handoff: bool,
    /// When idle it is deleted, not saved
    #[arg(long, requires = "checkpoint")]
    delete_when_idle: bool,
    /// How long it stays without a client and with nothing running; 0: for ever
    #[arg(long, value_name = "SECONDS")]
    idle_timeout: Option<f64>,
    /// A variable of the environment of every program; may be given several times
    #[arg(long, short, value_name = "NAME=VALUE", value_parser = pair)]
    env: Vec<(String, String)>,
    /// Let output that nobody fetches go, the oldest first, in place of making the program wait
    #[arg(long)]
    drop_output: bool,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let body = Value::Object(body(args));
    let made = working("making the sandbox", || args.ask.ask("POST", "/v1/sandboxes", Some(&body)))?;
    tokens::keep(&made);
    args.ask.print(&made, |made| format!("{}\n", text(made, "id")))
}

pub(crate) fn texts(pairs: &[(String, String)]) -> Value {
    Value::Object(pairs.iter().map(|(name, value)| (name.clone(), json!(value))).collect())
}

fn body(args: &Args) -> Map<String, Value> {
    let Native { inside, checkpoint, autosave, handoff, delete_when_idle, idle_timeout, env, drop_output } = &args.native;
    let Inside { image, fs_snapshot, cwd, memory, cpus, pids, disk, allow } = inside;
    let limits: Map<String, Value> = [("memory_mb", json!(memory)), ("cpus", json!(cpus)), ("pids", json!(pids)), ("disk_mb", json!(disk))]
        .into_iter()
        .filter_map(said)
        .collect();
    let some = |there: bool, value: Value| if there { value } else { Value::Null };
    let fields = [
        ("profile", json!(args.profile)),
        ("inputs", some(!args.input.is_empty(), texts(&args.input))),
        ("host", json!(args.host)),
        ("metadata", some(!args.metadata.is_empty(), texts(&args.metadata))),
        ("image", json!(image)),
        ("filesystem_snapshot_name", json!(fs_snapshot)),
        ("enable_checkpoint", some(*checkpoint, json!(true))),
        ("autosave_seconds", json!(autosave)),
        ("enable_sandbox_handoff", some(*handoff, json!(true))),
        ("enable_idle_timeout_auto_checkpoint", some(*delete_when_idle, json!(false))),
        ("idle_timeout", json!(idle_timeout)),
        ("env", some(!env.is_empty(), texts(env))),
        ("cwd", json!(cwd)),
        ("limits", some(!limits.is_empty(), Value::Object(limits))),
        ("network", some(!allow.is_empty(), json!({ "allow": allow }))),
        ("detached_output", some(*drop_output, json!("drop_oldest"))),
    ];
    fields.into_iter().filter_map(said).collect()
}

fn said((name, value): (&str, Value)) -> Option<(String, Value)> {
    (!value.is_null()).then(|| (name.to_owned(), value))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parsed(line: &str) -> Value {
        Value::Object(body(&Line::parse_from(std::iter::once("create").chain(line.split_whitespace())).args))
    }

    #[test]
    fn what_is_not_said_is_the_servers_to_choose() {
        assert_eq!(parsed(""), json!({}));
    }

    #[test]
    fn every_option_has_its_field() {
        let line = "--image i --fs-snapshot f --checkpoint --autosave 0.5 --handoff --delete-when-idle --idle-timeout 60 -e A=b --env C=d=e --cwd /srv \
                    --memory 512 --cpus 1.5 --pids 64 --disk 100 --allow example.com --allow *.example.org:443 --drop-output --metadata k=v";
        let expected = json!({
            "image": "i", "filesystem_snapshot_name": "f", "enable_checkpoint": true, "autosave_seconds": 0.5, "enable_sandbox_handoff": true,
            "enable_idle_timeout_auto_checkpoint": false, "idle_timeout": 60.0, "env": { "A": "b", "C": "d=e" }, "cwd": "/srv",
            "limits": { "memory_mb": 512, "cpus": 1.5, "pids": 64, "disk_mb": 100 }, "network": { "allow": ["example.com", "*.example.org:443"] },
            "detached_output": "drop_oldest", "metadata": { "k": "v" },
        });
        assert_eq!(parsed(line), expected);
        assert_eq!(parsed("--profile p.x --input a=1 --host h"), json!({ "profile": "p.x", "inputs": { "a": "1" }, "host": "h" }));
        assert!(Line::try_parse_from(["create", "--autosave", "1"]).is_err(), "without a volume nothing is saved");
    }
}

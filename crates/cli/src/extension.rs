//! `sandboxer extension check`: for those who write an extension.

use std::{collections::BTreeMap, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context as _, Result, anyhow};
use clap::Subcommand;
use sandboxer_extensions::{
    Config, Hosts, Profile, SandboxExtension as _,
    conformance::{self, Check},
    external::{External, Program},
};
use serde_json::{Value, json};

use crate::workspaces::pair;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a program through everything that an extension promises; exits with 1 if it breaks a promise
    Check(CheckArgs),
}

#[derive(Debug, clap::Args)]
struct CheckArgs {
    /// A profile of the extension; without it one without inputs is made up
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// An input of the profile; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    input: Vec<(String, String)>,
    /// Directory with a hosts.toml; without it there is only the host "local"
    #[arg(long, value_name = "DIR")]
    config_dir: Option<PathBuf>,
    /// The host to check it on
    #[arg(long, value_name = "HOST", default_value = "local")]
    host: String,
    /// Seconds that a call may take
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    timeout: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The program
    #[arg(value_name = "PROGRAM")]
    program: PathBuf,
    /// Its arguments
    #[arg(value_name = "ARGUMENT", trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let Command::Check(args) = &args.command;
    let state = tempfile::tempdir().context("make a directory for its state")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let checks = runtime.block_on(check(args, state.path().to_owned()))?;
    let good = checks.iter().all(|check| check.fault.is_none());
    if args.json {
        println!("{}", json!({ "good": good, "checks": checks }));
    } else {
        for check in &checks {
            match &check.fault {
                None => println!("ok    {}", check.promise),
                Some(fault) => println!("FAIL  {}: {fault}", check.promise),
            }
        }
        println!("{}", if good { "It does what an extension must." } else { "It does not do what an extension must." });
    }
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn check(args: &CheckArgs, state_dir: PathBuf) -> Result<Vec<Check>> {
    let path = std::path::absolute(&args.program).with_context(|| format!("find {}", args.program.display()))?;
    let within = Duration::from_secs(args.timeout.max(1));
    let program = Program { path, args: args.arguments.clone(), env: BTreeMap::new(), state_dir: state_dir.clone(), within };
    let extension = match External::introduce(program).await {
        Ok(extension) => extension,
        Err(error) => return Ok(vec![Check { promise: "it says who it is", fault: Some(error.message) }]),
    };
    let profile = match &args.profile {
        Some(file) => {
            let text = std::fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
            Profile::parse(&text).map_err(|faults| anyhow!("{}: {faults}", file.display()))?
        }
        None => {
            let text =
                format!("name = \"profile.check\"\nextension = \"{}\"\ndescription = \"A check\"\nsnapshots = true\n", extension.name());
            Profile::parse(&text).map_err(|faults| anyhow!("{faults}"))?
        }
    };
    let given: BTreeMap<String, Value> = args.input.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
    let inputs = profile.resolve(&given).map_err(|error| anyhow!("{error}"))?;
    let hosts = match &args.config_dir {
        Some(dir) => Config::load(Some(dir), &state_dir).map_err(|faults| anyhow!("{}: {faults}", dir.display()))?.hosts,
        None => Hosts::load(None).map_err(|faults| anyhow!("{faults}"))?,
    };
    let host = args.host.parse().ok().and_then(|name| hosts.get(&name)).with_context(|| format!("there is no host {:?}", args.host))?;
    let mut checks = vec![Check { promise: "it says who it is", fault: None }];
    checks.extend(conformance::check_program(&extension).await);
    checks.extend(conformance::check(&extension, &profile, &inputs, host).await);
    Ok(checks)
}

//! `sandboxer shell`: an interactive shell in a sandbox, on this terminal.

use std::{
    io::{self, IsTerminal as _},
    process::ExitCode,
};

use anyhow::Result;
use sandboxer_client::{Execution, Options, ResumeFrom, Sandbox};

use crate::{
    EXIT_USAGE,
    ask::{Ask, Token, pair},
    exec::{Rewinds, tell_left, to_its_end},
    passing::{Ending, Leave, block_on, failed},
    run::{CLIENT_GONE_TIMEOUT, IDLE_TIMEOUT, OPEN_WITHIN, remove},
    terminal,
};

/// A terminal that the image knows nothing of is one that it does.
const SHELL: &str = "if command -v infocmp >/dev/null && ! infocmp >/dev/null 2>&1; then export TERM=xterm-256color; fi\nexec bash -l\n";

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Every key reaches the shell, Ctrl-C and Ctrl-Z too. Typed at the beginning of a line, ~. leaves: a shell of a sandbox that is there \
                        goes on, and `sandboxer attach` comes back to it. Exit code: the shell's own; 125 if there could be none, 64 for a wrong \
                        command line. A server that is restarted or hands the sandbox over is a short wait and nothing else."
)]
pub(crate) struct Args {
    #[command(flatten)]
    ask: Ask,
    #[command(flatten)]
    token: Token,
    /// Of a new sandbox: name or digest of its image
    #[arg(long, value_name = "IMAGE", conflicts_with = "id")]
    image: Option<String>,
    /// Of a new sandbox: the filesystem snapshot that it starts from
    #[arg(long, value_name = "NAME", conflicts_with = "id")]
    fs_snapshot: Option<String>,
    /// Of a new sandbox: a host that it may reach; may be given several times
    #[arg(long, value_name = "HOST", conflicts_with = "id")]
    allow: Vec<String>,
    /// A variable of its environment; may be given several times
    #[arg(long, short, value_name = "NAME=VALUE", value_parser = pair)]
    env: Vec<(String, String)>,
    /// The sandbox: its id, or the beginning of it; without one, a new sandbox that is removed afterwards
    #[arg(value_name = "SANDBOX_ID")]
    id: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        eprintln!(
            "sandboxer: a shell needs a terminal, and this is none. For a script: sandboxer run FILE.sh, or sandboxer exec ID -- bash < FILE.sh"
        );
        return Ok(ExitCode::from(EXIT_USAGE));
    }
    if args.ask.json {
        eprintln!("sandboxer: a shell is for people: it prints no JSON");
        return Ok(ExitCode::from(EXIT_USAGE));
    }
    let id = match args.id.as_deref().map(|id| args.ask.sandbox(id)).transpose() {
        Ok(id) => id,
        Err(error) => return Ok(failed(&error)),
    };
    block_on(async move {
        match id {
            Some(id) => {
                let sandbox = args.ask.attach(id, &args.token, ResumeFrom::default()).await?;
                let result = in_sandbox(args, &sandbox).await;
                if matches!(result, Ok(Ending::Left(_))) {
                    tell_left(id);
                }
                sandbox.close().await;
                result.map(|ending| ending.code())
            }
            None => {
                let sandbox = make(args).await?;
                let result = in_sandbox(args, &sandbox).await;
                remove(sandbox, result.is_err()).await;
                result.map(|ending| ending.code())
            }
        }
    })
}

async fn make(args: &Args) -> Result<Sandbox> {
    let options = Options::default().connection(args.ask.connection()?.open_within(OPEN_WITHIN));
    let mut options = options.idle_timeout(IDLE_TIMEOUT).client_gone_timeout(CLIENT_GONE_TIMEOUT);
    if let Some(image) = &args.image {
        options = options.image(image);
    }
    if let Some(name) = &args.fs_snapshot {
        options = options.filesystem_snapshot(name);
    }
    for host in &args.allow {
        options = options.allow_host(host);
    }
    Sandbox::create(&args.ask.servers(), options).await.map_err(|error| args.ask.explain(error))
}

async fn in_sandbox(args: &Args, sandbox: &Sandbox) -> Result<Ending> {
    let mut leave = Leave::new()?;
    let (rows, cols) = terminal::size().unwrap_or((24, 80));
    let mut execution = terminal::about_here(Execution::bash(SHELL)).raw(true).tty(rows, cols);
    for (name, value) in &args.env {
        execution = execution.env(name, value);
    }
    let run = sandbox.run(execution).await.map_err(|error| args.ask.explain(error))?;
    let rewinds = Rewinds::new(sandbox, &run, None);
    let ended = to_its_end(run, rewinds, true, true, &mut leave).await;
    ended.map(|(ending, _run)| ending).map_err(|error| args.ask.explain_any(error))
}

//! `attach`, `logs` and `kill`: what runs in a sandbox, whoever began it.

use std::{
    io::{self, IsTerminal as _},
    process::ExitCode,
};

use anyhow::Result;
use sandboxer_client::{ResumeFrom, Run, Sandbox};
use serde_json::{Value, json};

use crate::{
    EXIT_USAGE,
    ask::{Ask, Token, text},
    exec::{Rewinds, tell_left, to_its_end},
    input::Input,
    passing::{Ending, Leave, Others, block_on, collect, failed, write},
};

const NOTHING_RUNS: &str = "nothing runs in this sandbox. Begin something: sandboxer exec, or sandboxer shell";

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Shows the output that no client has had yet, and what comes. Exit code: the program's own, or 128 and the number of the signal that ended \
                        it; 125 if there is none. Ctrl-C interrupts the program, a second one kills it; Ctrl-\\ leaves it running. A program with a \
                        terminal gets this one, with every key: there, ~. at the beginning of a line leaves."
)]
pub(crate) struct AttachArgs {
    #[command(flatten)]
    ask: Ask,
    #[command(flatten)]
    token: Token,
    /// Only watch: keep this command's input to itself
    #[arg(long, short)]
    no_stdin: bool,
    /// The sandbox: its id, or the beginning of it
    #[arg(value_name = "SANDBOX_ID")]
    id: String,
}

#[derive(Debug, clap::Args)]
#[command(
    after_help = "A sandbox holds the output that no client has fetched, up to 8 MiB a stream; what exec, shell or attach have shown is not held any \
                        longer. Looking takes nothing away: it is there for the next logs or attach. While a client is attached, the output is its."
)]
pub(crate) struct LogsArgs {
    #[command(flatten)]
    ask: Ask,
    #[command(flatten)]
    token: Token,
    /// Stay until the program ends, and print what comes
    #[arg(long, short)]
    follow: bool,
    /// The sandbox: its id, or the beginning of it
    #[arg(value_name = "SANDBOX_ID")]
    id: String,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "The sandbox stays: `sandboxer rm` removes it. Whoever is attached sees the program end.")]
pub(crate) struct KillArgs {
    #[command(flatten)]
    ask: Ask,
    /// Only send the program this signal, such as SIGTERM; without it, it and everything that it started are killed
    #[arg(long, short, value_name = "SIGNAL")]
    signal: Option<String>,
    /// The sandbox: its id, or the beginning of it
    #[arg(value_name = "SANDBOX_ID")]
    id: String,
}

pub(crate) fn attach(args: &AttachArgs) -> Result<ExitCode> {
    let id = match args.ask.sandbox(&args.id) {
        Ok(id) => id,
        Err(error) => return Ok(failed(&error)),
    };
    block_on(async move {
        let sandbox = args.ask.attach(id, &args.token, ResumeFrom::default()).await?;
        let result = stay(args, &sandbox).await;
        sandbox.close().await;
        result
    })
}

async fn stay(args: &AttachArgs, sandbox: &Sandbox) -> Result<ExitCode> {
    let Some(mut run) = sandbox.resume().await.map_err(|error| args.ask.explain(error))? else {
        return Ok(failed(&anyhow::anyhow!(NOTHING_RUNS)));
    };
    let mut leave = Leave::new()?;
    if args.ask.json {
        let input = (!args.no_stdin).then(Input::begin);
        let _others = Others::begin(&mut run, input.as_ref())?;
        return tokio::select! {
            code = leave.asked() => Ok(ExitCode::from(code)),
            collected = collect(sandbox, &mut run) => collected,
        };
    }
    let on_terminal = run.has_terminal() && !args.no_stdin && io::stdin().is_terminal() && io::stdout().is_terminal();
    let rewinds = Rewinds::new(sandbox, &run, None);
    let ending = to_its_end(run, rewinds, !args.no_stdin, on_terminal, &mut leave).await;
    let (ending, _run) = ending.map_err(|error| args.ask.explain_any(error))?;
    if matches!(ending, Ending::Left(_) | Ending::BrokenPipe) {
        tell_left(sandbox.id());
    }
    Ok(ending.code())
}

pub(crate) fn logs(args: &LogsArgs) -> Result<ExitCode> {
    if args.follow && args.ask.json {
        eprintln!("sandboxer: --json prints one object at the end: it does not follow");
        return Ok(ExitCode::from(EXIT_USAGE));
    }
    let id = args.ask.sandbox(&args.id)?;
    block_on(async move {
        let sandbox = args.ask.attach(id, &args.token, ResumeFrom::peek()).await?;
        let result = look(args, &sandbox).await;
        sandbox.close().await;
        result
    })
}

async fn look(args: &LogsArgs, sandbox: &Sandbox) -> Result<ExitCode> {
    let found = sandbox.resume().await.map_err(|error| args.ask.explain(error))?;
    let Some(mut run) = found else {
        let nothing = json!({ "sandbox_id": sandbox.id().to_string(), "execution_id": null, "stdout": "", "stderr": "" });
        return args.ask.done(&nothing);
    };
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    while args.follow || !is_shown(&run) {
        let Some(piece) = run.next().await else { break };
        if !args.ask.json {
            match write(&piece) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(Ending::BrokenPipe.code()),
                Err(error) => return Err(error.into()),
            }
            continue;
        }
        let held = if piece.stream == sandboxer_client::OutputStream::Stdout { &mut stdout } else { &mut stderr };
        held.extend_from_slice(&piece.data);
    }
    if args.follow {
        // How the program ended is not how this command did.
        run.wait().await.map_err(|error| args.ask.explain(error))?;
    }
    let (id, lossy) = (run.id().to_string(), |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned());
    let told = json!({ "sandbox_id": sandbox.id().to_string(), "execution_id": id, "stdout": lossy(&stdout), "stderr": lossy(&stderr) });
    args.ask.done(&told)
}

/// All that was held when this command came is here.
fn is_shown(run: &Run) -> bool {
    let (stdout, stderr) = run.offsets();
    // A server that does not say how much there is: whatever comes, up to the end.
    run.held_to().is_some_and(|(held_stdout, held_stderr)| stdout >= held_stdout && stderr >= held_stderr)
}

pub(crate) fn kill(args: &KillArgs) -> Result<ExitCode> {
    let id = args.ask.sandbox_id(&args.id)?;
    let body = args.signal.as_ref().map(|signal| json!({ "signal": signal }));
    let killed: Value = args.ask.ask("POST", &format!("/v1/sandboxes/{id}/executions/kill"), body.as_ref())?;
    args.ask.print(&killed, |killed| format!("{}\n", text(killed, "execution_id")))
}

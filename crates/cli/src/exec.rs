//! `sandboxer exec`: a program in a sandbox that is there, as if it ran here.

use std::{
    ffi::{OsStr, OsString},
    io::{self, IsTerminal as _},
    os::unix::ffi::OsStrExt as _,
    process::ExitCode,
    time::Duration,
};

use anyhow::{Result, anyhow, bail};
use sandboxer_client::{Error, Execution, ExecutionId, ResumeFrom, Run, Sandbox, SandboxId};
use serde_json::json;
use tokio::time::timeout;

use crate::{
    ask::{Ask, Token, pair},
    input::Input,
    passing::{Ending, Leave, Others, block_on, collect, failed, pass_on, tell_timeout},
    run::{no_language, program, seconds},
    terminal::{self, Raw},
};

/// How often a program is run again that was lost. Beyond it, servers fail too often for it to come to its end.
const MAX_RERUNS: usize = 10;
/// How long a program may take to end by SIGPIPE before it is killed.
const SIGPIPE_ENDS_WITHIN: Duration = Duration::from_secs(2);
/// How long this command waits for the end of a program that it killed.
const KILL_ENDS_WITHIN: Duration = Duration::from_secs(10);
/// The size of a terminal that nobody looks at.
const USUAL_SIZE: (u16, u16) = (24, 80);

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Either CODE with its language, or a command behind --, whose arguments reach it exactly as they are: no shell reads them.\n\
                        Exit code: the program's own, or 128 and the number of the signal that ended it; 125 if it could not be run, 64 for a wrong \
                        command line. Its input is this command's. Ctrl-C interrupts the program, a second one kills it; Ctrl-\\ leaves it running, \
                        for `sandboxer attach`. A server that is restarted or hands the sandbox over is a short wait and nothing else. If a server fails, a sandbox with \
                        checkpoints comes back from its last save. A program that began later is lost with the time that was not saved: this command \
                        says so and exits with 125, or runs the program again with --rerun. If the reader of this command's output goes away, as with `| head`, the \
                        program gets SIGPIPE and is killed if it goes on, and this command exits with 141."
)]
pub(crate) struct Args {
    #[command(flatten)]
    ask: Ask,
    #[command(flatten)]
    token: Token,
    /// The language of CODE: python or bash; not needed for a file that ends in .py or .sh
    #[arg(long, short, value_name = "LANGUAGE", conflicts_with = "command")]
    language: Option<String>,
    /// Give it a terminal: this command's own, if it has one. All its output is then on the standard output
    #[arg(long, short, conflicts_with_all = ["detach", "json"])]
    tty: bool,
    /// Start it and leave: print the execution's id. `logs`, `attach` and `kill` find it; beyond 8 MiB of output that nobody fetches it waits
    #[arg(long, short)]
    detach: bool,
    /// Give it no input: it is at its end from the start
    #[arg(long, short)]
    no_stdin: bool,
    /// Run the program again, from its beginning, if a server failed and the sandbox came back from a save of before the program
    /// began. It gets no input
    #[arg(long, conflicts_with_all = ["tty", "detach"])]
    rerun: bool,
    /// Kill the program after this time
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
    /// A variable of its environment; may be given several times
    #[arg(long, short, value_name = "NAME=VALUE", value_parser = pair)]
    env: Vec<(String, String)>,
    /// The directory in which it starts
    #[arg(long, value_name = "DIR")]
    cwd: Option<String>,
    /// The sandbox: its id, or the beginning of it
    #[arg(value_name = "SANDBOX_ID")]
    id: String,
    /// The program itself, a file (its name ends in .py or .sh or has a slash in it), or - for the standard input
    #[arg(value_name = "CODE|FILE|-", allow_hyphen_values = true, required_unless_present = "command", conflicts_with = "command")]
    program: Option<String>,
    /// A command of the sandbox and its arguments
    #[arg(value_name = "COMMAND", last = true)]
    command: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let (language, code) = match &args.program {
        None => ("bash".to_owned(), command_line(&args.command)?),
        Some(text) => match program(text, args.language.as_deref()) {
            Ok(Some(program)) => program,
            Ok(None) => {
                let hint = "For a command of the sandbox with its arguments, put -- before it: sandboxer exec ID -- ls -l";
                let code = no_language();
                eprintln!("{hint}");
                return Ok(code);
            }
            Err(error) => return Ok(failed(&error)),
        },
    };
    let id = match args.ask.sandbox(&args.id) {
        Ok(id) => id,
        Err(error) => return Ok(failed(&error)),
    };
    block_on(execute(args, id, language, code))
}

/// A bash program that becomes this command. bash's own `exec` looks for it, and says what is wrong with it: 127 not there, 126 not to be run.
fn command_line(command: &[OsString]) -> Result<String> {
    let words = command.iter().map(|word| quoted(word)).collect::<Result<Vec<_>>>()?;
    Ok(format!("exec -- {}\n", words.join(" ")))
}

/// As bash reads it back, byte by byte.
fn quoted(word: &OsStr) -> Result<String> {
    let bytes = word.as_bytes();
    if bytes.contains(&0) {
        bail!("an argument can't contain a NUL");
    }
    Ok(match std::str::from_utf8(bytes) {
        Ok(text) => shlex::try_quote(text)?.into_owned(),
        // The program travels as text.
        Err(_) => format!("$'{}'", bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect::<String>()),
    })
}

async fn execute(args: &Args, id: SandboxId, language: String, code: String) -> Result<ExitCode> {
    let sandbox = args.ask.attach(id, &args.token, ResumeFrom::default()).await?;
    let result = in_sandbox(args, &sandbox, language, code).await;
    sandbox.close().await;
    result
}

async fn in_sandbox(args: &Args, sandbox: &Sandbox, language: String, code: String) -> Result<ExitCode> {
    let reads_program = args.program.as_deref() == Some("-");
    let feed = !args.no_stdin && !args.rerun && !reads_program && !args.detach;
    let on_terminal = args.tty && feed && io::stdin().is_terminal();
    // Output is passed on as it is, whatever it is.
    let mut execution = Execution::new(language, code).raw(true).stdin(feed);
    for (name, value) in &args.env {
        execution = execution.env(name, value);
    }
    if let Some(cwd) = &args.cwd {
        execution = execution.cwd(cwd);
    }
    if let Some(timeout) = args.timeout {
        execution = execution.timeout(timeout);
    }
    if args.detach {
        execution = execution.for_others();
    }
    if args.tty {
        let (rows, cols) = terminal::size().unwrap_or(USUAL_SIZE);
        execution = terminal::about_here(execution).tty(rows, cols);
    }
    let again = args.rerun.then(|| execution.clone());
    let mut run = sandbox.run(execution).await.map_err(|error| args.ask.explain(error))?;
    if args.detach {
        let told = json!({ "sandbox_id": sandbox.id().to_string(), "execution_id": run.id().to_string() });
        return args.ask.print(&told, |told| format!("{}\n", told["execution_id"].as_str().unwrap_or_default()));
    }
    let mut leave = Leave::new()?;
    if args.ask.json {
        let input = feed.then(Input::begin);
        let mut rewinds = Rewinds::new(sandbox, &run, again);
        loop {
            let others = Others::begin(&mut run, input.as_ref())?;
            let collected = tokio::select! {
                code = leave.asked() => return Ok(ExitCode::from(code)),
                collected = collect(sandbox, &mut run) => collected,
            };
            drop(others);
            match collected {
                Err(error) => run = rewinds.go_on(error).await.map_err(|error| args.ask.explain_any(error))?,
                collected => return collected,
            }
        }
    }
    let rewinds = Rewinds::new(sandbox, &run, again);
    let (ending, mut run) = to_its_end(run, rewinds, feed, on_terminal, &mut leave).await.map_err(|error| args.ask.explain_any(error))?;
    match &ending {
        Ending::Exit(exit) => tell_timeout(exit, args.timeout),
        Ending::Left(_) => tell_left(sandbox.id()),
        Ending::BrokenPipe => end_unread(&mut run).await,
    }
    Ok(ending.code())
}

/// Ends a program whose output nothing reads any longer: it gets the signal that a program in a local pipeline gets.
async fn end_unread(run: &mut Run) {
    eprintln!("sandboxer: nothing reads the output any longer, so the program gets SIGPIPE");
    // An error means that the program has ended already.
    let _ = run.signal("SIGPIPE").await;
    if timeout(SIGPIPE_ENDS_WITHIN, run.wait()).await.is_err() {
        eprintln!("sandboxer: the program goes on after SIGPIPE, so it is killed");
        let _ = run.kill().await;
        if timeout(KILL_ENDS_WITHIN, run.wait()).await.is_err() {
            eprintln!("sandboxer: the program has not ended yet");
        }
    }
}

pub(crate) fn tell_left(id: SandboxId) {
    eprintln!("sandboxer: the program goes on. See it again: sandboxer attach {id}   End it: sandboxer kill {id}");
}

/// How this command goes on with a program whose sandbox comes back from its last save.
pub(crate) struct Rewinds<'a> {
    sandbox: &'a Sandbox,
    /// The program that this command stays with.
    id: ExecutionId,
    /// The program to run if that one was lost.
    again: Option<Execution>,
    reruns: usize,
}

impl<'a> Rewinds<'a> {
    pub(crate) fn new(sandbox: &'a Sandbox, run: &Run, again: Option<Execution>) -> Self {
        Self { sandbox, id: run.id().clone(), again, reruns: 0 }
    }

    /// The run to go on with after this error: the same program at an earlier moment, or the program once more.
    async fn go_on(&mut self, error: anyhow::Error) -> Result<Run> {
        if !matches!(error.downcast_ref::<Error>(), Some(Error::Rewound { .. })) {
            return Err(error);
        }
        let lost = match self.sandbox.resume_execution(&self.id).await {
            Ok(run) => {
                eprintln!(
                    "sandboxer: the sandbox came back from its last save: the program goes on from there, and what it did since then is undone"
                );
                return Ok(run);
            }
            Err(lost @ Error::ExecutionLost { .. }) => lost,
            Err(error) => return Err(error.into()),
        };
        let told = "the sandbox came back from a save of before the program began, so the program and what it did are lost";
        match &self.again {
            Some(execution) if self.reruns < MAX_RERUNS => {
                self.reruns += 1;
                eprintln!("sandboxer: {told}; running it again");
                let run = self.sandbox.run(execution.clone()).await?;
                self.id = run.id().clone();
                Ok(run)
            }
            Some(_) => Err(anyhow!("{told}; it was run {} times. {lost}", self.reruns + 1)),
            None => Err(anyhow!("{told}. {lost}")),
        }
    }
}

/// Stays with a program to its end, also where its sandbox comes back from its last save.
pub(crate) async fn to_its_end(
    run: Run,
    mut rewinds: Rewinds<'_>,
    feed: bool,
    on_terminal: bool,
    leave: &mut Leave,
) -> Result<(Ending, Run)> {
    let (mut run, mut input) = (run, None);
    loop {
        let ended = if on_terminal {
            let raw = Raw::enter()?;
            let ended = terminal::pass_on(&mut run, input.get_or_insert_with(Input::begin), leave).await;
            drop(raw);
            ended
        } else {
            pass_on(&mut run, feed.then(|| &*input.get_or_insert_with(Input::begin)), leave).await
        };
        match ended {
            Ok(ending) => return Ok((ending, run)),
            Err(error) => run = rewinds.go_on(error).await?,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::ffi::OsStringExt as _, process::Command};

    use super::*;

    /// What bash makes of it.
    fn as_bash_reads_it(words: &[OsString]) -> Vec<u8> {
        let line = command_line(words).unwrap();
        let output = Command::new("bash").args(["-c", &line]).env("LC_ALL", "C.UTF-8").output().unwrap();
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    }

    #[test]
    fn every_argument_is_read_back_byte_by_byte() {
        let every_byte = OsString::from_vec((1..=255).collect());
        let every_char = OsString::from((1..128_u8).map(char::from).collect::<String>());
        let mut arguments: Vec<OsString> =
            ["", " ", "a b", "'", "\"", "\\", "$HOME", "`id`", "!x", "-n", "--", "a\nb\n", "\n", "*", "~", "ü💥", "#", "a=b", "{a,b}"]
                .map(OsString::from)
                .into();
        arguments.extend([every_byte, every_char, OsString::from_vec(b"\xffabc123".to_vec())]);
        arguments.extend((1..=255_u8).map(|byte| OsString::from_vec(vec![byte])));
        let mut words = vec![OsString::from("printf"), OsString::from("%s\\0")];
        words.extend(arguments.iter().cloned());
        let expected: Vec<u8> = arguments.iter().flat_map(|argument| [argument.as_bytes(), b"\0"].concat()).collect();
        assert_eq!(as_bash_reads_it(&words), expected);
    }

    #[test]
    fn a_command_that_begins_with_a_hyphen_is_no_option_of_bash() {
        let line = command_line(&["-c".into(), "true".into()]).unwrap();
        let output = Command::new("bash").args(["-c", &line]).output().unwrap();
        assert_eq!(output.status.code(), Some(127), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

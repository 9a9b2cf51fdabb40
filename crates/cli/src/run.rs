//! `sandboxer run`: one program in a sandbox of its own, as if it ran here.

use std::{
    io::{self, IsTerminal as _, Read as _, Write as _},
    path::Path,
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, bail};
use sandboxer_client::{Connection, Controller, Error, Execution, Exit, Options, OutputStream, Piece, Run, Sandbox, Stdin};
use tokio::{
    io::AsyncReadExt as _,
    signal::unix::{Signal, SignalKind, signal},
    time::timeout,
};

use crate::EXIT_USAGE;

/// What this command itself exits with when it fails, so that it can be told from the program's own code.
const EXIT_OWN_FAILURE: u8 = 125;
/// 128 and SIGPIPE: whoever read the output is gone.
const EXIT_BROKEN_PIPE: u8 = 141;
/// A sandbox whose command was killed is not kept for long, but for longer than the command tries to come back.
const IDLE_TIMEOUT: Duration = Duration::from_secs(180);
/// A server that is not there is told soon.
const OPEN_WITHIN: Duration = Duration::from_secs(2);
const REMOVE_WITHIN: Duration = Duration::from_secs(5);
/// What `--json` holds of each stream.
const MAX_COLLECTED_BYTES: usize = 16 * 1024 * 1024;
const INPUT_BYTES: usize = 64 * 1024;

/// Run a program in a throwaway sandbox and pass on its output and its exit code.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit code: the program's own, or 128 and the number of the signal that ended it; 125 if it could not be run, \
                        64 for a wrong command line. Its input is this command's, unless that is a terminal. Ctrl-C interrupts the \
                        program; a second one kills it.")]
pub(crate) struct RunArgs {
    /// The language of the program: python or bash; not needed for a file that ends in .py or .sh
    #[arg(long, short, value_name = "LANGUAGE")]
    language: Option<String>,
    /// Address of the server
    #[arg(long, value_name = "URL", env = "SANDBOXER_SERVER", default_value = "http://127.0.0.1:8080")]
    server: String,
    /// Key that the server asks for
    #[arg(long, value_name = "KEY", env = "SANDBOXER_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Kill the program after this time
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
    /// A variable of its environment; may be given several times
    #[arg(long, short, value_name = "NAME=VALUE", value_parser = variable)]
    env: Vec<(String, String)>,
    /// Print one JSON object at the end in place of the output
    #[arg(long)]
    json: bool,
    /// The program itself, a file (its name ends in .py or .sh or has a slash in it), or - for the standard input
    #[arg(value_name = "CODE|FILE|-", allow_hyphen_values = true)]
    program: String,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().map_err(|error| error.to_string())?;
    let duration = Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())?;
    if duration.is_zero() { Err("more than zero".into()) } else { Ok(duration) }
}

fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("NAME=VALUE".into()),
    }
}

/// Where the program comes from.
#[derive(Debug, PartialEq, Eq)]
enum Source<'a> {
    Code(&'a str),
    File(&'a Path),
    Stdin,
}

fn source(program: &str) -> Source<'_> {
    if program == "-" {
        return Source::Stdin;
    }
    let path = Path::new(program);
    let one_word = !program.contains(char::is_whitespace) && !program.contains(['(', ';', '"', '\'']);
    let named = suffix_language(path).is_some() && one_word;
    if named || (program.contains('/') && path.is_file()) { Source::File(path) } else { Source::Code(program) }
}

fn suffix_language(path: &Path) -> Option<&'static str> {
    match path.extension()?.to_str()? {
        "py" => Some("python"),
        "sh" | "bash" => Some("bash"),
        _ => None,
    }
}

/// The program and its language; none: the command line does not tell.
fn program(args: &RunArgs) -> anyhow::Result<Option<(String, String)>> {
    let source = source(&args.program);
    let language = match (&args.language, &source) {
        (Some(language), _) => language.clone(),
        (None, Source::File(path)) => match suffix_language(path) {
            Some(language) => language.to_owned(),
            None => return Ok(None),
        },
        (None, Source::Code(_) | Source::Stdin) => return Ok(None),
    };
    let code = match source {
        Source::Code(code) => code.to_owned(),
        Source::File(path) => std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?,
        Source::Stdin => {
            let mut code = String::new();
            io::stdin().lock().read_to_string(&mut code).context("read the program from the standard input")?;
            code
        }
    };
    Ok(Some((language, code)))
}

pub(crate) fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let (language, code) = match program(args) {
        Ok(Some(program)) => program,
        Ok(None) => {
            eprintln!(
                "sandboxer: which language is this? Say --language python or --language bash, or name a file that ends in .py or .sh."
            );
            return Ok(ExitCode::from(EXIT_USAGE));
        }
        Err(error) => return Ok(failed(&error)),
    };
    // One thread for the connection; this one writes the output, and waits with it.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let code = runtime.block_on(execute(args, language, code)).unwrap_or_else(|error| failed(&error));
    // Nobody waits for input that may never come.
    runtime.shutdown_background();
    Ok(code)
}

fn failed(error: &anyhow::Error) -> ExitCode {
    eprintln!("sandboxer: {error:#}");
    ExitCode::from(EXIT_OWN_FAILURE)
}

async fn execute(args: &RunArgs, language: String, code: String) -> anyhow::Result<ExitCode> {
    // From here on they go to the program.
    let interrupts = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let feed = args.program != "-" && !io::stdin().is_terminal();
    let mut connection = Connection::default().open_within(OPEN_WITHIN);
    if let Some(key) = &args.api_key {
        connection = connection.api_key(key);
    }
    let options = Options::default().connection(connection).idle_timeout(IDLE_TIMEOUT);
    let sandbox = match Sandbox::create(&args.server, options).await {
        Ok(sandbox) => sandbox,
        Err(error) => bail!("{error}{}", hint(&error, args)),
    };
    let result = tokio::select! {
        result = in_sandbox(args, &sandbox, language, code, feed, interrupts) => result,
        _ = terminate.recv() => Ok(ExitCode::from(128 + 15)),
    };
    match timeout(REMOVE_WITHIN, sandbox.kill_sandbox()).await {
        Ok(Ok(())) => {}
        // What went wrong before is what counts.
        _ if result.is_err() => {}
        Ok(Err(error)) => eprintln!("sandboxer: the sandbox was not removed and goes when its idle time is over: {error}"),
        Err(_) => eprintln!("sandboxer: the sandbox was not removed in time and goes when its idle time is over"),
    }
    result
}

fn hint(error: &Error, args: &RunArgs) -> String {
    match error {
        Error::Unavailable { .. } => {
            format!("\nIs a server running at {}? Start one with `sandboxer serve`, or name one by --server.", args.server)
        }
        Error::Denied { .. } if args.api_key.is_none() => "\nGive the server's key by --api-key or SANDBOXER_API_KEY.".to_owned(),
        _ => String::new(),
    }
}

async fn in_sandbox(
    args: &RunArgs,
    sandbox: &Sandbox,
    language: String,
    code: String,
    feed: bool,
    interrupts: Signal,
) -> anyhow::Result<ExitCode> {
    // Output is passed on as it is, whatever it is.
    let mut execution = Execution::new(language, code).raw(true).stdin(feed);
    for (name, value) in &args.env {
        execution = execution.env(name, value);
    }
    if let Some(timeout) = args.timeout {
        execution = execution.timeout(timeout);
    }
    let mut run = sandbox.run(execution).await?;
    let interrupting = tokio::spawn(interrupt(run.controller(), interrupts));
    let feeding = feed.then(|| tokio::spawn(feed_input(run.take_stdin())));
    let result = if args.json { collect(sandbox, run).await } else { pass_on(&mut run, args).await };
    interrupting.abort();
    if let Some(feeding) = feeding {
        feeding.abort();
    }
    result
}

/// The first Ctrl-C is the program's; the second ends it.
async fn interrupt(controller: Controller, mut interrupts: Signal) {
    if interrupts.recv().await.is_some() {
        // It may have ended already.
        let _ = controller.signal("SIGINT").await;
    }
    while interrupts.recv().await.is_some() {
        let _ = controller.kill().await;
    }
}

/// Passes on this command's input until either side has enough.
async fn feed_input(mut stdin: Stdin) {
    let mut input = tokio::io::stdin();
    let mut buffer = vec![0; INPUT_BYTES];
    loop {
        match input.read(&mut buffer).await {
            Ok(count @ 1..) if stdin.write(&buffer[..count]).await.is_ok() => {}
            Ok(1..) => return,
            Ok(0) => break,
            Err(error) => {
                eprintln!("sandboxer: reading the standard input: {error}");
                break;
            }
        }
    }
    // A program that has ended needs no end of its input.
    let _ = stdin.eof().await;
}

async fn pass_on(run: &mut Run, args: &RunArgs) -> anyhow::Result<ExitCode> {
    while let Some(piece) = run.next().await {
        match write(&piece) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(ExitCode::from(EXIT_BROKEN_PIPE)),
            Err(error) => return Err(error).context("write the program's output"),
        }
    }
    let exit = run.wait().await?;
    if exit.timed_out {
        let seconds = args.timeout.unwrap_or(exit.duration).as_secs_f64();
        eprintln!("sandboxer: the program was killed after its {seconds} s were over");
    }
    Ok(ExitCode::from(exit.shell_code()))
}

fn write(piece: &Piece) -> io::Result<()> {
    match piece.stream {
        OutputStream::Stdout => {
            let mut stdout = io::stdout().lock();
            stdout.write_all(&piece.data)?;
            stdout.flush()
        }
        OutputStream::Stderr => io::stderr().lock().write_all(&piece.data),
    }
}

async fn collect(sandbox: &Sandbox, mut run: Run) -> anyhow::Result<ExitCode> {
    let id = run.id().clone();
    let (mut stdout, mut stderr, mut truncated) = (Vec::new(), Vec::new(), false);
    while let Some(piece) = run.next().await {
        let collected = if piece.stream == OutputStream::Stdout { &mut stdout } else { &mut stderr };
        let room = MAX_COLLECTED_BYTES - collected.len();
        truncated |= piece.data.len() > room;
        collected.extend_from_slice(&piece.data[..piece.data.len().min(room)]);
    }
    let exit = run.wait().await?;
    let Exit { code, signal, duration, timed_out, .. } = &exit;
    let object = serde_json::json!({
        "sandbox_id": sandbox.id().to_string(),
        "execution_id": id.to_string(),
        "exit_code": code,
        "signal": signal,
        "timed_out": timed_out,
        "duration_ms": duration.as_secs_f64() * 1000.0,
        "stdout": String::from_utf8_lossy(&stdout),
        "stderr": String::from_utf8_lossy(&stderr),
        "truncated": truncated,
    });
    println!("{object}");
    Ok(ExitCode::from(exit.shell_code()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_a_file_only_where_it_looks_like_one() {
        assert_eq!(source("-"), Source::Stdin);
        assert_eq!(source("script.py"), Source::File(Path::new("script.py")));
        assert_eq!(source("dir/x.sh"), Source::File(Path::new("dir/x.sh")));
        assert_eq!(source("/etc/passwd"), Source::File(Path::new("/etc/passwd")));
        for code in ["print(1)", "ls", "ls /etc", "1/2", "bash x.sh", "open('a.py')", "import os; os.remove('a.py')"] {
            assert_eq!(source(code), Source::Code(code), "{code}");
        }
    }

    #[test]
    fn options_are_read_strictly() {
        assert_eq!(seconds("1.5"), Ok(Duration::from_millis(1500)));
        assert!(["", "0", "-1", "x", "nan", "1e30"].iter().all(|text| seconds(text).is_err()));
        assert_eq!(variable("A=b=c"), Ok(("A".to_owned(), "b=c".to_owned())));
        assert!(["", "A", "=b"].iter().all(|text| variable(text).is_err()));
    }
}

//! `sandboxer run`: one program in a sandbox of its own, as if it ran here.

use std::{
    io::{self, IsTerminal as _, Read as _},
    path::Path,
    process::ExitCode,
    time::Duration,
};

use anyhow::Context as _;
use sandboxer_client::{Execution, Options, Sandbox};
use tokio::time::timeout;

use crate::{
    EXIT_USAGE,
    ask::{Ask, pair},
    create::Inside,
    input::Input,
    passing::{Ending, Leave, Others, block_on, collect, failed, pass_on, tell_timeout},
};

/// A sandbox whose command was killed is not kept for long, but for longer than the command tries to come back.
pub(crate) const IDLE_TIMEOUT: Duration = Duration::from_secs(180);
/// A throwaway sandbox ends so long after the server has seen that its command has gone, whatever runs in it.
pub(crate) const CLIENT_GONE_TIMEOUT: Duration = Duration::from_secs(60);
/// A server that is not there is told soon.
pub(crate) const OPEN_WITHIN: Duration = Duration::from_secs(2);
const REMOVE_WITHIN: Duration = Duration::from_secs(5);

/// Run a program in a throwaway sandbox and pass on its output and its exit code.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit code: the program's own, or 128 and the number of the signal that ended it; 125 if it could not be run, \
                        64 for a wrong command line. Its input is this command's, unless that is a terminal. Ctrl-C interrupts the \
                        program; a second one kills it. The sandbox and the program end a minute after this command has gone, \
                        however it ended.")]
pub(crate) struct RunArgs {
    /// The language of the program: python or bash; not needed for a file that ends in .py or .sh
    #[arg(long, short, value_name = "LANGUAGE")]
    language: Option<String>,
    #[command(flatten)]
    ask: Ask,
    /// Kill the program after this time
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
    /// A variable of its environment; may be given several times
    #[arg(long, short, value_name = "NAME=VALUE", value_parser = pair)]
    env: Vec<(String, String)>,
    #[command(flatten, next_help_heading = "The sandbox")]
    inside: Inside,
    /// The program itself, a file (its name ends in .py or .sh or has a slash in it), or - for the standard input
    #[arg(value_name = "CODE|FILE|-", allow_hyphen_values = true)]
    program: String,
}

pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().map_err(|error| error.to_string())?;
    let duration = Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())?;
    if duration.is_zero() { Err("more than zero".into()) } else { Ok(duration) }
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

/// Says that the command line does not tell the language.
pub(crate) fn no_language() -> ExitCode {
    eprintln!("sandboxer: which language is this? Say --language python or --language bash, or name a file that ends in .py or .sh.");
    ExitCode::from(EXIT_USAGE)
}

/// The program and its language; none: the command line does not tell.
pub(crate) fn program(program: &str, language: Option<&str>) -> anyhow::Result<Option<(String, String)>> {
    let source = source(program);
    let language = match (language, &source) {
        (Some(language), _) => language.to_owned(),
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
    let (language, code) = match program(&args.program, args.language.as_deref()) {
        Ok(Some(program)) => program,
        Ok(None) => return Ok(no_language()),
        Err(error) => return Ok(failed(&error)),
    };
    block_on(execute(args, language, code))
}

async fn execute(args: &RunArgs, language: String, code: String) -> anyhow::Result<ExitCode> {
    let feed = args.program != "-" && !io::stdin().is_terminal();
    let options = Options::default().connection(args.ask.connection()?.open_within(OPEN_WITHIN));
    let options = options.idle_timeout(IDLE_TIMEOUT).client_gone_timeout(CLIENT_GONE_TIMEOUT);
    let sandbox = Sandbox::create(&args.ask.servers(), args.inside.on(options)).await.map_err(|error| args.ask.explain(error))?;
    let result = in_sandbox(args, &sandbox, language, code, feed).await;
    remove(sandbox, result.is_err()).await;
    result
}

/// Removes a sandbox that nobody is to see again. What went wrong before is what counts: then it is done in silence.
pub(crate) async fn remove(sandbox: Sandbox, in_silence: bool) {
    match timeout(REMOVE_WITHIN, sandbox.kill_sandbox()).await {
        Ok(Ok(())) => {}
        _ if in_silence => {}
        Ok(Err(error)) => eprintln!("sandboxer: the sandbox was not removed and goes when its idle time is over: {error}"),
        Err(_) => eprintln!("sandboxer: the sandbox was not removed in time and goes when its idle time is over"),
    }
}

async fn in_sandbox(args: &RunArgs, sandbox: &Sandbox, language: String, code: String, feed: bool) -> anyhow::Result<ExitCode> {
    // From here on signals go to the program, or end this command in good order.
    let mut leave = Leave::new()?;
    // Output is passed on as it is, whatever it is.
    let mut execution = Execution::new(language, code).raw(true).stdin(feed);
    for (name, value) in &args.env {
        execution = execution.env(name, value);
    }
    if let Some(timeout) = args.timeout {
        execution = execution.timeout(timeout);
    }
    let mut run = sandbox.run(execution).await?;
    let input = feed.then(Input::begin);
    if args.ask.json {
        let _others = Others::begin(&mut run, input.as_ref())?;
        return tokio::select! {
            code = leave.asked() => Ok(ExitCode::from(code)),
            collected = collect(sandbox, &mut run) => collected,
        };
    }
    let ending = pass_on(&mut run, input.as_ref(), &mut leave).await?;
    if let Ending::Exit(exit) = &ending {
        tell_timeout(exit, args.timeout);
    }
    Ok(ending.code())
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
        assert_eq!(pair("A=b=c"), Ok(("A".to_owned(), "b=c".to_owned())));
        assert!(["", "A", "=b"].iter().all(|text| pair(text).is_err()));
    }
}

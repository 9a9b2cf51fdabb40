//! A program that runs in a sandbox, as if it ran here: its output and its input passed on, Ctrl-C, its end.

use std::{
    io::{self, Write as _},
    process::ExitCode,
    time::Duration,
};

use anyhow::Context as _;
use sandboxer_client::{Controller, Exit, OutputStream, Piece, Run, Sandbox, Stdin};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::input::Input;

/// What a command that runs programs exits with when it fails itself, so that it can be told from the program's own code.
pub(crate) const EXIT_OWN_FAILURE: u8 = 125;
/// 128 and SIGPIPE: whoever read the output is gone.
const EXIT_BROKEN_PIPE: u8 = 141;
/// What `--json` holds of each stream.
const MAX_COLLECTED_BYTES: usize = 16 * 1024 * 1024;

/// How this command's part in a program came to its end.
#[derive(Debug)]
pub(crate) enum Ending {
    /// The program ended.
    Exit(Exit),
    /// The program goes on; this command ends, by a signal or since its user said so.
    Left(u8),
    /// The reader of the output has gone. The program goes on, unless the caller ends it.
    BrokenPipe,
}

impl Ending {
    pub(crate) fn code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Exit(exit) => exit.shell_code(),
            Self::Left(code) => *code,
            Self::BrokenPipe => EXIT_BROKEN_PIPE,
        })
    }
}

/// Signals by which this command leaves a program that goes on.
pub(crate) struct Leave {
    terminate: Signal,
    hang_up: Signal,
    quit: Signal,
}

impl Leave {
    pub(crate) fn new() -> io::Result<Self> {
        let hang_up = signal(SignalKind::hangup())?;
        Ok(Self { terminate: signal(SignalKind::terminate())?, hang_up, quit: signal(SignalKind::quit())? })
    }

    /// Returns what to exit with.
    pub(crate) async fn asked(&mut self) -> u8 {
        let number: SignalKind = tokio::select! {
            _ = self.terminate.recv() => SignalKind::terminate(),
            _ = self.hang_up.recv() => SignalKind::hangup(),
            _ = self.quit.recv() => SignalKind::quit(),
        };
        u8::try_from(128 + number.as_raw_value()).unwrap_or(u8::MAX)
    }
}

pub(crate) fn failed(error: &anyhow::Error) -> ExitCode {
    eprintln!("sandboxer: {error:#}");
    ExitCode::from(EXIT_OWN_FAILURE)
}

/// Runs it to its end, with one thread for the connection; this one writes the output, and waits with it.
pub(crate) fn block_on(work: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let code = runtime.block_on(work).unwrap_or_else(|error| failed(&error));
    // Nobody waits for input that may never come.
    runtime.shutdown_background();
    Ok(code)
}

/// Passes on output and, if there is any, input, until the program ends or this command is told to leave.
pub(crate) async fn pass_on(run: &mut Run, input: Option<&Input>, leave: &mut Leave) -> anyhow::Result<Ending> {
    let others = Others::begin(run, input)?;
    let ending = loop {
        tokio::select! {
            code = leave.asked() => break Ending::Left(code),
            piece = run.next() => match piece.map(|piece| write(&piece)) {
                Some(Ok(())) => {}
                Some(Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => break Ending::BrokenPipe,
                Some(Err(error)) => return Err(error).context("write the program's output"),
                None => break Ending::Exit(run.wait().await?),
            },
        }
    };
    drop(others);
    Ok(ending)
}

/// What goes the other way: input, and Ctrl-C. Ends when it is dropped.
pub(crate) struct Others(Vec<tokio::task::AbortHandle>);

impl Others {
    pub(crate) fn begin(run: &mut Run, input: Option<&Input>) -> io::Result<Self> {
        let interrupts = signal(SignalKind::interrupt())?;
        let mut tasks = vec![tokio::spawn(interrupt(run.controller(), interrupts)).abort_handle()];
        if let Some(input) = input {
            tasks.push(tokio::spawn(feed_input(input.clone(), run.take_stdin())).abort_handle());
        }
        Ok(Self(tasks))
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        self.0.iter().for_each(tokio::task::AbortHandle::abort);
    }
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
async fn feed_input(input: Input, mut stdin: Stdin) {
    loop {
        match input.next().await {
            Ok(Some(piece)) if stdin.write(&piece).await.is_ok() => {}
            Ok(Some(_)) => return,
            Ok(None) => break,
            Err(error) => {
                eprintln!("sandboxer: reading the standard input: {error}");
                break;
            }
        }
    }
    // A program that has ended needs no end of its input.
    let _ = stdin.eof().await;
}

pub(crate) fn write(piece: &Piece) -> io::Result<()> {
    match piece.stream {
        OutputStream::Stdout => {
            let mut stdout = io::stdout().lock();
            stdout.write_all(&piece.data)?;
            stdout.flush()
        }
        OutputStream::Stderr => io::stderr().lock().write_all(&piece.data),
    }
}

/// Says why a program was ended that ran out of time.
pub(crate) fn tell_timeout(exit: &Exit, limit: Option<Duration>) {
    if exit.timed_out {
        let seconds = limit.unwrap_or(exit.duration).as_secs_f64();
        eprintln!("sandboxer: the program was killed after its {seconds} s were over");
    }
}

/// Collects the output and prints it as one object, with how the program ended.
pub(crate) async fn collect(sandbox: &Sandbox, run: &mut Run) -> anyhow::Result<ExitCode> {
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

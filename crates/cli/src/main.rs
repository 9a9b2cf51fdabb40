//! The `sandboxer` binary: one module a verb.
//!
//! `main` starts no threads and no runtime: `serve` has to enter a user namespace first where it is not root, and a process can do that only while it has
//! one thread. Each verb that needs a runtime makes its own.

mod doctor;
mod image;
mod run;
mod serve;
mod store;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// What a wrong command line or configuration exits with (EX_USAGE of sysexits.h).
const EXIT_USAGE: u8 = 64;

/// Runs untrusted Python and bash in gVisor sandboxes.
#[derive(Debug, Parser)]
#[command(name = "sandboxer", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve sandboxes over WebSockets
    Serve(Box<serve::Args>),
    /// Run a program in a throwaway sandbox and pass on its output and its exit code
    Run(run::RunArgs),
    /// Make, list and remove the images that sandboxes start from
    Image(image::Args),
    /// List and check what is kept on the volume of checkpoints
    Store(store::Args),
    /// Say in plain words what works on this machine and what does not
    Doctor(doctor::Args),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Nothing can be done where even this can't be printed.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(EXIT_USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let result = match cli.command {
        Command::Serve(args) => serve::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Image(args) => image::run(args),
        Command::Store(args) => store::run(&args),
        Command::Doctor(args) => doctor::run(&args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("sandboxer: {error:#}");
        ExitCode::FAILURE
    })
}

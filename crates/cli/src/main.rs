//! The `sandboxer` binary: one module a verb.
//!
//! `main` starts no threads and no runtime: `serve` has to enter a user namespace first where it is not root, and a process can do that only while it has
//! one thread. Each verb that needs a runtime makes its own.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test"))]

mod ask;
mod attach;
mod completion;
mod cp;
mod create;
mod doctor;
mod exec;
mod extension;
mod fs_snapshot;
mod image;
mod input;
mod network;
mod pages;
mod passing;
mod run;
mod serve;
mod serve_files;
mod shell;
mod store;
mod terminal;
mod tokens;
mod travel;
mod tree;
mod workspaces;

use std::{env, ffi::OsStr, process::ExitCode};

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand, builder::Resettable};

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
    Run(Box<run::RunArgs>),
    /// Make a sandbox of any kind, and print its id
    Create(Box<create::Args>),
    /// Run a program or a command in a sandbox, and pass on its output and its exit code
    Exec(Box<exec::Args>),
    /// Open an interactive shell in a sandbox, or in a new one that is removed afterwards
    Shell(Box<shell::Args>),
    /// Come back to the program that runs in a sandbox
    Attach(attach::AttachArgs),
    /// Print the output that a sandbox holds of the program that runs in it, or ran last
    Logs(attach::LogsArgs),
    /// Kill the program that runs in a sandbox; the sandbox stays
    Kill(attach::KillArgs),
    /// List the sandboxes of a server
    Ls(workspaces::ListArgs),
    /// Show a sandbox
    Get(workspaces::OneArgs),
    /// Remove sandboxes, with everything in them
    Rm(workspaces::RemoveArgs),
    /// Copy files and directories into a sandbox or out of it
    Cp(cp::Args),
    /// Print a link to a server that runs in a sandbox, or forward a local port to it
    Port(network::PortArgs),
    /// Show what a sandbox's programs have reached, and what they were refused
    Network(network::NetworkArgs),
    /// Save the state of a sandbox, which goes on, and print the snapshot's id
    Snapshot(travel::SnapshotArgs),
    /// Make a new sandbox from a snapshot, and print its id
    Restore(workspaces::RestoreArgs),
    /// List, show and delete snapshots
    Snapshots(workspaces::SnapshotsArgs),
    /// Save a sandbox on the server's volume and end it here: who attaches to it goes on from there
    Checkpoint(travel::CheckpointArgs),
    /// List the checkpoints of a sandbox
    Checkpoints(travel::CheckpointsArgs),
    /// Let a sandbox go back to a snapshot or to one of its checkpoints, whether it runs or not
    Rollback(travel::RollbackArgs),
    /// Make copies of a sandbox, of one of its checkpoints or of a snapshot, and print their ids
    Fork(travel::ForkArgs),
    /// Draw the history of a sandbox: what was saved of it, what it came from and what came from it
    Tree(tree::TreeArgs),
    /// Keep the files of sandboxes as templates for new ones; list, show, remove, export and import them
    FsSnapshot(fs_snapshot::Args),
    /// List, show and check profiles: what kinds of sandboxes there are
    Profiles(workspaces::ProfilesArgs),
    /// For those who write an extension
    Extension(extension::Args),
    /// Make, list and remove the images that sandboxes start from
    Image(image::Args),
    /// List, check, measure and clean what is kept on the volume of checkpoints
    Store(store::Args),
    /// Say in plain words what works on this machine and what does not
    Doctor(doctor::Args),
    /// Print a script by which a shell completes these commands
    Completions(pages::CompletionsArgs),
    /// Print the manual page, or write the pages of all commands
    Man(pages::ManArgs),
}

/// An environment variable that is empty counts as unset: a file of settings can name every variable.
fn without_empty_variables(command: clap::Command) -> clap::Command {
    let is_empty = |name: &OsStr| env::var_os(name).is_some_and(|value| value.is_empty());
    let command = command.mut_args(|argument| match argument.get_env() {
        Some(name) if is_empty(name) => argument.env(Resettable::Reset),
        _ => argument,
    });
    command.mut_subcommands(without_empty_variables)
}

fn main() -> ExitCode {
    if let Some(done) = serve_files::if_asked_for() {
        return done;
    }
    // A shell that wants to know how a line goes on sets a variable; then nothing else is done.
    clap_complete::CompleteEnv::with_factory(completion::command).complete();
    let parsed = without_empty_variables(Cli::command()).try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
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
        Command::Create(args) => create::run(&args),
        Command::Exec(args) => exec::run(&args),
        Command::Shell(args) => shell::run(&args),
        Command::Attach(args) => attach::attach(&args),
        Command::Logs(args) => attach::logs(&args),
        Command::Kill(args) => attach::kill(&args),
        Command::Ls(args) => workspaces::ls(&args),
        Command::Get(args) => workspaces::get(&args),
        Command::Rm(args) => workspaces::rm(&args),
        Command::Cp(args) => cp::run(&args),
        Command::Port(args) => network::port(&args),
        Command::Network(args) => network::network(&args),
        Command::Snapshot(args) => travel::snapshot(&args),
        Command::Checkpoint(args) => travel::checkpoint(&args),
        Command::Checkpoints(args) => travel::checkpoints(&args),
        Command::Rollback(args) => travel::rollback(&args),
        Command::Fork(args) => travel::fork(&args),
        Command::Tree(args) => tree::tree(&args),
        Command::Restore(args) => workspaces::restore(&args),
        Command::Snapshots(args) => workspaces::snapshots(&args),
        Command::FsSnapshot(args) => fs_snapshot::run(&args),
        Command::Profiles(args) => workspaces::profiles(&args),
        Command::Extension(args) => extension::run(&args),
        Command::Image(args) => image::run(args),
        Command::Store(args) => store::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Completions(args) => pages::completions(&args),
        Command::Man(args) => pages::man(&args, Cli::command()),
    };
    result.unwrap_or_else(|error| {
        eprintln!("sandboxer: {error:#}");
        ExitCode::FAILURE
    })
}

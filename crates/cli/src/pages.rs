//! `completions` and `man`: what shells and people read about this command.

use std::{fs, io, path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::Command;
use clap_complete::{Shell, env::Shells};

#[derive(Debug, clap::Args)]
#[command(after_help = "For bash: sandboxer completions bash > ~/.local/share/bash-completion/completions/sandboxer\n\
                        For zsh: sandboxer completions zsh > \"${fpath[1]}/_sandboxer\"\n\
                        For fish: sandboxer completions fish > ~/.config/fish/completions/sandboxer.fish")]
pub(crate) struct CompletionsArgs {
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "To read it: sandboxer man | man -l -\nTo install all pages: sandboxer man ~/.local/share/man/man1")]
pub(crate) struct ManArgs {
    /// Write the page of every command into this directory
    #[arg(value_name = "DIR")]
    directory: Option<PathBuf>,
}

pub(crate) fn completions(args: &CompletionsArgs) -> Result<ExitCode> {
    let shell = args.shell.to_string();
    let shells = Shells::builtins();
    let completer = shells.completer(&shell).with_context(|| format!("{shell} can't be completed"))?;
    let mut script = Vec::new();
    completer.write_registration("COMPLETE", "sandboxer", "sandboxer", "sandboxer", &mut script)?;
    print(&script)
}

pub(crate) fn man(args: &ManArgs, command: Command) -> Result<ExitCode> {
    let Some(directory) = &args.directory else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page)?;
        return print(&page);
    };
    let context = || format!("write the pages into {}", directory.display());
    fs::create_dir_all(directory).with_context(context)?;
    clap_mangen::generate_to(command, directory).with_context(context)?;
    Ok(ExitCode::SUCCESS)
}

fn print(text: &[u8]) -> Result<ExitCode> {
    match io::Write::write_all(&mut io::stdout(), text) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error).context("write to the standard output"),
        _ => Ok(ExitCode::SUCCESS),
    }
}

#[cfg(test)]
mod tests;

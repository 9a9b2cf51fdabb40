//! Completion of commands, options and ids. The shell calls `sandboxer` itself for it, so the ids are
//! those that the server has now.

use std::{ffi::OsStr, sync::mpsc, thread, time::Duration};

use clap::{Command, CommandFactory, Parser};
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use serde_json::Value;

use crate::{Cli, ask::Ask, ask::text, tokens};

/// How long the server may take: a shell must not hang on a key.
const ANSWERS_WITHIN: Duration = Duration::from_millis(1500);

/// The settings by which a server is asked, from the environment alone.
#[derive(Debug, Parser)]
struct Settings {
    #[command(flatten)]
    ask: Ask,
}

/// All commands, with ids for the arguments that take one.
pub(crate) fn command() -> Command {
    with_ids(Cli::command())
}

fn with_ids(command: Command) -> Command {
    command.mut_args(complete_ids).mut_subcommands(with_ids)
}

fn complete_ids(argument: clap::Arg) -> clap::Arg {
    let takes = |kind: &str| {
        let names = argument.get_value_names().unwrap_or_default();
        names.iter().any(|name| name.split('|').any(|name| name == kind))
    };
    let (sandboxes, snapshots) = (takes("SANDBOX_ID"), takes("SNAPSHOT_ID"));
    if !sandboxes && !snapshots {
        return argument;
    }
    argument.add(ArgValueCompleter::new(move |beginning: &OsStr| {
        let mut found = Vec::new();
        if sandboxes {
            let saved_here = || tokens::ids().into_iter().map(CompletionCandidate::new).collect();
            found.extend(asked("/v1/sandboxes", "status").unwrap_or_else(saved_here));
        }
        if snapshots {
            found.extend(asked("/v1/snapshots", "created_at").unwrap_or_default());
        }
        let beginning = beginning.to_string_lossy();
        found.retain(|candidate| candidate.get_value().to_string_lossy().starts_with(&*beginning));
        found
    }))
}

/// The ids of a list of the server, each with one of its fields as a hint. None: it does not answer.
fn asked(path: &'static str, hint: &'static str) -> Option<Vec<CompletionCandidate>> {
    let (sender, answer) = mpsc::channel();
    // The thread ends with this process, which lives for one completion.
    thread::spawn(move || {
        let list = Settings::try_parse_from(["sandboxer"]).ok().and_then(|settings| settings.ask.list(path).ok());
        // After the deadline there is no receiver.
        let _ = sender.send(list);
    });
    let list = answer.recv_timeout(ANSWERS_WITHIN).ok()??;
    let candidate = |item: &Value| {
        let shown: String = text(item, hint).chars().filter(|c| !c.is_control()).collect();
        CompletionCandidate::new(text(item, "id")).help(Some(shown.into()))
    };
    Some(list["items"].as_array().into_iter().flatten().map(candidate).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_argument_for_an_id_offers_ids() {
        fn count(command: &Command) -> usize {
            let own = command.get_arguments().filter(|argument| argument.get::<ArgValueCompleter>().is_some()).count();
            own + command.get_subcommands().map(count).sum::<usize>()
        }
        fn named(command: &Command) -> usize {
            let is_id = |argument: &&clap::Arg| {
                let names = argument.get_value_names().unwrap_or_default();
                names.iter().any(|name| name.ends_with("SANDBOX_ID") || name.starts_with("SNAPSHOT_ID"))
            };
            let own = command.get_arguments().filter(is_id).count();
            own + command.get_subcommands().map(named).sum::<usize>()
        }
        let command = command();
        assert!(count(&command) > 15, "{}", count(&command));
        assert_eq!(count(&command), named(&command));
    }
}

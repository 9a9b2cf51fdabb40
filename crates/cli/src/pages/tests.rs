//! The pages, the README's table and the commands say the same.

use std::{collections::BTreeSet, path::Path};

use clap::CommandFactory as _;

use super::*;

/// Every command, as it is called: `fs-snapshot create`. What clap adds itself is left out.
fn commands() -> BTreeSet<String> {
    fn walk(command: &Command, path: &str, into: &mut BTreeSet<String>) {
        let below: Vec<&Command> = command.get_subcommands().filter(|below| below.get_name() != "help").collect();
        if below.is_empty() {
            into.insert(path.to_owned());
        }
        for one in below {
            walk(one, format!("{path} {}", one.get_name()).trim(), into);
        }
    }
    let mut all = BTreeSet::new();
    walk(&crate::Cli::command(), "", &mut all);
    all
}

/// What the README's table names: `sandboxer VERB …` at the beginning of each row, with `a|b` for several below one verb.
fn in_readme() -> BTreeSet<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let text = std::fs::read_to_string(path).unwrap();
    let table = text.split("\n## Commands\n").nth(1).and_then(|rest| rest.split("\n## ").next()).unwrap();
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `sandboxer ")?.split_once('`'));
    let mut all = BTreeSet::new();
    for (command, _) in rows {
        let mut words = command.split_whitespace();
        let verb = words.next().unwrap();
        let below: Vec<&str> = match words.next() {
            Some(word) if word.starts_with(|c: char| c.is_ascii_lowercase()) => word.split("\\|").collect(),
            _ => Vec::new(),
        };
        match below[..] {
            [] => {
                all.insert(verb.to_owned());
            }
            ref several => all.extend(several.iter().map(|one| format!("{verb} {one}"))),
        }
    }
    all
}

#[test]
fn the_table_of_the_readme_names_every_command_and_nothing_else() {
    assert_eq!(in_readme(), commands());
}

#[test]
fn every_command_has_a_page_with_every_option_and_every_page_is_of_a_command() {
    let place = tempfile::tempdir().unwrap();
    man(&ManArgs { directory: Some(place.path().to_owned()) }, crate::Cli::command()).unwrap();
    let names = |path: &Path| {
        std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect::<BTreeSet<_>>()
    };
    let mut pages = names(place.path());
    pages.retain(|page| !page.contains("-help"));
    let mut root = crate::Cli::command();
    root.build();
    fn check(command: &Command, name: &str, pages: &mut BTreeSet<String>, place: &Path) {
        let file = format!("{name}.1");
        assert!(pages.remove(&file), "{file} is missing");
        let page = std::fs::read_to_string(place.join(&file)).unwrap().replace('\\', "");
        for long in command.get_arguments().filter(|argument| !argument.is_hide_set()).filter_map(|argument| argument.get_long()) {
            assert!(page.contains(&format!("--{long}")), "{file} lacks --{long}");
        }
        assert!(command.get_about().is_some(), "{name} does not say what it is for");
        for below in command.get_subcommands().filter(|below| below.get_name() != "help") {
            check(below, &format!("{name}-{}", below.get_name()), pages, place);
        }
    }
    check(&root, "sandboxer", &mut pages, place.path());
    assert!(pages.is_empty(), "nobody has {pages:?}");
}

#[test]
fn every_shell_gets_a_script_that_knows_every_verb() {
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut crate::Cli::command(), "sandboxer", &mut script);
        let script = String::from_utf8(script).unwrap();
        for verb in crate::Cli::command().get_subcommands() {
            assert!(script.contains(verb.get_name()), "{shell}: {}", verb.get_name());
        }
    }
}

#[test]
fn the_command_line_is_sound_and_every_argument_is_explained() {
    crate::Cli::command().debug_assert();
    fn check(command: &Command) {
        for argument in command.get_arguments().filter(|argument| argument.get_long().is_some()) {
            assert!(argument.get_help().is_some(), "{}: --{}", command.get_name(), argument.get_id());
        }
        command.get_subcommands().for_each(check);
    }
    check(&crate::Cli::command());
}

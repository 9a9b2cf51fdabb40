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

/// A part of the README, up to the next one.
fn part_of_readme(head: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let text = std::fs::read_to_string(path).unwrap();
    text.split(&format!("\n## {head}\n")).nth(1).and_then(|rest| rest.split("\n## ").next()).unwrap().to_owned()
}

/// The cells of the rows of tables.
fn rows(part: &str) -> Vec<Vec<String>> {
    // A bar within a cell is written with a backslash before it.
    let cells = |line: &str| line.replace("\\|", "\0").split('|').map(|cell| cell.trim().replace('\0', "|")).collect::<Vec<_>>();
    let rows = part.lines().filter_map(|line| line.strip_prefix('|')?.strip_suffix('|'));
    rows.filter(|row| !row.starts_with("---")).map(cells).collect()
}

/// What stands between backticks.
fn code(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// A page without what makes its words bold or keeps its hyphens.
fn read_page(path: &Path) -> String {
    let page = std::fs::read_to_string(path).unwrap();
    ["\\fB", "\\fI", "\\fR", "\\"].iter().fold(page, |page, mark| page.replace(mark, ""))
}

/// However it was broken into lines.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The options that a text names: `--drop-output`.
fn options_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
    words.filter_map(|word| word.strip_prefix("--")).filter(|name| name.starts_with(char::is_alphanumeric)).map(str::to_owned).collect()
}

/// The options that a command takes.
fn options_of(command: &Command) -> BTreeSet<String> {
    let visible = command.get_arguments().filter(|argument| !argument.is_hide_set());
    visible.filter_map(|argument| argument.get_long()).map(str::to_owned).collect()
}

/// Every command with all of its options, the global ones too.
fn each(check: &mut dyn FnMut(&str, &mut Command)) {
    fn walk(command: &mut Command, name: &str, check: &mut dyn FnMut(&str, &mut Command)) {
        check(name, command);
        for below in command.get_subcommands_mut().filter(|below| below.get_name() != "help") {
            let name = format!("{name}-{}", below.get_name());
            walk(below, &name, check);
        }
    }
    let mut root = crate::Cli::command();
    root.build();
    walk(&mut root, "sandboxer", check);
}

/// What the README's table names: `sandboxer VERB …` at the beginning of each row, with `a|b` for several below one verb.
fn in_readme() -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for row in rows(&part_of_readme("Commands")) {
        let Some(command) = code(&row[0]).first().and_then(|command| command.strip_prefix("sandboxer ").map(str::to_owned)) else {
            continue;
        };
        let mut words = command.split_whitespace();
        let verb = words.next().unwrap();
        let below: Vec<&str> = match words.next() {
            Some(word) if word.starts_with(|c: char| c.is_ascii_lowercase()) => word.split('|').collect(),
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
    each(&mut |name, command| {
        let file = format!("{name}.1");
        assert!(pages.remove(&file), "{file} is missing");
        let page = read_page(&place.path().join(&file));
        let missing: Vec<String> = options_of(command).difference(&options_in(&page)).cloned().collect();
        assert!(missing.is_empty(), "{file} lacks {missing:?}");
        assert!(command.get_about().is_some(), "{name} does not say what it is for");
    });
    assert!(pages.is_empty(), "nobody has {pages:?}");
}

#[test]
fn the_help_of_every_command_has_every_option_and_argument_and_neither_it_nor_its_page_names_one_that_there_is_not() {
    let place = tempfile::tempdir().unwrap();
    man(&ManArgs { directory: Some(place.path().to_owned()) }, crate::Cli::command()).unwrap();
    let mut known = BTreeSet::new();
    each(&mut |_, command| known.extend(options_of(command)));
    each(&mut |name, command| {
        let help = command.render_long_help().to_string();
        let page = read_page(&place.path().join(format!("{name}.1")));
        let missing: Vec<String> = options_of(command).difference(&options_in(&help)).cloned().collect();
        assert!(missing.is_empty(), "the help of {name} lacks {missing:?}");
        for text in [&help, &page] {
            let unknown: Vec<String> = options_in(text).difference(&known).cloned().collect();
            assert!(unknown.is_empty(), "of {name} it is said that there is {unknown:?}");
        }
        let positional = command.get_positionals().filter(|argument| !argument.is_hide_set());
        for value in positional.filter_map(|argument| argument.get_value_names()).flatten() {
            assert!(help.contains(value.as_str()), "the help of {name} lacks {value}");
            assert!(page.contains(value.as_str()), "the page of {name} lacks {value}");
        }
        for below in command.get_subcommands().filter(|below| below.get_name() != "help") {
            let about = below.get_about().map(ToString::to_string).unwrap();
            assert!(one_line(&help).contains(&one_line(&about)), "the help of {name} does not say what {} is for", below.get_name());
        }
    });
}

#[test]
fn the_table_of_the_readme_names_no_option_that_its_command_does_not_have() {
    let mut root = crate::Cli::command();
    root.build();
    let mut seen = 0;
    for row in rows(&part_of_readme("Commands")) {
        let spans = code(&row[0]);
        let Some(verb) = spans.first().and_then(|span| span.strip_prefix("sandboxer ")?.split_whitespace().next()) else { continue };
        let command = root.find_subcommand(verb).unwrap();
        let mut has = options_of(command);
        command.get_subcommands().for_each(|below| has.extend(options_of(below)));
        // The second column too: it says what its options do.
        let named: BTreeSet<String> = spans.into_iter().chain(code(&row[1])).flat_map(options_in).collect();
        let others: BTreeSet<String> = options_of(root.find_subcommand("serve").unwrap());
        let unknown: Vec<&String> = named.iter().filter(|name| !has.contains(*name) && !others.contains(*name)).collect();
        assert!(unknown.is_empty(), "sandboxer {verb} has no {unknown:?}");
        seen += named.len();
    }
    assert!(seen > 8, "the table names {seen} options");
}

#[test]
fn the_settings_in_the_readme_are_those_of_serve_with_their_variables() {
    let (mut options, mut variables) = (BTreeSet::new(), Vec::new());
    for row in rows(&part_of_readme("Settings of the server")).into_iter().filter(|row| row.len() == 4) {
        options.extend(code(&row[0]).into_iter().flat_map(options_in));
        variables.extend(code(&row[1]).into_iter().map(str::to_owned));
    }
    let mut root = crate::Cli::command();
    root.build();
    let serve = root.find_subcommand("serve").unwrap();
    let mut has = options_of(serve);
    has.retain(|name| !["help", "version"].contains(&name.as_str()));
    assert_eq!(options, has);
    for argument in serve.get_arguments().filter(|argument| !argument.is_hide_set()) {
        let Some(name) = argument.get_env().and_then(|name| name.to_str()) else { continue };
        // Of several that begin alike only the beginning is told.
        let told = variables.iter().any(|told| told == name || told.strip_suffix('…').is_some_and(|begin| name.starts_with(begin)));
        assert!(told, "{name} is not in the table");
    }
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

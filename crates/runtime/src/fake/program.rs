//! The part of bash that the fake's programs are written in: enough that the same scripts mean the same on the real thing.
//!
//! | statement | what it does |
//! |---|---|
//! | `echo WORDS` | writes them; with ` >&2` to standard error, with ` > FILE` into a file |
//! | `cat` | copies its input to its output until the input ends |
//! | `cat FILE` | writes what was put into the file |
//! | `sleep S` | waits that many seconds, or parts of one |
//! | `head -c N /dev/zero \| tr '\0' C` | writes N times the character C |
//! | `for i in $(seq A B); do …; done` | repeats; `$i` is the number; no loop within a loop |
//! | `kill -9 $$` | ends by that signal |
//! | `exit N` | ends with that code |
//! | `print("TEXT")` | Python's, with one text in quotes |
//!
//! Statements are separated by `;` or new lines. Quotes around words are taken away, nothing else is expanded. Anything else is a
//! command that is not found: a line on standard error, and status 127.

use std::{collections::BTreeMap, time::Duration};

use sandboxer_agent::input::Input;
use sandboxer_protocol::agent::Stream;
use serde::{Deserialize, Serialize};

/// Files by name.
pub(super) type Disk = BTreeMap<String, Vec<u8>>;

const FILL_PIECE: u64 = 64 * 1024;
const NOT_FOUND: i32 = 127;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Statement {
    Echo { text: String, to: Target },
    Cat,
    CatFile(String),
    Sleep(f64),
    Fill { count: u64, with: u8 },
    Loop { from: u64, to: u64, body: Vec<Statement> },
    Kill(i32),
    Exit(i32),
    Unknown(String),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Target {
    Stdout,
    Stderr,
    File(String),
}

/// A program and where it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Program {
    statements: Vec<Statement>,
    at: usize,
    /// Within a loop: its number, and the statement of its body.
    turn: Option<(u64, usize)>,
    /// What is left of a `Fill` that was begun.
    filling: Option<u64>,
    status: i32,
}

/// What a program does next.
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    Write(Stream, Vec<u8>),
    Sleep(Duration),
    WaitForInput,
    Exit(i32),
    Signal(i32),
    Nothing,
}

impl Program {
    pub(super) fn parse(code: &str) -> Self {
        let parts: Vec<&str> = code.split([';', '\n']).map(str::trim).filter(|part| !part.is_empty()).collect();
        let mut statements = Vec::new();
        let mut parts = parts.into_iter();
        while let Some(part) = parts.next() {
            let Some((from, to)) = loop_bounds(part) else {
                statements.push(statement(part));
                continue;
            };
            let body = parts.by_ref().take_while(|part| *part != "done").map(|part| statement(part.strip_prefix("do ").unwrap_or(part)));
            statements.push(Statement::Loop { from, to, body: body.collect() });
        }
        Self { statements, at: 0, turn: None, filling: None, status: 0 }
    }

    /// Does the next thing. What it wants written must be written before the next step.
    pub(super) fn step(&mut self, input: &mut Input, disk: &mut Disk) -> Step {
        let Some(current) = self.statements.get(self.at) else { return Step::Exit(self.status) };
        let Statement::Loop { from, to, body } = current else {
            let current = current.clone();
            return self.perform(&current, None, input, disk);
        };
        let (number, within) = self.turn.unwrap_or((*from, 0));
        if number > *to || body.is_empty() {
            self.turn = None;
            self.at += 1;
            return Step::Nothing;
        }
        let Some(inner) = body.get(within).cloned() else {
            self.turn = Some((number + 1, 0));
            return Step::Nothing;
        };
        self.turn = Some((number, within));
        self.perform(&inner, Some(number), input, disk)
    }

    fn perform(&mut self, statement: &Statement, number: Option<u64>, input: &mut Input, disk: &mut Disk) -> Step {
        let expand = |text: &str| number.map_or_else(|| text.to_owned(), |number| text.replace("$i", &number.to_string()));
        let step = match statement {
            Statement::Cat => {
                if let Some(bytes) = input.front() {
                    let bytes = bytes.to_vec();
                    input.fed(bytes.len());
                    return Step::Write(Stream::Stdout, bytes);
                }
                if !input.finished() {
                    return Step::WaitForInput;
                }
                Step::Nothing
            }
            Statement::Fill { count, with } => {
                let left = self.filling.unwrap_or(*count);
                let piece = left.min(FILL_PIECE);
                self.filling = (left > piece).then(|| left - piece);
                let step = Step::Write(Stream::Stdout, vec![*with; usize::try_from(piece).unwrap_or_default()]);
                if self.filling.is_some() {
                    return step;
                }
                step
            }
            Statement::Echo { text, to } => {
                let mut line = expand(text).into_bytes();
                line.push(b'\n');
                match to {
                    Target::Stdout => Step::Write(Stream::Stdout, line),
                    Target::Stderr => Step::Write(Stream::Stderr, line),
                    Target::File(path) => {
                        disk.insert(expand(path), line);
                        Step::Nothing
                    }
                }
            }
            Statement::CatFile(path) => match disk.get(&expand(path)) {
                Some(content) => Step::Write(Stream::Stdout, content.clone()),
                None => Step::Write(Stream::Stderr, format!("cat: {}: No such file or directory\n", expand(path)).into_bytes()),
            },
            Statement::Sleep(seconds) => Step::Sleep(Duration::try_from_secs_f64(*seconds).unwrap_or_default()),
            Statement::Kill(signal) => Step::Signal(*signal),
            Statement::Exit(code) => Step::Exit(*code),
            Statement::Unknown(text) => {
                let name = text.split_whitespace().next().unwrap_or_default();
                Step::Write(Stream::Stderr, format!("{name}: command not found\n").into_bytes())
            }
            // Not parsed so.
            Statement::Loop { .. } => Step::Nothing,
        };
        self.status = match (&statement, &step) {
            (Statement::Unknown(_), _) => NOT_FOUND,
            (Statement::CatFile(_), Step::Write(Stream::Stderr, _)) => 1,
            _ => 0,
        };
        match &mut self.turn {
            Some((_, within)) => *within += 1,
            None => self.at += 1,
        }
        step
    }
}

/// `for i in $(seq A B)`
fn loop_bounds(part: &str) -> Option<(u64, u64)> {
    let (from, to) = part.strip_prefix("for i in $(seq ")?.strip_suffix(')')?.split_once(' ')?;
    Some((from.parse().ok()?, to.trim().parse().ok()?))
}

fn statement(part: &str) -> Statement {
    parse(part).unwrap_or_else(|| Statement::Unknown(part.to_owned()))
}

fn parse(part: &str) -> Option<Statement> {
    if let Some(text) = part.strip_prefix("print(").and_then(|rest| rest.strip_suffix(')')) {
        return Some(Statement::Echo { text: text.trim_matches(['"', '\'']).to_owned(), to: Target::Stdout });
    }
    let (name, rest) = part.split_once(' ').unwrap_or((part, ""));
    let rest = rest.trim();
    Some(match name {
        "echo" => {
            let (text, to) = if let Some(text) = rest.strip_suffix(">&2") {
                (text, Target::Stderr)
            } else if let Some((text, file)) = rest.rsplit_once(" > ") {
                (text, Target::File(file.trim().to_owned()))
            } else {
                (rest, Target::Stdout)
            };
            Statement::Echo { text: text.trim().trim_matches(['"', '\'']).to_owned(), to }
        }
        "cat" if rest.is_empty() => Statement::Cat,
        "cat" => Statement::CatFile(rest.to_owned()),
        "sleep" => Statement::Sleep(rest.parse().ok()?),
        "head" => {
            let (count, with) = rest.strip_prefix("-c ")?.split_once(" /dev/zero | tr '\\0' ")?;
            Statement::Fill { count: count.parse().ok()?, with: *with.as_bytes().first()? }
        }
        "kill" => Statement::Kill(rest.strip_prefix('-')?.strip_suffix(" $$")?.parse().ok()?),
        "exit" => Statement::Exit(if rest.is_empty() { 0 } else { rest.parse().ok()? }),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(code: &str) -> (String, String, i32) {
        let (mut program, mut input, mut disk) = (Program::parse(code), Input::new(1024), Disk::new());
        let (mut out, mut err) = (Vec::new(), Vec::new());
        loop {
            // What is saved at any step goes on from there.
            program = serde_json::from_str(&serde_json::to_string(&program).unwrap()).unwrap();
            match program.step(&mut input, &mut disk) {
                Step::Write(Stream::Stdout, bytes) => out.extend(bytes),
                Step::Write(Stream::Stderr, bytes) => err.extend(bytes),
                Step::Exit(code) => return (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap(), code),
                Step::Signal(signal) => return (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap(), -signal),
                Step::Sleep(_) | Step::Nothing => {}
                Step::WaitForInput => panic!("waits for input"),
            }
        }
    }

    #[test]
    fn programs_do_what_bash_would() {
        assert_eq!(run("echo 'a b'; echo oops >&2; exit 3"), ("a b\n".into(), "oops\n".into(), 3));
        assert_eq!(run("for i in $(seq 1 3); do echo n$i; sleep 0.1; done\necho end").0, "n1\nn2\nn3\nend\n");
        assert_eq!(run("head -c 100000 /dev/zero | tr '\\0' x").0, "x".repeat(100_000));
        assert_eq!(run("echo kept > /root/f; cat /root/f"), ("kept\n".into(), String::new(), 0));
        assert_eq!(run("frobnicate -x"), (String::new(), "frobnicate: command not found\n".into(), 127));
        assert_eq!(run("kill -9 $$; echo never").2, -9);
        assert_eq!(run("print(\"hello\")").0, "hello\n");
    }
}

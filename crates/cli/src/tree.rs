//! `sandboxer tree`: the history of a sandbox, what it came from and what came from it.

use std::{collections::BTreeSet, process::ExitCode};

use anyhow::Result;
use indicatif::HumanBytes;
use serde_json::Value;

use crate::ask::{Ask, text};

#[derive(Debug, clap::Args)]
pub(crate) struct TreeArgs {
    #[command(flatten)]
    ask: Ask,
    /// The sandbox, running or not
    #[arg(value_name = "SANDBOX_ID")]
    id: String,
}

pub(crate) fn tree(args: &TreeArgs) -> Result<ExitCode> {
    let family = args.ask.ask("GET", &format!("/v1/sandboxes/{}/tree", args.ask.sandbox_id(&args.id)?), None)?;
    args.ask.print(&family, draw)
}

/// A line, and what hangs on it.
struct Node {
    line: String,
    below: Vec<Node>,
}

fn draw(family: &Value) -> String {
    let members: Vec<&Value> = items(family, "items");
    let ids: BTreeSet<&str> = members.iter().map(|one| text(one, "id")).collect();
    let asked = text(family, "id");
    let mut drawn = BTreeSet::new();
    let roots: Vec<&&Value> = members.iter().filter(|one| !ids.contains(text(&one["from"], "sandbox_id"))).collect();
    // Where two say that they came from each other, one has to be the first.
    let first: Vec<&&Value> = if roots.is_empty() { members.iter().take(1).collect() } else { roots };
    let mut picture = String::new();
    for root in first {
        let node = sandbox(root, &members, asked, &mut drawn);
        picture.push_str(&format!("{}\n", plain(&node.line)));
        hang(&node.below, "", &mut picture);
    }
    picture
}

fn sandbox<'a>(one: &'a Value, members: &[&'a Value], asked: &str, drawn: &mut BTreeSet<&'a str>) -> Node {
    let id = text(one, "id");
    drawn.insert(id);
    let mark = if id == asked { "* " } else { "" };
    let mut line = format!("{mark}{id}  {}", text(one, "status"));
    if let Some(from) = origin(&one["from"]) {
        line.push_str(&format!("  made from {from}"));
    }
    // In the order of time: what was saved, and behind each what was made from it.
    let mut saved: Vec<(&Value, bool)> = items(one, "checkpoints").into_iter().map(|one| (one, false)).collect();
    saved.extend(items(one, "snapshots").into_iter().map(|one| (one, true)));
    saved.sort_by_key(|(one, _)| text(one, "created_at"));
    let mut before = None;
    let mut below = Vec::new();
    for (one, is_snapshot) in saved {
        let name = text(one, "name");
        let copies = copies_of(id, Some(name), members, drawn);
        let copies = copies.into_iter().map(|copy| sandbox(copy, members, asked, drawn)).collect();
        below.push(Node { line: branch(one, is_snapshot, before, id), below: copies });
        if !is_snapshot {
            before = Some(name);
        }
    }
    // What they were made from is not there any more.
    for copy in copies_of(id, None, members, drawn) {
        below.push(sandbox(copy, members, asked, drawn));
    }
    Node { line, below }
}

/// Sandboxes that were made from something saved of another; without a name, from anything of it.
fn copies_of<'a>(id: &str, name: Option<&str>, members: &[&'a Value], drawn: &BTreeSet<&str>) -> Vec<&'a Value> {
    let from_it = |one: &&&Value| {
        let from = &one["from"];
        let of = name.is_none_or(|name| text(from, "checkpoint") == name || text(from, "snapshot_id") == name);
        text(from, "sandbox_id") == id && of && !drawn.contains(text(one, "id"))
    };
    members.iter().filter(from_it).copied().collect()
}

fn branch(one: &Value, is_snapshot: bool, before: Option<&str>, of: &str) -> String {
    let bytes = |field: &str| HumanBytes(one[field].as_u64().unwrap_or(0));
    let kind = if is_snapshot { "snapshot " } else { "" };
    let time = text(one, "created_at");
    let time = time.split('.').next().unwrap_or_default().trim_end_matches('Z');
    let mut line = format!("{kind}{}  {time}  own {}, shared {}", text(one, "name"), bytes("own_bytes"), bytes("shared_bytes"));
    if let Some(called) = one["called"].as_str() {
        line.push_str(&format!("  {called:?}"));
    }
    if one["automatic"] == true {
        line.push_str("  automatic");
    }
    if one["latest"] == true {
        line.push_str("  latest");
    }
    let parent = one["parent"].as_str().filter(|parent| Some(*parent) != before && !is_snapshot);
    if let Some(back) = parent.map(str::to_owned).or_else(|| origin(&one["from"])) {
        // What is its own needs no name.
        line.push_str(&format!("  from {}", back.trim_end_matches(&format!(" of {of}"))));
    }
    line
}

fn origin(from: &Value) -> Option<String> {
    let of = from["sandbox_id"].as_str()?;
    Some(match (from["checkpoint"].as_str(), from["snapshot_id"].as_str()) {
        (Some(name), _) => format!("{name} of {of}"),
        (None, Some(id)) => format!("snapshot {id} of {of}"),
        (None, None) => of.to_owned(),
    })
}

fn hang(nodes: &[Node], indent: &str, picture: &mut String) {
    for (number, node) in nodes.iter().enumerate() {
        let last = number + 1 == nodes.len();
        let (joint, more) = if last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        picture.push_str(&format!("{indent}{joint}{}\n", plain(&node.line)));
        hang(&node.below, &format!("{indent}{more}"), picture);
    }
}

/// Nothing that a server says steers the terminal.
fn plain(line: &str) -> String {
    line.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn items<'a>(object: &'a Value, field: &str) -> Vec<&'a Value> {
    object[field].as_array().into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn saved(name: &str, second: u32) -> Value {
        json!({"name": name, "created_at": format!("2026-11-16T12:00:{second:02}.5Z"), "parent": null, "from": null,
               "own_bytes": 1024, "shared_bytes": 2048, "latest": false, "automatic": false})
    }

    #[test]
    fn a_family_is_drawn_with_what_came_from_where() {
        let mut second = saved("checkpoint_3.img", 3);
        (second["parent"], second["latest"]) = (json!("checkpoint_1.img"), json!(true));
        let family = json!({"id": "b", "items": [
            {"id": "a", "status": "ready", "from": null, "checkpoints": [saved("checkpoint_1.img", 1), saved("checkpoint_2.img", 2), second],
             "snapshots": [saved("s", 4)]},
            {"id": "b", "status": "saved", "from": {"sandbox_id": "a", "checkpoint": "checkpoint_1.img"}, "checkpoints": [], "snapshots": []},
            {"id": "c", "status": "gone", "from": {"sandbox_id": "a", "snapshot_id": "deleted"}, "checkpoints": [], "snapshots": []},
        ]});
        let expected = "\
a  ready
├─ checkpoint_1.img  2026-11-16T12:00:01  own 1.00 KiB, shared 2.00 KiB
│  └─ * b  saved  made from checkpoint_1.img of a
├─ checkpoint_2.img  2026-11-16T12:00:02  own 1.00 KiB, shared 2.00 KiB
├─ checkpoint_3.img  2026-11-16T12:00:03  own 1.00 KiB, shared 2.00 KiB  latest  from checkpoint_1.img
├─ snapshot s  2026-11-16T12:00:04  own 1.00 KiB, shared 2.00 KiB
└─ c  gone  made from snapshot deleted of a
";
        assert_eq!(draw(&family), expected);
    }

    #[test]
    fn a_circle_has_an_end() {
        let family = json!({"id": "a", "items": [
            {"id": "a", "status": "ready", "from": {"sandbox_id": "b"}, "checkpoints": [], "snapshots": []},
            {"id": "b", "status": "ready", "from": {"sandbox_id": "a"}, "checkpoints": [], "snapshots": []},
        ]});
        assert_eq!(draw(&family).lines().count(), 2);
    }
}

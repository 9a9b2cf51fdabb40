//! Every public type shows how it is used, and every public function is used in some example. That each has words at all is `missing_docs`.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    fs,
    path::{Path, PathBuf},
};

/// A public item with the examples in its own documentation.
struct Item {
    file: PathBuf,
    kind: String,
    name: String,
    examples: String,
}

fn sources(directory: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with("tests.rs") && !path.ends_with("model.rs")
        {
            into.push(path);
        }
    }
}

/// What stands between the fences of these lines of documentation.
fn examples(lines: &[&str]) -> String {
    let mut inside = false;
    let mut code = String::new();
    for line in lines {
        if line.starts_with("```") {
            inside = !inside;
        } else if inside {
            code += line;
            code.push('\n');
        }
    }
    code
}

/// Public items are told by their first words: nothing here is made by a macro.
fn items(file: &Path) -> Vec<Item> {
    let text = fs::read_to_string(file).unwrap();
    let (mut found, mut docs) = (Vec::new(), Vec::new());
    for line in text.lines().take_while(|line| *line != "#[cfg(test)]").map(str::trim) {
        if let Some(doc) = line.strip_prefix("///") {
            docs.push(doc.strip_prefix(' ').unwrap_or(doc));
        } else if let Some(rest) = line.strip_prefix("pub ") {
            let words: Vec<&str> = rest.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).collect();
            let words = words.iter().copied().filter(|word| !["async", "const", "unsafe"].contains(word)).take(2).collect::<Vec<_>>();
            if let [kind @ ("struct" | "enum" | "trait" | "fn"), name] = words[..] {
                found.push(Item { file: file.to_owned(), kind: kind.to_owned(), name: name.to_owned(), examples: examples(&docs) });
            }
            docs.clear();
        } else if !line.starts_with("#[") {
            docs.clear();
        }
    }
    found
}

#[test]
fn every_public_type_has_an_example_and_every_public_function_is_in_one() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    let all: Vec<Item> = files.iter().flat_map(|file| items(file)).collect();
    let (functions, types): (Vec<&Item>, Vec<&Item>) = all.iter().partition(|item| item.kind == "fn");
    assert!(types.len() > 25 && functions.len() > 120, "only {} types and {} functions are found", types.len(), functions.len());
    let without: Vec<String> =
        types.iter().filter(|item| item.examples.is_empty()).map(|item| format!("{} {}", item.file.display(), item.name)).collect();
    assert!(without.is_empty(), "no example: {without:#?}");
    // A function may be shown with its type, or where it is needed. The blocking ones have names of their own only in blocking's examples.
    for blocking in [false, true] {
        let of = |item: &&&Item| item.file.ends_with("blocking.rs") == blocking;
        let shown: String = all.iter().filter(|item| of(&item)).map(|item| item.examples.as_str()).collect();
        let unused: Vec<&str> = functions
            .iter()
            .filter(of)
            .filter(|item| !shown.contains(&format!(".{}(", item.name)) && !shown.contains(&format!("::{}(", item.name)))
            .map(|item| item.name.as_str())
            .collect();
        assert!(unused.is_empty(), "in no example: {unused:?}");
    }
}

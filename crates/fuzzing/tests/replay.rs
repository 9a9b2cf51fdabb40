//! Every input that is kept of the fuzz targets, once more.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{collections::BTreeSet, fs, path::Path};

use sandboxer_fuzzing::TARGETS;

/// All corpora together: they are kept in the repository.
const MOST_BYTES: u64 = 1 << 20;

#[test]
fn nothing_that_was_ever_found_breaks_a_promise_again() {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    let found: BTreeSet<String> = fs::read_dir(&corpora).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(found, TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect(), "a corpus for every target, and no other");
    let mut bytes = 0;
    for (name, target) in TARGETS {
        let mut files: Vec<_> = fs::read_dir(corpora.join(name)).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        assert!(files.len() >= 10, "{name} has a corpus of {} files", files.len());
        for file in files {
            let input = fs::read(&file).unwrap();
            bytes += input.len() as u64;
            // The test's own output is shown if it fails: this names the culprit.
            println!("{}", file.display());
            target(&input);
        }
    }
    assert!(bytes <= MOST_BYTES, "{bytes} bytes of corpora are kept: minimise them (scripts/soak fuzz says how)");
}

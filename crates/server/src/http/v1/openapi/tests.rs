//! The document against the routes, and against its committed copy.

use std::{collections::BTreeSet, fs, path::PathBuf};

use super::*;

fn document() -> Value {
    serde_json::from_str(text()).unwrap()
}

/// With `UPDATE_SCHEMA` set, writes the file instead.
#[test]
fn the_committed_document_is_that_of_the_types_and_routes() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
    if std::env::var_os("UPDATE_SCHEMA").is_some() {
        fs::write(&path, text()).unwrap();
        return;
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == text(),
        "run UPDATE_SCHEMA=1 cargo test -p sandboxer-server openapi and look at what changed in docs/openapi.json"
    );
}

/// Routes are documented where they are made (`routes!`); what is made by hand is known here.
#[test]
fn every_route_is_in_the_document_and_nothing_else_is() {
    let source = include_str!("../mod.rs");
    let by_hand: BTreeSet<&str> = source.split(".route(\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    assert_eq!(
        by_hand,
        BTreeSet::from(["/v1", "/v1/stubs/{id}", "/v1/stubs/{id}/{*path}", "/v1/{*rest}"]),
        "use routes!, or say here why not"
    );
    let document = document();
    let paths = document["paths"].as_object().unwrap();
    let operations: usize = paths.values().map(|path| path.as_object().unwrap().len()).sum();
    let made: usize = source.split("routes!(").skip(1).map(|rest| rest.split(')').next().unwrap().split(',').count()).sum();
    assert_eq!(operations, made);
    assert!(paths.keys().all(|path| path.starts_with("/v1/")), "{:?}", paths.keys());
}

#[test]
fn what_the_document_refers_to_is_in_it_and_every_operation_has_its_name_and_its_errors() {
    let document = document();
    let schemas = document["components"]["schemas"].as_object().unwrap();
    for part in text().split("\"#/components/schemas/").skip(1) {
        let name = part.split('"').next().unwrap();
        assert!(schemas.contains_key(name), "{name} is missing");
    }
    let mut names = BTreeSet::new();
    for (path, operations) in document["paths"].as_object().unwrap() {
        for (method, operation) in operations.as_object().unwrap() {
            let name = operation["operationId"].as_str().unwrap();
            assert!(names.insert(name.to_owned()), "two are called {name}");
            let answers = operation["responses"].as_object().unwrap();
            assert!(path == "/v1/openapi.json" || answers.contains_key("401"), "{method} {path}");
            assert!(answers.keys().any(|status| status.starts_with('2')), "{method} {path}");
        }
    }
}

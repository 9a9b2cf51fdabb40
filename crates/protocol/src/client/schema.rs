//! The committed JSON Schema of every message, compared with the types: a change of the wire shows in review.

use std::{fs, path::PathBuf};

use schemars::{JsonSchema, generate::SchemaSettings};

use super::{CreateConfig, ExecuteRequest, ServerEvent, write};

#[test]
fn the_committed_schema_is_that_of_the_types() {
    check::<ServerEvent>("server-message");
    check::<CreateConfig>("configuration");
    check::<ExecuteRequest>("execution");
    check::<write::Action<'_>>("action");
    check::<write::Input<'_>>("input");
}

/// With `UPDATE_SCHEMA` set, writes the file instead.
fn check<T: JsonSchema>(name: &str) {
    let schema = SchemaSettings::draft2020_12().into_generator().into_root_schema_for::<T>();
    let text = serde_json::to_string_pretty(&schema).unwrap() + "\n";
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../../docs/schema/{name}.json"));
    if std::env::var_os("UPDATE_SCHEMA").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        return;
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(committed, text, "{name}: run UPDATE_SCHEMA=1 cargo test -p sandboxer-protocol and look at what changed");
}

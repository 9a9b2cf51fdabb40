//! What every extension promises, as checks that run on any of them: `sandboxer extension check`, and the tests of the built-in ones.

use std::time::Duration;

use sandboxer_protocol::SandboxId;
use serde::Serialize;
use serde_json::json;

use crate::{ExtensionError, Health, Host, Inputs, Map, Profile, Sandbox, SandboxExtension, SnapshotId, check_map, external::External};

/// One promise, and whether it is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    pub promise: &'static str,
    /// What is wrong.
    pub fault: Option<String>,
}

/// Collects checks.
#[derive(Default)]
struct Checks(Vec<Check>);

impl Checks {
    fn note(&mut self, promise: &'static str, result: Result<(), String>) {
        self.0.push(Check { promise, fault: result.err() });
    }
}

fn text(error: ExtensionError) -> String {
    error.message
}

fn is(expected: &Health, found: Result<Health, ExtensionError>) -> Result<(), String> {
    let found = found.map_err(text)?;
    if found == *expected { Ok(()) } else { Err(format!("expected {expected:?}, found {found:?}")) }
}

/// Makes a sandbox, looks at it, snapshots and restores it where that is supported, and removes everything again.
pub async fn check(extension: &dyn SandboxExtension, profile: &Profile, inputs: &Inputs, host: &Host) -> Vec<Check> {
    let mut checks = Checks::default();
    let new = || Sandbox {
        id: SandboxId::random(),
        profile: profile.clone(),
        inputs: inputs.clone(),
        host: host.clone(),
        metadata: Map::from([("made-by".to_owned(), "check".to_owned())]),
        handle: Map::new(),
    };
    checks.note("it accepts inputs that are right", extension.validate(profile, inputs, host).await.map_err(text));
    checks.note("it removes what was never made", extension.teardown(&new()).await.map_err(text));
    let mut sandbox = new();
    let provisioned = extension.provision(&sandbox).await.and_then(|handle| check_map("handle", &handle).map(|()| handle));
    match provisioned {
        Ok(handle) => {
            sandbox.handle = handle;
            checks.note("it provisions a sandbox", Ok(()));
            checks.note("what was provisioned is ready", is(&Health::Ready, extension.status(&sandbox).await));
            snapshots(&mut checks, extension, &sandbox, new()).await;
        }
        Err(error) => checks.note("it provisions a sandbox", Err(text(error))),
    }
    checks.note("it tears a sandbox down", extension.teardown(&sandbox).await.map_err(text));
    checks.note("it tears it down twice, which is the same as once", extension.teardown(&sandbox).await.map_err(text));
    checks.0
}

async fn snapshots(checks: &mut Checks, extension: &dyn SandboxExtension, sandbox: &Sandbox, mut other: Sandbox) {
    let id = SnapshotId::random();
    match extension.supports_snapshots().await {
        Err(error) => return checks.note("it says whether it supports snapshots", Err(text(error))),
        Ok(false) => {
            let refused = extension.snapshot(id, sandbox).await;
            let good = refused.is_err().then_some(()).ok_or_else(|| "it made one all the same".to_owned());
            return checks.note("without support for snapshots it refuses one", good);
        }
        Ok(true) => {}
    }
    let meta = match extension.snapshot(id, sandbox).await.and_then(|meta| check_map("snapshot", &meta).map(|()| meta)) {
        Ok(meta) => meta,
        Err(error) => return checks.note("it makes a snapshot", Err(text(error))),
    };
    checks.note("it makes a snapshot", Ok(()));
    checks.note("the sandbox goes on after a snapshot", is(&Health::Ready, extension.status(sandbox).await));
    match extension.restore_from_snapshot(&other, id, &meta).await {
        Ok(handle) => {
            other.handle = handle;
            checks.note("it restores a snapshot into another sandbox", Ok(()));
            checks.note("what was restored is ready", is(&Health::Ready, extension.status(&other).await));
            checks.note("the first sandbox is ready beside it", is(&Health::Ready, extension.status(sandbox).await));
        }
        Err(error) => checks.note("it restores a snapshot into another sandbox", Err(text(error))),
    }
    checks.note("it tears down what was restored", extension.teardown(&other).await.map_err(text));
    checks.note("the first sandbox outlives it", is(&Health::Ready, extension.status(sandbox).await));
    checks.note("it deletes a snapshot", extension.delete_snapshot(id, &sandbox.host, &meta).await.map_err(text));
    checks.note("it deletes it twice, which is the same as once", extension.delete_snapshot(id, &sandbox.host, &meta).await.map_err(text));
}

/// What only a program can do wrong.
pub async fn check_program(extension: &External) -> Vec<Check> {
    const WITHIN: Duration = Duration::from_secs(30);
    let mut checks = Checks::default();
    checks.note("it says who it is, twice the same", twice(extension).await);
    let unknown = extension.call("no_such_method", json!({}), WITHIN).await;
    let good = match unknown {
        Err(error) if error.code == "extension_failed" && error.message.contains("does not do what an extension must") => {
            Err(error.message)
        }
        Err(_) => Ok(()),
        Ok(_) => Err("it answered with a result".to_owned()),
    };
    checks.note("a method that it does not know is answered with an error", good);
    let more = extension.call("describe", json!({ "a_field_of_a_newer_server": [1, 2, 3] }), WITHIN).await;
    checks.note("it ignores fields that it does not know", more.map(drop).map_err(text));
    checks.0
}

async fn twice(extension: &External) -> Result<(), String> {
    let first = extension.describe().await.map_err(text)?;
    let second = extension.describe().await.map_err(text)?;
    if first == second { Ok(()) } else { Err("its answers differ".to_owned()) }
}

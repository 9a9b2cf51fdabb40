//! What is in `deploy` is understood by those who will read it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use sandboxer_e2e::{sandboxer, stderr_of, stdout_of, tool};

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").canonicalize().unwrap()
}

#[test]
fn kubernetes_knows_every_field() {
    for version in ["1.32", "1.37"] {
        let mut command = Command::new(tool("kubernetes-validate"));
        let said = command.args(["--strict", "-k", version]).arg(deploy().join("kubernetes/sandboxer.yaml")).output().unwrap();
        assert!(said.status.success(), "{}{}", stdout_of(&said), stderr_of(&said));
        assert!(stdout_of(&said).contains("statefulset/sandboxer") || stderr_of(&said).contains("statefulset/sandboxer"));
    }
}

#[test]
fn compose_takes_the_file_and_wants_a_key() {
    let config = |key: Option<&str>| {
        let mut command = Command::new("docker");
        command.args(["compose", "-f"]).arg(deploy().join("compose.yaml")).args(["config", "--format", "json"]);
        command.env_remove("SANDBOXER_API_KEYS").envs(key.map(|key| ("SANDBOXER_API_KEYS", key)));
        command.output().unwrap()
    };
    let refused = config(None);
    assert!(!refused.status.success() && stderr_of(&refused).contains("SANDBOXER_API_KEYS"), "{}", stderr_of(&refused));
    let taken = config(Some("0123456789abcdef0123456789abcdef"));
    assert!(taken.status.success(), "{}", stderr_of(&taken));
    let resolved: serde_json::Value = serde_json::from_slice(&taken.stdout).unwrap();
    let grace = |name: &str| resolved["services"][name]["stop_grace_period"].as_str().unwrap().to_owned();
    assert_eq!(["one", "two", "three"].map(grace), ["30s"; 3]);
}

#[test]
fn systemd_has_nothing_to_say_against_the_unit() {
    let unit = fs::read_to_string(deploy().join("systemd/sandboxer.service")).unwrap();
    for line in ["KillMode=process", "RestartKillSignal=SIGUSR2", "NoNewPrivileges=yes"] {
        assert!(unit.lines().any(|there| there == line), "{line}");
    }
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path().join("sandboxer.service");
    fs::write(&here, unit.replace("/usr/local/bin/sandboxer", &sandboxer().display().to_string())).unwrap();
    let said = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&here).output().unwrap();
    // It warns of what it does not know, and is content all the same.
    let about: Vec<_> = stderr_of(&said).lines().filter(|line| line.contains("sandboxer.service")).map(str::to_owned).collect();
    assert!(said.status.success() && about.is_empty(), "{about:#?}");
}

#[test]
fn every_variable_that_is_set_is_one_of_the_servers() {
    let help = Command::new(sandboxer()).args(["serve", "--help"]).output().unwrap();
    // Its lines are broken where they end.
    let help = stdout_of(&help).split_whitespace().collect::<Vec<_>>().join(" ");
    let root = deploy();
    for file in ["compose.yaml", "kubernetes/sandboxer.yaml", "systemd/sandboxer.service", "cloud-run.md", "README.md", "../Dockerfile"] {
        let text = fs::read_to_string(root.join(file)).unwrap();
        let named =
            text.split(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')).filter(|word| word.starts_with("SANDBOXER_"));
        for name in named {
            assert!(name == "SANDBOXER_API_KEYS" || help.contains(&format!("[env: {name}=")), "{file}: {name}");
        }
    }
}
